"""What a model needs cached: layer groups with their heads, dims and windows; bytes per token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvcache_core.errors import ShapeError

__all__ = ["DTYPE_SIZES", "CacheGeometry", "LayerGroup", "LayerSpec"]

#: Bytes per element of the dtypes a cache can be stored in, by torch's names.
DTYPE_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
    }
)

Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
LayerIndex = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))


class LayerSpec(_Frozen):
    """What one layer caches for each token.

    Attributes:
        num_kv_heads: Key/value heads (not query heads).
        head_dim: Elements of a key per head.
        value_head_dim: Elements of a value per head; equal to `head_dim` unless given.
        window: Tokens a query sees, itself included (sliding-window attention), or None for all.
    """

    num_kv_heads: Count
    head_dim: Count
    value_head_dim: Count = Field(default=None, validate_default=False)  # type: ignore[assignment]
    window: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _value_dim_follows_head_dim(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("value_head_dim") is None and "head_dim" in data:
            return {**data, "value_head_dim": data["head_dim"]}
        return data

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token takes in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


class LayerGroup(LayerSpec):
    """Layers of one model that cache the same shape.

    Attributes:
        layers: The layer numbers, ascending.
    """

    layers: tuple[LayerIndex, ...] = Field(min_length=1)

    @property
    def spec(self) -> LayerSpec:
        """The group's shape without its layer numbers."""
        return LayerSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            window=self.window,
        )


class CacheGeometry(_Frozen):
    """The shape of everything one model caches.

    A uniform model is given by `num_layers`, `num_kv_heads` and `head_dim` (and, where they apply,
    `value_head_dim` and `window`); a mixed one by `groups`. A layer that is in no group and shares with no
    producer caches nothing.

    Attributes:
        num_layers: Layers of the model, those that cache nothing included.
        groups: The layers that cache, grouped by shape.
        shared: Layer number -> the earlier layer whose K and V it reads instead of caching its own.
        max_position_embeddings: Longest sequence the model was made for, in tokens, or None.
        dtype: The model's compute dtype by torch's name, which the cache uses unless told otherwise, or None.
        model: A name for messages, or None.
    """

    num_layers: Count
    groups: tuple[LayerGroup, ...] = ()
    shared: Mapping[LayerIndex, LayerIndex] = Field(default_factory=dict)
    max_position_embeddings: Count | None = None
    dtype: str | None = None
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_uniform(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        uniform = {key for key in LayerSpec.model_fields if key in data}
        if not uniform:
            return data
        if data.get("groups"):
            raise ValueError(
                f"give either 'groups' or the uniform keys ({', '.join(sorted(uniform))}), not both"
            )
        missing = {"num_kv_heads", "head_dim"} - uniform
        if missing:
            raise ValueError(f"{' and '.join(sorted(missing))} missing beside {', '.join(sorted(uniform))}")
        rest = {key: value for key, value in data.items() if key not in uniform}
        count = data.get("num_layers")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 2**31:
            return rest  # num_layers itself is reported by its own field
        layers = [layer for layer in range(count) if layer not in (data.get("shared") or {})]
        return {**rest, "groups": [{"layers": layers, **{key: data[key] for key in uniform}}]}

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        if value is not None and value not in DTYPE_SIZES:
            raise ValueError(f"{value!r} is not one of {', '.join(DTYPE_SIZES)}")
        return value

    @field_validator("shared", mode="after")
    @classmethod
    def _read_only(cls, value: Mapping[int, int]) -> Mapping[int, int]:
        return MappingProxyType(dict(value))

    @model_validator(mode="after")
    def _consistent(self) -> CacheGeometry:
        seen: set[int] = set()
        for group in self.groups:
            for layer in group.layers:
                if layer >= self.num_layers:
                    raise ValueError(f"layer {layer} is in a group but num_layers is {self.num_layers}")
                if layer in seen:
                    raise ValueError(f"layer {layer} is in two groups, or twice in one")
                seen.add(layer)
        if not seen:
            raise ValueError("no layer caches anything; give num_kv_heads and head_dim, or groups")
        for layer, producer in self.shared.items():
            if layer in seen:
                raise ValueError(f"layer {layer} both caches its own K and V and shares layer {producer}'s")
            if producer not in seen:
                raise ValueError(f"layer {layer} shares with layer {producer}, which caches nothing")
            if layer >= self.num_layers:
                raise ValueError(f"layer {layer} is shared but num_layers is {self.num_layers}")
        return self

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        window: int | None = None,
        max_position_embeddings: int | None = None,
        dtype: str | None = None,
        model: str | None = None,
    ) -> CacheGeometry:
        """The geometry of a model whose layers all cache the same shape."""
        return cls.model_validate(
            {
                "num_layers": num_layers,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "value_head_dim": value_head_dim,
                "window": window,
                "max_position_embeddings": max_position_embeddings,
                "dtype": dtype,
                "model": model,
            }
        )

    @cached_property
    def caching_layers(self) -> tuple[int, ...]:
        """The layers that cache K and V of their own, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @cached_property
    def _specs(self) -> tuple[LayerSpec | None, ...]:
        specs: list[LayerSpec | None] = [None] * self.num_layers
        for group in self.groups:
            for layer in group.layers:
                specs[layer] = group.spec
        for layer, producer in self.shared.items():
            specs[layer] = specs[producer]
        return tuple(specs)

    @cached_property
    def _producers(self) -> tuple[int | None, ...]:
        caching = set(self.caching_layers)
        return tuple(
            layer if layer in caching else self.shared.get(layer) for layer in range(self.num_layers)
        )

    def check_layer(self, layer: int) -> int:
        """Return `layer` if it is a layer number of this model.

        Raises:
            ShapeError: It is not an int in `[0, num_layers)`.
        """
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            raise ShapeError(f"layer must be an int from 0 to {self.num_layers - 1}, not {layer!r}")
        return layer

    def layer_spec(self, layer: int) -> LayerSpec | None:
        """The shape that `layer` reads (its own or its producer's), or None if it caches nothing."""
        return self._specs[self.check_layer(layer)]

    def producer(self, layer: int) -> int | None:
        """The layer whose K and V `layer` reads: itself, the one it shares with, or None."""
        return self._producers[self.check_layer(layer)]

    @cached_property
    def single_spec(self) -> LayerSpec | None:
        """The spec that all caching layers have (windows aside), or None where layer groups differ."""
        shapes = {(g.num_kv_heads, g.head_dim, g.value_head_dim) for g in self.groups}
        return self.groups[0].spec if len(shapes) == 1 else None

    def bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of K and V that one token takes in all layers together.

        Args:
            dtype: Storage dtype by torch's name; the geometry's own, else float32, when None.
        """
        size = DTYPE_SIZES[dtype or self.dtype or "float32"]
        return size * sum(group.elements_per_token * len(group.layers) for group in self.groups)
