"""Which cached prefixes go first when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

        The result may be lazy, and is read only as far as room is needed; prefixes may be forgotten meanwhile.
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
        return list(self._order)


class PriorityLruPolicy(LruPolicy):
    """The lowest priority goes first; among equals the least recently used."""

    name = "priority"

    def select_eviction_candidates(self, candidates: Mapping[str, EvictionCandidate]) -> Iterable[str]:
        """Lowest priority first, then oldest access."""
        return sorted(self._order, key=lambda cache_id: candidates[cache_id].priority)


#: Policies that a configuration can name.
EVICTION_POLICIES: Mapping[str, Callable[[], CacheEvictionPolicy]] = MappingProxyType(
    {policy.name: policy for policy in (LruPolicy, PriorityLruPolicy)}
)
