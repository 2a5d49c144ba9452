import copy
import math
import pickle

import pytest

from kvcache_core.errors import ConfigError, ShapeError
from kvcache_core.geometry import DTYPE_SIZES, CacheGeometry, LayerGroup, LayerSpec

#: Values that a count must not take. None is left to the fields where it means something.
BAD_COUNTS = [0, -1, 0.5, 16.0, True, "16", 2**31, 2**63, math.nan, math.inf, [1], {}]
UNIFORM = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8}


def mixed(**changes):
    values = {
        "num_layers": 6,
        "groups": [
            {"layers": [3, 1], "num_kv_heads": 1, "head_dim": 16, "value_head_dim": 4},
            {"layers": [0, 2], "num_kv_heads": 2, "head_dim": 8, "window": 32},
        ],
        "shared": {5: 3},
    }
    return CacheGeometry(**{**values, **changes})


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize(
    "name", ["num_layers", "num_kv_heads", "head_dim", "value_head_dim", "window", "max_position_embeddings"]
)
def test_vllm_43496_a_count_that_is_none_is_refused_by_name(name, bad):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(**{**UNIFORM, name: bad})
    assert caught.value.key == name
    assert str(caught.value).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim"])
def test_vllm_43496_none_is_no_count(name):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(**{**UNIFORM, name: None})
    assert caught.value.key == name


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "value_head_dim", "window"])
def test_vllm_43496_a_bad_count_in_a_group_is_located(name, bad):
    group = {"layers": [0], "num_kv_heads": 2, "head_dim": 8, name: bad}
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(num_layers=1, groups=[group])
    assert caught.value.key == f"groups.0.{name}"


@pytest.mark.parametrize("bad", [-1, 0.5, 1.0, True, "x", None, 2**16, 2**63, math.nan], ids=repr)
def test_vllm_43496_a_bad_layer_number_is_located(bad):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(num_layers=1, groups=[{"layers": [bad], "num_kv_heads": 2, "head_dim": 8}])
    assert caught.value.key == "groups.0.layers.0"


@pytest.mark.parametrize("bad", [-1, 0.5, 1.0, True, "1", None, 2**63, math.nan], ids=repr)
def test_vllm_43496_a_bad_producer_is_located(bad):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(**UNIFORM, shared={3: bad})
    assert caught.value.key == "shared.3"


def test_more_layers_than_any_model_has_are_refused_at_once_instead_of_filling_the_memory():
    with pytest.raises(ConfigError, match="num_layers must be less than or equal to 65536"):
        CacheGeometry(num_layers=2**31 - 1, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("name", ["num_layers", "groups", "shared", "dtype"])
def test_vllm_43496_nothing_can_be_assigned_after_construction(name):
    geometry = CacheGeometry(**UNIFORM)
    before = getattr(geometry, name)
    with pytest.raises(ValueError, match="frozen"):
        setattr(geometry, name, 1)
    assert getattr(geometry, name) == before


def test_the_inside_of_a_geometry_is_frozen_too():
    shared = {5: 3}
    geometry = mixed(shared=shared)
    shared[4] = 3
    assert geometry.shared == {5: 3}
    with pytest.raises(TypeError):
        geometry.shared[4] = 3
    with pytest.raises(ValueError, match="frozen"):
        geometry.groups[0].window = 7


def test_all_problems_are_reported_at_once_each_under_the_key_the_user_wrote():
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(num_layers=0, num_kv_heads=True, head_dim="16", windw=3)
    assert str(caught.value).split("\n") == [
        "4 problems in the configuration; fix num_layers, num_kv_heads, head_dim, windw",
        "  num_layers must be greater than or equal to 1, not 0",
        "  num_kv_heads must be a valid integer, not True",
        "  head_dim must be a valid integer, not '16'",
        "  windw is not a known key; did you mean 'window'?",
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_key_value_heads", "num_kv_heads"),
        ("num_hidden_layers", "num_layers"),
        ("sliding_window", "window"),
        ("torch_dtype", "dtype"),
        ("head_dims", "head_dim"),
    ],
)
def test_a_name_from_elsewhere_or_a_slip_gets_a_suggestion(wrong, right):
    with pytest.raises(ConfigError, match=f"{wrong} is not a known key; did you mean '{right}'"):
        CacheGeometry(**UNIFORM, **{wrong: 3})


def test_a_uniform_model_is_one_group_of_all_layers():
    geometry = CacheGeometry(**UNIFORM, window=5)
    assert geometry == CacheGeometry.uniform(4, 2, 8, window=5)
    assert geometry.groups == (LayerGroup(layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=8, window=5),)
    assert geometry.single_spec == LayerSpec(num_kv_heads=2, head_dim=8, value_head_dim=8, window=5)


def test_uniform_keys_leave_out_the_layers_that_share():
    geometry = CacheGeometry(**UNIFORM, shared={3: 1})
    assert geometry.caching_layers == (0, 1, 2)
    assert geometry.producer(3) == 1
    assert geometry.layer_spec(3) == geometry.layer_spec(1)


def test_the_value_head_dim_follows_the_head_dim_unless_given():
    assert LayerSpec(num_kv_heads=1, head_dim=8).value_head_dim == 8
    assert LayerSpec(num_kv_heads=1, head_dim=8, value_head_dim=None).value_head_dim == 8
    assert LayerSpec(num_kv_heads=1, head_dim=8, value_head_dim=4).value_head_dim == 4


