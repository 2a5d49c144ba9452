"""The application around the commands."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from kvcache_core.cli.app import app
from kvcache_core.cli.output import JsonFlag, command
from kvcache_core.errors import ConfigError, ConfigWarning
from tests.cli.conftest import Run

COMMANDS = ["list", "show", "doctor", "schema", "plan", "generate", "demo", "conformance", "new-backend", "bench"]


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_speaks_json(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_loses_nothing_in_square_brackets(run: Run, name: str) -> None:
    """It is markup, where `[bench]` would be taken for a style."""
    help_of = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    texts = [help_of.help, *(getattr(parameter, "help", None) for parameter in help_of.params)]
    shown = re.sub(r"\W+", "", run(name, "--help").stdout)
    for word in re.findall(r"\S*\[\S*", " ".join(filter(None, texts))):
        assert re.sub(r"\W+", "", word) in shown


def test_no_arguments_show_the_help(run: Run) -> None:
    assert "Usage" in run().output


def test_an_unknown_command_is_wrong_usage(run: Run) -> None:
    assert run("lst").exit_code == 2


def test_the_version(run: Run) -> None:
    assert run("--version").stdout == f"kvcache-core {version('kvcache-core')}\n"


def test_the_package_alone_imports_neither_typer_nor_torch() -> None:
    program = "import sys, kvcache_core.cli; print([m for m in ('typer', 'rich', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def example() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @command
    def fail(as_json: JsonFlag = False) -> None:
        warnings.warn("take note", ConfigWarning, stacklevel=2)
        raise ConfigError("it is wrong; mend it", key="block_size", details=["a detail"])

    return app


@pytest.mark.filterwarnings("default")
def test_errors_and_warnings_are_one_clean_line_each() -> None:
    result = CliRunner().invoke(example(), [])
    assert result.exit_code == 2
    assert result.stderr == "warning: take note\nConfigError: it is wrong; mend it\n  a detail\n"


@pytest.mark.filterwarnings("default")
def test_errors_are_json_where_json_was_asked_for() -> None:
    result = CliRunner().invoke(example(), ["--json"])
    assert result.exit_code == 2
    assert '"message": "it is wrong; mend it"' in result.stdout
    assert '"key": "block_size"' in result.stdout


def test_faults_of_ours_are_not_disguised() -> None:
    app = typer.Typer()

    @app.command()
    @command
    def crash(as_json: JsonFlag = False) -> None:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(app, []).exception, ZeroDivisionError)


def test_the_package_runs_as_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_core", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("kvcache-core ")
