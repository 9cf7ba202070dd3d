"""When fagen.attention builds a kernel, with a GPU and a compiler pretended."""

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fagen
from fagen.dispatch.select import Choice, buildable, first_slug
from fagen.errors import BuildError, DeviceError, FagenError, RefusedBuild, UntunedWarning
from fagen.runtime import arguments, decode, op
from fagen.runtime.attention import ATTENTION
from fagen.runtime.call import CallKey, _rows_of

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a Hopper GPU on which building is counted and takes a moment."""
    machine = SimpleNamespace(built=[], loaded=[], capability=(9, 0), capturing=False)

    def build(source: object, planned: object, **_: object) -> object:
        machine.built.append(source.slug)  # type: ignore[attr-defined]
        torch.randn(300, 300) @ torch.randn(300, 300)
        return source

    def load(binary: object) -> None:
        machine.loaded.append(binary.slug)  # type: ignore[attr-defined]

    monkeypatch.setattr(op, "build", build)
    monkeypatch.setattr(op, "load", load)
    monkeypatch.setattr(
        op, "kernel_of", lambda plan, _: op.Kernel(plan.slug, *[print] * 4, 1.0, "")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Sandbox 1000")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    return machine


def key(device: int = 0, head_dim: int = 64, schedule: Choice = None, **e4m3: Any) -> CallKey:
    dtype = torch.float8_e4m3fn if e4m3 else torch.float16
    fields = torch.device("cuda", device), dtype, head_dim, head_dim, False, schedule
    return ATTENTION.key_of(*fields, **e4m3)


def ready(*fields: Any, **e4m3: Any) -> Any:
    return ATTENTION.find(ATTENTION.ready(key(*fields, **e4m3)))


def test_many_threads_build_once(pretended: SimpleNamespace) -> None:
    threads = [Thread(target=ready) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pretended.built) == len(pretended.loaded) == 1


def test_a_device_on_which_it_is_ready_builds_nothing(pretended: SimpleNamespace) -> None:
    first = ready()
    slug = first.slug
    assert ready(schedule=slug) is first  # the same kernel by its name
    assert pretended.built == pretended.loaded == [slug]
    ready(1)  # the cache has it by now
    assert pretended.built == pretended.loaded == [slug] * 2


def test_while_a_graph_is_captured_an_unbuilt_kernel_is_an_error(
    pretended: SimpleNamespace,
) -> None:
    pretended.capturing = True
    with pytest.raises(FagenError, match=r"call fagen\.prepare.*while a CUDA graph is captured"):
        ready()
    assert pretended.built == []
    pretended.capturing = False
    ready()
    pretended.capturing = True
    ready(schedule=pretended.built[0])  # ready on this device, however it is asked for
    with pytest.raises(FagenError, match="while a CUDA graph is captured"):
        ready(1)  # on another its first call has work to do


def test_while_a_graph_is_captured_what_few_queries_want_is_passed_over_where_it_is_not_ready(
    pretended: SimpleNamespace,
) -> None:
    few = 1, 32, 8, 1, 4_096
    ready = ATTENTION.ready(key(head_dim=128))
    rows = ready.look_up()
    assert rows is not None
    next_best = first_slug(rows, *few, ready=lambda _: False)
    ATTENTION.find(ready, slug=next_best)
    pretended.capturing = True
    assert ATTENTION.find(ready, few, ("few",)).slug == next_best
    assert not ATTENTION.known
    pretended.capturing = False
    best = ATTENTION.find(ready, few, ("few",)).slug
    assert best == first_slug(rows, *few) != next_best
    pretended.capturing = True
    assert ATTENTION.find(ready, few, ("as few",)).slug == best


def test_a_call_of_new_sizes_makes_no_key_and_takes_no_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(keys: int) -> None:
        q, k = (torch.zeros(1, n, 2, 64, dtype=torch.float16) for n in (1, keys))
        fagen.attention(q, k, k)
        lengths = torch.full((keys,), 9, dtype=torch.int32)
        fagen.attention_decode(*(x.expand(keys, -1, -1, -1) for x in (q, k, k)), seqused_k=lengths)

    call(9)
    monkeypatch.setattr(arguments, "CallKey", None)
    monkeypatch.setattr(decode, "CallKey", None)
    for ready in (*ATTENTION.alike.values(), *decode.DECODING.alike.values()):
        monkeypatch.setattr(ready, "lock", None)
    call(10)
    assert len(ATTENTION.known) == len(decode.DECODING.known) == 2


def test_another_gpu_than_hopper_is_refused_in_words(pretended: SimpleNamespace) -> None:
    pretended.capability = (10, 0)
    with pytest.raises(DeviceError, match=r"cuda:0 is a Sandbox 1000 of compute capability 10\.0"):
        ready()
    assert pretended.built == []


def test_a_build_that_failed_is_tried_again(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FagenError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(op, "build", fail)
        with pytest.raises(FagenError, match="no compiler"):
            ready()
    ready()
    assert len(pretended.built) == 1


def test_a_kernel_of_e4m3_is_built_for_its_layout_and_scales(
    schedules_folder: Path, pretended: SimpleNamespace
) -> None:
    how = {"out_dtype": torch.float16, "v_layout": "columns"}
    ready(**how, scale_rows=64)
    assert pretended.built == ["fwd_e4m3_d64_full_m128n128_ofp16_sblock_pm1"]
    pretended.capturing = True
    with pytest.raises(FagenError, match="cannot be built while a CUDA graph is captured"):
        ready(**how, scale_rows=32)


# ---- derived schedules --------------------------------------------------------------------------


def refusing(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace, slugs: list[str], error: type
) -> list[str]:
    """Have builds of these fail; return where each attempt is noted."""
    build, tried = op.build, []

    def attempt(source: object, planned: object, **more: object) -> object:
        tried.append(source.slug)  # type: ignore[attr-defined]
        if source.slug in slugs:  # type: ignore[attr-defined]
            raise error("12 bytes of registers spilled")
        return build(source, planned, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "build", attempt)
    return tried


def of_no_table() -> list[str]:
    """The slugs of the derived schedules that serve calls of head dim 24."""
    problem = key(head_dim=24).problem
    assert problem
    choice = buildable(problem)
    assert choice.derived
    return [schedule.slug for schedule in choice.schedules]


def test_of_derived_schedules_the_first_that_does_not_spill_serves(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slugs = of_no_table()
    tried = refusing(monkeypatch, pretended, slugs[:2], RefusedBuild)
    with pytest.warns(UntunedWarning, match=f": {slugs[2]} is derived.*fagen search {slugs[2]} "):
        served = ready(head_dim=24)
    assert tried == slugs[:3] and pretended.loaded == [slugs[2]]
    assert served.slug == slugs[2]


def test_where_every_derived_schedule_spills_or_no_compiler_runs_that_is_said(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slugs = of_no_table()
    with monkeypatch.context() as patch:
        tried = refusing(patch, pretended, slugs, RefusedBuild)
        with pytest.raises(RefusedBuild, match="spilled"):
            ready(head_dim=24)
        assert tried == slugs
    tried = refusing(monkeypatch, pretended, slugs, BuildError)
    with pytest.raises(BuildError):
        ready(head_dim=24)
    assert tried == slugs[:1], "a cache that cannot be written is no better for the next"


def test_a_schedule_that_was_chosen_has_no_other_in_its_place(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slugs = of_no_table()
    tried = refusing(monkeypatch, pretended, slugs[:1], RefusedBuild)
    with pytest.raises(RefusedBuild):
        ready(head_dim=24, schedule=slugs[0])
    assert tried == slugs[:1]


def types_in(value: Any) -> set[type]:
    parts = value if isinstance(value, tuple) else ()
    return {type(value)}.union(*map(types_in, parts))


def test_what_torch_compile_is_told_of_rows_are_plain_tuples_which_choose_alike() -> None:
    """Torch 2.11 takes no other tuple apart."""
    fields = torch.device("cpu"), torch.float16, 128, 128, True
    rows, whole = _rows_of("attention", fields), ATTENTION.rows(ATTENTION.key_of(*fields))
    assert whole is not None and types_in(rows) <= {tuple, int, str, bool, type(None)}
    for keys in (1, 500, 5_000, 500_000):
        assert first_slug(rows, 1, 8, 2, 64, keys) == first_slug(whole, 1, 8, 2, 64, keys)
