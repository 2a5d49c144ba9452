"""Random histories of a cache, each operation done to lists of tokens as well.

Every operation draws all that it needs before it does anything, since hypothesis may end a history at any draw.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvcache_core.errors import CacheFullError, HandleError, ShapeError, StepError
from kvcache_core.testing.comparison import ComparedCache, Line, OpenStep

__all__ = ["CacheMachine", "Draw"]

Drawn = TypeVar("Drawn")
Draw = Callable[["st.SearchStrategy[Drawn]"], Drawn]

PICKS = st.integers(0, 63)
COUNTS = st.integers(0, 9)
PARTS = st.floats(0, 1)

#: Parts of a step: which sequence, how many new tokens, and whether they are named.
BATCHES = st.lists(st.tuples(PICKS, COUNTS, st.sampled_from([True, True, False])), min_size=0, max_size=4)


class CacheMachine(ComparedCache):
    """A tiny cache against a list of tokens for each sequence; everything is compared after every operation."""

    #: Operation -> how often it is chosen, relative to the others.
    operations: ClassVar[dict[str, int]] = {
        "whole_step": 4,
        "decode": 2,
        "fork": 3,
        "truncate": 2,
        "let_go": 2,
        "begin_step": 2,
        "end_step": 2,
        "vain_step": 2,
        "allocate": 1,
        "clone": 1,
        "extend": 1,
        "edit_table": 1,
        "take_blocks": 1,
        "reset_now_and_then": 1,
    }

    # One rule, and the choice made here: hypothesis would try few of many rules in any one history.
    @rule(data=st.data())
    def do_something(self, data: st.DataObject) -> None:
        """Do one operation, and compare."""
        menu = [name for name, weight in self.operations.items() for _ in range(weight)]
        getattr(self, data.draw(st.sampled_from(menu)))(data.draw)
        self.compare()

    # -- sequences ---------------------------------------------------------------------------------------

    def allocate(self, draw: Draw[Any]) -> None:
        """Open a sequence."""
        if len(self.lines) > 5:
            return
        room, limit = draw(COUNTS), draw(st.sampled_from([self.limit, self.limit, min(self.limit, 5)]))
        made = self.has_room(lambda: self.cache.allocate(num_tokens=room, max_sequence_length=limit))
        if made is not None:
            self.lines.append(Line([made], limit))
            assert made.block_table.capacity >= room

    def fork(self, draw: Draw[Any]) -> None:
        """Fork a sequence."""
        line = self.pick(draw(PICKS))
        if len(self.lines) < 6 and not self.refused_in_step(line, line.handle.fork):
            made = self.has_room(line.handle.fork)
            if made is not None:
                assert made.cache_id != line.handle.cache_id
                self.lines.append(Line([made], line.limit, list(line.tokens), list(line.named), line.salt))

    def clone(self, draw: Draw[Any]) -> None:
        """Take another reference."""
        line = self.pick(draw(PICKS))
        line.handles.append(line.handle.clone_handle())

    def truncate(self, draw: Draw[Any]) -> None:
        """Truncate a sequence."""
        line, part = self.pick(draw(PICKS)), draw(PARTS)
        length = round(part * len(line.tokens))
        if not self.refused_in_step(line, lambda: line.handle.truncate(length)):
            line.handles[-1].truncate(length)
            del line.tokens[length:], line.named[length:]
            assert line.handle.block_table.num_blocks == -(-length // self.cache.block_size)
            with pytest.raises(ShapeError):
                line.handle.truncate(length + 1)

    def extend(self, draw: Draw[Any]) -> None:
        """Reserve room."""
        line, count = self.pick(draw(PICKS)), draw(COUNTS)
        if not self.refused_in_step(line, lambda: self.cache.extend(line.handle, count)):
            self.has_room(lambda: self.cache.extend(line.handle.request_id, count))

    def let_go(self, draw: Draw[Any]) -> None:
        """Free a handle, drop it, or deallocate its sequence."""
        line, way = self.pick(draw(PICKS)), draw(st.sampled_from(["free", "drop", "deallocate"]))
        if way == "deallocate":
            name = line.handle.request_id
            if not self.refused_in_step(line, lambda: self.cache.deallocate(name)):
                self.cache.deallocate(name)
                assert not any(handle.is_valid for handle in line.handles)
                self.lines.remove(line)
        elif way == "free":
            if not self.refused_in_step(line, line.handle.free):
                handle = line.handles.pop()
                handle.free()
                with pytest.raises(HandleError):
                    handle.free()
        elif line.step is None or len(line.handles) > 1:  # a step refers to the first handle
            with pytest.warns(ResourceWarning, match="without free"):
                line.handles.pop()
        self.lines = [line for line in self.lines if line.handles]

    # -- steps -------------------------------------------------------------------------------------------

    def whole_step(self, draw: Draw[Any]) -> None:
        """Do a whole step over a ragged batch, and keep all of its tokens or some."""
        batch, attend, kept = draw(BATCHES), draw(st.booleans()), draw(st.sampled_from([None, None, 0.0, 0.4, 0.8]))
        opened = self._begin(batch, attend=attend)
        if opened is not None:
            self._end(opened, "commit", kept)

    def decode(self, draw: Draw[Any]) -> None:
        """Add a token to everything that is in no step."""
        idle = [(index, 1, True) for index, line in enumerate(self.lines) if line.step is None]
        opened = self._begin(idle, attend=draw(st.booleans()))
        if opened is not None:
            self._end(opened, "commit", None)

    def vain_step(self, draw: Draw[Any]) -> None:
        """Write a step that comes to nothing."""
        batch, ending = draw(BATCHES), draw(st.sampled_from(["abort", "exception", "drop"]))
        opened = self._begin(batch, attend=False)
        if opened is not None:
            self._end(opened, ending, None)

    def begin_step(self, draw: Draw[Any]) -> None:
        """Write a step and leave it open while other things happen."""
        opened = self._begin(draw(BATCHES), attend=draw(st.booleans()))
        if opened is not None:
            self.open_steps.append(opened)

    def end_step(self, draw: Draw[Any]) -> None:
        """End a step that was left open."""
        which, kept = draw(PICKS), draw(st.sampled_from([None, 0.5]))
        ending = draw(st.sampled_from(["commit", "commit", "abort", "drop"]))
        if self.open_steps:
            opened = self.open_steps.pop(which % len(self.open_steps))
            self._check_attention(opened)
            self._end(opened, ending, kept)

    def _begin(self, batch: list[tuple[int, int, bool]], *, attend: bool) -> OpenStep | None:
        new: dict[Line, tuple[list[int], bool]] = {}
        for which, count, named in batch:
            new.setdefault(self.pick(which), (self.new_tokens(count), named))
        wanted = {line.handle: tokens if named else len(tokens) for line, (tokens, named) in new.items()}
        if any(line.step is not None for line in new):
            with pytest.raises((StepError, CacheFullError)):  # whichever is noticed first
                self.cache.begin(wanted)
            return None
        opened = OpenStep([(line, *what) for line, what in new.items()])
        opened.step = self.has_room(lambda: self.cache.begin(wanted))
        if opened.step is None:
            return None
        for line in new:
            line.step = opened
        if new:
            self.kit.write(opened.step, {line.handle: tokens for line, (tokens, _) in new.items()})
            if attend:
                self._check_attention(opened)
        self.compare()
        return opened

    def _check_attention(self, opened: OpenStep) -> None:
        for layer in self.kit.attending_layers(self.cache) if opened.new else ():
            spec, rows = self.kit.layer_spec(self.cache, layer), opened.step.num_new_tokens
            query = self.kit.random(rows, 2 * spec.num_kv_heads, spec.head_dim, dtype=self.cache.dtype)
            self.kit.assert_attends(opened.step, layer, query)

    def _end(self, opened: OpenStep, ending: str, kept: float | None) -> None:
        if ending == "commit":
            for line, tokens, named in opened.new:
                count = len(tokens) if kept is None else round(kept * len(tokens))
                if kept is not None:
                    opened.step.accept(line.handle, count)
                line.tokens += tokens[:count]
                line.named += [named] * count
            opened.step.commit()
        elif ending == "abort":
            opened.step.abort()
        elif ending == "exception":
            with pytest.raises(KeyError), opened.step:
                raise KeyError
        for line, _, _ in opened.new:
            line.step = None
        if ending == "drop":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del opened.step
            assert ["rolled back" in str(warning.message) for warning in caught] == [True]

    # -- tables and the whole ----------------------------------------------------------------------------

    def edit_table(self, draw: Draw[Any]) -> None:
        """Extend a block table by hand, with blocks of the cache's choice or the caller's."""
        line, blocks = self.pick(draw(PICKS)), draw(st.sampled_from([0, 1, 2, self.loose, self.loose]))
        fail = draw(st.booleans())
        if self.refused_in_step(line, lambda: line.handle.block_table_mut().__enter__()):
            return
        before = line.handle.block_table
        try:
            with line.handle.block_table_mut() as table:
                table.add_blocks(blocks)
                if fail:
                    raise KeyError
        except (KeyError, CacheFullError, ShapeError):  # ShapeError: more blocks than the sequence can fill
            assert line.handle.block_table == before
        else:
            assert line.handle.block_table.physical_blocks[: before.num_blocks] == before.physical_blocks
            if blocks is self.loose:
                self.loose = []

    def take_blocks(self, draw: Draw[Any]) -> None:
        """Take blocks from the allocator, or give back those taken."""
        count = draw(st.integers(0, 2))
        if count:
            self.loose += self.has_room(lambda: self.cache.block_allocator.allocate_blocks(count)) or []
        else:
            self.cache.block_allocator.free_blocks(self.loose)
            self.loose = []

    def reset_now_and_then(self, draw: Draw[Any]) -> None:
        """Drop everything, once in a while."""
        if draw(st.integers(0, 5)):
            return
        self.cache.reset()
        assert not any(handle.is_valid for line in self.lines for handle in line.handles)
        self.lines.clear()
        self.open_steps.clear()
