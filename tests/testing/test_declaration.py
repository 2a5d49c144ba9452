"""What an author declares, and how the kit takes it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache_core import testing
from kvcache_core.plugin import Available, BackendDescriptor, Storage, StorageSpec
from kvcache_core.registry import get_registry
from kvcache_core.testing import BackendConformance, Conformance, StepConformance
from tests.storages.paged import PagedStorage

ROOT = Path(__file__).parents[2]
PARTS = [part for part in BackendConformance.__bases__ if issubclass(part, Conformance)]


class Reports:
    """A pytest plugin that notes how each test of a nested run went."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.collection: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection.append(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.reasons[name] = getattr(report, "wasxfail", "") or str(report.longrepr)


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Any]:
    """Run a test module of its own and return its reports."""

    def run(text: str) -> Reports:
        module = tmp_path / f"{tmp_path.name}.py"  # a name of its own, since modules are remembered
        module.write_text(textwrap.dedent(text))
        reports = Reports()
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(tmp_path)]
        pytest.main([*options, str(module)], plugins=[reports])
        return reports

    return run


def test_what_a_backend_does_not_declare_is_skipped_with_that_reason(nested: Any) -> None:
    reports = nested(
        """
        from kvcache_core.testing import AppendConformance
        from tests.storages.paged import PagedStorage

        class TestNarrow(AppendConformance):
            def open_storage(self, spec):
                return PagedStorage(spec)
        """
    )
    name = "test_keys_and_values_may_have_different_head_dims"
    assert reports.outcomes.pop(name) == "skipped"
    assert "the backend does not declare the capability 'unequal_head_dims'" in reports.reasons[name]
    assert set(reports.outcomes.values()) == {"passed"}


def test_a_known_failure_is_expected_and_shows_its_reason(nested: Any) -> None:
    reports = nested(
        """
        from kvcache_core.testing import TruncateConformance
        from tests.testing.wrong import RowsBeyondTheLength

        class TestLong(TruncateConformance):
            capabilities = RowsBeyondTheLength.capabilities
            known_failures = {
                "test_vllm_mlx_385_rows_that_were_cut_off_never_come_back": "shows whole blocks",
                "test_truncate_refuses_what_is_no_length_of_the_sequence": "does not happen",
            }

            def open_storage(self, spec):
                return RowsBeyondTheLength(spec)
        """
    )
    name = "test_vllm_mlx_385_rows_that_were_cut_off_never_come_back"
    assert (reports.outcomes[name], reports.reasons[name]) == ("xfailed", "shows whole blocks")
    assert reports.outcomes["test_truncate_keeps_the_first_tokens_and_gives_back_the_rest"] == "failed"


def test_a_test_of_the_kit_cannot_be_replaced() -> None:
    with pytest.raises(TypeError, match="replaces test_metadata_describes_the_packed_batch of the conformance kit"):
        type("Mine", (StepConformance,), {"test_metadata_describes_the_packed_batch": None})
    type("Mine", (StepConformance,), {"test_something_of_my_own": lambda self: None})


def test_a_test_of_the_kit_cannot_be_replaced_by_a_mixin_either() -> None:
    mixin = type("Mixin", (), {"test_metadata_describes_the_packed_batch": None})
    with pytest.raises(TypeError, match="replaces test_metadata_describes_the_packed_batch of the conformance kit"):
        type("Mine", (mixin, StepConformance), {})
    type("Mine", (StepConformance, mixin), {})  # the kit's own comes first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("TestMine.test_metadata_describes_the_packed_batch = None", "replaces test_metadata_describes"),
        (
            "TestMine = pytest.mark.xfail(TestMine)",
            "marks test_begin_reserves_for_all_handles_or_for_none of the conformance kit with xfail",
        ),
    ],
    ids=["deleted later", "marked with xfail"],
)
def test_a_test_that_would_not_count_stops_the_collection(nested: Any, change: str, message: str) -> None:
    reports = nested(
        f"""
        import pytest
        from kvcache_core.testing import StepConformance
        from tests.storages.paged import PagedStorage

        class TestMine(StepConformance):
            capabilities = PagedStorage.capabilities

            def open_storage(self, spec):
                return PagedStorage(spec)

        {change}
        """
    )
    assert not reports.outcomes
    assert re.search(message, " ".join(reports.collection))


