"""The tree of blocks that prompts can find: naming, finding, homes, and what is left when a sequence goes."""

from __future__ import annotations

import gc
import hashlib
from array import array
from collections.abc import Iterable

import pytest

from kvcache_core.prefix import PrefixKey
from kvcache_core.prefix_index import PrefixIndex, PrefixNode
from kvcache_core.sequence import CachedSequence

KEY = PrefixKey(salt="a")


def sequence(token_ids: Iterable[int], key: PrefixKey | None = KEY, *, kept: bool = False) -> CachedSequence:
    ids = array("q", token_ids)
    made = CachedSequence("id", "request", 100, 0, 0, None, list(range(len(ids))), num_tokens=len(ids), token_ids=ids)
    made.prefix_key = key
    made.is_kept = kept
    return made


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(2)


def published(
    index: PrefixIndex, token_ids: Iterable[int], key: PrefixKey = KEY, *, kept: bool = False
) -> CachedSequence:
    made = sequence(token_ids, key, kept=kept)
    index.publish(made)
    return made


def depth(index: PrefixIndex, token_ids: Iterable[int], key: PrefixKey = KEY) -> int:
    ids = array("q", token_ids)
    node = index.find(key, ids, len(ids) // index.block_size)
    return 0 if node is None else node.depth


def nodes_of(sequence: CachedSequence) -> list[PrefixNode]:
    """From the tip up."""
    nodes = []
    node = sequence.tip
    while node is not None and node.depth:
        nodes.append(node)
        node = node.parent
    return nodes


# -- names -----------------------------------------------------------------------------------------------


def test_a_name_is_a_sha256_chain_over_the_key_and_all_tokens_before(index: PrefixIndex) -> None:
    tip = published(index, [1, -2, 3, 4, 5]).tip
    assert tip is not None
    root = hashlib.sha256(KEY.encoded).digest()
    first = hashlib.sha256(root + array("q", [1, -2]).tobytes()).digest()
    assert tip.parent.name == first
    assert tip.name == hashlib.sha256(first + array("q", [3, 4]).tobytes()).digest()
    assert tip.depth == 2  # the last, partly filled block has no name


def test_names_of_equal_tokens_differ_after_other_tokens_and_under_another_key(index: PrefixIndex) -> None:
    sequences = [
        published(index, [1, 2, 5, 6]),
        published(index, [3, 4, 5, 6]),
        published(index, [1, 2, 5, 6], PrefixKey(salt="b")),
    ]
    assert len({s.tip.name for s in sequences if s.tip is not None}) == 3
    assert len(index) == 6


# -- finding -----------------------------------------------------------------------------------------------


def test_only_whole_leading_blocks_under_the_same_key_are_found(index: PrefixIndex) -> None:
    published(index, [1, 2, 3, 4, 5])
    assert depth(index, [1, 2, 3, 4, 5, 6]) == 2
    assert depth(index, [1, 2, 3, 9]) == 1
    assert depth(index, [1, 2, 3]) == 1
    assert depth(index, [1, 9, 3, 4]) == 0
    assert depth(index, [3, 4]) == 0  # not at the start
    assert depth(index, [1, 2, 3, 4], PrefixKey(salt="b")) == 0
    assert depth(index, []) == 0


def test_no_more_blocks_are_found_than_asked_for(index: PrefixIndex) -> None:
    published(index, range(8))
    node = index.find(KEY, array("q", range(8)), 3)
    assert node is not None
    assert node.depth == 3
    assert index.find(KEY, array("q", range(8)), 0) is None


def test_tokens_that_spell_a_key_or_a_longer_token_are_not_confused(index: PrefixIndex) -> None:
    spelled = KEY.encoded[: len(KEY.encoded) // 16 * 16]
    tokens = array("q")
    tokens.frombytes(spelled)
    published(index, tokens)
    assert depth(index, [1, 2]) == 0
    published(index, [2**32 + 1, 0])
    assert depth(index, [1, 1]) == depth(index, [1, 0]) == 0
    assert depth(index, [2**32 + 1, 0]) == 1


@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1, 2**31, -1])
def test_token_ids_of_all_64_bits_count(index: PrefixIndex, extreme: int) -> None:
    published(index, [extreme, 0])
    assert depth(index, [extreme, 0]) == 1
    assert depth(index, [extreme ^ 2**40, 0]) == depth(index, [extreme ^ 1, 0]) == 0


