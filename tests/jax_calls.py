"""What a vendored package for JAX computes, and its gradients, compared with fp64.

    python jax_calls.py calls|gradients

is run by a Python that has JAX and the package `demo` of the kernels in test_vendor_jax.py, without
fagen: on a Hopper GPU over these kernels, on a CPU over loops that stand for them.
"""

import sys
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}
KEY_ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
E4M3 = jnp.float8_e4m3fn
FORWARD, BACKWARD = "fwd_fp16_d128_causal_m128n128", "bwd_fp16_d128_causal_m64n128"
SCALE = 0.2  # of gradients
X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # of older JAX

randomness = np.random.default_rng(17)


def normal(dtype, *shape):
    return jnp.asarray(randomness.normal(size=shape), dtype)


def qkv(dtype="float16", head_dim=128, batch=2, queries=77, keys=130, heads=4):
    """q of so many heads, k and v of 2."""
    shapes = (queries, heads), (keys, 2), (keys, 2)
    return tuple(normal(dtype, batch, *shape, head_dim) for shape in shapes)


def total(call):
    """A call's only result, or its first, as one number, which has a gradient."""

    def added(*given):
        found = call(*given)
        return (found[0] if isinstance(found, tuple) else found).astype(jnp.float32).sum()

    return added


def positive(*shape):
    return jnp.asarray(randomness.uniform(0.5, 1.5, shape), jnp.float32)


def exact(array):
    return np.asarray(array).astype(np.float64)


def compare(found, right, allowed):
    off = np.abs(exact(found) - right) / allowed
    assert found.shape == right.shape and np.all(off <= 1), off.max()


