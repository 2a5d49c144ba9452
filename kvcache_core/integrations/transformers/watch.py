"""Hooks that tell a cache when a forward pass begins and ends, and what the model was called with.

They are functions of this module, put on a model once and for all caches: nothing ties the model to a cache, so
neither keeps the other alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import Cache

from kvcache_core.integrations.transformers.attention import ATTENTION_NAME
from kvcache_core.integrations.transformers.unpadding import may_pack, packed_call, unpacked_output

if TYPE_CHECKING:
    import torch

    from kvcache_core.integrations.transformers.forward_pass import PassWriter

__all__ = ["decoder_of", "watch"]


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a model that is called with the cache."""
    decoder: torch.nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder


def watch(model: Any) -> None:
    """Have the decoder of `model` tell every `KvCache` that it is called with about its forward passes.

    Watching a model twice is the same as once. A model that is called without a `KvCache` behaves as before.
    """
    decoder = decoder_of(model)
    if _before not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True)


def _writer_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PassWriter | None:
    for value in (*kwargs.values(), *args):
        if isinstance(value, Cache):
            writer: PassWriter | None = getattr(value, "pass_writer", None)
            return writer
    return None


def _before(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    writer = _writer_among(args, kwargs)
    if writer is None:
        return None
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    tokens = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
    if tokens is None:
        return None  # the model itself says what is wrong with a call without input
    given = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    begun = writer.begin(
        tokens.shape[0],
        tokens.shape[1],
        input_ids=input_ids if writer.is_of(module) else None,
        position_ids=kwargs.get("position_ids"),
        attention_mask=given,
        # Said in the call. A config's default is less specific than a cache that was passed.
        stored=kwargs.get("use_cache") is not False,
        attends=getattr(getattr(module, "config", None), "_attn_implementation", None) == ATTENTION_NAME,
        may_pack=partial(may_pack, module, args, kwargs),
    )
    mask = begun.attention_mask
    if begun.packing is not None:
        return packed_call(begun.packing, args, {**kwargs, "attention_mask": mask}, columns=begun.columns)
    if mask is given:
        return None
    if "attention_mask" in kwargs or len(args) < 2:
        return args, {**kwargs, "attention_mask": mask}
    return (args[0], mask, *args[2:]), kwargs


def _after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    writer = _writer_among(args, kwargs)
    if writer is None:
        return None
    packing = writer.packing
    writer.end(succeeded=output is not None)  # torch calls with None after an exception
    return None if packing is None or output is None else unpacked_output(packing, output)
