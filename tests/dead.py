"""Find in a kernel's text what nothing needs: names, parameters, empty bodies and neutral terms."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fagen.render.tokens import tokens

_ATTRIBUTES = {"alignas", "__launch_bounds__", "__cluster_dims__", "__align__", "decltype"}
_NO_TYPES = {
    *("return", "else", "case", "goto", "new", "throw", "break", "continue", "if", "for", "while"),
    *("switch", "do", "using", "static_assert", "asm", "operator", "sizeof", "default", "public"),
}
_QUALIFIERS = {
    *("const", "constexpr", "static", "extern", "inline", "volatile", "explicit", "__shared__"),
    *("__host__", "__device__", "__global__", "__forceinline__", "__grid_constant__"),
}
_NEUTRAL = (
    r"[-+] 0(\.0?)?f(?! [*/])",
    r"\* 1(\.0?)?f? [^*/%]",
    r"\|\| false\b",
    r"&& true\b",
    r"\bif (constexpr )?\( (true|false) \)",
    r"\belse \{ \}",
    r"\bif \((?:[^()]|\([^()]*\))*\) \{ \}",
)


@dataclass(frozen=True)
class Function:
    """A function's name, the names of its parameters, and its body."""

    name: str
    parameters: tuple[str, ...]
    body: tuple[str, ...]


def closing(words: Sequence[str], begin: int) -> int:
    """Return the place of the bracket that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(words)):
        depth += words[place] in ("(", "[", "{")
        depth -= words[place] in (")", "]", "}")
        if depth == 0:
            return place
    raise ValueError(words[begin : begin + 20])


class Scope:
    """What a namespace declares, and the structs in it."""

    def __init__(self, words: Sequence[str]) -> None:
        self.names: list[str] = []
        self.structs: set[str] = set()
        self.functions: list[Function] = []
        self._read(words)

    def _read(self, words: Sequence[str]) -> None:
        place = 0
        while place < len(words):
            end = place
            while end < len(words) and words[end] not in (";", "{"):
                end = closing(words, end) + 1 if words[end] in ("(", "[") else end + 1
            head = words[place:end]
            if end == len(words):
                return
            if words[end] == "{":
                last = closing(words, end)
                place = self._block(head, words[end + 1 : last], words, last)
            else:
                self.names += declared(head)
                place = end + 1

    def _block(
        self, head: Sequence[str], body: Sequence[str], words: Sequence[str], last: int
    ) -> int:
        """Read what has a body; return the place behind it."""
        plain = without_attributes(head)
        kind = next((word for word in plain if word in ("struct", "union", "enum")), "")
        if kind and "(" not in plain:
            if kind == "enum":
                befores = zip(("{", *body), body, strict=False)
                self.names += [word for before, word in befores if before in ("{", ",")]
            else:
                own = plain[plain.index(kind) + 1 :][:1]  # none of an anonymous union
                self.names += filter(str.isidentifier, own)
                self.structs |= {*own}
                self._read(body)
            return words.index(";", last) + 1
        if "(" not in plain or "=" in plain[: plain.index("(")]:  # a value in braces
            self.names += declared(head)
            return words.index(";", last) + 1
        self.functions.append(function(head, body))
        return last + 1 + (words[last + 1 : last + 2] == [";"])


def function(head: Sequence[str], body: Sequence[str]) -> Function:
    """Return a function, of what stands before its body."""
    place = 0
    head = without_attributes(head)
    while head[place] != "(":
        place += 1
    end = closing(head, place)
    parameters = [
        name for one in by_commas(head[place + 1 : end]) for name in declared(one, alone=True)
    ]
    rest = tuple(head[end + 1 :])  # what members begin with
    return Function(head[place - 1], tuple(parameters), (*rest, *body))


def by_commas(words: Sequence[str]) -> Iterator[list[str]]:
    """Split at the commas that are in no brackets."""
    depth, one = 0, []
    for word in words:
        depth += (word in ("(", "[", "{", "<")) - (word in (")", "]", "}", ">"))
        if word == "," and depth == 0:
            yield one
            one = []
        else:
            one.append(word)
    if one:
        yield one


def declared(words: Sequence[str], *, alone: bool = False) -> list[str]:
    """Return the names that a statement declares, or a parameter; none if it is no declaration."""
    words = [*words]
    while words[:1] in (["["], ["template"]):
        words = words[after_attribute(words) :]
    if words[:1] == ["using"] and "=" in words:
        return [words[1]]
    words = without_attributes(words)
    if not words or not words[0].isidentifier() or words[0] in _NO_TYPES:
        return []
    place = type_end(words)
    names = []
    for number, one in enumerate(by_commas(words[place:])):
        while one and one[0] in ("*", "&", "&&"):
            one = one[1:]
        if one[:1] == ["("] and one[1:2] == ["&"]:  # a reference to an array
            one = one[2:]
        ends = one[1:2] in ([], ["="], ["["], ["{"], ["("], [")"], [":"])
        called = alone and number == 0 and one[1:2] == ["("]
        if not one or not one[0].isidentifier() or not ends or called:
            return names
        names.append(one[0])
    return names


def without_attributes(words: Sequence[str]) -> list[str]:
    """Return a declaration without words like const, and without alignas(…)."""
    plain: list[str] = []
    place = 0
    while place < len(words):
        if words[place] in _ATTRIBUTES:
            place = closing(words, place + 1)
        elif words[place] not in _QUALIFIERS:
            plain.append(words[place])
        place += 1
    return plain


def after_attribute(words: Sequence[str]) -> int:
    """Return how many words [[…]] or template <…> takes at the beginning."""
    if words[0] == "[":
        return closing(words, 0) + 1
    depth = 0
    for place, word in enumerate(words):
        depth += (word == "<") - (word == ">")
        if word == ">" and depth == 0:
            return place + 1
    return len(words)


def type_end(words: Sequence[str]) -> int:
    """Return where the type ends that a declaration begins with."""
    place = 1
    while words[place : place + 1] == ["::"]:
        place += 2
    if words[place : place + 1] == ["<"]:
        depth = 0
        while place < len(words):
            depth += (words[place] == "<") - (words[place] == ">")
            place += 1
            if depth == 0:
                break
    while words[place : place + 1] == ["::"]:
        place += 2
    return place


def locals_of(body: Sequence[str]) -> Iterator[str]:
    """Yield the names that a function's body declares."""
    begin = 0
    for place, word in enumerate(body):
        if word in (";", "{", "}") or (word == "(" and body[place - 1] in ("for", "if")):
            statement = [*body[begin:place]]
            if word == ";" or (word == "{" and statement[-1:] != [")"]):
                yield from declared(statement)
            begin = place + 1


