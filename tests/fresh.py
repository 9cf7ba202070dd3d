"""Calls as they are in a new process."""

from typing import Any

import pytest

from fagen.runtime import call, op


def forget(patch: pytest.MonkeyPatch) -> None:
    """Let calls know of no kernel, now and again once what was patched is as before."""
    call.reset()
    for door in call.DOORS.values():
        patch.setattr(door, "known", {})
        patch.setattr(door, "alike", {})
    patch.setattr(call, "_ready", {})


def asked_for(kind: str = "forward") -> set[Any]:
    """The slugs, None the usual one, that tables or callers chose of what is ready of a kind."""
    problems = {key: key.problem for key in call._ready if key.problem}
    return {
        slug
        for key, own in problems.items()
        if own.kind == kind
        for slug in call._ready[key].kernels
    }


def orders_of_gradients() -> set[bool]:
    """Whether the kernels of gradients that are ready are deterministic."""
    problems = (key.problem for key in call._ready)
    return {problem.deterministic for problem in problems if problem and problem.kind == "backward"}


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let what stands in for every kernel return q at once."""
    forget(patch)
    kernel = op.Kernel("slug", *[lambda q, *_: q] * 4, 1.0, "")
    patch.setattr(op, "ready", lambda *_, **__: kernel)
