"""Masks of which a call gives numbers on a Hopper GPU, beside lambdas of ours and FlexAttention."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import flow, registry
from fagen.dispatch.select import serve
from fagen.kind import load_named
from fagen.measure.verification import Verification
from fagen.problem import Problem, Sizes
from fagen.runtime import op
from fagen.schedule import Schedule
from fagen.variants import names_of, said
from tests.gpu.conftest import BUILDERS, COMMITTED
from tests.gpu.helpers import graph_of, ints, poisoned, spoil
from tests.mask_helpers import (
    LENGTHS,
    call_of,
    check,
    check_varlen,
    compiled_windows,
    dense,
    flex,
    on,
    others,
    seen,
    varlen_call,
    varlen_numbers,
    windows,
)
from tests.test_mask_arguments import DECODING, OTHERS, VARLEN, WINDOWED
from tests.test_mask_calls import DECODED, MASKS, WINDOWS, near, tensors
from tests.test_mask_calls import dense as by_lambda
from tests.test_mask_calls import ints as ints_of_cpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

# ---- kernels, into outputs and workspaces of NaN -------------------------------------------------

DENSE = (*(slug for slug in COMMITTED if "_window_" in slug), *WINDOWED, *OTHERS)
# batch, heads, KV heads, queries, keys: more of either, a few queries, groups, whole tiles
SIZES = (2, 4, 2, 300, 700), (2, 3, 1, 500, 130), (2, 8, 1, 5, 2_000), (2, 2, 2, 256, 256)
LONGER = (*LENGTHS, (700, 700), (1, 1_500), (300, 1_000), (900, 100), (1, 1), (0, 0), (64, 128))


@pytest.mark.parametrize("slug", DENSE)
def test_kernels_are_what_numbers_and_tables_say(pair_of, slug):
    plan, binary = pair_of(slug)
    for sizes in SIZES:
        if plan.mask.name == "window":
            every = list(windows(plan.block_n, sizes[-1]))
        else:
            every = list(others(plan.mask.name, sizes))
        for given in every:
            _, call, exact = call_of(slug, sizes, given, device="cuda")
            check(plan, poisoned(plan, binary, call), exact)


@pytest.mark.parametrize("slug", VARLEN)
def test_varlen_kernels_are_what_numbers_and_tables_say(pair_of, slug):
    plan, binary = pair_of(slug)
    for heads in ((2, 1), (3, 3), (8, 2), (6, 1)):
        for given in varlen_numbers(plan.mask.name, plan.block_n, LONGER):
            _, call, exact = varlen_call(slug, given, heads, lengths=LONGER, device="cuda")
            check_varlen(plan, poisoned(plan, binary, call), exact)


@pytest.mark.parametrize("slug", DECODING)
def test_decoding_is_what_numbers_and_tables_say_whatever_keys_hold_that_no_query_sees(
    pair_of, slug
):
    plan, binary = pair_of(slug)
    heads, begins = (4, 2), (0, 1, 0)
    for rows, keys in ((1, 300), (3, 150), (5, 4_000), (4, 2), (1, 9_000)):
        sizes, ends = (3, *heads, rows, keys), (keys, max(1, keys - 37), 0)
        if plan.mask.name == "window":
            every = list(windows(plan.block_n, keys))
        else:
            every = list(others(plan.mask.name, sizes))
        for given in every:
            _, call, _ = call_of(slug, (*sizes[:3], rows, 0), given, device="cuda")
            call |= {name: kept(keys, heads[1], plan) for name in ("k", "v")}
            if plan.fixed:
                call["reference"] = torch.zeros(heads[0], device="cuda")
            exact = []
            for number, (first, last) in enumerate(zip(begins, ends, strict=True)):
                visible = seen(plan.mask.name, (rows, last - first), given, number)
                own = (x[number, first:last].float() for x in (call["k"], call["v"]))
                q = call["q"][number].float()
                exact.append(dense(q, *own, visible.cuda(), call["scale"]))
                unseen = first + int(visible.any(0).int().argmax()) if visible.any() else last
                for x in (call["k"], call["v"]):
                    x[number, :unseen] = x[number, last:] = math.nan
            call["seqused_k"], call["leftpad_k"] = ints(*ends), ints(*begins)
            check(plan, poisoned(plan, binary, call), exact)


PROVED = (
    "fwd_fp16_d64_window_m128n128_q2",
    *(VARLEN[i] for i in (0, 3, 6)),
    *(DECODING[i] for i in (0, 3)),
)


@pytest.mark.parametrize("slug", PROVED)
def test_proofs_give_numbers_and_pass(pair_of, slug):
    """Varlen sequences beside NaN, bits alone, hard scores: as `fagen verify` runs them."""
    plan, binary = pair_of(slug)
    verification: Verification = load_named(registry.kind(plan.kind).verification)
    assert all(error.ok for error in verification.errors(plan, binary, print))


def kept(keys: int, heads: int, plan: Any) -> Tensor:
    """Keys or values of three sequences."""
    dtype = getattr(torch, plan.dtype.torch)
    return torch.randn(3, keys, heads, plan.head_dim, device="cuda").to(dtype)


# ---- calls ---------------------------------------------------------------------------------------

DENSE_CALLS = (*WINDOWS[:6], *MASKS)
PACKED = (30, 60), (200, 333), (0, 50), (150, 20)  # of each sequence: queries, keys


def schedules_of_calls(card: str = "") -> list[Schedule]:
    """Of all calls below, for building them together."""
    served = []
    for word in ("document", *(word_of_call(how) for how, _ in DENSE_CALLS)):
        problem = Problem("fp16", 64, 64, word, "fp16", "", 0)
        for queries, keys in (*LENGTHS, (500, 1_000)):
            served.append(serve(problem, Sizes(2, 4, 2, queries, keys), card))
        served.append(serve(replace(problem, lengths="varlen"), Sizes(4, 4, 2, 9, 9), card))
    for how, _ in DECODED:
        problem = Problem("fp16", 64, 64, word_of_call(how), "fp16", "", 0, kind="decode")
        served += [serve(problem, Sizes(2, 4, 2, queries, 300), card) for queries in (1, 3)]
    return [*{one.schedule.slug: one.schedule for one in served}.values()]


def word_of_call(how: dict[str, Any]) -> str:
    """The one word that a call's mask amounts to."""
    given, names = dict(how), ("window", "mask", "softcap", "score")
    causal, own = given.pop("causal", False), [given.pop(name, None) for name in names]
    return names_of(said(fagen.attention, causal, *own, None, given).variant)[0]


