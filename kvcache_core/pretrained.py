"""The geometry of a transformers model, read from its config without importing transformers or torch.

What a config does not say beyond doubt is refused by name: a wrong window or head count would not crash, it
would quietly change what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcache_core.errors import ConfigError
from kvcache_core.geometry import CacheGeometry

__all__ = ["geometry_from_pretrained", "model_name"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HEAD_DIM = ("head_dim", "kv_channels", "dim_head")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
#: Rotary scalings whose frequencies depend on how long the sequence is, by transformers' names ("su" is an old one).
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su"})
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TEXT_CONFIGS = ("text_config", "decoder", "generator")
_COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")

_FULL, _SLIDING, _NOTHING = "full_attention", "sliding_attention", "no_attention"

#: Layer types by the names that configs use -> what such a layer caches. Any other type is refused.
_LAYER_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "full_attention": _FULL,
        "attention": _FULL,
        "global": _FULL,
        "sliding_attention": _SLIDING,
        "local": _SLIDING,
        "moe": _NOTHING,
        "mlp": _NOTHING,
    }
)

#: Models that apply `sliding_window`, where it is set, to every layer.
_ALL_LAYERS_SLIDE = frozenset(
    {"doge", "ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe", "qwen3_moe", "starcoder2"}
)

#: Models whose configs were written without `layer_types` -> whether layer `i` slides.
_SLIDES: Mapping[str, Callable[[int, _Config], bool]] = MappingProxyType(
    {
        "gemma2": lambda i, config: i % 2 == 0,
        "gemma3_text": lambda i, config: bool((i + 1) % (config.get("sliding_window_pattern") or 6)),
        "cohere2": lambda i, config: bool((i + 1) % (config.get("sliding_window_pattern") or 4)),
        "qwen2": lambda i, config: i >= config.count("max_window_layers"),
        "qwen3": lambda i, config: i >= config.count("max_window_layers"),
    }
)

#: Keys that only models with a state of another kind have, where no `layer_types` says so -> what it is.
_OTHER_STATE: Mapping[str, str] = MappingProxyType(
    {
        "kv_lora_rank": "caches compressed latents (multi-head latent attention)",
        "block_configs": "gives every layer a configuration of its own (block_configs)",
        "state_size": "keeps a recurrent state (state-space layers)",
        "ssm_cfg": "keeps a recurrent state (state-space layers)",
        "mamba_d_state": "keeps a recurrent state beside its attention (hybrid layers)",
        "hybrid_override_pattern": "keeps a recurrent state beside its attention (hybrid layers)",
        "layers_block_type": "keeps a recurrent state beside its attention (hybrid layers)",
        "block_types": "keeps a recurrent state beside its attention (hybrid layers)",
        "linear_num_key_heads": "keeps a recurrent state beside its attention (linear attention)",
        "conv_L_cache": "keeps a convolution state beside its attention (hybrid layers)",
        "qk_dim_factor": "keeps a recurrent state (xLSTM)",
        "cross_attention_layers": "has cross-attention layers, which cache the image",
        "rescale_every": "keeps a recurrent state (RWKV)",
        "lru_width": "keeps a recurrent state (RG-LRU layers)",
        "attn_layers": "hashes its keys into buckets (Reformer)",
        "mem_len": "carries a memory of hidden states (Transformer-XL)",
        "encoder_layers": "is part of an encoder-decoder, which also caches the encoder's output",
        "H_cycles": "runs its layers several times, each time with a cache of their own",
        "n_recurrent_loops": "runs its layers several times, each time with a cache of their own",
    }
)


#: Models that decode and cache although their config says `is_decoder = False`.
_DECODERS_ALL_THE_SAME = frozenset({"gpt_neox", "gpt_neox_japanese"})

#: Models whose full-attention layers have a head dim of their own.
_GLOBAL_HEADS = frozenset({"gemma4_text", "gemma4_unified_text"})

#: Models whose code caches something that no key of their config tells -> what it is.
_UNTOLD: Mapping[str, str] = MappingProxyType(
    {"mimo_v2_flash": "gives its sliding layers more key/value heads than its config says"}
)


class _Layer(NamedTuple):
    """What one layer caches."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None


