"""Block tables: logical block index -> physical block id, with the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcache_core.counts import check_count
from kvcache_core.errors import HandleError, ShapeError

__all__ = ["BlockTable", "MutableBlockTable", "blocks_for"]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take."""
    return -(-num_tokens // block_size)


class BlockTable:
    """An immutable snapshot of a sequence's block table.

    Args:
        physical_blocks: Physical block ids in logical order, those reserved but not yet filled included.
        sequence_length: Tokens stored.
        block_size: Tokens per block.

    Raises:
        ShapeError: `block_size` is less than 1, or the blocks have no room for `sequence_length` tokens.
    """

    __slots__ = ("_blocks", "_length", "_size")

    def __init__(self, physical_blocks: Iterable[int], sequence_length: int, block_size: int) -> None:
        self._blocks: tuple[int, ...] | list[int] = tuple(physical_blocks)
        self._size = check_count("block_size", block_size, least=1)
        self._length = check_count("sequence_length", sequence_length)
        if sequence_length > self.capacity:
            raise ShapeError(
                f"{sequence_length} tokens do not fit {len(self._blocks)} blocks of {block_size} tokens; add blocks"
            )

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
        check_count("num_tokens", num_tokens)
        return blocks_for(num_tokens, self._size)

    def has_free_space(self, num_tokens: int = 1) -> bool:
        """Whether `num_tokens` further tokens fit into the held blocks.

        Raises:
            ShapeError: `num_tokens` is negative or not an int.
        """
        return check_count("num_tokens", num_tokens) <= self.free_tokens

    def slot(self, position: int) -> int:
        """Physical token slot (`block id * block_size + row`) of a stored or reserved position.

        Raises:
            ShapeError: The position lies beyond the held blocks.
        """
        if not 0 <= check_count("position", position) < self.capacity:
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

    __slots__ = ("_allocate", "_frozen")
    __hash__ = None  # type: ignore[assignment]

    _blocks: list[int]

    def __init__(
        self,
        physical_blocks: Iterable[int],
        sequence_length: int,
        block_size: int,
        allocate: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__(physical_blocks, sequence_length, block_size)
        self._blocks = list(self._blocks)
        self._allocate = allocate
        self._frozen = False

    def add_blocks(self, blocks: int | Iterable[int]) -> None:
        """Append blocks to the table.

        Args:
            blocks: How many to take from the cache's allocator, or the ids of blocks that the caller has got
                from `BlockAllocator.allocate_blocks` and now hands over.

        Raises:
            CacheFullError: Fewer blocks are free than asked for; the table is unchanged.
            ShapeError: The count is negative or not an int, or a block id is no such thing.
            HandleError: The context manager that yielded the table has exited.
        """
        self._require_editable()
        if isinstance(blocks, int):
            blocks = self._allocate(check_count("blocks", blocks))
        self._blocks += [check_count("a block id", block, least=1) for block in blocks]

    def extend_sequence(self, num_tokens: int) -> None:
        """Make sure that `num_tokens` further tokens fit; short blocks are taken from the allocator.

        The sequence length itself moves only when a step commits.

        Raises:
            CacheFullError: Blocks are short; the table is unchanged.
            ShapeError: `num_tokens` is negative or not an int.
            HandleError: The context manager that yielded the table has exited.
        """
        self._require_editable()
        needed = blocks_for(self._length + check_count("num_tokens", num_tokens), self._size)
        if needed > len(self._blocks):
            self.add_blocks(needed - len(self._blocks))

    def freeze(self) -> None:
        """Refuse further changes, since nobody would adopt the blocks; for core."""
        self._frozen = True

    def _require_editable(self) -> None:
        if self._frozen:
            raise HandleError(
                "this block table is no longer being edited; enter block_table_mut() again", reason="stale"
            )
