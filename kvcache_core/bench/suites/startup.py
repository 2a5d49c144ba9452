"""How long it takes to start: what importing core and listing backends add to the interpreter's own start.

Peers are `import pydantic` with one model, which core stands on, and `import transformers`. Every case is a process of
its own; the modules are compiled already.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

from kvcache_core.bench.figures import Figure, Series
from kvcache_core.bench.session import Bench

__all__ = ["measure"]

#: What is run -> its code.
PROGRAMS = {
    "python": "pass",
    "import pydantic, and a model": "import pydantic; pydantic.create_model('Model', x=(int, 0))",
    "import transformers": "import transformers",
    "import kvcache_core": "import kvcache_core",
    "import kvcache_core.plugin": "import kvcache_core.plugin",
    "from kvcache_core import open_cache": "from kvcache_core import open_cache",
    "kvcache list": "import sys; sys.argv[1:] = ['list']; from kvcache_core.cli import main; main()",
}
LIMITS = {"import kvcache_core": 0.2, "kvcache list": 0.6}
PEERS = {"import pydantic, and a model": "pydantic", "import transformers": "transformers"}


def measure(bench: Bench) -> list[Figure | Series]:
    """Start each case several times, without and with the interpreter's own start."""
    cases: dict[str, Callable[[], object]] = {name: partial(_run, code) for name, code in PROGRAMS.items()}
    if not _works(cases["import transformers"]):
        del cases["import transformers"]
    seconds = bench.interleaved(cases, rounds=10, warmup=1)
    figures: list[Figure | Series] = [
        Figure.of(name, samples, "s", peer=PEERS.get(name), at_most=LIMITS.get(name))
        for name, samples in seconds.items()
    ]
    own = seconds["python"]
    for name in PROGRAMS:
        if "kvcache_core" not in name:
            continue
        for peer, distribution in PEERS.items():
            if peer in seconds:
                ratio = (seconds[name] - own) / (seconds[peer] - own)
                title = f"{name}, of {peer}, without python's own"
                figures.append(Figure.of(title, ratio, "x", peer=distribution))
    return figures


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def _works(case: Callable[[], object]) -> bool:
    try:
        case()
    except subprocess.CalledProcessError:
        return False
    return True
