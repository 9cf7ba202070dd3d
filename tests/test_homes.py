"""Homes that are not to be had, and paths that are no text: variables name what is needed."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from fagen import pick
from fagen.commandline import report
from fagen.dispatch.pick import search_command
from fagen.doctor import doctor
from fagen.errors import CacheError
from fagen.paths import config_folder
from tests.cli_helpers import SLUG, fagen, finding_of
from tests.scripted_compilers import made


@pytest.fixture(
    params=["unset", "empty", "nobody's", "not there", "not to be read", "inherited", "a file"]
)
def homeless(request, tmp_path, monkeypatch):
    """A home that nobody can use, and a user that is in no list."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    closed = tmp_path / "closed"
    closed.mkdir()
    homes = {"empty": "", "nobody's": "/nonexistent", "not there": str(tmp_path / "none")}
    homes |= dict.fromkeys(("not to be read", "inherited"), str(closed / "home"))
    homes["a file"] = __file__
    if request.param == "unset":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    else:
        monkeypatch.setenv("HOME", homes[request.param])
        if request.param == "inherited":
            monkeypatch.setenv("XDG_CONFIG_HOME", str(closed / "config"))
    stat = Path.stat

    def refused(path: Path, **how: bool) -> os.stat_result:
        if closed in path.parents:  # root may look anywhere
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refused)


def test_a_home_that_is_not_to_be_had_is_not_asked_for_where_the_cache_is_named(
    homeless, tmp_path, monkeypatch
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    assert made() is False and made() is True
    choice = pick(dtype="fp16", head_dim=128, causal=True)
    assert choice.slug and choice.file and not choice.found
    assert list(report.listed_of_users()) == []
    assert search_command(SLUG).startswith(f"fagen search {SLUG} ")
    for words in (("cache", "list"), ("doctor",), ("check", SLUG)):
        answer = fagen(*words)
        assert answer.exit_code == 0, answer.output
    assert finding_of("cache folder").ok
    if config_folder() is None:
        assert "set XDG_CONFIG_HOME" in finding_of("schedules").remedy


def test_without_a_cache_named_the_way_out_is(homeless, monkeypatch):
    monkeypatch.delenv("FAGEN_CACHE")
    finding = finding_of("cache folder")
    if not finding.ok:
        assert "FAGEN_CACHE" in finding.remedy or "XDG_CACHE_HOME" in finding.remedy
    assert "Traceback" not in fagen("cache", "list").output


@pytest.mark.parametrize("name", ["FAGEN_CACHE", "XDG_CONFIG_HOME", "CUDA_HOME", "FAGEN_CUTLASS"])
def test_a_home_of_nobody_in_a_variable_is_said_by_the_doctor(monkeypatch, name):
    monkeypatch.setenv(name, "~nobody-at-all/x")
    findings = [finding for finding in doctor() if name in finding.found + finding.remedy]
    assert findings and not any(finding.ok for finding in findings)


def test_a_path_that_is_not_utf_8_is_shown_escaped_and_json_stays_json(tmp_path, monkeypatch):
    monkeypatch.setenv("FAGEN_CACHE", os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n\x1b[2J"))
    assert made() is False
    for words in (("cache", "list"), ("cache", "prune", "--all"), ("doctor",)):
        assert all(line.isprintable() for line in fagen(*words).output.splitlines())
        assert json.loads(fagen(*words, "--json").stdout) is not None
    odd = os.fsdecode(b"\xff.toml")
    assert fagen("check", odd).exit_code == 1
    assert json.loads(fagen("check", odd, "--json").stdout)["exit_code"] == 1


@pytest.mark.parametrize("where", ["loop", "loop/x", "y" * 300, "file", "file/x"])
def test_a_cache_that_cannot_be_is_said_in_words(tmp_path, monkeypatch, where):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / where))
    with pytest.raises(CacheError, match=r"cannot be written(.|\n)*set FAGEN_CACHE"):
        made()
    finding = finding_of("cache folder")
    assert not finding.ok and "set FAGEN_CACHE" in finding.remedy
    for words in (("cache", "list"), ("cache", "prune", "--all")):
        assert fagen(*words).exit_code in (0, 4)


def test_the_doctor_names_what_compilers_do_not_get(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    finding = finding_of("compilers")
    assert finding.ok and re.search("do not get .*NVCC_APPEND_FLAGS", finding.found)
