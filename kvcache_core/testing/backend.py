"""The whole kit in one class."""

from __future__ import annotations

from kvcache_core.testing.append import AppendConformance
from kvcache_core.testing.attention import AttentionConformance
from kvcache_core.testing.faults import FaultConformance
from kvcache_core.testing.forks import ForkConformance
from kvcache_core.testing.handle import HandleConformance
from kvcache_core.testing.numerics import NumericsConformance
from kvcache_core.testing.oracle import OracleConformance
from kvcache_core.testing.perturbation import PerturbationConformance
from kvcache_core.testing.reuse import ReuseConformance
from kvcache_core.testing.sharing import SharingConformance
from kvcache_core.testing.step import StepConformance
from kvcache_core.testing.swapping import SwapConformance
from kvcache_core.testing.tables import TableConformance
from kvcache_core.testing.tensors import TensorConformance
from kvcache_core.testing.threads import ThreadConformance
from kvcache_core.testing.truncate import TruncateConformance

__all__ = ["BackendConformance"]


class BackendConformance(  # pytest runs the tests of the last base first
    OracleConformance,
    FaultConformance,
    ThreadConformance,
    SharingConformance,
    SwapConformance,
    ReuseConformance,
    TensorConformance,
    NumericsConformance,
    PerturbationConformance,
    AttentionConformance,
    TruncateConformance,
    ForkConformance,
    StepConformance,
    AppendConformance,
    TableConformance,
    HandleConformance,
):
    """Every test of the kit. Subclass it under a name that pytest collects, and say how to open the storage."""
