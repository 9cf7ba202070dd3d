"""Evidence files go out and come back the same, and every way to be wrong is told apart."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fagen import toolchain
from fagen.errors import VerificationError
from fagen.evidence import (
    Bandwidth,
    Evidence,
    RoundingError,
    ShapeError,
    Speed,
    evidence_path,
    faults,
    launchers,
    outlived,
    read,
    read_excuses,
    renew,
    staleness,
    write,
)
from fagen.evidence.store import _encoded
from fagen.problem import Problem
from fagen.registry import from_slug, plan
from fagen.render import Source, render

SLUG = "fwd_fp16_d128_full_m128n128"
SOURCE = Source(slug=SLUG, kernel="int x;\n", binding="", hash="a" * 64, host_hash="e" * 64)
GOOD = ShapeError(1, 128, 128, 2, 2, 1.234567e-4, 1e-4, 1.1e-3, 3e-7, 1e-3)
EVIDENCE = Evidence(
    slug=SLUG,
    source_hash=SOURCE.hash,
    host_hash=SOURCE.host_hash,
    flags=tuple(toolchain.FLAGS),
    cutlass="4.2.0",
    machine_code="b" * 64,
    compiler="13.0.88",
    card="NVIDIA H200",
    driver="580.159.03",
    torch="2.11.0+cu130",
    date="2026-11-21",
    errors=(GOOD,),
    speeds=(Speed("sustained", 4, 4096, 16, 600.0, 0.01, 1560, 563.0),),
)


@pytest.fixture
def folder(tmp_path):
    """generated/ as it should be: one kernel with its evidence."""
    (tmp_path / f"{SLUG}.cu").write_text(SOURCE.kernel)
    write(EVIDENCE, tmp_path)
    return tmp_path


def kinds(folder, **given):
    return [fault.kind for fault in faults([SOURCE], folder, **given)]


def test_evidence_reads_back_as_it_was_written_to_four_digits(folder):
    found = read(SLUG, folder)
    assert found.errors[0].error == 1.235e-4
    rounded = dataclasses.replace(GOOD, error=1.235e-4)
    assert found == dataclasses.replace(EVIDENCE, errors=(rounded,))


def test_evidence_of_a_quantiser_reads_back_and_is_checked_against_its_own_bounds(tmp_path):
    slug = "quant_fp16_d128_rot_shead"
    fine = RoundingError(1, 128, 2, False, 1e-4, 1e-3, 0, 1e-7, 1e-5)
    made = dataclasses.replace(
        EVIDENCE,
        slug=slug,
        errors=(fine,),
        speeds=(Bandwidth(4, 16_384, 16, True, 3_600.0, 4_000.0),),
    )
    write(made, tmp_path)
    assert read(slug, tmp_path) == made
    assert made.speeds[0].ratio == 0.9
    (tmp_path / f"{slug}.cu").write_text(SOURCE.kernel)
    source = dataclasses.replace(SOURCE, slug=slug)
    assert not faults([source], tmp_path)
    for off in (dict(neighbours=2e-3), dict(wrong=1), dict(descale_error=1e-4)):
        assert fine.ok and not dataclasses.replace(fine, **off).ok
    assert not dataclasses.replace(fine, neighbours=float("nan")).ok
    write(dataclasses.replace(made, errors=(dataclasses.replace(fine, wrong=1),)), tmp_path)
    assert [fault.kind for fault in faults([source], tmp_path)] == ["failed"]


def test_writing_leaves_no_second_file_and_replaces_the_old(folder):
    write(dataclasses.replace(EVIDENCE, date="2026-12-01"), folder)
    assert read(SLUG, folder).date == "2026-12-01"
    assert sorted(path.name for path in folder.iterdir()) == [f"{SLUG}.cu", f"{SLUG}.json"]


def test_a_write_that_fails_leaves_the_old_evidence_whole(folder):
    endless = dataclasses.replace(GOOD, error=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write(dataclasses.replace(EVIDENCE, errors=(endless,)), folder)
    assert read(SLUG, folder).date == EVIDENCE.date
    assert len(list(folder.iterdir())) == 2


def test_there_is_no_evidence_of_a_kernel_that_never_ran(tmp_path):
    assert read(SLUG, tmp_path) is None


@pytest.mark.parametrize("error", [1.2e-3, float("nan"), float("inf")])
def test_an_error_over_its_bound_or_not_a_number_is_not_ok(error):
    assert GOOD.ok
    assert not dataclasses.replace(GOOD, error=error).ok
    assert not dataclasses.replace(GOOD, lse_error=error).ok


def test_a_folder_that_agrees_has_no_fault(folder):
    assert kinds(folder) == []
    same = {SLUG: EVIDENCE.machine_code}
    assert kinds(folder, cutlass="4.2.0", machine_codes=same, compiler="13.0.88") == []


def test_a_kernel_without_evidence_or_without_its_text_is_missing(folder):
    evidence_path(SLUG, folder).unlink()
    assert kinds(folder) == ["missing"]
    (folder / f"{SLUG}.cu").unlink()
    assert kinds(folder) == ["missing", "missing"]


def test_an_edit_in_generated_is_drift(folder):
    (folder / f"{SLUG}.cu").write_text("int x;  // better\n")
    assert kinds(folder) == ["drift"]


@pytest.mark.parametrize(
    "change",
    [{"source_hash": "c" * 64}, {"flags": ("-O0",)}, {"cutlass": "4.1.0"}, {"machine_code": "d"}],
    ids=lambda change: next(iter(change)),
)
def test_evidence_of_anything_else_is_stale(folder, change):
    write(dataclasses.replace(EVIDENCE, **change), folder)
    told = faults(
        [SOURCE],
        folder,
        cutlass="4.2.0",
        machine_codes={SLUG: EVIDENCE.machine_code},
        compiler="13.0.88",
    )
    assert [fault.kind for fault in told] == ["stale"]
    assert f"fagen verify {SLUG}" in str(told[0])


def test_other_machine_code_of_another_compiler_is_no_fault_of_a_kernel(folder):
    assert staleness(EVIDENCE, SOURCE.hash, machine_code="e", compiler="13.2.10") == []
    assert staleness(EVIDENCE, SOURCE.hash, machine_code="e", compiler="13.0.88") != []


def test_evidence_that_shows_a_wrong_shape_is_no_evidence(folder):
    bad = dataclasses.replace(GOOD, error=1.0)
    write(dataclasses.replace(EVIDENCE, errors=(GOOD, bad)), folder)
    assert kinds(folder) == ["failed"]
    write(dataclasses.replace(EVIDENCE, errors=()), folder)
    assert kinds(folder) == ["failed"]


def test_a_file_that_no_schedule_makes_is_an_orphan(folder):
    (folder / "fwd_fp16_d64_full_m64n64.cu").write_text("")
    (folder / "notes.txt").write_text("")
    (folder / "fwd_fp16_d64_full_m64n64.json").write_text("")
    assert kinds(folder) == ["orphan"] * 3
    said = {fault.slug: "--same-code" in str(fault) for fault in faults([SOURCE], folder)}
    assert [slug for slug, carried in said.items() if carried] == ["fwd_fp16_d64_full_m64n64.json"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"slug": 1}'])
def test_a_file_that_is_no_evidence_is_said_to_be_unreadable(folder, text):
    evidence_path(SLUG, folder).write_text(text)
    assert kinds(folder) == ["unreadable"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("600.0", "1" + "0" * 400, "tflops is 1000"),
        ("600.0", "NaN", "tflops is NaN"),
        ("600.0", "-600.0", "tflops is -600"),
        ('"NVIDIA H200"', '"\\u001b[2J"', r'card is "\\u001b\[2J"'),
        ('"NVIDIA H200"', f'"{"x" * 501}"', "card is "),
        ('"driver"', '"\\u001b"', r"fields: \\u001b, driver"),
        ("600.0", "[" * 60_000, "not evidence that this fagen can read"),
        ("600.0", " " * 140_000, "longer than 131,072 bytes"),
    ],
)
def test_what_no_gpu_can_have_found_is_no_evidence(folder, old, new, said):
    path = evidence_path(SLUG, folder)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(VerificationError, match=said) as refusal:
        read(SLUG, folder)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500


def test_a_copy_that_took_no_time_or_all_of_it_is_no_evidence(tmp_path):
    slug = "quant_fp16_d128_rot_shead"
    made = dict(slug=slug, errors=(), speeds=(Bandwidth(4, 16, 16, True, 3_600.0, 0.0),))
    write(dataclasses.replace(EVIDENCE, **made), tmp_path)
    with pytest.raises(VerificationError, match=r"copy_gb_per_s is 0\.0"):
        read(slug, tmp_path)


def test_a_kernel_that_is_no_text_is_drift(folder):
    (folder / f"{SLUG}.cu").write_bytes(b"\xff")
    assert kinds(folder) == ["drift"]


JUNK = st.sampled_from([None, True, -1, 0.5, "x", [], ["x"], [1], {}, {"a": 1}, [{}], 1e999])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(_encoded(EVIDENCE))), JUNK), max_size=3))
def test_no_evidence_is_a_traceback(tmp_path_factory, changes):
    """Nor one inside a record of errors or speeds."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / f"{SLUG}.cu").write_text(SOURCE.kernel)
    data = json.loads(json.dumps(_encoded(EVIDENCE)))
    for field, value in changes:
        data[field] = value
    evidence_path(SLUG, folder).write_text(json.dumps(data))
    assert {fault.kind for fault in faults([SOURCE], folder)} <= {"unreadable", "stale", "failed"}
    for part in ("errors", "speeds"):
        data = json.loads(json.dumps(_encoded(EVIDENCE)))
        for number, (_, value) in enumerate(changes):
            data[part][0][sorted(data[part][0])[number]] = value
        evidence_path(SLUG, folder).write_text(json.dumps(data))
        assert {fault.kind for fault in faults([SOURCE], folder)} <= {"unreadable", "failed"}


