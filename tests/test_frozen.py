import copy
import pickle

import pytest

from kvcache_core.frozen import FrozenMapping, freeze, thaw


def test_a_frozen_mapping_is_a_copy():
    original = {"a": 1}
    frozen = FrozenMapping(original)
    original["a"] = 2
    assert frozen["a"] == 1


def test_a_frozen_mapping_cannot_be_changed():
    frozen = FrozenMapping({"a": 1})
    with pytest.raises(TypeError):
        frozen["a"] = 2
    with pytest.raises(TypeError):
        del frozen["a"]


def test_a_frozen_mapping_equals_a_dict_of_the_same_items_and_keeps_their_order():
    assert FrozenMapping({"b": 1, "a": 2}) == {"a": 2, "b": 1}
    assert list(FrozenMapping({"b": 1, "a": 2})) == ["b", "a"]
    assert FrozenMapping() == {}


def test_equal_frozen_mappings_have_equal_hashes():
    assert hash(FrozenMapping({"a": 1, "b": 2})) == hash(FrozenMapping({"b": 2, "a": 1}))


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.copy, copy.deepcopy])
def test_a_frozen_mapping_survives_pickling_and_copying(copied):
    frozen = freeze({"a": {"b": [1, {"c": 2}]}})
    again = copied(frozen)
    assert again == frozen
    assert isinstance(again["a"], FrozenMapping)


def test_freezing_reaches_every_depth_and_thawing_undoes_it():
    plain = {"a": {"b": [1, {"c": [2]}]}, "d": "text"}
    frozen = freeze(plain)
    plain["a"]["b"][1]["c"].append(3)
    assert frozen["a"]["b"][1]["c"] == (2,)
    assert thaw(frozen) == {"a": {"b": [1, {"c": [2]}]}, "d": "text"}
    assert type(thaw(frozen)["a"]) is dict
