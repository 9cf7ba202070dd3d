"""Scores through public calls on CPU tensors, beside lambdas written by hand; refusals by name."""

import math
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import flash_attn_interface as fa3
from fagen import registry
from fagen.errors import ExpressionError
from fagen.problem import Problem
from tests.cli_helpers import fagen as command
from tests.tensors import normal

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]
Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scaled products, positions and keys


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score = lambda s, q, k: s,
    sees: Any = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in fp64, causal unless `sees` is said; sinks are one more logit of a row."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    queries, keys = scores.shape[2:]
    position = torch.arange(queries).view(-1, 1) + keys - queries
    key = torch.arange(keys).view(1, -1)
    visible = (key <= position) if sees is None else sees(position, key)
    scores = score(scores, position, key).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    p = scores.softmax(-1).nan_to_num(0)[..., :keys]
    return torch.einsum("bhqk,bkhd->bqhd", p, v), scores.logsumexp(-1)


def tensors(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, queries, 4, 64), (batch, keys, 2, 64), (batch, keys, 2, 64)
    q, k, v = (normal(*shape, dtype=torch.float16, seed=i) for i, shape in enumerate(shapes))
    return 2 * q, k, v  # scores of some size


def near(results: Any, expected: tuple[Tensor, Tensor], within: float = 4e-3) -> None:
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, atol=within, rtol=0)


def capped(most: float) -> Score:
    return lambda s, q, k: most * torch.tanh(s / most)


Slope = fagen.float32(min=0, max=10)


@fagen.score
def fading(score: Any, q_pos: Any, k_idx: Any, *, slope: Slope) -> Any:  # type: ignore[valid-type]
    return score - slope * fagen.maximum(0, q_pos - k_idx)


SCORES: list[tuple[dict[str, Any], Score]] = [
    ({"softcap": 1.5}, capped(1.5)),
    ({"softcap": 50}, capped(50)),
    ({"softcap": 0.0}, lambda s, q, k: s),
    ({"score": "softcap", "softcap": 1.5}, capped(1.5)),
    ({"score": "cap * tanh(score / cap)", "cap": 2}, capped(2)),
    (
        {"score": "cap * tanh(score / cap) - 1.0", "cap": 2.0},
        lambda s, q, k: capped(2)(s, q, k) - 1,
    ),
    ({"score": "0.5 * score"}, lambda s, q, k: s / 2),
    ({"score": fading, "slope": 0.25}, lambda s, q, k: s - 0.25 * (q - k).clamp(min=0)),
]
IDS = [str(i) for i, _ in enumerate(SCORES)]


@pytest.mark.parametrize(("call", "score"), SCORES, ids=IDS)
def test_a_score_is_what_it_says(call, score):
    for lengths in ((33, 100), (100, 33), (1, 40)):
        q, k, v = tensors(*lengths)
        near(fagen.attention(q, k, v, causal=True, **call, return_lse=True), dense(q, k, v, score))


