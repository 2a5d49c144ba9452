import warnings

import pytest

from kvcache_core.budget import Budget
from kvcache_core.config import CacheConfig, PressureThresholds
from kvcache_core.config_sources import parse_text
from kvcache_core.errors import ConfigError, ConfigWarning
from kvcache_core.geometry import CacheGeometry

GEOMETRY = CacheGeometry.uniform(2, 2, 8)
MODEL = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "dtype": "float16"}


def load(_path=None, **environ) -> CacheConfig:
    return CacheConfig.load(_path, environ={f"KVCACHE_{name}": value for name, value in environ.items()})


# -- precedence --------------------------------------------------------------------------------------------


def test_argument_before_environment_before_file_before_default(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("block_size = 2\nbudget = '2 blocks'\ninitial_blocks = 2\n")
    environ = {"KVCACHE_BLOCK_SIZE": "4", "KVCACHE_BUDGET": "4 blocks"}
    config = CacheConfig.load(path, environ=environ, block_size=8)
    assert (config.block_size, config.budget.amount, config.initial_blocks) == (8, 4, 2)
    assert config.max_sequence_length is None
    assert [config.origin(key) for key in ("block_size", "budget", "initial_blocks", "max_sequence_length")] == [
        "argument",
        "environment variable KVCACHE_BUDGET",
        f"{path}, line 3",
        "default",
    ]


def test_tables_merge_key_by_key_over_all_sources(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("[options]\na = 1\nb = 1\nc = 1\nd = { x = 1, y = 1 }\n[pressure]\nmedium = 0.1\nhigh = 0.2\n")
    environ = {"KVCACHE_OPTIONS__B": "2", "KVCACHE_OPTIONS__D__Y": "2", "KVCACHE_PRESSURE__HIGH": "0.3"}
    config = CacheConfig.load(path, environ=environ, options={"c": 3, "e": 3}, pressure={"critical": 0.9})
    assert config.options == {"a": 1, "b": 2, "c": 3, "d": {"x": 1, "y": 2}, "e": 3}
    assert config.pressure == PressureThresholds(medium=0.1, high=0.3, critical=0.9)
    assert {
        key: config.origin(key) for key in ("options.a", "options.b", "options.c", "options.d.x", "options.d.y")
    } == {
        "options.a": f"{path}, line 2",
        "options.b": "environment variable KVCACHE_OPTIONS__B",
        "options.c": "argument",
        "options.d.x": f"{path}, line 5",
        "options.d.y": "environment variable KVCACHE_OPTIONS__D__Y",
    }
    assert config.origin("pressure.medium") == f"{path}, line 7"
    assert config.origin("pressure.critical") == "argument"


def test_an_object_replaces_a_whole_table(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("[geometry]\nnum_layers = 9\nnum_kv_heads = 9\nhead_dim = 9\nwindow = 9\n")
    config = CacheConfig.load(path, environ={}, geometry=GEOMETRY)
    assert config.geometry is GEOMETRY
    assert config.origin("geometry") == config.origin("geometry.num_layers") == "argument"


def test_an_overridden_value_leaves_no_origin_behind(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("[pressure]\nmedium = 0.1\n")
    config = CacheConfig.load(path, environ={}, pressure=PressureThresholds(high=0.7))
    assert config.origin("pressure.medium") == "default"
    assert config.origin("pressure.high") == "argument"


def test_an_error_names_the_source_of_the_value_that_counts(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("block_size = 32\n")
    with pytest.raises(ConfigError, match=r"not 3 \(environment variable KVCACHE_BLOCK_SIZE\)"):
        load(path, BLOCK_SIZE="3")
    with pytest.raises(ConfigError, match=r"not 3 \(argument\)"):
        CacheConfig.load(path, environ={"KVCACHE_BLOCK_SIZE": "64"}, block_size=3)


def test_no_file_is_read_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvcache.toml").write_text("block_size = 32\n")
    assert CacheConfig.load(environ={}).block_size == "auto"


def test_the_environment_names_a_file_and_a_path_given_overrides_it(tmp_path):
    for number in (2, 4):
        (tmp_path / f"{number}.toml").write_text(f"block_size = {number}\n")
    environ = {"KVCACHE_CONFIG": f" {tmp_path / '2.toml'} "}
    assert CacheConfig.load(environ=environ).block_size == 2
    assert CacheConfig.load(tmp_path / "4.toml", environ=environ).block_size == 4


# -- environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("BACKEND", "cpu", "backend", "cpu"),
        ("BACKEND", " cpu ", "backend", "cpu"),
        ("BACKEND_ORDER", "cuda, cpu", "backend_order", ("cuda", "cpu")),
        ("DISABLE", "cuda", "disable", ("cuda",)),
        ("DISABLE", " cuda , kvcache-metal,, ", "disable", ("cuda", "kvcache-metal")),
        ("DISABLE", '["cuda"]', "disable", ("cuda",)),
        ("DISABLE", "*", "disable", ("*",)),
        ("DEVICE", "cuda:1", "device", "cuda:1"),
        ("DTYPE", "bfloat16", "dtype", "bfloat16"),
        ("ALLOW_DTYPE_CAST", "true", "allow_dtype_cast", True),
        ("ALLOW_DTYPE_CAST", "TRUE", "allow_dtype_cast", True),
        ("SCRUB_FREED", "1", "scrub_freed", True),
        ("SCRUB_FREED", "on", "scrub_freed", True),
        ("SCRUB_FREED", "0", "scrub_freed", False),
        ("SCRUB_FREED", "No", "scrub_freed", False),
        ("BLOCK_SIZE", "16", "block_size", 16),
        ("BLOCK_SIZE", "auto", "block_size", "auto"),
        ("BUDGET", "4 GiB", "budget", Budget("bytes", 4 * 2**30)),
        ("BUDGET", "1024", "budget", Budget("bytes", 1024)),
        ("BUDGET", "0.5", "budget", Budget("fraction", 0.5)),
        ("BUDGET", "50%", "budget", Budget("fraction", 0.5)),
        ("INITIAL_BLOCKS", "7", "initial_blocks", 7),
        ("MAX_SEQUENCE_LENGTH", "7", "max_sequence_length", 7),
        ("PRESSURE__HIGH", "0.7", "pressure", PressureThresholds(high=0.7)),
        ("PRESSURE", '{"high": 0.7}', "pressure", PressureThresholds(high=0.7)),
        ("OPTIONS__THREADS", "4", "options", {"threads": 4}),
        ("OPTIONS__NAME", "four", "options", {"name": "four"}),
        ("OPTIONS__NAME", '"4"', "options", {"name": "4"}),
        ("OPTIONS__LIST", "[1, 2]", "options", {"list": (1, 2)}),
        ("OPTIONS__A__B", "true", "options", {"a": {"b": True}}),
        ("OPTIONS", '{"Threads": 4}', "options", {"Threads": 4}),
        ("GEOMETRY", GEOMETRY.model_dump_json(), "geometry", GEOMETRY),
    ],
)
def test_a_variable_sets_its_key(variable, text, key, value):
    config = load(**{variable: text})
    assert getattr(config, key) == value
    assert f"environment variable KVCACHE_{variable}" in [origin for _, _, origin in config.explain()]


def test_mlx_lm_1392_every_key_can_be_set_from_the_environment():
    config = load(
        BACKEND="cpu", BACKEND_ORDER="a", DISABLE="b", OBSERVERS="c", DEVICE="cpu", DTYPE="float16",
        ALLOW_DTYPE_CAST="1", OPTIONS__X="1", GEOMETRY__NUM_LAYERS="2", GEOMETRY__NUM_KV_HEADS="2",
        GEOMETRY__HEAD_DIM="8", BLOCK_SIZE="32", BUDGET="1 block", INITIAL_BLOCKS="1", MAX_SEQUENCE_LENGTH="1",
        SCRUB_FREED="1", PRESSURE__MEDIUM="0.1", PREFIX__ENABLED="0",
    )  # fmt: skip
    assert all(getattr(config, name) != getattr(CacheConfig(), name) for name in CacheConfig.model_fields)
    assert config.geometry == GEOMETRY


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_variable_counts_as_unset(empty):
    names = [name.upper() for name in CacheConfig.model_fields]
    assert load(**dict.fromkeys([*names, "CONFIG", "OPTIONS__X", "PRESSURE__HIGH"], empty)) == CacheConfig()


@pytest.mark.parametrize("text", ["0", "-1", "0.5", "16.0", "true", '"16"', "0x10", "1e1", "2147483648", "NaN", "lots"])
@pytest.mark.parametrize("name", ["block_size", "initial_blocks", "max_sequence_length"])
def test_vllm_43496_a_bad_number_in_a_variable_names_the_key_and_the_variable(name, text):
    with pytest.raises(ConfigError) as caught:
        load(**{name.upper(): text})
    assert caught.value.key == name
    assert caught.value.origin == f"environment variable KVCACHE_{name.upper()}"


@pytest.mark.parametrize("text", ["maybe", "2", "-1", "null"])
def test_a_switch_in_a_variable_takes_only_words_for_on_and_off(text):
    with pytest.raises(ConfigError, match="scrub_freed"):
        load(SCRUB_FREED=text)


def test_a_table_given_as_a_word_is_refused():
    with pytest.raises(ConfigError, match="environment variable KVCACHE_PRESSURE"):
        load(PRESSURE="high")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("KVCACHE_BUGDET", "did you mean KVCACHE_BUDGET?"),
        ("KVCACHE_PRESSURE__HIHG", "did you mean KVCACHE_PRESSURE__HIGH?"),
        ("KVCACHE_CONFIGURATION", "did you mean KVCACHE_CONFIG?"),
        ("KVCACHE_BUDGET__X", "KVCACHE_BUDGET"),
        ("KVCACHE_BLOCKSIZE", "did you mean KVCACHE_BLOCK_SIZE?"),
        ("KVCACHE_OPTIONS__", "no configuration key"),
        ("KVCACHE_", "no configuration key"),
        ("KVCACHE_XYZZY", "no configuration key is called that"),
        ("KVCACHE_GEOMETRY__GROUPS__HEAD_DIM", "no configuration key"),
    ],
)
def test_an_unknown_variable_warns_with_a_suggestion_and_has_no_effect(name, hint):
    with pytest.warns(ConfigWarning) as caught:
        config = CacheConfig.load(environ={name: "1"})
    assert len(caught) == 1
    message = str(caught[0].message)
    assert name in message
    assert hint in message
    assert caught[0].filename == __file__
    assert config == CacheConfig()


def test_the_warning_points_at_the_caller_of_every_way_to_load():
    with pytest.warns(ConfigWarning) as caught:
        CacheConfig.from_pretrained_config(MODEL, environ={"KVCACHE_XYZZY": "1"})
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["KVCACHE_HOME", "KVCACHED_X", "kvcache_backend", "XKVCACHE_BACKEND", "VLLM_BACKEND"])
def test_variables_of_others_are_left_alone(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CacheConfig.load(environ={name: "1"}) == CacheConfig()


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("KVCACHE_BLOCK_SIZE", "64")
    assert CacheConfig.load().block_size == 64
    assert CacheConfig.load(environ={}).block_size == "auto"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("-1", -1),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('"16"', "16"),
        ("016", "016"),
        ("a b", "a b"),
    ],
)
def test_text_of_unknown_type_is_json_where_it_reads_as_json(text, value):
    assert parse_text(text) == value
    assert type(parse_text(text)) is type(value)


