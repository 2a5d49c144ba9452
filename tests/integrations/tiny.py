"""Tiny models with random weights, one for each shape of attention that the integration has to get right."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}
_OLD_NAMES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_layer": 3,
    "n_head": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}

_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _COMMON),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _COMMON),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_COMMON, "head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_COMMON, "head_dim": 8, "sliding_window": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_COMMON, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_COMMON, "head_dim": 16, "sliding_window": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_COMMON,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "dynamic_rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_COMMON,
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "mixtral": (  # each token goes to two of four experts
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3n": (  # the upper layers read the K and V of lower ones
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_COMMON,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gpt_oss": (  # attention sinks
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_COMMON, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mpt": (  # its config says use_cache=False
        "MptConfig",
        "MptForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_layers": 3,
            "n_heads": 4,
            "max_seq_len": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "dtype": "float32",
        },
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_OLD_NAMES, "n_embd": 32, "n_positions": 512}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_OLD_NAMES, "hidden_size": 32}),  # positions by ALiBi
    "gpt_neox": (  # rotates a part of each head
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
    ),
    "falcon": (  # one kv head for all
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "dtype": "float32",
        },
    ),
    "diffllama": (  # computes with V after it was cached
        "DiffLlamaConfig",
        "DiffLlamaForCausalLM",
        _COMMON,
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_COMMON, "num_key_value_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},  # offsets its positions
    ),
}

FAMILIES = tuple(_FAMILIES)
WINDOWED_FAMILIES = ("mistral", "phi3", "gemma2", "gemma3")


@cache
def tiny_model(family: str = "llama") -> PreTrainedModel:
    """The model of a family; the same object every time."""
    config_name, model_name, values = _FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, config_name)(**values)
    return getattr(transformers, model_name)(config).eval()


def random_ids(length: int, *, seed: int = 0) -> torch.Tensor:
    """A prompt `[1, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


def left_padded(prompts: list[torch.Tensor], width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts `[1, length]` as one batch, at least `width` wide, and its mask."""
    width = max(width, *(prompt.shape[1] for prompt in prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :] = prompt[0]
        mask[row, width - prompt.shape[1] :] = 1
    return ids, mask


def greedy(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None, new_tokens: int = 12, **kwargs: Any) -> Any:
    """Greedy continuation; on transformers' own cache when none is given."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        **kwargs,
    )
