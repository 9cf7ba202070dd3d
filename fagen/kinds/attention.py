"""What kinds of attention write alike: keys of schedules, and what Plans say of their ledgers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from pydantic import Field

from fagen.arch import SM90
from fagen.combining import LOG2_E, fp32
from fagen.kinds.budget import Budget, Ledgers
from fagen.kinds.sinks import NO_SINK
from fagen.ledger import Ledger
from fagen.schedule import Schedule, Section, Values, derived
from fagen.vocab import DTYPES, FP32, MASKS, PARTIALS, SCORES

# one wgmma takes all columns of V; rows of 8 columns keep the 16-byte steps that TMA needs
HEAD_DIM: dict[str, Any] = {"ge": 16, "le": SM90.wgmma_n_max, "multiple_of": 8}

SCORE_KEY = (
    "what the scaled product of a query and a key becomes, before the mask and the softmax: "
    '"plain", nothing else; "softcap", softcap · tanh(score / softcap)'
)

# what words of a schedule stand for in a Plan
_NAMED: Mapping[str, Mapping[str, Any]] = {
    "dtype": {**DTYPES, FP32.name: FP32},
    "out_dtype": {**DTYPES, FP32.name: FP32},
    "mask": MASKS,
    "score": SCORES,
    "sink": {NO_SINK: None, **PARTIALS},
}


def scale_log2(scale: float) -> float:
    """Return what scores are multiplied by to be exponents of 2, as a kernel works it out."""
    return fp32(fp32(scale) * LOG2_E)


class Build(Section):
    """What the compiler may do."""

    max_spill_bytes: int = Field(
        default=0, ge=0, le=4096, description="bytes per thread that may spill to local memory"
    )


def registers(description: str) -> Any:
    """Declare a key of registers per thread, as setmaxnreg takes them."""
    return derived(
        description,
        ge=SM90.setmaxnreg_min,
        le=SM90.setmaxnreg_max,
        multiple_of=SM90.register_quantum,
    )


def padded_head_dims(values: Values) -> tuple[int, int]:
    """Return how many columns of shared memory Q and K take, and V and O."""
    filled_up = DTYPES[values["dtype"]].filled_up
    return filled_up(values["head_dim"]), filled_up(values["head_dim_v"])


def accumulators(columns: int) -> int:
    """Return a thread's fp32 registers of one warpgroup's 64 x columns."""
    return columns * SM90.wgmma_m // SM90.warpgroup_threads


def operands(first: int, count: int) -> tuple[int, ...]:
    """Return the numbers of so many asm operands, from one on."""
    return tuple(range(first, first + count))


@dataclass(frozen=True)
class Gemm:
    """A wgmma instruction of 64 rows: what it makes, its N, of what numbers, and how they lie."""

    name: str
    says: str
    n: int
    number: str
    a_in_registers: bool = False
    a_along_m: bool = False  # in shared memory, with M and not K along its rows
    b_along_n: bool = False
    sixteen_bits: bool = True  # else both have K along their rows

    @property
    def accumulators(self) -> int:
        """Fp32 registers of a thread."""
        return accumulators(self.n)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the asm operands that follow these: A, B, whether to add."""
        return operands(self.accumulators, 6 if self.a_in_registers else 3)

    @property
    def immediates(self) -> tuple[int, ...]:
        """What comes last: A and B as they are, not negated; whether they lie along M and N."""
        along: tuple[int, ...] = (int(self.b_along_n),)
        if not self.a_in_registers:
            along = int(self.a_along_m), *along
        return (1, 1, *(along if self.sixteen_bits else ()))


def carried(plan: type, schedule: Schedule, *but: str) -> dict[str, Any]:
    """Return the fields of a Plan that are a schedule's own keys, `but` some, and which it is."""
    values = schedule.values()
    names = {field.name for field in fields(plan)} & values.keys() - {*but}
    named = {name: _NAMED.get(name, {}).get(values[name], values[name]) for name in names}
    return {"schedule": schedule, "slug": schedule.slug, **named}


class Budgeted:
    """What a Plan with ledgers says of them."""

    budget: ClassVar[Budget]
    thrifty: ClassVar[str]  # which keys ask for fewer registers

    schedule: Any
    threads: int
    ledgers: Ledgers

    @property
    def shared(self) -> Ledger:
        """What is taken of shared memory."""
        return self.ledgers.shared

    @property
    def shared_bytes(self) -> int:
        """Of a thread block."""
        return self.shared.total

    @property
    def modelled_registers(self) -> int:
        """Of the thread that takes most, by the ledgers."""
        return max(ledger.total for ledger in self.ledgers.by_role)

    @property
    def spill_remedy(self) -> str:
        """What a schedule may change against spills; {spilled} is how many bytes there are."""
        return (
            f"{self.thrifty} fewer registers, "
            "max_spill_bytes = {spilled} under [build] tolerates it"
        )

    @property
    def ledger(self) -> str:
        """The ledgers, to be printed."""
        return "\n\n".join(map(str, self.ledgers))

    def explained(self) -> str:
        """Return the ledgers with their formulae, the numbers in them, and the solved limits."""
        return "\n".join([self.ledger, "", *self.budget.explained(self.schedule)])

    def record(self) -> dict[str, Any]:
        """Return keys and ledgers, for JSON."""
        return {
            "schedule": self.schedule.slug,
            "keys": self.schedule.values(),
            "threads": self.threads,
            **self._recorded(),
            **{
                name: {**asdict(ledger), "total": ledger.total}
                for name, ledger in zip(
                    ("shared", "registers", "last_registers"),
                    (self.shared, *self.ledgers.by_role),
                    strict=False,
                )
            },
        }

    def _recorded(self) -> dict[str, Any]:
        return {}
