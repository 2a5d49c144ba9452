"""The manager: one cache, its handles, its steps and its numbers."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcache_core.accounting import audit_cache, cache_statistics
from kvcache_core.allocator import BlockAllocator
from kvcache_core.block_table import blocks_for
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.counts import check_count
from kvcache_core.errors import ConfigError, HandleError, ShapeError, StepError, UnsupportedError
from kvcache_core.eviction import EVICTION_POLICIES, CacheEvictionPolicy
from kvcache_core.geometry import CacheGeometry, LayerSpec
from kvcache_core.handle import KvCacheHandle, sequences_in
from kvcache_core.new_tokens import NewTokens, pack
from kvcache_core.observing import EventQueue, Observer, Subscription, kinds_among
from kvcache_core.prefix import PrefixExplanation, PrefixKey
from kvcache_core.pressure import PressureCallback, PressureMonitor
from kvcache_core.request import AllocationRequest, RequestRules
from kvcache_core.sequence import CachedSequence, HandleState, unique_id
from kvcache_core.sequence_store import SequenceStore
from kvcache_core.sharing import share_prefix
from kvcache_core.stats import CacheGcStats, CacheManagerStats
from kvcache_core.step import Step, make_batch, require_named_once
from kvcache_core.swapping import swap_in, swap_out

if TYPE_CHECKING:
    import torch

    from kvcache_core.events import CacheEvent
    from kvcache_core.observers import NamedObserver
    from kvcache_core.storage import Storage

__all__ = ["KvCacheManager"]


class KvCacheManager:
    """One cache: a storage, the books over it, and the handles to what is in it.

    Usually made by `open_cache(config)`. All methods may be called from several threads; one sequence takes
    part in at most one open step at a time. As a context manager it closes itself.

    Args:
        storage: The memory, with its `spec`.
        backend: The backend's name, for messages.
        allow_dtype_cast: Whether writes convert floating tensors of another dtype to the stored one.
        pressure_thresholds: Shares of the budget from which pressure is medium, high and critical.
        prefix: How prefixes are kept and found; by default not at all.
        eviction_policy: Which cached prefixes go first; the one that `prefix` names when None.

    Attributes:
        backend: The backend's name.
        manager_id: Unique name of this cache, which its events carry.
        storage: The memory.
        allow_dtype_cast: Whether writes convert floating tensors of another dtype.
        store: The sequences and their books, for core.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        backend: str = "custom",
        allow_dtype_cast: bool = False,
        pressure_thresholds: tuple[float, float, float] = (0.6, 0.8, 0.95),
        prefix: PrefixCacheConfig | None = None,
        eviction_policy: CacheEvictionPolicy | None = None,
    ) -> None:
        self.backend = backend
        self.manager_id = unique_id("manager")
        self.storage = storage
        self.allow_dtype_cast = allow_dtype_cast
        prefix = prefix or PrefixCacheConfig(enabled=False)
        if prefix.enabled and prefix.demote and not storage.tier_blocks:
            raise ConfigError(
                f"prefix.demote needs a host tier, and backend {backend!r} has none here; give it one by its options, "
                "or leave prefix.demote off",
                key="prefix.demote",
            )
        policy = eviction_policy or EVICTION_POLICIES[prefix.eviction_policy]()
        self.store = SequenceStore(
            storage, PressureMonitor(pressure_thresholds), prefix, policy, EventQueue(self.manager_id)
        )
        self._pressure_callback: Subscription | None = None
        self._reported = (0, 0)
        self._own_specs = _own_specs(storage.spec.geometry)
        self._requests = RequestRules(storage)

    # -- what it is --------------------------------------------------------------------------------------

    @property
    def geometry(self) -> CacheGeometry:
        """The shape of what is cached."""
        return self.storage.spec.geometry

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.storage.spec.block_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens that one sequence may hold unless its request asks for less."""
        return self.storage.spec.max_sequence_length

    @property
    def device(self) -> torch.device:
        """Where the cache resides."""
        return self.storage.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that reads return and writes take."""
        return self.storage.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V in one block."""
        return self.storage.bytes_per_block

    @property
    def block_allocator(self) -> BlockAllocator:
        """The block ids, for callers who extend a block table by hand."""
        return self.store.books.allocator

    @property
    def capabilities(self) -> frozenset[str]:
        """What the backend can do beyond the mandatory contract."""
        return self.storage.capabilities

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self.store.closed

    def require_capability(self, capability: str) -> None:
        """Raise UnsupportedError unless the backend declares `capability`."""
        if capability not in self.storage.capabilities:
            raise UnsupportedError(
                f"backend {self.backend!r} does not declare the capability {capability!r}",
                capability=capability,
                backend=self.backend,
                details=[f"it declares: {', '.join(sorted(self.storage.capabilities)) or 'none'}"],
            )

    def own_spec(self, layer: int) -> LayerSpec:
        """The shape of a layer that caches K and V of its own.

        Raises:
            ShapeError: There is no such layer, it caches nothing, or it reads another's.
        """
        spec = self._own_specs.get(layer) if type(layer) is int else None
        if spec is not None:
            return spec
        producer = self.geometry.producer(layer)
        if producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so it cannot be written")
        raise ShapeError(f"layer {layer} shares the K and V of layer {producer}; write that one")

    # -- sequences ---------------------------------------------------------------------------------------

    def allocate(self, request: AllocationRequest | None = None, **fields: Any) -> KvCacheHandle:
        """Open a new sequence and reserve room for its initial tokens.

        With prefix reuse on, the sequence starts with the longest cached prefix of `token_ids`, in whole blocks and
        never the last token: feed the model `token_ids[handle.num_tokens:]`.

        Args:
            request: What it needs.
            fields: The fields of an `AllocationRequest`, as a shorthand for making one.

        Raises:
            CacheFullError: There is no room, or the prompt is longer than a sequence may be; nothing changes.
            ShapeError: The request does not fit the cache's geometry, device or dtype.
            HandleError: The request id belongs to a live sequence.
        """
        request = self._requests.checked(request, fields)
        return self.handle_to(
            self.store.open(
                request.request_id,
                request.prompt,
                request.initial_tokens,
                self._requests.max_tokens(request),
                request.priority,
                self._prefix_key(request),
            )
        )

    def can_allocate(self, request: AllocationRequest | None = None, **fields: Any) -> bool:
        """Whether `allocate` with the same arguments would find room now.

        Cached prefixes that could be evicted count as room; what the prompt might reuse does not reduce the need.

        Raises:
            ShapeError: The request does not fit the cache's geometry, device or dtype.
        """
        request = self._requests.checked(request, fields)
        initial = request.initial_tokens
        with self.store.locked():
            enough = blocks_for(initial, self.block_size) <= self.store.books.available_blocks
            return enough and initial <= self._requests.max_tokens(request)

    def extend(self, handle: KvCacheHandle | str, num_tokens: int) -> None:
        """Reserve room so that `num_tokens` further tokens can be stored without asking for more.

        Args:
            handle: The handle, or its request id.
            num_tokens: Tokens beyond those stored.

        Raises:
            CacheFullError: There is no room; nothing changes.
            ShapeError: `num_tokens` is negative or not an int.
            StepError: The handle is part of an open step.
            HandleError: The handle is invalid or foreign, or no live sequence has this id.
        """
        check_count("num_tokens", num_tokens)
        if isinstance(handle, str):
            with self.store.locked():
                sequence = self.store.find(handle)
        else:
            sequence = self._own(handle)
        self.store.extend(sequence, num_tokens)

    def deallocate(self, request_id: str) -> None:
        """Free a sequence by its request id; every handle to it becomes invalid.

        Raises:
            HandleError: No live sequence has this id.
            StepError: The sequence is part of an open step.
        """
        self.store.free(request_id)

    def get_handle(self, request_id: str) -> KvCacheHandle | None:
        """Return a live handle of the sequence with this request id, or None; not a new reference."""
        with self.store.locked():
            sequence = self.store.live.get(request_id)
        return None if sequence is None else sequence.any_handle()

    def list_handles(self) -> list[KvCacheHandle]:
        """Return one live handle for each sequence, in order of allocation; not new references."""
        with self.store.locked():
            sequences = list(self.store.live.values())
        handles = (sequence.any_handle() for sequence in sequences)
        return [handle for handle in handles if handle is not None]

    def handle_to(self, sequence: CachedSequence) -> KvCacheHandle:
        """Return a handle for a reference that has been counted already; for core."""
        handle = self.storage.handle_type(self, sequence)
        sequence.note_handle(handle)
        self.store.catch_up()
        return handle

    def adopt(self, other: CachedSequence) -> KvCacheHandle:
        """Open a sequence with the name, key and room of one that another cache holds; for core.

        Raises:
            CacheFullError: There is no room for it; nothing changes.
            HandleError: Its request id belongs to a live sequence here.
        """
        most = min(other.max_tokens, self.max_sequence_length)
        opened = self.store.open(
            other.request_id, other.token_ids[:], other.num_tokens, most, other.priority, other.prefix_key
        )
        return self.handle_to(opened)

    # -- steps -------------------------------------------------------------------------------------------

    def begin(self, new_tokens: Mapping[KvCacheHandle, NewTokens]) -> Step:
        """Begin a step: reserve every new token's slot, for all handles or for none.

        Args:
            new_tokens: For each handle the ids of its new tokens, or their number when the caller will not name
                them. A handle may add none. The packed tensors of the step follow the mapping's order.

        Raises:
            CacheFullError: There is no room for all of them; nothing changes.
            StepError: A sequence is named twice, or is part of an open step.
            HandleError: A handle is invalid or belongs to another cache.
            ShapeError: Token ids or a count that are no such thing.
        """
        handles = tuple(new_tokens)
        sequences = sequences_in(self, handles) or [self._own(handle) for handle in handles]
        tokens = pack(tuple(new_tokens.values()))
        try:
            transaction = self.store.reserve(sequences, tokens)
        except StepError:
            require_named_once(handles)
            raise
        try:
            batch = make_batch(transaction, self.storage)
            batch.plan = self.storage.plan(batch)
        except BaseException:
            self.store.finish(transaction, keep=False)
            raise
        return Step(self, handles, transaction, batch)

    def step(self, new_tokens: Mapping[KvCacheHandle, NewTokens]) -> Step:
        """Begin a step for a `with` statement, which commits on a normal exit and aborts on an exception.

        Takes and raises what `begin` does.
        """
        return self.begin(new_tokens)

    # -- prefixes ----------------------------------------------------------------------------------------

    def explain(
        self, request: AllocationRequest | None = None, *, across_salts: bool = False, **fields: Any
    ) -> PrefixExplanation:
        """Say how many tokens `allocate` with the same request would reuse now, and why not more.

        Nothing changes: nothing is pinned, and recency and hit rate stay as they are. Only what has outlived its time
        is dropped first, as `allocate` would.

        Args:
            request: The request.
            across_salts: Whether to tell that the same tokens are cached under another salt, adapter or namespace.
                That reveals what other tenants have asked; leave it off where tenants can see the answer.
            fields: The fields of an `AllocationRequest`, as a shorthand for making one.
        """
        request = self._requests.checked(request, fields)
        with self.store.locked():
            self.store.expire_prefixes()
            return self.store.prefixes.explain(
                self._prefix_key(request),
                request.prompt,
                self._requests.max_tokens(request),
                across_salts=across_salts,
            )

    def share_prefix(self, source: KvCacheHandle, target: KvCacheHandle, num_tokens: int) -> None:
        """Make an empty sequence start with the first `num_tokens` tokens of another, sharing their memory.

        The caller vouches that both are of the same model and may see each other's contents. Unlike a prefix hit
        this is exact to the token, and works for anonymous tokens.

        Raises:
            ShapeError: `target` holds tokens already, or `num_tokens` is not between 0 and what `source` holds and
                `target` may hold.
            StepError: One of them is part of an open step.
            CacheFullError: The backend has to copy something and there is no room; nothing changes.
        """
        share_prefix(self.store, self._own(source), self._own(target), num_tokens)

    def enable_prefix_caching(self, enabled: bool = True) -> None:
        """Switch prefix reuse on or off; switching it off drops what is kept."""
        with self.store.locked():
            self.store.prefixes.enable(enabled)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, for instance after the model's weights have changed.

        Live sequences go on, but what they hold now, and what follows it, is never found by others.

        Returns:
            How many blocks could be found before and no longer can.
        """
        with self.store.locked():
            return self.store.prefixes.clear()

    # -- swapping ----------------------------------------------------------------------------------------

    def swap_out(self, handle: KvCacheHandle) -> None:
        """Move a sequence to the backend's host tier and free its blocks; until `swap_in`, its handles are unusable.

        They can still be freed. What others share with it stays where it is.

        Raises:
            UnsupportedError: The backend does not declare `swap`, or has no host tier.
            CacheFullError: The tier is full; nothing changes.
            StepError: The handle is part of an open step.
            HandleError: The handle is invalid or foreign.
        """
        self.require_capability("swap")
        swap_out(self.store, self._own(handle))

    def swap_in(self, handle: KvCacheHandle) -> None:
        """Bring a swapped sequence back, into blocks of its own; one that is not swapped out stays as it is.

        Raises:
            UnsupportedError: The backend does not declare `swap`.
            CacheFullError: There is no room for it; it stays swapped out.
            HandleError: The handle was freed, or is otherwise invalid or foreign.
        """
        self.require_capability("swap")
        if handle.state is not HandleState.SWAPPED or handle.manager is not self:
            self._own(handle)
            handle.require_usable()
            return
        swap_in(self.store, handle.sequence)

    # -- the whole ---------------------------------------------------------------------------------------

    def stats(self) -> CacheManagerStats:
        """The cache in numbers, at this moment."""
        return cache_statistics(self.store)

    def gc(self) -> CacheGcStats:
        """Give back what unreachable handles and outdated prefixes still hold, and report it.

        Handles that are dropped without `free()` are given back as soon as Python finalizes them; those caught in
        reference cycles wait for Python's collector, which this runs. The report covers everything given back in
        either way since the last call.
        """
        gc.collect()
        with self.store.locked():
            self.store.expire_prefixes()
            now = (self.store.reclaimed_sequences, self.store.reclaimed_blocks)
            before, self._reported = self._reported, now
        return CacheGcStats(freed_caches=now[0] - before[0], freed_bytes=(now[1] - before[1]) * self.bytes_per_block)

    def subscribe(self, observer: Observer, *kinds: type[CacheEvent]) -> Subscription:
        """Have `observer(event)` called for everything that happens in the cache from now on.

        It is called outside all locks, in the order in which things happened, by the operation that caused the event
        or by another thread's; what the finalizer of a dropped handle causes is told by the next operation. It may
        use the cache. An observer that raises is reported once, as a warning, and disturbs nobody.

        Args:
            observer: Called with each `kvcache_core.events.CacheEvent`, `Attached` first.
            kinds: The classes of events that it wants, base classes included; all when none is given. An event that
                nobody wants costs nothing.

        Returns:
            What ends it: `cancel()`, or a `with` block.

        Raises:
            TypeError: `observer` cannot be called, or a kind is no class of events.
            HandleError: The cache is closed.
        """
        wanted = kinds_among(observer, kinds)
        with self.store.locked():
            return self._add_observer(observer, wanted, f"an observer of the cache ({observer!r})")

    def attach(self, observer: NamedObserver) -> None:
        """Have an observer that a plugin provides hear of everything; for `open_cache`."""
        with self.store.locked():
            for hook in observer.hooks:
                self._add_observer(hook, kinds_among(hook, ()), f"the observer {observer.label}")

    def set_pressure_callback(self, callback: PressureCallback | None) -> None:
        """Have `callback(level)` called whenever the memory pressure changes level; None removes it.

        Otherwise as an observer that `subscribe` is told to call for `PressureChanged`.
        """
        from kvcache_core.events import PressureChanged  # noqa: PLC0415 - loaded with the first observer

        with self.store.locked():
            if self._pressure_callback is not None:
                self._pressure_callback.cancel()
            self._pressure_callback = callback and self._add_observer(
                lambda event: callback(event.level), frozenset({PressureChanged}), "the memory-pressure callback"
            )

    def _add_observer(self, observer: Observer, kinds: frozenset[type[CacheEvent]], label: str) -> Subscription:
        store = self.store
        return store.events.add(
            observer,
            kinds,
            label=label,
            backend=self.backend,
            device=str(self.storage.spec.device),
            dtype=str(self.storage.spec.dtype),
            block_size=self.block_size,
            total_blocks=store.books.allocator.total_block_count,
            bytes_per_block=self.bytes_per_block,
            used_blocks=store.books.used_blocks,
            num_sequences=len(store.live),
        )

    def audit(self) -> tuple[str, ...]:
        """Check the books and return a line for each inconsistency; none when all is well.

        Every block must be in exactly one state, every reference count must equal the number of tables that name
        the block, and every table must have room for its tokens. The storage adds its own findings.
        """
        return audit_cache(self.store)

    def reset(self) -> None:
        """Drop every sequence; all handles become stale. Open steps are undone.

        No other thread may be inside `write`, `attend` or a read of this cache: it would touch memory that has been
        given back.
        """
        self.store.drop_all()

    def close(self) -> None:
        """Drop every sequence and give all memory back. Closing twice is harmless.

        Tensors that were handed out stay readable as long as they are referenced.
        """
        self.store.close()

    def __enter__(self) -> KvCacheManager:
        self.store.require_usable()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.store.live)} sequences"
        total = self.block_allocator.total_block_count
        return f"<KvCacheManager {self.backend!r}, {total} blocks of {self.block_size} tokens: {state}>"

    # -- checks ------------------------------------------------------------------------------------------

    def _own(self, handle: KvCacheHandle) -> CachedSequence:
        """Return the sequence of a handle of this cache that was not freed; whether it is usable, the store checks."""
        if not isinstance(handle, KvCacheHandle):
            raise HandleError(f"{handle!r} is not a cache handle", reason="foreign")
        sequence = handle.sequence_in(self)
        if sequence is not None:
            return sequence
        if handle.manager is self:
            handle.require_usable()
        raise HandleError(f"{handle!r} belongs to another cache", reason="foreign")

    def _prefix_key(self, request: AllocationRequest) -> PrefixKey | None:
        """What blocks of this prompt can be found by, or None if by nobody."""
        settings = self.store.prefixes.settings
        if settings.enable_cross_request_sharing:
            return request.prefix_key(settings.namespace)
        if request.request_id is None:  # the id that is made up for it will never be asked for again
            return None
        return replace(request.prefix_key(settings.namespace), request=request.request_id)


def _own_specs(geometry: CacheGeometry) -> dict[int, LayerSpec]:
    return {layer: group.spec for group in geometry.groups for layer in group.layers}
