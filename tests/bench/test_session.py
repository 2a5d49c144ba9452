import gc

import pytest

from kvcache_core.bench.session import Bench


def test_cases_run_in_turn_and_the_warmup_does_not_count() -> None:
    calls: list[str] = []
    cases = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = Bench().interleaved(cases, rounds=2, warmup=1, between=lambda: calls.append("-"))
    assert "".join(calls) == "a-b-" * 3
    assert {name: len(one.values) for name, one in samples.items()} == {"a": 2, "b": 2}


def test_a_quick_run_has_few_rounds() -> None:
    calls: list[int] = []
    samples = Bench(quick=True).interleaved({"a": lambda: calls.append(1)}, rounds=500)
    assert len(samples["a"].values) == 3
    assert len(calls) == 4


def test_the_collector_rests_while_cases_run_and_not_afterwards() -> None:
    states: list[bool] = []

    def fail() -> None:
        states.append(gc.isenabled())
        raise RuntimeError("not well")

    with pytest.raises(RuntimeError, match="not well"):
        Bench().interleaved({"a": fail}, rounds=1)
    assert states == [False]
    assert gc.isenabled()


def test_whoever_watches_is_told_every_round() -> None:
    told: list[tuple[str, int, int]] = []
    bench = Bench(progress=lambda what, done, total: told.append((what, done, total)))
    bench.interleaved({"a": lambda: None, "b": lambda: None}, rounds=2, warmup=1)
    assert told == [("a, b", 0, 3), ("a, b", 1, 3), ("a, b", 2, 3)]
