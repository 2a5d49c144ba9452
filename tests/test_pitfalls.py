"""What is known to go wrong with entry points (P), pluggy (G), pydantic (Y) and test tooling (T), and where we test it.

Tests are named after these rows. A row without such a test has a line in `ELSEWHERE`: the tests that cover it, or why
it does not apply here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROWS = {
    "P01": "Metadata is scanned once, and never because core is imported",
    "P02": "METADATA is read only of distributions that announce something; 500 take 30 ms at most",
    "P03": "A metadata directory without METADATA hurts nobody",
    "P04": "A malformed line of entry_points.txt costs itself",
    "P05": "Bytes that are not UTF-8 cost their distribution",
    "P06": "A stale empty directory hides nothing",
    "P07": "One distribution found twice is one backend",
    "P08": "Distributions are told apart by the name in METADATA",
    "P09": "What pip has renamed with a tilde is ignored",
    "P10": "A name that no backend can have is a problem, not an exception",
    "P11": "Names are compared in one canonical form",
    "P12": "The metadata library differs from version to version, so one module touches it",
    "P13": "An invalid entry-point value names its distribution and line",
    "P14": "Nothing depends on the classes of one metadata library",
    "P15": "A missing field is None, whatever the library raises",
    "P16": "Zip files work, and programs without any metadata",
    "P17": "Editable installs are told as such",
    "P18": "What is installed while the program runs is seen after a refresh",
    "P19": "Nothing is cached on disk",
    "P20": "Asking for one backend never returns another",
    "P21": "A broken plugin leaves everything else alone",
    "P22": "Only the named plugin is imported",
    "P23": "Every call into a plugin is isolated",
    "P24": "A named backend never falls back; auto warns before it does",
    "P25": "What cannot run here is registered all the same and says why",
    "P26": "Plugins fail with anything, SystemExit included; an interrupt is the user's",
    "P27": "Advice to install only where nothing provides the name",
    "P28": "Listing asks no plugin; doctor gives each a process and a limit",
    "P29": "A plugin's module is light",
    "P30": "Core imports no torch",
    "P31": "A probe does not initialise CUDA",
    "P32": "Plugins and core import in either order",
    "P33": "Failures are remembered until a refresh",
    "P34": "Threads that ask for one slow plugin get one object",
    "P35": "No lock is held across plugin code",
    "P36": "A plugin that asks for itself while it is loaded gets a clear error",
    "P37": "Registering the same thing twice changes nothing",
    "P38": "Two claimants of a name are an error only when it is asked for",
    "P39": "Nothing depends on the hash seed",
    "P40": "The automatic choice is by priority, then by name, and logged",
    "P41": "Any of its names switches a plugin off; one that names nothing causes a warning",
    "P42": "An empty variable is an unset one",
    "P43": "The environment is read when a choice is made",
    "P44": "Interface versions are compared before anything heavy is imported",
    "P45": "Plugins use what is public",
    "P46": "Missing methods are listed",
    "P47": "Package versions do not matter",
    "G1": "A plugin that raises does not keep later ones from being registered",
    "G2": "Two distributions with one name are both reachable",
    "G3": "A failed registration leaves nothing behind",
    "G4": "No property of a plugin is evaluated",
    "G5": "A misspelt hook is noticed",
    "G6": "A hook with arguments that it does not get is refused",
    "G7": "One implementation that raises does not stop the others",
    "G8": "The order of hooks chooses nothing",
    "G9": "Historic hooks are replayed",
    "G10": "Odd plugin objects cannot be unregistered",
    "G11": "Blocked names are registered silently",
    "G12": "One module may stand behind several names",
    "G13": "Hooks called without their arguments warn and fail",
    "G14": "Lists of plugins include blocked ones",
    "Y1": "Options are validated by the backend's model, not by a closed union",
    "Y2": "A configuration written down reads back equal",
    "Y3": "Unknown keys are refused everywhere",
    "Y4": "Paths of errors begin with options.",
    "Y5": "Braces in values are left alone",
    "Y6": "Values are taken literally except where the source is text",
    "Y7": "Frozen means frozen at any depth",
    "Y8": "Options name dtypes, so that no model imports torch",
    "Y9": "A field whose name pydantic uses itself warns",
    "Y10": "Validation context reaches validators by one way only",
    "Y11": "pydantic looks for plugins of its own when the first model is built",
    "Y12": "Every error pickles",
    "T1": "There is no pytest11 entry point",
    "T2": "The backport of importlib.metadata changes what later tests see",
    "T3": "Tests use real metadata directories",
    "T4": "Plugins work in spawned and forked children",
    "T5": "The plugins of the tests are no distributions that anybody must have",
}

_ONE_USE = "each plugin has a pluggy manager of its own, which asks it once and is thrown away (docs/adr/0006)"

ELSEWHERE = {
    "P31": ["plugins/cuda/tests/test_plugin.py::test_describing_and_probing_import_no_torch"],
    "G3": _ONE_USE,
    "G5": ["tests/test_registry.py::test_g1_to_g7_a_wrong_hook_is_one_plugins_trouble_and_stays_so"],
    "G8": ["tests/test_selection.py::test_p40_equal_priorities_are_settled_by_name"],
    "G9": "no hook is historic; " + _ONE_USE,
    "G10": ["tests/test_registry.py::test_a_module_that_replaces_itself_with_an_object_is_refused"],
    "G11": "nothing is blocked through pluggy; what is switched off is not asked (kvcache_core/disabling.py)",
    "G13": "hooks are called by kvcache_core.hookspecs alone, with the one argument that they have",
    "G14": "nothing is blocked through pluggy, and its lists are not used",
    "Y2": ["tests/test_config.py::test_a_configuration_written_down_reads_back_equal"],
    "Y7": ["tests/test_config.py::test_options_are_a_copy_and_cannot_be_changed_at_any_depth"],
    "Y8": ["tests/test_config.py::test_importing_and_loading_a_configuration_imports_neither_torch_nor_transformers"],
    "Y10": "no validator of core reads a context",
    "Y11": ["tests/test_hostile_environment.py::test_a_good_backend_is_chosen_by_name_with_no_word_about_the_others"],
    "T1": ["tests/packaging/test_distributions.py::test_entry_points_are_exactly_these"],
    "T2": ["tests/test_discovery.py::test_p14_the_standard_librarys_classes_are_never_needed"],
    "T3": ["tests/test_discovery.py::test_an_entry_names_backend_module_and_distribution"],
    "T5": "they are made in temporary folders (tests/plugin_site.py, tests/hostile.py)",
}

FILES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py"), *ROOT.glob("kvcache_core/testing/*.py")]


def named_tests(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def rows_of(test: str) -> set[str]:
    """The rows that a test's name begins with: `test_p06_p09_...`, or a range, `test_g1_to_g7_...`."""
    words = test.removeprefix("test_").split("_")
    found: list[str] = []
    for index, word in enumerate(words):
        if word == "to" and found:
            kind, first, last = found[-1][0], int(found[-1][1:]), int(words[index + 1][1:])
            found += [f"{kind}{number}" for number in range(first, last + 1)]
        elif re.fullmatch(r"p\d\d|[gy]\d{1,2}|t[1-5]", word):
            found.append(word.upper())
        else:
            break
    return set(found)


