"""Each guard is needed: what it guards against breaks the test that is named after it, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest

from kvcache_metal.guards import GUARDS, Guards
from kvcache_metal.options import GuardName
from plugins.metal.tests.caches import open_on
from plugins.metal.tests.scenarios import SCENARIOS, Open
from plugins.metal.tests.stand_in import RULES, StandIn, StandInFault

#: For each guard, the faults that it keeps away.
KEPT_AWAY: dict[str, tuple[str, ...]] = {
    "blocking_uploads": ("copies_read_freed_memory",),
    "bounded_tensors": ("large_tensors_fail",),
    "bucketed_lengths": ("graphs_pile_up",),
    "contiguous_operands": ("attention_misreads_strides", "strides_are_misread"),
    "equal_head_dims": ("attention_returns_the_dim_of_k",),
    "float_mask": (
        "attention_ignores_boolean_masks",
        "attention_leaks_within_four",
        "attention_uses_the_first_mask",
    ),
    "folded_heads": ("attention_aborts_on_grouped_heads",),
    "whole_tensors": ("writes_ignore_offsets",),
}
PAIRS = [(guard, rule) for guard, rules in KEPT_AWAY.items() for rule in rules]

#: Shapes of one operation that are few.
FEW = 24


def test_every_guard_has_a_scenario_and_reports() -> None:
    assert set(SCENARIOS) == set(KEPT_AWAY) == set(GUARDS) == set(get_args(GuardName))
    for guard in GUARDS.values():
        assert guard.reports
        assert all(report.url.startswith("https://github.com/") for report in guard.reports)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.__name__)
def test_with_every_guard_no_fault_strikes(scenario: Callable[[Open], None]) -> None:
    stand_in = StandIn(max_graphs=FEW)
    scenario(partial(open_on, stand_in, {}))
    assert dict(stand_in.fired) == {}


@pytest.mark.parametrize(("guard", "rule"), PAIRS)
def test_without_its_guard_a_scenario_fails_by_each_fault_that_the_guard_keeps_away(guard: str, rule: str) -> None:
    stand_in = StandIn(without=set(RULES) - {rule}, max_graphs=FEW)
    with pytest.raises((AssertionError, StandInFault)):
        SCENARIOS[guard](partial(open_on, stand_in, {"disable_guards": [guard]}))
    assert set(stand_in.fired) == {rule}


@pytest.mark.parametrize("guard", SCENARIOS)
def test_where_its_faults_are_mended_a_guard_can_go(guard: str) -> None:
    stand_in = StandIn(without=KEPT_AWAY[guard], max_graphs=FEW)
    SCENARIOS[guard](partial(open_on, stand_in, {"disable_guards": [guard]}))
    assert dict(stand_in.fired) == {}


@pytest.mark.parametrize(("guard", "rule"), PAIRS)
def test_a_guard_cites_the_reports_of_its_faults(guard: str, rule: str) -> None:
    assert {report.issue for report in GUARDS[guard].reports} & set(RULES[rule].issues)


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no guard mask"):
        Guards(["mask"])


@pytest.mark.parametrize(
    ("length", "computed"), [(0, 0), (1, 1), (8, 8), (9, 10), (16, 16), (17, 20), (33, 40), (64, 64), (1025, 1280)]
)
def test_lengths_fall_in_four_buckets_for_each_power_of_two(length: int, computed: int) -> None:
    assert Guards().bucketed_lengths(length) == computed
    assert Guards(["bucketed_lengths"]).bucketed_lengths(length) == length


def test_buckets_waste_a_quarter_at_most_and_are_few() -> None:
    guards = Guards()
    buckets = [guards.bucketed_lengths(length) for length in range(1, 131_073)]
    assert all(length <= bucket <= 1.25 * length for length, bucket in enumerate(buckets, start=1))
    assert buckets == sorted(buckets)
    assert len(set(buckets)) == 8 + 4 * 14
    assert all(guards.bucketed_lengths(bucket) == bucket for bucket in set(buckets))
