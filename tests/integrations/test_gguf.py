"""Unpacking a GGUF file once, and keeping the result."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from kvcache_core.errors import ConfigError
from kvcache_core.integrations import gguf
from kvcache_core.integrations.gguf import cache_home, unpacked_gguf
from kvcache_core.integrations.models import LoadedModel, bundled_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache folder, except for tests of the real model."""
    if "model" not in request.keywords:
        monkeypatch.setenv("KVCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every unpacking that is begun; each writes two files."""
    begun: list[Path] = []

    def convert(file: Path, target: Path) -> None:
        begun.append(target)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf, "_convert", convert)
    return begun


def test_the_cache_folder_is_the_platform_s_unless_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVCACHE_HOME", "~/mine")
    assert cache_home() == tmp_path / "mine"
    monkeypatch.delenv("KVCACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "kvcache-core"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_home() == tmp_path / ".cache" / "kvcache-core"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_home() == tmp_path / "Library" / "Caches" / "kvcache-core"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_home() == tmp_path / "local" / "kvcache-core"


def test_a_file_is_unpacked_once(file, conversions, home):
    said: list[str] = []
    folder = unpacked_gguf(file, said.append)
    assert unpacked_gguf(file, said.append) == folder
    assert folder.parent == home / "models"
    assert folder.name.startswith("tiny.Q4_1-")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (len(conversions), said) == (1, ["unpacking tiny.Q4_1.gguf, once"])


def test_another_content_another_size_and_another_transformers_get_folders_of_their_own(file, conversions, monkeypatch):
    import transformers

    folders = {unpacked_gguf(file)}
    file.write_bytes(b"GGUF" + bytes(99) + b"x")
    folders.add(unpacked_gguf(file))
    file.write_bytes(b"GGUF" + bytes(200))
    folders.add(unpacked_gguf(file))
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    folders.add(unpacked_gguf(file))
    assert len(folders) == len(conversions) == 4


def test_threads_that_ask_at_once_wait_for_one(file, conversions):
    barrier = threading.Barrier(4)
    found: list[Path] = []

    def ask() -> None:
        barrier.wait()
        found.append(unpacked_gguf(file))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(conversions) == 1
    assert len(found) == 4


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_unpacking_that_breaks_off_leaves_nothing_and_is_repeated(error, file, conversions, home, monkeypatch):
    def break_off(file: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise error("broken off")

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", break_off)
        with pytest.raises(error, match="broken off"):
            unpacked_gguf(file)
    assert [path for path in (home / "models").iterdir() if path.is_dir()] == []
    assert (unpacked_gguf(file) / "config.json").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file '.*none\.gguf'"):
        unpacked_gguf(tmp_path / "none.gguf")


def test_a_missing_reader_is_named_with_its_installation(file, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match="needs gguf and accelerate; pip install gguf accelerate"):
        unpacked_gguf(file)


def test_a_folder_that_cannot_be_written_is_said(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("KVCACHE_HOME", str(tmp_path / "occupied"))
    with pytest.raises(ConfigError, match="set KVCACHE_HOME to a folder with room"):
        unpacked_gguf(file)


@pytest.mark.model
@pytest.mark.slow
def test_the_weights_are_those_of_the_file(real_model: LoadedModel):
    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(bundled_gguf()).tensors}
    loaded = real_model.model.state_dict()
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        tensor = stored[theirs]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(loaded[ours], expected.reshape(loaded[ours].shape)), theirs
    assert "quantization_config" not in real_model.model.config.to_dict()
