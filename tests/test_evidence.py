"""Evidence goes out and comes back the same, and every way to be wrong is told apart."""

import dataclasses
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from fagen.errors import FagenError, VerificationError
from fagen.evidence import (
    Line,
    Rendering,
    drop,
    faults,
    is_current,
    launchers,
    note,
    outlived,
    read,
    read_excuses,
    read_line,
    renew,
    staleness,
    write,
)
from fagen.evidence.record import encoded, in_columns, in_rows, laid_out
from fagen.evidence.store import editing
from fagen.problem import Problem
from fagen.records import Bandwidth, RoundingError
from fagen.registry import kind_of_slug
from fagen.render import Hashes
from fagen.vocab import yardstick
from tests.evidence_helpers import FORM, GOOD, SLUG, SPEED, evidence_of, stand_in

QUANTIZER = "quant_fp16_d128_rot"  # which is not committed as text
EVIDENCE = evidence_of()
RENDERING = Rendering(SLUG, EVIDENCE.hashes)
LEDGER = "ledger/forward.jsonl"


@pytest.fixture
def generated(tmp_path, monkeypatch) -> Path:
    """generated/ as it should be: one kernel with its evidence."""
    folder = tmp_path / "generated"
    folder.mkdir()
    stand_in(folder, monkeypatch)
    write(EVIDENCE)
    return folder


def kinds(*renderings: Rendering, **options: object) -> list[str]:
    return [fault.kind for fault in faults(renderings or [RENDERING], **options)]


# ---- out and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["the ledger", "a folder"])
def test_evidence_reads_back_as_it_was_written_to_four_digits(generated, to):
    folder = generated / "mine" if to == "a folder" else None
    assert read(QUANTIZER, folder) is None, "it never ran"
    exact = evidence_of(errors=(dataclasses.replace(GOOD, error=1.234567e-4),))
    quantizer = evidence_of(
        QUANTIZER,
        errors=(RoundingError(1, 128, 2, False, 1e-4, 1e-3, 0, 1e-7, 1e-5),),
        speeds=(Bandwidth(4, 16_384, 16, True, 3_600.0, 4_000.0),),
    )
    for evidence in (exact, quantizer, evidence_of(errors=(), speeds=())):
        write(evidence, folder)
        assert read(evidence.slug, folder) == (EVIDENCE if evidence is exact else evidence)
    assert quantizer.speeds[0].ratio == 0.9
    write(dataclasses.replace(EVIDENCE, date="2026-12-01"), folder)
    assert read(SLUG, folder).date == "2026-12-01"
    drop(SLUG, folder)
    assert read(SLUG, folder) is None and read(QUANTIZER, folder)
    files = {path.relative_to(generated).as_posix() for path in generated.rglob("*.json*")}
    assert files >= {f"mine/{QUANTIZER}.json"} if folder else files >= {"ledger/quantize.jsonl"}


def test_a_ledger_has_a_line_for_each_schedule_by_slug_and_the_form_is_laid_out_beside(generated):
    for slug in (FORM, f"{SLUG}_onlinemax"):
        write(evidence_of(slug))
    lines = (generated / LEDGER).read_text().splitlines()
    assert [json.loads(line)["slug"] for line in lines] == [FORM, SLUG, f"{SLUG}_onlinemax"]
    assert [path.name for path in (generated / "forward").iterdir()] == [f"{FORM}.json"]
    beside = json.loads((generated / "forward" / f"{FORM}.json").read_text())
    assert in_columns(beside) == json.loads(lines[0]) and beside == encoded(evidence_of(FORM))
    assert in_rows(in_columns(beside)["errors"]) == beside["errors"]


