from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvcache_core.geometry import CacheGeometry
from kvcache_cpu.options import CpuOptions
from plugins.cpu.tests.driver import MIXED, Driver, MakeDriver, Sequence, reference_attention

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def filled(driver: Driver, num_tokens: int) -> Sequence:
    sequence = driver.open()
    driver.append(sequence, num_tokens)
    return sequence


def random_query(driver: Driver, num_tokens: int, layer: int, group: int = 2) -> torch.Tensor:
    spec = driver.spec.geometry.layer_spec(layer)
    shape = (num_tokens, spec.num_kv_heads * group, spec.head_dim)
    return torch.randn(*shape, generator=driver.generator).to(driver.storage.dtype)


def expected(
    sequence: Sequence, layer: int, query: torch.Tensor, scale: float = 0.3, window: int | None = None
) -> torch.Tensor:
    return reference_attention(query, *sequence.rows[layer], scale, window)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: str = "float32") -> None:
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 5), (0, 40), (15, 1), (16, 2), (31, 5), (64, 16), (100, 30)])
def test_pytorch_144858_the_last_query_sees_every_key(
    make_driver: MakeDriver, dtype: str, group: int, cached: int, new: int
) -> None:
    driver = make_driver(dtype=dtype)
    sequence = filled(driver, cached)
    batch = driver.write({sequence: driver.random_rows(new)})
    for layer in MIXED.caching_layers:
        query = random_query(driver, new, layer, group)
        got = driver.attend(batch, layer, query)
        assert got.dtype == query.dtype
        assert_close(got, expected(sequence, layer, query), dtype)


@pytest.mark.parametrize("window", [1, 6, 7, 1000])
@pytest.mark.parametrize("chunks", [[20], [7, 13], [5] * 4, [1] * 20, [3 * 6 + 1, 1]])
def test_trymirai_lalamo_200_and_lablup_mlxcel_412_a_window_counts_absolute_positions(
    driver: Driver, window: int, chunks: list[int]
) -> None:
    sequence = driver.open()
    for new in chunks:
        batch = driver.write({sequence: driver.random_rows(new)})
        for layer in MIXED.caching_layers:
            query = random_query(driver, new, layer)
            got = driver.attend(batch, layer, query, window=window)
            assert_close(got, expected(sequence, layer, query, window=window))


def test_a_ragged_batch_equals_its_sequences_one_by_one(driver: Driver) -> None:
    sequences = [filled(driver, length) for length in (0, 17, 33, 5)]
    new = [4, 1, 0, 7]
    batch = driver.write({s: driver.random_rows(n) for s, n in zip(sequences, new, strict=True)})
    for layer in MIXED.caching_layers:
        query = random_query(driver, sum(new), layer)
        got = driver.attend(batch, layer, query)
        parts = [expected(s, layer, q) for s, q in zip(sequences, query.split(new), strict=True)]
        assert_close(got, torch.cat(parts))


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("window", [None, 9])
def test_long_and_short_parts_of_one_batch_equal_their_sequences_one_by_one(
    kind: str, make_driver: MakeDriver, attention: str, window: int | None
) -> None:
    driver = make_driver(options=CpuOptions.model_validate({"memory": kind, "attention": attention}))
    sequences = [filled(driver, length) for length in (3, 17, 33, 5, 0, 60)]
    new = [40, 1, 0, 17, 16, 2]
    batch = driver.write({s: driver.random_rows(n) for s, n in zip(sequences, new, strict=True)})
    for layer in MIXED.caching_layers:
        query = random_query(driver, sum(new), layer)
        got = driver.attend(batch, layer, query, window=window)
        parts = [expected(s, layer, q, window=window) for s, q in zip(sequences, query.split(new), strict=True)]
        assert_close(got, torch.cat(parts))


def test_a_step_attends_over_the_memory_of_now_after_a_sequence_has_grown_in_another(driver: Driver) -> None:
    first, second = filled(driver, 5), filled(driver, 7)
    batch = driver.write({first: driver.random_rows(1), second: driver.random_rows(2)})
    query = random_query(driver, 3, 0)
    before = driver.attend(batch, 0, query)
    driver.append(first, 300)  # in heap memory its rows move
    driver.append(second, 300)
    assert torch.equal(driver.attend(batch, 0, query), before)


@pytest.mark.parametrize("query_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_output_has_the_dtype_of_the_query_and_the_precision_of_the_coarser(
    make_driver: MakeDriver, dtype: str, query_dtype: torch.dtype
) -> None:
    driver = make_driver(dtype=dtype)
    sequence = filled(driver, 20)
    batch = driver.write({sequence: driver.random_rows(3)})
    query = random_query(driver, 3, 0).to(query_dtype)
    got = driver.attend(batch, 0, query)
    assert got.dtype == query_dtype
    coarser = max((dtype, str(query_dtype).removeprefix("torch.")), key=TOLERANCE.__getitem__)
    assert_close(got, expected(sequence, 0, query), coarser)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e4])
def test_sgl_project_sglang_32477_what_a_sequence_dropped_does_not_leak(make_driver: MakeDriver, poison: float) -> None:
    driver = make_driver()
    sequence, clean = driver.open(), driver.open()
    rows = driver.random_rows(200)
    for key, value in rows.values():
        key.fill_(poison)
        value.fill_(poison)
    driver.write({sequence: rows})
    driver.truncate(sequence, 0)
    for new in (21, 1, 5):
        rows = driver.random_rows(new)
        query = random_query(driver, new, 0)
        got = driver.attend(driver.write({sequence: rows}), 0, query)
        assert torch.equal(got, driver.attend(driver.write({clean: rows}), 0, query))


