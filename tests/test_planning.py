"""Plans, compared with caches that are really opened and filled."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core import (
    BackendUnavailableError,
    CacheConfig,
    CacheFullError,
    CacheGeometry,
    ConfigError,
    KvCacheHandle,
    KvCacheManager,
    ShapeError,
    UnknownBackendError,
    open_cache,
)
from kvcache_core.config import PrefixCacheConfig
from kvcache_core.planning import plan, plan_config
from kvcache_core.plugin import Available, BackendDescriptor, Storage, Unavailable
from kvcache_core.registry import BackendRegistry
from kvcache_core.sizing import Sizing
from tests.caches import GEOMETRY, MIXED, NewCache, grow, raising
from tests.storages.int8 import Int8Storage
from tests.storages.paged import PagedStorage

SMOLLM = CacheGeometry.uniform(30, 3, 64, dtype="bfloat16", max_position_embeddings=8192, model="SmolLM2")
SMOLLM_TOKEN = 30 * 2 * 3 * 64 * 2


def descriptor(storage: type[Storage], **fields: Any) -> BackendDescriptor:
    values: dict[str, Any] = {
        "name": storage.__name__.removesuffix("Storage").lower(),
        "interface": (1, 0),
        "storage": f"{storage.__module__}:{storage.__name__}",
        "summary": "for tests",
        "placement": storage.placement,
        "devices": ("cpu",),
        "dtypes": ("float32", "float16"),
        "probe": lambda request: Available(device="cpu"),
        "capabilities": storage.capabilities,
    }
    return BackendDescriptor(**values | fields)


@pytest.fixture
def registry() -> BackendRegistry:
    """A registry of the test storages: `paged` stores K and V as they are, `int8` packs them."""
    made = BackendRegistry(finders=[])
    for storage in (PagedStorage, Int8Storage):
        made.register(descriptor(storage))
    return made


# -- the same numbers as an opened cache ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["paged", "int8"])
@pytest.mark.parametrize("geometry", [GEOMETRY, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize("budget", ["100KiB", 99_999, "7 blocks", "100 tokens", "0.01%"])
@pytest.mark.parametrize(
    "values", [{}, {"block_size": 4, "max_sequence_length": 10}, {"dtype": "float16"}], ids=["auto", "short", "half"]
)
def test_a_plan_that_asks_the_backend_is_what_an_opened_cache_reports(
    registry: BackendRegistry, backend: str, geometry: CacheGeometry, budget: Any, values: dict[str, Any]
) -> None:
    config = CacheConfig(backend=backend, geometry=geometry, budget=budget, **values)
    planned = plan_config(config, registry=registry)
    assert planned.capacity is not None
    with open_cache(config, registry=registry) as cache:
        stats = cache.stats()
        assert planned.capacity.total_blocks == stats.total_blocks
        assert planned.capacity.total_bytes == stats.total_bytes
        assert planned.bytes_per_block == cache.bytes_per_block
        assert planned.block_size == cache.block_size
        assert planned.capacity.longest_sequence == cache.max_sequence_length
        assert f"torch.{planned.dtype}" == str(cache.dtype)
        assert (planned.backend, planned.device) == (cache.backend, str(cache.device))


@pytest.mark.parametrize("geometry", [GEOMETRY, MIXED, SMOLLM.model_copy(update={"dtype": "float16"})])
@pytest.mark.parametrize("budget", [None, "1MiB", "7 blocks", "100 tokens"])
def test_a_plan_that_asks_no_backend_is_right_for_one_that_stores_k_and_v_as_they_are(
    registry: BackendRegistry, geometry: CacheGeometry, budget: str | None
) -> None:
    if budget is None:
        geometry = GEOMETRY  # 1000 blocks of a real model are too much for a test
    values: dict[str, Any] = {} if budget is None else {"budget": budget}
    planned = plan(geometry, budget)
    assert planned.capacity is not None
    with open_cache(CacheConfig(backend="paged", geometry=geometry, **values), registry=registry) as cache:
        stats = cache.stats()
        assert (planned.capacity.total_blocks, planned.capacity.total_bytes) == (stats.total_blocks, stats.total_bytes)
        assert (planned.bytes_per_block, planned.block_size) == (cache.bytes_per_block, cache.block_size)
        assert planned.capacity.longest_sequence == cache.max_sequence_length


def test_a_plan_for_the_cpu_backend_is_what_it_opens() -> None:
    pytest.importorskip("kvcache_cpu")
    config = CacheConfig(backend="cpu", geometry=MIXED, budget="1MiB", dtype="bfloat16")
    planned = plan_config(config)
    assert planned.capacity is not None
    with open_cache(config) as cache:
        stats = cache.stats()
        assert (planned.capacity.total_blocks, planned.capacity.total_bytes) == (stats.total_blocks, stats.total_bytes)
        assert planned.bytes_per_block == cache.bytes_per_block


# -- what fits, tried ----------------------------------------------------------------------------------------


def fill(cache: KvCacheManager, length: int, prefix: int) -> list[KvCacheHandle]:
    """Store sequences of one length, the first `prefix` tokens alike, until one no longer fits."""
    handles: list[KvCacheHandle] = []
    while True:
        first = 1000 * (len(handles) + 1)
        token_ids = [*range(prefix), *range(first, first + length - prefix)]
        try:
            handle = cache.allocate(token_ids=token_ids)
        except CacheFullError:
            return handles
        handles.append(handle)
        grow(handle, length - handle.num_tokens, token_ids=token_ids[handle.num_tokens :])


def paged_cache(new_cache: NewCache, num_blocks: int) -> KvCacheManager:
    settings = {"prefix": PrefixCacheConfig(enabled=True, namespace="test")}
    return new_cache(num_blocks=num_blocks, block_size=4, settings=settings)


@pytest.mark.parametrize(
    ("num_blocks", "length", "prefix"),
    [(16, 4, 0), (16, 9, 0), (16, 48, 0), (3, 13, 0), (16, 9, 8), (16, 10, 7), (16, 21, 17), (7, 20, 19), (5, 21, 20)],
)
def test_as_many_sequences_fit_as_planned(new_cache: NewCache, num_blocks: int, length: int, prefix: int) -> None:
    planned = plan(GEOMETRY, f"{num_blocks} blocks", block_size=4, lengths=length, shared_prefix=prefix)
    cache = paged_cache(new_cache, num_blocks)
    assert len(fill(cache, length, prefix)) == planned.lengths[0].concurrent
    assert cache.audit() == ()


@pytest.mark.parametrize(("sequences", "length", "prefix"), [(1, 1, 0), (3, 9, 0), (3, 9, 8), (4, 11, 6), (2, 40, 33)])
def test_the_needed_budget_holds_exactly_the_sequences_that_were_asked(
    new_cache: NewCache, registry: BackendRegistry, sequences: int, length: int, prefix: int
) -> None:
    planned = plan(GEOMETRY, block_size=4, lengths=length, sequences=sequences, shared_prefix=prefix)
    assert planned.capacity is None
    need = planned.lengths[0].need
    assert need is not None
    with open_cache(
        CacheConfig(backend="paged", geometry=GEOMETRY, block_size=4, budget=need.budget), registry=registry
    ) as opened:
        assert (opened.stats().total_blocks, opened.stats().total_bytes) == (need.blocks, need.bytes)
    cache = paged_cache(new_cache, need.blocks)
    assert len(fill(cache, length, prefix)) == sequences
    assert cache.stats().free_blocks == 0
    if need.blocks > 1:
        assert len(fill(paged_cache(new_cache, need.blocks - 1), length, prefix)) == sequences - 1


def test_a_stored_sequence_takes_and_wastes_what_was_planned(new_cache: NewCache) -> None:
    planned = plan(GEOMETRY, "16 blocks", block_size=4, lengths=[1, 4, 13]).lengths
    for each in planned:
        cache = new_cache(block_size=4)
        handle = cache.allocate()
        grow(handle, each.length)
        stats = handle.stats()
        assert (each.blocks, each.bytes) == (stats.blocks_allocated, stats.total_memory_bytes)
        assert each.waste.tokens == handle.block_table.free_tokens
        assert each.waste.bytes == each.waste.tokens * cache.bytes_per_block // 4
        assert each.waste.percent == pytest.approx(100 * (1 - stats.utilization))


sizes = st.sampled_from([1, 2, 8, 16, 256])


@given(size=sizes, length=st.integers(1, 5000), sequences=st.integers(1, 500), data=st.data())
def test_need_and_fit_are_inverse(size: int, length: int, sequences: int, data: st.DataObject) -> None:
    sizing = Sizing(size, 10, shared_prefix=data.draw(st.integers(0, length - 1)))
    blocks = sizing.blocks_for_all(sequences, length)
    assert sizing.concurrent(blocks, length) == sequences
    assert sizing.concurrent(blocks - 1, length) == sequences - 1


@given(size=sizes, lengths=st.lists(st.integers(1, 5000), min_size=1))
def test_waste_is_the_room_after_the_last_token_of_each_sequence(size: int, lengths: list[int]) -> None:
    waste = Sizing(size, 10).waste(lengths)
    assert waste.tokens == sum(-length % size for length in lengths)
    assert waste.bytes == 10 * waste.tokens
    assert waste.percent == pytest.approx(100 * waste.tokens / (waste.tokens + sum(lengths)))


# -- the parts of a plan -------------------------------------------------------------------------------------


def test_bytes_and_layers_are_those_of_the_geometry() -> None:
    planned = plan(SMOLLM)
    assert (planned.bytes_per_token, planned.bytes_per_block) == (SMOLLM_TOKEN, 16 * SMOLLM_TOKEN)
    assert (planned.model, planned.dtype, planned.backend, planned.device) == ("SmolLM2", "bfloat16", None, None)
    mixed = plan(MIXED)
    assert (mixed.num_layers, mixed.caching_layers, mixed.windowed_layers) == (5, 3, 1)
    assert (mixed.dtype, mixed.model) == ("float32", None)


def test_dtype_and_block_size_may_be_given() -> None:
    planned = plan(SMOLLM, dtype="int8", block_size=64)
    assert (planned.bytes_per_token, planned.bytes_per_block) == (SMOLLM_TOKEN // 2, 32 * SMOLLM_TOKEN)


def test_a_mapping_is_a_geometry_too() -> None:
    assert plan({"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}) == plan(GEOMETRY)


def test_without_lengths_the_longest_allowed_sequence_is_planned() -> None:
    assert [each.length for each in plan(SMOLLM).lengths] == [8192]
    assert [each.length for each in plan(SMOLLM, max_sequence_length=100).lengths] == [100]
    unlimited = plan(GEOMETRY)
    assert (unlimited.lengths, unlimited.max_sequence_length) == ((), None)
    assert {each.waste for each in unlimited.block_sizes} == {None}


def test_lengths_may_be_one_or_several_and_keep_their_order() -> None:
    assert [each.length for each in plan(SMOLLM, lengths=5).lengths] == [5]
    assert [each.length for each in plan(SMOLLM, lengths=iter([70, 5, 70])).lengths] == [70, 5, 70]


def test_a_sequence_longer_than_the_budget_fits_no_times() -> None:
    planned = plan(SMOLLM, "100 tokens", lengths=[112, 113])
    assert planned.capacity is not None
    assert planned.capacity.longest_sequence == 112
    assert [each.concurrent for each in planned.lengths] == [1, 0]


def test_the_longest_configured_sequence_may_exceed_the_models_own_maximum() -> None:
    planned = plan(SMOLLM, "100000 tokens", max_sequence_length=10_000)
    assert planned.capacity is not None
    assert (planned.max_sequence_length, planned.capacity.longest_sequence) == (10_000, 10_000)


def test_need_says_whether_a_given_budget_is_enough() -> None:
    fits = [plan(SMOLLM, budget, lengths=100, sequences=2).lengths[0].need for budget in ("14 blocks", "13 blocks")]
    assert [need.fits for need in fits if need] == [True, False]
    need = plan(SMOLLM, lengths=100, sequences=2).lengths[0].need
    assert need is not None
    assert (need.blocks, need.fits) == (14, None)


def test_a_configured_budget_is_planned_beside_the_need_and_the_default_one_is_not() -> None:
    config = CacheConfig(geometry=SMOLLM)
    assert plan_config(config, lengths=9, sequences=2).capacity is None
    assert plan_config(config.replace(budget="1000 blocks"), lengths=9, sequences=2).capacity is not None
    capacity = plan_config(config, lengths=9).capacity
    assert capacity is not None
    assert (capacity.budget, capacity.total_blocks) == ("1000 blocks", 1000)


# -- other block sizes ---------------------------------------------------------------------------------------


def test_other_block_sizes_are_compared_in_the_same_memory() -> None:
    planned = plan(SMOLLM, "1000 blocks", lengths=[100, 1000], sequences=3, shared_prefix=40)
    assert [each.block_size for each in planned.block_sizes] == [8, 16, 32, 64, 128, 256]
    for each in planned.block_sizes:
        alone = plan(
            SMOLLM,
            planned.capacity.total_bytes if planned.capacity else None,
            block_size=each.block_size,
            lengths=[100, 1000],
            sequences=3,
            shared_prefix=40,
        )
        assert alone.capacity is not None
        assert (each.bytes_per_block, each.total_blocks) == (alone.bytes_per_block, alone.capacity.total_blocks)
        assert each.concurrent == tuple(length.concurrent for length in alone.lengths)
        assert each.needed_bytes == tuple(length.need.bytes for length in alone.lengths if length.need)
        assert each.shared_tokens == 40 // each.block_size * each.block_size
        assert each.waste is not None
        assert each.waste.bytes == sum(length.waste.bytes for length in alone.lengths)
        assert each.most_wasted_bytes == (each.block_size - 1) * SMOLLM_TOKEN


def test_the_planned_block_size_is_among_the_compared() -> None:
    assert [each.block_size for each in plan(SMOLLM, block_size=512, compare=[1, 64]).block_sizes] == [1, 64, 512]
    assert plan(SMOLLM, block_size=2).block_sizes[0].block_size == 2
    assert [each.block_size for each in plan(SMOLLM, compare=32).block_sizes] == [16, 32]


def test_a_block_size_too_large_for_the_budget_holds_nothing() -> None:
    assert [each.concurrent for each in plan(SMOLLM, "16 tokens", lengths=16, compare=[32]).block_sizes] == [(1,), (0,)]


# -- a named backend -----------------------------------------------------------------------------------------


def test_a_backend_that_packs_is_asked_for_its_bytes(registry: BackendRegistry) -> None:
    planned = plan_config(CacheConfig(backend="int8", geometry=GEOMETRY), registry=registry)
    assert planned.bytes_per_token == Int8Storage.bytes_per_token(GEOMETRY, "float32", None)
    assert planned.bytes_per_token != GEOMETRY.bytes_per_token("float32")
    assert any("stores a token in 144 bytes; as float32 it would take 384" in note for note in planned.notes)


def test_a_share_of_the_memory_is_that_of_the_backends_device(registry: BackendRegistry) -> None:
    config = CacheConfig(backend="paged", geometry=SMOLLM, dtype="float16", budget="50%")
    planned = plan_config(config, registry=registry)
    assert planned.capacity is not None
    assert planned.capacity.total_blocks == (1 << 28) // (16 * SMOLLM_TOKEN)
    assert planned.capacity.budget == 0.5
    assert any("free now" in note for note in planned.notes)


def test_the_block_size_is_what_the_backends_probe_finds_best() -> None:
    registry = BackendRegistry(finders=[])
    registry.register(descriptor(PagedStorage, probe=lambda request: Available(device="cpu", block_size=128)))
    config = CacheConfig(backend="paged", geometry=GEOMETRY, budget="1024 tokens")
    planned = plan_config(config, registry=registry)
    assert planned.block_size == 128
    with open_cache(config, registry=registry) as cache:
        assert cache.block_size == 128


def test_only_block_sizes_that_the_backend_takes_are_compared() -> None:
    registry = BackendRegistry(finders=[])
    registry.register(descriptor(PagedStorage, block_sizes=(32, 64), default_block_size=64))
    config = CacheConfig(backend="paged", geometry=GEOMETRY)
    planned = plan_config(config, registry=registry)
    assert (planned.block_size, [each.block_size for each in planned.block_sizes]) == (64, [32, 64])
    with raising(ConfigError, "block_size 16", "takes 32, 64"):
        plan_config(config, compare=[16], registry=registry)


def test_a_named_backend_that_cannot_run_is_an_error_and_auto_asks_none() -> None:
    registry = BackendRegistry(finders=[])
    registry.register(descriptor(PagedStorage, probe=lambda request: Unavailable(code="no", reason="no device")))
    config = CacheConfig(backend="paged", geometry=GEOMETRY)
    with raising(BackendUnavailableError, "paged", reason="no device"):
        plan_config(config, registry=registry)
    with raising(UnknownBackendError, "nowhere"):
        plan_config(config.replace(backend="nowhere"), registry=registry)
    assert plan_config(config.replace(backend="auto"), registry=registry).backend is None


def test_a_value_that_does_not_go_with_the_named_backend_is_refused(registry: BackendRegistry) -> None:
    with raising(ConfigError, "dtype 'float64'", "'float32', 'float16'"):
        plan_config(CacheConfig(backend="paged", geometry=GEOMETRY, dtype="float64"), registry=registry)


# -- what is assumed is said ---------------------------------------------------------------------------------


def test_windows_are_said_not_to_shrink_anything() -> None:
    windowed = plan(CacheGeometry.uniform(4, 2, 8, window=128))
    assert windowed.windowed_layers == 4
    assert windowed.bytes_per_token == plan(CacheGeometry.uniform(4, 2, 8)).bytes_per_token
    (note,) = [note for note in windowed.notes if "window" in note]
    assert note.startswith("4 of 4 caching layers have a sliding window (128 tokens)")
    assert "all rows are kept" in note
    assert not [note for note in plan(GEOMETRY).notes if "window" in note]


def test_that_no_backend_was_asked_is_said() -> None:
    (note,) = plan(GEOMETRY).notes
    assert note == "No backend is named: assumed is one that stores K and V as they are, and blocks of 16 tokens."
    assert plan(GEOMETRY, block_size=32).notes == (note.replace(", and blocks of 16 tokens", ""),)


def test_how_much_of_a_shared_prefix_is_stored_once_is_said() -> None:
    assert "32 of the 40 tokens" in plan(SMOLLM, lengths=100, shared_prefix=40).notes[-1]


def test_a_prefix_that_no_other_prompt_may_reuse_is_not_counted_as_shared() -> None:
    depends_on_length = SMOLLM.model_copy(update={"prefix_reusable": False})
    planned = plan(depends_on_length, "1GiB", lengths=100, sequences=5, shared_prefix=40)
    assert planned.shared_prefix == 40
    assert planned.lengths == plan(SMOLLM, "1GiB", lengths=100, sequences=5).lengths
    assert {each.shared_tokens for each in planned.block_sizes} == {0}
    assert "nothing is counted as shared" in planned.notes[-1]


# -- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": "1KiB"}, ConfigError, ('"360 KiB" or more',)),
        ({"budget": 0}, ConfigError, ("budget", "from 1", "not 0")),
        ({"budget": "some"}, ConfigError, ("budget", "'some'")),
        ({"budget": "50%"}, ConfigError, ("budget 50%", "share of a device's memory", "name the backend")),
        ({"budget": 0.5}, ConfigError, ("budget 50%", "give bytes")),
        ({"budget": "100 tokens", "max_sequence_length": 113}, ConfigError, ("113", "budget 100 tokens", "112 tokens")),
        ({"block_size": 0}, ConfigError, ("block_size", "power of two", "not 0")),
        ({"block_size": 24}, ConfigError, ("block_size", "not 24")),
        ({"dtype": "int4"}, ConfigError, ("dtype", "'int4'")),
        ({"max_sequence_length": 0}, ConfigError, ("max_sequence_length", "not 0")),
        ({"compare": [16, 0]}, ConfigError, ("block_size", "not 0")),
        ({"compare": 1.5}, ConfigError, ("block_size", "not 1.5")),
        ({"lengths": 0}, ShapeError, ("length", "at least 1", "not 0")),
        ({"lengths": [5, -1]}, ShapeError, ("length", "not -1")),
        ({"lengths": [True]}, ShapeError, ("length", "not True")),
        ({"lengths": 1.5}, ShapeError, ("length", "not 1.5")),
        ({"lengths": "512"}, ShapeError, ("length", "not '512'")),
        ({"lengths": [1 << 63]}, ShapeError, ("length", "fits 64 bits")),
        ({"lengths": 8193}, ShapeError, ("length 8193", "8192", "max_sequence_length")),
        ({"lengths": 101, "max_sequence_length": 100}, ShapeError, ("length 101", "100")),
        ({"sequences": 0}, ShapeError, ("sequences", "at least 1", "not 0")),
        ({"sequences": 2.0}, ShapeError, ("sequences", "not 2.0")),
        ({"shared_prefix": -1}, ShapeError, ("shared_prefix", "not -1")),
        ({"shared_prefix": 100, "lengths": [200, 100]}, ShapeError, ("shared_prefix 100", "less than the length 100")),
        ({"sequences": 1 << 40}, ShapeError, ("sequences of 8192 tokens", "more than one cache can hold")),
        ({"sequences": 1 << 62, "lengths": 1}, ShapeError, ("more than one cache can hold",)),
    ],
)
def test_wrong_input_is_refused(arguments: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with raising(error, *words):
        plan(SMOLLM, **arguments)


def test_the_refusal_of_a_small_budget_says_what_would_fit() -> None:
    with pytest.raises(ConfigError, match="11 tokens would fit"):
        plan(SMOLLM, 11 * SMOLLM_TOKEN)
    assert plan(SMOLLM, 16 * SMOLLM_TOKEN).capacity is not None


def test_the_refusal_of_a_length_says_who_limits_it() -> None:
    with pytest.raises(ShapeError, match=r"the limit is geometry\.max_position_embeddings \(argument\)"):
        plan(SMOLLM, lengths=9000)
    config = CacheConfig.load(environ={"KVCACHE_MAX_SEQUENCE_LENGTH": "50"}, geometry=SMOLLM)
    with pytest.raises(ShapeError, match=r"max_sequence_length \(environment variable KVCACHE_MAX_SEQUENCE_LENGTH\)"):
        plan_config(config, lengths=51)


def test_sequences_of_an_unknown_length_cannot_be_planned() -> None:
    for arguments in ({"sequences": 3}, {"shared_prefix": 3}, {"sequences": 1, "lengths": []}):
        with raising(ShapeError, "length of the sequences is missing"):
            plan(GEOMETRY, **arguments)


def test_a_geometry_is_needed() -> None:
    with raising(ConfigError, "geometry is missing"):
        plan_config(CacheConfig())
    with raising(ConfigError, "geometry.head_dim is missing"):
        plan({"num_layers": 3, "num_kv_heads": 2})


# -- as a library --------------------------------------------------------------------------------------------


def test_a_plan_is_frozen_and_becomes_json() -> None:
    planned = plan(MIXED, "1MiB", lengths=[10, 20], sequences=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.block_size = 8  # type: ignore[misc]
    assert json.loads(json.dumps(planned.to_json()))["lengths"][1]["length"] == 20


def test_planning_does_not_import_torch() -> None:
    program = (
        "import sys; from kvcache_core import CacheGeometry; from kvcache_core.planning import plan; "
        "plan(CacheGeometry.uniform(2, 2, 8), '1GiB', lengths=[100], sequences=3, shared_prefix=20); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
