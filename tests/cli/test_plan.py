"""`kvcache plan`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache_core import CacheConfig, CacheGeometry
from kvcache_core.planning import plan, plan_config
from tests.cli.conftest import Run
from tests.plugin_site import STORAGE, Site

RunJson = Callable[..., Any]

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SMOLLM = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GEOMETRY = CacheGeometry.uniform(30, 3, 64, dtype="bfloat16", max_position_embeddings=8192, model="llama")
NUMBERS = ("--num-layers", "4", "--num-kv-heads", "2", "--head-dim", "8")


def first_block(language: str) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("KVCACHE_CONFIG", "KVCACHE_BACKEND", "KVCACHE_BUDGET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the config.json of SmolLM2."""
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM), encoding="utf-8")
    return str(folder)


def words(text: str) -> str:
    return " ".join(text.split())


# -- where the model comes from ------------------------------------------------------------------------------


def test_a_folder_and_its_config_json_are_the_same_model(run_json: RunJson, model: str) -> None:
    wanted = plan(GEOMETRY, "4GiB", lengths=[500, 4000]).to_json()
    for name in (model, f"{model}/config.json", "smollm2"):
        found = run_json("plan", "--model", name, "--budget", "4GiB", "--length", "500,4000")
        assert found == json.loads(json.dumps(wanted))


def test_numbers_are_a_model(run_json: RunJson) -> None:
    geometry = CacheGeometry.uniform(4, 2, 8, value_head_dim=6, window=100)
    found = run_json("plan", *NUMBERS, "--value-head-dim", "6", "--window", "100", "-l", "90")
    assert found == json.loads(json.dumps(plan(geometry, lengths=90).to_json()))


def test_a_configuration_brings_its_geometry_and_the_command_line_stands_above_it(run_json: RunJson) -> None:
    Path("kvcache.toml").write_text(
        'block_size = 32\nbudget = "1MiB"\n[geometry]\nnum_layers = 4\nnum_kv_heads = 2\nhead_dim = 8\n'
    )
    wanted = plan_config(CacheConfig.load("kvcache.toml", environ={})).to_json()
    assert run_json("plan", "--config", "kvcache.toml") == json.loads(json.dumps(wanted))
    found = run_json("plan", "--config", "kvcache.toml", "--head-dim", "16", "--budget", "2MiB", "--block-size", "8")
    assert found["bytes_per_token"] == 2 * wanted["bytes_per_token"]
    assert (found["block_size"], found["capacity"]["budget"]) == (8, "2MiB")


def test_a_model_stands_above_the_geometry_of_the_configuration(run_json: RunJson, model: str) -> None:
    Path("kvcache.toml").write_text("block_size = 32\n[geometry]\nnum_layers = 4\nnum_kv_heads = 2\nhead_dim = 8\n")
    found = run_json("plan", "--config", "kvcache.toml", "--model", model)
    assert (found["num_layers"], found["block_size"]) == (30, 32)


