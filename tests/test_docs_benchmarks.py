"""The page about benchmarks says what is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from kvcache_core.bench.figures import Figure
from kvcache_core.bench.run import SUITES
from kvcache_core.bench.session import Bench
from kvcache_core.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_suite_that_is_shown_measures() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    (figure,) = namespace["measure"](Bench(quick=True))
    assert isinstance(figure, Figure)
    assert figure.value > 0


def test_the_commands_have_the_options_and_suites_that_are_shown() -> None:
    command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    shown = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("$ kvcache bench")]
    assert len(shown) == 5
    for _, _, _, *arguments in shown:
        assert {argument for argument in arguments if argument.startswith("--")} <= options
        if "--only" in arguments:
            assert set(arguments[arguments.index("--only") + 1].split(",")) <= set(SUITES)


def test_the_files_and_targets_that_are_named_exist() -> None:
    assert (ROOT / "benchmarks" / "peers.txt").exists()
    assert (ROOT / "benchmarks" / "RESULTS.md").exists()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("bench", "bench-peers", "bench-smoke"):
        assert f"make {target}" in PAGE
        assert f"\n{target}: " in makefile
