"""How much a cache holds and how much it needs, worked out without opening one.

Nothing here imports torch unless the configuration names a backend: then that backend's storage is asked for its
block size, its bytes a token and its device's memory, as opening a cache would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvcache_core import fit
from kvcache_core.budget import Budget
from kvcache_core.config import CacheConfig
from kvcache_core.counts import check_count
from kvcache_core.errors import ConfigError, ShapeError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.names import AUTO, canonical
from kvcache_core.registry import Backend, BackendRegistry, get_registry
from kvcache_core.selection import choose
from kvcache_core.sizing import BlockSizePlan, Capacity, LengthPlan, Need, Sizing, Waste
from kvcache_core.storage import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_core.config import ConfigValues

__all__ = ["BlockSizePlan", "CachePlan", "Capacity", "LengthPlan", "Need", "Waste", "plan", "plan_config"]

#: What most backends use when the configuration leaves the block size open.
_USUAL_BLOCK_SIZE = 16
_USUAL_DTYPE = "float32"
_COMPARED_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """What a cache of one geometry holds and needs.

    Attributes:
        model: The model's name, or None.
        backend: The backend that was asked, or None when none was named.
        device: The device that it would use, or None.
        dtype: Stored dtype by torch's name.
        block_size: Tokens per block.
        bytes_per_token: Bytes of K and V that one token takes in all layers together.
        bytes_per_block: The same for one block.
        num_layers: Layers of the model.
        caching_layers: Of these, layers that cache K and V of their own.
        windowed_layers: Of these, layers with a sliding window. They keep all rows, as the others.
        max_sequence_length: Longest sequence that the configuration or else the model allows; None if unlimited.
        shared_prefix: Tokens with which all planned sequences begin alike.
        sequences: The number of sequences whose need was asked, or None.
        capacity: What the budget holds; None when only a need was asked.
        lengths: One entry for each planned length, in the order given.
        block_sizes: One entry for each compared block size, ascending; the planned one is among them.
        notes: What these numbers assume, one sentence each.
    """

    model: str | None
    backend: str | None
    device: str | None
    dtype: str
    block_size: int
    bytes_per_token: int
    bytes_per_block: int
    num_layers: int
    caching_layers: int
    windowed_layers: int
    max_sequence_length: int | None
    shared_prefix: int
    sequences: int | None
    capacity: Capacity | None
    lengths: tuple[LengthPlan, ...]
    block_sizes: tuple[BlockSizePlan, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The plan in plain types, its attributes as keys."""
        return asdict(self)


def plan(
    geometry: CacheGeometry | Mapping[str, Any],
    budget: Budget | str | int | float | None = None,
    *,
    dtype: str = AUTO,
    block_size: int | Literal["auto"] = "auto",
    max_sequence_length: int | None = None,
    lengths: int | Iterable[int] | None = None,
    sequences: int | None = None,
    shared_prefix: int = 0,
    compare: int | Iterable[int] | None = None,
) -> CachePlan:
    """Plan a cache that stores K and V as they are, whatever backend will hold it.

    ```python
    plan(CacheGeometry.uniform(30, 3, 64, dtype="bfloat16"), "4GiB", lengths=[512, 4096]).lengths[0].concurrent
    ```

    Args:
        geometry: The shape of what is cached.
        budget: In any form but a share of a device's memory; the default of a configuration when None, unless
            `sequences` asks for the budget.
        dtype: Stored dtype; `"auto"` for the geometry's, or float32 where it names none.
        block_size: Tokens per block; `"auto"` for 16.
        max_sequence_length: As in a configuration.
        lengths: As in `plan_config`, like all that follow.
        sequences: The same.
        shared_prefix: The same.
        compare: The same.

    Raises:
        ConfigError: A value is wrong, or the budget does not hold a single block.
        ShapeError: A length, number of sequences or prefix is wrong.
    """
    values: ConfigValues = {"geometry": geometry, "dtype": dtype, "block_size": block_size}
    if budget is not None:
        values["budget"] = budget
    if max_sequence_length is not None:
        values["max_sequence_length"] = max_sequence_length
    return plan_config(
        CacheConfig(**values), lengths=lengths, sequences=sequences, shared_prefix=shared_prefix, compare=compare
    )


