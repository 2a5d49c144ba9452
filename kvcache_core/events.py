"""What happens in a cache, as objects: one frozen class for each kind of event.

`KvCacheManager.subscribe` hands them to a function of yours; a plugin receives them through the hook `kvcache_event`.
They name sequences and count tokens and blocks. Token ids, salts and tensors never appear in them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Literal

from kvcache_core.prefix import MissReason
from kvcache_core.stats import MemoryPressure

__all__ = [
    "Aborted",
    "Allocated",
    "Attached",
    "CacheEvent",
    "Closed",
    "Committed",
    "EVENT_TYPES",
    "EventsLost",
    "Evicted",
    "EvictionReason",
    "Forked",
    "FreeReason",
    "Freed",
    "PrefixHit",
    "PrefixMiss",
    "PrefixShared",
    "PressureChanged",
    "Refused",
    "Reset",
    "SequenceEvent",
    "StepPart",
    "SwappedIn",
    "SwappedOut",
    "Truncated",
]

EvictionReason = Literal["room", "limit", "expired", "cleared"]
FreeReason = Literal["freed", "dropped", "reset", "closed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEvent:
    """Something that happened in a cache.

    Attributes:
        name: The kind, as it stands in JSON.
        number: Counts the events of one cache, so that a gap shows that some were not asked for, or lost.
        time: `time.time()` when it happened; it may be delivered later.
        manager_id: The cache it happened in; `KvCacheManager.manager_id`.
    """

    name: ClassVar[str] = ""

    number: int = 0
    time: float = 0.0
    manager_id: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The event as JSON knows it: `{"event": name, ...}` with all fields, nested ones too."""
        return {"event": self.name, **_plain(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, (CacheEvent, StepPart)):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """What a step did to one sequence.

    Attributes:
        request_id: The caller's name for the sequence.
        cache_id: Unique name of the sequence.
        new_tokens: Tokens that the step added.
        num_tokens: Tokens that the sequence holds now.
    """

    request_id: str
    cache_id: str
    new_tokens: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceEvent(CacheEvent):
    """Something that happened to one sequence.

    Attributes:
        request_id: The caller's name for the sequence, or one that was made up.
        cache_id: Unique name of the sequence; a fork has another.
    """

    request_id: str
    cache_id: str


# -- the cache -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached(CacheEvent):
    """An observer hears of this cache from now on; the first event that it gets.

    Attributes:
        backend: The backend's name.
        device: Where K and V are, by torch's name.
        dtype: What they are stored as, by torch's name.
        block_size: Tokens per block.
        total_blocks: Blocks of the budget.
        bytes_per_block: Bytes of K and V in one block.
        used_blocks: Blocks that sequences name already.
        num_sequences: Sequences that are there already.
    """

    name: ClassVar[str] = "attached"

    backend: str
    device: str
    dtype: str
    block_size: int
    total_blocks: int
    bytes_per_block: int
    used_blocks: int
    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureChanged(CacheEvent):
    """The share of the budget in use has crossed a threshold.

    Attributes:
        level: The level now.
        previous: The level before.
        used_blocks: Blocks that sequences name.
        total_blocks: Blocks of the budget.
    """

    name: ClassVar[str] = "pressure_changed"

    level: MemoryPressure
    previous: MemoryPressure
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(CacheEvent):
    """Something was refused with `CacheFullError` for want of blocks; nothing has changed.

    Attributes:
        purpose: What the blocks were for, as a phrase.
        needed: Blocks that were asked for.
        free: Blocks that are free.
        evictable: Blocks that cached prefixes hold and eviction could free.
    """

    name: ClassVar[str] = "refused"

    purpose: str
    needed: int
    free: int
    evictable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset(CacheEvent):
    """Everything was dropped; each sequence and each kept prefix has had an event of its own before.

    Attributes:
        num_sequences: Live sequences that this ended.
    """

    name: ClassVar[str] = "reset"

    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed(CacheEvent):
    """The cache was closed, after everything was dropped as by a reset; the last event.

    Attributes:
        num_sequences: Live sequences that this ended.
    """

    name: ClassVar[str] = "closed"

    num_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsLost(CacheEvent):
    """Observers were so slow that events had to be thrown away rather than fill the memory.

    Attributes:
        count: How many, all of them right before this one.
    """

    name: ClassVar[str] = "events_lost"

    count: int


# -- a sequence begins -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHit(SequenceEvent):
    """A prompt begins like something that is cached; its `allocated` follows if there is room for the rest.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        num_tokens: Of these, tokens that need not be computed again.
        demoted_tokens: Of these, tokens that are copied back from the host tier.
        reason: Why it is not more; `"hit"` when nothing more can be. As `PrefixExplanation.reason`.
        message: The same as a sentence.
    """

    name: ClassVar[str] = "prefix_hit"

    prompt_tokens: int
    num_tokens: int
    demoted_tokens: int
    reason: MissReason
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMiss(SequenceEvent):
    """Nothing of a prompt could be reused.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reason: Why; as `PrefixExplanation.reason`.
        message: The same as a sentence.
    """

    name: ClassVar[str] = "prefix_miss"

    prompt_tokens: int
    reason: MissReason
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocated(SequenceEvent):
    """A sequence was opened.

    Attributes:
        prompt_tokens: Tokens of the prompt that was given; 0 when only room was asked for.
        num_tokens: Tokens it starts with: those of a prefix hit.
        num_blocks: Blocks it holds, shared ones included.
    """

    name: ClassVar[str] = "allocated"

    prompt_tokens: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forked(SequenceEvent):
    """A sequence was opened as a copy of another.

    Attributes:
        parent_request_id: The caller's name for the other.
        parent_cache_id: Unique name of the other.
        num_tokens: Tokens it starts with.
        num_blocks: Blocks it holds.
        shared_blocks: Of these, blocks that both name; the rest are copies.
    """

    name: ClassVar[str] = "forked"

    parent_request_id: str
    parent_cache_id: str
    num_tokens: int
    num_blocks: int
    shared_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixShared(SequenceEvent):
    """An empty sequence took over the beginning of another, by `share_prefix`.

    Attributes:
        source_request_id: The caller's name for the other.
        source_cache_id: Unique name of the other.
        num_tokens: Tokens it holds now.
    """

    name: ClassVar[str] = "prefix_shared"

    source_request_id: str
    source_cache_id: str
    num_tokens: int


# -- a sequence changes ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed(CacheEvent):
    """A step was committed.

    Attributes:
        parts: What it did to each of its sequences, in the order of the step.
    """

    name: ClassVar[str] = "committed"

    parts: tuple[StepPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Aborted(CacheEvent):
    """A step was undone: aborted, failed, dropped, or open when the cache was reset or closed.

    Attributes:
        parts: Its sequences as they were before and are now; `new_tokens` is 0 for each.
    """

    name: ClassVar[str] = "aborted"

    parts: tuple[StepPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncated(SequenceEvent):
    """A sequence lost its last tokens.

    Attributes:
        num_tokens: Tokens it holds now.
        dropped_tokens: Tokens that were dropped.
    """

    name: ClassVar[str] = "truncated"

    num_tokens: int
    dropped_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedOut(SequenceEvent):
    """A sequence was moved to the host tier.

    Attributes:
        num_tokens: Tokens it holds.
        num_blocks: Blocks it held and no longer names.
    """

    name: ClassVar[str] = "swapped_out"

    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedIn(SequenceEvent):
    """A sequence was brought back from the host tier.

    Attributes:
        num_tokens: Tokens it holds.
        num_blocks: Blocks it holds now.
    """

    name: ClassVar[str] = "swapped_in"

    num_tokens: int
    num_blocks: int


# -- a sequence ends -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Freed(SequenceEvent):
    """A sequence ended; no handle can use it any more.

    Attributes:
        num_tokens: Tokens it held.
        num_blocks: Blocks it held, shared ones included.
        kept_tokens: Tokens of it that are kept for reuse under its `cache_id` until `evicted`. 0 also where another
            kept prefix holds the same tokens already.
        reason: `"freed"`, `"dropped"` (its handle was, without `free`), `"reset"` or `"closed"`.
    """

    name: ClassVar[str] = "freed"

    num_tokens: int
    num_blocks: int
    kept_tokens: int
    reason: FreeReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Evicted(SequenceEvent):
    """A finished sequence that was kept for reuse lost its last tokens, or all.

    Attributes:
        num_blocks: Blocks that this freed.
        kept_tokens: Tokens of it that are still kept.
        reason: `"room"` (blocks were needed), `"limit"` (more than `max_prefixes`), `"expired"`, or `"cleared"`
            (a reset, a close, or prefix reuse was switched off).
    """

    name: ClassVar[str] = "evicted"

    num_blocks: int
    kept_tokens: int
    reason: EvictionReason


#: Every kind of event.
EVENT_TYPES: tuple[type[CacheEvent], ...] = (
    Attached,
    PrefixHit,
    PrefixMiss,
    Allocated,
    Forked,
    PrefixShared,
    Committed,
    Aborted,
    Truncated,
    SwappedOut,
    SwappedIn,
    Freed,
    Evicted,
    PressureChanged,
    Refused,
    Reset,
    Closed,
    EventsLost,
)
