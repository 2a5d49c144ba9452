"""The handle: a reference to one sequence's cached keys and values."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kvcache_core.accounting import sequence_statistics
from kvcache_core.block_table import BlockTable, MutableBlockTable
from kvcache_core.errors import HandleError, ShapeError, StepError
from kvcache_core.geometry import LayerSpec
from kvcache_core.sequence import CachedSequence, HandleState
from kvcache_core.stats import CacheHandleStats

if TYPE_CHECKING:
    import torch

    from kvcache_core.manager import KvCacheManager

__all__ = ["KvCacheHandle", "sequences_in"]

HandleT = TypeVar("HandleT", bound="KvCacheHandle")


class KvCacheHandle:
    """A reference to the cached K and V of one sequence.

    Handles come from `KvCacheManager.allocate`, `fork` and `clone_handle`, and are given back with `free`, or by
    using them as a context manager. Every backend has its own subclass; `unwrap` gets at what that adds.

    Numbers, tables and stats that a handle returns are values: they never change afterwards.
    """

    __slots__ = ("__weakref__", "_freed", "_manager", "_sequence")

    def __init__(self, manager: KvCacheManager, sequence: CachedSequence) -> None:
        self._manager = manager
        self._sequence = sequence
        self._freed = False

    # -- identity ----------------------------------------------------------------------------------------

    @property
    def cache_id(self) -> str:
        """Unique id of this cache instance: the same for clones, another for forks. Readable after free."""
        return self._sequence.cache_id

    @property
    def request_id(self) -> str:
        """The caller's name for the sequence, or one that was made up. Readable after free."""
        return self._sequence.request_id

    @property
    def manager(self) -> KvCacheManager:
        """The cache this handle belongs to."""
        return self._manager

    @property
    def sequence(self) -> CachedSequence:
        """The sequence's books, for core; read-only for everybody else."""
        return self._sequence

    def sequence_in(self, manager: KvCacheManager) -> CachedSequence | None:
        """The sequence's books, if the handle belongs to `manager` and was not freed; for core."""
        return self._sequence if self._manager is manager and not self._freed else None

    @property
    def is_valid(self) -> bool:
        """Whether the handle can be used.

        False after free, after the cache was closed or reset, and in a child process after `os.fork`.
        """
        return self._problem() is None

    @property
    def state(self) -> HandleState:
        """Active, swapped or freed. Never raises."""
        problem = self._problem()
        return self._sequence.state if problem is None or problem.reason == "swapped" else HandleState.FREED

    # -- shape -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the cache resides."""
        return self._live().storage.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that reads return and writes take."""
        return self._live().storage.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model, those that cache nothing included."""
        return self._live().geometry.num_layers

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of every layer.

        Raises:
            ShapeError: Layers differ; ask `layer_spec(layer)`.
        """
        return self._single_spec("num_kv_heads").num_kv_heads

    @property
    def num_heads(self) -> int:
        """Key/value heads of every layer: the heads that are cached. The same as `num_kv_heads`.

        Raises:
            ShapeError: Layers differ; ask `layer_spec(layer)`.
        """
        return self._single_spec("num_heads").num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a key per head.

        Raises:
            ShapeError: Layers differ; ask `layer_spec(layer)`.
        """
        return self._single_spec("head_dim").head_dim

    @property
    def value_head_dim(self) -> int:
        """Elements of a value per head.

        Raises:
            ShapeError: Layers differ; ask `layer_spec(layer)`.
        """
        return self._single_spec("value_head_dim").value_head_dim

    def layer_spec(self, layer: int) -> LayerSpec | None:
        """Heads, dims and window of one layer, or None for a layer that caches nothing.

        Raises:
            ShapeError: There is no such layer.
        """
        return self._live().geometry.layer_spec(layer)

    # -- contents ----------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens stored, the same for all layers; moves when a step commits and by truncate."""
        self._live()
        return self._sequence.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the stored tokens, as far as they were named from the start without a gap."""
        self._live()
        return tuple(self._sequence.token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens this sequence may ever hold."""
        self._live()
        return self._sequence.max_tokens

    @property
    def block_table(self) -> BlockTable:
        """A snapshot of the block table, with real physical ids."""
        manager, sequence = self._live(), self._sequence
        return BlockTable(sequence.blocks, sequence.num_tokens, manager.block_size)

    @contextmanager
    def block_table_mut(self) -> Iterator[MutableBlockTable]:
        """Yield a mutable block table for extending capacity; it takes effect when the context exits.

        ```python
        with handle.block_table_mut() as table:
            table.extend_sequence(100)      # room for 100 more tokens
        ```

        Raises:
            StepError: The handle is part of an open step.
            ShapeError: On exit: a block is missing, moved or named twice, or there are more than the sequence's
                maximum length can fill. The table is then unchanged.
            HandleError: On exit: a block is not one the caller has got from the allocator; or the handle was
                freed or changed meanwhile.
        """
        from kvcache_core.table_editing import edited_table  # noqa: PLC0415 - plugins import this module

        with edited_table(self._live().store, self._sequence) as table:
            yield table

    @property
    def dense_is_view(self) -> bool:
        """Whether `key_cache` and `value_cache` return views of the cache's memory, rather than copies."""
        return self._live().storage.dense_is_view

    def key_cache(self, layer: int) -> torch.Tensor | None:
        """Keys of one layer, `[num_tokens, num_kv_heads, head_dim]`, or None if it caches nothing.

        A layer that shares another's K and V returns the producer's. Where `dense_is_view`, the tensor is a view,
        valid until the handle's next truncate, swap or free; its memory lives as long as it is referenced.

        Raises:
            ShapeError: There is no such layer.
        """
        both = self.kv_cache(layer)
        return None if both is None else both[0]

    def value_cache(self, layer: int) -> torch.Tensor | None:
        """Values of one layer, `[num_tokens, num_kv_heads, value_head_dim]`; otherwise as `key_cache`."""
        both = self.kv_cache(layer)
        return None if both is None else both[1]

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of one layer; see `key_cache`."""
        manager, sequence = self._live(), self._sequence
        producer = manager.geometry.producer(layer)
        if producer is None:
            return None
        sequence.touch()
        return manager.storage.gather(sequence.slot, sequence.blocks, sequence.num_tokens, producer)

    def append(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        token_ids: Iterable[int] | None = None,
    ) -> None:
        """Append new tokens to all layers or to none: a whole step in one call, for simple callers.

        Args:
            layers: One `(key, value)` for each layer that caches, in ascending layer order: `[new tokens,
                num_kv_heads, head_dim]` and `[new tokens, num_kv_heads, value_head_dim]`.
            token_ids: Ids of the new tokens; anonymous when None.

        Raises:
            ShapeError: A pair is missing or too many, or a tensor does not fit.
            CacheFullError: There is no room.
            StepError: The handle is part of an open step.
        """
        from kvcache_core.step import require_tensor  # noqa: PLC0415 - plugins import this module

        manager = self._live()
        caching = manager.geometry.caching_layers
        try:
            pairs = [(key, value) for key, value in layers]
        except (TypeError, ValueError):
            raise ShapeError(
                f"append takes a list of (key, value) pairs, one for each of {len(caching)} layers"
            ) from None
        if len(pairs) != len(caching):
            raise ShapeError(f"append needs one (key, value) for each of {len(caching)} layers, not {len(pairs)}")
        first = pairs[0][0]
        require_tensor(caching[0], "key", first)
        new_tokens = (len(first) if first.ndim else 1) if token_ids is None else token_ids
        with manager.step({self: new_tokens}) as step:
            for layer, (key, value) in zip(caching, pairs, strict=True):
                step.write(layer, key, value)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back what is no longer needed, reserved room included.

        What forks and cached prefixes see does not change.

        Raises:
            ShapeError: `num_tokens` is not an int between 0 and the handle's `num_tokens`.
            StepError: The handle is part of an open step.
        """
        self._live().store.truncate(self._sequence, num_tokens)

    # -- references --------------------------------------------------------------------------------------

    def clone_handle(self: HandleT) -> HandleT:
        """Return a new reference to the same cache: appends are seen by all, memory lives until the last is freed."""
        manager = self._live()
        manager.store.add_reference(self._sequence)
        return self._same_type(manager.handle_to(self._sequence))

    def fork(self: HandleT, *, request_id: str | None = None) -> HandleT:
        """Return an independent sequence that starts with the same tokens.

        The memory is shared until one of the two writes. The fork has a `cache_id` of its own.

        Args:
            request_id: The caller's name for it; made up when None.

        Raises:
            StepError: The handle is part of an open step.
            CacheFullError: The backend has to copy something and there is no room.
        """
        manager = self._live()
        return self._same_type(manager.handle_to(manager.store.fork(self._sequence, request_id)))

    def _same_type(self: HandleT, other: KvCacheHandle) -> HandleT:
        if not isinstance(other, type(self)):
            raise TypeError(f"the cache made a {type(other).__name__} from a {type(self).__name__}")
        return other

    def free(self) -> None:
        """Give this reference back; the last one frees the memory at once.

        Raises:
            HandleError: It was freed before, or is otherwise invalid.
            StepError: The handle is part of an open step.
        """
        store = self._manager.store
        with store.locked():
            if self._freed:
                self.require_usable()
            store.require_freeable(self._sequence, "free")
            self._freed = True
            store.drop_reference(self._sequence)

    def discard(self) -> None:
        """Give this reference back from a finalizer: by the next operation, if the cache is in use right now.

        Neither waits for a lock nor calls an observer, since the garbage collector runs finalizers anywhere, also
        inside this very cache. Does nothing where there is nothing to give back.
        """
        if not self._freed and self._is_freeable:
            self._freed = True
            self._manager.store.release_dropped(self._sequence)

    # -- about -------------------------------------------------------------------------------------------

    def stats(self) -> CacheHandleStats:
        """Memory, blocks, tokens and last use of this sequence, at this moment."""
        return sequence_statistics(self._live().store, self._sequence)

    def as_any(self) -> Any:
        """Return this handle typed as Any, for backend-specific access without a check."""
        return self

    def unwrap(self, handle_type: type[HandleT]) -> HandleT:
        """Return this handle as the backend's own type.

        Raises:
            HandleError: It is a handle of another backend.
        """
        if not isinstance(self, handle_type):
            raise HandleError(
                f"this is a {type(self).__name__}, not a {handle_type.__name__}; the cache's backend is another",
                reason="foreign",
            )
        return self

    def __enter__(self: HandleT) -> HandleT:
        self._live()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_freeable:
            return
        try:
            self.free()
        except StepError:
            if error_type is None:  # else the caller's error is the one to show, and the finalizer frees the handle
                raise

    def __copy__(self: HandleT) -> HandleT:
        return self.fork()

    def __deepcopy__(self: HandleT, memo: dict[int, Any]) -> HandleT:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise HandleError(
            "a handle refers to memory of this process and cannot be pickled; fork it, or read its tensors",
            reason="foreign",
        )

    def __del__(self) -> None:
        if sys.is_finalizing() or getattr(self, "_freed", True) or not self._is_freeable:
            return
        self.discard()
        warnings.warn(
            f"handle of {self._sequence.request_id!r} was dropped without free(); its memory has been given back",
            ResourceWarning,
            stacklevel=2,
        )

    def __repr__(self) -> str:
        sequence, problem = self._sequence, self._problem()
        what = problem.reason if problem else f"{sequence.num_tokens} tokens in {len(sequence.blocks)} blocks"
        return f"<{type(self).__name__} {sequence.request_id!r} ({sequence.cache_id}): {what}>"

    # -- checks ------------------------------------------------------------------------------------------

    def _single_spec(self, asked: str) -> LayerSpec:
        spec = self._live().geometry.single_spec
        if spec is None:
            raise ShapeError(f"{asked} differs between layers of this model; ask layer_spec(layer)")
        return spec

    def _problem(self) -> HandleError | None:
        """Why the handle cannot be used, or None."""
        problem = self._manager.store.problem_with(self._sequence)
        if self._freed and (problem is None or problem.reason == "swapped"):
            name = self._sequence.request_id
            return HandleError(f"this handle of {name!r} was freed; allocate, fork or clone another", reason="freed")
        return problem

    @property
    def _is_freeable(self) -> bool:
        """Whether the handle can be given back: it is usable, or swapped out."""
        problem = self._problem()
        return problem is None or problem.reason == "swapped"

    def require_usable(self) -> None:
        """Raise HandleError, with the reason, unless the handle can be used."""
        problem = self._problem()
        if problem is not None:
            raise problem

    def _live(self) -> KvCacheManager:
        """Return the manager of a usable handle; raises HandleError for any other."""
        self.require_usable()
        return self._manager


def sequences_in(manager: KvCacheManager, handles: Sequence[KvCacheHandle]) -> list[CachedSequence] | None:
    """As `sequence_in` of each, but without a call for each; None if that of one is None, or if one is no handle."""
    try:
        sequences = [each._sequence for each in handles if each._manager is manager and not each._freed]
    except AttributeError:  # one of them is no handle
        return None
    return sequences if len(sequences) == len(handles) else None
