import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from kvcache_core.budget import Budget
from kvcache_core.config import CacheConfig, ConfigValues, PrefixCacheConfig, PressureThresholds
from kvcache_core.errors import ConfigError, KvCacheError
from kvcache_core.frozen import FrozenMapping
from kvcache_core.geometry import CacheGeometry

GEOMETRY = CacheGeometry.uniform(4, 2, 8, dtype="bfloat16", max_position_embeddings=4096)

#: A value other than the default for every key.
UNUSUAL: dict[str, Any] = {
    "backend": "acme-kvcache:cuda",
    "backend_order": ("cuda", "cpu"),
    "disable": ("metal",),
    "observers": ("acme",),
    "device": "cuda:1",
    "dtype": "float16",
    "allow_dtype_cast": True,
    "options": {"threads": 3, "nested": {"list": [1, {"x": None}]}},
    "geometry": GEOMETRY,
    "block_size": 64,
    "budget": "50%",
    "initial_blocks": 7,
    "max_sequence_length": 1234,
    "scrub_freed": True,
    "pressure": PressureThresholds(medium=0.1, high=0.2, critical=0.3),
    "prefix": PrefixCacheConfig(
        enabled=False,
        max_prefixes=3,
        min_prefix_length=32,
        prefix_ttl_seconds=60.0,
        enable_cross_request_sharing=False,
        namespace="weights-7",
        eviction_policy="priority",
    ),
}


def refused(**values) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**values)
    return caught.value


# -- values ------------------------------------------------------------------------------------------------


def test_every_key_has_a_value_and_the_seeds_defaults_hold():
    config = CacheConfig()
    assert config.budget == Budget("blocks", 1000)
    assert config.initial_blocks == 100
    assert (config.pressure.medium, config.pressure.high, config.pressure.critical) == (0.6, 0.8, 0.95)
    assert (config.backend, config.device, config.dtype, config.block_size) == ("auto", "auto", "auto", "auto")
    assert config.geometry is None


def test_mlx_lm_1392_the_unusual_values_of_these_tests_cover_every_key_and_differ_from_the_defaults():
    assert set(UNUSUAL) == set(CacheConfig.model_fields)
    config = CacheConfig(**UNUSUAL)
    assert all(getattr(config, name) != getattr(CacheConfig(), name) for name in CacheConfig.model_fields)


def test_the_types_of_the_constructors_arguments_cover_every_key():
    assert list(get_type_hints(ConfigValues)) == list(CacheConfig.model_fields)


@pytest.mark.parametrize("bad", [0, -1, 0.5, 16.0, True, "16", 2**31, 2**63, math.nan, None, [16]], ids=repr)
def test_vllm_43496_a_bad_block_size_is_refused_by_name(bad):
    error = refused(block_size=bad)
    assert error.key == "block_size"
    assert str(error).startswith('block_size must be a power of two from 1 to 65536 or "auto", not ')
    assert repr(bad) in str(error)


@pytest.mark.parametrize("bad", [3, 24, 100, 2**17])
def test_a_block_size_that_is_no_power_of_two_is_refused(bad):
    assert "power of two" in str(refused(block_size=bad))


@pytest.mark.parametrize("good", ["auto", *(2**n for n in range(17))])
def test_a_block_size_may_be_auto_or_any_power_of_two_up_to_65536(good):
    assert CacheConfig(block_size=good).block_size == good


def test_a_quoted_block_size_is_told_to_lose_its_quotes():
    assert "write the number without quotes" in str(refused(block_size="16"))


@pytest.mark.parametrize("bad", [0, -1, 0.5, 16.0, True, "16", 2**31, 2**63, math.nan, [16]], ids=repr)
@pytest.mark.parametrize("name", ["initial_blocks", "max_sequence_length"])
def test_vllm_43496_a_bad_count_is_refused_by_name(name, bad):
    error = refused(**{name: bad})
    assert error.key == name
    assert str(error).startswith(f"{name} must be ")


@pytest.mark.parametrize("bad", [0, 0.0, -0.1, 1.1, True, "0.5", None, math.nan, math.inf], ids=repr)
@pytest.mark.parametrize("name", ["medium", "high", "critical"])
def test_vllm_43496_a_bad_threshold_is_refused_by_name(name, bad):
    assert refused(pressure={name: bad}).key == f"pressure.{name}"


