"""The protocol a backend implements: the memory of a cache, and attention over it.

Core keeps all the books: which block belongs to whom and how often, lengths, forks, steps, prefixes,
eviction, stats. A storage only holds bytes and computes. It comes in two placements:

* **paged**: memory is a pool of blocks and a token is found through the block table. Forks share blocks by
  id; core asks for a copy of a shared block before somebody writes to it.
* **contiguous**: each sequence has memory of its own, called its slot, where the tokens of one layer lie in
  order. Forks share bytes through whatever the platform offers; block ids only account for them.

Every method says what each placement has to do. Core calls `open`, `fork`, `reserve`, `truncate`, `scrub` and
`close` under the manager's lock, and `plan`, `write`, `attend` and `gather` without it, never two at a time for
the same sequence. A method that raises must leave its sequence as it was; core then undoes its own part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from kvcache_core.batch import Batch, Segment
from kvcache_core.counts import check_count
from kvcache_core.errors import UnsupportedError
from kvcache_core.geometry import CacheGeometry

if TYPE_CHECKING:
    import torch

    from kvcache_core.handle import KvCacheHandle

__all__ = [
    "CAPABILITIES",
    "Batch",
    "BlockCopy",
    "BlockRows",
    "DeviceMemory",
    "Placement",
    "Segment",
    "Storage",
    "StorageSpec",
]

Placement = Literal["contiguous", "paged"]

#: What a backend may declare beyond the mandatory contract. `export.<name>` is open-ended.
CAPABILITIES: frozenset[str] = frozenset(
    {"swap", "compress", "move", "window_frees", "unequal_head_dims", "graph_capture"}
)


@dataclass(frozen=True, kw_only=True)
class StorageSpec:
    """Everything a storage is built from; all values are resolved and valid.

    Attributes:
        geometry: The shape of what is cached.
        block_size: Tokens per block.
        num_blocks: The budget. Core hands out block ids 1 to `num_blocks`; id 0 is the null block, never written.
        max_sequence_length: No sequence will ever hold more tokens.
        dtype: Stored dtype by torch's name, such as `"bfloat16"`.
        device: Device by torch's name, such as `"cpu"` or `"cuda:1"`.
        initial_blocks: Blocks to have memory for at once, where a pool can grow up to `num_blocks`.
        scrub: Memory that no sequence names any more is zeroed.
        options: The backend's own validated options.

    Raises:
        ShapeError: A number is not an int, or `block_size`, `num_blocks` or `max_sequence_length` is less than 1.
    """

    geometry: CacheGeometry
    block_size: int
    num_blocks: int
    max_sequence_length: int
    dtype: str
    device: str
    initial_blocks: int = 0
    scrub: bool = False
    options: Any = None

    def __post_init__(self) -> None:
        check_count("initial_blocks", self.initial_blocks)
        for name in ("block_size", "num_blocks", "max_sequence_length"):
            check_count(name, getattr(self, name), least=1)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device in bytes: what it has, and what is free now."""

    total: int
    free: int


class BlockCopy(NamedTuple):
    """Copy the first `rows` token rows of block `source` to block `target`, in all layers."""

    source: int
    target: int
    rows: int


class BlockRows(NamedTuple):
    """Token rows `start` to `stop` (exclusive) of one block, in all layers."""

    block: int
    start: int
    stop: int


