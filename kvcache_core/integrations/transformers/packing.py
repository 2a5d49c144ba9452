"""The way between a padded batch and its packed tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["Packing"]


class Packing:
    """Leaves pads and repeated rows out of tensors that a model made, and puts them back.

    Args:
        num_rows: Rows of the batch.
        num_columns: Columns of each row.
        is_token: Which columns hold tokens, bool `[rows, columns]` on the host; None if all do.
        leaders: The rows that the step is over, in its order; None for all.
        followers: For each row of the batch, which of the leaders it repeats; None without leaders.
        device: Where the tensors are.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        is_token: torch.Tensor | None,
        leaders: Sequence[int] | None,
        followers: Sequence[int] | None,
        device: torch.device,
    ) -> None:
        self._shape = (num_rows if leaders is None else len(leaders), num_columns)
        self._leaders = None if leaders is None else torch.tensor(leaders, device=device)
        self._followers = None if followers is None else torch.tensor(followers, device=device)
        self._index: torch.Tensor | None = None
        if is_token is not None:
            chosen = is_token if leaders is None else is_token[list(leaders)]
            self._index = chosen.flatten().nonzero().flatten().to(device)

    @classmethod
    def of_one_row(cls, num_columns: int, device: torch.device) -> Packing:
        """Of a single row without pads."""
        return cls(1, num_columns, None, None, None, device)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[rows, heads, columns, dim]` as `[tokens, heads, dim]`; a view where nothing has to be left out."""
        if self._index is None and self._leaders is None and tensor.shape[2] == 1:
            return tensor.squeeze(2)
        return self.pack_columns(tensor.transpose(1, 2))

    def pack_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[rows, columns, ...]` as `[tokens, ...]`, likewise."""
        if self._leaders is not None:
            tensor = tensor.index_select(0, self._leaders)
        packed = tensor.flatten(0, 1)
        return packed if self._index is None else packed.index_select(0, self._index)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`[tokens, ...]` as `[rows, columns, ...]`, with zeros for pads."""
        if self._index is not None:
            padded = packed.new_zeros(math.prod(self._shape), *packed.shape[1:])
            packed = padded.index_copy_(0, self._index, packed)
        unpacked = packed.view(*self._shape, *packed.shape[1:])
        return unpacked if self._followers is None else unpacked.index_select(0, self._followers)
