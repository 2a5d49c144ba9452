"""What other systems' kernels take, made of a step and the pool without copying either.

Each function returns views of the pool and the step's own index tensors, with the names that the reader's function has
for its arguments, or raises `WouldCopy` when the memory does not lie as that reader needs it. The step's new tokens are
counted in all lengths; the caller stores them first, with `Step.write` or a kernel of his own followed by
`Step.mark_written`.

| export | reader | needs |
|---|---|---|
| `varlen` | `torch.nn.attention.varlen.varlen_attn` | half precision, equal dims; with FA2, blocks of 256 |
| `flash_attn` | `flash_attn_with_kvcache`, `flash_attn_varlen_func` | as above |
| `flashinfer` | FlashInfer's paged wrappers and `append_paged_kv_cache` | half precision, equal dims |
| `vllm` | `reshape_and_cache_flash` | equal dims |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch

from kvcache_core.errors import ShapeError, WouldCopy
from kvcache_core.paged.tables import pages_of, tables_of

if TYPE_CHECKING:
    from kvcache_core.paged.storage import PagedStorage
    from kvcache_core.step import Step

__all__ = [
    "FlashAttnExport",
    "FlashInferExport",
    "VarlenExport",
    "VllmExport",
    "flash_attn",
    "flashinfer",
    "varlen",
    "vllm",
]

#: Stock FlashAttention 2 reads pages of a multiple of so many tokens.
FA2_BLOCK_MULTIPLE = 256
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class VarlenExport:
    """Arguments of `varlen_attn`; pass `num_splits=1` with FA2.

    Attributes:
        key: K blocks, `[blocks, block_size, num_kv_heads, head_dim]`.
        value: V blocks likewise.
        cu_seq_q: int32 `[sequences + 1]`.
        cu_seq_k: int32 `[sequences + 1]`.
        max_q: Most new tokens of a sequence.
        max_k: Most tokens of a sequence.
        seqused_k: int32 `[sequences]`.
        block_table: int32 `[sequences, max blocks]`, padded with the null block 0.
        window_size: `(left, 0)`; left is -1 without a window.
        slot_mapping: int64 `[new tokens]`, for writes.
    """

    key: torch.Tensor
    value: torch.Tensor
    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    window_size: tuple[int, int]
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class FlashAttnExport:
    """Arguments of flash-attn's `flash_attn_with_kvcache` (`block_table` is FA3's `page_table`).

    Attributes:
        k_cache: K blocks, `[blocks, block_size, num_kv_heads, head_dim]`.
        v_cache: V blocks likewise.
        cache_seqlens: int32 `[sequences]`, the new tokens included.
        block_table: int32 `[sequences, max blocks]`, padded with the null block 0.
        cu_seqlens_q: int32 `[sequences + 1]`.
        max_seqlen_q: Most new tokens of a sequence.
        window_size: `(left, 0)`; left is -1 without a window.
        causal: Always True.
        slot_mapping: int64 `[new tokens]`, for writes.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    window_size: tuple[int, int]
    causal: bool
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class FlashInferExport:
    """Arguments of FlashInfer's paged wrappers and `append_paged_kv_cache`.

    A sequence without tokens has no pages, and a `last_page_len` of 1, since FlashInfer allows no 0.

    Attributes:
        paged_kv_cache: K and V blocks; `[blocks, block_size, num_kv_heads, head_dim]` each with `"NHD"`,
            `[blocks, num_kv_heads, block_size, head_dim]` with `"HND"`.
        kv_layout: `"NHD"` or `"HND"`.
        qo_indptr: Prefix sums of the new tokens, int32 `[sequences + 1]`.
        kv_indptr: Prefix sums of the pages, int32 `[sequences + 1]`.
        kv_indices: Block ids, int32 `[pages]`.
        last_page_len: Tokens in each sequence's last page, int32 `[sequences]`.
        batch_indices: Sequence of each new token, int32 `[new tokens]`.
        positions: Position of each new token, int32 `[new tokens]`.
        page_size: Tokens per block.
        window_left: Tokens a query sees besides itself, or -1.
    """

    paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    kv_layout: Literal["NHD", "HND"]
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    page_size: int
    window_left: int


