"""The attention implementation `"kvcache"`: equal to sdpa, and sdpa itself where it is not needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache, attention
from kvcache_core.step import Step
from tests.integrations.tiny import greedy, left_padded, random_ids, tiny_model


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


def test_the_backend_attends_where_it_says_that_it_is_the_faster(attended, manager):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    greedy(model, random_ids(20), KvCache(manager, model), new_tokens=3)
    passes = [20, 1, 1]
    assert attended == [width for width in passes if manager.storage.prefers_attend(width) for _ in range(4)]


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
    greedy(model, random_ids(9), KvCache.for_model(model, backend="cpu", options={"attention": "torch"}), new_tokens=3)
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cached", [0, 5])
def test_an_own_mask_is_followed(cached, rows, attended, manager):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    cache = KvCache(manager, model)
    ids = torch.cat([random_ids(cached + 4, seed=seed) for seed in range(rows)])
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(rows, 1, cached + 4, cached + 4, generator=generator) < 0.7
    mask[..., 0] = True
    mask[:, :, :cached] = torch.ones(cached, cached + 4, dtype=torch.bool).tril()
    with torch.no_grad():
        if cached:
            model(ids[:, :cached], cache=cache)
        attended.clear()
        got = model(ids[:, cached:], cache=cache, attention_mask=mask[:, :, cached:]).logits
        torch.testing.assert_close(got, tiny_model()(ids, attention_mask=mask).logits[:, cached:])
    assert attended == []
    assert all(len(handle.token_ids) == cached for handle in cache.handles)


@pytest.mark.parametrize("argument", [{"position_bias": True}, {"dropout": 0.5}])
def test_what_a_backend_does_not_know_is_computed_by_sdpa_from_a_padded_copy(argument, attended, manager, monkeypatch):
    model = copy.deepcopy(tiny_model())
    model.set_attn_implementation(ATTENTION_NAME)
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def sdpa(_: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **__):
        calls.append((key, value, mask))
        return query.transpose(1, 2), None

    def odd(*args: object, **kwargs: object) -> object:
        return attention.attention_forward(*args, **{**kwargs, **argument})

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, odd)
    cache = KvCache(manager, model)
    ids, mask = left_padded([random_ids(3), random_ids(7)])
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
    assert attended == []
    for layer, (key, value, made) in zip(cache.layers, calls, strict=True):
        assert torch.equal(key, layer.keys)
        assert torch.equal(value, layer.values)
        assert torch.equal(made[:, 0, -1], mask.bool())


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


def test_a_mask_for_each_kind_of_layer_is_the_callers_own(open_for):
    model = copy.deepcopy(tiny_model("gemma3"))
    model.set_attn_implementation(ATTENTION_NAME)
    ids = torch.cat([random_ids(12, seed=seed) for seed in (1, 2)])

    def states(of: PreTrainedModel, cache: Cache) -> torch.Tensor:
        said = {"config": of.config, "inputs_embeds": of.get_input_embeddings()(ids), "cache": cache}
        masks = create_masks_for_generate(**said, attention_mask=torch.ones_like(ids))
        out: torch.Tensor = of.get_decoder()(ids, attention_mask=masks, cache=cache).last_hidden_state
        return out

    with torch.no_grad():
        expected = states(tiny_model("gemma3"), DynamicCache(config=model.config))
        torch.testing.assert_close(states(model, KvCache(open_for(model), model)), expected)


def test_a_model_that_computes_with_v_after_it_was_cached_is_refused(open_for):
    model = copy.deepcopy(tiny_model("diffllama"))
    model.set_attn_implementation(ATTENTION_NAME)
    ids = torch.cat([random_ids(9, seed=seed) for seed in (1, 2)])
    cache = KvCache(open_for(model), model)
    with pytest.raises(UnsupportedError, match=r"chunk.*set_attn_implementation\('sdpa'\)"), torch.no_grad():
        model(ids, cache=cache)
    assert cache.get_seq_length() == 0
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(model(ids, cache=cache).logits, tiny_model("diffllama")(ids).logits)
