import copy
import inspect
import pickle
import re
from typing import Any

import pytest

from kvcache_core import errors
from kvcache_core.errors import KvCacheError, KvCacheWarning

ERRORS = [value for name in errors.__all__ if issubclass(value := getattr(errors, name), KvCacheError)]
WARNINGS = [value for name in errors.__all__ if issubclass(value := getattr(errors, name), KvCacheWarning)]

#: An unusual value for every keyword that an error of ours takes.
KEYWORDS: dict[str, Any] = {
    "key": "geometry.head_dim",
    "origin": "kvcache.toml, line 3",
    "backend": "cuda",
    "problems": [("options.x", "unknown option"), ("options.y", "must be 1")],
    "distribution": "kvcache-cuda 1.2.0",
    "hint": "pip install something",
    "code": "torch-without-cuda",
    "capability": "swap",
    "needed": 7,
    "free": 3,
    "evictable": 2,
    "reason": "stale",
    "export": "flashinfer",
    "details": ["first detail", "second detail"],
}


def build(cls: type[KvCacheError]) -> KvCacheError:
    parameters = inspect.signature(cls.__init__).parameters
    return cls("do this {now}", **{name: KEYWORDS[name] for name in parameters if name in KEYWORDS})


def keywords_of(cls: type[KvCacheError]) -> list[str]:
    return [name for name in inspect.signature(cls.__init__).parameters if name in KEYWORDS and name != "details"]


def documented_tree() -> dict[str, tuple[str, ...]]:
    """Class name -> base names, read from the tree in the module's docstring."""
    tree: dict[str, tuple[str, ...]] = {}
    parents: dict[int, str] = {}
    block = errors.__doc__.split("```")[1]
    for line in block.strip().splitlines():
        match = re.match(r"^([│ ├└─]*)(\w+)(?:\((\w+)\))?", line)
        depth = len(match[1]) // 3
        bases = (parents[depth - 1],) if depth else ("Exception",)
        tree[match[2]] = (*bases, match[3]) if match[3] else bases
        parents[depth] = match[2]
    return tree


@pytest.mark.parametrize("cls", ERRORS)
@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_keep_type_message_and_attributes_when_pickled_or_copied(cls, copied):
    error = build(cls)
    again = copied(error)
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", ERRORS)
def test_every_keyword_of_an_error_is_kept_as_an_attribute(cls):
    error = build(cls)
    for name in keywords_of(cls):
        expected = tuple(KEYWORDS[name]) if isinstance(KEYWORDS[name], list) else KEYWORDS[name]
        assert getattr(error, name) == expected


@pytest.mark.parametrize("cls", ERRORS)
def test_the_first_line_stands_alone_and_details_are_indented(cls):
    first, *rest = str(build(cls)).split("\n")
    assert first == "do this {now}"
    assert rest
    assert all(line.startswith("  ") for line in rest)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    actual = {cls.__name__: tuple(base.__name__ for base in cls.__bases__) for cls in ERRORS}
    assert documented_tree() == actual


def test_all_names_every_class_of_the_module_and_is_sorted():
    defined = [
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert errors.__all__ == sorted(defined)
    assert {*ERRORS, *WARNINGS} == {getattr(errors, name) for name in errors.__all__}


@pytest.mark.parametrize("cls", WARNINGS)
def test_warnings_are_user_warnings_so_that_they_are_shown_by_default(cls):
    assert issubclass(cls, UserWarning)


def test_a_cache_full_error_says_what_would_help():
    error = errors.CacheFullError("no room for 7 blocks", needed=7, free=3, hint="free a handle")
    assert "free a handle" in str(error)


def test_errors_can_be_caught_as_the_builtin_they_resemble():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.CacheFullError, MemoryError)
    assert issubclass(errors.UnknownBackendError, LookupError)
    assert issubclass(errors.BackendLoadError, ImportError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
