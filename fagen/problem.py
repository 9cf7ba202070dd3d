"""A call's dtypes, head dims, mask and layouts in; whether a schedule computes that out."""

from dataclasses import dataclass, replace

import torch

from fagen.kinds.forward.keys import Schedule
from fagen.runtime.arguments import dtype_of, name_of, refuse_word
from fagen.vocab import DTYPES, MASKS, OUT_DTYPES


@dataclass(frozen=True)
class Problem:
    """What is to be computed, apart from sizes that any kernel takes."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    # in e4m3; None leaves it to a schedule that the caller has chosen
    out_dtype: torch.dtype | None = None
    v_layout: str | None = None
    scale_rows: int | None = None  # that share a scale; 0 where a head or the tensor has one

    def __str__(self) -> str:
        columns = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            columns += f" and {self.head_dim_v} (V)"
        mask = "causal" if self.causal else "full"
        said = [name_of(self.dtype), f"head_dim {columns}", mask]
        if self.v_layout:
            said.append(f"V by {self.v_layout}")
        if self.scale_rows is not None:
            blocks = f"block of {self.scale_rows} rows" if self.scale_rows else "head or tensor"
            said.append(f"scales by {blocks}")
        if self.out_dtype:
            said.append(f"out in {name_of(self.out_dtype)}")
        return ", ".join(said)


def problem_of(schedule: Schedule) -> Problem:
    """Return what a schedule computes."""
    asked, dtype = schedule.attention, DTYPES[schedule.attention.dtype]
    problem = Problem(
        getattr(torch, dtype.torch), asked.head_dim, asked.head_dim_v, MASKS[asked.mask].causal
    )
    if not dtype.fp8:
        return problem
    return replace(
        problem,
        out_dtype=getattr(torch, DTYPES[asked.out_dtype].torch),
        v_layout=schedule.fp8.v_layout,
        scale_rows=schedule.fp8.scale_rows,
    )


def solves(schedule: Schedule, problem: Problem) -> bool:
    """Whether a schedule computes that; what the problem leaves open it may say."""
    found = problem_of(schedule)
    left = {key: value for key, value in vars(found).items() if getattr(problem, key) is None}
    return replace(problem, **left) == found


def writing(schedule: Schedule, out_dtype: torch.dtype | None) -> Schedule:
    """Return the schedule, with O in this dtype where it is of e4m3: nothing else depends on it.

    Raises ValueError for a dtype that no kernel writes.
    """
    if out_dtype is None or not DTYPES[schedule.attention.dtype].fp8:
        return schedule
    words = {dtype_of(word): word for word in OUT_DTYPES}
    refuse_word("out_dtype", out_dtype, words)
    return schedule.but(out_dtype=words[out_dtype])
