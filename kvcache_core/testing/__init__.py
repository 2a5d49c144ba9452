"""The conformance kit: the tests that every backend of kvcache-core has to pass.

A backend's author writes one class, in a test module of the backend's own distribution:

```python
from kvcache_core.testing import BackendConformance

class TestAcme(BackendConformance):
    backend = "acme"                                    # as users write it; or override open_storage(spec)
    options = {"pages": "huge"}                         # as they would stand in a configuration
    dtypes = ("float32", "bfloat16")
    capabilities = frozenset({"unequal_head_dims"})     # what the storage declares
```

and inherits some two hundred tests. Before the backend is installed, or to test its `Storage` alone:

```python
    def open_storage(self, spec):
        return AcmeStorage(spec)
```

`Declaration` says what else can be declared: a storage that loses precision gives its `round_trip_error`, kernels
that round more than usual their `attention_error`, and a backend with few block sizes its `block_size` and
`block_sizes`. What a backend does not declare is skipped, with that reason; what it declares has to work. Tests of
the kit cannot be replaced in a subclass. One that fails for a good reason is named in `known_failures`, with the
reason, and then has to fail.

The parts may be used one by one, each in a class of its own: `HandleConformance`, `TableConformance`,
`AppendConformance`, `StepConformance`, `ForkConformance`, `TruncateConformance`, `AttentionConformance`,
`PerturbationConformance`, `NumericsConformance`, `TensorConformance`, `ReuseConformance`, `SwapConformance`,
`SharingConformance`, `ThreadConformance`, `FaultConformance` and `OracleConformance`. The last one tries random
histories; give a subclass of it a larger `oracle_runs` to search longer.

`reference_attention` is the attention that all others are judged by, and `FailingStorage` a storage that fails when it
is told to.

Needs `pip install "kvcache-core[testing]"`, which brings pytest and hypothesis.
"""

from __future__ import annotations

from pkgutil import iter_modules

from kvcache_core.conformance import missing_requirements

_missing = missing_requirements()
if _missing:
    raise ImportError(_missing)

import pytest  # noqa: E402

# So that a failing assertion of the kit shows its values, as one in a test module would.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from kvcache_core.testing.append import AppendConformance  # noqa: E402
from kvcache_core.testing.attention import AttentionConformance  # noqa: E402
from kvcache_core.testing.backend import BackendConformance  # noqa: E402
from kvcache_core.testing.conformance import Conformance  # noqa: E402
from kvcache_core.testing.declaration import Declaration  # noqa: E402
from kvcache_core.testing.failing import FailingStorage, InjectedFault  # noqa: E402
from kvcache_core.testing.faults import FaultConformance  # noqa: E402
from kvcache_core.testing.forks import ForkConformance  # noqa: E402
from kvcache_core.testing.handle import HandleConformance  # noqa: E402
from kvcache_core.testing.numerics import NumericsConformance  # noqa: E402
from kvcache_core.testing.oracle import OracleConformance  # noqa: E402
from kvcache_core.testing.perturbation import PerturbationConformance  # noqa: E402
from kvcache_core.testing.reference import reference_attention  # noqa: E402
from kvcache_core.testing.reuse import ReuseConformance  # noqa: E402
from kvcache_core.testing.sharing import SharingConformance  # noqa: E402
from kvcache_core.testing.step import StepConformance  # noqa: E402
from kvcache_core.testing.swapping import SwapConformance  # noqa: E402
from kvcache_core.testing.tables import TableConformance  # noqa: E402
from kvcache_core.testing.tensors import TensorConformance  # noqa: E402
from kvcache_core.testing.threads import ThreadConformance  # noqa: E402
from kvcache_core.testing.truncate import TruncateConformance  # noqa: E402

__all__ = [
    "AppendConformance",
    "AttentionConformance",
    "BackendConformance",
    "Conformance",
    "Declaration",
    "FailingStorage",
    "FaultConformance",
    "ForkConformance",
    "HandleConformance",
    "InjectedFault",
    "NumericsConformance",
    "OracleConformance",
    "PerturbationConformance",
    "ReuseConformance",
    "SharingConformance",
    "StepConformance",
    "SwapConformance",
    "TableConformance",
    "TensorConformance",
    "ThreadConformance",
    "TruncateConformance",
    "reference_attention",
]
