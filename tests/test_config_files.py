import json
import math
import os
import re
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_core.config import CacheConfig
from kvcache_core.config_files import from_file
from kvcache_core.errors import ConfigError

TOML = """\
# how this host caches
"$schema" = "kvcache.schema.json"
backend = "cpu"

disable = [
    "cuda",   # no drivers here
    "metal",
]
block_size = 32
options.threads = 3
options.pages = { huge = true, count = 4 }

[pressure]  # earlier than usual
high = 0.7

[geometry]
num_layers = 3
model = '''
a name
over lines'''
[[geometry.groups]]
layers = [0, 1]
num_kv_heads = 2
head_dim = 8
[[geometry.groups]]
layers = [2]
num_kv_heads = 1

head_dim = 16
"""

TOML_ORIGINS = {
    "backend": 3,
    "disable": 5,
    "block_size": 9,
    "options.threads": 10,
    "options.pages": 11,
    "options.pages.huge": 11,
    "options.pages.count": 11,
    "pressure": 13,
    "pressure.high": 14,
    "geometry": 16,
    "geometry.num_layers": 17,
    "geometry.model": 18,
    "geometry.groups.0.num_kv_heads": 23,
    "geometry.groups.1": 25,
    "geometry.groups.1.layers.0": 26,
    "geometry.groups.1.head_dim": 29,
}

JSON = """\
{
  "$schema": "x",
  "backend": "c\\u0070u", "block_size":
     32,
  "disable": [
    "cu,da}",
    "metal"
  ],
  "options": {"threads": 3,
    "pages": {}, "list": [[], {"a": [1,
      2]}]},
  "pressure": {
    "high": 0.7}
}
"""

JSON_ORIGINS = {
    "backend": 3,
    "block_size": 3,
    "disable": 5,
    "disable.1": 7,
    "options": 9,
    "options.threads": 9,
    "options.pages": 10,
    "options.list": 10,
    "pressure": 12,
    "pressure.high": 13,
}


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
    return path


def refused(path, **values):
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environ={}, **values)
    return caught.value


# -- lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "origins"), [("kvcache.toml", TOML, TOML_ORIGINS), ("kvcache.json", JSON, JSON_ORIGINS)]
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_every_value_knows_the_line_it_is_written_on(tmp_path, name, content, origins, newline, mark):
    path = write(tmp_path, name, (mark + content.replace("\n", newline)).encode())
    config = CacheConfig.load(path, environ={})
    assert {key: config.origin(key) for key in origins} == {
        key: f"{path}, line {line}" for key, line in origins.items()
    }


def test_keys_that_a_file_does_not_hold_come_from_the_defaults(tmp_path):
    config = CacheConfig.load(write(tmp_path, "kvcache.toml", TOML), environ={})
    for key in ("budget", "pressure.medium", "geometry.dtype", "geometry.groups.0.window"):
        assert config.origin(key) == "default"


def test_the_name_in_an_origin_is_the_one_the_user_gave(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "kvcache.toml", "backend = 'cpu'")
    assert CacheConfig.load("kvcache.toml", environ={}).origin("backend") == "kvcache.toml, line 1"


