"""The attention implementation `"kvcache"`: ragged batches without a padded copy, and attention by the backend.

```python
model.set_attn_implementation("kvcache")
```

Where the K of a layer comes from a `KvCache` and attention is causal over it, the backend attends over its own memory:
for batches, whose pads then cost nothing, where K and V would have to be gathered, and where the storage says that its
own attention is the faster (`Storage.prefers_attend`). Else, a decode step of one sequence in float32 folds the query
heads of each kv head into the query length, so that torch reads K and V once and not once for each query head; in half
precision torch's own grouped kernel is the faster one.

Everything else goes to transformers' own `sdpa`, masks included: forwards without a cache or with another one,
training, chunks of one sequence's prefill, `position_bias`, masks of the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers.known_masks import look_up
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.integrations.transformers.pending import (
    built_mask,
    is_of_batch,
    is_pending,
    of_batch,
    pending_mask,
    written_layer,
)

__all__ = ["ATTENTION_NAME", "attention_forward", "attention_mask"]

#: What `set_attn_implementation` takes.
ATTENTION_NAME = "kvcache"

#: Arguments that change what is computed in a way that neither sdpa nor the backends know: attention sinks, soft caps.
_REFUSED = ("s_aux", "sinks", "softcap")


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
        attention_mask: None where attention is plainly causal, or a mask, or what stands in for one.
        dropout: As in training.
        scaling: Factor on the scores.
        kwargs: What the model passes besides.

    Returns:
        `[batch, new tokens, heads, value head dim]` and no attention weights.

    Raises:
        UnsupportedError: The model's attention has sinks or a soft cap.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"the attention implementation {ATTENTION_NAME!r} does not know {name!r}, which "
                f"{type(module).__name__} needs: call model.set_attn_implementation('eager')",
                capability=name,
            )
    written = written_layer(key, value)
    if written is not None:
        if not dropout and _is_plain(module, query, attention_mask, kwargs):
            if written.prefers_attend:
                return written.attend(query, scaling), None
            if query.shape[2] == 1 and query.dtype is torch.float32:
                return _attend_folded(query, key, value, scaling), None
        if written.dense is not None:
            key, value = written.dense()
        if written.model_packing is not None:
            return _attend_batch(
                written.model_packing, module, query, key, value, attention_mask, dropout, scaling, **kwargs
            )
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, built_mask(attention_mask), dropout=dropout, scaling=scaling, **kwargs
    )
    return result


def _is_plain(
    module: torch.nn.Module, query: torch.Tensor, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> bool:
    """Whether each token attends over what is cached before it, and over nothing else."""
    if kwargs.get("position_bias") is not None:
        return False
    if attention_mask is not None:
        return is_pending(attention_mask)  # which says as much, whatever `is_causal` says
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return is_causal is not False or query.shape[2] == 1


def _attend_batch(
    packing: Packing,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by sdpa where K, V and mask are those of a batch and the model runs over its packed tokens.

    Raises:
        UnsupportedError: The model has made the mask itself, of what it runs over.
    """
    if attention_mask is None or not is_of_batch(attention_mask):
        raise UnsupportedError(
            f"{type(module).__name__} makes a mask of its own, which does not fit a batch that runs without its pads: "
            "call model.set_attn_implementation('sdpa')",
            capability="own_mask",
        )
    mask = built_mask(attention_mask)
    query = packing.unpack(query[0].transpose(0, 1)).transpose(1, 2)
    out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    return packing.pack_columns(out)[None], None


def _attend_folded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention of one new token over all of K and V, as sdpa would return it."""
    kv_heads, head_dim = key.shape[1], query.shape[3]
    folded = query.reshape(1, kv_heads, -1, head_dim)
    out = scaled_dot_product_attention(folded, key, value, scale=scaling)
    return out.reshape(1, 1, query.shape[1], value.shape[3])


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a mask is known by its memory, which a traced one has not
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of the layers of one kind, in the form transformers calls it.

    Args:
        batch_size: Rows.
        q_length: New columns.
        kv_length: Columns that are attended over.
        q_offset: The first new column.
        kv_offset: The first column that is attended over.
        attention_mask: The 2-D mask.
        allow_is_causal_skip: False where the model has put something on top of a causal mask.
        use_vmap: True where it has put a function there that works on single elements only.
        kwargs: What `sdpa_mask` takes besides.

    Returns:
        As `sdpa_mask`; a stand-in where the cache knows the 2-D mask and so needs none.
    """
    shape = (batch_size, 1, q_length, kv_length)
    known = look_up(attention_mask)
    if known is not None and known.is_packed:
        attention_mask, q_length = known.batch, known.width
        batch_size, kv_length = attention_mask.shape
        q_offset, kv_offset = kv_length - q_length, 0
    build: Callable[[], torch.Tensor | None] = partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        **kwargs,
    )
    if known is None:
        return build()
    if allow_is_causal_skip and not use_vmap:
        return pending_mask(build, shape)
    return of_batch(build())


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
