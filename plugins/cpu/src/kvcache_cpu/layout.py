"""Where the rows of one sequence lie in its memory.

The memory of a sequence is a row of *sections*, one for the keys and one for the values of each layer group. A
section is a row of *runs*, one for each layer and kv head. A run holds the rows of all positions one after the
other (head-major, which attention reads faster than token-major), has room for the sequence's whole capacity
and starts at a page of its own, so that the pages of each run can be given back from the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from kvcache_core.plugin import CacheGeometry

__all__ = ["Layout", "Section", "Span", "Strided"]


class Span(NamedTuple):
    """A range of bytes in a sequence's memory."""

    offset: int
    length: int


class Strided(NamedTuple):
    """A tensor in a sequence's memory: what `torch.Tensor.as_strided` takes, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Section:
    """Keys or values of one layer group. Methods that return spans return one for each run.

    Attributes:
        offset: First byte.
        layers: Layers of the group.
        heads: Kv heads.
        dim: Elements of a row.
        row_bytes: Bytes of a row.
        run_bytes: From the start of a run to the start of the next, a multiple of `page`.
        page: Bytes of a page.
    """

    offset: int
    layers: int
    heads: int
    dim: int
    row_bytes: int
    run_bytes: int
    page: int

    @property
    def nbytes(self) -> int:
        """Bytes of the section."""
        return self.layers * self.heads * self.run_bytes

    def layer(self, index: int) -> Section:
        """The part of one layer."""
        offset = self.offset + index * self.heads * self.run_bytes
        return Section(offset, 1, self.heads, self.dim, self.row_bytes, self.run_bytes, self.page)

    def strided(self, capacity: int) -> Strided:
        """The first `capacity` rows of all runs as a tensor `[layers, heads, capacity, dim]`."""
        itemsize = self.row_bytes // self.dim
        run = self.run_bytes // itemsize
        shape = (self.layers, self.heads, capacity, self.dim)
        return Strided(shape, (self.heads * run, run, self.dim, 1), self.offset // itemsize)

    def rows(self, start: int, stop: int) -> Iterator[Span]:
        """Rows `start` to `stop` (exclusive)."""
        return self._spans(start * self.row_bytes, stop * self.row_bytes)

    def rest(self, start: int, stop: int, *, exact: bool = False) -> Iterator[Span]:
        """What dropping rows `start` to `stop` (exclusive) leaves unused, up to the end of the last page.

        Begins at the first page that holds no row before `start` or, if `exact`, at row `start` itself.
        """
        first = start * self.row_bytes if exact else self._page_after(start)
        return self._spans(first, self._page_after(stop))

    def page_tails(self, start: int, stop: int) -> Iterator[Span]:
        """The part of rows `start` to `stop` (exclusive) that is in a page with rows before `start`."""
        return self._spans(start * self.row_bytes, min(self._page_after(start), stop * self.row_bytes))

    def pages_touching(self, start: int, stop: int) -> Iterator[Span]:
        """The whole pages that hold any of rows `start` to `stop` (exclusive)."""
        return self._spans(*self._pages(start, stop))

    def pages_before(self, start: int, stop: int) -> Iterator[Span]:
        """Those of `pages_touching(start, stop)` that lie before the page of row `stop`."""
        return self._spans(self._page_of(start), self._page_of(stop))

    def bytes_touching(self, start: int, stop: int) -> int:
        """Bytes of `pages_touching(start, stop)`."""
        first, last = self._pages(start, stop)
        return self.layers * self.heads * (last - first)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        if start >= stop:
            return 0, 0
        return self._page_of(start), self._page_after(stop)

    def _page_of(self, row: int) -> int:
        return row * self.row_bytes // self.page * self.page

    def _page_after(self, row: int) -> int:
        return _round_up(row * self.row_bytes, self.page)

    def _spans(self, first: int, last: int) -> Iterator[Span]:
        """The same range of bytes in every run."""
        length = last - first
        if length > 0:
            begin = self.offset + first
            for offset in range(begin, begin + self.nbytes, self.run_bytes):
                yield Span(offset, length)


@dataclass(frozen=True)
class Layout:
    """Places of all rows of a sequence. Methods that return spans return one for each run of each section.

    Attributes:
        capacity: Tokens a sequence can hold.
        groups: Sections of keys and of values of each layer group, in the order of the geometry's groups.
        nbytes: Bytes of the whole, a multiple of the page size.
        rows_per_page: Rows that fit a page, where they are smallest; at least 1.
    """

    capacity: int
    groups: tuple[tuple[Section, Section], ...]
    nbytes: int
    rows_per_page: int

    @classmethod
    def of(cls, geometry: CacheGeometry, itemsize: int, capacity: int, page: int) -> Layout:
        """Lay out `capacity` tokens of `geometry`, stored with `itemsize` bytes per element."""
        groups = []
        offset = 0
        for group in geometry.groups:
            pair = []
            for dim in (group.head_dim, group.value_head_dim):
                row = dim * itemsize
                run = _round_up(capacity * row, page)
                pair.append(Section(offset, len(group.layers), group.num_kv_heads, dim, row, run, page))
                offset += pair[-1].nbytes
            groups.append((pair[0], pair[1]))
        smallest = min(section.row_bytes for pair in groups for section in pair)
        return cls(capacity, tuple(groups), offset, max(1, page // smallest))

    @cached_property
    def strided(self) -> tuple[tuple[Strided, Strided], ...]:
        """Keys and values of each layer group as tensors."""
        return tuple((key.strided(self.capacity), value.strided(self.capacity)) for key, value in self.groups)

    @property
    def sections(self) -> Iterator[Section]:
        """All sections, in the order of their offsets."""
        return chain.from_iterable(self.groups)

    def rows(self, start: int, stop: int) -> Iterator[Span]:
        """See `Section.rows`."""
        return chain.from_iterable(section.rows(start, stop) for section in self.sections)

    def rest(self, start: int, stop: int, *, exact: bool = False) -> Iterator[Span]:
        """See `Section.rest`."""
        return chain.from_iterable(section.rest(start, stop, exact=exact) for section in self.sections)

    def page_tails(self, start: int, stop: int) -> Iterator[Span]:
        """See `Section.page_tails`."""
        return chain.from_iterable(section.page_tails(start, stop) for section in self.sections)

    def pages_touching(self, start: int, stop: int) -> Iterator[Span]:
        """See `Section.pages_touching`."""
        return chain.from_iterable(section.pages_touching(start, stop) for section in self.sections)

    def pages_before(self, start: int, stop: int) -> Iterator[Span]:
        """See `Section.pages_before`."""
        return chain.from_iterable(section.pages_before(start, stop) for section in self.sections)

    def bytes_touching(self, start: int, stop: int) -> int:
        """See `Section.bytes_touching`."""
        return sum(section.bytes_touching(start, stop) for section in self.sections)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
