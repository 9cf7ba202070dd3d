"""Turn a kernel's text into C++ for a CPU: asm statements and launches become calls of gpu.hpp."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fagen.errors import BuildError
from fagen.render import HEADER, header_text

_INCLUDE = re.compile(r"^#include <(?:cu|cute/|cutlass/)[^>]*>\n", re.MULTILINE)
_ASM = re.compile(r"\basm\b\s*(?:volatile\s*)?\(")
_CLUSTER = re.compile(
    r"__cluster_dims__\((\w+), 1, 1\)[^{;]*?\s(\w+)\s*\(\s*const __grid_constant__"
)
_LAUNCH = re.compile(r"(\w+)<<<(.+?)>>>\(\s*(\w*)\);", re.DOTALL)
_ENQUEUED = re.compile(r"\benqueue\((\w+),")
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
_CONFIGURED = re.compile(r"\.(grid|block)Dim\b")  # a launch's; in a kernel these are macros
_OPERAND = re.compile(r'\s*(?:\[\w+\]\s*)?"([=+]?)([a-z])"\s*\(')
_STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Asm:
    """An asm statement: its instructions, and the expressions of its operands in order."""

    code: str
    operands: tuple[str, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of the operands, as the instruction names them."""
        return tuple(map(int, re.findall(r"%(\d+)", self.code)))


def translated(kernel: str) -> str:
    """Return the C++ that does on a CPU what the text of a kernel does on a GPU.

    Raises BuildError where an instruction is none that the simulator knows.
    """
    text = _INCLUDE.sub("", kernel.replace(f'#include "{HEADER}"\n', header_text()))
    text = "".join(_without_asm(text))
    text = _CONFIGURED.sub(r".\1_dim", text)
    shared = r"\1* const \2 = reinterpret_cast<\1*>(sim::self().block->shared);"
    text = _DYNAMIC.sub(shared, text)
    clusters = {kernel: size for size, kernel in _CLUSTER.findall(text)}
    text = _LAUNCH.sub(lambda match: _launch(match, clusters), text)
    text = _ENQUEUED.sub(lambda match: _enqueued(match, clusters), text)
    return f'#include "gpu.hpp"\n{text}'


def _launch(match: re.Match[str], clusters: Mapping[str, str]) -> str:
    name, configuration, arguments = match.groups()
    grid, threads, *rest = _split(configuration)
    shared = rest[0] if rest else "0"
    cluster = clusters.get(name, "1")
    return f"sim::launch({name}, {grid}, {threads}, {shared}, {cluster}, {arguments});"


def _enqueued(match: re.Match[str], clusters: Mapping[str, str]) -> str:
    size = clusters.get(match[1])
    return f"enqueue(sim::clustered({match[1]}, {size})," if size else match[0]


def _without_asm(text: str) -> Iterator[str]:
    end = 0
    for match in _ASM.finditer(text):
        yield text[end : match.start()]
        end = _closing(text, match.end())
        yield _call(_parsed(text[match.end() : end - 1]))
    yield text[end:]


def _parsed(inside: str) -> Asm:
    code, rest = "", inside
    while string := _STRING.match(rest):
        code += string[1].encode().decode("unicode_escape")
        rest = rest[string.end() :]
    operands = []
    for section in _split(rest, ":")[1:3]:
        for text in _split(section):
            if operand := _OPERAND.match(text):
                operands.append(text[operand.end() : _closing(text, operand.end()) - 1].strip())
    return Asm(" ".join(code.split()), tuple(operands))


def _call(asm: Asm) -> str:
    if not asm.code:
        return "(void)0"
    for pattern, write in _INSTRUCTIONS.items():
        if match := re.fullmatch(pattern, asm.code):
            return write(asm, match)
    raise BuildError(f"the simulator does not know the instruction {asm.code[:80]!r}")


def _of(call: str) -> Callable[[Asm, re.Match[str]], str]:
    """Write a call that names operands by number, as {0}."""
    return lambda asm, match: call.format(*asm.operands)


