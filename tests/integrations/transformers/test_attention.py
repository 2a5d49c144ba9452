"""The attention implementation `"kvcache"`: equal to sdpa, and sdpa itself where it is not needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache, attention
from kvcache_core.step import Step
from tests.integrations.tiny import greedy, random_ids, tiny_model


@pytest.fixture(params=["llama", "gemma3", "mistral", "bloom"])
def switched(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of its own that attends through the cache."""
    model = copy.deepcopy(tiny_model(request.param))
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Query lengths of the layers that the backend attended."""
    lengths: list[int] = []
    attend = Step.attend

    def count(self: Step, layer: int, query: torch.Tensor, **kwargs: float) -> torch.Tensor:
        lengths.append(query.shape[0])
        return attend(self, layer, query, **kwargs)

    monkeypatch.setattr(Step, "attend", count)
    return lengths


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under sdpa."""
    return tiny_model(model.config.model_type.removesuffix("_text"))


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_greedy_tokens_equal_those_of_sdpa(chunk, switched, open_for):
    ids = random_ids(21)
    cache = KvCache(open_for(switched), switched)
    assert torch.equal(greedy(switched, ids, cache, prefill_chunk_size=chunk), greedy(twin(switched), ids))
    longer = torch.cat([ids, random_ids(4)], dim=1)
    cache.prepare(longer)
    assert torch.equal(greedy(switched, longer, cache), greedy(twin(switched), longer))


def test_logits_equal_those_of_sdpa_with_ragged_chunks(switched, open_for):
    ids = random_ids(30)
    cache = KvCache(open_for(switched), switched)
    with torch.no_grad():
        expected = twin(switched)(ids).logits
        got = [switched(part, cache=cache).logits for part in ids.split([1, 6, 1, 1, 9, 12], dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), expected)


def test_the_backend_attends_where_keys_would_have_to_be_gathered(attended, manager):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    greedy(model, random_ids(9), KvCache(manager, model), new_tokens=3)
    assert attended == ([] if manager.storage.dense_is_view else [9] * 4 + [1] * 8)


@pytest.mark.parametrize(("dtype", "folds"), [(torch.float32, True), (torch.bfloat16, False)])
def test_views_are_attended_folded_in_float32_only(dtype, folds, monkeypatch):
    model = copy.deepcopy(tiny_model()).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    folded: list[int] = []
    fold = attention._attend_folded

    def count(query: torch.Tensor, *rest: object) -> torch.Tensor:
        folded.append(query.shape[2])
        return fold(query, *rest)

    monkeypatch.setattr(attention, "_attend_folded", count)
    greedy(model, random_ids(9), KvCache.for_model(model, backend="cpu"), new_tokens=3)
    assert folded == ([1] * 8 if folds else [])


@pytest.mark.parametrize(
    "call",
    [
        lambda model, ids: model(ids),
        lambda model, ids: model(ids, use_cache=False),
        lambda model, ids: model(ids, cache=DynamicCache(config=model.config)),
        lambda model, ids: model(ids.repeat(2, 1), attention_mask=torch.tensor([[1] * 9, [0] * 4 + [1] * 5])),
    ],
    ids=["own cache", "no cache", "dynamic cache", "padded batch"],
)
def test_without_a_kvcache_it_is_sdpa(call, attended, switched):
    with torch.no_grad():
        torch.testing.assert_close(
            call(switched, random_ids(9)).logits, call(twin(switched), random_ids(9)).logits, rtol=0, atol=0
        )
    assert attended == []


def test_a_dynamic_cache_in_chunks_is_masked_rightly(switched):
    ids = random_ids(21)
    cache = DynamicCache(config=switched.config)
    assert torch.equal(greedy(switched, ids, cache, prefill_chunk_size=5), greedy(twin(switched), ids))


def test_an_own_mask_is_followed(attended, manager):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with torch.no_grad():
        got = model(random_ids(4), cache=KvCache(manager, model), attention_mask=mask).logits
        torch.testing.assert_close(got, tiny_model()(random_ids(4), attention_mask=mask).logits)
    assert attended == []


def test_training_goes_the_usual_way(attended):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    ids = random_ids(9)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    assert attended == []


@pytest.mark.parametrize(("family", "what"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_attention_with_a_soft_cap_or_sinks_is_refused(family, what, open_for):
    model = copy.deepcopy(tiny_model(family))
    model.set_attn_implementation(ATTENTION_NAME)
    cache = KvCache(open_for(model), model)
    with pytest.raises(UnsupportedError, match=f"does not know '{what}'.*'eager'"):
        greedy(model, random_ids(9), cache)
    assert cache.get_seq_length() == 0
