"""`CacheConfig`: what to cache, where and how much; from arguments, the environment, a file, or a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import Field, PrivateAttr, model_validator

from kvcache_core.budget import Budget
from kvcache_core.config_fields import (
    BackendName,
    BlockSize,
    BudgetValue,
    DeviceName,
    DtypeName,
    Flag,
    Names,
    Options,
    Share,
)
from kvcache_core.config_files import SCHEMA_KEY, from_file
from kvcache_core.config_sources import CONFIG_FILE_VARIABLE, Source, from_arguments, from_environment
from kvcache_core.errors import ConfigError
from kvcache_core.frozen import FrozenMapping, thaw
from kvcache_core.geometry import CacheGeometry, Count
from kvcache_core.pretrained import geometry_from_pretrained, model_name
from kvcache_core.validation import (
    FrozenModel,
    KeyPath,
    annotation_at,
    is_array,
    refusals_as_config_errors,
    table_of,
    unknown_key,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Budget", "CacheConfig", "ConfigValues", "PrefixCacheConfig", "PressureThresholds"]

_DEFAULT_BUDGET = Budget("blocks", 1000)
#: A number of things that may be none.
CountOrNone = Annotated[int, Field(strict=True, ge=0, lt=2**31)]

_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class PressureThresholds(FrozenModel):
    """The shares of the budget in use from which memory pressure is medium, high and critical."""

    medium: Share = Field(default=0.6, description="Share of the budget from which pressure is medium.")
    high: Share = Field(default=0.8, description="Share of the budget from which pressure is high.")
    critical: Share = Field(default=0.95, description="Share of the budget from which pressure is critical.")

    @model_validator(mode="after")
    def _ascending(self) -> PressureThresholds:
        if not self.medium < self.high < self.critical:
            raise ValueError(
                f"must ascend, not be medium {self.medium:g}, high {self.high:g}, critical {self.critical:g}"
            )
        return self


class PrefixCacheConfig(FrozenModel):
    """How prompts reuse what earlier sequences have cached."""

    enabled: Flag = Field(
        default=True,
        description="Whether finished sequences are kept for reuse until their room is needed, and prompts look for "
        "cached prefixes. Has no effect for models whose keys cannot be reused (`geometry.prefix_reusable`).",
    )
    max_prefixes: CountOrNone = Field(
        default=1000,
        description="Finished sequences that are kept at most; with 0, prompts find only what live ones hold.",
    )
    min_prefix_length: CountOrNone = Field(
        default=0, description="Tokens below which a prefix is neither kept nor found."
    )
    prefix_ttl_seconds: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds without use after which a kept sequence is dropped; never unless given."
    )
    enable_cross_request_sharing: Flag = Field(
        default=True,
        description="Whether a prompt may reuse what requests with another request id have cached.",
    )
    demote: Flag = Field(
        default=False,
        description="Whether evicted blocks go to the backend's host tier, as far as it has room, and come back when a "
        "prompt finds them; needs a backend with such a tier.",
    )
    namespace: str | None = Field(
        default=None,
        description="Identity of the model's weights, for caches that several models take turns with.",
    )
    eviction_policy: Literal["lru", "priority"] = Field(
        default="lru",
        description='Which kept sequence goes first: the least recently used ("lru"), or the one of lowest priority, '
        'and of those the least recently used ("priority").',
    )


class ConfigValues(TypedDict, total=False):
    """What each key of a configuration may be given as; `CacheConfig` says what they mean."""

    backend: str
    backend_order: Sequence[str]
    disable: Sequence[str]
    observers: Sequence[str]
    device: Any  # a name or a torch.device: core does not import torch
    dtype: Any  # a name or a torch.dtype
    allow_dtype_cast: bool
    options: Mapping[str, Any]
    geometry: CacheGeometry | Mapping[str, Any] | None
    block_size: int | Literal["auto"]
    budget: Budget | str | int | float
    initial_blocks: int
    max_sequence_length: int | None
    scrub_freed: bool
    pressure: PressureThresholds | Mapping[str, float]
    prefix: PrefixCacheConfig | Mapping[str, Any]


class CacheConfig(FrozenModel):
    """The configuration of one cache.

    The constructor takes keyword arguments and nothing else; `load` adds a file and the environment, and
    `from_pretrained_config` a model. Every value knows where it came from, see `origin`.

    Raises:
        ConfigError: Values are unknown, of the wrong type, out of range or contradictory; all are reported.
    """

    backend: BackendName = Field(
        default="auto",
        description='The backend\'s name, "distribution:name" where several distributions have it, or "auto" for '
        "the best one that can run here. A named backend is never replaced by another.",
    )
    backend_order: Names = Field(
        default=(),
        description='Backends that "auto" tries first, in this order; the others follow by priority.',
    )
    disable: Names = Field(default=(), description='Backends or distributions that are not used; "*" stands for all.')
    observers: Names = Field(
        default=(),
        description="Installed observers that are told what happens in the cache; no other is imported.",
    )
    device: DeviceName = Field(
        default="auto",
        description="Device that holds the cache, by torch's name; \"auto\" for the backend's choice.",
    )
    dtype: DtypeName = Field(
        default="auto",
        description="Dtype in which K and V are stored, by torch's name; \"auto\" for the geometry's dtype, or "
        "float32 where it names none.",
    )
    allow_dtype_cast: Flag = Field(
        default=False,
        description="Whether K and V of another dtype are cast to the stored one; else writing them is an error.",
    )
    options: Options = Field(
        default_factory=FrozenMapping,
        description="The backend's own options; `kvcache show NAME` lists them.",
    )
    geometry: CacheGeometry | None = Field(
        default=None, description="The shape of what is cached. Opening a cache needs one."
    )
    block_size: BlockSize = Field(
        default="auto",
        description='Tokens per block, the unit of accounting and sharing: a power of two, or "auto" for the '
        "backend's default, as a rule 16.",
    )
    budget: BudgetValue = Field(
        default=_DEFAULT_BUDGET,
        json_schema_extra={"default": _DEFAULT_BUDGET.to_plain()},
        description='The most the cache may hold: bytes (a whole number, or "4GiB"), "1000 blocks", '
        '"16000 tokens", or a share of the memory that is free when the cache is opened ("50%" or 0.5).',
    )
    initial_blocks: Count = Field(
        default=100,
        description="Blocks whose memory is taken when the cache is opened, where the backend's memory grows; "
        "never more than the budget.",
    )
    max_sequence_length: Count | None = Field(
        default=None,
        description="Longest sequence in tokens. Unless given: the model's own maximum, or what the budget holds "
        "where that is less or the only limit known.",
    )
    scrub_freed: Flag = Field(
        default=False,
        description="Whether memory is overwritten with zeros as soon as no sequence uses it.",
    )
    pressure: PressureThresholds = Field(
        default=PressureThresholds(), description="From which shares of the budget on memory is under pressure."
    )
    prefix: PrefixCacheConfig = Field(
        default=PrefixCacheConfig(),
        description="What is kept of finished sequences, and which prompts may reuse it.",
        json_schema_extra={"default": PrefixCacheConfig().model_dump(exclude_none=True)},
    )

    _origins: Source = PrivateAttr(default_factory=Source)

    def __init__(self, **values: Unpack[ConfigValues]) -> None:
        with refusals_as_config_errors(type(self), lambda path: "argument"):
            super(FrozenModel, self).__init__(**values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # see FrozenModel

    # -- sources -----------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **overrides: Unpack[ConfigValues],
    ) -> Self:
        """Read a configuration: arguments before environment variables before the file before defaults.

        Tables (`options`, `pressure`, `prefix`, `geometry`) merge key by key; any other value replaces the one below.

        Args:
            path: A `.toml` or `.json` file; the one that `KVCACHE_CONFIG` names when None, else no file.
            environ: The environment; that of the process, as it is now, when None.
            **overrides: Any key of the configuration.

        Raises:
            ConfigError: The file cannot be read, or values are wrong; the message says where they stand.
        """
        return cls._load(path, environ, from_arguments(overrides))

    @classmethod
    def from_pretrained_config(
        cls,
        model_config: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **overrides: Unpack[ConfigValues],
    ) -> Self:
        """Read a configuration as `load` does, with the geometry (and so the dtype) of a model.

        Args:
            model_config: A transformers model's `config`, or the content of its `config.json` as a mapping.
            path: As in `load`.
            environ: As in `load`.
            **overrides: Any key of the configuration but `geometry`.

        Raises:
            ConfigError: As in `load`, or the model is of a kind that cannot be cached.
        """
        if "geometry" in overrides:
            raise ConfigError("give either a model config or geometry, not both", key="geometry")
        geometry = Source(
            {"geometry": geometry_from_pretrained(model_config)},
            {("geometry",): f"config of model {model_name(model_config)!r}"},
        )
        return cls._load(path, environ, from_arguments(overrides).under(geometry))

    @classmethod
    def _load(cls, path: str | os.PathLike[str] | None, environ: Mapping[str, str] | None, arguments: Source) -> Self:
        environ = os.environ if environ is None else environ
        named = environ.get(CONFIG_FILE_VARIABLE, "").strip()
        file = Source()
        if path is not None:
            file = from_file(path)
        elif named:
            file = from_file(named, named_by=f"environment variable {CONFIG_FILE_VARIABLE}")
        # Three frames up is the caller of `load`, whom a warning about the environment concerns.
        environment = from_environment(environ, cls, stacklevel=3)
        return cls._of(file.under(environment).under(arguments))

    @classmethod
    def _of(cls, source: Source) -> Self:
        with refusals_as_config_errors(cls, source.origin):
            config = super(FrozenModel, cls).model_validate(source.values)
        config._origins = Source(origins=source.origins)
        return config

    # -- where values come from --------------------------------------------------------------------------

    def origin(self, key: str) -> str:
        """Where the value of a key came from.

        Args:
            key: A key, such as `"budget"`, or the dotted path to a nested one, such as `"pressure.high"`.

        Returns:
            `"argument"`, `"environment variable KVCACHE_BUDGET"`, `"kvcache.toml, line 3"`, `"config of model
            'llama'"` or `"default"`.

        Raises:
            ConfigError: There is no such key.
        """
        path = self._path(key)
        if path in self._origins.origins:
            return self._origins.origins[path]
        return (self._origins.origin(path) or "argument") if self._is_set(path) else "default"

    def _path(self, key: str) -> KeyPath:
        for place in self._origins.origins:
            if key == ".".join(map(str, place)):
                return place
        path: KeyPath = ()
        for part in key.split("."):
            annotation = annotation_at(type(self), path)
            path = (*path, int(part) if part.isdigit() and is_array(annotation) else part)
            if annotation_at(type(self), path) is None:
                table = table_of(annotation)
                known = unknown_key(part, table) if table else "is not a known key"
                raise ConfigError(f"{key!r} {known}", key=key)
        return path

    def _is_set(self, path: KeyPath) -> bool:
        table: Any = self
        for part in path:
            if isinstance(table, FrozenModel) and part in type(table).model_fields:
                if part not in table.model_fields_set:
                    return False
                table = getattr(table, str(part))
            elif isinstance(table, tuple) and part in range(len(table)):
                table = table[int(part)]
            else:
                return True  # in a free table, which has no defaults
        return True

    def explain(self) -> Iterator[tuple[str, Any, str]]:
        """Every effective value as `(key, value, origin)`, nested keys dotted, in the order of the docs."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, PressureThresholds | PrefixCacheConfig):
                value = dict(value)
            if isinstance(value, Mapping) and value:
                yield from ((f"{name}.{key}", inner, self.origin(f"{name}.{key}")) for key, inner in value.items())
            else:
                yield name, value, self.origin(name)

    # -- other configurations ----------------------------------------------------------------------------

    def replace(self, **changes: Unpack[ConfigValues]) -> Self:
        """A copy with other values for some keys, validated; the rest keeps its origin.

        Raises:
            ConfigError: A value is wrong.
        """
        kept = {name: getattr(self, name) for name in self.model_fields_set if name not in changes}
        origins = {path: words for path, words in self._origins.origins.items() if path[0] in kept}
        origins |= {(name,): "argument" for name in kept if not self._origins.origin((name,))}
        changed = from_arguments(changes)
        return self._of(Source(kept | changed.values, origins | changed.origins))

    # -- what follows from it ----------------------------------------------------------------------------

    @property
    def length_limit(self) -> int | None:
        """Tokens that a sequence may hold whatever the budget: what is configured, else what the model was made for."""
        return self.max_sequence_length or (self.geometry.max_position_embeddings if self.geometry else None)

    def longest_sequence(self, budget_tokens: int) -> int:
        """Tokens that one sequence may hold where the budget holds so many.

        Raises:
            ConfigError: `max_sequence_length` is more than the budget holds.
        """
        asked = self.max_sequence_length
        if asked is not None and asked > budget_tokens:
            raise ConfigError(
                f"max_sequence_length {asked} is more than the {budget_tokens} tokens that budget {self.budget} holds; "
                "raise the budget or lower the length",
                key="max_sequence_length",
                origin=self.origin("max_sequence_length"),
            )
        return min(self.length_limit or budget_tokens, budget_tokens)

    def with_geometry(self, geometry: CacheGeometry) -> Self:
        """A copy for a model of this geometry."""
        return self.replace(geometry=geometry)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but `update` is validated (`copy.replace` comes here as well)."""
        return self.replace(**update) if update else super().model_copy(deep=deep)

    def __eq__(self, other: object) -> bool:
        """Equal when all values are; where they came from does not matter."""
        if not isinstance(other, CacheConfig):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    # -- written down ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All effective values in plain types, as a TOML or JSON file would hold them; None is left out.

        `CacheConfig(**config.to_dict())` equals `config`.
        """
        plain: dict[str, Any] = thaw(self.model_dump(exclude_none=True))
        return plain

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a configuration file, by which an editor completes and checks TOML and JSON."""
        schema = cls.model_json_schema()
        schema["title"] = "kvcache-core configuration"
        schema["properties"][SCHEMA_KEY] = {
            "type": "string",
            "description": "Where an editor finds this schema; it configures nothing.",
        }
        return {"$schema": _SCHEMA_DIALECT, **schema}
