"""Guards against known faults of torch MPS: each one function, with the reason and the public reports.

A guard that is named in option `disable_guards` does what code for any other device would do. That is how to find out
whether a torch still has the fault; `docs/metal.md` in the repository tells how.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeVar

import torch

__all__ = ["GUARDS", "Guard", "Guards", "Report", "SdpaMask"]

_LARGEST_NUMEL = 2**31 - 1
_Method = TypeVar("_Method", bound=Callable[..., object])


@dataclass(frozen=True)
class Report:
    """A public report of a fault.

    Attributes:
        issue: The issue or pull request, such as `"pytorch#175191"`.
        seen: In which torch or macOS it was reported, or when, and of which operation.
        mended: Since which torch it is mended, where the public record says so, or an empty string.
    """

    issue: str
    seen: str
    mended: str = ""

    @property
    def url(self) -> str:
        """Where to read it."""
        repository, _, number = self.issue.partition("#")
        owner = {"pytorch": "pytorch/pytorch", "YuE": "multimodal-art-projection/YuE"}[repository]
        return f"https://github.com/{owner}/issues/{number}"


@dataclass(frozen=True)
class Guard:
    """What is known about a guard.

    Attributes:
        name: The function's name, and what `disable_guards` takes.
        reason: What goes wrong without it, as a phrase.
        reports: The public reports.
    """

    name: str
    reason: str
    reports: tuple[Report, ...]


#: All guards, by name.
GUARDS: dict[str, Guard] = {}


def _guard(reason: str, *reports: Report) -> Callable[[_Method], _Method]:
    def register(method: _Method) -> _Method:
        GUARDS[method.__name__] = Guard(method.__name__, reason, reports)
        return method

    return register


@dataclass(frozen=True)
class SdpaMask:
    """How scaled dot product attention is told what a query sees.

    Attributes:
        attn_mask: Its argument of that name.
        is_causal: Its argument of that name.
    """

    attn_mask: torch.Tensor | None
    is_causal: bool = False


class Guards:
    """The guards that are in force.

    Args:
        disabled: Names of those that are not.

    Raises:
        ValueError: There is no guard of a name.
    """

    def __init__(self, disabled: Collection[str] = ()) -> None:
        unknown = sorted(set(disabled) - set(GUARDS))
        if unknown:
            raise ValueError(f"there is no guard {', '.join(unknown)}; there are {', '.join(sorted(GUARDS))}")
        self.disabled = frozenset(disabled)

    def __repr__(self) -> str:
        return f"Guards(active={sorted(set(GUARDS) - self.disabled)}, disabled={sorted(self.disabled)})"

    # -- memory ------------------------------------------------------------------------------------------

    @_guard(
        "kernels address 32 bits: above 4 GiB or 2^31 elements they fail, read zeros or write elsewhere",
        Report("pytorch#149325", "an open list of operations"),
        Report("pytorch#143859", "2.5.1"),
        Report("pytorch#188756", "2.12", "2.14"),
        Report("pytorch#182052", "a nightly of April 2026"),
        Report("pytorch#161265", "macOS 26"),
    )
    def bounded_tensors(self, dtype: torch.dtype, max_bytes: int) -> int | None:
        """Return how many elements a tensor of the pool may have; None for any number."""
        if "bounded_tensors" in self.disabled:
            return None
        return min(max_bytes // dtype.itemsize, _LARGEST_NUMEL)

    @_guard(
        "writes through a view that does not start its allocation go astray or are dropped",
        Report("pytorch#94390", "early 2023"),
        Report("pytorch#114692", "November 2023", "2.1.2"),
        Report("pytorch#122016", "2.2 on macOS 14.4"),
        Report("pytorch#183631", "2.12.0"),
        Report("pytorch#193385", "macOS 14", "2.14"),
    )
    def whole_tensors(
        self, shapes: Sequence[tuple[int, ...]], allocate: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a tensor for each shape, each of an allocation of its own (without it: views of one allocation)."""
        if "whole_tensors" not in self.disabled:
            return [allocate(prod(shape)).view(shape) for shape in shapes]
        sizes = [prod(shape) for shape in shapes]
        together, starts = allocate(sum(sizes)), accumulate(sizes, initial=0)
        return [
            together[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    @_guard(
        "a copy to the GPU that does not block reads its source after that has been freed",
        Report("pytorch#189690", "July 2026"),
        Report("pytorch#139550", "2.5.1"),
    )
    def blocking_uploads(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor from the host to the device."""
        return torch.empty_like(host, device=device).copy_(host, non_blocking="blocking_uploads" in self.disabled)

    # -- operands ----------------------------------------------------------------------------------------

    @_guard(
        "kernels read operands with gaps or in another order as if they had none",
        Report("pytorch#175191", "2.10.0 and a nightly of 2.12; scatter_"),
        Report("pytorch#181133", "April 2026; attention"),
        Report("pytorch#163597", "2.8.0; attention"),
        Report("pytorch#183419", "2.11.0; isfinite, which writes outside its output"),
        Report("pytorch#150967", "a nightly of 2.8; where"),
    )
    def contiguous_operands(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an operand of an index operation, of attention or of a reduction without gaps."""
        return tensor if "contiguous_operands" in self.disabled else tensor.contiguous()

    @_guard(
        "the driver keeps buffers and a compiled graph for each new shape and gives none back",
        Report("pytorch#132596", "2.4.0"),
        Report("pytorch#152550", "May 2025"),
        Report("pytorch#181213", "April 2026"),
        Report("YuE#187", "2.10.0; 68 to 82 GiB after 9,000 decoded tokens"),
    )
    def bucketed_lengths(self, length: int) -> int:
        """Return the length that is computed with in place of `length`.

        Lengths up to 8 are themselves; above, there are four for each power of two, so that a quarter is wasted at
        most.
        """
        if "bucketed_lengths" in self.disabled or length <= 8:
            return length
        step = 1 << ((length - 1).bit_length() - 3)
        return -(-length // step) * step

    # -- attention ---------------------------------------------------------------------------------------

    @_guard(
        "attention with fewer kv heads than query heads ends the process or reads beyond K and V",
        Report("pytorch#149132", "a nightly of 2.7", "2.7"),
        Report("pytorch#174861", "2.10", "2.11"),
    )
    def folded_heads(self, query: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, int]:
        """Bring a query in the order that attention takes, with as many heads as K and V have.

        Args:
            query: `[batch, tokens, num_heads, head_dim]`.
            num_kv_heads: Heads of K and V.

        Returns:
            `[batch, num_kv_heads, members * tokens, head_dim]`, all tokens of a head's first member first, and how
            many members a group has (without the guard: `[batch, num_heads, tokens, head_dim]` and 1).
        """
        batch, tokens, num_heads, head_dim = query.shape
        if "folded_heads" in self.disabled:
            return query.transpose(1, 2), 1
        members = num_heads // num_kv_heads
        grouped = query.view(batch, tokens, num_kv_heads, members, head_dim).permute(0, 2, 3, 1, 4)
        return grouped.reshape(batch, num_kv_heads, members * tokens, head_dim), members

    @_guard(
        "`is_causal` shows a query later tokens in half precision, and kernels misread boolean or broadcast masks",
        Report("pytorch#195910", "September 2026"),
        Report("YuE#176", "2.10.0; not in 2.14.0"),
        Report("pytorch#174861", "2.10", "2.11"),
        Report("pytorch#182285", "May 2026; boolean masks", "2.12"),
        Report("pytorch#184180", "May 2026; masks that are broadcast over heads"),
        Report("pytorch#156707", "June 2025; rows that see nothing"),
    )
    def float_mask(
        self, visible: torch.Tensor, dtype: torch.dtype, *, heads: int, members: int, causal: bool
    ) -> SdpaMask:
        """Tell attention what each query sees.

        Args:
            visible: `[batch, tokens, keys]`, boolean; every row sees a key at least.
            dtype: Of the query.
            heads: Heads that attention is called with.
            members: How often each head's mask is repeated along its tokens, see `folded_heads`.
            causal: Whether this is the causal mask of as many keys as tokens.
        """
        batch, tokens, keys = visible.shape
        visible = visible[:, None].expand(batch, members, tokens, keys).reshape(batch, 1, members * tokens, keys)
        if "float_mask" in self.disabled:
            return SdpaMask(None, is_causal=True) if causal and members == 1 else SdpaMask(visible)
        zero, hidden = visible.new_zeros((), dtype=dtype), visible.new_full((), -torch.inf, dtype=dtype)
        mask = torch.where(self.contiguous_operands(visible), zero, hidden)
        if batch > 1:
            mask = mask.expand(batch, heads, -1, -1)
        return SdpaMask(self.contiguous_operands(mask))

    @_guard(
        "attention over V of another dim than K's returns rows of K's dim, with what lay in memory",
        Report("pytorch#176767", "March 2026", "2.12"),
    )
    def equal_head_dims(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pad query, key and value with zeros to one head dim, which changes neither scores nor the first columns."""
        if "equal_head_dims" in self.disabled:
            return operands
        dim = max(operand.shape[-1] for operand in operands)
        return tuple(
            operand if operand.shape[-1] == dim else torch.nn.functional.pad(operand, (0, dim - operand.shape[-1]))
            for operand in operands
        )