def formula(q, k, v, scale=SCALE, causal=True):
    """out and its log-sum-exp."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        rows, keys = jnp.indices(scores.shape[2:])
        seen = keys <= rows + scores.shape[3] - scores.shape[2]
        scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), v), lse


def reference(q, k, v, scale, causal=False):
    """out, its log-sum-exp, and what its terms add up to without their signs, in fp64."""
    with X64(True):
        q, k, v = (jnp.asarray(exact(x), jnp.float64) for x in (q, k, v))
        out, lse = formula(q, k, v, scale, causal)
        size, _ = formula(q, k, jnp.abs(v), scale, causal)
        return exact(out), exact(lse), exact(size)


def bound(dtype, out, right, size):
    return 2 * ROUNDING[dtype] * size + 2 * ROUNDING[out.dtype.name] * np.abs(right) + 1e-6


def sixteen_bits(demo):
    for dtype, head_dim, causal in (("float16", 128, True), ("bfloat16", 64, False)):
        q, k, v = qkv(dtype, head_dim)
        attention = jax.jit(
            partial(demo.attention, causal=causal), static_argnames=("return_lse", "scale")
        )
        for scale in (None, 0.2):
            right, lse, size = reference(*map(exact, (q, k, v)), scale or head_dim**-0.5, causal)
            out, found = attention(q, k, v, return_lse=True, scale=scale)
            compare(out, right, bound(dtype, out, right, size))
            compare(found, lse, 1e-3)
            alone = attention(q, k, v, scale=scale)
            assert alone.dtype == q.dtype and jnp.array_equal(alone, out)
        assert jnp.array_equal(demo.attention(q, k, v, causal=causal, scale=0.2), out)
        mapped = jax.jit(jax.vmap(lambda q, c=causal, k=k, v=v: demo.attention(q, k, v, causal=c)))
        several = jnp.stack([q, -q, q * 0.5])
        for one, found in zip(several, mapped(several), strict=True):
            assert jnp.array_equal(found, demo.attention(one, k, v, causal=causal))
        later = jax.vmap(lambda q, k, v: demo.attention(q, k, v, causal=True), in_axes=(1, 1, 1))
        if causal:
            stacked = (jnp.stack([x, x], 1) for x in (q, k, v))
            assert jnp.array_equal(later(*stacked)[1], demo.attention(q, k, v, causal=True))


def chains(demo):
    """Calls in a row, which XLA records into a CUDA graph: each has a workspace of its own."""
    k, v = (normal("float16", 1, 100, 2, 128) for _ in range(2))

    def chain(q):
        for _ in range(8):
            q = demo.attention(q, k, v, causal=True)
        return q

    compiled = jax.jit(chain)
    for _ in range(3):
        q = normal("float16", 1, 100, 4, 128)
        assert jnp.array_equal(compiled(q), chain(q))


def columns(v):
    """V as (B, Hk, Dv, Sk to 16), the keys of each 16 in KEY_ORDER."""
    batch, keys, heads, width = v.shape
    padded = np.zeros((batch, heads, width, -(-keys // 16) * 16), v.dtype)
    padded[..., :keys] = np.asarray(v).transpose(0, 2, 3, 1)
    groups = padded.reshape(batch, heads, width, -1, 16)[..., KEY_ORDER]
    return jnp.asarray(groups.reshape(padded.shape))


def blocks(descale, rows, seqlen):
    """Descales of blocks of rows, for each row: (B, S, H, 1)."""
    return exact(descale).repeat(rows, 2)[:, :, :seqlen].transpose(0, 2, 1)[..., None]


def e4m3(demo):
    q, k, v = qkv(E4M3, 64)
    attention = partial(demo.attention, q, k, columns(v), v_layout="columns", return_lse=True)
    none = {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
    some = {"q_descale": positive(2, 4), "k_descale": positive(1, 1, 1)}
    some |= {"v_descale": positive(2, 2, 64), "v_mean": positive(1, 2, 64)}
    some |= {"k_mean": positive(2, 1, 64)}
    for given in (none, some):
        out, lse = attention(**given)
        factor = {name: exact(array) for name, array in given.items()}
        means = {
            name: np.broadcast_to(factor.get(name, 0.0), (2, 2, 64))[:, None]
            for name in ("k_mean", "v_mean")
        }
        by_head = np.broadcast_to(factor["q_descale"], (2, 4))[:, None, :, None]
        by_column = np.broadcast_to(factor["v_descale"], (2, 2, 64))[:, None]
        real_k = exact(k) * factor["k_descale"].item() + means["k_mean"]
        right, sums, size = reference(exact(q) * by_head, real_k, exact(v) * by_column, 64**-0.5)
        right += means["v_mean"].repeat(2, 2)
        compare(out, right, bound("float8_e4m3fn", out, right, size))
        compare(lse, sums, 1e-2)
    q, k, v = qkv(E4M3)
    given = {"q_descale": positive(2, 4, 2), "k_descale": positive(2, 2, 3)}
    per_v = positive(2, 2, 128)
    out = jax.jit(demo.attention)(q, k, v, v_descale=per_v, **given)
    scaled = zip((q, k), given.values(), strict=True)
    real = [exact(x) * blocks(d, 64, x.shape[1]) for x, d in scaled]
    real.append(exact(v) * exact(per_v)[:, None])
    right, _, size = reference(*real, 128**-0.5)
    compare(out, right, bound("float8_e4m3fn", out, right, size))


def quantised(values, descale, right):
    """Whether numbers times their descales are these, within e4m3's rounding."""
    allowed = 1.02 * 2.0**-4 * np.abs(right) + exact(descale) / 256 + 1e-3 * np.abs(right).max()
    compare(values, right / exact(descale), allowed / exact(descale))