def test_an_unknown_field_makes_evidence_unreadable_and_is_named(folder):
    path = evidence_path(SLUG, folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "x"}))
    with pytest.raises(VerificationError, match="host"):
        read(SLUG, folder)


def test_evidence_of_another_kernel_is_refused(folder):
    other = SLUG.replace("fp16", "bf16")
    evidence_path(other, folder).write_text(evidence_path(SLUG, folder).read_text())
    with pytest.raises(VerificationError, match=f"not of {other}"):
        read(other, folder)


def test_an_excused_kernel_may_lack_evidence_but_not_be_edited(folder):
    evidence_path(SLUG, folder).unlink()
    (folder / "unverified.toml").write_text(
        f'[{SLUG}]\ndate = "2026-11-21"\nreason = "no GPU at hand"\n'
    )
    assert read_excuses(folder)[SLUG].reason == "no GPU at hand"
    assert kinds(folder) == []
    (folder / f"{SLUG}.cu").write_text("int y;\n")
    assert kinds(folder) == ["drift"]


def test_an_excuse_that_is_not_needed_or_for_nothing_is_a_fault(folder):
    (folder / "unverified.toml").write_text(
        f'[{SLUG}]\ndate = 2026-11-21\nreason = "x"\n\n[gone]\ndate = 2026-11-21\nreason = "x"\n'
    )
    assert kinds(folder) == ["unneeded", "orphan"]


