"""A schedule's values in, its ledgers out, and where one is exceeded what to change, in words."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fagen.arch import SM90
from fagen.errors import OverBudget, ScheduleError
from fagen.ledger import Formulae, Ledger, Row, first_that_fits, rows, solved, summed
from fagen.schedule import Schedule, Values

FP32_BYTES = 4
SHARED = "shared memory of a thread block"
REGISTER_FILE = "register file of a thread block"

Changes = dict[str, Any]  # keys with new values; None leaves a key out


@dataclass(frozen=True)
class Account:
    """A ledger before it is worked out: its formulae are those that `choices` pick.

    Each row is rounded up to a multiple of `align`; an explanation solves the sum for `unknown`.
    """

    name: str
    unit: str
    formulae: Formulae
    choices: tuple[Any, ...]
    limit: int
    source: str
    unknown: str
    align: int = 1

    def ledger(self, sizes: Mapping[str, int]) -> Ledger:
        """Return it with its rows at these sizes."""
        lines = rows(sizes, self.align, self.formulae, self.choices)
        return Ledger(self.name, self.unit, lines, self.limit, self.source)

    def total(self, sizes: Mapping[str, int]) -> int:
        """Return the sum of its rows, and nothing more: for a search."""
        return summed(tuple(sizes), self.formulae, self.choices, self.align)(*sizes.values())


def shared_memory(
    formulae: Formulae,
    choices: tuple[Any, ...],
    unknown: str,
    limit: int = SM90.smem_per_block,
    source: str = SM90.source("smem_per_block"),
) -> Account:
    """Return what is taken of a thread block's shared memory, array by array."""
    align = SM90.smem_tile_alignment
    unit = f"bytes, each array rounded up to {align:,}"
    return Account(SHARED, unit, formulae, choices, limit, source, unknown, align)


def register_file(
    values: Values, roles: Mapping[str, tuple[int, str]], threads: int, launched: int
) -> Ledger:
    """Return what setmaxnreg asks for, of what the launch brought; more would wait for ever.

    `roles` says of each role how many warpgroups it has, and the key of their threads' registers.
    So many `threads` have been `launched` with so many.
    """
    group = SM90.warpgroup_threads
    lines = (
        Row(role, groups * group * values[key], f"{f'{groups}·' * (groups > 1)}{group}·{key}")
        for role, (groups, key) in roles.items()
    )
    return Ledger(
        REGISTER_FILE,
        "registers after setmaxnreg",
        tuple(lines),
        launched * threads,
        f"{threads} threads at launch, {SM90.source('registers_per_sm')}",
    )


class Ledgers(tuple[Ledger, ...]):
    """The ledgers of a schedule: shared memory, registers of each role, the register file."""

    @property
    def shared(self) -> Ledger:
        """That of shared memory."""
        return self[0]

    @property
    def registers(self) -> Ledger:
        """That of the registers of a thread; of several roles the first one's."""
        return self[1]

    @property
    def by_role(self) -> tuple[Ledger, ...]:
        """Those of the registers of a thread of each role."""
        return tuple(ledger for ledger in self[1:] if ledger.name != REGISTER_FILE)

    def over(self) -> tuple[Ledger, ...]:
        """Return those that do not fit."""
        return tuple(ledger for ledger in self if not ledger.fits)


@dataclass(frozen=True)
class Budget:
    """What schedules of a kind take of an SM.

    `names` are those of all ledgers that a schedule may have. `sizes` gives the numbers that
    formulae are of, in the order of their symbols, and `accounts` what is summed up. `options` are,
    of a key or several, the values that ask for less, nearest first.
    """

    names: tuple[str, ...]
    sizes: Callable[[Values], dict[str, int]]
    accounts: Callable[[Values], Iterable[Account | Ledger]]
    options: Callable[[Schedule], Iterable[list[Changes]]]

    def of(self, schedule: Schedule) -> Ledgers:
        """Return all ledgers of a schedule, whether they fit or not."""
        values = schedule.values()
        sizes = self.sizes(values)
        return Ledgers(
            account if isinstance(account, Ledger) else account.ledger(sizes)
            for account in self.accounts(values)
        )

    def sums(self, values: Values) -> Iterator[tuple[str, int, int]]:
        """Yield (name, sum, limit) of each that does not fit, and nothing more: for a search.

        `values` are those of a schedule's keys that keep the rules between keys.
        """
        sizes = self.sizes(values)
        for account in self.accounts(values):
            total = account.total if isinstance(account, Ledger) else account.total(sizes)
            if total > account.limit:
                yield account.name, total, account.limit

    def fits(self, schedule: Schedule, changes: Mapping[str, Any]) -> bool:
        """Whether a schedule is one and fits once keys are changed."""
        try:
            return next(self.sums(schedule.but(**changes).values()), None) is None
        except ScheduleError:
            return False

    def first(self, schedule: Schedule, options: Iterable[list[Changes]]) -> Changes | None:
        """Return the first combination of changes, one of each options, with which it fits."""
        return first_that_fits(options, lambda changes: self.fits(schedule, changes))

    def nearest(self, schedule: Schedule) -> tuple[Changes, ...]:
        """Return changes that make a schedule fit: of each key alone the nearest."""
        changes_by_key = (self.first(schedule, [options]) for options in self.options(schedule))
        return tuple(changes for changes in changes_by_key if changes)

    def kept(self, schedule: Schedule, key: str) -> Ledgers:
        """Return the ledgers of a schedule that fits.

        Raises OverBudget, with every sum that does not fit and what would. `key` of [tile] is what
        a reader would change first.
        """
        ledgers = self.of(schedule)
        if over := ledgers.over():
            raise _over(schedule, key, over, self.nearest(schedule))
        return ledgers

    def explained(self, schedule: Schedule) -> Iterator[str]:
        """Yield lines: the numbers in the formulae, each sum, and the limit it leads to."""
        values = schedule.values()
        sizes = self.sizes(values)
        yield "with " + ", ".join(f"{name} = {value}" for name, value in sizes.items())
        for account in self.accounts(values):
            if isinstance(account, Account):
                formulae = account.formulae(*account.choices)
                yield from solved(account.ledger(sizes), formulae, sizes, account.unknown)


def _over(
    schedule: Schedule, key: str, over: Iterable[Ledger], nearest: Iterable[Changes]
) -> OverBudget:
    lines = [
        f"{schedule.origin.at('tile', key)}: tile.{key} = {schedule.values()[key]}: "
        f"{schedule.slug} does not fit an SM of {SM90.name}"
    ]
    for ledger in over:
        lines += ["  " + line for line in str(ledger).splitlines()]
    fits = [
        " and ".join(
            f"{key} left out" if value is None else f"{key} = {json.dumps(value)}"
            for key, value in changes.items()
        )
        for changes in nearest
    ]
    lines.append("  fits with " + ", or with ".join(fits) if fits else "  nothing near it fits")
    return OverBudget("\n".join(lines))


def registers_left_out(schedule: Schedule, *keys: str) -> Changes:
    """Return the change that leaves out which of these keys a schedule says."""
    return {key: None for key in keys if key in schedule.settings()}


def below(value: int, step: int, least: int = 1) -> range:
    """Return the values below one, nearest first."""
    return range(value - step, least - 1, -step)
