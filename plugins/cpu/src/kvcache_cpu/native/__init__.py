"""The compiled kernel: its sources in C, the shared library that a build leaves here, and what loads it."""
