"""The transaction over one forward pass: begin, write layer by layer, attend, commit or abort."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from kvcache_core.batch import Batch, Segment
from kvcache_core.errors import HandleError, ShapeError, StepError
from kvcache_core.new_tokens import NewTokens
from kvcache_core.transaction import StepState, Transaction
from kvcache_core.validation import show

if TYPE_CHECKING:
    import torch

    from kvcache_core.handle import KvCacheHandle
    from kvcache_core.manager import KvCacheManager
    from kvcache_core.storage import Storage

__all__ = ["NewTokens", "Step", "StepState"]


class Step:
    """One forward pass over a batch of handles; made by `KvCacheManager.begin` or `.step`.

    All tensors are packed along tokens, in the order in which the handles were named: a step with 3 new tokens
    for the first handle and 1 for the second takes K of shape `[4, num_kv_heads, head_dim]`, whose last row
    belongs to the second.

    As a context manager a step commits on a normal exit and aborts on an exception. A step that is dropped
    without either is rolled back, with a ResourceWarning.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        handles: tuple[KvCacheHandle, ...],
        transaction: Transaction,
        batch: Batch,
    ) -> None:
        self._manager = manager
        self._handles = handles
        self._transaction = transaction
        self._batch = batch
        self._storage = storage = manager.storage
        self._dtype, self._device = storage.dtype, storage.device
        self._written: set[int] = set()
        self._store = manager.store
        self._generation = manager.store.generation
        self._discarded = False

    @cached_property
    def _shown(self) -> Batch:
        """Index tensors for the caller, who may change what it is given; the storage reads those of `_batch`."""
        batch = self._batch
        return Batch(batch.segments, batch.block_size, batch.device, batch.upload)

    # -- what the step is over ---------------------------------------------------------------------------

    @property
    def manager(self) -> KvCacheManager:
        """The cache this step is over."""
        return self._manager

    @property
    def handles(self) -> tuple[KvCacheHandle, ...]:
        """The handles, in packing order."""
        return self._handles

    @property
    def num_new_tokens(self) -> int:
        """Rows of every packed tensor."""
        return self._batch.num_tokens

    @property
    def state(self) -> StepState:
        """Whether the step is open, committed or aborted; a reset or close of the cache aborts it."""
        return self._transaction.state

    @property
    def positions(self) -> torch.Tensor:
        """Position of every new token in its sequence, int64 `[num_new_tokens]`."""
        return self._shown.positions

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """Physical slot of every new token (`block id * block_size + row`), int64 `[num_new_tokens]`.

        Raises:
            StepError: It is asked for the first time after the step was aborted or its handles have changed.
        """
        self._require_readable("slot_mapping")
        return self._shown.slot_mapping

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """Block ids of each sequence, int32 `[handles, max blocks]`, padded with the null block 0.

        Raises:
            StepError: It is asked for the first time after the step was aborted or its handles have changed.
        """
        self._require_readable("block_tables")
        return self._shown.block_tables

    @property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each sequence, the new ones included, int32 `[handles]`."""
        return self._shown.seq_lens

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Prefix sums of the new tokens, int32 `[handles + 1]`."""
        return self._shown.cu_seqlens_q

    @property
    def last_token_index(self) -> torch.Tensor:
        """Packed row of each sequence's last new token, int64 `[handles]`; -1 where it has none."""
        return self._shown.last_token_index

    @property
    def batch(self) -> Batch:
        """The step as the storage sees it, for what a backend offers of its own; nobody may change it.

        Raises:
            StepError: The step was aborted, or is over and its handles have changed.
        """
        self._require_readable("reading its batch")
        return self._batch

    # -- data --------------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' keys and values of one layer.

        Args:
            layer: A layer that caches K and V of its own, not yet written in this step.
            key: `[num_new_tokens, num_kv_heads, head_dim]`, in the cache's dtype and on its device. The cache
                copies it; the caller may change it afterwards.
            value: `[num_new_tokens, num_kv_heads, value_head_dim]` likewise.

        Raises:
            ShapeError: A wrong shape, dtype, device or layer, or a tensor that carries gradients.
            StepError: The step is not open, or the layer was already written.
        """
        self._require_open("write")
        spec = self._manager.own_spec(layer)
        if layer in self._written:
            raise StepError(f"layer {layer} was already written in this step; each layer is written once")
        rows, heads = self._batch.num_tokens, spec.num_kv_heads
        key = self._checked(layer, "key", key, (rows, heads, spec.head_dim))
        value = self._checked(layer, "value", value, (rows, heads, spec.value_head_dim))
        self._storage.write(self._batch, layer, key, value)
        self._written.add(layer)

    def mark_written(self, *layers: int) -> None:
        """Note that the caller has stored the new tokens of these layers himself, with a kernel or a captured graph.

        Nothing checks that: rows that were not stored hold whatever was there before.

        Args:
            layers: Layers that cache K and V of their own, not yet written; every such layer when none is named.

        Raises:
            UnsupportedError: The backend lets nobody else write to its memory.
            ShapeError: A layer caches nothing of its own.
            StepError: The step is not open, or a layer was already written.
        """
        self._require_open("mark_written")
        if "graph_capture" not in self._storage.capabilities and not any(
            name.startswith("export.") for name in self._storage.capabilities
        ):
            self._manager.require_capability("graph_capture")
        for layer in layers:
            self._manager.own_spec(layer)
            if layer in self._written:
                raise StepError(f"layer {layer} was already written in this step; each layer is written once")
        self._written.update(layers or self._storage.spec.geometry.caching_layers)

    def attend(self, layer: int, query: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Attend the new tokens causally over everything cached in `layer`, the new tokens included.

        Legal from the write of the layer until a handle of the step changes again, so also after the commit,
        unless `accept` has dropped tokens of the step: their memory is gone then.

        Args:
            layer: A layer that was written in this step, or one that shares the K and V of such a layer.
            query: `[num_new_tokens, num_heads, head_dim]`, floating; query head `h` reads kv head
                `h // (num_heads // num_kv_heads)`.
            scale: Factor on the scores; `head_dim ** -0.5` when None.

        Returns:
            `[num_new_tokens, num_heads, value_head_dim]` in the dtype of `query`.

        Raises:
            ShapeError: A wrong shape, dtype, device or layer.
            StepError: The layer was not written in this step, or the step is over and its handles have changed.
        """
        self._require_readable("attend")
        producer = self._written_producer(layer)
        spec = self._manager.own_spec(producer)
        require_tensor(layer, "query", query)
        shape, num_heads = query.shape, query.shape[1] if query.ndim == 3 else 0
        if (
            query.ndim != 3
            or shape[0] != self._batch.num_tokens
            or shape[2] != spec.head_dim
            or num_heads == 0
            or num_heads % spec.num_kv_heads
        ):
            raise ShapeError(
                f"layer {layer}: query must be [{self._batch.num_tokens}, a multiple of {spec.num_kv_heads}, "
                f"{spec.head_dim}], not {list(shape)}"
            )
        if not query.is_floating_point():
            raise ShapeError(f"layer {layer}: query must be floating point, not {query.dtype}")
        self._check_device(layer, "query", query)
        return self._storage.attend(
            self._batch, producer, query, spec.head_dim**-0.5 if scale is None else scale, spec.window
        )

    def gather(self, layer: int, handle: KvCacheHandle | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one sequence in one layer, the step's new tokens included.

        For callers that bring their own attention. Views where the backend can (`dense_is_view`), valid until
        the handle's next truncate, swap or free; else copies.

        Args:
            layer: A layer that was written in this step, or one that shares with such a layer.
            handle: Which sequence; may be left out when the step has only one.

        Returns:
            K `[tokens, num_kv_heads, head_dim]` and V `[tokens, num_kv_heads, value_head_dim]`.

        Raises:
            ShapeError: The layer does not exist or caches nothing.
            StepError: The layer was not written in this step, the step is over and its handles have changed,
                or the handle is not part of it.
        """
        self._require_readable("gather")
        producer = self._written_producer(layer)
        return self._storage.context(self._batch, self._index(handle), producer)

    # -- the end -----------------------------------------------------------------------------------------

    def accept(self, handle: KvCacheHandle, num_tokens: int) -> None:
        """Keep only the first `num_tokens` new tokens of `handle` when the step commits (speculation).

        Raises:
            StepError: The step is not open or the handle is not part of it.
            ShapeError: `num_tokens` is not between 0 and the handle's new tokens.
        """
        self._require_open("accept")
        index = self._index(handle)
        most = self._batch.segments[index].num_new_tokens
        if type(num_tokens) is not int or not 0 <= num_tokens <= most:
            raise ShapeError(
                f"accept takes an int from 0 to {most}, the new tokens of this handle, not {show(num_tokens)}"
            )
        self._transaction.accepted[index] = num_tokens

    def commit(self) -> None:
        """Make the new tokens part of their sequences: all lengths move together.

        If the backend fails on the way, the step is aborted.

        Raises:
            StepError: The step is not open, or a layer that caches is unwritten; the step stays open.
        """
        self._require_open("commit")
        layers = self._storage.spec.geometry.caching_layers
        if len(self._written) < len(layers) and self._batch.num_tokens:
            missing = [layer for layer in layers if layer not in self._written]
            raise StepError(
                f"commit needs every layer written; missing: {_ranges(missing)}. Write them, or abort the step"
            )
        store, transaction = self._store, self._transaction
        try:
            store.finish(transaction, keep=True)
        except BaseException:
            # The storage may have dropped rows of some handles already, so there is no second attempt.
            if transaction.state == "open":
                store.finish(transaction, keep=False)
            raise

    def abort(self) -> None:
        """Put lengths, tables and free counts back to what they were before the step.

        Raises:
            StepError: The step is not open.
        """
        self._require_open("abort")
        self._store.finish(self._transaction, keep=False)

    def discard(self) -> None:
        """Abort from a finalizer, if the step is open; as `KvCacheHandle.discard`."""
        if self._can_abort and not self._discarded:
            self._discarded = True
            self._store.release_dropped(self._transaction)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is not None:
            if self._can_abort:  # else there is nothing left to undo, and the caller's error is the one to show
                self.abort()
        elif self._transaction.state == "open":
            self._commit_or_abort()
        elif self.state == "aborted":
            self._require_current("commit")  # raises where it was not the caller who aborted it, but a reset or close

    def _commit_or_abort(self) -> None:
        try:
            self.commit()
        except StepError:
            if self._can_abort:
                self.abort()
            raise

    @property
    def _can_abort(self) -> bool:
        store = self._store
        return self.state == "open" and store.unusable is None and self._generation == store.generation

    def __del__(self) -> None:
        transaction = getattr(self, "_transaction", None)
        if transaction is None or transaction.state != "open":
            return
        if not sys.is_finalizing() and self._can_abort and not self._discarded:
            self.discard()
            warnings.warn(
                "a step was dropped without commit() or abort(); it has been rolled back",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        names = ", ".join(sequence.request_id for sequence in self._transaction.sequences)
        return f"<Step {self.state}, {self.num_new_tokens} new tokens over [{names}]>"

    # -- checks ------------------------------------------------------------------------------------------

    def _require_open(self, operation: str) -> None:
        self._require_current(operation)
        if self._transaction.state != "open":
            raise StepError(f"{operation} needs an open step; this one is {self.state}")

    def _require_readable(self, operation: str) -> None:
        self._require_current(operation)
        transaction = self._transaction
        if transaction.state == "open":
            return
        if transaction.state == "aborted":
            raise StepError(f"{operation} needs a step that was not aborted")
        if transaction.versions is None:
            raise StepError(f"{operation} is not possible any more: the commit has dropped tokens of this step")
        if transaction.versions != transaction.current_versions():
            raise StepError(f"{operation} is not possible any more: a handle of this step has changed since")

    def _require_current(self, operation: str) -> None:
        store = self._store
        store.require_usable()
        if self._generation != store.generation:
            raise HandleError(
                f"{operation} is not possible: the cache was reset since the step began; begin another", reason="stale"
            )

    def _written_producer(self, layer: int) -> int:
        """Return the layer whose K and V `layer` reads, if it was written in this step."""
        if type(layer) is int and layer in self._written:
            return layer
        producer = self._manager.geometry.producer(layer)
        if producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so there is nothing to read")
        if producer not in self._written and self._batch.num_tokens:
            raise StepError(f"layer {producer} was not written in this step; write it first")
        return producer

    def _index(self, handle: KvCacheHandle | None) -> int:
        if handle is None:
            if len(self._handles) != 1:
                raise StepError(f"name a handle: this step has {len(self._handles)}")
            return 0
        sequence = getattr(handle, "sequence", None)
        for index, own in enumerate(self._transaction.sequences):
            if own is sequence:
                return index
        raise StepError(f"{handle!r} is not part of this step")

    def _checked(self, layer: int, name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        try:
            if (
                tensor.shape == shape
                and tensor.dtype is self._dtype
                and tensor.device == self._device
                and not tensor.requires_grad
            ):
                return tensor
        except AttributeError:  # no tensor
            pass
        return self._converted(layer, name, tensor, shape)

    def _converted(self, layer: int, name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return the tensor in the stored dtype, if that is allowed and all that is wrong with it."""
        require_tensor(layer, name, tensor)
        if tensor.shape != shape:
            raise ShapeError(f"layer {layer}: {name} must be {list(shape)}, not {list(tensor.shape)}")
        if tensor.requires_grad:
            raise ShapeError(
                f"layer {layer}: {name} carries gradients, which a cache cannot keep; "
                "run the model under torch.no_grad(), or detach it"
            )
        self._check_device(layer, name, tensor)
        if not self._manager.allow_dtype_cast or not tensor.is_floating_point():
            raise ShapeError(
                f"layer {layer}: {name} is {tensor.dtype} and the cache stores {self._dtype}; "
                "convert it, choose the cache's dtype to match, or set allow_dtype_cast"
            )
        return tensor.to(self._dtype)

    def _check_device(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise ShapeError(f"layer {layer}: {name} is on {tensor.device} and the cache is on {self._device}")


def require_tensor(layer: int, name: str, value: object) -> None:
    """Raise ShapeError unless `value` is a tensor."""
    import torch  # noqa: PLC0415 - core does not import torch until a tensor is at hand

    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"layer {layer}: {name} must be a torch.Tensor, not {type(value).__name__}")


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers briefly: `0-3, 7`."""
    parts: list[str] = []
    first = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != previous + 1:
            parts.append(str(first) if first == previous else f"{first}-{previous}")
            first = number
        previous = number
    return ", ".join(parts)


def make_batch(transaction: Transaction, storage: Storage) -> Batch:
    """Lay the sequences of a step out in packing order."""
    return Batch(
        _segments(transaction),
        storage.spec.block_size,
        storage.device,
        storage.upload,
        num_tokens=transaction.tokens.total,
    )


def _segments(transaction: Transaction) -> Iterator[Segment]:
    """The sequences of a step, worked out when the storage looks at them."""
    row = 0
    for sequence, start, stop in zip(transaction.sequences, transaction.starts, transaction.stops, strict=True):
        yield Segment(sequence.slot, sequence.blocks, start, stop, row)
        row += stop - start


def require_named_once(handles: Sequence[KvCacheHandle]) -> None:
    """Raise StepError if two handles of a step refer to the same sequence."""
    seen: dict[int, KvCacheHandle] = {}
    for handle in handles:
        other = seen.setdefault(id(handle.sequence), handle)
        if other is not handle:
            raise StepError(f"{handle!r} and {other!r} are the same sequence; name it once in a step") from None
