"""`kvcache plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache_core.cli.model_options import BackendOptions, ConfigFile, parse_options
from kvcache_core.cli.output import JsonFlag, print_json, print_table
from kvcache_core.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from kvcache_core.config import CacheConfig
    from kvcache_core.planning import CachePlan, Need, Waste

__all__ = ["plan"]

_MODEL = "Model"
_CACHE = "Cache"
_SEQUENCES = "Sequences"


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Folder of a model, or its config.json. Nothing is downloaded.", rich_help_panel=_MODEL
        ),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option("--num-layers", help="Layers, instead of --model.", rich_help_panel=_MODEL)
    ] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option("--num-kv-heads", help="Key/value heads (not query heads).", rich_help_panel=_MODEL)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", help="Elements of a key per head.", rich_help_panel=_MODEL)
    ] = None,
    value_head_dim: Annotated[
        int | None,
        typer.Option(
            "--value-head-dim",
            help="Elements of a value per head.",
            show_default="as --head-dim",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", help="Sliding window of all layers, in tokens.", rich_help_panel=_MODEL)
    ] = None,
    config: ConfigFile = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help='What the cache may hold: "4GiB", "1000 blocks", "16000 tokens"; "50%" where a backend is named.',
            rich_help_panel=_CACHE,
        ),
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option("--block-size", help="Tokens per block.", show_default="auto", rich_help_panel=_CACHE),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Stored dtype.", show_default="the model's", rich_help_panel=_CACHE),
    ] = None,
    max_sequence_length: Annotated[
        int | None,
        typer.Option(
            "--max-sequence-length",
            help="Longest sequence in tokens.",
            show_default="the model's",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="Ask this backend for its block size, its bytes and its device's memory; this imports torch. "
            "auto asks none, whatever the configuration names.",
            show_default="auto",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device of the named backend.", show_default="auto", rich_help_panel=_CACHE),
    ] = None,
    option: BackendOptions = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            "--length",
            "-l",
            help="Length of the sequences in tokens; several separated by commas, or by repeating it.",
            show_default="the longest allowed",
            metavar="TOKENS",
            rich_help_panel=_SEQUENCES,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            "--sequences",
            "-n",
            help="Say which budget so many sequences of each length need.",
            rich_help_panel=_SEQUENCES,
        ),
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(
            "--shared-prefix",
            help="Tokens with which all sequences begin alike, stored once.",
            rich_help_panel=_SEQUENCES,
        ),
    ] = 0,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Block sizes to compare, separated by commas or by repeating it.",
            show_default="8 to 256",
            metavar="TOKENS",
            rich_help_panel=_SEQUENCES,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what a cache holds in a budget, or which budget it needs.

    The model comes from --model, from numbers, or from the geometry of a configuration. torch is not needed
    unless a backend is named.
    """
    from kvcache_core.planning import plan_config  # noqa: PLC0415 - only this command needs it

    geometry = {
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "window": window,
    }
    overrides = {
        "geometry": {key: value for key, value in geometry.items() if value is not None} or None,
        "budget": _parsed(budget),
        "block_size": _parsed(block_size),
        "dtype": dtype,
        "max_sequence_length": max_sequence_length,
        "backend": backend,
        "device": device,
        "options": parse_options(option) or None,
    }
    configuration = _configuration(model, config, {key: value for key, value in overrides.items() if value is not None})
    try:
        planned = plan_config(
            configuration,
            lengths=_counts("--length", length),
            sequences=sequences,
            shared_prefix=shared_prefix,
            compare=_counts("--compare", compare),
        )
    except BackendError:
        typer.echo("hint: to plan for another machine, ask no backend: --backend auto", err=True)
        raise
    if as_json:
        print_json(planned.to_json())
    else:
        _print(planned)


# -- what is asked for -----------------------------------------------------------------------------------


def _configuration(model: str | None, config_file: Path | None, overrides: dict[str, Any]) -> CacheConfig:
    from kvcache_core.config import CacheConfig  # noqa: PLC0415
    from kvcache_core.names import AUTO, canonical  # noqa: PLC0415

    if model is None:
        config = CacheConfig.load(config_file, **overrides)
    elif "geometry" not in overrides:
        config = CacheConfig.from_pretrained_config(_model_config(model), config_file, **overrides)
    else:
        raise ConfigError("give either --model or numbers such as --num-layers, not both", key="geometry")
    if config.geometry is None:
        raise ConfigError(
            "geometry is missing: give --model, or --num-layers, --num-kv-heads and --head-dim, or a configuration "
            "that has one with --config",
            key="geometry",
        )
    for key in ("device", "options"):
        if key in overrides and canonical(config.backend) == AUTO:
            raise ConfigError(f"--{key.removesuffix('s')} is for a named backend; give --backend too", key=key)
    return config


def _model_config(model: str) -> dict[str, Any]:
    """The content of a local model's config.json."""
    from kvcache_core.config_files import from_file  # noqa: PLC0415
    from kvcache_core.validation import show  # noqa: PLC0415

    path = os.path.expanduser(model)  # os.path, as Path raises for a name that the system refuses
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
        if not os.path.isfile(path):
            raise ConfigError(f"the folder {model!r} has no config.json; name the folder of a model", key="model")
    elif not os.path.isfile(path):
        raise ConfigError(
            f"there is no folder or file {show(model)}; give a model's folder or config.json; nothing is downloaded",
            key="model",
        )
    elif not path.lower().endswith(".json"):
        raise ConfigError(f"{model!r} must be a config.json, or the folder that has it", key="model")
    return from_file(path).values


