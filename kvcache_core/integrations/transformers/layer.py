"""One layer of a `KvCache`, as transformers wants to see it: a face of the sequence, with no data of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from transformers.cache_utils import CacheLayerMixin

from kvcache_core.integrations.transformers.forward_pass import PassWriter, not_supported

if TYPE_CHECKING:
    import torch

__all__ = ["KvCacheLayer"]


class KvCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of one cached sequence.

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
        spec = writer.handle.layer_spec(layer)
        self.is_sliding = spec is not None and spec.window is not None

    def __repr__(self) -> str:
        return f"KvCacheLayer({self._layer})"

    @property
    def keys(self) -> torch.Tensor | None:
        """Cached keys, `[1, kv heads, tokens, head dim]`."""
        both = self._writer.read(self._layer)
        return None if both is None else both[0]

    @property
    def values(self) -> torch.Tensor | None:
        """Cached values, `[1, kv heads, tokens, value head dim]`."""
        both = self._writer.read(self._layer)
        return None if both is None else both[1]

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return self._writer.handle.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache resides."""
        return self._writer.handle.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new K and V and return those of the whole sequence."""
        return self._writer.write(self._layer, key_states, value_states, kwargs)

    def get_seq_length(self) -> int:
        """Tokens cached, those of an unfinished forward pass not counted."""
        return self._writer.handle.num_tokens

    def get_max_length(self) -> int:
        """Tokens the sequence may ever hold."""
        return self._writer.handle.max_tokens

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
        """Refused: there is one sequence only."""
        raise not_supported("beam search", "use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: there is one sequence only."""
        raise not_supported("repeating rows", "use copy.deepcopy(cache) for each continuation")

    def batch_select_indices(self, indices: torch.Tensor) -> NoReturn:
        """Refused: there is one sequence only."""
        raise not_supported("selecting rows", "use copy.deepcopy(cache) for each continuation")

    def _whole_sequence_only(self, operation: str) -> Exception:
        return not_supported(
            f"{operation} of a single layer", f"all layers have one length: call {operation} on the cache"
        )
