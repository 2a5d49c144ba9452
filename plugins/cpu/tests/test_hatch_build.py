"""Building the package with a compiler, and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

PACKAGE = Path(__file__).parents[1]
LIBRARY = "kvcache_cpu/native/_attend.so"
compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.slow


def build(folder: Path, *, succeeds: bool = True, **environment: str) -> tuple[list[str], list[str], str]:
    """Build a wheel; return the names of the wheels, what is in them, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=PACKAGE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is succeeds, done.stderr
    wheels = sorted(folder.glob("*.whl"))
    names = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()]
    return [wheel.name for wheel in wheels], names, done.stdout + done.stderr


@pytest.mark.skipif(compiler is None, reason="there is no C compiler")
def test_a_wheel_carries_the_kernel_for_its_platform_and_any_python(tmp_path: Path) -> None:
    (wheel,), names, _ = build(tmp_path, KVCACHE_CPU_NATIVE="1")
    assert "-py3-none-" in wheel
    assert not wheel.endswith("-any.whl")
    assert LIBRARY in names
    assert not any(name.endswith((".c", ".h")) for name in names)
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); "
    script += "from kvcache_cpu.native import library as l; "
    script += f"assert l.LIBRARY.is_relative_to({str(tmp_path)!r}) and l.library_fault() is None, l.library_fault()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_wheel_without_a_compiler_is_pure_python_and_the_build_says_why(tmp_path: Path) -> None:
    (wheel,), names, said = build(tmp_path, CC=str(tmp_path / "no-compiler"), KVCACHE_CPU_NATIVE="")
    assert wheel.endswith("-py3-none-any.whl")
    assert LIBRARY not in names
    assert "built without its attention kernel" in said
    assert "no-compiler" in said


def test_the_kernel_can_be_left_out(tmp_path: Path) -> None:
    (wheel,), names, _ = build(tmp_path, KVCACHE_CPU_NATIVE="0")
    assert wheel.endswith("-py3-none-any.whl")
    assert LIBRARY not in names


def test_a_kernel_that_is_wanted_and_cannot_be_built_fails_the_build(tmp_path: Path) -> None:
    code = tmp_path / "failing"
    code.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    code.chmod(0o755)
    wheels, _, said = build(tmp_path / "out", succeeds=False, CC=str(code), KVCACHE_CPU_NATIVE="1")
    assert wheels == []
    assert "no such header" in said
