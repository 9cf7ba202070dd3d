"""attention_fp8(q, k, v, …): tensors in 16 bits in, their attention by a kernel of e4m3 out."""

from typing import Any

from torch import Tensor

from fagen.expr.canonical import Expression
from fagen.masking import Window
from fagen.runtime import autocast
from fagen.runtime.argument_types import flag, names_types
from fagen.runtime.arguments import refuse_unquantisable, told
from fagen.runtime.attention import attention
from fagen.runtime.call import Choice
from fagen.runtime.quantize import quantize
from fagen.variants import names_of
from fagen.vocab import SCALE_ROWS_DEFAULT, SCORES


@names_types
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | Tensor = False,
    window: Window = None,
    mask: str | Expression | None = None,
    softcap: float | None = None,
    score: str | Expression | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    schedule: Choice = None,
    rotate: bool = True,
    center_k: bool = True,
    center_v: bool = True,
    scales: str = "block",
    scale_rows: int | None = None,
    v_layout: str = "columns",
    seed: int = 0,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what attention(…) does, in e4m3: quantise q, k and v, then call an e4m3 kernel.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) in fp16 or bf16, D and Dv multiples of 16;
    out is in their dtype. torch.autocast casts as of attention(…). With `rotate`, q and k are
    multiplied by the random signs of `seed` and a Hadamard matrix, which leaves their products as
    they are and spreads outliers. Their scales are of a "tensor", a "head" or a "block" of
    `scale_rows` rows, 64 if left out; V's are of a column.
    With `center_k` and `center_v` the means of columns over all keys are taken off K and V before
    they are rounded, which softmax does not notice of K, and O gets back of V. Each is read twice
    then. With softcap or another score K's are left. V is written transposed, unless v_layout is
    "rows".

    Where a CUDA graph is captured an earlier call with such tensors must have readied its kernels;
    prepare(…) readies those of attention alone.  Other arguments, what is returned and what is
    raised are as of attention(…).
    """
    how: dict[str, Any] = dict(
        causal=causal, window=window, mask=mask, softcap=softcap, score=score, sinks=sinks
    )
    variant, *_ = told(attention_fp8, *how.values(), given)  # refused by this call's name
    q, k, v = autocast.cast(q, k, v)
    center_k, center_v = flag("center_k", center_k), flag("center_v", center_v)
    # a score of keys less their mean is another, unless it is a multiple
    center_k = center_k and not SCORES[names_of(variant)[1]].acts
    refuse_unquantisable(q, k, v, scales, v_layout)
    by_block = scales == "block"
    if by_block and scale_rows is None:
        scale_rows = SCALE_ROWS_DEFAULT
    elif scale_rows is not None and not by_block:
        raise ValueError(f'scale_rows goes with scales = "block"; scales is {scales!r}')
    scaled: dict[str, Any] = {"scales": scales} | ({"scale_rows": scale_rows} if by_block else {})
    q8, q_descale = quantize(q, rotate=rotate, seed=seed, **scaled)
    k8, k_descale, *k_mean = quantize(k, rotate=rotate, center=center_k, seed=seed, **scaled)
    v8, v_descale, *v_mean = quantize(v, layout=v_layout, scales="column", center=center_v)
    return attention(
        q8,
        k8,
        v8,
        scale=scale,
        return_lse=return_lse,
        schedule=schedule,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        v_mean=v_mean[0] if v_mean else None,
        k_mean=k_mean[0] if k_mean else None,
        v_layout=v_layout,
        scale_rows=scale_rows or 0,
        out_dtype=q.dtype,
        **how,
        **given,
    )