@pytest.mark.parametrize("to", ["the ledger", "a folder"])
def test_a_write_that_fails_leaves_the_old_evidence_whole(generated, to):
    folder = generated / "mine" if to == "a folder" else None
    write(EVIDENCE, folder)
    before = sorted(generated.rglob("*"))
    endless = dataclasses.replace(GOOD, error=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write(dataclasses.replace(EVIDENCE, errors=(endless,)), folder)
    assert read(SLUG, folder).date == EVIDENCE.date and sorted(generated.rglob("*")) == before


def _written_by_another_process(folder: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder, patch)
        for step in range(8):
            write(evidence_of(f"fwd_number{number}_{step}"))


def test_processes_that_write_at_once_lose_no_line_of_each_other(generated):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_written_by_another_process, [generated] * 4, range(4)))
    slugs = [json.loads(line)["slug"] for line in (generated / LEDGER).read_text().splitlines()]
    assert len(slugs) == 33 and slugs == sorted(slugs)


# ---- what is right, and what is stale ------------------------------------------------------------


def test_errors_are_judged_by_the_bounds_of_their_kind_and_none_is_no_evidence(generated):
    rounding = RoundingError(1, 128, 2, False, 1e-4, 1e-3, 0, 1e-7, 1e-5)
    nan, inf = float("nan"), float("inf")
    for good, off in (
        *((GOOD, dict(error=error)) for error in (1.2e-3, nan, inf)),
        *((GOOD, dict(lse_error=error)) for error in (1.2e-3, nan, inf)),
        *((rounding, dict(neighbours=share)) for share in (2e-3, nan)),
        *((rounding, dict(wrong=1)), (rounding, dict(descale_error=1e-4))),
    ):
        assert good.ok and not dataclasses.replace(good, **off).ok
    for errors in ((GOOD, dataclasses.replace(GOOD, error=1.0)), ()):
        write(dataclasses.replace(EVIDENCE, errors=errors))
        assert kinds() == ["failed"]
    write(evidence_of(QUANTIZER, errors=(dataclasses.replace(rounding, wrong=1),), speeds=()))
    quantizer = dataclasses.replace(RENDERING, slug=QUANTIZER)
    assert [fault.slug for fault in faults([RENDERING, quantizer])] == [SLUG, QUANTIZER]


CHANGES = {"device": "d", "launcher": "d", "constants": "d", "flags": "-O0", "cutlass": "4.1.0"}


@pytest.mark.parametrize("field", CHANGES)
def test_evidence_of_anything_else_is_stale(generated, field):
    assert kinds(cutlass="4.2.0") == []
    with editing("forward") as texts:
        ran = dataclasses.replace(EVIDENCE, **{field: CHANGES[field]})
        texts[SLUG] = str(Line(SLUG, EVIDENCE.hashes, ran))
    (fault,) = faults([RENDERING], cutlass="4.2.0")
    assert fault.kind == "stale" and f"fagen verify {SLUG}" in str(fault)
    assert is_current(read_line(SLUG)) == (field == "cutlass"), "which a list does not look for"


def test_machine_code_is_compared_where_the_compiler_is_the_same():
    hashes = EVIDENCE.hashes
    assert staleness(EVIDENCE, hashes, machine_code="b" * 64, compiler="13.0.88") == []
    assert staleness(EVIDENCE, hashes, machine_code="e", compiler="13.2.10") == []
    assert staleness(EVIDENCE, hashes, machine_code="e", compiler="13.0.88") != []


def test_a_launcher_that_ran_with_another_kernel_of_the_kind_is_proved(generated, tmp_path):
    now = dataclasses.replace(EVIDENCE.hashes, launcher="1" * 64)
    assert kinds(Rendering(SLUG, now)) == ["drift", "stale"]
    with pytest.raises(VerificationError, match="not one that ran with any kernel"):
        renewed(launcher=now.launcher, launchers=launchers(SLUG))
    write(evidence_of(QUANTIZER, launcher=now.launcher, errors=(), speeds=()))
    assert kinds(Rendering(SLUG, now)) == ["drift", "stale", "orphan"], "that is of another kind"
    drop(QUANTIZER)
    write(evidence_of(FORM, launcher=now.launcher))
    assert launchers(SLUG) == {"1" * 64, "e" * 64}
    assert kinds(Rendering(SLUG, now), Rendering(FORM, now, "int x;\n")) == ["missing"] * 2  # texts
    assert renewed(launcher=now.launcher, launchers=launchers(SLUG)).launcher == now.launcher
    # by `generate --all` it is entered as this one's
    note([Rendering(SLUG, now)])
    assert read(SLUG).hashes == now
    # what lies in a user's folder counts there too
    write(evidence_of(f"{SLUG}_onlinemax", launcher="2" * 64), tmp_path / "mine")
    (tmp_path / "mine" / "fwd_odd.json").write_text("{}")
    assert launchers(SLUG, tmp_path / "mine") == launchers(SLUG) | {"2" * 64}


