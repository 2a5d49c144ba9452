"""Generating text on a `KvCache`, with the figures that tell what the cache was good for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, TextStreamer

from kvcache_core.integrations.models import LoadedModel
from kvcache_core.integrations.quiet import quiet_transformers
from kvcache_core.integrations.transformers import KvCache

__all__ = ["Generation", "chat_prompt", "generate", "generate_on_dynamic_cache"]

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A continuation of a prompt, and what it took.

    Attributes:
        text: The new text, special tokens left out.
        token_ids: Ids of the new tokens, the end token included if it came.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Of these, tokens that were cached and not computed again.
        new_tokens: Tokens generated.
        ttft_s: Seconds from the call to the first new token.
        tokens_per_s: New tokens a second after the first; of the whole where there is only one.
        cache_bytes: Bytes of K and V the sequence holds afterwards.
        backend: The backend that holds them.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    ttft_s: float
    tokens_per_s: float
    cache_bytes: int
    backend: str


def chat_prompt(loaded: LoadedModel, messages: Sequence[Message]) -> list[int]:
    """The token ids of a conversation in the model's own chat format, ready for the assistant's answer.

    A tokenizer without a chat format gets the contents, one after the other.
    """
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def generate(
    loaded: LoadedModel,
    cache: KvCache,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    on_text: Callable[[str], None] | None = None,
    on_pass: Callable[[int], None] | None = None,
    prefill_chunk_size: int | None = None,
) -> Generation:
    """Continue `prompt`, reusing what `cache` has of it.

    Args:
        loaded: The model.
        cache: A cache for it; holds prompt and answer afterwards, except for the last token.
        prompt: Token ids.
        max_new_tokens: Most tokens to generate.
        temperature: 0 for the likeliest token each time; above, sample.
        on_text: Called with every piece of text as it comes.
        on_pass: Called after every forward pass with the tokens that are cached by then.
        prefill_chunk_size: Tokens of the prompt in one forward pass; all of them when None.

    Raises:
        CacheFullError: Prompt and answer together are longer than the sequence may become; nothing has changed.
    """
    started = time.perf_counter()
    reused = cache.prepare(prompt, max_new_tokens=max_new_tokens)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    with _after_passes(loaded.model, cache, on_pass):
        new, times = _run(loaded, cache, prompt, max_new_tokens, on_text, prefill_chunk_size, sampling)
    return _generation(
        loaded,
        prompt,
        new,
        [moment - started for moment in times],
        reused=reused,
        cache_bytes=cache.handle.stats().total_memory_bytes,
        backend=cache.manager.backend,
    )


def generate_on_dynamic_cache(loaded: LoadedModel, prompt: Sequence[int], *, max_new_tokens: int) -> Generation:
    """Continue `prompt` greedily on transformers' own cache, from nothing, to compare with."""
    cache = DynamicCache(config=loaded.model.config)
    started = time.perf_counter()
    new, times = _run(loaded, cache, prompt, max_new_tokens, None, None, {"do_sample": False})
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return _generation(
        loaded,
        prompt,
        new,
        [moment - started for moment in times],
        reused=0,
        cache_bytes=sum(tensor.nbytes for tensor in tensors),
        backend="DynamicCache",
    )


def _run(
    loaded: LoadedModel,
    cache: Cache,
    prompt: Sequence[int],
    max_new_tokens: int,
    on_text: Callable[[str], None] | None,
    prefill_chunk_size: int | None,
    sampling: dict[str, Any],
) -> tuple[tuple[int, ...], list[float]]:
    """The new token ids, and when each came."""
    input_ids = torch.tensor([list(prompt)], device=loaded.model.device)
    clock = _Clock(loaded.tokenizer, on_text)
    with quiet_transformers():
        output = loaded.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=cache,
            max_new_tokens=max_new_tokens,
            prefill_chunk_size=prefill_chunk_size,
            streamer=clock,
            **sampling,
        )
    return tuple(output[0, len(prompt) :].tolist()), clock.times


def _generation(
    loaded: LoadedModel,
    prompt: Sequence[int],
    new: tuple[int, ...],
    times: list[float],
    *,
    reused: int,
    cache_bytes: int,
    backend: str,
) -> Generation:
    return Generation(
        text=str(loaded.tokenizer.decode(new, skip_special_tokens=True)),
        token_ids=new,
        prompt_tokens=len(prompt),
        reused_tokens=reused,
        new_tokens=len(new),
        ttft_s=times[0],
        tokens_per_s=(len(new) - 1) / (times[-1] - times[0]) if len(new) > 1 else 1 / times[0],
        cache_bytes=cache_bytes,
        backend=backend,
    )


@contextmanager
def _after_passes(model: Any, cache: KvCache, on_pass: Callable[[int], None] | None) -> Iterator[None]:
    if on_pass is None:
        yield
        return
    hook = model.register_forward_hook(lambda *_: on_pass(cache.get_seq_length()))
    try:
        yield
    finally:
        hook.remove()


class _Clock(TextStreamer):  # type: ignore[misc]
    """Notes when each token came, and hands text on as soon as it is whole."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text and self._on_text is not None:
            self._on_text(text)
