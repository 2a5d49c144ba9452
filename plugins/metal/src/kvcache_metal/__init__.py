"""The Metal backend of kvcache-core: a pool of blocks on an Apple GPU, through torch MPS.

Nothing is imported here, so that listing backends stays cheap; see `kvcache_metal.storage.MetalStorage`.
"""