class _Config:
    """A config, whether object or mapping, whose values are asked for under several names."""

    def __init__(self, source: Any, name: str) -> None:
        self._source = source
        self._name = name

    def get(self, *names: str) -> Any:
        """The first value under these names that is not None."""
        for name in names:
            value = _read(self._source, name)
            if value is not None:
                return value
        return None

    def count(self, *names: str) -> int:
        """The first of these that is given, which must be a whole number above 0."""
        value = self.get(*names)
        if type(value) is int and value > 0:
            return value
        problem = "is missing" if value is None else f"must be a whole number above 0, not {value!r}"
        raise ConfigError(f"config of model {self._name!r}: {names[0]} {problem}", key="geometry")

    def layer(self, index: int) -> _Config:
        """The config as layer `index` sees it."""
        layers = _read(self._source, "per_layer_config")
        if layers is None:
            return self
        if not isinstance(layers, Mapping):
            return _Config(layers[index], self._name)
        own: Mapping[str, Any] = next((values for key, values in layers.items() if int(key) == index), {})
        return _Config({**self._source, **own}, self._name)

    def refusal(self, what: str) -> ConfigError:
        """The error that says that this model cannot be cached, and why."""
        return ConfigError(
            f"model {self._name!r} cannot be cached: it {what}",
            key="geometry",
            details=["if its layers do cache plain K and V, describe them yourself with CacheGeometry"],
        )