@pytest.mark.parametrize(
    "text", ["x", "[a]\nreason = 'x'\n", "[a]\ndate = 2026-11-21\n", "a = 1\n"]
)
def test_an_excuse_without_date_or_reason_is_unreadable(folder, text):
    (folder / "unverified.toml").write_text(text)
    assert "unreadable" in kinds(folder)


def test_same_machine_code_renews_evidence_and_other_does_not():
    new = dict(slug=SLUG, source_hash="f", host_hash="e" * 64, cutlass="4.2.1", compiler="13.0.90")
    renewed = renew(EVIDENCE, **new, machine_code="b" * 64)
    assert (renewed.source_hash, renewed.cutlass, renewed.compiler) == ("f", "4.2.1", "13.0.90")
    assert (renewed.card, renewed.date) == (EVIDENCE.card, EVIDENCE.date)
    with pytest.raises(VerificationError, match="other machine code"):
        renew(EVIDENCE, **new, machine_code="c")
    with pytest.raises(VerificationError, match="launcher"):
        renew(EVIDENCE, **new | {"host_hash": "0"}, machine_code="b" * 64)


def test_a_launcher_that_ran_with_another_kernel_need_not_run_with_this_one(folder):
    other = dataclasses.replace(EVIDENCE, slug=SLUG, host_hash="1" * 64)
    write(other, folder)
    (folder / "fwd_odd.json").write_text("{}")
    ran = launchers(SLUG, folder)
    assert ran == {"1" * 64}
    new = dict(slug=SLUG, source_hash="f", cutlass="4.2.1", compiler="13.0.90", launchers=ran)
    renewed = renew(EVIDENCE, **new, host_hash="1" * 64, machine_code="b" * 64)
    assert renewed.host_hash == "1" * 64
    with pytest.raises(VerificationError, match="not one that ran with any kernel"):
        renew(EVIDENCE, **new, host_hash="2" * 64, machine_code="b" * 64)


