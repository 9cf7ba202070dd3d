"""A kernel's text with one fault at a time: what orders its threads is left out, or is too weak.

Faults are found by the structure of the text: every statement of a device function that waits,
arrives, fences, meets or counts. All of them stand in the text that comes out, and a number, which
may be another for each run, says which of them is in force: 0 is none.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

_TOKEN = re.compile(
    r'//[^\n]*|^[ \t]*#[^\n]*|"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|\.?\d[\w.]*'
    r"|::|->|\+\+|--|<<=|>>=|[-+*/%&|^<>=!]=|&&|\|\||<<|>>|\S",
    re.MULTILINE,
)
_SETS = {"=", "+=", "-=", "*=", "|=", "^=", "++", "--"}
_WEAK = {  # what ends an operand, by what binds as it does
    "+ -": {"+", "-", "<", ">", "<=", ">=", "==", "!=", "<<", ">>", "&", "|", "^"},
    "&& ||": set[str](),
}
_ENDS_ALL = {"&&", "||", "?", ":", ";", ",", ")", "]", "}", *_SETS}
_CHOICES = ("min", "max")  # which a term may be: what is put before their names stands next to them
_BEFORE = {"?", ":", ";", ",", "(", "[", "{", "return"}
_OPENS, _CLOSES = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}

# what orders threads by itself: of CUDA, of CUTLASS, and as an instruction
_CALLS = {
    *("__syncthreads", "__syncwarp", "__threadfence", "__syncthreads_or", "cluster_sync"),
    *("wait", "test_wait", "try_wait", "arrive", "arrive_and_expect_tx"),
    *("tma_store_arrive", "tma_store_wait", "fence_barrier_init", "fence_view_async_shared"),
    *("atomicInc", "atomicAdd"),
}
_INSTRUCTION = re.compile(
    r'asm volatile \( "(\{ \.reg \.pred \w+, \w+; setp[^;]*; )?'
    r"(bar\.|barrier\.|fence|griddepcontrol|red\.release|ld\.acquire|mbarrier"
    r"|wgmma\.(fence|commit|wait)|cp\.async\.(bulk\.)?(commit|wait))"
)

# Stands before the kernel's text.
_HEAD = """\
namespace fault {
inline int chosen = 0;
inline bool is(int number) { return chosen == number; }
template <class T> T other_phase(int number, T x) { return is(number) ? x ^ 1 : x; }
template <class T> T nothing(int number, T x) { return is(number) ? T(0) : x; }
inline bool always(int number, bool x) { return is(number) || x; }
inline bool never(int number, bool x) { return !is(number) && x; }
struct At {
  int number;
  template <class T> T either(T a, T b, bool first) const {
    return is(number) ? a : is(number + 1) ? b : first ? a : b;
  }
  template <class T> T min(T a, T b) const { return either(a, b, a < b); }
  template <class T> T max(T a, T b) const { return either(a, b, b < a); }
};
}
extern "C" inline __attribute__((used)) void fagen_fault(int number) { fault::chosen = number; }
"""


@dataclass(frozen=True)
class Fault:
    """A fault by its number in the text, and where it is and what, in words that stay."""

    number: int
    function: str
    statement: str
    what: str
    kind: str  # of statement: what it calls, or its first word
    orders: bool  # threads
    place: int  # of several alike in one function

    def __str__(self) -> str:
        place = f" ({self.place + 1})" if self.place else ""
        return f"{self.function}: {self.statement}{place} {self.what}"


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int


@dataclass
class Statement:
    """Tokens first … last - 1, and the function that they are in."""

    function: str
    first: int
    last: int
    head: tuple[int, int] | None = None  # what stands in parentheses of an if or a loop


@dataclass
class Function:
    name: str
    statements: list[Statement] = field(default_factory=list)


class Text:
    """The tokens of a kernel's text and its device functions."""

    def __init__(self, text: str) -> None:
        self.text = text
        tokens = (Token(m[0], m.start(), m.end()) for m in _TOKEN.finditer(text))
        self.tokens = [x for x in tokens if not x.text.lstrip().startswith(("//", "#"))]
        self.closing: dict[int, int] = {}
        stack: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in _OPENS:
                stack.append(i)
            elif token.text in _CLOSES:
                self.closing[stack.pop()] = i
        self.opening = {last: first for first, last in self.closing.items()}
        self.functions = list(self._functions())

    def words(self, first: int, last: int) -> list[str]:
        return [token.text for token in self.tokens[first:last]]

    def source(self, first: int, last: int) -> str:
        """The text of some tokens, on a line."""
        return " ".join(self.text[self.tokens[first].start : self.tokens[last - 1].end].split())

    def _functions(self) -> Iterator[Function]:
        struct, ends = "", 0
        for i, token in enumerate(self.tokens):
            if i >= ends:
                struct = ""
            if token.text == "struct" and (body := self._body(i)):
                struct, ends = self.tokens[i + 1].text, self.closing[body]
            host = i > 0 and self.tokens[i - 1].text == "__host__"
            if token.text not in ("__device__", "__global__") or host:
                continue
            body = self._body(i)
            if body is None or "constexpr" in self.words(i, body):
                continue
            name = next(
                self.tokens[j - 1].text
                for j in range(i, body)
                if self.tokens[j].text == "(" and not self.tokens[j - 1].text.startswith("__")
            )
            function = Function(f"{struct}::{name}" if struct else name)
            self._block(function, body)
            yield function

    def _body(self, i: int) -> int | None:
        """Where the braces open behind a declaration, if any do."""
        while self.tokens[i].text not in ("{", ";"):
            i = self.closing.get(i, i) + 1
        return i if self.tokens[i].text == "{" else None

    def _block(self, function: Function, opening: int) -> int:
        i = opening + 1
        while i < self.closing[opening]:
            i = self._statement(function, i)
        return self.closing[opening] + 1

    def _statement(self, function: Function, i: int) -> int:
        """Note a statement and those within it; returns where the next one begins."""
        first, word = i, self.tokens[i].text
        if word == "{":
            return self._block(function, i)
        if word in ("if", "for", "while", "switch"):
            here = Statement(function.name, first, first)
            function.statements.append(here)
            i += 2 if self.tokens[i + 1].text == "constexpr" else 1
            here.head = (i + 1, self.closing[i])
            i = self._statement(function, self.closing[i] + 1)
            if word == "if" and self.tokens[i].text == "else":
                i = self._statement(function, i + 1)
            here.last = i
            return i
        while self.tokens[i].text != ";":
            i = self.closing.get(i, i) + 1
        function.statements.append(Statement(function.name, first, i + 1))
        return i + 1

    def called(self, first: int, last: int) -> str:
        """The function that a statement of nothing but a call calls, or none."""
        if self.words(last - 2, last) != [")", ";"] or last - 2 not in self.opening:
            return ""
        i = self._name_before(self.opening[last - 2])
        callee = self.tokens[i].text
        while i > first:  # what it is a member of
            if self.tokens[i - 1].text not in (".", "->", "::"):
                return ""
            i -= 2
            while i > first and self.tokens[i].text == "]":
                i = self.opening[i] - 1
        return callee if callee[0].isalpha() or callee[0] == "_" else ""

    def end_of(self, i: int, after: str) -> int:
        """Where an operand ends that begins here, behind an operator that binds as `after`."""
        while (word := self.tokens[i].text) not in _ENDS_ALL and word not in _WEAK[after]:
            i = self.closing.get(i, i) + 1
        return i

    def begin_of(self, question: int) -> int:
        """Where the condition before a question mark begins."""
        i = question
        while (word := self.tokens[i - 1].text) not in _BEFORE and word not in _SETS:
            i = self.opening.get(i - 1, i - 1)
        return i

    def is_binary(self, i: int) -> bool:
        before = self.tokens[i - 1].text
        return before in (")", "]") or (before[0].isalnum() and before != "return")

    def calls(self, first: int, last: int) -> set[str]:
        """The names of all that some tokens call."""
        opened = (i for i in range(first, last) if self.tokens[i].text == "(")
        return {self.tokens[self._name_before(i)].text for i in opened}

    def _name_before(self, parenthesis: int) -> int:
        """The name of what is called, before its arguments and those of a template."""
        i = parenthesis - 1
        if self.tokens[i].text == ">" and self.tokens[i].end == self.tokens[parenthesis].start:
            while self.tokens[i].text != "<":
                i -= 1
            i -= 1
        return i