def _parsed(text: str | None) -> Any:
    """What text means for a key whose value may be a number or text, as in the environment."""
    from kvcache_core.config_sources import parse_text  # noqa: PLC0415

    return None if text is None else parse_text(text.strip())


def _counts(option: str, texts: list[str] | None) -> list[int] | None:
    from kvcache_core.validation import show  # noqa: PLC0415

    if texts is None:
        return None
    parts = [part.strip() for text in texts for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and len(part) <= 19)]
    if wrong:
        raise ConfigError(f"{option} must be whole numbers of tokens separated by commas, not {show(wrong[0])}")
    return [int(part) for part in parts]


# -- the answer for people -------------------------------------------------------------------------------


def _print(planned: CachePlan) -> None:
    cached = "" if planned.caching_layers == planned.num_layers else f", {planned.caching_layers} of which cache"
    where = f", on {planned.backend} ({planned.device})" if planned.backend else ""
    typer.echo(
        f"{planned.model or 'the model'}: {planned.num_layers} layers{cached}; {planned.dtype} in blocks of "
        f"{planned.block_size} tokens{where}\n"
    )
    facts = list(_facts(planned))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        typer.echo(f"  {name:<{width}}  {value}")
    if planned.lengths:
        typer.echo()
        _print_lengths(planned)
    typer.echo(f"\nBy block size{', in the same memory' if planned.capacity else ''}:\n")
    _print_block_sizes(planned)
    if planned.notes:
        typer.echo()
    for note in planned.notes:
        typer.echo(f"note: {note}")


def _facts(planned: CachePlan) -> Iterator[tuple[str, str]]:
    from kvcache_core.budget import Budget  # noqa: PLC0415

    yield "a token takes", _bytes_of(planned.bytes_per_token)
    yield "a block takes", _bytes_of(planned.bytes_per_block)
    held, limit = planned.capacity, planned.max_sequence_length
    if held:
        size = f"{held.total_blocks:,} blocks, {held.total_tokens:,} tokens, {_bytes_of(held.total_bytes)}"
        yield f"the budget {Budget.parse(held.budget)} holds", size
        limited = "" if held.longest_sequence == limit else ", all that the budget holds"
        yield "a sequence may have", f"{held.longest_sequence:,} tokens{limited}"
    elif limit:
        yield "a sequence may have", f"{limit:,} tokens"
    if planned.shared_prefix:
        yield "all sequences share", f"{planned.shared_prefix:,} tokens"


def _print_lengths(planned: CachePlan) -> None:
    columns = ["LENGTH", "BLOCKS", "MEMORY", "WASTED"]
    if planned.capacity:
        columns.append("FIT AT ONCE")
    if planned.sequences is not None:
        columns += [f"{planned.sequences:,} NEED", "AS A BUDGET"]
        columns += ["FITS"] if planned.capacity else []
    rows = []
    for each in planned.lengths:
        row = [f"{each.length:,}", f"{each.blocks:,}", _bytes(each.bytes), _waste(each.waste)]
        row += [] if each.concurrent is None else [f"{each.concurrent:,}"]
        row += [] if each.need is None else _need(each.need)
        rows.append(row)
    print_table(columns, rows)


def _print_block_sizes(planned: CachePlan) -> None:
    columns = ["BLOCK SIZE", "A BLOCK TAKES", "WASTED", "AT MOST, BY ONE SEQUENCE"]
    if planned.shared_prefix:
        columns.append("SHARED TOKENS")
    if planned.capacity and planned.lengths:
        columns.append("FIT AT ONCE")
    if planned.sequences is not None:
        columns.append(f"{planned.sequences:,} NEED")
    rows = []
    for each in planned.block_sizes:
        waste = _waste(each.waste) if each.waste else "-"
        row = [f"{each.block_size:,}", _bytes(each.bytes_per_block), waste, _bytes(each.most_wasted_bytes)]
        row += [f"{each.shared_tokens:,}"] if planned.shared_prefix else []
        row += [" / ".join(f"{count:,}" for count in each.concurrent)] if each.concurrent else []
        row += [" / ".join(map(_bytes, each.needed_bytes))] if each.needed_bytes else []
        rows.append(row)
    print_table(columns, rows)


def _waste(waste: Waste) -> str:
    return f"{_bytes(waste.bytes)} ({waste.percent:.1f}%)"


def _need(need: Need) -> list[str]:
    verdict = [] if need.fits is None else ["yes" if need.fits else "no"]
    return [f"{_bytes(need.bytes)} ({need.blocks:,} blocks)", str(need.budget), *verdict]


def _bytes(count: int) -> str:
    from kvcache_core.budget import format_bytes  # noqa: PLC0415

    return format_bytes(count)


def _bytes_of(count: int) -> str:
    shown = _bytes(count)
    return shown if shown == f"{count} B" else f"{shown} ({count:,} bytes)"