def build_together(schedules: list[Schedule]) -> None:
    """Compile them; what fails is raised by the call that needs it."""

    def build(schedule: Schedule) -> None:
        with suppress(Exception):
            flow.built(schedule, binding=True)

    with ThreadPoolExecutor(BUILDERS) as pool:
        list(pool.map(build, schedules))


@pytest.fixture(scope="module")
def built_of_calls(hopper) -> None:
    build_together(schedules_of_calls(torch.cuda.get_device_name()))


@pytest.fixture
def haunted(built_of_calls) -> None:
    """What calls allocate holds NaN."""
    small = [torch.full((1 << 17,), math.nan, device="cuda") for _ in range(64)]
    large = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(4)]
    del small, large


IDS = [str(number) for number, _ in enumerate(DENSE_CALLS)]


@pytest.mark.parametrize(("how", "sees"), DENSE_CALLS, ids=IDS)
def test_a_call_is_what_it_says(haunted, how, sees):
    for queries, keys in ((70, 70), (33, 100), (100, 33), (1, 40), (40, 0), (500, 1_000)):
        qkv = tensors(queries, keys)
        exact = by_lambda(*qkv, sees)
        out, lse = fagen.attention(*(x.cuda() for x in qkv), **on("cuda", how), return_lse=True)
        near((out.cpu(), lse.cpu()), exact)
        assert torch.equal(lse.cpu() == -math.inf, exact[1] == -math.inf)
        assert not out.cpu().transpose(1, 2)[exact[1] == -math.inf].any()