def quantisers(demo):
    quantise = jax.jit(demo.kernels.quant_fp16_d128_rot_shead, static_argnums=1)
    x, y = normal("float16", 2, 70, 3, 128), normal("float16", 2, 70, 3, 128)
    (a, d), (b, e) = quantise(x, 5), quantise(y, 5)  # the same rotation leaves products as they are
    products = np.einsum(
        "bshd,bshd,bh,bh->bsh", exact(a), exact(b), exact(d), exact(e), optimize=True
    )
    right = (exact(x) * exact(y)).sum(-1)
    assert np.abs(products - right).max() < 6 and np.std(products - right) < 1
    assert np.any(exact(quantise(x, 6)[0]) != exact(a))
    given = positive(2, 3)
    values, same = jax.jit(demo.kernels.quant_fp16_d128_rot_shead)(x, descale=given)
    assert jnp.array_equal(same, given)
    squares = np.square(exact(values) * exact(given)[:, None, :, None]).sum(-1)
    assert np.allclose(squares, np.square(exact(x)).sum(-1), rtol=0.1)

    quantise = jax.jit(demo.kernels.quant_fp16_d128_center_scol_vcols)
    values, descale, mean = quantise(x)
    compare(mean, exact(x).mean(1), 1e-4)
    places = np.argsort(KEY_ORDER)
    for given in (False, True):
        if given:
            descale, mean = positive(2, 3, 128), positive(2, 3, 128)
            values, same, other = quantise(x, descale=descale, mean=mean)
            assert jnp.array_equal(same, descale) and jnp.array_equal(other, mean)
        rows = exact(values).reshape(2, 3, 128, 5, 16)[..., places].reshape(2, 3, 128, 80)
        right = exact(x) - exact(mean)[:, None]
        quantised(rows[..., :70].transpose(0, 3, 1, 2), exact(descale)[:, None], right)

    x = normal("bfloat16", 2, 70, 3, 64)
    angles = randomness.uniform(0, 6, (2, 70, 32))
    cos, sin = (jnp.asarray(f(angles), "bfloat16") for f in (np.cos, np.sin))
    values, descale = demo.kernels.quant_bf16_d64_halves_shead(x, cos=cos, sin=sin)
    one, other, c, s = (
        *(exact(half) for half in jnp.split(x, 2, -1)),
        *(exact(f)[:, :, None] for f in (cos, sin)),
    )
    right = np.concatenate([one * c - other * s, other * c + one * s], -1)
    quantised(values, exact(descale)[:, None, :, None], right)


def combined(outs, lses):
    """(splits, …, Dv) and (splits, …) to their sums."""
    most = lses.max(0)
    weights = np.exp(lses - most)
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], most + np.log(
        weights.sum(0)
    )


def combiners(demo):
    outs, lses = normal("float16", 3, 2, 50, 4, 64), normal("float32", 3, 2, 4, 50)
    out, lse = jax.jit(demo.kernels.comb_fp16_d64)(outs, lses)
    right, sums = combined(exact(outs), exact(lses).transpose(0, 1, 3, 2))
    compare(out, right, 2e-3 * np.abs(right) + 1e-3)
    compare(lse, sums.transpose(0, 2, 1), 1e-4)
    outs, lses = normal("float32", 3, 50, 4, 128), normal("float32", 3, 4, 50)
    splits, starts = jnp.array([3, 2], jnp.int32), jnp.array([0, 20, 50], jnp.int32)
    out, lse = jax.jit(demo.kernels.comb_fp32_d128_obf16_varlen)(outs, lses, splits, starts)
    for n, begin, end in ((3, 0, 20), (2, 20, 50)):
        right, sums = combined(exact(outs[:n, begin:end]), exact(lses[:n, :, begin:end].mT))
        compare(out[begin:end], right, 2e-2 * np.abs(right) + 1e-3)
        compare(lse[:, begin:end], sums.T, 1e-4)


def devices(demo):
    """Each device computes its own batches."""
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    of_batch = jax.sharding.PartitionSpec("x")
    q, k, v = (normal("float16", 2 * mesh.size, 33, 2, 128) for _ in range(3))
    attention = partial(demo.attention, causal=True)
    right = attention(q, k, v)
    apart = jax.device_put((q, k, v), jax.sharding.NamedSharding(mesh, of_batch))
    assert jnp.array_equal(jax.jit(attention)(*apart), right)  # brought together first
    if hasattr(jax, "shard_map"):  # of newer JAX
        specs = {"in_specs": (of_batch,) * 3, "out_specs": of_batch}
        assert jnp.array_equal(jax.jit(jax.shard_map(attention, mesh=mesh, **specs))(*apart), right)


