"""A storage with all capabilities that the kit tries, and some that are wrong in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvcache_core.paged import BlockPool, HostTier, PagedStorage, Pool, ReferenceKernel, SwapTicket, Tables
from kvcache_core.plugin import DeviceMemory

CAPABILITIES = frozenset({"unequal_head_dims", "swap", "graph_capture", "export.varlen", "export.flashinfer"})


class Capable(PagedStorage):
    """A right one, with a tier of six blocks."""

    capabilities: ClassVar[frozenset[str]] = CAPABILITIES

    @classmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        return DeviceMemory(total=1 << 30, free=1 << 29)

    def make_tier(self) -> HostTier:
        assert isinstance(self.pool, BlockPool)
        return HostTier(self.pool, 6, self.allocate, self.upload)


class SwapsKeysOnly(Capable):
    def swap_in(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        super().swap_in(ticket, blocks)
        for layer in self.spec.geometry.caching_layers:
            self.pool.value(layer)[list(blocks)] = 0


class SwapsIntoOrder(Capable):
    """Takes the new blocks for neighbours."""

    def swap_in(self, ticket: SwapTicket, blocks: Sequence[int]) -> None:
        super().swap_in(ticket, [min(blocks, default=0) + index for index in reversed(range(len(blocks)))])


class KeepsSwappedPlaces(Capable):
    def drop_swapped(self, ticket: SwapTicket) -> None:
        return None


class SwapsOutHalf(Capable):
    """A full tier takes what fits."""

    def swap_out(self, slot: None, blocks: Sequence[int], num_tokens: int) -> SwapTicket:
        assert self.tier is not None
        return super().swap_out(slot, list(blocks)[: self.tier.free_block_count], num_tokens)


class CopyingPool(BlockPool):
    def key(self, layer: int) -> torch.Tensor:
        return super().key(layer).clone()


class ExportsACopy(Capable):
    def make_pool(self) -> Pool:
        return CopyingPool(self.spec.geometry, self.spec.block_size, self.spec.num_blocks, self.allocate)


class OtherRolePool(BlockPool):
    def value(self, layer: int) -> torch.Tensor:
        return super().key(layer)


class ExportsKeysTwice(Capable):
    def make_pool(self) -> Pool:
        return OtherRolePool(self.spec.geometry, self.spec.block_size, self.spec.num_blocks, self.allocate)


class DecodesPadding(Capable):
    """Writes something where no sequence is."""

    def make_kernel(self) -> ReferenceKernel:
        return PaddingKernel(self.pool, self.upload)


class PaddingKernel(ReferenceKernel):
    def decode(self, tables: Tables, *arguments: Any, **named: Any) -> torch.Tensor:
        out = super().decode(tables, *arguments, **named)
        return torch.where((tables.seq_lens == 0)[:, None, None], 1, out)


class DecodesOneLess(Capable):
    """Does not see the new token."""

    def make_kernel(self) -> ReferenceKernel:
        return OneLessKernel(self.pool, self.upload)


class OneLessKernel(ReferenceKernel):
    def decode(self, tables: Tables, *arguments: Any, **named: Any) -> torch.Tensor:
        shorter = Tables(**{**vars(tables), "seq_lens": (tables.seq_lens - 1).clamp(min=0)})
        return super().decode(shorter, *arguments, **named)