class Storage(ABC):
    """The memory and kernels of one cache. See the module's docstring for who calls what.

    Attributes:
        placement: `"contiguous"` or `"paged"`.
        handle_type: The backend's own subclass of `KvCacheHandle`.
        dense_is_view: Whether `gather` returns views of the storage (True) or copies (False).
        capabilities: What it can do beyond the mandatory contract; see `CAPABILITIES`.
        spec: What it was built from.
        device: Where it lives, a `torch.device`.
        dtype: What `gather` returns and `write` takes, a `torch.dtype`.
    """

    placement: ClassVar[Placement]
    handle_type: ClassVar[type[KvCacheHandle]]
    dense_is_view: ClassVar[bool]
    capabilities: ClassVar[frozenset[str]] = frozenset()

    spec: StorageSpec
    device: torch.device
    dtype: torch.dtype

    def __init__(self, spec: StorageSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def device_memory(cls, device: str, options: Any) -> DeviceMemory:
        """Return the memory of `device`, from which a fractional budget is taken."""

    @classmethod
    def bytes_per_token(cls, geometry: CacheGeometry, dtype: str, options: Any) -> int:
        """Return the bytes that one token takes in all layers together, for budgets and stats.

        K and V in `dtype`, unless a storage that packs them overrides it.
        """
        return geometry.bytes_per_token(dtype)

    # -- sequences ---------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, max_tokens: int) -> Any:
        """Return the slot of a new, empty sequence that may grow to `max_tokens` tokens.

        A paged storage needs none and may return None. A contiguous one reserves address space here, so
        that `reserve` never has to move data.
        """

    @abstractmethod
    def fork(self, slot: Any, num_tokens: int) -> Any:
        """Return the slot of a new sequence that starts with the first `num_tokens` tokens of `slot`.

        Whatever either of the two writes, truncates or closes afterwards, the other does not see. A paged
        storage may return None: core has already shared the blocks.
        """

    def shared_tokens(self, slot: Any, num_tokens: int) -> int:
        """Return how many leading tokens `fork(slot, num_tokens)` would share rather than copy.

        Core charges the copied rest to the new sequence. All of them, unless overridden.
        """
        return num_tokens

    @abstractmethod
    def reserve(self, slot: Any, blocks: Sequence[int], start: int, stop: int, copies: Sequence[BlockCopy]) -> None:
        """Make positions `start` to `stop` of a sequence writable, without touching what others see.

        A paged storage is not asked where new tokens stay within the sequence's own last block: the memory of a whole
        block is there since its first row was asked for.

        Args:
            slot: The sequence.
            blocks: Its block ids after the reservation.
            start: The first position that may be written; what lies before it is unchanged.
            stop: One past the last position that may be written.
            copies: Blocks that were shared and now have a private id. A paged storage copies the rows; a
                contiguous one may ignore them and do what its own sharing needs.
        """

    @abstractmethod
    def truncate(self, slot: Any, num_tokens: int) -> None:
        """Drop all tokens of the sequence from position `num_tokens` on and give their memory back.

        What a fork shares stays. With `spec.scrub`, a contiguous storage zeroes what it keeps of the dropped
        rows; a paged one leaves that to `scrub`.
        """

    @abstractmethod
    def close(self, slot: Any) -> None:
        """Forget the sequence and give its memory back, except what forks or tensors still refer to."""

    def scrub(self, rows: Iterable[BlockRows]) -> None:
        """Zero rows that no sequence names any more; called only when `spec.scrub` is set.

        A paged storage has to implement it. A contiguous one has nothing to do here.
        """
        return

    # -- data --------------------------------------------------------------------------------------------

    def upload(self, indices: torch.Tensor) -> torch.Tensor:
        """Bring an index tensor of a step from the host to the device.

        A device that can copy without making the host wait overrides it; the host tensor may be given up at once.
        """
        return indices.to(self.device)

    def plan(self, batch: Batch) -> Any:
        """Prepare what all layers of a step share; the result is kept as `batch.plan`."""
        return None

    @abstractmethod
    def write(self, batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens of one layer.

        Args:
            batch: The step's sequences; `reserve` was called for each.
            layer: A layer that caches K and V of its own.
            key: `[batch.num_tokens, num_kv_heads, head_dim]` in `dtype`, any strides, no gradient.
            value: `[batch.num_tokens, num_kv_heads, value_head_dim]` likewise.
        """

    @abstractmethod
    def attend(self, batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """Causal attention of the new tokens over everything cached in `layer`.

        Row `i` of a sequence's new tokens has position `start + i` and sees positions `p` with
        `start + i - window < p <= start + i` (all of `p <= start + i` when `window` is None).

        Args:
            batch: The step's sequences; `write` was called for `layer`.
            layer: A layer that caches K and V of its own.
            query: `[batch.num_tokens, num_heads, head_dim]`, any floating dtype, `num_heads` a multiple of
                `num_kv_heads`; query head `h` reads kv head `h // (num_heads // num_kv_heads)`.
            scale: Factor on the scores.
            window: Tokens a query sees, itself included, or None.

        Returns:
            `[batch.num_tokens, num_heads, value_head_dim]` in the dtype of `query`.
        """

    def prefers_attend(self, num_new_tokens: int) -> bool:
        """Whether `attend` is a faster way to attention than torch's own over what `context` returns.

        For callers that could do either. True where `context` has to copy, unless overridden.

        Args:
            num_new_tokens: New tokens of a sequence, at most.
        """
        return not self.dense_is_view

    @abstractmethod
    def gather(
        self, slot: Any, blocks: Sequence[int], num_tokens: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K `[num_tokens, num_kv_heads, head_dim]` and V `[num_tokens, num_kv_heads, value_head_dim]`.

        Exactly the first `num_tokens` tokens of the sequence; views where `dense_is_view`, else copies.
        """

    def context(self, batch: Batch, index: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `gather` would for sequence `index` of a step, with the step's new tokens.

        Overridden where `plan` has it at hand, since models that bring their own attention ask in every layer.
        """
        segment = batch.segments[index]
        return self.gather(segment.slot, segment.blocks, segment.stop, layer)

    # -- the host tier, for the capability "swap" ----------------------------------------------------------

    def swap_out(self, slot: Any, blocks: Sequence[int], num_tokens: int) -> Any:
        """Copy a sequence's tokens to another tier and return a ticket for them; the sequence stays as it is.

        Core closes the slot and releases the blocks right afterwards: what is then written to them must not overtake
        the copy. Called under the manager's lock, as the other two.

        Args:
            slot: The sequence.
            blocks: The ids of the blocks that hold its tokens.
            num_tokens: How many tokens.

        Raises:
            CacheFullError: The tier is full; nothing has changed.
            UnsupportedError: There is no such tier.
        """
        raise UnsupportedError("this backend cannot swap", capability="swap")

    def swap_in(self, ticket: Any, blocks: Sequence[int]) -> Any:
        """Copy the tokens behind a ticket to `blocks`, free its place in the tier and return the slot.

        What is then read from the blocks must not overtake the copy. If it raises, the ticket stays valid.
        """
        raise UnsupportedError("this backend cannot swap", capability="swap")

    def drop_swapped(self, ticket: Any) -> None:
        """Free the place of a ticket in the tier."""
        raise UnsupportedError("this backend cannot swap", capability="swap")

    def demote(self, blocks: Sequence[int]) -> list[Any]:
        """Copy whole blocks of a paged storage to the other tier and return a ticket for each, in order.

        Core releases the blocks right afterwards, as with `swap_out`; it calls this only where `tier_free_blocks` says
        that there is room. `drop_swapped` takes these tickets too. If it raises, nothing has changed.
        """
        raise UnsupportedError("this backend cannot swap", capability="swap")

    def promote(self, tickets: Sequence[Any], blocks: Sequence[int]) -> None:
        """Copy what lies behind tickets of `demote` to as many blocks, and free its places in the tier.

        What is then read from the blocks must not overtake the copy. If it raises, all tickets stay valid.
        """
        raise UnsupportedError("this backend cannot swap", capability="swap")

    @property
    def tier_blocks(self) -> int:
        """Blocks that the other tier has; 0 where there is none."""
        return 0

    @property
    def tier_free_blocks(self) -> int:
        """Of these, blocks that nothing lies in."""
        return 0

    # -- the whole ---------------------------------------------------------------------------------------

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V in one block."""
        spec = self.spec
        return spec.block_size * self.bytes_per_token(spec.geometry, spec.dtype, spec.options)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory this storage holds at the moment."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give all memory back. Tensors that were handed out stay readable while they are referenced."""

    def audit(self) -> Iterable[str]:
        """Return a line for each inconsistency the storage finds in its own books; none when all is well."""
        return ()
