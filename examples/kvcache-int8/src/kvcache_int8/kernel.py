"""Attention over codes and scales.

A decode step is bound by memory, so it never makes floats of a whole sequence: codes are converted a chunk at a time,
while they are in the processor's caches, and each row's scale is multiplied into its score or its weight, one number
for each row instead of one for each element. A prefill is bound by arithmetic and converts the rows of one sequence
and layer once.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from kvcache_core.attention import attend_dense
from kvcache_core.paged import AttentionKernel, Upload
from kvcache_core.plugin import Batch

from kvcache_int8.pool import Int8Pool
from kvcache_int8.quantise import dequantise

__all__ = ["Int8Kernel"]


class Part(NamedTuple):
    """One sequence of a step.

    Attributes:
        rows: Its new tokens in the packed tensors.
        start: Its tokens before the step.
        stop: Its tokens with the new ones.
        ids: Its blocks, on the device.
    """

    rows: slice
    start: int
    stop: int
    ids: torch.Tensor


class Int8Kernel(AttentionKernel):
    """Attends sequence by sequence.

    Args:
        pool: The blocks.
        upload: Brings an index tensor from the host to the device.
        dtype: What a prefill converts rows to.
        chunk_tokens: Tokens that a decode step converts at a time.
    """

    name: ClassVar[str] = "int8"

    def __init__(self, pool: Int8Pool, upload: Upload, dtype: torch.dtype, chunk_tokens: int) -> None:
        super().__init__(pool, upload)
        self._pool = pool
        self._dtype = dtype
        self._chunk_blocks = -(-chunk_tokens // pool.block_size)

    def plan(self, batch: Batch) -> list[Part]:
        """Bring the block ids of each sequence to the device, once for all layers."""
        size = self._pool.block_size
        return [
            Part(
                rows=slice(segment.row, segment.row + segment.num_new_tokens),
                start=segment.start,
                stop=segment.stop,
                ids=self.upload(torch.tensor(segment.blocks[: -(-segment.stop // size)], dtype=torch.int64)),
            )
            for segment in batch.segments
            if segment.num_new_tokens
        ]

    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attend to each sequence in turn."""
        attend = {True: self._decode, False: self._prefill}
        out = [attend[part.stop - part.start == 1](part, layer, query[part.rows], scale, window) for part in batch.plan]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _prefill(self, part: Part, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        first = 0 if window is None else max(0, part.start - window + 1) // self._pool.block_size
        ids, count = part.ids[first:], part.stop - first * self._pool.block_size
        key = dequantise(*self._pool.keys(layer, ids, count), self._dtype)
        value = dequantise(*self._pool.values(layer, ids, count), self._dtype)
        return attend_dense(query, key, value, scale=scale, window=window)

    def _decode(self, part: Part, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Attend one query over all rows it sees."""
        low = 0 if window is None else max(0, part.stop - window)
        compute = torch.promote_types(query.dtype, torch.float32)
        heads = self._pool.codes.key(layer).shape[2]
        q = query.to(compute).view(heads, -1, query.shape[-1]) * scale  # [kv heads, group, dim]

        chunks = self._chunks(part, low)
        scores = []
        for ids, skipped, stop in chunks:
            codes, scales = self._pool.keys(layer, ids, stop)
            scores.append(q @ _by_head(codes[skipped:], compute).mT * _by_head(scales[skipped:], compute).mT)
        weights = torch.softmax(scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1), dim=-1)
        del scores

        out, done = torch.zeros((), dtype=compute, device=query.device), 0
        for ids, skipped, stop in chunks:
            codes, scales = self._pool.values(layer, ids, stop)
            taken = weights[..., done : done + stop - skipped] * _by_head(scales[skipped:], compute).mT
            out = out + taken @ _by_head(codes[skipped:], compute)
            done += stop - skipped
        return out.reshape(1, query.shape[1], -1).to(query.dtype)

    def _chunks(self, part: Part, low: int) -> list[tuple[torch.Tensor, int, int]]:
        """Cut positions `low` to `part.stop` into chunks: block ids, rows to skip in the first, rows up to the end."""
        size = self._pool.block_size
        chunks = []
        for block in range(low // size, len(part.ids), self._chunk_blocks):
            ids = part.ids[block : block + self._chunk_blocks]
            chunks.append((ids, max(0, low - block * size), min(len(ids) * size, part.stop - block * size)))
        return chunks


def _by_head(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[tokens, heads, dim]` as `[heads, tokens, dim]` in `dtype`."""
    return rows.transpose(0, 1).to(dtype)
