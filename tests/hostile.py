"""An environment in which all is wrong that can be: damaged neighbours, and plugins that are broken in every way.

`python -m tests.hostile DIR` builds it in a folder and says how to use it.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from kvcache_core.interface import ENTRY_POINT_GROUP, OBSERVER_GROUP
from tests.plugin_site import STORAGE, Site, declaration

__all__ = ["add_damage", "add_deadly_plugins"]


def add_damage(site: Site) -> None:
    """Damaged metadata, and plugins that raise, exit, lie and collide. One of them, `good`, works."""
    _add_damaged_metadata(site)
    _add_good_plugins(site)
    site.plugin("raising", before="raise OSError('undefined symbol')", priority=1000)
    site.plugin("exiting", before="raise SystemExit(0)")
    site.plugin("dying", probe="lambda request: __import__('os')._exit(3)", priority=-1000)
    site.plugin("newer", interface="(9, 9)")
    site.plugin("hookless")
    site.module("kvcache_hookless.plugin", "pass")
    site.plugin("probing", probe="lambda request: 1 / 0")
    site.plugin("lacking", storage="from kvcache_core.plugin import Storage\nclass Store(Storage): pass")
    site.plugin("shared", dist="first-kv")
    site.plugin("shared", dist="second-kv")
    site.distribution("broken-observer", f"[{OBSERVER_GROUP}]\nlistener = broken_observer\n")
    site.module("broken_observer", "raise OSError('no listener')")


def _add_damaged_metadata(site: Site) -> None:
    site.distribution("", None, metadata=None, directory="-.dist-info")
    site.distribution("half", None, metadata=None)
    site.distribution("unrelated", "[console_scripts]\nno equals sign\n")
    site.distribution("latin", b"[console_scripts]\ncaf\xe9 = y:z\n")
    site.distribution("ghost", {"ghost": "ghost.plugin"}, directory="~host-1.0.dist-info")
    site.distribution("nameless", {"nameless": "x.plugin"}, metadata="Version: 1\n")
    site.distribution("bytes", f"[{ENTRY_POINT_GROUP}]\nx = x.y\n# ".encode() + b"\xff\n")
    site.distribution("lines", f"[{ENTRY_POINT_GROUP}]\nwhat\nbad name = x.y\nattr = x.y:z\n")
    site.distribution("missing", {"missing": "no_such_module.plugin"})
    site.distribution("kvcache-good", {"good": "kvcache_good.plugin"}, path=site.add_path("earlier"), version="0.1")


def _add_good_plugins(site: Site) -> None:
    """The same thing three ways: installed, as an editable install, and in a zip file."""
    site.plugin("good", priority=1)
    sources = site.add_path("sources")
    package = site.plugin("edited", path=sources)
    metadata = sources / f"{package}-1.0.dist-info"
    record = {"url": sources.as_uri(), "dir_info": {"editable": True}}
    (metadata / "direct_url.json").write_text(json.dumps(record), encoding="utf-8")
    metadata.rename(site.path / metadata.name)
    archive = site.path.with_name("zipped.zip")
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("kvcache_zipped/__init__.py", "")
        opened.writestr("kvcache_zipped/plugin.py", declaration("zipped", "kvcache_zipped"))
        opened.writestr("kvcache_zipped/storage.py", STORAGE)
        folder = "kvcache_zipped-1.0.dist-info"
        opened.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: kvcache-zipped\nVersion: 1.0\n")
        opened.writestr(f"{folder}/entry_points.txt", f"[{ENTRY_POINT_GROUP}]\nzipped = kvcache_zipped.plugin\n")
    site.paths.append(archive)


def add_deadly_plugins(site: Site) -> None:
    """Plugins whose import never ends or ends the process, and another that calls itself cpu."""
    site.plugin("hanging", before="import time\ntime.sleep(10_000)")
    site.plugin("leaving", before="import os\nos._exit(0)")
    site.plugin("cpu", dist="evil-cpu", priority=10_000)


def main() -> None:
    """Build it in the folder that is given."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    site = Site(folder, pytest.MonkeyPatch())
    add_damage(site)
    add_deadly_plugins(site)
    print(f"PYTHONPATH={os.pathsep.join(map(str, site.paths))} kvcache doctor")


if __name__ == "__main__":
    main()
