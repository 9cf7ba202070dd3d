"""What compute-sanitizer says of a run, as findings, and which of them are known to be harmless."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

FINISHED = {  # a tool's last line, with the number of its findings
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "synccheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "initcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \(.*\)"),
}
RETURNED = "Target application returned an error"
ENDED = "CUDA error 719"  # what the driver tells a program whose kernel a finding ended


@dataclass(frozen=True)
class Harmless:
    """A finding of `tool` that is none: the patterns of its first line and of some that follow."""

    tool: str
    first: str
    following: str
    ends_the_program: bool = False

    def matches(self, finding: tuple[str, ...]) -> bool:
        """Whether a finding is this one and nothing else."""
        first, *following = finding
        return bool(
            re.fullmatch(self.first, first) and re.match(self.following, "\n".join(following))
        )


_KERNEL = r"fagen_\w+_kernel::"
_PLACE = r"\((?:[^()]|\([^()]*\))*\)(?: const)?\+0x\w+ in \S+:\d+"

# With output = "reuse_v" o_empty tells the producer that the O of a tile has left V's space, and it
# waits for that before the next tile's first V. No V follows the last tile with keys, so nobody
# waits any more; but tiles without a key are stored after it, from the same space and by the same
# function, and each completes a phase of o_empty. A phase that nobody waits for does no harm: the
# barrier is initialised anew by each thread block. The tool ends the kernel all the same.
O_AFTER_THE_LAST_WAIT = Harmless(
    "synccheck",
    r"Barrier error detected\. Missing wait\.",
    rf"at cutlass::arch::ClusterBarrier::arrive{_PLACE}\n"
    r"by thread .*\n"
    r"Barrier is located at shared address \w+\n"
    r"Device Frame: cutlass::arch::ClusterBarrier::arrive\(\) const\+0x\w+ in \S+:\d+\n"
    rf"Device Frame: {_KERNEL}Consumer::store{_PLACE}(\n|$)",
    ends_the_program=True,
)


def read_by_all_lanes(reader: str, writer: str) -> tuple[Harmless, ...]:
    """What racecheck says where a warp reads, and one of its lanes lets the writer go on.

    All lanes read what lies in shared memory; then comes __syncwarp, which orders their reads
    before what one lane does next: it arrives at the barrier that counts the readers' warps, a
    release. Whoever writes there next waits for that phase first, an acquire. So each read happens
    before the write. racecheck looks at machine code, where __syncwarp in a warp that runs as one
    is no instruction: it orders the reads of the arriving lane alone.
    """
    return race(reader, writer)


def race(reader: str, writer: str) -> tuple[Harmless, ...]:
    """What racecheck says of one function that reads and one that writes, either named first."""
    # of templates the tool says the return type too
    read, write = (
        rf"{access} access at {'void ' if '<' in function else ''}{_KERNEL}{function}{_PLACE}"
        for access, function in (("Read", reader), ("Write", writer))
    )
    return tuple(
        Harmless(
            "racecheck",
            f"Error: Race reported between {one}",
            rf"(and {other} \[\d+ hazards?\](\n|$))+\Z",
        )
        for one, other in ((read, write), (write, read))
    )


# With order = "dynamic": the tile that the producer drew, and the barrier is tile_empty.
TILE_READ_BY_ALL_LANES = read_by_all_lanes("Tiles::next", "TileScheduler::next")

# Varlen sequences: a tile, which the lane that has its sequence writes, and all lanes of those that
# work at it read. Between that lane and the one that arrives at tile_full there is __syncwarp, as
# there is between the reads and tile_empty. Of one sequence, which lane 0 has, no tile is found.
TILE_WRITTEN_BY_ANY_LANE = race(r"(?:Consumer::\w+|produce)", "TileFinder::find")

# With scales by block: K's of a block, and the barrier is k_empty, for which each lane of a warp
# waits itself before __syncwarp, and those that have them write. On an H200 the tool counted what
# this explains and nothing else, the bytes of each stage that was written again: 3,080 blocks, of
# which 132 thread blocks wrote the first two into fresh stages, are 2,816 x 4 bytes = 11,264
# hazards. An H100's were as many.
SCALES_READ_BY_ALL_LANES = read_by_all_lanes("Consumer::read_scales", "Descales::write")

# Gradients by two warpgroups: P, which all lanes of one write and all of the other read; barriers
# p_full and p_empty, at each of which a lane of a warp arrives, for the others' writes as for their
# reads. On an H200 the tool counted 158,720 hazards of each read, a multiple of 31: the lanes that
# do not arrive.
P_READ_BY_ALL_LANES = read_by_all_lanes("KeyConsumer::step", r"ValueConsumer::step<\(bool\)[01]>")

# With postprocess = true: no_more_tiles, the one word that the warp which rounds dQ looks at before
# it draws another block. It is volatile, written once, and either answer is right: what the warp
# leaves round_dq has. So nobody waits for it. On an H200 the tool counted 320 hazards, 4 bytes of
# each of 80 thread blocks.
HINT_TO_STOP = race("Rounder::draw", "Loader::run")


def findings(said: str, tool: str) -> tuple[tuple[str, ...], ...]:
    """Return the findings that a tool said, each as its first line and the indented ones below.

    Raises ValueError where it did not finish, or counts others than it showed.
    """
    found: list[list[str]] = []
    counted = []
    for line in said.splitlines():
        sign, _, words = line.partition("========= ")
        if sign or not words.strip() or words.startswith(("COMPUTE-SANITIZER", RETURNED)):
            continue
        if count := FINISHED[tool].fullmatch(words):
            counted.append(int(count[1]))
        elif not words.startswith(" "):
            found.append([words.strip()])
        elif found:
            found[-1].append(words.strip())
    if counted != [len(found)]:
        raise ValueError(f"{tool} counts {counted} findings, {len(found)} are shown:\n{said}")
    return tuple(map(tuple, found))


def fault(said: str, tool: str, returncode: int, harmless: Iterable[Harmless] = ()) -> str | None:
    """Say what is wrong in what a tool and its program said; None where all is as it should be.

    `harmless` are the findings that this program may have.
    """
    try:
        found = findings(said, tool)
    except ValueError as error:
        return str(error)
    known = [one for one in harmless if one.tool == tool]
    met = set()
    for finding in found:
        match = next((one for one in known if one.matches(finding)), None)
        if match is None:
            return "\n".join(finding)
        met.add(match)
    if RETURNED in said:  # the program's own verdict, if no finding ended it
        ended = any(one.ends_the_program for one in met)
        return None if ended and ENDED in said else said
    return None if found or returncode == 0 else said
