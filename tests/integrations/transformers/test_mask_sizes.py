"""What the cache says about its columns is what it returns, under a sliding window and within a burst of drafts."""

from __future__ import annotations

import pytest
import torch

from kvcache_core.integrations.transformers import KvCache
from tests.integrations.tiny import tiny_model


@pytest.mark.parametrize("burst", [[1] * 6, [7, *[1] * 12], [3, 2, 9, 1, 1, 17, 1]])
def test_transformers_48280_announced_and_returned_columns_agree_while_nothing_is_cropped(burst: list[int]) -> None:
    """A window of 8; each update is asked about just before it, across the window's edge too."""
    cache = KvCache.for_model(tiny_model("mistral"), backend="cpu", budget="64 blocks")
    cache.layers[0].activate_past_recording()
    stored = 0
    for count in burst:
        for layer in range(4):
            announced, offset = cache.get_mask_sizes(count, layer)
            rows = torch.full((1, 2, count, 8), float(layer))
            key, value = cache.update(rows, -rows, layer)
            assert key.shape[-2] == value.shape[-2] == announced == stored + count
            assert offset == 0
        stored += count
        assert cache.get_seq_length() == stored
    cache.crop(-3)
    assert cache.get_mask_sizes(1, 0) == (stored - 2, 0)
    cache.free()
