"""A decode step whose tensors never move, so that it can be captured once and replayed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from kvcache_core.errors import ShapeError, UnsupportedError
from kvcache_core.paged.tables import Tables

if TYPE_CHECKING:
    from kvcache_core.paged.storage import PagedStorage
    from kvcache_core.step import Step

__all__ = ["StaticDecode"]


class StaticDecode:
    """One new token for each of up to `max_sequences` sequences, at fixed addresses.

    `load` fills in a step's tables; `write` and `attend` then do for all layers what the step's own methods do, by
    device tensors alone. Rows beyond the step's sequences are padding: they are stored nowhere, and their
    attention is zero.

    ```python
    static = StaticDecode(cache.storage, max_sequences=32, max_blocks=64)
    ...                                  # capture: for each layer static.write(...) and static.attend(...)
    with cache.step({handle: [token] for handle, token in batch}) as step:
        static.load(step)
        graph.replay()
        step.mark_written()
    ```

    Args:
        storage: The memory.
        max_sequences: Rows of every tensor.
        max_blocks: Width of the block tables.

    Attributes:
        positions: Position of each new token, int64 `[max_sequences]`; 0 for padding.
        slot_mapping: Where each is stored, int64 `[max_sequences]`; a slot of the trash block for padding.
        tables: What the kernel reads.

    Raises:
        UnsupportedError: The backend does not declare `graph_capture`.
        ShapeError: There is room for nothing.
    """

    def __init__(self, storage: PagedStorage, max_sequences: int, max_blocks: int) -> None:
        if "graph_capture" not in storage.capabilities:
            raise UnsupportedError(
                "this backend cannot keep the tables of a decode step in place; use Step.attend",
                capability="graph_capture",
            )
        if max_sequences < 1 or max_blocks < 1:
            raise ShapeError(f"a static decode step needs room, not {max_sequences} sequences of {max_blocks} blocks")
        self._storage = storage
        self.max_sequences = max_sequences
        self.max_blocks = max_blocks
        device = storage.device
        with torch.inference_mode(False):
            self.positions = torch.zeros(max_sequences, dtype=torch.int64, device=device)
            self.slot_mapping = torch.full((max_sequences,), storage.pool.trash_slot, dtype=torch.int64, device=device)
            self.tables = Tables(
                block_tables=torch.zeros(max_sequences, max_blocks, dtype=torch.int32, device=device),
                seq_lens=torch.zeros(max_sequences, dtype=torch.int32, device=device),
                cu_seqlens_q=torch.arange(max_sequences + 1, dtype=torch.int32, device=device),
                cu_seqlens_k=torch.zeros(max_sequences + 1, dtype=torch.int32, device=device),
                max_new_tokens=1,
                max_seq_len=max_blocks * storage.spec.block_size,
            )

    def load(self, step: Step) -> None:
        """Fill in the tables of a step, in place and without waiting for the device.

        Raises:
            ShapeError: It has more sequences than rows, a sequence adds other than one token, or has more blocks than
                the tables are wide; nothing has changed.
            StepError: It was aborted, or is over and its handles have changed.
        """
        batch, size = step.batch, self._storage.spec.block_size
        segments, rows, width = batch.segments, self.max_sequences, self.max_blocks
        if len(segments) > rows:
            raise ShapeError(f"this step has {len(segments)} sequences and the static one has room for {rows}")
        tables, lengths, sums = array("i"), array("i"), array("i", [0])
        positions, slots = array("q"), array("q")
        for segment in segments:
            used = segment.blocks[: -(-segment.stop // size)]
            if segment.num_new_tokens != 1 or len(used) > width:
                raise ShapeError(
                    f"a static decode step takes one new token a sequence and {width * size} tokens in all, not "
                    f"{segment.num_new_tokens} and {segment.stop}"
                )
            tables.extend(used)
            tables.extend([0] * (width - len(used)))
            lengths.append(segment.stop)
            sums.append(sums[-1] + segment.stop)
            positions.append(segment.start)
            slots.append(used[-1] * size + segment.start % size)
        padding = rows - len(segments)
        tables.extend([0] * (padding * width))
        lengths.extend([0] * padding)
        sums.extend([sums[-1]] * padding)
        positions.extend([0] * padding)
        slots.extend([self._storage.pool.trash_slot] * padding)
        self._storage.order()
        for target, values in (
            (self.tables.block_tables, tables),
            (self.tables.seq_lens, lengths),
            (self.tables.cu_seqlens_k, sums),
            (self.positions, positions),
            (self.slot_mapping, slots),
        ):
            host = torch.frombuffer(values, dtype=target.dtype).view(target.shape)
            target.copy_(self._storage.upload(host))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens of one layer; `[max_sequences, num_kv_heads, dim]` each, in the cache's dtype."""
        self._storage.pool.write(layer, self.slot_mapping, key, value)

    def attend(self, layer: int, query: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
        """Attend the new tokens over their sequences in one layer.

        Args:
            layer: A layer that caches, or shares with one that does.
            query: `[max_sequences, num_heads, head_dim]`.
            scale: Factor on the scores; `head_dim ** -0.5` when None.

        Returns:
            `[max_sequences, num_heads, value_head_dim]` in the dtype of `query`.
        """
        geometry = self._storage.spec.geometry
        spec, producer = geometry.layer_spec(layer), geometry.producer(layer)
        if spec is None or producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so there is nothing to attend to")
        factor = spec.head_dim**-0.5 if scale is None else scale
        return self._storage.kernel.decode(self.tables, producer, query, factor, spec.window)
