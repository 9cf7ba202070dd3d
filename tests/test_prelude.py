"""A part's text parses behind its seat's prelude, which names all that it may use of others."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fagen import registry, simulator
from fagen.kind import Plan
from fagen.part import SEATS
from fagen.paths import locate
from fagen.process import run
from fagen.render import written
from fagen.simulator.translate import translated
from fagen.toolchain import find_gxx
from tests.decode_helpers import SPREAD as DECODE
from tests.often import some

TEMPLATES = locate("templates")
HEADERS = Path(simulator.__file__).parent
LINES = 60

# by kind and seat the preludes of a text, and what it stands in behind them; sections of a kernel
# that use what their parts offer stand behind that too
STATEMENTS = "void kernel() {{ {} }}"
# beginnings of two loops, each with a block of rows of a head and whose turn it is
ROUNDS = """
void add_dq(const Params& params, SharedStorage& shared, const Tile& tile, int step) {{
  {}
      row_block_of(params, shared, tile, head, block), await_turn(nullptr, turn);
    }}
    step -= steps;
  }}
}}"""
COMBINING = {
    "combine": (("attention/combine",), STATEMENTS),
    "sums": (("attention/sums",), STATEMENTS),
    "combined": (("attention/combined",), STATEMENTS),
    "kernels": (("attention/kernels",), "{}"),
}
STAND_IN = {
    "decode": {
        "loader": (
            ("decode/loader",),
            "struct Producer : Loader {{ using Loader::prefetch; {} }};",
        ),
        "consumer": (("decode/consumer",), "struct Consumer : Computing {{ {} }};"),
        "kernel": (("decode/kernel",), STATEMENTS),
        **COMBINING,
    },
    "forward": {
        "loader": (("forward/loader",), "struct Producer : Loader {{ {} }};"),
        "first_loads": (
            ("forward/loader",),
            "struct Producer : Loader {{ void begin(Loader& loader, const Tile& tile) {{ {} }} }};",
        ),
        "finder": (("forward/finder",), "struct TileFinder : Finder {{ {} }};"),
        "producer": (("forward/loader", "forward/producer"), "{}"),
        "softmax": (
            ("forward/softmax",),
            "struct Rows : Softmax {{ using Softmax::exponentiate; {} }};",
        ),
        "consumer": (
            ("forward/loader", "forward/softmax", "forward/consumer"),
            "struct Consumer : Consuming {{ {} }};",
        ),
        "scores": (
            ("forward/loader", "forward/softmax", "forward/consumer"),
            "struct Consumer : Consuming {{ void finish(Scores& s) {{ {} }} }};",
        ),
        "row_ends": (
            ("forward/loader", "forward/softmax", "forward/consumer"),
            "struct Consumer : Consuming {{ void end(const Tile& tile, Softmax& softmax, int r, "
            "float sum, float (&inverse)[2], bool (&empty)[2]) {{ {} }} }};",
        ),
        "tile_ends": (
            ("forward/loader", "forward/softmax", "forward/consumer"),
            "struct Consumer : Consuming {{ void end(const Tile& tile, Output& o, "
            "Softmax& softmax) {{ {} }} }};",
        ),
        **dict.fromkeys(("kernel", "role", "counters"), (("forward/kernel",), STATEMENTS)),
        **COMBINING,
    },
    "backward": {
        "loader": (("backward/loader",), "struct Producer : Loader {{ {} }};"),
        "producer": (("backward/producer",), "{}"),
        "rounds": (("backward/producer",), ROUNDS),
        "consumer": (("backward/consumer",), "struct Consumer : Computing {{ {} }};"),
        **dict.fromkeys(
            ("entry", "kernel", "role", "consumer_role", "exit"),
            (("backward/kernel",), STATEMENTS),
        ),
    },
    "quantize": {
        **dict.fromkeys(("loader", "consumer"), (("quantize/get",), STATEMENTS)),
        "producer": (("quantize/share",), STATEMENTS),
        "kernel": (("quantize/kernel",), STATEMENTS),
        **dict.fromkeys(("kernels", "quantize/get.j2", "quantize/kernel.j2"), ((), "{}")),
    },
    "combine": {"combine/kernel.j2": ((), "{}")},
}
WITHOUT = "about", "head", "methods", "workspace", "host", "launches"
INTERNAL = {"backward": ("backward/internal",), "decode": ("decode/internal",)}
DESCRIPTORS = "sm90/descriptor.cuh", "sm90/describe.cuh", "sm90/column_offset.cuh"
HEAD = {
    "decode": (
        *("decode/head.j2", "sm90/ring.cuh", "sm90/wgmma.cuh", *DESCRIPTORS),
        *("sm90/accumulators.cuh", "sm90/exp2.cuh", "attention/combine/weights.cuh.j2"),
    ),
    "forward": (
        *("forward/head.j2", "sm90/lane.cuh", "sm90/ring.cuh", "sm90/barrier_sync.cuh"),
        *("sm90/barrier_arrive.cuh", "sm90/accumulators.cuh", "sm90/elements.cuh"),
        *("sm90/exp2.cuh", "sm90/wgmma.cuh", *DESCRIPTORS),
    ),
    "backward": (
        *("backward/head.j2", "sm90/barrier_arrive.cuh", "sm90/accumulators.cuh"),
        *("sm90/elements.cuh", "sm90/exp2.cuh", "sm90/store_matrices.cuh", "sm90/wgmma.cuh"),
        *DESCRIPTORS,
    ),
    "quantize": ("quantize/head.j2",),
    "combine": ("combine/head.j2", "attention/combine/weights.cuh.j2"),
}
# so many that each text of a part is in one of them
PLANS = (
    "bwd_fp16_d128_causal_m64n128_softcap_persist_post",
    "bwd_bf16_d256_causal_m64n64_softcap_dss1_intra_c2",
    "bwd_bf16_d64_causal_m64n64_sinkbf16",
    "dec_fp16_d128_causal_r8n64",
    "dec_bf16_d96_causal_r8n64_c5_streamk",
    "dec_fp16_d96_causal_r8n64_h2",
    "dec_fp16_d128_causal_r64n64",
    "dec_fp16_d64_causal_r8n64_c3_fixed",
    "dec_bf16_d64_causal_r32n128_streamk",
    "dec_fp16_d64_causal_r8n128_paged_c3",
    "dec_bf16_d256_causal_r32n64_streamk_spill56",
    "fwd_e4m3_d64_causal_m192n128_nointer_vrows_sblock_pm1_smemtotals",
    "fwd_e4m3_d256_full_m128n96_half_nointra_vrows_pm1_pc64",
    "fwd_e4m3_d256_full_m128n128_vr1_half_nointra_vrows_pm1_pc64_dynamic_spill48",
    "fwd_e4m3_d256_full_m128n128_half_nointra_vrows_pretrans_pm1_pc64",
    "fwd_e4m3_d128_full_m128n128_nointer_vrows_pm1_pc128",
    "fwd_e4m3_d64_causal_m128n64_sinkbf16_packgqa_vrows",
    "fwd_e4m3_d64_causal_m64n64_softcap_packgqa_vrows_pm1_pc32",
    "fwd_e4m3_d96_causal_m64n64_vrows_pretrans_pm1_pc32",
    "fwd_e4m3_d96_full_m128n64_packgqa_nointer_vrows_pretrans_parts",
    "fwd_e4m3_d128_causal_m128n128_varlen_nointer_pm1_pc64",
    "fwd_e4m3_d64_causal_m192n96_varlen_s3_nointer_pm1",
    "fwd_e4m3_d128_full_m128n128_lazymax",
    "fwd_e4m3_d128_full_m128n128_lazymax_pm1_pc64",
    "fwd_e4m3_d128_full_m128n128_split3_nointer_vrows_pm1_pc64",
    "fwd_bf16_d256_full_m128n64_varlen_half",
    "fwd_bf16_d256_causal_m128n64_split16",
    "fwd_bf16_d256_full_m64n64_reusev_pm64_smemtotals_c2",
    "fwd_fp16_d128_full_m128n128_noprod",
    "fwd_fp16_d64_causal_m192n128_softcap_q2_curve",
    "fwd_fp16_d128_full_m128n128_nointra",
    "fwd_fp16_d64_full_m64n64_tensorsum_onlinemax",
    "fwd_fp16_d128_causal_m128n128_c2",
    "fwd_e4m3_d128_full_m128n128_sblock_vsblock",
    "fwd_fp16_d256_causal_m128n64_reusev_onlinemax_t8_c2_spill16",
    "fwd_bf16_d128_causal_m128n128_varlen",
    "fwd_e4m3_d128_full_m128n128_t4_sblock",
    "fwd_fp16_d64_full_m64n64_nointra_pm2",
    "fwd_fp16_d128_causal_m128n128_split16",
    "fwd_fp16_d192_causal_m128n80_split8_fill",
    "fwd_bf16_d128_full_m64n128_varlen",
    "fwd_fp16_d64_causal_m256n64_varlen_packgqa_s4_q2_nointer",
    "fwd_bf16_d64_full_m64n48_varlen_packgqa",
    "fwd_fp16_d64_causal_m256n64_packgqa_s4_q2_nointer",
    "fwd_bf16_d64_window_m192n64_s3_nointer",
    "fwd_bf16_d64_window_m256n64_s8_q2_nointer",
    "fwd_fp16_d256_window_m128n64_softcap_half",
    "fwd_e4m3_d64_causal_m64n64_softcap_split3_vrows_pm1_pc32",
    "dec_fp16_d256_causal_r8n64_softcap",
    "dec_bf16_d64_causal_r8n128_sinkbf16",
    "fwd_bf16_d64_causal_m64n64_sinkfp32",
    "fwd_bf16_d64_causal_m64n64_sinkfp32_packgqa",
    "fwd_fp16_d64_causal_m64n64_sinkfp32_packgqa_tensorsum_onlinemax",
    "fwd_e4m3_d64_causal_m64n64_sinkfp32_vrows",
    "fwd_e4m3_d64_causal_m64n64_sinkfp32_split3_vrows_pm1_pc32",
    "bwd_bf16_d256_causal_m64n64_det_dss1_intra_c2",
    "bwd_bf16_d128_causal_m64n128_persist_post",
    "bwd_bf16_d48_causal_m64n128_varlen_s1",
    "bwd_bf16_d256_causal_m64n64_varlen_dss1_intra_c2",
    "bwd_fp16_d256_full_m64n64_varlen",
    "bwd_fp16_d64_full_m96n128_keepk",
    "bwd_bf16_d160_full_m64n64_intra",
    "bwd_bf16_d48_causal_m64n128_persist",
    "bwd_fp16_d64v192_causal_m64n64_dss1",
    "bwd_bf16_d192v128_causal_m48n128_det_underdp",
    "bwd_bf16_d128_full_m64n128_det_persist_post",
    "bwd_fp16_d128_window_m64n128",
    "bwd_fp16_d64_chunked_m64n128",
    "bwd_fp16_d64_prefix_m64n64",
    "bwd_bf16_d64_document_m64n64_det",
    "bwd_bf16_d64_document_m64n64_varlen",
    "quant_bf16_d224_rot_center_shead_vcols",
    "quant_fp16_d80_pairs",
    "quant_fp16_d128_center_scol_vcols",
    "quant_bf16_d192_halves_rot",
    "quant_bf16_d144_rot_shead",
    "quant_fp16_d256_center_sr128",
    "comb_bf16_d256",
    "comb_fp32_d16_varlen",
)
OFTEN = (
    "dec_bf16_d96_causal_r8n64_c5_streamk",
    "fwd_e4m3_d64_causal_m192n128_nointer_vrows_sblock_pm1_smemtotals",
    "fwd_bf16_d128_causal_m128n128_varlen",
    "fwd_fp16_d64_causal_m256n64_packgqa_s4_q2_nointer",
    "fwd_fp16_d128_causal_m128n128_split16",
    "fwd_fp16_d128_full_m128n128_noprod",
    "bwd_bf16_d128_causal_m64n128_persist_post",
    "bwd_bf16_d256_causal_m64n64_varlen_dss1_intra_c2",
    "bwd_fp16_d256_full_m64n64_varlen",
    "bwd_bf16_d64_document_m64n64_det",
    "quant_bf16_d224_rot_center_shead_vcols",
    "comb_fp32_d16_varlen",
)


INCLUDED = "algorithm", "cmath", "cstdint", "cstring", "type_traits"


def behind_preludes(plan: Plan) -> str:
    """Return all texts of a kernel's seats, each by itself behind the preludes of its seat.

    Those of the device's use each other, and offer the same to all others.
    """
    device = f"{plan.kind}/device"
    parts = [written(name, plan=plan) for name in HEAD[plan.kind]]
    parts += seat_of(plan, "device", (device, *INTERNAL.get(plan.kind, ())), "{}")
    parts.append(prelude(device))
    for seat, (names, place) in STAND_IN[plan.kind].items():
        parts += seat_of(plan, seat, names, place)
    includes = "".join(f"#include <{name}>\n" for name in INCLUDED)
    return f"{includes}namespace head {{\n{chr(10).join(parts)}\n}}\n"


def seat_of(plan: Plan, seat: str, preludes: tuple[str, ...], place: str) -> Iterator[str]:
    if texts := texts_of(plan, seat):
        yield f"namespace {seat.translate(str.maketrans('/.', '__'))}_seat {{"
        yield from map(prelude, preludes)
        for number, text in enumerate(texts):
            whole = place.format(f'\n#line 1 "{text}"\n{written(text, plan=plan)}\n')
            yield f"namespace text_{number} {{\n{whole}\n}}"
        yield "}"


def texts_of(plan: Plan, seat: str) -> tuple[str, ...]:
    return (seat,) if seat.endswith(".j2") else plan.parts.texts(seat)


def prelude(name: str) -> str:
    folder, seat = name.split("/")
    path = f"{folder}/prelude/{seat}.h"
    return f'#line 1 "{path}"\n{(TEMPLATES / path).read_text()}'


@pytest.mark.parametrize("slug", some(PLANS, OFTEN))
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


def test_the_kernels_here_have_every_text_that_stands_behind_a_prelude():
    schedules = [path.stem for kind in STAND_IN for path in registry.schedules(kind)]
    assert texts_behind([*DECODE, *schedules]) <= texts_behind(PLANS)


def test_all_seats_stand_behind_preludes_but_those_of_the_head_and_of_the_launcher():
    for kind, seats in STAND_IN.items():
        plans = [registry.plan_of(path.stem) for path in registry.schedules(kind)]
        for seat in set(SEATS) - set(WITHOUT) - {*seats, "device"}:
            assert not any(plan.parts.texts(seat) for plan in plans), (kind, seat)


def test_a_prelude_declares_no_function_that_no_text_knows():
    texts = [path for suffix in ("cuh", "j2") for path in TEMPLATES.rglob(f"*.{suffix}")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in texts)))
    for path in TEMPLATES.glob("*/prelude/*.h"):
        code = re.sub("//.*", "", path.read_text())
        assert set(re.findall(r"(?<!operator )\b(\w+)\(", code)) <= words, path


def texts_behind(slugs) -> set[tuple[str, str]]:
    return {
        (seat, text)
        for plan in map(registry.plan_of, slugs)
        for seat in ("device", *STAND_IN[plan.kind])
        for text in texts_of(plan, seat)
    }
