"""The decoder runs over the tokens of a batch alone, and nobody outside can tell."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_cpu.storage import CpuStorage
from tests.integrations.tiny import left_padded, random_ids, tiny_model

PROMPTS = [random_ids(3, seed=1), random_ids(7, seed=2), random_ids(12, seed=3)]
IDS, MASK = left_padded(PROMPTS)
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
REAL = MASK.bool()


def switched(family: str = "llama") -> PreTrainedModel:
    model = copy.deepcopy(tiny_model(family))
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    decoder = model.get_decoder()
    layers: torch.nn.ModuleList = decoder.h if hasattr(decoder, "h") else decoder.layers
    return layers


@pytest.fixture
def model() -> PreTrainedModel:
    return switched()


@pytest.fixture
def computed(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Rows and columns that the first layer computes in each pass."""
    shapes: list[tuple[int, int]] = []
    hook = layers_of(model)[0].register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    yield shapes
    hook.remove()


@torch.no_grad()
def run(model: PreTrainedModel, cache: object, ids: torch.Tensor = IDS, mask: torch.Tensor = MASK, **more: object):
    return model(ids, attention_mask=mask, position_ids=POSITIONS[:, : ids.shape[1]], cache=cache, **more)


def test_pads_are_not_computed(model, computed, manager):
    model.generate(IDS, attention_mask=MASK, cache=KvCache(manager, model), max_new_tokens=3, do_sample=False)
    assert computed == [(1, 3 + 7 + 12), (3, 1), (3, 1)]


def test_pads_are_computed_with_another_attention_implementation(model, computed, manager):
    model.set_attn_implementation("sdpa")
    run(model, KvCache(manager, model))
    assert computed == [(3, 12)]


@pytest.mark.parametrize("return_dict", [True, False])
def test_what_comes_out_has_the_shape_of_the_batch_and_zeros_for_pads(return_dict, model, manager):
    decoder = model.get_decoder()
    out = run(decoder, KvCache(manager, model), return_dict=return_dict)
    states = out.last_hidden_state if return_dict else out[0]
    assert states.shape == (3, 12, 32)
    assert not states[~REAL].any()
    torch.testing.assert_close(states[REAL], run(decoder, DynamicCache(config=model.config)).last_hidden_state[REAL])
    if return_dict:
        assert out["last_hidden_state"] is states


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3", "gemma3n", "qwen3", "mixtral", "dynamic_rope"])
def test_logits_of_all_tokens_are_those_of_a_padded_batch(family, open_for):
    model = switched(family)
    got = run(model, KvCache(open_for(model), model)).logits
    expected = run(tiny_model(family), DynamicCache(config=model.config)).logits
    torch.testing.assert_close(got[REAL], expected[REAL])


@pytest.mark.parametrize("family", ["llama", "opt"])  # which count columns and tokens
def test_without_positions_a_model_counts_as_in_a_padded_batch(family, open_for):
    model = switched(family)
    cache, expected_cache = KvCache(open_for(model), model), DynamicCache(config=model.config)
    with torch.no_grad():
        for columns in (slice(0, 8), slice(8, 12)):
            ids, mask = IDS[:, columns], MASK[:, : columns.stop]
            got = model(ids, attention_mask=mask, cache=cache).logits
            expected = tiny_model(family)(ids, attention_mask=mask, cache=expected_cache).logits
            torch.testing.assert_close(got[REAL[:, columns]], expected[REAL[:, columns]])


@pytest.mark.slow
@pytest.mark.parametrize("storage_class", [CpuStorage])
@pytest.mark.parametrize("part", ["layers", "decoder", "model"])
def test_a_compiled_model_computes_the_same(part, model, computed, manager):
    compiled = model
    if part == "model":
        compiled = torch.compile(model, backend="eager")
    for module in layers_of(model) if part == "layers" else [model.get_decoder()] * (part == "decoder"):
        module.compile(backend="eager")
    try:
        got = run(compiled, KvCache(manager, model)).logits
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(got[REAL], run(tiny_model(), DynamicCache(config=model.config)).logits[REAL])
    assert computed == [(1, 22)]