def test_text_nested_without_end_is_left_as_text():
    assert parse_text("[" * 100_000) == "[" * 100_000


# -- origins -----------------------------------------------------------------------------------------------


def test_every_effective_value_says_where_it_came_from():
    config = load(BUDGET="1 GiB", OPTIONS__X="1")
    rows = list(config.explain())
    keys = [key for key, _, _ in rows]
    assert ("budget", Budget("bytes", 2**30), "environment variable KVCACHE_BUDGET") in rows
    assert ("options.x", 1, "environment variable KVCACHE_OPTIONS__X") in rows
    assert ("pressure.high", 0.8, "default") in rows
    assert {key.partition(".")[0] for key in keys} == set(CacheConfig.model_fields)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("key", ["bugdet", "pressure.hihg", "budget.x", "", "geometry.groups.x"])
def test_the_origin_of_an_unknown_key_is_an_error(key):
    with pytest.raises(ConfigError, match="is not a known key"):
        CacheConfig().origin(key)


def test_an_option_whose_name_holds_a_dot_or_a_number_has_an_origin_too():
    config = CacheConfig.load(environ={"KVCACHE_OPTIONS": '{"a.b": 1, "0": 2}'}, options={"c": {"0": [1]}})
    assert config.origin("options.a.b") == "environment variable KVCACHE_OPTIONS"
    assert config.origin("options.0") == "environment variable KVCACHE_OPTIONS"
    assert config.origin("options.c.0") == "argument"


