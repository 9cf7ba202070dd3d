"""Turn a Plan into Source: the kernel's C++ and the torch binding's, out of templates."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fagen import outputs, process
from fagen.errors import ToolchainError
from fagen.kind import Plan
from fagen.paths import find_packaged, locate
from fagen.render import tokens
from fagen.render.cpp import checked, counted, cpp, described, filled, initialised, members
from fagen.render.tokens import HOST_MARK, INTERFACE_MARK, Hashes, token_hash
from fagen.statuses import ALIGNMENT, Status, statuses

__all__ = [
    "BINDING",
    "HASH_WORD",
    "HEADER",
    "HOST_MARK",
    "INTERFACE_MARK",
    "Hashes",
    "Source",
    "environment",
    "formatted",
    "hashes",
    "hashes_of",
    "header_file",
    "header_text",
    "kernel_file",
    "kernel_text",
    "render",
    "source_hash",
    "token_hash",
    "written",
]

HASH_WORD = "FAGEN_SOURCE_HASH"  # the kernel says its own hash where a template says this

KERNEL, BINDING = "kernel.cu.j2", "binding.cpp.j2"

HEADER = "fagen_host.h"  # what launchers share: it lies beside kernels
_HEADER_HASH = "FAGEN_HOST_HASH"  # the header and each kernel say the header's where this stands


@dataclass(frozen=True)
class Source:
    """C++ that needs CUTLASS's headers only; hashes are of tokens (see token_hash).

    The kernel includes the header, which is the same of all kernels. Each text ends with a stamp,
    by which it is known again where it would be written over. `hash` is of the whole kernel's file,
    which says the header's, and tells one library from another; `hashes` are of its parts, and tell
    of what there is evidence.
    """

    slug: str
    kernel: str  # <slug>.cu
    header: str  # fagen_host.h
    binding: str  # <slug>_torch.cpp
    hash: str
    hashes: Hashes
    plan: Plan  # that it is of


def render(plan: Plan) -> Source:
    """Write the kernel and its binding.  Raises ToolchainError where clang-format is missing."""
    text = kernel_text(plan)
    return Source(
        slug=plan.slug,
        kernel=kernel_file(text),
        header=header_file(),
        binding=outputs.stamped(formatted(_template(BINDING, plan))),
        hash=token_hash(text),
        hashes=hashes_of(text, plan.slug),
        plan=plan,
    )


def kernel_file(text: str) -> str:
    """Return a kernel as its file has it, of its text: laid out, with its hash and a stamp."""
    return outputs.stamped(formatted(text.replace(HASH_WORD, token_hash(text))))


def kernel_text(plan: Plan) -> str:
    """Return a kernel's text as its template has it, not laid out and without its hash."""
    return _template(KERNEL, plan).replace(_HEADER_HASH, _header()[1])


def header_file() -> str:
    """Return the header that lies beside kernels, as its file has it."""
    return outputs.stamped(formatted(header_text()))


def header_text() -> str:
    """Return the text of the header that kernels include, not laid out."""
    return _header()[0]


@dataclass(frozen=True)
class _Calls:
    """What the header says of how all calls end."""

    statuses: tuple[Status, ...]
    alignment: int


@cache
def _header() -> tuple[str, str]:
    """The header's text, and a number by which kernels know it."""
    text = written(f"{HEADER}.j2", calls=_Calls(statuses(()), ALIGNMENT))
    number = f"0x{token_hash(text)[:8]}"
    return text.replace(_HEADER_HASH, number), number


def source_hash(plan: Plan) -> str:
    """Return the hash that render(plan) would have, in a tenth of its time."""
    return token_hash(kernel_text(plan))


def hashes(plan: Plan) -> Hashes:
    """Return the hashes of its parts that render(plan) would have, as quickly."""
    return hashes_of(kernel_text(plan), plan.slug)


def hashes_of(kernel: str, slug: str) -> Hashes:
    """Hash the parts of a kernel's text, laid out or not."""
    return tokens.hashes_of(kernel, slug, header_text())


@lru_cache(512)  # what is in several folders is laid out once: it takes longer than all else
def formatted(text: str) -> str:
    """Return C++ text laid out by clang-format in the style of templates/.clang-format."""
    result = process.run(
        [
            find_packaged("clang_format", "data/bin/clang-format"),
            f"--style=file:{locate('templates') / '.clang-format'}",
            "--assume-filename=kernel.cpp",
        ],
        input=text,
    )
    if result.returncode:
        raise ToolchainError(f"clang-format failed: {result.stderr.strip()}")
    return result.stdout


class _Loader(FileSystemLoader):
    """Reads templates; a .cuh is C++ as it stands, in which {{ means what it means there."""

    def get_source(self, environment: Environment, template: str) -> Any:
        source, path, is_current = super().get_source(environment, template)
        if template.endswith(".cuh"):
            source = f"{{% raw %}}{source}{{% endraw %}}"
        return source, path, is_current


@cache
def environment() -> Environment:
    """Return the templates' environment; a name that is not in the Plan is an error."""
    templates = Environment(
        loader=_Loader(locate("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"cpp": cpp}
    templates.filters |= {"members": members, "initialised": initialised, "filled": filled}
    templates.filters |= {"counted": counted, "described": described, "checked": checked}
    return templates


def written(name: str, **value: object) -> str:
    """Return what a template makes of its one value, given by the name that it reads."""
    return environment().get_template(name).render(**value)


def _template(name: str, plan: Plan) -> str:
    return written(name, plan=plan)
