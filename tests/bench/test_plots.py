from pathlib import Path

import pytest

from kvcache_core.bench.figures import Series
from kvcache_core.bench.plots import draw

pytest.importorskip("matplotlib")


def test_each_series_becomes_a_picture_named_after_it(tmp_path: Path) -> None:
    series = Series(name="Fork a sequence (30 layers)", x="tokens", y="µs")
    for tokens in (100, 1_000):
        series.add("ours", tokens, 50)
        series.add("theirs", tokens, tokens)
    folder = tmp_path / "plots" / "new"
    assert draw([series], folder) == [folder / "fork-a-sequence-30-layers.png"]
    assert (folder / "fork-a-sequence-30-layers.png").read_bytes().startswith(b"\x89PNG")
