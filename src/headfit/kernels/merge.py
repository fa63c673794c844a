"""Merging the partials of the split kernel, in an order that the number of splits alone fixes.

Belongs here: the kernel. A program merges one head of one row; nothing depends on the other heads or rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from headfit.kernels.common import HAS_MAX_LOGITS, HAS_SINK, row_factor, row_statistics, to_bf16

SPLIT_BLOCK = tl.constexpr(16)  # shares of a row that are loaded together

INTEGERS = (
    "out_b", "out_s", "out_h", "lse_b", "lse_h", "lse_s", "max_b", "max_h", "max_s",
    "row0", "s_q", "h_q", "flags", "splits",
)  # fmt: skip
UNALIGNED = ("sink", "lse", "max_logits", "peaks", "totals")


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=UNALIGNED)
def sparse_mla_merge(
    partial, peaks, totals, sink, out, lse, max_logits,
    out_b: tl.int64, out_s: tl.int64, out_h: tl.int64, lse_b: tl.int64, lse_h: tl.int64, lse_s: tl.int64,
    max_b: tl.int64, max_h: tl.int64, max_s: tl.int64, row0: tl.int32, s_q: tl.int32,
    h_q: tl.int32, flags: tl.int32, splits: tl.int32,
    UNIT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """out, lse and max_logits of head ``program_id(0) % h_q`` of row ``row0 + program_id(0) // h_q``."""
    program = tl.program_id(0)
    local = program // h_q
    head = program - local * h_q
    row = row0 + local
    b = row // s_q
    s = row - b * s_q
    first = local.to(tl.int64) * splits * h_q + head
    lane = tl.arange(0, SPLIT_BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    for i in range(0, splits, SPLIT_BLOCK):
        here = tl.load(peaks + first + (i + lane) * h_q, mask=i + lane < splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(here, 0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    dims = tl.arange(0, 512)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((512,), tl.float32)
    for i in range(0, splits, SPLIT_BLOCK):  # a block of shares at once: the loads of one wait for no other
        column = first + (i + lane) * h_q
        part = tl.load(totals + column, mask=i + lane < splits, other=0.0)
        weight = tl.exp2(tl.load(peaks + column, mask=i + lane < splits, other=float("-inf")) - base)
        rows = tl.load(partial + column[:, None] * 512 + dims[None, :], mask=(part != 0.0)[:, None], other=0.0)
        total += tl.sum(part * weight, 0)
        # A share whose every score is NaN has peak -inf, hence weight 0: 0 * NaN is still NaN.
        acc += tl.sum(rows * weight[:, None], 0)
    wanted = tl.load(sink + head, mask=(flags & HAS_SINK) != 0, other=float("-inf"))
    factor = row_factor(peak, total, wanted)
    place = out + (b * out_b + s * out_s + head * out_h) * UNIT + dims
    tl.store(place, to_bf16(acc * factor, MATH))
    natural, largest = row_statistics(peak, total)
    tl.store(lse + b * lse_b + s * lse_s + head * lse_h, natural)
    tl.store(max_logits + b * max_b + s * max_s + head * max_h, largest, mask=(flags & HAS_MAX_LOGITS) != 0)
