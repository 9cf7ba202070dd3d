"""One text and one hash for each expression, however it was written or traced."""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

from fagen.errors import ExpressionError
from fagen.expr import logic, make
from fagen.expr.tree import BOOL, INT, LANGUAGE, MOST_GIVEN, Lookup, Name, Node, Table


@dataclass(frozen=True)
class Expression:
    """A mask or a score, checked: fagen.expr.rules makes it."""

    tree: Node
    called: str = field(default="", compare=False)  # for messages: a function's name

    @property
    def kind(self) -> str:
        """Whether it is a mask or a score."""
        return "mask" if self.tree.type == BOOL else "score"

    @property
    def text(self) -> str:
        """What reads back as it."""
        return self.tree.text

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """What a call gives as tensors, by name."""
        found = {n.table.name: n.table for n in self.tree.walk() if isinstance(n, Lookup)}
        return tuple(found[name] for name in sorted(found))

    @cached_property
    def parameters(self) -> tuple[Name, ...]:
        """What a call gives as numbers, by name; extents of tables are among them."""
        names = [node for node in self.tree.walk() if isinstance(node, Name)]
        names += [dim for table in self.tables for dim in table.over if isinstance(dim, Name)]
        found = {node.name: node for node in names if node.name not in LANGUAGE}
        return tuple(found[name] for name in sorted(found))

    @property
    def given(self) -> tuple[Name | Table, ...]:
        """All that a call gives."""
        return self.parameters + self.tables

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of all that a call gives."""
        return tuple(sorted(given.name for given in self.given))

    @cached_property
    def declarations(self) -> str:
        """All that a call gives, a line for each."""
        lines = [f"{p.name}: {p.type}{_ends(p)}" for p in self.parameters]
        for table in self.tables:
            flags = " rising" * table.rising + " gradient" * table.gradient
            lines.append(f"{table.name}: {table.type}[{table.extents}]{flags}")
        return "\n".join(lines)

    @cached_property
    def key(self) -> str:
        """Ten digits that are another expression's by chance alone."""
        whole = f"{self.kind}\n{self.text}\n{self.declarations}"
        return sha256(whole.encode()).hexdigest()[:10]

    def __str__(self) -> str:
        return self.text

    def __and__(self, other: "Expression") -> "Expression":
        """Return the mask that shows what both do."""
        return all_of(self, other)


def _ends(parameter: Name) -> str:
    usual = (-MOST_GIVEN, MOST_GIVEN) if parameter.type == INT else (-make.INF, make.INF)
    if (parameter.least, parameter.most) == usual:
        return ""
    return f" from {parameter.least!r} to {parameter.most!r}"


def all_of(*masks: Expression) -> Expression:
    """Return the mask that shows what all do; a name that two declare is one thing in both."""
    named: dict[str, Name | Table] = {}
    for mask in masks:
        if mask.kind != "mask":
            raise ExpressionError(f"{mask.text} is a score, not a mask")
        for given in mask.given:
            if named.setdefault(given.name, given) != given:
                raise ExpressionError(f"two masks declare {given.name}, and not alike")
    called = " and ".join(dict.fromkeys(mask.called for mask in masks if mask.called))
    return Expression(logic.both(*(mask.tree for mask in masks)), called)
