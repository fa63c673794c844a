"""The prefill kernel: one program per query row and head tile, one pass over the row's keys, nothing to merge.

Belongs here: the kernel. The plan and the launch are in ``triton.py``, shared device code in ``common.py``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headfit.kernels.common import (
    HAS_LENGTHS_1,
    HAS_LENGTHS_2,
    HAS_MAX_LOGITS,
    HAS_SINK,
    attend_tiles,
    clamped_length,
    load_q,
    piece_dims,
    row_factor,
    row_statistics,
    to_bf16,
    v_pieces,
)

# Nothing here may make another binary: shapes, strides, lengths and page counts are data.
INTEGERS = (
    "q_b", "q_s", "q_h", "out_b", "out_s", "out_h", "lse_b", "lse_h", "lse_s", "max_b", "max_h", "max_s",
    "idx1_b", "idx1_s", "idx2_b", "idx2_s", "page_stride1", "page_stride2", "row_stride1", "row_stride2",
    "slots1", "slots2", "row0", "s_q", "h_q", "head_tiles", "page1", "page2", "topk1", "topk2", "flags", "scale_log2",
)  # fmt: skip
UNALIGNED = ("sink", "lse", "max_logits", "idx1", "idx2", "len1", "len2")


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_prefill(
    q, kv1, kv2, idx1, idx2, len1, len2, sink, out, lse, max_logits,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64, out_b: tl.int64, out_s: tl.int64, out_h: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_s: tl.int64, max_b: tl.int64, max_h: tl.int64, max_s: tl.int64,
    idx1_b: tl.int64, idx1_s: tl.int64, idx2_b: tl.int64, idx2_s: tl.int64,
    page_stride1: tl.int64, page_stride2: tl.int64, row_stride1: tl.int64, row_stride2: tl.int64,
    slots1: tl.int64, slots2: tl.int64, row0: tl.int32, s_q: tl.int32,
    h_q: tl.int32, head_tiles: tl.int32, page1: tl.int32, page2: tl.int32, topk1: tl.int32, topk2: tl.int32,
    flags: tl.int32, scale_log2: tl.float32,
    LAYOUT: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr,
    ALIGN: tl.constexpr, UNIT: tl.constexpr, MATH: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out, lse and max_logits of rows ``row0 + program_id(0) // head_tiles``."""
    program = tl.program_id(0)
    row = row0 + program // head_tiles
    heads = (program % head_tiles) * H + tl.arange(0, H)
    mask = heads < h_q
    b = row // s_q
    s = row - b * s_q
    lanes1 = clamped_length(len1, b, flags & HAS_LENGTHS_1, topk1)
    lanes2 = clamped_length(len2, b, flags & HAS_LENGTHS_2, topk2)
    full1 = tl.cdiv(lanes1, BLOCK)
    tiles = full1 + tl.cdiv(lanes2, BLOCK)
    query = load_q(q + (b * q_b + s * q_s) * UNIT, heads * q_h * UNIT, mask, LAYOUT, WIDE)
    acc, peak, total = attend_tiles(
        query, kv1, kv2, idx1 + b * idx1_b + s * idx1_s, idx2 + b * idx2_b + s * idx2_s, lanes1, lanes2, 0, tiles,
        full1, slots1, slots2, page1, page2, page_stride1, page_stride2, row_stride1, row_stride2, scale_log2, h_q,
        LAYOUT, H, BLOCK, POW2, ALIGN, MATH, WIDE, STAGES, AHEAD, AT_ONCE,
    )  # fmt: skip
    sinks = tl.load(sink + heads, mask=mask & (((heads * 0 + flags) & HAS_SINK) != 0), other=float("-inf"))
    factor = row_factor(peak, total, sinks)
    place = out + (b * out_b + s * out_s) * UNIT
    place = place + (heads * out_h * UNIT)[None, :]
    for p in tl.static_range(v_pieces(LAYOUT, WIDE)):
        value = to_bf16(acc[p] * factor[None, :], MATH)
        tl.store(place + piece_dims(p, LAYOUT, WIDE)[:, None], value, mask=mask[None, :])
    natural, largest = row_statistics(peak, total)
    tl.store(lse + b * lse_b + s * lse_s + heads * lse_h, natural, mask=mask)
    wanted = mask & (((heads * 0 + flags) & HAS_MAX_LOGITS) != 0)
    tl.store(max_logits + b * max_b + s * max_s + heads * max_h, largest, mask=wanted)
