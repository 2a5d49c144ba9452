from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import Field, model_validator

from kvcache_core.errors import ConfigError
from kvcache_core.validation import FrozenModel, Problem, annotation_at, config_error, did_you_mean, is_array, show


class Leaf(FrozenModel):
    size: int = Field(default=1, strict=True, ge=1)
    free: Mapping[str, int] = Field(default_factory=dict)


class Tree(FrozenModel):
    name: str = "tree"
    leaf: Leaf = Leaf()
    maybe: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()

    @model_validator(mode="after")
    def _no_rotten_trees(self) -> "Tree":
        if self.name == "rotten":
            raise ValueError("must be sound")
        return self


def refusal(**values) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Tree(**values)
    return caught.value


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"leaf": {"size": 0}}, "leaf.size", "leaf.size must be greater than or equal to 1, not 0"),
        ({"leaf": {"size": "1"}}, "leaf.size", "leaf.size must be a valid integer, not '1'"),
        ({"maybe": {"sise": 1}}, "maybe.sise", "maybe.sise is not a known key; did you mean 'size'?"),
        ({"leaves": [{}, {"size": True}]}, "leaves.1.size", "leaves.1.size must be a valid integer, not True"),
        ({"leaves": [{"sise": 1}]}, "leaves.0.sise", "leaves.0.sise is not a known key; did you mean 'size'?"),
        ({"name": "rotten"}, None, "must be sound"),
        ({"leaf": 3}, "leaf", "leaf must be a valid dictionary or instance of Leaf, not 3"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_whole_key_and_the_users_value(values, key, message):
    error = refusal(**values)
    assert (str(error), error.key, error.origin) == (message, key, None)


@pytest.mark.parametrize(
    "build",
    [lambda: Tree(name=3), lambda: Tree.model_validate({"name": 3}), lambda: Tree.model_validate_json('{"name": 3}')],
)
def test_every_way_to_build_a_model_refuses_alike(build):
    with pytest.raises(ConfigError, match="name must be a valid string, not 3"):
        build()


def test_several_problems_are_one_error_whose_first_line_names_the_keys():
    error = config_error([Problem("a", "must be 1, not 2", "argument"), Problem("b", "no such thing")])
    assert str(error) == (
        "2 problems in the configuration; fix a, b\n  a must be 1, not 2 (argument)\n  b: no such thing"
    )
    assert (error.key, error.origin) == ("a", "argument")


def test_a_first_line_names_a_handful_of_keys_at_most():
    first = str(config_error([Problem(f"key{n}", "is missing") for n in range(50)])).split("\n")[0]
    assert first == "50 problems in the configuration; fix key0, key1, key2, key3, key4, ..."


@pytest.mark.parametrize(
    ("path", "annotation"),
    [
        (("name",), str),
        (("leaf", "size"), int),
        (("maybe", "size"), int),
        (("leaves", 0, "size"), int),
        (("leaf", "free", "anything"), Any),
        (("leaf", "free", "a", "b"), Any),
        (("nome",), None),
        (("name", "x"), None),
        (("leaves", "size"), None),
        (("leaves", 0, "sise"), None),
    ],
)
def test_the_annotation_at_a_path_is_none_where_there_is_no_such_key(path, annotation):
    assert annotation_at(Tree, path) is annotation


def test_arrays_are_told_from_tables():
    assert is_array(annotation_at(Tree, ("leaves",)))
    assert not is_array(annotation_at(Tree, ("maybe",)))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("blok_size", "block_size"), ("BLOCK-SIZE", "block_size"), ("gpu", "cuda"), ("zzz", None), ("", None)],
)
def test_an_alias_comes_before_the_closest_spelling(name, meant):
    assert did_you_mean(name, ["block_size", "cpu", "xpu"], {"gpu": "cuda"}) == meant


def test_values_are_shown_whole_where_they_are_short_and_cut_where_they_are_long():
    class Unprintable:
        def __repr__(self):
            raise RuntimeError

    assert show("a{0}%s") == "'a{0}%s'"
    assert len(show("x" * 1000)) == 60
    assert show(10**5000) == "an integer of 16610 bits"
    assert "\n" not in show(Leaf) + show("a\nb")
    assert "Unprintable" in show(Unprintable())