def plan_config(
    config: CacheConfig,
    *,
    lengths: int | Iterable[int] | None = None,
    sequences: int | None = None,
    shared_prefix: int = 0,
    compare: int | Iterable[int] | None = None,
    registry: BackendRegistry | None = None,
) -> CachePlan:
    """Plan the cache that a configuration describes.

    A configuration whose backend is `"auto"` asks no backend. One that names a backend asks it, which imports its
    storage (and so torch); it must be able to run here.

    Args:
        config: The configuration, with a geometry. Its budget is planned unless it is the default one and
            `sequences` asks for the budget instead.
        lengths: Lengths of the sequences in tokens; the longest that configuration or model allows when None.
        sequences: Plan the budget for so many sequences of each length.
        shared_prefix: Tokens with which all sequences begin alike, stored once as far as they fill whole blocks.
        compare: Block sizes to compare with the planned one; some usual ones that the backend takes when None.
        registry: Where to look for a named backend; the registry of this process when None.

    Raises:
        ConfigError: The geometry is missing, the budget does not hold a single block or is a share of the memory of
            a device that no backend was named for, a block size is none, or a value does not go with the backend.
        ShapeError: A length, number of sequences or prefix is wrong, or a sequence longer than is allowed.
        BackendError: The named backend cannot be found, loaded or used.
    """
    geometry = config.geometry
    if geometry is None:
        raise ConfigError(
            "geometry is missing: give a model's config, or num_layers, num_kv_heads and head_dim", key="geometry"
        )
    limit = config.length_limit
    if lengths is None:
        lengths = () if limit is None else limit
    demand = _Demand(lengths=_each(lengths), sequences=sequences, shared_prefix=shared_prefix)
    demand.check(config)
    terms = _asked(config, geometry, registry) if canonical(config.backend) != AUTO else _assumed(config, geometry)
    reused = demand.shared_prefix if geometry.prefix_reusable else 0
    sizing = Sizing(terms.block_size, terms.bytes_per_token, reused)
    only_need = demand.sequences is not None and config.origin("budget") == "default"
    capacity = None if only_need else _capacity(config, terms, sizing)
    return CachePlan(
        model=geometry.model,
        backend=terms.backend.name if terms.backend else None,
        device=terms.device,
        dtype=terms.dtype,
        block_size=terms.block_size,
        bytes_per_token=terms.bytes_per_token,
        bytes_per_block=sizing.bytes_per_block,
        num_layers=geometry.num_layers,
        caching_layers=len(geometry.caching_layers),
        windowed_layers=sum(len(group.layers) for group in geometry.groups if group.window),
        max_sequence_length=limit,
        shared_prefix=demand.shared_prefix,
        sequences=demand.sequences,
        capacity=capacity,
        lengths=tuple(sizing.plan_length(length, demand.sequences, capacity) for length in demand.lengths),
        block_sizes=tuple(
            replace(sizing, block_size=size).plan_comparison(demand.lengths, demand.sequences, capacity)
            for size in _compared_sizes(config, terms, compare)
        ),
        notes=tuple(_notes(config, geometry, terms, sizing, demand)),
    )


# -- what is asked and assumed ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """What a cache would be opened with, as far as a plan depends on it."""

    backend: Backend | None
    device: str | None
    dtype: str
    block_size: int
    bytes_per_token: int
    device_memory: Callable[[], DeviceMemory]


def _assumed(config: CacheConfig, geometry: CacheGeometry) -> _Terms:
    """The terms of a backend that stores K and V as they are."""

    def unknown_memory() -> DeviceMemory:
        raise ConfigError(
            f"budget {config.budget} is a share of a device's memory, and no backend is named that could say how much "
            'that is; give bytes, such as "8GiB", or name the backend',
            key="budget",
            origin=config.origin("budget"),
        )

    dtype = config.dtype if config.dtype != AUTO else geometry.dtype or _USUAL_DTYPE
    return _Terms(
        backend=None,
        device=None,
        dtype=dtype,
        block_size=_block_size(config, None),
        bytes_per_token=geometry.bytes_per_token(dtype),
        device_memory=unknown_memory,
    )


