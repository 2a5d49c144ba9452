"""Opening a cache that fits a model, and closing it with the last user."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kvcache_core.errors import ShapeError
from kvcache_core.integrations.transformers.pass_plan import SpecialTokens
from kvcache_core.pretrained import geometry_from_pretrained

if TYPE_CHECKING:
    from kvcache_core.config import CacheConfig
    from kvcache_core.geometry import CacheGeometry
    from kvcache_core.manager import KvCacheManager

__all__ = ["Lease", "config_for_model", "require_same_shape", "special_tokens"]


class Lease:
    """Opens a cache and closes it when the last of those who hold this object has gone."""

    def __init__(self, config: CacheConfig) -> None:
        from kvcache_core.opening import open_cache  # noqa: PLC0415 - brings the registry in

        self.manager: KvCacheManager = open_cache(config)
        weakref.finalize(self, self.manager.store.close_abandoned)


def config_for_model(model: Any, config: CacheConfig | None, overrides: dict[str, Any]) -> CacheConfig:
    """The configuration of a cache for `model`: its geometry, and its dtype and device where none are configured.

    Raises:
        ConfigError: A value is wrong, or the model is of a kind that cannot be cached.
        ShapeError: The configuration has a geometry, and it is another model's.
    """
    from kvcache_core.config import CacheConfig  # noqa: PLC0415

    if config is None:
        config = CacheConfig.from_pretrained_config(model.config, **overrides)
    else:
        config = config.replace(**overrides)
        if config.geometry is None:
            config = config.with_geometry(geometry_from_pretrained(model.config))
        else:
            _require_same_shape(config.geometry, model)
    # "auto" asks for what suits the model as it was loaded, which its config need not say.
    if config.dtype == "auto":
        config = config.replace(dtype=model.dtype)
    if config.device == "auto":
        config = config.replace(device=model.device)
    return config


def require_same_shape(manager: KvCacheManager, model: Any) -> None:
    """Raise ShapeError unless the cache was opened for a model of this shape."""
    _require_same_shape(manager.geometry, model)


def special_tokens(model: Any) -> SpecialTokens:
    """The ids that `model` ends and pads texts with, unless a call of `generate` says otherwise."""
    config = getattr(model, "generation_config", None) or model.config
    end = getattr(config, "eos_token_id", None)
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    pad = getattr(config, "pad_token_id", None)
    if pad is None and ends:
        pad = ends[0]  # as generate does
    return SpecialTokens(frozenset(ends), pad)


def _require_same_shape(geometry: CacheGeometry, model: Any) -> None:
    wanted = geometry_from_pretrained(model.config)
    differing = [
        (layer, geometry.layer_spec(layer), wanted.layer_spec(layer))
        for layer in range(min(geometry.num_layers, wanted.num_layers))
        if geometry.layer_spec(layer) != wanted.layer_spec(layer)
    ]
    if geometry.num_layers == wanted.num_layers and not differing:
        return
    raise ShapeError(
        "the cache was opened for a model of another shape; use CacheConfig.from_pretrained_config(model.config)",
        details=[
            f"layers: {geometry.num_layers} in the cache, {wanted.num_layers} in the model",
            *(f"layer {layer}: {mine} in the cache, {theirs} in the model" for layer, mine, theirs in differing[:3]),
        ],
    )
