from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvcache_core.plugin import StorageSpec
from kvcache_cpu import storage as module
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.storage import CpuStorage
from plugins.cpu.tests.driver import MIXED


def storage(options: Any) -> CpuStorage:
    return CpuStorage(
        StorageSpec(
            geometry=MIXED,
            block_size=16,
            num_blocks=10,
            max_sequence_length=160,
            dtype="float32",
            device="cpu",
            options=options,
        )
    )


def test_auto_is_the_default_and_takes_mapped_memory_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuOptions().memory == "auto"
    assert storage(CpuOptions(memory="heap")).memory_kind == "heap"
    for fault, kind in ((None, "mapped"), ("this kernel's private mappings do not copy on write", "heap")):
        monkeypatch.setattr(module, "mapping_fault", lambda fault=fault: fault)
        assert storage(CpuOptions()).memory_kind == kind
        assert storage(None).memory_kind == kind


@pytest.mark.parametrize("memory", ["stack", "", None, 1])
def test_other_kinds_of_memory_are_refused(memory: Any) -> None:
    with pytest.raises(ValidationError):
        CpuOptions(memory=memory)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError):
        CpuOptions.model_validate({"memroy": "heap"})
