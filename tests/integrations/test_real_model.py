"""SmolLM2-135M-Instruct in float32 on the CPU backend: token for token what it says on transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from kvcache_core.integrations.generation import chat_prompt, generate, generate_on_dynamic_cache
from kvcache_core.integrations.models import LoadedModel
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = ("Explain what a cache is.", "Shorter, please.")


@pytest.fixture(params=["sdpa", ATTENTION_NAME])
def loaded(request: pytest.FixtureRequest, real_model: LoadedModel) -> Iterator[LoadedModel]:
    real_model.model.set_attn_implementation(request.param)
    yield real_model
    real_model.model.set_attn_implementation("sdpa")


@pytest.fixture
def cache(loaded: LoadedModel) -> Iterator[KvCache]:
    cache = KvCache.for_model(loaded.model, backend="cpu")
    yield cache
    assert cache.manager.audit() == ()


def test_two_turns_say_the_same_and_the_second_computes_only_what_is_new(loaded, cache):
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = chat_prompt(loaded, messages)
        answer = generate(loaded, cache, prompt, max_new_tokens=32)
        assert answer.token_ids == generate_on_dynamic_cache(loaded, prompt, max_new_tokens=32).token_ids
        messages.append({"role": "assistant", "content": answer.text})
    assert answer.prompt_tokens - answer.reused_tokens < 25


def test_a_long_prompt_in_chunks_says_the_same(loaded, cache):
    story = " ".join(f"In year {year} the harvest was {'good' if year % 3 else 'bad'}." for year in range(1900, 1960))
    prompt = chat_prompt(loaded, [{"role": "user", "content": f"{story}\n\nIn which years was the harvest bad?"}])
    answer = generate(loaded, cache, prompt, max_new_tokens=12, prefill_chunk_size=256)
    assert answer.prompt_tokens > 2 * 256
    assert answer.token_ids == generate_on_dynamic_cache(loaded, prompt, max_new_tokens=12).token_ids


def test_forks_of_a_conversation_go_their_own_ways(loaded, cache):
    prompt = chat_prompt(loaded, [{"role": "user", "content": "Name a colour."}])
    generate(loaded, cache, prompt, max_new_tokens=1)
    samples = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        fork = copy.deepcopy(cache)
        samples.append(generate(loaded, fork, prompt, max_new_tokens=12, temperature=1.5))
        assert samples[-1].reused_tokens == len(prompt) - 1
    assert samples[0].token_ids == samples[2].token_ids != samples[1].token_ids
