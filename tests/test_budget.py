import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_core.budget import Budget, format_bytes
from kvcache_core.errors import ConfigError
from kvcache_core.storage import DeviceMemory

GIB = 2**30
MEMORY = DeviceMemory(total=16 * GIB, free=8 * GIB)


def not_asked() -> DeviceMemory:
    raise AssertionError("the device was asked for its memory although the budget does not depend on it")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, Budget("bytes", 4096)),
        ("4096 B", Budget("bytes", 4096)),
        ("4GiB", Budget("bytes", 4 * GIB)),
        ("4 gib", Budget("bytes", 4 * GIB)),
        ("512 MiB", Budget("bytes", 512 * 2**20)),
        ("2GB", Budget("bytes", 2 * 10**9)),
        ("1.5 KiB", Budget("bytes", 1536)),
        ("0.1 KB", Budget("bytes", 100)),
        ("1_000 blocks", Budget("blocks", 1000)),
        (" 1 block ", Budget("blocks", 1)),
        ("16000 tokens", Budget("tokens", 16000)),
        ("50%", Budget("fraction", 0.5)),
        ("33.3 %", Budget("fraction", 0.333)),
        (0.25, Budget("fraction", 0.25)),
        (1.0, Budget("fraction", 1.0)),
        ("100%", Budget("fraction", 1.0)),
        (Budget("tokens", 5), Budget("tokens", 5)),
    ],
)
def test_every_form_of_a_budget_is_read(text, expected):
    assert Budget.parse(text) == expected


@pytest.mark.parametrize(
    "bad",
    [
        0, -1, True, False, None, 0.0, -0.5, 1.5, 16.0, math.nan, math.inf, 2**63, 10**5000, [4], {"bytes": 4}, b"4GiB",
        "", " ", "GiB", "0 blocks", "-1 blocks", "1.5 blocks", "1e3 blocks", "4 apples", "4G", "4GiB free", "0%",
        "101%", "nan%", "0 B", "0.3 B", "9" * 50 + " blocks", "2147483648 blocks", "9999999999 TiB", "\u0661 blocks",
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else f"int{value.bit_length()}",
)  # fmt: skip
def test_vllm_43496_what_is_no_budget_is_refused_with_the_user_s_own_value(bad):
    with pytest.raises(ConfigError) as caught:
        Budget.parse(bad)
    assert caught.value.key == "budget"
    message = str(caught.value)
    assert message.startswith("budget must ")
    shown = repr(bad) if not isinstance(bad, int) or bad < 2**64 else "an integer of"
    assert shown[:40] in message


@pytest.mark.parametrize(("kind", "amount"), [("bytes", 1.0), ("blocks", True), ("fraction", 1), ("apples", 1)])
def test_a_budget_cannot_be_built_wrong_directly_either(kind, amount):
    with pytest.raises(ConfigError, match="budget must be"):
        Budget(kind, amount)


def test_a_number_without_a_unit_in_text_asks_for_the_unit():
    with pytest.raises(ConfigError, match='say what \'1000\' counts: "1000 blocks", "1000 tokens" or "1000 B"'):
        Budget.parse("1000")


def test_a_budget_is_frozen_hashable_and_pickles():
    budget = Budget.parse("50%")
    with pytest.raises(AttributeError):
        budget.amount = 1
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert len({budget, Budget("fraction", 0.5)}) == 1


counts = st.integers(1, 2**31 - 1)


@settings(deadline=None)
@given(
    st.one_of(
        st.integers(1, 2**63 - 1).map(lambda n: Budget("bytes", n)),
        counts.map(lambda n: Budget("blocks", n)),
        counts.map(lambda n: Budget("tokens", n)),
        st.floats(0, 1, exclude_min=True).map(lambda f: Budget("fraction", f)),
    )
)
def test_the_plain_form_reads_back_exactly(budget):
    assert Budget.parse(budget.to_plain()) == budget


@pytest.mark.parametrize(
    ("budget", "blocks"),
    [
        ("1000 blocks", 1000),
        ("16000 tokens", 1000),
        ("16001 tokens", 1001),
        ("1 token", 1),
        (100 * 720, 100),
        (100 * 720 - 1, 99),
        (720, 1),
    ],
)
def test_a_budget_that_does_not_depend_on_the_device_resolves_without_asking_it(budget, blocks):
    resolved = Budget.parse(budget).resolve(bytes_per_block=720, block_size=16, device_memory=not_asked)
    assert resolved == blocks


@pytest.mark.parametrize("memory", [MEMORY, lambda: MEMORY])
def test_a_share_is_taken_of_the_free_memory(memory):
    budget = Budget.parse("25%")
    assert budget.resolve(bytes_per_block=2**20, block_size=16, device_memory=memory) == 2 * 1024


def test_a_device_is_asked_for_its_memory_once():
    asked = []

    def memory() -> DeviceMemory:
        asked.append(1)
        return DeviceMemory(total=100, free=100)

    with pytest.raises(ConfigError):
        Budget.parse("50%").resolve(bytes_per_block=720, block_size=16, device_memory=memory)
    assert len(asked) == 1


@pytest.mark.parametrize("budget", ["719 B", "8.9%"])
def test_a_budget_below_one_block_says_what_fits_and_what_would_do(budget):
    with pytest.raises(ConfigError) as caught:
        Budget.parse(budget).resolve(
            bytes_per_block=737280, block_size=16, device_memory=DeviceMemory(8000, 8000), origin="kvcache.toml, line 3"
        )
    first, *details = str(caught.value).split("\n")
    assert f"budget {budget}" in first
    assert '"720 KiB" or more, or a smaller block_size' in first
    assert "kvcache.toml, line 3" in first
    assert any("one block takes 737280 bytes" in line for line in details)
    assert any("0 tokens would fit" in line for line in details)
    assert (caught.value.key, caught.value.origin) == ("budget", "kvcache.toml, line 3")


def test_what_a_too_small_budget_is_told_to_give_is_enough():
    for needed in (999, 1025, 737281, 2**30 + 1, 123456789):
        with pytest.raises(ConfigError) as caught:
            Budget.parse("1 B").resolve(bytes_per_block=needed, block_size=1, device_memory=not_asked)
        advice = str(caught.value).split('"')[1]
        assert Budget.parse(advice).resolve(bytes_per_block=needed, block_size=1, device_memory=not_asked) == 1


@pytest.mark.parametrize("budget", [2**62, 2**62 + 1])
def test_more_blocks_than_can_be_numbered_are_refused(budget):
    with pytest.raises(ConfigError, match="at most 2147483647 blocks"):
        Budget.parse(budget).resolve(bytes_per_block=16, block_size=16, device_memory=not_asked)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * GIB // 2, "2.5 GiB")]
)
def test_bytes_are_shown_in_the_largest_unit(count, text):
    assert format_bytes(count) == text
