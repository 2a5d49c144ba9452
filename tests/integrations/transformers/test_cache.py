"""`KvCache` in the hands of `generate`: the same tokens as transformers' own cache, and reuse."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import Cache, DynamicCache

from kvcache_core.config import CacheConfig
from kvcache_core.errors import CacheFullError, ConfigError, HandleError, ShapeError, UnsupportedError
from kvcache_core.integrations.transformers import KvCache
from tests.integrations.tiny import FAMILIES, VOCABULARY, greedy, random_ids, tiny_model

# -- the same tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_dynamic_cache(family, open_for):
    model, ids = tiny_model(family), random_ids(21)
    cache = KvCache(open_for(model), model)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [2, 5])
def test_chunked_prefill_gives_the_same_tokens(family, chunk, open_for):
    model, ids = tiny_model(family), random_ids(21)
    cache = KvCache(open_for(model), model)
    assert torch.equal(greedy(model, ids, cache, prefill_chunk_size=chunk), greedy(model, ids))


def test_sampled_tokens_equal_those_of_dynamic_cache_from_the_same_seed(model, manager):
    ids = random_ids(9)

    def sample(cache: Cache) -> torch.Tensor:
        torch.manual_seed(7)
        return model.generate(ids, cache=cache, max_new_tokens=12, do_sample=True, temperature=1.5)

    assert torch.equal(sample(KvCache(manager, model)), sample(DynamicCache(config=model.config)))


def test_prompt_lookup_which_crops_after_every_step_gives_the_same_tokens(model, manager):
    ids = random_ids(6).repeat(1, 4)
    cache = KvCache(manager, model)
    assert torch.equal(greedy(model, ids, cache, prompt_lookup_num_tokens=3), greedy(model, ids))
    assert cache.handle.token_ids == tuple(greedy(model, ids)[0].tolist())[: cache.get_seq_length()]


def test_an_assistant_model_gives_the_same_tokens(model, manager):
    ids = random_ids(8)
    cache = KvCache(manager, model)
    assert torch.equal(greedy(model, ids, cache, assistant_model=tiny_model("qwen2")), greedy(model, ids))


def test_the_first_argument_may_be_a_configuration(model):
    config = CacheConfig.from_pretrained_config(model.config, backend="cpu", environ={})
    cache = KvCache(config, model)
    assert torch.equal(greedy(model, random_ids(9), cache), greedy(model, random_ids(9)))


# -- opening for a model -----------------------------------------------------------------------------------


def test_for_model_takes_shape_dtype_and_device_from_the_model():
    model = copy.deepcopy(tiny_model()).to(torch.bfloat16)  # its config still says float32
    cache = KvCache.for_model(model, backend="cpu")
    assert (cache.manager.dtype, cache.manager.device) == (torch.bfloat16, model.device)
    assert cache.manager.geometry.num_layers == model.config.num_hidden_layers


def test_for_model_keeps_what_the_configuration_says(model):
    config = CacheConfig(backend="cpu", dtype="float16", allow_dtype_cast=True, budget="64 tokens")
    cache = KvCache.for_model(model, config, block_size=8)
    assert cache.manager.dtype is torch.float16
    assert (cache.manager.block_size, cache.get_max_length()) == (8, 64)
    assert greedy(model, random_ids(9), cache).shape == (1, 21)


def test_a_cache_of_another_shape_is_refused(manager):
    with pytest.raises(ShapeError, match="opened for a model of another shape"):
        KvCache(manager, tiny_model("gpt2"))
    config = CacheConfig.from_pretrained_config(tiny_model("gpt2").config, backend="cpu", environ={})
    with pytest.raises(ShapeError, match="another shape"):
        KvCache.for_model(tiny_model("llama"), config)


def test_models_that_cache_something_else_are_refused_by_name():
    import transformers

    for config in (transformers.MambaConfig(), transformers.DeepseekV3Config(), transformers.T5Config()):
        with pytest.raises(ConfigError, match=config.model_type):
            KvCache.for_model(_Configured(config))


class _Configured:
    """As much of a model as its refusal needs."""

    def __init__(self, config: object) -> None:
        self.config = config


def test_an_opened_cache_is_closed_with_its_last_user(model):
    cache = KvCache.for_model(model, backend="cpu")
    manager, fork = cache.manager, cache.fork()
    del cache
    assert not manager.closed
    del fork
    assert manager.closed


def test_a_cache_that_was_given_stays_open(model, manager):
    cache = KvCache(manager, model)
    del cache
    assert not manager.closed
    assert manager.list_handles() == []


def test_an_adopted_handle_brings_its_tokens(model, manager):
    first = KvCache(manager, model)
    out = greedy(model, random_ids(9), first)
    adopted = KvCache(first.handle.fork(), model)
    assert adopted.get_seq_length() == first.get_seq_length()
    longer = torch.cat([out, random_ids(3)], dim=1)
    assert adopted.prepare(longer) == out.shape[1] - 1
    assert torch.equal(greedy(model, longer, adopted), greedy(model, longer))


# -- conversations -----------------------------------------------------------------------------------------


def test_a_second_turn_computes_only_what_is_new(model, manager):
    cache = KvCache(manager, model)
    first = greedy(model, random_ids(9), cache)
    second = torch.cat([first, random_ids(6, seed=1)], dim=1)
    assert cache.prepare(second) == first.shape[1] - 1  # the last token was never fed to the model
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(greedy(model, second, cache), greedy(model, second))
    hook.remove()
    assert seen[0] == 7


def test_what_differs_from_the_prompt_is_dropped(model, manager):
    cache = KvCache(manager, model)
    first = greedy(model, random_ids(9), cache)
    edited = first.clone()
    edited[0, 12] = (edited[0, 12] + 1) % VOCABULARY
    assert cache.prepare(edited) == cache.get_seq_length() == 12
    assert torch.equal(greedy(model, edited, cache), greedy(model, edited))


def test_a_prompt_that_is_wholly_cached_leaves_its_last_token_to_compute(model, manager):
    cache = KvCache(manager, model)
    first = greedy(model, random_ids(9), cache)
    for length in (first.shape[1] - 1, 9, 1):
        prompt = first[:, :length]
        assert cache.prepare(prompt) == cache.get_seq_length() == length - 1
        assert torch.equal(greedy(model, prompt, cache), greedy(model, prompt))


@pytest.mark.parametrize(
    "form", [lambda ids: ids, lambda ids: ids[0], lambda ids: ids.tolist(), lambda ids: ids[0].tolist()]
)
def test_prepare_takes_tensors_and_lists_with_or_without_the_batch_dimension(form, model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    assert cache.prepare(form(random_ids(9))) == 8


@pytest.mark.parametrize("prompt", [[], torch.zeros(1, 0, dtype=torch.long), [1.5], ["a"], torch.ones(1, 3)])
def test_prepare_refuses_what_is_no_prompt(prompt, model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    with pytest.raises(ShapeError):
        cache.prepare(prompt)
    assert cache.get_seq_length() == 20


def test_a_model_whose_rotation_depends_on_the_length_reuses_nothing(open_for):
    model = tiny_model("dynamic_rope")
    cache = KvCache(open_for(model), model)
    first = greedy(model, random_ids(20), cache)
    longer = torch.cat([first, random_ids(3)], dim=1)
    assert cache.prepare(longer) == cache.get_seq_length() == 0
    assert torch.equal(greedy(model, longer, cache), greedy(model, longer))


def test_prepare_refuses_a_prompt_longer_than_the_sequence_may_become(model, manager):
    cache = KvCache(manager, model, max_sequence_length=12)
    greedy(model, random_ids(9), cache, new_tokens=2)
    with pytest.raises(CacheFullError, match="the prompt has 13 tokens and the sequence may hold 12"):
        cache.prepare(random_ids(13))
    with pytest.raises(CacheFullError, match="ask for 2 new tokens at most"):
        cache.prepare(random_ids(11), max_new_tokens=3)
    assert cache.get_seq_length() == 10
    assert cache.prepare(random_ids(11), max_new_tokens=2) == 9


def test_a_prompt_longer_than_the_cache_is_refused_by_the_model_call_as_well(model, manager):
    cache = KvCache(manager, model, max_sequence_length=12)
    with pytest.raises(CacheFullError, match="13"):
        greedy(model, random_ids(13), cache)
    assert cache.get_seq_length() == 0
    assert manager.stats().used_blocks == 0


def test_tokens_are_anonymous_without_the_model_and_never_match(open_for):
    model = copy.deepcopy(tiny_model())  # one that no cache was ever told about
    model.get_decoder()._forward_pre_hooks.clear()
    model.get_decoder()._forward_hooks.clear()
    cache = KvCache(open_for(model))
    assert torch.equal(greedy(model, random_ids(9), cache), greedy(model, random_ids(9)))
    assert cache.handle.token_ids == ()
    assert cache.prepare(random_ids(9)) == cache.get_seq_length() == 0


# -- copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, KvCache.fork])
def test_a_copy_is_independent_and_shares_memory_until_written(duplicate, model, manager):
    prompt = random_ids(17)
    cache = KvCache(manager, model)
    greedy(model, prompt, cache, new_tokens=1)
    used = manager.stats().used_blocks
    copied = duplicate(cache)
    assert manager.stats().used_blocks == used
    left, right = (torch.cat([prompt, random_ids(5, seed=seed)], dim=1) for seed in (1, 2))
    for ids, target in ((left, cache), (right, copied), (left, cache)):
        assert target.prepare(ids) >= 17
        assert torch.equal(greedy(model, ids, target), greedy(model, ids))


def test_copies_within_a_container_are_the_same_copy(model, manager):
    cache = KvCache(manager, model)
    first, second = copy.deepcopy([cache, cache])
    assert first is second
    assert first is not cache


def test_a_copy_outlives_its_original(model, manager):
    cache = KvCache(manager, model)
    out = greedy(model, random_ids(9), cache)
    copied = copy.deepcopy(cache)
    del cache
    longer = torch.cat([out, random_ids(2)], dim=1)
    assert copied.prepare(longer) == 20
    assert torch.equal(greedy(model, longer, copied), greedy(model, longer))


def test_pickling_is_refused(model, manager, tmp_path):
    cache = KvCache(manager, model)
    with pytest.raises(UnsupportedError, match="pickling"):
        pickle.dumps(cache)
    with pytest.raises(UnsupportedError, match="pickling"):
        torch.save(cache, tmp_path / "cache.pt")


# -- lengths -----------------------------------------------------------------------------------------------


def test_crop_and_reset_move_the_length_and_give_memory_back(model, manager):
    cache = KvCache(manager, model)
    out = greedy(model, random_ids(9), cache)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    cache.crop(-8)
    assert (cache.get_seq_length(), cache.handle.token_ids) == (12, tuple(out[0, :12].tolist()))
    assert manager.stats().used_blocks == 3
    cache.reset()
    assert (cache.get_seq_length(), manager.stats().used_blocks) == (0, 0)
    assert torch.equal(greedy(model, random_ids(9), cache), out)


@pytest.mark.parametrize("wrong", [1, -21, True, -1.0, None, "1"])
def test_crop_refuses_anything_but_minus_a_number_of_cached_tokens(wrong, model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    with pytest.raises(ShapeError, match="from -20 to 0"):
        cache.crop(wrong)
    assert cache.get_seq_length() == 20


def test_lengths_and_mask_sizes_are_those_of_the_sequence_for_every_layer(model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [20] * 4
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * 4
    assert cache.get_seq_length(99) == 0
    assert cache.get_mask_sizes(3, 1) == cache.layers[1].get_mask_sizes(3) == (23, 0)
    assert cache.get_max_length() == cache.layers[0].get_max_length() == 256
    assert (len(cache), cache.batch_size, cache.is_initialized, cache.is_compileable) == (4, 1, True, False)


# -- memory ------------------------------------------------------------------------------------------------


def test_memory_is_given_back_as_soon_as_the_object_goes(model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    gone, handle = weakref.ref(cache), cache.handle
    gc.disable()
    try:
        del cache
        assert gone() is None
        assert not handle.is_valid
        assert manager.stats().used_blocks == 0
    finally:
        gc.enable()


def test_free_gives_memory_back_now_and_once(model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    cache.free()
    cache.free()
    assert manager.stats().used_blocks == 0
    with pytest.raises(HandleError, match="freed"):
        cache.get_seq_length()


def test_the_first_sequence_is_opened_when_it_is_needed(model, manager):
    cache = KvCache(manager, model)
    assert (repr(cache), cache.batch_size, cache.get_seq_length()) == ("<KvCache over nothing yet>", 1, 0)
    assert (cache.get_mask_sizes(3), cache.get_max_length()) == ((3, 0), 256)
    assert manager.list_handles() == []
    greedy(model, random_ids(9), cache)
    assert manager.list_handles() == [cache.handle]


def test_a_cache_that_was_freed_before_its_first_use_cannot_be_used(model, manager):
    cache = KvCache(manager, model)
    cache.free()
    for use in (cache.get_seq_length, lambda: cache.handle, lambda: greedy(model, random_ids(9), cache)):
        with pytest.raises(HandleError, match="was freed; make another"):
            use()
    assert manager.list_handles() == []


def test_a_cache_whose_manager_was_closed_goes_quietly_and_says_so_when_used(model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    manager.close()
    with pytest.raises(HandleError, match="closed"):
        cache.get_seq_length()
    del cache


def test_its_repr_tells_what_it_holds(model, manager):
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    assert "20 tokens" in repr(cache)
    assert repr(cache.layers[2]) == "KvCacheLayer(2)"
