"""What one touches to make fagen grow: sample changes to a copy of the tree, and what they give.

    python tests/growth.py

prints a table: for each kind of change the files that are touched by hand (tests, examples and
pages aside), how many there may be, and by how many the conditionals in templates of kernels grow.
Each sample is a few edits, or a patch of growth_patches/, after which code runs in the changed
copy: it must plan, render and compute what was added. With --simulate larger ones compute it on
the simulated GPU too, by their kernels' own text; with --build a kernel is compiled. Names of
samples after that leave out all others.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, nodes

ROOT = Path(__file__).resolve().parent.parent
TREE = ("cli.py", "fagen", "templates", "schedules")
PATCHES = Path(__file__).parent / "growth_patches"
LOADED = ("torch", "pydantic", "sympy", "jinja2", "click")  # once, for all samples


# what kernels are made of, in templates/
KERNELS = (
    *("forward", "backward", "decode", "quantize", "combine"),
    *("attention", "host", "parts", "sm90"),
)
CHOICES = (nodes.If, nodes.CondExpr)  # an elif is an If too
BRANCHES = (ast.If, ast.IfExp, ast.match_case, ast.While)


def choices(template: Path) -> Iterator[nodes.Node]:
    """Yield the expressions that a template chooses by: a `.cuh` has none."""
    if template.suffix != ".j2":
        return
    tree = Environment().parse(template.read_text(encoding="utf-8"))
    for node in tree.find_all((*CHOICES, nodes.For)):
        if node.test is not None:
            yield node.test


def kernel_templates(root: Path, *kinds: str) -> list[Path]:
    """Return the templates of kernels in a tree: of all, or of some kinds."""
    folder = root / "templates"
    others = () if kinds else ("kernel.cu.j2", "abi.h.j2", "fagen_host.h.j2")
    inside = (path for kind in kinds or KERNELS for path in (folder / kind).rglob("*"))
    every = (*(folder / name for name in others), *inside)
    return sorted(path for path in every if path.is_file())


def conditionals(root: Path, *kinds: str) -> int:
    """Return how many conditionals the templates of kernels have: ifs, elifs, inline ifs."""
    return sum(1 for path in kernel_templates(root, *kinds) for _ in choices(path))


def branches(path: Path) -> int:
    """Return how many branches a module has, or all of a package."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    every = [node for tree in trees for node in ast.walk(tree)]
    conditions = sum(len(node.ifs) for node in every if isinstance(node, ast.comprehension))
    return sum(isinstance(node, BRANCHES) for node in every) + conditions


@dataclass(frozen=True)
class Edit:
    """A change of one file: `old`, which is there once, becomes `new`; a new file has no `old`."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Sample:
    """A change, how many files it may touch, and code that shows that it works.

    `added` is a folder beside this file: what lies in it is put into the tree and is not counted,
    as a kind's own package and templates. `patch` is a file of PATCHES. Where more files are
    touched than they should be, `aim` says how many that is.
    """

    name: str
    most: int
    shows: str
    builds: str  # the slug of a kernel that it makes
    edits: tuple[Edit, ...] = ()
    added: str = ""
    patch: str = ""
    aim: int = 0

    @property
    def touched(self) -> list[str]:
        """The files that are touched by hand."""
        text = (PATCHES / self.patch).read_text(encoding="utf-8") if self.patch else ""
        patched = re.findall(r"^diff --git a/\S+ b/(\S+)$", text, re.M)
        return list(dict.fromkeys((*(edit.path for edit in self.edits), *patched)))


# what the code of every sample begins with
BEGIN = """
import math
import torch
from fagen import registry
from fagen.kind import load_named
from fagen.render import render

def made(slug):
    plan = registry.plan(registry.from_slug(slug))
    return plan, render(plan)

def emulated(plan, *given, **named):
    return load_named(registry.kind(plan.kind).emulate)(plan, *given, **named)

def simulated(plan, **arguments):
    # what the kernel's own text computes, on a CPU: its results in their order
    from fagen import simulator
    from fagen.runtime.checks import allocated, checked
    results = allocated(plan, arguments, checked(plan, arguments))
    named = {tensor.result: x for tensor, x in zip(plan.signature.outputs, results, strict=True)}
    simulator.call(plan, simulator.build(render(plan).kernel), **arguments, named=named)
    return results

