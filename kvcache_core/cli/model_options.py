"""What the commands that run a model have in common: their options, the model, and the cache for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache_core.errors import ConfigError

if TYPE_CHECKING:
    from kvcache_core.config import CacheConfig
    from kvcache_core.integrations.models import LoadedModel
    from kvcache_core.integrations.transformers import KvCache
    from kvcache_core.observing import Observer

__all__ = [
    "BackendName",
    "BackendOptions",
    "ConfigFile",
    "DeviceName",
    "DtypeName",
    "ModelName",
    "let_waiting_threads_sleep",
    "open_for",
    "parse_options",
    "read_config",
]

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A folder, a .gguf file or a name on the Hugging Face hub.",
        show_default="SmolLM2-135M-Instruct",
    ),
]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="Backend that holds the cache.", show_default="auto")
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Device of model and cache, by torch's name.", show_default="the config's, else cpu"),
]
DtypeName = Annotated[
    str, typer.Option("--dtype", help="Compute dtype, such as bfloat16; auto for the one the weights are stored in.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration file of the cache, TOML or JSON.", dir_okay=False)
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of the backend, as key=value; may be repeated.", metavar="KEY=VALUE"),
]


def let_waiting_threads_sleep() -> None:
    """Keep torch's threads from spinning while they wait for each other; to be called before torch is imported.

    Spinning gains a few per cent on an idle machine. Where other work wants the cores, in a container or on a build
    machine, each thread spends its turn waiting for one that is not running: generating becomes ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """`["a=1", "b.c=x"]` as `{"a": 1, "b": {"c": "x"}}`; values are read as in the environment.

    Raises:
        ConfigError: An entry is not `key=value`, or gives a key twice.
    """
    from kvcache_core.config_sources import parse_text  # noqa: PLC0415 - keeps the other commands light

    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise ConfigError(f"--option must be key=value, not {pair!r}", key="options", origin="command line")
        *path, last = (part.strip() for part in key.split("."))
        table = options
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--option {key} is given both as a value and as a table", key="options")
        if last in table:
            raise ConfigError(f"--option {key} is given twice; give it once", key="options", origin="command line")
        table[last] = parse_text(text.strip())
    return options


def read_config(
    *, backend: str | None, device: str | None, config_file: Path | None, options: list[str] | None
) -> CacheConfig:
    """The configuration that the command line, the environment and the file make together.

    Whether the backend can be had is found out here, before a model is loaded for it.

    Raises:
        ConfigError: A value is wrong.
        BackendError: The backend is not there or cannot run here.
    """
    from kvcache_core.config import CacheConfig  # noqa: PLC0415
    from kvcache_core.selection import choose  # noqa: PLC0415

    overrides: dict[str, Any] = {"backend": backend} if backend else {}
    if device:
        overrides["device"] = device
    if given := parse_options(options):
        overrides["options"] = given
    config = CacheConfig.load(config_file, **overrides)
    if config.device == "auto":
        config = config.replace(device="cpu")  # where the model will be
    choose(config, load=False)
    return config


@contextmanager
def open_for(loaded: LoadedModel, config: CacheConfig, observer: Observer | None = None) -> Iterator[KvCache]:
    """A cache for the model, which attends through it from now on; closed in the end.

    Args:
        loaded: The model.
        config: The cache's configuration.
        observer: Told what happens in the cache, its closing included.
    """
    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache  # noqa: PLC0415 - brings in torch
    from kvcache_core.integrations.transformers.opening import config_for_model  # noqa: PLC0415
    from kvcache_core.opening import open_cache  # noqa: PLC0415

    with open_cache(config_for_model(loaded.model, config, {})) as manager:
        if observer is not None:
            manager.subscribe(observer)
        cache = KvCache(manager, loaded.model)
        if loaded.model.config._attn_implementation == "sdpa":
            loaded.model.set_attn_implementation(ATTENTION_NAME)
        try:
            yield cache
        finally:
            cache.free()
