"""Read a kernel's text as C++ tokens, and hash what is proved by what.

Three parts of a kernel can each be wrong by themselves, and each has a hash of its own: see Hashes.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

INTERFACE_MARK = "---- The C interface"  # behind device code: from here on structs and prototypes
HOST_MARK = "---- The host's side"  # the rest of a kernel's file is its launcher

_SLUG = "FAGEN_SLUG"  # stands for the slug in what is hashed
_WORKSPACE = "workspace_bytes"  # a formula of numbers
_ENTRIES = (f"fagen_{_SLUG}", f"fagen_{_SLUG}_workspace")
# What refuses calls, or says why, answers without a GPU: tests call all of it. Of shared memory the
# compiler gives both sides the same size.
_NOT_FOLLOWED = frozenset({"check", "check_sizes", "Status", "kMessages", "SharedStorage"})
_ATTRIBUTES = frozenset({"alignas", "__launch_bounds__", "__cluster_dims__", "decltype"})
_TYPES = frozenset({"struct", "enum", "using"})


@dataclass(frozen=True)
class Hashes:
    """Of what of a kernel's text there is evidence; comments and layout are in no hash.

    `device` is of the includes and of all that thread blocks run. `launcher` is of what runs on the
    CPU once a call is found good: all that its C functions reach, in the header that launchers
    share too, numbers of the head by name only.
    `constants` is of these numbers and of the workspace's formula, of which machine code need not
    show anything. In none are the slug, the C structs, the checks of arguments and the texts of
    messages: tests prove those on a CPU; and the names of what the text itself declares.
    """

    device: str
    launcher: str
    constants: str


def hashes_of(kernel: str, slug: str, header: str) -> Hashes:
    """Hash the parts of a kernel's text, laid out or not, with what it reaches in the header."""
    top, device, host = parts_of_text(kernel.replace(slug, _SLUG), _SLUG)
    own = [*tokens(device)]
    declared = [*_declarations(own)]
    names = dict.fromkeys(decl.name for decl in declared)
    launcher, constants = _launched(
        [*declared, *_declarations([*tokens(host)]), *_shared_by_launchers(header)]
    )
    return Hashes(
        device=_digest([*tokens(top), *_unnamed(own, _numbered(names))]),
        launcher=_digest(launcher),
        constants=_digest(constants),
    )


def parts_of_text(kernel: str, slug: str) -> tuple[str, str, str]:
    """Return a kernel's includes, its device code in its namespace, and its launcher.

    The C interface is left out, which once stood before the device code.
    """
    begin = kernel.index(f"namespace fagen_{slug}_kernel")
    (top, _), (rest, host) = _cut(kernel[:begin], INTERFACE_MARK), _cut(kernel[begin:], HOST_MARK)
    return top, _cut(rest, INTERFACE_MARK)[0], host


@lru_cache(1)  # the header is the same of all kernels
def _shared_by_launchers(header: str) -> tuple["_Declaration", ...]:
    return tuple(_declarations([*tokens(header[header.index("namespace ") :])]))


def _cut(text: str, mark: str) -> tuple[str, str]:
    """Return what is above and below the line with a mark."""
    above, _, below = text.partition(mark)
    return above, below.partition("\n")[2]


def token_hash(text: str) -> str:
    """Return the sha256 of C++ text's tokens: comments and layout do not change it."""
    return _digest(tokens(text))


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


