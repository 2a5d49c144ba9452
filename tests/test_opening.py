"""`open_cache` hands every key of the configuration to whom it concerns."""

import pickle

import pytest
import torch

from kvcache_core import CacheConfig, CacheGeometry, ConfigError, MemoryPressure, ShapeError, open_cache
from kvcache_core.plugin import Available, BackendDescriptor
from kvcache_core.registry import BackendRegistry
from tests.storages.paged import PagedStorage

GEOMETRY = CacheGeometry.uniform(2, 2, 8, max_position_embeddings=100)


@pytest.fixture
def registry():
    registry = BackendRegistry(finders=[])
    registry.register(
        BackendDescriptor(
            name="paged",
            interface=(1, 0),
            storage="tests.storages.paged:PagedStorage",
            summary="a pool of blocks",
            placement="paged",
            devices=("cpu",),
            dtypes=("float32", "bfloat16"),
            probe=lambda request: Available(device="cpu"),
        )
    )
    return registry


@pytest.fixture
def opened(registry):
    caches = []

    def open_with(**values):
        cache = open_cache(CacheConfig(**{"geometry": GEOMETRY, **values}), registry=registry)
        caches.append(cache)
        return cache

    yield open_with
    for cache in caches:
        cache.close()


def fill(cache, token_ids):
    handle = cache.allocate(token_ids=token_ids)
    new = token_ids[handle.num_tokens :]
    handle.append([(torch.randn(len(new), 2, 8), torch.randn(len(new), 2, 8)) for _ in range(2)], new)
    return handle


def test_a_cache_needs_a_geometry(registry):
    with pytest.raises(ConfigError, match="geometry is missing") as caught:
        open_cache(CacheConfig(), registry=registry)
    assert caught.value.key == "geometry"
    assert pickle.loads(pickle.dumps(caught.value)).key == "geometry"


def test_the_storage_is_built_from_the_configuration(opened):
    spec = opened(
        block_size=8, budget="20 blocks", dtype="bfloat16", max_sequence_length=50, initial_blocks=5, scrub_freed=True
    ).storage.spec
    assert (spec.block_size, spec.num_blocks, spec.dtype, spec.device) == (8, 20, "bfloat16", "cpu")
    assert (spec.max_sequence_length, spec.initial_blocks, spec.scrub) == (50, 5, True)


def test_a_budget_in_bytes_is_what_the_blocks_take(opened):
    cache = opened(budget="64KiB")
    assert cache.stats().total_bytes <= 2**16 < cache.stats().total_bytes + cache.bytes_per_block


def test_a_fraction_is_taken_from_the_memory_the_storage_reports(opened):
    cache = opened(budget=0.001)
    free = PagedStorage.device_memory("cpu", None).free
    assert cache.stats().total_blocks == int(free * 0.001) // cache.bytes_per_block


def test_the_longest_sequence_is_the_models_unless_the_budget_holds_less(opened):
    assert opened().max_sequence_length == 100
    assert opened(budget="48 tokens").max_sequence_length == 48
    with pytest.raises(ConfigError, match="max_sequence_length 500 is more than the 48 tokens"):
        opened(budget="48 tokens", max_sequence_length=500)


def test_casting_happens_only_when_it_is_allowed(opened):
    strict, lenient = opened(dtype="bfloat16"), opened(dtype="bfloat16", allow_dtype_cast=True)
    layers = [(torch.randn(2, 2, 8), torch.randn(2, 2, 8)) for _ in range(2)]
    with strict.allocate() as handle, pytest.raises(ShapeError, match="allow_dtype_cast"):
        handle.append(layers)
    with fill(lenient, [1, 2]) as handle:
        assert handle.key_cache(0).dtype is torch.bfloat16


def test_pressure_thresholds_reach_the_manager(opened):
    cache = opened(budget="10 blocks", pressure={"medium": 0.1, "high": 0.2, "critical": 0.3})
    handle = cache.allocate(num_tokens=32)
    assert cache.stats().pressure is MemoryPressure.HIGH
    handle.free()


@pytest.mark.parametrize(
    ("prefix", "reused"),
    [
        ({}, 32),
        ({"enabled": False}, 0),
        ({"min_prefix_length": 48}, 0),
        ({"enable_cross_request_sharing": False}, 0),
    ],
)
def test_the_prefix_table_decides_what_a_second_prompt_reuses(opened, prefix, reused):
    cache = opened(prefix=prefix)
    prompt = list(range(40))
    with fill(cache, prompt):
        pass
    with cache.allocate(token_ids=prompt) as again:
        assert again.num_tokens == reused


def test_a_model_whose_keys_depend_on_the_length_reuses_nothing(opened):
    cache = opened(geometry=CacheGeometry.model_validate({**GEOMETRY.model_dump(), "prefix_reusable": False}))
    with fill(cache, list(range(40))):
        pass
    assert cache.explain(token_ids=list(range(40))).reason == "disabled"


def test_the_eviction_policy_is_the_one_that_is_named(opened):
    assert opened().store.prefixes.policy.name == "lru"
    assert opened(prefix={"eviction_policy": "priority"}).store.prefixes.policy.name == "priority"


def test_keys_given_beside_a_configuration_stand_above_it(registry):
    with open_cache(CacheConfig(geometry=GEOMETRY, block_size=8), registry=registry, block_size=32) as cache:
        assert cache.block_size == 32


def test_a_file_is_read_with_its_environment(registry, tmp_path, monkeypatch):
    path = tmp_path / "kvcache.toml"
    path.write_text('block_size = 8\nbudget = "30 blocks"\n', encoding="utf-8")
    monkeypatch.setenv("KVCACHE_BUDGET", "40 blocks")
    with open_cache(path, registry=registry, geometry=GEOMETRY) as cache:
        assert (cache.block_size, cache.stats().total_blocks) == (8, 40)
