from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.geometry import CacheGeometry
from kvcache_cpu.native.kernel import MOST_NEW_TOKENS
from plugins.cpu.tests.driver import (
    MIXED,
    Driver,
    MakeDriver,
    Rows,
    Sequence,
    assert_same_bits,
    reference_attention,
)

ONE = CacheGeometry.uniform(1, 2, 16)


def rows_of_bits(dtype: torch.dtype, patterns: list[int]) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limit = 1 << (8 * dtype.itemsize)
    signed = [pattern - limit if pattern >= limit // 2 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=integer).view(dtype)


SPECIAL_BITS = {
    # quiet and signalling NaNs with payload, minus zero, subnormals, infinities
    "float32": [0x7FC12345, 0x7F812345, 0xFFC00001, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000],
    "bfloat16": [0x7FC5, 0x7F85, 0xFFC1, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80],
    "float16": [0x7E15, 0x7C15, 0xFE01, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00],
    "float64": [0x7FF8000000012345, 0x7FF0000000012345, 0x8000000000000000, 0x1, 0x7FF0000000000000] + [0] * 3,
}


@pytest.mark.parametrize("dtype", sorted(SPECIAL_BITS))
def test_huggingface_transformers_25420_what_is_stored_comes_back_bit_by_bit(
    make_driver: MakeDriver, dtype: str
) -> None:
    driver = make_driver(ONE, dtype=dtype)
    sequence = driver.open()
    pattern = rows_of_bits(getattr(torch, dtype), SPECIAL_BITS[dtype])
    rows = pattern.repeat(3 * 2 * 16 // 8).reshape(3, 2, 16)
    driver.write({sequence: {0: (rows, rows.flip(0).contiguous())}})
    fork = driver.fork(sequence)
    driver.append(fork, 1)
    driver.truncate(fork, 2)
    driver.check(sequence, fork)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_huggingface_transformers_30377_rows_are_counted_whatever_they_hold(
    make_driver: MakeDriver, fill: float
) -> None:
    driver = make_driver(ONE)
    sequence = driver.open()
    for index in range(6):
        rows = driver.random_rows(1)
        if index in (0, 3, 5):
            rows = {0: (torch.full_like(rows[0][0], fill), torch.full_like(rows[0][1], fill))}
        driver.write({sequence: rows})
    fork = driver.fork(sequence)
    driver.append(fork, 1)
    driver.truncate(sequence, 4)
    driver.append(sequence, 1)
    driver.check(sequence, fork)


def test_ml_explore_mlx_lm_1141_a_batch_may_hold_empty_sequences_and_add_nothing_to_some(
    make_driver: MakeDriver,
) -> None:
    driver = make_driver()
    empty, short, long = driver.open(), driver.open(), driver.open()
    driver.append(short, 17)
    driver.append(long, 33)
    driver.write({empty: driver.random_rows(0), short: driver.random_rows(4), long: driver.random_rows(0)})
    driver.write({empty: driver.random_rows(2), long: driver.random_rows(1), short: driver.random_rows(3)})
    driver.write({empty: driver.random_rows(0), short: driver.random_rows(0)})
    driver.write({short: driver.random_rows(0)})
    assert [sequence.length for sequence in (empty, short, long)] == [2, 24, 34]
    driver.check(empty, short, long)


def test_a_batch_without_sequences_is_written_and_attended(driver: Driver) -> None:
    batch = driver.begin({})
    driver.storage.write(batch, 0, torch.empty(0, 2, 24), torch.empty(0, 2, 8))
    assert driver.attend(batch, 0, torch.empty(0, 4, 24)).shape == (0, 4, 8)


def test_ml_explore_mlx_lm_1097_the_caller_may_change_its_tensors_after_a_write(driver: Driver) -> None:
    sequence = driver.open()
    rows = driver.random_rows(3)
    kept = {layer: (key.clone(), value.clone()) for layer, (key, value) in rows.items()}
    driver.write({sequence: rows})
    for key, value in rows.values():
        key.zero_()
        value.zero_()
    sequence.rows = kept
    driver.check(sequence)


def test_rows_are_taken_with_any_strides(driver: Driver) -> None:
    sequence = driver.open()
    rows = {
        layer: (
            torch.randn(24, 5, 2 if layer != 3 else 1)[:, ::1].permute(1, 2, 0)
            if layer != 3
            else torch.randn(64, 1, 10).permute(2, 1, 0)[::2],
            torch.randn(1, value.shape[1], value.shape[2]).expand(5, -1, -1),
        )
        for layer, (_, value) in driver.random_rows(5).items()
    }
    driver.write({sequence: rows})
    driver.check(sequence)


def test_memory_made_in_inference_mode_is_written_outside_it_and_the_other_way_round(
    make_driver: MakeDriver,
) -> None:
    with torch.inference_mode():
        driver = make_driver()
        sequence = driver.open()
        driver.append(sequence, 3)
        fork = driver.fork(sequence)
        view = driver.storage.gather(fork.slot, (), 3, 0)[0]
    driver.append(fork, 30)
    driver.append(sequence, 30)
    with torch.inference_mode():
        driver.append(fork, 1)
    assert not view.requires_grad
    driver.check(sequence, fork)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17])
