import json
import math
from types import SimpleNamespace

import pytest

from kvcache_core.errors import ConfigError
from kvcache_core.geometry import CacheGeometry
from kvcache_core.pretrained import geometry_from_pretrained, model_name

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
WINDOWED = {**LLAMA, "sliding_window": 8}

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
GEMMA3N = {
    **TINY,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "laurel_rank": 8,
    "sliding_window": 3,
    "intermediate_size": 48,
}

#: Model type -> the settings of a tiny model that shows what is special about it.
MODELS = {
    "llama": TINY,
    "llama-head-dim": {**TINY, "head_dim": 24},
    "mistral": {**TINY, "sliding_window": 3},
    "mistral-full": {**TINY, "sliding_window": None},
    "mixtral": {**TINY, **MOE, "sliding_window": 3},
    "qwen2": {**TINY, "sliding_window": 3},
    "qwen2-sliding": {**TINY, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {**TINY, "head_dim": 24},
    "qwen3-sliding": {**TINY, "head_dim": 24, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 3},
    "qwen3_moe": {**TINY, **MOE, "head_dim": 24},
    "gemma": {**TINY, "head_dim": 24},
    "gemma2": {**TINY, "head_dim": 24, "sliding_window": 3},
    "gemma3_text": {**TINY, "head_dim": 24, "sliding_window": 3, "num_hidden_layers": 7},
    "gemma3n_text": GEMMA3N,
    "gemma4_text": {**GEMMA3N, "global_head_dim": 32, "num_hidden_layers": 8},
    "gemma4_text-k-is-v": {
        **GEMMA3N, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "num_kv_shared_layers": 0, "num_hidden_layers": 8,
    },
    "phi": {**TINY, "num_key_value_heads": 4},
    "phi3": {**TINY, "sliding_window": 3},
    "gpt2": GPT2,
    "gpt_neo": {
        "vocab_size": 97, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 3,
        "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 64,
    },
    "gpt_neox": {**TINY, "num_key_value_heads": None},
    "gpt_bigcode": {**GPT2, "multi_query": True},
    "gpt_bigcode-multi-head": {**GPT2, "multi_query": False},
    "gptj": {**GPT2, "rotary_dim": 8},
    "opt": {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 64},
    "bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "falcon": {**TINY, "multi_query": True, "new_decoder_architecture": False},
    "falcon-multi-head": {**TINY, "multi_query": False, "new_decoder_architecture": False},
    "falcon-new": {**TINY, "num_kv_heads": 2, "new_decoder_architecture": True},
    "mpt": {"vocab_size": 97, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    "starcoder2": {**TINY, "sliding_window": 3},
    "granite": TINY,
    "olmo2": TINY,
    "olmo3": {**TINY, "sliding_window": 3},
    "stablelm": TINY,
    "cohere2": {**TINY, "sliding_window": 3, "num_hidden_layers": 5},
    "exaone4": {**TINY, "sliding_window": 3},
    "gpt_oss": {**TINY, **MOE, "head_dim": 24, "sliding_window": 3},
    "smollm3": TINY,
    "glm4": {**TINY, "head_dim": 24},
    "nemotron": TINY,
    "jetmoe": {**TINY, "kv_channels": 24, "num_local_experts": 4},
}  # fmt: skip
LENGTH = 9
#: Enough to see the rules at work; all of them together take a while.
QUICK = {
    "llama",
    "mistral",
    "qwen2-sliding",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_bigcode",
    "falcon-new",
}


def tiny_config(name):
    configuration = pytest.importorskip("transformers.models.auto.configuration_auto")
    cls = configuration.CONFIG_MAPPING[name.split("-")[0]]
    known = set(cls().to_dict()) | {"global_head_dim", "num_global_key_value_heads"}
    values = {key: value for key, value in MODELS[name].items() if key in known or key in cls.attribute_map}
    return cls(**values, dtype="float32")


def cached_shapes(config):
    """Per layer `(kv heads, K head dim, V head dim)` of what the model itself caches, and the windows it masks by."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    ids = torch.randint(3, 90, (1, LENGTH))
    with torch.no_grad():
        model(input_ids=ids, cache=cache, use_cache=True)
    for layer in cache.layers:
        if layer.keys is None:
            yield None
        else:
            yield (
                (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]),
                getattr(layer, "sliding_window", None),
            )


def described_shapes(geometry):
    for layer in range(geometry.num_layers):
        spec = geometry.layer_spec(layer)
        if geometry.producer(layer) != layer:
            yield None
        else:
            yield (spec.num_kv_heads, spec.head_dim, spec.value_head_dim), spec.window


def has_unnamed_windows(config):
    return hasattr(config, "attention_layers")  # gpt_neo windows by its own mask, out of the cache's sight


@pytest.mark.filterwarnings("ignore")  # what transformers warns about is not ours
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_the_geometry_is_what_the_model_really_caches(name):
    config = tiny_config(name)
    geometry = geometry_from_pretrained(config)
    real, described = list(cached_shapes(config)), list(described_shapes(geometry))
    if has_unnamed_windows(config):
        real = [entry and entry[0] for entry in real]
        described = [entry and entry[0] for entry in described]
    assert described[: len(real)] == real
    assert all(entry is None for entry in described[len(real) :])  # transformers leaves trailing shared layers out


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma4_text")])
def test_a_published_gemma_4_file_says_by_global_keys_what_a_saved_one_says_per_layer(name):
    config = tiny_config(name)
    content = json.loads(config.to_json_string(use_diff=False))
    del content["per_layer_config"]
    content |= {key: value for key, value in MODELS[name].items() if "global" in key}
    assert geometry_from_pretrained(content) == geometry_from_pretrained(config)


@pytest.mark.parametrize("name", MODELS)
def test_the_content_of_config_json_gives_the_same_geometry_as_the_config_object(name):
    config = tiny_config(name)
    content = json.loads(config.to_json_string(use_diff=False))
    assert geometry_from_pretrained(content) == geometry_from_pretrained(config)
    content["torch_dtype"] = content.pop("dtype")  # as older files spell it
    assert geometry_from_pretrained(content).dtype == "float32"


def output_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits[0, -1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_neo", "phi3", "starcoder2", "gpt_oss", "cohere2"])
def test_a_window_is_the_number_of_tokens_a_query_sees_with_itself(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = tiny_config(name)
    windows = [geometry_from_pretrained(config).layer_spec(i).window for i in range(4)]
    first = windows.index(3)
    for key in ("num_hidden_layers", "num_layers"):
        if hasattr(config, key):
            setattr(config, key, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[first]]
    if getattr(config, "attention_layers", None):
        config.attention_layers = [config.attention_layers[first]]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 90, (1, 8))
    changed = {back: ids.clone() for back in range(8)}
    for back, other in changed.items():
        other[0, 7 - back] = 91
    with torch.no_grad():
        same = output_of(model, ids)
        seen = [back for back, other in changed.items() if not torch.equal(output_of(model, other), same)]
    assert seen == [0, 1, 2]


# -- without transformers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [dict, lambda values: SimpleNamespace(**values)])
def test_a_mapping_or_any_object_with_the_attributes_will_do(wrap):
    geometry = geometry_from_pretrained(wrap({**LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 128}))
    assert geometry == CacheGeometry.uniform(4, 2, 16, max_position_embeddings=128, model="llama")


def test_kv_heads_fall_back_to_all_heads_and_the_head_dim_to_their_share_of_the_hidden_size():
    assert geometry_from_pretrained(LLAMA) == CacheGeometry.uniform(4, 4, 16, model="llama")
    assert geometry_from_pretrained({**LLAMA, "head_dim": None, "num_key_value_heads": None}).groups[0].head_dim == 16


@pytest.mark.parametrize(
    ("key", "value", "dtype"),
    [
        ("dtype", "bfloat16", "bfloat16"),
        ("torch_dtype", "float16", "float16"),
        ("torch_dtype", "torch.float16", "float16"),
        ("dtype", "auto", None),
        ("dtype", "float8_e4m3fn", None),
        ("dtype", None, None),
    ],
)
def test_the_dtype_is_the_one_the_model_computes_in(key, value, dtype):
    assert geometry_from_pretrained({**LLAMA, key: value}).dtype == dtype


def test_a_torch_dtype_object_is_read():
    torch = pytest.importorskip("torch")
    assert geometry_from_pretrained(SimpleNamespace(**LLAMA, dtype=torch.bfloat16)).dtype == "bfloat16"


def test_a_config_of_several_parts_gives_its_text_decoder_and_the_dtype_of_either():
    parts = {
        "model_type": "llava",
        "dtype": "float16",
        "text_config": LLAMA,
        "vision_config": {"num_hidden_layers": 99},
    }
    geometry = geometry_from_pretrained(parts)
    assert (geometry.num_layers, geometry.dtype, geometry.model) == (4, "float16", "llava")
    asked = SimpleNamespace(model_type="llava", get_text_config=lambda decoder: SimpleNamespace(**LLAMA))
    assert geometry_from_pretrained(asked).num_layers == 4


def test_two_text_decoders_are_refused():
    with pytest.raises(ConfigError, match="2 text decoders"):
        geometry_from_pretrained({"text_config": LLAMA, "decoder": LLAMA})


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, [8, 8, 8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "gemma2"}, [8, None, 8, None]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [8, 8, None, 8]),
        ({"model_type": "cohere2"}, [8, 8, 8, None]),
        ({"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 2}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 8, None, 8]),
        ({"layer_types": ["attention"] * 4}, [None] * 4),
    ],
)
def test_files_written_before_layer_types_existed_are_read_by_the_models_own_rule(changes, windows):
    geometry = geometry_from_pretrained({**WINDOWED, **changes})
    assert [geometry.layer_spec(layer).window for layer in range(4)] == windows


def test_layers_without_attention_cache_nothing():
    geometry = geometry_from_pretrained({**LLAMA, "layer_types": ["attention", "moe", "mlp", "attention"]})
    assert [geometry.producer(layer) for layer in range(4)] == [0, None, None, 3]


def test_shared_layers_read_the_last_layer_of_their_type_that_has_its_own():
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = {**WINDOWED, "num_hidden_layers": 5, "layer_types": types, "num_kv_shared_layers": 2}
    geometry = geometry_from_pretrained(config)
    assert [geometry.producer(layer) for layer in range(5)] == [0, 1, 2, 1, 2]
    assert geometry.layer_spec(4).window == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"encoder_layers": 2}, "encoder-decoder"),
        ({"is_decoder": False}, "is an encoder"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"use_bidirectional_attention": "all"}, "both directions"),
        ({"causal": False}, "both directions"),
        ({"cross_attention_layers": [1, 3]}, "cross-attention layers"),
        ({"kv_lora_rank": 64}, "multi-head latent attention"),
        ({"mamba_d_state": 16}, "recurrent state"),
        ({"state_size": 16}, "recurrent state"),
        ({"linear_num_key_heads": 2}, "linear attention"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"attention_chunk_size": 8}, "within chunks"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layers of type 'linear_attention'"),
        ({"layer_types": ["mamba"] * 4}, "layers of type 'mamba'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layers of type 'chunked_attention'"),
        ({"layer_types": ["hybrid"] * 4}, "layers of type 'hybrid'"),
        ({"layer_types": ["something_new"] * 4}, "layers of type 'something_new'"),
        ({"layer_types": ["full_attention"] * 3}, "types of 3 layers but has 4"),
        ({"layer_types": ["mlp"] * 4}, "no layer that caches"),
        ({"model_type": "gemma4_text"}, "global_head_dim"),
        ({"sliding_window": 8}, "does not say in which layers"),
        ({"model_type": "qwen2_moe", "sliding_window": 8, "use_sliding_window": True}, "does not say in which layers"),
        ({"num_kv_shared_layers": 4}, "none of them has its own"),
        ({"num_attention_heads": 5}, "hidden size of 64 that 5 heads do not divide"),
    ],
)
def test_what_a_config_does_not_settle_is_refused_by_name(changes, reason):
    with pytest.raises(ConfigError) as caught:
        geometry_from_pretrained({**LLAMA, **changes})
    first = str(caught.value).split("\n")[0]
    assert first.startswith(f"model '{changes.get('model_type', 'llama')}' cannot be cached: it ")
    assert reason in first
    assert caught.value.key == "geometry"


@pytest.mark.parametrize("bad", [0, -1, 0.5, 16.0, True, "16", [2], math.nan], ids=repr)
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_vllm_43496_a_bad_number_in_a_model_config_is_refused_by_name(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number above 0"):
        geometry_from_pretrained({**LLAMA, name: bad})


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_config_that_lacks_a_number_says_which(name):
    with pytest.raises(ConfigError, match=f"config of model 'llama': {name} is missing"):
        geometry_from_pretrained({key: value for key, value in LLAMA.items() if key != name})


def test_a_sliding_layer_without_a_window_is_refused():
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        geometry_from_pretrained({**LLAMA, "layer_types": ["sliding_attention"] * 4})


@pytest.mark.parametrize("nothing", [None, {}, 3, "gpt2", object()])
def test_what_is_no_config_at_all_is_refused(nothing):
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        geometry_from_pretrained(nothing)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"_name_or_path": "a/b", "model_type": "llama"}, "a/b"),
        ({"_name_or_path": "", "model_type": "llama"}, "llama"),
        ({}, "unnamed"),
    ],
)
def test_a_model_is_called_by_its_name_else_its_type(config, name):
    assert model_name(config) == name


@pytest.mark.parametrize(
    "kind",
    [
        "bart", "bert", "deepseek_v3", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "llama4_text", "mamba",
        "mimo_v2_flash", "minimax", "mllama", "qwen3_next", "recurrent_gemma", "reformer", "rwkv", "t5", "whisper",
        "xlnet", "xlstm",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_models_that_cache_something_else_are_refused_by_name(kind):
    configuration = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = configuration.CONFIG_MAPPING[kind]()
    for given in (config, json.loads(config.to_json_string(use_diff=False))):
        with pytest.raises(ConfigError, match=f"model '{kind}' cannot be cached: it "):
            geometry_from_pretrained(given)


@pytest.mark.parametrize(
    ("rope", "reusable"),
    [
        (None, True),
        ({"rope_type": "default", "rope_theta": 10000.0}, True),
        ({"rope_type": "llama3", "factor": 8.0}, True),
        ({"rope_type": "yarn", "factor": 4.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
        ({"type": "su"}, False),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, False),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotation_that_depends_on_the_length_is_not_reusable(key, rope, reusable):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        key: rope,
    }
    assert geometry_from_pretrained(config).prefix_reusable is reusable
