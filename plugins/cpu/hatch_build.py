"""Compiles the attention kernel where there is a compiler; without one the package is pure Python, and works.

`KVCACHE_CPU_NATIVE=0` leaves it out, `KVCACHE_CPU_NATIVE=1` makes it an error that it cannot be compiled. `CC` and
`CFLAGS` mean what they always do.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi")
NATIVE = Path("src", "kvcache_cpu", "native")
LIBRARY = "_attend.so"


class KernelBuildHook(BuildHookInterface):
    """Adds the shared library to wheels, and leaves it among the sources of editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling what came of it."""
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("KVCACHE_CPU_NATIVE", "")
        native = Path(self.root) / NATIVE
        if version == "editable":
            library = native / LIBRARY
            library.unlink(missing_ok=True)  # what was built from other sources, or is not wanted any more
        else:
            self._folder = tempfile.TemporaryDirectory()
            library = Path(self._folder.name) / LIBRARY
        if wanted == "0":
            return
        fault = compile_kernel(native / "attend.c", library)
        if fault is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            if version != "editable":
                build_data["force_include"][str(library)] = f"kvcache_cpu/native/{LIBRARY}"
        elif wanted == "1":
            raise RuntimeError(f"KVCACHE_CPU_NATIVE is 1, but the attention kernel cannot be built: {fault}")
        else:
            self.app.display_warning(f"kvcache-cpu is built without its attention kernel: {fault}")


def compile_kernel(source: Path, library: Path) -> str | None:
    """Compile the kernel; return why that failed, or None."""
    if sys.platform == "win32":
        return "it has not been tried on Windows"
    if sys.byteorder != "little":
        return "it has not been tried on big-endian machines"
    compiler = shlex.split(os.environ.get("CC", "")) or _compiler()
    if not compiler:
        return "there is no C compiler"
    draft = library.with_suffix(".part")
    command = [*compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), str(source), "-o", str(draft), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler
    except OSError as error:
        return f"{shlex.join(command)}: {error}"
    if done.returncode != 0:
        return f"{shlex.join(command)} failed: {done.stderr.strip()}"
    draft.replace(library)  # a process that has loaded the old one keeps it
    return None


def _compiler() -> list[str]:
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [])
