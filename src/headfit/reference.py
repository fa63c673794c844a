"""The float64 oracle: slow, row by row, and what every backend is compared with.

Belongs here: the meaning of sparse MLA in as few lines as it takes. Does not belong here: speed, or
bytes (`cache.unpack_kv` says which rows a packed cache stands for).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headfit.call import KeySet, SparseCall

D_V = 512  # V is the first 512 dims of a row, at every d_qk


def sparse_mla_reference(
    q: Tensor,
    rows_list: Sequence[Tensor],
    indices_list: Sequence[Tensor],
    lengths_list: Sequence[Tensor | None],
    sm_scale: float,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse MLA in float64, over the rows exactly as they are given.

    Args:
        q: ``[b, s_q, h, d_qk]``, any float dtype and strides.
        rows_list: for each key set, its dequantised rows ``[slots, d_qk]`` (see `headfit.unpack_kv`).
        indices_list: for each key set, int ``[b, s_q, topk]``; a value < 0 or >= slots is an invalid lane.
        lengths_list: for each key set, int ``[b]`` or None; lanes at or past it are ignored, whatever they hold.
        sm_scale: multiplies q . k.
        attn_sink: ``[h]`` in natural-log units, or None.

    Returns:
        out ``[b, s_q, h, 512]``, max_logits ``[b, h, s_q]`` (scaled; -inf for a row without keys) and lse
        ``[b, h, s_q]`` (natural log, without the sink; +inf for a row without keys), all float64 on the CPU. Keys that
        stand twice count twice. A row without keys has out 0, whatever the sink.
    """
    b, s_q, h, _ = q.shape
    out = torch.zeros(b, s_q, h, D_V, dtype=torch.float64)
    max_logits = torch.full((b, h, s_q), float("-inf"), dtype=torch.float64)
    lse = torch.full((b, h, s_q), float("inf"), dtype=torch.float64)
    for i in range(b):
        for j in range(s_q):
            chosen = []
            for rows, indices, lengths in zip(rows_list, indices_list, lengths_list, strict=True):
                length = None if lengths is None else int(lengths[i])
                chosen.append(rows[_valid_slots(indices[i, j], length, rows.shape[0]).to(rows.device)])
            keys = torch.cat(chosen).double().cpu()
            if keys.shape[0] == 0:
                continue
            logits = q[i, j].double().cpu() @ keys.T * sm_scale
            top = logits.amax(1)
            # not exp(logits - lse): at logits of 1e15 the sum of a float64 lse is rounded to halves
            weights = torch.exp(logits - top[:, None])
            total = weights.sum(1)
            max_logits[i, :, j] = top
            lse[i, :, j] = top + total.log()
            out[i, j] = weights @ keys[:, :D_V] / total[:, None]
            if attn_sink is not None:
                out[i, j] *= (1 / (1 + torch.exp(attn_sink.double().cpu() - lse[i, :, j])))[:, None]
    return out, max_logits, lse


def reference_call(call: SparseCall) -> tuple[Tensor, Tensor, Tensor]:
    """`sparse_mla_reference` of a prepared call: (out, max_logits, lse), float64.

    The outputs of the call are not written.
    """
    return sparse_mla_reference(
        call.q,
        [key_set_rows(keys) for keys in call.key_sets],
        [keys.indices for keys in call.key_sets],
        [keys.lengths for keys in call.key_sets],
        call.sm_scale,
        call.attn_sink,
    )


def key_set_rows(keys: KeySet) -> Tensor:
    """The rows of a key set, bf16 ``[slots, d_qk]``: `unpack_kv` of the pages that its strides describe."""
    from headfit.cache import LAYOUTS, unpack_kv

    pages = keys.slots // keys.page_size
    start = keys.data.storage_offset()
    if keys.layout == "bf16":
        width = keys.data.shape[-1]
        shape, strides = (pages, keys.page_size, width), (keys.page_stride, keys.row_stride, 1)
        return keys.data.as_strided(shape, strides, start).reshape(keys.slots, width)
    token = LAYOUTS[keys.layout].bytes_per_token
    shape4, strides4 = (pages, keys.page_size, 1, token), (keys.page_stride, token, token, 1)
    return unpack_kv(keys.data.view(torch.uint8).as_strided(shape4, strides4, start), keys.layout)


def _valid_slots(lanes: Tensor, length: int | None, slots: int) -> Tensor:
    """The slots a row attends to, in lane order: cut at the length (clamped to [0, topk]), invalid lanes left out."""
    if length is not None:
        lanes = lanes[: min(max(length, 0), lanes.numel())]
    lanes = lanes.long()
    return lanes[(lanes >= 0) & (lanes < slots)].cpu()
