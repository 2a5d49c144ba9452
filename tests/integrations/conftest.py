"""Caches for tiny models on the storages that the integration has to work with, and the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.errors import ConfigError
from kvcache_core.integrations.models import LoadedModel, bundled_gguf, load_model
from kvcache_core.manager import KvCacheManager
from kvcache_core.pretrained import geometry_from_pretrained
from kvcache_core.storage import Storage, StorageSpec
from kvcache_cpu.storage import CpuStorage
from tests.integrations.tiny import tiny_model
from tests.storages.paged import PagedStorage

#: Opens a cache for a model; keyword arguments replace those of the `StorageSpec`.
OpenFor = Callable[..., KvCacheManager]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Busy threads that share a core with other work wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[CpuStorage, PagedStorage], ids=["cpu", "paged"])
def storage_class(request: pytest.FixtureRequest) -> type[Storage]:
    return request.param


@pytest.fixture
def open_for(storage_class: type[Storage]) -> Iterator[OpenFor]:
    """Open caches for models; afterwards their books must be in order. Prompts find each other's with `prefix=True`."""
    opened: list[KvCacheManager] = []

    def open_cache(model: PreTrainedModel, **spec: object) -> KvCacheManager:
        values = {
            "geometry": geometry_from_pretrained(model.config),
            "block_size": 4,
            "num_blocks": 256,
            "max_sequence_length": 256,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": "cpu",
            **spec,
        }
        cast = bool(values.pop("allow_dtype_cast", False))
        prefix = PrefixCacheConfig(enabled=bool(values.pop("prefix", False)))
        opened.append(KvCacheManager(storage_class(StorageSpec(**values)), allow_dtype_cast=cast, prefix=prefix))
        return opened[-1]

    yield open_cache
    for manager in opened:
        assert manager.closed or manager.audit() == ()
        manager.close()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
def manager(open_for: OpenFor, model: PreTrainedModel) -> KvCacheManager:
    return open_for(model)


@pytest.fixture(scope="session")
def real_model() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32."""
    try:
        bundled_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    return load_model(dtype="float32")
