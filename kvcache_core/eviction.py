"""Which cached prefixes go first when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Protocol

__all__ = ["EVICTION_POLICIES", "CacheEvictionPolicy", "EvictionCandidate", "LruPolicy", "PriorityLruPolicy"]


class EvictionCandidate(NamedTuple):
    """A cached prefix that no handle refers to.

    Attributes:
        cache_id: The id of the cache it came from.
        num_blocks: Blocks it holds.
        priority: Priority of the request it came from.
    """

    cache_id: str
    num_blocks: int
    priority: int


class CacheEvictionPolicy(Protocol):
    """Orders cached prefixes for eviction.

    The policy names whole prefixes; core cuts them from the tail, block by block, and stops as soon as there
    is room, so that a shared head outlives the tails that grew from it.
    """

    @property
    def name(self) -> str:
        """What the configuration calls it."""
        ...

    def record_access(self, cache_id: str) -> None:
        """A prefix was stored, or a prompt has found it."""
        ...

    def forget(self, cache_id: str) -> None:
        """A prefix is gone."""
        ...

    def select_eviction_candidates(self, candidates: Mapping[str, EvictionCandidate]) -> Iterable[str]:
        """Return cache ids of `candidates` in the order in which they should go; one that is left out stays.

        The result may be lazy: core takes the first prefix that it has not tried yet, and asks again while room is
        needed. A prefix that frees nothing, because live sequences hold all of it, counts as used and is passed over.
        """
        ...


class LruPolicy:
    """The least recently used prefix goes first."""

    name = "lru"

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def record_access(self, cache_id: str) -> None:
        """Move the prefix to the young end."""
        self._order.pop(cache_id, None)
        self._order[cache_id] = None

    def forget(self, cache_id: str) -> None:
        """Drop the prefix from the order."""
        self._order.pop(cache_id, None)

    def select_eviction_candidates(self, candidates: Mapping[str, EvictionCandidate]) -> Iterable[str]:
        """Oldest access first."""
        return self._order


class PriorityLruPolicy:
    """The lowest priority goes first; among equals the least recently used."""

    name = "priority"

    def __init__(self) -> None:
        self._recent: dict[str, None] = {}  # used since they were last asked for, oldest first
        self._levels: dict[int, dict[str, None]] = {}  # all others by priority, oldest first
        self._level_of: dict[str, int] = {}

    def record_access(self, cache_id: str) -> None:
        """Move the prefix to the young end of its priority."""
        self.forget(cache_id)
        self._recent[cache_id] = None

    def forget(self, cache_id: str) -> None:
        """Drop the prefix from the order."""
        level = self._level_of.pop(cache_id, None)
        if level is None:
            self._recent.pop(cache_id, None)
        else:
            del self._levels[level][cache_id]

    def select_eviction_candidates(self, candidates: Mapping[str, EvictionCandidate]) -> Iterable[str]:
        """Lowest priority first, then oldest access."""
        for cache_id in self._recent:
            level = self._level_of[cache_id] = candidates[cache_id].priority
            self._levels.setdefault(level, {})[cache_id] = None
        self._recent.clear()
        return chain.from_iterable(self._levels[level] for level in sorted(self._levels))


#: Policies that a configuration can name.
EVICTION_POLICIES: Mapping[str, Callable[[], CacheEvictionPolicy]] = MappingProxyType(
    {policy.name: policy for policy in (LruPolicy, PriorityLruPolicy)}
)
