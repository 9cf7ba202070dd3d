"""Shared by all tests: a cache of built kernels that outlives a run, and kernels by their slugs."""

import gc
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# before torch is imported: workers share the cores, and threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from fagen import registry, simulator
from fagen.build import Binary, build, prune
from fagen.kind import Plan
from fagen.render import Source, render
from fagen.toolchain import Toolchain
from tests import rings
from tests.committed import Committed
from tests.often import some
from tests.precompiled import headers
from tests.scripted_compilers import scripted

if TYPE_CHECKING:
    from tests.stubs import StubOp

DAY = 86_400  # seconds

# One kernel of each kind: what is true of these is taken to be true of all. Each costs about ten
# CPU-seconds where the cache is cold, so a new one replaces one that it covers.
SPREAD = (
    "fwd_fp16_d128_causal_m128n128",
    "fwd_fp16_d128_full_m128n128_c2",
    "fwd_fp16_d64_causal_m192n128_q2_tensorsum_onlinemax",
    "fwd_fp16_d256_full_m128n80_reusev",
    "fwd_fp16_d80_full_m192n112_s4",
    "fwd_bf16_d192v128_causal_m128n128_reusev_onlinemax",
    "fwd_bf16_d128_full_m128n64_noprod",
    "fwd_bf16_d128_causal_m128n96_s3_q2_reusev",
    "fwd_fp16_d64_full_m128n160_nointer_onlinemax_t8",
    "fwd_fp16_d96_causal_m128n80_nointra",
)


@dataclass(frozen=True)
class Built:
    """A kernel with all that came before it."""

    plan: Any
    source: Source
    binary: Binary


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(pytestconfig: pytest.Config) -> Iterator[Path]:
    """No test touches the user's home, nor needs one; what one builds the next run finds.

    What tests make by hand is nobody else's to write to, as fagen asks of a cache, under any umask.
    """
    folder = pytestconfig.rootpath / ".pytest_cache" / "fagen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/dev/null/home")  # where root cannot write either
        patch.setenv("MPLCONFIGDIR", str(folder.with_name("matplotlib")))  # which finds fonts once
        patch.setenv("FAGEN_CACHE", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "no configuration"))
        umask = os.umask(0o022)
        prune(older_than=7 * DAY)
        yield folder
        os.umask(umask)


@pytest.fixture(scope="session", autouse=True)
def compiled_headers(request: pytest.FixtureRequest, kernel_cache: Path) -> Iterator[None]:
    """Where tests simulate kernels, the simulator's headers are compiled once for all."""
    with pytest.MonkeyPatch.context() as patch:
        if any(hasattr(item.module, "simulator") for item in request.session.items):  # type: ignore[attr-defined]
            patch.setattr(simulator, "_HEADERS", headers(kernel_cache.with_name("headers")))
        yield


@pytest.fixture(scope="session")
def committed() -> Committed:
    """Every committed schedule, planned and rendered once for all tests that walk over them."""
    return Committed()


@pytest.fixture(scope="session")
def built(kernel_cache: Path) -> Callable[[str], Built]:
    """Build the kernel of a slug, with its torch binding, once for all tests that ask for it."""

    @once
    def build_slug(slug: str) -> Built:
        planned = registry.plan(registry.from_slug(slug))
        source = render(planned)
        return Built(planned, source, build(source, planned, binding=True))

    return build_slug


@pytest.fixture(scope="session")
def stub_op(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], StubOp]":
    """The op of a slug over a stub, compiled and loaded once for all tests that ask for it."""
    from tests.stubs import load_stub  # torch, which takes seconds

    return once(lambda slug: load_stub(slug, tmp_path_factory.mktemp("binary")))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A vendored package for torch whose kernels compute on the CPU, for all tests that call it."""
    from tests.vendor_gradients import DEMO, package  # torch, which takes seconds

    with package(tmp_path_factory.mktemp("demo"), *DEMO) as module:
        yield module


# in CI clusters, V's space, a head dim of V's own, no producer; each takes a compiler 20 seconds
OFTEN = (SPREAD[0], SPREAD[3], SPREAD[5])


@pytest.fixture(scope="session", params=some(SPREAD, OFTEN))
def kernel(request: pytest.FixtureRequest, built: Callable[[str], Built]) -> Built:
    """A kernel of each kind in turn."""
    return built(request.param)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels of an empty cache, whose path has a space and a dollar in it."""
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "my $cache"))
    return tmp_path / "my $cache/kernels"


@pytest.fixture
def tools(tmp_path: Path, cache: Path) -> Toolchain:
    """Compilers made of scripts, which build into that cache."""
    return scripted(tmp_path)


@pytest.fixture
def planned() -> Plan:
    """What a build by such compilers is judged by."""
    return registry.plan_of("fwd_fp16_d128_full_m128n128")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Load a script of benchmarks/ as a module."""
    from tests.benchmark_helpers import scripts  # torch, which takes seconds

    with scripts(monkeypatch) as load:
        yield load


@pytest.fixture
def schedules_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing in it, in which fagen.attention looks for schedules and tables."""
    for module in ("registry", "dispatch.select"):
        monkeypatch.setattr(f"fagen.{module}.locate", lambda name: tmp_path)
    (tmp_path / "forward").mkdir()
    return tmp_path


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile as in a new process: it has traced nothing."""
    import torch._dynamo  # which takes seconds

    with warnings.catch_warnings():  # beside a GPU it imports what warns
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def nothing_is_ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """fagen.attention as in a new process: it has found and readied no kernel."""
    from fagen.dispatch import select
    from tests.fresh import forget  # torch, which takes seconds

    forget(monkeypatch)
    select.committed.cache_clear()
    yield
    select.committed.cache_clear()


@pytest.fixture
def comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compares no e4m3, and opcheck compares what went in with what is left of it."""
    import torch  # which takes seconds

    allclose = torch.allclose

    def widened(*tensors: torch.Tensor, **options: bool) -> bool:
        as_wide = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in tensors)
        return allclose(*as_wide, **options)

    monkeypatch.setattr(torch, "allclose", widened)


def pytest_configure(config: pytest.Config) -> None:
    """Until all is collected nothing goes, modules or tests: looking for that takes seconds."""
    if not config.getoption("numprocesses", None):  # who shares tests out collects none
        gc.disable()


def pytest_collection_finish() -> None:
    """Look from now on only among what tests make."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    meaning = "of a test with many cases run every N-th: a quick look, where all take an hour"
    parser.addoption("--sample", type=int, default=1, metavar="N", help=meaning)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which no test would run."""
    return rings.is_left_out(collection_path, config) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU or is long, unless `-m` names it, and cases beyond a sample."""
    rings.mark(items)
    apart = [mark for mark in rings.APART if not rings.named(config, mark)]
    every = config.getoption("sample")
    counts: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        test = item.nodeid.split("[")[0]
        chosen = counts[test] % every == 0
        counts[test] += 1
        keep = chosen and not any(map(item.get_closest_marker, apart))
        (kept if keep else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = rings.in_order(kept)
