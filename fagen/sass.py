"""Read machine code: a library or cubin goes in, what its instructions use comes out.

Needs cuobjdump (to take the cubin out of a library) and nvdisasm. What is relied on:

* nvdisasm prints one instruction per line behind its offset, labels on lines of their own, and with
  `--life-range-mode narrow` a table with one column per register. The table says what nvdisasm
  itself knows of operand widths, so an HGMMA that names R24 counts all its accumulators. Of a
  kernel of 255 registers, which is all there are, it refuses to draw the table.
* USETMAXREG is what setmaxnreg becomes: DEALLOC in the producer, TRY_ALLOC in the consumers. All
  code that can run after one of them belongs to that role; code both can reach belongs to both.
"""

import hashlib
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fagen.arch import SM90
from fagen.errors import BuildError, ToolchainError
from fagen.paths import compiler_environment
from fagen.process import run
from fagen.programs import MissingError
from fagen.toolchain import INSTALL_DISASSEMBLER, Disassembler, find_disassembler

COMMON, PRODUCER, CONSUMER = "common", "producer", "consumer"
_ROLES = {"USETMAXREG.DEALLOC": PRODUCER, "USETMAXREG.TRY_ALLOC": CONSUMER}
_ENDS_A_PATH = {"BRX", "JMP", "JMX", "EXIT", "RET", "KILL"}