def test_the_environment_is_read(run_json: RunJson, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_BUDGET", "100 blocks")
    assert run_json("plan", "--model", model)["capacity"]["total_blocks"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "org/name"], "there is no folder or file 'org/name'"),
        (["--model", "x" * 5000], "there is no folder or file 'xxx"),
        (["--model", "null\0byte"], "there is no folder or file 'null"),
        (["--model", "empty"], "the folder 'empty' has no config.json"),
        (["--model", "weights.gguf"], "'weights.gguf' must be a config.json"),
        (["--model", "broken.json"], "broken.json, line 1: not valid JSON"),
        (["--model", "list.json"], "list.json: not valid JSON: the document must be an object"),
        (["--model", "mamba.json"], "model 'mamba' cannot be cached: it keeps a recurrent state"),
        (["--model", "partial.json"], "config of model 'llama': num_hidden_layers is missing"),
        (["--model", "mamba.json", *NUMBERS], "give either --model or numbers"),
        ([], "geometry is missing: give --model, or --num-layers"),
        (["--num-layers", "4", "--head-dim", "8"], "geometry.num_kv_heads is missing"),
        (["--num-layers", "0", "--num-kv-heads", "2", "--head-dim", "8"], "geometry.num_layers must be"),
        (["--config", "missing.toml"], "configuration file 'missing.toml' does not exist"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clean_error(run_json: RunJson, arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    Path("weights.gguf").write_bytes(b"GGUF")
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("mamba.json").write_text('{"model_type": "mamba", "state_size": 16, "num_hidden_layers": 2}')
    Path("partial.json").write_text('{"model_type": "llama"}')
    error = run_json("plan", *arguments, status=2)["error"]
    assert error["type"] == "ConfigError"
    assert error["message"].startswith(message)


# -- what is planned -----------------------------------------------------------------------------------------


def test_the_json_has_these_keys_whatever_is_planned(run_json: RunJson) -> None:
    for arguments in ((), ("--length", "9", "--budget", "1MiB"), ("--length", "9", "--sequences", "2")):
        found = run_json("plan", *NUMBERS, *arguments)
        assert list(found) == [
            "model",
            "backend",
            "device",
            "dtype",
            "block_size",
            "bytes_per_token",
            "bytes_per_block",
            "num_layers",
            "caching_layers",
            "windowed_layers",
            "max_sequence_length",
            "shared_prefix",
            "sequences",
            "capacity",
            "lengths",
            "block_sizes",
            "notes",
        ]
        for each in found["lengths"]:
            assert list(each) == ["length", "blocks", "bytes", "waste", "concurrent", "need"]
            assert list(each["waste"]) == ["tokens", "bytes", "percent"]
        for each in found["block_sizes"]:
            assert list(each) == [
                "block_size",
                "bytes_per_block",
                "total_blocks",
                "shared_tokens",
                "waste",
                "most_wasted_bytes",
                "concurrent",
                "needed_bytes",
            ]
    assert found["capacity"] is None
    assert list(found["lengths"][0]["need"]) == ["blocks", "bytes", "budget", "fits"]
    capacity = run_json("plan", *NUMBERS)["capacity"]
    assert list(capacity) == ["budget", "total_blocks", "total_bytes", "total_tokens", "longest_sequence"]


def test_the_json_of_one_plan(run_json: RunJson) -> None:
    found = run_json(
        "plan", *NUMBERS, "--dtype", "float16", "--budget", "100000", "-l", "10", "-n", "3", "--compare", "16"
    )
    assert found == {
        "model": None,
        "backend": None,
        "device": None,
        "dtype": "float16",
        "block_size": 16,
        "bytes_per_token": 256,
        "bytes_per_block": 4096,
        "num_layers": 4,
        "caching_layers": 4,
        "windowed_layers": 0,
        "max_sequence_length": None,
        "shared_prefix": 0,
        "sequences": 3,
        "capacity": {
            "budget": "100000 B",
            "total_blocks": 24,
            "total_bytes": 98304,
            "total_tokens": 384,
            "longest_sequence": 384,
        },
        "lengths": [
            {
                "length": 10,
                "blocks": 1,
                "bytes": 4096,
                "waste": {"tokens": 6, "bytes": 1536, "percent": 37.5},
                "concurrent": 24,
                "need": {"blocks": 3, "bytes": 12288, "budget": "12KiB", "fits": True},
            }
        ],
        "block_sizes": [
            {
                "block_size": 16,
                "bytes_per_block": 4096,
                "total_blocks": 24,
                "shared_tokens": 0,
                "waste": {"tokens": 6, "bytes": 1536, "percent": 37.5},
                "most_wasted_bytes": 3840,
                "concurrent": [24],
                "needed_bytes": [12288],
            }
        ],
        "notes": ["No backend is named: assumed is one that stores K and V as they are, and blocks of 16 tokens."],
    }


def test_lengths_and_block_sizes_may_be_repeated_or_separated_by_commas(run_json: RunJson) -> None:
    found = run_json("plan", *NUMBERS, "-l", "1, 2", "--length", "3", "--compare", "8,4", "--compare", "64")
    assert [each["length"] for each in found["lengths"]] == [1, 2, 3]
    assert [each["block_size"] for each in found["block_sizes"]] == [4, 8, 16, 64]


def test_need_and_shared_prefix_reach_the_plan(run_json: RunJson, model: str) -> None:
    found = run_json("plan", "--model", model, "-n", "64", "-l", "4000", "--shared-prefix", "1000")
    wanted = plan(GEOMETRY, lengths=4000, sequences=64, shared_prefix=1000)
    assert found == json.loads(json.dumps(wanted.to_json()))
    assert found["capacity"] is None


def test_the_table_shows_what_is_planned(run: Run, model: str) -> None:
    result = run("plan", "--model", model, "--budget", "10MiB", "-l", "500", "-n", "1", "--shared-prefix", "40")
    assert result.exit_code == 0, result.output
    text = words(result.stdout)
    assert text.startswith("llama: 30 layers; bfloat16 in blocks of 16 tokens a token takes 22.5 KiB (23,040 bytes)")
    assert "the budget 10 MiB holds 28 blocks, 448 tokens, 9.84 MiB (10,321,920 bytes)" in text
    assert "a sequence may have 448 tokens, all that the budget holds" in text
    assert "all sequences share 40 tokens" in text
    assert "LENGTH BLOCKS MEMORY WASTED FIT AT ONCE 1 NEED AS A BUDGET FITS" in text
    assert "500 32 11.25 MiB 270 KiB (2.3%) 0 11.25 MiB (32 blocks) 11520KiB no" in text
    assert "BLOCK SIZE A BLOCK TAKES WASTED AT MOST, BY ONE SEQUENCE SHARED TOKENS FIT AT ONCE 1 NEED" in text
    assert "32 720 KiB 270 KiB (2.3%) 697.5 KiB 32 0 11.25 MiB" in text


def test_the_table_leaves_out_what_was_not_asked(run: Run) -> None:
    text = words(run("plan", *NUMBERS).stdout)
    assert text.startswith("the model: 4 layers; float32")
    assert "LENGTH" not in text
    assert "NEED" not in text
    assert "8 4 KiB - 3.5 KiB 16" in text


def test_windows_are_said_to_save_nothing(run: Run) -> None:
    text = words(run("plan", *NUMBERS, "--window", "64").stdout)
    assert "note: 4 of 4 caching layers have a sliding window (64 tokens). In this version a window only masks" in text


def test_layers_that_cache_nothing_are_counted_apart(run: Run) -> None:
    Path("kvcache.json").write_text(
        json.dumps(
            {
                "geometry": {
                    "num_layers": 3,
                    "groups": [{"layers": [0], "num_kv_heads": 1, "head_dim": 8}],
                    "shared": {"2": 0},
                }
            }
        )
    )
    assert "the model: 3 layers, 1 of which cache; float32" in run("plan", "--config", "kvcache.json").stdout


# -- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--budget", "1 B"], "ConfigError", "budget 1 B must hold one block of 16 tokens at least"),
        (["--budget", "0"], "ConfigError", "budget must be a whole number of bytes from 1"),
        (["--budget", "much"], "ConfigError", "budget must be bytes"),
        (["--budget", "50%"], "ConfigError", "budget 50% is a share of a device's memory"),
        (["--budget", "0.5"], "ConfigError", "budget 50% is a share of a device's memory"),
        (["--block-size", "0"], "ConfigError", "block_size must be a power of two"),
        (["--block-size", "many"], "ConfigError", "block_size must be a power of two"),
        (["--dtype", "bf16"], "ConfigError", "dtype must be one of"),
        (["--max-sequence-length", "-1"], "ConfigError", "max_sequence_length must be"),
        (["--length", "0"], "ShapeError", "length must be an int of at least 1"),
        (["--length", "-1"], "ConfigError", "--length must be whole numbers of tokens separated by commas, not '-1'"),
        (["--length", "1,,2"], "ConfigError", "--length must be whole numbers of tokens separated by commas, not ''"),
        (["--length", "9" * 5000], "ConfigError", "--length must be whole numbers"),
        (["--length", "²"], "ConfigError", "--length must be whole numbers"),
        (["--compare", "x"], "ConfigError", "--compare must be whole numbers"),
        (["--compare", "24"], "ConfigError", "block_size must be a power of two"),
        (["--max-sequence-length", "8", "-l", "9"], "ShapeError", "length 9 is more than the 8 tokens"),
        (["--sequences", "2"], "ShapeError", "the length of the sequences is missing"),
        (["--sequences", "0", "-l", "9"], "ShapeError", "sequences must be an int of at least 1"),
        (["--shared-prefix", "9", "-l", "9"], "ShapeError", "shared_prefix 9 must be less than the length 9"),
        (["--device", "cpu"], "ConfigError", "--device is for a named backend; give --backend too"),
        (["--option", "a=1"], "ConfigError", "--option is for a named backend; give --backend too"),
        (["--option", "a"], "ConfigError", "--option must be key=value"),
        (["--backend", "nowhere"], "UnknownBackendError", "no KV-cache backend named 'nowhere' is installed"),
    ],
)
def test_wrong_input_is_one_clean_error_with_status_2(
    run: Run, run_json: RunJson, arguments: list[str], error: str, message: str
) -> None:
    found = run_json("plan", *NUMBERS, *arguments, status=2)["error"]
    assert (found["type"], found["message"][: len(message)]) == (error, message)
    result = run("plan", *NUMBERS, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{error}: {message}" in result.stderr
    assert "Traceback" not in result.stderr


# -- backends and torch --------------------------------------------------------------------------------------


def test_a_named_backend_is_asked(run: Run, run_json: RunJson, site: Site) -> None:
    packs = (
        "from kvcache_core.plugin import DeviceMemory\n"
        "members |= {\n"
        "    'bytes_per_token': classmethod(lambda cls, geometry, dtype, options: 100),\n"
        "    'device_memory': classmethod(lambda cls, device, options: DeviceMemory(1 << 20, 640_000)),\n"
        "}\n"
        "Store = type('Store', (Storage,), members)\n"
    )
    site.plugin("acme", storage=STORAGE + packs, default_block_size="64")
    found = run_json("plan", *NUMBERS, "--backend", "acme", "--budget", "50%", "--device", "cpu")
    assert (found["backend"], found["device"], found["block_size"]) == ("acme", "cpu", 64)
    assert (found["bytes_per_token"], found["capacity"]["total_blocks"]) == (100, 50)
    text = words(run("plan", *NUMBERS, "--backend", "acme", "--budget", "50%").stdout)
    assert "float32 in blocks of 64 tokens, on acme (cpu)" in text
    assert "the budget 50% holds 50 blocks" in text


def test_a_backend_of_the_configuration_is_asked_unless_the_command_line_says_auto(
    run: Run, run_json: RunJson, site: Site
) -> None:
    site.plugin("acme", probe="lambda request: Unavailable(code='no', reason='no device')", default_block_size="64")
    Path("kvcache.toml").write_text("backend = 'acme'\n")
    result = run("plan", *NUMBERS, "--config", "kvcache.toml")
    assert result.exit_code == 2
    assert "backend 'acme'" in result.stderr
    assert "hint: to plan for another machine, ask no backend: --backend auto" in result.stderr
    assert run_json("plan", *NUMBERS, "--config", "kvcache.toml", "--backend", "auto")["block_size"] == 16


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_without_a_named_backend_torch_is_not_imported(model: str, arguments: list[str]) -> None:
    program = (
        "import sys; from kvcache_core.cli.app import app; "
        f"app({['plan', '--model', model, '--budget', '1GiB', '-l', '100', '-n', '3', *arguments]!r}, "
        "standalone_mode=False); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("\nFalse\n")


def test_help_says_when_torch_is_imported(run: Run) -> None:
    result = run("plan", "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "imports torch" in words(result.stdout.replace("│", " "))


# -- docs/planning.md ----------------------------------------------------------------------------------------


@pytest.fixture
def _files_of_the_page() -> None:
    Path("smollm2").mkdir()
    Path("smollm2", "config.json").write_text(first_block("json"), encoding="utf-8")
    Path("kvcache.toml").write_text(first_block("toml"), encoding="utf-8")


@pytest.mark.usefixtures("_files_of_the_page")
@pytest.mark.parametrize("example", re.findall(r"^```console\n\$ kvcache (.*?)^```$", PAGE, flags=re.M | re.S))
def test_the_commands_of_the_page_print_what_it_shows(run: Run, example: str) -> None:
    line, _, shown = example.partition("\n")
    result = run(*shlex.split(line))
    assert result.exit_code == 0, result.output
    assert [text.rstrip() for text in result.stdout.splitlines()] == shown.splitlines()


@pytest.mark.usefixtures("_files_of_the_page")
def test_the_library_example_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = first_block("python")
    exec(compile(code, "docs/planning.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert len(promised) == code.count("print(")
    assert capsys.readouterr().out.splitlines() == promised


def test_the_page_names_every_key_of_the_json(run_json: RunJson) -> None:
    found = run_json("plan", *NUMBERS, "--budget", "1MiB", "-l", "9", "-n", "2")
    inner = [found["capacity"], found["lengths"][0], found["lengths"][0]["need"], found["block_sizes"][0]]
    for key in {*found, *found["lengths"][0]["waste"], *(key for table in inner for key in table)}:
        assert f"`{key}`" in PAGE