_TOKEN = re.compile(
    r"""
      (?P<skip>   //[^\n]* | /\*.*?\*/ | \\\n | [^\S\n]+ )
    | (?P<line>   \n )
    | R"(?P<mark>[^(]*)\(.*?\)(?P=mark)"
    | "(?: \\. | [^"\\\n] )*" | '(?: \\. | [^'\\\n] )*'
    | \.?\d(?: [eEpP][+-] | '\w | [\w.] )*
    | \w+
    | <<=|>>=|<=>|\.\.\.|->\*|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\#\#|[-+*/%&|^]=
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens(text: str) -> Iterator[str]:
    """Yield C++ tokens; the end of a preprocessor line is one of them, since it means something."""
    directive = False
    fresh = True  # nothing but white space since the line began
    for match in _TOKEN.finditer(text):
        if match["line"]:
            if directive:
                yield "\n"
            directive, fresh = False, True
        elif not match["skip"]:
            directive = directive or (fresh and match[0] == "#")
            fresh = False
            yield match[0]


# ---- what a launcher reaches ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Declaration:
    """What a namespace declares by one name."""

    name: str
    tokens: tuple[str, ...]

    @property
    def value(self) -> tuple[str, ...]:
        """What a constant or another name of a type stands for; nothing of anything else."""
        head, _, value = _split(self.tokens, "=")
        plain = not {"(", "{"} & {*head} or self.tokens[:2] == ("enum", ":")
        return value if plain else ()

    @property
    def is_device_code(self) -> bool:
        """Whether the launcher can name it and not run it."""
        head, _, _ = _split(self.tokens, "{")
        return "__global__" in head or ("__device__" in head and "__host__" not in head)


def _launched(declared: Sequence[_Declaration]) -> tuple[list[str], list[str]]:
    """Return the tokens of what a call runs on the CPU, and those of the numbers that it reads.

    The former are in the order in which the C functions reach them, the latter in that of the text.
    """
    named: dict[str, list[_Declaration]] = {}
    for decl in declared:
        named.setdefault(decl.name, []).append(decl)
    reached = [decl for name in _ENTRIES for decl in named[name]]
    used = dict.fromkeys(_ENTRIES)
    for decl in reached:  # which grows meanwhile
        for word in decl.tokens:
            if word in named and word not in used:
                used[word] = None
                if word not in _NOT_FOLLOWED:
                    reached += [new for new in named[word] if not new.is_device_code]
    numeric = [decl for decl in reached if decl.value or decl.name == _WORKSPACE]
    launcher = [word for decl in reached if decl not in numeric for word in decl.tokens]
    in_order = sorted(numeric, key=declared.index)
    names = dict.fromkeys(named, "#") | _numbered(decl.name for decl in in_order)
    constants = [word for decl in in_order for word in decl.value or decl.tokens]
    texts = map(_without_message, _unnamed(launcher, _numbered(used)))
    return [*texts], [*_unnamed(constants, names)]


def _numbered(names: Iterable[str]) -> dict[str, str]:
    return {name: f"#{number}" for number, name in enumerate(names)}


def _unnamed(words: Iterable[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield words, those in `names` as what these say: names that a text declares itself.

    So to rename a constant, a function or a type everywhere changes nothing. What stands behind a
    dot, an arrow or a scope is the member of something, and stays as it is.
    """
    before = ""
    for word in words:
        yield word if before in (".", "->", "::") else names.get(word, word)
        before = word


def _without_message(token: str) -> str:
    """Return a token, or an empty string's for one of several words, which is for people."""
    return '""' if token.startswith('"') and " " in token else token


def _declarations(text: Sequence[str]) -> Iterator[_Declaration]:
    """Yield what tokens declare outside of any function or struct, in their order."""
    depth, begin = 0, 0
    for place, token in enumerate(text):
        if depth == 0 and token == "{" and "namespace" in text[begin:place]:
            begin = place + 1  # what is inside counts as outside
        elif token in ("{", "(", "["):
            depth += 1
        elif token == "}" and depth == 0:
            begin = place + 1  # the end of a namespace
        elif token in ("}", ")", "]"):
            depth -= 1
        behind = text[place + 1] if place + 1 < len(text) else ""
        ends = token in (";", "\n") or (token == "}" and behind not in (";", ",", ")"))
        if depth == 0 and ends and place >= begin:
            decl = tuple(text[begin : place + 1])
            yield _Declaration(_name(decl), decl)
            begin = place + 1


def _name(decl: tuple[str, ...]) -> str:
    """Return the name that is declared: what stands before its value, its body or its arguments."""
    if decl[:2] == ("enum", ":"):  # of one enumerator
        return decl[decl.index("{") + 1]
    depth, name, of_type = 0, "", False
    for token in decl:
        if depth:
            depth += (token == "(") - (token == ")")
        elif token == "(" and name in _ATTRIBUTES:
            depth, name = 1, ""
        elif token in ("(", "=", "[", ";") or (token == "{" and name):
            break
        elif token.isidentifier() and not (of_type and name):
            of_type = of_type or token in _TYPES
            name = "" if token in _TYPES else token
    return name


def _split(words: tuple[str, ...], at: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return what is before the first of these words, the word, and what is after it."""
    if at not in words:
        return words, "", ()
    place = words.index(at)
    return words[:place], at, words[place + 1 :]