def decoding(demo):
    """A few queries of each sequence over its part of a cache, whose lengths are traced."""
    decode = jax.jit(demo.attention_decode, static_argnames=("causal", "scale", "return_lse"))
    for batch, queries, heads in ((1, 1, 4), (3, 3, 4), (2, 5, 8)):
        q, k, v = qkv("float16", 64, batch, queries, 300, heads)
        ends = jnp.array([300, 170, 90][:batch], jnp.int32)
        begins = jnp.array([0, 40, 3][:batch], jnp.int32)
        out, lse = decode(q, k, v, seqused_k=ends, leftpad_k=begins, return_lse=True)
        for b, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            own = (exact(q[b : b + 1]), *(exact(x[b : b + 1, begin:end]) for x in (k, v)))
            right, sums, size = reference(*own, 64**-0.5, causal=True)
            compare(out[b : b + 1], right, bound("float16", out, right, size))
            compare(lse[b : b + 1], sums, 1e-3)
        right, _, size = reference(*map(exact, (q, k, v)), 0.2, causal=True)
        compare(decode(q, k, v, scale=0.2), right, bound("float16", out, right, size))
    same = decode(q[:, :1], k, v, causal=False)  # of one query
    assert jnp.array_equal(same, decode(q[:, :1], k, v))
    said = "no kernel of this package decodes dtype float16, head_dim 64, head_dim_v 64, mask full"
    refused(lambda: decode(q, k, v, causal=False), ValueError, f"{said} with 5 queries")
    refused(lambda: decode(q[:, :, :3], k, v), ValueError, "must be a multiple of kv_heads")
    refused(lambda: decode(q[0], k, v), ValueError, "it must be (batch, seqlen, heads, head_dim)")
    differentiated = jax.grad(total(decode))
    refused(lambda: differentiated(q, k, v), NotImplementedError, "decoding has none")


def packed(demo):
    """Sequences of lengths of their own, whose offsets are traced."""
    lengths = [(5, 5), (0, 7), (40, 60), (3, 0), (1, 130)]
    at_q, at_k = (np.cumsum([0, *(one[i] for one in lengths)]) for i in (0, 1))
    offsets = jnp.asarray(at_q, jnp.int32), jnp.asarray(at_k, jnp.int32)
    words = ("causal", "scale", "return_lse", "out_dtype")
    attention = jax.jit(demo.attention_varlen, static_argnames=words)
    for dtype, causal in (("float16", True), ("bfloat16", False)):
        q = normal(dtype, at_q[-1], 4, 64)
        k, v = (normal(dtype, at_k[-1], 2, 64) for _ in range(2))
        called = partial(attention, q, k, v, *offsets, causal=causal)
        for used in (None, jnp.asarray([5, 7, 33, 0, 64], jnp.int32)):
            out, lse = called(seqused_k=used, return_lse=True)
            assert jnp.array_equal(called(seqused_k=used), out)
            for b, keys in enumerate(used if used is not None else [one[1] for one in lengths]):
                rows, own = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b] + int(keys))
                if lengths[b][0] == 0 or int(keys) == 0:
                    continue
                given = exact(q[None, rows]), *(exact(x[None, own]) for x in (k, v))
                right, sums, size = reference(*given, 64**-0.5, causal)
                seen = np.isfinite(sums[0]).all(0)
                near = bound(dtype, out[None, rows], right, size)
                compare(out[rows][seen], right[0][seen], near[0][seen])
                compare(lse[:, rows][:, seen], sums[0][:, seen], 1e-3)
    q8 = normal(E4M3, at_q[-1], 4, 64)
    k8, v8 = (normal(E4M3, at_k[-1], 2, 64) for _ in range(2))
    per_head, per_v = positive(5, 2), positive(1, 2, 64)
    out = attention(q8, k8, v8, *offsets, causal=True, k_descale=per_head, v_descale=per_v)
    half = attention(q8, k8, v8, *offsets, causal=True, q_descale=2.0, scale=0.1)
    assert out.dtype == half.dtype == jnp.bfloat16
    for b in (0, 2, 4):
        rows, own = slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1])
        real = [exact(q8[None, rows]), exact(k8[None, own]) * exact(per_head)[b][:, None]]
        right, _, size = reference(*real, exact(v8[None, own]) * exact(per_v), 64**-0.5, True)
        compare(out[None, rows], right, bound("float8_e4m3fn", out, right, size))
        plain = (exact(x[None, own]) for x in (k8, v8))
        right, _, size = reference(exact(q8[None, rows]), *plain, 0.2, True)
        compare(half[None, rows], right, bound("float8_e4m3fn", half, right, size))
    said = (
        "no kernel of this package serves varlen sequences of dtype float16, head_dim 64, head_di"
    )
    q = normal("float16", 9, 4, 64)
    refused(lambda: attention(q, q, q, *offsets), ValueError, said)
    refused(lambda: attention(q, q, q, q), ValueError, "it must be (batch + 1)")
    refused(lambda: attention(q[None], q, q, *offsets), ValueError, "must be (total, heads, head_")
    call = partial(attention, q, q, q, offsets[0], causal=True)
    refused(lambda: call(v_descale=1.0), ValueError, "v_descale go with arrays in float8_e4m3fn")
    refused(lambda: attention(q8, k8, v8, *offsets, causal=True, out_dtype="float16"), ValueError,
            "out_dtype float16; there are kernels for")  # fmt: skip
    refused(lambda: attention(q8, k8, v8, *offsets, causal=True, q_descale=jnp.ones((5, 4, 9))),
            ValueError, "q_descale has shape (5, 4, 9)")  # fmt: skip


