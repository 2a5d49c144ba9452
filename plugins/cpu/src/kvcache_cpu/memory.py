"""What the two kinds of memory, mapped and heap, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType

import torch

from kvcache_core.plugin import CacheGeometry, StorageSpec
from kvcache_cpu.layout import Layout
from kvcache_cpu.pages import PAGE

__all__ = ["HERE", "Elsewhere", "Memory", "Slot", "SlotMemory", "dense_views"]


@dataclass(frozen=True, kw_only=True)
class SlotMemory:
    """The memory of one sequence, at one moment.

    Attributes:
        kind: `"mapped"` or `"heap"`.
        reserved_bytes: Bytes of address space.
        own_bytes: Bytes, in whole pages, of the rows that it shares with no other sequence.
        shared_tokens: Leading tokens whose rows it shares with other sequences.
        writes_in_place: Whether its next token is written without copying a shared page first.
    """

    kind: str
    reserved_bytes: int
    own_bytes: int
    shared_tokens: int
    writes_in_place: bool


class Elsewhere(NamedTuple):
    """A second address at which leading rows of a sequence can be read with fewer page faults.

    What is there stays as it is for as long as the sequence's tensors do and the sequence itself neither drops nor
    rewrites these rows.

    Attributes:
        num_tokens: How many rows.
        shift: Bytes from where they are in the sequence's own tensors to there.
    """

    num_tokens: int
    shift: int


#: There is none.
HERE = Elsewhere(0, 0)


#: The keys of each layer group, and the values.
Tensors = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


class Clearable(Protocol):
    """Something that holds tensors and can let go of them."""

    def clear(self) -> None:
        """Let go."""


class Slot:
    """The memory of one sequence.

    Attributes:
        capacity: Tokens the sequence may ever hold.
        views: Refers to what the last step has cut out of `keys` and `values`, or None.
    """

    __slots__ = ("__weakref__", "_place", "_tensors", "capacity", "views")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.views: ReferenceType[Clearable] | None = None
        self._place: tuple[Any, torch.dtype, Layout] | None = None
        self._tensors: Tensors | None = None

    def place(self, memory: Any, dtype: torch.dtype, layout: Layout) -> None:
        """Have the sequence live in a buffer that is laid out by `layout`."""
        self._place, self._tensors = (memory, dtype, layout), None

    @property
    def tensors(self) -> Tensors:
        """The keys and the values of each layer group, `[layers, kv heads, room, dim]`."""
        tensors, place = self._tensors, self._place
        if tensors is None:  # made when first asked for: a fork that is dropped unused never is
            tensors = self._tensors = ((), ()) if place is None else dense_views(*place)
        return tensors

    def drop(self) -> None:
        """Let go of the memory."""
        self._place, self._tensors = None, None
        self.clear_views()

    def clear_views(self) -> None:
        """Have the last step let go of the memory too, which may outlive the sequence."""
        views = None if self.views is None else self.views()
        if views is not None:
            views.clear()


SlotT = TypeVar("SlotT", bound=Slot)


class Memory(ABC, Generic[SlotT]):
    """Gives sequences their memory. The methods mean what those of `Storage` of the same names mean.

    Args:
        spec: What the storage is built from.
        dtype: The stored dtype.
    """

    #: Which of the options' kinds this is.
    kind: str

    def __init__(self, spec: StorageSpec, dtype: torch.dtype) -> None:
        self._geometry: CacheGeometry = spec.geometry
        self._block_size = spec.block_size
        self._scrub = spec.scrub
        self._dtype = dtype

    def _layout(self, room: int) -> Layout:
        return Layout.of(self._geometry, self._dtype.itemsize, max(1, room), PAGE)

    @abstractmethod
    def open(self, max_tokens: int) -> SlotT:
        """Return the slot of a new, empty sequence."""

    @abstractmethod
    def fork(self, slot: SlotT, num_tokens: int) -> SlotT:
        """Return the slot of a new sequence that starts with the first tokens of `slot`."""

    @abstractmethod
    def shared_tokens(self, slot: SlotT, num_tokens: int) -> int:
        """Return how many tokens such a fork would share."""

    @abstractmethod
    def reserve(self, slot: SlotT, start: int, stop: int) -> None:
        """Make rows writable."""

    @abstractmethod
    def truncate(self, slot: SlotT, num_tokens: int) -> None:
        """Drop rows and give their memory back."""

    @abstractmethod
    def close(self, slot: SlotT) -> None:
        """Forget the sequence."""

    def wrote_in_bulk(self, slot: SlotT) -> bool:
        """Whether `after_write` wants to be called after each layer of the step that was reserved last."""
        return False

    def after_write(self, slot: SlotT, group: int, index: int) -> None:
        """Do what must follow a write to layer `index` of a group."""
        return

    def elsewhere(self, slot: SlotT) -> Elsewhere:
        """Return where the rows of a sequence had better be read."""
        return HERE

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    @abstractmethod
    def shutdown(self) -> None:
        """Forget all sequences."""

    @abstractmethod
    def describe(self, slot: SlotT) -> SlotMemory:
        """Return what a sequence's memory is like."""

    def audit(self) -> Iterable[str]:
        """Return a line for each inconsistency."""
        return ()


def dense_views(memory: Any, dtype: torch.dtype, layout: Layout) -> Tensors:
    """Return the keys and the values of each layer group as tensors over a buffer laid out by `layout`.

    The tensors keep the buffer alive. They are made outside inference mode, so that they can be written within it
    and without.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return dense_views(memory, dtype, layout)
    flat = torch.frombuffer(memory, dtype=dtype)
    keys = tuple([flat.as_strided(*key) for key, _ in layout.strided])
    values = tuple([flat.as_strided(*value) for _, value in layout.strided])
    return keys, values
