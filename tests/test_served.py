"""The table of families of models says what dispatch does, and why not by name."""

import pytest

from docs import families
from docs.families import served, table

PLAIN = {"head_dim": 128, "causal": True}
LARGE = {"head_dim": 512, "causal": True}


@pytest.mark.parametrize(
    ("family", "train", "prefill", "decode"),
    [
        ({"layers": [PLAIN]}, [], [], []),
        ({"layers": [PLAIN], "decode": []}, [], [], None),
        ({"layers": [PLAIN | {"window": 9}]}, [], [], []),
        (
            {"layers": [PLAIN | {"softcap": 9.0, "sinks": "bf16"}, PLAIN | {"mask": "chunked"}]},
            *[[]] * 3,
        ),
        ({"layers": [PLAIN], "decode": [LARGE]}, [], [], ["head dim 512"]),
        ({"layers": [LARGE | {"window": 9}]}, *[["head dim 512"]] * 3),
        ({"layers": [PLAIN], "lacks": "luck"}, *[["luck"]] * 3),
        ({"layers": [PLAIN], "lacks": "luck", "lacks_in": ["train"]}, ["luck"], [], []),
    ],
)
def test_what_no_kernel_has_of_a_family_is_named(family, train, prefill, decode):
    found = [served(family, name) for name in families.PASSES]
    assert found == [train, prefill, decode]


def test_a_refusal_that_is_none_of_features_is_not_taken_for_one():
    with pytest.raises(Exception, match="heads"):
        served({"layers": [PLAIN | {"heads": 7, "kv_heads": 2}]}, "prefill")


def test_the_table_has_each_family_once():
    rows = list(table())[2:-1]
    names = [family["name"] for family in families.families()]
    told = [name for row in rows for name in row.removeprefix("| ").split(" | ")[0].split(" · ")]
    assert sorted(told) == sorted(names) and len(set(names)) == len(names)
