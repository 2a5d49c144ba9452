"""The guide for backend authors, followed to the letter: each command run, each file written, each output compared."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.environments import ROOT, Environment

GUIDE = ROOT / "docs" / "backends.md"


class Step(NamedTuple):
    """Something that the guide tells its reader to do."""

    kind: str
    subject: str
    text: str = ""


def steps(page: str) -> Iterator[Step]:
    """What the guide tells its reader to do, in order."""
    block = r"^```(?P<language>\w+)\n(?P<body>.*?)^```$"
    put = r"^In `(?P<file>\S+)`, put `(?P<new>[^`]+)` in place of `(?P<old>[^`]+)`\.$"
    for found in re.finditer(f"{block}|{put}", page, re.DOTALL | re.MULTILINE):
        if found["file"]:
            yield Step("put", found["file"], f"{found['old']}\n{found['new']}")
            continue
        if found["language"] == "console":
            for command, said in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", found["body"], re.MULTILINE):
                yield Step("run", command, said)
            continue
        before = page[: found.start()].rstrip().splitlines()[-1]
        if whole := re.fullmatch(r"`(\S+)`:", before):
            yield Step("write", whole[1], found["body"])
        elif part := re.fullmatch(r"In `(\S+)`, in place of `(\w+)`:", before):
            yield Step("replace", f"{part[1]}:{part[2]}", found["body"])
        else:
            raise AssertionError(f"the guide does not say what to do with the block after {before!r}")


def without(source: str, name: str, new: str) -> str:
    """A module with another function in place of the one called `name`."""
    lines = source.splitlines(keepends=True)
    (old,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    first = min([old.lineno, *(decorator.lineno for decorator in old.decorator_list)]) - 1
    return "".join([*lines[:first], new, *lines[old.end_lineno :]])


def assert_said(shown: str, output: str) -> None:
    """Assert that the output is as shown, where `...` stands for anything and spaces for any number of them."""
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    pattern = "\n".join(".*".join(map(re.escape, line.split("..."))) for line in lines)
    pattern = pattern.replace("\n.*\n", "\n(?:.*\n)*").removeprefix(".*\n")
    actual = "\n".join(" ".join(line.split()) for line in output.splitlines()) + "\n"
    assert re.search(pattern.removesuffix("\n.*"), actual), f"expected:\n{shown}\nfound:\n{output}"


@pytest.mark.packaging
@pytest.mark.slow
def test_every_step_of_the_guide_does_what_it_says(environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "author"
    folder.mkdir()
    for kind, subject, text in steps(GUIDE.read_text(encoding="utf-8")):
        if kind == "run":
            command, _, status = subject.partition("# exits with ")
            program, *arguments = shlex.split(command)
            if program == "cd":
                folder = folder / arguments[0]
                continue
            if "venv" in command:  # `environment` is that one
                continue
            if arguments[:2] == ["-m", "build"]:
                arguments.append("--no-isolation")  # the build backend is there, and nothing can be downloaded
            done = environment.run(program, *arguments, cwd=folder, status=int(status or 0))
            assert_said(text, done.stdout)
            continue
        file = folder / subject.partition(":")[0]
        if kind == "write":
            file.write_text(text)
        elif kind == "replace":
            file.write_text(without(file.read_text(), subject.partition(":")[2], text))
        else:
            old, new = text.split("\n")
            assert file.read_text().count(old) == 1
            file.write_text(file.read_text().replace(old, new))


def test_the_guide_names_only_what_there_is() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", page)
    assert links
    assert [link for link in links if not Path(os.path.normpath(GUIDE.parent / link)).exists()] == []
    from kvcache_core import plugin, testing

    for part in re.findall(r"\(`(\w+)`(?:, `(\w+)`)?\)", page):
        assert all(hasattr(testing, f"{name}Conformance") for name in part if name)
    for name in re.findall(r"`kvcache_core\.plugin\.(\w+)`", page):
        assert hasattr(plugin, name)


def test_the_walk_notices_a_command_that_says_something_else() -> None:
    assert_said("a  b\n...\nz\n", "first\na b\nc\nd\nz\nlast\n")
    assert_said("...x...y\n", "1 x 2 y\n")
    assert_said("", "anything")
    for shown in ("a c\n", "z\n...\na b\n", "...y...x\n"):
        with pytest.raises(AssertionError, match="expected"):
            assert_said(shown, "a b\nz\n1 x 2 y\n")