NAMED = {row for file in FILES for test in named_tests(file) for row in rows_of(test)}


def test_every_row_has_a_test_of_its_name_or_says_where_else() -> None:
    assert set(ROWS) >= NAMED
    assert set(ROWS) - NAMED - {row for row, what in ELSEWHERE.items() if what} == set()


@pytest.mark.parametrize("row", [row for row, where in ELSEWHERE.items() if isinstance(where, list)])
def test_the_tests_that_cover_a_row_exist(row: str) -> None:
    for where in ELSEWHERE[row]:
        file, _, test = where.partition("::")
        assert test in named_tests(ROOT / file), where


def imports(file: Path) -> set[str]:
    """Every module that a file imports, by its full name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_p12_one_module_touches_the_metadata_library() -> None:
    core = ROOT / "kvcache_core"
    touching = {file.relative_to(core) for file in core.rglob("*.py") if "importlib_metadata" in imports(file)}
    assert {file for file in touching if file.parts[0] != "bench"} == {Path("_compat.py")}  # a benchmark compares them


@pytest.mark.parametrize("folder", sorted(ROOT.glob("plugins/*/src")), ids=lambda folder: folder.parent.name)
def test_p45_our_plugins_use_no_private_module_of_core(folder: Path) -> None:
    for file in folder.rglob("*.py"):
        parts = {part for name in imports(file) if name.startswith("kvcache_core") for part in name.split(".")[1:]}
        assert not [part for part in parts if part.startswith("_")], file


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["cpu", "cuda", "metal"])
def test_y9_building_the_options_of_our_backends_warns_of_nothing(name: str) -> None:
    from kvcache_core.registry import get_registry
    from kvcache_core.schema import config_schema

    if name not in get_registry().names():
        pytest.skip(f"kvcache-{name} is not installed")
    assert config_schema(get_registry(), get_registry().describe(name))
