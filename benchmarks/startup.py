"""How long it takes to start: what importing core and listing backends add to the interpreter's own start.

Peers are `import pydantic` with one model, which core stands on, and `import transformers`. Every case is a process of
its own, run in turn; the modules are compiled already. Run it on a quiet machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._measure import Figure

__all__ = ["measure"]

ROUNDS = 10
MODEL = "import pydantic; pydantic.create_model('Model', x=(int, 0))"
PROGRAMS = {
    "python": "pass",
    "import pydantic, and a model": MODEL,
    "import transformers": "import transformers",
    "import kvcache_core": "import kvcache_core",
    "import kvcache_core.plugin": "import kvcache_core.plugin",
    "from kvcache_core import open_cache": "from kvcache_core import open_cache",
}


def measure() -> list[Figure]:
    """Start each case ten times."""
    cases: dict[str, Sequence[str]] = {name: (sys.executable, "-c", code) for name, code in PROGRAMS.items()}
    script = Path(sys.executable).with_name("kvcache")
    cases["kvcache list"] = (str(script),) if script.exists() else (shutil.which("kvcache") or "kvcache",)
    cases["kvcache list"] = (*cases["kvcache list"], "list")
    times: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(ROUNDS + 1):
            for name, command in cases.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
                if round_:
                    times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    limits = {"import kvcache_core": 0.2, "kvcache list": 0.6}
    figures = [Figure(name=name, value=taken, unit="s", at_most=limits.get(name)) for name, taken in seconds.items()]
    own = seconds["python"]
    for name in ("import kvcache_core", "import kvcache_core.plugin", "from kvcache_core import open_cache"):
        for peer in ("import pydantic, and a model", "import transformers"):
            ratio = (seconds[name] - own) / (seconds[peer] - own)
            figures.append(Figure(name=f"{name}, of {peer}, without python's own", value=ratio, unit="x"))
    return figures
