"""What the README shows works as it is shown."""

import re
from pathlib import Path

import pytest

from kvcache_core.config import CacheConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def block(language: str, containing: str) -> str:
    (found,) = [text for kind, text in BLOCKS if kind == language and containing in text]
    return found


def run(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {})


def test_the_handle_example_shares_a_fork_and_passes_its_audit(capsys):
    run(block("python", "step.attend"))
    printed = capsys.readouterr().out
    assert "4 tokens in 1 blocks" in printed
    assert "3 torch.Size([3, 2, 64]) ()" in printed


def test_the_configuration_file_loads_and_knows_where_its_values_stand(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text(block("toml", "budget"), encoding="utf-8")
    config = CacheConfig.load(path, environ={"KVCACHE_BACKEND": "cpu"})
    assert config.origin("backend") == "environment variable KVCACHE_BACKEND"
    assert config.origin("budget").endswith("kvcache.toml, line 4")


@pytest.mark.slow
@pytest.mark.model
def test_the_transformers_example_answers_the_question(capsys):
    run(block("python", "KvCache.for_model"))
    assert "Paris" in capsys.readouterr().out


def test_every_linked_page_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
