"""Block tables: logical block index -> physical block id, with the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcache_core.errors import ShapeError

__all__ = ["BlockTable", "MutableBlockTable", "blocks_for"]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take."""
    return -(-num_tokens // block_size)


class BlockTable:
    """An immutable snapshot of a sequence's block table.

    Attributes:
        physical_blocks: Physical block ids in logical order, those reserved but not yet filled included.
        sequence_length: Tokens stored.
        block_size: Tokens per block.
    """

    __slots__ = ("_blocks", "_length", "_size")

    def __init__(self, physical_blocks: Iterable[int], sequence_length: int, block_size: int) -> None:
        self._blocks: tuple[int, ...] | list[int] = tuple(physical_blocks)
        self._length = sequence_length
        self._size = block_size

    @property
    def physical_blocks(self) -> tuple[int, ...]:
        """Physical block ids in logical order."""
        return tuple(self._blocks)

    @property
    def sequence_length(self) -> int:
        """Tokens stored."""
        return self._length

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._size

    @property
    def logical_to_physical(self) -> dict[int, int]:
        """Logical block index -> physical block id, a fresh dict."""
        return dict(enumerate(self._blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks held, filled or not."""
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Tokens the held blocks have room for."""
        return len(self._blocks) * self._size

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit into the held blocks."""
        return self.capacity - self._length

    def blocks_needed_for_length(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens takes.

        Raises:
            ShapeError: `num_tokens` is negative or not an int.
        """
        _check_count("num_tokens", num_tokens)
        return blocks_for(num_tokens, self._size)

    def has_free_space(self, num_tokens: int = 1) -> bool:
        """Whether `num_tokens` further tokens fit into the held blocks.

        Raises:
            ShapeError: `num_tokens` is negative or not an int.
        """
        return _check_count("num_tokens", num_tokens) <= self.free_tokens

    def slot(self, position: int) -> int:
        """Physical token slot (`block id * block_size + row`) of a stored or reserved position.

        Raises:
            ShapeError: The position lies beyond the held blocks.
        """
        if not 0 <= _check_count("position", position) < self.capacity:
            raise ShapeError(f"position {position} lies beyond the table's capacity of {self.capacity} tokens")
        return self._blocks[position // self._size] * self._size + position % self._size

    def __len__(self) -> int:
        return len(self._blocks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockTable):
            return NotImplemented
        return (
            self.physical_blocks == other.physical_blocks
            and self._length == other._length
            and self._size == other._size
        )

    def __hash__(self) -> int:
        return hash((self.physical_blocks, self._length, self._size))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(physical_blocks={list(self._blocks)}, "
            f"sequence_length={self._length}, block_size={self._size})"
        )


class MutableBlockTable(BlockTable):
    """A block table whose capacity can be extended; see `KvCacheHandle.block_table_mut`.

    Nothing changes for the handle until the context manager that yielded the table exits without an error.
    """

    __slots__ = ("_allocate",)
    __hash__ = None  # type: ignore[assignment]

    _blocks: list[int]

    def __init__(
        self,
        physical_blocks: Iterable[int],
        sequence_length: int,
        block_size: int,
        allocate: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__((), sequence_length, block_size)
        self._blocks = list(physical_blocks)
        self._allocate = allocate

    def add_blocks(self, blocks: int | Iterable[int]) -> None:
        """Append blocks to the table.

        Args:
            blocks: How many to take from the cache's allocator, or the ids of blocks that the caller has got
                from `BlockAllocator.allocate_blocks` and now hands over.

        Raises:
            CacheFullError: Fewer blocks are free than asked for; the table is unchanged.
            ShapeError: The count is negative or not an int.
        """
        if isinstance(blocks, int):
            blocks = self._allocate(_check_count("blocks", blocks))
        self._blocks.extend(blocks)

    def extend_sequence(self, num_tokens: int) -> None:
        """Make sure that `num_tokens` further tokens fit; short blocks are taken from the allocator.

        The sequence length itself moves only when a step commits.

        Raises:
            CacheFullError: Blocks are short; the table is unchanged.
            ShapeError: `num_tokens` is negative or not an int.
        """
        needed = self.blocks_needed_for_length(self._length + _check_count("num_tokens", num_tokens))
        if needed > len(self._blocks):
            self.add_blocks(needed - len(self._blocks))


def _check_count(name: str, value: int) -> int:
    if type(value) is not int or value < 0:
        raise ShapeError(f"{name} must be an int of at least 0, not {value!r}")
    return value
