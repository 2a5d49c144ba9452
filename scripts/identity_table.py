"""Write docs/identity.md: what `generate` says on a `KvCache`, beside what it says on transformers' own cache.

    python -m scripts.identity_table            # all of it, which takes a few minutes
    python -m scripts.identity_table opt llama  # the rows of these models

Run it in the root of the repository.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from kvcache_core.integrations.models import BUNDLED_MODEL, load_model
from kvcache_core.integrations.transformers import ATTENTION_NAME
from tests.integrations.tiny import FAMILIES, tiny_model
from tests.integrations.transformers.modes import MODES, outcomes

#: The rows, in their order.
ALL = (BUNDLED_MODEL, *FAMILIES)
PAGE = Path(__file__).resolve().parent.parent / "docs" / "identity.md"

_INTRODUCTION = """\
# Token for token the same

Written by `python -m scripts.identity_table`; the tests check that a run still gives this. Every mode generates on a
`KvCache` over the CPU backend and on transformers' `DynamicCache`, in float32; *same* means that all tokens are. The
first row is the real SmolLM2-135M-Instruct; the others are tiny models with random weights.
"""
_USUAL = "\n## Under the attention implementation that the model has (sdpa or eager)\n\n"
_OURS = f"""
## Under `{ATTENTION_NAME}`

Bloom, Falcon and MPT bring attention of their own and are not in this table. Gemma 2 and GPT-OSS need soft caps and
sinks, which neither sdpa nor the backends know: keep `eager`. DiffLlama computes with V after it was cached:
keep `sdpa`.

"""


def switchable(model: PreTrainedModel) -> bool:
    """Whether the model's attention can be replaced."""
    return bool(model._can_set_attn_implementation())


def row(name: str, model: PreTrainedModel, attention: str) -> str:
    """One line of a table."""
    found = outcomes(model, attention)
    return f"| {name} | {' | '.join(found[mode.name] for mode in MODES)} |\n"


def header() -> str:
    """The first lines of a table."""
    return f"| | {' | '.join(mode.name for mode in MODES)} |\n|{'---|' * (len(MODES) + 1)}\n"


def _model(name: str) -> PreTrainedModel:
    return load_model(dtype="float32").model if name == BUNDLED_MODEL else copy.deepcopy(tiny_model(name))


def _rows(page: str) -> dict[str, str]:
    """The lines of the tables of a page by what they begin with."""
    return {
        line.split(" | ")[0][2:]: line + "\n" for line in page.splitlines() if line.startswith("| ") and line[2] != "|"
    }


def main(names: Sequence[str]) -> None:
    """Write the page; run only the models of these names anew, if any are given."""
    usual, ours = map(_rows, PAGE.read_text(encoding="utf-8").split(_OURS)) if names and PAGE.exists() else ({}, {})
    for name in names or ALL:
        model = _model(name)
        usual[name] = row(name, model, "")
        if switchable(model):
            ours[name] = row(name, model, ATTENTION_NAME)
    tables = (header() + "".join(rows[name] for name in ALL if name in rows) for rows in (usual, ours))
    PAGE.write_text(_INTRODUCTION + _USUAL + _OURS.join(tables), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
