"""2-D masks that say nothing which the cache of the pass does not know, and what the real one is made from.

A model may pass such a mask on as a view, which carries no attributes of the tensor that it is a view of. So it is
known by its memory, for as long as the tensor lives that the model was called with.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

__all__ = ["KnownMask", "known_mask", "look_up"]


class KnownMask(NamedTuple):
    """What a mask stands for.

    Attributes:
        batch: The 2-D mask of the batch, bool `[rows, columns]`, 0 for pads.
        width: New columns among these.
        is_packed: Whether the model itself runs over one row, of the tokens alone.
        shape: That of the mask itself.
    """

    batch: torch.Tensor
    width: int
    is_packed: bool
    shape: torch.Size


#: Address of a mask's memory -> what it stands for.
_known: dict[int, KnownMask] = {}


def known_mask(
    batch: torch.Tensor, width: int, num_packed: int | None = None, *, device: torch.device | None = None
) -> torch.Tensor:
    """The mask to call a model with, bool `[rows, columns]`.

    Args:
        batch: The mask of the batch.
        width: New columns among those of the mask.
        num_packed: How many tokens the model runs over in one row, or None if it runs over the batch.
        device: Where the model runs; where the mask of the batch is when None.
    """
    # transformers keeps a mask as it is that is bool and where the model is, and would copy another.
    batch = batch.to(device=device, dtype=torch.bool)
    if num_packed is None:
        mask = batch.clone()
    else:
        columns = batch.shape[1] - width
        mask = torch.ones(1, columns + num_packed, dtype=torch.bool, device=batch.device)
    address = mask.data_ptr()
    _known[address] = KnownMask(batch, width, num_packed is not None, mask.shape)
    weakref.finalize(mask, _known.pop, address, None).atexit = False
    return mask


def look_up(mask: torch.Tensor | None) -> KnownMask | None:
    """What a mask stands for, if it was made by `known_mask` or is a view of all of one that was; else None."""
    if not _known or type(mask) is not torch.Tensor:  # those of a model that is traced have no memory
        return None
    known = _known.get(mask.data_ptr())
    return known if known is not None and known.shape == mask.shape else None