def _asked(config: CacheConfig, geometry: CacheGeometry, registry: BackendRegistry | None) -> _Terms:
    """The terms of the backend that the configuration names."""
    registry = registry or get_registry()
    selection = choose(config, registry)
    storage = registry.load(selection.backend)
    return _Terms(
        backend=selection.backend,
        device=selection.device,
        dtype=selection.dtype,
        block_size=selection.block_size,
        bytes_per_token=storage.bytes_per_token(geometry, selection.dtype, selection.options),
        device_memory=lambda: storage.device_memory(selection.device, selection.options),
    )


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """The sequences that are planned for."""

    lengths: tuple[int, ...]
    sequences: int | None
    shared_prefix: int

    def check(self, config: CacheConfig) -> None:
        """Raise ShapeError unless caches of this configuration could hold such sequences, given the memory."""
        for length in self.lengths:
            check_count("length", length, least=1)
        if self.sequences is not None:
            check_count("sequences", self.sequences, least=1)
        check_count("shared_prefix", self.shared_prefix)
        if not self.lengths and (self.sequences is not None or self.shared_prefix):
            raise ShapeError("the length of the sequences is missing, and neither configuration nor model limits it")
        limit = config.length_limit
        longest, shortest = max(self.lengths, default=0), min(self.lengths, default=None)
        if limit is not None and longest > limit:
            key = "max_sequence_length" if config.max_sequence_length else "geometry.max_position_embeddings"
            raise ShapeError(
                f"length {longest} is more than the {limit} tokens that a sequence may hold; plan a shorter one or "
                "raise max_sequence_length",
                details=[f"the limit is {key} ({config.origin(key)})"],
            )
        if shortest is not None and self.shared_prefix >= shortest:
            raise ShapeError(
                f"shared_prefix {self.shared_prefix} must be less than the length {shortest}: the last token of a "
                "prompt is always computed"
            )


def _compared_sizes(config: CacheConfig, terms: _Terms, compare: int | Iterable[int] | None) -> list[int]:
    if compare is None:
        backend_takes = terms.backend.descriptor.block_sizes if terms.backend else ()
        return sorted({*(backend_takes or _COMPARED_BLOCK_SIZES), terms.block_size})
    wishes = [config.replace(block_size=size) for size in _each(compare)]
    return sorted({terms.block_size, *(_block_size(wish, terms.backend) for wish in wishes)})


def _block_size(config: CacheConfig, backend: Backend | None) -> int:
    if backend is not None:
        return fit.block_size_for(config, backend)
    return _USUAL_BLOCK_SIZE if isinstance(config.block_size, str) else config.block_size


def _each(numbers: int | Iterable[int]) -> tuple[int, ...]:
    """One number or several as a tuple; what is neither is left for the check of a single one to refuse."""
    several = isinstance(numbers, Iterable) and not isinstance(numbers, str)
    return tuple(numbers) if several else (numbers,)  # type: ignore[arg-type, return-value]


def _capacity(config: CacheConfig, terms: _Terms, sizing: Sizing) -> Capacity:
    total_blocks = config.budget.resolve(
        bytes_per_block=sizing.bytes_per_block,
        block_size=sizing.block_size,
        device_memory=terms.device_memory,
        origin=config.origin("budget"),
    )
    total_tokens = total_blocks * sizing.block_size
    return Capacity(
        budget=config.budget.to_plain(),
        total_blocks=total_blocks,
        total_bytes=total_blocks * sizing.bytes_per_block,
        total_tokens=total_tokens,
        longest_sequence=config.longest_sequence(total_tokens),
    )


# -- what the numbers assume -----------------------------------------------------------------------------


def _notes(
    config: CacheConfig, geometry: CacheGeometry, terms: _Terms, sizing: Sizing, demand: _Demand
) -> Iterable[str]:
    windows = sorted({group.window for group in geometry.groups if group.window})
    if windows:
        layers = sum(len(group.layers) for group in geometry.groups if group.window)
        yield (
            f"{layers} of {len(geometry.caching_layers)} caching layers have a sliding window "
            f"({', '.join(map(str, windows))} tokens). In this version a window only masks: all rows are kept, so "
            "these layers take as much memory as the others."
        )
    if terms.backend is None:
        size = "" if config.block_size != AUTO else f", and blocks of {_USUAL_BLOCK_SIZE} tokens"
        yield f"No backend is named: assumed is one that stores K and V as they are{size}."
    plain = geometry.bytes_per_token(terms.dtype)
    if terms.backend is not None and terms.bytes_per_token != plain:
        yield (
            f"Backend {terms.backend.name!r} stores a token in {terms.bytes_per_token} bytes; as {terms.dtype} it "
            f"would take {plain}."
        )
    if config.budget.kind == "fraction":
        yield "The budget is a share of the memory that is free now; a cache takes what is free when it is opened."
    if demand.shared_prefix and not geometry.prefix_reusable:
        yield (
            "The keys of this model depend on the length of the whole sequence, so no other prompt may reuse a prefix: "
            "nothing is counted as shared."
        )
    if sizing.shared_prefix:
        yield (
            f"{sizing.shared_tokens} of the {sizing.shared_prefix} tokens of the shared prefix are "
            "stored once, those in full blocks. A backend that copies a prefix instead of sharing it stores them "
            "once for each sequence."
        )
