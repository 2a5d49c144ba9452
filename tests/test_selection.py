"""Which backend is chosen, and what is said about those that are not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.config import CacheConfig
from kvcache_core.errors import (
    AmbiguousBackendError,
    BackendDisabledError,
    BackendLoadError,
    BackendSkippedWarning,
    BackendUnavailableError,
    ConfigError,
    ConfigWarning,
    IncompatibleBackendError,
    NoBackendAvailableError,
    OptionsError,
    UnknownBackendError,
    UnsupportedError,
)
from kvcache_core.geometry import CacheGeometry
from kvcache_core.plugin import BackendDescriptor
from kvcache_core.selection import Selection, choose
from tests.plugin_site import Site

NO = "lambda request: Unavailable(code='no-device', reason='there is no device')"


def select(site: Site, backend: str = "auto", **values: Any) -> Selection:
    return choose(CacheConfig(backend=backend, **values), site.registry())


def passed_over(selection: Selection) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in selection.rejected]


# -- by name ---------------------------------------------------------------------------------------------


def test_a_named_backend_is_chosen_with_concrete_values(site: Site) -> None:
    site.plugin("acme")
    geometry = CacheGeometry.uniform(2, 2, 8, dtype="float16")
    selection = select(site, "acme", geometry=geometry)
    assert selection.backend.name == "acme"
    assert (selection.device, selection.dtype, selection.block_size) == ("cpu", "float16", 16)
    assert selection.options.model_dump() == {}
    assert selection.rejected == ()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"probe": NO}, BackendUnavailableError),
        ({"before": "raise OSError('gone')"}, BackendLoadError),
        ({"storage": "raise OSError('gone')"}, BackendLoadError),
        ({"interface": "(2, 0)"}, IncompatibleBackendError),
    ],
)
def test_p24_a_named_backend_never_falls_back(site: Site, fields: dict[str, Any], error: type[Exception]) -> None:
    site.plugin("acme", **fields)
    site.plugin("cpu")
    with pytest.raises(error):
        select(site, "acme")


def test_vllm_48277_by_name_the_error_holds_the_original_traceback(site: Site) -> None:
    site.plugin("acme", before="def register(): raise RuntimeError('no platform')\nregister()")
    site.plugin("cpu")
    with pytest.raises(BackendLoadError, match="RuntimeError: no platform") as caught:
        select(site, "acme")
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    traceback = cause.__traceback__
    files = []
    while traceback:
        files.append(Path(traceback.tb_frame.f_code.co_filename).name)
        traceback = traceback.tb_next
    assert files[-1] == "plugin.py"


@pytest.mark.parametrize("source", ["import no_such_module", "raise SystemExit", "raise OSError('so')"])
def test_vllm_48277_auto_warns_and_names_the_broken_plugin_before_it_falls_back(site: Site, source: str) -> None:
    site.plugin("acme", version="1.2", before=source)
    site.plugin("cpu")
    with pytest.warns(
        BackendSkippedWarning, match=r"'acme' \(kvcache-acme 1.2\) is broken and was skipped: .*using 'cpu'"
    ):
        selection = select(site)
    assert selection.backend.name == "cpu"
    assert passed_over(selection) == [("acme", "broken")]


def test_p25_unavailable_tells_code_reason_and_what_else_there_is(site: Site) -> None:
    site.plugin("acme", probe=NO)
    site.plugin("cpu")
    with pytest.raises(BackendUnavailableError) as caught:
        select(site, "acme")
    assert (caught.value.code, caught.value.reason) == ("no-device", "there is no device")
    assert 'choose backend="cpu" or backend="auto"' in str(caught.value)


def test_an_unknown_name_says_who_asked_for_it(site: Site) -> None:
    config = CacheConfig.load(environ={"KVCACHE_BACKEND": "cdua"})
    with pytest.raises(UnknownBackendError, match=r"\(requested by environment variable KVCACHE_BACKEND\)"):
        choose(config, site.registry())


def test_p42_an_empty_variable_is_unset(site: Site) -> None:
    site.plugin("cpu")
    assert choose(CacheConfig.load(environ={"KVCACHE_BACKEND": ""}), site.registry()).backend.name == "cpu"


def test_p38_an_ambiguous_name_is_an_error_that_a_qualified_one_is_not(site: Site) -> None:
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    with pytest.raises(AmbiguousBackendError):
        select(site, "shared")
    assert select(site, "Beta_KV:Shared").backend.qualified == "beta-kv:shared"


def test_p38_hiding_one_of_two_claimants_settles_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    monkeypatch.setenv("KVCACHE_DISABLE", "acme-kv")
    assert select(site, "shared").backend.qualified == "beta-kv:shared"


def test_choosing_without_loading_imports_no_storage(site: Site) -> None:
    package = site.plugin("acme", storage="raise AssertionError")
    selection = choose(CacheConfig(backend="acme"), site.registry(), load=False)
    assert selection.backend.name == "acme"
    assert f"{package}.storage" not in sys.modules


# -- what does not go together ---------------------------------------------------------------------------


def test_a_device_the_backend_does_not_run_on(site: Site) -> None:
    site.plugin("acme", devices="('cpu', 'xpu')")
    with pytest.raises(ConfigError, match=r"device 'cuda:1' \(argument\) does not go with backend 'acme'") as caught:
        select(site, "acme", device="cuda:1")
    assert caught.value.key == "device"
    assert "runs on 'cpu', 'xpu'" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "offered", "fits"),
    [
        ("auto", "xpu:3", True),
        ("xpu", "xpu:3", True),
        ("xpu:3", "xpu:3", True),
        ("xpu:0", "xpu", True),
        ("xpu:1", "xpu", False),
        ("xpu:1", "xpu:3", False),
        ("xpu", "cpu", False),
    ],
)
def test_the_device_of_the_probe_must_be_the_one_asked_for(site: Site, asked: str, offered: str, fits: bool) -> None:
    site.plugin("acme", devices="('xpu', 'cpu')", probe=f"lambda request: Available(device={offered!r})")
    if fits:
        assert select(site, "acme", device=asked).device == offered
    else:
        with pytest.raises(BackendUnavailableError, match=f"would use device '{offered}', not '{asked}'"):
            select(site, "acme", device=asked)


@pytest.mark.parametrize(
    ("asked", "of_the_model", "stored", "dtype"),
    [
        ("float16", "float32", "('float32', 'float16')", "float16"),
        ("auto", "float16", "('float32', 'float16')", "float16"),
        ("auto", None, "('float16', 'float32')", "float32"),
        ("auto", None, "('int8', 'float16')", "int8"),
    ],
)
def test_the_dtype_is_the_one_asked_for_else_the_models_else_float32(
    site: Site, asked: str, of_the_model: str | None, stored: str, dtype: str
) -> None:
    site.plugin("acme", dtypes=stored)
    geometry = CacheGeometry.uniform(2, 2, 8, dtype=of_the_model)
    assert select(site, "acme", dtype=asked, geometry=geometry).dtype == dtype


def test_a_dtype_the_backend_cannot_store(site: Site) -> None:
    site.plugin("acme", dtypes="('float32',)")
    with pytest.raises(ConfigError, match=r"^dtype 'bfloat16' \(argument\) does not go with backend 'acme'"):
        select(site, "acme", dtype="bfloat16")
    geometry = CacheGeometry.uniform(2, 2, 8, dtype="float16")
    with pytest.raises(ConfigError, match=r"^geometry.dtype 'float16' .* change dtype or backend") as caught:
        select(site, "acme", geometry=geometry)
    assert caught.value.key == "geometry.dtype"


@pytest.mark.parametrize(
    ("sizes", "default", "asked", "chosen"),
    [("()", 16, "auto", 16), ("()", 16, 64, 64), ("(16, 256)", 256, "auto", 256), ("(16, 256)", 256, 16, 16)],
)
def test_the_block_size_is_the_one_asked_for_else_the_backends(
    site: Site, sizes: str, default: int, asked: Any, chosen: int
) -> None:
    site.plugin("acme", block_sizes=sizes, default_block_size=default)
    assert select(site, "acme", block_size=asked).block_size == chosen


def test_a_block_size_the_backend_does_not_take(site: Site) -> None:
    site.plugin("acme", block_sizes="(256,)", default_block_size=256)
    with pytest.raises(ConfigError, match=r"block_size 16 \(argument\) does not go with backend 'acme' .* takes 256"):
        select(site, "acme", block_size=16)


def test_unequal_head_dims_need_the_capability(site: Site) -> None:
    site.plugin("acme")
    site.plugin("beta", capabilities="{'unequal_head_dims'}", storage=CAPABLE)
    geometry = CacheGeometry.uniform(2, 2, 8, value_head_dim=4)
    with pytest.raises(UnsupportedError, match="head_dim is 8 and value_head_dim 4 in layer 0") as caught:
        select(site, "acme", geometry=geometry)
    assert caught.value.capability == "unequal_head_dims"
    assert select(site, "beta", geometry=geometry).backend.name == "beta"


CAPABLE = """
from tests.plugin_site import STORAGE
exec(STORAGE)
Store.capabilities = frozenset({"unequal_head_dims"})
"""


def test_llama_cpp_28524_what_a_backend_cannot_do_is_refused_before_anything_is_imported(site: Site) -> None:
    """An option accepted at the front must not become a crash further down: every pair works or names both sides."""
    site.plugin("acme", devices="('xpu',)", dtypes="('int8',)", storage="raise AssertionError")
    for values in ({"device": "cpu"}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="does not go with backend 'acme'"):
            select(site, "acme", **values)


# -- options and probe -----------------------------------------------------------------------------------

OPTIONS = "class Options(BackendOptions):\n    size: int = 1\n    name: str = ''\n"


def test_options_are_validated_by_the_backends_own_model(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options")
    assert select(site, "acme", options={"size": 3}).options.model_dump() == {"size": 3, "name": ""}
    with pytest.raises(OptionsError, match=r"options.siez: unknown option; did you mean 'size'"):
        select(site, "acme", options={"siez": 3})
    with pytest.raises(OptionsError):
        select(site, "acme", options={"size": "3"})


def test_options_from_the_environment_are_read_as_text(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options")
    environ = {"KVCACHE_BACKEND": "acme", "KVCACHE_OPTIONS__SIZE": "3", "KVCACHE_OPTIONS__NAME": "7"}
    selection = choose(CacheConfig.load(environ=environ), site.registry())
    assert selection.options.model_dump() == {"size": 3, "name": "7"}


def test_the_probe_sees_validated_options_and_concrete_wishes(site: Site) -> None:
    site.plugin(
        "acme",
        before=f"{OPTIONS}\nseen = []\n"
        "def probe(request):\n    seen.append(request)\n    return Available(device='cpu')",
        options="Options",
        probe="probe",
    )
    geometry = CacheGeometry.uniform(2, 2, 8, dtype="float16")
    select(site, "acme", options={"size": 2}, device="cpu", geometry=geometry)
    (request,) = sys.modules["kvcache_acme.plugin"].seen
    assert (request.options.size, request.device, request.dtype) == (2, "cpu", "float16")
    assert request.geometry is geometry


BROKEN_CALLS = {
    "options module is missing": {"options": "'no.such:Options'"},
    "options are no model": {"options": "'json:loads'"},
    "a validator raises": {
        "before": "from pydantic import model_validator\nclass Options(BackendOptions):\n"
        "    @model_validator(mode='before')\n    @classmethod\n    def _check(cls, data): raise TypeError('oops')\n",
        "options": "Options",
    },
    "probe module is missing": {"probe": "'no.such:probe'"},
    "probe raises": {"before": "def probe(request): raise OSError('driver')", "probe": "probe"},
    "probe exits": {"before": "def probe(request): raise SystemExit(1)", "probe": "probe"},
    "probe returns None": {"probe": "lambda request: None"},
    "probe returns True": {"probe": "lambda request: True"},
    "probe takes nothing": {"probe": "lambda: Available(device='cpu')"},
}


@pytest.mark.parametrize("fields", BROKEN_CALLS.values(), ids=BROKEN_CALLS.keys())
def test_p23_every_call_into_a_plugin_is_isolated(site: Site, fields: dict[str, Any]) -> None:
    site.plugin("acme", **fields)
    site.plugin("beta")
    with pytest.raises(BackendLoadError) as caught:
        select(site, "acme")
    assert caught.value.__cause__ is not None
    with pytest.warns(BackendSkippedWarning, match=r"'acme' \(kvcache-acme 1.0, priority 0\) is broken"):
        assert select(site).backend.name == "beta"


# -- auto ------------------------------------------------------------------------------------------------


def test_auto_takes_the_highest_priority_that_can_run(site: Site) -> None:
    site.plugin("low", priority=1)
    site.plugin("high", priority=9)
    site.plugin("higher", priority=10, probe=NO)
    selection = select(site)
    assert selection.backend.name == "high"
    assert passed_over(selection) == [("higher", "unavailable")]
    assert selection.rejected[0].reason == "there is no device"
    assert "priority" in selection.reason


def test_p40_equal_priorities_are_settled_by_name(site: Site) -> None:
    for name in ["zeta", "beta", "gamma"]:
        site.plugin(name)
    assert select(site).backend.name == "beta"


def test_p39_the_choice_does_not_depend_on_the_hash_seed(site: Site) -> None:
    for name in ["one", "two", "three", "four"]:
        site.plugin(name)
    program = (
        "from kvcache_core.config import CacheConfig; from kvcache_core.selection import choose\n"
        "print(choose(CacheConfig(disable=['kvcache-cpu'])).backend.name)"
    )
    path = os.pathsep.join([str(site.path), str(Path(__file__).parents[1])])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert outputs == {"four\n"}


def test_third_parties_do_not_outrank_first_parties(site: Site) -> None:
    site.plugin("acme", priority=1000)
    site.plugin("cpu", priority=5)
    assert select(site).backend.name == "cpu"
    assert select(site, backend_order=["acme"]).backend.name == "acme"


def test_capped_third_parties_stand_before_lower_first_parties(site: Site) -> None:
    site.plugin("cuda", priority=100, probe=NO)
    site.plugin("acme", priority=1000)
    site.plugin("cpu", priority=0)
    assert passed_over(select(site)) == [("cuda", "unavailable")]
    assert select(site).backend.name == "acme"


def test_a_third_party_that_takes_a_first_party_name_cannot_knock_it_out(site: Site) -> None:
    site.plugin("cpu")
    site.plugin("cpu", dist="acme-kv", priority=1000)
    assert select(site).backend.qualified == "kvcache-cpu:cpu"


def test_backend_order_comes_first_and_the_rest_follows(site: Site) -> None:
    site.plugin("cpu", priority=5)
    site.plugin("acme", probe=NO)
    site.plugin("beta")
    selection = select(site, backend_order=["acme", "kvcache-beta:beta"])
    assert selection.backend.name == "beta"
    assert "backend_order" in selection.reason
    assert select(site, backend_order=["acme"]).backend.name == "cpu"


def test_backend_order_imports_nothing_beyond_what_it_lists(site: Site) -> None:
    site.plugin("acme")
    site.plugin("other")
    select(site, backend_order=["acme"])
    assert "kvcache_other" not in sys.modules


def test_backend_order_passes_over_what_is_not_installed(site: Site) -> None:
    site.plugin("cpu")
    selection = select(site, backend_order=["cuda", "cpu"])
    assert passed_over(selection) == [("cuda", "not installed")]


def test_backend_order_with_a_name_that_nothing_has_warns(site: Site) -> None:
    site.plugin("cpu")
    with pytest.warns(ConfigWarning, match="backend_order names 'cpuu'"):
        assert select(site, backend_order=["cpuu", "cpu"]).backend.name == "cpu"


def test_backend_order_with_an_ambiguous_name_is_an_error(site: Site) -> None:
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    with pytest.raises(AmbiguousBackendError):
        select(site, backend_order=["shared"])


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"device": "xpu"}, {"devices": "('xpu',)", "probe": "lambda request: Available(device='xpu:0')"}),
        ({"dtype": "int8"}, {"dtypes": "('int8',)"}),
        ({"block_size": 256}, {"block_sizes": "(256,)", "default_block_size": 256}),
    ],
)
def test_auto_passes_quietly_over_what_does_not_suit(site: Site, values: Any, fields: Any) -> None:
    site.plugin("cpu", priority=9, block_sizes="(16,)")
    site.plugin("acme", **fields)
    selection = select(site, **values)
    assert selection.backend.name == "acme"
    assert passed_over(selection) == [("cpu", "unsuitable")]


def test_auto_passes_over_a_backend_whose_storage_is_broken_with_a_warning(site: Site) -> None:
    site.plugin("cuda", version="1.2.0", priority=100, storage="raise OSError('libcudart.so.12: not found')")
    site.plugin("cpu")
    with pytest.warns(BackendSkippedWarning) as caught:
        assert select(site).backend.name == "cpu"
    (warning,) = caught
    assert str(warning.message) == (
        "'cuda' (kvcache-cuda 1.2.0, priority 100) is broken and was skipped: "
        "OSError: libcudart.so.12: not found; using 'cpu'"
    )
    assert warning.filename == __file__


def test_auto_passes_over_an_incompatible_backend_with_a_warning(site: Site) -> None:
    site.plugin("cuda", priority=100, interface="(2, 3)")
    site.plugin("cpu")
    with pytest.warns(
        BackendSkippedWarning, match="is incompatible and was skipped: implements interface 2.3, needs 1.x"
    ):
        assert passed_over(select(site)) == [("cuda", "incompatible")]


def test_auto_warns_once_and_not_about_what_is_worse(site: Site, recwarn: pytest.WarningsRecorder) -> None:
    site.plugin("bad", priority=-1, probe="lambda request: 1 / 0")
    site.plugin("worse", priority=3, probe="lambda request: 1 / 0")
    site.plugin("cpu")
    registry = site.registry()
    with pytest.warns(BackendSkippedWarning) as caught:
        choose(CacheConfig(backend_order=["worse"]), registry)
    assert ["'worse'" in str(warning.message) for warning in caught] == [True]
    choose(CacheConfig(backend_order=["worse"]), registry)
    assert len(recwarn) == 0


def test_auto_with_options_that_no_backend_knows_is_an_options_error(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options", priority=3)
    site.plugin("beta")
    with pytest.raises(OptionsError, match=r"backend 'acme': options\.siez: unknown option; did you mean 'size'"):
        select(site, options={"siez": 3})


def test_auto_says_so_when_options_decide_the_choice(site: Site) -> None:
    site.plugin("acme", before=OPTIONS, options="Options")
    site.plugin("beta", priority=3)
    with pytest.warns(
        BackendSkippedWarning, match=r"'beta' .* was skipped: .*options.size: unknown option.*using 'acme'"
    ):
        assert select(site, options={"size": 3}).backend.name == "acme"


def test_nothing_that_can_run_lists_every_reason(site: Site) -> None:
    site.plugin("cuda", probe=NO)
    site.plugin("metal", interface="(7, 4)")
    with pytest.raises(NoBackendAvailableError) as caught:
        select(site, device="auto")
    assert str(caught.value) == (
        "no KV-cache backend can run on this machine\n"
        "    cuda   unavailable    there is no device\n"
        "    metal  incompatible   implements interface 7.4, needs 1.x\n"
        '    cpu    not installed  pip install "kvcache-core[cpu]"'
    )


def test_nothing_that_suits_says_what_was_asked_for(site: Site) -> None:
    site.plugin("cpu")
    with pytest.raises(NoBackendAvailableError, match="Asked for: device 'cuda:1', dtype 'int8'"):
        select(site, device="cuda:1", dtype="int8")


def test_nothing_that_can_run_is_caused_by_what_is_broken(site: Site) -> None:
    site.plugin("acme", before="raise OSError('gone')")
    with pytest.raises(NoBackendAvailableError, match=r"broken .*OSError: gone") as caught:
        select(site)
    assert isinstance(caught.value.__cause__, BackendLoadError)


def test_nothing_installed(site: Site) -> None:
    with pytest.raises(NoBackendAvailableError, match="not installed"):
        select(site)


def test_p40_the_decision_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.plugin("cpu")
    with caplog.at_level(logging.INFO, logger="kvcache_core"):
        selection = select(site)
    assert f"kvcache backend 'cpu' (kvcache-cpu 1.0) on cpu: {selection.reason}" in caplog.messages


def test_a_registered_backend_takes_part(site: Site) -> None:
    package = site.plugin("acme")
    registry = site.registry()
    registry.register(
        BackendDescriptor(
            name="home",
            interface=(1, 0),
            storage=f"{package}.storage:Store",
            summary="",
            placement="paged",
            devices=("cpu",),
            dtypes=("float32",),
            probe=f"{package}.probe:probe",
            priority=7,
        )
    )
    site.module(
        f"{package}.probe", "from kvcache_core.plugin import *\nprobe = lambda request: Available(device='cpu')"
    )
    assert choose(CacheConfig(), registry).backend.name == "home"


# -- switched off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["acme", "ACME", "acme-kv", "Acme_KV", "acme-kv:acme", "*", " acme , ,", "x,acme"])
def test_p41_p42_backends_are_disabled_by_any_of_their_names(
    site: Site, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    site.plugin("acme", dist="Acme.KV", package="acme_kv", before="raise AssertionError('imported')")
    site.plugin("x")
    monkeypatch.setenv("KVCACHE_DISABLE", word)
    with pytest.raises(BackendDisabledError, match="switched off by environment variable KVCACHE_DISABLE"):
        select(site, "acme")


def test_p41_an_entry_that_names_nothing_warns_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("cpu")
    monkeypatch.setenv("KVCACHE_DISABLE", "acmee, cuda, kvcache-metal")
    registry = site.registry()
    with pytest.warns(ConfigWarning, match="KVCACHE_DISABLE names 'acmee'") as caught:
        choose(CacheConfig(), registry)
    assert len(caught) == 1
    choose(CacheConfig(), registry)


@pytest.mark.parametrize("value", ["", " ", ",", " , ,"])
def test_p42_an_empty_list_disables_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    site.plugin("cpu")
    monkeypatch.setenv("KVCACHE_DISABLE", value)
    assert select(site).backend.name == "cpu"


def test_p43_the_environment_is_read_when_a_selection_is_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme", priority=2)
    site.plugin("beta")
    config, registry = CacheConfig(), site.registry()
    assert choose(config, registry).backend.name == "acme"
    monkeypatch.setenv("KVCACHE_DISABLE", "acme")
    selection = choose(config, registry)
    assert selection.backend.name == "beta"
    assert passed_over(selection) == [("acme", "disabled")]
    monkeypatch.delenv("KVCACHE_DISABLE")
    assert choose(config, registry).backend.name == "acme"


def test_disabled_plugins_are_not_imported_by_auto(site: Site) -> None:
    site.plugin("acme")
    site.plugin("beta")
    select(site, disable=["acme"])
    assert "kvcache_acme" not in sys.modules


def test_the_config_key_disables_as_well_and_says_where_it_stands(site: Site, tmp_path: Path) -> None:
    site.plugin("acme")
    file = tmp_path / "kvcache.toml"
    file.write_text('backend = "acme"\ndisable = ["kvcache-acme"]\n')
    config = CacheConfig.load(file, environ={})
    with pytest.raises(BackendDisabledError, match=r"the config key 'disable' .*kvcache.toml, line 2"):
        choose(config, site.registry())


def test_disabling_everything_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("cpu")
    monkeypatch.setenv("KVCACHE_DISABLE", "*")
    with pytest.raises(
        NoBackendAvailableError, match=r"cpu\s+disabled\s+by '\*' in environment variable KVCACHE_DISABLE"
    ):
        select(site)
