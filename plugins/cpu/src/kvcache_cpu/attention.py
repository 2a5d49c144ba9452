"""What attends over a sequence: the compiled kernel where it can, else torch, made to use all cores for one new token.

torch's `scaled_dot_product_attention` gives each kv head of a decode step to one thread, so that three
heads leave thirteen of sixteen cores idle. Cutting the context into chunks makes more, smaller tasks, whose partial
results are merged by their log-sum-exp (as in Flash-Decoding). Merging costs about 40 µs, so that it pays only
where at least half of the threads would have nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcache_core.attention import attend_dense
from kvcache_core.errors import BackendUnavailableError
from kvcache_core.plugin import CacheGeometry
from kvcache_cpu.native.kernel import NativeKernel
from kvcache_cpu.native.library import group_fault, library_fault, native_fault
from kvcache_cpu.options import AttentionKind

__all__ = ["attend", "choose_kernels"]

#: Contexts shorter than this are not worth the merging.
_LEAST_TOKENS = 4096

#: Nothing is cut where the kv heads alone keep more than this share of the threads busy.
_BUSY_ENOUGH = 0.5

#: No chunk is shorter than this.
_LEAST_CHUNK = 512

#: Returns the output and the log-sum-exp of the scores; None where this torch has no such kernel.
_flash_attention: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def choose_kernels(kind: AttentionKind, geometry: CacheGeometry, dtype: str) -> list[NativeKernel | None]:
    """Return the kernel for each layer group, or None where torch attends.

    Args:
        kind: What the options ask for.
        geometry: What is cached.
        dtype: The stored dtype by torch's name.

    Raises:
        BackendUnavailableError: `"native"` is asked for and cannot be had for every group.
    """
    if kind == "torch" or (kind == "auto" and library_fault() is not None):
        return [None] * len(geometry.groups)
    fault = native_fault(geometry, dtype) if kind == "native" else None
    if fault is not None:
        raise BackendUnavailableError(
            f"options.attention is 'native', but {fault}; set it to 'auto' or 'torch'",
            code="no-native-attention",
            reason=fault,
            backend="cpu",
            hint="set options.attention to 'auto' or 'torch'",
        )
    torch_dtype = getattr(torch, dtype)
    return [
        None if group_fault(group, dtype) is not None else NativeKernel(group, torch_dtype) for group in geometry.groups
    ]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Attend as `kvcache_core.attention.attend_dense` does; see there for shapes."""
    if query.shape[0] == 1 and query.dtype == key.dtype and key.shape[2] == value.shape[2] and _flash_attention:
        if window is not None:
            key, value = key[-window:], value[-window:]
        chunks = _chunks(key.shape[0], key.shape[1])
        if chunks > 1:
            return _attend_in_chunks(query, key, value, scale, chunks)
    return attend_dense(query, key, value, scale=scale, window=window)


def _chunks(length: int, num_kv_heads: int) -> int:
    """Into how many chunks to cut a context, so that the threads finish together; 1 for not at all."""
    threads = torch.get_num_threads()
    if length < _LEAST_TOKENS or _busy(num_kv_heads, threads) > _BUSY_ENOUGH:
        return 1
    return max(range(1, length // _LEAST_CHUNK + 1), key=lambda chunks: _busy(chunks * num_kv_heads, threads))


def _busy(tasks: int, threads: int) -> float:
    """Share of the threads' time that equal tasks fill, handed out in rounds."""
    rounds = -(-tasks // threads)
    return tasks / (rounds * threads)


def _cut(rows: torch.Tensor, chunks: int) -> torch.Tensor:
    """View rows `[S, heads, dim]` as `[chunks, heads, S / chunks, dim]`."""
    length, num_heads, dim = rows.shape
    return rows.view(chunks, length // chunks, num_heads, dim).transpose(1, 2)


def _attend_in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, chunks: int
) -> torch.Tensor:
    length, num_kv_heads, head_dim = key.shape
    folded = query.view(1, num_kv_heads, -1, head_dim)
    size = length // chunks
    rest = length - chunks * size
    folds = folded.expand(chunks, -1, -1, -1)
    parts = [_flash_attention(folds, _cut(key[rest:], chunks), _cut(value[rest:], chunks), scale=scale)]
    if rest:
        parts.append(_flash_attention(folded, _cut(key[:rest], 1), _cut(value[:rest], 1), scale=scale))
    weights = torch.cat([log_sum for _, log_sum in parts]).softmax(0)
    outputs = torch.cat([output for output, _ in parts]).to(weights.dtype)
    merged = (outputs * weights[..., None]).sum(0)
    return merged.view(1, -1, head_dim).to(query.dtype)