def test_waybarrios_vllm_mlx_385_views_show_exactly_the_rows_that_were_asked_for(driver: Driver, length: int) -> None:
    canary = 12345.0
    source = driver.open()
    driver.append(source, length)
    fork = driver.fork(source)
    secret = {
        layer: (torch.full_like(k, canary), torch.full_like(v, canary))
        for layer, (k, v) in driver.random_rows(20).items()
    }
    driver.write({source: secret})
    driver.append(fork, 3)
    driver.truncate(fork, length)
    for layer in MIXED.caching_layers:
        for view in driver.storage.gather(fork.slot, (), length, layer):
            assert view.shape[0] == length
            assert not (view == canary).any()
    driver.check(source, fork)


def test_gathered_tensors_are_views_of_the_rows_that_a_step_writes(mapped_driver: MakeDriver) -> None:
    driver = mapped_driver()
    sequence = driver.open()
    driver.append(sequence, 4)
    before = driver.storage.gather(sequence.slot, (), 4, 0)[0]
    driver.append(sequence, 100)
    after = driver.storage.gather(sequence.slot, (), 104, 0)[0]
    assert driver.storage.dense_is_view
    assert before.data_ptr() == after.data_ptr()


def test_callers_are_advised_to_let_it_attend_where_its_kernel_would(driver: Driver) -> None:
    native = driver.storage.attention_kind == "native"
    assert driver.storage.prefers_attend(1) is native
    assert driver.storage.prefers_attend(MOST_NEW_TOKENS) is native
    assert not driver.storage.prefers_attend(MOST_NEW_TOKENS + 1)


def test_a_closed_sequence_is_forgotten(driver: Driver) -> None:
    sequence = driver.open()
    driver.append(sequence, 3)
    slot = weakref.ref(sequence.slot)
    driver.close(sequence)
    del sequence
    assert slot() is None


class TestCapacity:
    def test_Pushkinist_rMLX_14_a_step_beyond_the_capacity_is_refused_before_anything_is_written(
        self, driver: Driver
    ) -> None:
        sequence = driver.open(max_tokens=10)
        driver.append(sequence, 9)
        with pytest.raises(CacheFullError, match="opened for 10 tokens cannot hold 12") as caught:
            driver.begin({sequence: 3})
        assert caught.value.needed == 1
        driver.append(sequence, 1)
        driver.check(sequence)

    def test_the_last_token_fits(self, driver: Driver) -> None:
        sequence = driver.open(max_tokens=43)
        for _ in range(43):
            driver.append(sequence, 1)
        driver.check(sequence)

    @pytest.mark.parametrize("num_tokens", [-1, 1001])
    def test_a_length_that_no_sequence_can_have_is_refused(self, driver: Driver, num_tokens: int) -> None:
        sequence = driver.open()
        driver.append(sequence, 3)
        with pytest.raises(ShapeError):
            driver.storage.truncate(sequence.slot, num_tokens)
        with pytest.raises(ShapeError):
            driver.storage.fork(sequence.slot, num_tokens)
        driver.check(sequence)

    @pytest.mark.parametrize("capacity", [27, 28, 32, 40, 1000])
    def test_huggingface_transformers_30400_results_do_not_depend_on_the_capacity(
        self, make_driver: MakeDriver, capacity: int
    ) -> None:
        outputs = []
        for size in (27, capacity):
            driver = make_driver()
            sequence = driver.open(max_tokens=size)
            query = torch.randn(27, 4, 24, generator=torch.Generator().manual_seed(1))
            batch = driver.write({sequence: driver.random_rows(7)})
            rows = [driver.attend(batch, 0, query[:7])]
            for index in range(7, 27):
                batch = driver.write({sequence: driver.random_rows(1)})
                rows.append(driver.attend(batch, 0, query[index : index + 1]))
            outputs.append(torch.cat(rows))
        assert_same_bits(*outputs)


