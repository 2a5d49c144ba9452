"""How the queries of a step are put together for attention, worked out once for all its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcache_core.paged import RowPlaces
from kvcache_core.paged.pool import Upload
from kvcache_core.paged.sharded import slots_of
from kvcache_core.plugin import Batch, Segment
from kvcache_metal.guards import Guards
from kvcache_metal.pool import MetalPool

__all__ = ["Piece", "PieceMaker", "Pieces", "StepPlan"]

#: Most scores that attention computes at once; MPS keeps them in memory, and those of a long prompt would not fit.
_MOST_SCORES = 1 << 26

#: Most rows of K that sequences which are attended together are read into; a longer sequence is attended by itself.
_MOST_ROWS = 1 << 17

#: Fewest keys that are computed with. Fewer would be as fast, and more shapes.
_FEWEST_KEYS = 16


@dataclass(frozen=True)
class Piece:
    """Queries that are attended together: so many tokens of each of so many sequences.

    There may be more sequences, tokens and keys than there really are, to keep the shapes few: a row of padding repeats
    another, and a key of padding is a zero of the null block that nobody sees.

    Attributes:
        batch: Sequences.
        tokens: New tokens of each.
        keys: Keys of each.
        query_rows: Their rows in the packed query, int64 `[batch * tokens]`.
        places: Where their keys lie, `[batch * keys]`.
        visible: What each query sees, boolean `[batch, tokens, keys]`.
        hidden: Keys from this one on are hidden from some query; `keys` where only padding is.
        causal: Whether `visible` is the causal mask of as many keys as tokens.
        segment: The sequence, where it is one.
        rows: Its new tokens that this is about, counted from its first one.
    """

    batch: int
    tokens: int
    keys: int
    query_rows: torch.Tensor
    places: RowPlaces
    visible: torch.Tensor
    hidden: int
    causal: bool
    segment: Segment | None
    rows: range


@dataclass(frozen=True)
class Pieces:
    """All queries of a step.

    Attributes:
        pieces: The pieces.
        order: For each packed row, its place in the pieces put together, int64 `[num_tokens]` on the device; None where
            that is its own number.
    """

    pieces: tuple[Piece, ...]
    order: torch.Tensor | None


class PieceMaker:
    """Puts queries together.

    Args:
        pool: Where the keys lie.
        upload: Brings an index tensor to the device.
        guards: The guards in force.
    """

    def __init__(self, pool: MetalPool, upload: Upload, guards: Guards) -> None:
        self._pool = pool
        self._upload = upload
        self._guards = guards

    def pieces(self, segments: Sequence[Segment], window: int | None, num_heads: int) -> Pieces:
        """Put all queries of a step together."""
        made: list[Piece] = []
        order: dict[int, int] = {}
        end = 0
        single = [segment for segment in segments if segment.num_new_tokens == 1]
        several = [segment for segment in segments if segment.num_new_tokens > 1]
        for group in self._similar(single, window):
            made.append(self._decoding(group, window))
            order.update((segment.row, end + number) for number, segment in enumerate(group))
            end += made[-1].batch
        for segment in several:
            for rows in self._chunks(segment, window, num_heads):
                made.append(self.prefill(segment, rows, window))
                order.update((segment.row + row, end + number) for number, row in enumerate(rows))
                end += made[-1].tokens
        places = [order[row] for row in range(len(order))]
        if places == list(range(len(places))):
            return Pieces(tuple(made), None)
        return Pieces(tuple(made), self._upload(torch.tensor(places, dtype=torch.int64)))

    def locate(self, segment: Segment) -> RowPlaces:
        """Find a sequence's tokens."""
        return self._pool.locate_tokens(segment.blocks, segment.stop, self._upload)

    def one_by_one(self, piece: Piece, window: int | None) -> Iterator[Piece]:
        """Yield a piece for each of a sequence's queries, with no key but those that it sees."""
        assert piece.segment is not None  # noqa: S101 - only pieces of one sequence hide anything but padding
        for row in piece.rows:
            yield self.prefill(piece.segment, range(row, row + 1), window)

    def prefill(self, segment: Segment, rows: range, window: int | None) -> Piece:
        """Make the piece of some consecutive new tokens of one sequence."""
        first, last = segment.start + rows.start, segment.start + rows.stop  # positions
        low = _lowest(first, window)
        tokens = self._guards.bucketed_lengths(len(rows))
        ends = [first + number + 1 - low for number in range(len(rows))]
        hidden = 0 if window is not None and low < _lowest(last - 1, window) else ends[0]
        return self._piece(
            [(segment, low, last)],
            tokens=tokens,
            query_rows=[segment.row + row for row in rows] + [segment.row + rows.stop - 1] * (tokens - len(rows)),
            ends=ends + ends[-1:] * (tokens - len(rows)),
            window=window,
            hidden=hidden if len(rows) > 1 else None,
            causal=first == 0 and window is None,
            segment=segment,
            rows=rows,
        )

    def _decoding(self, group: Sequence[Segment], window: int | None) -> Piece:
        """Make the piece of sequences that add one token each."""
        batch = self._guards.bucketed_lengths(len(group))
        read = [(segment, _lowest(segment.start, window), segment.stop) for segment in group]
        padding = batch - len(group)
        return self._piece(
            read,
            batch=batch,
            query_rows=[segment.row for segment in group] + [group[0].row] * padding,
            ends=[stop - low for _, low, stop in read] + [1] * padding,
            segment=group[0] if len(group) == 1 else None,
            rows=range(1),
        )

    def _piece(
        self,
        read: Sequence[tuple[Segment, int, int]],
        *,
        query_rows: Sequence[int],
        ends: Sequence[int],
        segment: Segment | None,
        rows: range,
        batch: int = 1,
        tokens: int = 1,
        window: int | None = None,
        hidden: int | None = None,
        causal: bool = False,
    ) -> Piece:
        keys = self._width(max(stop - low for _, low, stop in read))
        # The null block is zeros, which is what padding has to be.
        slots = torch.zeros(batch * keys, dtype=torch.int64)
        parts = [slots_of(each.blocks, self._pool.block_size, low, stop) for each, low, stop in read]
        filled = [torch.arange(number * keys, number * keys + len(part)) for number, part in enumerate(parts)]
        slots = slots.index_put((torch.cat(filled),), torch.cat(parts))
        last = self._upload(torch.tensor(ends, dtype=torch.int32).view(batch, tokens, 1))
        counted = torch.arange(keys, dtype=torch.int32, device=last.device)
        visible = counted < last
        if window is not None:
            visible = visible & (counted >= last - window)
        return Piece(
            batch=batch,
            tokens=tokens,
            keys=keys,
            query_rows=self._upload(torch.tensor(query_rows, dtype=torch.int64)),
            places=self._pool.locate(slots, self._upload),
            visible=visible,
            hidden=keys if hidden is None else hidden,
            causal=causal and tokens == keys,
            segment=segment,
            rows=rows,
        )

    def _width(self, length: int) -> int:
        return self._guards.bucketed_lengths(max(length, _FEWEST_KEYS))

    def _similar(self, segments: Sequence[Segment], window: int | None) -> Iterator[list[Segment]]:
        """Group sequences that add one token, so that padding them to the longest at most doubles what is read."""

        def length(segment: Segment) -> int:
            return segment.stop - _lowest(segment.start, window)

        group: list[Segment] = []
        for segment in sorted(segments, key=length, reverse=True):
            if group:
                longest = self._width(length(group[0]))
                if longest > 2 * self._width(length(segment)) or (len(group) + 1) * longest > _MOST_ROWS:
                    yield group
                    group = []
            group.append(segment)
        if group:
            yield group

    def _chunks(self, segment: Segment, window: int | None, num_heads: int) -> Iterator[range]:
        """Cut a sequence's new tokens so that the scores of each part stay within bounds."""
        new = segment.num_new_tokens
        longest = segment.stop if window is None else min(segment.stop, window + new)
        at_once = max(1, _MOST_SCORES // (num_heads * self._width(longest)))
        at_once = 1 << (at_once.bit_length() - 1)  # a bucket, so that only the last part is padded
        for start in range(0, new, at_once):
            yield range(start, min(start + at_once, new))


def _lowest(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


class StepPlan:
    """What all layers of a step share, made when a layer needs it.

    Args:
        batch: The step. It is not held, as it holds the plan.
        maker: Puts queries together.
    """

    def __init__(self, batch: Batch, maker: PieceMaker) -> None:
        self._segments = batch.segments
        self._maker = maker
        self._made: dict[tuple[int | None, int], Pieces] = {}
        self._located: dict[int, RowPlaces] = {}

    def pieces(self, window: int | None, num_heads: int) -> Pieces:
        """The queries of the step, for a layer of this window and so many heads."""
        made = self._made.get((window, num_heads))
        if made is None:
            made = self._made[window, num_heads] = self._maker.pieces(self._segments, window, num_heads)
        return made

    def places(self, index: int) -> RowPlaces:
        """Where the tokens of sequence `index` lie, see `MetalPool.locate_tokens`."""
        located = self._located.get(index)
        if located is None:
            located = self._located[index] = self._maker.locate(self._segments[index])
        return located
