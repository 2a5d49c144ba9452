"""What a paged storage asks of an attention kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from kvcache_core.batch import Batch
from kvcache_core.paged.gathering import attend_decode
from kvcache_core.paged.pool import Pool, Upload
from kvcache_core.paged.tables import Tables

__all__ = ["AttentionKernel"]


class AttentionKernel(ABC):
    """Attention over a pool of blocks.

    Attributes:
        name: What reports call it.
        pool: The blocks.
        upload: Brings an index tensor from the host to the device.
    """

    name: ClassVar[str]

    def __init__(self, pool: Pool, upload: Upload) -> None:
        self.pool = pool
        self.upload = upload

    def plan(self, batch: Batch) -> Any:
        """Prepare what all layers of a step share; kept as `batch.plan`."""
        return None

    @abstractmethod
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attend as `Storage.attend` does; `batch` holds one new token at least."""

    def decode(self, tables: Tables, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attend one new token of each sequence, by device tensors alone: nothing is read back, so it can be captured.

        Args:
            tables: The sequences.
            layer: A layer that caches K and V of its own.
            query: `[sequences, num_heads, head_dim]`.
            scale: Factor on the scores.
            window: Tokens a query sees, itself included, or None.

        Returns:
            `[sequences, num_heads, value_head_dim]` in the dtype of `query`; zeros for a row of no tokens.
        """
        key, value = self.pool.key(layer), self.pool.value(layer)
        return attend_decode(query, key, value, tables.block_tables, tables.seq_lens, scale=scale, window=window)
