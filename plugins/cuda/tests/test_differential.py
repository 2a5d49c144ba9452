"""Random operations against plain lists: every token of every sequence stays what was written, whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from kvcache_core import CacheFullError, CacheGeometry, KvCacheHandle, KvCacheManager, LayerGroup
from kvcache_core.attention import attend_dense
from kvcache_core.config import PrefixCacheConfig
from kvcache_cuda.storage import CudaStorage
from plugins.cuda.tests.caches import spec_of

GEOMETRY = CacheGeometry(
    num_layers=3,
    groups=(
        LayerGroup(layers=(0,), num_kv_heads=2, head_dim=4, window=5),
        LayerGroup(layers=(2,), num_kv_heads=1, head_dim=4, value_head_dim=2),
    ),
)
SHAPES = {0: ((2, 4), (2, 4)), 2: ((1, 4), (1, 2))}
_tags = iter(range(1, 1 << 24))


@dataclass(eq=False)
class Model:
    """A handle, and its tokens as (token id, tag): a tag says who wrote a row and when."""

    handle: KvCacheHandle
    tokens: list[tuple[int | None, int]] = field(default_factory=list)


@lru_cache(maxsize=4096)
def row(tag: int, layer: int, role: int) -> torch.Tensor:
    """The row that a tag stands for; no two tags, layers and roles are alike."""
    shape = SHAPES[layer][role]
    return torch.full(shape, float(tag)) + torch.arange(shape[0] * shape[1]).view(shape) / 16 + (layer + role) / 256


class Fuzz:
    """One cache, its sequences, and everything that may be done to them."""

    def __init__(self, seed: int, *, scrub: bool, prefixes: bool, poison: float) -> None:
        self.random = random.Random(seed)
        storage = CudaStorage(spec_of(geometry=GEOMETRY, num_blocks=24, scrub=scrub))
        for section in storage.pool.sections:
            section[:, 1:] = poison
        self.cache = KvCacheManager(storage, prefix=PrefixCacheConfig(enabled=prefixes, namespace="m", max_prefixes=6))
        self.models: list[Model] = []
        self.stored: dict[tuple[int, ...], dict[int, int]] = {}
        self.hits = 0

    def run(self, operations: int) -> None:
        for _ in range(operations):
            try:
                self.random.choice(
                    [self.allocate, self.step, self.step, self.step, self.fork, self.truncate, self.free]
                )()
            except CacheFullError:
                if self.models:
                    self.free()
            self.check()

    def pick(self) -> Model | None:
        return self.random.choice(self.models) if self.models else None

    # -- operations ----------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """A prompt over few words, so that prefixes are found; what a hit holds is read back and becomes the truth."""
        prompt = [self.random.randrange(2) for _ in range(self.random.randrange(14))]
        handle = self.cache.allocate(token_ids=prompt)
        model = Model(handle)
        self.hits += handle.num_tokens > 0
        for position in range(handle.num_tokens):
            known = self.stored[tuple(prompt[: position + 1])]
            tag = int(handle.key_cache(0)[position, 0, 0].item())  # type: ignore[index]
            assert tag in known, "a hit holds a row that nobody stored for this prefix"
            model.tokens.append((prompt[position], tag))
        self.models.append(model)
        self.append({model: prompt[handle.num_tokens :]})

    def step(self) -> None:
        chosen = self.random.sample(self.models, self.random.randint(0, min(3, len(self.models))))
        new: dict[Model, Any] = {}
        for model in chosen:
            count = self.random.choice([0, 1, 1, 2, 5])
            count = min(count, 48 - len(model.tokens))
            new[model] = count if self.random.random() < 0.3 else [self.random.randrange(2) for _ in range(count)]
        self.append(new)

    def append(self, new: dict[Model, Any]) -> None:
        ids = {m: [None] * wanted if isinstance(wanted, int) else list(wanted) for m, wanted in new.items()}
        tags = {model: [next(_tags) for _ in names] for model, names in ids.items()}
        flat = [tag for each in tags.values() for tag in each]
        ending = self.random.choice(["commit", "commit", "accept", "abort"])
        with self.cache.step({model.handle: wanted for model, wanted in new.items()}) as step:
            for layer in GEOMETRY.caching_layers:
                rows = [
                    torch.stack([row(tag, layer, role) for tag in flat]) if flat else torch.empty(0, *shape)
                    for role, shape in enumerate(SHAPES[layer])
                ]
                step.write(layer, *rows)
                self.check_attention(step, layer, tags)
            if ending == "abort":
                step.abort()
                return
            for model, names in ids.items():
                kept = self.random.randint(0, len(names)) if ending == "accept" else len(names)
                if kept < len(names):
                    step.accept(model.handle, kept)
                model.tokens += zip(names[:kept], tags[model][:kept], strict=True)
        for model in new:
            self.note(model)

    def note(self, model: Model) -> None:
        """Remember which rows stand for which prefix."""
        names = [name for name, _ in model.tokens]
        if None in names:
            names = names[: names.index(None)]
        for position in range(len(names)):
            prefix = tuple(name for name in names[: position + 1] if name is not None)
            self.stored.setdefault(prefix, {})[model.tokens[position][1]] = 1

    def fork(self) -> None:
        source = self.pick()
        if source:
            self.models.append(Model(source.handle.fork(), list(source.tokens)))

    def truncate(self) -> None:
        model = self.pick()
        if model:
            keep = self.random.randint(0, len(model.tokens))
            model.handle.truncate(keep)
            del model.tokens[keep:]

    def free(self) -> None:
        model = self.pick()
        if model:
            self.models.remove(model)
            model.handle.free()

    # -- what must hold ------------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.cache.audit() == ()
        for model in self.models:
            assert model.handle.num_tokens == len(model.tokens)
            for layer in GEOMETRY.caching_layers:
                both = model.handle.kv_cache(layer)
                assert both is not None
                for role, got in enumerate(both):
                    assert got.shape == (len(model.tokens), *SHAPES[layer][role])
                    if model.tokens:
                        wanted = torch.stack([row(tag, layer, role) for _, tag in model.tokens])
                        same = torch.equal(got, wanted)
                        assert same or self.is_deduplicated(model, got, layer, role)

    def is_deduplicated(self, model: Model, got: torch.Tensor, layer: int, role: int) -> bool:
        """Whether rows differ only in that an equal block of another sequence has taken their place."""
        names = tuple(name for name, _ in model.tokens)
        for position, (_, tag) in enumerate(model.tokens):
            if torch.equal(got[position], row(tag, layer, role)):
                continue
            known = self.stored.get(names[: position + 1], {})  # type: ignore[arg-type]
            found = next((other for other in known if torch.equal(got[position], row(other, layer, role))), None)
            if found is None:
                return False
            model.tokens[position] = (names[position], found)
        wanted = torch.stack([row(tag, layer, role) for _, tag in model.tokens])
        return torch.equal(got, wanted)

    def check_attention(self, step: Any, layer: int, tags: dict[Model, list[int]]) -> None:
        spec = self.cache.own_spec(layer)
        total = sum(map(len, tags.values()))
        query = torch.randn(total, 2, 4, generator=torch.Generator().manual_seed(total))
        got = step.attend(layer, query, scale=0.01)
        start = 0
        for model, new in tags.items():
            rows = slice(start, start + len(new))
            start += len(new)
            if new:
                key, value = step.gather(layer, model.handle)
                wanted = attend_dense(query[rows], key, value, scale=0.01, window=spec.window)
                assert torch.equal(got[rows], wanted)
                assert got[rows].isfinite().all()
                assert torch.equal(key[-len(new) :], torch.stack([row(tag, layer, 0) for tag in new]))

    def close(self) -> None:
        for model in self.models:
            model.handle.free()
        self.cache.reset_prefix_cache()
        assert self.cache.audit() == ()
        allocator = self.cache.block_allocator
        assert allocator.free_block_count == allocator.total_block_count
        self.cache.close()


def run(seed: int, *, scrub: bool, prefixes: bool, poison: float, operations: int = 60) -> Fuzz:
    fuzz = Fuzz(seed, scrub=scrub, prefixes=prefixes, poison=poison)
    fuzz.run(operations)
    fuzz.close()
    return fuzz


@pytest.mark.parametrize("prefixes", [False, True], ids=["no prefixes", "prefixes"])
@pytest.mark.parametrize("scrub", [False, True], ids=["kept", "scrubbed"])
def test_random_operations_keep_every_token(scrub: bool, prefixes: bool) -> None:
    fuzz = run(0, scrub=scrub, prefixes=prefixes, poison=float("nan"))
    assert (fuzz.hits > 0) is prefixes


@pytest.mark.slow
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
def test_sglang_32477_what_lies_in_unused_memory_changes_nothing(poison: float) -> None:
    for seed in range(1, 5):
        run(seed, scrub=False, prefixes=True, poison=poison)
