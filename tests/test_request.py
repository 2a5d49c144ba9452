"""Requests for new sequences."""

from __future__ import annotations

import dataclasses
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from kvcache_core import AllocationRequest, CacheGeometry, ConfigError, ShapeError
from kvcache_core.request import token_array
from tests.caches import MIXED

# -- token ids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        (i for i in (1, 2)),
        {1: "a", 2: "b"},
        array("q", [1, 2]),
        array("B", [1, 2]),
        np.array([1, 2], dtype=np.int32),
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor([[0, 1], [0, 2]])[:, 1],
        memoryview(array("i", [1, 2])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_come_in_any_flat_form(ids: Any) -> None:
    assert token_array(ids) == array("q", [1, 2])


def test_token_ids_may_be_negative_or_empty_and_64_bits_long() -> None:
    assert token_array([]) == array("q")
    assert list(token_array([-(2**63), 2**63 - 1])) == [-(2**63), 2**63 - 1]


@pytest.mark.parametrize(
    "ids",
    [
        [1.0],
        ["a"],
        "ab",
        b"01234567",
        bytearray(8),
        [None],
        [[1]],
        5,
        None,
        [2**63],
        [10**5000],
        torch.tensor([[1]]),
        torch.tensor(1),
        torch.tensor([1.0]),
        np.array([0.5]),
        [1] * 10**5 + ["a"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_in_one_short_line(ids: Any) -> None:
    with pytest.raises(ShapeError, match=r"^token ids must be a flat sequence of 64-bit ints, not ") as caught:
        token_array(ids)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250


# -- requests ------------------------------------------------------------------------------------------------


def test_a_request_is_a_value() -> None:
    ids = [1, 2, 3]
    request = AllocationRequest(token_ids=ids, request_id="chat")
    ids.append(4)
    assert list(request.token_ids) == [1, 2, 3]
    assert request == AllocationRequest(token_ids=(1, 2, 3), request_id="chat")
    assert pickle.loads(pickle.dumps(request)) == request
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.token_ids = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        AllocationRequest([1])  # type: ignore[misc]


def test_room_is_asked_for_by_the_longer_of_prompt_and_number() -> None:
    assert AllocationRequest().initial_tokens == 0
    assert AllocationRequest(token_ids=[1, 2]).initial_tokens == 2
    assert AllocationRequest(token_ids=[1, 2], num_tokens=1).initial_tokens == 2
    assert AllocationRequest(token_ids=[1, 2], num_tokens=5).initial_tokens == 5


@pytest.mark.parametrize("value", [-1, True, 1.5, "3", [1], 10**5000], ids=type)
@pytest.mark.parametrize("name", ["num_tokens", "max_sequence_length", "num_layers", "num_heads", "head_dim"])
def test_numbers_of_a_request_are_counts(name: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=f"^{name} must be an int of at least [01] that fits 64 bits, not "):
        AllocationRequest(**{name: value})


@pytest.mark.parametrize("name", ["max_sequence_length", "num_layers", "num_heads", "head_dim"])
def test_only_the_number_of_tokens_may_be_zero(name: str) -> None:
    AllocationRequest(num_tokens=0)
    with pytest.raises(ShapeError, match=name):
        AllocationRequest(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_is_an_int(priority: Any) -> None:
    with pytest.raises(ShapeError, match=r"^priority must be an int, not "):
        AllocationRequest(priority=priority)
    assert AllocationRequest(priority=-5).priority == -5


@pytest.mark.parametrize("name", ["", 3, b"chat", ["chat"], True])
def test_a_request_id_is_a_string(name: Any) -> None:
    with pytest.raises(ShapeError, match=r"^request_id must be a string with at least one character, not "):
        AllocationRequest(request_id=name)


def test_a_dtype_is_torchs_or_its_name() -> None:
    for dtype in ("bfloat16", torch.bfloat16):
        assert AllocationRequest(dtype=dtype).dtype == "bfloat16"
    with pytest.raises(ShapeError, match="did you mean 'bfloat16'"):
        AllocationRequest(dtype="bf16")


@pytest.mark.parametrize("dtype", ["int64", "bfloat", torch.int32, 16, ["float32"]])
def test_a_dtype_that_no_cache_stores_is_refused(dtype: Any) -> None:
    with pytest.raises(ShapeError, match=r"^dtype must be one of .*'bfloat16'"):
        AllocationRequest(dtype=dtype)
    with pytest.raises(ShapeError, match=r"^dtype must be one of"):
        AllocationRequest(num_tokens=1).estimated_memory_bytes(CacheGeometry.uniform(1, 1, 1), dtype)


def test_memory_is_estimated_from_the_geometry_or_the_request_alone() -> None:
    geometry = CacheGeometry.uniform(3, 2, 8)
    request = AllocationRequest(num_tokens=10)
    assert request.estimated_memory_bytes(geometry) == 10 * 3 * 2 * 16 * 4
    assert request.estimated_memory_bytes(geometry, "bfloat16") == 10 * 3 * 2 * 16 * 2
    assert request.estimated_memory_bytes(CacheGeometry.uniform(3, 2, 8, dtype="float16")) == 10 * 3 * 2 * 16 * 2
    assert request.estimated_memory_bytes(MIXED) == 10 * (2 * 2 * 16 + 10) * 4
    alone = AllocationRequest(num_tokens=10, num_layers=3, num_heads=2, head_dim=8, dtype="float16")
    assert alone.estimated_memory_bytes() == 10 * 3 * 2 * 16 * 2
    assert alone.estimated_memory_bytes(dtype="float32") == 10 * 3 * 2 * 16 * 4
    assert AllocationRequest().estimated_memory_bytes(geometry) == 0


@pytest.mark.parametrize("missing", ["num_layers", "num_heads", "head_dim"])
def test_an_estimate_needs_every_number(missing: str) -> None:
    numbers = {"num_layers": 3, "num_heads": 2, "head_dim": 8}
    del numbers[missing]
    with pytest.raises(ConfigError, match="needs a geometry, or num_layers, num_heads and head_dim"):
        AllocationRequest(num_tokens=1, **numbers).estimated_memory_bytes()


# -- ids and records -----------------------------------------------------------------------------------------
