"""Runs the trace over vLLM's `KVCacheManager`; a program for an interpreter that has vLLM, and not for import."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request


def main(task: dict[str, Any]) -> dict[str, float]:
    """Return the microseconds of each operation."""
    size = task["block_size"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=task["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        max_model_len=4096,
        scheduler_block_size=size,
        hash_block_size=size,
        enable_caching=True,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(size, sha256)
    gc.collect()
    gc.disable()
    seconds = {"admit": 0.0, "decode": 0.0, "free": 0.0}
    prompts, batch = task["prompts"], task["batch"]
    for first in range(0, len(prompts), batch):
        requests = []
        for number, prompt in enumerate(prompts[first : first + batch], start=first):
            start = time.perf_counter()
            request = Request(
                str(number), prompt, SamplingParams(max_tokens=task["decoded"]), None, block_hasher=hasher
            )
            found, computed, *_ = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, len(prompt) - computed, computed, found) is None:
                raise MemoryError("vLLM found no room")
            seconds["admit"] += time.perf_counter() - start
            request.num_computed_tokens = len(prompt)
            requests.append(request)
        for token in range(task["decoded"]):
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
        "admit": seconds["admit"] / len(prompts) * 1e6,
        "free": seconds["free"] / len(prompts) * 1e6,
        "decode": seconds["decode"] / (len(prompts) * task["decoded"]) * 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.stdin.read()))))