@pytest.mark.parametrize(("how", "sees"), DENSE_CALLS, ids=IDS)
def test_flex_attention_says_the_same(haunted, how, sees):
    """Where its lambdas read no table: vmap wants those on the GPU."""
    if any(isinstance(x, Tensor) for x in how.values()):
        pytest.skip("the lambda reads a table of the CPU")
    for queries, keys in ((33, 100), (100, 33), (500, 1_000)):
        qkv = [x.cuda() for x in tensors(queries, keys)]
        out, lse = fagen.attention(*qkv, **how, return_lse=True)
        theirs, their_lse = flex(*qkv, sees)
        torch.testing.assert_close(out, theirs, atol=4e-3, rtol=0)
        torch.testing.assert_close(lse, their_lse, atol=4e-3, rtol=0)


@pytest.mark.parametrize("word", ["prefix", "causal_by_sequence", "document"])
@pytest.mark.parametrize("sizes", [(33, 300), (300, 33), (500, 1_000)])
def test_tables_are_what_they_say_beside_flex_attention_and_lambdas(haunted, word, sizes):
    rows, keys = sizes
    qkv = [x.cuda() for x in tensors(rows, keys)]
    for given in others(word, (2, 4, 2, rows, keys)):
        how = {"mask": word, **on("cuda", given)}
        if word == "causal_by_sequence":
            how = {"causal": how["causal_of"]}
        tables = [x for x in how.values() if isinstance(x, Tensor)]

        def sees(b: Any, i: Any, j: Any, tables: list[Tensor] = tables) -> Any:
            first, last = tables[0], tables[-1]
            if word == "document":
                row = i - (keys - rows)
                return (first[b, row] <= j) & (j < last[b, row])
            return (j <= i) | (j < first[b] if word == "prefix" else first[b] == 0)

        out, lse = fagen.attention(*qkv, **how, return_lse=True)
        near((out, lse), tuple(x.double() for x in flex(*qkv, sees)))
        for number in range(2):
            visible = seen(word, sizes, given, number).cuda()
            exact = dense(*(x[number] for x in qkv), visible, 0.125)
            near((out[number], lse[number]), exact)


def test_documents_of_varlen_sequences_are_of_their_own_queries_and_keys(haunted):
    for given in varlen_numbers("document", 64, LONGER):
        _, call, (exact, exact_lse) = varlen_call(
            VARLEN[5], given, (4, 2), lengths=LONGER, device="cuda"
        )
        at = call["cu_seqlens_q"], call["cu_seqlens_k"]
        out, lse = fagen.attention_varlen(
            *(call[name] for name in "qkv"),
            *at,
            **dict(mask="document", first=call["first"], last=call["last"]),
            return_lse=True,
        )
        near((out, lse), (exact, exact_lse))


@pytest.mark.parametrize(("how", "sees"), DENSE_CALLS, ids=IDS)
def test_varlen_sequences_have_their_own(haunted, how, sees):
    if any(isinstance(x, Tensor) for x in how.values()):
        tables = {name: x for name, x in how.items() if isinstance(x, Tensor)}
        how = how | {name: x.repeat(2) for name, x in tables.items()}
    parts = [tensors(*lengths, batch=1) for lengths in PACKED]
    q, k, v = (torch.cat([part[i][0] for part in parts]) for i in range(3))
    at_q, at_k = (
        ints(*(sum(lengths[i] for lengths in PACKED[:n]) for n in range(len(PACKED) + 1)))
        for i in range(2)
    )
    out, lse = fagen.attention_varlen(
        *(x.cuda() for x in (q, k, v)), at_q, at_k, **on("cuda", how), return_lse=True
    )
    for number, part in enumerate(parts):
        rows = slice(*at_q[number : number + 2].tolist())

        def of_one(b: Any, i: Any, j: Any, number: int = number) -> Any:
            return sees(b + number % 2, i, j)

        near((out[None, rows].cpu(), lse[None, :, rows].cpu()), by_lambda(*part, of_one))


