"""What `kvcache conformance` has pytest collect; its plugin gives the class the backend's own declarations."""

from __future__ import annotations

from kvcache_core.testing.backend import BackendConformance

__all__ = ["TestBackend"]


class TestBackend(BackendConformance):
    """The whole kit for one installed backend."""
