"""A strict stand-in for torch MPS: the CPU, with MPS's known faults.

Between `with StandIn():` and its end, torch on the CPU rejects what MPS is known to reject and corrupts what MPS is
known to corrupt, silently and in the same way. It holds the faults of all releases at once, and where a fault was
reported for some operations of a kind or for some sizes it strikes at the whole kind: what gets through here relies on
nothing that any of them is known to get wrong. It is no proof of what works on a Mac.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_core.plugin import Storage

__all__ = ["RULES", "Rule", "StandIn", "StandInFault", "on_stand_in"]

aten = torch.ops.aten


class StandInFault(RuntimeError):
    """MPS raises here, or ends the process."""


@dataclass(frozen=True)
class Rule:
    """A known fault.

    Attributes:
        issues: The public reports.
        happens: What MPS does.
    """

    issues: tuple[str, ...]
    happens: str


#: The faults that the stand-in has, by name.
RULES: dict[str, Rule] = {
    "attention_aborts_on_grouped_heads": Rule(
        ("pytorch#149132", "pytorch#174861"), "fewer kv heads than query heads end the process"
    ),
    "attention_ignores_boolean_masks": Rule(
        ("pytorch#182285",),
        "with up to 8 queries and head dims of 64, 96 and 128, bytes of a boolean mask are read as "
        "numbers next to 0, which hide nothing",
    ),
    "attention_leaks_within_four": Rule(
        ("pytorch#195910", "YuE#176"), "is_causal in half precision masks four queries as it masks the last of them"
    ),
    "attention_misreads_strides": Rule(
        ("pytorch#181133", "pytorch#163597"), "operands are read in the order in which they lie in memory"
    ),
    "attention_returns_the_dim_of_k": Rule(
        ("pytorch#176767",), "V of another dim gives rows of K's dim, with what lay in memory"
    ),
    "attention_uses_the_first_mask": Rule(
        ("pytorch#184180",), "a mask that is broadcast over heads is the first sequence's for all of a batch"
    ),
    "hidden_rows_are_nan": Rule(("pytorch#156707",), "a query that sees nothing gives NaN"),
    "copies_read_freed_memory": Rule(
        ("pytorch#189690", "pytorch#139550"), "a copy that does not block reads its source when that has been freed"
    ),
    "double_precision_is_missing": Rule(("pytorch#77764",), "float64 is refused"),
    "graphs_pile_up": Rule(
        ("pytorch#132596", "pytorch#152550", "YuE#187"), "each new shape costs a compiled graph that is never freed"
    ),
    "index_copy_is_missing": Rule(("pytorch#77764",), "index_copy is not implemented in older releases"),
    "indices_are_not_checked": Rule(
        ("pytorch#189968",), "a row of an index outside the tensor is written outside the tensor"
    ),
    "large_tensors_fail": Rule(
        ("pytorch#149325", "pytorch#143859", "pytorch#84039", "pytorch#188756"),
        "above 4 GiB or 2^31 elements operations end the process",
    ),
    "outputs_in_slices_are_lost": Rule(
        ("pytorch#193385", "pytorch#104832"), "a result for out= is never written if that is a slice"
    ),
    "strides_are_misread": Rule(
        ("pytorch#175191", "pytorch#183419", "pytorch#150967"),
        "index operations, where and isfinite read operands in the order in which they lie in memory",
    ),
    "writes_ignore_gaps": Rule(
        ("pytorch#131285", "pytorch#176159"), "in place, a tensor with gaps is written as if it had none"
    ),
    "writes_ignore_offsets": Rule(
        ("pytorch#94390", "pytorch#114692", "pytorch#122016", "pytorch#183631"),
        "in place, a view is written at the start of its allocation",
    ),
}

_READS_BY_INDEX = {aten.index_select, aten.index, aten.gather, aten.take}
_WRITES_BY_INDEX = {
    aten.index_put_,
    aten.index_put,
    aten._index_put_impl_,
    aten.index_add_,
    aten.index_fill_,
    aten.scatter_,
    aten.scatter,
    aten.scatter_add_,
}
_COPIES_BY_INDEX = {aten.index_copy_, aten.index_copy}
#: What MPS runs as a compiled graph, besides attention.
_GRAPHS = {aten.index_select}
_VECTOR_DIMS = (64, 96, 128)
_VECTOR_QUERIES = 8


class StandIn:
    """A context in which torch on the CPU has MPS's faults.

    Args:
        without: Rules that are not in force.
        max_graphs: Shapes of one operation from which on a rule strikes.

    Attributes:
        fired: How often each rule has struck.
        graphs: The shapes with which each operation was called that is compiled for each shape.
    """

    max_bytes = 2**32
    max_elements = 2**31

    def __init__(self, *, without: Collection[str] = (), max_graphs: int = 256) -> None:
        assert set(without) <= set(RULES)
        self.fired: Counter[str] = Counter()
        self.graphs: dict[str, set[Any]] = defaultdict(set)
        self.paused = False
        self._without = frozenset(without)
        self._max_graphs = max_graphs
        self._open: list[tuple[_Dispatch, _Functions]] = []

    def __enter__(self) -> StandIn:
        modes = _Dispatch(self), _Functions(self)
        for mode in modes:
            mode.__enter__()
        self._open.append(modes)
        return self

    def __exit__(self, *failure: Any) -> None:
        for mode in reversed(self._open.pop()):
            mode.__exit__(*failure)

    # -- rules -------------------------------------------------------------------------------------------

    def strikes(self, rule: str, happens: bool) -> bool:
        """Whether a rule strikes; `happens` says whether its condition is met."""
        assert rule in RULES
        if not happens or rule in self._without:
            return False
        self.fired[rule] += 1
        return True

    def refuse(self, rule: str, happens: bool, error: type[Exception] = StandInFault) -> None:
        """Raise if a rule strikes."""
        if self.strikes(rule, happens):
            raise error(f"{rule}: {RULES[rule].happens} ({', '.join(RULES[rule].issues)})")

    def note_graph(self, operation: str, *tensors: torch.Tensor | None) -> None:
        """Note that an operation is called with tensors of these shapes."""
        made = self.graphs[operation]
        made.add(tuple(None if each is None else (tuple(each.shape), each.dtype) for each in tensors))
        self.refuse("graphs_pile_up", len(made) > self._max_graphs)


def _in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel sees that takes the tensor for one without gaps; over and over where its memory ends before."""
    available = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.as_strided((available,), (1,), tensor.storage_offset())
    return flat[torch.arange(tensor.numel()) % available].view(tensor.shape)


