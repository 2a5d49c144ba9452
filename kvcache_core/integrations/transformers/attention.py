"""The attention implementation `"kvcache"`: the backend attends over its own memory.

```python
model.set_attn_implementation("kvcache")
```

Where the K of a layer comes from a `KvCache` and attention is plainly causal (every decode step, and a prefill into
an empty cache), the backend computes it; grouped heads then read K and V once instead of once for each query head.
Everything else goes to transformers' own `sdpa`, masks included: forwards without a cache or with another one,
training, chunks of a prefill, `position_bias`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION_NAME", "attention_forward"]

#: What `set_attn_implementation` takes.
ATTENTION_NAME = "kvcache"

#: Arguments that change what is computed; given, the layer is not ours to attend.
_NOT_PLAIN = ("position_bias", "softcap", "s_aux", "sinks", "output_attentions")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer, in the form transformers calls it.

    Args:
        module: The attention module.
        query: `[batch, heads, new tokens, head dim]`.
        key: `[batch, kv heads, tokens, head dim]`, as `KvCache.update` returned it or from anywhere else.
        value: Likewise.
        attention_mask: None where attention is plainly causal.
        dropout: As in training.
        scaling: Factor on the scores.
        kwargs: What the model passes besides.

    Returns:
        `[batch, new tokens, heads, value head dim]` and no attention weights.
    """
    written = getattr(key, "kvcache_step", None)
    is_plain = attention_mask is None and not dropout and not any(kwargs.get(name) for name in _NOT_PLAIN)
    is_causal = kwargs.get("is_causal")
    if written is not None and is_plain and (is_causal or is_causal is None):
        step, layer = written
        return step.attend(layer, query[0].transpose(0, 1), scale=scaling).unsqueeze(0), None
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
