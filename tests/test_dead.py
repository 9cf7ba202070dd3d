"""No kernel has what nothing needs: a name, a parameter, an empty body, a neutral term."""

from collections import defaultdict

import pytest

from fagen import evidence, registry
from fagen.render import kernel_text
from tests.backward_helpers import SPREAD as BACKWARD
from tests.combine_helpers import SPREAD as COMBINE
from tests.dead import dead, ignored
from tests.decode_helpers import SPREAD as DECODE
from tests.quantize_helpers import SPREAD as QUANTIZE
from tests.test_split import SLUGS as SPLIT

# one of each form, and of each kind those that differ most
FORMS = sorted({*evidence.forms(), *BACKWARD, *COMBINE, *DECODE, *QUANTIZE, *SPLIT})


def text_of(slug: str) -> str:
    return kernel_text(registry.plan_of(slug))


@pytest.mark.parametrize("slug", FORMS)
def test_a_kernel_has_nothing_that_nothing_needs(slug):
    assert dead(text_of(slug), slug) == set()


def test_a_parameter_that_one_way_ignores_is_read_by_another():
    """All ways to fill a slot share a narrow interface, of which one may need less."""
    ways = defaultdict(set)
    for slug in FORMS:
        kind = registry.kind_of_slug(slug).name
        for name, is_ignored in ignored(text_of(slug), slug):
            ways[kind, name].add(is_ignored)
    assert {name for name, ignoring in ways.items() if ignoring == {True}} == set()


KERNEL = """
namespace fagen_x_kernel {
struct Params { int a, b; };
using Row = int;
constexpr int kRows = 2, kMore = 3;
enum Barrier { kOne = 1 };
template <class T> __device__ T first(const T (&x)[kRows], int at = 0) { return x[at]; }
__device__ void nothing() {}
struct Consumer {
  const Params& params;
  int taken = 0;
  __device__ __forceinline__ void run() const { const int i = params.a + 0.f; }
};
__global__ void __launch_bounds__(128, 1) kernel(const __grid_constant__ Params params) {
  const int x[kRows] = {params.a};
  if (first(x)) { Consumer{params}.run(); } else {}
}
}  // namespace fagen_x_kernel
"""


def test_what_is_dead_is_found():
    assert dead(KERNEL, "x") == {
        *("b", "Row", "kMore", "kOne", "taken", "nothing()", "nothing: empty"),
        *("run: i", "run: + 0.f", "kernel: else { }", "kernel()"),
    }
