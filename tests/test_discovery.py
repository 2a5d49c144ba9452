"""Discovery: right in a hostile environment, and never an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.discovery import Catalogue, DiscoveryProblem, scan
from kvcache_core.plugin import ENTRY_POINT_GROUP
from tests.plugin_site import PathsFinder, Site


def scan_site(site: Site) -> Catalogue:
    return scan([PathsFinder(site.paths)])


def found(site: Site) -> list[tuple[str, str]]:
    return [(entry.name, entry.distribution.name) for entry in scan_site(site).entries]


def problem(site: Site, code: str) -> DiscoveryProblem:
    (match,) = [each for each in scan_site(site).problems if each.code == code]
    return match


def test_an_entry_names_backend_module_and_distribution(site: Site) -> None:
    folder = site.distribution("Acme-KV", {"acme": "acme_kv.plugin"}, version="2.1")
    (entry,) = scan_site(site).entries
    assert (entry.name, entry.module, entry.qualified) == ("acme", "acme_kv.plugin", "acme-kv:acme")
    assert (entry.distribution.name, entry.distribution.version) == ("Acme-KV", "2.1")
    assert entry.distribution.location == str(site.path)
    assert entry.distribution.metadata == str(folder)
    assert not entry.distribution.editable


def test_scanning_imports_no_plugin(site: Site) -> None:
    site.plugin("acme", before="raise SystemExit('imported')")
    assert found(site) == [("acme", "kvcache-acme")]
    assert "kvcache_acme" not in sys.modules


def test_other_groups_and_comments_are_ignored(site: Site) -> None:
    site.distribution(
        "acme",
        "[console_scripts]\ncpu = acme.cli:main\n"
        f"# {ENTRY_POINT_GROUP}\n[{ENTRY_POINT_GROUP}]\n; comment\n# comment\n\nacme = acme.plugin [extra]\n"
        f"[{ENTRY_POINT_GROUP}.other]\nother = acme.other\n",
    )
    assert [(entry.name, entry.module) for entry in scan_site(site).entries] == [("acme", "acme.plugin")]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_endings_and_a_byte_order_mark_do_not_matter(site: Site, newline: str, start: str) -> None:
    site.distribution("acme", f"{start}[{ENTRY_POINT_GROUP}]{newline}acme=acme.plugin{newline}")
    assert found(site) == [("acme", "acme")]


def test_p01_importing_core_scans_nothing(site: Site) -> None:
    program = "import sys, kvcache_core, kvcache_core.selection; print('importlib_metadata' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_p02_five_hundred_distributions_are_scanned_quickly(site: Site) -> None:
    for number in range(500):
        site.distribution(f"neighbour{number}", "[console_scripts]\nx = y:z\n" if number % 2 else None)
    site.plugin("acme")
    assert found(site) == [("acme", "kvcache-acme")]
    start = time.perf_counter()
    assert found(site) == [("acme", "kvcache-acme")]
    assert time.perf_counter() - start < 0.25


def test_p03_a_nameless_directory_left_by_an_interrupted_pip_hurts_nobody(site: Site) -> None:
    folder = site.distribution("", None, metadata=None, directory="-1.0.dist-info")
    site.plugin("acme")
    assert found(site) == [("acme", "kvcache-acme")]
    note = problem(site, "nameless")
    assert note.location == str(folder)
    assert not note.breaks_plugin


def test_p03_a_nameless_distribution_that_announces_a_backend_is_reported_as_broken(site: Site) -> None:
    site.distribution("acme", {"acme": "acme.plugin"}, metadata=None)
    site.distribution("other", {"other": "other.plugin"}, metadata="Version: 1.0\n")
    site.plugin("good")
    assert found(site) == [("good", "kvcache-good")]
    assert [each.code for each in scan_site(site).problems if each.breaks_plugin] == ["nameless", "nameless"]


def test_p04_a_malformed_line_in_an_unrelated_distribution_hurts_nobody(site: Site) -> None:
    site.distribution("unrelated", "[console_scripts]\nthis line has no equals sign\n")
    site.plugin("acme")
    assert found(site) == [("acme", "kvcache-acme")]
    assert scan_site(site).problems == ()


def test_p04_a_malformed_line_costs_only_itself_and_is_named(site: Site) -> None:
    folder = site.distribution("acme", f"[{ENTRY_POINT_GROUP}]\nno equals sign\nacme = acme.plugin\n= acme.x\nb =\n")
    assert found(site) == [("acme", "acme")]
    lines = [(each.line, each.distribution, each.location) for each in scan_site(site).problems]
    assert lines == [(2, "acme", str(folder)), (4, "acme", str(folder)), (5, "acme", str(folder))]
    assert all(each.code == "malformed-line" and each.breaks_plugin for each in scan_site(site).problems)


def test_p05_bytes_that_are_not_utf8_in_an_unrelated_distribution_hurt_nobody(site: Site) -> None:
    site.distribution("unrelated", b"[console_scripts]\ncaf\xe9 = y:z\n")
    site.plugin("acme")
    assert found(site) == [("acme", "kvcache-acme")]
    assert not problem(site, "not-utf8").breaks_plugin


def test_p05_bytes_that_are_not_utf8_beside_a_backend_are_reported_as_broken(site: Site) -> None:
    site.distribution("acme", f"[{ENTRY_POINT_GROUP}]\nacme = acme.plugin\ncaf".encode() + b"\xe9 = acme.plugin\n")
    site.distribution("beta", {"beta": "beta.plugin"}, metadata=b"Name: beta\nAuthor: Ren\xe9\n")
    assert found(site) == []
    assert [each.breaks_plugin for each in scan_site(site).problems if each.code == "not-utf8"] == [True, True]


def test_p06_a_stale_empty_directory_earlier_on_the_path_does_not_shadow(site: Site) -> None:
    site.plugin("acme")
    earlier = site.add_path("earlier")
    stale = site.distribution("kvcache-acme", None, metadata=None, version="0.9", path=earlier)
    assert found(site) == [("acme", "kvcache-acme")]
    assert problem(site, "nameless").location == str(stale)


def test_p07_the_same_distribution_on_two_path_entries_is_one_backend(site: Site) -> None:
    later = site.distribution("acme", {"acme": "acme.plugin"}, version="2.0")
    site.distribution("Acme", {"acme": "acme.plugin"}, version="1.0", path=site.add_path("earlier"))
    (entry,) = scan_site(site).entries
    assert entry.distribution.version == "1.0"
    shadowed = problem(site, "shadowed")
    assert shadowed.location == str(later)
    assert not shadowed.breaks_plugin


def test_p07_egg_info_beside_dist_info_is_one_backend(site: Site) -> None:
    site.distribution("acme", {"acme": "acme.plugin"})
    text = (site.path / "acme-1.0.dist-info" / "METADATA").read_text()
    site.distribution(
        "acme", {"acme": "acme.plugin"}, metadata=None, directory="acme.egg-info", files={"PKG-INFO": text}
    )
    assert found(site) == [("acme", "acme")]


def test_p07_one_directory_reached_by_two_paths_is_not_even_worth_a_note(site: Site) -> None:
    site.plugin("acme")
    link = site.path.parent / "link"
    link.symlink_to(site.path)
    site.paths.append(link)
    assert found(site) == [("acme", "kvcache-acme")]
    assert scan_site(site).problems == ()


@pytest.mark.parametrize("order", [1, -1])
def test_p07_of_two_versions_in_one_directory_the_newest_counts(site: Site, order: int) -> None:
    for version in ["0.9.0", "0.10.0"][::order]:
        site.distribution("acme", {"acme": "acme.plugin"}, version=version)
    finder = PathsFinder(site.paths)

    class Ordered:
        def find_distributions(self, context: Any) -> Any:
            return sorted(finder.find_distributions(context), key=lambda each: each.version)[::order]

    (entry,) = scan([Ordered()]).entries
    assert entry.distribution.version == "0.10.0"


def test_p08_distributions_are_keyed_on_their_metadata_name(site: Site) -> None:
    for name, directory in [("flake8", "flake8.egg-info"), ("flake8-plugin-utils", "flake8-plugin-utils.egg-info")]:
        site.distribution(
            name,
            {f"{name}-kv": "some.plugin"},
            metadata=None,
            directory=directory,
            files={"PKG-INFO": f"Name: {name}\nVersion: 1\n"},
        )
    assert found(site) == [("flake8-kv", "flake8"), ("flake8-plugin-utils-kv", "flake8-plugin-utils")]


def test_p09_renamed_leftovers_of_pip_are_ignored_and_mentioned(site: Site) -> None:
    leftover = site.distribution("acme", {"ghost": "acme.plugin"}, directory="~cme-1.0.dist-info")
    site.plugin("acme")
    assert found(site) == [("acme", "kvcache-acme")]
    assert problem(site, "leftover").location == str(leftover)


@pytest.mark.parametrize("name", ["1fast", "no spaces", "ümlaut", "a:b", "-", "auto", "AUTO", "a/b", "\u212aelvin"])
def test_p10_a_name_no_backend_can_have_is_a_problem_and_not_an_exception(site: Site, name: str) -> None:
    site.distribution("acme", f"[{ENTRY_POINT_GROUP}]\n{name} = acme.plugin\nfine = acme.plugin\n")
    assert found(site) == [("fine", "acme")]
    assert problem(site, "bad-name").line == 2


@pytest.mark.parametrize(
    ("written", "canonical"),
    [("CUDA", "cuda"), ("my_backend", "my-backend"), ("my.backend", "my-backend"), ("My-_.Backend2", "my-backend2")],
)
def test_p11_names_are_compared_in_canonical_form(site: Site, written: str, canonical: str) -> None:
    site.distribution("acme", {written: "acme.plugin"})
    assert found(site) == [(canonical, "acme")]
    registry = site.registry()
    for spelling in (written, canonical, f"ACME:{written}", f" {canonical.upper()} "):
        assert registry.find(spelling).name == canonical


def test_p11_two_spellings_of_one_name_in_one_distribution_are_one_backend(site: Site) -> None:
    site.distribution("acme", {"fast_kv": "acme.first", "FAST-KV": "acme.second"})
    (entry,) = scan_site(site).entries
    assert entry.module == "acme.first"
    assert problem(site, "duplicate").line == 3


@pytest.mark.parametrize("value", ["not-a-module", "acme.plugin:attr", "1acme", "acme..plugin", "acme.class", ":x"])
def test_p13_an_invalid_value_is_a_problem_that_names_distribution_and_line(site: Site, value: str) -> None:
    folder = site.distribution("acme", {"bad": value, "fine": "acme.plugin"})
    assert found(site) == [("fine", "acme")]
    bad = problem(site, "bad-value")
    assert (bad.distribution, bad.line, bad.location) == ("acme", 2, str(folder))


def test_p14_the_standard_librarys_classes_are_never_needed(site: Site) -> None:
    class Homemade:
        """A distribution of a foreign finder: not a subclass of anything."""

        metadata = {"Name": "homemade", "Version": "3"}  # noqa: RUF012

        def read_text(self, name: str) -> str | None:
            return f"[{ENTRY_POINT_GROUP}]\nhome = homemade.plugin\n" if name == "entry_points.txt" else None

    class Finder:
        def find_distributions(self, context: Any) -> Any:
            return [Homemade()]

    (entry,) = scan([Finder()]).entries
    assert (entry.name, str(entry.distribution)) == ("home", "homemade 3")


@pytest.mark.parametrize("error", [FileNotFoundError, KeyError, TypeError, AttributeError])
def test_p15_missing_metadata_is_reported_whatever_the_library_raises(error: type[Exception]) -> None:
    class Nameless:
        @property
        def metadata(self) -> Any:
            raise error("no metadata")

        def read_text(self, name: str) -> str | None:
            return f"[{ENTRY_POINT_GROUP}]\nx = x.plugin\n" if name == "entry_points.txt" else None

    class Finder:
        def find_distributions(self, context: Any) -> Any:
            return [Nameless()]

    catalogue = scan([Finder()])
    assert catalogue.entries == ()
    assert [each.code for each in catalogue.problems] == ["nameless"]


def test_p16_plugins_in_a_zip_file_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = site.path.parent / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("zipped-1.0.dist-info/METADATA", "Name: zipped\nVersion: 1.0\n")
        bundle.writestr("zipped-1.0.dist-info/entry_points.txt", f"[{ENTRY_POINT_GROUP}]\nzipped = zipped.plugin\n")
    site.paths.append(archive)
    (entry,) = scan_site(site).entries
    assert (entry.name, entry.distribution.location) == ("zipped", str(archive))
    assert scan_site(site).problems == ()


def test_p17_an_editable_install_says_so_and_where_its_sources_are(site: Site) -> None:
    record = json.dumps({"url": "file:///src/acme", "dir_info": {"editable": True}})
    site.distribution("acme", {"acme": "acme.plugin"}, files={"direct_url.json": record})
    (entry,) = scan_site(site).entries
    assert entry.distribution.editable
    assert entry.distribution.source == "/src/acme"


@pytest.mark.parametrize("record", ["{", "[]", '{"dir_info": null}', '{"dir_info": 3}', "null"])
def test_p17_a_damaged_record_of_the_origin_only_costs_that_detail(site: Site, record: str) -> None:
    site.distribution("acme", {"acme": "acme.plugin"}, files={"direct_url.json": record})
    (entry,) = scan_site(site).entries
    assert not entry.distribution.editable


def test_an_entry_points_file_that_cannot_be_read_is_reported_as_broken(site: Site) -> None:
    folder = site.distribution("acme", None)
    (folder / "entry_points.txt").mkdir()
    unreadable = problem(site, "unreadable")
    assert unreadable.location == str(folder)
    assert unreadable.breaks_plugin


def test_a_finder_that_raises_does_not_hide_what_others_find(site: Site) -> None:
    site.plugin("acme")

    class Broken:
        def find_distributions(self, context: Any) -> Any:
            raise OSError("disk on fire")

    catalogue = scan([Broken(), PathsFinder(site.paths)])
    assert [entry.name for entry in catalogue.entries] == ["acme"]
    (failed,) = catalogue.problems
    assert failed.code == "finder-failed"
    assert "OSError: disk on fire" in failed.reason


@pytest.mark.parametrize("entry", [None, 7, "nul\0byte"])
def test_a_nonsensical_entry_of_sys_path_hides_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    site.plugin("acme")
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    assert "acme" in [each.name for each in scan().entries]


def test_a_distribution_whose_reading_raises_is_recorded(site: Site) -> None:
    class Evil:
        def read_text(self, name: str) -> str | None:
            raise RuntimeError("no")

    class Finder:
        def find_distributions(self, context: Any) -> Any:
            return [Evil(), *PathsFinder(site.paths).find_distributions(context)]

    site.plugin("acme")
    catalogue = scan([Finder()])
    assert [entry.name for entry in catalogue.entries] == ["acme"]
    assert "RuntimeError: no" in catalogue.problems[0].reason


def test_a_name_that_no_distribution_can_have_is_reported(site: Site) -> None:
    site.distribution("acme", {"acme": "acme.plugin"}, metadata="Name: we: ird\nVersion: 1\n")
    assert found(site) == []
    assert "'we: ird' is not a distribution name" in problem(site, "nameless").reason


def test_a_missing_version_is_unknown(site: Site) -> None:
    site.distribution("acme", {"acme": "acme.plugin"}, metadata="Name: acme\n")
    (entry,) = scan_site(site).entries
    assert entry.distribution.version == "unknown"


def test_p39_the_result_does_not_depend_on_the_hash_seed(site: Site) -> None:
    for name in ["one", "two", "three"]:
        site.plugin("same", dist=f"acme-{name}")
        site.plugin(name)
    program = "from kvcache_core.discovery import scan; print([entry.qualified for entry in scan().entries])"
    path = os.pathsep.join([str(site.path), str(Path(__file__).parents[1])])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    assert "acme-one:same" in outputs.pop()
