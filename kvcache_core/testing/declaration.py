"""What an author declares about a backend, and how pytest meets the kit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from kvcache_core.config import CacheConfig
from kvcache_core.registry import get_registry
from kvcache_core.selection import choose
from kvcache_core.storage import Storage, StorageSpec
from kvcache_core.testing.rows import ROW_BITS

__all__ = ["Declaration"]

_KIT = __name__.rpartition(".")[0] + "."


def _parts(cls: type) -> list[type]:
    """The classes of the kit that a class is made of."""
    return [part for part in cls.__mro__ if part.__module__.startswith(_KIT)]


def _owner(cls: type, name: str) -> type:
    """The class that a class has an attribute from."""
    return next(part for part in cls.__mro__ if name in vars(part))


def _require_every_test(cls: type) -> None:
    """Raise unless a class has all tests of the parts of the kit it is made of, as they are there."""
    parts = _parts(cls)
    for part in parts:
        for name in vars(part):
            if name.startswith("test_") and _owner(cls, name) not in parts:
                raise TypeError(
                    f"{cls.__name__} replaces {name} of the conformance kit; "
                    "if the backend fails it, name it in known_failures, with the reason"
                )


class Declaration:
    """What an author declares about a backend. Subclass a part of the kit (or all of it) and set these.

    Attributes:
        backend: Name of an installed backend; None for a subclass that writes `open_storage`.
        device: Device of the storages, by torch's name.
        dtypes: Dtypes to test, by torch's names; the first is used where the dtype does not matter.
        block_size: Tokens per block in most tests.
        block_sizes: Block sizes to try where they matter.
        head_dim: Elements per head, at least 32, so that a row can spell where it belongs.
        options: The backend's own options: as they would stand in a configuration for an installed backend, and
            otherwise what `open_storage` finds in `spec.options`.
        capabilities: The storage's capabilities. Tests of others are skipped, with that reason.
        round_trip_error: Largest difference between an element written and read, divided by the largest element of
            its row: 0 unless the storage loses precision, and then bits must come back unchanged.
        attention_error: For each dtype, the largest difference between an output of `attend` and exact attention
            over what the cache reads back, divided by the largest value.
        oracle_runs: Random histories that the differential test tries.
        oracle_steps: Operations in each.
        oracle_shrinks: Whether a history that fails is made as short as possible, which may take minutes.
        known_failures: Test name -> why the backend fails it. The test then has to fail.
    """

    backend: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    block_size: ClassVar[int] = 4
    block_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, 16)
    head_dim: ClassVar[int] = ROW_BITS + 1
    options: ClassVar[Any] = None
    capabilities: ClassVar[frozenset[str]] = frozenset()
    round_trip_error: ClassVar[float] = 0.0
    attention_error: ClassVar[Mapping[str, float]] = {
        "float64": 1e-12,
        "float32": 1e-5,
        "float16": 2e-3,
        "bfloat16": 1.6e-2,
    }
    oracle_runs: ClassVar[int] = 30
    oracle_steps: ClassVar[int] = 40
    oracle_shrinks: ClassVar[bool] = True
    known_failures: ClassVar[Mapping[str, str]] = {}

    def open_storage(self, spec: StorageSpec) -> Storage:
        """Return a new storage of the backend under test: of `backend`, unless a subclass says otherwise."""
        if self.backend is None:
            raise NotImplementedError(
                f"{type(self).__name__} has to say what to test: set backend to an installed backend's name, "
                "or write open_storage(spec)"
            )
        registry = get_registry()
        selection = choose(
            CacheConfig(
                backend=self.backend,
                device=spec.device,
                dtype=spec.dtype,
                block_size=spec.block_size,
                geometry=spec.geometry,
                options=self.options or {},
            ),
            registry,
        )
        return registry.load(selection.backend)(replace(spec, device=selection.device, options=selection.options))

    # -- how pytest meets it -----------------------------------------------------------------------------

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _require_every_test(cls)
        for name, reason in cls.known_failures.items():
            if not hasattr(cls, name):
                raise TypeError(f"known_failures of {cls.__name__} names {name}, which is no test of the kit")
            if not reason.strip():
                raise TypeError(f"known_failures of {cls.__name__} needs a reason for {name}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that takes one of these arguments once for each of its values.

        Raises:
            TypeError: A test of the kit has been replaced, deleted or marked with xfail.
        """
        _require_every_test(type(self))
        name = metafunc.function.__name__
        if any(True for _ in metafunc.definition.iter_markers("xfail")) and _owner(type(self), name) in _parts(
            type(self)
        ):
            raise TypeError(
                f"{type(self).__name__} marks {name} of the conformance kit with xfail; "
                "if the backend fails it, name it in known_failures, with the reason"
            )
        for argument, values in self.arguments().items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values)

    @classmethod
    def arguments(cls) -> dict[str, Sequence[Any]]:
        """The arguments that tests of the kit may take, and their values."""
        return {"dtype": cls.dtypes, "block_size": cls.block_sizes, "shape": ("uniform", "single-head", "mixed")}

    @pytest.fixture(autouse=True)
    def _expect_known_failure(self, request: pytest.FixtureRequest) -> None:
        reason = self.known_failures.get(request.node.originalname)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture(autouse=True)
    def _one_torch_thread(self) -> Iterator[None]:
        """The kit's tensors are so small that further threads would only wait for each other."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def require(self, capability: str) -> None:
        """Skip the running test unless the backend declares `capability`."""
        if capability not in self.capabilities:
            pytest.skip(f"the backend does not declare the capability {capability!r}")
