"""A part's text parses behind its seat's prelude, which names all that it may use of others."""

from pathlib import Path

import pytest

from fagen import registry, simulator
from fagen.kind import Plan
from fagen.paths import locate
from fagen.process import run
from fagen.render import written
from fagen.simulator.translate import translated
from fagen.toolchain import find_gxx
from tests.decode_helpers import SPREAD as DECODE

TEMPLATES = locate("templates")
HEADERS = Path(simulator.__file__).parent
LINES = 60

# by kind and seat the prelude of a text, and what the text stands in behind it
STATEMENTS = "void kernel() {{ {} }}"
STAND_IN = {
    "decode": {
        "loader": ("decode/prelude/loader.h", "struct Producer : Loader {{ {} }};"),
        "consumer": ("decode/prelude/consumer.h", "struct Consumer : Computing {{ {} }};"),
        "kernel": ("decode/prelude/kernel.h", STATEMENTS),
        "combine": ("attention/prelude/combine.h", STATEMENTS),
    },
    "forward": {
        "consumer": ("forward/prelude/consumer.h", "struct Consumer : Consuming {{ {} }};")
    },
    "backward": {
        "loader": ("backward/prelude/loader.h", "struct Producer : Loader {{ {} }};"),
        "producer": ("backward/prelude/producer.h", "{}"),
        "consumer": ("backward/prelude/consumer.h", "struct Consumer : Computing {{ {} }};"),
        "entry": ("backward/prelude/kernel.h", STATEMENTS),
        "kernel": ("backward/prelude/kernel.h", STATEMENTS),
        "role": ("backward/prelude/kernel.h", STATEMENTS),
        "consumer_role": ("backward/prelude/kernel.h", STATEMENTS),
        "exit": ("backward/prelude/kernel.h", STATEMENTS),
    },
}
HEAD = {
    "decode": (
        *("decode/head.j2", "sm90/ring.cuh", "sm90/wgmma.cuh", "sm90/descriptor.cuh"),
        *("sm90/accumulators.cuh", "sm90/exp2.cuh", "attention/combine/weights.cuh.j2"),
        "decode/prelude/device.h",
    ),
    "forward": ("forward/head.j2", "forward/tiles.j2", "forward/producer.j2"),
    "backward": (
        *("backward/head.j2", "sm90/barrier_arrive.cuh", "sm90/accumulators.cuh"),
        *("sm90/elements.cuh", "sm90/exp2.cuh", "sm90/store_matrices.cuh", "sm90/wgmma.cuh"),
        *("sm90/descriptor.cuh", "backward/prelude/device.h"),
    ),
}
# so many that each text of a part is in one of them
PLANS = (
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d96_causal_r8n64_c5_streamk",
    "dec_fp16_d128_causal_r64n64",
    "dec_fp16_d64_causal_r8n64_c3_fixed",
    "fwd_e4m3_d64_causal_m192n128_nointer_vrows_sblock_pm1_smemtotals",
    "fwd_e4m3_d256_full_m128n96_half_nointra_vrows_pm1_pc64",
    "fwd_e4m3_d128_causal_m128n128_varlen_nointer_pm1_pc64",
    "fwd_e4m3_d64_causal_m192n96_varlen_s3_nointer_pm1",
    "fwd_e4m3_d128_full_m128n128_lazymax",
    "fwd_bf16_d256_full_m128n64_varlen_half",
    "fwd_bf16_d256_causal_m128n64_split16",
    "fwd_bf16_d256_full_m64n64_reusev_pm64_smemtotals_c2",
    "fwd_fp16_d128_full_m128n128_noprod",
    "fwd_fp16_d128_full_m128n128_nointra",
    "fwd_fp16_d64_full_m64n64_tensorsum_onlinemax",
    "fwd_fp16_d128_causal_m128n128_c2",
    "bwd_bf16_d256_causal_m64n64_det_dss1_intra_c2",
    "bwd_bf16_d128_causal_m64n128_persist_post",
    "bwd_bf16_d48_causal_m64n128_varlen_s1",
    "bwd_bf16_d256_causal_m64n64_varlen",
    "bwd_fp16_d64_full_m96n128_keepk",
    "bwd_bf16_d160_full_m64n64_intra",
    "bwd_bf16_d48_causal_m64n128_persist",
    "bwd_fp16_d64v192_causal_m64n64_dss1",
)


INCLUDED = "algorithm", "cmath", "cstdint", "cstring", "type_traits"


def behind_preludes(plan: Plan) -> str:
    """Return all texts of a kernel's seats, each by itself behind the prelude of its seat."""
    parts = [written(name, plan=plan) for name in HEAD[plan.kind]]
    for seat, (prelude, place) in STAND_IN[plan.kind].items():
        parts.append(f"namespace {seat}_seat {{\n{(TEMPLATES / prelude).read_text()}")
        for number, text in enumerate(plan.parts.texts(seat)):
            whole = place.format(written(text, plan=plan))
            parts.append(f'namespace text_{number} {{\n#line 1 "{text}"\n{whole}\n}}')
        parts.append("}")
    includes = "".join(f"#include <{name}>\n" for name in INCLUDED)
    return f"{includes}namespace head {{\n{chr(10).join(parts)}\n}}\n"


@pytest.mark.parametrize("slug", PLANS)
def test_each_text_of_a_part_parses_behind_the_prelude_of_its_seat(slug, tmp_path):
    source = tmp_path / "texts.cpp"
    source.write_text(translated(behind_preludes(registry.plan_of(slug))))
    gxx, _ = find_gxx()
    command = [gxx, "-std=c++20", "-fsyntax-only", "-w", f"-I{HEADERS}", source]
    result = run(command, cwd=tmp_path)
    assert not result.returncode, result.stderr[:3000]


def test_a_prelude_is_short():
    for path in Path(TEMPLATES).glob("*/prelude/*.h"):
        assert len(path.read_text().splitlines()) <= LINES, path


def test_the_kernels_here_have_every_text_of_these_seats():
    def texts(slugs):
        plans = [registry.plan_of(slug) for slug in slugs]
        return {
            (seat, text)
            for plan in plans
            for seat in STAND_IN[plan.kind]
            for text in plan.parts.texts(seat)
        }

    schedules = [*registry.schedules("forward"), *registry.schedules("backward")]
    assert texts([*DECODE, *(path.stem for path in schedules)]) <= texts(PLANS)
