"""The registry: isolation, laziness, threads, forks, and in-process backends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.errors import (
    AmbiguousBackendError,
    BackendError,
    BackendLoadError,
    IncompatibleBackendError,
    UnknownBackendError,
)
from kvcache_core.plugin import Available, BackendDescriptor, Storage
from kvcache_core.registry import BackendRegistry, get_registry
from tests.plugin_site import PathsFinder, Site, declaration

ROOT = Path(__file__).parents[1]


def descriptor(name: str = "home", **changes: Any) -> BackendDescriptor:
    fields: dict[str, Any] = {
        "name": name,
        "interface": (1, 0),
        "storage": "home.storage:Store",
        "summary": "",
        "placement": "paged",
        "devices": ("cpu",),
        "dtypes": ("float32",),
        "probe": "home.probe:probe",
    }
    return BackendDescriptor(**(fields | changes))


def run_python(program: str, site: Site, **environ: str) -> str:
    """Run a program in a fresh interpreter that sees the site, and return what it printed."""
    path = os.pathsep.join([*map(str, site.paths), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- finding, describing, loading ------------------------------------------------------------------------


def test_a_backend_is_found_described_and_loaded(site: Site) -> None:
    package = site.plugin("acme", dist="acme-kv", version="2.0")
    registry = site.registry()
    assert registry.names() == ("acme",)
    backend = registry.describe("acme")
    assert backend.descriptor.name == "acme"
    assert backend.qualified == "acme-kv:acme"
    assert backend.label == "'acme' (acme-kv 2.0)"
    assert not backend.is_first_party
    assert f"{package}.storage" not in sys.modules
    storage = registry.load("acme")
    assert issubclass(storage, Storage)
    assert storage is registry.load(backend)


def test_p01_metadata_is_scanned_once_until_refresh(site: Site) -> None:
    site.plugin("acme")
    finder = PathsFinder(site.paths)
    registry = BackendRegistry(finders=[finder])
    assert finder.calls == 0
    for _ in range(3):
        registry.names()
        registry.describe("acme")
        with pytest.raises(UnknownBackendError):
            registry.find("nothing")
    assert finder.calls == 1
    registry.refresh()
    registry.names()
    assert finder.calls == 2


def test_p16_a_registry_without_finders_serves_what_the_program_registers(site: Site) -> None:
    package = site.plugin("acme")
    registry = BackendRegistry(finders=[])
    assert registry.names() == ()
    registry.register(descriptor("home", storage=f"{package}.storage:Store"))
    assert registry.names() == ("home",)
    assert issubclass(registry.load("home"), Storage)


def test_p16_a_frozen_program_registers_plugin_modules(site: Site) -> None:
    package = site.plugin("acme")
    module = __import__(f"{package}.plugin", fromlist=["plugin"])
    registry = BackendRegistry(finders=[])
    (backend,) = registry.register_plugin(module)
    assert (backend.name, backend.distribution) == ("acme", None)
    assert registry.register_plugin(module) == (backend,)
    assert issubclass(registry.load("acme"), Storage)


def test_p18_a_backend_installed_while_the_program_runs_is_found_after_refresh(site: Site) -> None:
    registry = site.registry()
    with pytest.raises(UnknownBackendError):
        registry.describe("late")
    site.plugin("late")
    with pytest.raises(UnknownBackendError):
        registry.describe("late")
    registry.refresh()
    assert issubclass(registry.load("late"), Storage)


def test_p20_asking_for_one_never_returns_another(site: Site) -> None:
    for name in ["one", "two", "three"]:
        site.plugin(name)
    registry = site.registry()
    for name in ["two", "one", "three"]:
        assert registry.describe(name).name == name
        assert registry.load(name).__module__ == f"kvcache_{name}.storage"
    with pytest.raises(UnknownBackendError):
        registry.describe("four")


def test_p21_a_broken_plugin_leaves_names_and_other_backends_alone(site: Site) -> None:
    site.plugin("broken", before="raise RuntimeError('boom')")
    site.plugin("good")
    registry = site.registry()
    with pytest.raises(BackendLoadError):
        registry.load("broken")
    assert registry.names() == ("broken", "good")
    assert issubclass(registry.load("good"), Storage)


def test_p22_only_the_named_plugin_is_imported(site: Site) -> None:
    site.plugin("other")
    site.plugin("acme")
    site.registry().load("acme")
    assert "kvcache_acme.storage" in sys.modules
    assert "kvcache_other" not in sys.modules


FAILURES = {
    "ImportError": "import no_such_module",
    "OSError": "raise OSError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    "RuntimeError": "raise RuntimeError('autoload')",
    "AttributeError": "import os; os.no_such_name",
    "SyntaxError": "1 +",
    "SystemExit": "raise SystemExit(3)",
    "KvCacheError": "import kvcache_core; raise kvcache_core.UnknownBackendError('hm')",
}


@pytest.mark.parametrize("source", FAILURES.values(), ids=FAILURES.keys())
def test_p26_every_kind_of_import_failure_becomes_a_load_error_with_its_cause(site: Site, source: str) -> None:
    site.plugin("acme", before=source)
    with pytest.raises(BackendLoadError, match=r"failed while importing kvcache_acme\.plugin") as caught:
        site.registry().describe("acme")
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in str(caught.value)
    assert (caught.value.backend, caught.value.distribution) == ("acme", "kvcache-acme")


@pytest.mark.parametrize("source", FAILURES.values(), ids=FAILURES.keys())
def test_p26_every_kind_of_storage_import_failure_becomes_a_load_error(site: Site, source: str) -> None:
    site.plugin("acme", storage=source)
    with pytest.raises(BackendLoadError, match=r"failed while importing kvcache_acme\.storage"):
        site.registry().load("acme")


def test_p26_a_keyboard_interrupt_is_the_users(site: Site) -> None:
    site.plugin("acme", before="raise KeyboardInterrupt")
    registry = site.registry()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            registry.describe("acme")


def test_p27_an_install_hint_only_where_nothing_provides_the_name(site: Site) -> None:
    site.plugin("cuda", before="import no_such_module")
    registry = site.registry()
    with pytest.raises(BackendLoadError) as broken:
        registry.describe("cuda")
    assert "pip install" not in str(broken.value)
    assert "no_such_module" in str(broken.value)
    with pytest.raises(UnknownBackendError, match="pip install"):
        registry.describe("metal")


def test_p32_a_plugin_may_import_core_at_its_top(site: Site) -> None:
    site.plugin("acme", before="import kvcache_core, kvcache_core.registry, kvcache_core.selection")
    assert site.registry().describe("acme").name == "acme"


@pytest.mark.parametrize("order", ["kvcache_acme.plugin, kvcache_core", "kvcache_core, kvcache_acme.plugin"])
def test_vllm_rbln_876_plugin_and_core_import_in_either_order(site: Site, order: str) -> None:
    site.plugin("acme", before="import kvcache_core")
    program = f"import {order}; from kvcache_core.registry import get_registry; print(get_registry().load('acme'))"
    assert "Store" in run_python(program, site)


def test_vllm_rbln_876_a_module_that_asks_for_itself_while_it_is_imported_is_not_dropped(site: Site) -> None:
    before = """
        from kvcache_core.errors import BackendLoadError
        from kvcache_core.registry import get_registry
        try:
            get_registry().describe("acme")
        except BackendLoadError as error:
            refused = str(error)
    """
    site.plugin("acme", before=before)
    program = (
        "import kvcache_acme.plugin as plugin; print(plugin.refused)\n"
        "from kvcache_core.registry import get_registry; print(get_registry().describe('acme').name)"
    )
    output = run_python(program, site)
    assert "still being imported" in output
    assert output.splitlines()[-1] == "acme"


# -- failures are remembered, successes made once --------------------------------------------------------


def counting(counter: Path) -> str:
    return f"with open({str(counter)!r}, 'a') as file: file.write('x')"


def test_p33_a_failure_is_remembered_until_refresh(site: Site, tmp_path: Path) -> None:
    counter, flag = tmp_path / "count", tmp_path / "repaired"
    source = f"{counting(counter)}\nimport os\nif not os.path.exists({str(flag)!r}): raise OSError('driver')"
    site.plugin("acme", before=source)
    registry = site.registry()
    errors = []
    for _ in range(3):
        with pytest.raises(BackendLoadError) as caught:
            registry.describe("acme")
        errors.append(caught.value)
    assert counter.read_text() == "x"
    assert len({id(error) for error in errors}) == 3  # threads must not share one traceback
    assert all(isinstance(error.__cause__, OSError) for error in errors)
    flag.touch()
    registry.refresh()
    assert registry.describe("acme").name == "acme"


def test_vllm_10443_module_and_hook_run_once_over_many_lookups_and_threads(site: Site, tmp_path: Path) -> None:
    module, hook, storage = (tmp_path / name for name in ("module", "hook", "storage"))
    package = site.plugin("acme")
    source = declaration("acme", package, before=counting(module)).replace(
        "(host):\n", f"(host):\n    {counting(hook)}\n"
    )
    site.module(f"{package}.plugin", source)
    site.module(f"{package}.storage", counting(storage) + (site.path / package / "storage.py").read_text())
    registry = site.registry()
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda _: registry.load("acme"), range(6)))) == 1
    assert [path.read_text() for path in (module, hook, storage)] == ["x", "x", "x"]


def test_p34_sixteen_threads_asking_for_a_slow_plugin_get_one_object(site: Site, tmp_path: Path) -> None:
    counter = tmp_path / "count"
    slow = f"import time; time.sleep(0.3)\n{counting(counter)}"
    site.plugin("slow", before=slow)
    registry = site.registry()
    barrier = threading.Barrier(16)

    def ask(_: int) -> tuple[int, type[Storage]]:
        barrier.wait()
        return id(registry.describe("slow").descriptor), registry.load("slow")

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(16)))) == 1
    assert counter.read_text() == "x"


@pytest.mark.parametrize("asked", ["register", "describe other", "describe itself"])
def test_p35_a_plugin_that_calls_the_registry_while_another_thread_asks_for_it_does_not_deadlock(
    site: Site, asked: str
) -> None:
    calls = {
        "register": "get_registry().register(BackendDescriptor(name='extra', interface=(1, 0), storage='a.b:C', "
        "summary='', placement='paged', devices=('cpu',), dtypes=('float32',), probe='a.b:c'))",
        "describe other": "get_registry().describe('other')",
        "describe itself": "try:\n    get_registry().describe('acme')\nexcept ImportError:\n    pass",
    }
    before = "\n".join(
        [
            "import threading, time",
            "from kvcache_core.registry import get_registry",
            "importing = True",
            "import builtins; builtins.started.set(); time.sleep(0.3)",
            calls[asked],
        ]
    )
    site.plugin("other")
    site.plugin("acme", before=before)
    program = """
