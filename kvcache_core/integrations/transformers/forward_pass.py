"""One model forward pass over one sequence, written to the cache layer by layer.

transformers hands each layer's K and V to `Cache.update` and says neither where a forward pass begins nor whether
it came to its end. Hooks on the model (see `watch`) tell both; without them a pass begins with the first layer and
ends with the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_core.errors import ShapeError, StepError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from kvcache_core.handle import KvCacheHandle
    from kvcache_core.step import Step

__all__ = ["PassWriter", "not_supported"]

KeyValue = tuple["torch.Tensor", "torch.Tensor"]


@dataclass
class _ForwardPass:
    """What is known of the forward pass under way.

    Attributes:
        token_ids: The ids of its tokens, or None when nobody has named them.
        announced: Whether a hook has said that it began, and so will say that it ended.
        stored: Whether it stores what it computes (`use_cache`).
        step: The step that takes its K and V; opened by the first layer.
        layers: Layers written so far.
    """

    token_ids: Sequence[int] | None = None
    announced: bool = False
    stored: bool = True
    step: Step | None = None
    layers: set[int] = field(default_factory=set)


class PassWriter:
    """Writes the forward passes over one handle, all layers of a pass or none."""

    def __init__(self, handle: KvCacheHandle) -> None:
        self.handle = handle
        self._caching_layers = frozenset(handle.manager.geometry.caching_layers)
        self._is_view = handle.dense_is_view
        self._pass = _ForwardPass()

    # -- the beginning and the end of a pass ---------------------------------------------------------------

    def begin(
        self,
        batch_size: int,
        num_tokens: int,
        *,
        token_ids: Sequence[int] | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        stored: bool = True,
    ) -> None:
        """Note that a forward pass begins, and refuse one that this cache cannot hold.

        Args:
            batch_size: Rows.
            num_tokens: New tokens of a row.
            token_ids: Their ids, or None where the model is fed something else.
            position_ids: Their positions, if given.
            attention_mask: The mask, if given.
            stored: False to attend over the cache without adding to it (`use_cache=False`).

        Raises:
            UnsupportedError: More than one row, or padding.
            ShapeError: The pass does not continue where the cache ends.
        """
        self.roll_back()
        self._check_batch(batch_size)
        is_plain = self._check_mask(num_tokens, attention_mask)
        self._check_positions(num_tokens, position_ids)
        # K and V under a mask of the caller's own do not follow from the token ids, so they stay anonymous.
        self._pass = _ForwardPass(token_ids if is_plain else None, announced=True, stored=stored)

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
        """Forget a pass that was left half-way; the sequence is as it was before it."""
        step, self._pass = self._pass.step, _ForwardPass()
        if step is not None and step.state == "open" and self.handle.is_valid:
            step.abort()

    def close(self) -> None:
        """Forget an unfinished pass and free the handle."""
        self.roll_back()
        if self.handle.is_valid:
            self.handle.free()

    def _commit(self) -> None:
        step, self._pass = self._pass.step, _ForwardPass()
        if step is not None:
            step.commit()

    # -- one layer -----------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, said: Mapping[str, Any]) -> KeyValue:
        """Take one layer's new K and V `[1, heads, new tokens, dim]`; return those of the whole sequence.

        Args:
            layer: The layer.
            key: The new keys.
            value: The new values.
            said: What the model passes to `Cache.update` besides: perhaps `use_cache` and `position_ids`.
        """
        if key.ndim != 4 or value.ndim != 4:
            raise ShapeError(
                f"layer {layer}: key and value must be [1, kv heads, new tokens, head dim], not {list(key.shape)} "
                f"and {list(value.shape)}"
            )
        self._check_batch(key.shape[0])
        current = self._pass
        if not current.announced:
            current = self._unannounced(layer, key.shape[2], said)
        elif layer in current.layers:
            raise StepError(
                f"layer {layer} came twice in one forward pass, and each layer is cached once; "
                "if the pass before was interrupted, call cache.crop(0) to forget it"
            )
        if not current.stored:
            current.layers.add(layer)
            return self._joined(layer, key, value)
        step = current.step or self._open_step(current, key.shape[2])
        step.write(layer, key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1))
        current.layers.add(layer)
        keys, values = step.gather(layer)
        result = _as_model_reads(keys, key.dtype), _as_model_reads(values, value.dtype)
        result[0].kvcache_step = step, layer, self._is_view  # type: ignore[attr-defined]  # for our attention
        if not current.announced and len(current.layers) == len(self._caching_layers):
            self._commit()
        return result

    def _unannounced(self, layer: int, num_tokens: int, said: Mapping[str, Any]) -> _ForwardPass:
        """The pass under way when nobody says where one begins: a layer that comes again begins the next."""
        if layer in self._pass.layers:
            self.roll_back()
        said = said.get("kwargs") or said  # models pass what they know in a keyword of that name
        if not self._pass.layers:
            self._check_positions(num_tokens, said.get("position_ids"))
        self._pass.stored = self._pass.stored and said.get("use_cache") is not False
        return self._pass

    def read(self, layer: int) -> KeyValue | None:
        """K and V of one layer, `[1, heads, tokens, dim]`, or None if it caches nothing."""
        both = self.handle.kv_cache(layer)
        return None if both is None else (_as_model_reads(both[0]), _as_model_reads(both[1]))

    def _open_step(self, current: _ForwardPass, num_tokens: int) -> Step:
        ids = current.token_ids
        named = ids is not None and len(ids) == num_tokens  # soft prompts and images add rows that have no id
        current.step = self.handle.manager.begin({self.handle: ids if ids is not None and named else num_tokens})
        return current.step

    def _joined(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KeyValue:
        import torch  # noqa: PLC0415

        cached = self.read(layer)
        if cached is None:
            return key, value
        return (
            torch.cat([cached[0].to(key.dtype), key], dim=2),
            torch.cat([cached[1].to(value.dtype), value], dim=2),
        )

    # -- checks --------------------------------------------------------------------------------------------

    def _check_batch(self, batch_size: int) -> None:
        if batch_size != 1:
            raise not_supported(
                f"a batch of {batch_size} sequences",
                "run one prompt at a time, without beams and num_return_sequences; "
                "for several continuations of one prompt, generate each on its own copy.deepcopy(cache)",
            )

    def _check_positions(self, num_tokens: int, position_ids: Any) -> None:
        start = self.handle.num_tokens
        if num_tokens == 0:
            raise ShapeError(
                f"the forward pass has no new tokens, and the cache holds {start}; a prompt must be longer than "
                "what is cached of it: call cache.prepare(input_ids) before generate"
            )
        if position_ids is None or position_ids.ndim != 2 or position_ids.shape[-1] != num_tokens:
            return
        positions = position_ids[0].tolist()
        if positions != list(range(start, start + num_tokens)):
            raise ShapeError(
                f"the forward pass is at positions {_brief(positions)}, but the cache holds {start} tokens and "
                "continues there: call cache.prepare(input_ids) before generate",
                details=[
                    "generate feeds the wrong tokens when the prompt is not longer than the cache;",
                    "prepare keeps what both have in common and drops the rest",
                ],
            )

    def _check_mask(self, num_tokens: int, attention_mask: Any) -> bool:
        """Whether the mask is absent or says nothing; a two-dimensional one must cover cache and new tokens."""
        if attention_mask is None:
            return True
        if getattr(attention_mask, "ndim", 0) != 2:
            return False
        length = self.handle.num_tokens + num_tokens
        if attention_mask.shape[1] < length:
            raise ShapeError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, but {self.handle.num_tokens} are cached and "
                f"{num_tokens} new: extend it to {length}, or leave it out"
            )
        if not bool(attention_mask[:, :length].all()):
            raise not_supported("a padded prompt", "tokenize without padding; a single prompt needs none")
        return True


def not_supported(what: str, instead: str) -> UnsupportedError:
    """The refusal of something that transformers' own caches can do and this one cannot yet."""
    return UnsupportedError(f"KvCache does not support {what} yet; {instead}", capability=what)


def _brief(positions: list[int]) -> str:
    first, last = positions[0], positions[-1]
    if len(positions) > 1 and positions == list(range(first, last + 1)):
        return f"{first} to {last}"
    shown = ", ".join(map(str, positions[:8]))
    return f"{shown}, ..." if len(positions) > 8 else shown


def _as_model_reads(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`[tokens, heads, dim]` as `[1, heads, tokens, dim]`, a view unless converted to `dtype`."""
    view = tensor.transpose(0, 1).unsqueeze(0)
    return view if dtype is None or view.dtype is dtype else view.to(dtype)
