"""Ledgers: what is taken of a limit, row by row, from formulae that sympy prints and solves.

Importing this module does not import sympy, which takes half a second.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

Formulae = Callable[..., Mapping[str, Any]]  # of choices: names of rows, each with its formula


@dataclass(frozen=True)
class Row:
    """One line of a ledger; `amount` is in the ledger's unit, `formula` what it came from."""

    name: str
    amount: int
    formula: str


@dataclass(frozen=True)
class Margin:
    """How far a model of registers is off: the compiler's less the model's, least and most.

    Of so many kernels; the compiler spends what a limit leaves, and so takes more where there is.
    """

    kernels: int
    least: int
    most: int

    def __str__(self) -> str:
        ends = [f"{abs(end)} {'less' if end < 0 else 'more'}" for end in (self.least, self.most)]
        return f"a model: in {self.kernels} kernels the compiler took {' … '.join(ends)}"


@dataclass(frozen=True)
class Ledger:
    """What is taken, in rows, of a limit that has a source."""

    name: str
    unit: str
    rows: tuple[Row, ...]
    limit: int
    source: str

    @property
    def total(self) -> int:
        """The sum of the rows."""
        return sum(row.amount for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether the sum is within the limit."""
        return self.total <= self.limit

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.unit}"]
        lines += [f"  {row.name:<10}{row.amount:>9,}  {row.formula}" for row in self.rows]
        sign = "of" if self.fits else ">"
        return "\n".join(
            [*lines, f"  {'sum':<10}{self.total:>9,}  {sign} {self.limit:,} ({self.source})"]
        )


@cache
def symbols(names: tuple[str, ...]) -> dict[str, Any]:
    """Return sympy's symbols for positive whole numbers of these names."""
    import sympy

    return {name: sympy.Symbol(name, positive=True, integer=True) for name in names}


@cache
def _evaluator(names: tuple[str, ...], formulae: Formulae, *choices: Any) -> Callable[..., Any]:
    import sympy

    function: Callable[..., Any] = sympy.lambdify(
        list(symbols(names).values()), list(formulae(*choices).values()), modules="math"
    )
    return function


@cache
def summed(
    names: tuple[str, ...], formulae: Formulae, choices: tuple[Any, ...], align: int
) -> Callable[..., int]:
    """Return a function of the sizes: the sum of the rows, each rounded up; it remembers."""
    rows = _evaluator(names, formulae, *choices)
    return cache(lambda *sizes: sum(-(-int(row) // align) * align for row in rows(*sizes)))


def rows(
    sizes: Mapping[str, int], align: int, formulae: Formulae, choices: Iterable[Any]
) -> tuple[Row, ...]:
    """Return the rows of a ledger at these sizes, each rounded up to a multiple of `align`."""
    choices = tuple(choices)
    amounts = _evaluator(tuple(sizes), formulae, *choices)(**sizes)
    return tuple(
        Row(name, -(-int(amount) // align) * align, str(formula).replace("*", "·"))
        for (name, formula), amount in zip(formulae(*choices).items(), amounts, strict=True)
    )


def solved(
    ledger: Ledger, formulae: Mapping[str, Any], sizes: Mapping[str, int], key: str
) -> Iterator[str]:
    """Yield lines: `sum of the formulae = limit`, solved for one of the sizes."""
    import sympy

    named = symbols(tuple(sizes))
    numbers = {named[name]: value for name, value in sizes.items()}
    unknown = sympy.Dummy(key)  # of any sign: what does not fit at all is to be solved too
    total = sympy.Add(*formulae.values())
    room = ledger.limit - total.subs(named[key], unknown)
    # Max(a, b) ≤ x means a ≤ x and b ≤ x: the least root of all is the bound
    cases = [room.subs(most, term) for most in room.atoms(sympy.Max) for term in most.args]
    roots = [root for case in cases or [room] for root in sympy.solve(case, unknown)]
    bound = min(roots, key=lambda root: root.subs(numbers))
    yield ""
    yield f"{ledger.name} = {total} <= {ledger.limit:,} ({ledger.source})".replace("*", "·")
    yield f"  so {key} <= {bound} = {float(bound.subs(numbers)):.1f}".replace("*", "·")


def first_that_fits(
    options: Iterable[Iterable[Mapping[str, Any]]], fits: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any] | None:
    """Return the first combination of changed keys, one of each options, that fits."""
    for choice in product(*options):
        changes = {key: value for part in choice for key, value in part.items()}
        if fits(changes):
            return changes
    return None
