"""What two prompts must have in common besides their tokens to share blocks."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_core import ConfigError, PrefixExplanation
from kvcache_core.prefix import PrefixKey

VALUES = st.one_of(
    st.none(), st.text(max_size=3), st.binary(max_size=3), st.integers(-300, 300), st.sampled_from([2**64, -(2**64)])
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "namespace": VALUES,
        "adapter": VALUES,
        "salt": VALUES,
        "request": st.one_of(st.none(), st.text(max_size=3)),
        "extra": st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
    },
)


def given_fields(fields: dict[str, Any]) -> list[Any]:
    """The fields that are given, each with its type, in one order."""
    plain = {(name, ""): value for name, value in fields.items() if name != "extra"}
    extra = {("extra", name): value for name, value in fields.get("extra", {}).items()}
    return sorted((name, type(value).__name__, value) for name, value in (plain | extra).items() if value is not None)


@given(FIELDS, FIELDS)
def test_keys_are_equal_exactly_if_all_given_fields_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    same = given_fields(one) == given_fields(other)
    assert (PrefixKey(**one) == PrefixKey(**other)) is same
    assert (PrefixKey(**one).encoded == PrefixKey(**other).encoded) is same
    assert PrefixKey(**one) == PrefixKey(**one)
    assert hash(PrefixKey(**one)) == hash(PrefixKey(**one))


def test_vllm_44701_equal_strings_in_different_fields_are_different_keys() -> None:
    keys = [
        PrefixKey(),
        *(PrefixKey(**{field: "X"}) for field in ("namespace", "adapter", "salt", "request")),
        *(PrefixKey(extra={name: "X"}) for name in ("namespace", "adapter", "salt", "request", "image", "")),
        *(PrefixKey(salt=value) for value in ("", "ab", b"ab", b"", 0, "0", b"0", 1, -1, "None")),
        PrefixKey(salt="a", adapter="b"),
        PrefixKey(salt="ab", adapter=""),
        PrefixKey(salt="", adapter="ab"),
        PrefixKey(extra={"a": "b", "c": "d"}),
        PrefixKey(extra={"a": "bc", "": "d"}),
        PrefixKey(extra={"ab": "c", "c": "d"}),
    ]
    for one, other in itertools.combinations(keys, 2):
        assert one != other
        assert one.encoded != other.encoded
    assert PrefixKey(salt=None) == PrefixKey()
    assert PrefixKey() != "a key"


def test_lmcache_3301_five_thousand_extra_keys_are_five_thousand_keys() -> None:
    keys = [PrefixKey(extra={"image": value}) for value in range(-2500, 2500)]
    keys += [PrefixKey(extra={"image": sign * 2**bits}) for bits in range(16, 4097, 17) for sign in (1, -1)]
    assert len({key.encoded for key in keys}) == len(keys)


def test_the_order_of_extra_keys_does_not_matter_and_later_changes_do_not_show() -> None:
    extra: dict[str, Any] = {"b": 1, "a": 2}
    key = PrefixKey(extra=extra)
    extra["c"] = 3
    assert key == PrefixKey(extra={"a": 2, "b": 1})
    with pytest.raises(TypeError):
        key.extra["d"] = 4  # type: ignore[index]


def test_salts_that_are_no_valid_unicode_are_accepted() -> None:
    assert PrefixKey(salt="\ud800") != PrefixKey(salt="\udfff")
    assert PrefixKey(extra={"\ud800": 1}) != PrefixKey(extra={"\udfff": 1})


@pytest.mark.parametrize("value", [True, 1.5, ["hunter2"], ("hunter2",), {"hunter2": 1}, object()])
@pytest.mark.parametrize("name", ["namespace", "adapter", "salt", "extra.image"])
def test_values_of_other_types_are_refused_without_showing_them(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"extra": {"image": value}} if name == "extra.image" else {name: value}
    with pytest.raises(ConfigError, match=rf"^{name} must be text, bytes, an int or None, not a \w+$") as caught:
        PrefixKey(**fields)
    assert caught.value.key == name
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("extra", [{1: "a"}, {b"image": "a"}, {None: 1}, [("image", "a")], "image"])
def test_extra_keys_must_be_named_by_text(extra: Any) -> None:
    with pytest.raises(ConfigError, match="mapping whose keys are text"):
        PrefixKey(extra=extra)


def test_a_salt_is_not_shown() -> None:
    assert "hunter2" not in repr(PrefixKey(salt="hunter2", adapter="lora"))
    assert "lora" in repr(PrefixKey(salt="hunter2", adapter="lora"))


def test_an_explanation_is_a_value() -> None:
    one = PrefixExplanation(num_tokens=4, reason="diverged", diverged_at=6, message="...")
    assert pickle.loads(pickle.dumps(one)) == one
    assert PrefixExplanation(num_tokens=4, reason="hit", message="...").diverged_at is None
    with pytest.raises(AttributeError):
        one.num_tokens = 5  # type: ignore[misc]