def _wgmma(asm: Asm, match: re.Match[str]) -> str:
    n, k, number = int(match[1]), int(match[2]), match[3]
    accumulators, rest = asm.operands[: n // 2], [*asm.operands[n // 2 :]]
    in_registers = match[4].startswith("{")
    registers = [rest.pop(0) for _ in range(4)] if in_registers else ["0"] * 4
    a = "0" if in_registers else rest.pop(0)
    b = rest.pop(0)
    accumulate = rest.pop(0) if match[5].startswith("%") else match[5]
    # which operands lie with M or N along their rows; A in registers has no say
    flags = re.findall("[01]", match[6]) or ["0"]
    transposed = ["0", flags[-1]] if in_registers else (flags * 2)[:2]
    pointers = ", ".join(f"&({register})" for register in accumulators)
    return (
        f"sim::wgmma<{n}, {k}>(sim::Number::{_NUMBERS[number]}, "
        f"std::array<float*, {n // 2}>{{{pointers}}}, {{{', '.join(registers)}}}, "
        f"{str(in_registers).lower()}, {a}, {b}, {accumulate}, {', '.join(transposed)})"
    )


def _mma(asm: Asm, match: re.Match[str]) -> str:
    *into, a0, a1, a2, a3, b0, b1, c = asm.operands
    pointers = ", ".join(f"&({register})" for register in into)
    return (
        f"sim::mma(sim::Number::{_NUMBERS[match[1]]}, {{{pointers}}}, "
        f"{{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {c})"
    )


def _ldmatrix(asm: Asm, match: re.Match[str]) -> str:
    *into, address = asm.operands
    reads = " ".join(f"{register} = four[{i}];" for i, register in enumerate(into))
    transposed = "true" if match[1] else "false"
    return f"do {{ const auto four = sim::ldmatrix({address}, {transposed}); {reads} }} while (0)"


_NUMBERS = {"f16": "kHalf", "bf16": "kBfloat", "e4m3": "kE4m3"}
_FOUR = r"\{ ?%\d+, %\d+, %\d+, %\d+ ?\}"
_INSTRUCTIONS: dict[str, Callable[[Asm, re.Match[str]], str]] = {
    r"wgmma\.fence\.sync\.aligned;": _of("sim::wgmma_fence()"),
    r"wgmma\.commit_group\.sync\.aligned;": _of("sim::wgmma_commit()"),
    r"wgmma\.wait_group\.sync\.aligned %0;": _of("sim::wgmma_wait({0})"),
    (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.\3 "
        r"\{[%\d, ]+\}, (\{[%\d, ]+\}|%\d+), %\d+, (%\d+|[01]), 1, 1((?:, [01])*);"
    ): _wgmma,
    r"bar\.sync %0, %1;": _of("sim::bar_sync({0}, {1})"),
    r"bar\.arrive %0, %1;": _of("sim::bar_arrive({0}, {1})"),
    (
        r"\{ \.reg \.pred said, any; setp\.ne\.s32 said, %3, 0; "
        r"bar\.red\.or\.pred any, %1, %2, said; selp\.s32 %0, 1, 0, any; \}"
    ): _of("{0} = sim::bar_red_or({1}, {2}, {3})"),
    r"griddepcontrol\.(?:wait|launch_dependents);": _of("(void)0"),
    r"ex2\.approx\.ftz\.f32 %0, %1;": _of("{0} = std::exp2({1})"),
    r"lg2\.approx\.ftz\.f32 %0, %1;": _of("{0} = std::log2({1})"),
    r"tanh\.approx\.f32 %0, %1;": _of("{0} = std::tanh({1})"),
    r"sqrt\.approx\.ftz\.f32 %0, %1;": _of("{0} = std::sqrt({1})"),
    r"rcp\.approx\.ftz\.f32 %0, %1;": _of("{0} = 1.f / ({1})"),
    rf"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 \[%0\], {_FOUR};": _of(
        "sim::stmatrix<4>({0}, {{{1}, {2}, {3}, {4}}}, false)"
    ),
    rf"stmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 \[%0\], {_FOUR};": _of(
        "sim::stmatrix<4>({0}, {{{1}, {2}, {3}, {4}}}, true)"
    ),
    r"stmatrix\.sync\.aligned\.m8n8\.x2\.trans\.shared\.b16 \[%0\], \{ %1, %2 \};": _of(
        "sim::stmatrix<2>({0}, {{{1}, {2}}}, true)"
    ),
    (
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(\w+)\.\1\.f32 \{ %0, %1, %2, %3 \}, "
        r"\{ %4, %5, %6, %7 \}, \{ %8, %9 \}, \{ %10, %10, %10, %10 \};"
    ): _mma,
    r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16;": _of("sim::copy_async({0}, {1}, 16)"),
    r"cp\.async\.commit_group;": _of("sim::copies_commit()"),
    r"cp\.async\.wait_group %0;": _of("sim::copies_wait({0})"),
    rf"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16 {_FOUR}, \[%4\];": _ldmatrix,
    (
        r"\{ \.reg \.b16 low, high; cvt\.rn\.satfinite\.e4m3x2\.f32 low, %2, %1; "
        r"cvt\.rn\.satfinite\.e4m3x2\.f32 high, %4, %3; mov\.b32 %0, \{ ?low, high ?\}; \}"
    ): _of("{0} = sim::to_e4m3x2({2}, {1}) | sim::to_e4m3x2({4}, {3}) << 16"),
    r"mov\.u32 %0, %%laneid;": _of("{0} = sim::lane()"),
    r"prefetch\.global\.L1 \[%0\];": _of("(void)({0})"),
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32 \[%0\], \[%1\], %2;": _of(
        "sim::bulk_add({0}, {1}, {2})"
    ),
    r"cp\.async\.bulk\.global\.shared::cta\.bulk_group \[%0\], \[%1\], %2;": _of(
        "sim::bulk_store({0}, {1}, {2})"
    ),
    r"mapa\.shared::cluster\.u32 %0, %1, %2;": _of("{0} = sim::mapa({1}, {2})"),
    r"mov\.b32 %0, %1;": _of("{0} = {1}"),
    (
        r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes "
        r"\[%0\], \[%1\], %2, \[%3\];"
    ): _of("sim::copy_to_peer({0}, {1}, {2}, {3})"),
    r"fence\.proxy\.async\.global;": _of("(void)0"),
    r"ld\.acquire\.gpu\.global\.u32 %0, \[%1\];": _of("{0} = sim::load_acquire({1})"),
    r"red\.release\.gpu\.global\.add\.u32 \[%0\], 1;": _of("++*({0})"),
    r"cp\.async\.bulk\.wait_group (\d+);": lambda _, match: f"sim::bulk_wait({match[1]}, 2)",
}


def _closing(text: str, start: int) -> int:
    """Return the index past the parenthesis that closes one opened before `start`."""
    depth, i = 1, start
    while depth:
        if string := _STRING.match(text, i):
            i = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        i += 1
    return i


def _split(text: str, at: str = ",") -> list[str]:
    """Split at a character that is in no bracket and no string; `::` is no colon."""
    parts, depth, begun, i = [], 0, 0, 0
    while i < len(text):
        if string := _STRING.match(text, i):
            i = string.end()
            continue
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif text[i] == at and not depth:
            parts.append(text[begun:i])
            begun = i + 1
        i += 1
    return [*parts, text[begun:]]
