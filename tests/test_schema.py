"""The JSON schema of a configuration file with a backend's options in place."""

from __future__ import annotations

import json

import pytest

from kvcache_core.errors import BackendLoadError
from kvcache_core.schema import config_schema, list_options
from tests.plugin_site import Site

OPTIONS = """
from typing import Literal
from enum import Enum
from pydantic import BaseModel, Field

class PressureThresholds(BaseModel):
    "A name that core's schema has as well."
    size: int = 1

class Colour(Enum):
    RED = "red"
    BLUE = "blue"

class Options(BackendOptions):
    size: int = Field(default=16, ge=1, le=64, description="How   many\\n    there are.")
    kind: Literal["fast", "small"] = "fast"
    pages: int | Literal["auto"] = "auto"
    sizes: list[int] = []
    colour: Colour = Colour.RED
    inner: PressureThresholds = PressureThresholds()
    endpoint: str
"""


def test_without_a_backend_options_are_any_table(site: Site) -> None:
    assert config_schema(site.registry())["properties"]["options"]["type"] == "object"


def test_a_backends_options_stand_in_their_place_and_every_reference_leads_somewhere(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options", dtypes="('int8',)", block_sizes="(16, 256)")
    registry = site.registry()
    schema = config_schema(registry, registry.describe("acme"))
    properties = schema["properties"]
    assert properties["backend"]["enum"] == ["acme", "kvcache-acme:acme"]
    assert "backend" in schema["required"]
    assert properties["dtype"]["enum"] == ["auto", "int8"]
    assert properties["block_size"]["enum"] == ["auto", 16, 256]
    assert properties["options"]["properties"]["size"]["maximum"] == 64
    assert properties["options"]["additionalProperties"] is False
    assert "medium" in schema["$defs"]["PressureThresholds"]["properties"]
    assert "size" in schema["$defs"]["options.PressureThresholds"]["properties"]
    text = json.dumps(schema)
    for piece in text.split('"$ref": "#/$defs/')[1:]:
        assert piece.split('"')[0] in schema["$defs"]


def test_options_are_listed_with_type_default_and_meaning(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options")
    registry = site.registry()
    options = {option.name: option for option in list_options(registry, registry.describe("acme"))}
    assert {name: option.type for name, option in options.items()} == {
        "size": "integer >= 1, <= 64",
        "kind": "'fast' | 'small'",
        "pages": "integer | 'auto'",
        "sizes": "list of integer",
        "colour": "'red' | 'blue'",
        "inner": "PressureThresholds",
        "endpoint": "string",
    }
    assert options["size"].default == 16
    assert options["size"].description == "How many there are."
    assert [name for name, option in options.items() if option.required] == ["endpoint"]


def test_a_model_without_a_schema_is_a_load_error(site: Site) -> None:
    before = """
class Thing: pass
class Options(BackendOptions):
    model_config = {"arbitrary_types_allowed": True}
    thing: Thing
"""
    site.plugin("acme", before=before, options="Options")
    registry = site.registry()
    with pytest.raises(BackendLoadError, match="describing its options"):
        config_schema(registry, registry.describe("acme"))
