"""The examples of docs/transformers.md run, one after the other, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.model
@pytest.mark.slow
def test_the_examples_run_and_say_what_they_should(capsys):
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names: dict[str, object] = {}
    said = []
    try:
        for number, example in enumerate(EXAMPLES, start=1):
            exec(compile(example, f"docs/transformers.md, example {number}", "exec"), names)
            said.append(capsys.readouterr().out)
    finally:
        torch.set_num_threads(threads)
    _, first, turns, requests, batch, further, beams, forks, failure, _ = said
    assert "Paris" in first
    reused = [int(match) for match in re.findall(r"\((\d+) of \d+ tokens reused\)", turns)]
    assert (len(reused), reused[0]) == (2, 0)
    assert reused[1] > 37
    reused = [int(match) for match in re.findall(r"(\d+) of \d+ tokens reused", requests)]
    assert reused[0] == 0
    assert reused[1] >= 32
    assert reused[1] % 16 == 0
    assert "hit rate 4" in requests
    assert "Thursday" in batch
    assert re.findall(r"^\[\d+, \d+, \d+\]$", batch, re.MULTILINE)
    kept, whole = map(int, re.findall(r"(\d+) of (\d+) tokens reused", further)[0])
    assert whole / 2 < kept < whole
    assert int(re.findall(r"hold (\d+)% of what", beams)[0]) < 50
    assert len(set(forks.splitlines()[:3])) == 3
    assert failure == "the ninth layer is not well\n"


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
