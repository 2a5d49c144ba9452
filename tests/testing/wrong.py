"""Storages and managers that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache_core.allocator import BlockAllocator
from kvcache_core.attention import attend_dense
from kvcache_core.books import Books
from kvcache_core.handle import KvCacheHandle
from kvcache_core.locking import Guard
from kvcache_core.manager import KvCacheManager
from kvcache_core.plugin import Batch, BlockCopy
from kvcache_core.prefix_cache import PrefixCache
from kvcache_core.reservation import Reservation
from kvcache_core.sequence import CachedSequence
from kvcache_core.sequence_store import SequenceStore
from kvcache_core.step import Step
from tests.storages.paged import PagedStorage

Pair = tuple[torch.Tensor, torch.Tensor]

# -- reading -------------------------------------------------------------------------------------------------


class LengthOneOff(PagedStorage):
    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Pair:
        return super().gather(slot, blocks, max(0, num_tokens - 1), layer)


class RowsBeyondTheLength(PagedStorage):
    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Pair:
        size = self.spec.block_size
        return super().gather(slot, blocks, -(-num_tokens // size) * size, layer)


class StaleTable(PagedStorage):
    """Remembers each sequence's first table, as a cache of device tensors might that nobody invalidates."""

    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Pair:
        tables = self.__dict__.setdefault("_tables", {})
        known = tables.setdefault(blocks[0] if blocks else None, list(blocks))
        return super().gather(slot, [*known, *blocks[len(known) :]], num_tokens, layer)