# -- entering ------------------------------------------------------------------------------------------------


def test_publishing_continues_where_it_ended(index: PrefixIndex) -> None:
    one = published(index, [1, 2, 3])
    assert (len(index), len(nodes_of(one))) == (1, 1)
    index.publish(one)
    assert len(index) == 1
    one.token_ids.extend([4, 5, 6])
    index.publish(one)
    assert [node.depth for node in nodes_of(one)] == [3, 2, 1]
    assert depth(index, range(1, 7)) == 3


def test_a_sequence_without_a_key_is_not_published(index: PrefixIndex) -> None:
    index.publish(sequence([1, 2], None))
    assert len(index) == 0
    assert list(index) == []


def test_sequences_share_the_blocks_that_they_have_in_common(index: PrefixIndex) -> None:
    one, two = published(index, [1, 2, 3, 4]), published(index, [1, 2, 5, 6])
    assert len(index) == 3
    assert nodes_of(one)[1] is nodes_of(two)[1]
    assert nodes_of(two)[1].home is one
    assert list(nodes_of(one)[1].holders()) == [one, two]


# -- leaving -------------------------------------------------------------------------------------------------


def test_what_nobody_else_holds_goes_with_its_sequence(index: PrefixIndex) -> None:
    one, two = published(index, [1, 2, 3, 4]), published(index, [1, 2, 5, 6])
    index.leave(one, 0)
    assert depth(index, [1, 2, 3, 4]) == 1
    assert depth(index, [1, 2, 5, 6]) == 2
    assert {node.home for node in index} == {two}
    assert one.tip is None
    index.leave(two, 0)
    assert len(index) == 0
    assert list(index) == []


def test_a_shortened_sequence_keeps_its_leading_blocks(index: PrefixIndex) -> None:
    one = published(index, range(8))
    index.leave(one, 3)
    assert depth(index, range(8)) == 3
    index.leave(one, 3)
    index.leave(one, 7)
    assert depth(index, range(8)) == 3
    assert {node.home for node in index} == {one}


def test_a_longer_sequence_inherits_from_a_shorter_one_and_the_other_way_round(index: PrefixIndex) -> None:
    short, long = published(index, [1, 2]), published(index, [1, 2, 3, 4])
    index.leave(short, 0)
    assert [node.home for node in nodes_of(long)] == [long, long]
    short = published(index, [1, 2])
    index.leave(long, 0)
    assert depth(index, [1, 2, 3, 4]) == 1
    assert nodes_of(short)[0].home is short


def test_a_kept_sequence_inherits_before_a_live_one(index: PrefixIndex) -> None:
    leaving = published(index, [1, 2, 3, 4])
    published(index, [1, 2, 5, 6])
    kept = published(index, [1, 2, 7, 8], kept=True)
    index.leave(leaving, 0)
    assert nodes_of(kept)[1].home is kept


def test_a_kept_sequence_inherits_what_it_holds_although_a_live_one_holds_more(index: PrefixIndex) -> None:
    leaving = published(index, [1, 2, 3, 4, 5, 6], kept=True)
    live = published(index, [1, 2, 3, 4, 7, 8])
    kept = published(index, [1, 2, 9, 9], kept=True)
    index.leave(leaving, 0)
    assert [node.home for node in nodes_of(live)] == [live, live, kept]


def test_the_younger_kept_sequence_becomes_the_home_of_the_last_shared_block(index: PrefixIndex) -> None:
    live = published(index, [0, 0, 1, 2, 3, 4, 5, 6])
    old = published(index, [0, 0, 1, 2, 3, 4, 7, 8])
    old.is_kept = True
    assert index.prefer(old) == []
    assert [node.home for node in nodes_of(old)] == [old] * 4
    young = published(index, [0, 0, 1, 2, 9, 9])
    young.is_kept = True
    assert index.prefer(young) == []
    assert [node.home for node in nodes_of(young)] == [young, young, old]
    assert [node.home for node in nodes_of(live)] == [live, old, young, old]


