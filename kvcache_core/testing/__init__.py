"""The conformance kit: the tests that every backend of kvcache-core has to pass.

Needs `pip install "kvcache-core[testing]"`, which brings pytest and hypothesis.
"""

from __future__ import annotations

from importlib.util import find_spec

_missing = [name for name in ("pytest", "hypothesis", "torch") if find_spec(name) is None]
if _missing:
    raise ImportError(
        f"kvcache_core.testing needs {' and '.join(_missing)}: pip install 'kvcache-core[testing]'", name=_missing[0]
    )

from kvcache_core.testing.reference import reference_attention  # noqa: E402

__all__ = ["reference_attention"]
