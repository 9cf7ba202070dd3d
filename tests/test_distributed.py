"""Gradients of fagen.attention in a model that two processes train, on a CPU."""

import pytest
import torch
from torch import Tensor

from tests.training import WRAPS, mean_gradient, shared_gradients


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """The gradients of both ranks; to start processes takes seconds."""
    return shared_gradients(64, "cpu", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_ranks_have_the_mean_of_both_parts_gradients(
    shared: dict[str, list[Tensor]], wrap: str
) -> None:
    expected = mean_gradient(64, "cpu")
    for gradient in shared[wrap]:
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
