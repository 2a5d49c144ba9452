"""The books of mapped memory: who maps which range of the file, and which of its rows are still needed.

A *base* is one range of the file, laid out for one sequence. At most one mapping *owns* it: a shared mapping,
whose writes go to the file. All others are private mappings, whose writes go to private copies of the touched
pages. What a private mapping has not written it reads from the base, so these rows are *frozen*: nobody writes
them or gives them back while the mapping lives.

What lies in the file can be read at a second address too, the *window* of the base. It exists once a fork was read,
and took over the page table of the owner: the kernel then meets no page fault for what the owner had touched,
whoever reads it, whereas each mapping of its own would meet one for every sixteen pages.

A mapping stays in these books as long as a tensor views it, which may be longer than its sequence lives.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType

from kvcache_cpu.layout import Layout
from kvcache_cpu.pages import PageFile, discard, lift, unmap

__all__ = ["Base", "Ledger", "Mapping"]


@dataclass(eq=False, slots=True)
class Mapping:
    """One mapping of a base.

    Attributes:
        base: What it maps.
        address: Where.
        private: Whether its writes go to private pages instead of to the file.
        shared: Of a private mapping: it reads its first `shared` rows from the base.
        extent: Rows at and beyond this were never made writable, or were dropped.
        strays: Of a private mapping: its last step may have added empty pages to the file up to this row.
    """

    base: Base
    address: int
    private: bool
    shared: int = 0
    extent: int = 0
    strays: int = 0

    @property
    def length(self) -> int:
        """Bytes that it spans."""
        return self.base.layout.nbytes

    @property
    def private_bytes(self) -> int:
        """Bytes of the private pages that its own rows take."""
        return self.base.layout.bytes_touching(self.shared, self.extent) if self.private else 0


@dataclass(eq=False, slots=True)
class Base:
    """One range of the file.

    Attributes:
        offset: First byte in the file.
        layout: Where the rows lie in it.
        mappings: Everything that maps it.
        owner: The mapping whose writes go to the file, or None.
        frozen: Private mappings read the first `frozen` rows from the file.
        filled: Rows of the file at and beyond this have no pages, but for the rest of the last page in use.
        window: The address of the window, or None.
    """

    offset: int
    layout: Layout
    mappings: set[Mapping] = field(default_factory=set)
    owner: Mapping | None = None
    frozen: int = 0
    filled: int = 0
    window: int | None = None

    @property
    def needed(self) -> int:
        """Rows of the file that somebody reads."""
        return self.frozen if self.owner is None else max(self.frozen, self.owner.extent)

    def recount(self) -> None:
        """Bring `frozen` up to date."""
        self.frozen = max((mapping.shared for mapping in self.mappings if mapping.private), default=0)

    def needed_by_others(self, mapping: Mapping) -> int:
        """Rows of the file that mappings other than this one read."""
        return max((m.shared if m.private else m.extent for m in self.mappings if m is not mapping), default=0)


class Ledger:
    """All bases of one file, and the lock over them, which `with ledger:` holds.

    A mapping goes when the last tensor that views it is collected, which may happen on any thread, at any point,
    even while this thread holds the lock. So the lock is not re-entrant, and `unreferenced` leaves its work to
    whoever holds it.

    Attributes:
        file: Where the bases are.
        bases: Those in use.
    """

    def __init__(self, file: PageFile, *, scrub: bool) -> None:
        self.file = file
        self.bases: set[Base] = set()
        self._scrub = scrub
        self._retired = False
        self._lock = Lock()
        self._unreferenced: deque[Mapping] = deque()
        self._stuck: list[tuple[int, int]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._settle()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
        self._settle_if_free()

    def unreferenced(self, mapping: Mapping) -> None:
        """Remove a mapping that no tensor views any more; without the lock, from a finalizer."""
        self._unreferenced.append(mapping)
        self._settle_if_free()

    def _settle_if_free(self) -> None:
        # Whoever holds the lock comes here after releasing it, so nothing is left behind.
        while self._unreferenced and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        self._unmap_stuck()
        while self._unreferenced:
            mapping = self._unreferenced.popleft()
            base = mapping.base
            if base.owner is mapping and base.window is None and len(base.mappings) > 1:
                base.window = mapping.address
            else:
                self.unmap(mapping.address, mapping.length)
            self.leave(mapping)

    def _unmap_stuck(self) -> None:
        while self._stuck:
            try:
                unmap(*self._stuck[-1])
            except OSError:
                return
            self._stuck.pop()

    # -- under the lock ----------------------------------------------------------------------------------

    def unmap(self, address: int, length: int) -> None:
        """Remove what is mapped at an address, now or as soon as the system lets us.

        The kernel may have joined it with its neighbours, and refuses to part them where the process has as many
        mappings as it may. What stays is address space, but no memory.
        """
        try:
            unmap(address, length)
        except OSError:
            discard(address, length)
            self._stuck.append((address, length))

    def new_base(self, layout: Layout) -> Base:
        """Take a range of the file; it is given back when the last mapping leaves it."""
        base = Base(self.file.take(layout.nbytes), layout)
        self.bases.add(base)
        return base

    def enter(self, mapping: Mapping, base: Base, *, private: bool, shared: int = 0) -> None:
        """Note that a mapping now maps `base`: as its owner, or privately, reading its first `shared` rows."""
        former = mapping.base
        if former is not base:
            self.leave(mapping)
        elif base.owner is mapping:
            base.owner = None
        mapping.base, mapping.private, mapping.shared, mapping.strays = base, private, shared, 0
        base.mappings.add(mapping)
        if private:
            base.frozen = max(base.frozen, shared)
        else:
            base.owner = mapping
            base.recount()
        base.filled = max(base.filled, base.needed)

    def leave(self, mapping: Mapping) -> None:
        """Take a mapping out of its base, and give back what only this mapping needed."""
        base = mapping.base
        base.mappings.discard(mapping)
        if base.owner is mapping:
            base.owner = None
        if base.mappings:
            self.trim(base)
        else:
            self.drop(base)

    def drop(self, base: Base) -> None:
        """Give back a base that nobody maps; harmless when it was given back before."""
        if base not in self.bases:
            return
        self.bases.discard(base)
        if base.window is not None:
            self.unmap(base.window, base.layout.nbytes)
        self.file.give_back(base.offset, base.layout.nbytes)
        self._close_file_if_unused()

    def window(self, base: Base) -> int | None:
        """Return the address of the base's window, which is made if need be, or None where it cannot be made."""
        if base.window is None and base.owner is not None:
            try:
                base.window = lift(base.owner.address, base.owner.length)
            except OSError:
                return None
        return base.window

    def trim(self, base: Base) -> None:
        """Recount what is needed of a base, and give back the rest."""
        base.recount()
        needed = base.needed
        if needed < base.filled:
            if needed == 0:
                self.file.punch(base.offset, base.layout.nbytes)
            else:
                for span in base.layout.rest(needed, base.filled, exact=self._scrub):
                    self.file.punch(base.offset + span.offset, span.length)
        base.filled = max(needed, *(mapping.strays for mapping in base.mappings), 0)

    def retire(self) -> None:
        """Close the file once nothing maps it any more; no base may be taken afterwards."""
        self._retired = True
        self._close_file_if_unused()

    def _close_file_if_unused(self) -> None:
        if self._retired and not self.bases:
            self.file.close()

    # -- numbers -----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: the pages of the file, and the private pages of mappings."""
        return self.file.committed + sum(mapping.private_bytes for base in self.bases for mapping in base.mappings)

    def audit(self) -> list[str]:
        """Return a line for each inconsistency."""
        return [line for base in self.bases for line in _audit_base(base)]


def _audit_base(base: Base) -> list[str]:
    problems = []
    if any(mapping.base is not base for mapping in base.mappings):
        problems.append("a mapping is entered that belongs to another base")
    if [mapping for mapping in base.mappings if not mapping.private] != ([base.owner] if base.owner else []):
        problems.append("not exactly the owner maps it shared")
    frozen = max((mapping.shared for mapping in base.mappings if mapping.private), default=0)
    if base.frozen != frozen:
        problems.append(f"{base.frozen} rows are frozen but private mappings read {frozen}")
    if base.filled < base.needed:
        problems.append(f"{base.filled} rows are kept but {base.needed} are needed")
    problems += [
        f"a private mapping reads {mapping.shared} rows of it but has only {mapping.extent}"
        for mapping in base.mappings
        if mapping.private and mapping.shared > mapping.extent
    ]
    return [f"memory at file offset {base.offset:#x}: {problem}" for problem in problems]
