"""When fagen.attention builds a kernel, with a GPU and a compiler pretended."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from fagen.dispatch.select import Choice, buildable
from fagen.errors import BuildError, DeviceError, FagenError, RefusedBuild, UntunedWarning
from fagen.runtime import attention as dispatch
from fagen.runtime import ready

pytestmark = pytest.mark.usefixtures("nothing_is_ready")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a Hopper GPU on which building is counted and takes a moment."""
    machine = SimpleNamespace(built=[], loaded=[], capability=(9, 0), capturing=False)

    def build(source: object, planned: object, **_: object) -> object:
        machine.built.append(source.slug)  # type: ignore[attr-defined]
        torch.randn(300, 300) @ torch.randn(300, 300)
        return source

    def load(binary: object) -> Callable[..., None]:
        machine.loaded.append(binary.slug)  # type: ignore[attr-defined]
        return lambda *_: None

    monkeypatch.setattr(ready, "build", build)
    monkeypatch.setattr(ready, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Sandbox 1000")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    return machine


def key(device: int = 0) -> tuple[dispatch.Kind, Choice]:
    return (torch.device("cuda", device), torch.float16, 64, 64, False), None


def test_many_threads_build_once(pretended: SimpleNamespace) -> None:
    threads = [Thread(target=dispatch._make_ready, args=key()) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pretended.built) == len(pretended.loaded) == 1


def test_a_device_on_which_it_is_ready_builds_nothing(pretended: SimpleNamespace) -> None:
    slug = dispatch.choose(dispatch.problem_of(key()[0])).slug
    first = dispatch._make_ready(*key(0))[0]
    chosen = key()[0], slug  # the same kernel by its name
    assert dispatch._make_ready(*chosen)[0] is first
    assert pretended.built == pretended.loaded == [slug]
    dispatch._make_ready(*key(1))  # the cache has it by now
    assert pretended.built == pretended.loaded == [slug] * 2


def test_while_a_graph_is_captured_an_unbuilt_kernel_is_an_error(
    pretended: SimpleNamespace,
) -> None:
    pretended.capturing = True
    with pytest.raises(FagenError, match=r"call fagen\.prepare.*while a CUDA graph is captured"):
        dispatch._make_ready(*key())
    assert pretended.built == []
    pretended.capturing = False
    dispatch._make_ready(*key())
    pretended.capturing = True
    slug = dispatch.choose(dispatch.problem_of(key()[0])).slug
    dispatch._make_ready(key()[0], slug)  # ready on this device, however it is asked for
    with pytest.raises(FagenError, match="while a CUDA graph is captured"):
        dispatch._make_ready(*key(1))  # on another its first call has work to do


def test_another_gpu_than_hopper_is_refused_in_words(pretended: SimpleNamespace) -> None:
    pretended.capability = (10, 0)
    with pytest.raises(DeviceError, match=r"cuda:0 is a Sandbox 1000 of compute capability 10\.0"):
        dispatch._make_ready(*key())
    assert pretended.built == []


def test_a_build_that_failed_is_tried_again(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FagenError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(ready, "build", fail)
        with pytest.raises(FagenError, match="no compiler"):
            dispatch._make_ready(*key())
    dispatch._make_ready(*key())
    assert len(pretended.built) == 1


def test_a_kernel_of_e4m3_is_built_for_its_layout_and_scales(
    schedules_folder: Path, pretended: SimpleNamespace
) -> None:
    kind: dispatch.Kind
    device, e4m3 = torch.device("cuda", 0), torch.float8_e4m3fn
    kind = (device, e4m3, 64, 64, False, torch.float16, "columns", 64)
    dispatch._make_ready(kind, None)
    assert pretended.built == ["fwd_e4m3_d64_full_m128n128_ofp16_sblock_pm1"]
    pretended.capturing = True
    with pytest.raises(FagenError, match="cannot be built while a CUDA graph is captured"):
        dispatch._make_ready((*kind[:-1], 32), None)  # type: ignore[arg-type]


# ---- derived schedules --------------------------------------------------------------------------


def refusing(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace, slugs: list[str], error: type
) -> list[str]:
    """Have builds of these fail; return where each attempt is noted."""
    build, tried = ready.build, []

    def attempt(source: object, planned: object, **more: object) -> object:
        tried.append(source.slug)  # type: ignore[attr-defined]
        if source.slug in slugs:  # type: ignore[attr-defined]
            raise error("12 bytes of registers spilled")
        return build(source, planned, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ready, "build", attempt)
    return tried


def of_no_table() -> tuple[dispatch.Kind, list[str]]:
    """A kind of call that is served by derived schedules, and their slugs."""
    kind = (torch.device("cuda", 0), torch.float16, 24, 24, False)
    found = buildable(dispatch.problem_of(kind))
    assert found.derived
    return kind, [schedule.slug for schedule in found.schedules]


def test_of_derived_schedules_the_first_that_does_not_spill_serves(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, slugs = of_no_table()
    tried = refusing(monkeypatch, pretended, slugs[:2], RefusedBuild)
    with pytest.warns(UntunedWarning, match=f": {slugs[2]} is derived.*fagen search {slugs[2]} "):
        *_, served = dispatch._make_ready(kind, None)
    assert tried == slugs[:3] and pretended.loaded == [slugs[2]]
    assert served == slugs[2]


def test_where_every_derived_schedule_spills_or_no_compiler_runs_that_is_said(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, slugs = of_no_table()
    with monkeypatch.context() as patch:
        tried = refusing(patch, pretended, slugs, RefusedBuild)
        with pytest.raises(RefusedBuild, match="spilled"):
            dispatch._make_ready(kind, None)
        assert tried == slugs
    tried = refusing(monkeypatch, pretended, slugs, BuildError)
    with pytest.raises(BuildError):
        dispatch._make_ready(kind, None)
    assert tried == slugs[:1], "a cache that cannot be written is no better for the next"


def test_a_schedule_that_was_chosen_has_no_other_in_its_place(
    pretended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, slugs = of_no_table()
    tried = refusing(monkeypatch, pretended, slugs[:1], RefusedBuild)
    with pytest.raises(RefusedBuild):
        dispatch._make_ready(kind, slugs[0])
    assert tried == slugs[:1]