@pytest.mark.parametrize("new", [1, 5, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_pytorch_141128_nan_reaches_the_rows_that_use_it_and_no_others(driver: Driver, new: int, bad: float) -> None:
    sequence = filled(driver, 30)
    rows = driver.random_rows(new)
    rows[0][1][new // 2] = bad
    batch = driver.write({sequence: rows})
    query = random_query(driver, new, 0)
    got = driver.attend(batch, 0, query)
    finite = torch.isfinite(got).all(-1).all(-1)
    assert finite.tolist() == [row < new // 2 for row in range(new)]
    want = expected(sequence, 0, query)
    assert_close(got[finite], want[finite])


@pytest.mark.parametrize("history", [0, 1, 63, 64, 65, 128])
def test_tenstorrent_tt_metal_48899_a_row_does_not_depend_on_later_rows(driver: Driver, history: int) -> None:
    first, second = filled(driver, history), driver.open()
    second.rows = first.rows
    driver.close(second)
    second = driver.fork(first)
    rows, query = driver.random_rows(5), random_query(driver, 5, 0)
    changed = {layer: (key.clone(), value.clone()) for layer, (key, value) in rows.items()}
    for key, value in changed.values():
        key[1:] = 50.0
        value[1:] = -7.0
    five = driver.attend(driver.write({first: rows}), 0, query)
    other = driver.attend(driver.write({second: changed}), 0, query)
    assert torch.equal(five[0], other[0])


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 60])
def test_huggingface_transformers_48748_no_row_depends_on_a_later_token(make_driver: MakeDriver, chunk: int) -> None:
    outputs = []
    for changed in (False, True):
        driver = make_driver()
        sequence = driver.open()
        rows, query = driver.random_rows(60), random_query(driver, 60, 0)
        if changed:
            rows[0][0][33] += 3.0
            rows[0][1][33] -= 5.0
        out = []
        for start in range(0, 60, chunk):
            part = {layer: (k[start : start + chunk], v[start : start + chunk]) for layer, (k, v) in rows.items()}
            out.append(driver.attend(driver.write({sequence: part}), 0, query[start : start + chunk]))
        outputs.append(torch.cat(out))
    assert torch.equal(outputs[0][:33], outputs[1][:33])
    assert not torch.equal(outputs[0][33:], outputs[1][33:])


@pytest.mark.parametrize("score", [-1e5, 1e5, -3e4])
@pytest.mark.parametrize("new", [1, 3, 20])
def test_flashinfer_ai_flashinfer_4401_scores_far_from_zero_keep_their_weights(
    make_driver: MakeDriver, score: float, new: int
) -> None:
    driver = make_driver(CacheGeometry.uniform(1, 1, 16), dtype="float32")
    sequence = driver.open()
    rows = driver.random_rows(40 + new)
    key = rows[0][0]
    key[..., 0] = score / 100
    key[..., 1:] *= 0.5
    driver.write({sequence: {0: (key[:40], rows[0][1][:40])}})
    batch = driver.write({sequence: {0: (key[40:], rows[0][1][40:])}})
    query = torch.ones(new, 2, 16)
    query[..., 0] = 100.0
    got = driver.attend(batch, 0, query, scale=1.0)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), expected(sequence, 0, query, 1.0), rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_pytorch_162588_a_long_prefill_builds_no_mask_of_its_whole_square(mapped_driver: MakeDriver) -> None:
    """Peak memory of a chunked prefill stays far below one mask element per pair of tokens."""
    script = """
import resource, torch
from plugins.cpu.tests.driver import Driver
from kvcache_core.geometry import CacheGeometry
from kvcache_cpu.options import CpuOptions
torch.set_num_threads(1)
driver = Driver("mapped", CacheGeometry.uniform(1, 1, 4), max_sequence_length=40_000)
sequence = driver.open()
driver.append(sequence, 16)
batch = driver.write({sequence: driver.random_rows(30_000)})
query = torch.randn(30_000, 1, 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = driver.attend(batch, 0, query, window=64)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert torch.isfinite(out).all()
assert grown < 300e6, grown
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_pytorch_174939_empty_inputs_give_empty_outputs_and_no_signal() -> None:
    script = """
import torch
from plugins.cpu.tests.driver import Driver, MIXED
for kind, dtype in (("auto", "float32"), ("auto", "bfloat16"), ("heap", "float32"), ("heap", "bfloat16")):
    driver = Driver(kind, MIXED, dtype=dtype)
    empty, other = driver.open(), driver.open()
    driver.append(other, 3)
    forked = driver.fork(empty)
    driver.truncate(other, 0)
    for sequences in ((), (empty,), (empty, other), (empty, forked, other)):
        batch = driver.begin(dict.fromkeys(sequences, 0))
        for layer in MIXED.caching_layers:
            spec = MIXED.layer_spec(layer)
            key = torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=driver.storage.dtype)
            value = torch.empty(0, spec.num_kv_heads, spec.value_head_dim, dtype=driver.storage.dtype)
            driver.storage.write(batch, layer, key, value)
            query = torch.empty(0, 4, spec.head_dim, dtype=driver.storage.dtype)
            assert driver.attend(batch, layer, query).shape == (0, 4, spec.value_head_dim)
            assert driver.attend(batch, layer, query, window=3).shape == (0, 4, spec.value_head_dim)
    driver.check(empty, other, forked)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