class TestFork:
    def test_xLLM_AI_xllm_1984_diverging_sequences_keep_their_common_past(self, driver: Driver) -> None:
        for length in (0, 16, 21):
            source = driver.open()
            driver.append(source, length)
            fork = driver.fork(source)
            driver.append(source, 1)
            driver.append(fork, 1)
            driver.check(source, fork)

    def test_MemTensor_MemOS_2301_a_kept_prompt_does_not_change_when_it_is_used(self, driver: Driver) -> None:
        prompt = driver.open()
        driver.append(prompt, 19)
        held = driver.storage.nbytes
        for _ in range(3):
            turn = driver.fork(prompt)
            for _ in range(8):
                driver.append(turn, 1)
            driver.check(prompt, turn)
            driver.close(turn)
        driver.check(prompt)
        assert driver.storage.nbytes == held

    def test_vllm_project_vllm_417_beams_read_their_own_lineage_at_each_step(self, driver: Driver) -> None:
        root = driver.open()
        driver.append(root, 20)
        beams = [driver.fork(root) for _ in range(4)]
        driver.close(root)
        for parents in ([0, 0, 1, 3], [2, 2, 2, 2], [3, 2, 1, 0], [0, 0, 0, 3], [1, 1, 2, 3]):
            chosen = [driver.fork(beams[parent]) for parent in parents]
            for beam in beams:
                driver.close(beam)
            beams = chosen
            driver.write({beam: driver.random_rows(1) for beam in beams})
            driver.check(*beams)

    def test_ggml_org_llama_cpp_3825_operations_in_a_row_without_a_read_compose(self, driver: Driver) -> None:
        source = driver.open()
        driver.append(source, 100)
        fork = driver.fork(driver.fork(source), 90)
        driver.truncate(fork, 80)
        driver.truncate(fork, 30)
        driver.truncate(source, 20)
        driver.truncate(source, 10)
        driver.append(source, 50)
        second = driver.fork(fork)
        driver.append(fork, 5)
        driver.append(second, 5)
        driver.check(source, fork, second)


class TestTruncate:
    def test_sgl_project_sglang_31616_rejected_drafts_leave_no_memory_behind(self, driver: Driver) -> None:
        sequence = driver.open()
        driver.append(sequence, 50)
        driver.append(sequence, 7)
        driver.truncate(sequence, 50)
        held = driver.storage.nbytes
        for drafts in (1, 7, 3, 40, 5) * 10:
            driver.append(sequence, drafts)
            driver.truncate(sequence, 50)
        assert driver.storage.nbytes <= 2 * held
        driver.check(sequence)
        driver.close(sequence)
        assert driver.storage.nbytes == 0

    def test_a_step_that_is_undone_leaves_rows_as_they_were(self, driver: Driver) -> None:
        source = driver.open()
        driver.append(source, 40)
        fork = driver.fork(source)
        for sequence in (source, fork):
            batch = driver.begin({sequence: 60})
            for layer, (key, value) in driver.random_rows(60).items():
                driver.storage.write(batch, layer, key, value)
            driver.storage.truncate(sequence.slot, 40)
            driver.check(source, fork)

    @pytest.mark.parametrize("keep", [0, 1, 40, 42, 43, 99])
    def test_dropped_rows_are_zeroed_when_memory_is_to_be_scrubbed(self, make_driver: MakeDriver, keep: int) -> None:
        driver = make_driver(scrub=True)
        source = driver.open()
        driver.append(source, 100)
        first, second = driver.fork(source, 60), driver.fork(source, 60)
        driver.append(first, 40)
        driver.append(second, 40)
        for sequence in (source, first, second):
            driver.truncate(sequence, keep)
        driver.check(source, first, second)
        for sequence in (source, first, second):
            for rows in itertools.chain(*sequence.slot.tensors):
                assert not rows[:, :, keep:100].any()

    def test_a_sequence_freed_by_another_is_not_readable_in_memory_that_is_used_again(self, driver: Driver) -> None:
        sequence = driver.open()
        driver.append(sequence, 100)
        driver.close(sequence)
        other = driver.open()
        driver.append(other, 1)
        for rows in itertools.chain(*other.slot.tensors):
            assert not rows[:, :, 1:].any()


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("histories", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_any_history_of_operations_reads_and_attends_as_plain_tensors_would(
    kind: str, histories: int, scrub: bool
) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: History(kind, scrub), settings=settings(max_examples=histories, stateful_step_count=40, deadline=None)
    )


