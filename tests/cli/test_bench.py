import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcache_core.cli.app import app

pytestmark = pytest.mark.slow


def test_a_quick_run_gives_figures_series_and_plots_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "--quick", "--only", "fork,memory", "--plots", str(tmp_path), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["quick"] is True
    assert set(report["figures"]) == {"fork", "memory"}
    fork = {figure["name"]: figure for figure in report["figures"]["fork"]}["fork of 8000 tokens"]
    assert fork["value"] > 0
    assert fork["low"] <= fork["value"] <= fork["high"]
    assert fork["unit"] == "µs"
    (series,) = report["series"]["fork"]
    assert set(series["lines"]) == {"kvcache-core, fork and free", "copy.deepcopy(DynamicCache)"}
    assert {Path(path) for path in report["plots"]} == set(tmp_path.iterdir())


def test_people_get_a_table_and_hear_of_missing_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_core.bench.machine.PEERS", {"no-such-peer": ("no_such_peer", "its cache")})
    result = CliRunner().invoke(app, ["bench", "--quick", "--only", "fork"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "fork of 8000 tokens" in result.stdout
    assert "no-such-peer is not installed, so there is no comparison with its cache" in result.stdout


def test_an_unknown_suite_is_a_clean_message() -> None:
    result = CliRunner().invoke(app, ["bench", "--only", "forks"])
    assert result.exit_code == 2
    assert "there is no suite 'forks'; choose from" in result.stderr