def test_rows_that_are_the_same_are_computed_once(model, computed, manager):
    out = model.generate(
        PROMPTS[2], cache=KvCache(manager, model), max_new_tokens=2, do_sample=True, num_return_sequences=5
    )
    assert out.shape == (5, 14)
    assert computed == [(1, 12), (5, 1)]
    ids, mask = IDS[[0, 1, 0, 1, 2]], MASK[[0, 1, 0, 1, 2]]
    more = {"attention_mask": mask, "position_ids": POSITIONS[[0, 1, 0, 1, 2]]}
    with torch.no_grad():
        got = model(ids, cache=KvCache(manager, model), **more).logits
        expected = tiny_model()(ids, cache=DynamicCache(config=model.config), **more).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])
    assert computed[2:] == [(1, 22)]


@pytest.mark.parametrize(
    "what",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"use_cache": False},
        {"unheard_of": torch.zeros(3, 12)},
    ],
    ids=lambda what: next(iter(what)),
)
def test_a_call_that_asks_for_more_is_computed_as_it_is(what, model, computed, manager):
    run(model.get_decoder(), KvCache(manager, model), **what)
    assert computed == [(3, 12)]


def test_hidden_states_that_the_config_asks_for_have_the_shape_of_the_batch(model, manager):
    model.config.output_hidden_states = True
    out = run(model, KvCache(manager, model))
    assert {states.shape for states in out.hidden_states} == {(3, 12, 32)}


def test_a_model_in_training_is_computed_as_it_is(model, computed, manager):
    model.train()
    run(model, KvCache(manager, model))
    assert computed == [(3, 12)]


def test_a_model_that_is_fed_embeddings_is_computed_as_it_is(model, computed, manager):
    embeds = model.get_input_embeddings()(IDS).detach()
    with torch.no_grad():
        got = model(
            inputs_embeds=embeds, attention_mask=MASK, position_ids=POSITIONS, cache=KvCache(manager, model)
        ).logits
    assert computed == [(3, 12)]
    torch.testing.assert_close(got[REAL], run(tiny_model(), DynamicCache(config=model.config)).logits[REAL])


def test_ids_may_be_given_by_position(model, computed, manager):
    run(model.get_decoder(), KvCache(manager, model))
    assert computed == [(1, 22)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # whose decoders have their arguments in different orders
def test_all_arguments_may_be_given_by_position(family, open_for):
    model = switched(family)
    both = torch.cat([MASK, MASK], 1)

    @torch.no_grad()
    def states(decoder: torch.nn.Module, cache: object) -> torch.Tensor:
        for mask in (MASK, both):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -12:]
            rest = (mask, positions, cache) if family == "llama" else (cache, mask, None, positions)
            out: torch.Tensor = decoder(IDS, *rest).last_hidden_state
        return out[REAL]

    cache = KvCache(open_for(model), model)
    expected = states(tiny_model(family).get_decoder(), DynamicCache(config=model.config))
    torch.testing.assert_close(states(model.get_decoder(), cache), expected)
    assert [handle.token_ids for handle in cache.handles] == [tuple(p[0].tolist() * 2) for p in PROMPTS]


def test_arguments_that_nobody_names_are_refused(model, manager):
    decoder = model.get_decoder()
    forward = decoder.forward

    def unnamed(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    decoder.forward = unnamed
    with pytest.raises(UnsupportedError, match="pass them all by keyword"), torch.no_grad():
        decoder(IDS, MASK, cache=KvCache(manager, model))
    with pytest.raises(UnsupportedError, match="given by name too"), torch.no_grad():
        decoder(IDS, input_ids=IDS, cache=KvCache(manager, model))


def test_a_pass_that_fails_leaves_nothing_behind(model, manager):
    cache = KvCache(manager, model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = layers_of(model)[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model, cache)
    hook.remove()
    assert (cache.get_seq_length(), manager.stats().used_blocks) == (0, 0)
    torch.testing.assert_close(
        run(model, cache).logits[REAL], run(tiny_model(), DynamicCache(config=model.config)).logits[REAL]
    )


def test_a_mask_that_is_made_of_what_the_model_runs_over_is_refused_and_nothing_is_stored(model, manager):
    cache = KvCache(manager, model)  # whose hook runs first

    def change(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}

    run(model, cache, IDS[:, :8], MASK[:, :8])
    model.get_decoder().register_forward_pre_hook(change, with_kwargs=True)
    longer = torch.cat([MASK[:, :8], MASK[:, :4]], dim=1)
    with pytest.raises(UnsupportedError, match=r"mask of its own.*set_attn_implementation\('sdpa'\)"), torch.no_grad():
        model(IDS[:, :4], attention_mask=longer, position_ids=longer.cumsum(1)[:, 8:] - 1, cache=cache)
    assert [handle.num_tokens for handle in cache.handles] == [0, 3, 8]
