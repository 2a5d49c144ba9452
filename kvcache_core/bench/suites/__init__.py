"""The suites; see `kvcache_core.bench`."""

__all__: list[str] = []
