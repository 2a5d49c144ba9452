"""Sequences in ordinary anonymous memory that grows by doubling; a fork copies. Works on every platform."""

from __future__ import annotations

import mmap
from itertools import chain

import torch
from typing_extensions import override

from kvcache_core.errors import CacheFullError
from kvcache_core.plugin import StorageSpec
from kvcache_cpu.memory import Memory, Slot, SlotMemory

__all__ = ["HeapMemory", "HeapSlot"]

#: Tokens for which room is made at first.
_LEAST_ROOM = 16


class HeapSlot(Slot):
    """A sequence in heap memory.

    Attributes:
        room: Tokens that the present buffer holds.
        rows: Rows that may hold data.
        nbytes: Bytes of the present buffer.
    """

    __slots__ = ("nbytes", "room", "rows")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.room = 0
        self.rows = 0
        self.nbytes = 0


class HeapMemory(Memory[HeapSlot]):
    """Gives every sequence one buffer, replaced by one twice as large when it is full.

    A buffer comes from the operating system zeroed and goes back to it with the last tensor that views it, so that
    views stay readable and nothing has to be scrubbed but what a truncate keeps.
    """

    kind = "heap"

    def __init__(self, spec: StorageSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        self._slots: set[HeapSlot] = set()

    @override
    def open(self, max_tokens: int) -> HeapSlot:
        slot = HeapSlot(max_tokens)
        self._resize(slot, 0)
        self._slots.add(slot)
        return slot

    @override
    def fork(self, slot: HeapSlot, num_tokens: int) -> HeapSlot:
        fork = HeapSlot(slot.capacity)
        fork.rows = num_tokens
        self._resize(fork, num_tokens, source=slot)
        self._slots.add(fork)
        return fork

    @override
    def shared_tokens(self, slot: HeapSlot, num_tokens: int) -> int:
        return 0

    @override
    def reserve(self, slot: HeapSlot, start: int, stop: int) -> None:
        slot.rows = min(slot.rows, start)  # only these have to move
        if stop > slot.room:
            self._resize(slot, min(slot.capacity, max(stop, 2 * slot.room, _LEAST_ROOM)))
        slot.rows = max(slot.rows, stop)

    @override
    def truncate(self, slot: HeapSlot, num_tokens: int) -> None:
        if num_tokens >= slot.rows:
            return
        dropped = slice(num_tokens, slot.rows)
        slot.rows = num_tokens
        if num_tokens <= slot.room // 4:
            self._resize(slot, num_tokens)
        elif self._scrub:
            for rows in chain(*slot.tensors):
                rows[:, :, dropped].zero_()

    @override
    def close(self, slot: HeapSlot) -> None:
        self._slots.discard(slot)
        slot.drop()

    @override
    def shutdown(self) -> None:
        for slot in list(self._slots):
            self.close(slot)

    @property
    @override
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in list(self._slots))

    @override
    def describe(self, slot: HeapSlot) -> SlotMemory:
        return SlotMemory(
            kind=self.kind,
            reserved_bytes=slot.nbytes,
            own_bytes=slot.nbytes,
            shared_tokens=0,
            writes_in_place=True,
        )

    def _resize(self, slot: HeapSlot, room: int, *, source: HeapSlot | None = None) -> None:
        """Move the rows of a slot, or copy those of another, to a new buffer with room for `room` tokens."""
        layout = self._layout(room)
        try:
            buffer = mmap.mmap(-1, layout.nbytes, access=mmap.ACCESS_COPY)
        except (OSError, MemoryError, OverflowError, ValueError) as error:
            raise CacheFullError(
                f"no memory for {room} tokens of one sequence: the system refuses {layout.nbytes} bytes",
                needed=-(-room // self._block_size),
                free=0,
                hint="free handles, or lower the budget below the machine's free memory",
                details=[str(error)],
            ) from error
        former = (slot if source is None else source).tensors
        slot.place(buffer, self._dtype, layout)
        if slot.rows:
            for old, new in zip(chain(*former), chain(*slot.tensors), strict=True):
                new[:, :, : slot.rows].copy_(old[:, :, : slot.rows])
        slot.room, slot.nbytes = room, layout.nbytes
