"""SmolLM2-135M-Instruct in float32: token for token what it says on transformers' own cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache_core import KvCacheManager
from kvcache_core.errors import ConfigError
from kvcache_core.integrations.generation import chat_prompt, generate, generate_on_dynamic_cache
from kvcache_core.integrations.models import LoadedModel, bundled_gguf, load_model
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.plugin import StorageSpec
from kvcache_core.pretrained import geometry_from_pretrained
from kvcache_metal.options import MetalOptions
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.stand_in import StandIn, on_stand_in

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = ("Explain what a cache is.", "Shorter, please.")


@pytest.fixture(scope="module")
def real_model() -> LoadedModel:
    try:
        bundled_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    return load_model(dtype="float32")


@pytest.fixture(params=["sdpa", ATTENTION_NAME])
def loaded(request: pytest.FixtureRequest, real_model: LoadedModel) -> Iterator[LoadedModel]:
    real_model.model.set_attn_implementation(request.param)
    yield real_model
    real_model.model.set_attn_implementation("sdpa")


def test_two_turns_on_the_stand_in_say_the_same_and_no_fault_strikes(loaded: LoadedModel) -> None:
    spec = StorageSpec(
        geometry=geometry_from_pretrained(loaded.model.config),
        block_size=16,
        num_blocks=32,
        max_sequence_length=512,
        dtype="float32",
        device="cpu",
        options=MetalOptions(device="cpu"),
    )
    stand_in = StandIn(max_graphs=24)
    with KvCacheManager(on_stand_in(lambda: MetalStorage(spec), stand_in)) as manager:
        cache = KvCache(manager, loaded.model)
        messages: list[dict[str, str]] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            prompt = chat_prompt(loaded, messages)
            answer = generate(loaded, cache, prompt, max_new_tokens=12)
            assert answer.token_ids == generate_on_dynamic_cache(loaded, prompt, max_new_tokens=12).token_ids
            messages.append({"role": "assistant", "content": answer.text})
        assert answer.reused_tokens > 0
        assert manager.audit() == ()
        cache.free()
    assert dict(stand_in.fired) == {}


def test_a_configured_cache_says_the_same(real_model: LoadedModel) -> None:
    cache = KvCache.for_model(real_model.model, backend="metal", options={"device": "cpu"}, budget="512 tokens")
    prompt = chat_prompt(real_model, [{"role": "user", "content": "What is the capital of France?"}])
    answer = generate(real_model, cache, prompt, max_new_tokens=12)
    assert answer.token_ids == generate_on_dynamic_cache(real_model, prompt, max_new_tokens=12).token_ids
    assert "Paris" in answer.text
    cache.free()
