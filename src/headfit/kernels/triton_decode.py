"""The split kernel of decode: one program per query row, head tile and share of the row's keys; ``merge.py`` follows.

Belongs here: the kernel. The plan and the launch are in ``triton.py``, shared device code in ``common.py``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headfit.kernels.common import (
    HAS_LENGTHS_1,
    HAS_LENGTHS_2,
    attend_tiles,
    clamped_length,
    load_q,
    piece_dims,
    v_pieces,
)

INTEGERS = (
    "q_b", "q_s", "q_h", "idx1_b", "idx1_s", "idx2_b", "idx2_s", "page_stride1", "page_stride2", "row_stride1",
    "row_stride2", "slots1", "slots2", "row0", "s_q", "h_q", "head_tiles", "page1", "page2", "topk1", "topk2", "flags",
    "splits", "tiles_per_split", "scale_log2",
)  # fmt: skip
UNALIGNED = ("idx1", "idx2", "len1", "len2")


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_split(
    q, kv1, kv2, idx1, idx2, len1, len2, partial, peaks, totals,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64,
    idx1_b: tl.int64, idx1_s: tl.int64, idx2_b: tl.int64, idx2_s: tl.int64,
    page_stride1: tl.int64, page_stride2: tl.int64, row_stride1: tl.int64, row_stride2: tl.int64,
    slots1: tl.int64, slots2: tl.int64, row0: tl.int32, s_q: tl.int32,
    h_q: tl.int32, head_tiles: tl.int32, page1: tl.int32, page2: tl.int32, topk1: tl.int32, topk2: tl.int32,
    flags: tl.int32, splits: tl.int32, tiles_per_split: tl.int32, scale_log2: tl.float32,
    LAYOUT: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr,
    ALIGN: tl.constexpr, UNIT: tl.constexpr, MATH: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """float32 partials of share ``program_id(1)`` of the tiles of row ``row0 + program_id(0) // head_tiles``.

    ``tiles_per_split`` > 0 fixes the share, so that it is the same whatever the shape of the call; 0 deals the tiles
    that the row has evenly to the splits of the launch.
    """
    program = tl.program_id(0)
    local = program // head_tiles
    row = row0 + local
    heads = (program % head_tiles) * H + tl.arange(0, H)
    mask = heads < h_q
    b = row // s_q
    s = row - b * s_q
    lanes1 = clamped_length(len1, b, flags & HAS_LENGTHS_1, topk1)
    lanes2 = clamped_length(len2, b, flags & HAS_LENGTHS_2, topk2)
    full1 = tl.cdiv(lanes1, BLOCK)
    tiles = full1 + tl.cdiv(lanes2, BLOCK)
    share = tl.where(tiles_per_split > 0, tiles_per_split, tl.cdiv(tiles, splits))
    tile0 = tl.program_id(1) * share
    count = tl.maximum(tl.minimum(tiles - tile0, share), 0)
    query = load_q(q + (b * q_b + s * q_s) * UNIT, heads * q_h * UNIT, mask, LAYOUT, WIDE)
    acc, peak, total = attend_tiles(
        query, kv1, kv2, idx1 + b * idx1_b + s * idx1_s, idx2 + b * idx2_b + s * idx2_s, lanes1, lanes2, tile0, count,
        full1, slots1, slots2, page1, page2, page_stride1, page_stride2, row_stride1, row_stride2, scale_log2, h_q,
        LAYOUT, H, BLOCK, POW2, ALIGN, MATH, WIDE, STAGES, AHEAD, AT_ONCE,
    )  # fmt: skip
    column = (local.to(tl.int64) * splits + tl.program_id(1)) * h_q + heads
    tl.store(peaks + column, peak, mask=mask)
    tl.store(totals + column, total, mask=mask)
    place = partial + (column * 512)[None, :]
    stored = mask & (total != 0.0)  # a share without keys leaves its place unwritten, and merge does not read it
    for p in tl.static_range(v_pieces(LAYOUT, WIDE)):
        tl.store(place + piece_dims(p, LAYOUT, WIDE)[:, None], acc[p], mask=stored[None, :])