def test_a_mixed_model_answers_per_layer():
    geometry = mixed()
    assert geometry.caching_layers == (0, 1, 2, 3)
    assert [geometry.producer(layer) for layer in range(6)] == [0, 1, 2, 3, None, 3]
    assert geometry.layer_spec(4) is None
    assert geometry.layer_spec(5).value_head_dim == 4
    assert geometry.layer_spec(0).window == 32
    assert geometry.single_spec is None


def test_groups_that_differ_only_in_their_window_have_a_single_spec():
    groups = [
        {"layers": [0], "num_kv_heads": 2, "head_dim": 8, "window": 4},
        {"layers": [1], "num_kv_heads": 2, "head_dim": 8},
    ]
    assert CacheGeometry(num_layers=2, groups=groups).single_spec is not None


def test_the_order_in_which_groups_and_layers_are_written_does_not_matter():
    groups = [
        {"layers": [1, 3], "num_kv_heads": 1, "head_dim": 16, "value_head_dim": 4},
        {"layers": [2, 0], "num_kv_heads": 2, "head_dim": 8, "window": 32},
    ]
    assert mixed(groups=groups) == mixed(groups=groups[::-1]) == mixed()


@pytest.mark.parametrize("layer", [-1, 6, True, 1.0, "1", None])
def test_a_wrong_layer_number_is_a_shape_error(layer):
    with pytest.raises(ShapeError, match="from 0 to 5"):
        mixed().layer_spec(layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": []}, "no layer caches anything"),
        ({"groups": [{"layers": [0, 0], "num_kv_heads": 1, "head_dim": 1}]}, "twice"),
        ({"groups": [{"layers": [7], "num_kv_heads": 1, "head_dim": 1}]}, "layer 7 is in a group but num_layers is 6"),
        ({"groups": [{"layers": [], "num_kv_heads": 1, "head_dim": 1}]}, "at least 1 item"),
        ({"shared": {3: 1}}, "layer 3 both caches"),
        ({"shared": {5: 4}}, "layer 5 shares with layer 4, which caches nothing"),
        ({"shared": {9: 3}}, "layer 9 is shared but num_layers is 6"),
        ({"shared": {"x": 3}}, "shared.x"),
        ({"num_kv_heads": 3, "head_dim": 3}, "give either 'groups' or the uniform keys"),
    ],
)
def test_layers_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        mixed(**changes)


def test_a_layer_cannot_read_what_a_later_layer_will_write():
    groups = [{"layers": [1], "num_kv_heads": 1, "head_dim": 1}]
    with pytest.raises(ConfigError, match="layer 0 shares with layer 1, which comes after it"):
        CacheGeometry(num_layers=2, groups=groups, shared={0: 1})


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim"])
def test_half_a_uniform_model_names_the_missing_key(name):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(**{key: value for key, value in UNIFORM.items() if key != name})
    assert str(caught.value) == f"{name} is missing"


@pytest.mark.parametrize("dtype", [*DTYPE_SIZES, None])
def test_bytes_per_token_counts_k_and_v_of_the_caching_layers(dtype):
    size = DTYPE_SIZES[dtype or "float32"]
    assert mixed(dtype=dtype).bytes_per_token() == size * (2 * 1 * (16 + 4) + 2 * 2 * (8 + 8))
    assert mixed().bytes_per_token("int8") == 2 * 1 * (16 + 4) + 2 * 2 * (8 + 8)


@pytest.mark.parametrize(
    ("given", "suggested"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp8", "float8_e4m3fn"), ("flaot32", "float32")],
)
def test_a_dtype_by_another_name_gets_a_suggestion(given, suggested):
    with pytest.raises(ConfigError, match=f"not '{given}'; did you mean '{suggested}'"):
        CacheGeometry(**UNIFORM, dtype=given)


@pytest.mark.parametrize("bad", ["", "bfloat", 16, True, ["float32"], "int4"])
def test_a_wrong_dtype_is_refused(bad):
    with pytest.raises(ConfigError) as caught:
        CacheGeometry(**UNIFORM, dtype=bad)
    assert caught.value.key == "dtype"


def test_a_dtype_may_be_the_torch_dtype_itself():
    torch = pytest.importorskip("torch")
    assert CacheGeometry(**UNIFORM, dtype=torch.bfloat16).dtype == "bfloat16"
    assert CacheGeometry(**UNIFORM, dtype=str(torch.bfloat16)).dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"not torch.complex64"):
        CacheGeometry(**UNIFORM, dtype=torch.complex64)


@pytest.mark.parametrize("copied", [lambda g: pickle.loads(pickle.dumps(g)), copy.deepcopy, copy.copy])
def test_a_geometry_survives_pickling_and_copying(copied):
    geometry = mixed(dtype="bfloat16", model="m", max_position_embeddings=64)
    assert geometry.caching_layers  # cached values must not get in the way
    again = copied(geometry)
    assert again == geometry
    assert hash(again) == hash(geometry)
    assert again.producer(5) == 3


@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_dumped_geometry_reads_back_equal(mode):
    geometry = mixed(dtype="bfloat16")
    assert CacheGeometry(**geometry.model_dump(mode=mode)) == geometry
    assert CacheGeometry.model_validate_json(geometry.model_dump_json()) == geometry
