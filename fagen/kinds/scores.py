"""What kinds of attention have in common of scores: factors, Params, and what elements call."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fagen.combining import fp32
from fagen.errors import ExpressionError
from fagen.expr.tree import INT as WHOLE
from fagen.part import FLOAT, INT, Argument, Computed, Field, Part, Times
from fagen.schedule import Broken, Section, Values, derived
from fagen.scores import Score
from fagen.signature import Scalar
from fagen.vocab import SCORES

_HEADS = Field("all_heads", INT, Argument("heads"))
_MOST_SPILLED = 4096
# functions of the core that kernels have as texts
_FUNCTIONS = {"tanh": "sm90/tanh.cuh", "sqrt": "sm90/sqrt.cuh"}


CURVED_GROUP = 16  # of a thread's scores, that are under way at a time where registers are few


@dataclass(frozen=True)
class Curve:
    """tanh x as x (c0 + c1 x² + …), of |x| up to some end off by 1e-5 of itself, as the MUFU is.

    It rises for ever. So where a row max is so far below the end that P of the end outgrows a sum
    of 2 to the power of log2_sum, larger scores show; and where it is so far above minus the end
    that P of that is below 2 to the power of -unseen, smaller ones are no part of it.
    """

    coefficients: tuple[float, ...]  # minimax of the relative error
    end: float  # tanh of the largest x
    log2_sum: int
    unseen: int
    rise: float  # share of the largest row max by which a tile's first ones are to be smaller

    @property
    def terms(self) -> int:
        """How many coefficients it has."""
        return len(self.coefficients)

    @property
    def max_sum(self) -> float:
        """What a lane's P may add up to."""
        return 2.0**self.log2_sum


# x to 0.4339: with a cap of 50 of scores to 20.4, of rows whose largest is in -3.8 … 14.2, and
# first is 10 at most
CURVE = Curve((0.99999, -0.33236953, 0.119321995), math.tanh(0.4339), 9, 24, rise=0.3)


class Build(Section):
    """What the compiler may do, of kernels with scores."""

    max_spill_bytes: int = derived(
        "bytes per thread that may spill to local memory; by default 0, and any number where "
        "elements of S become other numbers, by whatever score a call says",
        ge=0,
        le=_MOST_SPILLED,
    )


def spilled(values: Values) -> int:
    """Return how many bytes may spill, where a schedule does not say."""
    return _MOST_SPILLED if SCORES[values["score"]].acts else 0