class _Dispatch(TorchDispatchMode):
    """The faults of single operations."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stand_in.paused:
            return func(*args, **kwargs)
        about = _about(func)
        return func(*args, **kwargs) if about.is_view else self._run(func, about, list(args), kwargs)

    def _run(self, func: Any, about: _Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
        here, packet = self._stand_in, about.packet
        operands = list(_tensors((args, kwargs)))
        for operand in operands:
            large = operand.numel() >= here.max_elements or operand.nbytes > here.max_bytes
            here.refuse("large_tensors_fail", large)
            here.refuse("double_precision_is_missing", operand.dtype is torch.float64 and operand.ndim > 0, TypeError)
        here.refuse("index_copy_is_missing", packet in _COPIES_BY_INDEX, NotImplementedError)
        if packet in _GRAPHS:
            here.note_graph(str(packet), *operands)
        if packet in _WRITES_BY_INDEX | _READS_BY_INDEX | {aten.where}:
            first = 1 if packet in _WRITES_BY_INDEX else 0  # what is written to is another rule's
            args = [*args[:first], *(self._misread(value) for value in args[first:])]
        hurries = bool(kwargs.get("non_blocking")) or (packet is aten.copy_ and len(args) > 2 and bool(args[2]))
        if here.strikes("copies_read_freed_memory", hurries):
            return args[0].zero_() if packet is aten.copy_ else func(*args, **kwargs).zero_()
        if packet is aten.index_put_ and self._write_outside(*args[:3]):
            return args[0]
        return self._write(func, about, args, kwargs)

    def _misread(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._misread(each) for each in value)
        gaps = isinstance(value, torch.Tensor) and not value.is_contiguous()
        return _in_storage_order(value) if self._stand_in.strikes("strides_are_misread", gaps) else value

    def _write_outside(self, target: torch.Tensor, indices: Any, rows: torch.Tensor) -> bool:
        """Write rows whose index is outside `target` where they would lie if it went on; whether there are any."""
        if len(indices) != 1 or indices[0].dtype is torch.bool:
            return False
        index = indices[0]
        outside = (index < 0) | (index >= len(target))
        if not self._stand_in.strikes("indices_are_not_checked", bool(outside.any())):
            return False
        width = target[0].numel()
        flat = target.as_strided((target.untyped_storage().nbytes() // target.itemsize,), (1,), 0)
        for row, place in enumerate(index.tolist()):
            start = target.storage_offset() + place * width
            if 0 <= start <= len(flat) - width:
                flat[start : start + width] = rows.expand(len(index), *target.shape[1:])[row].flatten()
        return True

    def _write(self, func: Any, about: _Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation, with what it writes to where MPS would look for it."""
        here = self._stand_in
        returned = None
        for number, name, is_out in about.writes:
            holder, place = (args, number) if number < len(args) else (kwargs, name)
            target = args[number] if number < len(args) else kwargs.get(name)
            if not isinstance(target, torch.Tensor):
                continue
            returned = target
            sliced = target.storage_offset() != 0 or not target.is_contiguous()
            if is_out:
                if here.strikes("outputs_in_slices_are_lost", sliced):
                    holder[place] = torch.empty_like(target, memory_format=torch.contiguous_format)
                continue
            if here.strikes("writes_ignore_gaps", not target.is_contiguous()):
                contiguous = torch.empty(target.shape, device="meta").stride()
                target = target.as_strided(target.shape, contiguous, target.storage_offset())
            if here.strikes("writes_ignore_offsets", target.storage_offset() != 0):
                target = target.as_strided(target.shape, target.stride(), 0)
            holder[place] = target
        result = func(*args, **kwargs)
        return result if returned is None else returned


