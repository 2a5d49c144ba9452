"""A backend's options, validated by its own model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from kvcache_core.config import CacheConfig
from kvcache_core.errors import OptionsError
from kvcache_core.options import validate_options
from kvcache_core.plugin import BackendDescriptor, BackendOptions


class Tier(BaseModel):
    size: int = Field(default=1, ge=1)
    label: str = ""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 16


class Options(BackendOptions):
    block_size: int = Field(default=16, ge=1, le=1024)
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    pinned: bool = False
    ratio: float = 0.5
    label: str = ""
    pages: int | Literal["auto"] = "auto"
    sizes: tuple[int, ...] = ()
    colour: Colour = Colour.RED
    level: Level = Level.LOW
    width: Literal[16, 32] = 16
    folder: Path = Path()
    tier: Tier = Tier()
    limit: int | None = None
    budget: int = 0

    @field_validator("budget", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return int(value.removesuffix("KiB")) * 1024 if isinstance(value, str) and value.endswith("KiB") else value


def backend(model: type[BaseModel] | str = Options) -> BackendDescriptor:
    return BackendDescriptor(
        name="cuda",
        interface=(1, 0),
        storage="a.b:C",
        summary="",
        placement="paged",
        devices=("cuda",),
        dtypes=("float16",),
        probe="a.b:c",
        options=model,
    )


def refused(raw: Mapping[str, Any], model: type[BaseModel] = Options, **how: Any) -> OptionsError:
    with pytest.raises(OptionsError) as caught:
        validate_options(backend(model), raw, **how)
    return caught.value


def accepted(raw: Mapping[str, Any], **how: Any) -> Any:
    return validate_options(backend(), raw, **how)


def test_several_problems_are_listed_word_for_word() -> None:
    error = refused({"blok_size": 32, "dtype": "float8"})
    assert str(error) == (
        "2 problems in the options of backend 'cuda'\n"
        "  options.blok_size : unknown option; did you mean 'block_size'?\n"
        "  options.dtype     : 'float8' is not one of 'float16', 'bfloat16', 'float32'\n"
        "  All options: kvcache show cuda"
    )
    assert error.problems == (
        ("options.blok_size", "unknown option; did you mean 'block_size'?"),
        ("options.dtype", "'float8' is not one of 'float16', 'bfloat16', 'float32'"),
    )
    assert error.backend == "cuda"


def test_a_single_problem_stands_in_the_first_line() -> None:
    assert str(refused({"blok_size": 32})).splitlines()[0] == (
        "a problem in the options of backend 'cuda': options.blok_size: unknown option; did you mean 'block_size'?"
    )


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"block_size": 0}, "options.block_size"),
        ({"sizes": [1, "x"]}, "options.sizes.1"),
        ({"tier": {"size": 0}}, "options.tier.size"),
        ({"tier": {"siz": 1}}, "options.tier.siz"),
        ({"tier": 3}, "options.tier"),
        ({"pages": "many"}, "options.pages"),
        ({"pages": [1]}, "options.pages"),
        ({"limit": "x"}, "options.limit"),
        ({"level": 2}, "options.level"),
    ],
)
def test_y4_paths_begin_with_options_and_end_where_the_user_wrote(raw: dict[str, Any], path: str) -> None:
    assert [each for each, _ in refused(raw).problems] == [path]


def test_the_members_of_a_union_make_one_problem() -> None:
    ((path, message),) = refused({"pages": "many"}).problems
    assert path == "options.pages"
    assert "'many' is not one of 'auto'" in message
    assert "valid integer" in message


@pytest.mark.parametrize("value", ["{}", "{0}", "%s", "}{", "{name!r}"])
def test_y5_braces_in_values_and_names_are_left_alone(value: str) -> None:
    assert repr(value) in str(refused({"dtype": value}))
    assert value in str(refused({value: 1}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", True),
        ("block_size", "32"),
        ("block_size", 32.0),
        ("block_size", 0.5),
        ("block_size", None),
        ("block_size", 2**63),
        ("block_size", float("nan")),
        ("block_size", -1),
        ("pinned", 1),
        ("pinned", "true"),
        ("ratio", "0.5"),
        ("ratio", True),
        ("label", 3),
        ("width", "16"),
        ("limit", 1.0),
    ],
)
def test_y6_values_are_taken_literally(key: str, value: Any) -> None:
    assert [path for path, _ in refused({key: value}).problems] == [f"options.{key}"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("block_size", "32", 32),
        ("pinned", "true", True),
        ("pinned", "off", False),
        ("ratio", "0.25", 0.25),
        ("label", "32", "32"),
        ("label", "true", "true"),
        ("pages", "auto", "auto"),
        ("pages", "7", 7),
        ("sizes", "[1, 2]", (1, 2)),
        ("colour", "blue", Colour.BLUE),
        ("level", "16", Level.HIGH),
        ("width", "32", 32),
        ("folder", "/tmp/x", Path("/tmp/x")),
        ("limit", "5", 5),
        ("limit", "null", None),
        ("tier", '{"size": 3}', Tier(size=3)),
        ("budget", "4KiB", 4096),
    ],
)
def test_y6_text_is_read_by_the_type_of_the_option(key: str, text: str, value: Any) -> None:
    assert getattr(accepted({key: text}, from_text=True), key) == value
    assert getattr(accepted({key: text}, from_text=[key]), key) == value


@pytest.mark.parametrize(("key", "text"), [("block_size", "many"), ("pinned", "maybe"), ("width", "17")])
def test_text_that_cannot_be_read_is_refused_in_the_users_words(key: str, text: str) -> None:
    assert text in str(refused({key: text}, from_text=True))


def test_only_the_named_keys_are_read_as_text() -> None:
    assert [path for path, _ in refused({"block_size": "8", "limit": "8"}, from_text=["limit"]).problems] == [
        "options.block_size"
    ]


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("sizes", [1, 2], (1, 2)),
        ("sizes", (1, 2), (1, 2)),
        ("colour", "blue", Colour.BLUE),
        ("colour", Colour.BLUE, Colour.BLUE),
        ("folder", "/tmp/x", Path("/tmp/x")),
        ("folder", Path("/tmp/x"), Path("/tmp/x")),
        ("ratio", 1, 1.0),
        ("tier", {"size": 2, "label": "x"}, Tier(size=2, label="x")),
        ("budget", "1KiB", 1024),
    ],
)
def test_what_a_file_or_a_program_can_say_is_accepted(key: str, given: Any, value: Any) -> None:
    assert getattr(accepted({key: given}), key) == value


def test_options_of_a_configuration_are_accepted_as_they_are() -> None:
    config = CacheConfig(options={"tier": {"size": 2}, "sizes": [1]})
    assert accepted(config.options).tier.size == 2


def test_nothing_given_means_the_defaults() -> None:
    assert accepted({}) == Options()


@pytest.mark.parametrize("value", [object(), int, lambda: 0])
def test_values_that_no_file_could_hold_are_refused(value: Any) -> None:
    ((path, message),) = refused({"label": value}).problems
    assert path == "options.label"
    assert "options are numbers, text, flags, lists and tables" in message


def test_a_mapping_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["tier"] = endless
    assert refused(endless).problems[0][0] == "options.tier"


@pytest.mark.parametrize("extra", ["ignore", "allow", "forbid"])
def test_y3_unknown_options_are_refused_whatever_the_model_says(extra: Any) -> None:
    class Loose(BaseModel):
        model_config = ConfigDict(extra=extra)
        size: int = 1

    assert refused({"siez": 2}, Loose).problems == (("options.siez", "unknown option; did you mean 'size'?"),)


def test_a_backend_without_options_says_so() -> None:
    assert "this backend has none" in str(refused({"size": 1}, BackendOptions))


def test_aliases_are_known_and_names_only_where_the_model_takes_them() -> None:
    class Aliased(BaseModel):
        size: int = Field(default=1, alias="blockSize")
        depth: int = Field(default=1, validation_alias=AliasChoices("depth", "levels"))

    given = {"blockSize": 3, "levels": 4}
    options: Any = validate_options(backend(Aliased), given)
    assert (options.size, options.depth) == (3, 4)
    assert [path for path, _ in refused({"size": 3}, Aliased).problems] == ["options.size"]
    text: Any = validate_options(backend(Aliased), {"blockSize": "3"}, from_text=True)
    assert text.size == 3


def test_a_missing_required_option_is_named() -> None:
    class Required(BackendOptions):
        endpoint: str

    assert refused({}, Required).problems == (("options.endpoint", "is missing"),)


def test_a_rule_across_options_is_reported_in_its_authors_words() -> None:
    class Ruled(BackendOptions):
        low: int = 1
        high: int = 2

        @model_validator(mode="after")
        def _ascending(self) -> Ruled:
            if self.low >= self.high:
                raise ValueError(f"low ({self.low}) must be less than high ({self.high})")
            return self

    assert refused({"low": 5}, Ruled).problems == (("options", "low (5) must be less than high (2)"),)


def test_long_values_are_cut() -> None:
    message = str(refused({"dtype": "x" * 10_000}))
    assert len(message) < 400


def test_the_model_may_be_an_import_path() -> None:
    options = validate_options(backend(f"{__name__}:Options"), {"block_size": 8}, model=Options)
    assert options == Options(block_size=8)
    assert validate_options(backend("kvcache_core.plugin:BackendOptions"), {}) == BackendOptions()


def test_y1_the_raw_options_are_what_a_configuration_stores() -> None:
    raw = {"block_size": 8, "anything": {"else": [1]}}
    config = CacheConfig(backend="elsewhere:thing", options=raw)
    assert config.to_dict()["options"] == raw


def test_the_validated_options_are_frozen() -> None:
    options = accepted({})
    with pytest.raises(ValueError, match="frozen"):
        options.block_size = 3
