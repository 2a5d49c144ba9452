"""What `varlen_attn` and FlashInfer promise to compute from their arguments, in plain torch.

They stand in for the kernels where there is no GPU: a wrong or swapped argument shows. What the real ones compute is
for a GPU to show.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcache_core.attention import attend_dense


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, left: int) -> torch.Tensor:
    return attend_dense(query, key, value, scale=scale, window=None if left < 0 else left + 1)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn` over pages."""
    size = key.shape[1]
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for index in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert index.dtype is torch.int32
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    assert max_k >= int(seqused_k.max())
    assert max_q >= int(cu_seq_q.diff().max())
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    for row, length in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[row : row + 2].tolist()
        if length == 0:
            continue  # the kernel leaves zeros
        blocks = block_table[row, : -(-length // size)].long()
        keys, values = (pool[blocks].flatten(0, 1)[:length] for pool in (key, value))
        out[first:last] = _attend(query[first:last], keys, values, scale, window_size[0])
    return out


class _Wrapper:
    """What FlashInfer's two wrappers share: `plan`, then `run` once for each layer."""

    def __init__(self, workspace: torch.Tensor, layout: str, **settings: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype is torch.uint8
        self.plans = 0

    def _keep(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        settings: dict[str, Any],
    ) -> None:
        for index in (qo_indptr, indptr, indices, last_page_len):
            assert index.dtype is torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu"  # planned on the host
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.plans += 1
        self._tables = (qo_indptr.tolist(), indptr.tolist(), indices.clone(), last_page_len.tolist())
        self._heads, self._page_size, self._settings = heads, page_size, settings

    def run(self, query: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        qo_indptr, indptr, indices, last = self._tables
        key, value = paged_kv_cache
        assert (query.shape[1], key.shape[2], key.shape[3]) == self._heads
        assert key.shape[1] == self._page_size
        assert query.is_contiguous()
        assert query.dtype is self._settings["q_data_type"]
        assert key.dtype is self._settings["kv_data_type"]
        assert key.stride() == value.stride()
        out = torch.zeros_like(query)
        for row in range(len(last)):
            first, stop = qo_indptr[row : row + 2]
            pages = indices[indptr[row] : indptr[row + 1]].long()
            if not len(pages):
                continue
            length = (len(pages) - 1) * self._page_size + last[row]
            keys, values = (pool[pages].flatten(0, 1)[:length] for pool in (key, value))
            out[first:stop] = _attend(
                query[first:stop], keys, values, self._settings["sm_scale"], self._settings["window_left"]
            )
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        **settings: Any,
    ) -> None:
        assert causal
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        tables = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(qo_indptr, *tables, heads, page_size, settings)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(
            one_each, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim), page_size, settings
        )