def test_evidence_of_a_kernel_that_was_renamed_is_the_same_under_its_new_name():
    new = dict(source_hash="f", host_hash="e" * 64, cutlass="4.2.0", compiler="13.0.88")
    named = renew(EVIDENCE, slug="fwd_new", **new, machine_code="b" * 64)
    assert named == dataclasses.replace(EVIDENCE, slug="fwd_new", source_hash="f")
    with pytest.raises(VerificationError, match=f"^fwd_new: .* as {SLUG}: run .* fwd_new"):
        renew(EVIDENCE, slug="fwd_new", **new | {"host_hash": "0"}, machine_code="b" * 64)


OUTLIVED = "fwd_e4m3_d128_full_m128n128_sblock_sr64"  # as it was called under other defaults


def test_evidence_has_outlived_its_schedule_where_no_schedule_has_its_slug(tmp_path, monkeypatch):
    """In a user's folder no schedule at all, in generated/ none that is committed."""
    other = "fwd_fp16_d128_full_m256n16"
    for slug in (SLUG, other, OUTLIVED):
        write(dataclasses.replace(EVIDENCE, slug=slug), tmp_path)
    (tmp_path / "fwd_unreadable.json").write_text("{}")
    (tmp_path / "notes.json").write_text("[]")
    assert [found.slug for found in outlived(tmp_path, SLUG)] == [OUTLIVED]
    monkeypatch.setattr("fagen.evidence.store.locate", lambda name: tmp_path)
    home = tmp_path / "forward" / "fp16_d128"
    home.mkdir(parents=True)
    for slug in (SLUG, other, OUTLIVED):
        (tmp_path / f"{slug}.json").rename(home / f"{slug}.json")
    assert [found.slug for found in outlived(None, SLUG)] == [OUTLIVED, other]


def test_a_launcher_is_hashed_without_the_name_of_its_kernel():
    of = plan(from_slug(SLUG))
    source, renamed = render(of), render(dataclasses.replace(of, slug="fwd_another_name"))
    assert source.hash != renamed.hash
    assert source.host_hash == renamed.host_hash
    bf16 = plan(from_slug(SLUG.replace("fp16", "bf16")))  # whose tensor maps are of another type
    assert render(dataclasses.replace(bf16, slug=SLUG)).host_hash != source.host_hash


def test_the_ratio_to_cudnn_is_none_where_cudnn_could_not():
    speed = EVIDENCE.speeds[0]
    assert speed.ratio == pytest.approx(600 / 563)
    assert dataclasses.replace(speed, cudnn_tflops=None).ratio is None


def test_a_ratio_names_its_yardstick_and_in_which_dtype_that_is():
    of = {  # slugs of every kind, and beside what they are timed
        SLUG: "cuDNN",
        "fwd_e4m3_d128_full_m192n96_s3": "cuDNN fp16",
        "bwd_fp16_d128_causal_m64n128": "cuDNN",
        "dec_fp16_d128_causal_r8n64": "cuDNN",
        "quant_fp16_d128_rot_shead": "a copy",
        "quant_e4m3_d128": "a copy",
        "comb_fp16_d128": "a copy",
    }
    for slug, yardstick in of.items():
        found = dataclasses.replace(EVIDENCE, slug=slug)
        assert found.yardstick == yardstick
        if yardstick.startswith("cuDNN"):
            assert f" of {yardstick}, at" in found.speeds_in_words()[0]
    e4m3 = Problem("e4m3", 128, 128, "full")
    assert (e4m3.peer.name, e4m3.peer.title) == ("cudnn", "cuDNN fp16")
    assert dataclasses.replace(e4m3, lengths="varlen").peer.title == "FlashAttention-2 fp16"
    assert dataclasses.replace(e4m3, dtype="bf16").peer.title == "cuDNN"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# caf\xe9\n", r":1: this is not UTF-8 text"),
        (
            b'["a\\u001b[2J\\n"]\nreason = "x"\n',
            r":1: [a\u001b[2J\u000a] needs a date and a reason",
        ),
        (b'[a]\ndate = "x"\nreason = "\\u001b[2J"\n', ":1: [a] needs a line of text"),
        (b'[a]\ndate = "x"\nreason = 0x' + b"f" * 4000, ":1: [a] needs a line of text"),
        (b'["a\\u001b"]\ndate = "x"\nreason = "x"\n', r":1: [a\u001b] needs a line of text"),
    ],
)
def test_excuses_that_nobody_meant_are_refused_in_a_line_that_can_be_printed(
    content, said, tmp_path
):
    (tmp_path / "unverified.toml").write_bytes(content)
    with pytest.raises(VerificationError) as refusal:
        read_excuses(tmp_path)
    assert said in str(refusal.value) and str(refusal.value).isprintable()
