"""Committed kernels, each built once, on a Hopper GPU; `pytest -m gpu` runs this folder."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fagen import flow
from fagen.arch import SM90
from fagen.expr.words import PLAIN
from fagen.kinds.forward.operands import has_descales, launch, operands
from fagen.kinds.forward.verify.dense import Kernel, dense
from fagen.kinds.forward.verify.fp8 import by_operands
from fagen.measure.inputs import cell_of, inputs, softmax_scale, usual
from fagen.paths import locate
from fagen.problem import Cell, Sizes
from fagen.registry import from_slug, plan_of
from fagen.registry import read as read_schedule
from fagen.runtime import op
from fagen.runtime.c_interface import call

_NONE = SimpleNamespace(params={})  # of a test without parameters
BUILDERS = os.cpu_count() or 1  # kernels that are compiled at a time
_ALL = sorted(read_schedule(path).slug for path in (locate("schedules") / "forward").glob("*.toml"))
_DENSE = [slug for slug in _ALL if not plan_of(slug).varlen]  # others: test_varlen_gpu.py
SCORED = [slug for slug in _DENSE if plan_of(slug).sink or plan_of(slug).score.name != PLAIN]
COMMITTED = [slug for slug in _DENSE if slug not in SCORED]  # others: test_scores_gpu.py
SLUGS = [slug for slug in COMMITTED if not has_descales(plan_of(slug))]
E4M3 = [  # one of each kind, for what does not depend on the tile
    "fwd_e4m3_d128_causal_m128n128_vrows",
    "fwd_e4m3_d256_causal_m128n96_sblock_sr32",
    "fwd_e4m3_d64_full_m192n128",
    "fwd_e4m3_d80v48_causal_m64n32_sblock_sr32",
    "fwd_e4m3_d128_full_m128n128_lazymax_vrows_sblock_sr128",
    "fwd_e4m3_d256_full_m128n64_vrows",
]


class Committed:
    """One kernel of schedules/: its Plan, its Binary, and the two ways to call it."""

    def __init__(self, built: Any) -> None:
        self.plan = built.plan
        self.binary = built.binary

    @property
    def op(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The torch op."""
        return op.load(self.binary)

    @property
    def poisoned(self) -> Kernel:
        """The C function, into outputs full of NaN."""
        return dense(self.plan, partial(call, self.plan, self.binary.library))

    def given(self, *sizes: int, seed: int = 0) -> tuple[Any, float]:
        """Tensors that it takes at these sizes, and the scale."""
        case = self.cell(*sizes)
        qkv = inputs(case, seed=seed)
        scale = softmax_scale(case.problem.head_dim)
        return (operands(self.plan, *qkv, centered="kv") if self.plan.descales else qkv), scale

    def numbers(self, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
        """What its op takes behind the scale: what a call gives to its mask, as usual."""
        given = usual(self.plan.mask, len(q), q.shape[1], k.shape[1], q.device)
        return tuple(given[name] for name in self.plan.mask.given)

    def run(self, given: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What the C function makes of these tensors, in outputs that were full of NaN."""
        if self.plan.descales:
            return by_operands(self.plan, partial(call, self.plan, self.binary.library))(
                given, scale
            )
        return self.poisoned(*given, scale)

    def run_into(self, given: Any, scale: float, *into: torch.Tensor | None) -> None:
        """The same into these outputs."""
        arguments = *given[:3], scale, *self.numbers(*given[:2]), *given[3:]
        launch(self.plan, self.binary.library, arguments, into)()

    def cell(self, batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int) -> Cell:
        """The problem of this kernel at these sizes."""
        return cell_of(self.plan, Sizes(batch, heads, kv_heads, seqlen_q, seqlen_k))


@pytest.fixture(scope="session", autouse=True)
def hopper() -> None:
    """Skip, with the reason, where there is no GPU that these kernels can run on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    capability = torch.cuda.get_device_capability()
    if capability != SM90.capability:
        pytest.skip(f"compute capability {capability}, these kernels are for {SM90.capability}")


@pytest.fixture(scope="session")
def built_together(built: Any) -> Callable[[Iterable[str]], Any]:
    """`built`, after the kernels of some slugs have been compiled in parallel."""

    def build_all(slugs: Iterable[str]) -> Any:
        with ThreadPoolExecutor(BUILDERS) as pool:
            list(pool.map(_attempt(built), slugs))
        return built

    return build_all


@pytest.fixture(scope="module")
def pair_of(request: pytest.FixtureRequest, hopper: None) -> Callable[[str], Any]:
    """Plan and Binary by slug; those that tests to be run here name are compiled beforehand."""

    @cache
    def build(slug: str) -> Any:
        return flow.built(from_slug(slug), binding=True)

    slugs = {
        item.callspec.params["slug"]
        for item in request.session.items
        if item.module is request.module and "slug" in getattr(item, "callspec", _NONE).params
    }
    with ThreadPoolExecutor(BUILDERS) as pool:
        list(pool.map(_attempt(build), slugs))
    return build


@pytest.fixture(scope="session")
def all_built(request: pytest.FixtureRequest, built_together: Any) -> Callable[[str], Any]:
    """`built`, with every kernel that a collected test wants compiled beforehand, in parallel."""
    slugs = {
        item.callspec.params[name]
        for item in request.session.items
        if hasattr(item, "callspec")
        for name in ("kernel", "any_kernel", "every_kind")
        if name in item.callspec.params
    }
    return built_together(slugs)


@pytest.fixture(scope="session", params=SLUGS)
def kernel(request: pytest.FixtureRequest, hopper: None, all_built: Callable) -> Committed:
    """Each kernel of schedules/ in turn that takes q, k and v in 16 bits."""
    return Committed(all_built(request.param))


@pytest.fixture(scope="session", params=COMMITTED)
def any_kernel(request: pytest.FixtureRequest, hopper: None, all_built: Callable) -> Committed:
    """Each kernel of schedules/ in turn, whatever it takes."""
    return Committed(all_built(request.param))


@pytest.fixture(scope="session", params=[*SLUGS, *E4M3])
def every_kind(request: pytest.FixtureRequest, hopper: None, all_built: Callable) -> Committed:
    """Each kernel of 16 bits, and one of each kind in e4m3."""
    return Committed(all_built(request.param))


@pytest.fixture(scope="session")
def one_kernel(hopper: None, built: Callable) -> Committed:
    """One kernel, for what does not depend on which."""
    return Committed(built("fwd_fp16_d128_causal_m128n128"))


def _attempt(build: Callable[[str], Any]) -> Callable[[str], None]:
    def attempt(slug: str) -> None:
        with suppress(Exception):  # the kernel's own tests raise it again
            build(slug)

    return attempt