def test_a_test_of_the_authors_own_may_be_marked_as_he_likes(nested: Any) -> None:
    reports = nested(
        """
        import pytest
        from kvcache_core.testing import TableConformance
        from tests.storages.paged import PagedStorage

        class TestMine(TableConformance):
            capabilities = PagedStorage.capabilities

            def open_storage(self, spec):
                return PagedStorage(spec)

            @pytest.mark.xfail
            def test_mine(self):
                raise AssertionError
        """
    )
    assert reports.outcomes["test_mine"] == "xfailed"


@pytest.mark.parametrize(("name", "reason"), [("test_no_such_thing", "because"), ("test_gather_wants", "x")])
def test_a_known_failure_names_a_test_of_the_kit(name: str, reason: str) -> None:
    with pytest.raises(TypeError, match=f"names {name}, which is no test of the kit"):
        type("Mine", (StepConformance,), {"known_failures": {name: reason}})


def test_a_known_failure_needs_a_reason() -> None:
    with pytest.raises(TypeError, match="needs a reason"):
        type("Mine", (StepConformance,), {"known_failures": {"test_gather_wants_to_know_whose_rows": " "}})


def test_a_backend_that_says_nothing_is_told_what_to_say() -> None:
    with pytest.raises(NotImplementedError, match="write open_storage"):
        StepConformance().open_storage(StepConformance().spec())


def test_an_installed_backend_is_opened_by_its_name() -> None:
    class Installed(StepConformance):
        backend = "acme"
        capabilities = frozenset({"unequal_head_dims"})

    with get_registry().isolated() as registry:
        registry.register(
            BackendDescriptor(
                name="acme",
                interface=(1, 0),
                storage="tests.storages.paged:PagedStorage",
                summary="a test",
                placement="paged",
                devices=("cpu",),
                dtypes=("float32",),
                probe=lambda request: Available(device="cpu"),
                capabilities=Installed.capabilities,
            )
        )
        kit = Installed()
        storage = kit.open_storage(kit.spec(num_blocks=7))
        assert type(storage).__name__ == "PagedStorage"
        assert (storage.spec.num_blocks, storage.spec.block_size) == (7, kit.block_size)
        kit.test_an_ended_step_takes_nothing_more()


def test_no_two_parts_use_one_name() -> None:
    owners: dict[str, type] = {}
    for part in PARTS:
        for name in vars(part):
            if not name.startswith("__"):
                assert owners.setdefault(name, part) is part, f"{name} is in {owners[name]} and {part}"


def test_the_public_names_are_exact() -> None:
    public = {name for name, value in vars(testing).items() if not name.startswith("_") and isinstance(value, type)}
    assert public | {"reference_attention"} == set(testing.__all__)
    assert list(testing.__all__) == sorted(testing.__all__)
    assert set(PARTS) <= {getattr(testing, name) for name in testing.__all__}


@pytest.mark.parametrize("missing", [("pytest",), ("hypothesis", "pytest")])
def test_without_its_requirements_the_kit_says_so_in_one_error(missing: tuple[str, ...]) -> None:
    code = f"""
        import sys
        for name in {missing!r}:
            sys.modules[name] = None
        try:
            import kvcache_core.testing
        except ImportError as error:
            assert error.__cause__ is None and error.__context__ is None
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout.startswith("kvcache_core.testing needs pytest")
    assert "pip install 'kvcache-core[testing]'" in run.stdout
    assert all(name in run.stdout for name in missing)


def test_pytest_loads_nothing_of_the_kit_by_itself() -> None:
    for project in ROOT.glob("**/pyproject.toml"):
        assert "pytest11" not in project.read_text(encoding="utf-8")


def test_one_class_is_all_that_an_author_writes() -> None:
    class Mine(BackendConformance):
        capabilities = frozenset({"unequal_head_dims"})

        def open_storage(self, spec: StorageSpec) -> Storage:
            return PagedStorage(spec)

    tests = [name for name in dir(Mine) if name.startswith("test_")]
    assert len(tests) > 80
