"""The CUDA backend of kvcache-core: a pool of blocks on an NVIDIA GPU, read by paged attention kernels.

Nothing is imported here, so that listing backends stays cheap; see `kvcache_cuda.storage.CudaStorage`.
"""
