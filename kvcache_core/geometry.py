"""What a model needs cached: layer groups with their heads, dims and windows; bytes per token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict

from kvcache_core.errors import ShapeError
from kvcache_core.frozen import FrozenMapping
from kvcache_core.validation import FrozenModel, did_you_mean, show

__all__ = ["DTYPE_SIZES", "CacheGeometry", "LayerGroup", "LayerSpec", "check_dtype"]

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

_DTYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "fp64": "float64",
        "double": "float64",
        "fp8": "float8_e4m3fn",
        "float8": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
    }
)


def check_dtype(value: object) -> str:
    """The torch name of a dtype, which may be given as that name or as the `torch.dtype` itself.

    Raises:
        ValueError: It is not one that a cache can be stored in.
    """
    is_torch_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    name = str(value).removeprefix("torch.") if is_torch_dtype or isinstance(value, str) else ""
    if name in DTYPE_SIZES:
        return name
    suggestion = did_you_mean(name, DTYPE_SIZES, _DTYPE_ALIASES) if name else None
    hint = f"; did you mean {suggestion!r}?" if suggestion else ""
    raise ValueError(f"must be one of {', '.join(map(repr, DTYPE_SIZES))}, not {show(value)}{hint}")


def _check_optional_dtype(value: object) -> str | None:
    return None if value is None else check_dtype(value)


def _numbered(value: Any) -> Any:
    """Layer numbers as ints: the keys of a TOML or JSON table are always text."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: item
        for key, item in value.items()
    }


_COUNT_LIMIT = 2**31
Count = Annotated[int, Field(strict=True, ge=1, lt=_COUNT_LIMIT)]

#: Every layer costs core a little bookkeeping, so the number of layers has a limit far above any model's.
LayerCount = Annotated[int, Field(strict=True, ge=1, le=2**16)]
LayerIndex = Annotated[int, Field(strict=True, ge=0, lt=2**16)]
SharedLayers = Annotated[
    Mapping[LayerIndex, LayerIndex],
    BeforeValidator(_numbered),
    AfterValidator(FrozenMapping),
    PlainSerializer(lambda shared: {str(layer): producer for layer, producer in shared.items()}),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^[0-9]+$": {"type": "integer", "minimum": 0}},
            "additionalProperties": False,
        }
    ),
]


def _without_default(schema: JsonDict) -> None:
    del schema["default"]


class LayerSpec(FrozenModel):
    """What one layer caches for each token."""

    num_kv_heads: Count = Field(description="Key/value heads (not query heads).")
    head_dim: Count = Field(description="Elements of a key per head.")
    value_head_dim: Count = Field(  # type: ignore[assignment]
        default=None,
        description="Elements of a value per head; equal to `head_dim` unless given.",
        json_schema_extra=_without_default,
    )
    window: Count | None = Field(
        default=None,
        description="Tokens a query sees, itself included (sliding-window attention); all of them unless given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _value_dim_follows_head_dim(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("value_head_dim") is not None:
            return data
        given = {key: value for key, value in data.items() if key != "value_head_dim"}
        follows = type(data.get("head_dim")) is int and 0 < data["head_dim"] < _COUNT_LIMIT  # else it is refused, once
        return given | {"value_head_dim": data["head_dim"]} if follows else given

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token takes in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


class LayerGroup(LayerSpec):
    """Layers of one model that cache the same shape."""

    layers: Annotated[tuple[LayerIndex, ...], AfterValidator(lambda layers: tuple(sorted(layers)))] = Field(
        min_length=1, description="The numbers of the layers, counted from 0."
    )

    @property
    def spec(self) -> LayerSpec:
        """The group's shape without its layer numbers."""
        return LayerSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            window=self.window,
        )


