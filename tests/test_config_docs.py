"""The examples of docs/configuration.md run, and its table is complete."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.config import CacheConfig, PrefixCacheConfig, PressureThresholds
from kvcache_core.errors import ConfigError

TEXT = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    found = [text for kind, text in BLOCKS if kind == language]
    assert found
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run_and_print_what_they_say(code, capsys):
    exec(compile(code, "docs/configuration.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[: len(promised)] == promised


@pytest.mark.parametrize(
    ("suffix", "content"), [*(("toml", text) for text in blocks("toml")), *(("json", text) for text in blocks("json"))]
)
def test_example_files_load(suffix, content, tmp_path):
    path = tmp_path / f"kvcache.{suffix}"
    path.write_text(content, encoding="utf-8")
    assert CacheConfig.load(path, environ={}) != CacheConfig()


def test_the_example_of_a_refusal_is_what_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kvcache.toml").write_text("bakend = 'cpu'\n\nblock_size = 0\n")
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load("kvcache.toml", environ={"KVCACHE_BUDGET": '"1000"'})
    assert str(caught.value) == blocks("text")[0].rstrip("\n")


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_keys_has_every_key_in_order_with_its_default():
    rows = {re.sub("`", "", key): default for key, default, _ in table("Keys")}
    keys: list[str] = []
    for name in CacheConfig.model_fields:
        model = {"pressure": PressureThresholds, "prefix": PrefixCacheConfig}.get(name)
        keys += [f"{name}.{inner}" for inner in model.model_fields] if model else [name]
    assert list(rows) == keys
    defaults: dict[str, Any] = CacheConfig().to_dict()
    for key, default in rows.items():
        value: Any = defaults
        for part in key.split("."):
            value = value.get(part) if value is not None else None
        assert default.strip("`") == ("none" if value is None else repr(value).replace("'", '"').lower())


def test_the_forms_of_a_budget_in_the_docs_are_budgets():
    for forms, _ in table("Budget"):
        for form in re.findall("`([^`]+)`", forms):
            CacheConfig(budget=eval(form, {}))


def test_the_variables_in_the_docs_work():
    environ = dict(re.match(r"`(\w+)=?(.*?)`$", row[0]).groups() for row in table("Environment variables"))
    del environ["KVCACHE_CONFIG"], environ["KVCACHE_HOME"]
    environ = {name: value.strip("'") for name, value in environ.items()}
    config = CacheConfig.load(environ=environ)
    origins = {origin for _, _, origin in config.explain()}
    assert {f"environment variable {name}" for name in environ} <= origins