# -- models ------------------------------------------------------------------------------------------------


def test_a_model_config_brings_geometry_and_dtype():
    config = CacheConfig.from_pretrained_config(MODEL, environ={}, budget="50%")
    assert config.geometry == CacheGeometry.uniform(3, 4, 16, dtype="float16", model="llama")
    assert config.origin("geometry") == "config of model 'llama'"
    assert config.origin("geometry.dtype") == "config of model 'llama'"
    assert config.origin("budget") == "argument"


def test_a_models_geometry_stands_above_a_files_and_everything_else_as_in_load(tmp_path):
    path = tmp_path / "kvcache.toml"
    path.write_text("block_size = 2\ninitial_blocks = 2\n[geometry]\nnum_layers = 9\nwindow = 5\n")
    config = CacheConfig.from_pretrained_config(MODEL, path, environ={"KVCACHE_BLOCK_SIZE": "4"}, max_sequence_length=8)
    assert config.geometry.num_layers == 3
    assert config.geometry.layer_spec(0).window is None
    assert (config.block_size, config.initial_blocks, config.max_sequence_length) == (4, 2, 8)


def test_a_model_config_and_a_geometry_contradict_each_other():
    with pytest.raises(ConfigError, match="either a model config or geometry, not both"):
        CacheConfig.from_pretrained_config(MODEL, environ={}, geometry=GEOMETRY)