def _by_first_layer(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    return tuple(sorted(groups, key=lambda group: group.layers[0]))


def _uniform_keys_in_schema(schema: JsonDict) -> None:
    """Let an editor accept the uniform keys, which are no fields of the model, and refuse a mixture."""
    uniform = LayerSpec.model_json_schema()
    schema["properties"] |= uniform["properties"]
    schema["oneOf"] = [
        {"required": uniform["required"], "properties": {"groups": False}},
        {"required": ["groups"], "properties": dict.fromkeys(uniform["properties"], False)},
    ]


class CacheGeometry(FrozenModel):
    """The shape of everything one model caches.

    A uniform model is given by `num_layers`, `num_kv_heads` and `head_dim` (and, where they apply,
    `value_head_dim` and `window`); a mixed one by `groups`. A layer that is in no group and shares with no
    producer caches nothing.
    """

    model_config = ConfigDict(ignored_types=(cached_property,), json_schema_extra=_uniform_keys_in_schema)

    num_layers: LayerCount = Field(description="Layers of the model, those that cache nothing included.")
    groups: Annotated[tuple[LayerGroup, ...], AfterValidator(_by_first_layer)] = Field(
        default=(), description="The layers that cache, grouped by shape."
    )
    shared: SharedLayers = Field(
        default_factory=FrozenMapping,
        description="Layer number -> the earlier layer whose K and V it reads instead of caching its own.",
    )
    max_position_embeddings: Count | None = Field(
        default=None, description="Longest sequence the model was made for, in tokens."
    )
    dtype: Annotated[str | None, BeforeValidator(_check_optional_dtype)] = Field(
        default=None,
        description="The model's compute dtype by torch's name; the cache stores it unless told otherwise.",
        json_schema_extra={"enum": [*DTYPE_SIZES, None]},
    )
    model: str | None = Field(default=None, description="A name for messages.")
    prefix_reusable: bool = Field(
        default=True,
        strict=True,
        description="Whether what is cached for a token depends on nothing after it. False where rotary scaling "
        "changes with the length of the sequence (dynamic NTK, LongRoPE): no other prompt may then reuse it.",
    )

    @classmethod
    def key_types(cls) -> dict[str | int, Any]:
        """The keys that a geometry table may hold: the fields, and those of a uniform model."""
        return super().key_types() | LayerSpec.key_types()

    @model_validator(mode="wrap")
    @classmethod
    def _expand_uniform(cls, data: Any, validate: ModelWrapValidatorHandler[CacheGeometry]) -> CacheGeometry:
        uniform = [key for key in LayerSpec.model_fields if isinstance(data, Mapping) and key in data]
        if not uniform:
            return validate(data)
        if data.get("groups"):
            raise ValueError(f"give either 'groups' or the uniform keys ({', '.join(uniform)}), not both")
        rest = {key: value for key, value in data.items() if key not in uniform and key != "groups"}
        rest["groups"] = [{key: data[key] for key in uniform} | {"layers": cls._unshared(data)}]
        try:
            return validate(rest)
        except ValidationError as error:
            raise _without_group(error) from None

    @staticmethod
    def _unshared(data: Mapping[str, Any]) -> list[int]:
        """The layers of a uniform model that cache; a wrong number of layers is left to its own field."""
        count, shared = data.get("num_layers"), _numbered(data.get("shared"))
        if type(count) is not int or not 1 <= count <= 2**16:
            return [0]
        return [layer for layer in range(count) if not isinstance(shared, Mapping) or layer not in shared]

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
            if layer >= self.num_layers:
                raise ValueError(f"layer {layer} is shared but num_layers is {self.num_layers}")
            if layer in seen:
                raise ValueError(f"layer {layer} both caches its own K and V and shares layer {producer}'s")
            if producer not in seen:
                raise ValueError(f"layer {layer} shares with layer {producer}, which caches nothing")
            if producer > layer:
                raise ValueError(f"layer {layer} shares with layer {producer}, which comes after it")
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
        """The geometry of a model whose layers all cache the same shape.

        Raises:
            ConfigError: A value is of the wrong type or out of range.
        """
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
            spec = group.spec
            for layer in group.layers:
                specs[layer] = spec
        for layer, producer in self.shared.items():
            specs[layer] = specs[producer]
        return tuple(specs)

    @cached_property
    def _producers(self) -> tuple[int | None, ...]:
        caching = set(self.caching_layers)
        return tuple(layer if layer in caching else self.shared.get(layer) for layer in range(self.num_layers))

    def check_layer(self, layer: int) -> int:
        """Return `layer` if it is a layer number of this model.

        Raises:
            ShapeError: It is not an int in `[0, num_layers)`.
        """
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            raise ShapeError(f"layer must be an int from 0 to {self.num_layers - 1}, not {show(layer)}")
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


def _without_group(error: ValidationError) -> ValidationError:
    """Locate the errors of the one group of a uniform model at the keys that the user wrote."""
    return ValidationError.from_exception_data(
        error.title,
        [
            {
                "type": each["type"],
                "loc": each["loc"][2:] if each["loc"][:2] == ("groups", 0) else each["loc"],
                "input": each["input"],
                "ctx": each.get("ctx", {}),
            }
            for each in error.errors(include_url=False)
        ],
    )
