"""The CPU backend of kvcache-core: contiguous rows in reserved virtual memory, forks without copying.

Nothing is imported here, so that listing backends stays cheap; see `kvcache_cpu.storage.CpuStorage`.
"""