@dataclass(frozen=True)
class VllmExport:
    """Arguments of vLLM's `reshape_and_cache_flash`, and the tables its attention kernels read.

    Attributes:
        key_cache: K blocks, `[blocks, block_size, num_kv_heads, head_dim]`.
        value_cache: V blocks likewise.
        slot_mapping: int64 `[new tokens]`.
        block_table: int32 `[sequences, max blocks]`, padded with the null block 0.
        seq_lens: int32 `[sequences]`.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def varlen(step: Step, layer: int, *, block_multiple: int = FA2_BLOCK_MULTIPLE) -> VarlenExport:
    """Export a step for torch's `varlen_attn`.

    Args:
        step: The step.
        layer: A layer that caches, or shares with one that does.
        block_multiple: What the block size has to be a multiple of: 256 with FA2, 1 with FA3.

    Raises:
        WouldCopy: The pool's dtype, dims or block size are not what the kernel reads.
        UnsupportedError: The backend does not offer this export.
        ShapeError: The layer does not exist or caches nothing.
        StepError: The step was aborted, or is over and its handles have changed.
    """
    source = _Source("varlen", step, layer)
    source.require_half_precision()
    source.require_equal_dims()
    source.require_blocks_of(block_multiple)
    tables = tables_of(source.batch)
    return VarlenExport(
        key=source.key,
        value=source.value,
        cu_seq_q=tables.cu_seqlens_q,
        cu_seq_k=tables.cu_seqlens_k,
        max_q=tables.max_new_tokens,
        max_k=tables.max_seq_len,
        seqused_k=tables.seq_lens,
        block_table=tables.block_tables,
        window_size=(source.window_left, 0),
        slot_mapping=source.batch.slot_mapping,
    )


def flash_attn(step: Step, layer: int, *, block_multiple: int = FA2_BLOCK_MULTIPLE) -> FlashAttnExport:
    """Export a step for flash-attn; takes and raises what `varlen` does."""
    source = _Source("flash_attn", step, layer)
    source.require_half_precision()
    source.require_equal_dims()
    source.require_blocks_of(block_multiple)
    tables = tables_of(source.batch)
    return FlashAttnExport(
        k_cache=source.key,
        v_cache=source.value,
        cache_seqlens=tables.seq_lens,
        block_table=tables.block_tables,
        cu_seqlens_q=tables.cu_seqlens_q,
        max_seqlen_q=tables.max_new_tokens,
        window_size=(source.window_left, 0),
        causal=True,
        slot_mapping=source.batch.slot_mapping,
    )


def flashinfer(step: Step, layer: int, *, kv_layout: Literal["NHD", "HND"] = "NHD") -> FlashInferExport:
    """Export a step for FlashInfer.

    Args:
        step: The step.
        layer: A layer that caches, or shares with one that does.
        kv_layout: The order of the blocks' dimensions; both are views.

    Raises:
        WouldCopy: The pool's dtype or dims are not what the kernels read.
        UnsupportedError: The backend does not offer this export.
        ShapeError: The layer does not exist or caches nothing, or there is no such layout.
        StepError: The step was aborted, or is over and its handles have changed.
    """
    source = _Source("flashinfer", step, layer)
    source.require_half_precision()
    source.require_equal_dims()
    if kv_layout not in ("NHD", "HND"):
        raise ShapeError(f"kv_layout must be 'NHD' or 'HND', not {kv_layout!r}")
    blocks = (source.key, source.value)
    if kv_layout == "HND":
        blocks = (blocks[0].transpose(1, 2), blocks[1].transpose(1, 2))
    pages = pages_of(source.batch)
    return FlashInferExport(
        paged_kv_cache=blocks,
        kv_layout=kv_layout,
        qo_indptr=source.batch.cu_seqlens_q,
        kv_indptr=pages.indptr.on_device,
        kv_indices=pages.indices.on_device,
        last_page_len=pages.last_page_len.on_device,
        batch_indices=pages.batch_indices.on_device,
        positions=pages.positions.on_device,
        page_size=source.batch.block_size,
        window_left=source.window_left,
    )


def vllm(step: Step, layer: int) -> VllmExport:
    """Export a step for vLLM's cache operations.

    Raises:
        WouldCopy: K and V differ in their dims.
        UnsupportedError: The backend does not offer this export.
        ShapeError: The layer does not exist or caches nothing.
        StepError: The step was aborted, or is over and its handles have changed.
    """
    source = _Source("vllm", step, layer)
    source.require_equal_dims()
    batch = source.batch
    return VllmExport(source.key, source.value, batch.slot_mapping, batch.block_tables, batch.seq_lens)


class _Source:
    """One layer of one step, and what can be said about sharing its memory."""

    def __init__(self, export: str, step: Step, layer: int) -> None:
        manager = step.manager
        manager.require_capability(f"export.{export}")
        producer = manager.geometry.producer(layer)
        if producer is None:
            raise ShapeError(f"layer {layer} caches nothing, so there is nothing to export")
        self.export = export
        self.batch = step.batch
        self.storage = cast("PagedStorage", manager.storage)
        self.spec = manager.own_spec(producer)
        self.key = self.storage.pool.key(producer)
        self.value = self.storage.pool.value(producer)
        self.storage.order()

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query sees, or -1 for all."""
        return -1 if self.spec.window is None else self.spec.window - 1

    def require_half_precision(self) -> None:
        if self.storage.dtype not in _HALF:
            self._refuse(
                f"it reads float16 and bfloat16 and the cache stores {self.storage.spec.dtype}",
                "open the cache with dtype bfloat16",
            )

    def require_equal_dims(self) -> None:
        key, value = self.spec.head_dim, self.spec.value_head_dim
        if key != value:
            self._refuse(f"it needs K and V of equal strides and their dims are {key} and {value}", "use Step.attend")

    def require_blocks_of(self, multiple: int) -> None:
        size = self.batch.block_size
        if size % multiple:
            self._refuse(
                f"it reads pages of a multiple of {multiple} tokens and the cache's blocks have {size}",
                f"open the cache with block_size {multiple}",
            )

    def _refuse(self, reason: str, help_: str) -> None:
        raise WouldCopy(
            f"export {self.export!r} would have to copy the cache: {reason}; {help_}",
            export=self.export,
            reason=reason,
        )