@pytest.mark.parametrize("bad", [0, 1, "true", "yes", None, 1.0])
@pytest.mark.parametrize("name", ["allow_dtype_cast", "scrub_freed"])
def test_vllm_43496_a_switch_is_true_or_false_and_nothing_else(name, bad):
    assert refused(**{name: bad}).key == name


@pytest.mark.parametrize("bad", [0, -1, True, None, math.nan, "lots", 2**63], ids=repr)
def test_vllm_43496_a_bad_budget_is_refused_by_name(bad):
    error = refused(budget=bad)
    assert error.key == "budget"
    assert str(error).startswith("budget must be ")


@pytest.mark.parametrize(
    "thresholds", [{"medium": 0.8}, {"high": 0.6}, {"critical": 0.5}, {"medium": 0.9, "high": 0.85}]
)
def test_thresholds_must_ascend(thresholds):
    error = refused(pressure=thresholds)
    assert error.key == "pressure"
    assert "must ascend" in str(error)


@pytest.mark.parametrize("bad", ["", " ", "a b", "a:b:c", ":a", "a:", 3, None, ["cpu"]])
def test_a_bad_backend_name_is_refused(bad):
    assert refused(backend=bad).key == "backend"


@pytest.mark.parametrize("bad", ["cuda", "cuda,cpu", [""], [3], {"cuda"}, {"cuda": 1}, None, 3], ids=repr)
@pytest.mark.parametrize("name", ["disable", "backend_order", "observers"])
def test_a_list_of_names_is_a_list_and_keeps_its_order(name, bad):
    assert refused(**{name: bad}).key == name
    assert getattr(CacheConfig(**{name: [" b ", "a"]}), name) == ("b", "a")


@pytest.mark.parametrize("bad", ["", "gpu 0", "cuda:", "cuda:x", "CUDA", 0, None])
def test_a_bad_device_is_refused(bad):
    assert refused(device=bad).key == "device"


def test_device_and_dtype_may_be_torchs_own_objects():
    torch = pytest.importorskip("torch")
    config = CacheConfig(device=torch.device("cuda", 1), dtype=torch.float16)
    assert (config.device, config.dtype) == ("cuda:1", "float16")


@pytest.mark.parametrize("bad", ["bf16", "float", "auto ", 16, None])
def test_a_bad_dtype_is_refused(bad):
    assert refused(dtype=bad).key == "dtype"


@pytest.mark.parametrize("bad", [None, "x", [1], {1: 2}])
def test_options_are_a_table_with_text_keys(bad):
    assert refused(options=bad).key == "options"


def test_geometry_may_be_given_as_a_table_and_is_checked_there():
    assert CacheConfig(geometry={"num_layers": 4, "num_kv_heads": 2, "head_dim": 8}).geometry.num_layers == 4
    error = refused(geometry={"num_layers": 4, "num_kv_heads": 0, "head_dim": 8})
    assert str(error) == "geometry.num_kv_heads must be greater than or equal to 1, not 0 (argument)"


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("blok_size", "block_size"),
        ("block-size", "block_size"),
        ("max_blocks", "budget"),
        ("gpu_memory_utilization", "budget"),
        ("max_model_len", "max_sequence_length"),
        ("torch_dtype", "dtype"),
        ("Backend", "backend"),
    ],
)
def test_mlx_lm_1392_an_unknown_key_is_refused_with_a_suggestion(wrong, right):
    error = refused(**{wrong: 1})
    assert error.key == wrong
    assert str(error) == f"{wrong} is not a known key; did you mean '{right}'? (argument)"


def test_a_key_like_no_other_is_refused_with_all_keys():
    assert "the keys are backend, backend_order, disable, observers" in str(refused(zzz=1))


def test_an_unknown_nested_key_is_refused_with_a_suggestion_from_its_own_table():
    assert str(refused(pressure={"hihg": 0.5})).startswith("pressure.hihg is not a known key; did you mean 'high'?")


def test_all_problems_are_reported_at_once():
    error = refused(block_size=0, budget="4 apples", bakend="cpu")
    first, *details = str(error).split("\n")
    assert first == "3 problems in the configuration; fix block_size, budget, bakend"
    assert len(details) == 3
    assert all(line.startswith("  ") for line in details)


@pytest.mark.parametrize("value", ["{}", "{0}", "{budget}", "%s", "a\nb"])
def test_braces_and_other_odd_characters_in_a_value_are_shown_as_they_are(value):
    assert repr(value) in str(refused(dtype=value))


def test_a_very_long_value_is_cut_in_the_message():
    assert len(str(refused(backend="x y" * 1000)).split("\n")[0]) < 250


