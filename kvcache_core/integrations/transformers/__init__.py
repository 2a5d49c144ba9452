"""A transformers `Cache` whose memory belongs to a kvcache-core backend.

```python
from kvcache_core.integrations.transformers import KvCache

cache = KvCache.for_model(model)
cache.prepare(inputs["input_ids"])                  # keeps what an earlier turn has in common with this prompt
model.generate(**inputs, cache=cache)
```

Importing this package also registers the attention implementation `"kvcache"`; see `attention`.
"""

from kvcache_core.integrations.transformers.attention import ATTENTION_NAME
from kvcache_core.integrations.transformers.cache import KvCache

__all__ = ["ATTENTION_NAME", "KvCache"]
