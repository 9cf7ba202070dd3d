"""fagen.attention: which kernel it picks, when it builds, and what it says when it cannot."""

import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fagen
from fagen import dispatch, dispatch_table
from fagen.dispatch.tables import Row
from fagen.emulator import emulate, reference
from fagen.errors import DeviceError, FagenError, ScheduleError
from fagen.paths import locate
from fagen.kinds.forward.plan import plan
from fagen.problem import problem_of
from fagen.kinds.forward.keys import Schedule
from fagen.registry import read as read_schedule

THERE = [read_schedule(path) for path in sorted(locate("schedules").glob("fwd_*.toml"))]


pytestmark = pytest.mark.usefixtures("nothing_is_ready")


def qkv(
    dtype: torch.dtype = torch.float16, head_dim: int = 64, head_dim_v: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, 40, 4, head_dim, generator=generator).to(dtype),
        torch.randn(2, 90, 2, head_dim, generator=generator).to(dtype),
        torch.randn(2, 90, 2, head_dim_v or head_dim, generator=generator).to(dtype),
    )


ROWS = 2 * 40 * 4  # query rows of qkv()


def toml(schedule: Schedule) -> str:
    keys = schedule.attention
    return (
        f'[attention]\nhead_dim = {keys.head_dim}\ndtype = "{keys.dtype}"\nmask = "{keys.mask}"\n'
        f"[tile]\nblock_m = {schedule.tile.block_m}\nblock_n = {schedule.tile.block_n}\n"
    )


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_attention(causal: bool) -> None:
    q, k, v = qkv()
    exact, exact_lse = reference(q, k, v, causal=causal, scale=1 / 8)
    out = fagen.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)
    again, lse = fagen.attention(q, k, v, causal=causal, scale=1 / 8, return_lse=True)
    assert torch.equal(out, again)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "schedule",
    [schedule for schedule in THERE if schedule.attention.dtype != "e4m3"],
    ids=lambda schedule: schedule.slug,
)
def test_every_schedule_of_the_folder_serves_its_problem(schedule: Schedule) -> None:
    problem = problem_of(schedule)
    slug = fagen.prepare(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        seqlen=90,
        rows=ROWS,
        device="cpu",
    )
    assert problem_of(Schedule.from_slug(slug)) == problem
    q, k, v = qkv(problem.dtype, problem.head_dim, problem.head_dim_v)
    out, lse = fagen.attention(q, k, v, causal=problem.causal, return_lse=True)
    expected = emulate(plan(Schedule.from_slug(slug)), q, k, v, problem.head_dim**-0.5)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_schedule_may_be_a_path_a_slug_or_itself(tmp_path: Path) -> None:
    schedule = Schedule.from_slug("fwd_fp16_d64_full_m64n16")
    (tmp_path / "mine.toml").write_text(toml(schedule))
    q, k, v = qkv()
    expected = emulate(plan(schedule), q, k, v, 0.125)[0]
    assert not torch.equal(expected, fagen.attention(q, k, v)), "the tile shows in the roundings"
    for choice in (schedule, schedule.slug, tmp_path / "mine.toml", str(tmp_path / "mine.toml")):
        assert torch.equal(fagen.attention(q, k, v, schedule=choice), expected)
        assert fagen.prepare(dtype="fp16", head_dim=64, schedule=choice) == schedule.slug


# ---- which schedule -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A schedules folder that holds exactly these slugs."""
    monkeypatch.setattr(dispatch, "locate", lambda name: tmp_path)

    def fill(*slugs: str) -> None:
        for number, slug in enumerate(slugs):
            (tmp_path / f"fwd_{number}.toml").write_text(toml(Schedule.from_slug(slug)))
        dispatch._schedules.cache_clear()

    return fill


