"""The page about the backend says what is true."""

from __future__ import annotations

import re
from pathlib import Path

from kvcache_core.config import CacheConfig
from kvcache_metal.guards import GUARDS
from kvcache_metal.options import MetalOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metal.md").read_text(encoding="utf-8")
TABLE_ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, flags=re.MULTILINE))


def test_every_guard_is_described_with_its_reports_and_every_option_named() -> None:
    assert set(TABLE_ROWS) == set(GUARDS) | set(MetalOptions.model_fields)
    for name, guard in GUARDS.items():
        reason, reports = TABLE_ROWS[name].rsplit(" | ", 1)
        assert reason == guard.reason
        assert re.findall(r"\[([\w#]+)\]\((\S+)\) \(([^)]+)\)", reports) == [
            (report.issue, report.url, report.seen + (f"; mended in {report.mended}" if report.mended else ""))
            for report in guard.reports
        ]


def test_the_configuration_file_loads(tmp_path: Path) -> None:
    (source,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "kvcache.toml"
    path.write_text(source, encoding="utf-8")
    assert CacheConfig.load(path, environ={}).backend == "metal"


def test_nobody_is_told_that_it_has_run_on_a_mac() -> None:
    for page in (PAGE, (ROOT / "README.md").read_text("utf-8"), (ROOT / "plugins/metal/README.md").read_text("utf-8")):
        assert "not yet confirmed on hardware" in page.lower()


def test_what_a_mac_owner_runs_is_there() -> None:
    assert "make test-metal" in PAGE
    assert re.search(r"^test-metal:", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)


def test_every_linked_page_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
