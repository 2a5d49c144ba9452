"""Options of a backend, written on the command line."""

from __future__ import annotations

import os

import pytest

from kvcache_core.cli.model_options import let_waiting_threads_sleep, parse_options
from kvcache_core.errors import ConfigError


@pytest.mark.parametrize(
    ("pairs", "options"),
    [
        (None, {}),
        ([], {}),
        (["a=1"], {"a": 1}),
        (["a=true", "b=0.5", "c=text", "d="], {"a": True, "b": 0.5, "c": "text", "d": ""}),
        (["a=x=y"], {"a": "x=y"}),
        ([" a = b "], {"a": "b"}),
        (["a.b=1", "a.c=2", "d=3"], {"a": {"b": 1, "c": 2}, "d": 3}),
        (["a=[1, 2]"], {"a": [1, 2]}),
    ],
)
def test_pairs_become_a_table(pairs, options):
    assert parse_options(pairs) == options


@pytest.mark.parametrize(
    "pairs", [["a"], ["=1"], [""], ["a..b=1"], [".=1"], ["a=1", "a=2"], ["a=1", "a.b=2"], ["a.b=2", "a=1"]]
)
def test_anything_else_is_refused(pairs):
    with pytest.raises(ConfigError, match="--option"):
        parse_options(pairs)


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
