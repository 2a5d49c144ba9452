"""What happens where the compiled kernel is missing, broken or does not fit."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcache_core.errors import BackendUnavailableError, UnsupportedError
from kvcache_core.geometry import CacheGeometry, LayerGroup
from kvcache_core.plugin import Available, ProbeRequest, StorageSpec, Unavailable
from kvcache_cpu.native import library as module
from kvcache_cpu.native.library import group_fault, library, library_fault, native_fault
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.probe import probe
from kvcache_cpu.storage import CpuStorage

MODEL = CacheGeometry.uniform(2, 1, 8)
ODD = CacheGeometry(
    num_layers=2,
    groups=(
        LayerGroup(layers=(0,), num_kv_heads=1, head_dim=8),
        LayerGroup(layers=(1,), num_kv_heads=1, head_dim=8, value_head_dim=12),
    ),
)

needs_kernel = pytest.mark.skipif(library_fault() is not None, reason=str(library_fault()))
compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def storage(attention: str, geometry: CacheGeometry = MODEL, dtype: str = "float32") -> CpuStorage:
    return CpuStorage(
        StorageSpec(
            geometry=geometry,
            block_size=16,
            num_blocks=10,
            max_sequence_length=160,
            dtype=dtype,
            device="cpu",
            options=CpuOptions.model_validate({"memory": "heap", "attention": attention}),
        )
    )


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library is looked for instead."""
    path = tmp_path / "_attend.so"
    monkeypatch.setattr(module, "LIBRARY", path)
    library.cache_clear()
    yield path
    library.cache_clear()


def ask(attention: str, **request: object) -> Available | Unavailable:
    options = CpuOptions.model_validate({"attention": attention})
    return probe(ProbeRequest(options=options, **request))  # type: ignore[arg-type]


def test_a_kernel_that_was_not_built_leaves_attention_to_torch_and_says_so(elsewhere: Path) -> None:
    assert "was not built" in str(library_fault())
    assert storage("auto").attention_kind == "torch"
    answer = ask("auto")
    assert isinstance(answer, Available)
    assert "torch's attention (the kernel was not built" in answer.detail


def test_a_library_that_cannot_be_loaded_leaves_attention_to_torch(elsewhere: Path) -> None:
    elsewhere.write_bytes(b"\x7fELF and nothing else")
    assert "cannot be loaded" in str(library_fault())
    assert storage("auto").attention_kind == "torch"


@pytest.mark.skipif(compiler is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("source", "fault"),
    [("int kvcache_abi(void) { return 999; }", "version 999"), ("int nothing;", "cannot be loaded")],
)
def test_a_library_of_other_sources_leaves_attention_to_torch(elsewhere: Path, source: str, fault: str) -> None:
    code = elsewhere.with_suffix(".c")
    code.write_text(source)
    subprocess.run([str(compiler), "-shared", "-fPIC", str(code), "-o", str(elsewhere)], check=True)
    assert fault in str(library_fault())
    assert storage("auto").attention_kind == "torch"


def test_a_kernel_that_is_asked_for_and_missing_is_an_error_that_says_why(elsewhere: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="but the kernel was not built") as error:
        storage("native")
    assert error.value.code == "no-native-attention"
    assert pickle.loads(pickle.dumps(error.value)).reason == error.value.reason
    answer = ask("native")
    assert isinstance(answer, Unavailable)
    assert answer.code == "no-native-attention"
    assert "not built" in answer.reason
    assert "'auto' or 'torch'" in answer.hint


@needs_kernel
@pytest.mark.parametrize(
    ("geometry", "dtype", "fault"),
    [(MODEL, "float64", "not float64"), (ODD, "float32", "multiples of 8, not 8 and 12")],
)
def test_a_model_that_does_not_fit_is_refused_where_the_kernel_is_named(
    geometry: CacheGeometry, dtype: str, fault: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=fault):
        storage("native", geometry, dtype)
    answer = ask("native", geometry=geometry, dtype=dtype)
    assert isinstance(answer, Unavailable)
    assert fault in answer.reason


@needs_kernel
def test_under_auto_the_kernel_serves_the_layers_that_fit_and_torch_the_others() -> None:
    assert storage("auto", ODD).attention_kind == "native"
    assert storage("auto", MODEL, "float64").attention_kind == "torch"
    assert [group_fault(group, "float32") is None for group in ODD.groups] == [True, False]
    assert native_fault(None, "float32") is None


def test_torch_is_used_where_it_is_named() -> None:
    assert storage("torch").attention_kind == "torch"
    answer = ask("torch")
    assert isinstance(answer, Available)
    assert answer.detail.endswith("torch's attention")


@needs_kernel
def test_the_probe_names_the_instruction_set() -> None:
    answer = ask("auto")
    assert isinstance(answer, Available)
    assert f"native attention ({module.level()})" in answer.detail


def test_only_the_kernel_can_do_nothing_but_read() -> None:
    built = storage("torch")
    slot = built.open(16)
    with pytest.raises(UnsupportedError, match="only the compiled kernel"):
        built.read(built_batch(built, slot), 0)


def built_batch(built: CpuStorage, slot: object):  # type: ignore[no-untyped-def]
    from kvcache_core.storage import Batch, Segment

    batch = Batch([Segment(slot, (), 0, 1, 0)], 16, torch.device("cpu"))
    batch.plan = built.plan(batch)
    return batch


def test_finding_out_about_the_kernel_imports_no_torch() -> None:
    script = "import sys; from kvcache_cpu.native.library import library_fault; library_fault(); "
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
