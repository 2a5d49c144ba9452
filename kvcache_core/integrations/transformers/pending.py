"""What stands in for K, V and mask where our attention function reads the cache itself.

The stand-ins are on the meta device and have the right shape: whatever else uses them fails instead of computing
something. Each carries what it takes to make the real tensor, should that be needed after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from kvcache_core.integrations.transformers.dense import KeyValue
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.step import Step

__all__ = [
    "WrittenLayer",
    "built_mask",
    "is_of_batch",
    "is_pending",
    "note_layer",
    "of_batch",
    "pending_mask",
    "written_layer",
]


class WrittenLayer(NamedTuple):
    """What our attention function needs to know of a K that came from a `KvCache`.

    Attributes:
        step: The step that holds the K and V of the layer.
        layer: The layer.
        packing: The way between the model's tensors and the step's.
        model_packing: The way between the batch and the model's tensors, where the model runs without the pads.
        dense: Makes K and V as the model knows them, where the ones at hand are stand-ins; else None.
        prefers_attend: Whether to have the backend attend, rather than to attend over K and V.
    """

    step: Step
    layer: int
    packing: Packing
    model_packing: Packing | None
    dense: Callable[[], KeyValue] | None
    prefers_attend: bool

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attend `[rows, heads, columns, dim]` causally; returns `[rows, columns, heads, value dim]`."""
        packing = self.packing
        return packing.unpack(self.step.attend(self.layer, packing.pack(query), scale=scale))


def note_layer(key: torch.Tensor, written: WrittenLayer) -> None:
    """Have a K tell our attention function where it came from."""
    key.kvcache_layer = written  # type: ignore[attr-defined]


def written_layer(key: torch.Tensor) -> WrittenLayer | None:
    """Where a K came from, or None if it is no `KvCache`'s."""
    return cast("WrittenLayer | None", getattr(key, "kvcache_layer", None))


def pending_mask(build: Callable[[], torch.Tensor | None], shape: tuple[int, ...]) -> torch.Tensor:
    """Stand in for the mask that `build` would make."""
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    mask.kvcache_build = build  # type: ignore[attr-defined]
    return mask


def built_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask that a stand-in stands for; any other as it is."""
    build = getattr(mask, "kvcache_build", None)
    return mask if build is None else build()


def of_batch(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Note of a mask that was made from what the cache knows that it is the one of the batch."""
    if mask is not None:
        mask.kvcache_of_batch = True  # type: ignore[attr-defined]
    return mask


def is_of_batch(mask: torch.Tensor) -> bool:
    """Whether a mask is noted so, or stands for such a one."""
    return is_pending(mask) or hasattr(mask, "kvcache_of_batch")


def is_pending(mask: torch.Tensor) -> bool:
    """Whether a mask is a stand-in."""
    return hasattr(mask, "kvcache_build")