def close(got, wanted, atol):
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)

def refused(slug, words):
    from fagen.errors import ScheduleError
    try:
        registry.from_slug(slug)
    except ScheduleError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{slug} is not refused")

def dense(q, k, v, hidden=None):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.125
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.double().transpose(1, 2)).transpose(1, 2)

def tensors(dtype, head_dim, queries=70, keys=90):
    dice = torch.Generator().manual_seed(0)
    shape = lambda n: (1, n, 2, head_dim)
    return [torch.randn(shape(n), generator=dice).to(dtype) for n in (queries, keys, keys)]
"""

TILE = Sample(
    name="a tile, a head dim",
    most=1,
    builds="fwd_bf16_d40_full_m64n48",
    edits=(
        Edit(
            "schedules/forward/fwd_bf16_d40_full_m64n48.toml",
            "",
            """\
#:schema schedule.schema.json
# A head dim and a tile that no other schedule has.

[attention]
head_dim = 40
dtype = "bf16"
mask = "full"

[tile]
block_m = 64
block_n = 48
""",
        ),
    ),
    shows="""
from fagen import flow
slug = "fwd_bf16_d40_full_m64n48"
assert slug in [schedule.slug for schedule in flow.committed("forward")]
plan, source = made(slug)
q, k, v = tensors(torch.bfloat16, 40)
out, _ = emulated(plan, q, k, v, 0.125)
torch.testing.assert_close(out.double(), dense(q, k, v), rtol=2e-2, atol=2e-2)
""",
)

KNOB = Sample(
    name="a key of a schedule",
    most=2,
    builds="fwd_fp16_d64_full_m64n64_l2promotion128",
    edits=(
        Edit(
            "fagen/kinds/forward/keys.py",
            """    q_stages: int = Field(""",
            """    l2_promotion: int = Field(
        default=256, ge=128, le=256, multiple_of=128, description="bytes that TMA fetches into L2"
    )
    q_stages: int = Field(""",
        ),
        Edit(
            "fagen/render/cpp.py",  # which writes tensor maps of other kinds, without the key
            "{tensor_map.promotion}",
            "{plan.schedule.values().get('l2_promotion', tensor_map.promotion)}",
        ),
    ),
    shows="""
_, before = made("fwd_fp16_d64_full_m64n64")
assert "CU_TENSOR_MAP_L2_PROMOTION_L2_256B" in before.kernel
schedule = registry.from_slug("fwd_fp16_d64_full_m64n64").but(l2_promotion=128)
assert schedule.slug == "fwd_fp16_d64_full_m64n64_l2promotion128"
plan, source = made(schedule.slug)
assert "CU_TENSOR_MAP_L2_PROMOTION_L2_128B" in source.kernel and source.hash != before.hash
assert "l2_promotion" in str(registry.kind("forward").schedule.json_schema())
try:
    registry.parse("[attention]\\n[pipeline]\\nl2_promotion = 200\\n")
except Exception as error:
    assert "schedule:3: pipeline.l2_promotion = 200 must be" in str(error), error
""",
)

MASK = Sample(
    name="a mask whose numbers a call gives",
    most=2,
    builds="fwd_fp16_d64_steps_m64n32",
    edits=(
        Edit(
            "fagen/expr/words.py",
            """    Word(
        "chunked",
""",
            """    Word(
        "steps",
        "mask",
        "k_idx // step <= q_pos // step",
        "causal in steps of so many keys",
        (_whole("step", 1, MOST_LENGTH),),
        {"step": 4},
        usual=lambda len_q, len_k: {"step": 32},
    ),
    Word(
        "chunked",
""",
        ),
        Edit(
            "schedules/forward/fwd_fp16_d64_steps_m64n32.toml",
            "",
            """\
#:schema schedule.schema.json
# Causal in steps.

[attention]
head_dim = 64
dtype = "fp16"
mask = "steps"

[tile]
block_m = 64
block_n = 32
""",
        ),
    ),
    shows="""
def check(slug, exact, **named):
    plan, _ = made(slug)
    for compute in ways:
        out, *_ = compute(plan, **named, step=20, scale=0.125)
        close(out.view(exact.shape), exact, 2e-3)

q, k, v = tensors(torch.float16, 64)
def wanted(q, k, v):
    row, key = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    return dense(q, k, v, key // 20 > row // 20)

check(registry.committed_file("fwd_fp16_d64_steps_m64n32").stem, wanted(q, k, v), q=q, k=k, v=v)
check("fwd_fp16_d64_steps_m128n64_packgqa", wanted(q, k, v), q=q, k=k, v=v)
own = {name: x[0].contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
parts = (slice(0, 30), slice(30, 70)), (slice(0, 45), slice(45, 90))
each = [wanted(q[:, i], k[:, j], v[:, j]) for i, j in zip(*parts)]
offsets = {"cu_seqlens_q": [0, 30, 70], "cu_seqlens_k": [0, 45, 90]}
own |= {name: torch.tensor(x, dtype=torch.int32) for name, x in offsets.items()}
check("fwd_fp16_d64_steps_m64n64_varlen", torch.cat(each, 1), **own)
q = q[:, :3].contiguous()
check("dec_fp16_d64_steps_r8n64_c3", wanted(q, k, v), q=q, k=k, v=v)
""",
)

OUTPUT = Sample(
    name="a type of the output",
    most=2,
    builds="fwd_e4m3_d64_full_m64n64_ofp32",
    edits=(
        Edit(
            "fagen/vocab.py",
            "OUT_DTYPES = _table(*SIXTEEN_BITS.values())",
            "OUT_DTYPES = _table(*SIXTEEN_BITS.values(), FP32)",
        ),
        Edit(
            "templates/forward/output/store_4_bytes.cuh.j2",
            "",
            """template <int slab, int swizzle_bits>
__device__ __forceinline__ int swizzled(int row, int column) {
  const int offset = (row * slab + column) * sizeof(OutElement);
  return offset ^ (offset >> 3 & ((1 << swizzle_bits) - 1) << 4);
}

// Writes a warp's 16 rows of an accumulator to slabs of 64 rows, as they are.
template <int columns, int slab, int swizzle_bits, class Elements>
__device__ __forceinline__ void store_accumulator(OutElement* tile, Elements element) {
#pragma unroll
  for (int i = 0; i < columns / 2; i += 2) {
    const int row = warp_row() + lane() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane() % 4 * 2;
    char* base = reinterpret_cast<char*>(tile + column / slab * kWarpgroupRows * slab);
    const int offset = swizzled<slab, swizzle_bits>(row, column % slab);
    *reinterpret_cast<float2*>(base + offset) = {element(i), element(i + 1)};
  }
}
""",
        ),
    ),
    shows="""
schedule = registry.from_slug("fwd_e4m3_d64_full_m64n64").but(out_dtype="fp32")
assert schedule.slug == "fwd_e4m3_d64_full_m64n64_ofp32"
plan, source = made(schedule.slug)
bf16, _ = made("fwd_e4m3_d64_full_m64n64")
amount = lambda plan: {row.name: row.amount for row in plan.shared.rows}
assert amount(plan)["o"] == 2 * amount(bf16)["o"] == 64 * 64 * 4
assert "using OutElement = float;" in source.kernel and "stmatrix" not in source.kernel
assert source.binding.count("aoti_torch_dtype_float32(), device)") == 2  # out and lse
from fagen.e4m3 import by_columns
q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(torch.float32, 64, keys=96))
descales = dict.fromkeys(("q_descale", "k_descale", "v_descale", "v_mean", "k_mean"))
out, _ = emulated(plan, q, k, by_columns(v), 0.125, **descales)
assert out.dtype == torch.float32
exact = dense(q, k, v)
torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.03)
if simulated in ways:
    out, _ = simulated(plan, q=q, k=k, v=by_columns(v), scale=0.125)
    torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.03)
""",
)

ARGUMENT = Sample(
    name="an argument of a call",
    most=3,  # with the emulation, which does what the kernel does
    builds="fwd_fp16_d64_full_m64n64",
    edits=(
        Edit(
            "fagen/kinds/forward/signature.py",
            """        scalars=scalars(plan.mask, plan.score),
        order=(
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale"),
""",
            """        scalars=(
            *scalars(plan.mask, plan.score),
            Scalar("temperature", "float", "divides it", default=1.0, positive=True),
        ),
        order=(
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "scale", "temperature"),
""",
        ),
        Edit(
            "fagen/kinds/forward/signature.py",
            "Limit, Signature,",
            "Limit, Scalar, Signature,",
        ),
        Edit(
            "fagen/kinds/forward/parts/scores.py",
            "FLOAT, factor_log2(values), ",
            'FLOAT, Times(Ratio("scale", "temperature"), 1.44269504089), ',
        ),
        Edit(
            "fagen/kinds/forward/parts/scores.py",
            "    Strided,\n",
            "    Ratio,\n    Strided,\n    Times,\n",
        ),
        Edit(
            "fagen/kinds/forward/emulate/__init__.py",
            """scale: float, **more: Any
) -> tuple[Tensor, Tensor]:""",
            """scale: float, temperature: float = 1.0, **more: Any
) -> tuple[Tensor, Tensor]:
    scale /= temperature""",
        ),
    ),
    shows="""
from fagen.runtime.c_interface import struct_of
from fagen.runtime.op import emulated as op_of
plan, source = made("fwd_fp16_d64_full_m64n64")
assert "float temperature=1.0" in plan.signature.asked and plan.signature.asked in source.binding
assert "temperature" in dict(struct_of(plan.signature)._fields_)
for text in (source.kernel, source.binding):
    assert "float temperature" in text
assert "scale, temperature must be finite and positive" in source.kernel
op = op_of(plan.slug)
q, k, v = tensors(torch.float16, 64)
for made_so in (op(q, k, v, 0.25, 2.0), op(q, k, v, 0.125)):
    torch.testing.assert_close(made_so[0].double(), dense(q, k, v), rtol=2e-3, atol=2e-3)
try:
    op(q, k, v, 0.125, -1.0)
except ValueError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("a negative temperature is taken")
""",
)

LIMIT = Sample(
    name="a limit of the hardware",
    most=1,
    builds="fwd_fp16_d64_full_m64n64",
    edits=(
        Edit(
            "fagen/arch.py",
            """_of(232_448, f"{_GUIDE}: 227 KiB per block, opted in")""",
            """_of(101_376, "another card: 99 KiB per block, opted in")""",
        ),
    ),
    shows="""
from fagen.errors import OverBudget
made("fwd_fp16_d64_full_m64n64")
try:
    made("fwd_fp16_d128_causal_m128n128")
except OverBudget as error:
    assert "> 101,376 (another card: 99 KiB per block, opted in)" in str(error), error
    assert "fits with " in str(error)
else:
    raise AssertionError("it does not fit")
""",
)

KIND = Sample(
    name="a kind",
    most=1,
    builds="scale_bf16_d64_t64",
    edits=(
        Edit(
            "fagen/registry.py",
            """        Entry("quantize",""",
            """        Entry("scale", "fagen.kinds.scale", "scale_", "scale"),
        Entry("quantize",""",
        ),
    ),
    added="growth_kind",
    shows="""
from fagen import evidence, flow
from fagen.runtime.op import emulated as op_of
(schedule,) = flow.committed("scale")
assert schedule in flow.all_committed()
assert schedule.slug == "scale_bf16_d64_t64" == registry.committed_file(schedule.slug).stem
text = registry.committed_file(schedule.slug).read_text()
assert registry.parse('kind = "scale"\\n' + text) == schedule
plan, source = made(schedule.slug)
assert "struct FagenScaleArgs {" in source.kernel and plan.signature.asked in source.binding
(ledger,) = evidence.note([flow.to_commit(schedule)])
assert ledger.name == "scale.jsonl" and schedule.slug in ledger.read_text()
x = torch.randn(2, 3, 64).bfloat16()
for out in (emulated(plan, x, 0.5), op_of(plan.slug)(x, 0.5)):
    assert torch.equal(out, x * 0.5)
from click.testing import CliRunner
import cli
for words in ("check SLUG", "generate --binding SLUG", "schema --kind scale"):
    answer = CliRunner().invoke(cli.main, words.replace("SLUG", schedule.slug).split())
    assert answer.exit_code == 0 and "scale" in answer.output, answer.output
""",
)

PAGED = Sample(
    name="a paged loader for varlen",
    most=8,
    builds="fwd_bf16_d128_causal_m128n128_varlen_pagesize64",
    patch="paged.patch",
    shows="""
dice = torch.Generator().manual_seed(1)
table = torch.randperm(12, generator=dice).view(2, 6).int()
lengths = torch.tensor([90, 37], dtype=torch.int32)

def pages_of(size):
    # behind a sequence's last key its page holds what it likes
    pages = [torch.randn(12, size, 2, 64, generator=dice).half() for _ in "kv"]
    for row, length in zip(table.long(), lengths.tolist()):
        for x in pages:
            x[row[length // size], length % size :] = math.nan
    return pages

def keys_of(pages, number):
    rows = pages[table[number].long()].flatten(0, 1)[: lengths[number]]
    return rows.double().repeat_interleave(2, 1)

def attended(q, k, v):
    rows, keys = len(q), len(k)
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.125
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)

def check(slug, size, q, parts, **more):
    plan, _ = made(slug)
    k, v = pages_of(size)
    exact = [attended(q[part], keys_of(k, i), keys_of(v, i)) for i, part in enumerate(parts)]
    exact = torch.cat(exact).nan_to_num(0).view(q.shape)
    k, v = (x.flatten(0, 1) for x in (k, v))
    named = {"q": q, "k": k, "v": v, "page_table": table, "seqused_k": lengths, **more}
    for compute in ways:
        close(compute(plan, **named, scale=0.125)[0], exact, 2e-3)

q, begins = torch.randn(100, 4, 64, generator=dice).half(), torch.tensor([0, 70, 100])
parts, begins = (slice(0, 70), slice(70, 100)), {"cu_seqlens_q": begins.int()}
check("fwd_fp16_d64_causal_m64n64_varlen_pagesize16", 16, q, parts, **begins)
refused("fwd_fp16_d64_full_m64n64_varlen_pagesize24", "are no multiples of each other")
refused("fwd_fp16_d64_full_m64n64_pagesize64", 'needs lengths = "varlen"')
""",
)

SAMPLES = (TILE, KNOB, MASK, OUTPUT, ARGUMENT, KIND, LIMIT, PAGED)


def grown(sample: Sample, folder: Path) -> Path:
    """Copy the tree into a folder and change it."""
    for name in TREE:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "generated").mkdir()
    if sample.added:
        shutil.copytree(Path(__file__).parent / sample.added, folder, dirs_exist_ok=True)
    if sample.patch:
        command = ["git", "apply", "-C1", "--whitespace=nowarn", PATCHES / sample.patch]
        subprocess.run(command, cwd=folder, check=True)
    for edit in sample.edits:
        path = folder / edit.path
        if not edit.old:
            assert not path.exists(), f"{edit.path} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(edit.new, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.path}: {edit.old!r} is not there once"
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return folder


def shown(sample: Sample, folder: Path, options: frozenset[str]) -> None:
    """Run a sample's code in its tree; raises what it raises."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    ways = "emulated, simulated" if "--simulate" in options else "emulated,"
    code = f"{BEGIN}\nways = ({ways})\n{sample.shows}"
    if "--build" in options:
        code += f"from fagen import flow\nflow.built(registry.from_slug({sample.builds!r}))\n"
    exec(compile(code, f"<{sample.name}>", "exec"), {})


def main(*words: str) -> int:
    """Try samples, each in a process of its own, and print the table; the exit code."""
    for name in LOADED:
        __import__(name)
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    options = frozenset(word for word in words if word.startswith("--"))
    names = [word for word in words if word not in options]
    failed, before = False, conditionals(ROOT)
    print("| added | files | at most | aim | conditionals | |\n|---|---|---|---|---|---|")
    for sample in (one for one in SAMPLES if not names or one.name in names):
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                try:
                    shown(sample, grown(sample, Path(folder)), options)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
                os._exit(0)
            wrong = os.waitpid(child, 0)[1] != 0 or len(sample.touched) > sample.most
            more = conditionals(Path(folder)) - before
        failed |= wrong
        files = ", ".join(f"`{path}`" for path in sample.touched)
        counted = f"{len(sample.touched)} | {sample.most} | {sample.aim or sample.most} | {more:+}"
        print(f"| {sample.name} | {counted} | {files} |")
        if wrong:
            print(f"{sample.name}: does not work, or touches too many files", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
