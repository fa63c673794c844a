"""Merging the shares of split rows on Hopper, in an order that the number of splits alone fixes.

Belongs here: the kernel. One CTA merges one head of one row, four dims a thread; nothing depends on the other heads or
rows. The same meaning as ``merge.py``: a share without weight is not read, NaN stays NaN, a row without keys gives 0
and +inf.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_params import Params, Traced

THREADS = 128
AT_ONCE = 8  # shares whose loads are issued together
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NONE = float("-inf")


def merge() -> Traced:
    """Grid (rows, h_q): ``out`` and ``lse`` of head y of row x from its ``splits`` shares."""

    @cute.kernel
    def sparse_mla_merge(p: Params):
        thread, _, _ = cute.arch.thread_idx()
        row, head, _ = cute.arch.block_idx()
        ptx_async.wait_for_kernel_before()
        # Offsets in elements of peaks and totals; a share further is h_q further.
        first = (Int64(row) * Int64(p.splits)) * Int64(p.h_q) + Int64(head)
        sink = load_if(p.sink + Int64(head) * 4, ptx.given(p.sink), Float32(NONE))
        peak = Float32(NONE)
        lane = thread & 31
        for i in cutlass.range(lane, p.splits, 32, unroll=1):
            place = p.peaks + (first + Int64(i) * Int64(p.h_q)) * 4
            peak = ptx.fmax(peak, load_if(place, Int32(1), Float32(NONE)))
        for mask in (16, 8, 4, 2, 1):
            peak = ptx.fmax(peak, ptx.shfl_xor(peak, mask))
        base = ptx.pickf(ptx.above(peak, 0xFF800000), peak, Float32(0.0))
        total = Float32(0.0)
        a0 = Float32(0.0)
        a1 = Float32(0.0)
        a2 = Float32(0.0)
        a3 = Float32(0.0)
        for i in cutlass.range(0, p.splits, AT_ONCE, unroll=1):
            total, a0, a1, a2, a3 = add_shares([total, a0, a1, a2, a3], p, first, i, base, thread)
        store(p, row, head, thread, [a0, a1, a2, a3], peak, base, total, sink)

    return Traced(sparse_mla_merge, threads=THREADS, smem=0)


# Loads without .nc: what they read was still being written when this kernel was started.


def load_if(p, flag, other):
    """One float32 where ``flag``, else ``other``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, $3; @p ld.global.f32 $0, [$1]; }"
    return ptx.asm([Float32], [p, flag, other], code, "=&f,l,r,f,~{memory}")[0]


def load4_if(p, flag):
    """Four float32 where ``flag``, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.v4.f32 {$0,$1,$2,$3}, [$4]; }"
    )
    return ptx.asm([Float32] * 4, [p, flag], code, "=&f,=&f,=&f,=&f,l,r,~{memory}")


def not_zero(x):
    """1 where x is not 0; a NaN is not."""
    code = "{ .reg .pred p; setp.neu.f32 p, $1, 0f00000000; selp.s32 $0, 1, 0, p; }"
    return ptx.asm([Int32], [x], code, "=r,f", False)[0]


def add_shares(sums, p, first, i, base, thread):
    """The total and this thread's four dims, with shares i to i + 7 added one after another.

    All loads are issued before the first sum; past the last share, and where one has no weight, zeros are added.
    """
    parts, weights, shares = [], [], []
    columns = [first + Int64(i + k) * Int64(p.h_q) for k in range(AT_ONCE)]
    inside = [ptx.less(i + k, p.splits) for k in range(AT_ONCE)]
    for column, flag in zip(columns, inside, strict=True):
        parts.append(load_if(p.totals + column * 4, flag, Float32(0.0)))
        peak = load_if(p.peaks + column * 4, flag, Float32(NONE))
        weights.append(ptx.ex2(peak - base))
    for column, part in zip(columns, parts, strict=True):
        shares.append([part, *load4_if(p.partial + column * 2048 + Int64(thread) * 16, not_zero(part))])
    for share, weight in zip(shares, weights, strict=True):
        sums = [ptx.fma(x, weight, sum_) for x, sum_ in zip(share, sums, strict=True)]
    return sums


def store(p, row, head, thread, acc, peak, base, total, sink):
    """Normalise with the sink and write; thread 0 writes lse."""
    low, high, lse = result(acc, peak, base, total, sink)
    b = ptx.divide(row, p.magic_s, p.shift_s)
    s = row - b * p.s_q
    place = p.out + (Int64(b) * p.out_b + Int64(s) * p.out_s + Int64(head) * p.out_h) * 2 + Int64(thread) * 8
    ptx.stg64(place, [low, high])
    target = p.lse + (Int64(b) * p.lse_b + Int64(head) * p.lse_h + Int64(s) * p.lse_s) * 4
    ptx.stg32f_if(target, lse, ptx.equal(thread, Int32(0)))


def result(acc, peak, base, total, sink):
    """Four normalised dims as two bf16 pairs, and lse: 0 and +inf without a key."""
    some = not_zero(total)
    weight = total + ptx.ex2(sink * LOG2_E - base)
    factor = ptx.pickf(some, ptx.asm([Float32], [weight], "rcp.rn.f32 $0, $1;", "=f,f", False)[0], Float32(0.0))
    low = ptx.pack_bf16(ptx.fmul(acc[0], factor), ptx.fmul(acc[1], factor))
    high = ptx.pack_bf16(ptx.fmul(acc[2], factor), ptx.fmul(acc[3], factor))
    return low, high, ptx.pickf(some, (peak + ptx.lg2(total)) * LN_2, Float32(float("inf")))
