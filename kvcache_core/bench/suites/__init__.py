"""The suites; see `kvcache_core.bench`."""
