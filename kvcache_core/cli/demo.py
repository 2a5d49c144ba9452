"""`kvcache demo`: a conversation, its forks, another one, and a comparison with transformers' own cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from kvcache_core.integrations.generation import Generation
    from kvcache_core.integrations.models import LoadedModel
    from kvcache_core.integrations.transformers import KvCache

__all__ = ["demo"]

_STORY = """\
The lighthouse at Skerry Point was built in 1871 by a keeper's daughter named Marit Olsen, after her father's
boat was lost in the fog. She drew the plans herself, hired eleven masons from the next village, and paid them
in dried fish through two winters. The tower stands forty metres high and is painted in green and white bands,
because red paint could not be had that year. Its lamp burned whale oil at first, then paraffin, and since 1954
it has run on electricity from a cable under the bay. Every ship that passes answers the light with one long
blast of its horn. The villagers say the custom began with Marit, who promised to put on the kettle for any
captain who greeted the tower, and who kept that promise for fifty-two years. Today the lamp is automatic and
nobody lives there, but a thermos of tea is left on the doorstep every Sunday, and every Sunday it is gone."""
_QUESTIONS = ("Who built the lighthouse?", "What do the villagers leave on the doorstep?")
_STRANGER = "What colours is the tower painted in?"
_OPEN_END = "Make up one sentence that could follow the story."

_ANSWER_TOKENS = 48
_CONTINUATION_TOKENS = 24
_SHORT_ANSWER_TOKENS = 24
_CONTINUATIONS = 4
_TEMPERATURE = 0.9

Say = Callable[..., None]


@dataclass(frozen=True)
class _Outcome:
    """What the demo found.

    Attributes:
        turns: The two answers.
        continuations: Sampled, each on its own fork.
        stranger: The answer to somebody else who asks about the same story, on a cache of their own.
        hit_rate: Share of the prompt tokens that the prefix cache was asked for and had.
        reference: All three answers on transformers' own cache.
        shared_bytes: Bytes of cache that the conversation and its forks held together.
        separate_bytes: Bytes that as many separate caches would have held.
    """

    turns: list[Generation]
    continuations: list[Generation]
    stranger: Generation
    hit_rate: float
    reference: list[Generation]
    shared_bytes: int
    separate_bytes: int

    @property
    def identical(self) -> bool:
        """Whether all answers are token for token those of transformers' own cache."""
        answers = [*self.turns, self.stranger]
        return [answer.token_ids for answer in answers] == [answer.token_ids for answer in self.reference]

    @property
    def saved_s(self) -> float:
        """Seconds by which the stranger's answer began earlier than on transformers' own cache."""
        return self.reference[-1].ttft_s - self.stranger.ttft_s


def demo(
    backend: BackendName = None,
    model: ModelName = None,
    dtype: DtypeName = "float32",
    device: DeviceName = None,
    config: ConfigFile = None,
    option: BackendOptions = None,
    as_json: JsonFlag = False,
) -> None:
    """Two chat turns, four continuations, a second conversation and a comparison, on a real model.

    The second turn reuses the cache of the first, the continuations fork it, the other conversation finds the story
    that both begin with, and all answers are compared with those on transformers' own cache. The exit status is 1 if
    they differ.
    """
    from kvcache_core.cli.waiting import Waiting  # noqa: PLC0415 - as the other, only this command needs it
    from kvcache_core.integrations.models import load_model  # noqa: PLC0415

    let_waiting_threads_sleep()
    started = time.perf_counter()
    cache_config = read_config(backend=backend, device=device, config_file=config, options=option)
    with Waiting() as waiting:
        waiting.phase("starting")
        loaded = load_model(model, dtype=dtype, device=cache_config.device, report=waiting.phase)
    say: Say = _nothing if as_json else typer.secho
    with open_for(loaded, cache_config) as cache:
        dtype_name = str(loaded.model.dtype).removeprefix("torch.")
        say(f"{loaded.name} in {dtype_name}, cache on {cache.manager.backend}", bold=True)
        outcome = _run(loaded, cache, say)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(_as_json(outcome, loaded.name, seconds))
    else:
        _print(outcome, seconds)
    if not outcome.identical:
        raise typer.Exit(1)


