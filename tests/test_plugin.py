"""What a backend author imports and declares."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from kvcache_core import plugin
from kvcache_core.plugin import BackendDescriptor, BackendOptions, HostInfo

FIELDS: dict[str, Any] = {
    "name": "acme",
    "interface": (1, 0),
    "storage": "acme.storage:Store",
    "summary": "a backend",
    "placement": "paged",
    "devices": ("cpu",),
    "dtypes": ("float32",),
    "probe": "acme.probe:probe",
}


def describe(**changes: Any) -> BackendDescriptor:
    return BackendDescriptor(**(FIELDS | changes))


def test_p45_the_public_names_exist_and_are_sorted() -> None:
    assert sorted(plugin.__all__) == sorted(set(plugin.__all__))
    assert all(hasattr(plugin, name) for name in plugin.__all__)


def test_p29_p30_importing_it_imports_nothing_heavy() -> None:
    program = (
        "import sys, kvcache_core.plugin\n"
        "print([name for name in ('torch', 'numpy', 'importlib_metadata', 'typer', 'rich') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_lists_and_sets_become_what_the_fields_declare() -> None:
    descriptor = describe(
        devices=["cuda", "cpu"],
        dtypes=["float16"],
        block_sizes=[16, 256],
        capabilities=["swap", "export.dlpack"],
    )
    assert descriptor.devices == ("cuda", "cpu")
    assert descriptor.dtypes == ("float16",)
    assert descriptor.block_sizes == (16, 256)
    assert descriptor.capabilities == frozenset({"swap", "export.dlpack"})
    assert hash(descriptor) == hash(dataclasses.replace(descriptor))


class NotOptions:
    pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Acme"),
        ("name", "my_backend"),
        ("name", "auto"),
        ("name", ""),
        ("name", None),
        ("interface", "1.0"),
        ("interface", (1,)),
        ("interface", (1, 0, 0)),
        ("interface", (True, 0)),
        ("interface", (1, -1)),
        ("interface", [1, 0]),
        ("storage", "acme.storage"),
        ("storage", "acme.storage:"),
        ("storage", "acme storage:Store"),
        ("storage", NotOptions),
        ("summary", None),
        ("placement", "scattered"),
        ("devices", "cpu"),
        ("devices", ()),
        ("devices", ("cuda:0",)),
        ("devices", (1,)),
        ("devices", None),
        ("dtypes", ()),
        ("dtypes", "float32"),
        ("dtypes", ("float99",)),
        ("dtypes", ("torch.float32",)),
        ("options", NotOptions),
        ("options", BackendOptions()),
        ("options", "acme.options"),
        ("probe", None),
        ("probe", "acme.probe"),
        ("capabilities", "swap"),
        ("capabilities", ("teleport",)),
        ("capabilities", ("export.",)),
        ("priority", "10"),
        ("priority", True),
        ("priority", 1.5),
        ("block_sizes", (0,)),
        ("block_sizes", (16.0,)),
        ("block_sizes", (True,)),
        ("block_sizes", 16),
        ("default_block_size", 0),
        ("default_block_size", 24),
        ("default_block_size", True),
        ("default_block_size", "16"),
        ("round_trip_error", -0.1),
        ("round_trip_error", 1),
        ("round_trip_error", True),
        ("round_trip_error", float("nan")),
        ("round_trip_error", "0.01"),
    ],
)
def test_p10_a_slip_of_the_author_is_named_where_it_was_made(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"BackendDescriptor\.{field}\b"):
        describe(**{field: value})


def test_the_default_block_size_is_one_of_those_it_takes() -> None:
    assert describe(block_sizes=(24, 48), default_block_size=24).default_block_size == 24
    with pytest.raises(ValueError, match="default_block_size must be one of"):
        describe(block_sizes=(256,))


def test_p44_a_newer_interface_may_use_words_we_do_not_know() -> None:
    newer = describe(interface=(1, 9), capabilities=("teleport",), placement="spread", dtypes=("float4",))
    assert newer.interface == (1, 9)
    with pytest.raises(ValueError, match="name"):
        describe(interface=(1, 9), name="No Name")


@pytest.mark.parametrize("options", ["acme.options:Options", BackendOptions, BaseModel])
def test_options_may_be_a_model_or_its_path(options: Any) -> None:
    assert describe(options=options).options is options


def test_a_descriptor_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        describe().name = "other"  # type: ignore[misc]


def test_options_are_frozen_and_refuse_what_they_do_not_know() -> None:
    class Options(BackendOptions):
        size: int = 1

    with pytest.raises(ValidationError):
        Options(siez=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="frozen"):
        Options().size = 2


def test_the_host_is_described_by_its_interface() -> None:
    assert HostInfo().interface == plugin.INTERFACE_VERSION
