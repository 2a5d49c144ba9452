"""Benchmarks against named peers, for `kvcache bench`.

A suite is a module of `kvcache_core.bench.suites` with a function `measure(bench)` that returns figures and series.
All that it compares it runs in turn, so that what disturbs the machine disturbs all alike, and ratios mean something;
times alone depend on the machine.
"""

__all__: list[str] = []
