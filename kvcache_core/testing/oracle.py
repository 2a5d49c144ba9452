"""The differential test: random histories on a tiny pool, against a list of tokens for each sequence."""

from __future__ import annotations

from typing import cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcache_core.testing.conformance import Conformance
from kvcache_core.testing.machine import CacheMachine
from kvcache_core.testing.reuse_machine import ReuseMachine

__all__ = ["OracleConformance"]


class OracleConformance(Conformance):
    """Whatever the history, a cache holds what lists of tokens would hold."""

    tokens_found = 0  # by the prompts of all histories

    def test_any_history_leaves_what_lists_of_tokens_would_hold(self) -> None:
        self.run_histories(CacheMachine)

    def test_any_history_with_reuse_finds_only_what_the_tenant_stored(self) -> None:
        self.run_histories(ReuseMachine)

    def run_histories(self, machine: type[CacheMachine]) -> None:
        """Try `oracle_runs` random histories of `oracle_steps` operations, always the same ones."""
        run_state_machine_as_test(
            cast("type[CacheMachine]", lambda: machine(self)),  # anything that makes a machine will do
            settings=settings(
                max_examples=self.oracle_runs,
                stateful_step_count=self.oracle_steps,
                derandomize=True,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink) if self.oracle_shrinks else (Phase.generate,),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            ),
        )
