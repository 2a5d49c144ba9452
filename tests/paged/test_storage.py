"""Writes through slots, memory that grows as it is touched, pools beyond 32-bit offsets, and scrubbing."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheManager, ShapeError
from tests.caches import MIXED, assert_holds, filled, grow, make_spec, rows
from tests.paged.hostpool import HostPool, LazyHostPool, open_pool


def snapshot(storage: Any) -> list[torch.Tensor]:
    return [memory.nan_to_num(nan=-7.0) for memory in storage.pool.memory]


# -- writes ------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(cache: KvCacheManager) -> HostPool:
    assert isinstance(cache.storage, HostPool)
    return cache.storage


def test_vllm_43810_padding_slots_write_nowhere(pool: HostPool) -> None:
    before = snapshot(pool)
    key, value = torch.ones(3, 2, 8), torch.ones(3, 2, 8)
    pool.write_slots(1, torch.tensor([-1, 9, -1]), key, value)
    pool.pool.key_slots(1)[[9, pool.pool.trash_slot]] = float("nan")
    pool.pool.value_slots(1)[[9, pool.pool.trash_slot]] = float("nan")
    for now, then in zip(snapshot(pool), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("slots", [[4, 5], [4, 5, 6, 7]])
def test_vllm_13922_as_many_slots_as_rows(pool: HostPool, slots: list[int]) -> None:
    before = snapshot(pool)
    with pytest.raises(ShapeError, match="slots need a key of"):
        pool.write_slots(0, torch.tensor(slots), torch.ones(3, 2, 8), torch.ones(3, 2, 8))
    assert all(map(torch.equal, snapshot(pool), before))


@pytest.mark.parametrize("slot", [-2, 0, 3, 68, 71, 10**12])
def test_pytorch_189968_slots_outside_the_pool_are_refused_or_thrown_away(pool: HostPool, slot: int) -> None:
    """16 blocks of 4: slots 4 to 67; 0 to 3 are the null block and 68 to 71 the trash block."""
    before = snapshot(pool)
    with torch.no_grad():
        if 0 <= slot < 4:
            pool.write_slots(0, torch.tensor([slot]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
            pool.pool.key(0)[-1] = pool.pool.value(0)[-1] = float("nan")
        else:
            with pytest.raises(ShapeError, match="is none of this pool's"):
                pool.write_slots(0, torch.tensor([slot]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert all(map(torch.equal, snapshot(pool), before))


@pytest.mark.parametrize(
    ("slots", "key", "value"),
    [
        (torch.tensor([4], dtype=torch.int32), torch.ones(1, 2, 8), torch.ones(1, 2, 8)),
        (torch.tensor([[4]]), torch.ones(1, 2, 8), torch.ones(1, 2, 8)),
        (torch.tensor([4]), torch.ones(1, 1, 8), torch.ones(1, 2, 8)),
        (torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 4)),
        (torch.tensor([4]), torch.ones(1, 2, 8, dtype=torch.float64), torch.ones(1, 2, 8)),
    ],
)
def test_slots_and_rows_of_another_shape_or_dtype_are_refused(
    pool: HostPool, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    before = snapshot(pool)
    with pytest.raises(ShapeError):
        pool.write_slots(0, slots, key, value)
    assert all(map(torch.equal, snapshot(pool), before))


def test_slots_of_a_layer_that_stores_nothing_of_its_own_are_refused() -> None:
    geometry = CacheGeometry(num_layers=3, groups=({"layers": (0,), "num_kv_heads": 2, "head_dim": 8},), shared={1: 0})
    storage = open_pool(geometry=geometry).storage
    for layer in (1, 2):
        with pytest.raises(ShapeError, match=f"layer {layer} caches nothing of its own"):
            storage.write_slots(layer, torch.tensor([4]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))


def layouts(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same rows in memory that is not contiguous."""
    padded = torch.full((2 * len(rows) + 3, *rows.shape[1:]), 9.0)
    padded[3::2] = rows
    return {
        "heads first": rows.transpose(0, 1).contiguous().transpose(0, 1),
        "dims first": rows.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "every other row, at an offset": padded[3::2],
    }


@pytest.mark.parametrize("layout", ["heads first", "dims first", "every other row, at an offset"])
def test_pytorch_175191_rows_in_any_memory_are_stored_by_value(cache: KvCacheManager, layout: str) -> None:
    handle = cache.allocate()
    handle.append([tuple(layouts(part)[layout] for part in rows(cache, layer, 0, 6)) for layer in range(3)])
    assert_holds(handle, a=6)


