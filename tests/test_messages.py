"""The messages users see, word for word."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvcache_core import messages
from kvcache_core.discovery import Distribution, Entry
from kvcache_core.errors import BackendLoadError

SITE = "/venv/lib/python3.12/site-packages"
CPU = Distribution("kvcache-cpu", "1.2.0", SITE, f"{SITE}/kvcache_cpu-1.2.0.dist-info")
CUDA = Distribution("kvcache-cuda", "1.2.0", SITE, f"{SITE}/kvcache_cuda-1.2.0.dist-info")
METAL = Distribution("kvcache-metal", "0.9.0", SITE, f"{SITE}/kvcache_metal-0.9.0.dist-info")
ACME = Distribution("acme-kvcache", "0.4.1", SITE, f"{SITE}/acme_kvcache-0.4.1.dist-info")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")


def text(*lines: str) -> str:
    return "\n".join(lines)


def test_unknown_with_a_suggestion_that_is_not_installed() -> None:
    error = messages.unknown("cdua", [("cpu", CPU)], "environment variable KVCACHE_BACKEND")
    assert str(error) == text(
        "no KV-cache backend named 'cdua' is installed (requested by environment variable KVCACHE_BACKEND)",
        "  Did you mean 'cuda'? It is provided by kvcache-cuda, which is not installed here:",
        '      pip install "kvcache-core[cuda]"',
        "  Installed: cpu (kvcache-cpu 1.2.0)",
        "  Environment: /venv/bin/python",
    )
    assert error.hint == 'pip install "kvcache-core[cuda]"'


def test_unknown_with_a_suggestion_that_is_installed() -> None:
    assert str(messages.unknown("cpuu", [("cpu", CPU), ("cuda", CUDA)])) == text(
        "no KV-cache backend named 'cpuu' is installed",
        "  Did you mean 'cpu'?",
        "  Installed: cpu (kvcache-cpu 1.2.0), cuda (kvcache-cuda 1.2.0)",
        "  Environment: /venv/bin/python",
    )


def test_a_first_party_backend_that_is_not_installed() -> None:
    assert str(messages.unknown("Metal", [])) == text(
        "no KV-cache backend named 'Metal' is installed",
        "  It is provided by kvcache-metal, which is not installed here:",
        '      pip install "kvcache-core[metal]"',
        "  Installed: none",
        "  Environment: /venv/bin/python",
    )


def test_unknown_with_nothing_similar() -> None:
    assert str(messages.unknown("zzzzzz", [("cpu", CPU), ("home", None)])) == text(
        "no KV-cache backend named 'zzzzzz' is installed",
        "  Installed: cpu (kvcache-cpu 1.2.0), home (registered by this program)",
        "  Backends are looked up in the entry-point group 'kvcache_core.backends'; `kvcache doctor` shows the finds.",
        "  A plugin in an editable install announces a new backend only after it has been installed again.",
        "  Environment: /venv/bin/python",
    )


def test_unknown_backend_of_an_installed_distribution() -> None:
    message = str(messages.unknown("acme-kvcache:fast", [("acme", ACME), ("cpu", CPU)]))
    assert "'acme-kvcache' is installed and provides 'acme'." in message


def test_unknown_distribution() -> None:
    message = str(messages.unknown("acme-kvcahce:acme", [("acme", ACME), ("cpu", CPU)]))
    assert "Did you mean 'acme-kvcache:acme'?" in message


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("gpu", "'gpu' is not a backend name; use 'cuda' (NVIDIA), 'metal' (Apple) or 'auto'"),
        ("GPU", "'GPU' is not a backend name; use 'cuda' (NVIDIA), 'metal' (Apple) or 'auto'"),
        ("nvidia", "'nvidia' is not a backend name; use 'cuda' (NVIDIA) or 'auto'"),
        ("mps", "'mps' is not a backend name; use 'metal' (Apple) or 'auto'"),
        ("host", "'host' is not a backend name; use 'cpu' or 'auto'"),
        ("default", "'default' is not a backend name; use 'auto'"),
    ],
)
def test_aliases_come_before_spelling(alias: str, expected: str) -> None:
    assert str(messages.unknown(alias, [("cpu", CPU), ("xpu", ACME)])) == expected


def test_an_alias_says_where_the_request_came_from() -> None:
    assert str(messages.unknown("mps", [], "kvcache.toml, line 3")) == (
        "'mps' is not a backend name (requested by kvcache.toml, line 3); use 'metal' (Apple) or 'auto'"
    )


def test_unavailable() -> None:
    error = messages.unavailable(
        "cuda",
        CUDA,
        "torch-without-cuda",
        "torch 2.13.0+cpu was built without CUDA",
        "install a CUDA build of torch",
        ["cpu"],
    )
    assert str(error) == text(
        "backend 'cuda' (kvcache-cuda 1.2.0) is installed but cannot run on this machine",
        "  Reason [torch-without-cuda]: torch 2.13.0+cpu was built without CUDA",
        '  Fix: install a CUDA build of torch, or choose backend="cpu" or backend="auto"',
        "  No other backend was tried because this one was named explicitly.",
    )
    assert (error.code, error.reason) == ("torch-without-cuda", "torch 2.13.0+cpu was built without CUDA")


def test_unavailable_without_advice_or_alternative() -> None:
    assert "Fix" not in str(messages.unavailable("cuda", CUDA, "no-device", "no device"))


def test_ambiguous() -> None:
    claims = [Entry("cuda", "kvcache_cuda.plugin", CUDA), Entry("cuda", "acme_kvcache.plugin", ACME)]
    assert str(messages.ambiguous("cuda", claims)) == text(
        "2 installed distributions provide a backend named 'cuda'",
        "    kvcache-cuda 1.2.0   kvcache_cuda.plugin   /venv/lib/python3.12/site-packages",
        "    acme-kvcache 0.4.1   acme_kvcache.plugin   /venv/lib/python3.12/site-packages",
        '  Pick one:   backend="kvcache-cuda:cuda"   or   backend="acme-kvcache:cuda"',
        "  Or hide one: KVCACHE_DISABLE=acme-kvcache",
    )


def test_load_failed() -> None:
    cause = OSError("libcudart.so.12: cannot open shared object file: No such file or directory\nmore")
    assert str(messages.load_failed("cuda", CUDA, "importing kvcache_cuda.backend", cause)) == text(
        "backend 'cuda' (kvcache-cuda 1.2.0) failed while importing kvcache_cuda.backend",
        "  OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "  The original traceback follows as the direct cause. Other backends are not affected.",
        "  To hide this one: KVCACHE_DISABLE=cuda",
    )


def test_incompatible_with_an_older_plugin_of_ours() -> None:
    error = messages.incompatible("metal", METAL, (1, 4), core=(2, 1), core_version="2.1.0")
    assert str(error) == text(
        "backend 'metal' (kvcache-metal 0.9.0) implements interface 1.4, this kvcache-core 2.1.0 needs 2.x (up to 2.1)",
        '  Upgrade the plugin:   pip install -U "kvcache-core[metal]"',
        '  Or keep the old core: pip install "kvcache-core<2"',
    )


def test_incompatible_with_an_older_plugin_of_others() -> None:
    error = messages.incompatible("acme", ACME, (0, 4), core=(1, 0), core_version="0.3.0")
    assert str(error) == text(
        "backend 'acme' (acme-kvcache 0.4.1) implements interface 0.4, this kvcache-core 0.3.0 needs 1.x (up to 1.0)",
        "  Upgrade the plugin:   pip install -U acme-kvcache",
        '  Or keep the old core: pip install "kvcache-core<0.3.0"',
    )


def test_incompatible_with_a_newer_plugin() -> None:
    error = messages.incompatible("acme", ACME, (1, 2), core=(1, 0), core_version="1.0.0")
    assert str(error) == text(
        "backend 'acme' (acme-kvcache 0.4.1) implements interface 1.2, this kvcache-core 1.0.0 needs 1.x (up to 1.0)",
        "  Upgrade the core:        pip install -U kvcache-core",
        '  Or keep an older plugin: pip install "acme-kvcache<0.4.1"',
    )


@pytest.mark.parametrize(
    ("interface", "core", "expected"),
    [
        ((1, 0), (1, 0), None),
        ((1, 0), (1, 3), None),
        ((1, 3), (1, 3), None),
        ((1, 4), (1, 3), "implements interface 1.4, needs 1.x (up to 1.3)"),
        ((1, 4), (2, 0), "implements interface 1.4, needs 2.x"),
        ((3, 0), (2, 9), "implements interface 3.0, needs 2.x"),
    ],
)
def test_p44_same_major_and_no_greater_minor_work_together(interface: Any, core: Any, expected: str | None) -> None:
    assert messages.interface_mismatch(interface, core) == expected


def test_nothing_available() -> None:
    rejected = [
        ("cuda", "unavailable", "no CUDA device is visible (CUDA_VISIBLE_DEVICES is empty)"),
        ("metal", "incompatible", "implements interface 1.4, needs 2.x"),
    ]
    assert str(messages.nothing_available(rejected, ["cuda", "metal"])) == text(
        "no KV-cache backend can run on this machine",
        "    cuda   unavailable    no CUDA device is visible (CUDA_VISIBLE_DEVICES is empty)",
        "    metal  incompatible   implements interface 1.4, needs 2.x",
        '    cpu    not installed  pip install "kvcache-core[cpu]"',
    )


def test_nothing_installed() -> None:
    error = messages.nothing_available([], [])
    assert str(error) == text(
        "no KV-cache backend can run on this machine",
        '    cpu    not installed  pip install "kvcache-core[cpu]"',
        '    cuda   not installed  pip install "kvcache-core[cuda]"',
        '    metal  not installed  pip install "kvcache-core[metal]"',
    )
    assert error.hint == 'pip install "kvcache-core[cpu]"'


def test_disabled_names_the_word_and_the_variable() -> None:
    error = messages.disabled("cuda", CUDA, "kvcache-cuda", "environment variable KVCACHE_DISABLE")
    assert str(error) == (
        "backend 'cuda' (kvcache-cuda 1.2.0) is switched off by environment variable KVCACHE_DISABLE: "
        "take 'kvcache-cuda' out of environment variable KVCACHE_DISABLE, or choose another backend"
    )


def test_lacking_methods() -> None:
    error = messages.lacking("acme", ACME, "acme.storage:Store", ["missing methods: attend", "no handle_type"])
    assert str(error) == text(
        "backend 'acme' (acme-kvcache 0.4.1) does not implement interface 1.0: missing methods: attend",
        "  no handle_type",
        "  Class: acme.storage:Store",
        "  Upgrade the plugin: pip install -U acme-kvcache",
    )


def test_the_cause_of_a_failed_load_is_told_through_several_of_them() -> None:
    inner = BackendLoadError("inner")
    inner.__cause__ = OSError("the root")
    assert messages.cause_line(inner) == "OSError: the root"
    assert messages.cause_line(RuntimeError()) == "RuntimeError"


def test_no_alias_hides_a_backend_of_ours() -> None:
    assert not set(messages.ALIASES) & set(messages.FIRST_PARTY)
    assert {target for targets in messages.ALIASES.values() for target in targets} <= set(messages.FIRST_PARTY)