_LINE = re.compile(
    r"\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"(?P<label>[.$\w]+):\s*$")
_WORD = re.compile(r"[.$\w]+")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `registers` is 1 + the highest R register alive at it, or 0."""

    offset: int
    guard: str
    opcode: str
    operands: str
    registers: int

    @property
    def base(self) -> str:
        """The opcode without its modifiers: HGMMA for HGMMA.64x128x16.F32."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class MachineCode:
    """What the instructions of a kernel use, or of all kernels of one library.

    Register figures are counts, 1 + the highest index, and the largest of any kernel.
    `consumer_registers` and `producer_registers` are None where no setmaxnreg tells the roles
    apart, or nvdisasm no registers. `raised_to` and `lowered_to` are the operands of setmaxnreg.
    `hash` is the sha256 of the code and its constants and of nothing else: neither names, nor
    lines, nor the host's code.
    """

    kernel: str
    instructions: int
    opcodes: Mapping[str, int]
    registers: int
    consumer_registers: int | None
    producer_registers: int | None
    wgmma_from_registers: int  # wgmma whose first operand is not in shared memory
    raised_to: tuple[int, ...]
    lowered_to: tuple[int, ...]
    hash: str

    def count(self, *bases: str) -> int:
        """How often instructions with these base opcodes (HGMMA, UTMALDG, LDL, …) occur."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.partition(".")[0] in bases)


def machine_code(
    binary: Path, tools: Disassembler | None = None, *, kernels: int = 1
) -> MachineCode:
    """Read the kernels in a shared library, object file or cubin.

    Raises ToolchainError where a tool cannot read it, BuildError where there are not that many.
    """
    tools = tools or find_disassembler()
    if tools is None:
        raise MissingError("nvdisasm or cuobjdump is missing", INSTALL_DISASSEMBLER)
    with tempfile.TemporaryDirectory(prefix="fagen-") as folder:
        cubin = binary if binary.suffix == ".cubin" else _extract(binary, tools, Path(folder))
        stated = compiler_environment()
        listing, untold = run([tools.nvdisasm, "-c", "-lrm", "narrow", cubin], only=stated), None
        if "Invalid register count" in listing.stderr:
            listing = run([tools.nvdisasm, "-c", cubin], only=stated)
            untold = SM90.max_registers_per_thread
        if listing.returncode:
            raise ToolchainError(f"{tools.nvdisasm} cannot read {cubin}: {listing.stderr.strip()}")
        return read_listing(listing.stdout, hash_code(cubin.read_bytes()), kernels, untold)


def _extract(library: Path, tools: Disassembler, folder: Path) -> Path:
    stated = compiler_environment()
    dump = run([tools.cuobjdump, "-xelf", "all", library.resolve()], cwd=folder, only=stated)
    cubins = sorted(folder.glob("*.cubin"))
    if len(cubins) != 1:
        raise BuildError(
            f"{library} holds {len(cubins)} cubins, not one\n{dump.stderr.strip()}".strip()
        )
    return cubins[0]


def read_listing(
    listing: str, code_hash: str, kernels: int = 1, untold: int | None = None
) -> MachineCode:
    """Turn nvdisasm's listing of so many kernels into a MachineCode.

    `untold` is how many registers there are in all where the listing has no table of them; what
    each role has of them is not known then.
    """
    functions = dict(functions_of(listing, drawn=untold is None))
    if len(functions) != kernels:
        raise BuildError(
            f"kernels expected in the machine code: {kernels}, not {sorted(functions)}"
        )
    code = [instruction for instructions, _ in functions.values() for instruction in instructions]
    named: dict[str, list[Instruction]] = {}
    for instructions, labels in functions.values():
        for role, places in _roles(instructions, labels).items():
            named.setdefault(role, []).extend(instructions[at] for at in places)
    opcodes = Counter(instruction.opcode for instruction in code)

    def used(role: str) -> int | None:
        return _highest(named[role]) if role in named and untold is None else None

    return MachineCode(
        kernel=" ".join(functions),
        instructions=len(code),
        opcodes=dict(sorted(opcodes.items())),
        registers=untold or _highest(code),
        consumer_registers=used(CONSUMER),
        producer_registers=used(PRODUCER),
        wgmma_from_registers=sum(
            i.base == "HGMMA" and i.operands.split(", ")[1].startswith("R") for i in code
        ),
        raised_to=_setmaxnreg(code, "USETMAXREG.TRY_ALLOC"),
        lowered_to=_setmaxnreg(code, "USETMAXREG.DEALLOC"),
        hash=code_hash,
    )


def _highest(code: Iterable[Instruction]) -> int:
    return max((instruction.registers for instruction in code), default=0)


def _setmaxnreg(code: Iterable[Instruction], kind: str) -> tuple[int, ...]:
    """The register counts that instructions of this kind ask for: their last operand."""
    counts = (i.operands.split(",")[-1] for i in code if i.opcode.startswith(kind))
    return tuple(sorted({int(operand, 0) for operand in counts}))


def functions_of(
    listing: str, *, drawn: bool
) -> Iterator[tuple[str, tuple[list[Instruction], dict[str, int]]]]:
    """Each code section: its name, its instructions, and which instruction each label stands at.

    Whether there is a table of registers is said by `drawn`; without, no instruction has any.
    """
    for section in re.split(r"^//-+ \.text\.", listing, flags=re.MULTILINE)[1:]:
        name = section.split(maxsplit=1)[0]
        code: list[Instruction] = []
        labels: dict[str, int] = {}
        first_column = 0
        for line in section.splitlines():
            text, _, table = line.partition(" // ")
            table = table[1:]  # a rule begins with "+", a row with "|"
            general = table.partition("|")[0]
            if "#" in general:  # the header row that numbers the columns, count first
                first_column = general.index("#") + 2
            elif match := _LINE.match(text):
                used = general[first_column:].rstrip() if first_column else ""
                code.append(
                    Instruction(
                        int(match["offset"], 16),
                        match["guard"] or "",
                        match["opcode"],
                        match["operands"].strip(),
                        len(used),
                    )
                )
            elif match := _LABEL.match(text.strip()):
                labels[match["label"]] = len(code)
        if code and drawn and not first_column:
            raise BuildError(f"nvdisasm printed no register table for {name}")
        if code:
            yield name, (code, labels)


def _roles(code: list[Instruction], labels: dict[str, int]) -> dict[str, set[int]]:
    """Walk every path from the entry; the instructions reached before and after each setmaxnreg.

    A path carries the labels that its BSSY instructions announced, because BSYNC, where threads
    that went different ways meet again, goes on at the label of the matching BSSY. It is of no more
    use then: a path that kept it would be another one than those that never had it.
    """
    roles: dict[str, set[int]] = {}
    visited: set[tuple[int, str, frozenset[tuple[str, int]]]] = set()
    paths: list[tuple[int, str, frozenset[tuple[str, int]]]] = [(0, COMMON, frozenset())]
    while paths:
        path = paths.pop()
        at, role, meetings = path
        if path in visited or at >= len(code):
            continue
        visited.add(path)
        instruction = code[at]
        role = next((r for k, r in _ROLES.items() if instruction.opcode.startswith(k)), role)
        roles.setdefault(role, set()).add(at)
        base = instruction.base
        words = _WORD.findall(instruction.operands)
        targets = [] if base == "RET" else [labels[word] for word in words if word in labels]
        if base == "BRA" and not targets:
            raise BuildError(f"a branch to nowhere in the machine code: {instruction}")
        if base == "BSSY":
            others = {meeting for meeting in meetings if meeting[0] != words[0]}
            meetings, targets = frozenset(others | {(words[0], targets[0])}), []
        elif base == "BSYNC":
            targets = [place for barrier, place in meetings if barrier == words[0]]
        unconditional = not instruction.guard and (
            base in _ENDS_A_PATH
            or (base == "BSYNC" and targets)
            # a BRA whose first operand is a predicate may also fall through
            or (base == "BRA" and instruction.operands.startswith("`"))
        )
        if not unconditional:
            paths.append((at + 1, role, meetings))
        if base == "BSYNC":
            meetings = frozenset(meeting for meeting in meetings if meeting[0] != words[0])
        paths.extend((target, role, meetings) for target in targets)
    return roles


def hash_code(cubin: bytes) -> str:
    """sha256 over the code and constant sections of a cubin, an ELF file of 64-bit little endian.

    Section names hold the kernel's mangled name; only what comes before it (.text, .nv.constant0)
    enters, so that a kernel that was renamed and nothing else keeps its hash.
    """
    digest = hashlib.sha256()
    kept = re.compile(r"\.text\.|\.nv\.constant\d+|\.nv\.global\.init")
    for name, content in sorted(_sections(cubin)):
        if match := kept.match(name):
            digest.update(match[0].encode() + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BuildError("the machine code is not a 64-bit little-endian ELF file")
    table, size, count, names_at = (
        struct.unpack_from("<Q", elf, 0x28)[0],
        *struct.unpack_from("<HHH", elf, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    names = headers[names_at][4]
    no_bits = 8  # sh_type of a section that takes no room in the file
    for name, kind, _flags, _address, offset, length in headers:
        end = elf.index(b"\0", names + name)
        label = elf[names + name : end].decode()
        yield label, b"" if kind == no_bits else elf[offset : offset + length]
