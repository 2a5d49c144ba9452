"""One step's ragged batch: which sequences take part, which token positions are new, and the index tensors.

Index tensors are built on first use and then shared by all layers. Their dtypes and pads are the ones that
flash-attention, vLLM and torch's `varlen_attn` read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Segment"]


class Segment(NamedTuple):
    """One sequence's part of a batch.

    Attributes:
        slot: What the storage returned when the sequence was opened or forked.
        blocks: Physical block ids of the sequence, logical order, capacity for `stop` tokens at least.
        start: Tokens cached before the step, which is the position of the first new token.
        stop: Tokens cached once the step commits.
        row: Row of the first new token in the packed tensors.
    """

    slot: Any
    blocks: Sequence[int]
    start: int
    stop: int
    row: int

    @property
    def num_new_tokens(self) -> int:
        """New tokens of this sequence in the step; may be 0."""
        return self.stop - self.start


class Batch:
    """The sequences of one step, packed along tokens in the order the caller named them.

    Attributes:
        segments: One per sequence.
        num_tokens: Rows of every packed tensor: the new tokens of all sequences together.
        block_size: Tokens per block.
        device: Where the index tensors live (a `torch.device`).
        plan: Free for the storage: whatever `Storage.plan` returned for this batch.
    """

    def __init__(self, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self.segments = tuple(segments)
        self.num_tokens = sum(segment.stop - segment.start for segment in self.segments)
        self.block_size = block_size
        self.device = device
        self.plan: Any = None

    def _tensor(self, values: Sequence[Any], dtype_name: str) -> torch.Tensor:
        import torch  # noqa: PLC0415 - core does not import torch until a tensor is asked for

        return torch.tensor(values, dtype=getattr(torch, dtype_name), device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every new token in its sequence, int64 `[num_tokens]`."""
        rows = [position for s in self.segments for position in range(s.start, s.stop)]
        return self._tensor(rows, "int64")

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """`block_id * block_size + row in block` of every new token, int64 `[num_tokens]` (as vLLM)."""
        size = self.block_size
        slots = [
            segment.blocks[position // size] * size + position % size
            for segment in self.segments
            for position in range(segment.start, segment.stop)
        ]
        return self._tensor(slots, "int64")

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """Block ids that hold each sequence's tokens, int32 `[sequences, max blocks]`, padded with 0."""
        used = [segment.blocks[: -(-segment.stop // self.block_size)] for segment in self.segments]
        width = max((len(blocks) for blocks in used), default=0)
        rows = [[*blocks, *([0] * (width - len(blocks)))] for blocks in used]
        return self._tensor(rows, "int32").reshape(len(rows), width)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each sequence, the new ones included, int32 `[sequences]`."""
        return self._tensor([segment.stop for segment in self.segments], "int32")

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Prefix sums of the new tokens, starting with 0, int32 `[sequences + 1]`."""
        return self._tensor([*(segment.row for segment in self.segments), self.num_tokens], "int32")

    @cached_property
    def last_token_index(self) -> torch.Tensor:
        """Packed row of each sequence's last new token, int64 `[sequences]`; -1 where it has none."""
        return self._tensor([s.row + s.stop - s.start - 1 if s.stop > s.start else -1 for s in self.segments], "int64")
