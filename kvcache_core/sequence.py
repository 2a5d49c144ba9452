"""The record of one cached sequence, which every handle to it refers to; and requests for new ones."""

from __future__ import annotations

import itertools
import os
import secrets
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from kvcache_core.counts import check_count
from kvcache_core.errors import ConfigError, ShapeError
from kvcache_core.geometry import DTYPE_SIZES, CacheGeometry, check_dtype
from kvcache_core.prefix import KeyValue, PrefixKey
from kvcache_core.validation import show

if TYPE_CHECKING:
    from kvcache_core.handle import KvCacheHandle
    from kvcache_core.prefix_index import PrefixNode
    from kvcache_core.transaction import Transaction

__all__ = ["AllocationRequest", "CachedSequence", "HandleState", "token_array"]


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


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as a signed 64-bit array.

    Args:
        token_ids: Ints, or a one-dimensional integer tensor or array (anything with `tolist()`). An `array("q")`
            is copied as it is, without looking at each id.

    Raises:
        ShapeError: An id is not an int of at most 64 bits, or the tensor has more than one dimension.
    """
    kind = type(token_ids)
    if kind is array and cast("array[int]", token_ids).typecode == "q":
        return cast("array[int]", token_ids)[:]
    values = token_ids.tolist() if kind is not list and hasattr(token_ids, "tolist") else token_ids
    try:
        if isinstance(values, (bytes, bytearray)):  # which `array` would take for its own memory
            raise TypeError("bytes are no token ids")
        return array("q", values)
    except (TypeError, OverflowError) as error:
        raise ShapeError(f"token ids must be a flat sequence of 64-bit ints, not {show(token_ids)} ({error})") from None


@lru_cache(maxsize=64, typed=True)
def _plain_key(namespace: KeyValue) -> PrefixKey:
    """The key of most prompts; made once for each model."""
    return PrefixKey(namespace=namespace)


def check_request_id(request_id: object) -> None:
    """Raise ShapeError unless `request_id` is a name for a sequence, or None."""
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise ShapeError(f"request_id must be a string with at least one character, not {show(request_id)}")


def _dtype_name(dtype: object) -> str | None:
    try:
        return None if dtype is None else check_dtype(dtype)
    except ValueError as error:
        raise ShapeError(f"dtype {error}") from None


@dataclass(frozen=True, kw_only=True)
class AllocationRequest:
    """What a new sequence needs.

    Attributes:
        token_ids: The prompt, which is copied to an `array("q")`. Room for it is reserved, and its cached prefix, if
            any, is reused.
        num_tokens: Tokens to reserve room for when the prompt's ids are not given, or for more than the prompt.
        request_id: The caller's name for the sequence; made up when None.
        max_sequence_length: Tokens the sequence may ever hold; the cache's own maximum when None.
        priority: Higher is more important; eviction policies may use it.
        adapter: Name or digest of the adapter the prompt runs with; prompts reuse only what the same one stored.
        salt: A tenant's secret; prompts reuse only what the same salt stored. Not shown by `repr`.
        extra_keys: Whatever else the contents depend on, such as digests of attached media, by name.
        num_layers: If given, must equal the cache's.
        num_heads: Key/value heads; if given, must equal the cache's.
        head_dim: If given, must equal the cache's.
        device: If given, must be the cache's, as a string or `torch.device`.
        dtype: If given, must be the cache's, as torch's name or `torch.dtype`.
    """

    token_ids: Iterable[int] = ()
    num_tokens: int | None = None
    request_id: str | None = None
    max_sequence_length: int | None = None
    priority: int = 0
    adapter: KeyValue = None
    salt: KeyValue = field(default=None, repr=False)
    extra_keys: Mapping[str, KeyValue] = field(default_factory=dict)
    num_layers: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    device: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_array(self.token_ids))
        for name in ("num_tokens", "max_sequence_length", "num_layers", "num_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, least=0 if name == "num_tokens" else 1)
        if type(self.priority) is not int:
            raise ShapeError(f"priority must be an int, not {show(self.priority)}")
        check_request_id(self.request_id)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))

    def prefix_key(self, namespace: KeyValue) -> PrefixKey:
        """What cached blocks of this prompt depend on besides its tokens, in the cache of `namespace`."""
        if self.adapter is None and self.salt is None and not self.extra_keys:
            return _plain_key(namespace)
        return PrefixKey(namespace=namespace, adapter=self.adapter, salt=self.salt, extra=self.extra_keys)

    @property
    def initial_tokens(self) -> int:
        """Tokens to reserve room for."""
        return max(len(self.prompt), self.num_tokens or 0)

    @property
    def prompt(self) -> array[int]:
        """The ids as they are kept."""
        return cast("array[int]", self.token_ids)

    def estimated_memory_bytes(self, geometry: CacheGeometry | None = None, dtype: str | None = None) -> int:
        """Bytes of K and V that `initial_tokens` take, not rounded to blocks.

        Args:
            geometry: The cache's geometry; needed where the request does not give its own numbers.
            dtype: Stored dtype by torch's name; the request's, else the geometry's, else float32.

        Raises:
            ConfigError: Neither a geometry nor all of num_layers, num_heads and head_dim is given.
            ShapeError: A cache cannot be stored in `dtype`.
        """
        name = _dtype_name(dtype) or self.dtype
        if geometry is not None:
            return self.initial_tokens * geometry.bytes_per_token(name)
        if self.num_layers is None or self.num_heads is None or self.head_dim is None:
            raise ConfigError(
                "estimated_memory_bytes needs a geometry, or num_layers, num_heads and head_dim in the request"
            )
        per_token = self.num_layers * self.num_heads * self.head_dim * 2 * DTYPE_SIZES[name or "float32"]
        return self.initial_tokens * per_token


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
        deduplicated: How many of these were already replaced by equal blocks that others hold.
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
    deduplicated: int = 0
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