def test_what_a_schedule_renders_to_is_noted_until_it_ran(generated):
    now = Hashes("1" * 64, "2" * 64, "3" * 64)
    assert kinds(Rendering(SLUG, now)) == ["drift", "stale"]
    assert note([Rendering(SLUG, now)]) == [generated / LEDGER]
    assert kinds(Rendering(SLUG, now)) == ["stale"]
    assert read_line(SLUG).rendered == now and read(SLUG).hashes == EVIDENCE.hashes
    assert not is_current(read_line(SLUG))
    assert note([Rendering(SLUG, now)]) == [], "nothing is new"
    write(evidence_of(SLUG, **vars(now)))
    assert kinds(Rendering(SLUG, now)) == [] and is_current(read_line(SLUG))
    note([Rendering(f"{SLUG}_onlinemax", now)])  # a new schedule
    assert read(f"{SLUG}_onlinemax") is None and read_line(f"{SLUG}_onlinemax").rendered == now


def test_a_kernel_without_evidence_a_line_or_its_text_is_missing_and_an_edit_is_drift(generated):
    drop(SLUG)
    assert kinds() == ["missing"] * 2
    write(EVIDENCE)
    form = Rendering(FORM, EVIDENCE.hashes, "int x;\n")
    write(evidence_of(FORM))
    assert kinds(RENDERING, form) == ["missing"] * 2, "its text, and the header that it includes"
    note([form])
    assert kinds(RENDERING, form) == []
    names = f"{FORM}.cu", f"{FORM}.json", "fagen_host.h"
    kernel, beside, header = (generated / "forward" / name for name in names)
    edits = (kernel, b"int x;  // better\n"), (kernel, b"\xff"), (beside, b"{}"), (header, b"")
    for path, content in edits:
        before = path.read_bytes()
        path.write_bytes(content)
        assert kinds(RENDERING, form) == ["drift"]
        path.write_bytes(before)


def test_what_no_schedule_makes_is_an_orphan(generated):
    write(evidence_of("fwd_fp16_d64_full_m64n64"))
    for name in ("forward/fwd_fp16_d64_full_m64n64.cu", "notes.txt", f"forward/{SLUG}.json"):
        (generated / name).parent.mkdir(exist_ok=True)
        (generated / name).write_text("")
    (generated / "README.md").write_text("")
    assert kinds() == ["orphan"] * 4
    carried = [fault.slug for fault in faults([RENDERING]) if "--same-code" in str(fault)]
    assert carried == ["fwd_fp16_d64_full_m64n64"]


# ---- renewal, and kernels that were renamed ------------------------------------------------------


def renewed(slug: str = SLUG, machine_code: str = "b" * 64, launchers=(), **hashes: str):
    new = dataclasses.replace(EVIDENCE.hashes, device="f", **hashes)
    return renew(
        EVIDENCE,
        slug=slug,
        hashes=new,
        cutlass="4.2.1",
        machine_code=machine_code,
        compiler="13.0.90",
        launchers=launchers,
    )


