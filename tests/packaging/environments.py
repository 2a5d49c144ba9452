"""Virtual environments that hold what a test installs, and borrow only third parties from the one that runs it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

#: The folder of each distribution of ours.
PROJECTS = (ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")))

#: What must not be borrowed: our own distributions, and whatever makes them importable.
_OURS = ("kvcache", "_kvcache", "__editable__", "_editable_impl_", "easy-install", "distutils-precedence")


class Environment:
    """A virtual environment without any distribution of ours.

    torch and the other third parties are links to those of the running environment: nothing is downloaded, and pip
    still checks that they are there.

    Args:
        folder: Where to make it.
        requirements: What to borrow, with all that it needs itself; everything when None.
    """

    def __init__(self, folder: Path, requirements: Iterable[str] | None = None) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        lent = None if requirements is None else _items_of(requirements)
        for item in Path(sysconfig.get_path("purelib")).iterdir():
            if lent is None:
                if not item.name.startswith(_OURS) and item.suffix != ".pth":
                    (borrowed / item.name).symlink_to(item)
            elif item.name in lent:
                (borrowed / item.name).symlink_to(item)
        self.site_packages().joinpath("borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")

    def site_packages(self) -> Path:
        """Where packages are installed."""
        return Path(self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())

    def run(
        self, program: str, *arguments: str | Path, cwd: Path | None = None, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, a script or a module, with little of the outer environment's variables."""
        script = self.bin / program
        command = [script] if script.exists() else [self.python, "-m", program]
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "SYSTEMROOT", "LANG") if name in os.environ
        }
        environ = {
            **kept,
            "VIRTUAL_ENV": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",  # everything is there already
            "PIP_NO_BUILD_ISOLATION": "0",  # which means: no isolation; the build backend is there, too
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        done = subprocess.run(
            [*command, *arguments], cwd=cwd or self.folder, env=environ, text=True, capture_output=True, check=False
        )
        assert done.returncode == status, (
            f"{program} {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done


def _items_of(requirements: Iterable[str]) -> set[str]:
    """What lies in site-packages of the distributions that are required, directly or not."""
    waiting, names, items = [Requirement(each) for each in requirements], set[str](), set[str]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(name)
        found = distribution(name)
        items |= {file.parts[0] for file in found.files or ()}
        waiting += [Requirement(each) for each in found.requires or ()]
    return items
