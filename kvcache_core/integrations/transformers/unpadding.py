"""Running a decoder over the tokens of a batch alone: pads and repeated rows are left out before it and put back after.

All but attention works on single tokens, and attention is the cache's, which knows the rows. So the decoder may be
called with one row of all tokens, each at its own position; nothing in between has to know.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache

from kvcache_core.integrations.transformers.packing import Packing

__all__ = ["may_pack", "packed_call", "unpacked_output"]

#: What a decoder may be told without its result depending on the shape of the batch.
_HARMLESS = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict"})

#: Settings that have a decoder return more than the last hidden states.
_RETURNS_MORE = ("output_hidden_states", "output_attentions", "output_router_logits")


def may_pack(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether a decoder that is called so gives the same for packed tokens.

    Only where it is told the position of each token, and nothing else that has the shape of the batch. One that is not
    told may count columns, tokens (OPT) or whatever else.
    """
    ids, position_ids, config = kwargs.get("input_ids"), kwargs.get("position_ids"), getattr(module, "config", None)
    return (
        ids is not None
        and position_ids is not None
        and position_ids.ndim == 2
        and position_ids.shape[1] == ids.shape[1]
        and not module.training
        and not any(getattr(config, name, False) for name in _RETURNS_MORE)
        and all(
            value is None or value is False or name in _HARMLESS or isinstance(value, Cache)
            for name, value in kwargs.items()
        )
        and "position_ids" in inspect.signature(module.forward).parameters
    )


def packed_call(packing: Packing, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call over packed tokens, made of those of the call over the batch."""
    input_ids, position_ids = kwargs["input_ids"], kwargs["position_ids"]
    return {
        **kwargs,
        "input_ids": packing.pack_columns(input_ids)[None],
        "position_ids": packing.pack_columns(position_ids.expand(input_ids.shape))[None],
    }


def unpacked_output(packing: Packing, output: Any) -> Any:
    """What a decoder returned, as if it had been called with the batch; hidden states of pads are zeros."""
    if isinstance(output, tuple):
        return packing.unpack(output[0][0]), *output[1:]
    output.last_hidden_state = packing.unpack(output.last_hidden_state[0])
    return output