@pytest.mark.parametrize("build", [CacheConfig, lambda **v: CacheConfig.model_validate(v)])
def test_a_refusal_is_a_config_error_and_a_value_error_that_pickles(build):
    with pytest.raises(ConfigError) as caught:
        build(block_size=0)
    error = caught.value
    assert isinstance(error, KvCacheError)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key, again.origin) == (str(error), "block_size", "argument" if error.origin else None)


# -- frozen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CacheConfig.model_fields)
def test_vllm_43496_no_key_can_be_assigned_after_construction(name):
    config = CacheConfig()
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, name, UNUSUAL[name])
    assert config == CacheConfig()


def test_options_are_a_copy_and_cannot_be_changed_at_any_depth():
    options = {"a": {"b": [1]}}
    config = CacheConfig(options=options)
    options["a"]["b"].append(2)
    options["c"] = 3
    assert config.options == {"a": {"b": (1,)}}
    with pytest.raises(TypeError):
        config.options["c"] = 3
    with pytest.raises(TypeError):
        config.options["a"]["b"] = 3
    assert isinstance(config.options, FrozenMapping)


@pytest.mark.parametrize(
    "copied",
    [
        lambda c: pickle.loads(pickle.dumps(c)),
        copy.copy,
        copy.deepcopy,
        lambda c: c.model_copy(),
        lambda c: c.replace(),
    ],
)
def test_a_configuration_survives_pickling_and_copying_with_its_origins(copied, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("block_size = 32")
    config = CacheConfig.load(path, environ={"KVCACHE_BUDGET": "1 GiB"}, **{**UNUSUAL, "block_size": 64})
    again = copied(config)
    assert again == config
    assert list(again.explain()) == list(config.explain())


def test_origins_take_no_part_in_equality_or_hash():
    from_argument = CacheConfig(backend="cpu")
    from_environment = CacheConfig.load(environ={"KVCACHE_BACKEND": "cpu"})
    assert from_argument == from_environment
    assert hash(from_argument) == hash(from_environment)
    assert from_argument != CacheConfig()
    assert CacheConfig(backend="auto") == CacheConfig()
    assert CacheConfig() != "auto"


# -- copies with changes -----------------------------------------------------------------------------------


def test_replace_validates_and_keeps_the_other_origins():
    config = CacheConfig.load(environ={"KVCACHE_BUDGET": "1 GiB", "KVCACHE_BLOCK_SIZE": "32"})
    changed = config.replace(block_size=64)
    assert (changed.block_size, changed.budget) == (64, config.budget)
    assert changed.origin("block_size") == "argument"
    assert changed.origin("budget") == "environment variable KVCACHE_BUDGET"
    assert changed.origin("device") == "default"
    with pytest.raises(ConfigError, match="block_size must be"):
        config.replace(block_size=0)


def test_replace_names_the_origin_of_an_old_value_that_a_new_one_contradicts(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[pressure]\nmedium = 0.7\n")
    config = CacheConfig.load(path, environ={})
    with pytest.raises(ConfigError) as caught:
        config.replace(pressure={"medium": 0.7, "high": 0.5})
    assert caught.value.origin == "argument"


def test_replace_takes_a_whole_table():
    config = CacheConfig(options={"a": 1, "b": 2})
    assert config.replace(options={"c": 3}).options == {"c": 3}


def test_pydantics_own_way_to_change_a_copy_validates_too():
    config = CacheConfig()
    assert config.model_copy(update={"block_size": 32}).block_size == 32
    with pytest.raises(ConfigError):
        config.model_copy(update={"block_size": 0})


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace is new in Python 3.13")
def test_copy_replace_validates_too():
    assert copy.replace(CacheConfig(), block_size=32).block_size == 32
    with pytest.raises(ConfigError):
        copy.replace(CacheConfig(), block_size=0)


def test_a_configuration_without_geometry_can_be_completed_later():
    config = CacheConfig(budget="50%")
    assert config.geometry is None
    assert config.with_geometry(GEOMETRY) == CacheConfig(budget="50%", geometry=GEOMETRY)


# -- written down ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, UNUSUAL, *({name: value} for name, value in UNUSUAL.items())], ids=list)
def test_a_configuration_written_down_reads_back_equal(values):
    config = CacheConfig(**values)
    assert CacheConfig(**config.to_dict()) == config
    assert CacheConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert CacheConfig(**config.model_dump()) == config
    assert CacheConfig.model_validate_json(config.model_dump_json()) == config


def test_to_dict_holds_only_plain_values_and_no_none_but_inside_options():
    plain = CacheConfig(**UNUSUAL).to_dict()

    def check(value, inside_options=False):
        assert type(value) in (dict, list, str, int, float, bool) or inside_options
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            check(inner, inside_options or key == "options")

    check(plain)
    assert plain["options"] == {"threads": 3, "nested": {"list": [1, {"x": None}]}}
    assert "geometry" not in CacheConfig().to_dict()


# -- import ------------------------------------------------------------------------------------------------


def test_importing_and_loading_a_configuration_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from kvcache_core.config import CacheConfig; "
        "CacheConfig.from_pretrained_config({'num_hidden_layers': 2, 'hidden_size': 8, 'num_attention_heads': 2}); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYDANTIC_DISABLE_PLUGINS": "__all__"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_the_environment_is_read_when_a_configuration_is_loaded_and_never_else(monkeypatch):
    monkeypatch.setenv("KVCACHE_BACKEND", "first")
    assert CacheConfig().backend == "auto"
    assert CacheConfig.load().backend == "first"
    monkeypatch.setenv("KVCACHE_BACKEND", "second")
    assert CacheConfig.load().backend == "second"


# -- the schema --------------------------------------------------------------------------------------------


def _described(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = []
    for name, field in schema.get("properties", {}).items():
        if isinstance(field, dict):
            found.append((f"{path}{name}", field))
            found += _described(field, f"{path}{name}.")
    for name, definition in schema.get("$defs", {}).items():
        found += _described(definition, f"{name}.")
    return found


def test_every_key_in_the_schema_has_a_description():
    fields = _described(CacheConfig.json_schema())
    assert {name for name, _ in fields} >= {*CacheConfig.model_fields, "CacheGeometry.head_dim", "LayerGroup.layers"}
    assert [name for name, field in fields if not field.get("description")] == []


def test_the_schema_is_plain_json_names_its_dialect_and_closes_every_table():
    schema = json.loads(json.dumps(CacheConfig.json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"]
    tables = [schema, *schema["$defs"].values()]
    assert [table.get("title") for table in tables if table.get("additionalProperties") is not False] == []
    assert "$schema" in schema["properties"]


def _accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON schema that the keys of the top level use; it has no references."""
    types = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": (list, tuple),
        "object": dict,
    }
    if "anyOf" in schema:
        return any(_accepts(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"] and not isinstance(value, bool)
    wanted = types[schema["type"]] if "type" in schema else object
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return False
    if isinstance(value, str) and "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        within = value >= schema.get("minimum", -math.inf) and value <= schema.get("maximum", math.inf)
        return (
            within
            and value > schema.get("exclusiveMinimum", -math.inf)
            and value < schema.get("exclusiveMaximum", math.inf)
        )
    return True


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key, value in UNUSUAL.items() if key not in ("geometry", "pressure", "prefix", "options")),
        *(("budget", value) for value in ("4GiB", "512 MiB", "2GB", "1000 blocks", "1 token", "50%", 0.5, 1024)),
        *(("budget", value) for value in ("4 apples", "", "1000", 0, True, 1.5, "1.5 blocks", "4G")),
        *(("block_size", value) for value in (1, 16, 0, 3, True, "auto", "16")),
        *(("backend", value) for value in ("auto", "cpu", "dist:cpu", "", "a b", "a:b:c")),
        *(("device", value) for value in ("auto", "cuda:0", "cuda:", "CUDA", "")),
        *(("dtype", value) for value in ("auto", "bfloat16", "bf16", "")),
        *(("initial_blocks", value) for value in (1, 0, True, 2**31)),
        *(("disable", value) for value in ([], ["cuda"], "cuda")),
        *(("scrub_freed", value) for value in (True, 1, "true")),
    ],
    ids=str,
)
def test_an_editor_with_the_schema_accepts_exactly_what_the_configuration_accepts(key, value):
    schema = CacheConfig.json_schema()["properties"][key]
    try:
        CacheConfig(**{key: value})
        accepted = True
    except ConfigError:
        accepted = False
    assert _accepts(schema, value) == accepted


def test_the_defaults_in_the_schema_are_the_defaults():
    properties = CacheConfig.json_schema()["properties"]
    plain = CacheConfig().to_dict()
    given = {name: field["default"] for name, field in properties.items() if "default" in field}
    assert given == {name: plain.get(name) for name in given}
    assert set(properties) - set(given) == {"options", "$schema"}
