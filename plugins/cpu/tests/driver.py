"""A driver that does to a storage what core does, and remembers in plain tensors what every sequence must hold."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvcache_core.geometry import CacheGeometry, LayerGroup
from kvcache_core.storage import Batch, Segment, StorageSpec
from kvcache_cpu.memory import dense_views
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.storage import CpuStorage

#: Rows of 96, 32 and 256 bytes in float32: they fill a page exactly, and do not.
MIXED = CacheGeometry(
    num_layers=4,
    groups=(
        LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=24, value_head_dim=8),
        LayerGroup(layers=(3,), num_kv_heads=1, head_dim=64),
    ),
)


Rows = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Sequence:
    """A sequence under test: its slot, and the rows of each layer that it must hold."""

    def __init__(self, slot: Any, rows: Rows) -> None:
        self.slot = slot
        self.rows = rows

    def __repr__(self) -> str:
        return f"<{self.length} tokens>"

    @property
    def length(self) -> int:
        return next(iter(self.rows.values()))[0].shape[0]


class Driver:
    """Drives one storage through the protocol."""

    def __init__(self, kind: str, geometry: CacheGeometry, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "block_size": 16,
            "num_blocks": 100_000,
            "max_sequence_length": 1000,
            "dtype": "float32",
            "device": "cpu",
            "options": CpuOptions(memory=kind),
        }
        self.spec = StorageSpec(geometry=geometry, **{**settings, **changes})
        self.storage = CpuStorage(self.spec)
        self.generator = torch.Generator().manual_seed(0)
        self.lock: AbstractContextManager[Any] = nullcontext()

    @classmethod
    def sharing(cls, other: Driver, seed: int, lock: AbstractContextManager[Any]) -> Driver:
        """A driver of the same storage for another thread, which takes `lock` where core does."""
        driver = cls.__new__(cls)
        driver.spec, driver.storage, driver.lock = other.spec, other.storage, lock
        driver.generator = torch.Generator().manual_seed(seed)
        return driver

    # -- operations --------------------------------------------------------------------------------------

    def open(self, max_tokens: int | None = None) -> Sequence:
        return Sequence(self.storage.open(max_tokens or self.spec.max_sequence_length), self.random_rows(0))

    def append(self, sequence: Sequence, num_tokens: int) -> None:
        self.write({sequence: self.random_rows(num_tokens)})

    def write(self, new: dict[Sequence, Rows]) -> Batch:
        batch = self.begin({sequence: next(iter(rows.values()))[0].shape[0] for sequence, rows in new.items()})
        for layer in self.spec.geometry.caching_layers:
            key = torch.cat([rows[layer][0] for rows in new.values()])
            value = torch.cat([rows[layer][1] for rows in new.values()])
            self.storage.write(batch, layer, key, value)
        for sequence, rows in new.items():
            for layer, (key, value) in sequence.rows.items():
                sequence.rows[layer] = (torch.cat([key, rows[layer][0]]), torch.cat([value, rows[layer][1]]))
        return batch

    def begin(self, new_tokens: dict[Sequence, int]) -> Batch:
        segments = []
        row = 0
        for sequence, count in new_tokens.items():
            start = sequence.length
            with self.lock:
                self.storage.reserve(sequence.slot, (), start, start + count, ())
            segments.append(Segment(sequence.slot, (), start, start + count, row))
            row += count
        batch = Batch(segments, self.spec.block_size, self.storage.device)
        batch.plan = self.storage.plan(batch)
        return batch

    def fork(self, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
        count = sequence.length if num_tokens is None else num_tokens
        with self.lock:
            slot = self.storage.fork(sequence.slot, count)
        return Sequence(slot, {layer: (k[:count], v[:count]) for layer, (k, v) in sequence.rows.items()})

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        with self.lock:
            self.storage.truncate(sequence.slot, num_tokens)
        sequence.rows = {layer: (k[:num_tokens], v[:num_tokens]) for layer, (k, v) in sequence.rows.items()}

    def close(self, sequence: Sequence) -> None:
        with self.lock:
            self.storage.close(sequence.slot)

    # -- what must hold ----------------------------------------------------------------------------------

    def check(self, *sequences: Sequence, audit: bool = True) -> None:
        for sequence in sequences:
            for layer, (key, value) in sequence.rows.items():
                got_key, got_value = self.storage.gather(sequence.slot, (), sequence.length, layer)
                assert_same_bits(got_key, key)
                assert_same_bits(got_value, value)
            self.check_elsewhere(sequence)
        if audit:
            assert list(self.storage.audit()) == []
            assert self.unaccounted_bytes <= 0

    def check_elsewhere(self, sequence: Sequence) -> None:
        """Where else the kernel may read rows, they must be the same."""
        with self.lock:
            count, shift = self.storage._memory.elsewhere(sequence.slot)
        count = min(count, sequence.length)
        if count == 0:
            return
        mapping = sequence.slot.mapping
        there = (ctypes.c_char * mapping.length).from_address(mapping.address + shift)
        keys, values = dense_views(there, self.storage.dtype, mapping.base.layout)
        for group, key, value in zip(self.spec.geometry.groups, keys, values, strict=True):
            for index, layer in enumerate(group.layers):
                wanted_key, wanted_value = sequence.rows[layer]
                assert_same_bits(key[index, :, :count].transpose(0, 1), wanted_key[:count])
                assert_same_bits(value[index, :, :count].transpose(0, 1), wanted_value[:count])

    @property
    def unaccounted_bytes(self) -> int:
        """Bytes that the file of mapped memory takes beyond what its books say."""
        if self.storage.memory_kind == "heap":
            return 0
        ledger = self.storage._memory._ledger  # type: ignore[attr-defined]
        filled = sum(base.layout.bytes_touching(0, base.filled) for base in ledger.bases)
        return int(ledger.file.committed - filled)

    def random_rows(self, num_tokens: int) -> Rows:
        dtype = getattr(torch, self.spec.dtype)
        rows = {}
        for group in self.spec.geometry.groups:
            for layer in group.layers:
                rows[layer] = (
                    self._random(num_tokens, group.num_kv_heads, group.head_dim).to(dtype),
                    self._random(num_tokens, group.num_kv_heads, group.value_head_dim).to(dtype),
                )
        return rows

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def attend(
        self, batch: Batch, layer: int, query: torch.Tensor, scale: float = 0.3, window: int | None = None
    ) -> torch.Tensor:
        return self.storage.attend(batch, layer, query, scale, window)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare bit by bit: NaN payloads, signed zeros and subnormals included."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.itemsize]
    assert torch.equal(got.contiguous().view(integer), want.contiguous().view(integer))


MakeDriver = Callable[..., Driver]


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Attention in float64 with an explicit mask: query `i` of `T` over `S` keys has position `S - T + i`."""
    num_new, num_heads, _ = query.shape
    length, kv_heads, _ = key.shape
    query, key, value = (rows.double() for rows in (query, key, value))
    key, value = (rows.repeat_interleave(num_heads // kv_heads, dim=1) for rows in (key, value))
    position = torch.arange(length - num_new, length)[:, None]
    seen = torch.arange(length)[None] <= position
    if window is not None:
        seen &= torch.arange(length)[None] > position - window
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.zeros(num_new, num_heads, value.shape[2], dtype=torch.float64)
    for row in range(num_new):  # a masked row must not matter even when it is NaN
        rows = seen[row]
        out[row] = torch.einsum("hs,shd->hd", weights[:, row, rows], value[rows])
    return out
