"""`kvcache demo`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

pytest.importorskip("transformers")

from kvcache_core.integrations import generation
from tests.integrations.saved import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def check(found: dict[str, Any]) -> None:
    """What holds for every model."""
    first, second = found["turns"]
    assert first["reused_tokens"] == 0
    # All of the first turn but its last token, which was never fed to the model; less where the text re-tokenises.
    assert first["prompt_tokens"] <= second["reused_tokens"] <= first["prompt_tokens"] + first["new_tokens"] - 1
    assert len(found["continuations"]) == 4
    for continuation in found["continuations"]:
        assert continuation["reused_tokens"] >= second["prompt_tokens"]
    assert found["shared_bytes"] < found["separate_bytes"] / 2
    answers = [*found["turns"], found["stranger"]]
    assert [each["token_ids"] for each in found["reference"]] == [each["token_ids"] for each in answers]
    # A separate request finds the story, in whole blocks; what it asks differs.
    assert found["stranger"]["reused_tokens"] >= 64
    assert found["stranger"]["reused_tokens"] % 16 == 0
    assert 0.4 < found["hit_rate"] < 1
    assert found["identical"] is True


def test_the_second_turn_reuses_the_first_and_the_continuations_fork_it(run: Run, folder: Path) -> None:
    result = run("demo", "--model", str(folder), "--backend", "cpu", "--json")
    assert result.exit_code == 0, result.output
    check(json.loads(result.stdout))


def test_people_get_the_answers_and_one_table(run: Run, folder: Path) -> None:
    result = run("demo", "--model", str(folder), "--backend", "cpu")
    assert result.exit_code == 0, result.output
    for part in (
        "in float32, cache on cpu",
        "> (a story of",
        "What it took",
        "continuation 4",
        "transformers, answer 3",
    ):
        assert part in result.stdout
    assert "Reuse between requests: the other conversation found" in result.stdout
    assert "Greedy output: identical to transformers' own cache, token for token." in result.stdout


def test_a_difference_is_said_and_ends_with_status_1(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = generation.generate_on_dynamic_cache

    def differ(*args: Any, **kwargs: Any) -> generation.Generation:
        found = compute(*args, **kwargs)
        return dataclasses.replace(found, token_ids=(*found.token_ids[:-1], found.token_ids[-1] + 1))

    monkeypatch.setattr(generation, "generate_on_dynamic_cache", differ)
    result = run("demo", "--model", str(folder), "--backend", "cpu")
    assert result.exit_code == 1
    assert "DIFFERS from transformers' own cache" in result.stdout


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_passes(run: Run) -> None:
    result = run("demo", "--backend", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    check(found)
    assert "Marit Olsen" in found["turns"][0]["text"]
    assert "Sunday" in found["turns"][1]["text"]
    assert found["stranger"]["reused_tokens"] > 200
