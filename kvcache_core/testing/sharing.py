"""What the backend declares it shares with other systems: exports without a copy, and steps that can be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch

from kvcache_core.errors import WouldCopy
from kvcache_core.paged import PagedStorage, StaticDecode, exports
from kvcache_core.step import Step
from kvcache_core.storage import CAPABILITIES
from kvcache_core.testing.conformance import Conformance

__all__ = ["SharingConformance"]

#: Capabilities that tests of the kit try.
_TRIED = frozenset({"swap", "unequal_head_dims", "graph_capture"})


class View(NamedTuple):
    """What an export says: the blocks, and for each sequence its block ids and its tokens."""

    key: torch.Tensor
    value: torch.Tensor
    blocks: list[list[int]]
    lengths: list[int]


def _from_table(key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> View:
    return View(key, value, table.tolist(), lengths.tolist())


def _varlen(step: Step, layer: int) -> View:
    export = exports.varlen(step, layer, block_multiple=1)
    return _from_table(export.key, export.value, export.block_table, export.seqused_k)


def _flash_attn(step: Step, layer: int) -> View:
    export = exports.flash_attn(step, layer, block_multiple=1)
    return _from_table(export.k_cache, export.v_cache, export.block_table, export.cache_seqlens)


def _vllm(step: Step, layer: int) -> View:
    export = exports.vllm(step, layer)
    return _from_table(export.key_cache, export.value_cache, export.block_table, export.seq_lens)


def _flashinfer(step: Step, layer: int) -> View:
    export = exports.flashinfer(step, layer)
    bounds, ids = export.kv_indptr.tolist(), export.kv_indices.tolist()
    blocks = [ids[first:last] for first, last in pairwise(bounds)]
    last_page = export.last_page_len.tolist()
    lengths = [
        max(0, len(used) - 1) * export.page_size + last if used else 0
        for used, last in zip(blocks, last_page, strict=True)
    ]
    return View(*export.paged_kv_cache, blocks, lengths)


EXPORTS: dict[str, Callable[[Step, int], View]] = {
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
    "varlen": _varlen,
    "vllm": _vllm,
}


class SharingConformance(Conformance):
    """What other systems are given is the cache's own memory, and leads to the right rows."""

    @classmethod
    def arguments(cls) -> dict[str, Sequence[Any]]:
        """Every export that kvcache-core makes, and every capability."""
        others = sorted((CAPABILITIES | cls.capabilities) - _TRIED - {f"export.{name}" for name in EXPORTS})
        return {**super().arguments(), "export": sorted(EXPORTS), "untried": others}

    def test_a_capability_that_the_kit_does_not_try_is_named(self, untried: str) -> None:
        self.require(untried)
        pytest.skip(f"the backend declares {untried!r}, and the kit has no test for it: write your own")

    def test_an_export_is_the_caches_memory_and_leads_to_its_rows(self, export: str, dtype: str) -> None:
        self.require(f"export.{export}")
        size = self.block_size
        with self.cache(self.geometry("uniform"), dtype=dtype) as cache:
            held = [self.filled(cache, length) for length in (size + 1, 0, 2 * size)]
            fork = held[0][0].fork()
            new = {held[0][0]: self.tokens(size), held[1][0]: self.tokens(1), fork: self.tokens(2)}
            with cache.step({**new, held[2][0]: []}) as step:
                self.write(step, new)
                for layer in (0, 1):
                    try:
                        view = EXPORTS[export](step, layer)
                    except WouldCopy:
                        assert dtype not in ("bfloat16", "float16"), "an export has to work in half precision"
                        continue
                    again = EXPORTS[export](step, layer)
                    assert view.key.data_ptr() == again.key.data_ptr(), "the blocks were copied"
                    for handle, blocks, length in zip(step.handles, view.blocks, view.lengths, strict=True):
                        ids = torch.tensor(blocks[: -(-length // size)], dtype=torch.int64, device=cache.device)
                        key, value = step.gather(layer, handle)
                        assert length == len(key)
                        assert torch.equal(view.key[ids].flatten(0, 1)[:length], key)
                        assert torch.equal(view.value[ids].flatten(0, 1)[:length], value)

    def test_a_static_decode_step_does_what_a_step_does(self, dtype: str) -> None:
        self.require("graph_capture")
        size = self.block_size
        with self.cache(self.geometry("uniform"), dtype=dtype) as cache:
            handles = [self.filled(cache, length)[0] for length in (size, 2 * size + 1, 1)]
            held = [list(handle.token_ids) for handle in handles]
            static = StaticDecode(cast("PagedStorage", cache.storage), max_sequences=5, max_blocks=4)
            for count in (3, 2):
                batch = {handle: self.tokens(1) for handle in handles[:count]}
                query = self.random(5, 4, self.head_dim, dtype=cache.dtype)
                with cache.step(batch) as step:
                    static.load(step)
                    for layer in (0, 1):
                        key, value = self.rows(cache, layer, [(batch[h], h.num_tokens) for h in handles[:count]])
                        padding = key.new_full((5 - count, *key.shape[1:]), float("nan"))
                        static.write(layer, torch.cat([key, padding]), torch.cat([value, padding]))
                        out = static.attend(layer, query)
                        assert bool((out[count:] == 0).all()), "rows of padding are zeros"
                        step.mark_written()
                        expected = self.assert_attends(step, layer, query[:count])
                        self.assert_close(out[:count], expected.cpu().double(), value, what="the static step")
                held = [tokens + batch.get(handle, []) for handle, tokens in zip(handles, held, strict=True)]
                for handle, tokens in zip(handles, held, strict=True):
                    self.assert_holds(handle, tokens)