def test_same_machine_code_renews_evidence_under_any_name_and_other_does_not():
    new = renewed()
    assert (new.device, new.cutlass, new.compiler) == ("f", "4.2.1", "13.0.90")
    assert (new.card, new.date) == (EVIDENCE.card, EVIDENCE.date)
    assert renewed("fwd_new") == dataclasses.replace(new, slug="fwd_new")
    for off, why in (
        (dict(machine_code="c"), "other machine code"),
        (dict(launcher="0"), "launcher is not one that ran"),
        (dict(constants="0"), "other numbers"),
    ):
        with pytest.raises(VerificationError, match=f"{why}.*: run `fagen verify {SLUG}`"):
            renewed(**off)
        with pytest.raises(VerificationError, match=f"^fwd_new: .* as {SLUG}.*: run .* fwd_new"):
            renewed("fwd_new", **off)


def test_a_schedule_that_has_another_slug_and_the_same_source_has_its_evidence(generated):
    lost, slug = "fwd_fp16_d128_full_m128n128_s2", f"{SLUG}_onlinemax"
    write(evidence_of(lost))
    other = dataclasses.replace(EVIDENCE.hashes, constants="d")
    note([RENDERING, Rendering(slug, other)])
    assert read(lost) and not read(slug), "it is of other numbers"
    note([RENDERING, Rendering(slug, EVIDENCE.hashes)])
    assert read(slug) == evidence_of(slug) and not read(lost) and read(SLUG)


def test_evidence_has_outlived_its_schedule_where_no_schedule_has_its_slug(generated, tmp_path):
    """In a user's folder no schedule at all, in a ledger none that is committed."""
    lost = "fwd_e4m3_d128_full_m128n128_sblock_sr64"  # as it was called under other defaults
    other = "fwd_fp16_d128_full_m256n16"
    mine = tmp_path / "mine"
    for slug in (SLUG, other, lost):
        write(evidence_of(slug))
        write(evidence_of(slug), mine)
    (mine / "fwd_unreadable.json").write_text("{}")
    (mine / "notes.json").write_text("[]")
    assert [evidence.slug for evidence in outlived(mine, SLUG)] == [lost]
    assert [evidence.slug for evidence in outlived(None, SLUG)] == [lost, other]


# ---- what is no evidence -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("600.0", "1" + "0" * 400, "tflops is 1000"),
        ("600.0", "NaN", "tflops is NaN"),
        ("600.0", "-600.0", "tflops is -600"),
        ('"NVIDIA H200"', '"\\u001b[2J"', r'card is "\\u001b\[2J"'),
        ('"NVIDIA H200"', f'"{"x" * 501}"', "card is "),
        ('"driver"', '"\\u001b"', r"fields: \\u001b, driver"),
        ('"driver"', '"host": "x", "driver"', "fields: host"),
        ("600.0", "[" * 60_000, "not evidence that this fagen can read"),
        ("0.01", "0.01" + " " * 140_000, "longer than 131,072 bytes"),
        (f'"slug": "{SLUG}"', '"slug": "fwd_x"', f"of fwd_x, not of {SLUG}"),
    ],
)
def test_what_no_gpu_can_have_found_is_no_evidence(generated, tmp_path, old, new, message):
    path = write(EVIDENCE, tmp_path / "mine")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(VerificationError, match=message) as refusal:
        read(SLUG, tmp_path / "mine")
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500
    if "slug" not in old and len(new) < 100_000:
        ledger = generated / LEDGER
        ledger.write_text(ledger.read_text().replace(old, new))
        with pytest.raises(VerificationError, match=f"^forward.jsonl: {SLUG}: .*{message}"):
            read(SLUG)
        assert kinds() == ["unreadable"]


def test_a_copy_that_took_all_of_the_time_is_no_evidence(tmp_path):
    endless = (Bandwidth(4, 16, 16, True, 3_600.0, 0.0),)
    write(evidence_of(QUANTIZER, errors=(), speeds=endless), tmp_path)
    with pytest.raises(VerificationError, match=r"copy_gb_per_s is 0\.0"):
        read(QUANTIZER, tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]\n", '{"a": 1}\n', '{"slug": "b"}\n{"slug": "b"}\n', "\xff"]
)
def test_a_ledger_that_fagen_did_not_write_is_told_and_not_written_over(generated, text):
    (generated / LEDGER).write_text(text, encoding="latin-1")
    assert kinds() == ["unreadable"]
    assert launchers(SLUG) == frozenset()
    with pytest.raises(VerificationError, match=r"forward\.jsonl:\d+: "):
        write(EVIDENCE)
    assert (generated / LEDGER).read_text(encoding="latin-1") == text


