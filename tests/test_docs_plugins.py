"""The page about plugins says what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.messages import DISABLE_VARIABLE, FIRST_PARTY

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("kvcache_cpu.plugin")
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    assert "cpu" in capsys.readouterr().out


def test_it_names_the_variable_and_the_first_parties() -> None:
    assert DISABLE_VARIABLE in PAGE
    assert all(f"`{distribution}`" in PAGE for distribution in FIRST_PARTY.values())
