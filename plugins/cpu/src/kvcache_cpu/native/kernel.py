"""Calls the kernel on tensors."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import torch

from kvcache_core.plugin import LayerGroup
from kvcache_cpu.native.library import DTYPES, library

__all__ = ["MOST_NEW_TOKENS", "NativeKernel", "Rows", "RowsTable"]

#: New tokens of one sequence up to which the kernel is meant to be used.
MOST_NEW_TOKENS = 16

#: `kvcache_call` of `attend.h`.
_CALL = Struct("@10qd2q")

#: `kvcache_new_rows` of `attend.h`.
_NEW_ROWS = Struct("@10q")

_CODES = {getattr(torch, name): code for name, code in DTYPES.items()}


class Rows(NamedTuple):
    """The keys and values of one sequence in one layer group, and its new tokens.

    Attributes:
        keys: `[layers, kv heads, room, head_dim]`.
        values: `[layers, kv heads, room, value_head_dim]`.
        length: Tokens, the new ones included.
        num_new_tokens: How many are new.
        row: Row of the first new token in packed tensors.
        num_elsewhere: Leading tokens that are read at another address.
        shift: Bytes from where they are in `keys` and `values` to there.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    num_new_tokens: int
    row: int
    num_elsewhere: int = 0
    shift: int = 0


class RowsTable:
    """Where the rows of some sequences lie, as the kernel reads it; keeps the memory alive."""

    __slots__ = ("_numbers", "_tensors", "address", "size")

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._tensors = [(each.keys, each.values) for each in rows]
        numbers = array("q")
        for keys, values, length, num_new_tokens, row, num_elsewhere, shift in rows:
            size = keys.itemsize
            key_layer, key_head, key_token, _ = keys.stride()
            value_layer, value_head, value_token, _ = values.stride()
            numbers.extend(
                (
                    keys.data_ptr(),
                    values.data_ptr(),
                    key_layer * size,
                    key_head * size,
                    key_token * size,
                    value_layer * size,
                    value_head * size,
                    value_token * size,
                    length,
                    num_new_tokens,
                    row,
                    num_elsewhere,
                    shift,
                )
            )
        self._numbers = numbers
        self.address = numbers.buffer_info()[0]
        self.size = len(rows)


class NativeKernel:
    """The kernel for the layers of one group.

    Args:
        group: What the layers cache; `group_fault` must be None.
        dtype: The stored dtype.
    """

    def __init__(self, group: LayerGroup, dtype: torch.dtype) -> None:
        self._shape = array("q", (_CODES[dtype], group.num_kv_heads, group.head_dim, group.value_head_dim))
        self._group = self._shape.buffer_info()[0]
        self._value_dim = group.value_head_dim
        self._dtype, self._itemsize = dtype, dtype.itemsize
        self._attend, self._store = library().kvcache_attend, library().kvcache_store
        _use_openmp_of_torch()

    def takes(self, query: torch.Tensor) -> bool:
        """Whether the kernel can attend with this query: its dtype is known, and nothing but its numbers counts."""
        return (
            query.dtype in _CODES
            and not (query.requires_grad and torch.is_grad_enabled())
            and type(query) in _PLAIN
            and not query.is_neg()
        )

    def attend(
        self,
        table: RowsTable,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as `kvcache_core.attention.attend_dense` does, over many sequences at once.

        Args:
            table: The sequences.
            layer: Number of the layer within its group.
            query: `[rows, num_heads, head_dim]`.
            scale: Factor on the scores.
            window: Tokens a query sees, itself included, or None for all.
            out: Where to write, contiguous `[rows, num_heads, value_head_dim]` in the dtype of `query`; rows of no
                sequence are left alone. A new tensor when None.

        Returns:
            `out`.
        """
        token, head, element = query.stride()
        if element != 1:
            query = query.contiguous()
            token, head, _ = query.stride()
        num_rows, num_heads, _ = query.shape
        if out is None:
            out = query.new_empty(num_rows, num_heads, self._value_dim)
        size = query.itemsize
        failed = self._attend(
            _CALL.pack(
                self._group,
                table.address,
                table.size,
                layer,
                query.data_ptr(),
                token * size,
                head * size,
                num_heads,
                _CODES[query.dtype],
                out.data_ptr(),
                scale,
                window or 0,
                torch.get_num_threads(),
            )
        )
        if failed:
            raise MemoryError("no memory for the intermediate results of attention; use shorter batches")
        return out

    def store(self, table: RowsTable, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Write the new tokens of all sequences to the memory that `attend` reads.

        Args:
            table: The sequences; their `row` is that of their first new token here too.
            layer: Number of the layer within its group.
            key: `[rows, kv heads, head_dim]`.
            value: `[rows, kv heads, value_head_dim]`.

        Returns:
            False where the elements of a row do not lie in memory as they are to be stored; nothing is written then.
        """
        size = self._itemsize
        key_token, key_head, key_element = key.stride()
        value_token, value_head, value_element = value.stride()
        if not (
            key_element == value_element == 1
            and key.dtype is value.dtype is self._dtype
            and type(key) in _PLAIN
            and type(value) in _PLAIN
            and not (key.is_neg() or value.is_neg())
        ):
            return False
        self._store(
            _NEW_ROWS.pack(
                self._group,
                table.address,
                table.size,
                layer,
                key.data_ptr(),
                key_token * size,
                key_head * size,
                value.data_ptr(),
                value_token * size,
                value_head * size,
            )
        )
        return True

    def read(self, table: RowsTable, layer: int) -> None:
        """Read what `attend` would, and do nothing with it: the time that this takes is the limit."""
        library().kvcache_read(self._group, table.address, table.size, layer, torch.get_num_threads())


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@cache
def _use_openmp_of_torch() -> None:
    """Let the kernel run on the threads that torch uses itself, so that the two do not compete for cores."""
    name = "libtorch_cpu.dylib" if os.uname().sysname == "Darwin" else "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
        function = loaded.GOMP_parallel  # found in what libtorch_cpu was linked with
    except (OSError, AttributeError):
        return
    library().kvcache_use_openmp(ctypes.cast(function, ctypes.c_void_p))
