"""Where blocks lie: no gaps, no overlaps, and K and V alike where their dims are."""

from __future__ import annotations

import pytest
import torch

from kvcache_core import LayerGroup
from kvcache_core.paged import PoolLayout, TensorLayout


def view(memory: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    return memory.as_strided(layout.shape, layout.strides, layout.offset)


@pytest.fixture(params=[8, 3], ids=["equal dims", "unequal dims"])
def layout(request: pytest.FixtureRequest) -> PoolLayout:
    group = LayerGroup(layers=(1, 4, 5), num_kv_heads=2, head_dim=8, value_head_dim=request.param)
    return PoolLayout(group, num_blocks=6, block_size=4)


def test_blocks_are_token_major_without_gaps(layout: PoolLayout) -> None:
    shape, strides, _ = layout.key(4)
    assert shape == (6, 4, 2, 8)
    assert strides == (64, 16, 8, 1)


def test_every_element_belongs_to_exactly_one_layer_and_role(layout: PoolLayout) -> None:
    memory = torch.zeros(layout.num_elements)
    for layer in layout.group.layers:
        for part in (layout.key(layer), layout.value(layer)):
            view(memory, part).add_(1)
    assert torch.equal(memory, torch.ones(layout.num_elements))


def test_sections_cover_everything_once(layout: PoolLayout) -> None:
    memory = torch.zeros(layout.num_elements)
    for section in layout.sections:
        view(memory, section).add_(1)
    assert torch.equal(memory, torch.ones(layout.num_elements))


def test_k_and_v_have_equal_strides_where_their_dims_agree() -> None:
    layout = PoolLayout(LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=8), num_blocks=6, block_size=4)
    assert layout.joint
    assert len(layout.sections) == 1
    assert layout.key(1).strides == layout.value(1).strides
    assert layout.value(1).offset - layout.key(1).offset == 6 * 4 * 2 * 8


def test_offsets_beyond_32_bits_are_exact() -> None:
    layout = PoolLayout(LayerGroup(layers=(0, 1), num_kv_heads=8, head_dim=128), num_blocks=2**20, block_size=16)
    assert layout.value(1).offset == 3 * 2**20 * 16 * 8 * 128
    assert layout.num_elements == 4 * 2**34