def _run(loaded: LoadedModel, cache: KvCache, say: Say) -> _Outcome:
    import torch  # noqa: PLC0415 - as the other, only here

    from kvcache_core.integrations.generation import (  # noqa: PLC0415
        chat_prompt,
        generate,
        generate_on_dynamic_cache,
    )
    from kvcache_core.integrations.transformers import KvCache  # noqa: PLC0415

    messages: list[dict[str, str]] = []
    prompts: list[list[int]] = []
    turns: list[Generation] = []
    for number, question in enumerate(_QUESTIONS):
        content = question if number else _about_the_story(question)
        messages.append({"role": "user", "content": content})
        prompts.append(chat_prompt(loaded, messages))
        say(f"\n> {'' if number else '(a story of 200 words) '}{question}\n", fg="cyan")
        turns.append(generate(loaded, cache, prompts[-1], max_new_tokens=_ANSWER_TOKENS, on_text=_teller(say)))
        say()
        messages.append({"role": "assistant", "content": turns[-1].text})

    prompt = chat_prompt(loaded, [*messages, {"role": "user", "content": _OPEN_END}])
    say(f"\n> {_OPEN_END}  (four samples, each on a fork)\n", fg="cyan")
    forks: list[KvCache] = []
    continuations: list[Generation] = []
    for number in range(_CONTINUATIONS):
        torch.manual_seed(number)
        forks.append(cache.fork())
        continuations.append(
            generate(loaded, forks[-1], prompt, max_new_tokens=_CONTINUATION_TOKENS, temperature=_TEMPERATURE)
        )
        say(f"  {number + 1}. {' '.join(continuations[-1].text.split())} ...")
    holders = [cache, *forks]
    shared = cache.manager.stats().used_bytes
    separate = sum(holder.handle.stats().total_memory_bytes for holder in holders)

    say(f"\n> (somebody else, the same story) {_STRANGER}\n", fg="cyan")
    prompts.append(chat_prompt(loaded, [{"role": "user", "content": _about_the_story(_STRANGER)}]))
    request = KvCache(cache.manager, loaded.model)
    stranger = generate(loaded, request, prompts[-1], max_new_tokens=_SHORT_ANSWER_TOKENS, on_text=_teller(say))
    hit_rate = cache.manager.stats().hit_rate
    say()

    say("\nThe answers once more, on transformers' own cache ...")
    lengths = [_ANSWER_TOKENS] * len(turns) + [_SHORT_ANSWER_TOKENS]
    reference = [
        generate_on_dynamic_cache(loaded, prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return _Outcome(turns, continuations, stranger, hit_rate, reference, shared, separate)


def _about_the_story(question: str) -> str:
    return f"Read this story:\n\n{_STORY}\n\n{question}"


def _teller(say: Say) -> Callable[[str], None]:
    def tell(piece: str) -> None:
        say(piece, nl=False)
        sys.stdout.flush()

    return tell


def _nothing(*_: Any, **__: Any) -> None:
    """Say nothing, when the output is for programs."""


def _as_json(outcome: _Outcome, model: str, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        **asdict(outcome),
        "saved_s": outcome.saved_s,
        "identical": outcome.identical,
        "seconds": seconds,
    }


def _print(outcome: _Outcome, seconds: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - as all of rich, not needed for --json
    from rich.filesize import decimal  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="\nWhat it took", title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("prompt", "reused", "first token", "tokens/s", "cache"):
        table.add_column(heading, justify="right")
    groups = (
        ("turn", outcome.turns),
        ("continuation", outcome.continuations),
        ("other conversation", [outcome.stranger]),
        ("transformers, answer", outcome.reference),
    )
    for name, results in groups:
        for number, result in enumerate(results, start=1):
            table.add_row(
                f"{name} {number}",
                str(result.prompt_tokens),
                str(result.reused_tokens),
                f"{result.ttft_s:.2f} s",
                f"{result.tokens_per_s:.1f}",
                decimal(result.cache_bytes),
            )
        table.add_section()
    console = Console()
    console.print(table)
    first, second = outcome.turns[1].ttft_s, outcome.reference[1].ttft_s
    console.print(f"Reuse between turns: the second answer begins after {first:.2f} s instead of {second:.2f} s.")
    console.print(
        f"Reuse between requests: the other conversation found {outcome.stranger.reused_tokens} of its "
        f"{outcome.stranger.prompt_tokens} prompt tokens (hit rate {outcome.hit_rate:.0%}), and its answer begins "
        f"{outcome.saved_s:.2f} s earlier."
    )
    console.print(
        f"Forks: the conversation and its {len(outcome.continuations)} continuations hold "
        f"{decimal(outcome.shared_bytes)} together, {decimal(outcome.separate_bytes)} if each were a copy."
    )
    if outcome.identical:
        console.print("Greedy output: [green]identical[/] to transformers' own cache, token for token.")
    else:
        console.print("Greedy output: [red]DIFFERS[/] from transformers' own cache.")
    console.print(f"All in {seconds:.0f} s.")