def _read(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except RuntimeError:  # transformers: the value differs between layers, so ask each layer's own config
        return None


def model_name(config: Any) -> str:
    """What to call the model in messages."""
    names = (_read(config, name) for name in ("_name_or_path", "name_or_path", "model_type"))
    return next((name for name in names if isinstance(name, str) and name), "unnamed")


def geometry_from_pretrained(config: Any) -> CacheGeometry:
    """The shape of what a transformers model caches.

    Args:
        config: The model's `config` object, or the content of its `config.json` as a mapping. A config with
            several parts gives its text decoder.

    Raises:
        ConfigError: The model caches something else than K and V of every token (latents, recurrent states, an
            encoder's output), or the config does not say beyond doubt what each layer caches.
    """
    name = model_name(config)
    text = _Config(_text_config(config, name), name)
    _refuse_other_state(_Config(config, name))
    _refuse_other_state(text)
    num_layers = text.count(*_LAYERS)
    types = _layer_types(text, num_layers)
    shared = _shared_layers(text, types)
    layers: dict[_Layer, list[int]] = {}
    for index, kind in enumerate(types):
        if kind != _NOTHING and index not in shared:
            layers.setdefault(_layer(text.layer(index), kind), []).append(index)
    if not layers:
        raise text.refusal("has no layer that caches K and V of its own")
    positions = text.get(*_POSITIONS)
    return CacheGeometry(
        num_layers=num_layers,
        groups=[{**layer._asdict(), "layers": indices} for layer, indices in layers.items()],
        shared=shared,
        max_position_embeddings=positions if type(positions) is int and positions > 0 else None,
        dtype=_dtype(text) or _dtype(_Config(config, name)),
        model=name,
        prefix_reusable=not _rotation_depends_on_length(text),
    )


def _rotation_depends_on_length(config: _Config) -> bool:
    """Whether the rotary embedding of a position changes with the length of the sequence it is in."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(parameters, Mapping):
        return False
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]  # one table a layer type
    kinds = [table.get("rope_type", table.get("type")) for table in (parameters, *nested)]
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in kinds)


def _text_config(config: Any, name: str) -> Any:
    if not isinstance(config, Mapping):
        find = getattr(config, "get_text_config", None)
        return find(decoder=True) if callable(find) else config
    parts = [config[part] for part in _TEXT_CONFIGS if isinstance(config.get(part), Mapping)]
    if len(parts) > 1:
        raise _Config(config, name).refusal(f"has {len(parts)} text decoders; give the config of one")
    return parts[0] if parts else config


def _refuse_other_state(config: _Config) -> None:
    if config.get("is_encoder_decoder"):
        raise config.refusal("is an encoder-decoder, which also caches the encoder's output")
    if config.get("add_cross_attention"):
        raise config.refusal("has cross-attention, which also caches the encoder's output")
    if config.get("is_decoder") is False and config.get("model_type") not in _DECODERS_ALL_THE_SAME:
        raise config.refusal("is an encoder, which caches nothing (is_decoder is false)")
    if config.get("use_bidirectional_attention") in (True, "all") or config.get("causal") is False:
        raise config.refusal("attends in both directions, so earlier K and V change with every token")
    for key, what in _OTHER_STATE.items():
        if config.get(key):
            raise config.refusal(what)
    if config.get("model_type") in _UNTOLD:
        raise config.refusal(_UNTOLD[config.get("model_type")])
    if config.get("model_type") in _GLOBAL_HEADS and config.get("per_layer_config", "global_head_dim") is None:
        raise config.refusal("does not say the head dim of its full-attention layers (global_head_dim)")


def _layer_types(config: _Config, num_layers: int) -> list[str]:
    given = config.get("layer_types", "attention_layers")
    if given is None:
        return _unnamed_layer_types(config, num_layers)
    if len(given) != num_layers:
        raise config.refusal(f"names the types of {len(given)} layers but has {num_layers}")
    for kind in given:
        if kind not in _LAYER_TYPES:
            raise config.refusal(f"has layers of type {kind!r}")
    return [_LAYER_TYPES[kind] for kind in given]


def _unnamed_layer_types(config: _Config, num_layers: int) -> list[str]:
    if config.get("attention_chunk_size"):
        raise config.refusal("attends within chunks (attention_chunk_size)")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [_FULL] * num_layers
    kind = config.get("model_type")
    if kind in _ALL_LAYERS_SLIDE:
        return [_SLIDING] * num_layers
    if kind in _SLIDES:
        return [_SLIDING if _SLIDES[kind](index, config) else _FULL for index in range(num_layers)]
    raise config.refusal("has a sliding_window, but does not say in which layers (layer_types)")


def _shared_layers(config: _Config, types: Sequence[str]) -> dict[int, int]:
    """Layer -> the layer whose K and V it reads: the last of its type that has its own."""
    count = config.get("num_kv_shared_layers")
    if not count:
        modes = config.get("kv_sharing_modes")
        if modes and any(mode not in (None, "store") for mode in modes):
            raise config.refusal("shares K and V between layers in a way that is not known")
        return {}
    own = types[: len(types) - count]
    missing = sorted(set(types) - set(own))
    if missing:
        raise config.refusal(
            f"shares all K and V of its layers of type {', '.join(missing)}, so none of them has its own"
        )
    return {
        index: max(producer for producer, kind in enumerate(own) if kind == types[index])
        for index in range(len(own), len(types))
        if types[index] != _NOTHING
    }


def _layer(config: _Config, kind: str) -> _Layer:
    head_dim = _head_dim(config, kind)
    return _Layer(
        num_kv_heads=_kv_heads(config, kind),
        head_dim=head_dim,
        value_head_dim=config.count("v_head_dim") if config.get("v_head_dim") else head_dim,
        window=config.count("sliding_window", "window_size") if kind == _SLIDING else None,
    )


def _kv_heads(config: _Config, kind: str) -> int:
    if config.get("new_decoder_architecture"):  # Falcon repeats K and V for all heads before it caches them
        return config.count(*_HEADS)
    if config.get("multi_query"):
        return 1
    if kind == _FULL and config.get("num_global_key_value_heads") and config.get("attention_k_eq_v") is not False:
        return config.count("num_global_key_value_heads")  # Gemma 4, as published
    return config.count("num_key_value_heads", "num_kv_heads", *_HEADS)


def _head_dim(config: _Config, kind: str) -> int:
    if kind == _FULL and config.get("global_head_dim"):
        return config.count("global_head_dim")  # Gemma 4, as published
    if config.get(*_HEAD_DIM):
        return config.count(*_HEAD_DIM)
    hidden, heads = config.count(*_HIDDEN), config.count(*_HEADS)
    if hidden % heads:
        raise config.refusal(f"has a hidden size of {hidden} that {heads} heads do not divide, and no head_dim")
    return hidden // heads


def _dtype(config: _Config) -> str | None:
    name = str(config.get("dtype", "torch_dtype")).removeprefix("torch.")
    return name if name in _COMPUTE_DTYPES else None
