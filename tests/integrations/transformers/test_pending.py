"""Stand-ins may be handed on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers.pending import StandIn


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn.empty((2, 1, 3, 4), torch.bool)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor & True,
        lambda tensor: tensor[:, :, :, :4],
        lambda tensor: tensor.repeat(1, 2, 1, 1),
        lambda tensor: torch.cat([tensor, torch.ones(2, 1, 3, 1, dtype=torch.bool)], dim=-1),
        lambda tensor: torch.ones(2, 1, 3, 4).masked_fill(tensor, 0.0),
        lambda tensor: tensor.chunk(2, dim=2),
        lambda tensor: tensor.fill_(True),
        lambda tensor: tensor.__setitem__(0, True),
        lambda tensor: tensor.to(torch.float32),
        lambda tensor: tensor.mT,
        lambda tensor: bool(tensor.all()),
        lambda tensor: tensor.tolist(),
    ],
)
def test_computing_with_one_is_refused(use: Callable[[torch.Tensor], object], stand_in: StandIn) -> None:
    with pytest.raises(UnsupportedError, match=r"set_attn_implementation\('sdpa'\)"):
        use(stand_in)


@pytest.mark.parametrize(
    "move", [lambda tensor: tensor.to("cpu", non_blocking=True), lambda tensor: tensor.contiguous()]
)
def test_one_stays_itself_wherever_it_is_moved(move: Callable[[torch.Tensor], object], stand_in: StandIn) -> None:
    assert move(stand_in) is stand_in


def test_it_says_what_shape_it_has(stand_in: StandIn) -> None:
    assert (stand_in.shape, stand_in.dtype, stand_in.ndim, stand_in.size(3)) == ((2, 1, 3, 4), torch.bool, 4, 4)
    assert stand_in.grad is None
