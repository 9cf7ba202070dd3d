"""Turn a Plan into Source: the kernel's C++ and the torch binding's, out of templates."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fagen import outputs, process
from fagen.errors import ToolchainError
from fagen.kind import Plan
from fagen.paths import find_packaged, locate

HASH_WORD = "FAGEN_SOURCE_HASH"  # the kernel says its own hash where a template says this
SLUG_WORD = "FAGEN_SLUG"  # stands for the slug where a launcher is hashed

BINDING = "binding.cpp.j2"

HOST_MARK = "---- The host's side"  # the rest of a kernel's file is its launcher


@dataclass(frozen=True)
class Source:
    """C++ that needs CUTLASS's headers only; hashes are of tokens (see token_hash).

    Each text ends with a stamp, by which it is known again where it would be written over.

    `hash` is of the whole kernel's file, its names included. `host_hash` is of what that file runs
    on the CPU, which is no part of the machine code, with the slug taken out: machine code has no
    names, so of a kernel that was only renamed neither changes. (The slug was in it at first. When
    it was taken out every launcher had changed as well, and no evidence was lost by that.)
    """

    slug: str
    kernel: str  # <slug>.cu
    binding: str  # <slug>_torch.cpp
    hash: str
    host_hash: str


def render(plan: Plan) -> Source:
    """Write the kernel and its binding.  Raises ToolchainError where clang-format is missing."""
    kernel, binding = kernel_text(plan), _template(BINDING, plan)
    digest = token_hash(kernel)
    _, _, host = kernel.partition(HOST_MARK)
    host = host.replace(plan.slug, SLUG_WORD)
    return Source(
        slug=plan.slug,
        kernel=outputs.stamped(formatted(kernel.replace(HASH_WORD, digest))),
        binding=outputs.stamped(formatted(binding)),
        hash=digest,
        host_hash=token_hash(host),
    )


def kernel_text(plan: Plan) -> str:
    """Return a kernel's text as its template has it, not laid out and without its hash."""
    return _template(f"{plan.kind}.cu.j2", plan)


def source_hash(plan: Plan) -> str:
    """Return the hash that render(plan) would have, in a tenth of its time."""
    return token_hash(kernel_text(plan))


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


def token_hash(text: str) -> str:
    """Return the sha256 of C++ text's tokens: comments and layout do not change it."""
    return hashlib.sha256("\0".join(_tokens(text)).encode()).hexdigest()


@cache
def environment() -> Environment:
    """Return the templates' environment; a name that is not in the Plan is an error."""
    return Environment(
        loader=FileSystemLoader(locate("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def written(name: str, **value: object) -> str:
    """Return what a template makes of its one value, given by the name that it reads."""
    return environment().get_template(name).render(**value)


def _template(name: str, plan: Plan) -> str:
    return written(name, plan=plan)


_TOKEN = re.compile(
    r"""
      (?P<skip>   //[^\n]* | /\*.*?\*/ | \\\n | [^\S\n]+ )
    | (?P<line>   \n )
    | R"(?P<mark>[^(]*)\(.*?\)(?P=mark)"
    | "(?: \\. | [^"\\\n] )*" | '(?: \\. | [^'\\\n] )*'
    | \.?\d(?: [eEpP][+-] | '\w | [\w.] )*
    | \w+
    | <<=|>>=|<=>|\.\.\.|->\*|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\#\#|[-+*/%&|^]=
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str) -> Iterator[str]:
    """Yield C++ tokens; the end of a preprocessor line is one of them, since it means something."""
    directive = False
    fresh = True  # nothing but white space since the line began
    for match in _TOKEN.finditer(text):
        if match["line"]:
            if directive:
                yield "\n"
            directive, fresh = False, True
        elif not match["skip"]:
            directive = directive or (fresh and match[0] == "#")
            fresh = False
            yield match[0]
