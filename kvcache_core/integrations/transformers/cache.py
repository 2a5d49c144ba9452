"""`KvCache`: cached sequences, as a transformers `Cache`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import Cache
from transformers.cache_utils import DummyLayer

from kvcache_core.errors import ShapeError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.integrations.transformers.forward_pass import PassWriter, not_supported
from kvcache_core.integrations.transformers.layer import KvCacheLayer
from kvcache_core.integrations.transformers.opener import Opener
from kvcache_core.integrations.transformers.opening import Lease, config_for_model, require_same_shape, special_tokens
from kvcache_core.integrations.transformers.prompt import read_prompts, require_length
from kvcache_core.integrations.transformers.reuse import fitting_rows
from kvcache_core.integrations.transformers.rows import Row, forget, forked, pick, row_indices
from kvcache_core.integrations.transformers.watch import decoder_of, watch
from kvcache_core.manager import KvCacheManager
from kvcache_core.prefix import KeyValue

if TYPE_CHECKING:
    import torch

    from kvcache_core.config import CacheConfig

__all__ = ["KvCache"]


class KvCache(Cache):  # type: ignore[misc]
    """The keys and values of a sequence or a batch, for `model.generate(..., cache=...)` and `model(..., cache=...)`.

    It may be used for any number of calls; `prepare` before each makes it fit the prompts. Each row of a batch is a
    sequence with a handle of its own, and pads are not stored. Its memory is given back when the object goes, or by
    `free`.

    Args:
        source: Where the memory comes from: an open cache, which stays open; the configuration of one, which is
            closed with the last `KvCache` that uses it; or a handle, which is taken over with what it holds.
        model: The model it will be used with. Told it, the cache learns the ids of the tokens it stores, which
            `prepare` needs, and notices when a forward pass fails.
        max_sequence_length: Tokens a sequence may ever hold; the cache's own maximum when None.
        adapter: Name of the adapter that the model runs with; prompts reuse only what the same one stored.
        salt: A tenant's secret; prompts reuse only what the same salt stored.

    Raises:
        ShapeError: The model does not have the shape that the cache was opened for.
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True

    def __init__(
        self,
        source: KvCacheManager | CacheConfig | KvCacheHandle,
        model: Any = None,
        *,
        max_sequence_length: int | None = None,
        adapter: KeyValue = None,
        salt: KeyValue = None,
    ) -> None:
        lease: Lease | None = None
        if isinstance(source, KvCacheManager):
            manager = source
        elif isinstance(source, KvCacheHandle):
            manager = source.manager
        else:
            lease = Lease(source)
            manager = lease.manager
        if model is not None:
            require_same_shape(manager, model)
            watch(model)
        if isinstance(source, KvCacheHandle):
            max_sequence_length = source.max_tokens
        opener = Opener(manager, model, max_sequence_length=max_sequence_length, adapter=adapter, salt=salt)
        rows = [Row(source)] if isinstance(source, KvCacheHandle) else None
        self._adopt(PassWriter(manager, opener.open, rows), opener, lease)
        if model is not None:
            self.pass_writer.special = special_tokens(model)
            self.pass_writer.decoder = weakref.ref(decoder_of(model))

    @classmethod
    def for_model(cls, model: Any, config: CacheConfig | None = None, **overrides: Any) -> KvCache:
        """Open a cache that fits `model` and return one over it.

        Args:
            model: The model; its geometry, dtype and device are used where nothing else is said.
            config: What to open; a file, the environment and the defaults decide when None.
            overrides: Fields of the configuration that take precedence, such as `backend="cpu"`.

        Raises:
            ConfigError: The configuration, or the model's, is not one that can be cached.
            BackendError: The backend is not there or cannot run here.
        """
        return cls(config_for_model(model, config, overrides), model)

    def _adopt(self, writer: PassWriter, opener: Opener, lease: Lease | None) -> None:
        self.pass_writer = writer
        self._opener = opener
        self._identity = opener.refresh()
        self._finalizer = weakref.finalize(self, self.pass_writer.abandon)
        self._lease = lease  # held after the finalizer has run, so the handle is freed before its cache is closed
        self._geometry = geometry = self.manager.geometry
        caching = set(geometry.caching_layers)
        super().__init__(
            layers=[
                KvCacheLayer(self.pass_writer, layer) if layer in caching else DummyLayer()
                for layer in range(geometry.num_layers)
            ]
        )

    # -- what it is over -------------------------------------------------------------------------------------

    @property
    def handles(self) -> tuple[KvCacheHandle, ...]:
        """The sequences, one for each row. They belong to this object: fork one to keep it for longer."""
        return tuple(row.handle for row in self.pass_writer.rows)

    @property
    def handle(self) -> KvCacheHandle:
        """The only sequence, likewise.

        Raises:
            ShapeError: There are several; see `handles`.
        """
        handle, *others = self.handles
        if others:
            raise ShapeError(f"this cache has {1 + len(others)} sequences; ask for handles")
        return handle

    @property
    def manager(self) -> KvCacheManager:
        """The cache that the sequences are part of."""
        return self.pass_writer.manager

    @property
    def batch_size(self) -> int:
        """Sequences in it."""
        return max(1, len(self.pass_writer.rows_so_far))

    def __repr__(self) -> str:
        rows = ", ".join(repr(row.handle) for row in self.pass_writer.rows_so_far)
        return f"<KvCache over {rows or 'nothing yet'}>"

    # -- reuse -----------------------------------------------------------------------------------------------

    def prepare(self, input_ids: Any, attention_mask: Any = None, *, max_new_tokens: int = 1) -> int:
        """Make the cache fit a prompt or a batch of them: keep the tokens both begin with, drop the rest.

        A prompt also finds what other sequences of the same cache have stored, those of other conversations and batches
        included, if they are of the same model, adapter and salt: the longest such beginning, in whole blocks.

        At least the last token of every prompt is left for the model to compute, since `generate` needs its logits.
        Rows of a batch advance together, so that the one with least in common limits what the others keep.
        Only tokens whose ids are known can match: those of passes by a model that this cache was told about. A
        model whose rotary embedding depends on the length of the sequence (dynamic NTK, LongRoPE) reuses nothing, and
        nor does one whose weights have changed.

        Args:
            input_ids: The whole prompts: `[rows, tokens]` or `[tokens]`, a tensor or lists of ints. Lists of different
                lengths are taken as padded on the left.
            attention_mask: 0 for the pads of `input_ids`, which must be on the left; None for no pads.
            max_new_tokens: Tokens that will be generated at most, to learn now whether there is room for them.

        Returns:
            Tokens kept, of all rows together, whose computation is saved.

        Raises:
            ShapeError: A prompt has no token, or the mask does not fit.
            CacheFullError: Prompt and new tokens are more than a sequence may hold; nothing is dropped.
        """
        writer, opener = self.pass_writer, self._opener
        prompts = read_prompts(input_ids, attention_mask)
        require_length(
            self.manager, self.get_max_length(), max(len(each.token_ids) for each in prompts), max_new_tokens
        )
        writer.roll_back()
        identity = opener.refresh()
        if identity != self._identity or not self._geometry.prefix_reusable:
            forget(writer.rows_so_far)
            writer.replace_rows([])
            self._identity = identity
        writer.replace_rows(fitting_rows(writer.rows_so_far, prompts, opener))
        return sum(row.num_tokens for row in writer.rows)

    def fork(self) -> KvCache:
        """Return an independent copy that shares memory until one of the two writes; see `KvCacheHandle.fork`."""
        writer = self.pass_writer
        writer.roll_back()
        copy = type(self).__new__(type(self))
        copied = PassWriter(writer.manager, self._opener.open, forked(writer.rows))
        copied.special, copied.decoder = writer.special, writer.decoder
        copy._adopt(copied, self._opener, self._lease)
        copy._identity = self._identity
        return copy

    def __copy__(self) -> KvCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KvCache:
        copy = self.fork()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_supported(
            "pickling", "its memory belongs to this process: fork it with copy.deepcopy, or run the prompt again there"
        )

    def free(self) -> None:
        """Give the memory back now. Any further use raises HandleError; freeing twice is harmless."""
        if self._finalizer.detach() is not None:
            self.pass_writer.close()

    # -- what transformers calls -------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new K and V of a layer, `[rows, kv heads, new columns, dim]`, and return those of all columns.

        They are views of the cache for one row without pads. For a batch they are stand-ins on the meta device where
        the attention implementation is `"kvcache"`, which attends over the cache itself; under any other they are a
        copy with zeros for pads.

        Raises:
            ShapeError: The layer does not exist, or the tensors do not fit it.
        """
        self._geometry.check_layer(layer_idx)
        return self.pass_writer.write(layer_idx, key_states, value_states, kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns cached, pads included; 0 for a layer that caches nothing. An unfinished pass does not count yet."""
        if not 0 <= layer_idx < self._geometry.num_layers:
            return 0
        return 0 if layer_idx and self._geometry.producer(layer_idx) is None else self.pass_writer.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens a sequence may ever hold."""
        longest = self._opener.max_tokens
        return min([longest, *(row.handle.max_tokens for row in self.pass_writer.rows_so_far)])

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the K that a pass of `query_length` columns attends over."""
        return self.pass_writer.num_columns + query_length, 0

    def reset(self) -> None:
        """Drop all tokens and rows but one empty one, and give their memory back; the cache can be used again."""
        writer = self.pass_writer
        writer.roll_back()
        writer.replace_rows([writer.rows[0].cut(0)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns, and what an interrupted forward pass has left.

        Args:
            tokens_to_remove: Minus how many columns; 0 drops none.

        Raises:
            ShapeError: A positive number, or more columns than there are.
        """
        writer = self.pass_writer
        length = writer.num_columns
        if type(tokens_to_remove) is not int or not -length <= tokens_to_remove <= 0:
            raise ShapeError(
                f"crop takes minus the number of tokens to drop, from {-length} to 0, not {tokens_to_remove!r}"
            )
        writer.roll_back()
        if tokens_to_remove:
            writer.replace_rows([row.cut(length + tokens_to_remove) for row in writer.rows])

    # -- rows ------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Have row `i` continue what row `beam_idx[i]` holds, as beam search does after every token.

        A row that is chosen once is moved, one that is chosen again is forked, and the others are freed. What they
        alone held is not kept for other requests.

        Raises:
            ShapeError: An index is not one of a row.
            CacheFullError: The backend has to copy something and there is no room; nothing changes.
        """
        former = self.pass_writer.rows
        picked = self._picked(beam_idx)
        forget(former, keep=picked)
        self.pass_writer.replace_rows(picked)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have `repeats` forks of each row, one after the other."""
        if type(repeats) is not int or repeats < 1:
            raise ShapeError(f"batch_repeat_interleave takes an int of at least 1, not {repeats!r}")
        self.batch_select_indices([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | list[int]) -> None:
        """Keep the rows at `indices`, in their order; as `reorder_cache`, for any number of them."""
        self.pass_writer.replace_rows(self._picked(indices))

    def _picked(self, indices: torch.Tensor | list[int]) -> list[Row]:
        writer = self.pass_writer
        writer.roll_back()
        if not writer.num_columns:
            return writer.rows  # an empty cache takes on as many rows as the next pass has
        return pick(writer.rows, row_indices(indices, self.batch_size))