import builtins, threading
builtins.started = threading.Event()
from kvcache_core.registry import get_registry
importer = threading.Thread(target=lambda: __import__("kvcache_acme.plugin"), daemon=True)
importer.start()
builtins.started.wait()
answers = []
asker = threading.Thread(target=lambda: answers.append(get_registry().describe("acme").name), daemon=True)
asker.start()
importer.join(20), asker.join(20)
print(answers, importer.is_alive(), asker.is_alive())
"""
    assert run_python(program, site) == "['acme'] False False\n"


def test_p36_a_hook_that_asks_for_its_own_backend_gets_a_clear_error(site: Site) -> None:
    package = site.plugin("acme")
    site.plugin("other")
    source = declaration("acme", package).replace(
        "(host):\n",
        "(host):\n    from tests.test_registry import CURRENT\n    CURRENT[0].describe('other')\n"
        "    CURRENT[0].describe('acme')\n",
    )
    site.module(f"{package}.plugin", source)
    CURRENT[:] = [site.registry()]
    with pytest.raises(BackendLoadError, match="asked for itself while it was being loaded"):
        CURRENT[0].describe("acme")


CURRENT: list[BackendRegistry] = []


def test_p37_registering_the_same_descriptor_twice_changes_nothing() -> None:
    registry = BackendRegistry(finders=[])
    first = registry.register(descriptor())
    assert registry.register(descriptor()) == first
    with pytest.raises(BackendError, match="a different backend named 'home' is already registered"):
        registry.register(descriptor(priority=5))
    assert registry.describe("home").descriptor.priority == 0
    registry.register(descriptor(priority=5), replace=True)
    assert registry.describe("home").descriptor.priority == 5


def test_p38_a_name_that_two_distributions_claim_is_ambiguous_only_when_asked_for(site: Site) -> None:
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    site.plugin("other")
    registry = site.registry()
    assert registry.names() == ("other", "shared")
    assert registry.describe("other").name == "other"
    with pytest.raises(AmbiguousBackendError) as caught:
        registry.describe("shared")
    assert "acme-kv 1.0" in str(caught.value)
    assert "beta-kv 1.0" in str(caught.value)
    for owner in ("acme-kv", "beta-kv"):
        backend = registry.describe(f"{owner}:shared")
        assert backend.distribution is not None
        assert backend.distribution.name == owner
        assert registry.load(f"{owner}:shared").__module__ == f"{owner.replace('-', '_')}.storage"


def test_p46_missing_methods_are_listed(site: Site) -> None:
    storage = """
        from kvcache_core.plugin import Storage
        class Store(Storage):
            placement = "paged"
            def open(self, max_tokens): ...
    """
    site.plugin("acme", storage=storage)
    with pytest.raises(IncompatibleBackendError, match="missing methods: attend, close, device_memory") as caught:
        site.registry().load("acme")
    assert "open" not in str(caught.value).splitlines()[0]
    assert "handle_type" in str(caught.value)


@pytest.mark.parametrize(
    ("storage", "complaint"),
    [
        ("Store = 3", "3 is not a class"),
        ("class Store: pass", "it does not subclass kvcache_core.plugin.Storage"),
        ("from tests.plugin_site import STORAGE; exec(STORAGE); Store.placement = 'contiguous'", "its placement is"),
        ("from tests.plugin_site import STORAGE; exec(STORAGE); Store.handle_type = int", "handle_type must be"),
        ("from tests.plugin_site import STORAGE; exec(STORAGE); Store.dense_is_view = None", "dense_is_view must be"),
    ],
)
def test_p46_a_class_that_is_not_the_storage_it_promises_is_refused(site: Site, storage: str, complaint: str) -> None:
    site.plugin("acme", storage=storage)
    with pytest.raises(IncompatibleBackendError, match=complaint):
        site.registry().load("acme")


def test_a_capability_that_the_class_does_not_have_is_refused(site: Site) -> None:
    site.plugin("acme", capabilities="{'swap'}")
    with pytest.raises(IncompatibleBackendError, match="declares capabilities that the class does not: swap"):
        site.registry().load("acme")


@pytest.mark.parametrize("interface", ["(0, 9)", "(1, 1)", "(2, 0)"])
def test_p44_the_interface_version_is_compared_before_heavy_imports(site: Site, interface: str) -> None:
    site.plugin("acme", interface=interface, storage="raise AssertionError('imported')")
    registry = site.registry()
    assert registry.describe("acme").descriptor.interface == eval(interface)
    with pytest.raises(IncompatibleBackendError, match="implements interface"):
        registry.load("acme")


def test_p47_the_package_version_does_not_matter(site: Site) -> None:
    site.plugin("acme", version="99.7.dev3+local")
    assert issubclass(site.registry().load("acme"), Storage)


# -- hooks -----------------------------------------------------------------------------------------------

HOOKS = {
    "none at all": ("x = 1", "implements no kvcache_backends hook"),
    "not marked": ("def kvcache_backends(host): return []", "implements no kvcache_backends hook"),
    "misspelt": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backend(host): return []",
        "kvcache_backend.*the hooks are: kvcache_backends",
    ),
    "unknown argument": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(machine): return []",
        "machine",
    ),
    "raises": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): raise ValueError('no')",
        "ValueError: no",
    ),
    "exits": (
        "import sys\nfrom kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): sys.exit(1)",
        "SystemExit",
    ),
    "returns None": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): return None",
        "must return a list of BackendDescriptor, not NoneType",
    ),
    "returns text": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): return 'acme'",
        "not str",
    ),
    "returns names": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): return ['acme', 1]",
        "not list of int, str",
    ),
    "returns nothing": (
        "from kvcache_core.plugin import hookimpl\n@hookimpl\ndef kvcache_backends(host): return []",
        "declares no backend of this name .declared: none",
    ),
    "another name": (declaration("beta", "kvcache_acme"), "declares no backend of this name .declared: beta"),
    "twice": (declaration("acme", "kvcache_acme", names=["acme", "acme"]), "declares a backend twice"),
    "bad descriptor": (declaration("acme", "kvcache_acme", devices="'cpu'"), "BackendDescriptor.devices must be"),
    "newer descriptor": (declaration("acme", "kvcache_acme", colour="'red'"), "may be written for a newer"),
}


@pytest.mark.parametrize(("source", "complaint"), HOOKS.values(), ids=HOOKS.keys())
def test_g1_to_g7_a_wrong_hook_is_one_plugins_trouble_and_stays_so(site: Site, source: str, complaint: str) -> None:
    package = site.plugin("acme")
    site.module(f"{package}.plugin", source)
    site.plugin("good")
    registry = site.registry()
    for _ in range(2):
        with pytest.raises(BackendLoadError, match=complaint):
            registry.describe("acme")
    assert registry.describe("good").name == "good"


def test_g2_two_distributions_with_one_name_are_both_reachable_although_one_is_broken(site: Site) -> None:
    site.plugin("shared", dist="acme-kv", before="raise OSError")
    site.plugin("shared", dist="beta-kv")
    assert site.registry().describe("beta-kv:shared").qualified == "beta-kv:shared"


def test_g4_names_in_the_module_that_misbehave_are_not_evaluated(site: Site) -> None:
    before = """
        class Trap:
            def __getattr__(self, name): raise RuntimeError(name)
            def __eq__(self, other): raise RuntimeError
            def __bool__(self): raise RuntimeError
            __hash__ = None
        trap = Trap()
    """
    site.plugin("acme", before=before)
    assert site.registry().describe("acme").name == "acme"


def test_g6_a_hook_need_not_take_the_host(site: Site) -> None:
    package = site.plugin("acme")
    file = site.path / package / "plugin.py"
    file.write_text(file.read_text().replace("(host)", "()"))
    assert site.registry().describe("acme").name == "acme"


def test_the_host_tells_interface_and_version(site: Site) -> None:
    package = site.plugin("acme")
    file = site.path / package / "plugin.py"
    file.write_text(file.read_text().replace("    return [", "    global seen; seen = host\n    return ["))
    site.registry().describe("acme")
    seen = sys.modules[f"{package}.plugin"].seen
    assert seen.interface == (1, 0)
    assert seen.version


def test_g12_one_module_may_stand_behind_several_names(site: Site) -> None:
    package = site.plugin("acme")
    site.distribution("multi", {"fast": f"{package}.multi", "small": f"{package}.multi"})
    site.module(f"{package}.multi", declaration("", package, names=["fast", "small", "hidden"]))
    registry = site.registry()
    assert [registry.describe(name).name for name in ("fast", "small")] == ["fast", "small"]
    with pytest.raises(UnknownBackendError):
        registry.describe("hidden")
    (note,) = registry.problems
    assert note.code == "unannounced"
    assert "'hidden'" in note.reason
    assert not note.breaks_plugin


def test_a_module_that_replaces_itself_with_an_object_is_refused(site: Site) -> None:
    package = site.plugin("acme")
    site.module(f"{package}.plugin", "import sys\nclass Fake: pass\nsys.modules[__name__] = Fake()")
    with pytest.raises(BackendLoadError, match="a plugin must be a module, not Fake"):
        site.registry().describe("acme")
    del sys.modules[f"{package}.plugin"]


# -- registered backends ---------------------------------------------------------------------------------


def test_register_refuses_anything_but_a_descriptor() -> None:
    with pytest.raises(BackendError, match="takes a BackendDescriptor, not str"):
        BackendRegistry(finders=[]).register("acme")  # type: ignore[arg-type]


def test_a_registered_backend_stands_before_an_installed_one(site: Site) -> None:
    site.plugin("acme")
    registry = site.registry()
    registry.register(descriptor("acme"))
    assert registry.names() == ("acme",)
    assert registry.describe("acme").distribution is None
    assert registry.describe("kvcache-acme:acme").distribution is not None
    registry.unregister("acme")
    assert registry.describe("acme").distribution is not None


def test_unregister_refuses_what_is_installed_or_unknown(site: Site) -> None:
    site.plugin("acme")
    registry = site.registry()
    with pytest.raises(BackendError, match="installed, not registered; set KVCACHE_DISABLE=acme"):
        registry.unregister("acme")
    with pytest.raises(UnknownBackendError):
        registry.unregister("nothing")


def test_refresh_keeps_what_the_program_registered() -> None:
    registry = BackendRegistry(finders=[])
    registry.register(descriptor())
    registry.refresh()
    assert registry.names() == ("home",)


def test_isolated_undoes_everything(site: Site) -> None:
    site.plugin("acme")
    registry = site.registry()
    registry.register(descriptor("kept"))
    with registry.isolated() as inside:
        assert inside is registry
        registry.register(descriptor("inner"))
        registry.unregister("kept")
        registry.refresh()
        assert registry.names() == ("acme", "inner")
    assert registry.names() == ("acme", "kept")


def test_isolated_undoes_everything_after_an_error() -> None:
    registry = BackendRegistry(finders=[])

    def fail() -> None:
        with registry.isolated():
            registry.register(descriptor())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert registry.names() == ()


def test_register_plugin_adds_all_backends_of_a_module_or_none() -> None:
    module = types.ModuleType("homemade")
    exec(declaration("", "home", names=["one", "two"]), vars(module))
    registry = BackendRegistry(finders=[])
    registry.register(descriptor("two", priority=3))
    with pytest.raises(BackendError, match="a different backend named 'two'"):
        registry.register_plugin(module)
    assert registry.names() == ("two",)


def test_register_plugin_reports_a_broken_module() -> None:
    with pytest.raises(BackendLoadError, match="implements no kvcache_backends hook"):
        BackendRegistry(finders=[]).register_plugin(types.ModuleType("empty"))


def test_targets_may_be_objects_or_paths(site: Site) -> None:
    package = site.plugin("acme", probe="'kvcache_acme.parts:Probes.probe'", options="'kvcache_acme.parts:Options'")
    site.module(
        f"{package}.parts",
        "from kvcache_core.plugin import *\nclass Options(BackendOptions): size: int = 1\n"
        "class Probes:\n    @staticmethod\n    def probe(request): return Available(device='cpu')\n",
    )
    registry = site.registry()
    backend = registry.describe("acme")
    assert registry.options_model(backend).__name__ == "Options"
    assert registry.probe(backend)(None) == Available(device="cpu")


@pytest.mark.parametrize("path", ["kvcache_acme.parts:Missing", "kvcache_acme.missing:Options", "json:loads"])
def test_options_that_cannot_be_had_are_a_load_error(site: Site, path: str) -> None:
    package = site.plugin("acme", options=repr(path))
    site.module(f"{package}.parts", "")
    registry = site.registry()
    with pytest.raises(BackendLoadError):
        registry.options_model(registry.describe("acme"))


# -- processes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_t4_a_spawned_worker_loads_the_plugin(site: Site) -> None:
    site.plugin("acme")
    program = (
        "import multiprocessing\n"
        "from kvcache_core.registry import get_registry\n"
        "def work(_): return get_registry().load('acme').__module__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(work, [0]))\n"
    )
    script = site.path / "spawning.py"
    script.write_text(program)
    assert run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", site) == (
        "['kvcache_acme.storage']\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_t4_a_forked_child_goes_on_although_another_thread_was_loading(site: Site) -> None:
    """The thread that was inside the hook does not exist in the child, which must not wait for it."""
    package = site.plugin("acme")
    source = declaration("acme", package).replace("(host):\n", "(host):\n    import time; time.sleep(0.5)\n")
    site.module(f"{package}.plugin", source)
    program = """