def test_no_link_in_generated_leads_out_of_it(generated, tmp_path):
    (tmp_path / "out").mkdir()
    (generated / "ledger" / "quantize.jsonl").symlink_to(tmp_path / "out" / "x")
    (generated / "forward").symlink_to(tmp_path / "out")
    for refused in (lambda: write(evidence_of(QUANTIZER)), lambda: write(evidence_of(FORM))):
        with pytest.raises(FagenError, match="is a symbolic link"):
            refused()
    assert not list((tmp_path / "out").iterdir())


# ---- excuses, and words --------------------------------------------------------------------------


def test_an_excused_kernel_may_lack_evidence_but_its_line_is_of_today(generated):
    with editing("forward") as texts:
        texts[SLUG] = str(Line(SLUG, EVIDENCE.hashes))
    excuse = f'[{SLUG}]\ndate = 2026-11-21\nreason = "no GPU at hand"\n'
    (generated / "unverified.toml").write_text(excuse)
    assert read_excuses()[SLUG].reason == "no GPU at hand"
    assert kinds() == []
    assert kinds(Rendering(SLUG, Hashes("1", "2", "3"))) == ["drift"]
    write(EVIDENCE)
    (generated / "unverified.toml").write_text(excuse + excuse.replace(SLUG, "gone"))
    assert kinds() == ["unneeded", "orphan"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\n", "needs a date and a reason"),
        (b"[a]\ndate = 2026-11-21\n", "needs a date and a reason"),
        (b"# caf\xe9\n", ":1: this is not UTF-8 text"),
        (b'["a\\u001b[2J\\n"]\nreason = "x"\n', r":1: [a\u001b[2J\u000a] needs a date and a"),
        (b'[a]\ndate = "x"\nreason = "\\u001b[2J"\n', ":1: [a] needs a line of text"),
    ],
)
def test_excuses_that_nobody_meant_are_refused_in_a_line_that_can_be_printed(
    content, message, generated
):
    (generated / "unverified.toml").write_bytes(content)
    with pytest.raises(VerificationError) as refusal:
        read_excuses()
    assert message in str(refusal.value) and str(refusal.value).isprintable()
    assert kinds() == ["unreadable"]


def test_a_ratio_names_its_yardstick_and_in_which_dtype_that_is():
    assert SPEED.ratio == pytest.approx(600 / 500)
    assert dataclasses.replace(SPEED, cudnn_tflops=None).ratio is None
    for slug, dtype, peer in (
        (SLUG, "fp16", "cuDNN"),
        ("fwd_e4m3_d128_full_m192n96_s3", "e4m3", "cuDNN fp16"),
        ("bwd_fp16_d128_causal_m64n128", "fp16", "cuDNN"),
        ("dec_fp16_d128_causal_r8n64", "fp16", "cuDNN"),
        (QUANTIZER, "fp16", "a copy"),
        ("comb_fp32_d128", "fp32", "a copy"),
    ):
        assert yardstick(kind_of_slug(slug).speeds.beside, dtype) == peer
        assert f" of {peer}, at" in evidence_of(slug, yardstick=peer).speeds_in_words()[0]
    e4m3 = Problem("e4m3", 128, 128, "full")
    assert (e4m3.peer.name, e4m3.peer.title) == ("cudnn", "cuDNN fp16")
    assert dataclasses.replace(e4m3, lengths="varlen").peer.title == "FlashAttention-2 fp16"
    assert dataclasses.replace(e4m3, dtype="bf16").peer.title == "cuDNN"
    assert laid_out(encoded(EVIDENCE)).count("\n") == len(vars(EVIDENCE)) + 6