def test_expanded_rows_are_stored_by_value(cache: KvCacheManager) -> None:
    handle = cache.allocate()
    one = torch.arange(8.0).expand(5, 2, 8)
    handle.append([(one, one)] * 3)
    assert torch.equal(handle.key_cache(2), one)


def test_rows_come_back_bit_for_bit(cache: KvCacheManager) -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-45, float("inf"), float("-inf"), 0.0, 3.0, -1.0])
    odd = odd.expand(5, 2, 8).contiguous()
    odd.view(torch.int32)[0, 0, 0] = 0x7FC12345  # a NaN with a payload
    handle = cache.allocate()
    handle.append([(odd, odd)] * 3)
    for layer in range(3):
        for got in handle.kv_cache(layer):
            assert torch.equal(got.view(torch.int32), odd.view(torch.int32))


def test_writing_in_inference_mode_and_reading_outside_and_the_reverse() -> None:
    with torch.inference_mode():
        cache = open_pool()
        handle = filled(cache, 5)
    grow(handle, 4)
    with torch.inference_mode():
        grow(handle, 3)
        assert_holds(handle, a=12)
    assert_holds(handle, a=12)


def test_a_write_of_one_batch_touches_its_own_slots_only(cache: KvCacheManager, pool: HostPool) -> None:
    first, second = filled(cache, 5), filled(cache, 6, "b")
    before = snapshot(pool)
    slots = []
    with cache.step({second: 3, first: 1}) as step:
        for layer in range(3):
            key, value = (torch.cat(pair) for pair in zip(*_two(cache, layer), strict=True))
            step.write(layer, key, value)
        slots = step.slot_mapping.tolist()
    for layer in range(3):
        pool.pool.key_slots(layer)[slots] = float("nan")
        pool.pool.value_slots(layer)[slots] = float("nan")
    first_change = [index for index, (now, then) in enumerate(zip(snapshot(pool), before, strict=True)) if now is then]
    assert first_change == []
    assert all(map(torch.equal, snapshot(pool), before))


