"""The kit notices what is wrong: each wrong storage, and each fault in core, fails the test named for it."""

from __future__ import annotations

import gc
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcache_core.plugin import Storage, StorageSpec
from kvcache_core.testing import BackendConformance, Conformance, SharingConformance, SwapConformance
from tests.storages.paged import PagedStorage
from tests.testing import wrong, wrong_capable
from tests.testing.wrong_capable import Capable


def kit_for(storage: Callable[[StorageSpec], Storage], **declared: Any) -> type[BackendConformance]:
    """The whole kit for a storage."""

    def open_storage(self: Conformance, spec: StorageSpec) -> Storage:
        return storage(spec)

    values = {"capabilities": frozenset({"unequal_head_dims"}), "oracle_shrinks": False, "open_storage": open_storage}
    return type("Kit", (BackendConformance,), {**values, **declared})


def runs(kit: type[Conformance], name: str) -> Iterator[Callable[[], None]]:
    """A test of the kit with each of its arguments."""
    function = getattr(kit, name)
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            choices.append([{mark.args[0]: value} for value in mark.args[1]])
    wanted = inspect.signature(function).parameters
    choices += [[{key: value} for value in values] for key, values in kit.arguments().items() if key in wanted]
    for combination in itertools.product(*choices):
        arguments = {key: value for part in combination for key, value in part.items()}
        yield lambda arguments=arguments: getattr(kit(), name)(**arguments)  # type: ignore[misc]


def noticed(kit: type[Conformance], name: str) -> bool:
    """Whether some run of the test fails."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        failed = any(fails(run) for run in runs(kit, name))
        gc.collect()  # what a failure left behind
    return failed


def fails(run: Callable[[], None]) -> bool:
    """Whether a test fails, in whatever way."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - whatever a wrong backend leads to
        return not isinstance(error, pytest.skip.Exception)
    return False


def skips(run: Callable[[], None]) -> bool:
    """Whether a test is skipped."""
    try:
        run()
    except pytest.skip.Exception:
        return True
    return False


STORAGES = {
    wrong.LengthOneOff: "test_reads_show_exactly_the_stored_tokens_in_every_layer",
    wrong.RowsBeyondTheLength: "test_vllm_mlx_385_rows_that_were_cut_off_never_come_back",
    wrong.StaleTable: "test_any_history_leaves_what_lists_of_tokens_would_hold",
    wrong.ViewsOfThePool: "test_a_tensor_outlives_its_handle_and_never_shows_another_sequence",
    wrong.ReturnsTheSharedHandleType: "test_the_handle_is_of_the_backends_own_type",
    wrong.ValuesForKeys: "test_reads_show_exactly_the_stored_tokens_in_every_layer",
    wrong.BatchRowsSwapped: "test_mlx_lm_1141_a_ragged_batch_equals_appending_one_by_one",
    wrong.WritesTheFirstLayerOnly: "test_append_stores_a_whole_step_in_one_call",
    wrong.ReadsStorageOrder: "test_pytorch_175191_rows_are_read_whatever_their_strides",
    wrong.LosesPrecision: "test_transformers_25420_stored_bits_come_back_unchanged",
    wrong.NormalisesNumbers: "test_transformers_25420_stored_bits_come_back_unchanged",
    wrong.PoolOfOneMode: "test_inference_mode_is_neither_needed_nor_remembered",
    wrong.KeepsTheCallersRows: "test_mlx_lm_1097_the_cache_keeps_nothing_of_the_callers_tensors",
    wrong.CopyIgnored: "test_xllm_1984_both_sides_of_a_fork_diverge_and_keep_what_they_had",
    wrong.CopiesTheLastRows: "test_xllm_1984_both_sides_of_a_fork_diverge_and_keep_what_they_had",
    wrong.CopiesKeysOnly: "test_memos_2301_deriving_from_a_stored_prompt_never_changes_it",
    wrong.MaskOffByOne: "test_transformers_48748_a_later_token_changes_no_earlier_output",
    wrong.TopLeftMask: "test_pytorch_144858_the_last_query_sees_every_key",
    wrong.NoMask: "test_tt_metal_48899_the_first_row_of_a_step_does_not_depend_on_the_others",
    wrong.WindowOffByOne: "test_a_window_counts_the_token_itself",
    wrong.WindowInsideTheChunk: "test_lalamo_200_every_way_to_feed_the_tokens_gives_the_same_outputs",
    wrong.HeadsInterleaved: "test_pytorch_144858_the_last_query_sees_every_key",
    wrong.ScaleIgnored: "test_scale_multiplies_the_scores",
    wrong.ReturnsFloat32: "test_outputs_have_the_dtype_of_the_query",
    wrong.PrefillIgnoresTheTable: "test_accel_10_no_query_length_assumes_blocks_in_order",
    wrong.MaskTimesNan: "test_sglang_32477_poison_in_unowned_memory_changes_no_bit",
    wrong.FiniteMinusInfinity: "test_flashinfer_4401_very_negative_scores_keep_their_weights",
    wrong.NanBecomesZero: "test_pytorch_141128_nan_reaches_the_rows_that_use_it_and_no_others",
}


