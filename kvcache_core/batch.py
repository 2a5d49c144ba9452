"""One step's ragged batch: which sequences take part, which token positions are new, and the index tensors.

Index tensors are built on first use and then shared by all layers. Their dtypes and pads are the ones that
flash-attention, vLLM and torch's `varlen_attn` read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Segment"]


class Segment(NamedTuple):
    """One sequence's part of a batch.

    Attributes:
        slot: What the storage returned when the sequence was opened or forked.
        blocks: Physical block ids of the sequence, logical order, capacity for `stop` tokens at least. It is the
            sequence's own table, which later steps change: copy what has to outlive this one.
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
        num_tokens: Rows of every packed tensor: the new tokens of all sequences together.
        block_size: Tokens per block.
        device: Where the index tensors live (a `torch.device`).
        plan: Free for the storage: whatever `Storage.plan` returned for this batch.
        upload: Brings an index tensor from the host to the device; a plain copy when None.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        block_size: int,
        device: torch.device,
        upload: Callable[[torch.Tensor], torch.Tensor] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self._segments = segments
        self.num_tokens = sum(segment.num_new_tokens for segment in self.segments) if num_tokens is None else num_tokens
        self.block_size = block_size
        self.device = device
        self.plan: Any = None
        self.upload = upload

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One per sequence."""
        return tuple(self._segments)

    def _tensor(self, values: array[int]) -> torch.Tensor:
        """Return 64-bit (`"q"`) or 32-bit (`"i"`) integers as a tensor on the device."""
        import torch  # noqa: PLC0415 - core does not import torch until a tensor is asked for

        dtype = torch.int64 if values.typecode == "q" else torch.int32
        host = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        return host.to(self.device) if self.upload is None else self.upload(host)

    @property
    def max_new_tokens(self) -> int:
        """Most new tokens that one sequence adds."""
        return max((segment.stop - segment.start for segment in self.segments), default=0)

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence, the new ones included."""
        return max((segment.stop for segment in self.segments), default=0)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every new token in its sequence, int64 `[num_tokens]`."""
        rows = array("q")
        for segment in self.segments:
            rows.extend(range(segment.start, segment.stop))
        return self._tensor(rows)

    @cached_property
    def slot_mapping(self) -> torch.Tensor:
        """`block_id * block_size + row in block` of every new token, int64 `[num_tokens]` (as vLLM)."""
        size = self.block_size
        slots = array("q")
        for segment in self.segments:
            position = segment.start
            while position < segment.stop:  # one run of slots for each block that is written
                index, row = divmod(position, size)
                count = min(size - row, segment.stop - position)
                first = segment.blocks[index] * size + row
                slots.extend(range(first, first + count))
                position += count
        return self._tensor(slots)

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """Block ids that hold each sequence's tokens, int32 `[sequences, max blocks]`, padded with 0."""
        used = [segment.blocks[: -(-segment.stop // self.block_size)] for segment in self.segments]
        width = max((len(blocks) for blocks in used), default=0)
        rows = array("i")
        for blocks in used:
            rows.extend(blocks)
            rows.extend([0] * (width - len(blocks)))
        return self._tensor(rows).reshape(len(used), width)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each sequence, the new ones included, int32 `[sequences]`."""
        return self._tensor(array("i", [segment.stop for segment in self.segments]))

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Prefix sums of the new tokens, starting with 0, int32 `[sequences + 1]`."""
        return self._tensor(array("i", [*(segment.row for segment in self.segments), self.num_tokens]))

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of `seq_lens`, starting with 0, int32 `[sequences + 1]`."""
        return self._tensor(array("i", accumulate((segment.stop for segment in self.segments), initial=0)))

    @cached_property
    def last_token_index(self) -> torch.Tensor:
        """Packed row of each sequence's last new token, int64 `[sequences]`; -1 where it has none."""
        last = [s.row + s.stop - s.start - 1 if s.stop > s.start else -1 for s in self.segments]
        return self._tensor(array("q", last))