def ordering(text: Text) -> set[str]:
    """Names of all that orders threads: also of functions that do nothing else."""
    calls = set(_CALLS)
    while True:
        more = {
            function.name.split("::")[-1]
            for function in text.functions
            if any(orders(text, each, calls) for each in function.statements)
            and all(_is_beside(text, each, calls) for each in function.statements)
        }
        if more <= calls:
            return calls
        calls |= more


def _is_beside(text: Text, statement: Statement, calls: set[str]) -> bool:
    """Whether a statement orders threads, or goes on to what is to be ordered next."""
    if statement.head or orders(text, statement, calls):
        return True
    words = text.words(statement.first, statement.last)
    called = text.called(statement.first, statement.last)
    return called in ("advance", "fence_operand") or (not called and words[0] != "asm")


def orders(text: Text, statement: Statement, calls: set[str]) -> bool:
    if statement.head:
        return False
    words = text.words(statement.first, statement.last)
    if words[0] == "asm":
        return bool(_INSTRUCTION.match(" ".join(words)))
    return bool(calls & text.calls(statement.first, statement.last))


class Faults:
    """Writes faults into a text, and knows them.

    Everywhere those of what orders threads; in functions whose names match one of `careful`, which
    deal out work, also what they decide: statements, conditions, terms, sides of a choice. Where a
    pattern goes on behind ": ", such faults alone as it matches.
    """

    def __init__(self, kernel: str, careful: Iterable[str] = ()) -> None:
        self.text = Text(kernel)
        self.calls = ordering(self.text)
        self.faults: list[Fault] = []
        self._edits: list[tuple[int, int, int, str]] = []  # where, ends first, which, what
        self._numbers = count(1)
        every = (each for function in self.text.functions for each in function.statements)
        self._before = {each.last: each.first for each in every if not each.head}
        self._alike: Counter[tuple[str, str, str]] = Counter()
        for function in self.text.functions:
            if len(function.statements) == 1 and self._first_word(function) == "asm":
                continue
            wanted = [each for each in careful if re.fullmatch(each.split(": ")[0], function.name)]
            known = len(self.faults)
            for statement in reversed(function.statements) if wanted else ():
                self._decisions(statement)
            for statement in function.statements:
                self._at(statement, bool(wanted))
            if wanted and all(": " in each for each in wanted):
                self.faults[known:] = [
                    fault
                    for fault in self.faults[known:]
                    if fault.orders or any(re.fullmatch(each, str(fault)) for each in wanted)
                ]

    @property
    def source(self) -> str:
        """The text with all faults, of which none is in force."""
        parts, at = [_HEAD], 0
        for where, *_, insertion in sorted(self._edits):
            parts += [self.text.text[at:where], insertion]
            at = where
        return "".join([*parts, self.text.text[at:]])

    def _first_word(self, function: Function) -> str:
        return self.text.tokens[function.statements[0].first].text

    def _new(self, statement: Statement, what: str, shown: str = "") -> int:
        shown = shown or self.text.source(statement.first, statement.last)
        key = statement.function, shown, what
        number = next(self._numbers)
        called = self.text.called(statement.first, statement.last)
        kind = called or self.text.tokens[statement.first].text
        ordering = orders(self.text, statement, self.calls)
        self.faults.append(
            Fault(number, statement.function, shown, what, kind, ordering, self._alike[key])
        )
        self._alike[key] += 1
        return number

    def _around(self, first: int, last: int, before: str, behind: str = "") -> None:
        """Put texts around some tokens; what is put there later stands outside."""
        order = len(self._edits)
        self._edits.append((self.text.tokens[first].start, 1, -order, before))
        if behind:
            self._edits.append((self.text.tokens[last - 1].end, 0, order, behind))

    # ---- what orders threads

    def _at(self, statement: Statement, careful: bool) -> None:
        text, (first, last) = self.text, (statement.first, statement.last)
        if statement.head:
            if not careful:
                self._at_head(statement)
            elif (
                text.tokens[first].text in ("for", "while")
                and text.words(*statement.head) != [";"] * 2
            ):
                shown = f"{text.tokens[first].text} ({text.source(*statement.head)})"
                number = self._new(statement, "left out", shown)
                self._around(first, last, f"{{ if (!fault::is({number}))", "}")
            return
        words, called = text.words(first, last), text.called(first, last)
        ordering = orders(text, statement, self.calls)
        if not (ordering or careful) or not self._removable(words, called):
            return
        inside = text.opening[last - 2] + 1 if called else last
        if called == "wait" and last - 2 > inside:
            number = self._new(statement, "of the other phase")
            self._around(inside, last - 2, f"fault::other_phase({number}, ", ")")
        if called == "arrive_and_expect_tx":
            number = self._new(statement, "of no bytes")
            self._around(inside, last - 2, f"fault::nothing({number}, ", ")")
        equals = words.index("=") if ordering and "=" in words and not called else 0
        if equals:
            number = self._new(statement, "gives 0")
            self._around(first + equals + 1, last - 1, f"fault::nothing({number}, ", ")")
        weaker = ""
        if called in ("wgmma_wait", "tma_store_wait"):
            number = self._new(statement, "for one group less")
            less = text.source(first, last).replace(">();", " + 1>();")
            weaker = f"if (fault::is({number})) {{ {less} }} else "
        kept = f"!fault::is({self._new(statement, 'left out')})"
        if (wait := self._wait_before(statement)) is not None:
            number = self._new(statement, "before what it follows")
            early = f"if (fault::is({number})) {{ {text.source(first, last)} }} "
            self._edits.append((text.tokens[wait].start, 1, -1_000_000, early))
            kept += f" && !fault::is({number})"
        self._around(first, last, f"{{ if ({kept}) {{ {weaker}", " } }")

    def _wait_before(self, statement: Statement) -> int | None:
        """Where the wait begins that an arrival stands behind, with calls alone between them."""
        text, i = self.text, statement.first
        called = text.called(i, statement.last)
        if called == "arrive_and_expect_tx" or not re.search("arrive|release|end_turn", called):
            return None  # that bytes are to come may be said at any time
        while (before := self._before.get(i)) and (called := text.called(before, i)):
            if "wait" in called or called == "begin_turn":
                return before
            i = before
        return None

    @staticmethod
    def _removable(words: list[str], called: str) -> bool:
        """Whether a statement makes nothing known that others need: no declaration, no return."""
        if called or words[0] == "asm":
            return words[0] not in ("static_assert", "return")
        target = next((i for i, word in enumerate(words) if word in _SETS), 0)
        names = [word for word in words[:target] if word[0].isalpha() or word[0] == "_"]
        between = [word for word in words[:target] if word in (".", "->", "[", "::")]
        return target > 0 and words[0] != "return" and len(names) <= len(between) + 1

    def _at_head(self, statement: Statement) -> None:
        """What is asked of other threads in a condition: both answers."""
        assert statement.head
        first, last = statement.head
        kind = self.text.tokens[statement.first].text
        if kind in ("if", "while") and self.calls & self.text.calls(first, last):
            self._answers(statement, first, last, f"{kind} ", always=kind == "if")

    def _answers(
        self, statement: Statement, first: int, last: int, kind: str, *, always: bool = True
    ) -> None:
        if ";" in self.text.words(first, last):
            return
        shown = f"{kind}({self.text.source(first, last)})"
        for word in ("never", "always") if always else ("never",):
            number = self._new(statement, word, shown)
            self._around(first, last, f"fault::{word}({number}, ", ")")

    # ---- what is decided

    def _decisions(self, statement: Statement) -> None:
        """Terms, conditions and choices of a statement, or of what stands in its parentheses."""
        text = self.text
        first, last = statement.head or (statement.first, statement.last)
        words = text.words(first, last)
        if {"constexpr", "static_assert", "asm"} & {text.tokens[statement.first].text, words[0]}:
            return
        found: list[tuple[int, int, str]] = []
        for i in range(first, last):
            word = text.tokens[i].text
            if word == "?":
                found.append((text.begin_of(i), i, "?"))
            elif word in ("&&", "||"):
                found.append((i + 1, text.end_of(i + 1, "&& ||"), word))
            elif word in ("+", "-") and text.is_binary(i):
                found.append((i + 1, text.end_of(i + 1, "+ -"), word))
            elif word == "[" and text.words(i - 3, i - 1) == ["shared", "."]:
                found.append((i + 1, text.closing[i], word))
            elif word in _CHOICES and text.tokens[i + 1].text == "(":
                found.append((i, text.closing[i + 1] + 1, word))
        if statement.head and text.tokens[statement.first].text == "if":
            found.append((first, last, "if"))
        for begin, end, word in sorted(
            found, key=lambda each: (each[1] - each[0], each[2] not in _CHOICES)
        ):
            shown = text.source(begin, end)
            if word in ("?", "if"):
                self._answers(statement, begin, end, f"{word} ")
            elif word in _CHOICES:
                number = self._new(statement, "always the first", shown)
                self._new(statement, "always the second", shown)
                self._around(begin, end, f"fault::At{{{number}}}.")
            elif word in ("&&", "||"):
                number = self._new(statement, "left out", f"{word} {shown}")
                how = "always" if word == "&&" else "never"
                self._around(begin, end, f"fault::{how}({number}, ", ")")
            elif not all(one[0] == "k" or not one[0].isalpha() for one in text.words(begin, end)):
                what = "as if 0" if word == "[" else "left out"
                number = self._new(statement, what, f"{word} {shown}")
                self._around(begin, end, f"fault::nothing({number}, ", ")")
