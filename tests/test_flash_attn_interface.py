"""fagen.flash_attn_interface: calls that are written for FlashAttention-3, and what they get."""

import math
import re
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen.flash_attn_interface import calls, flash_attn_func, flash_attn_varlen_func
from tests.attention_helpers import qkv
from tests.tensors import normal
from tests.varlen_helpers import packed

pytestmark = pytest.mark.usefixtures("nothing_is_ready")

E4M3 = torch.float8_e4m3fn

# of hopper/flash_attn_interface.py in Dao-AILab/flash-attention at 01afd16, in its order
ARGUMENTS: dict[str, object] = {
    "q": Parameter.empty,
    "k": Parameter.empty,
    "v": Parameter.empty,
    "softmax_scale": None,
    "causal": False,
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}


def test_the_arguments_are_flash_attention_3s() -> None:
    ours = signature(flash_attn_func).parameters
    assert [(name, one.default) for name, one in ours.items()] == [*ARGUMENTS.items()]
    assert {one.kind for one in ours.values()} == {Parameter.POSITIONAL_OR_KEYWORD}


def test_the_arguments_of_packed_sequences_are_too() -> None:
    ours = signature(flash_attn_varlen_func).parameters
    first = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    wanted = dict.fromkeys(first, Parameter.empty) | {"seqused_q": None, "seqused_k": None}
    wanted |= {name: default for name, default in ARGUMENTS.items() if name not in "qkv"}
    assert [(name, one.default) for name, one in ours.items()] == [*wanted.items()]
    assert {one.kind for one in ours.values()} == {Parameter.POSITIONAL_OR_KEYWORD}


# ---- what it computes ---------------------------------------------------------------------------


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention head by head in fp64; query i of Sq sees keys up to i + Sk - Sq if causal."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    (queries, keys), group = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril(keys - queries)
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].mT * (scale or q.shape[3] ** -0.5)
        scores = scores.masked_fill(~seen, -math.inf)
        outs.append(scores.softmax(-1).nan_to_num(0.0) @ v[:, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 1)


@pytest.mark.parametrize(
    ("dtype", "queries", "keys"),
    [
        (torch.float16, 70, 200),
        (torch.bfloat16, 70, 150),
        (torch.bfloat16, 90, 40),
        (torch.float16, 1, 130),
        (torch.float16, 20, 0),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_with_grouped_heads_and_a_mask_at_the_bottom_right(
    dtype: torch.dtype, queries: int, keys: int, causal: bool
) -> None:
    q, k, v = qkv(dtype, queries=queries, keys=keys)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert (out.dtype, out.shape) == (dtype, (2, queries, 4, 64)) and out.is_contiguous()
    assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, queries)) and lse.is_contiguous()
    wanted, wanted_lse = exact(q, k, v, causal)
    close = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-3)
    if causal and queries > keys:
        assert not out[:, : queries - keys].any()


def test_arguments_go_by_place_as_they_do_there() -> None:
    q, k, v = qkv(queries=20, keys=50)
    wanted = exact(q, k, v, causal=True, scale=0.3)[0]
    given = (q, k, v, 0.3, True, None, None, None, None, (-1, -1), 0, 0.0, 1, None, False, 0, False)
    out = flash_attn_func(*given)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)


def test_what_is_about_speed_or_gradients_alone_changes_no_bit() -> None:
    q, k, v = qkv(queries=20, keys=50)
    out = flash_attn_func(q, k, v)
    for more in (
        *({"num_splits": splits} for splits in (-1, 0, 1, 2, 256)),
        *({"sm_margin": margin} for margin in (0, 8, 131)),
        *({"pack_gqa": packing} for packing in (None, False, True)),
        *({"deterministic": wanted} for wanted in (False, True)),
    ):
        assert torch.equal(out, flash_attn_func(q, k, v, **more)), more  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "causal", "is_causal"),
    [
        ((-1, -1), False, False),
        ([-1, 0], False, True),
        ((-1, 0), True, True),
        ((-1, 5), True, True),  # `causal` bounds the right
        ((49, 19), False, False),  # all 50 keys are in reach of all 20 queries
        ((49, -1), True, True),
        ((500, 0), False, True),
    ],
)
def test_a_window_that_is_a_mask_is_that_mask(
    window: tuple[int, int], causal: bool, is_causal: bool
) -> None:
    q, k, v = qkv(queries=20, keys=50)
    out = flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=is_causal))  # type: ignore[arg-type]
    (queries, keys), (left, right) = (20, 50), window
    for i in (0, queries - 1):  # what FlashAttention-3 says of a window
        here = i + keys - queries
        last = min(here + right if right >= 0 else keys, here if causal else keys, keys - 1)
        assert (here - left if left >= 0 else 0) <= 0
        assert last == (here if is_causal else keys - 1)


