"""`kvcache schema [NAME]`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvcache_core.config import CacheConfig
from tests.cli.conftest import Run
from tests.plugin_site import Site


def test_without_a_name_it_is_the_schema_of_any_configuration(run: Run) -> None:
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == CacheConfig.json_schema()


def test_with_a_name_it_holds_that_backends_options(run_json: Callable[..., Any], site: Site) -> None:
    site.plugin("acme", before="class Options(BackendOptions):\n    size: int = 3", options="Options")
    schema = run_json("schema", "acme")
    assert schema["properties"]["options"]["properties"]["size"]["default"] == 3
    assert schema["properties"]["backend"]["enum"] == ["acme", "kvcache-acme:acme"]


def test_an_unknown_name_is_an_error(run: Run) -> None:
    result = run("schema", "nothing")
    assert result.exit_code == 2
    assert result.stderr.startswith("UnknownBackendError")
