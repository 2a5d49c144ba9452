"""Trying installed backends in processes of their own."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvcache_core.report import BackendReport, DoctorReport, examine, try_backend
from kvcache_core.trial import trial
from tests.plugin_site import Site


def findings(site: Site, name: str = "acme", timeout: float = 20.0, **how: Any) -> dict[str, Any]:
    entry = site.registry().find(name)
    return try_backend(entry, timeout=timeout, **how)  # type: ignore[arg-type]


def reports(report: DoctorReport) -> dict[str, BackendReport]:
    return {backend.qualified: backend for backend in report.backends}


def test_an_available_backend(site: Site) -> None:
    site.plugin("acme", probe="lambda request: Available(device='cpu', detail='all is well')")
    found = findings(site)
    assert (found["state"], found["device"], found["reason"]) == ("available", "cpu", "all is well")
    assert found["interface"] == "1.0"


def test_an_unavailable_backend_keeps_code_reason_and_hint(site: Site) -> None:
    site.plugin("acme", probe="lambda request: Unavailable(code='no-device', reason='there is none', hint='buy one')")
    found = findings(site)
    assert (found["state"], found["code"], found["reason"], found["hint"]) == (
        "unavailable",
        "no-device",
        "there is none",
        "buy one",
    )


HOSTILE = {
    "exits": ({"before": "import os; os._exit(7)"}, "ended with status 7"),
    "is killed": (
        {"before": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"},
        "was killed by SIGKILL",
    ),
    "raises": ({"before": "raise OSError('libfoo.so')"}, "OSError: libfoo.so"),
    "raises SystemExit": ({"before": "raise SystemExit(3)"}, "SystemExit: 3"),
    "probe raises": ({"probe": "lambda request: 1 / 0"}, "ZeroDivisionError"),
    "storage raises": ({"storage": "raise OSError('libcudart.so.12')"}, "OSError: libcudart.so.12"),
    "tells why it exits": (
        {"before": "import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(1)"},
        "no licence",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_p28_a_plugin_that_dies_is_reported_like_any_other(site: Site, fields: dict[str, str], reason: str) -> None:
    site.plugin("acme", **fields)
    found = findings(site)
    assert found["state"] == "broken"
    assert reason in found["reason"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are POSIX")
def test_p28_a_plugin_that_hangs_is_given_up_with_what_it_started(site: Site, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    before = f"""
        import subprocess
        sleeper = subprocess.Popen(["sleep", "60"])
        open({str(pid)!r}, "w").write(str(sleeper.pid))
        sleeper.wait()
    """
    site.plugin("acme", before=before)
    found = findings(site, timeout=2.0)
    assert (found["state"], found["code"]) == ("broken", "timeout")
    assert "did not answer within 2 seconds" in found["reason"]
    deadline = time.monotonic() + 5
    while is_running(int(pid.read_text())):
        assert time.monotonic() < deadline, "the sleeping process was left behind"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry waiting for its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_output_and_threads_a_plugin_leaves_behind_do_not_matter(site: Site) -> None:
    before = "import threading, time\nprint('hello')\nthreading.Thread(target=time.sleep, args=[60]).start()"
    site.plugin("acme", before=before)
    assert findings(site)["state"] == "available"


def test_an_incompatible_backend(site: Site) -> None:
    site.plugin("acme", interface="(9, 0)")
    found = findings(site)
    assert (found["state"], found["interface"]) == ("incompatible", "9.0")
    assert "implements interface 9.0" in found["reason"]


def test_a_backend_that_lacks_methods_is_incompatible_only_when_it_is_loaded(site: Site) -> None:
    site.plugin("acme", storage="from kvcache_core.plugin import Storage\nclass Store(Storage): pass")
    assert findings(site, load=False)["state"] == "available"
    found = findings(site)
    assert found["state"] == "incompatible"
    assert "missing methods" in found["reason"]


def test_a_backend_with_required_options_cannot_be_tried(site: Site) -> None:
    site.plugin("acme", before="class Options(BackendOptions):\n    endpoint: str", options="Options")
    found = trial(site.registry(), "acme", load=True)
    assert (found["state"], found["code"]) == ("unavailable", "needs-options")
    assert "options.endpoint" in found["reason"]


def test_the_report_covers_everything_that_is_installed(site: Site) -> None:
    record = json.dumps({"url": "file:///src/good", "dir_info": {"editable": True}})
    package = site.plugin("good")
    (site.path / f"{package}-1.0.dist-info" / "direct_url.json").write_text(record)
    site.plugin("bad", before="raise OSError('gone')")
    site.plugin("shared", dist="acme-kv")
    site.plugin("shared", dist="beta-kv")
    site.plugin("hidden", before="raise AssertionError")
    report = examine(site.registry(), timeout=30, environ={"KVCACHE_DISABLE": "hidden"})
    found = reports(report)
    assert list(found) == [
        "kvcache-bad:bad",
        "kvcache-good:good",
        "kvcache-hidden:hidden",
        "acme-kv:shared",
        "beta-kv:shared",
    ]
    assert [backend.state for backend in report.backends] == [
        "broken",
        "available",
        "disabled",
        "available",
        "available",
    ]
    good = found["kvcache-good:good"]
    assert (good.editable, good.source, good.location) == (True, "/src/good", str(site.path))
    assert found["acme-kv:shared"].ambiguous
    assert not good.ambiguous
    assert found["kvcache-hidden:hidden"].reason == "by 'hidden' in environment variable KVCACHE_DISABLE"
    assert not report.healthy


def test_unavailable_and_disabled_backends_and_notes_are_healthy(site: Site) -> None:
    site.plugin("acme", probe="lambda request: Unavailable(code='no', reason='none')")
    site.distribution("acme", {"ghost": "acme.plugin"}, directory="~cme-1.0.dist-info")
    report = examine(site.registry(), environ={})
    assert [problem.code for problem in report.problems] == ["leftover"]
    assert report.healthy


def test_damaged_metadata_of_a_plugin_is_unhealthy(site: Site) -> None:
    site.distribution("acme", {"no name": "acme.plugin"})
    report = examine(site.registry(), environ={})
    assert report.backends == ()
    assert not report.healthy


def test_the_environment_shows_what_matters_and_hides_secrets(site: Site) -> None:
    environ = {
        "KVCACHE_BACKEND": "cpu",
        "KVCACHE_OPTIONS__TOKEN": "s3cret",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_ENABLE_MPS_FALLBACK": "1",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
    }
    assert examine(site.registry(), environ=environ).environment == {
        "CUDA_VISIBLE_DEVICES": "",
        "KVCACHE_BACKEND": "cpu",
        "KVCACHE_OPTIONS__TOKEN": "(hidden)",
        "PYTORCH_ENABLE_MPS_FALLBACK": "1",
    }


def test_the_json_form_is_stable(site: Site) -> None:
    site.plugin("acme")
    site.distribution("broken", {"no name": "x.y"})
    report = json.loads(json.dumps(examine(site.registry(), environ={}).to_json()))
    assert list(report) == [
        "healthy",
        "version",
        "interface",
        "python",
        "executable",
        "platform",
        "backends",
        "observers",
        "problems",
        "environment",
    ]
    assert list(report["backends"][0]) == [
        "name",
        "qualified",
        "distribution",
        "version",
        "location",
        "editable",
        "source",
        "module",
        "state",
        "code",
        "reason",
        "hint",
        "interface",
        "device",
        "ambiguous",
    ]
    assert list(report["problems"][0]) == [
        "code",
        "reason",
        "location",
        "distribution",
        "line",
        "breaks_plugin",
    ]
