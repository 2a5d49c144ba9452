"""Sequences in mapped memory: reserved address space, committed by touch, forked by copy-on-write."""

from __future__ import annotations

import ctypes
import weakref

import torch
from typing_extensions import override

from kvcache_core.errors import CacheFullError
from kvcache_core.plugin import StorageSpec
from kvcache_cpu.base import Base, Ledger, Mapping
from kvcache_cpu.layout import Layout
from kvcache_cpu.memory import HERE, Elsewhere, Memory, Slot, SlotMemory
from kvcache_cpu.pages import PageFile, copy, discard, map_pages, move, zero

__all__ = ["MappedMemory", "MappedSlot"]

#: Rows of its own from which on a fork takes the place of a living owner, if it may.
_WORTH_OWNING = 64


class MappedSlot(Slot):
    """A sequence in mapped memory.

    Attributes:
        mapping: Its mapping.
        writes_in_bulk: The step that was reserved last writes many rows to private pages.
    """

    __slots__ = ("mapping", "writes_in_bulk")

    def __init__(self, capacity: int, mapping: Mapping) -> None:
        super().__init__(capacity)
        self.mapping = mapping
        self.writes_in_bulk = False


class MappedMemory(Memory[MappedSlot]):
    """Gives every sequence one mapping with room for all the tokens it may ever hold.

    A fork maps the same memory privately, so the kernel copies a page when the fork first writes to it. The rules
    that keep this safe are in `kvcache_cpu.base`.
    """

    kind = "mapped"

    def __init__(self, spec: StorageSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        self._ledger = Ledger(PageFile(), scrub=spec.scrub)
        self._slots: set[MappedSlot] = set()

    # -- sequences ---------------------------------------------------------------------------------------

    @override
    def open(self, max_tokens: int) -> MappedSlot:
        with self._ledger:
            return self._open(max_tokens)

    def _open(self, capacity: int) -> MappedSlot:
        base = self._new_base(self._layout(capacity))
        try:
            return self._map(base, capacity, private=False)
        except BaseException:
            self._ledger.drop(base)
            raise

    @override
    def fork(self, slot: MappedSlot, num_tokens: int) -> MappedSlot:
        with self._ledger:
            source = slot.mapping
            if num_tokens == 0:
                return self._open(slot.capacity)
            if source.private and num_tokens > source.shared and self._may_own(source, source.shared):
                self._try_to_publish(source, num_tokens)
            shared = min(num_tokens, source.shared) if source.private else num_tokens
            fork = self._map(source.base, slot.capacity, private=True, shared=shared, extent=num_tokens)
            if shared < num_tokens:
                self._copy_rows(source, fork.mapping, shared, num_tokens)
            return fork

    @override
    def shared_tokens(self, slot: MappedSlot, num_tokens: int) -> int:
        with self._ledger:
            source = slot.mapping
            if not source.private or self._may_own(source, source.shared):
                return num_tokens
            return min(num_tokens, source.shared)

    @override
    def close(self, slot: MappedSlot) -> None:
        self._slots.discard(slot)
        slot.drop()  # the mapping itself goes with the last tensor that views it

    @override
    def shutdown(self) -> None:
        for slot in list(self._slots):
            self.close(slot)
        with self._ledger:
            self._ledger.retire()

    # -- rows --------------------------------------------------------------------------------------------

    @override
    def reserve(self, slot: MappedSlot, start: int, stop: int) -> None:
        mapping = slot.mapping
        with self._ledger:
            slot.writes_in_bulk = False
            if start < stop:
                if not mapping.private and start < mapping.base.frozen:
                    self._disown(mapping)
                if mapping.private:
                    self._share_less(mapping, start)
                    if mapping.shared == 0:
                        self._try_to_move_out(mapping, start)
                    elif self._wants_to_own(mapping, stop) and self._may_own(mapping, mapping.shared):
                        self._try_to_own(mapping)
            mapping.extent = max(mapping.extent, stop)
            if not mapping.private:
                mapping.base.filled = max(mapping.base.filled, stop)
            elif start < stop:
                self._expect_stray_pages(slot, stop - start, stop)

    @override
    def truncate(self, slot: MappedSlot, num_tokens: int) -> None:
        mapping = slot.mapping
        with self._ledger:
            if num_tokens >= mapping.extent:
                return
            if mapping.private:
                self._discard_rows(mapping, num_tokens)
            mapping.extent = num_tokens
            mapping.strays = 0
            mapping.shared = min(mapping.shared, num_tokens)
            self._ledger.trim(mapping.base)

    def _discard_rows(self, mapping: Mapping, keep: int) -> None:
        """Give back the private pages of a mapping's rows from `keep` on."""
        layout, address = mapping.base.layout, mapping.address
        if keep == 0:
            discard(address, layout.nbytes)
        elif keep <= mapping.shared:
            # The page that holds row `keep` holds no kept row that the base does not hold too.
            for span in layout.pages_touching(keep, mapping.extent):
                discard(address + span.offset, span.length)
        else:
            for span in layout.rest(keep, mapping.extent):
                discard(address + span.offset, span.length)
            if self._scrub:
                for span in layout.page_tails(keep, mapping.extent):
                    zero(address + span.offset, span.length)

    @override
    def elsewhere(self, slot: MappedSlot) -> Elsewhere:
        mapping = slot.mapping
        with self._ledger:
            base = mapping.base
            if base.window is None and mapping.shared == 0:
                return HERE
            window = self._ledger.window(base)
            if window is None:
                return HERE
            return Elsewhere(mapping.shared if mapping.private else mapping.extent, window - mapping.address)

    # -- whose writes go to the file ---------------------------------------------------------------------

    def _wants_to_own(self, mapping: Mapping, stop: int) -> bool:
        """Whether a private mapping that is to have `stop` rows had better be the owner of its base.

        Where there is an owner already it costs some milliseconds: the dirty pages of one mapping are unmapped and
        those of the other have to be mapped again. A fork of which little becomes never pays that.
        """
        return mapping.base.owner is None or stop - mapping.shared > _WORTH_OWNING

    def _may_own(self, mapping: Mapping, start: int) -> bool:
        """Whether rows from `start` on can be written to the base's file without anybody else seeing it."""
        return mapping.base.needed_by_others(mapping) <= start

    def _try_to_own(self, mapping: Mapping) -> None:
        """Make a private mapping the owner of its base: copy its own rows to the file and map that instead.

        From then on it writes to the file, which costs the kernel less, and forks of it share everything. An owner
        that was there before has nothing in the way and becomes private. Without address space it stays private.
        """
        base = mapping.base
        try:
            if base.owner is not None:
                self._disown(base.owner)
            self._remap(mapping, base, private=False, copied=(mapping.shared, mapping.extent))
        except CacheFullError:
            return
        self._ledger.enter(mapping, base, private=False)

    def _try_to_publish(self, source: Mapping, stop: int) -> None:
        """Copy a private mapping's own rows before `stop` to the file, from where it reads them from then on.

        Forks can then share them. The mapping stays in place: a step on another thread may be writing the rows from
        `stop` on, and what it wrote between a copy and a change of mappings would be lost. Without address space
        nothing happens.
        """
        base, layout = source.base, source.base.layout
        try:
            address = map_pages(self._ledger.file.fd, base.offset, layout.nbytes, private=False)
        except OSError:
            return
        for span in layout.rows(source.shared, stop):
            copy(source.address + span.offset, address + span.offset, span.length)
        self._ledger.unmap(address, layout.nbytes)
        start, source.shared = source.shared, stop
        self._ledger.trim(base)
        published = layout.pages_touching if stop == source.extent else layout.pages_before
        for span in published(start, stop):
            discard(source.address + span.offset, span.length)

    def _try_to_move_out(self, mapping: Mapping, keep: int) -> None:
        """Give a private mapping that shares nothing a base of its own, with its first `keep` rows.

        It then writes to the file, and forks of it share everything. Without address space it stays private.
        """
        layout = mapping.base.layout
        try:
            base = self._new_base(layout)
        except CacheFullError:
            return
        try:
            self._remap(mapping, base, private=False, copied=(0, keep))
        except CacheFullError:
            self._ledger.drop(base)
            return
        self._ledger.enter(mapping, base, private=False)

    def _disown(self, owner: Mapping) -> None:
        """Make the owner of a base private, so that what it writes is not seen by others."""
        self._ledger.window(owner.base)  # the page table would be lost
        self._remap(owner, owner.base, private=True, copied=(0, 0))
        self._ledger.enter(owner, owner.base, private=True, shared=owner.extent)

    def _share_less(self, mapping: Mapping, start: int) -> None:
        """Note that a private mapping is about to write rows from `start` on."""
        if start < mapping.shared:
            mapping.shared = start
            self._ledger.trim(mapping.base)

    def _remap(self, mapping: Mapping, base: Base, *, private: bool, copied: tuple[int, int]) -> None:
        """Put a mapping of another kind at the same address, so that all tensors over it stay valid."""
        length = mapping.length
        try:
            address = map_pages(self._ledger.file.fd, base.offset, length, private=private)
            try:
                for span in base.layout.rows(*copied):
                    copy(mapping.address + span.offset, address + span.offset, span.length)
                move(address, length, mapping.address)
            except BaseException:
                self._ledger.unmap(address, length)
                raise
        except OSError as error:
            raise self._refused(base.layout, error) from error

    def _copy_rows(self, source: Mapping, target: Mapping, start: int, stop: int) -> None:
        """Copy rows to a private mapping of the same base."""
        base = target.base
        for span in base.layout.rows(start, stop):
            copy(source.address + span.offset, target.address + span.offset, span.length)
        base.filled = max(base.filled, stop)  # the stray pages; see `_expect_stray_pages`
        self._ledger.trim(base)

    # -- pages the kernel adds to the file ---------------------------------------------------------------

    def _expect_stray_pages(self, slot: MappedSlot, num_rows: int, stop: int) -> None:
        """Prepare for a private mapping's write to rows that the file lacks, or may lose before they are written.

        The kernel then makes two pages: the private copy, and an empty page of the file to copy from. These strays
        are given back once they exceed a page per run or 2 % of what the base holds, and at once after a bulk write.
        """
        mapping, base = slot.mapping, slot.mapping.base
        allowed = max(base.layout.rows_per_page, base.needed // 50)
        mapping.strays = 0
        if num_rows > allowed:
            slot.writes_in_bulk = True
            return
        if base.filled - base.needed > allowed:
            self._ledger.trim(base)
        mapping.strays = stop
        base.filled = max(base.filled, stop)

    @override
    def wrote_in_bulk(self, slot: MappedSlot) -> bool:
        return slot.writes_in_bulk

    @override
    def after_write(self, slot: MappedSlot, group: int, index: int) -> None:
        with self._ledger:
            base = slot.mapping.base
            for section in base.layout.groups[group]:
                for span in section.layer(index).rest(base.filled, slot.mapping.extent):
                    self._ledger.file.punch(base.offset + span.offset, span.length)

    # -- mappings ----------------------------------------------------------------------------------------

    def _map(self, base: Base, capacity: int, *, private: bool, shared: int = 0, extent: int = 0) -> MappedSlot:
        length = base.layout.nbytes
        try:
            address = map_pages(self._ledger.file.fd, base.offset, length, private=private)
        except OSError as error:
            raise self._refused(base.layout, error) from error
        mapping = Mapping(base, address, private, shared, extent)
        pages = (ctypes.c_char * length).from_address(address)
        # The slot and the tensors keep `pages` alive, and nothing else does.
        weakref.finalize(pages, self._ledger.unreferenced, mapping).atexit = False
        self._ledger.enter(mapping, base, private=private, shared=shared)
        slot = MappedSlot(capacity, mapping)
        slot.place(pages, self._dtype, base.layout)
        self._slots.add(slot)
        return slot

    def _new_base(self, layout: Layout) -> Base:
        try:
            return self._ledger.new_base(layout)
        except OSError as error:
            raise self._refused(layout, error) from error

    def _refused(self, layout: Layout, error: OSError) -> CacheFullError:
        capacity, length = layout.capacity, layout.nbytes
        return CacheFullError(
            f"no room for a sequence of up to {capacity} tokens: the system refuses to reserve {length} bytes of "
            "address space",
            needed=-(-capacity // self._block_size),
            free=0,
            hint="free handles, lower max_sequence_length, or raise the limit on address space (ulimit -v, "
            "vm.max_map_count, vm.overcommit_memory)",
            details=[str(error)],
        )

    # -- numbers -----------------------------------------------------------------------------------------

    @property
    @override
    def nbytes(self) -> int:
        with self._ledger:
            return self._ledger.nbytes

    @override
    def describe(self, slot: MappedSlot) -> SlotMemory:
        mapping = slot.mapping
        with self._ledger:
            base = mapping.base
            shared = mapping.shared if mapping.private else min(base.frozen, mapping.extent)
            return SlotMemory(
                kind=self.kind,
                reserved_bytes=mapping.length,
                own_bytes=base.layout.bytes_touching(shared, mapping.extent),
                shared_tokens=shared,
                writes_in_place=not mapping.private and base.frozen <= mapping.extent,
            )

    @override
    def audit(self) -> list[str]:
        with self._ledger:
            return self._ledger.audit()