def refusals(demo):
    q = normal("bfloat16", 1, 8, 2, 64)
    loss = total(lambda q: demo.attention(q, q, q))
    said = "no kernel of this package computes its gradients; fagen vendor adds bwd_bf16_d64_full_"
    for transformed in (jax.grad(loss), lambda q: jax.jvp(loss, (q,), (q,)), jax.hessian(loss)):
        refused(lambda f=transformed: f(q), NotImplementedError, said)
    assert not jnp.any(jax.grad(lambda q: loss(jax.lax.stop_gradient(q)) + q.sum() * 0)(q))
    x = normal("float16", 1, 8, 2, 128)

    def quantised(x):
        return demo.kernels.quant_fp16_d128_rot_shead(x)[1].sum()

    refused(lambda: jax.grad(quantised)(x), NotImplementedError, "rounding to e4m3 has none")
    q = normal("float16", 1, 8, 2, 128)
    call = partial(demo.attention, q, q, q, causal=True)
    refused(lambda: call(scale="1.0"), ValueError, "scale is '1.0'; it must be a number")
    refused(lambda: call(scale=10**400), ValueError, "scale is no number: int")
    refused(lambda: call(causal="False"), TypeError, "causal is 'False'; it must be True or False")
    refused(lambda: call(return_lse=0.0), TypeError, "return_lse is 0.0; it must be True or False")
    refused(lambda: call(scale=-1.0), ValueError, "scale is -1.0; it must be finite and above 0")
    wide = normal("float16", 1, 8, 2, 96)
    refused(
        lambda: demo.attention(wide, wide, wide), ValueError, "there are kernels for float16, head"
    )
    out, lse = demo.attention(q[:0], q[:0], q[:0], causal=True, return_lse=True)
    assert out.shape == (0, 8, 2, 128) and lse.shape == (0, 2, 8)
    values, descale = demo.kernels.quant_fp16_d128_rot_shead(q[:, :0])
    assert values.shape == (1, 0, 2, 128) and descale.shape == (1, 2) and jnp.all(descale > 0)
    out, lse = demo.attention(q, q[:, :0], q[:, :0], causal=True, return_lse=True)
    if jax.default_backend() == "gpu":  # what a kernel makes of no key
        assert not jnp.any(out) and jnp.all(lse == -jnp.inf)


# ---- gradients: of the kernels in fp16, not of those in bf16 ------------------------------------


def right(given, dout, dlse):
    """The formula's gradients, in fp64."""
    with X64(True):
        q, k, v, *outs = (jnp.asarray(exact(x), jnp.float64) for x in (*given, dout, dlse))
        return [np.asarray(x) for x in jax.vjp(formula, q, k, v)[1](tuple(outs))]


def near(found, fine):
    assert len(found) == len(fine) == 3
    for one, other in zip(found, fine, strict=True):
        assert one.dtype == jnp.float16 and one.shape == other.shape
        off = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
        assert off <= 8 * 2.0**-11 * (1 + np.abs(np.asarray(other)).max()), off