@pytest.mark.parametrize(("call", "score"), SCORES[:1] + SCORES[-1:], ids=("0", "7"))
def test_masks_come_after_scores_in_every_call(call, score):
    q, k, v = tensors(33, 100)

    def sees(q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < 9)

    exact = dense(q, k, v, score, sees)
    near(fagen.attention(q, k, v, causal=True, window=9, **call, return_lse=True), exact)
    at = torch.tensor([0, 33], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
    packed = fagen.attention_varlen(q[0], k[0], v[0], *at, causal=True, window=9, **call)
    torch.testing.assert_close(packed.double(), exact[0][0], atol=4e-3, rtol=0)
    few = fagen.attention_decode(q[:, -3:], k, v, window=9, **call, return_lse=True)
    near(few, dense(q[:, -3:], k, v, score, sees))


SINKS = torch.tensor([1.0, -2.0, 3.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sink_is_one_more_logit_of_every_row(dtype):
    sinks = SINKS.to(dtype)
    for lengths in ((33, 100), (100, 33)):
        q, k, v = tensors(*lengths)
        own = fagen.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        near(own, dense(q, k, v, sinks=sinks))
        how: dict[str, Any] = dict(causal=True, window=7, softcap=1.5, sinks=sinks)

        def sees(q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q - k < 7)

        exact = dense(q, k, v, capped(1.5), sees, sinks)
        near(fagen.attention(q, k, v, **how, return_lse=True), exact)
        own = fa3.flash_attn_func(
            q,
            k,
            v,
            causal=True,
            window_size=(6, 0),
            softcap=1.5,
            s_aux=sinks,
            return_attn_probs=True,
        )
        near(own, exact)
        queries, keys = lengths
        at = (
            torch.tensor([0, queries], dtype=torch.int32),
            torch.tensor([0, keys], dtype=torch.int32),
        )
        packed = fagen.attention_varlen(q[0], k[0], v[0], *at, **how)
        torch.testing.assert_close(packed.double(), exact[0][0], atol=4e-3, rtol=0)
        for few in (1, 3):
            own = fagen.attention_decode(q[:, -few:], k, v, **how, return_lse=True)
            near(own, dense(q[:, -few:], k, v, capped(1.5), sees, sinks))
    cached = fa3.flash_attn_with_kvcache(q[:, -1:], k, v, causal=True, s_aux=sinks)
    exact, _ = dense(q[:, -1:], k, v, sinks=sinks)
    torch.testing.assert_close(cached.double(), exact, atol=4e-3, rtol=0)
    quantised = fagen.attention_fp8(q, k, v, causal=True, sinks=sinks)
    assert (quantised.double() - dense(q, k, v, sinks=sinks)[0]).abs().mean() < 0.03


def test_sinks_are_read_again_by_each_call_and_no_value_is_kept():
    q, k, v = tensors(20, 20)
    sinks = SINKS.clone()
    for _ in range(3):
        near(
            fagen.attention(q, k, v, causal=True, sinks=sinks, return_lse=True),
            dense(q, k, v, sinks=sinks),
        )
        sinks += 1


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        (SINKS[:3], r"sinks has shape \(3\); it must be \(heads = 4\)"),
        (SINKS[None], r"sinks has shape \(1, 4\)"),
        (SINKS.repeat(2)[::2], "sinks.contiguous"),
        (SINKS.long(), "sinks are torch.int64; they must be one of float32, float16, bfloat16"),
        ([0.0] * 4, "sinks is of type list; it must be a torch.Tensor or None"),
    ],
    ids=range(5),
)
def test_what_are_no_sinks_is_named(sinks, words):
    q, k, v = tensors(20, 20)
    with pytest.raises((ValueError, TypeError), match=words):
        fagen.attention(q, k, v, sinks=sinks)


def test_quantised_calls_cap_scores_and_leave_the_mean_of_keys():
    q, k, v = tensors(40, 60)
    out = fagen.attention_fp8(q, k + 1, v, causal=True, softcap=1.5)
    assert (out.double() - dense(q, k + 1, v, capped(1.5))[0]).abs().mean() < 0.03


def test_one_kernel_serves_all_caps_and_a_text_that_says_a_words():
    q, k, v = tensors(20, 20)
    door = fagen.runtime.attention.ATTENTION
    for cap in (1.0, 2.5, 50):
        fagen.attention(q, k, v, causal=True, softcap=cap)
        fagen.attention(q, k, v, causal=True, score="cap * tanh(score / cap)", cap=cap)
    fagen.attention(q, k, v, causal=True, softcap=None)
    fagen.attention(q, k, v, causal=True, score="1.0 * score")
    scores = {kernel.plan.schedule.values()["score"] for kernel in door.known.values()}
    assert scores == {"plain", "softcap"}
    assert len({kernel.slug for kernel in door.known.values()}) == 2
    fagen.attention(q, k, v, causal=True, score="cap * tanh(score / 2)", cap=2.0)  # which is none
    assert len({kernel.slug for kernel in door.known.values()}) == 3


def test_masks_and_scores_may_name_a_number_alike():
    q, k, v = tensors(20, 20)
    both = dict(mask="k_idx <= q_pos and q_pos - k_idx < far", score="score * far", far=3)
    out = fagen.attention(q, k, v, **both, return_lse=True)
    near(out, dense(q, k, v, lambda s, q, k: 3 * s, lambda q, k: (k <= q) & (q - k < 3)))


def test_flash_attentions_softcap_is_this_one():
    q, k, v = tensors(33, 100)
    how = dict(causal=True, softcap=1.5, window_size=(7, 0))
    own = fagen.attention(q, k, v, causal=True, softcap=1.5, window=8)
    assert torch.equal(fa3.flash_attn_func(q, k, v, **how), own)
    assert torch.equal(fa3.flash_attn_func(q, k, v, softcap=-1.0), fagen.attention(q, k, v))
    at = torch.tensor([0, 33], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
    packed = fa3.flash_attn_varlen_func(q[0], k[0], v[0], *at, 33, 100, **how)
    torch.testing.assert_close(packed, own[0], atol=2e-3, rtol=0)
    cached = fa3.flash_attn_with_kvcache(q[:, :2], k, v, **how)
    used = fagen.attention(q[:, :2], k, v, causal=True, window=8, softcap=1.5)
    torch.testing.assert_close(cached, used, atol=2e-3, rtol=0)


Q = normal(1, 4, 2, 64, dtype=torch.float16)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be a number from 0.001 to 1e"),
    ({"softcap": float("nan")}, ValueError, "softcap is nan; it must be a number"),
    ({"softcap": True}, ValueError, "softcap is true; it must be a number"),
    ({"score": "softcapp"}, ValueError, "did you mean softcap"),
    ({"score": "softcap"}, ValueError, "softcap is missing, which the score takes: one number"),
    ({"score": "alibi"}, ValueError, "whose slopes are a table; so far scores read none"),
    ({"score": "2 * score", "softcap": 3.0}, ValueError, "softcap and score are given; write the"),
    ({"score": "k_idx <= q_pos"}, ValueError, "score: "),
    ({"score": "score * far"}, ValueError, "score: column 9: far is not known"),
    ({"score": "score * far", "far": Q}, ValueError, "far is a tensor, and a text does not say"),
    ({"score": lambda score: score}, ValueError, "score is a function; write @fagen.score above"),
    ({"score": Q}, TypeError, "score is of type Tensor; it must be a word"),
    ({"mask": fading, "slope": 1.0}, ValueError, "@fagen.mask makes masks"),
    (
        {"score": fading, "slope": 11.0},
        ValueError,
        "slope is 11.0; it must be a number from 0 to 10",
    ),
    ({"score": fading, "slop": 1.0}, TypeError, r"attention\(\) takes no slop"),
    (
        {"softcap": 2.0, "dropout_p": 0.1},
        TypeError,
        "no dropout_p: not there yet in fagen: dropout",
    ),
    ({"softcap": 2.0, "attn_bias": Q}, TypeError, "no attn_bias: not there yet in fagen: a bias"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_argument_of_a_score_is_named(call, error, words):
    with pytest.raises(error, match=words):
        fagen.attention(Q, Q, Q, **call)


def test_an_argument_that_is_named_like_one_of_calls_is_refused_when_it_is_declared():
    for name in ("scale", "softcap", "sinks", "window", "return_lse"):

        def of_name(score: Any, **given: Any) -> Any:
            return score

        arguments = [Parameter("score", Parameter.KEYWORD_ONLY)]
        arguments += [Parameter(name, Parameter.KEYWORD_ONLY, annotation=fagen.float32)]
        setattr(of_name, "__signature__", Signature(arguments))  # noqa: B010
        with pytest.raises(ExpressionError, match=f"{name} is an argument of fagen's calls"):
            fagen.score(of_name)


def by_hand_capped(x: Tensor) -> Tensor:
    return 1.5 * torch.tanh(x / 1.5)


def leaking(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.25 * x)


@pytest.mark.parametrize(
    ("how", "by_hand"),
    [
        ({"softcap": 1.5}, by_hand_capped),
        ({"score": "cap * tanh(score / cap)", "cap": 1.5}, by_hand_capped),
        ({"score": "where(0.0 < score, score, 0.25 * score)"}, leaking),
        ({"score": "0.5 * score"}, lambda x: 0.5 * x),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_go_through_a_score(how, by_hand, packed):
    q, k, v = (x.requires_grad_() for x in tensors(20, 30))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in exact[1:])
    score = by_hand(torch.einsum("bshd,bthd->bhst", exact[0], keys) * q.shape[3] ** -0.5)
    hidden = torch.arange(30) > torch.arange(20)[:, None] + 10
    score = score.masked_fill(hidden, -math.inf)
    wanted = torch.einsum("bhst,bthd->bshd", score.softmax(-1), values)
    (wanted.square().sum() + score.logsumexp(-1).sum()).backward()
    if packed:
        batch = range(q.shape[0] + 1)
        at = [torch.tensor([n * one for one in batch], dtype=torch.int32) for n in (20, 30)]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse = fagen.attention_varlen(*flat, *at, causal=True, return_lse=True, **how)
    else:
        out, lse = fagen.attention(q, k, v, causal=True, return_lse=True, **how)
    (out.float().square().sum() + lse.sum()).backward()
    for found, own in zip((q, k, v), exact, strict=True):
        assert found.grad is not None and own.grad is not None
        assert (found.grad.double() - own.grad).norm() < 2e-3 * own.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_have_gradients_of_their_own_and_may_be_all_that_has(dtype):
    q, k, v = (x.requires_grad_() for x in tensors(30, 20))
    sinks = SINKS.detach().to(dtype).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in exact[1:3])
    score = torch.einsum("bshd,bthd->bhst", exact[0], keys) * q.shape[3] ** -0.5
    score = score.masked_fill(torch.arange(20) > torch.arange(30)[:, None] - 10, -math.inf)
    own = exact[3][None, :, None, None].expand(*score.shape[:3], 1)
    score = torch.cat([score, own], -1)
    wanted = torch.einsum("bhst,bthd->bshd", score.softmax(-1)[..., :-1], values)
    (wanted.square().sum() + score.logsumexp(-1).sum()).backward()
    out, lse = fagen.attention(q, k, v, causal=True, return_lse=True, sinks=sinks)
    (out.float().square().sum() + lse.sum()).backward()
    for found, of_exact in zip((q, k, v, sinks), exact, strict=True):
        assert found.grad is not None and of_exact.grad is not None
        assert (found.grad.double() - of_exact.grad).norm() < 5e-3 * of_exact.grad.norm()
    before, sinks.grad = sinks.grad, None
    fixed = [x.detach() for x in (q, k, v)]
    out, lse = fagen.attention(*fixed, causal=True, return_lse=True, sinks=sinks)
    (out.float().square().sum() + lse.sum()).backward()
    assert sinks.grad is not None and before is not None and torch.equal(sinks.grad, before)


def test_gradients_of_a_score_that_has_none_are_refused_before_all_else():
    q, k, v = tensors(20, 20)
    q.requires_grad_()
    with pytest.raises(ValueError, match="reads head, of which so far there are no gradients"):
        fagen.attention(q, k, v, score="score - 0.5 * head")
    with torch.no_grad():
        fagen.attention(q, k, v, score="score - 0.5 * head")


def test_what_calls_are_readied_for_is_told_by_the_same_words():
    like = dict(dtype="bf16", head_dim=64)
    for how in (
        {"causal": True, "softcap": 50.0},
        {"mask": "chunked", "softcap": 50.0},
        {"score": fading},
        {"score": "cap * tanh(score / cap)", "cap": 50.0, "window": 100},
    ):
        prepared = Problem.of(registry.from_slug(fagen.prepare(**like, **how, device="cpu")))
        picked = fagen.pick(**like, **how).problem
        assert (prepared.mask, prepared.score) == (picked.mask, picked.score) != ("causal", "plain")
    for sinks in (torch.bfloat16, "bfloat16", "bf16"):
        slug = fagen.prepare(**like, sinks=sinks, window=5, device="cpu")
        assert "sinkbf16" in slug and "sinkbf16" in fagen.pick(**like, sinks=sinks, window=5).slug
        fagen.prepare_varlen(**like, sinks=sinks, softcap=3.0, device="cpu")
        slug = fagen.prepare_decode(**like, heads=8, kv_heads=2, sinks=sinks, device="cpu")
        assert slug == fagen.pick(**like, heads=8, kv_heads=2, sinks=sinks, kind="decode").slug
    with pytest.raises(ValueError, match="sinks are int32; they must be one of float32, float16"):
        fagen.prepare(**like, sinks="int32", device="cpu")
    with pytest.raises(TypeError, match=r"prepare\(\) takes no cap"):
        fagen.prepare(**like, softcap=5.0, cap=3.0)


PICKED = ["pick", "--dtype", "bf16", "--head-dim", "64", "--causal"]


def test_the_command_line_takes_the_same_words():
    answer = command(
        *PICKED, "--window", 128, "--softcap", 50, "--sinks", "bf16", "--lengths", "varlen"
    )
    assert answer.exit_code == 0, answer.output
    assert (
        "bfloat16, head_dim 64, window, score softcap, sinks in bfloat16, varlen" in answer.output
    )
    answer = command(
        *PICKED, "--score", "cap * tanh(score / cap)", "--given", "cap=3", "--pass", "decode"
    )
    assert answer.exit_code == 0 and answer.output.startswith("dec_bf16_d64_causal_r8n128_softcap")
    for words, said in (
        (["--given", "width"], "'width' is not NAME=NUMBER"),
        (["--given", "heads=3"], "heads is an option: --heads"),
        (["--given", "far=3"], "pick() takes no far"),
        (["--score", "sofcap"], "did you mean softcap?"),
        (["--sinks", "int8"], "sinks are int8; they must be one of float32, float16, bfloat16"),
    ):
        answer = command(*PICKED, *words)
        assert answer.exit_code and said in answer.output, answer.output


def test_a_compiled_score_is_one_graph():
    q, k, v = tensors(20, 20)
    for call in (
        {"softcap": 1.5, "window": 5, "sinks": SINKS.half()},
        {"score": fading, "slope": 0.25},
        {"sinks": SINKS},
    ):
        graphs: list[Any] = []

        def counted(module: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(module)
            return module.forward

        function = torch.compile(
            lambda q, k, v, call=call: fagen.attention(q, k, v, causal=True, **call),
            backend=counted,
            fullgraph=True,
        )
        expected = fagen.attention(q, k, v, causal=True, **call)
        assert torch.equal(function(q, k, v), expected) and len(graphs) == 1
