"""Exports share memory with the pool and the step, hold what their readers' contracts ask for, or refuse."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from kvcache_core import CacheGeometry, KvCacheManager, ShapeError, StepError, UnsupportedError, WouldCopy
from kvcache_core.paged import exports
from kvcache_core.step import Step
from tests.caches import filled
from tests.paged.hostpool import LazyHostPool, open_pool
from tests.paged.oracle import attend_by_definition

HALF = CacheGeometry.uniform(2, 2, 16)
ALL = {
    "varlen": lambda step, layer: exports.varlen(step, layer, block_multiple=1),
    "flash_attn": lambda step, layer: exports.flash_attn(step, layer, block_multiple=1),
    "flashinfer": exports.flashinfer,
    "vllm": exports.vllm,
}


def half_cache(**changes: Any) -> Any:
    return open_pool(**{"geometry": HALF, "dtype": "bfloat16", **changes})


@pytest.fixture
def cache() -> Any:
    with half_cache() as made:
        yield made


@pytest.fixture
def step(cache: KvCacheManager) -> Any:
    """Decode over 9 tokens, 6 tokens of prefill, nothing for one that holds 4, and nothing for an empty one."""
    handles = [filled(cache, 9), cache.allocate(), filled(cache, 4, "b"), cache.allocate()]
    generator = torch.Generator().manual_seed(0)
    step = cache.begin(dict(zip(handles, (1, 6, 0, 0), strict=True)))
    for layer in range(2):
        step.write(layer, *(torch.randn(7, 2, 16, generator=generator).bfloat16() for _ in range(2)))
    yield step
    step.commit()


def tensors_of(export: Any) -> dict[str, torch.Tensor]:
    found = {}
    for field in fields(export):
        value = getattr(export, field.name)
        if isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
            found |= {f"{field.name}[{index}]": each for index, each in enumerate(value)}
        elif isinstance(value, torch.Tensor):
            found[field.name] = value
    return found


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_the_pools_own_memory(step: Step, cache: KvCacheManager, name: str) -> None:
    pool = cache.storage.pool
    export = tensors_of(ALL[name](step, 1))
    blocks = [tensor for tensor in export.values() if tensor.is_floating_point()]
    assert [tensor.data_ptr() for tensor in blocks] == [pool.key(1).data_ptr(), pool.value(1).data_ptr()]
    assert blocks[0].stride() == blocks[1].stride()
    assert all(tensor.shape[0] == 18 for tensor in blocks)


@pytest.mark.parametrize("name", ALL)
def test_index_tensors_are_made_once_for_all_layers(step: Step, name: str) -> None:
    first, second = tensors_of(ALL[name](step, 0)), tensors_of(ALL[name](step, 1))
    shared = [key for key, tensor in first.items() if not tensor.is_floating_point()]
    assert shared
    assert [first[key].data_ptr() for key in shared] == [second[key].data_ptr() for key in shared]


@pytest.mark.parametrize("name", ALL)
def test_indices_are_int32_and_slots_int64(step: Step, name: str) -> None:
    for key, tensor in tensors_of(ALL[name](step, 0)).items():
        if not tensor.is_floating_point():
            assert tensor.dtype is (torch.int64 if key == "slot_mapping" else torch.int32), key
            assert tensor.stride(-1) == 1


def read_varlen(export: exports.VarlenExport, query: torch.Tensor, scale: float) -> torch.Tensor:
    """What `varlen_attn` promises to compute from these arguments."""
    size, out = export.key.shape[1], []
    for row, length in enumerate(export.seqused_k.tolist()):
        first, last = export.cu_seq_q[row : row + 2].tolist()
        blocks = export.block_table[row, : -(-length // size)].long()
        key, value = (pool[blocks].flatten(0, 1)[:length] for pool in (export.key, export.value))
        window = None if export.window_size[0] < 0 else export.window_size[0] + 1
        out.append(attend_by_definition(query[first:last], key, value, scale, window))
    return torch.cat(out)


def test_the_varlen_export_leads_to_the_steps_own_attention(step: Step) -> None:
    query = torch.randn(7, 4, 16).bfloat16()
    export = exports.varlen(step, 1, block_multiple=1)
    assert export.max_q == 6
    assert export.max_k == 10
    assert export.cu_seq_k.tolist() == [0, 10, 16, 20, 20]
    got = read_varlen(export, query, 0.25)
    torch.testing.assert_close(step.attend(1, query, scale=0.25).double(), got, rtol=3e-2, atol=3e-2)


def test_tables_are_padded_with_the_null_block_never_with_minus_one(step: Step) -> None:
    table = exports.flash_attn(step, 0, block_multiple=1).block_table
    assert table.shape == (4, 3)
    assert table[3].tolist() == [0, 0, 0]
    assert (table >= 0).all()


def test_flashinfers_pages_lead_to_the_same_rows_as_the_table(step: Step) -> None:
    export, table = exports.flashinfer(step, 0), exports.varlen(step, 0, block_multiple=1)
    indptr = export.kv_indptr.tolist()
    lengths = table.seqused_k.tolist()
    for row, length in enumerate(lengths):
        pages = export.kv_indices[indptr[row] : indptr[row + 1]].tolist()
        assert pages == table.block_table[row, : -(-length // 4)].tolist()
        if length:
            assert (len(pages) - 1) * 4 + export.last_page_len[row].item() == length
    assert indptr[3] == indptr[4]  # an empty request is an equal pair
    assert export.last_page_len.tolist() == [2, 2, 4, 1]
    assert export.batch_indices.tolist() == [0] + [1] * 6
    assert export.positions.tolist() == [9, 0, 1, 2, 3, 4, 5]
    assert export.qo_indptr.tolist() == [0, 1, 7, 7, 7]


@pytest.mark.parametrize("tokens", range(1, 13))
def test_flashinfer_320_a_last_page_holds_one_to_a_whole_block_of_tokens(tokens: int) -> None:
    cache = half_cache()
    handle = cache.allocate()
    with cache.step({handle: tokens}) as step:
        export = exports.flashinfer(step, 0)
        step.abort()
    assert 1 <= export.last_page_len.item() <= 4
    assert export.kv_indptr.tolist() == [0, -(-tokens // 4)]


def test_heads_first_pages_are_a_view(step: Step, cache: KvCacheManager) -> None:
    key, value = exports.flashinfer(step, 0, kv_layout="HND").paged_kv_cache
    assert key.shape == (18, 2, 4, 16)
    assert key.data_ptr() == cache.storage.pool.key(0).data_ptr()
    assert key.stride(-1) == value.stride(-1) == 1


def test_windows_are_given_as_the_readers_count_them() -> None:
    cache = half_cache(geometry=CacheGeometry.uniform(1, 2, 16, window=5))
    with cache.step({cache.allocate(): 1}) as step:
        assert exports.varlen(step, 0, block_multiple=1).window_size == (4, 0)
        assert exports.flashinfer(step, 0).window_left == 4
        step.abort()


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "flashinfer"])
def test_single_precision_would_copy(name: str) -> None:
    with half_cache(dtype="float32") as cache, cache.step({cache.allocate(): 1}) as step:
        with pytest.raises(WouldCopy, match="stores float32") as caught:
            ALL[name](step, 0)
        assert caught.value.export == name
        step.abort()


@pytest.mark.parametrize("name", ALL)
def test_unequal_dims_would_copy(name: str) -> None:
    geometry = CacheGeometry.uniform(1, 2, 16, value_head_dim=8)
    with half_cache(geometry=geometry) as cache, cache.step({cache.allocate(): 1}) as step:
        with pytest.raises(WouldCopy, match="16 and 8"):
            ALL[name](step, 0)
        step.abort()


@pytest.mark.parametrize(("size", "fits"), [(1, False), (16, False), (128, False), (256, True), (512, True)])
def test_flash_attention_1579_pages_that_a_kernel_does_not_read_would_copy(size: int, fits: bool) -> None:
    with half_cache(block_size=size, num_blocks=2, max_sequence_length=2 * size) as cache:
        handle = cache.allocate()
        for export in (exports.varlen, exports.flash_attn):
            with cache.step({handle: 1}) as step:
                if fits:
                    assert tensors_of(export(step, 0))
                else:
                    with pytest.raises(WouldCopy, match=f"blocks have {size}; open the cache with block_size 256"):
                        export(step, 0)
                step.abort()


@pytest.mark.parametrize("name", ALL)
def test_a_backend_that_does_not_declare_an_export_refuses_it(name: str) -> None:
    with open_pool(LazyHostPool) as cache, cache.step({cache.allocate(): 1}) as step:
        with pytest.raises(UnsupportedError) as caught:
            ALL[name](step, 0)
        assert caught.value.capability == f"export.{name}"
        with pytest.raises(UnsupportedError):
            step.mark_written()
        step.abort()


def test_layers_that_share_export_the_producers_blocks_and_others_refuse() -> None:
    geometry = CacheGeometry.model_validate(
        {"num_layers": 3, "groups": [{"layers": [0], "num_kv_heads": 2, "head_dim": 16}], "shared": {2: 0}}
    )
    with half_cache(geometry=geometry) as cache, cache.step({cache.allocate(): 1}) as step:
        assert exports.vllm(step, 2).key_cache.data_ptr() == exports.vllm(step, 0).key_cache.data_ptr()
        with pytest.raises(ShapeError, match="layer 1 caches nothing"):
            exports.vllm(step, 1)
        step.abort()


def test_a_step_that_is_over_exports_nothing(cache: KvCacheManager) -> None:
    handle = filled(cache, 5)
    step = cache.begin({handle: 1})
    step.abort()
    with pytest.raises(StepError):
        exports.vllm(step, 0)


def test_rows_stored_by_the_callers_own_kernel_are_committed(cache: KvCacheManager) -> None:
    handle = filled(cache, 5)
    rows = torch.randn(2, 2, 16).bfloat16()
    with cache.step({handle: [7, 8]}) as step:
        for layer in range(2):
            export = exports.vllm(step, layer)
            export.key_cache.flatten(0, 1)[export.slot_mapping] = rows
            export.value_cache.flatten(0, 1)[export.slot_mapping] = -rows
        step.mark_written(1)
        with pytest.raises(StepError, match="already written"):
            step.mark_written(1)
        step.mark_written()
    assert torch.equal(handle.key_cache(1)[5:], rows)
    assert torch.equal(handle.value_cache(0)[5:], -rows)
    assert handle.token_ids[-2:] == (7, 8)
