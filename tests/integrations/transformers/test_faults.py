"""Faults that other caches shipped in their dealings with transformers."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import weakref

import pytest
import torch
from transformers import Cache, DynamicCache

from kvcache_core.errors import ShapeError, UnsupportedError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.integrations.transformers.layer import KvCacheLayer
from kvcache_core.manager import KvCacheManager
from kvcache_core.storage import StorageSpec
from tests.integrations.tiny import greedy, left_padded, random_ids, tiny_model

TINY = {"geometry": CacheGeometry(num_layers=4, num_kv_heads=2, head_dim=8)}


def filled(manager: KvCacheManager, model: torch.nn.Module, tokens: int = 10) -> KvCache:
    cache = KvCache(manager, model)
    with torch.no_grad():
        model(random_ids(11)[:, :tokens], cache=cache)
    return cache


def tagged(tokens: range, layer: int, *, role: str, dim: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """K or V `[1, 2, tokens, dim]` whose every element tells its position, layer and role."""
    sign = 1 if role == "key" else -1
    rows = torch.tensor([sign * (1 + position + 100 * layer) for position in tokens], dtype=dtype)
    return rows[None, None, :, None].expand(1, 2, len(tokens), dim).clone()


def write(cache: KvCache, start: int, count: int, dim: int = 8, value_dim: int = 8) -> list[tuple[torch.Tensor, ...]]:
    tokens = range(start, start + count)
    return [
        cache.update(
            tagged(tokens, layer, role="key", dim=dim), tagged(tokens, layer, role="value", dim=value_dim), layer
        )
        for layer in range(4)
    ]


# -- huggingface/transformers#38727 -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 6, 9, 10])
def test_transformers_38727_a_prompt_not_longer_than_the_cache_is_refused_and_prepare_makes_it_fit(
    length, model, manager
):
    cache = filled(manager, model)
    prompt = random_ids(11)[:, :length]
    with pytest.raises(ShapeError, match=r"cache\.prepare"):
        greedy(model, prompt, cache)
    assert (cache.get_seq_length(), cache.handle.token_ids) == (10, tuple(random_ids(11)[0, :10].tolist()))
    assert cache.prepare(prompt) == length - 1
    assert torch.equal(greedy(model, prompt, cache), greedy(model, prompt))


def test_transformers_38727_one_token_more_than_the_cache_works(model, manager):
    ids = random_ids(11)
    assert torch.equal(greedy(model, ids, filled(manager, model)), greedy(model, ids))


def test_transformers_38727_only_the_new_token_with_a_mask_of_all_works(model, manager):
    ids = random_ids(11)
    out = model.generate(
        ids[:, 10:],
        attention_mask=torch.ones(1, 11, dtype=torch.long),
        cache=filled(manager, model),
        max_new_tokens=12,
        do_sample=False,
    )
    assert torch.equal(out[0, 1:], greedy(model, ids)[0, 11:])


@pytest.mark.parametrize("length", [9, 10, 11])
def test_transformers_38727_embeddings_of_the_whole_prompt(length, model, manager):
    ids = random_ids(11)[:, :length]
    cache = filled(manager, model)
    arguments = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": 12, "do_sample": False}
    if length == 11:
        assert torch.equal(model.generate(**arguments, cache=cache)[0], greedy(model, ids)[0, 11:])
    else:
        with pytest.raises(ShapeError, match=r"cache\.prepare"):
            model.generate(**arguments, cache=cache)
        assert cache.get_seq_length() == 10


# -- the rest, in the order of their names ------------------------------------------------------------------


def test_memos_2313_a_filled_cache_has_its_length_whatever_the_route(model, manager):
    by_model = filled(manager, model)
    by_update = KvCache(manager)
    write(by_update, 0, 10)
    by_handle = KvCache(by_update.handle.fork())
    appended = KvCache(manager)
    appended.handle.append([(torch.zeros(10, 2, 8), torch.zeros(10, 2, 8))] * 4)
    routes = {"model": by_model, "update": by_update, "handle": by_handle, "append": appended}
    routes |= {f"copy of {name}": copy.deepcopy(cache) for name, cache in routes.items()}
    for name, cache in routes.items():
        assert (cache.get_seq_length(), cache.get_mask_sizes(1, 0)) == (10, (11, 0)), name
        assert all(layer.is_initialized for layer in cache.layers), name
        before = cache.layers[3].keys.clone()
        keys, _ = write(cache, 10, 1)[3]
        assert (keys.shape[2], cache.get_seq_length()) == (11, 11), name
        assert torch.equal(keys[:, :, :10], before), name


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION_NAME])
def test_transformers_18104_a_row_of_a_padded_batch_equals_its_own_run_in_both_turns(attention, model, open_for):
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    cache = KvCache(open_for(model), model)
    alone = [random_ids(length, seed=length) for length in (3, 7, 12)]
    for more in (5, 1):
        ids, mask = left_padded(alone)
        cache.prepare(ids, mask)
        out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=16, do_sample=False)
        alone = [greedy(model, prompt, new_tokens=16) for prompt in alone]
        for row, whole in enumerate(alone):
            assert torch.equal(out[row, -whole.shape[1] :], whole[0])
        alone = [torch.cat([whole, random_ids(more + row)], dim=1) for row, whole in enumerate(alone)]


def test_transformers_18104_right_padding_is_right(model, manager):
    cache = KvCache(manager, model)
    prompts = [random_ids(length, seed=length) for length in (3, 7, 12)]
    ids, mask = (torch.cat([side, side.flip(1)], dim=1)[:, 12 - 0 :] for side in left_padded(prompts))
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=torch.arange(12)[None], cache=cache).logits
        for row, prompt in enumerate(prompts):
            flipped = prompt.flip(1)
            torch.testing.assert_close(logits[row, : prompt.shape[1]], model(flipped).logits[0])
    assert [handle.num_tokens for handle in cache.handles] == [3, 7, 12]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_transformers_30108_the_model_returns_the_cache_it_was_given(family, open_for):
    model = tiny_model(family)
    cache = KvCache(open_for(model), model)
    with torch.no_grad():
        assert model(random_ids(5), cache=cache, use_cache=True).cache is cache
        assert cache.get_seq_length() == 5
        assert any(part is cache for part in model(random_ids(3), cache=cache, return_dict=False))
        assert cache.get_seq_length() == 8
        model(random_ids(3), cache=cache, use_cache=False)
        assert cache.get_seq_length() == 8
        assert not isinstance(model(random_ids(3), cache=None, use_cache=True).cache, KvCache)
    assert model.generate(random_ids(9), cache=cache, max_new_tokens=1, return_dict_in_generate=True).cache is cache


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_transformers_32681_copies_are_independent_and_equal_to_fresh_runs(duplicate, context, model, manager):
    prompt = random_ids(10)
    cache = KvCache(manager, model)
    with context():
        model(prompt, cache=cache)
    copied = duplicate(cache)
    left, right = (torch.cat([prompt, random_ids(4, seed=seed)], dim=1) for seed in (1, 2))
    assert torch.equal(greedy(model, left, cache), greedy(model, left))
    assert torch.equal(greedy(model, right, copied), greedy(model, right))


def test_transformers_32681_gradients_are_refused_and_pickling_is_refused(model, manager):
    cache = KvCache(manager, model)
    with pytest.raises(ShapeError, match="no_grad"):
        model(random_ids(4), cache=cache)
    with pytest.raises(UnsupportedError, match="pickling"):
        pickle.dumps(cache)
    assert cache.get_seq_length() == 0


def test_transformers_32681_a_deep_copy_does_not_copy_the_pool(model, manager):
    cache = filled(manager, model)
    before = manager.storage.nbytes
    copies = [copy.deepcopy(cache) for _ in range(8)]
    assert manager.stats().used_blocks == 3
    assert manager.storage.nbytes <= before + 8 * 4096 * 8  # a page for each layer and role at the very most
    del copies


def test_transformers_33861_layers_in_any_order_and_layers_that_cache_nothing(storage_class):
    geometry = CacheGeometry(num_layers=5, groups=[{"layers": [1, 3], "num_kv_heads": 2, "head_dim": 8}])
    spec = StorageSpec(
        geometry=geometry, block_size=4, num_blocks=64, max_sequence_length=64, dtype="float32", device="cpu"
    )
    with KvCacheManager(storage_class(spec)) as manager:
        cache = KvCache(manager)
        for order in ([3, 1], [1, 3], [3, 1]):
            for layer in order:
                tokens = range(cache.get_seq_length(), cache.get_seq_length() + 2)
                cache.update(tagged(tokens, layer, role="key"), tagged(tokens, layer, role="value"), layer)
        assert [cache.get_seq_length(layer) for layer in range(5)] == [6, 6, 0, 6, 0]
        assert len(cache) == 5
        assert torch.equal(cache.layers[3].keys, tagged(range(6), 3, role="key"))
        with pytest.raises((ShapeError, NotImplementedError)):
            cache.update(tagged(range(1), 2, role="key"), tagged(range(1), 2, role="value"), 2)
        cache.crop(-1)
        assert cache.get_seq_length(1) == 5
        cache.reset()
        cache.free()
        assert manager.audit() == ()


def test_transformers_34232_values_come_back_as_values(storage_class):
    geometry = CacheGeometry(num_layers=4, num_kv_heads=2, head_dim=8, value_head_dim=4)
    spec = StorageSpec(
        geometry=geometry, block_size=4, num_blocks=64, max_sequence_length=64, dtype="float32", device="cpu"
    )
    with KvCacheManager(storage_class(spec)) as manager:
        cache = KvCache(manager)
        write(cache, 0, 6, value_dim=4)
        returned = write(cache, 6, 3, value_dim=4)
        cache.crop(-1)
        returned = [(keys[:, :, :8], values[:, :, :8]) for keys, values in returned]
        for source in (cache, copy.copy(cache), copy.deepcopy(cache), KvCache(cache.handle.fork())):
            for layer in range(4):
                keys, values = source.layers[layer].keys, source.layers[layer].values
                assert torch.equal(keys, tagged(range(8), layer, role="key"))
                assert torch.equal(values, tagged(range(8), layer, role="value", dim=4))
                assert torch.equal(keys, returned[layer][0])
                assert torch.equal(values, returned[layer][1])


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.float16, torch.bfloat16),
    ],
)
def test_transformers_34799_other_dtypes_are_refused_or_stored_in_the_configured_one(
    key_dtype, value_dtype, model, open_for
):
    key, value = tagged(range(3), 0, role="key", dtype=key_dtype), tagged(range(3), 0, role="value", dtype=value_dtype)
    strict = KvCache(open_for(model, dtype="bfloat16"))
    with pytest.raises(ShapeError, match="allow_dtype_cast"):
        strict.update(key, value, 0)
    casting = KvCache(open_for(model, dtype="bfloat16", allow_dtype_cast=True))
    for layer in range(4):
        keys, values = casting.update(key, value, layer)
        assert (keys.dtype, values.dtype) == (key_dtype, value_dtype)  # the model computes on in its own dtype
        assert torch.equal(keys, key)
        assert torch.equal(values, value)
    assert casting.layers[0].keys.dtype is casting.layers[0].values.dtype is torch.bfloat16
    for cache in (strict, casting):
        with pytest.raises(ShapeError):
            cache.update(key.to(torch.int64), value, 0)


def test_transformers_34799_a_bfloat16_cache_under_a_float32_model_and_autocast(model, open_for):
    cache = KvCache(open_for(model, dtype="bfloat16", allow_dtype_cast=True), model)
    assert greedy(model, random_ids(9), cache).dtype is torch.long
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(random_ids(3), cache=cache)
    assert (cache.get_seq_length(), cache.layers[0].dtype) == (23, torch.bfloat16)


def test_transformers_34921_everything_public_of_transformers_caches_is_there():
    def public(cls: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}

    assert public(Cache) | public(DynamicCache) <= public(KvCache)
    reads_layer_tensors = {"reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"}
    assert reads_layer_tensors <= KvCache.__dict__.keys()
    layers = DynamicCache(config=tiny_model("gemma3").config).layers
    for layer in (layers[0], layers[-1]):
        missing = {name for name in dir(layer) if not name.startswith("_")} - set(dir(KvCacheLayer))
        # Instance attributes of ours; the rest is the bookkeeping of a window that forgets rows, which ours does not.
        assert missing <= {"cumulative_length", "record_past", "sliding_window"}


def test_transformers_34921_every_mode_of_generate_works_or_is_refused(model, manager):
    ids = random_ids(9)
    works = [
        {"do_sample": False},
        {"do_sample": True},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": tiny_model("qwen2")},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
        {"guidance_scale": 2.0},
        {"output_hidden_states": True, "output_scores": True, "return_dict_in_generate": True},
    ]
    for mode in works:
        cache = KvCache(manager, model)
        out = model.generate(ids, cache=cache, max_new_tokens=5, **mode)
        assert getattr(out, "sequences", out).shape == (1, 14), mode
    for mode in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        out = model.generate(ids.repeat(3, 1), cache=KvCache(manager, model), max_new_tokens=5, **mode)
        assert out.shape == (3 * mode.get("num_return_sequences", 1), 14), mode
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids, cache=KvCache(manager, model), max_new_tokens=5, cache_implementation="static")


def test_transformers_35168_a_layer_of_another_length_is_refused_at_once(manager):
    cache = KvCache(manager)
    write(cache, 0, 4)
    cache.update(tagged(range(4, 9), 0, role="key"), tagged(range(4, 9), 0, role="value"), 0)
    with pytest.raises(ShapeError, match="layer 1"):
        cache.update(tagged(range(4, 7), 1, role="key"), tagged(range(4, 7), 1, role="value"), 1)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [4] * 4
    assert all(cache.get_mask_sizes(3, layer) == (7, 0) for layer in range(4))
    cache.crop(0)
    write(cache, 4, 3)
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("prompt", [6, 7, 8, 9, 16])
@pytest.mark.parametrize("chunk", [1, 3])
def test_transformers_37574_a_window_loses_no_token_at_its_edge(prompt, chunk, open_for):
    model = tiny_model("mistral")  # window 8 in every layer
    ids = random_ids(prompt + 6)
    with torch.no_grad():
        expected = model(ids).logits
        cache = KvCache(open_for(model), model)
        got = [model(ids[:, :prompt], cache=cache).logits]
        got += [model(part, cache=cache).logits for part in ids[:, prompt:].split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), expected)


def test_transformers_39668_there_are_as_many_layers_as_the_model_has_whatever_the_route(model, manager):
    cache = filled(manager, model)
    for each in (cache, KvCache(cache.handle.fork()), copy.deepcopy(cache), KvCache.for_model(model, backend="cpu")):
        assert len(each) == len(each.layers) == 4
        assert [repr(layer) for layer in each.layers] == [f"KvCacheLayer({layer})" for layer in range(4)]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16])
@pytest.mark.parametrize("query", [1, 7, 8, 9])
def test_transformers_45940_announced_and_returned_widths_agree(length, query, open_for):
    model = tiny_model("gemma3")
    cache = KvCache(open_for(model))
    if length:
        write(cache, 0, length, dim=16, value_dim=16)
    announced = [cache.get_mask_sizes(query, layer) for layer in range(4)]
    returned = [keys.shape[2] for keys, _ in write(cache, length, query, dim=16, value_dim=16)]
    assert announced == [(width, 0) for width in returned]
    assert returned == [length + query] * 4


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_transformers_47731_nothing_keeps_a_cache_alive_after_generate(error, model, manager):
    cache = KvCache(manager, model)
    gone, handle = weakref.ref(cache), weakref.ref(cache.handle)

    calls = itertools.count()

    def fail(*_: object) -> None:
        if error is not None and next(calls) == 3:
            raise error

    hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
    try:
        greedy(model, random_ids(9), cache)
    except BaseException as raised:
        if type(raised) is not error:
            raise
    finally:
        hook.remove()
    gc.disable()
    try:
        del cache
        assert gone() is None
        assert handle() is None
        assert manager.stats().used_blocks == 0
    finally:
        gc.enable()


def test_transformers_47731_a_cache_in_the_returned_output_lives_as_long_as_the_output(model, manager):
    output = model.generate(
        random_ids(9), cache=KvCache(manager, model), max_new_tokens=3, return_dict_in_generate=True
    )
    assert manager.stats().used_blocks > 0
    del output
    assert manager.stats().used_blocks == 0
