"""vLLM's attention kernel for CPUs, called through its operators; importing vLLM itself would take long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

__all__ = ["vllm_decode"]

_BLOCK_SIZE = 128


def vllm_decode(
    query: torch.Tensor, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> Callable[[], torch.Tensor] | None:
    """Return a call of vLLM's kernel for one new token of each sequence, or None where it is not installed.

    Args:
        query: `[sequences, num_heads, head_dim]`.
        caches: K and V of each sequence, `[tokens, num_kv_heads, head_dim]`; they are copied to vLLM's blocks.
        scale: Factor on the scores.
    """
    if not _load():
        return None
    ops = torch.ops._C
    lengths = [key.shape[0] for key, _ in caches]
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads = caches[0][0].shape[1]
    isa = "amx" if query.dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    sizes = [-(-length // _BLOCK_SIZE) for length in lengths]
    blocks = torch.zeros(sum(sizes) + 1, num_kv_heads, 2 * _BLOCK_SIZE, head_dim, dtype=query.dtype)
    keys, values = blocks.chunk(2, dim=2)
    table = torch.zeros(num_sequences, max(sizes), dtype=torch.int32)
    first = 1
    for row, (size, (key, value)) in enumerate(zip(sizes, caches, strict=True)):
        table[row, :size] = torch.arange(first, first + size)
        slots = torch.arange(key.shape[0]) + first * _BLOCK_SIZE
        ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), keys, values, slots, isa)
        first += size
    starts = torch.arange(num_sequences + 1, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan = ops.get_scheduler_metadata(
        num_sequences, num_heads, num_kv_heads, head_dim, seq_lens, query.dtype, starts, True, -1, isa, True, None
    )
    out = torch.empty_like(query)

    def attend() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query, keys, values, out, starts, seq_lens, scale, True, None, -1, table, 0.0, plan, None, None
        )
        return out

    return attend


@cache
def _load() -> bool:
    """Load the library that fits this machine, as vLLM itself does."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return False
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    library = Path(spec.submodule_search_locations[0], f"{name}.abi3.so")
    if not library.exists():
        return False
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return True
