"""The arithmetic of blocks: what sequences take, what fits, what is wasted, for blocks of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_core.block_table import blocks_for
from kvcache_core.budget import Budget
from kvcache_core.errors import ConfigError, ShapeError

__all__ = ["BlockSizePlan", "Capacity", "LengthPlan", "Need", "Sizing", "Waste"]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Room in blocks that holds no token, since the last block of a sequence is rarely full.

    Attributes:
        tokens: Tokens that would still fit.
        bytes: Bytes of K and V that they would take.
        percent: Their share of the blocks' room, from 0 to 100.
    """

    tokens: int
    bytes: int
    percent: float


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a budget holds; an opened cache reports the same in `stats()`.

    Attributes:
        budget: The budget as a configuration file would hold it.
        total_blocks: Whole blocks.
        total_bytes: Bytes of K and V in them.
        total_tokens: Tokens that fit into them.
        longest_sequence: Tokens that one sequence may hold: the limit of the model or of the configuration, or
            `total_tokens` where that is less.
    """

    budget: str | float
    total_blocks: int
    total_bytes: int
    total_tokens: int
    longest_sequence: int


@dataclass(frozen=True, kw_only=True)
class Need:
    """The budget that a number of sequences of one length takes.

    Attributes:
        blocks: Blocks, a shared prefix counted once.
        bytes: Bytes of K and V in them.
        budget: The same as a configuration file would hold it; it holds exactly `blocks` blocks.
        fits: Whether the planned budget holds them; None when none is planned.
    """

    blocks: int
    bytes: int
    budget: str | float
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """Sequences of one length.

    Attributes:
        length: Tokens of a sequence.
        blocks: Blocks that one takes alone.
        bytes: Bytes of K and V in them.
        waste: What of them holds no token.
        concurrent: Sequences of this length that the budget holds at once; None when no budget is planned.
        need: What the asked number of sequences takes; None when no number was asked.
    """

    length: int
    blocks: int
    bytes: int
    waste: Waste
    concurrent: int | None
    need: Need | None


@dataclass(frozen=True, kw_only=True)
class BlockSizePlan:
    """What would differ with another block size, in the same memory.

    Attributes:
        block_size: Tokens per block.
        bytes_per_block: Bytes of K and V in one block.
        total_blocks: Blocks that fit into the planned `total_bytes`; None when no budget is planned.
        shared_tokens: Tokens of the shared prefix that are stored once, those in full blocks.
        waste: Of one sequence of each planned length; None when no length is planned.
        most_wasted_bytes: The most that a sequence of any length wastes.
        concurrent: For each planned length, how many sequences fit at once; None when no budget is planned.
        needed_bytes: For each planned length, what the asked number takes; None when no number was asked.
    """

    block_size: int
    bytes_per_block: int
    total_blocks: int | None
    shared_tokens: int
    waste: Waste | None
    most_wasted_bytes: int
    concurrent: tuple[int, ...] | None
    needed_bytes: tuple[int, ...] | None


@dataclass(frozen=True)
class Sizing:
    """Blocks of one size, and how many of them sequences with a common prefix take.

    Attributes:
        block_size: Tokens per block.
        bytes_per_token: Bytes of K and V that one token takes.
        shared_prefix: Tokens with which all sequences begin alike; less than the length of any of them.
    """

    block_size: int
    bytes_per_token: int
    shared_prefix: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V in one block."""
        return self.block_size * self.bytes_per_token

    @property
    def shared_blocks(self) -> int:
        """Blocks stored once for all sequences: the full ones, since each writes to one that is partly filled."""
        return self.shared_prefix // self.block_size

    @property
    def shared_tokens(self) -> int:
        """Tokens stored once for all sequences."""
        return self.shared_blocks * self.block_size

    def own_blocks(self, length: int) -> int:
        """Blocks that each sequence of this length has for itself."""
        return blocks_for(length, self.block_size) - self.shared_blocks

    def blocks_for_all(self, sequences: int, length: int) -> int:
        """Blocks that so many sequences of this length take together."""
        return self.shared_blocks + sequences * self.own_blocks(length)

    def concurrent(self, total_blocks: int, length: int) -> int:
        """Sequences of this length that fit into so many blocks at once."""
        return max(0, total_blocks - self.shared_blocks) // self.own_blocks(length)

    def waste(self, lengths: Sequence[int]) -> Waste:
        """What one sequence of each of these lengths, at least one of them, wastes; all together."""
        room = sum(blocks_for(length, self.block_size) for length in lengths) * self.block_size
        wasted = room - sum(lengths)
        return Waste(tokens=wasted, bytes=wasted * self.bytes_per_token, percent=100 * wasted / room)

    def plan_length(self, length: int, sequences: int | None, capacity: Capacity | None) -> LengthPlan:
        """Plan for sequences of one length.

        Raises:
            ShapeError: So many sequences are more than a cache can number.
        """
        blocks = blocks_for(length, self.block_size)
        return LengthPlan(
            length=length,
            blocks=blocks,
            bytes=blocks * self.bytes_per_block,
            waste=self.waste([length]),
            concurrent=None if capacity is None else self.concurrent(capacity.total_blocks, length),
            need=None if sequences is None else self._need(length, sequences, capacity),
        )

    def _need(self, length: int, sequences: int, capacity: Capacity | None) -> Need:
        blocks = self.blocks_for_all(sequences, length)
        try:
            Budget("blocks", blocks)
            budget = Budget("bytes", blocks * self.bytes_per_block)
        except ConfigError as error:
            raise ShapeError(
                f"{sequences} sequences of {length} tokens are more than one cache can hold; plan for fewer or "
                "shorter ones, or larger blocks",
                details=[str(error)],
            ) from error
        return Need(
            blocks=blocks,
            bytes=blocks * self.bytes_per_block,
            budget=budget.to_plain(),
            fits=None if capacity is None else blocks <= capacity.total_blocks,
        )

    def plan_comparison(
        self, lengths: Sequence[int], sequences: int | None, capacity: Capacity | None
    ) -> BlockSizePlan:
        """Plan the same for blocks of this size, in the memory of a capacity that has others."""
        total_blocks = None if capacity is None else capacity.total_bytes // self.bytes_per_block
        concurrent = needed_bytes = None
        if total_blocks is not None:
            concurrent = tuple(self.concurrent(total_blocks, length) for length in lengths)
        if sequences is not None:
            needed_bytes = tuple(self.blocks_for_all(sequences, length) * self.bytes_per_block for length in lengths)
        return BlockSizePlan(
            block_size=self.block_size,
            bytes_per_block=self.bytes_per_block,
            total_blocks=total_blocks,
            shared_tokens=self.shared_tokens,
            waste=self.waste(lengths) if lengths else None,
            most_wasted_bytes=(self.block_size - 1) * self.bytes_per_token,
            concurrent=concurrent,
            needed_bytes=needed_bytes,
        )
