"""The command line as a test calls it, and what the tests of its commands name."""

from click.testing import CliRunner, Result

import cli
from fagen.doctor import Finding, doctor
from fagen.paths import locate
from fagen.registry import ENTRIES

SLUG = "fwd_fp16_d128_causal_m128n128"
QUANTIZER = "quant_fp16_d128_rot_shead"
ROOT = locate("cli.py").parent
COMMITTED = {  # slugs of the committed schedules, by kind
    kind: sorted(path.stem for path in (locate("schedules") / kind).glob("*.toml"))
    for kind in ENTRIES
}
ALL = [slug for slugs in COMMITTED.values() for slug in slugs]


def fagen(*words: object, input: str | bytes | None = None) -> Result:
    """Run a command; a traceback fails the test."""
    result = CliRunner().invoke(cli.main, [str(w) for w in words], input=input, prog_name="fagen")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def finding_of(name: str) -> Finding:
    """What `fagen doctor` has to say of one thing."""
    (finding,) = (finding for finding in doctor() if finding.name == name)
    return finding
