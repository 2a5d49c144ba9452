"""GGUF files, unpacked once into a folder that `from_pretrained` loads in a second.

transformers reads a GGUF file by parsing its vocabulary token by token and unpacking every weight, each time
anew: about half a minute for a model of 135 million parameters. The result is kept, in float32, in the user's
cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcache_core.errors import ConfigError
from kvcache_core.integrations.quiet import quiet_transformers

__all__ = ["cache_home", "unpacked_gguf"]

#: Raised when the layout of an unpacked folder changes, so that older ones are not taken for new ones.
_LAYOUT = 1
_DIGESTED_BYTES = 1 << 20


def cache_home() -> Path:
    """The folder for files that can be made again.

    `$KVCACHE_HOME` if set; else `kvcache-core` in the platform's place for caches: `$XDG_CACHE_HOME` or
    `~/.cache` on Linux, `~/Library/Caches` on macOS, `%LOCALAPPDATA%` on Windows.
    """
    if chosen := os.environ.get("KVCACHE_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvcache-core"


def unpacked_gguf(file: Path, report: Callable[[str], None] | None = None) -> Path:
    """Return a folder with the model and tokenizer of a GGUF file, unpacking it if that was not done before.

    Processes that ask at the same time wait for the one that unpacks. The folder appears whole or not at all.

    Args:
        file: The `.gguf` file.
        report: Called with a phrase when there is something to wait for.

    Raises:
        ConfigError: There is no such file, a package for reading it is missing, or there is no place for the result.
    """
    import transformers  # noqa: PLC0415 - takes seconds
    from filelock import FileLock  # noqa: PLC0415 - comes with transformers

    if not file.is_file():
        raise ConfigError(f"there is no file {str(file)!r}; give the path of a .gguf file", key="model")
    name = f"{file.stem}-{_digest(file)}-transformers-{transformers.__version__}-v{_LAYOUT}"
    folder = cache_home() / "models" / name
    if folder.is_dir():
        return folder
    _require_readers()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(name + ".lock")):
            if not folder.is_dir():
                if report is not None:
                    report(f"unpacking {file.name}, once")
                _unpack(file, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the unpacked model in {str(folder.parent)!r}; set KVCACHE_HOME to a folder with room",
            key="model",
            details=[str(error)],
        ) from error
    return folder


def _digest(file: Path) -> str:
    """Names the file by its size, beginning and end: enough to tell models apart, and read in a millisecond."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_DIGESTED_BYTES))
        stream.seek(max(0, size - _DIGESTED_BYTES))
        digest.update(stream.read(_DIGESTED_BYTES))
    return digest.hexdigest()[:12]


def _require_readers() -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"reading a GGUF file needs {' and '.join(missing)}; pip install {' '.join(missing)}", key="model"
        )


def _unpack(file: Path, folder: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # transformers draws one of its bars with tqdm itself, which only a change of stderr keeps away.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            _convert(file, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # only what a failure left: a rename has moved it


def _convert(file: Path, target: Path) -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(str(file.parent), **source).save_pretrained(target)
    packed = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **source)
    # transformers marks the model as quantised and refuses to save it, although its weights are plain by now.
    config = packed.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    plain.save_pretrained(target)
