"""On the GPU of a Mac: the whole kit, every guard's scenario, and the real model. Skipped where there is none.

With `METAL_CHECK_DRY_RUN=1` the same tests run on the CPU, to see that they would run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvcache_core import open_cache
from kvcache_core.errors import ConfigError
from kvcache_core.integrations.generation import chat_prompt, generate, generate_on_dynamic_cache
from kvcache_core.integrations.models import bundled_gguf, load_model
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.plugin import ProbeRequest, Unavailable
from kvcache_core.testing import BackendConformance
from kvcache_metal.options import MetalOptions
from kvcache_metal.probe import probe
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.caches import DEVICE, DRY_RUN, GEOMETRY, OPTIONS, open_on_mps
from plugins.metal.tests.scenarios import SCENARIOS, Open
from plugins.metal.tests.still_needed import fits

REFUSAL = None if DRY_RUN else probe(ProbeRequest(options=MetalOptions()))
if isinstance(REFUSAL, Unavailable):
    pytest.skip(f"no Apple GPU: {REFUSAL.reason}", allow_module_level=True)

pytestmark = pytest.mark.slow


def nan_vanishes() -> bool:
    """Whether torch's attention on this GPU makes numbers of a NaN (pytorch#188147); none of the cache's doing."""
    query = torch.zeros(1, 1, 4, 64)
    query[0, 0, 0, 0] = torch.nan
    other = torch.ones(1, 1, 16, 64, device=DEVICE)
    out = torch.nn.functional.scaled_dot_product_attention(query.to(DEVICE), other, other)
    return not bool(out.isnan().any().cpu())


class TestOnMps(BackendConformance):
    backend = "metal"
    device = DEVICE
    options = OPTIONS
    dtypes = ("float32", "bfloat16", "float16")
    capabilities = MetalStorage.capabilities
    # Another order of sums than on the CPU, whose bounds the kit has.
    attention_error = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3.2e-2}  # noqa: RUF012
    known_failures = (
        {"test_pytorch_141128_nan_reaches_the_rows_that_use_it_and_no_others": "this torch has pytorch#188147"}
        if nan_vanishes()
        else {}
    )


@pytest.mark.parametrize("guard", SCENARIOS)
def test_with_every_guard_no_scenario_fails(guard: str) -> None:
    if not fits(guard):
        pytest.skip("too little memory is free")
    scenario: Callable[[Open], None] = SCENARIOS[guard]
    scenario(partial(open_on_mps, {}))


def test_a_share_of_what_metal_recommends_is_taken() -> None:
    free = MetalStorage.device_memory(DEVICE, None).free
    with open_cache(backend="metal", geometry=GEOMETRY, budget=0.05, options=OPTIONS) as cache:
        assert 0.04 * free < cache.storage.pool.nbytes < 0.06 * free


@pytest.mark.model
@pytest.mark.parametrize("attention", ["sdpa", ATTENTION_NAME])
def test_the_real_model_says_the_same_as_on_transformers_own_cache(attention: str) -> None:
    try:
        bundled_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    loaded = load_model(dtype="float32", device=DEVICE)
    loaded.model.set_attn_implementation(attention)
    cache = KvCache.for_model(loaded.model, backend="metal", budget="1024 tokens", options=OPTIONS)
    prompt = chat_prompt(loaded, [{"role": "user", "content": "Explain what a cache is."}])
    answer = generate(loaded, cache, prompt, max_new_tokens=24)
    assert answer.token_ids == generate_on_dynamic_cache(loaded, prompt, max_new_tokens=24).token_ids
    assert cache.manager.audit() == ()
    cache.free()