def test_a_kept_sequence_that_another_continues_is_reported_as_surplus(index: PrefixIndex) -> None:
    short = published(index, [1, 2, 3, 4], kept=True)
    live = published(index, [1, 2, 3, 4])
    assert live.tip is short.tip
    long = published(index, [1, 2, 3, 4, 5, 6], kept=True)
    assert index.prefer(long) == [short]
    assert [node.home for node in nodes_of(long)] == [long, long, short]


def test_the_tree_of_a_key_goes_with_its_last_block(index: PrefixIndex) -> None:
    sequences = [published(index, [1, 2], PrefixKey(salt=salt)) for salt in range(100)]
    assert len(index._roots) == 100
    for each in sequences:
        index.leave(each, 0)
    assert not index._roots


def test_dropped_blocks_leave_no_reference_cycles(index: PrefixIndex) -> None:
    def count() -> int:
        return sum(type(each) is PrefixNode for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        one = published(index, range(200))
        assert count() == before + 101
        index.leave(one, 0)
        assert count() == before
    finally:
        gc.enable()


# -- explaining ----------------------------------------------------------------------------------------------


def why(index: PrefixIndex, token_ids: Iterable[int], key: PrefixKey = KEY, *, across_salts: bool = False) -> object:
    ids = array("q", token_ids)
    return index.explain(key, ids, len(ids) // index.block_size, across_salts=across_salts)


def test_an_explanation_names_the_first_block_that_is_missing(index: PrefixIndex) -> None:
    one = published(index, [1, 2, 3, 4, 5, 6])
    assert why(index, [1, 2, 3, 4]) == (2, "hit", None)
    assert why(index, [1, 2, 3, 9, 5, 6]) == (1, "diverged", 3)
    assert why(index, [1, 2, 9, 4]) == (1, "diverged", 2)
    assert why(index, [1, 9]) == (0, "diverged", 1)
    assert why(index, [9, 9]) == (0, "never-stored", None)  # nothing in common is no divergence
    assert why(index, [1, 2, 3, 4, 5, 6, 7, 8]) == (3, "never-stored", None)
    index.leave(one, 1)
    assert why(index, [1, 2, 3, 4, 5, 6]) == (1, "evicted", None)
    assert why(index, [1, 2, 3, 9]) == (1, "never-stored", None)
    published(index, [1, 2, 3, 4])
    assert why(index, [1, 2, 3, 4]) == (2, "hit", None)


def test_an_explanation_compares_with_the_nearest_of_what_is_cached(index: PrefixIndex) -> None:
    wide = PrefixIndex(4)
    for last in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 8, 8, 8]):
        published(wide, last)
    assert why(wide, [1, 2, 3, 5]) == (0, "diverged", 3)


def test_other_keys_are_only_spoken_of_when_asked(index: PrefixIndex) -> None:
    published(index, [1, 2, 3, 4], PrefixKey(salt="b"))
    assert why(index, [1, 2, 3, 4]) == (0, "never-stored", None)
    assert why(index, [1, 2, 3, 4], across_salts=True) == (0, "salt-differs", None)
    assert why(index, [1, 3, 3, 4], across_salts=True) == (0, "never-stored", None)
    published(index, [3, 4])
    assert why(index, [3, 4, 1, 2], across_salts=True) == (1, "never-stored", None)  # the block before it differs


def test_only_so_many_dropped_names_are_remembered(index: PrefixIndex) -> None:
    for first in range(PrefixIndex._REMEMBERED + 1):
        index.leave(published(index, [first, 0]), 0)
    assert why(index, [0, 0]) == (0, "never-stored", None)
    assert why(index, [1, 0]) == (0, "evicted", None)
    assert len(index._dropped) == PrefixIndex._REMEMBERED


def test_clearing_forgets_also_what_was_dropped(index: PrefixIndex) -> None:
    one = published(index, [1, 2])
    index.leave(published(index, [3, 4]), 0)
    index.clear()
    one.tip = None
    assert len(index) == 0
    assert why(index, [1, 2]) == why(index, [3, 4]) == (0, "never-stored", None)
