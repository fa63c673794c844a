"""The oracle in a form that is fast on many rows and on a GPU: all rows of a chunk at once, still float64.

`headfit.reference` is the definition, row by row; tests hold this file to it. Does not belong here: any meaning of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headfit.reference import D_V
from headfit.testing.compare import DOT_REL, Truth

# Float64 numbers of gathered keys at a time: what a CPU's caches still help with, and what fills a GPU.
_CHUNK = {"cpu": 2**21, "cuda": 2**25}


def oracle_device(device: torch.device) -> torch.device:
    """Where to judge tensors that lie on ``device``: there if it is a CUDA GPU; other chips may have no float64."""
    return device if device.type == "cuda" else torch.device("cpu")


def batched_truth(
    q: Tensor,
    rows_list: Sequence[Tensor],
    lanes_list: Sequence[Tensor],
    lengths_list: Sequence[Tensor | None],
    sm_scale: float,
    attn_sink: Tensor | None = None,
) -> Truth:
    """`headfit.reference.sparse_mla_reference` of rows, and what :class:`Truth` says beside it.

    Args:
        q: ``[n, h, d_qk]``, any float dtype.
        rows_list: for each key set, its dequantised rows ``[slots, d_qk]``.
        lanes_list: for each key set, int ``[n, topk]``; a value < 0 or >= slots is an invalid lane.
        lengths_list: for each key set, int ``[n]`` or None; lanes at or past it are ignored.
        sm_scale: multiplies q . k.
        attn_sink: ``[h]`` in natural-log units, or None.

    All lie on one device, where the float64 results lie too. They equal the definition's within float64 rounding.
    """
    keys = torch.cat([*rows_list, rows_list[0].new_zeros(1, q.shape[-1])])
    lanes, valid = _joined(rows_list, lanes_list, lengths_list, keys.shape[0] - 1)
    sink = None if attn_sink is None else attn_sink.double()
    n, h = q.shape[:2]
    made = Truth(
        out=q.new_empty(n, h, D_V, dtype=torch.float64),
        lse=q.new_empty(n, h, dtype=torch.float64),
        max_logits=q.new_empty(n, h, dtype=torch.float64),
        spread=q.new_empty(n, h, D_V, dtype=torch.float64),
        logit_error=q.new_empty(n, h, dtype=torch.float64),
    )
    for part in _chunks(n, lanes.shape[1] * q.shape[-1], q.device):
        found = _judge(q[part].double(), keys[lanes[part]].double(), valid[part, None], sm_scale, sink)
        for name, values in vars(found).items():
            getattr(made, name)[part] = values
    return made


def _joined(
    rows_list: Sequence[Tensor], lanes_list: Sequence[Tensor], lengths_list: Sequence[Tensor | None], nobody: int
) -> tuple[Tensor, Tensor]:
    """Lanes ``[n, lanes]`` into the rows of all key sets, and which are valid; the others name the row ``nobody``.

    One lane more than was asked for, never valid: a row of no lanes needs no case of its own.
    """
    lanes, valid, start = [], [], 0
    for rows, listed, lengths in zip(rows_list, lanes_list, lengths_list, strict=True):
        listed = listed.long()
        good = (listed >= 0) & (listed < rows.shape[0])
        if lengths is not None:
            good &= torch.arange(listed.shape[1], device=listed.device) < lengths[:, None]
        lanes.append(torch.where(good, listed + start, nobody))
        valid.append(good)
        start += rows.shape[0]
    spare = lanes[0].new_full((lanes[0].shape[0], 1), nobody)
    return torch.cat([*lanes, spare], 1), torch.cat([*valid, torch.zeros_like(spare, dtype=torch.bool)], 1)


def _chunks(n: int, numbers: int, device: torch.device) -> Iterator[slice]:
    step = max(1, _CHUNK.get(device.type, _CHUNK["cpu"]) // numbers)
    return (slice(start, start + step) for start in range(0, n, step))


def _judge(q: Tensor, keys: Tensor, valid: Tensor, sm_scale: float, sink: Tensor | None) -> Truth:
    """Float64 q ``[n, h, d]``, keys ``[n, lanes, d]``, valid ``[n, 1, lanes]``."""
    logits = torch.where(valid, q @ keys.mT * sm_scale, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    empty = ~valid.any(-1, keepdim=True)
    # not exp(logits - lse): at logits of 1e15 the sum of a float64 lse is rounded to halves
    weights = torch.exp(logits - torch.where(empty, 0.0, top))
    total = torch.where(empty, 1.0, weights.sum(-1, keepdim=True))
    values = keys[..., :D_V]
    lse = torch.where(empty, float("inf"), top + total.log())
    out = weights @ values / total
    if sink is not None:
        # an empty row is 0 whatever the sink: inf - inf must not reach it
        out *= 1 / (1 + torch.exp(sink[:, None] - torch.where(empty, 0.0, lse)))
    return Truth(
        out=out,
        lse=lse[..., 0],
        max_logits=top[..., 0],
        spread=weights @ values.abs() / total,
        logit_error=DOT_REL * abs(sm_scale) * (q.abs() @ keys.mT.abs()).amax(-1),
    )
