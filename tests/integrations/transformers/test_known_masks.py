from __future__ import annotations

import gc

import torch
from torch._subclasses import FakeTensorMode

from kvcache_core.integrations.transformers import known_masks
from kvcache_core.integrations.transformers.known_masks import KnownMask, known_mask, look_up

BATCH = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def test_a_mask_and_its_views_tell_what_they_stand_for():
    mask = known_mask(BATCH, 3)
    assert torch.equal(mask, BATCH.bool())
    for view in (mask, mask.view(2, -1), mask.to(torch.bool)):
        known = look_up(view)
        assert torch.equal(known.batch, BATCH.bool())
        assert (known.width, known.is_packed) == (3, False)


def test_a_packed_mask_is_one_row_of_the_columns_before_and_the_tokens():
    mask = known_mask(BATCH, 3, num_packed=5)
    assert mask.shape == (1, 1 + 5)
    assert bool(mask.all())
    assert look_up(mask).is_packed


def test_the_callers_own_mask_is_not_known():
    own = BATCH.bool()
    mask = known_mask(own, 4)
    assert look_up(own) is None
    assert look_up(mask.clone()) is None
    assert look_up(mask[:, :2]) is None
    assert look_up(None) is None


def test_a_mask_is_forgotten_when_it_goes():
    mask = known_mask(BATCH, 4)
    address = mask.data_ptr()
    assert isinstance(look_up(mask), KnownMask)
    del mask
    gc.collect()
    assert address not in known_masks._known


def test_a_tensor_without_memory_is_not_known():
    mask = known_mask(BATCH, 4)
    with FakeTensorMode():
        assert look_up(torch.ones(2, 4)) is None
    assert look_up(mask.to("meta")) is None
