"""The compiled kernel against exact attention in float64, on every instruction set of this machine."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvcache_core.geometry import LayerGroup
from kvcache_cpu.native.kernel import MOST_NEW_TOKENS, NativeKernel, Rows, RowsTable
from kvcache_cpu.native.library import LEVELS, library, library_fault
from plugins.cpu.tests.driver import assert_same_bits, reference_attention

pytestmark = pytest.mark.skipif(library_fault() is not None, reason=str(library_fault()))

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(ERRORS)


_BEST = -1 if library_fault() is not None else library().kvcache_best_level()


@pytest.fixture(params=range(_BEST + 1), ids=LEVELS[: _BEST + 1], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert library().kvcache_use_level(request.param) == request.param
    yield
    library().kvcache_use_level(-1)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)  # conftest puts it back
    return int(request.param)


Pair = tuple[torch.Tensor, torch.Tensor]


def rows(length: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows `[length, heads, dim]`, stored head by head, before poison."""
    room = torch.full((heads, length + 5, dim), math.nan)
    room[:, :length] = torch.randn(heads, length, dim)
    return room.to(dtype)[:, :length].transpose(0, 1)


def attend(
    query: torch.Tensor,
    sequences: Sequence[Pair],
    new: Sequence[int],
    scale: float = 0.3,
    window: int | None = None,
) -> torch.Tensor:
    key, value = sequences[0]
    group = LayerGroup(layers=(0,), num_kv_heads=key.shape[1], head_dim=key.shape[2], value_head_dim=value.shape[2])
    row, table = 0, []
    for (keys, values), count in zip(sequences, new, strict=True):
        table.append(Rows(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], keys.shape[0], count, row))
        row += count
    return NativeKernel(group, key.dtype).attend(RowsTable(table), 0, query, scale, window)


def exact(
    query: torch.Tensor,
    sequences: Sequence[Pair],
    new: Sequence[int],
    scale: float = 0.3,
    window: int | None = None,
) -> torch.Tensor:
    parts = zip(query.split(list(new)), sequences, strict=True)
    return torch.cat([reference_attention(part, *pair, scale, window) for part, pair in parts])


def assert_exact(
    query: torch.Tensor, sequences: Sequence[Pair], new: Sequence[int], error: float | None = None, **options: Any
) -> None:
    got, want = attend(query, sequences, new, **options), exact(query, sequences, new, **options)
    assert got.dtype is query.dtype
    largest = max(float(value.nan_to_num(0, 0, 0).abs().max()) for _, value in sequences)
    error = ERRORS[query.dtype] if error is None else error
    torch.testing.assert_close(got.double(), want, rtol=0, atol=error * largest, equal_nan=True)


