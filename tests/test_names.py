"""Names in canonical form."""

from __future__ import annotations

import pytest

from kvcache_core.names import Request, canonical, device_fits, name_problem, parse_request


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("cuda", Request(None, "cuda")),
        (" CUDA ", Request(None, "cuda")),
        ("KVP.Cuda:My_Name", Request("kvp-cuda", "my-name")),
        ("kvcache-cuda : cuda", Request("kvcache-cuda", "cuda")),
        (":cuda", Request(None, "cuda")),
        ("a:b:c", Request("a:b", "c")),
        ("", Request(None, "")),
    ],
)
def test_a_request_is_a_name_or_a_distribution_and_a_name(text: str, request_: Request) -> None:
    assert parse_request(text) == request_


def test_canonical_is_idempotent() -> None:
    for name in ["A__b..C", "-x-", "a-b"]:
        assert canonical(canonical(name)) == canonical(name)


@pytest.mark.parametrize("name", ["cuda", "My_Backend", "a1-b2", "A.B"])
def test_names_a_backend_can_have(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", ["", "auto", "Auto", "1a", "a b", "-a", "a-", "\u212a", "a\nb", "é"])
def test_names_a_backend_cannot_have(name: str) -> None:
    assert name_problem(name)


@pytest.mark.parametrize(
    ("asked", "offered", "fits"),
    [
        ("auto", "mps", True),
        ("cuda", "cuda:0", True),
        ("cuda", "cuda:3", True),
        ("cuda:3", "cuda:3", True),
        ("cuda:1", "cuda:0", False),
        ("cpu:0", "cpu", True),
        ("cpu:1", "cpu", False),
        ("cpu:x", "cpu", False),
        ("cpu", "cuda:0", False),
        ("cud", "cuda:0", False),
    ],
)
def test_a_device_fits_what_names_it_or_its_type(asked: str, offered: str, fits: bool) -> None:
    assert device_fits(asked, offered) is fits