def cotangents(batch=2, queries=77):
    dlse = jnp.asarray(randomness.normal(size=(batch, 4, queries)), jnp.float32)
    return normal("float16", batch, queries, 4, 128), dlse


def attention(demo, *given, **more):
    return demo.attention(*given, causal=True, scale=SCALE, **more)


def both_results(demo):
    """Through out and the log-sum-exp, of attention and of the kernel itself."""
    kernel = getattr(demo.kernels, FORWARD)
    for call in (
        partial(attention, demo, return_lse=True),
        lambda q, k, v: kernel(q, k, v, SCALE),
    ):
        for sizes in ((2, 77, 130), (1, 1, 1), (2, 64, 64)):
            given, out = qkv("float16", 128, *sizes), cotangents(*sizes[:2])
            back = jax.jit(lambda given, out, call=call: jax.vjp(call, *given)[1](out))
            near(back(given, out), right(given, *out))
    near(jax.vjp(call, *given)[1](out), right(given, *out))  # not compiled


def one_result(demo):
    """Through out alone, and through the log-sum-exp alone."""
    given, (dout, dlse) = qkv(), cotangents()
    _, back = jax.vjp(partial(attention, demo), *given)
    near(back(dout), right(given, dout, dlse * 0))
    alone = jax.grad(
        lambda *given: (attention(demo, *given, return_lse=True)[1] * dlse).sum(), (0, 1, 2)
    )
    near(alone(*given), right(given, dout * 0, dlse))
    # of one array alone
    _, dk, _ = right(given, dout, dlse * 0)
    q, k, v = given
    found = jax.grad(lambda k: jnp.vdot(attention(demo, q, k, v), dout).astype(jnp.float32))(k)
    near([found] * 3, [dk] * 3)


def the_kernel_of_gradients(demo):
    given, (dout, dlse) = qkv(), cotangents()
    out, lse = attention(demo, *given, return_lse=True)
    by = getattr(demo.kernels, BACKWARD)
    near(
        jax.jit(by, static_argnums=6)(dout, *given, out, lse, SCALE, dlse), right(given, dout, dlse)
    )
    near(by(dout, *given, out, lse, SCALE), right(given, dout, dlse * 0))


def gradients_transformed(demo):
    """Under vmap, remat and a scan."""
    given, (dout, dlse) = qkv(), cotangents()

    def loss(q, k, v):
        out, lse = attention(demo, q, k, v, return_lse=True)
        return (out.astype(jnp.float32) * dout).sum() + (lse * dlse).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    fine = right(given, dout, dlse)
    near(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*given), fine)
    several = [jnp.stack([x, -x]) for x in given[:1]]
    mapped = jax.jit(jax.vmap(lambda q: gradient(q, *given[1:])))(*several)
    for place, q in enumerate(several[0]):
        near([x[place] for x in mapped], right((q, *given[1:]), dout, dlse))

    def step(q, _):
        return q - gradient(q, *given[1:])[0] * jnp.float16(0), None

    found, _ = jax.lax.scan(step, given[0], length=2)
    assert jnp.array_equal(found, given[0])


def gradients_of_devices(demo):
    """Each device has its own batches, and the same keys: their gradients are added up."""
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    of_batch, same = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    q, k, v = qkv(batch=2 * mesh.size)
    k, v = k[:1], v[:1]
    dout, _ = cotangents(2 * mesh.size)

    def gradient(q, k, v, dout):
        def loss(q, k, v):
            wide = (jnp.broadcast_to(x, (len(q), *x.shape[1:])) for x in (k, v))
            out = attention(demo, q, *wide)
            return (out.astype(jnp.float32) * dout).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    fine = right((q, *(jnp.repeat(x, len(q), 0) for x in (k, v))), dout, jnp.zeros((len(q), 4, 77)))
    fine = [fine[0], *(x.sum(0, keepdims=True) for x in fine[1:])]
    near(jax.jit(gradient)(q, k, v, dout), fine)
    if hasattr(jax, "shard_map"):  # of newer JAX
        specs = {"in_specs": (of_batch, same, same, of_batch), "out_specs": (of_batch, same, same)}
        near(jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(q, k, v, dout), fine)

        def itself(q, k, v, dout):  # nothing stands between the arrays and the call
            def loss(q, k, v):
                return (attention(demo, q, k, v).astype(jnp.float32) * dout).sum()

            return jax.grad(loss, (0, 1, 2))(q, k, v)

        keys = [jnp.repeat(x, 2, 0) for x in (k, v)]
        found = jax.jit(jax.shard_map(itself, mesh=mesh, **specs))(q, *keys, dout)
        every = [jnp.tile(x, (mesh.size, 1, 1, 1)) for x in keys]
        fine = right((q, *every), dout, jnp.zeros((len(q), 4, 77)))
        summed = [x.reshape(mesh.size, 2, *x.shape[1:]).sum(0) for x in fine[1:]]
        near(found, [fine[0], *summed])


