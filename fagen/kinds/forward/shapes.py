"""The sizes at which a kernel of attention is verified."""

from fagen.kinds.forward.plan import Plan
from fagen.problem import Sizes

LONG_KEYS = Sizes(1, 32, 8, 128, 100_000)  # what splitting the keys is for


def verification_sizes(plan: Plan) -> tuple[Sizes, ...]:
    """Sizes that have caught attention kernels out, around the tile of `plan`.

    One tile and one more or less of it in each direction, a single query, no query, no key, more
    queries than keys (whole rows masked when causal), every grouping of heads, enough tiles that
    each block of a persistent grid takes several, and two long ones. Of splits, one block each and
    a few more, some of which rows or whole tiles do not see, and many keys.
    """
    m, n = plan.block_m, plan.block_n
    sizes = [
        Sizes(1, 1, 1, 1, 1),
        Sizes(1, 2, 2, m, n),
        Sizes(2, 3, 3, m - 1, n - 1),
        Sizes(1, 2, 1, m + 1, n + 1),
        Sizes(1, 4, 2, 2 * m + 1, 3 * n - 1),
        Sizes(2, 4, 4, 1, 2 * n + 1),
        Sizes(2, 2, 2, m, 1),
        Sizes(2, 2, 2, 0, n),
        Sizes(2, 4, 2, m + 1, 0),
        Sizes(1, 2, 2, 3 * m - 5, n // 2 + 3),
        Sizes(2, 6, 2, m // 2 + 7, 4 * n + 3),
        Sizes(3, 5, 1, 255, 511),
        Sizes(2, 2, 1, 1_021, 129),
        Sizes(1, 8, 8, 512, 512),
        Sizes(4, 40, 40, 3 * m, 2 * n),
        Sizes(4, 40, 8, 2 * m + 65, 2 * n - 9),
        Sizes(1, 4, 4, 2_048, 2_048),
        Sizes(1, 4, 1, 1_023, 4_097),
    ]
    if plan.num_splits > 1:
        num_splits = plan.num_splits
        sizes += [
            Sizes(2, 4, 2, 5, num_splits * n - 3),
            Sizes(1, 4, 1, m + 9, (num_splits + 1) * n + 5),
            Sizes(1, 2, 2, 3 * m + 1, 2 * num_splits * n),
            Sizes(3, 6, 2, 130, 2_500),
            LONG_KEYS,
        ]
    return tuple(dict.fromkeys(sizes))