def scattered(rng: random.Random, length: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of any strides, amid NaN."""
    gap, spare = rng.choice([1, 1, 2, 3]), rng.choice([0, 8, 24])
    room = torch.full((length * gap + 1, heads + 1, dim + spare), math.nan).to(dtype)
    if rng.random() < 0.5:
        room = room.transpose(0, 1).contiguous().transpose(0, 1)
    room[: length * gap : gap, :heads, :dim] = torch.randn(length, heads, dim).to(dtype)
    return room[: length * gap : gap, :heads, :dim]


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_of_any_shape_strides_and_dtypes_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(rng.choice([1, 2, 3, 8]))
    heads, group = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 33, 71])
    dim = 8 * rng.randint(1, 20)
    value_dim = dim if rng.random() < 0.5 else 8 * rng.randint(1, 20)
    query_dtype, dtype = rng.choice(DTYPES), rng.choice(DTYPES)
    new = [rng.choice([0, 1, 1, 2, 3, 5, MOST_NEW_TOKENS]) for _ in range(rng.randint(1, 5))]
    new[0] = max(1, new[0])
    lengths = [max(1, count) + rng.choice([0, 0, 1, 3, 15, 50, 100, 333, rng.randint(0, 1500)]) for count in new]
    sequences = [
        (scattered(rng, length, heads, dim, dtype), scattered(rng, length, heads, value_dim, dtype))
        for length in lengths
    ]
    query = scattered(rng, sum(new), heads * group, dim, query_dtype)
    assert_exact(
        query,
        sequences,
        new,
        window=rng.choice([None, None, 1, 2, 7, 64, 300]),
        scale=rng.choice([dim**-0.5, 0.3, -0.2, 0.0]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 128, 200])
def test_every_head_dim_that_is_a_multiple_of_8_is_exact(dtype: torch.dtype, dim: int) -> None:
    for group in range(1, 8):
        for length in (1, 2, 3, 4, 5, 63, 64, 65, 130):
            query = torch.randn(1, group, dim).to(dtype)
            assert_exact(query, [(rows(length, 1, dim, dtype), rows(length, 1, dim, dtype))], [1])


@pytest.mark.parametrize("threads", [1, 2, 5, 16], indirect=True)
@pytest.mark.parametrize("lengths", [[3000], [1, 2999], [700, 1, 16, 17, 900]])
@pytest.mark.usefixtures("threads")
def test_work_that_is_cut_among_threads_is_merged_by_the_true_weights(lengths: list[int]) -> None:
    sequences = [(rows(length, 3, 64), rows(length, 3, 64)) for length in lengths]
    for key, _ in sequences:
        key[: key.shape[0] // 3, :, 0] += 20.0  # all weight lies in one part
    query = torch.randn(len(lengths), 9, 64)
    query[:, :4, 0] = 3.0
    assert_exact(query, sequences, [1] * len(lengths))


@pytest.mark.parametrize("threads", [4], indirect=True)
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_which_thread_was_faster() -> None:
    sequences = [(rows(length, 2, 64), rows(length, 2, 64)) for length in (2000, 100, 700)]
    query = torch.randn(3, 8, 64)
    first = attend(query, sequences, [1] * 3)
    assert all(torch.equal(first, attend(query, sequences, [1] * 3)) for _ in range(20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, "largest"])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_a_key_or_value_that_a_query_does_not_see_never_reaches_it(
    dtype: torch.dtype, poison: Any, window: int | None
) -> None:
    for length, new in ((5, 3), (20, 4), (100, 16), (16, 16)):
        query, key, value = torch.randn(new, 2, 8).to(dtype), rows(length, 1, 8, dtype), rows(length, 1, 8, dtype)
        want = exact(query, [(key, value)], [new], window=window)
        bad = torch.finfo(dtype).max if poison == "largest" else poison
        key[-1], value[-1] = bad, bad
        got = attend(query, [(key, value)], [new], window=window)
        torch.testing.assert_close(got[:-1].double(), want[:-1], rtol=0, atol=4 * ERRORS[dtype])
        if window is not None and length > new + window:
            key[-1], value[-1], key[: length - new - window], value[: length - new - window] = 0, 0, bad, bad
            got = attend(query, [(key, value)], [new], window=window)
            torch.testing.assert_close(got[:-1].double(), want[:-1], rtol=0, atol=4 * ERRORS[dtype])


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("threads")
def test_pytorch_141128_nan_and_infinity_are_neither_hidden_nor_spread(
    dtype: torch.dtype, which: str, bad: float
) -> None:
    for length in (1, 2, 17, 70, 1200):
        for new in sorted({1, min(2, length), min(16, length)}):
            tensors = {
                "query": torch.randn(new, 6, 8).to(dtype),
                "key": rows(length, 3, 8, dtype),
                "value": rows(length, 3, 8, dtype),
            }
            tensors[which][-(new // 2) - 1, 1] = bad
            got = attend(tensors["query"], [(tensors["key"], tensors["value"])], [new])
            want = exact(tensors["query"], [(tensors["key"], tensors["value"])], [new])
            torch.testing.assert_close(got.double(), want, rtol=0, atol=6 * ERRORS[dtype], equal_nan=True)


@pytest.mark.parametrize("length", [1, 9, 40, 900])
def test_scores_that_are_all_minus_infinity_give_nan_and_a_finite_one_takes_all_weight(length: int) -> None:
    query, key, value = torch.full((1, 2, 8), math.inf), torch.full((length, 1, 8), -1.0), rows(length, 1, 8)
    assert attend(query, [(key, value)], [1]).isnan().all()
    if length > 1:
        key[:-1], key[-1] = -math.inf, -1.0
        out = attend(torch.ones(1, 2, 8), [(key, value)], [1])
        torch.testing.assert_close(out[0], value[-1].expand(2, -1))


@pytest.mark.parametrize("level_of_scores", [-1e5, 0.0, 1e5])
def test_flashinfer_4401_scores_far_from_zero_keep_their_weights(level_of_scores: float) -> None:
    key, value = rows(800, 1, 8), rows(800, 1, 8)
    key[..., 0] = level_of_scores
    assert_exact(torch.ones(1, 2, 8), [(key, value)], [1], error=0.02, scale=1.0)


def test_weights_below_the_smallest_normal_number_are_zero() -> None:
    key, value = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
    key[0], value[0], value[1] = -100.0, 3e38, 1.0
    out = attend(torch.ones(1, 1, 8), [(key, value)], [1], scale=1.0)
    assert torch.equal(out, torch.ones(1, 1, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_finite_number_of_a_short_dtype_is_read_and_rounded_rightly(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    value = numbers[: numbers.numel() // 8 * 8].view(1, -1, 8)  # one token, as many heads as it takes
    key = torch.zeros_like(value)
    heads = value.shape[1]
    for query_dtype in (dtype, torch.float32):
        out = attend(torch.zeros(1, heads, 8, dtype=query_dtype), [(key, value)], [1])
        assert torch.equal(out, value.to(query_dtype))
    mean = (value.float() + value.float().flip(1)) / 2 + value.float() / 3
    out = attend(torch.zeros(1, heads, 8, dtype=dtype), [(mean.float(), mean.float())], [1])
    assert torch.equal(out, mean.to(dtype))


def test_rows_of_no_sequence_are_left_alone() -> None:
    key, value = rows(9, 1, 8), rows(9, 1, 8)
    group = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=8)
    table = RowsTable([Rows(key.transpose(0, 1)[None], value.transpose(0, 1)[None], 9, 2, 1)])
    query, out = torch.randn(4, 2, 8), torch.full((4, 2, 8), 7.0)
    assert NativeKernel(group, torch.float32).attend(table, 0, query, 0.3, None, out) is out
    torch.testing.assert_close(out[1:3], exact(query[1:3], [(key, value)], [2]).float())
    assert (out[[0, 3]] == 7.0).all()


def test_no_sequences_and_no_new_tokens_are_nothing_to_do() -> None:
    group = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=8)
    kernel = NativeKernel(group, torch.float32)
    assert kernel.attend(RowsTable([]), 0, torch.empty(0, 2, 8), 0.3, None).shape == (0, 2, 8)
    key, value = rows(9, 1, 8), rows(9, 1, 8)
    assert attend(torch.empty(0, 2, 8), [(key, value)], [0]).shape == (0, 2, 8)


def test_queries_that_torch_must_see_are_left_to_it() -> None:
    kernel = NativeKernel(LayerGroup(layers=(0,), num_kv_heads=1, head_dim=8), torch.float32)
    query = torch.randn(1, 2, 8)
    assert kernel.takes(query)
    assert not kernel.takes(query.double())
    learned = query.clone().requires_grad_()
    assert not kernel.takes(learned)
    with torch.no_grad():
        assert kernel.takes(learned)
    assert not kernel.takes(torch.view_as_complex(torch.randn(1, 2, 8, 2)).conj().imag)


def test_several_threads_of_python_may_call_at_once() -> None:
    torch.set_num_threads(2)
    sequences = [(rows(length, 2, 64), rows(length, 2, 64)) for length in (1500, 40)]
    query = torch.randn(2, 6, 64)
    want = attend(query, sequences, [1, 1])
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not torch.equal(attend(query, sequences, [1, 1]), want):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_that_used_threads_attends_too() -> None:
    torch.set_num_threads(2)
    sequences = [(rows(4000, 2, 64), rows(4000, 2, 64))]
    query = torch.randn(1, 6, 64)
    want = attend(query, sequences, [1])
    for nested in (False, True):
        child = os.fork()
        if child == 0:
            if nested and os.fork():
                os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
            got = attend(query, sequences, [1])
            os._exit(0 if torch.allclose(got, want, atol=1e-5) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(attend(query, sequences, [1]), want)


@pytest.mark.parametrize("seed", range(20))
def test_new_rows_of_any_strides_are_stored_bit_by_bit_and_nothing_else_is(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, heads = rng.choice(DTYPES), rng.choice([1, 2, 3, 8])
    dim, value_dim = 8 * rng.randint(1, 20), 8 * rng.randint(1, 20)
    new = [rng.choice([0, 1, 1, 2, 3, MOST_NEW_TOKENS]) for _ in range(rng.randint(0, 5))]
    memory, table, row = [], [], 0
    for count in new:
        length = count + rng.choice([0, 0, 1, 3, 100])
        memory.append([torch.randn(2, heads, length + 2, width).to(dtype) for width in (dim, value_dim)])
        table.append(Rows(*memory[-1], length, count, row))
        row += count
    key, value = (scattered(rng, row, heads, width, dtype) for width in (dim, value_dim))
    group = LayerGroup(layers=(0, 1), num_kv_heads=heads, head_dim=dim, value_head_dim=value_dim)
    kernel = NativeKernel(group, dtype)
    want = [[tensor.clone() for tensor in pair] for pair in memory]
    for pair, (_, _, length, count, first, *_) in zip(want, table, strict=True):
        for tensor, rows_of_all in zip(pair, (key, value), strict=True):
            tensor[1, :, length - count : length] = rows_of_all[first : first + count].transpose(0, 1)
    assert kernel.store(RowsTable(table), 1, key, value)
    for pair, expected in zip(memory, want, strict=True):
        for tensor, wanted in zip(pair, expected, strict=True):
            assert_same_bits(tensor, wanted)


def test_rows_that_do_not_lie_in_memory_as_they_are_to_be_stored_are_left_to_torch() -> None:
    kernel = NativeKernel(LayerGroup(layers=(0,), num_kv_heads=2, head_dim=8), torch.float32)
    keys, values = torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8)
    table = RowsTable([Rows(keys, values, 7, 4, 0)])
    plain = torch.randn(4, 2, 8)
    negative = torch.view_as_complex(torch.randn(4, 2, 8, 2)).conj().imag
    assert negative.is_neg()
    for other in (plain.bfloat16(), torch.randn(4, 8, 2).transpose(1, 2), negative):
        assert not kernel.store(table, 0, plain, other)
        assert not kernel.store(table, 0, other, plain)
    assert not keys.any()
    assert kernel.store(table, 0, plain, torch.nn.Parameter(-plain, requires_grad=False))
    assert torch.equal(keys[0, :, 3:7].transpose(0, 1), plain)
    assert torch.equal(values[0, :, 3:7].transpose(0, 1), -plain)
    assert not keys[0, :, 7:].any()