@pytest.mark.parametrize(("how", "sees"), DECODED, ids=range(len(DECODED)))
def test_decoding_takes_them_over_the_keys_of_a_sequence(haunted, how, sees):
    used, before = (50, 260), (10, 0)
    how = {"causal": False, **how} if "mask" not in how else how
    for queries in (1, 3):
        q, k, v = tensors(queries, 300)
        out, lse = fagen.attention_decode(
            *(x.cuda() for x in (q, k, v)),
            **dict(seqused_k=ints(*used), leftpad_k=ints(*before)),
            **on("cuda", how),
            return_lse=True,
        )
        for number in range(2):
            own = slice(number, number + 1), slice(before[number], used[number])

            def of_one(b: Any, i: Any, j: Any, number: int = number) -> Any:
                return sees(b + number, i, j)

            exact = by_lambda(q[own[0]], k[own], v[own], of_one)
            near((out[own[0]].cpu(), lse[own[0]].cpu()), exact)


@pytest.mark.parametrize("lengths", [(130, 700), (700, 130)])
def test_e4m3_takes_windows(built_of_calls, lengths):
    q, k, v = tensors(*lengths)
    out = fagen.attention_fp8(*(x.cuda() for x in (q, k, v)), causal=True, window=40)
    exact, _ = by_lambda(q, k, v, lambda b, i, j: (j <= i) & (i - j < 40))
    assert (out.cpu().double() - exact).abs().mean() < 0.02


# ---- nothing is built again ----------------------------------------------------------------------


def test_no_kernel_is_built_for_other_windows_and_lengths(haunted, monkeypatch):
    def run(queries: int, keys: int, window: Any) -> None:
        qkv = [x.cuda() for x in tensors(queries, keys)]
        fagen.attention(*qkv, window=window)
        fagen.attention(*qkv, mask="chunked", chunk=1 + keys // 7)
        fagen.attention(*qkv, mask="prefix", prefix=ints(keys // 3, 0))
        at = ints(0, queries), ints(0, keys)
        fagen.attention_varlen(*(x[0] for x in qkv), *at, window=window)
        if queries < 5:
            fagen.attention_decode(*qkv, window=window, causal=True)

    sizes = (1, 40), (3, 300), (70, 70), (500, 1_000), (1_000, 300), (2, 5_000)
    for queries, keys in sizes:
        run(queries, keys, 16)

    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("a kernel is built again")

    monkeypatch.setattr(op, "build", refuse)
    for queries, keys in sizes:
        for window in (1, 17, 128, (3, 9), (None, 5), (40, None), 4_096):
            run(queries, keys + 3, window)


def test_a_graph_replays_with_other_tables(haunted):
    qkv = [x.cuda() for x in tensors(70, 200)]
    prefix = ints(0, 0)
    graph, out = graph_of(lambda: fagen.attention(*qkv, mask="prefix", prefix=prefix))
    for numbers in ((5, 150), (200, 1), (-3, 999)):
        prefix.copy_(ints(*numbers))
        spoil(out)
        graph.replay()
        table = ints_of_cpu(*numbers)
        exact, _ = by_lambda(
            *(x.cpu() for x in qkv), lambda b, q, k, table=table: (k <= q) | (k < table[b])
        )
        torch.testing.assert_close(out.cpu().double(), exact, atol=4e-3, rtol=0)


def test_a_compiled_window_is_one_graph_of_any_width(haunted):
    q, k, v = (x.cuda() for x in tensors(200, 200))
    compiled, graphs = compiled_windows(k, v)
    for width in (5, 7, 64, 100):
        expected = fagen.attention(q, k, v, causal=True, window=width)
        torch.testing.assert_close(compiled(q, width), expected, atol=2e-3, rtol=0)
    assert len(graphs) == 2  # of the first, and then of any
