"""The trace of the suite `bookkeeping` over vLLM's `KVCacheManager`; importing this needs vLLM."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

__all__ = ["run_vllm_trace"]


def run_vllm_trace(
    prompts: Sequence[list[int]], *, block_size: int, num_blocks: int, batch: int, decoded: int
) -> dict[str, float]:
    """Return the seconds of each operation.

    Args:
        prompts: Token ids of the requests.
        block_size: Tokens of a block.
        num_blocks: Blocks of the pool.
        batch: Requests that decode together.
        decoded: Tokens that each of them decodes.
    """
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=4096,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    gc.collect()
    gc.disable()
    try:
        return _time(manager, hasher, prompts, batch, decoded)
    finally:
        gc.enable()


def _time(
    manager: KVCacheManager, hasher: Any, prompts: Sequence[list[int]], batch: int, decoded: int
) -> dict[str, float]:
    seconds = {"admit": 0.0, "decode": 0.0, "free": 0.0}
    for first in range(0, len(prompts), batch):
        requests = []
        for number, prompt in enumerate(prompts[first : first + batch], start=first):
            start = time.perf_counter()
            request = Request(str(number), prompt, SamplingParams(max_tokens=decoded), None, block_hasher=hasher)
            found, computed, *_ = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, len(prompt) - computed, computed, found) is None:
                raise MemoryError("vLLM found no room")
            seconds["admit"] += time.perf_counter() - start
            request.num_computed_tokens = len(prompt)
            requests.append(request)
        for token in range(decoded):
            start = time.perf_counter()
            for request in requests:
                request.append_output_token_ids(token)
                if manager.allocate_slots(request, 1) is None:
                    raise MemoryError("vLLM found no room")
                request.num_computed_tokens += 1
            seconds["decode"] += time.perf_counter() - start
        start = time.perf_counter()
        for request in requests:
            manager.free(request)
        seconds["free"] += time.perf_counter() - start
    return {
        "admit": seconds["admit"] / len(prompts),
        "free": seconds["free"] / len(prompts),
        "decode": seconds["decode"] / (len(prompts) * decoded),
    }
