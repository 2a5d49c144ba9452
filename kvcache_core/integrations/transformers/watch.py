"""Hooks that tell a cache when a forward pass begins and ends, and what the model was called with.

They are functions of this module, put on a model once and for all caches: nothing ties the model to a cache, so
neither keeps the other alive.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers.attention import ATTENTION_NAME
from kvcache_core.integrations.transformers.unpadding import may_pack, packed_call, unpacked_output

if TYPE_CHECKING:
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


#: Tensors that a decoder may be given without its K and V depending on more than the ids.
_FOLLOW_FROM_IDS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep"})


def _named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name.

    Raises:
        UnsupportedError: The decoder does not say what its positional arguments are.
    """
    names = ["input_ids"]
    if len(args) > 1:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(names) < len(args) or names[0] != "input_ids" or not kwargs.keys().isdisjoint(names[: len(args)]):
        raise UnsupportedError(
            f"{type(module).__name__} was called with {len(args)} positional arguments, which its forward does not "
            "name or which were given by name too: pass them all by keyword",
            capability="positional_arguments",
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _writer_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PassWriter | None:
    for value in (*kwargs.values(), *args):
        if isinstance(value, Cache):
            writer: PassWriter | None = getattr(value, "pass_writer", None)
            return writer
    return None


# torch.compile leaves the hooks out of its graphs: what they do to a batch cannot be guarded.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    writer = _writer_among(args, kwargs)
    if writer is None:
        return None
    named = _named(module, args, kwargs) if args else kwargs
    input_ids = named.get("input_ids")
    tokens = input_ids if input_ids is not None else named.get("inputs_embeds")
    if tokens is None:
        return None  # the model itself says what is wrong with a call without input
    given = named.get("attention_mask")
    has_ids = writer.is_of(module) and all(
        name in _FOLLOW_FROM_IDS or not isinstance(value, torch.Tensor) for name, value in named.items()
    )
    begun = writer.begin(
        tokens.shape[0],
        tokens.shape[1],
        input_ids=input_ids if has_ids else None,
        position_ids=named.get("position_ids"),
        attention_mask=given,
        # Said in the call. A config's default is less specific than a cache that was passed.
        stored=named.get("use_cache") is not False,
        attends=getattr(getattr(module, "config", None), "_attn_implementation", None) == ATTENTION_NAME,
        may_pack=partial(may_pack, module, named),
    )
    if begun.attention_mask is given:
        return None
    masked = {"attention_mask": begun.attention_mask}
    if begun.packing is not None:
        return (), packed_call(begun.packing, {**named, **masked})
    return (args, {**kwargs, **masked}) if len(args) == 1 else ((), {**named, **masked})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    writer = _writer_among(args, kwargs)
    if writer is None:
        return None
    packing = writer.packing
    writer.end(succeeded=output is not None)  # torch calls with None after an exception
    return None if packing is None or output is None else unpacked_output(packing, output)