def gradients_traced(demo):
    """Shapes alone; and which targets are called, with no log-sum-exp where none is needed."""
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]
    loss = total(partial(attention, demo))
    found = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *given)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in given]
    for call, targets in ((loss, [FORWARD]), (jax.grad(loss), [FORWARD, BACKWARD])):
        text = str(jax.make_jaxpr(call)(*given))
        assert [f"xla_demo_{slug}" in text for slug in (FORWARD, BACKWARD)] == [
            slug in targets for slug in (FORWARD, BACKWARD)
        ]
        assert ("f32[2,4,77]" in text) == (len(targets) == 2), text
    empty = [x[:0] for x in qkv()]
    found = jax.grad(loss, (0, 1, 2))(*empty)
    assert [x.shape for x in found] == [x.shape for x in empty]
    for sizes in ((2, 5, 0), (2, 0, 5)):
        given = qkv("float16", 128, *sizes)
        assert not any(x.any() for x in jax.grad(loss, (0, 1, 2))(*given))


def gradients_of_packed(demo):
    """Of varlen sequences, whose offsets are whole numbers and have none."""
    lengths = (5, 0, 70, 33)
    at = np.cumsum([0, *lengths])
    q, k, v = (normal("float16", at[-1], heads, 64) for heads in (4, 2, 2))
    dout, dlse = normal("float16", at[-1], 4, 64), randomness.normal(size=(4, at[-1]))
    dlse = jnp.asarray(dlse, jnp.float32)
    offsets = jnp.asarray(at, jnp.int32)

    def results(q, k, v, offsets):
        return demo.attention_varlen(q, k, v, offsets, causal=True, scale=SCALE, return_lse=True)

    def gradients(q, k, v, offsets):
        back = jax.vjp(lambda *given: results(*given, offsets), q, k, v)[1]
        return back((dout, dlse))

    def loss(q, offsets):  # all that it is called with is traced for its gradient
        return jnp.vdot(results(q, k, v, offsets)[0], dout).astype(jnp.float32)

    fine = [np.zeros(x.shape) for x in (q, k, v)]
    for begin, end in pairwise(at):
        if end > begin:
            own = [x[None, begin:end] for x in (q, k, v)]
            made = right(own, dout[None, begin:end], dlse[None, :, begin:end])
            for whole, part in zip(fine, made, strict=True):
                whole[begin:end] = part[0]
    for call in (gradients, jax.jit(gradients)):
        near(call(q, k, v, offsets), fine)
    assert jax.jit(jax.grad(loss))(q, offsets).shape == q.shape
    other = jax.grad(total(lambda q: demo.attention_varlen(q, q, q, offsets)))
    said = "fagen vendor adds bwd_bf16_d64_full_"
    refused(lambda: other(q.astype(jnp.bfloat16)[:, :2]), NotImplementedError, said)


