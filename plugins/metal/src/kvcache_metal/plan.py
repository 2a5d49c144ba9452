"""How the queries of a step are put together for attention, worked out once for all its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from kvcache_core.paged import RowPlaces, Upload, slots_of
from kvcache_core.plugin import Batch, Segment
from kvcache_metal.guards import Guards, SdpaMask
from kvcache_metal.pool import MetalPool

__all__ = ["Piece", "PieceMaker", "Reading", "StepPlan", "StepQueries"]

#: Most scores that attention computes at once; MPS keeps them in memory, and those of a long prompt would not fit.
_MOST_SCORES = 1 << 26

#: Most rows of K that sequences which are attended together are read into; a longer sequence is attended by itself.
_MOST_ROWS = 1 << 16

#: Fewest keys that are computed with. Fewer would be as fast, and more shapes.
_FEWEST_KEYS = 16


@dataclass(frozen=True)
class Piece:
    """Queries that are attended together: so many tokens of each sequence of a reading.

    There may be more tokens than there really are, to keep the shapes few: a row of padding repeats another.

    Attributes:
        tokens: New tokens of each sequence.
        query_rows: Their rows in the packed query, int64 `[batch * tokens]`.
        first_key: The first key of the reading that some query sees.
        keys: How many there are from that one on, those of padding included.
        ends: For each query the number of keys up to its own, int32 `[batch, tokens, 1]`.
        window: Keys that a query sees at most, where some are hidden for that reason.
        hidden: Keys from this one on are hidden from some query; `keys` where only padding is.
        causal: Whether queries see what a causal mask of as many keys as tokens shows.
        segment: The sequence, where it is one.
        rows: Its new tokens that this is about, counted from its first one.
        masks: Masks for the layers to come, by dtype and heads; None where they would take much memory.
    """

    tokens: int
    query_rows: torch.Tensor
    first_key: int
    keys: int
    ends: torch.Tensor
    window: int | None
    hidden: int
    causal: bool
    segment: Segment | None
    rows: range
    masks: dict[tuple[torch.dtype, int, int], SdpaMask] | None = field(default=None, compare=False)

    def visible(self) -> torch.Tensor:
        """What each query sees, boolean `[batch, tokens, keys]`."""
        counted = torch.arange(self.keys, dtype=torch.int32, device=self.ends.device)
        visible = counted < self.ends
        return visible if self.window is None else visible & (counted >= self.ends - self.window)


@dataclass(frozen=True)
class Reading:
    """Keys that each layer reads out of the pool once, and the queries that meet them.

    Attributes:
        batch: Sequences. Those beyond the ones that there are read the null block, which is zeros.
        keys: Keys of each; beyond its own they are the null block's, which nobody sees.
        places: Where they lie, `[batch * keys]`.
        pieces: The queries; with several sequences all are in one.
    """

    batch: int
    keys: int
    places: RowPlaces
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StepQueries:
    """All queries of a step.

    Attributes:
        readings: What is read, and the queries that meet it.
        order: For each packed row, its place in the pieces put together, int64 `[num_tokens]` on the device; None where
            that is its own number.
    """

    readings: tuple[Reading, ...]
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

    def queries(self, segments: Sequence[Segment], window: int | None, num_heads: int) -> StepQueries:
        """Put all queries of a step together."""
        readings: list[Reading] = []
        order: dict[int, int] = {}
        end = 0
        for group in self._similar([segment for segment in segments if segment.num_new_tokens == 1], window):
            readings.append(self._decoding(group, window))
            order.update((segment.row, end + number) for number, segment in enumerate(group))
            end += readings[-1].batch
        for segment in segments:
            if segment.num_new_tokens > 1:
                readings.append(self._prefilling(segment, range(segment.num_new_tokens), window, num_heads))
                for piece in readings[-1].pieces:
                    order.update((segment.row + row, end + number) for number, row in enumerate(piece.rows))
                    end += piece.tokens
        places = [order[row] for row in range(len(order))]
        if places == list(range(len(places))):
            return StepQueries(tuple(readings), None)
        return StepQueries(tuple(readings), self._indices(places))

    def one_by_one(self, piece: Piece, window: int | None) -> Iterator[Reading]:
        """Yield a reading for each query of a piece of one sequence, with no key but those that it sees."""
        if piece.segment is None:
            return
        for row in piece.rows:
            yield self._prefilling(piece.segment, range(row, row + 1), window, 1)

    def locate(self, segment: Segment) -> RowPlaces:
        """Find a sequence's tokens."""
        return self._pool.locate_tokens(segment.blocks, segment.stop, self._upload)

    # -- several tokens of one sequence --------------------------------------------------------------------

    def _prefilling(self, segment: Segment, rows: range, window: int | None, num_heads: int) -> Reading:
        """Read a sequence for some of its new tokens."""
        low, stop = _lowest(segment.start + rows.start, window), segment.start + rows.stop  # positions
        longest = stop - low if window is None else min(stop - low, window + len(rows))
        chunks = list(_chunks(rows, _MOST_SCORES // (num_heads * self._width(longest))))
        pieces = tuple(self._chunk(segment, chunk, window, low, stop, alone=len(chunks) == 1) for chunk in chunks)
        keys = self._guards.bucketed_lengths(max(piece.first_key + piece.keys for piece in pieces))
        return Reading(1, keys, self._places([(segment, low, stop)], 1, keys), pieces)

    def _chunk(self, segment: Segment, rows: range, window: int | None, low: int, stop: int, *, alone: bool) -> Piece:
        """Make a piece of consecutive new tokens of a sequence that is read from position `low` to `stop`."""
        first, last = segment.start + rows.start, segment.start + rows.stop
        seen_from = _lowest(first, window)
        keys = self._width(last - seen_from)
        tokens = self._guards.bucketed_lengths(len(rows))
        padding = tokens - len(rows)
        ends = [position + 1 - seen_from for position in range(first, last)]
        slides = seen_from < _lowest(last - 1, window)
        stored = min(keys, stop - seen_from)  # what follows is padding
        return Piece(
            tokens=tokens,
            query_rows=self._indices([segment.row + row for row in (*rows, *([rows[-1]] * padding))]),
            first_key=seen_from - low,
            keys=keys,
            ends=self._upload(torch.tensor(ends + ends[-1:] * padding, dtype=torch.int32).view(1, tokens, 1)),
            window=window if slides else None,
            hidden=0 if slides else ends[0] if ends[0] < stored else keys,
            causal=first == 0 and not slides and tokens == keys,
            segment=segment,
            rows=rows,
            masks={} if alone else None,
        )

    # -- one token of several sequences --------------------------------------------------------------------

    def _decoding(self, group: Sequence[Segment], window: int | None) -> Reading:
        """Read sequences that add one token each."""
        batch = self._guards.bucketed_lengths(len(group))
        padding = batch - len(group)
        read = [(segment, _lowest(segment.start, window), segment.stop) for segment in group]
        keys = self._width(max(stop - low for _, low, stop in read))
        ends = [stop - low for _, low, stop in read] + [1] * padding
        piece = Piece(
            tokens=1,
            query_rows=self._indices([segment.row for segment in group] + [group[0].row] * padding),
            first_key=0,
            keys=keys,
            ends=self._upload(torch.tensor(ends, dtype=torch.int32).view(batch, 1, 1)),
            window=None,
            hidden=keys,
            causal=False,
            segment=None,
            rows=range(1),
            masks={},
        )
        return Reading(batch, keys, self._places(read, batch, keys), (piece,))

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

    # -- both --------------------------------------------------------------------------------------------

    def _places(self, read: Sequence[tuple[Segment, int, int]], batch: int, keys: int) -> RowPlaces:
        """Find positions `low` to `stop` of each sequence, filled up to `keys` with rows of the null block."""
        parts = [slots_of(segment.blocks, self._pool.block_size, low, stop) for segment, low, stop in read]
        slots = torch.cat([pad(part, (0, keys - len(part))) for part in parts])
        return self._pool.locate(pad(slots, (0, batch * keys - len(slots))), self._upload)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return self._upload(torch.tensor(values, dtype=torch.int64))

    def _width(self, length: int) -> int:
        return self._guards.bucketed_lengths(max(length, _FEWEST_KEYS))


def _chunks(rows: range, most: int) -> Iterator[range]:
    """Cut rows so that the scores of each part stay within bounds."""
    at_once = 1 << (max(1, most).bit_length() - 1)  # a bucket, so that only the last part is padded
    for start in range(rows.start, rows.stop, at_once):
        yield range(start, min(start + at_once, rows.stop))


def _lowest(position: int, window: int | None) -> int:
    """The first position that a query sees."""
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
        self._made: dict[tuple[int | None, int], StepQueries] = {}
        self._located: dict[int, RowPlaces] = {}

    def queries(self, window: int | None, num_heads: int) -> StepQueries:
        """The queries of the step, for a layer of this window and so many heads."""
        made = self._made.get((window, num_heads))
        if made is None:
            made = self._made[window, num_heads] = self._maker.queries(self._segments, window, num_heads)
        return made

    def places(self, index: int) -> RowPlaces:
        """Where the tokens of sequence `index` lie, see `MetalPool.locate_tokens`."""
        located = self._located.get(index)
        if located is None:
            located = self._located[index] = self._maker.locate(self._segments[index])
        return located