def test_of_several_the_preferred_one_is_taken(
    folder: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "fwd_fp16_d64_full_m128n112", "fwd_fp16_d64_full_m128n128"
    folder(second, first)
    assert fagen.prepare(dtype="fp16", head_dim=64) == first
    monkeypatch.setattr(dispatch, "PREFERRED", (second,))
    assert fagen.prepare(dtype="fp16", head_dim=64) == second


def test_what_is_picked_is_the_usual_choice_where_no_table_names_another(
    folder: Callable[..., None],
) -> None:
    plain, odd = "fwd_fp16_d64_full_m128n128", "fwd_fp16_d64_full_m128n128_s3"
    folder(plain)
    assert dispatch.picked(dtype="fp16", head_dim=64, seqlen=512).slug == plain
    assert dispatch._rank(Schedule.from_slug(odd)) > dispatch._rank(Schedule.from_slug(plain))
    with pytest.raises(ScheduleError, match="head_dim 96"):
        dispatch.picked(dtype="fp16", head_dim=96, seqlen=512)


def test_a_dispatch_table_names_the_kernel_by_the_number_of_keys(
    folder: Callable[..., None], tmp_path: Path
) -> None:
    few, many = "fwd_fp16_d64_full_m64n16", "fwd_fp16_d64_full_m64n64"
    other = "fwd_fp16_d64_full_m128n128"
    folder(few, many, other)
    problem = ("fp16", 64, 64, "full")
    rows = [Row("NVIDIA H200", *problem, 0, 89, few), Row("NVIDIA H200", *problem, 90, inf, many)]
    dispatch_table.update(tmp_path / dispatch_table.NAME, rows)
    assert fagen.prepare(dtype="fp16", head_dim=64) == many
    assert fagen.prepare(dtype="fp16", head_dim=64, seqlen=89) == few
    assert dispatch.picked(dtype="fp16", head_dim=64, seqlen=89, device="cpu").slug == few
    assert dispatch.picked(dtype=torch.float16, head_dim=64, seqlen=90).slug == many
    q, k, v = qkv()
    for keys, slug in ((90, many), (89, few), (1, few)):
        expected = emulate(plan(Schedule.from_slug(slug)), q, k[:, :keys], v[:, :keys], 0.125)[0]
        assert torch.equal(fagen.attention(q, k[:, :keys], v[:, :keys]), expected)
    assert not torch.equal(fagen.attention(q, k, v, schedule=other), fagen.attention(q, k, v))


FEW, FEWER, MANY = (f"fwd_fp16_d64_full_m64n{block_n}" for block_n in (16, 32, 64))
LONG = "fwd_fp16_d64_full_m64n96"  # for many keys


def computed(slug: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return emulate(plan(Schedule.from_slug(slug)), q, k, v, 0.125)[0]


@pytest.fixture
def by_rows(folder: Callable[..., None], tmp_path: Path) -> None:
    """A table for calls with the rows of qkv(), with fewer, and by keys with more."""
    folder("fwd_fp16_d64_full_m128n128", "fwd_fp16_d64_causal_m128n128")
    rows = [
        Row.of("NVIDIA H200", FEW, rows=ROWS),
        Row.of("NVIDIA H200", FEWER, rows=100),
        Row.of("NVIDIA H200", MANY, 0, 9_999),
        Row.of("NVIDIA H200", LONG, 10_000),
    ]
    dispatch_table.update(tmp_path / dispatch_table.NAME, rows)


def ready() -> set[object]:
    return {choice for _, choice in dispatch._ready}


def test_few_query_rows_have_their_own_kernel_whatever_the_keys(
    by_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_surely", None)  # which a call of known sizes has no need of
    q, k, v = qkv()
    more = torch.cat([q, q[:, :1]], 1)
    for queries, slug in ((q, FEW), (q[:, :13], FEW), (q[:, :12], FEWER), (more, MANY)):
        for keys in (90, 40):
            given = queries, k[:, :keys], v[:, :keys]
            assert torch.equal(fagen.attention(*given), computed(slug, *given)), slug
    # batch, heads and queries count alike
    grouped = q[:1, :2].repeat(1, 1, 20, 1), k[:1], v[:1]
    assert torch.equal(fagen.attention(*grouped), computed(FEW, *grouped))
    assert ready() == {FEW, FEWER, MANY}


@pytest.mark.parametrize(
    ("sizes", "slug", "readied"),
    [
        ({}, LONG, {FEW, FEWER, MANY, LONG}),
        (dict(seqlen=90), MANY, {FEW, FEWER, MANY}),
        (dict(seqlen=90, rows=ROWS), FEW, {FEW}),
        (dict(seqlen=10_000, rows=100), FEWER, {FEWER}),
        (dict(seqlen=90, rows=ROWS + 1), MANY, {MANY}),
        (dict(rows=0), FEWER, {FEWER}),
        (dict(rows=ROWS + 1), LONG, {MANY, LONG}),
    ],
)
def test_prepare_readies_every_kernel_that_the_sizes_leave_open(
    by_rows: None, sizes: dict[str, int], slug: str, readied: set[str]
) -> None:
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu", **sizes) == slug  # type: ignore[arg-type]
    assert ready() == readied
    sizes = {"seqlen": 10_000} | sizes
    assert dispatch.picked(dtype="fp16", head_dim=64, device="cpu", **sizes).slug == slug  # type: ignore[arg-type]


def test_the_slug_is_that_for_the_most_keys_also_where_fewer_share_it(
    folder: Callable[..., None], tmp_path: Path
) -> None:
    rows = [
        Row.of("NVIDIA H200", slug, *keys)
        for slug, *keys in ((MANY, 0, 89), (FEW, 90, 999), (MANY, 1_000))
    ]
    dispatch_table.update(tmp_path / dispatch_table.NAME, rows)
    assert fagen.prepare(dtype="fp16", head_dim=64, device="cpu") == MANY
    assert ready() == {FEW, MANY}


def test_no_call_but_the_first_looks_at_a_disk(
    folder: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slug = "fwd_fp16_d64_full_m64n16"
    folder(slug)
    rows = [Row("NVIDIA H200", "fp16", 64, 64, "full", 0, inf, slug)]
    dispatch_table.update(tmp_path / dispatch_table.NAME, rows)
    q, k, v = qkv()
    first = fagen.attention(q, k, v)
    monkeypatch.setattr(dispatch, "locate", None)
    monkeypatch.setattr(dispatch, "rows_for", None)
    assert torch.equal(fagen.attention(q, k, v), first)


def test_preferred_schedules_exist() -> None:
    assert set(dispatch.PREFERRED) <= {schedule.slug for schedule in THERE}


def test_the_folder_is_read_once(folder: Callable[..., None], tmp_path: Path) -> None:
    folder("fwd_fp16_d64_full_m64n64", "fwd_fp16_d64_causal_m64n64")
    fagen.attention(*qkv())
    for file in tmp_path.iterdir():
        file.write_text("no schedule any more")
    fagen.attention(*qkv(), causal=True)


def test_where_no_schedule_fits_there_is_a_list_of_those_that_exist() -> None:
    with pytest.raises(ScheduleError) as refusal:
        fagen.attention(*qkv(torch.bfloat16, 40, 24), causal=True)
    said = str(refusal.value)
    assert said.startswith("no schedule computes bfloat16, head_dim 40 and 24 (V), causal; in ")
    assert all(f"\n  {schedule.slug}\n" in said for schedule in THERE)
    with pytest.raises(ScheduleError, match="no schedule computes float32, head_dim 64, full;"):
        fagen.attention(*qkv(torch.float32))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            "fwd_fp16_d64_causal_m64n64",
            "computes float16, head_dim 64, causal; the call asks for float16, head_dim 64, full",
        ),
        ("fwd_bf16_d64_full_m64n64", "computes bfloat16, head_dim 64, full; the call asks for "),
        ("fwd_fp16_d64v32_full_m64n64", "computes float16, head_dim 64 and 32 (V), full; "),
        ("fwd_fp16", "'fwd_fp16' is no slug"),
        ("nowhere/x.toml", "nowhere/x.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_schedule_for_something_else_is_refused(choice: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        fagen.attention(*qkv(), schedule=choice)


def test_prepare_takes_torchs_names_and_ours_and_no_others() -> None:
    slugs = {
        fagen.prepare(dtype=dtype, head_dim=64) for dtype in ("fp16", "float16", torch.float16)
    }
    assert len(slugs) == 1
    with pytest.raises(ValueError, match="dtype is 'half'; it must be one of fp16, float16, bf16"):
        fagen.prepare(dtype="half", head_dim=64)


# ---- wrong calls --------------------------------------------------------------------------------


def test_wrong_arguments_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q has 3 dimensions and v has 4; both must have 4"):
        fagen.attention(q[0], k, v)
    with pytest.raises(ValueError, match="k has shape"):
        fagen.attention(q, k[0], v)
    with pytest.raises(ValueError, match="k is not float16"):
        fagen.attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="scale is -1; it must be finite and above 0"):
        fagen.attention(q, k, v, scale=-1)
    with pytest.raises(DeviceError, match="q is on meta; a kernel runs on a Hopper GPU"):
        fagen.attention(*(t.to("meta") for t in (q, k, v)))


@pytest.mark.parametrize("which", range(3))
def test_a_call_that_needs_a_gradient_is_refused(which: int) -> None:
    tensors = [*qkv()]
    tensors[which].requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient, and there is no backward yet"):
        fagen.attention(*tensors)
    with torch.no_grad():
        assert not fagen.attention(*tensors).requires_grad


def test_a_functional_gradient_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="requires a gradient"):
        torch.func.grad(lambda t: fagen.attention(t, k, v).float().sum())(q)


# ---- torch.compile and export -------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("choice", [None, "fwd_fp16_d64_causal_m64n48"])
def test_prepared_it_compiles_into_one_graph(
    fresh_dynamo: None, dynamic: bool, choice: str | None
) -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, schedule: str | None = choice) -> Tensor:
        out, lse = fagen.attention(q * 2, k, v, causal=True, return_lse=True, schedule=schedule)
        return out + lse.transpose(1, 2)[..., None]

    most = fagen.prepare(dtype="fp16", head_dim=64, causal=True, schedule=choice)
    compiled = torch.compile(twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    taken = most if dynamic else choice  # with sizes left open, rows count as many
    q, k, v = qkv()
    for given in ((q, k, v), (q[:1, :30], k[:1], v[:1])):
        assert torch.equal(compiled(*given), twice(*given, schedule=taken))


def test_unprepared_it_says_so_to_torch_compile(fresh_dynamo: None) -> None:
    compiled = torch.compile(fagen.attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"call fagen\.prepare") as refusal:
        compiled(*qkv())
    assert "cannot be built while torch.compile traces the call" in str(refusal.value)


def test_prepared_it_exports() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = fagen.attention(q, k, v, causal=True)  # one kernel for all lengths
            assert isinstance(out, Tensor)
            return out

    fagen.prepare(dtype="fp16", head_dim=64, causal=True)
    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    exported = torch.export.export(
        Model(), qkv(), dynamic_shapes=({1: queries}, {1: keys}, {1: keys})
    )
    q, k, v = qkv()
    assert torch.equal(
        exported.module()(q[:, :7], k[:, :50], v[:, :50]),
        fagen.attention(q[:, :7], k[:, :50], v[:, :50], causal=True),
    )


class Attention(torch.nn.Module):
    """fagen.attention, as torch.export wants it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fagen.attention(q, k, v)
        assert isinstance(out, Tensor)
        return out


@pytest.fixture
def one_range(folder: Callable[..., None], tmp_path: Path) -> None:
    """A table for calls with the rows of qkv(), and one kernel for all the others; both ready."""
    rows = [Row.of("NVIDIA H200", FEW, rows=ROWS), Row.of("NVIDIA H200", MANY)]
    dispatch_table.update(tmp_path / dispatch_table.NAME, rows)
    fagen.prepare(dtype="fp16", head_dim=64)


def test_compiled_for_fixed_sizes_few_rows_have_their_own_kernel(
    fresh_dynamo: None, one_range: None
) -> None:
    compiled = torch.compile(fagen.attention, fullgraph=True, dynamic=False, backend="aot_eager")
    q, k, v = qkv()
    assert torch.equal(compiled(q, k, v), computed(FEW, q, k, v))
    q = torch.cat([q, q], 1)
    assert torch.equal(compiled(q, k, v), computed(MANY, q, k, v))


def test_compiled_for_open_sizes_rows_are_many_and_none_leads_to_another_graph(
    fresh_dynamo: None, one_range: None
) -> None:
    compiled = torch.compile(fagen.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = qkv()
    assert torch.equal(compiled(q, k, v), computed(MANY, q, k, v))
    many = q.repeat(2, 5, 2, 1), k.repeat(2, 1, 2, 1), v.repeat(2, 1, 2, 1)
    few = q[:, :3].contiguous(), k, v
    with torch.compiler.set_stance("fail_on_recompile"):
        for given in (many, few):
            assert torch.equal(compiled(*given), computed(MANY, *given))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("most", "slug"),
    [pytest.param(None, MANY, id="any batch"), pytest.param(2, FEW, id="a batch of two at most")],
)
def test_exported_rows_are_few_where_no_batch_makes_them_many(
    fresh_dynamo: None, one_range: None, strict: bool, most: int | None, slug: str
) -> None:
    batch = torch.export.Dim("batch", max=most)
    q, k, v = qkv()
    exported = torch.export.export(
        Attention(), (q, k, v), dynamic_shapes=({0: batch},) * 3, strict=strict
    ).module()
    for given in ((q, k, v), (q[:1], k[:1], v[:1])):
        assert torch.equal(exported(*given), computed(slug, *given))
    if most is None:
        many = q.repeat(4, 1, 1, 1), k.repeat(4, 1, 1, 1), v.repeat(4, 1, 1, 1)
        assert torch.equal(exported(*many), computed(MANY, *many))


@pytest.mark.parametrize("dim", [1, 2], ids=["queries", "heads"])
def test_exported_with_queries_or_heads_left_open_rows_are_many(
    fresh_dynamo: None, one_range: None, dim: int
) -> None:
    q, k, v = qkv()
    k, v = k[:, :, :1], v[:, :, :1]
    exported = torch.export.export(
        Attention(), (q, k, v), dynamic_shapes=({dim: torch.export.Dim("any")}, None, None)
    ).module()
    for given in (q, q.repeat_interleave(3, dim)):
        assert torch.equal(exported(given, k, v), computed(MANY, given, k, v))


# ---- building, with a GPU and a compiler pretended ----------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a Hopper GPU on which building is counted and takes a moment."""
    machine = SimpleNamespace(built=[], loaded=[], capability=(9, 0), capturing=False)

    def build(source: object, planned: object, **_: object) -> object:
        machine.built.append(source.slug)  # type: ignore[attr-defined]
        torch.randn(300, 300) @ torch.randn(300, 300)
        return source

    def load(binary: object) -> Callable[..., None]:
        machine.loaded.append(binary.slug)  # type: ignore[attr-defined]
        return lambda *_: None

    monkeypatch.setattr(dispatch, "build", build)
    monkeypatch.setattr(dispatch.op, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Sandbox 1000")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    return machine


def key(device: int = 0, causal: bool = False) -> dispatch.Key:
    return (torch.device("cuda", device), torch.float16, 64, 64, causal), None


def test_many_threads_build_once(pretended: SimpleNamespace) -> None:
    threads = [Thread(target=dispatch._make_ready, args=(key(),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pretended.built) == len(pretended.loaded) == 1


def test_a_second_device_builds_nothing(pretended: SimpleNamespace) -> None:
    assert dispatch._make_ready(key(0)) is dispatch._make_ready(key(1))
    assert len(pretended.built) == 1


def test_while_a_graph_is_captured_an_unbuilt_kernel_is_an_error(
    pretended: SimpleNamespace,
) -> None:
    pretended.capturing = True
    with pytest.raises(FagenError, match=r"call fagen\.prepare.*while a CUDA graph is captured"):
        dispatch._make_ready(key())
    assert pretended.built == []
    pretended.capturing = False
    dispatch._make_ready(key())
    pretended.capturing = True
    dispatch._make_ready(key(1))  # built already, so any device may use it


def test_another_gpu_than_hopper_is_refused_in_words(pretended: SimpleNamespace) -> None:
    pretended.capability = (10, 0)
    with pytest.raises(DeviceError, match=r"cuda:0 is a Sandbox 1000 of compute capability 10\.0"):
        dispatch._make_ready(key())
    assert pretended.built == []


def test_a_build_that_failed_is_tried_again(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FagenError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "build", fail)
        with pytest.raises(FagenError, match="no compiler"):
            dispatch._make_ready(key())
    dispatch._make_ready(key())
    assert len(pretended.built) == 1
