"""What backends share whose memory is a pool of blocks: the pool, a storage over it, attention, exports.

Nothing here asks which device it is on: what a device does differently is a method that its backend overrides.
Importing this package imports torch.
"""

from kvcache_core.paged.decode import StaticDecode
from kvcache_core.paged.gathering import attend_decode, gather_rows
from kvcache_core.paged.handle import PagedKvCacheHandle
from kvcache_core.paged.host_tier import HostTier, SwapTicket
from kvcache_core.paged.kernel import AttentionKernel
from kvcache_core.paged.layout import PoolLayout, TensorLayout
from kvcache_core.paged.pool import BlockPool, Pool, Upload
from kvcache_core.paged.reference import ReferenceKernel
from kvcache_core.paged.sharded import RowPlaces, ShardedPool, slots_of
from kvcache_core.paged.storage import PagedStorage
from kvcache_core.paged.tables import Tables

__all__ = [
    "AttentionKernel",
    "BlockPool",
    "HostTier",
    "PagedKvCacheHandle",
    "PagedStorage",
    "Pool",
    "PoolLayout",
    "ReferenceKernel",
    "RowPlaces",
    "ShardedPool",
    "StaticDecode",
    "SwapTicket",
    "Tables",
    "TensorLayout",
    "Upload",
    "attend_decode",
    "gather_rows",
    "slots_of",
]
