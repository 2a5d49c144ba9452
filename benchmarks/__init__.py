"""Measurements against transformers' own caches. `python -m benchmarks` runs them all."""