class History(RuleBasedStateMachine):
    """Sequences that grow, fork, shrink, abort and close in any order, and views that outlive them."""

    def __init__(self, kind: str, scrub: bool) -> None:
        super().__init__()
        self.driver = Driver(kind, MIXED, scrub=scrub, max_sequence_length=400)
        self.live: list[Sequence] = []
        self.views: list[tuple[Sequence, Rows, Rows]] = []

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.live))

    def room(self, sequence: Sequence, wanted: int) -> int:
        return min(wanted, 400 - sequence.length)

    @initialize(length=st.integers(0, 200))
    def begin(self, length: int) -> None:
        self.open()
        self.driver.append(self.live[0], length)

    @precondition(lambda self: len(self.live) < 6)
    @rule()
    def open(self) -> None:
        self.live.append(self.driver.open())

    @rule(data=st.data(), count=st.one_of(st.integers(0, 4), st.integers(0, 150)))
    def append(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        self.step(data, {sequence: self.room(sequence, count)})

    @rule(data=st.data())
    def append_to_several(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live), min_size=1, max_size=4, unique=True))
        self.step(data, {s: self.room(s, data.draw(st.integers(0, 3))) for s in chosen})

    def step(self, data: st.DataObject, counts: dict[Sequence, int]) -> None:
        """Write new rows and attend over them in one layer of each group."""
        batch = self.driver.write({sequence: self.driver.random_rows(count) for sequence, count in counts.items()})
        window = data.draw(st.sampled_from([None, 1, 70]))
        for group in MIXED.groups:
            layer = group.layers[-1]
            query = torch.randn(sum(counts.values()), 2 * group.num_kv_heads, group.head_dim)
            got = self.driver.attend(batch, layer, query, window=window)
            for (sequence, count), rows, out in zip(
                counts.items(), query.split(list(counts.values())), got.split(list(counts.values())), strict=True
            ):
                if count:
                    wanted = reference_attention(rows, *sequence.rows[layer], 0.3, window)
                    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)

    @precondition(lambda self: len(self.live) < 6)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data: st.DataObject, whole: bool) -> None:
        sequence = self.pick(data)
        count = sequence.length if whole else data.draw(st.integers(0, sequence.length))
        assert 0 <= self.driver.storage.shared_tokens(sequence.slot, count) <= count
        self.live.append(self.driver.fork(sequence, count))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.driver.truncate(sequence, data.draw(st.integers(0, sequence.length)))
        self.views = [(owner, seen, expected) for owner, seen, expected in self.views if owner is not sequence]

    @rule(data=st.data(), count=st.integers(1, 60))
    def abort(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        count = self.room(sequence, count)
        batch = self.driver.begin({sequence: count})
        for layer, (key, value) in self.driver.random_rows(count).items():
            if data.draw(st.booleans()):
                self.driver.storage.write(batch, layer, key, value)
        self.driver.storage.truncate(sequence.slot, sequence.length)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if len(self.live) > 1:
            self.live.remove(sequence)
            self.driver.close(sequence)

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        gather, length = self.driver.storage.gather, sequence.length
        seen = {layer: gather(sequence.slot, (), length, layer) for layer in sequence.rows}
        self.views.append((sequence, seen, dict(sequence.rows)))

    @rule()
    def drop_views(self) -> None:
        self.views.clear()

    @invariant()
    def every_sequence_and_every_view_reads_as_expected(self) -> None:
        self.driver.check(*self.live)
        for _, seen, expected in self.views:
            for layer, (key, value) in expected.items():
                assert_same_bits(seen[layer][0], key)
                assert_same_bits(seen[layer][1], value)

    def teardown(self) -> None:
        for sequence in self.live:
            self.driver.close(sequence)
        self.views.clear()
        assert self.driver.storage.nbytes == 0
        self.driver.storage.shutdown()