def _two(cache: KvCacheManager, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [rows(cache, layer, 6, 9, "b"), rows(cache, layer, 5, 6)]


# -- memory ------------------------------------------------------------------------------------------------


def test_lazy_memory_counts_the_blocks_that_were_reserved() -> None:
    cache = open_pool(LazyHostPool)
    assert cache.storage.nbytes == 0
    handle = filled(cache, 9)
    assert cache.storage.nbytes == 3 * cache.bytes_per_block
    handle.free()
    filled(cache, 9)
    assert cache.storage.nbytes == 3 * cache.bytes_per_block


def test_initial_blocks_are_there_at_once_and_no_more_than_the_budget() -> None:
    assert open_pool(LazyHostPool, initial_blocks=5).storage.nbytes == 5 * 4 * 3 * 2 * 2 * 8 * 4
    cache = open_pool(LazyHostPool, initial_blocks=500)
    assert cache.storage.nbytes == 16 * cache.bytes_per_block


def test_memory_that_is_taken_at_once_counts_whole_from_the_start(cache: KvCacheManager) -> None:
    assert cache.storage.nbytes == 18 * cache.bytes_per_block


FAR = CacheGeometry.uniform(1, 8, 128)


def test_vllm_1486_a_pool_beyond_32_bit_offsets_is_exact_at_its_far_end() -> None:
    """4.6e9 elements in one tensor for K and V, of which only the last blocks are used."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_pool(LazyHostPool, geometry=FAR, num_blocks=140_000, block_size=16, dtype="bfloat16") as cache:
        assert cache.storage.pool.memory[0].numel() > 2**32
        low = filled(cache, 40)
        handle = cache.allocate()
        with handle.block_table_mut() as table:  # the last blocks, by hand
            allocator = cache.block_allocator
            skipped = allocator.allocate_blocks(allocator.free_block_count - 4)
            table.add_blocks(3)
        assert handle.block_table.physical_blocks[-1] > 139_990
        grow(handle, 40)
        assert_holds(handle, a=40)
        fork = handle.fork()
        grow(fork, 3)
        assert_holds(fork, a=43)
        assert_holds(handle, a=40)
        query = torch.ones(1, 8, 128, dtype=torch.bfloat16)
        outs = []
        for each in (low, fork):
            each.truncate(39)
            with cache.step({each: 1}) as step:
                step.write(0, *rows(cache, 0, 39, 40))
                outs.append(step.attend(0, query))
        assert torch.equal(*outs)
        allocator.free_blocks(skipped)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert used < 500_000  # kilobytes, of 9 GB


def test_vllm_50427_strides_that_span_layers_and_roles_reach_beyond_32_bits() -> None:
    """4.9e9 elements of K and V of three layers in one tensor; every block has rows beyond 2**31 and 2**32."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    far = CacheGeometry.uniform(3, 8, 128)
    with open_pool(LazyHostPool, geometry=far, num_blocks=50_000, block_size=16, dtype="bfloat16") as cache:
        [memory] = cache.storage.pool.memory
        assert cache.storage.pool.value(2).storage_offset() > 2**31
        assert memory.numel() > 2**32
        handle = cache.allocate()
        with handle.block_table_mut() as table:
            skipped = cache.block_allocator.allocate_blocks(49_990)
            table.add_blocks(2)
        grow(handle, 40)
        fork = handle.fork()
        grow(fork, 3, "b")
        assert_holds(handle, a=40)
        assert_holds(fork, a=40, b=43)
        cache.block_allocator.free_blocks(skipped)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes, of 9 GB


class GuardedPool(HostPool):
    """A pool within larger buffers, whose margins hold a canary."""

    margin = 100
    canary = 12345.0

    def allocate(self, num_elements: int) -> torch.Tensor:
        buffer = torch.full((num_elements + 2 * self.margin,), self.canary, dtype=self.dtype)
        self.__dict__.setdefault("buffers", []).append(buffer)
        return buffer[self.margin : -self.margin].zero_()

    @property
    def margins(self) -> torch.Tensor:
        return torch.cat([part for each in self.buffers for part in (each[: self.margin], each[-self.margin :])])


def test_lmcache_5166_a_pool_inside_a_larger_buffer_is_read_and_written_where_it_lies() -> None:
    """Offsets, strides across layers and roles, and unequal dims are those of the views, in every operation."""
    with open_pool(GuardedPool, geometry=MIXED, scrub=True) as cache:
        handle = filled(cache, 11)
        fork = handle.fork()
        grow(fork, 2, "b")
        assert_holds(handle, a=11)
        assert_holds(fork, a=11, b=13)
        for layer in (0, 2, 3):
            key, value = handle.as_any().pool(layer)
            for each, dense in zip((key, value), handle.kv_cache(layer) or (), strict=True):
                rows_of_blocks = each[torch.tensor(handle.block_table.physical_blocks)].flatten(0, 1)
                assert torch.equal(rows_of_blocks[:11], dense)
        handle.free()
        fork.truncate(3)
        assert_holds(fork, a=3)
        fork.free()
        assert (cache.storage.margins == GuardedPool.canary).all()


def test_lazy_memory_starts_as_zeros() -> None:
    storage = LazyHostPool(make_spec(num_blocks=1000))
    assert not storage.pool.key(0)[[0, 500, 1001]].any()


# -- scrubbing ---------------------------------------------------------------------------------------------


def test_scrubbed_memory_holds_nothing_of_what_was_freed() -> None:
    with open_pool(scrub=True) as cache:
        handle = filled(cache, 10)
        fork = handle.fork()
        handle.truncate(6)
        grow(fork, 3, "b")
        blocks = {*fork.block_table.physical_blocks, *handle.block_table.physical_blocks}
        assert_holds(fork, a=10, b=13)
        fork.free()
        handle.free()
        for section in cache.storage.pool.sections:
            assert not section[:, sorted(blocks)].any()


def test_a_private_copy_takes_only_the_rows_of_its_sequence(cache: KvCacheManager, pool: HostPool) -> None:
    """Rows after a fork's last token in a copied block are another sequence's, and must not come along."""
    handle = filled(cache, 8)
    draft = handle.fork()
    draft.truncate(6)
    grow(draft, 1, "b")
    block = draft.block_table.physical_blocks[1]
    assert block != handle.block_table.physical_blocks[1]
    for layer in range(3):
        assert pool.pool.key(layer)[block, 3].isnan().all()
        assert pool.pool.value(layer)[block, 3].isnan().all()
    assert_holds(handle, a=8)