import os, threading, time
from kvcache_core.registry import get_registry
registry = get_registry()
registry.names()
thread = threading.Thread(target=registry.describe, args=["acme"])
thread.start()
while not registry._state.memo._running: time.sleep(0.01)
child = os.fork()
if child == 0:
    os._exit(0 if registry.describe("acme").name == "acme" else 1)
print(os.waitpid(child, 0)[1])
thread.join()
"""
    assert run_python(program, site, PYTHONWARNINGS="ignore") == "0\n"


def test_the_registry_of_the_process_is_always_the_same() -> None:
    assert get_registry() is get_registry()


def test_y12_errors_pickle_with_their_attributes(site: Site) -> None:
    site.plugin("broken", before="raise OSError('gone')")
    registry = site.registry()
    raising: list[Callable[[], Any]] = [lambda: registry.describe("broken"), lambda: registry.describe("gpu")]
    for call in raising:
        with pytest.raises(BackendError) as caught:
            call()
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), vars(copy)) == (type(caught.value), str(caught.value), vars(caught.value))


def test_p30_describing_imports_no_torch(site: Site) -> None:
    program = (
        "import sys\nfrom kvcache_core.registry import get_registry\nregistry = get_registry()\n"
        "[registry.describe(name) for name in registry.names()]\nprint('torch' in sys.modules)"
    )
    site.plugin("acme")
    assert run_python(program, site) == "False\n"
