"""The stand-in has MPS's faults: what public reports show there shows here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from kvcache_core import KvCacheManager
from kvcache_core.paged import PagedStorage
from plugins.metal.tests.caches import append, rows_of, spec_of
from plugins.metal.tests.stand_in import RULES, StandIn, StandInFault, on_stand_in


@pytest.fixture
def mps() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


def randoms(*shape: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ value


def test_every_rule_is_tested_and_cites_public_reports() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for name, rule in RULES.items():
        assert f'"{name}"' in text, name
        assert all(re.fullmatch(r"(pytorch|YuE)#\d+", issue) for issue in rule.issues)


def test_outside_of_it_torch_is_whole() -> None:
    with StandIn() as mps:
        pass
    view = torch.zeros(4)[2:]
    view.fill_(1)
    assert view.tolist() == [1, 1]
    assert not mps.fired


def test_a_rule_can_be_left_out() -> None:
    with StandIn(without=["writes_ignore_offsets"]) as mps:
        whole = torch.ones(3)
        whole[1].zero_()
    assert whole.tolist() == [1, 0, 1]
    assert not mps.fired


# -- operations --------------------------------------------------------------------------------------------


def test_pytorch_175191_a_transposed_source_is_read_in_storage_order(mps: StandIn) -> None:
    base = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    out = torch.zeros(3, 2).scatter_(0, torch.zeros(3, 2, dtype=torch.long), base.t())
    wrong = torch.zeros(3, 2).scatter_(0, torch.zeros(3, 2, dtype=torch.long), base.view(3, 2))
    assert torch.equal(out, wrong)
    assert mps.fired == {"strides_are_misread": 1}


def test_pytorch_150967_a_transposed_condition_is_read_in_storage_order(mps: StandIn) -> None:
    condition = torch.tensor([[True, False], [True, False]])
    assert torch.where(condition.t(), 1, 0).tolist() == [[1, 0], [1, 0]]
    assert mps.fired == {"strides_are_misread": 1}


def test_pytorch_183419_isfinite_misreads_a_slice_of_columns(mps: StandIn) -> None:
    table = torch.tensor([[1.0, torch.inf], [2.0, torch.inf]])
    assert not torch.isfinite(table[:, :1]).all()
    assert mps.fired == {"strides_are_misread": 1}


def test_rows_of_an_expanded_tensor_are_read_over_and_over(mps: StandIn) -> None:
    target = torch.zeros(3, 2)
    target.index_put_((torch.tensor([0, 1, 2]),), torch.tensor([5.0, 6.0])[:, None].expand(2, 3).t())
    assert target.tolist() == [[5, 6], [5, 6], [5, 6]]
    target.index_put_((torch.tensor([0, 1, 2]),), torch.tensor([[5.0], [6.0], [7.0]]).expand(3, 2))
    assert target.tolist() == [[5, 6], [7, 5], [6, 7]]


def test_pytorch_189968_an_index_outside_writes_outside(mps: StandIn) -> None:
    storage = torch.zeros(64)
    storage[:5].index_put_((torch.tensor([8]),), torch.tensor([999.0]))
    storage[8:13].index_put_((torch.tensor([-1]),), torch.tensor([555.0]))
    assert (storage[8], storage[7]) == (999, 555)
    assert mps.fired == {"indices_are_not_checked": 2}


def test_index_copy_is_not_there(mps: StandIn) -> None:
    with pytest.raises(NotImplementedError, match="index_copy_is_missing"):
        torch.zeros(3).index_copy_(0, torch.tensor([1]), torch.ones(1))
    assert mps.fired == {"index_copy_is_missing": 1}


def test_pytorch_114692_a_slice_is_filled_at_the_start(mps: StandIn) -> None:
    whole = torch.ones(3)
    whole[1].zero_()
    assert whole.tolist() == [0, 1, 1]
    whole[2:].copy_(torch.tensor([7.0]))
    assert whole.tolist() == [7, 1, 1]
    assert mps.fired == {"writes_ignore_offsets": 2}


def test_pytorch_131285_a_tensor_with_gaps_is_written_as_if_it_had_none(mps: StandIn) -> None:
    whole = torch.zeros(6)
    whole[::2].masked_fill_(torch.tensor([False, True, False]), 1)
    assert whole.tolist() == [0, 1, 0, 0, 0, 0]
    assert mps.fired == {"writes_ignore_gaps": 1}


def test_pytorch_193385_an_output_in_a_slice_is_lost(mps: StandIn) -> None:
    out = torch.zeros(2, 2, 2)
    torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=out[1])
    torch.index_select(torch.ones(4, 2), 0, torch.tensor([1, 2]), out=out[1])
    assert not out.any()
    torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=out[0])
    assert out[0].tolist() == [[2, 2], [2, 2]]
    assert mps.fired == {"outputs_in_slices_are_lost": 2}


def test_pytorch_189690_a_copy_that_does_not_block_brings_garbage(mps: StandIn) -> None:
    host = torch.tensor([1, 2, 3])
    assert torch.empty_like(host).copy_(host, non_blocking=True).tolist() != [1, 2, 3]
    assert torch.empty_like(host).copy_(host).tolist() == [1, 2, 3]
    assert mps.fired == {"copies_read_freed_memory": 1}


def test_pytorch_149325_operations_on_large_tensors_fail(mps: StandIn) -> None:
    for large in (torch.empty(2**31, dtype=torch.int8, device="meta"), torch.empty(2**30 + 1, device="meta")):
        with pytest.raises(StandInFault, match="large_tensors_fail"):
            large + 1
    torch.empty(2**30, device="meta") + 1
    assert mps.fired == {"large_tensors_fail": 2}


def test_float64_is_refused(mps: StandIn) -> None:
    with pytest.raises(TypeError, match="double_precision_is_missing"):
        torch.zeros(3, dtype=torch.float64).abs()
    assert (torch.ones(3) * 2.0).tolist() == [2, 2, 2]


def test_pytorch_132596_each_shape_costs_a_graph() -> None:
    with StandIn(max_graphs=3) as mps:
        source, index = torch.ones(9, 2), torch.arange(9)
        for _ in range(2):
            for count in (1, 2, 3):
                source.index_select(0, index[:count])
        with pytest.raises(StandInFault, match="graphs_pile_up"):
            source.index_select(0, index[:4])
    assert len(mps.graphs["aten.index_select"]) == 4


# -- attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pytorch_195910_half_precision_sees_up_to_three_later_tokens(mps: StandIn, dtype: torch.dtype) -> None:
    query, key, value = (part.to(dtype) for part in randoms(1, 4, 64, 64))
    before = attention(query, key, value, is_causal=True)
    after = attention(query, torch.cat([key[:, :, :63], -key[:, :, 63:]], dim=2), value, is_causal=True)
    changed = [row for row in range(64) if not torch.equal(before[:, :, row], after[:, :, row])]
    assert changed == ([63] if dtype is torch.float32 else [60, 61, 62, 63])
    assert set(mps.fired) <= {"attention_leaks_within_four"}


def test_pytorch_149132_grouped_heads_end_the_process(mps: StandIn) -> None:
    with pytest.raises(StandInFault, match="attention_aborts_on_grouped_heads"):
        attention(*(torch.rand(2, heads, 3, 8) for heads in (4, 2, 2)), enable_gqa=True)


def test_pytorch_181133_permuted_operands_are_misread(mps: StandIn) -> None:
    query, key, value = (part.permute(0, 2, 1, 3) for part in randoms(84, 3, 3, 64))
    right = attention(query.contiguous(), key.contiguous(), value.contiguous())
    assert not mps.fired
    assert (attention(query, key, value) - right).abs().max() > 1
    assert mps.fired == {"attention_misreads_strides": 3}


def test_pytorch_176767_rows_have_the_dim_of_k(mps: StandIn) -> None:
    query, key = randoms(1, 1, 16, 32, count=2)
    assert attention(query, key, key[..., :24].contiguous()).shape[-1] == 32
    assert mps.fired == {"attention_returns_the_dim_of_k": 1}


def test_pytorch_182285_a_boolean_mask_hides_nothing_from_few_queries(mps: StandIn) -> None:
    query, key, value = randoms(1, 2, 8, 64)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    everything = torch.ones(8, 8, dtype=torch.bool)
    torch.testing.assert_close(attention(query, key, value, visible), exact(query, key, value, everything))
    assert mps.fired == {"attention_ignores_boolean_masks": 1}
    mask = torch.zeros(8, 8).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(attention(query, key, value, mask), exact(query, key, value, visible))


def test_pytorch_184180_a_mask_that_is_broadcast_over_heads_is_the_first_ones(mps: StandIn) -> None:
    query, key, value = randoms(2, 4, 8, 64)
    mask = torch.zeros(2, 1, 8, 8)
    mask[0:1].masked_fill_(torch.arange(8) > 4, -torch.inf)
    out = attention(query, key, value, mask)
    torch.testing.assert_close(out, exact(query, key, value, mask[:1] == 0))
    assert mps.fired == {"attention_uses_the_first_mask": 1}
    whole = mask.expand(2, 4, 8, 8).contiguous()
    torch.testing.assert_close(attention(query, key, value, whole), exact(query, key, value, whole == 0))


def test_pytorch_156707_a_row_that_sees_nothing_is_nan(mps: StandIn) -> None:
    mask = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]])
    out = attention(*randoms(1, 1, 2, 4), mask)
    assert out[0, 0, 0].isnan().all()
    assert not out[0, 0, 1].isnan().any()
    assert mps.fired == {"hidden_rows_are_nan": 1}


def test_attention_without_a_fault_is_torchs_own() -> None:
    query, key, value = randoms(2, 3, 20, 16)
    mask = torch.zeros(20, 20).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    for keywords in ({}, {"attn_mask": mask}, {"attn_mask": mask == 0}, {"is_causal": True}, {"scale": 0.3}):
        right = attention(query, key, value, **keywords)  # type: ignore[arg-type]
        with StandIn() as mps:
            torch.testing.assert_close(attention(query, key, value, **keywords), right)  # type: ignore[arg-type]
        assert not mps.fired


# -- storages ----------------------------------------------------------------------------------------------


def test_a_storage_written_for_other_devices_does_not_get_through() -> None:
    class Unguarded(PagedStorage):
        @classmethod
        def device_memory(cls, device, options):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    stand_in = StandIn()
    cache = KvCacheManager(on_stand_in(lambda: Unguarded(spec_of()), stand_in))
    with cache, cache.allocate() as handle, pytest.raises(NotImplementedError, match="index_copy"):
        append(cache, handle, 3)
    stand_in = StandIn(without=["index_copy_is_missing"])
    cache = KvCacheManager(on_stand_in(lambda: Unguarded(spec_of()), stand_in))
    with cache, cache.allocate() as handle:
        append(cache, handle, 3)
        assert not handle.key_cache(1).equal(rows_of(cache, 1, 3)[0])
    assert set(stand_in.fired) == {"writes_ignore_offsets"}
