"""Gradients of a vendored package for JAX, compared with those of the plain formula in fp64.

    python jax_gradients.py

is run as jax_calls.py is. Of the package's kernels the one in fp16 has gradients, that in bf16 not.
"""

import sys
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BACKWARD = "fwd_fp16_d128_causal_m128n128", "bwd_fp16_d128_causal_m64n128"
SCALE = 0.2
X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # of older JAX

randomness = np.random.default_rng(17)


def normal(*shape):
    return jnp.asarray(randomness.normal(size=shape), jnp.float16)


def qkv(batch=2, queries=77, keys=130):
    return normal(batch, queries, 4, 128), *(normal(batch, keys, 2, 128) for _ in range(2))


def formula(q, k, v):
    """out and lse under a causal mask, by JAX's own means."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    rows, keys = jnp.indices(scores.shape[2:])
    seen = keys <= rows + scores.shape[3] - scores.shape[2]
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), v), lse


def right(given, dout, dlse):
    """The formula's gradients, in fp64."""
    with X64(True):
        exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in (*given, dout, dlse)]
        return [np.asarray(x) for x in jax.vjp(formula, *exact[:3])[1](tuple(exact[3:]))]


def near(found, fine):
    assert len(found) == len(fine) == 3
    for one, other in zip(found, fine, strict=True):
        assert one.dtype == jnp.float16 and one.shape == other.shape
        off = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
        assert off <= 8 * 2.0**-11 * (1 + np.abs(np.asarray(other)).max()), off


def cotangents(batch=2, queries=77):
    dlse = jnp.asarray(randomness.normal(size=(batch, 4, queries)), jnp.float32)
    return normal(batch, queries, 4, 128), dlse


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
            given, out = qkv(*sizes), cotangents(*sizes[:2])
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


def transformed(demo):
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


def devices(demo):
    """Each device has its own batches, and the same keys: their gradients are added up."""
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    of_batch, same = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    q, k, v = qkv(2 * mesh.size)
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


def traced(demo):
    """Shapes alone; and which targets are called, with no log-sum-exp where none is needed."""
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()]

    def loss(q, k, v):
        return attention(demo, q, k, v).astype(jnp.float32).sum()

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
        given = qkv(*sizes)
        assert not any(x.any() for x in jax.grad(loss, (0, 1, 2))(*given))


def packed(demo):
    """Of varlen sequences, whose offsets are whole numbers and have none."""
    lengths = (5, 0, 70, 33)
    at = np.cumsum([0, *lengths])
    q, k, v = (normal(at[-1], heads, 64) for heads in (4, 2, 2))
    dout, dlse = normal(at[-1], 4, 64), randomness.normal(size=(4, at[-1]))
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
    other = q.astype(jnp.bfloat16)
    refused(
        lambda: jax.grad(
            lambda q: demo.attention_varlen(q, q, q, offsets).astype(jnp.float32).sum()
        )(other[:, :2]),
        NotImplementedError,
        "fagen vendor adds bwd_bf16_d64_full_",
    )


def refusals(demo):
    q = normal(1, 8, 2, 128)

    def loss(q):
        return attention(demo, q, q, q).astype(jnp.float32).sum()

    twice = jax.grad(lambda q: jax.grad(loss)(q).astype(jnp.float32).sum())
    for again in (twice, jax.hessian(loss)):
        said = "gradients of its gradients are not there"
        refused(lambda f=again: f(q), NotImplementedError, said)
    by, lse = getattr(demo.kernels, BACKWARD), jnp.zeros((1, 2, 8))
    itself = jax.grad(lambda q: by(q, q, q, q, q, lse, SCALE)[0].astype(jnp.float32).sum())
    refused(lambda: itself(q), NotImplementedError, "second derivatives are not supported")
    refused(lambda: jax.jvp(loss, (q,), (q,)), TypeError, "forward-mode")
    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    other = jax.grad(lambda q: demo.attention(q, q, q).astype(jnp.float32).sum())
    refused(
        lambda: other(q), NotImplementedError, "fagen vendor adds bwd_bf16_d64_full_m128n128, in"
    )


def refused(call, error, said):
    try:
        call()
    except error as found:
        assert said in str(found), found
    else:
        raise AssertionError(f"not refused: {said}")


CHECKS = (
    both_results,
    one_result,
    the_kernel_of_gradients,
    transformed,
    devices,
    traced,
    packed,
    refusals,
)


def main():
    import demo

    for check in CHECKS:
        check(demo)
        print(f"{check.__name__}: right on {jax.default_backend()}")
    assert "fagen" not in sys.modules


if __name__ == "__main__":
    main()
