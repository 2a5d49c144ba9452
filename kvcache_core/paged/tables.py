"""The index tensors by which paged kernels find the tokens of a batch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch

from kvcache_core.batch import Batch

__all__ = ["Indices", "Pages", "Tables", "pages_of", "tables_of"]


@dataclass(frozen=True)
class Tables:
    """The index tensors by which paged kernels find the tokens of a batch; all on the device.

    Attributes:
        block_tables: Block ids, int32 `[sequences, max blocks]`, padded with the null block.
        seq_lens: Tokens of each sequence, int32 `[sequences]`; 0 for a row that stands for none.
        cu_seqlens_q: Prefix sums of the new tokens, int32 `[sequences + 1]`.
        cu_seqlens_k: Prefix sums of `seq_lens`, int32 `[sequences + 1]`.
        max_new_tokens: Most new tokens of a sequence.
        max_seq_len: Most tokens of a sequence.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_new_tokens: int
    max_seq_len: int


def tables_of(batch: Batch) -> Tables:
    """Return the tables of a batch, which are the batch's own tensors."""
    return Tables(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        max_new_tokens=batch.max_new_tokens,
        max_seq_len=batch.max_seq_len,
    )


class Indices:
    """32-bit integers on the host, and on the device once somebody asks.

    Attributes:
        on_host: int32, one-dimensional.
    """

    def __init__(self, values: array[int], batch: Batch) -> None:
        self.on_host = torch.frombuffer(values, dtype=torch.int32) if values else torch.empty(0, dtype=torch.int32)
        self._upload, self._device = batch.upload, batch.device

    @cached_property
    def on_device(self) -> torch.Tensor:
        """The same on the device."""
        return self.on_host.to(self._device) if self._upload is None else self._upload(self.on_host)


@dataclass(frozen=True)
class Pages:
    """The blocks of a batch in compressed rows, as FlashInfer reads them.

    Attributes:
        new_indptr: Prefix sums of the new tokens, `[sequences + 1]`.
        indptr: Prefix sums of the blocks, `[sequences + 1]`.
        indices: Block ids, `[blocks]`.
        last_page_len: Tokens in each sequence's last block, `[sequences]`; 1 where there is none, as 0 is not allowed.
        batch_indices: Sequence of each new token, `[new tokens]`.
        positions: Position of each new token, `[new tokens]`.
    """

    new_indptr: Indices
    indptr: Indices
    indices: Indices
    last_page_len: Indices
    batch_indices: Indices
    positions: Indices


_pages: WeakKeyDictionary[Batch, Pages] = WeakKeyDictionary()


def pages_of(batch: Batch) -> Pages:
    """Return the blocks of a batch in compressed rows; made once for all layers."""
    known = _pages.get(batch)
    if known is not None:
        return known
    size = batch.block_size
    new, indptr = array("i", [0]), array("i", [0])
    indices, last = array("i"), array("i")
    sequences, positions = array("i"), array("i")
    for number, segment in enumerate(batch.segments):
        indices.extend(segment.blocks[: -(-segment.stop // size)])
        indptr.append(len(indices))
        last.append((segment.stop - 1) % size + 1 if segment.stop else 1)
        new.append(new[-1] + segment.num_new_tokens)
        sequences.extend([number] * segment.num_new_tokens)
        positions.extend(range(segment.start, segment.stop))
    pages = Pages(*(Indices(values, batch) for values in (new, indptr, indices, last, sequences, positions)))
    _pages[batch] = pages
    return pages