def test_layouts_that_it_copies_are_taken() -> None:
    q, k, v = qkv(queries=20, keys=50)
    out = flash_attn_func(q, k, v)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert {x.stride(1) for x in turned} == {1}
    assert torch.equal(out, flash_attn_func(*turned))  # type: ignore[arg-type]


# ---- e4m3 ---------------------------------------------------------------------------------------

# of each batch and KV head, powers of 2 so that the e4m3 values themselves are what is rounded
Q_SIZES = torch.tensor([[1.0, 8.0, 0.25], [4.0, 0.5, 2.0]])
K_SIZES = torch.tensor([[2.0, 0.125, 4.0], [0.25, 4.0, 1.0]])
V_SIZES = torch.tensor([[1.0, 64.0, 8.0], [0.125, 1.0, 16.0]])


def in_e4m3(heads: int = 6, queries: int = 40, keys: int = 100) -> list[Tensor]:
    """Q, K and V in e4m3 of three KV heads."""
    return [
        normal(2, queries, heads, 64).to(E4M3),
        normal(2, keys, 3, 64, seed=1).to(E4M3),
        normal(2, keys, 3, 64, seed=2).to(E4M3),
    ]


def real(x: Tensor, descale: Tensor | None) -> Tensor:
    """What e4m3 tensors stand for: each KV head's descale is that of all its query heads."""
    numbers = x.double()
    if descale is None:
        return numbers
    group = x.shape[2] // descale.shape[1]
    for head in range(x.shape[2]):
        numbers[:, :, head] *= descale[:, head // group, None, None].double()
    return numbers


def far(out: Tensor, wanted: Tensor) -> float:
    """The largest error of a head, root mean square relative to the head's own."""
    error, size = ((x.double().square().mean((1, 3))).sqrt() for x in (out - wanted, wanted))
    return float((error / size).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [3, 6, 12])
def test_descales_are_of_kv_heads_and_that_of_q_of_the_heads_that_share_one(
    heads: int, causal: bool
) -> None:
    q, k, v = in_e4m3(heads)
    descales = {"q_descale": Q_SIZES, "k_descale": K_SIZES, "v_descale": V_SIZES}
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, **descales)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 40, heads, 64))
    assert (lse.dtype, lse.shape) == (torch.float32, (2, heads, 40))
    dequantised = real(q, Q_SIZES), real(k, K_SIZES), real(v, V_SIZES)
    wanted, wanted_lse = exact(*dequantised, causal)
    assert far(out, wanted) < 0.05
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-3, atol=2e-2)
    # by the other grouping of heads, or none, it would be far off
    if heads > 3:
        mixed = exact(real(q, Q_SIZES.repeat(1, heads // 3)), *dequantised[1:], causal)[0]
        assert far(out, mixed) > 0.5


@pytest.mark.parametrize("missing", range(8))
def test_a_descale_that_is_none_is_one(missing: int) -> None:
    q, k, v = in_e4m3(queries=20)
    named = zip("qkv", (Q_SIZES, K_SIZES, V_SIZES), strict=True)
    given = [None if missing >> bit & 1 else sizes for bit, (_, sizes) in enumerate(named)]
    out = flash_attn_func(q, k, v, None, False, None, *given)
    ones = [torch.ones(2, 3) if sizes is None else sizes for sizes in given]
    assert torch.equal(out, flash_attn_func(q, k, v, None, False, None, *ones))  # type: ignore[arg-type]
    dequantised = (real(x, sizes) for x, sizes in zip((q, k, v), given, strict=True))
    assert far(out, exact(*dequantised)[0]) < 0.06  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_a_descale_that_all_heads_share_is_not_copied(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = in_e4m3(queries=20)
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    shared, spread = torch.tensor(0.5).expand(2, kv_heads), torch.full((2, kv_heads), 0.5)
    out = flash_attn_func(q, k, v, None, False, None, shared, shared, shared)
    assert torch.equal(out, flash_attn_func(q, k, v, None, False, None, spread, spread, spread))  # type: ignore[arg-type]
    assert far(out, exact(*(real(x, spread) for x in (q, k, v)))[0]) < 0.06  # type: ignore[arg-type]
    monkeypatch.setattr(calls, "attention", lambda *_, **given: given)
    taken: Any = flash_attn_func(q, k, v, q_descale=shared)
    assert taken["q_descale"].data_ptr() == shared.data_ptr()


def test_beside_16_bits_descales_are_not_read() -> None:
    q, k, v = qkv(queries=20, keys=50)
    descales: dict[str, Any] = {f"{x}_descale": torch.full((2, 2), 7.0) for x in "qkv"}
    assert torch.equal(flash_attn_func(q, k, v, **descales), flash_attn_func(q, k, v))  # type: ignore[arg-type]


# ---- traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_prepared_it_compiles_into_one_graph(fresh_dynamo: None, dynamic: bool) -> None:
    def called(q: Tensor, k: Tensor, v: Tensor, descale: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, q_descale=descale, causal=True, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out

    fagen.prepare(dtype="e4m3", head_dim=64, causal=True)
    compiled = torch.compile(called, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    q, k, v = in_e4m3(queries=20)
    for keys in (40, 30):
        given = q, k[:, :keys], v[:, :keys], Q_SIZES
        assert torch.equal(compiled(*given), called(*given))


# ---- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"qv": torch.ones(2, 70, 4, 64)}, "qv is not there yet in fagen; None is none"),
        (
            {"window_size": (128, 0)},
            "window_size = (128, 0) is not there yet in fagen; (-1, -1) is ",
        ),
        ({"window_size": (-1, 5)}, "window_size = (-1, 5) is not there yet"),
        ({"window_size": (198, -1), "causal": True}, "window_size = (198, -1) is not there yet"),
        ({"window_size": (0, 0), "causal": True}, "window_size = (0, 0) is not there yet"),
        ({"window_size": (-1, 68)}, "window_size = (-1, 68) is not there yet"),
        ({"attention_chunk": 64}, "attention_chunk = 64 is not there yet in fagen; 0 is none"),
        ({"softcap": 15.0}, "softcap = 15.0 is not there yet in fagen; 0.0 is none"),
    ],
)
def test_what_is_not_there_yet_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(f"flash_attn_func: {said}")):
        flash_attn_func(*qkv(), **more)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"q": torch.ones(40, 6, 64).to(E4M3)},
            "q has 3 dimensions; it must have 4: (batch, seqlen",
        ),
        (
            {"q_descale": torch.ones(2, 6)},
            "q_descale has shape (2, 6); it must be (batch = 2, kv_h",
        ),
        (
            {"k_descale": torch.ones(())},
            "k_descale has shape (); it must be (batch = 2, kv_heads = ",
        ),
        (
            {"v_descale": torch.ones(2, 3, 64)},
            "v_descale has shape (2, 3, 64); it must be (batch =",
        ),
        (
            {"k_descale": torch.ones(2, 3).half()},
            "k_descale is not float32, which this kernel takes",
        ),
        ({"q": normal(2, 40, 4, 64).to(E4M3)}, "heads = 4 must be a multiple of kv_heads = 3"),
        ({"v": normal(2, 100, 3, 64).half()}, "v is not float8_e4m3fn, which this kernel takes"),
        ({"q": normal(2, 40, 6, 64)}, "q is float32; use fp16 or bf16: q.to(torch.bfloat16)"),
        ({"softmax_scale": -1.0}, "softmax_scale is -1; it must be finite and above 0"),
        ({"num_splits": 257}, "num_splits is 257; it must be 256 at most"),
        ({"sm_margin": 132}, "sm_margin is 132; it must be 0 … 131"),
        ({"sm_margin": -1}, "sm_margin is -1; it must be 0 … 131"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = dict(zip("qkv", in_e4m3(), strict=True)) | {"q_descale": Q_SIZES}
    with pytest.raises(ValueError, match=re.escape(said)):
        flash_attn_func(**given | change)


# ---- packed sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "causal"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"window_size": (-1, 0)}, True),
        ({"window_size": (129, 69)}, False),
        ({"num_splits": 0, "pack_gqa": True, "deterministic": True}, False),
        ({"num_splits": 16, "sm_margin": 8}, False),
        ({"softmax_scale": 64**-0.5, "k_descale": torch.ones(6, 2)}, False),
    ],
)
def test_packed_sequences_are_those_of_attention_varlen(more: dict[str, Any], causal: bool) -> None:
    given = packed()
    out, lse = flash_attn_varlen_func(*given, 70, 130, return_attn_probs=True, **more)
    wanted = fagen.attention_varlen(*given, causal=causal, return_lse=True)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert torch.equal(flash_attn_varlen_func(*given, 70, 130, **more), out)  # type: ignore[arg-type]


def test_of_packed_sequences_it_copies_layouts_and_takes_used_keys() -> None:
    q, k, v, *at = packed()
    used = torch.tensor([5, 3, 20, 0, 0, 32], dtype=torch.int32)
    wanted = fagen.attention_varlen(q, k, v, *at, seqused_k=used)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    out = flash_attn_varlen_func(*turned, *at, 70, 130, seqused_k=used)
    assert torch.equal(out, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"window_size": torch.tensor((128, 0))}, "window_size = (128, 0) is not there yet"),
        ({"qv": torch.ones(119, 4, 64)}, "qv is not there yet in fagen; None is none"),
        ({"window_size": (128, 0)}, "window_size = (128, 0) is not there yet"),
        ({"softcap": 15.0}, "softcap = 15.0 is not there yet in fagen; 0.0 is none"),
    ],
)
def test_what_packed_sequences_do_not_have_yet_is_named(more: dict[str, Any], said: str) -> None:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    given: dict[str, Any] = dict(zip(names, packed(), strict=True)) | more
    with pytest.raises(NotImplementedError, match=re.escape(f"flash_attn_varlen_func: {said}")):
        flash_attn_varlen_func(**given, max_seqlen_q=70, max_seqlen_k=130)
