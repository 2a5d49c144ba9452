"""What stands in for K, V and mask where our attention function reads the cache itself.

The stand-ins have the right shape and no data: whatever else computes with them is refused. Each carries what it takes
to make the real tensor, should that be needed after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch._guards import TracingContext

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers.dense import KeyValue
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.step import Step

__all__ = [
    "StandIn",
    "WrittenLayer",
    "built_mask",
    "is_of_batch",
    "is_pending",
    "note_layer",
    "of_batch",
    "pending_mask",
    "written_layer",
]


class StandIn(torch.Tensor):
    """A tensor without data, to be handed on to our attention function as it is."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype) -> StandIn:
        """One of this shape."""
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            try:
                if func is torch.Tensor.to and torch._C._nn._parse_to(*args[1:], **kwargs)[1] in {None, args[0].dtype}:
                    return args[0]  # a device that the layers of a model are on, and nothing is there to move
                result = func(*args, **kwargs)
            except Exception as error:
                raise _not_laid_out(func) from error
        kept = func is torch.Tensor.contiguous and result is args[0]
        computed = isinstance(result, torch.Tensor) or (
            isinstance(result, tuple | list) and any(isinstance(item, torch.Tensor) for item in result)
        )
        changed = result is None and func.__name__ != "__get__"
        if ((computed and not kept) or changed) and TracingContext.try_get() is None:  # torch.compile looks at its base
            raise _not_laid_out(func)
        return result


def _not_laid_out(func: Callable[..., Any]) -> UnsupportedError:
    return UnsupportedError(
        "the model computes with the K, V or mask of its cache itself, which are not laid out for it under this "
        f"attention implementation ({func.__name__}): call model.set_attn_implementation('sdpa')",
        capability="own_attention",
    )


class WrittenLayer(NamedTuple):
    """What our attention function needs to know of the K and V that a `KvCache` returned.

    Attributes:
        value: The V that it returned beside the K.
        step: The step that holds the K and V of the layer.
        layer: The layer.
        packing: The way between the model's tensors and the step's.
        model_packing: The way between the batch and the model's tensors, where the model runs without the pads.
        dense: Makes K and V as the model knows them, where the ones at hand are stand-ins; else None.
        prefers_attend: Whether to have the backend attend, rather than to attend over K and V.
    """

    value: torch.Tensor
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


def written_layer(key: torch.Tensor, value: torch.Tensor) -> WrittenLayer | None:
    """Where K and V came from, or None if they are not as a `KvCache` returned them."""
    written = cast("WrittenLayer | None", getattr(key, "kvcache_layer", None))
    return None if written is None or written.value is not value else written


def pending_mask(build: Callable[[], torch.Tensor | None], shape: tuple[int, ...]) -> torch.Tensor:
    """Stand in for the mask that `build` would make."""
    mask = StandIn.empty(shape, torch.bool)
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