@pytest.mark.parametrize(("storage", "name"), STORAGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_storage_fails_the_test_named_for_it(storage: type[PagedStorage], name: str) -> None:
    assert noticed(kit_for(storage), name)


CORE = {
    wrong.shared_blocks_are_written: "test_xllm_1984_both_sides_of_a_fork_diverge_and_keep_what_they_had",
    wrong.forks_are_not_counted: "test_the_parent_may_go_first",
    wrong.aborts_keep_their_blocks: "test_an_abort_restores_lengths_tables_data_and_free_counts",
    wrong.aborts_lose_their_blocks: "test_kvcached_364_a_layer_refused_in_mid_step_leaves_no_layer_longer",
    wrong.failed_reservations_are_not_undone: "test_kvcached_364_no_call_that_fails_leaves_a_trace",
    wrong.truncation_keeps_blocks: "test_sglang_31616_rounds_of_drafts_and_rejections_leak_nothing",
    wrong.step_tensors_are_the_storages_own: "test_mlx_lm_1097_a_caller_may_change_the_metadata_it_was_given",
    wrong.nothing_is_locked: "test_lmcache_1858_threads_that_work_and_drop_handles_leave_the_books_right",
    wrong.salts_are_ignored: "test_vllm_44701_another_tenant_or_adapter_finds_nothing",
    wrong.a_hit_may_cover_the_last_token: "test_vllm_11186_a_prompt_finds_whole_blocks_and_never_its_last_token",
    wrong.evicted_blocks_can_still_be_found: "test_vllm_4761_what_was_evicted_is_not_found",
    wrong.what_is_cut_off_can_still_be_found: "test_any_history_with_reuse_finds_only_what_the_tenant_stored",
}


@pytest.mark.parametrize(("breakage", "name"), CORE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_in_core_fails_the_test_named_for_it(breakage: wrong.Breakage, name: str) -> None:
    with wrong.broken(breakage):
        assert noticed(kit_for(PagedStorage), name)


@pytest.mark.parametrize("name", sorted({*STORAGES.values(), *CORE.values()}))
def test_a_right_storage_passes_them_all(name: str) -> None:
    assert not noticed(kit_for(PagedStorage), name)


CAPABLE = {
    wrong_capable.SwapsKeysOnly: "test_a_swapped_sequence_comes_back_as_it_was_and_its_blocks_serve_others",
    wrong_capable.SwapsIntoOrder: "test_a_swapped_sequence_comes_back_as_it_was_and_its_blocks_serve_others",
    wrong_capable.KeepsSwappedPlaces: "test_what_is_freed_or_brought_back_gives_up_its_place",
    wrong_capable.SwapsOutHalf: "test_vllm_546_a_full_tier_leaves_a_sequence_where_it_is",
    wrong_capable.ExportsACopy: "test_an_export_is_the_caches_memory_and_leads_to_its_rows",
    wrong_capable.ExportsKeysTwice: "test_an_export_is_the_caches_memory_and_leads_to_its_rows",
    wrong_capable.DecodesPadding: "test_a_static_decode_step_does_what_a_step_does",
    wrong_capable.DecodesOneLess: "test_a_static_decode_step_does_what_a_step_does",
}
PARTS = (SwapConformance, SharingConformance)


def capable_kit(storage: Callable[[StorageSpec], Storage]) -> type[BackendConformance]:
    """The kit for a storage that declares all that the kit can try."""
    return kit_for(storage, capabilities=wrong_capable.CAPABILITIES, dtypes=("float32", "bfloat16"))


@pytest.mark.parametrize(("storage", "name"), CAPABLE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_with_a_declared_capability_is_noticed(storage: type[Capable], name: str) -> None:
    assert noticed(capable_kit(storage), name)


@pytest.mark.parametrize("name", [name for part in PARTS for name in vars(part) if name.startswith("test_")])
def test_a_right_storage_passes_all_that_it_declares(name: str) -> None:
    assert not noticed(capable_kit(Capable), name)
    if not name.endswith("does_not_try_is_named"):
        assert not all(skips(run) for run in runs(capable_kit(Capable), name)), "nothing was tried"


def test_random_histories_with_reuse_find_something_and_are_not_blind_to_salts() -> None:
    name = "test_any_history_with_reuse_finds_only_what_the_tenant_stored"
    kit = kit_for(PagedStorage)()
    getattr(kit, name)()
    assert kit.tokens_found > 0
    with wrong.broken(wrong.salts_are_ignored):
        assert noticed(kit_for(PagedStorage), name)