def masked(q, k, v, sees, cap=None, sinks=None):
    """out and its log-sum-exp where a row sees a key by places, of capped scores beside sinks."""
    q, k, v = (exact(x) for x in (q, k, v))
    k, v = (x.repeat(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    batch, _, rows, keys = scores.shape
    b, i, j = np.ogrid[:batch, :rows, :keys]
    p = np.exp(scores) * np.broadcast_to(sees(b, i + keys - rows, j), (batch, rows, keys))[:, None]
    total = p.sum(-1) + (0 if sinks is None else np.exp(exact(sinks))[:, None])
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.einsum("bhqk,bkhd->bqhd", np.nan_to_num(p / total[..., None]), v)
        return out, np.log(total)


def variants(demo):
    q, k, v = qkv(head_dim=64, queries=40, keys=60)
    sinks = normal("bfloat16", 4)
    lengths = jnp.asarray([5, 30], jnp.int32)

    def window(b, i, j):
        return (j <= i) & (i - j < 9)

    def prefix(b, i, j):
        return (j <= i) | (j < np.asarray(lengths)[b])

    both = {"causal": True, "window": 9, "softcap": 1.5, "sinks": sinks}
    for call, right in (
        ({"causal": True, "window": 9}, masked(q, k, v, window)),
        ({"window": (8, 0)}, masked(q, k, v, window)),
        (both, masked(q, k, v, window, 1.5, sinks)),
        ({"mask": "prefix", "prefix": lengths}, masked(q, k, v, prefix)),
    ):
        static = {name: value for name, value in call.items() if not hasattr(value, "shape")}
        traced = {name: value for name, value in call.items() if hasattr(value, "shape")}
        attention = jax.jit(partial(demo.attention, return_lse=True, **static))
        for found, one in zip(attention(q, k, v, **traced), right, strict=True):
            compare(found, one, 4e-3)
    few = q[:, -2:]
    right, lse = masked(few, k, v, window, 1.5, sinks.astype("float32"))
    how = {"window": 9, "softcap": 1.5, "sinks": sinks.astype("float32"), "return_lse": True}
    for found, one in zip(demo.attention_decode(few, k, v, **how), (right, lse), strict=True):
        compare(found, one, 4e-3)
    at = jnp.asarray([0, 40], jnp.int32), jnp.asarray([0, 60], jnp.int32)
    own = demo.attention_varlen(q[0], k[0], v[0], *at, causal=True, window=9)
    compare(own, masked(q, k, v, window)[0][0], 4e-3)
    refused(lambda: demo.attention(q, k, v, window=0), ValueError, "window is 0; it must be a numb")
    said = "no kernel of this package serves dtype float16"
    refused(lambda: demo.attention(q, k, v, softcap=2.0), ValueError, said)
    loss = total(lambda q: demo.attention(q, k, v, window=(8, 0)))
    refused(lambda: jax.grad(loss)(q), NotImplementedError, "leaves it out of a gradient")


def gradients_refused(demo):
    q = normal("float16", 1, 8, 2, 128)
    loss = total(lambda q: attention(demo, q, q, q))
    for again in (jax.grad(total(jax.grad(loss))), jax.hessian(loss)):
        said = "gradients of its gradients are not there"
        refused(lambda f=again: f(q), NotImplementedError, said)
    by, lse = getattr(demo.kernels, BACKWARD), jnp.zeros((1, 2, 8))
    itself = jax.grad(total(lambda q: by(q, q, q, q, q, lse, SCALE)))
    refused(lambda: itself(q), NotImplementedError, "second derivatives are not supported")
    refused(lambda: jax.jvp(loss, (q,), (q,)), TypeError, "forward-mode")
    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    other = jax.grad(total(lambda q: demo.attention(q, q, q)))
    said = "fagen vendor adds bwd_bf16_d64_full_m128n128, in"
    refused(lambda: other(q), NotImplementedError, said)


def refused(call, error, said):
    try:
        call()
    except error as found:
        assert said in str(found), found
    else:
        raise AssertionError(f"not refused: {said}")


CALLS = (
    sixteen_bits,
    chains,
    e4m3,
    quantisers,
    combiners,
    decoding,
    packed,
    variants,
    devices,
    refusals,
)
GRADIENTS = (
    both_results,
    one_result,
    the_kernel_of_gradients,
    gradients_transformed,
    gradients_of_devices,
    gradients_traced,
    gradients_of_packed,
    gradients_refused,
)


def main():
    import demo

    for check in {"calls": CALLS, "gradients": GRADIENTS}[sys.argv[1]]:
        check(demo)
        print(f"{check.__name__}: right on {jax.default_backend()}")
    assert "fagen" not in sys.modules


if __name__ == "__main__":
    main()
