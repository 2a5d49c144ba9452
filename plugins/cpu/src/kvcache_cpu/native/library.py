"""Loads the shared library of the kernel, without torch. It may be missing: building it is optional."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from kvcache_core.plugin import CacheGeometry, LayerGroup

__all__ = [
    "ABI",
    "DTYPES",
    "LEVELS",
    "LIBRARY",
    "NativeLibraryError",
    "group_fault",
    "level",
    "library",
    "library_fault",
    "native_fault",
]

#: Where the build puts the library.
LIBRARY = Path(__file__).with_name("_attend.so")

#: The version of the interface in `attend.h`.
ABI = 4

#: The codes of the dtypes in `attend.h`.
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

#: The instruction sets, in the order of their codes in `attend.h`.
LEVELS = ("portable code", "AVX2", "AVX-512")

_ADDRESS, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeLibraryError(Exception):
    """The library is not there or does not work; says why in a phrase."""


@cache
def library() -> ctypes.CDLL:
    """Return the library, its functions declared.

    Raises:
        NativeLibraryError: It was not built, cannot be loaded, or was built from other sources.
    """
    if not LIBRARY.exists():
        raise NativeLibraryError("the kernel was not built when kvcache-cpu was installed")
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.kvcache_abi.restype = _INT
        abi = loaded.kvcache_abi()
        if abi != ABI:
            raise NativeLibraryError(f"the kernel's library is of version {abi} instead of {ABI}")
        loaded.kvcache_best_level.restype = _INT
        loaded.kvcache_use_level.argtypes = [_INT]
        loaded.kvcache_use_level.restype = _INT
        loaded.kvcache_use_openmp.argtypes = [_ADDRESS]
        loaded.kvcache_use_openmp.restype = None
        loaded.kvcache_attend.restype = _INT
        loaded.kvcache_attend.argtypes = [ctypes.c_char_p]  # a packed struct: many arguments take ctypes long
        loaded.kvcache_store.restype = None
        loaded.kvcache_store.argtypes = [ctypes.c_char_p]  # likewise
        loaded.kvcache_read.restype = None
        loaded.kvcache_read.argtypes = [_ADDRESS, _ADDRESS, _INT64, _INT64, _INT]
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"the kernel's library cannot be loaded: {error}") from error
    return loaded


def library_fault() -> str | None:
    """Return why the kernel cannot be used on this machine, or None if it can."""
    try:
        library()
    except NativeLibraryError as error:
        return str(error)
    return None


def group_fault(group: LayerGroup, dtype: str) -> str | None:
    """Return why the kernel cannot attend over what such layers cache, or None if it can."""
    if dtype not in DTYPES:
        return f"the kernel reads {', '.join(DTYPES)}, not {dtype}"
    if group.head_dim % 8 or group.value_head_dim % 8:
        return f"the kernel's head dims are multiples of 8, not {group.head_dim} and {group.value_head_dim}"
    return None


def native_fault(geometry: CacheGeometry | None, dtype: str) -> str | None:
    """Return why the kernel cannot serve every layer of a model, or None if it can."""
    faults = [library_fault(), *(group_fault(group, dtype) for group in (geometry.groups if geometry else ()))]
    return next((fault for fault in faults if fault is not None), None)


def level() -> str:
    """Return the instruction set that the kernel takes here."""
    return LEVELS[library().kvcache_best_level()]