class _Operation(NamedTuple):
    """What is known about an operation from its schema.

    Attributes:
        packet: All its overloads.
        is_view: Whether it returns a view.
        writes: Number and name of each argument that it writes to, and whether that is an `out`.
    """

    packet: Any
    is_view: bool
    writes: tuple[tuple[int, str, bool], ...]


@cache
def _about(func: Any) -> _Operation:
    schema = func._schema
    return _Operation(
        packet=func.overloadpacket,
        is_view=any(value.alias_info and not value.alias_info.is_write for value in schema.returns),
        writes=tuple(
            (number, argument.name, argument.is_out)
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class _Functions(TorchFunctionMode):
    """The faults of functions that torch takes apart before single operations can be seen."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in (torch.isfinite, torch.isinf, torch.isnan):
            gaps = not args[0].is_contiguous()
            if self._stand_in.strikes("strides_are_misread", gaps):
                return func(_in_storage_order(args[0]))
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        here = self._stand_in
        assert query.ndim == key.ndim == value.ndim == 4
        assert not (is_causal and attn_mask is not None)
        here.note_graph("attention", query, key, value, attn_mask)
        here.refuse("attention_aborts_on_grouped_heads", query.shape[1] != key.shape[1])
        here.refuse("large_tensors_fail", query.shape[:3].numel() * key.shape[2] >= here.max_elements)
        here.paused = True
        try:
            return self._softmax(query, key, value, attn_mask, is_causal, scale)
        finally:
            here.paused = False

    def _softmax(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        here = self._stand_in
        batch, heads, tokens, dim = query.shape
        read: Callable[[torch.Tensor], torch.Tensor] = lambda operand: (  # noqa: E731
            _in_storage_order(operand)
            if here.strikes("attention_misreads_strides", not operand.is_contiguous())
            else operand
        )
        query, key, value = read(query), read(key), read(value)
        if query.shape[1] != key.shape[1]:  # the rule is not in force
            key, value = (operand.repeat_interleave(heads // key.shape[1], dim=1) for operand in (key, value))
        scores = query.float() @ key.float().transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
        if is_causal:
            visible = torch.ones(tokens, key.shape[2], dtype=torch.bool).tril()
            if here.strikes("attention_leaks_within_four", query.dtype is not torch.float32 and tokens > 1):
                visible = visible[[min(row // 4 * 4 + 3, tokens - 1) for row in range(tokens)]]
            scores = scores.masked_fill(~visible, -torch.inf)
        elif attn_mask is not None:
            scores = self._masked(scores, attn_mask, dim)
        nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = scores.softmax(dim=-1)
        if not here.strikes("hidden_rows_are_nan", bool(nothing.any())):
            weights = weights.masked_fill(nothing, 0)
        out = (weights @ value.float()).to(query.dtype)
        if here.strikes("attention_returns_the_dim_of_k", value.shape[-1] != dim):
            return out.new_full((batch, heads, tokens, dim), 7)
        return out

    def _masked(self, scores: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
        here = self._stand_in
        few = scores.shape[2] <= _VECTOR_QUERIES and dim in _VECTOR_DIMS
        if mask.dtype is torch.bool:
            if here.strikes("attention_ignores_boolean_masks", few):
                return scores
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        shared = mask.ndim == 4 and mask.shape[0] > 1 and mask.shape[1] == 1 < scores.shape[1]
        return scores + (mask[:1] if here.strikes("attention_uses_the_first_mask", shared) else mask).float()


class _StorageOnStandIn:
    """A storage each of whose calls runs on the stand-in; what its caller does in between does not."""

    def __init__(self, storage: Storage, stand_in: StandIn) -> None:
        self._storage = storage
        self.stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.stand_in:
                result = attribute(*arguments, **keywords)
                return list(result) if name == "audit" else result  # a generator would run outside

        return call


def on_stand_in(make: Callable[[], Storage], stand_in: StandIn) -> Any:
    """Make a storage on the stand-in, and run each of its calls there."""
    with stand_in:
        return _StorageOnStandIn(make(), stand_in)
