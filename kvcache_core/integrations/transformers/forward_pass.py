"""One model forward pass over the rows of a cache, written to it layer by layer.

transformers hands each layer's K and V to `Cache.update` and says neither where a forward pass begins nor whether
it came to its end. Hooks on the model (see `watch`) tell both, and with what the model was called. Without them a
pass begins with the first layer and ends with the last, and all its columns are taken for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch

from kvcache_core.errors import HandleError, ShapeError, StepError, UnsupportedError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.integrations.transformers.dense import KeyValue, as_model_reads, joined, padded
from kvcache_core.integrations.transformers.known_masks import known_mask
from kvcache_core.integrations.transformers.open_step import OpenStep
from kvcache_core.integrations.transformers.packing import Packing
from kvcache_core.integrations.transformers.pass_plan import PassPlan, SpecialTokens, is_own_mask, plan_pass
from kvcache_core.integrations.transformers.rows import Row, discard, drop, num_columns
from kvcache_core.manager import KvCacheManager

__all__ = ["PassInput", "PassWriter", "not_supported"]


class PassInput(NamedTuple):
    """What to call a model with.

    Attributes:
        attention_mask: The mask.
        packing: How to pack everything else, or None to leave it as it is.
    """

    attention_mask: torch.Tensor | None
    packing: Packing | None


@dataclass
class _ForwardPass:
    """The forward pass under way.

    Attributes:
        plan: What it adds, once that is known.
        announced: Whether a hook has said that it began, and so will say that it ended.
        stored: Whether it stores what it computes (`use_cache`).
        pending: Whether `update` returns stand-ins, since our attention function reads the cache itself.
        packing: How the batch was packed before the model ran, if it was.
        opened: What takes its K and V; opened by the first layer.
        layers: Layers written so far.
    """

    plan: PassPlan | None = None
    announced: bool = False
    stored: bool = True
    pending: bool = False
    packing: Packing | None = None
    opened: OpenStep | None = None
    layers: set[int] = field(default_factory=set)


class PassWriter:
    """Writes the forward passes over the rows of one cache, all layers and rows of a pass or none.

    Args:
        manager: The cache that the rows are part of.
        open_sequence: Opens the first row when it is first asked for.
        rows: The rows, if there are some already.

    Attributes:
        manager: The cache that the rows are part of.
        special: How to know finished rows.
        decoder: The model that they are of, if that is known; what any other computes stays without ids.
    """

    def __init__(
        self, manager: KvCacheManager, open_sequence: Callable[[], KvCacheHandle], rows: list[Row] | None = None
    ) -> None:
        self.manager = manager
        self.special = SpecialTokens()
        self.decoder: ReferenceType[torch.nn.Module] | None = None
        self._open_sequence = open_sequence
        self._rows = rows or []
        self._closed = False
        self._caching_layers = frozenset(manager.geometry.caching_layers)
        self._pass = _ForwardPass()

    @property
    def rows(self) -> list[Row]:
        """The rows, as the last finished pass left them; at least one."""
        if not self._rows:
            if self._closed:
                raise HandleError("this cache was freed; make another", reason="freed")
            self._rows = [Row(self._open_sequence())]
        return self._rows

    @property
    def rows_so_far(self) -> list[Row]:
        """The rows, or none if none was asked for yet."""
        return self._rows

    @property
    def num_columns(self) -> int:
        """Tokens and pads of each row, those of an unfinished pass not counted."""
        return num_columns(self.rows) if self._rows or self._closed else 0

    def is_of(self, decoder: torch.nn.Module) -> bool:
        """Whether the rows may be of this model."""
        return self.decoder is None or self.decoder() is decoder

    # -- the beginning and the end of a pass ---------------------------------------------------------------

    def begin(
        self,
        num_rows: int,
        width: int,
        *,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        stored: bool = True,
        attends: bool = False,
        may_pack: Callable[[], bool] | None = None,
    ) -> PassInput:
        """Note that a forward pass begins, and refuse one that this cache cannot hold.

        Args:
            num_rows: Rows of the batch.
            width: New columns.
            input_ids: The ids, `[num_rows, width]`, or None where the model is fed something else.
            position_ids: Their positions, if given.
            attention_mask: The mask, if given.
            stored: False to attend over the cache without adding to it (`use_cache=False`).
            attends: Whether attention is ours, so that K and V need not be laid out for it.
            may_pack: Tells whether the model may be run over one row of packed tokens instead of over the batch.

        Returns:
            What to call the model with.

        Raises:
            ShapeError: The pass does not continue where the cache ends.
        """
        self.roll_back()
        plan = plan_pass(
            self.rows,
            num_rows,
            width,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            special=self.special,
        )
        is_dense = plan.is_plain and not self.rows[0].gaps
        pending = attends and stored and (not is_dense or self.manager.storage.prefers_attend(width))
        self._pass = current = _ForwardPass(plan, announced=True, stored=stored, pending=pending)
        if not pending or is_own_mask(attention_mask):
            return PassInput(attention_mask, None)
        columns, device = plan.columns + width, self.manager.device
        if attention_mask is None:
            attention_mask = torch.ones(num_rows, columns, dtype=torch.bool)
        if plan.has_surplus and plan.num_stored and may_pack is not None and may_pack():
            current.packing = plan.packing(device)
            batch = attention_mask[:, :columns].expand(num_rows, columns)
            return PassInput(known_mask(batch, width, plan.num_stored, device=device), current.packing)
        return PassInput(known_mask(attention_mask, width, device=device), None)

    @property
    def packing(self) -> Packing | None:
        """How the batch of the pass under way was packed before the model ran, if it was."""
        return self._pass.packing

    def end(self, *, succeeded: bool) -> None:
        """Note that the announced pass is over: commit it whole, or roll it back.

        Raises:
            StepError: The model came to its end without writing every layer that caches.
        """
        current = self._pass
        if not succeeded:
            self.roll_back()
            return
        missing = self._caching_layers - current.layers
        if missing and current.stored:
            self.roll_back()
            raise StepError(
                f"the model wrote {len(current.layers)} of the {len(self._caching_layers)} layers that its cache "
                f"holds; open the cache with the geometry of the model as it runs (missing: {sorted(missing)})"
            )
        self._commit()

    def roll_back(self) -> None:
        """Forget a pass that was left half-way; the rows are as they were before it."""
        opened = self._pass.opened
        self._pass = _ForwardPass()
        if opened is not None:
            opened.abort()

    def close(self) -> None:
        """Forget an unfinished pass and free the handles."""
        self._closed = True
        self.roll_back()
        drop(self._rows)

    def abandon(self) -> None:
        """As `close`, but from a finalizer, where nobody may wait for a lock."""
        self._closed = True
        if self._pass.opened is not None:
            self._pass.opened.abandon()
        discard(self._rows)

    def replace_rows(self, rows: list[Row]) -> None:
        """Hold these rows from now on; former ones that are not among them are freed."""
        former, self._rows = self._rows, rows
        drop(former, keep=rows)

    def _commit(self) -> None:
        opened = self._pass.opened
        self._pass = _ForwardPass()
        if opened is not None:
            self.replace_rows(opened.commit())

    # -- one layer -----------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, said: Mapping[str, Any]) -> KeyValue:
        """Take one layer's new K and V `[rows, heads, new columns, dim]`; return those of all columns.

        Args:
            layer: The layer.
            key: The new keys.
            value: The new values.
            said: What the model passes to `Cache.update` besides: perhaps `use_cache` and `position_ids`.
        """
        if key.ndim != 4 or value.ndim != 4:
            raise ShapeError(
                f"layer {layer}: key and value must be [rows, kv heads, new tokens, head dim], not {list(key.shape)} "
                f"and {list(value.shape)}"
            )
        current = self._pass
        if not current.announced:
            current = self._unannounced(layer, key, said)
        elif layer in current.layers:
            raise StepError(
                f"layer {layer} came twice in one forward pass, and each layer is cached once; "
                "if the pass before was interrupted, call cache.crop(0) to forget it"
            )
        opened = current.opened
        if opened is None:
            plan = current.plan = _fitting(current.plan, key, packed=current.packing is not None)
            if not current.stored:
                current.layers.add(layer)
                return joined(self._cached(layer, plan), key, value)
            opened = current.opened = OpenStep(
                self.manager, self.rows, plan, pending=current.pending, packing=current.packing
            )
        result = opened.write(layer, key, value)
        current.layers.add(layer)
        if not current.announced and len(current.layers) == len(self._caching_layers):
            self._commit()
        return result

    def read(self, layer: int) -> KeyValue | None:
        """K and V of one layer, `[rows, heads, columns, dim]` with zeros for pads, or None if it caches nothing."""
        if self.manager.geometry.producer(layer) is None:
            return None
        rows = self.rows
        if len(rows) == 1 and not rows[0].gaps:
            return as_model_reads(_kv_cache(rows[0], layer))
        return padded(rows, self.num_columns, lambda row: _kv_cache(row, layer))

    def _cached(self, layer: int, plan: PassPlan) -> KeyValue | None:
        """What `read` returns, for each row of a batch the row that it continues."""
        pair = self.read(layer)
        if pair is None or pair[0].shape[0] == plan.num_rows:
            return pair
        sources = torch.tensor(plan.sources, device=pair[0].device)
        return pair[0].index_select(0, sources), pair[1].index_select(0, sources)

    def _unannounced(self, layer: int, key: torch.Tensor, said: Mapping[str, Any]) -> _ForwardPass:
        """The pass under way when nobody says where one begins: a layer that comes again begins the next."""
        if layer in self._pass.layers:
            self.roll_back()
        current = self._pass
        said = said.get("kwargs") or said  # models pass what they know in a keyword of that name
        if current.plan is None:
            num_rows, width = key.shape[0], key.shape[2]
            current.plan = plan_pass(
                self.rows,
                num_rows,
                width,
                input_ids=None,
                position_ids=said.get("position_ids") if num_rows == 1 else None,  # others may have pads unknown to us
                attention_mask=None,
                special=self.special,
            )
        current.stored = current.stored and said.get("use_cache") is not False
        return current


def _fitting(plan: PassPlan | None, key: torch.Tensor, *, packed: bool) -> PassPlan:
    """The plan of a pass, now that its first layer tells how many columns it has."""
    if plan is None:
        raise StepError("a forward pass was not planned")
    num_rows, width = key.shape[0], key.shape[2]
    if (num_rows, width) == ((1, plan.num_stored) if packed else (plan.num_rows, plan.width)):
        return plan
    if packed or num_rows != plan.num_rows or plan.is_token is not None:
        raise ShapeError(
            f"the model was called with {plan.num_rows} rows of {plan.width} tokens and caches {num_rows} of {width}"
        )
    return plan.of_width(width)  # soft prompts and images add columns that have no ids


def _kv_cache(row: Row, layer: int) -> KeyValue:
    pair = row.handle.kv_cache(layer)
    if pair is None:
        raise ShapeError(f"layer {layer} caches nothing")
    return pair


def not_supported(what: str, instead: str) -> UnsupportedError:
    """The refusal of something that transformers' own caches can do and this one cannot."""
    return UnsupportedError(f"KvCache does not support {what}; {instead}", capability=what)
