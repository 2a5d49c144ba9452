from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvcache_core.geometry import CacheGeometry, LayerGroup
from kvcache_cpu.layout import Layout, Section, Span

PAGE = 64


def bytes_of(spans: Iterable[Span]) -> set[int]:
    return {byte for offset, length in spans for byte in range(offset, offset + length)}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    counts = st.integers(1, 3)
    dims = st.integers(1, 40)
    groups, first = [], 0
    for _ in range(draw(counts)):
        last = first + draw(counts)
        groups.append(
            LayerGroup(
                layers=tuple(range(first, last)),
                num_kv_heads=draw(counts),
                head_dim=draw(dims),
                value_head_dim=draw(dims),
            )
        )
        first = last
    geometry = CacheGeometry(num_layers=first, groups=tuple(groups))
    return Layout.of(geometry, draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 30)), PAGE)


def runs(layout: Layout) -> list[tuple[Section, int]]:
    return [
        (section, section.offset + run * section.run_bytes)
        for section in layout.sections
        for run in range(section.layers * section.heads)
    ]


@given(layouts())
def test_runs_start_at_pages_hold_the_capacity_and_fill_the_whole_without_overlap(layout: Layout) -> None:
    end = 0
    for section, start in runs(layout):
        assert start == end
        assert start % PAGE == 0
        assert section.run_bytes >= layout.capacity * section.row_bytes
        end = start + section.run_bytes
    assert end == layout.nbytes


@given(layouts(), st.data())
def test_rows_of_a_run_follow_one_another(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.capacity))
    stop = data.draw(st.integers(start, layout.capacity))
    expected = {
        begin + byte
        for section, begin in runs(layout)
        for byte in range(start * section.row_bytes, stop * section.row_bytes)
    }
    assert bytes_of(layout.rows(start, stop)) == expected


@given(layouts(), st.data())
def test_the_rest_after_a_truncate_and_the_tails_cover_what_was_dropped_and_nothing_kept(
    layout: Layout, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, layout.capacity))
    stop = data.draw(st.integers(keep, layout.capacity))
    kept, dropped = bytes_of(layout.rows(0, keep)), bytes_of(layout.rows(keep, stop))
    rest, exact = bytes_of(layout.rest(keep, stop)), bytes_of(layout.rest(keep, stop, exact=True))
    tails = bytes_of(layout.page_tails(keep, stop))
    assert not kept & (rest | exact | tails)
    assert dropped <= rest | tails
    assert dropped <= exact
    assert not rest & tails
    assert all(span.offset % PAGE == 0 and span.length % PAGE == 0 for span in layout.rest(keep, stop))
    assert max(exact, default=0) < layout.nbytes


@given(layouts(), st.data())
def test_touched_pages_are_exactly_those_with_such_a_row(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.capacity))
    stop = data.draw(st.integers(start, layout.capacity))
    pages = {byte // PAGE for byte in bytes_of(layout.rows(start, stop))}
    touched = bytes_of(layout.pages_touching(start, stop))
    assert {byte // PAGE for byte in touched} == pages
    assert len(touched) == len(pages) * PAGE == layout.bytes_touching(start, stop)
    if stop < layout.capacity:
        next_row = {byte // PAGE for byte in bytes_of(layout.rows(stop, stop + 1))}
        before = bytes_of(layout.pages_before(start, stop))
        assert {byte // PAGE for byte in before} == pages - next_row
        assert len(before) == len(pages - next_row) * PAGE


@given(layouts(), st.data())
def test_a_layer_is_its_part_of_the_section(layout: Layout, data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(list(layout.sections)))
    together = [span for index in range(section.layers) for span in section.layer(index).rows(0, 1)]
    assert together == list(section.rows(0, 1))
