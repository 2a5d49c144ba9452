"""Several caches of one shape on several devices: where a sequence goes, and how it moves from one to another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from kvcache_core.config import CacheConfig
from kvcache_core.errors import CacheFullError, ConfigError, HandleError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.names import device_fits
from kvcache_core.opening import open_cache
from kvcache_core.request import AllocationRequest
from kvcache_core.stats import CacheManagerStats

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from kvcache_core.config import ConfigValues
    from kvcache_core.registry import BackendRegistry

__all__ = ["MultiDeviceManager", "open_caches"]


class MultiDeviceManager:
    """One cache on each of several devices, of one geometry, dtype and namespace.

    A sequence lives on one device at a time and is used through its handle, as ever: its steps are those of
    `handle.manager`. What a backend can do on its own device is the business of that manager too.

    Args:
        managers: Device, such as `"cuda:0"` -> its cache. They are closed with this one.

    Raises:
        ConfigError: There is none, or they hold different things.
    """

    def __init__(self, managers: Mapping[str, KvCacheManager]) -> None:
        if not managers:
            raise ConfigError("a manager of several devices needs one cache at least")
        self._managers = dict(managers)
        self._preference = tuple(self._managers)
        first, *others = self._managers.items()
        for device, manager in others:
            for what, own, wanted in _differences(manager, first[1]):
                if own != wanted:
                    raise ConfigError(f"the caches on {first[0]} and {device} must have the same {what}")

    # -- devices -----------------------------------------------------------------------------------------

    @property
    def supported_devices(self) -> tuple[str, ...]:
        """The devices, the most preferred one first."""
        return self._preference

    def set_device_preference(self, devices: Sequence[str]) -> None:
        """Say on which devices new sequences should go first; those that are not named follow in their old order.

        Raises:
            ConfigError: A device has no cache here, or is named twice.
        """
        named = [devices] if isinstance(devices, str) else list(devices)
        for device in named:
            self.manager(device)
        if len(set(named)) < len(named):
            raise ConfigError(f"each device can be preferred once, not {', '.join(named)}")
        self._preference = (*named, *(device for device in self._preference if device not in named))

    def manager(self, device: str) -> KvCacheManager:
        """The cache on a device.

        Raises:
            ConfigError: There is none.
        """
        manager = self._managers.get(str(device))
        if manager is None:
            raise ConfigError(
                f"there is no cache on {device}; the devices are {', '.join(self._managers)}", key="device"
            )
        return manager

    def get_cache_device(self, handle: KvCacheHandle) -> str:
        """The device that a sequence is on.

        Raises:
            HandleError: It is on none of these.
        """
        for device, manager in self._managers.items():
            if handle.manager is manager:
                return device
        raise HandleError(f"{handle!r} belongs to another cache", reason="foreign")

    def device_stats(self) -> Mapping[str, CacheManagerStats]:
        """The numbers of each device's cache."""
        return MappingProxyType({device: self._managers[device].stats() for device in self._preference})

    # -- sequences ---------------------------------------------------------------------------------------

    def allocate(self, request: AllocationRequest | None = None, **fields: Any) -> KvCacheHandle:
        """Open a sequence on the most preferred device that has room; `device` in the request narrows the choice.

        Raises:
            CacheFullError: None of them has room.
            ShapeError: The request does not fit the caches.
            HandleError: The request id belongs to a live sequence on one of the devices.
            ConfigError: The request asks for a device that has no cache here.
        """
        if request is None:
            request = AllocationRequest(**fields)
        elif fields:
            raise TypeError("give either an AllocationRequest or its fields, not both")
        asked = None if request.device is None else str(request.device)
        devices = [device for device in self._preference if asked is None or device_fits(asked, device)]
        if not devices:
            self.manager(asked or "")
        if request.request_id is not None and self.get_handle(request.request_id) is not None:
            raise HandleError(f"the request id {request.request_id!r} belongs to a live sequence", reason="in-use")
        refusals: dict[str, CacheFullError] = {}
        for device in devices:
            try:
                return self._managers[device].allocate(_anywhere(request))
            except CacheFullError as refusal:
                refusals[device] = refusal
        last = refusals[devices[0]]
        if len(refusals) == 1:
            raise last
        raise CacheFullError(
            f"no device has room for {request.initial_tokens} tokens",
            needed=last.needed,
            free=max(refusal.free for refusal in refusals.values()),
            evictable=max(refusal.evictable for refusal in refusals.values()),
            hint="; ".join(f"{device}: {refusal}" for device, refusal in refusals.items()).replace("\n", " "),
        )

    def get_handle(self, request_id: str) -> KvCacheHandle | None:
        """Return a live handle of the sequence with this request id, whatever its device, or None."""
        handles = (manager.get_handle(request_id) for manager in self._managers.values())
        return next((handle for handle in handles if handle is not None), None)

    def list_handles(self) -> list[KvCacheHandle]:
        """Return one live handle for each sequence, device by device."""
        return [handle for device in self._preference for handle in self._managers[device].list_handles()]

    def move_cache(self, handle: KvCacheHandle, device: str) -> KvCacheHandle:
        """Move a sequence to another device, whole blocks that are cached there already excepted.

        Its handles on the old device become invalid. The new sequence has the same request id, priority, key and
        tokens, and a `cache_id` of its own. A sequence that is there already stays as it is.

        Returns:
            A handle on the new device.

        Raises:
            CacheFullError: There is no room on the new device; nothing changes.
            HandleError: The handle is invalid or foreign, the sequence is swapped out, or it changed meanwhile.
            StepError: The sequence is part of an open step.
            ConfigError: There is no cache on that device.
        """
        target = self.manager(device)
        self.get_cache_device(handle)
        source, sequence = handle.manager, handle.sequence
        if source is target:
            handle.require_usable()
            return handle
        with source.step({handle: 0}) as step:  # while it is open, nobody else changes the sequence
            version = sequence.version
            moved = target.adopt(sequence)
            try:
                self._copy(step, moved)
            except BaseException:
                moved.free()
                raise
        try:
            source.store.free_unchanged(sequence, version + 1)  # the step's own commit
        except BaseException:
            moved.free()
            raise
        return moved

    @staticmethod
    def _copy(step: Any, moved: KvCacheHandle) -> None:
        """Store what `moved` lacks of the one sequence of a step."""
        target, sequence = moved.manager, step.handles[0].sequence
        found, known, stop = moved.num_tokens, len(sequence.token_ids), sequence.num_tokens
        for first, last, new in ((found, known, sequence.token_ids[found:]), (known, stop, stop - known)):
            if first == last:
                continue
            with target.step({moved: new}) as copy:
                for layer in target.geometry.caching_layers:
                    key, value = step.gather(layer)
                    copy.write(layer, key[first:last].to(target.device), value[first:last].to(target.device))

    def rebalance_devices(self) -> dict[KvCacheHandle, KvCacheHandle]:
        """Move sequences from the fullest devices to the emptiest, as long as that evens them out.

        Sequences that are part of an open step, or swapped out, stay where they are.

        Returns:
            For each sequence that was moved one of its old handles, now invalid, and the new one.
        """
        moves: dict[KvCacheHandle, KvCacheHandle] = {}
        settled: set[str] = set()
        while True:
            shares = {device: _used_share(manager) for device, manager in self._managers.items()}
            fullest = max((device for device in shares if device not in settled), key=shares.__getitem__, default=None)
            emptiest = min(shares, key=shares.__getitem__)
            if fullest is None or fullest == emptiest:
                return moves
            handle = self._best_to_move(fullest, emptiest)
            if handle is None:
                settled.add(fullest)
                continue
            try:
                moved = self.move_cache(handle, emptiest)
            except CacheFullError:
                settled.add(fullest)
                continue
            original = next((old for old, new in moves.items() if new is handle), handle)
            moves[original] = moved

    def _best_to_move(self, fullest: str, emptiest: str) -> KvCacheHandle | None:
        """The largest sequence that leaves the two devices closer to each other than before."""
        source, target = self._managers[fullest], self._managers[emptiest]
        source_total, target_total = (each.block_allocator.total_block_count for each in (source, target))
        gap = _used_share(source) - _used_share(target)
        best, most = None, 0
        for handle in source.list_handles():
            if not handle.is_valid or handle.sequence.transaction is not None:
                continue
            held = handle.stats()
            freed = held.blocks_allocated - held.shared_blocks
            left = gap - freed / source_total - held.blocks_allocated / target_total
            if most < freed and abs(left) < gap:
                best, most = handle, freed
        return best

    # -- the whole ---------------------------------------------------------------------------------------

    def audit(self) -> tuple[str, ...]:
        """Every inconsistency in the books of all devices, each with its device."""
        return tuple(f"{device}: {line}" for device, manager in self._managers.items() for line in manager.audit())

    def close(self) -> None:
        """Close the caches on all devices; closing twice is harmless."""
        with ExitStack() as stack:  # all of them, even if one raises
            for manager in self._managers.values():
                stack.callback(manager.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MultiDeviceManager on {', '.join(self._preference)}>"


def open_caches(
    config: CacheConfig | str | os.PathLike[str] | None = None,
    *,
    devices: Iterable[str],
    registry: BackendRegistry | None = None,
    **overrides: Unpack[ConfigValues],
) -> MultiDeviceManager:
    """Open a cache of the same configuration on each of several devices.

    ```python
    with open_caches("kvcache.toml", devices=["cuda:0", "cuda:1"], geometry=geometry) as caches:
        handle = caches.allocate(token_ids=prompt)
    ```

    Args:
        config: As for `open_cache`; the budget is that of each device.
        devices: The devices, the most preferred first.
        registry: As for `open_cache`.
        **overrides: Any key of the configuration but `device`.

    Raises:
        ConfigError: As for `open_cache`, or no device is named, or one twice.
        BackendError: As for `open_cache`.
    """
    named = list(devices)
    if len(set(named)) < len(named):
        raise ConfigError(f"each device can have one cache, not {', '.join(named)}", key="device")
    with ExitStack() as opened:
        managers = {}
        for device in named:
            overrides["device"] = device
            managers[device] = opened.enter_context(open_cache(config, registry=registry, **overrides))
        several = MultiDeviceManager(managers)
        opened.pop_all()
        return several


def _differences(one: KvCacheManager, other: KvCacheManager) -> Iterable[tuple[str, object, object]]:
    yield "geometry", one.geometry, other.geometry
    yield "dtype", one.dtype, other.dtype
    yield "block_size", one.block_size, other.block_size
    yield "prefix.namespace", one.store.prefixes.settings.namespace, other.store.prefixes.settings.namespace


def _used_share(manager: KvCacheManager) -> float:
    allocator = manager.block_allocator
    return allocator.used_block_count / allocator.total_block_count


def _anywhere(request: AllocationRequest) -> AllocationRequest:
    """The same request for any device: which one was meant has been found out."""
    return request if request.device is None else replace(request, device=None)
