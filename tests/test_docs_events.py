"""The page about events says what is true."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcache_core.config import CacheConfig
from kvcache_core.events import EVENT_TYPES, CacheEvent, EvictionReason, FreeReason, SequenceEvent, StepPart
from kvcache_core.hookspecs import event_hooks
from kvcache_core.interface import OBSERVER_GROUP
from kvcache_core.prefix import MissReason

TEXT = (Path(__file__).parents[1] / "docs" / "events.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
ROWS = {
    name: (kind, when, re.findall(r"`(\w+)`", said))
    for name, kind, when, said in re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \| (.*?) \|$", TEXT, flags=re.MULTILINE)
}


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kvcache_cpu.plugin")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    printed = capsys.readouterr().out
    if "misses" in source:
        assert "allocated {" in printed
        assert printed.splitlines()[-1] == "first never-stored 0 of 40 tokens are cached; the block at token 0 was " \
            "never stored"  # fmt: skip
    elif "print" in source:
        assert printed == "2\n"


def test_the_example_of_a_plugin_is_one() -> None:
    from types import ModuleType

    (source,) = [example for example in EXAMPLES if "hookimpl" in example]
    module = ModuleType("kvcache_acme")
    exec(source, vars(module))
    (hook,) = event_hooks(module)
    (evicted,) = [kind for kind in EVENT_TYPES if kind.name == "evicted"]
    hook(evicted(request_id="a", cache_id="b", num_blocks=3, kept_tokens=0, reason="room"))  # type: ignore[call-arg]
    assert vars(module)["evicted"] == 3
    assert f'"{OBSERVER_GROUP}"' in TEXT
    assert "observers" in CacheConfig.model_fields


def test_the_table_has_every_event_with_every_field() -> None:
    common = {field.name for field in fields(SequenceEvent)}
    assert list(ROWS) == [kind.name for kind in EVENT_TYPES]
    for kind in EVENT_TYPES:
        name, _, said = ROWS[kind.name]
        own = [field.name for field in fields(kind) if field.name not in common]
        assert name == kind.__name__
        assert set(own) <= set(said), kind.name
        values = {*get_args(MissReason), *get_args(EvictionReason), *get_args(FreeReason)}
        assert set(said) - set(own) - values <= {field.name for field in fields(StepPart)}, kind.name


def test_it_names_every_common_field_and_every_reason() -> None:
    words = set(re.findall(r"`([\w-]+)`", TEXT))
    assert words >= {field.name for field in fields(CacheEvent)}
    assert words >= {*get_args(MissReason), *get_args(EvictionReason), *get_args(FreeReason)}