class ViewsOfThePool(PagedStorage):
    """Hands out views of memory that the next sequence will get."""

    dense_is_view = True

    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Pair:
        first, count = (blocks[0] if blocks else 1), -(-num_tokens // self.spec.block_size)
        if list(blocks[:count]) != list(range(first, first + count)):
            return super().gather(slot, blocks, num_tokens, layer)
        rows = slice(first * self.spec.block_size, first * self.spec.block_size + num_tokens)
        return self.keys[layer].flatten(0, 1)[rows], self.values[layer].flatten(0, 1)[rows]


class ReturnsTheSharedHandleType(PagedStorage):
    handle_type = KvCacheHandle


# -- writing -------------------------------------------------------------------------------------------------


class ValuesForKeys(PagedStorage):
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.shape == value.shape:
            key, value = value, key
        super().write(batch, layer, key, value)


class BatchRowsSwapped(PagedStorage):
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if len(batch.segments) > 1:
            key, value = key.flip(0), value.flip(0)
        super().write(batch, layer, key, value)


class WritesTheFirstLayerOnly(PagedStorage):
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(batch, 0 if self.keys[0].shape[2:] == key.shape[1:] else layer, key, value)


class ReadsStorageOrder(PagedStorage):
    """Takes the rows as they lie in memory, whatever their strides."""

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        def as_it_lies(rows: torch.Tensor) -> torch.Tensor:
            return rows.as_strided(rows.shape, torch.empty(rows.shape).stride())

        super().write(batch, layer, as_it_lies(key), as_it_lies(value))


class LosesPrecision(PagedStorage):
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(batch, layer, key.to(torch.bfloat16).to(key.dtype), value)


class NormalisesNumbers(PagedStorage):
    """Keeps every number, but not every bit: -0.0 becomes 0.0, and NaN one NaN."""

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(batch, layer, key + 0.0, torch.where(value.isnan(), torch.nan, value))


class PoolOfOneMode(PagedStorage):
    """Is opened in inference mode, and can then be written to in no other."""

    def _pool(self, heads: int, dim: int) -> torch.Tensor:
        return super()._pool(heads, dim).clone()


class KeepsTheCallersRows(PagedStorage):
    """Stores a reference, and copies only when it is read."""

    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.__dict__.setdefault("_waiting", []).append((batch, layer, key, value))

    def gather(self, slot: None, blocks: Sequence[int], num_tokens: int, layer: int) -> Pair:
        for waiting in self.__dict__.pop("_waiting", []):
            super().write(*waiting)
        return super().gather(slot, blocks, num_tokens, layer)


# -- sharing -------------------------------------------------------------------------------------------------


class CopyIgnored(PagedStorage):
    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        return None


class CopiesTheLastRows(PagedStorage):
    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        for pool in (*self.keys.values(), *self.values.values()):
            for copy in copies:
                pool[copy.target, -copy.rows :] = pool[copy.source, -copy.rows :]


class CopiesKeysOnly(PagedStorage):
    def reserve(self, slot: None, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        for pool in self.keys.values():
            for copy in copies:
                pool[copy.target, : copy.rows] = pool[copy.source, : copy.rows]


# -- attention -----------------------------------------------------------------------------------------------


class Attends(PagedStorage):
    """Attends sequence by sequence, in whatever way a subclass chooses."""

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], self.values[layer].shape[-1])
        for segment in batch.segments:
            rows = slice(segment.row, segment.row + segment.num_new_tokens)
            key, value = self.gather(segment.slot, segment.blocks, segment.stop, layer)
            if segment.num_new_tokens:
                out[rows] = self.one(query[rows], key, value, scale, window)
        return out

    def one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        return attend_dense(query, key, value, scale=scale, window=window)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor) -> Any:
    """Attention with a mask `[queries, keys]`."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (rows.to(query.dtype).transpose(0, 1) for rows in (query, key, value))
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)


def causal(query: torch.Tensor, key: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """The right mask, or one that is `shift` keys off."""
    positions = torch.arange(len(key) - len(query), len(key))[:, None] + shift
    return torch.arange(len(key))[None] <= positions


class MaskOffByOne(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return masked(query, key, value, scale, causal(query, key, shift=1))


class TopLeftMask(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return masked(query, key, value, scale, causal(query, key, shift=len(query) - len(key)))


class NoMask(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return masked(query, key, value, scale, torch.ones(len(query), len(key), dtype=torch.bool))


class WindowOffByOne(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return attend_dense(query, key, value, scale=scale, window=window + 1 if window else None)


class WindowInsideTheChunk(Attends):
    """Counts the window from the last new token, for all of them."""

    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        seen = causal(query, key)
        if window is not None:
            seen[:, : max(0, len(key) - len(query) - window + 1)] = False
        return masked(query, key, value, scale, seen)


class HeadsInterleaved(Attends):
    """Lets query head h read kv head h % num_kv_heads."""

    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        heads = key.shape[1]
        group = query.shape[1] // heads
        order = torch.arange(query.shape[1]).reshape(group, heads).T.flatten()
        out = attend_dense(query[:, order], key, value, scale=scale, window=window)
        return out[:, order.argsort()]


class ScaleIgnored(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return attend_dense(query, key, value, scale=key.shape[-1] ** -0.5, window=window)


class ReturnsFloat32(Attends):
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        return super().attend(batch, layer, query, scale, window).float()


class PrefillIgnoresTheTable(PagedStorage):
    """Reads the pool as if the blocks of a sequence followed one another, except when it decodes."""

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        segments = [
            segment
            if segment.num_new_tokens <= 1
            else segment._replace(blocks=[segment.blocks[0] + i for i in range(len(segment.blocks))])
            for segment in batch.segments
        ]
        clipped = [s._replace(blocks=[min(b, self.spec.num_blocks) for b in s.blocks]) for s in segments]
        return super().attend(Batch(clipped, batch.block_size, batch.device), layer, query, scale, window)


class MaskTimesNan(Attends):
    """Attends over whole blocks and weighs what lies beyond the length with zero."""

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        out = query.new_empty(*query.shape[:2], self.values[layer].shape[-1])
        size = self.spec.block_size
        for segment in batch.segments:
            rows = slice(segment.row, segment.row + segment.num_new_tokens)
            whole = -(-segment.stop // size) * size
            key, value = self.gather(segment.slot, segment.blocks, whole, layer)
            seen = causal(query[rows], key[: segment.stop]) if segment.num_new_tokens else torch.ones(0, 0).bool()
            if window is not None and segment.num_new_tokens:
                positions = torch.arange(segment.start, segment.stop)[:, None]
                seen = seen & (torch.arange(segment.stop)[None] > positions - window)
            if segment.num_new_tokens:
                seen = torch.nn.functional.pad(seen, (0, whole - segment.stop))
                out[rows] = masked(query[rows], key, value, scale, seen)
        return out


class FiniteMinusInfinity(Attends):
    """Starts the maximum of the scores at -5e4, as if no score could be lower."""

    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        keys, values = (rows.float().repeat_interleave(group, dim=1) for rows in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
        seen = causal(query, key)
        if window is not None:
            seen &= ~causal(query, key, shift=-window)
        weights = (scores - scores.masked_fill(~seen, -5e4).amax(-1, keepdim=True).clamp(min=-5e4)).exp() * seen
        total = weights.sum(-1, keepdim=True)
        out = torch.einsum("hqk,khd->qhd", weights / total.clamp(min=1e-30), values)
        return out.to(query.dtype)


class NanBecomesZero(Attends):
    def one(self, query: Any, key: Any, value: Any, scale: float, window: int | None) -> torch.Tensor:
        return attend_dense(query, key, value, scale=scale, window=window).nan_to_num()


# -- the books: core itself, broken --------------------------------------------------------------------------

Breakage = Callable[[pytest.MonkeyPatch], None]


def shared_blocks_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockAllocator, "is_shared", lambda self, block: False)


def forks_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Books, "share", lambda self, blocks: None)


def aborts_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservation, "undo", lambda self, books: None)


def aborts_lose_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservation, "undo", lambda self, books: self._restore_table())


def undone_steps_leave_the_storage_alone(patch: pytest.MonkeyPatch) -> None:
    def undo(self: SequenceStore, parts: Any) -> None:
        for part in parts:
            part.reservation.undo(self.books)

    patch.setattr(SequenceStore, "_undo", undo)


def failed_reservations_are_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservation, "_restore_table", lambda self: None)


def truncation_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    def cut(self: SequenceStore, sequence: Any, num_tokens: int) -> None:
        del sequence.token_ids[num_tokens:]
        sequence.num_tokens = num_tokens
        sequence.version += 1

    patch.setattr(SequenceStore, "_cut", cut)


def step_tensors_are_the_storages_own(patch: pytest.MonkeyPatch) -> None:
    make = Step.__init__

    def init(self: Step, *arguments: Any) -> None:
        make(self, *arguments)
        self._shown = self._batch

    patch.setattr(Step, "__init__", init)


def nothing_is_locked(patch: pytest.MonkeyPatch) -> None:
    class NoLock:
        def acquire(self, blocking: bool = True) -> bool:
            return True

        def release(self) -> None:
            return None

        def locked(self) -> bool:
            return False

    make = Guard.__init__

    def init(self: Guard, *arguments: Any) -> None:
        make(self, *arguments)
        self._lock = NoLock()  # type: ignore[assignment]

    patch.setattr(Guard, "__init__", init)


def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    make = KvCacheManager._prefix_key

    def prefix_key(self: KvCacheManager, request: Any) -> Any:
        object.__setattr__(request, "salt", None)
        return make(self, request)

    patch.setattr(KvCacheManager, "_prefix_key", prefix_key)


def a_hit_may_cover_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_most_blocks", lambda self, token_ids: len(token_ids) // self._books.block_size)


def what_is_cut_off_can_still_be_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "forget", lambda self, sequence, keep: None)


def evicted_blocks_can_still_be_found(patch: pytest.MonkeyPatch) -> None:
    forget = PrefixCache.forget

    def forget_live_ones(self: PrefixCache, sequence: CachedSequence, keep: int) -> None:
        if not sequence.is_kept:
            forget(self, sequence, keep)

    patch.setattr(PrefixCache, "forget", forget_live_ones)


@contextmanager
def broken(breakage: Breakage | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if breakage is not None:
            breakage(patch)
        yield
