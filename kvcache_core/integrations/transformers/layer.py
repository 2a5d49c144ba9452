"""One layer of a `KvCache`, as transformers wants to see it: a face of the rows, with no data of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from transformers.cache_utils import CacheLayerMixin

from kvcache_core.integrations.transformers.forward_pass import PassWriter, not_supported

if TYPE_CHECKING:
    import torch

__all__ = ["KvCacheLayer"]


class KvCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cached rows.

    Attributes:
        is_sliding: Whether the model attends over a window here. All rows are kept all the same; the mask that
            transformers builds does the rest.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    is_initialized = True

    def __init__(self, writer: PassWriter, layer: int) -> None:
        # Not calling the base: it would set `keys` and `values`, which are read from the sequence here.
        self._writer = writer
        self._layer = layer
        spec = writer.manager.geometry.layer_spec(layer)
        self.is_sliding = spec is not None and spec.window is not None

    def __repr__(self) -> str:
        return f"KvCacheLayer({self._layer})"

    @property
    def keys(self) -> torch.Tensor | None:
        """Cached keys, `[rows, kv heads, columns, head dim]`, with zeros for pads."""
        both = self._writer.read(self._layer)
        return None if both is None else both[0]

    @property
    def values(self) -> torch.Tensor | None:
        """Cached values, `[rows, kv heads, columns, value head dim]`, with zeros for pads."""
        both = self._writer.read(self._layer)
        return None if both is None else both[1]

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return self._writer.manager.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache resides."""
        return self._writer.manager.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new K and V and return those of all columns."""
        return self._writer.write(self._layer, key_states, value_states, kwargs)

    def get_seq_length(self) -> int:
        """Columns cached, pads included; those of an unfinished forward pass do not count."""
        return self._writer.num_columns

    def get_max_length(self) -> int:
        """Tokens a sequence may ever hold."""
        return self._writer.rows[0].handle.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the K that the next `update` with `query_length` tokens will return."""
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        """Nothing to do: all rows are kept, so every `crop` is possible."""

    def offload(self) -> NoReturn:
        """Refused: memory belongs to the backend."""
        raise not_supported("offloading", "choose a backend whose device has room")

    def prefetch(self) -> None:
        """Nothing to do: nothing is ever offloaded."""

    def reset(self) -> NoReturn:
        """Refused for one layer alone; see `KvCache.reset`."""
        raise self._whole_sequence_only("reset")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused for one layer alone; see `KvCache.crop`."""
        raise self._whole_sequence_only("crop")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> NoReturn:
        """Refused for one layer alone; see `KvCache.reorder_cache`."""
        raise self._whole_sequence_only("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused for one layer alone; see `KvCache.batch_repeat_interleave`."""
        raise self._whole_sequence_only("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused for one layer alone; see `KvCache.batch_select_indices`."""
        raise self._whole_sequence_only("batch_select_indices")

    def _whole_sequence_only(self, operation: str) -> Exception:
        return not_supported(
            f"{operation} of a single layer", f"all layers hold the same tokens: call {operation} on the cache"
        )
