"""The record of one cached sequence, which every handle to it refers to."""

from __future__ import annotations

import itertools
import os
import secrets
import time
import weakref
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvcache_core.prefix import PrefixKey

if TYPE_CHECKING:
    from kvcache_core.handle import KvCacheHandle
    from kvcache_core.prefix_index import PrefixNode
    from kvcache_core.transaction import Transaction

__all__ = ["CachedSequence", "HandleState", "unique_id"]


class HandleState(Enum):
    """Where a sequence's memory is."""

    ACTIVE = "active"
    SWAPPED = "swapped"
    FREED = "freed"


_process = secrets.token_hex(4)
_numbers = itertools.count(1)


def _forget_process() -> None:
    global _process  # noqa: PLW0603 - a forked child must not repeat its parent's ids
    _process = secrets.token_hex(4)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_process)


def unique_id(prefix: str) -> str:
    """An id that no other sequence of this machine has, such as `"kv-1f8a03c2-17"`."""
    return f"{prefix}-{_process}-{next(_numbers)}"


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One sequence's books. Only the manager changes them, under its lock.

    Attributes:
        cache_id: Unique name of this sequence's cache; shared by clones, new for a fork.
        request_id: The caller's name for it.
        max_tokens: Tokens it may ever hold.
        generation: The cache's generation it belongs to.
        priority: Higher is more important.
        slot: What the storage returned for it.
        capacity: Tokens that its slot was opened for.
        blocks: Physical block ids in logical order.
        num_tokens: Committed tokens.
        token_ids: Ids of the leading tokens that were named; anonymous ones end it.
        prefix_key: What its blocks depend on besides the token ids, or None if they must not be found by others.
        tip: The last of its leading full blocks that can be found by others, or None if none can.
        deduplicated: The last of these that were already replaced by equal blocks that others hold, or None.
        is_kept: No handle is left, and its memory was given up for reuse.
        references: Live handles.
        state: Active, swapped or freed.
        swapped: What the storage returned when it was swapped out, or None.
        version: Changes whenever the contents or the table change.
        transaction: The open step it takes part in, or None.
        last_access: `time.time()` of the last use.
    """

    cache_id: str
    request_id: str
    max_tokens: int
    generation: int
    priority: int
    slot: Any
    blocks: list[int]
    capacity: int = 0
    num_tokens: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    prefix_key: PrefixKey | None = None
    tip: PrefixNode | None = None
    deduplicated: PrefixNode | None = None
    is_kept: bool = False
    references: int = 0
    state: HandleState = HandleState.ACTIVE
    swapped: Any = None
    version: int = 0
    transaction: Transaction | None = None
    last_access: float = field(default_factory=time.time)

    _handles: list[weakref.ref[KvCacheHandle]] = field(default_factory=list)

    def note_handle(self, handle: KvCacheHandle) -> None:
        """Remember a handle to this sequence, weakly; needs no lock."""
        handles = self._handles
        handles.append(weakref.ref(handle, handles.remove))

    def any_handle(self) -> KvCacheHandle | None:
        """Return a handle to this sequence that is usable, or would be if it were not swapped out; or None."""
        for known in tuple(self._handles):
            handle = known()
            if handle is not None and handle.state is not HandleState.FREED:
                return handle
        return None

    def touch(self) -> None:
        """Note a use."""
        self.last_access = time.time()
