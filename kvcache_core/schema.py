"""The JSON schema of a configuration file with one backend's options in place, and those options as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_core.config import CacheConfig
from kvcache_core.loading import plugin_code
from kvcache_core.registry import Backend, BackendRegistry

__all__ = ["Option", "config_schema", "list_options", "options_schema"]

_REFERENCES = "#/$defs/options.{model}"


@dataclass(frozen=True)
class Option:
    """One option of a backend.

    Attributes:
        name: Its key under `options`.
        type: Its type in words, such as `"integer >= 1"`.
        required: Whether it has no default.
        default: Its default, in plain types.
        description: What its author says about it.
    """

    name: str
    type: str
    required: bool
    default: Any
    description: str


def options_schema(registry: BackendRegistry, backend: Backend) -> dict[str, Any]:
    """Return the JSON schema of a backend's options.

    Raises:
        BackendLoadError: The model cannot be imported, or has no schema.
    """
    model = registry.options_model(backend)
    with plugin_code(backend.name, backend.distribution, "describing its options"):
        # Core refuses unknown options whatever the model says.
        return {**model.model_json_schema(ref_template=_REFERENCES), "additionalProperties": False}


def config_schema(registry: BackendRegistry, backend: Backend | None = None) -> dict[str, Any]:
    """Return the JSON schema of a configuration file, narrowed to one backend where that is given."""
    schema = CacheConfig.json_schema()
    if backend is None:
        return schema
    options = options_schema(registry, backend)
    definitions = {f"options.{name}": inner for name, inner in options.pop("$defs", {}).items()}
    schema["$defs"] = {**schema.get("$defs", {}), **definitions}
    properties = schema["properties"]
    narrowed: dict[str, dict[str, Any]] = {
        "backend": {"enum": list(dict.fromkeys([backend.name, backend.qualified]))},
        "dtype": {"enum": ["auto", *backend.descriptor.dtypes]},
        "options": options,
    }
    if backend.descriptor.block_sizes:
        narrowed["block_size"] = {"enum": ["auto", *backend.descriptor.block_sizes]}
    for key, inner in narrowed.items():
        kept = {word: properties[key][word] for word in ("description", "title") if word in properties[key]}
        properties[key] = {**kept, **inner}
    schema["required"] = [*schema.get("required", []), "backend"]
    return schema


def list_options(registry: BackendRegistry, backend: Backend) -> list[Option]:
    """Return a backend's options, in the order of its model."""
    schema = options_schema(registry, backend)
    definitions = {f"options.{name}": inner for name, inner in schema.get("$defs", {}).items()}
    required = schema.get("required", ())
    return [
        Option(
            name,
            _type_in_words(inner, definitions),
            name in required,
            inner.get("default"),
            " ".join(inner.get("description", "").split()),
        )
        for name, inner in schema.get("properties", {}).items()
    ]


def _type_in_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        target = definitions.get(name, {})
        return _type_in_words(target, definitions) if "enum" in target else name.removeprefix("options.")
    if "const" in schema or "enum" in schema:
        return " | ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " | ".join(_type_in_words(branch, definitions) for branch in branches)
    kind = str(schema.get("type", "any"))
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"list of {_type_in_words(schema['items'], definitions)}"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[word]}" for word, sign in bounds.items() if word in schema]
    return " ".join([kind, ", ".join(limits)]).strip()