values = st.recursive(
    st.one_of(st.integers(-5, 5), st.booleans(), st.text('a\\"{}[],:\n\u2028 é', max_size=5), st.floats(0, 1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('ab\\"{[,:\n', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text('ab\\"{[,:\n', max_size=3), values, max_size=4))
def test_the_lines_of_any_json_document_are_those_of_its_keys(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("j") / "d.json"
    text = json.dumps(document, indent=1)
    path.write_text(text, encoding="utf-8")
    source = from_file(path)
    assert source.values == {key: value for key, value in document.items() if key != "$schema"}

    def places(value, place=()):
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield (*place, key)
            yield from places(inner, (*place, key))

    assert set(source.origins) == set(places(document))
    lines = text.split("\n")
    for place, words in source.origins.items():
        line = lines[int(re.search(r"\d+$", words)[0]) - 1]
        if isinstance(place[-1], str):
            assert line.strip().startswith(json.dumps(place[-1]) + ":")


# -- values at fault ---------------------------------------------------------------------------------------


def test_a_wrong_value_names_key_line_and_value(tmp_path):
    path = write(tmp_path, "kvcache.toml", "backend = 'cpu'\nblock_size = 0\n")
    error = refused(path)
    assert str(error) == f'block_size must be a power of two from 1 to 65536 or "auto", not 0 ({path}, line 2)'
    assert (error.key, error.origin) == ("block_size", f"{path}, line 2")


def test_an_unknown_key_names_line_and_suggestion(tmp_path):
    path = write(tmp_path, "kvcache.toml", "[pressure]\nhihg = 0.7\n")
    assert str(refused(path)) == f"pressure.hihg is not a known key; did you mean 'high'? ({path}, line 2)"


def test_a_missing_value_names_the_table_that_lacks_it(tmp_path):
    path = write(tmp_path, "kvcache.toml", "\n[geometry]\nnum_layers = 3\nnum_kv_heads = 2\n")
    assert str(refused(path)) == f"geometry.head_dim is missing ({path}, line 2)"


def test_all_problems_of_a_file_are_reported_at_once_each_with_its_line(tmp_path):
    path = write(
        tmp_path,
        "kvcache.toml",
        """\
        block_size = 12
        bugdet = "4GiB"
        initial_blocks = true
        [[geometry.groups]]
        num_kv_heads = "2"
        """,
    )
    first, *details = str(refused(path)).split("\n")
    assert first.startswith("7 problems in the configuration; fix geometry.num_layers, ")
    found = {line.split()[0]: int(re.search(r", line (\d+)\)$", line)[1]) for line in details}
    assert found == {
        "block_size": 1,
        "bugdet": 2,
        "initial_blocks": 3,
        "geometry.num_layers": 4,
        "geometry.groups.0.layers": 4,
        "geometry.groups.0.head_dim": 4,
        "geometry.groups.0.num_kv_heads": 5,
    }


@pytest.mark.parametrize(
    "value", ["0", "-1", "0.5", "16.0", "true", '"16"', "2147483648", "9223372036854775808", "nan"]
)
@pytest.mark.parametrize(
    "key", ["block_size", "initial_blocks", "max_sequence_length", "geometry.num_layers", "geometry.window"]
)
def test_vllm_43496_a_bad_number_in_a_file_names_the_key_and_the_line(tmp_path, key, value):
    table, _, name = key.rpartition(".")
    header = f"[{table}]\n" if table else "\n"
    path = write(tmp_path, "kvcache.toml", f"{header}{name} = {value}\n")
    lines = [line for line in str(refused(path)).split("\n") if line.strip().startswith(f"{key} must be ")]
    assert len(lines) == 1
    assert lines[0].endswith(f"({path}, line 2)")


# -- broken files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("kvcache.toml", "a = 1\nb = \n", 2),
        ("kvcache.toml", "backend = 'cpu'\n\nbackend = 'cuda'\n", 3),
        ("kvcache.toml", "[pressure\n", 1),
        ("kvcache.toml", "disable = [\n'cuda'\n", 2),
        ("kvcache.toml", "block_size = 016\n", 1),
        ("kvcache.toml", "x = '\x00'\n", 1),
        ("kvcache.json", '{\n"a": 1,\n}', 3),
        ("kvcache.json", "", 1),
        ("kvcache.json", '{"a": 1}\n{"b": 2}', 2),
        ("kvcache.json", "backend = 'cpu'", 1),
        ("kvcache.json", "{\n\"a\": 'x'}", 2),
    ],
)
def test_a_syntax_error_names_file_and_line(tmp_path, name, content, line):
    path = write(tmp_path, name, content)
    error = refused(path)
    kind = path.suffix[1:].upper()
    assert str(error).startswith(f"{path}, line {line}: not valid {kind}: ")
    assert error.origin == f"{path}, line {line}"


@pytest.mark.parametrize("content", ["[1, 2]", "3", "null", '"text"'])
def test_a_json_document_must_be_an_object(tmp_path, content):
    assert "must be an object" in str(refused(write(tmp_path, "kvcache.json", content)))


def test_a_key_given_twice_in_json_is_refused_like_in_toml(tmp_path):
    error = refused(write(tmp_path, "kvcache.json", '{"budget": "1GiB", "budget": "2GiB"}'))
    assert "'budget' is given twice" in str(error)


@pytest.mark.parametrize("name", ["kvcache.toml", "kvcache.json"])
def test_text_that_is_not_utf_8_names_line_and_byte(tmp_path, name):
    path = write(tmp_path, name, b"# caf\xc3\xa9\n# caf\xe9\n")
    assert str(refused(path)) == f"{path}, line 2: not UTF-8 text (byte 0xe9); save the file as UTF-8"


@pytest.mark.parametrize(
    ("name", "content"), [("kvcache.toml", "x = " + "[" * 100_000), ("kvcache.json", "[" * 100_000)]
)
def test_nesting_without_end_is_a_config_error(tmp_path, name, content):
    assert str(tmp_path / name) in str(refused(write(tmp_path, name, content)))


@pytest.mark.parametrize("name", ["kvcache.toml", "kvcache.json"])
def test_a_number_of_thousands_of_digits_is_a_config_error(tmp_path, name):
    number = "9" * 5000
    content = f"block_size = {number}" if name.endswith("toml") else f'{{"block_size": {number}}}'
    assert str(tmp_path / name) in str(refused(write(tmp_path, name, content)))


@pytest.mark.parametrize("name", ["nothing.toml", "no/such/folder.json", "null\0byte.toml"])
def test_a_missing_file_says_so(tmp_path, name):
    error = refused(tmp_path / name)
    assert str(error).startswith("configuration file ")
    assert "does not exist" in str(error) or "cannot be read" in str(error)


def test_a_directory_says_so(tmp_path):
    assert "is a directory" in str(refused(tmp_path))
    (tmp_path / "folder.toml").mkdir()
    assert "is a directory" in str(refused(tmp_path / "folder.toml"))


@pytest.mark.parametrize("name", ["kvcache.yaml", "kvcache", "kvcache.toml.bak", ".toml"])
def test_another_extension_names_the_two_that_are_read(tmp_path, name):
    assert "must end in .toml or .json" in str(refused(write(tmp_path, name, "")))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_file_that_may_not_be_read_says_why(tmp_path):
    path = write(tmp_path, "kvcache.toml", "")
    path.chmod(0)
    assert "cannot be read" in str(refused(path))


def test_the_file_that_a_variable_names_says_which_variable(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist \(named by environment variable KVCACHE_CONFIG\)"):
        CacheConfig.load(environ={"KVCACHE_CONFIG": str(tmp_path / "nothing.toml")})


# -- good files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"), [("a.toml", ""), ("a.toml", "# nothing\n"), ("a.json", "{}"), ("A.TOML", "")]
)
def test_a_file_may_be_empty(tmp_path, name, content):
    assert CacheConfig.load(write(tmp_path, name, content), environ={}) == CacheConfig()


def test_the_schema_key_configures_nothing(tmp_path):
    path = write(tmp_path, "a.json", '{"$schema": "https://example.org/s.json"}')
    assert CacheConfig.load(path, environ={}) == CacheConfig()


@pytest.mark.parametrize("spelling", [str, os.fsencode, lambda path: path])
def test_a_path_may_be_text_bytes_or_a_path_object(tmp_path, spelling):
    path = write(tmp_path, "a.toml", "block_size = 32")
    config = CacheConfig.load(spelling(path), environ={})
    assert config.origin("block_size") == f"{path}, line 1"


def test_layers_shared_between_layers_are_written_as_a_table_of_numbers(tmp_path):
    path = write(
        tmp_path,
        "a.toml",
        """\
        [geometry]
        num_layers = 3
        num_kv_heads = 2
        head_dim = 8
        shared = { 2 = 1 }
        """,
    )
    config = CacheConfig.load(path, environ={})
    assert config.geometry.shared == {2: 1}
    assert config.origin("geometry.shared.2") == f"{path}, line 5"


def test_json_may_not_smuggle_in_a_number_that_is_none(tmp_path):
    path = write(tmp_path, "a.json", '{"pressure": {"high": NaN}, "budget": Infinity}')
    error = refused(path)
    assert "pressure.high" in str(error)
    assert "budget" in str(error)
    assert not math.isnan(CacheConfig().pressure.high)
