"""The way of a first call, from the public function to the launch: few modules, none twice."""

import sys
from collections.abc import Callable
from itertools import groupby
from types import FrameType
from typing import Any

import pytest

from tests.doors import DOORS

pytestmark = [
    pytest.mark.usefixtures("nothing_is_ready"),
    pytest.mark.filterwarnings("ignore::fagen.errors.UntunedWarning"),
]

CALLS = (
    "attention",
    "attention_lse",
    "attention_varlen",
    "attention_decode",
    "combine",
    "quantize",
)
MODULES = 6
OPS = ("first", "refusing")  # what calls an op on a CPU, where it is Python


def trace(call: Callable[[], Any]) -> list[str]:
    """The modules of calls and of choice that a call comes through, each as often as it comes back.

    Those of dispatch/ are one. What is below, the arrows from a schedule to a Plan and on to a
    binary, and the launch, which is an op's call, are not looked into.
    """
    entered: list[str] = []
    is_launched = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_launched
        name = frame.f_globals.get("__name__", "")
        is_launched |= name == "fagen.runtime.op" and frame.f_code.co_name in OPS
        if event == "call" and not is_launched and name.startswith(("fagen.runtime", "fagen.disp")):
            entered.append("dispatch" if "dispatch" in name else name.rpartition(".")[2])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert is_launched
    return [name for name, _ in groupby(entered)]


@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_goes_down_through_few_modules_and_comes_back_to_none(name: str) -> None:
    door = DOORS[name]
    tensors = door.made()
    if name == "attention_decode":  # of as many KV heads as a committed schedule is for
        q, k, v, lengths = tensors
        tensors = q.repeat(1, 1, 2, 1), k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1), lengths
    stays = trace(lambda: door.call(*tensors))
    assert len(stays) == len(set(stays)) <= MODULES, stays