def rules_of_scores(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule of a forward kernel's score that is broken."""
    score = SCORES[keys["score"]]
    if score.acts and keys["v_scales"] == "block":
        fault = f'"block" does not go with score = "{score.name}": V\'s scales are in the exponents'
        yield "v_scales", f"{fault}; leave it out"
    if keys["tanh"] == "curve":
        yield from _rules_of_curves(keys, score)


def _rules_of_curves(keys: Values, score: Score) -> Broken:
    if not score.is_tanh:
        fault = f'"curve" is for scores that are a tanh, and not for "{score.name}"'
        yield "tanh", f"{fault}; leave it out"
    for key, only, why in (
        ("maximum", "lazy", "whose sums of P show what is beyond it"),
        ("intra_warpgroup", True, "as plain steps have no loop of their own for it"),
        ("producer", "warp", "as consumers that load have no registers left"),
        ("promote", 0, "whose steps end in another way"),
        ("sink", "", "with which row maxima may begin"),
        ("num_splits", 1, "between which no barrier keeps warps together"),
    ):
        if keys[key] != only:
            yield key, f'does not go with tanh = "curve", {why}; leave one of them out'
    if keys["v_layout"]:  # e4m3
        yield (
            "dtype",
            '"e4m3" does not go with tanh = "curve": P has no sums that show; leave it out',
        )
    if keys["block_n"] % (2 * CURVED_GROUP):
        fault = f'must be a multiple of {2 * CURVED_GROUP} with tanh = "curve"'
        yield "block_n", f"{fault}: a thread takes {CURVED_GROUP} scores at a time"


# what elements of a kernel of gradients do not know: a step is of no head; nor of which rows, by
# gradients, where no mask asks
_UNKNOWN = ("head", "batch")
_UNKNOWN_BY_GRADIENTS = ("q_idx",)


def rules_of_slopes(keys: Values) -> Broken:
    """Yield (key, sentence) for each rule of the score of a kernel of gradients that is broken."""
    score = SCORES[keys["score"]]
    if not score.acts:
        return
    by_gradients = keys["partition"] == "gradients"
    unknown = _UNKNOWN + _UNKNOWN_BY_GRADIENTS * by_gradients
    if found := next((name for name in unknown if name in score.reads), ""):
        yield "score", f'= "{score.name}" reads {found}, of which so far there are no gradients'
    try:
        _ = score.slope
    except ExpressionError as error:
        yield "score", f'= "{score.name}": {error}'


def factor(values: Values) -> Argument | Computed:
    """What lies in S, once it is complete, is multiplied by to be scores."""
    score = SCORES[values["score"]]
    return Argument("scale") if score.is_plain else Computed(score.factor)


def factor_log2(values: Values) -> Times:
    """The same, to be exponents of 2."""
    own = factor(values)
    return Times(own.name if isinstance(own, Argument) else own, 1.44269504089)


def inverse_factor(values: Values) -> Computed:
    """What scores are multiplied by to be such elements."""
    own = factor(values)
    return Computed(f"1.0f / ({own.text if isinstance(own, Computed) else f'a.{own.name}'})")


def elements(values: Values, consumer: str) -> Iterator[Part]:
    """Yield what makes scores of products, by a text, where that is more than a factor."""
    score = SCORES[values["score"]]
    if not score.acts:
        return
    functions = (text for name, text in _FUNCTIONS.items() if name in score.functions)
    yield Part(
        device=(*functions, *("attention/scores/helpers.cuh.j2",) * bool(score.helpers)),
        consumer=(consumer,),
        params=(
            Field("product_scale", FLOAT, Computed(score.inner), "of S before it becomes scores"),
            *(
                Field(p.name, INT if p.type == WHOLE else FLOAT, Argument(p.name))
                for p in score.params
            ),
            *(_HEADS,) * ("heads" in score.reads),
        ),
    )


def slope_factor(values: Values) -> Argument | Computed:
    """What gradients of elements are multiplied by to be those of products."""
    score = SCORES[values["score"]]
    return Argument("scale") if score.is_plain else Computed(score.slope_factor)


def names_of_rows() -> dict[str, str]:
    """What elements of a kernel of gradients, whose rows are the columns of S, call them."""
    lengths = "lengths_of(params, shared)"
    return {
        "score": "score",
        "q_idx": "(first_row_of_block + column_of(i + j))",
        "k_idx": "(first_key + row_of(i) * 8)",
        "len_q": f"{lengths}.seqlen_q",
        "len_k": f"{lengths}.seqlen_k",
        "kv_head": "tile.kv_head",
        "heads": "params.all_heads",
    }


def names(packed: bool, own_lengths: bool) -> dict[str, str]:
    """What elements of a forward kernel call the names of the language."""
    lengths = "tile.sequence" if own_lengths else "params"
    return {
        "score": "score",
        "q_idx": "query[row_of(i)]",
        "k_idx": "(first_key + column_of(i))",
        "len_q": f"{lengths}.seqlen_q",
        "len_k": f"{lengths}.seqlen_k",
        "head": "head[row_of(i)]" if packed else "tile.head",
        "kv_head": "tile.kv_head",
        "batch": "tile.batch",
        "heads": "params.all_heads",
    }


def names_of_keys(skips: bool) -> dict[str, str]:
    """What elements of a decoding kernel, which may skip a sequence's first keys, call them."""
    before = "unit.sequence.skipped + " * skips
    return {
        "score": "score",
        "q_idx": "query",
        "k_idx": f"({before}key + row_at(i))",
        "len_q": "params.seqlen_q",
        "len_k": f"({before}unit.sequence.length)",
        "head": "head",
        "kv_head": "(head / params.group)",
        "batch": "unit.batch",
        "heads": "params.all_heads",
    }


def scalars(score: Score) -> tuple[Scalar, ...]:
    """Return the numbers that a call gives to a score."""
    note = f"of the score {score.name}"
    return tuple(
        Scalar(p.name, "int", note, least=int(p.least), most=int(p.most))
        if p.type == WHOLE
        else Scalar(p.name, "float", note, positive=True, most=float(p.most))
        if p.least > 0 and p.most < float("inf")
        else Scalar(p.name, "float", note)
        for p in score.parameters
    )


def factors(score: Score, scale: float) -> tuple[float, float]:
    """What products are multiplied by, and what they became, to be scores: as launchers do."""
    return fp32(score.before(fp32(scale))), fp32(score.after(fp32(scale)))
