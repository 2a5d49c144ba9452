"""What events cost the books: while nobody listens, beside the same books with every trace of events cut out.

The peer is core itself, its source compiled without the tests `if name in ...wanted:` and what stands under them. Each
variant runs in interpreters of its own, taken in turn. Nothing is stored and nothing attends, so the shares are the
largest there can be.
"""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_core.bench.figures import Figure, Series
    from kvcache_core.bench.session import Bench

__all__ = ["measure"]

ROUNDS = 9
REPEATS = 2_000
VARIANTS = ("cut out", "nobody", "evictions only", "everything")
OPERATIONS = ("decode a token", "allocate and free", "fork and free")


def measure(bench: Bench) -> list[Figure | Series]:
    """Time three operations under each variant."""
    from kvcache_core.bench.figures import Figure

    times: dict[tuple[str, str], list[float]] = {(v, operation): [] for v in VARIANTS for operation in OPERATIONS}
    rounds = 2 if bench.quick else ROUNDS
    for done in range(rounds):
        bench.tell("books with events and without", done, rounds)
        for variant in VARIANTS:
            command = [sys.executable, "-m", "kvcache_core.bench.suites.events", variant]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for operation, taken in json.loads(output).items():
                times[variant, operation].append(taken)
    micro = {key: min(taken) * 1e6 for key, taken in times.items()}  # the rounds that nothing disturbed
    figures: list[Figure | Series] = []
    for operation in OPERATIONS:
        without = micro["cut out", operation]
        figures.append(Figure(name=f"{operation}, events cut out", value=without, unit="µs"))
        for variant in VARIANTS[1:]:
            ratio = micro[variant, operation] / without
            limit = 1.05 if variant != "everything" else None
            figures.append(Figure(name=f"{operation}, listening: {variant}", value=ratio, unit="x", at_most=limit))
    return figures


# -- in a child ------------------------------------------------------------------------------------------


class _Cut(ast.NodeTransformer):
    """Takes out `if name in anything.wanted: ...`."""

    count = 0

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        test = node.test.values[-1] if isinstance(node.test, ast.BoolOp) else node.test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and not node.orelse:
            where = test.comparators[0]
            if isinstance(where, ast.Attribute) and where.attr == "wanted":
                type(self).count += 1
                return ast.copy_location(ast.Pass(), node)
        return node


def _cut_events_out() -> None:
    """Have core compiled without events from now on."""
    original = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        if not name.startswith("kvcache_core."):
            return original(loader, name)
        tree = ast.parse(loader.get_data(loader.get_filename(name)))
        return compile(ast.fix_missing_locations(_Cut().visit(tree)), loader.get_filename(name), "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def _run(variant: str) -> dict[str, float]:
    if variant == "cut out":
        _cut_events_out()
    from kvcache_core import CacheGeometry, KvCacheManager
    from kvcache_core.bench.suites.bookkeeping import BooksOnly
    from kvcache_core.events import Evicted
    from kvcache_core.plugin import StorageSpec

    if variant == "cut out" and _Cut.count < 10:
        raise RuntimeError(f"only {_Cut.count} places that make events were found")
    spec = StorageSpec(
        geometry=CacheGeometry.uniform(1, 1, 1),
        block_size=16,
        num_blocks=2_000,
        max_sequence_length=20_000,
        dtype="float32",
        device="cpu",
    )
    cache = KvCacheManager(BooksOnly(spec))
    if variant == "evictions only":
        cache.subscribe(_hear, Evicted)
    elif variant == "everything":
        cache.subscribe(_hear)
    handle = cache.allocate()

    def decode() -> None:
        with cache.step({handle: 1}) as step:
            step.mark_written()

    return {
        "decode a token": _median(decode),
        "allocate and free": _median(lambda: cache.allocate(num_tokens=16).free()),
        "fork and free": _median(lambda: handle.fork().free()),
    }


def _hear(event: object) -> None:
    pass


def _median(operation: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return statistics.median(times[REPEATS // 4 :])


if __name__ == "__main__":
    print(json.dumps(_run(sys.argv[1])))