def _device_code(kernel: str, slug: str) -> str:
    """Return what of a kernel's text stands in its namespace, and what follows."""
    return kernel[kernel.index("{", kernel.index(f"namespace fagen_{slug}_kernel")) + 1 :]


def _scope(code: str, slug: str) -> Scope:
    code = code[: code.rindex(f"}}  // namespace fagen_{slug}_kernel")]
    return Scope([*tokens(re.sub(r"#pragma[^\n]*", "", code))])


def ignored(kernel: str, slug: str) -> Iterator[tuple[str, bool]]:
    """Yield each parameter that a function names, as f(x), and whether its body ignores it."""
    for one in _scope(_device_code(kernel, slug), slug).functions:
        for name in one.parameters:
            yield f"{one.name}({name})", name not in one.body


def dead(kernel: str, slug: str) -> set[str]:
    """Return what nothing needs of a kernel's device code, a word or two each."""
    code = _device_code(kernel, slug)
    scope = _scope(code, slug)
    everywhere = Counter(tokens(code))
    needless = {name for name in scope.names if everywhere[name] == 1}
    several = Counter(one.name for one in scope.functions)
    for one in scope.functions:
        if one.name.isidentifier() and everywhere[one.name] <= several[one.name]:
            needless.add(f"{one.name}()")
        if not one.body and one.name not in scope.structs:  # a constructor need do no more
            needless.add(f"{one.name}: empty")
        inside = Counter(one.body)
        needless |= {f"{one.name}: {name}" for name in locals_of(one.body) if inside[name] == 1}
        text = " ".join(one.body)
        for sign in _NEUTRAL:
            needless |= {f"{one.name}: {match[0].strip()}" for match in re.finditer(sign, text)}
    return needless
