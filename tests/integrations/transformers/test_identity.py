"""docs/identity.md says what a run gives."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from kvcache_core.integrations.models import BUNDLED_MODEL, LoadedModel
from kvcache_core.integrations.transformers import ATTENTION_NAME
from scripts import identity_table
from tests.integrations.tiny import FAMILIES, tiny_model
from tests.integrations.transformers.modes import SAME

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "identity.md").read_text(encoding="utf-8")
SWITCHABLE = [family for family in FAMILIES if family not in ("bloom", "falcon", "mpt")]


def section(attention: str) -> str:
    usual, ours = PAGE.split(f"## Under `{ATTENTION_NAME}`")
    return ours if attention == ATTENTION_NAME else usual


def test_the_page_has_every_model_and_mode():
    for attention, families in (("", FAMILIES), (ATTENTION_NAME, SWITCHABLE)):
        text = section(attention)
        assert identity_table.header() in text
        assert re.findall(r"^\| ([^|]+) \| ", text, re.M) == [BUNDLED_MODEL, *families]


def test_every_cell_is_the_same_or_a_refusal_by_name_of_a_model_that_needs_more_than_causal_attention():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \w", line)]
    others = {row[0]: set(row[1:]) - {SAME} for row in rows if set(row[1:]) != {SAME}}
    assert others == {
        "gemma2": {"refused (softcap)"},
        "gpt_oss": {"refused (s_aux)"},
        "diffllama": {"refused (own_attention)"},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "family"),
    [*(("", family) for family in FAMILIES), *((ATTENTION_NAME, family) for family in SWITCHABLE)],
)
def test_a_run_on_a_tiny_model_gives_its_row(attention, family):
    model = copy.deepcopy(tiny_model(family))
    assert identity_table.switchable(model) is (family in SWITCHABLE)
    assert identity_table.row(family, model, attention) in section(attention)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("attention", ["", ATTENTION_NAME])
def test_a_run_on_the_real_model_gives_its_row(attention, real_model: LoadedModel):
    assert identity_table.row(BUNDLED_MODEL, real_model.model, attention) in section(attention)
