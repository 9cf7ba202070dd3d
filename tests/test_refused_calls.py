"""Wrong arguments of public calls: each is named, with what it must be or what to do instead.

Of ops test_op_refusals.py says so, and of what is of another type test_arguments_hostile.py.
"""

import pytest

from tests import wrong
from tests.public_calls import GOOD

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

WRONG = """
attention:
  q=q[0] -> q has 3 dimensions and v has 4; both must have 4
  k=k[0] -> k has shape (200, 2, 64)
  k=k.bfloat16() -> k is not float16, which this kernel takes
  scale=-1 -> scale is -1; it must be finite and above 0
  q=q.float() -> q is float32; use fp16 or bf16: q.to(torch.bfloat16), and k and v likewise
  q=q.double() -> q is float64; use fp16 or bf16: q.to(torch.bfloat16)
  q=q.to(float8_e5m2) -> q is float8_e5m2; use fp16 or bf16: q.to(torch.bfloat16)
  q=q.float(), schedule="fwd_fp16_d64_full_m64n64" -> q is float32; use fp16 or bf16
  q=q[..., :20], k=k[..., :20]
    -> q and k have head_dim 20; it must be a multiple of 8 from 16 to 256: fill it up with zeros
  q=q[..., :8], k=k[..., :8] -> fill it up with zeros to 16, and pass scale = 8 ** -0.5
  v=v[..., :30] -> v has head_dim 30; it must be a multiple of 8 from 16 to 256: fill it up with ze
  q=q.repeat(1, 1, 1, 8), k=k.repeat(1, 1, 1, 8)
    -> q and k have head_dim 512; it must be a multiple of 8 from 16 to 256
  q=q.half()[..., :64], q_descale=zeros(())
    -> descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which fagen.q
  out_dtype=half -> descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors, which

attention raises DeviceError:
  q=q.to("meta"), k=k.to("meta"), v=v.to("meta")
    -> tensors are on meta; a kernel runs on a Hopper GPU

attention raises ScheduleError:
  schedule="fwd_fp16_d64_causal_m64n64"
    -> computes float16, head_dim 64, causal; the call asks for float16, head_dim 64, full
  schedule="fwd_bf16_d64_full_m64n64" -> computes bfloat16, head_dim 64, full; the call asks for
  schedule="fwd_fp16_d64v32_full_m64n64" -> computes float16, head_dim 64 and 32 (V), full;
  schedule="fwd_fp16" -> "fwd_fp16" is no slug
  schedule="nowhere/x.toml" -> nowhere/x.toml: cannot be read: No such file or directory

e4m3:
  k_descale=None
    -> k_descale is missing: a number of an e4m3 tensor is its value times its descale. fagen.q
  v_descale=ones(2)
    -> v_descale has shape (2,); it must be one number (), (batch, heads) or (batch, heads, head_
  k_descale=ones(2, 2, 7)
    -> q_descale and k_descale have 1 and 7 blocks for 70 queries and 200 keys; both must have
    -> one, or one for each block of 32, 64, 128 rows, as many in both
  scale_rows=48 -> scale_rows is 48; it must be one of 0, 32, 64, 128
  scale_rows=64
    -> q_descale has shape (2, 4, 1); it must be (batch = 2 or 1, heads = 4 or 1, ceil(seqlen_q
  k=k.half()
    -> k is not float8_e4m3fn, which this kernel takes; fagen.quantize(k) makes it so, with its
  q=q.half() -> (and fagen.attention_fp8 for one call); q is float16
  out_dtype=float32 -> out_dtype is torch.float32; it must be one of torch.float16, torch.bfloat16
  v=by_columns(v)
    -> v has shape (2, 2, 64, 208), which is transposed V of 2 heads: pass v_layout="columns"
  v_layout="columns"
    -> v has shape (2, 200, 2, 64), which is row-major V of 200 keys: pass v_layout="rows", or
  v_layout="cols" -> v_layout is 'cols'; it must be one of 'columns', 'rows'
  k=k[0] -> k has 3 dimensions; it must have 4
  q=q[..., :40], k=k[..., :40] -> q and k have head_dim 40; in e4m3 it must be a multiple of 16 up
    -> to 256: before quantising fill it up with zeros to 48, and pass scale = 40 ** -0.5
  v=v[..., :24] -> 256: before quantising fill it up with zeros to 32, and drop as many columns
  q=cat([q] * 5, 3), k=cat([k] * 5, 3)
    -> q and k have head_dim 320; in e4m3 it must be a multiple of 16 up to 256
  scale=-1 -> scale is -1; it must be finite and above 0

e4m3 raises ScheduleError:
  schedule="fwd_e4m3_d64_full_m64n64", out_dtype=bfloat16
    -> fwd_e4m3_d64_full_m64n64 computes float8_e4m3fn, head_dim 64, full, V transposed, scales
    -> by head or tensor, out in bfloat16; the call asks for float8_e4m3fn,
    -> head_dim 64, full, V row-major
  schedule="fwd_fp16_d64_full_m64n64", out_dtype=bfloat16
    -> computes float16, head_dim 64, full; the call asks for
  schedule="fwd_e4m3_d64_full_m64n64_ofp16_vrows", out_dtype=bfloat16
    -> out in float16; the call asks for

attention_fp8:
  k=k.to(E4M3)
    -> k is in e4m3 already: fagen.attention takes it with its descale; attention_fp8 takes flo
  q=q.float() -> q is float32; attention_fp8 takes float16 or bfloat16: q.bfloat16() converts it
  v=v.bfloat16() -> v is bfloat16, but q is float16; v.to(q.dtype) converts it
  v=v.to("meta") -> v is not on the device of q; v.to(q.device) moves it there
  k=k[0] -> k has 3 dimensions; it must have 4
  q=q[..., :56], k=k[..., :56]
    -> 256: before quantising fill it up with zeros to 64, and pass scale = 56 ** -0.5
  k=k[..., :32] -> k has shape (2, 200, 2, 32); it must be (batch = 2, seqlen_k, kv_heads, 64)
  v=v[:, :100]
    -> v has shape (2, 2, 64, 112); it must be (batch = 2, kv_heads = 2, 64, ceil(seqlen_k / 16)
  scales="row" -> scales is 'row'; it must be one of 'head', 'tensor', 'block'
  scales="head", scale_rows=64 -> scale_rows goes with scales = "block"; scales is 'head'
  scale_rows=100 -> scale_rows = 100 must be 32 or 64 or 128
  v_layout="column" -> v_layout is 'column'; it must be one of 'columns', 'rows'

attention_varlen:
  q=normal(1, 9, 4, 64) -> q has 4 dimensions; it must have 3: (total, heads, head_dim)
  v=normal(9, 64) -> v has 2 dimensions; it must have 3
  cu_seqlens_q=zeros(1, 7) -> cu_seqlens_q has shape (1, 7); it must be (batch +
  cu_seqlens_k=zeros(0) -> cu_seqlens_k has shape (0,); it must be (batch + 1)
  cu_seqlens_q=arange(7)
    -> cu_seqlens_q is not int32, which this kernel takes; cu_seqlens_q.to(torch.int32) converts
  k=normal(215, 3, 64).half() -> v has shape (215, 2, 64); it must be (total_k = 215
  q=normal(119, 5, 64).half() -> heads = 5 must be a multiple of kv_heads = 2
  k=k.float() -> k is not float16, which this kernel takes; k.to(torch.float16
  q=q.float() -> q is float32; use fp16 or bf16: q.to(torch.bfloat16)
  q=q.to(E4M3)
    -> q_descale is missing: a number of an e4m3 tensor is its value times its descale
  q=q[..., :60] -> q and k have head_dim 60; it must be a multiple of 8
  scale=0.0 -> scale is 0; it must be finite and above 0
  q_descale=ones(()) -> descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors
  v_mean=ones(()) -> descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors
  out_dtype=half -> descales, means, v_layout, scale_rows and out_dtype go with e4m3 tensors
  seqused_q=ints(1) -> seqused_q has shape (1,) in torch.int32; it must be (batch = 6)
  seqused_q=arange(6) -> seqused_q has shape (6,) in torch.int64
  seqused_q=ints(1, 2, 3, 4, 5, 6).to("meta") -> seqused_q is not on the device

attention_varlen-e4m3:
  q_descale=None -> q_descale is missing: a number of an e4m3 tensor is its value times its descale
  v_descale=None -> v_descale is missing: a number of an e4m3 tensor is its value times its descale
  k_descale=ones(2) -> k_descale has shape (2,); it must be one number (), (bat
  q_descale=ones(6, 4, 3)
    -> q_descale has 3 blocks of rows for a head; of varlen sequences a head has one number, () or
  k_descale=ones(6, 4)
    -> k_descale has shape (6, 4, 1); it must be (offsets - 1 = 6 or 1, kv_heads = 2 or 1, 1
  v_mean=ones(6, 2, 32)
    -> v_mean has shape (6, 2, 32); it must be (offsets - 1 = 6 or 1, kv_heads = 2 or 1, 64
  out_dtype=float32 -> out_dtype is torch.float32; it must be one of
  k=normal(215, 2, 64).half()
    -> k is not float8_e4m3fn, which this kernel takes; fagen.quantize(k[None]) makes it so
  q=ones(119, 4, 40).to(E4M3) -> in e4m3 it must be a multiple of 16 up to 256

attention_decode:
  q=q[0] -> q has 3 dimensions
  k=k.float() -> k is not float16
  q=q.float(), k=k.float(), v=v.float() -> q is float32; use fp16 or bf16
  q=q[:, :, :5] -> q has 5 heads, which must be a multiple of k's 8
  v=v[:, :60] -> v has shape (2, 60, 8, 64); it must be (batch = 2, seqlen_k = 70
  v=v[:, :, :4] -> v has shape (2, 70, 4, 64); it must be (batch = 2, seqlen_k = 70, kv_heads = 8
  q=q[..., :20], k=k[..., :20] -> q and k have head_dim 20
  seqused_k=arange(2) -> seqused_k is not int32
  seqused_k=ints(70) -> seqused_k has shape (1); it must be (batch = 2)
  leftpad_k=ints(1, 2, 3) -> leftpad_k has shape
  scale=0.0 -> scale is 0; it must be finite and above 0
  q=q.clone().requires_grad_() -> requires a gradient, and decoding has none
  reference=zeros(3) -> reference has shape (3); it must be (heads = 8)

attention_decode raises ScheduleError:
  reference=zeros(8), schedule="dec_fp16_d64_causal_r8n128" -> a fixed maximum
  schedule="dec_bf16_d64_causal_r8n64" -> is not what the call asks for
  schedule="fwd_fp16_d64_causal_m128n128" -> is not what the call asks for
  q=q.repeat(1, 2, 1, 1), schedule="dec_fp16_d64_full_r8n64" -> is not what the call asks for

combine:
  outs=outs[0, 0] -> outs has 3 dimensions
  outs=outs[:, 0] -> lses has 4 dimensions; beside such outs it must be (splits, heads, total)
  lses=lses[..., :4] -> lses has shape
  lses=lses.double() -> lses is not float32
  outs=outs.double() -> dtype = "float64" must be
  outs=outs[..., :20] -> head_dim = 20 must be
  outs=outs.repeat(1, 1, 1, 1, 17) -> head_dim = 544 must be
  out_dtype=int8 -> out_dtype = "int8" must be
  num_splits=ints(1, 3) -> go together; only num_splits
  cu_seqlens=ints(0, 2, 5) -> go together; only cu_seqlens
  num_splits=ints(1, 3), cu_seqlens=ints(0, 2, 5) -> outs has 5 dimensions; with num_splits
  outs=empty(3, 2, 5, 4, 33)[..., :32] -> multiple of 4
  outs=outs.clone().requires_grad_() -> requires a gradient

combine-varlen:
  num_splits=num_splits.long() -> num_splits is not int32
  cu_seqlens=cu_seqlens[:2] -> cu_seqlens has shape (2); it must be (batch + 1 = 3)
  cu_seqlens=cu_seqlens.float() -> cu_seqlens is not int32

quantize:
  x=x[0] -> x has 3 dimensions; it must have 4
  x=x.float() -> dtype = "float32" must be "fp16" or "bf16"
  x=cat((x, x), 3)[..., :72] -> head_dim = 72 must be a whole number from 16 to 256 in steps
  x=cat([x] * 5, 3)[..., :272] -> head_dim = 272 must be
  scales="row" -> scales = "row" must be "head" or "tensor" or "block"
  scale_rows=48 -> scale_rows = 48 must be 32 or 64 or 128
  layout="vcols" -> layout = "vcols" must be "columns" or "r
  x=cat((x, x), 3)[..., ::2] -> x has stride 2 in dimension 3, which must be 1
  descale=0.1 -> descales of blocks are found, they cannot be
  scales="head", descale=ones(2, 1)
    -> descale has shape (2, 1); it must be (batch = 2, heads = 4)
  scales="tensor", descale=0.0 -> descale is 0; it must be fin
  scales="tensor", descale=inf -> descale is inf
  x=x.clone().requires_grad_() -> requires a gradient
  rotary=(ones(39, 32).half(), ones(39, 32).half())
    -> cos has shape (2, 39, 32); it must be (batch = 2, seqlen =
  rotary=(ones(70, 64).half()[:, ::2], ones(70, 64).half()[:, ::2])
    -> cos has stride 2 in dimension 2

quantize raises DeviceError:
  x=x.to("meta") -> tensors are on meta; a kernel runs on a Hopper GPU

prepare:
  dtype=float32 -> q is float32; use fp16 or bf16: q.to(torch.bfloat16)
  dtype="half" -> dtype is 'half'; it must be one of fp16, float16, bf16
  v_layout="rows" -> scale_rows and out_dtype go with e4m3 tensors, which fagen.quantize makes
  dtype="e4m3", v_layout="cols" -> v_layout is 'cols'; it must be one of 'columns', 'rows'
  seqlen=-1 -> seqlen is -1; it must be 0 or more
  head_dim_v=0 -> v has head_dim 0
  device="nowhere" -> device is 'nowhere', which torch does not know here
  deterministic=True -> deterministic goes with gradient=True: the forward

prepare raises TypeError:
  rows="many" -> prepare: rows is of type str; it must be a whole number or None
  causal="full" -> causal is of type str; it must be True or False
  deterministic="yes" -> deterministic is of type str; it must be True or False
  progress=1 -> progress is of type int; it must be a function or None

prepare_varlen:
  head_dim_v=0 -> v has head_dim 0
  head_dim=20 -> head_dim 20
  out_dtype="bf16" -> dtype is float16
  deterministic=True -> deterministic goes with gradient=True: the forward

prepare_decode:
  kv_heads=0 -> must be a multiple of k's 0
  queries=-1 -> queries is -1; it must be a whole number from 1 on
  dtype="fp64" -> dtype is 'fp64'
  dtype="e4m3" -> q is float8_e4m3fn; use fp16 or bf16
  head_dim=20 -> head_dim 20
  kv_heads=3 -> q has 8 heads, which must be a multiple of k's 3
  batch=0 -> batch is 0; it must be a whole number from 1 on

prepare_decode raises TypeError:
  heads="8" -> prepare_decode: heads is of type str

prepare_decode raises ScheduleError:
  schedule="fwd_fp16_d64_full_m64n64" -> fwd_fp16_d64_full_m64n64 is not what the call asks

flash_attn_func raises NotImplementedError:
  qv=ones(2, 70, 4, 64) -> flash_attn_func: qv is not there yet in fagen; None is none
  window_size=tensor((1, 0)).to("meta") -> window_size as a tensor is not there yet

flash_attn_func:
  softcap=nan -> softcap is nan; it must be finite, and 0.0 is none
  window_size=(1, 2, 3) -> window_size is (1, 2, 3); it must be (left, right), where -1 is no bound

flash_attn_func-e4m3:
  q=ones(40, 6, 64).to(E4M3) -> q has 3 dimensions; it must have 4: (bat
  q_descale=ones(2, 6) -> q_descale has shape (2, 6); it must be (batch = 2, kv_h
  k_descale=ones(()) -> k_descale has shape (); it must be (batch = 2, kv_h
  v_descale=ones(2, 3, 64) -> v_descale has shape (2, 3, 64); it must be
  k_descale=ones(2, 3).half() -> k_descale is not float32, which this k
  q=normal(2, 40, 4, 64).to(E4M3) -> heads = 4 must be a multiple of kv_heads
  q=normal(2, 40, 6, 64) -> q is float32; use fp16 or bf16: q.to(torch.bfloat
  softmax_scale=-1.0 -> softmax_scale is -1; it must be finite and above 0
  num_splits=257 -> num_splits is 257; it must be 256 at most
  sm_margin=132 -> sm_margin is 132; it must be 0 … 131
  sm_margin=-1 -> sm_margin is -1; it must be 0 … 131

flash_attn_varlen_func raises NotImplementedError:
  qv=ones(119, 4, 64) -> flash_attn_varlen_func: qv is not there yet in fagen; None is none

flash_attn_varlen_func:
  k=normal(2, 5, 2, 64).half(), v=normal(2, 5, 2, 64).half(), cu_seqlens_k=None
    -> k has shape (2, 5, 2, 64); without cu_seqlens_k it m
  q=tensor(1.0) -> q has 0 dimensions

flash_attn_varlen_func-e4m3:
  k_descale=ones(2, 2) -> k_descale has shape (2, 2); it must be (batch
  q_descale=ones(6, 4) -> q_descale has shape (6, 4); it must be (batch
  q=ones(2, 119, 4, 64).to(E4M3) -> q has 4 dimensions; it must have 3

flash_attn_varlen_func-window:
  window_size=tensor((1,)) -> window_size is [1]; it must be

flash_attn_varlen_func-window raises TypeError:
  window_size=tensor((1.5, 2.0)) -> window_size is of type Tensor; it must be a sequence of

flash_attn_qkvpacked_func:
  num_heads_q=None -> qkv has shape (2, 5, 4, 64); it must be (batch, seqlen, 3, heads, head_dim)
  qkv=normal(2, 30, 2, 4, 64), num_heads_q=None
    -> qkv has shape (2, 30, 2, 4, 64); it must be (batch, seqlen, 3, heads, head_dim)
  num_heads_q=1 -> num_heads_q + 2 · kv_heads
  num_heads_q=6 -> num_heads_q + 2 · kv_heads

flash_attn_with_kvcache raises NotImplementedError:
  block_table=ints(0, 1, 2)[:, None], q=q.flatten(0, 1), cu_seqlens_q=ints(0, 3, 6, 9)
    -> cu_seqlens_q beside block_table is not there yet
  k=k_cache -> flash_attn_with_kvcache: k is not there yet in fagen; write it to k_cache first
  v=v_cache -> flash_attn_with_kvcache: v is not there yet in fagen; write it to v_cache first
  rotary_cos=q -> rotary_cos is not there yet in fagen; turn q before
  rotary_sin=q -> rotary_sin is not there yet
  cache_batch_idx=ints(0, 1, 2) -> cache_batch_idx is not there yet
  qv=q -> flash_attn_with_kvcache: qv is not there yet in fagen; None is none
  k_cache=k_cache.to(E4M3)
    -> e4m3, with q_descale, k_descale and v_descale, is not there yet
  q=q.flatten(0, 1), cu_seqlens_q=ints(0, 3, 6, 9), k_cache=turned(stack((k_cache,) * 2), 1, 2)[0]
    -> cu_seqlens_q over caches of shape (3, 90, 2, 64)

flash_attn_with_kvcache:
  q=q[0] -> q has 3 dimensions
  cu_seqlens_q=ints(0, 3, 6, 9) -> q has 4 dimensions; with cu_seqlens_q it must have
  k_cache=k_cache[0] -> k_cache has 3 dimensions
  v_cache=v_cache[:2] -> v has shape (2, 90, 2, 64)
  cache_seqlens=tensor([1, 2, 3]) -> cache_seqlens has shape (3) in torch.int64
  cache_seqlens=ints(1, 2) -> cache_seqlens has shape (2) in torch.int32; it must be (
  cache_leftpad=ints(1) -> cache_leftpad has shape (1)
  k_cache=turned(k_cache, 1, 3) -> k has stride 180 in dimension 3
  softmax_scale=0.0 -> softmax_scale is 0; it must be
  q=q.float() -> q is float32; use fp16 or bf16
  cache_seqlens=33, v_cache=v_cache[:, :50]
    -> v_cache has shape (3, 50, 2, 64); it must be (batch = 3, seqlen = 90, kv_heads, head_dim)
  page_table=ints(0) -> page_table has shape (1) in torch.int32; it must be (batch, entries)
  page_table=ints(0)[None].long() -> page_table has shape (1, 1) in torch.int64
  page_table=ints(0)[None], block_table=ints(0)[None] -> are two names of one table
  page_table=ints(0)[None], cache_seqlens=None -> cache_seqlens is missing; with page_table
  block_table=ints(0)[None] -> cache_seqlens has shape (3) in torch.int32; it must be (batch = 1)
  cache_seqlens=2**31 -> cache_seqlens is 2147483648, which is no int32
  cache_seqlens=ints(1, 2, 3).to("meta") -> cache_seqlens is not on the device of k_cache

flash_attn_combine:
  out=zeros(3, 5, 4, 32) -> it must be (3, 5, 4, 64) in torch.float32
  out=zeros(3, 5, 4, 64), out_dtype=half -> it must be (3, 5, 4, 64) in torch.float16
  out=zeros(()).expand(3, 5, 4, 64) -> several of its elements are one in memory
  out=zeros(3, 5, 1, 64).expand(3, 5, 4, 64) -> several of its elements are one in memory
  out=zeros(3, 5, 4, 64, requires_grad=True) -> out requires a gradient

_flash_attn_forward:
  page_table=q -> cache_seqlens is missing; with page_table it must be given
  out_=q[:1].clone() -> out_ has shape (1, 5, 4, 64)

_flash_attn_forward raises NotImplementedError:
  k_new=q -> k is not there yet in fagen
  kv_batch_idx=q -> cache_batch_idx is not there yet in fagen
  rotary_cos=q -> rotary_cos is not there yet in fagen
  seqused_q=ints(1, 2), leftpad_k=ints(0, 1) -> seqused_q over a cache is not there yet

_flash_attn_backward raises NotImplementedError:
  q=q.to(E4M3) -> _flash_attn_backward: e4m3 is not there yet

_flash_attn_backward:
  dk=q[:1] -> dk has shape (1, 5, 4, 64)
  dv=q.bfloat16() -> dv has shape (2, 5, 4, 64) in torch.bfloat16
  dout=q[:1] -> dout has shape (1, 5, 4, 64); it must be out's
  softmax_scale=nan -> softmax_scale is nan
"""


@pytest.mark.parametrize(("name", "change", "error", "words"), wrong.cases(WRONG))
def test_a_wrong_argument_is_named(name, change, error, words):
    call, good = GOOD[name]
    with pytest.raises(error) as refusal:
        call(**wrong.changed(change, good))
    assert words in str(refusal.value)
    assert refusal.type is error
