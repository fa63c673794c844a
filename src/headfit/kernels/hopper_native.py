"""The native-width kernel of Hopper: one CTA for a row and 8, 16 or 32 of its heads, straight from packed v4 pages.

Belongs here: the life of a row (its queries, the loop over its tiles, its result) and the sizes. Does not belong here:
a tile (``hopper_native_tile.py``), the way of the keys (``hopper_keys.py``), launching (``hopper.py``).

Nothing is computed for a head that is not there beyond the next multiple of 8. Bits of a head depend on the row's keys
and on that head's query alone: tiles are 64 keys, in list order, whatever the width.
"""

# mypy: ignore-errors

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from headfit.kernels import hopper_cluster, ptx, ptx_async
from headfit.kernels.hopper_keys import ARRIVALS, Keys
from headfit.kernels.hopper_native_tile import PITCH, THREADS, WARPS, gathered, over_warps, permuted, tile
from headfit.kernels.hopper_params import Params, Traced

LOWEST = -3e38  # of a running maximum that has seen no logit
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634


@dataclass(frozen=True)
class Size:
    """What the number of heads of a CTA fixes. Offsets and sizes are bytes of shared memory.

    ``ahead``: steps of the second product that are read before the next one. ``whole_groups``: whether the first
    product runs a group of dims at a time, or half of one. ``rows``: that a CTA computes one after the other, 1, or the
    8 of a group: where most groups are packed, fewer CTAs have to come to see it.
    """

    heads: int
    min_blocks: int
    ahead: int
    whole_groups: bool
    rows: int = 1

    @property
    def n(self):
        """Accumulators of a thread for 64 rows of a product."""
        return self.heads // 2

    @property
    def nv(self):
        """Logits of a thread for each of its two keys."""
        return self.heads // 4

    @property
    def group_bytes(self):
        """Q or P of 64 dims or keys."""
        return self.heads * 128

    def offsets(self):
        """Places of q, weights, raw rows, peaks, maxima, factors, sources, lists, flag, barriers; and the end."""
        head = 8 * self.group_bytes
        sizes = (head, head, 64 * PITCH, WARPS * 128, 128, 128, 1024, 96, 16, 32)
        return [sum(sizes[:i]) for i in range(len(sizes) + 1)]


# As many CTAs an SM as registers (128, 168, 256 a thread) and shared memory allow. Widths differ in how far a warp
# works ahead, as measured at 4096 x 640: at most 3 %.
SIZES = {
    8: Size(8, min_blocks=4, ahead=1, whole_groups=False),
    16: Size(16, min_blocks=3, ahead=2, whole_groups=False),
    32: Size(32, min_blocks=2, ahead=2, whole_groups=True),
}


class Frame:
    """A thread's places, fixed for the life of a row. Few are kept in registers: the rest is computed where needed.

    ``rows``, ``rope_rows``: where it reads keys for the first product; ``columns``, `rope_columns`: for the second.
    """

    def __init__(self, size, base, tid, wid):
        q, p, raw, peaks, maxima, _, sources, lists, flag, barriers, _ = size.offsets()
        lane = tid & 31
        self.size, self.wid = size, wid
        self.q, self.p, self.raw = base + q, base + p, base + raw
        self.rows = self.raw + permuted(wid * 16 + (lane >> 2)) * PITCH + (lane & 3) * 16
        self.columns = self.raw + permuted(lane) * PITCH + wid * 16
        self.rope_rows = self.columns + wid * (16 * PITCH - 16) - ptx.shr(lane, 4) * (16 * PITCH - 16)
        self.held = self.find_rope_columns(lane) if size.rows == 1 else None
        self.peaks = base + peaks
        self.q_descriptor = ((base + q) >> 4) | 0x10000
        self.p_descriptor = ((base + p) >> 4) | 0x10000
        self.head_maxima, self.head_factors = base + maxima, base + maxima + 128
        self.sources, self.lists = base + sources, base + lists
        self.unusual = base + flag
        self.full = base + barriers  # two: of even and of odd tiles
        self.first_half_free, self.second_half_free = base + barriers + 16, base + barriers + 24

    def rope_columns(self):
        """``columns`` for rope dims; computed anew beside the loop over eight rows, which leaves no register for it."""
        return self.held if self.size.rows == 1 else self.find_rope_columns(ptx.lane())

    def find_rope_columns(self, lane):
        """Rope dims are two bytes each: the four matrices of an operand are 8 keys x 8 dims, dims first."""
        keys, dims = ptx.shr(lane, 4), ptx.shr(lane, 3) & 1
        return self.columns + self.wid * 16 - keys * (8 * PITCH) - dims * (8 * PITCH - 16)

    def scales_row(self):
        """The shared row of the first own key, with its scales of this tile at ``SCALES``."""
        return self.rows - ((ptx.lane() & 3) << 4) + self.parity * 8

    def weights(self, i):
        """Where this lane's row of eight weights is stored: of a head, eight first (``i`` 0) or second own keys."""
        head = ptx.lane() & (self.size.heads - 1)
        return self.p + head * 128 + (((2 * self.wid + i) ^ (head & 7)) << 4)

    def maxima(self):
        """The maximum of this thread's first head; the factor stands 128 bytes further, the next two heads 32."""
        return self.head_maxima + (ptx.lane() & 3) * 8

    def head(self, lane):
        """The head that a lane speaks for, after ``gathered``."""
        i = (lane >> 2) & (self.size.nv - 1)
        return 8 * (i >> 1) + 2 * (lane & 3) + (i & 1)


class State:
    """What a thread carries from tile to tile; register arrays, indexed by constants only."""

    def __init__(self, size):
        self.acc = cute.make_rmem_tensor((8 * size.n,), Float32)  # [group of dims][accumulator]
        self.total = cute.make_rmem_tensor((size.nv,), Float32)  # of this thread's keys, for each of its heads
        self.size = size


def clear(state):
    """Sums as before the first tile."""
    for i in range(8 * state.size.n):
        state.acc[i] = Float32(0.0)
    for i in range(state.size.nv):
        state.total[i] = Float32(0.0)


def fetch_queries(f, p, place):
    """Send for q of this CTA's heads: a warp takes a head at a time, a lane 2 x 8 of its dims."""
    lane, chunks = ptx.lane(), []
    for k in range(f.size.heads // WARPS):
        head = f.wid + WARPS * k
        source = place.q + ptx.wide(head, p.q_h) * 2
        here = ptx.less(head, place.heads)
        chunks.append([ptx.ldg128_if(ptx.at(source, lane * 16 + 512 * i), here) for i in range(2)])
    return chunks


def store_queries(f, p, chunks, any_scale):
    """Put q into shared memory, in the order of the first product's k index; maxima to their start.

    Usually a head is brought to a largest exponent of 7 by a power of two, whose inverse joins the softmax scale: f16
    then holds every element to 2^-28 of the largest, and rope dims stay bf16, exactly. For any scale q stays as it is:
    an element that is small beside the head's largest may meet a scale that is large.
    """
    lane = ptx.lane()
    for k, pair in enumerate(chunks):
        head = f.wid + WARPS * k
        exponent = Int32(134) if any_scale else largest_exponent(pair)
        power = None if any_scale else (261 - exponent) << 23
        for i in range(2):
            store_query_chunk(f, head, i, pair[i], power)
        factor = p.scale_log2 * ptx.as_float((exponent - 7) << 23)

        def write(head=head, factor=factor):
            ptx.sts32f(f.head_maxima + head * 4, Float32(LOWEST))
            ptx.sts32f(f.head_factors + head * 4, factor)

        ptx.when(ptx.equal(lane, Int32(0)), write)


def largest_exponent(pair):
    """The biased exponent of a head's largest element, over the warp that holds it; at least 14."""
    top = Int32(0)
    for word in pair[0] + pair[1]:
        top = ptx.max_u16x2(top, word & 0x7FFF7FFF)
    top = ptx.warp_max(ptx.max32(ptx.shr(top, 16), top & 0xFFFF))
    return ptx.max32(ptx.shr(top, 7), Int32(14))


def store_query_chunk(f, head, i, words, power):
    """Eight dims of a head at their k index: as they are without ``power``, else times it, as f16 or (rope) bf16.

    Lanes 24 to 31 of the second chunks have the rope dims, whose k index is their own order.
    """
    lane = ptx.lane()
    sub, swizzle = lane & 7, head & 7
    rope = ptx.less(Int32(23), lane) if i else Int32(0)
    base = f.q + ((lane >> 3) + 4 * i) * f.size.group_bytes + head * 128
    for j in range(4):
        word = words[j]
        if power is not None:
            scaled = ptx.mul_bf16x2(word, ptx.prmt(power, power, 0x3232))
            word = ptx.bf16_pair_to_f16(scaled)
            word = ptx.pick32(rope, scaled, word) if i else word
        place = (((4 * (sub & 1) + j) ^ swizzle) << 4) + 4 * (sub >> 1)
        if i:
            place = ptx.pick32(rope, ((sub ^ swizzle) << 4) + 4 * j, place)
        ptx.sts32(base + place, word)


def first_tile(keys, end, parity):
    """Send for the first tile of a pass, and in each warp for the index of its first turn."""
    keys.send_index(keys.wid >> 1, end)
    keys.locate(Int32(0), end, parity & 1)
    ptx.sync(THREADS)

    def copy():
        keys.copy_half(0, parity & 1)
        keys.copy_half(1, parity & 1)
        keys.expect(parity & 1, Int32(1))

    ptx.when(ptx.less(Int32(0), end), copy)


def finish(f, p, state, unit, r):
    """The result of the row, or this CTA's share of it. ``unit``: what a weight's scale was multiplied by, inverted."""
    lane = ptx.lane()
    peaks = f.peaks + lane * 4
    total = gathered([state.total[i] for i in range(f.size.nv)], lane >> 2, ptx.fadd)
    ptx.sts32f(peaks + f.wid * 128, total)
    ptx.sync(THREADS)
    total = over_warps(peaks, ptx.fadd)
    place = Place(p, f.size, r)
    place.lane, place.head = lane, f.head(lane)
    maximum = ptx.lds32f(f.head_maxima + place.head * 4)
    if f.size.rows > 1:
        write_whole(f, p, state, unit, place, total, maximum)
        return
    whole = ptx.equal(p.splits, Int32(1))
    ptx.when(whole, lambda: write_whole(f, p, state, unit, place, total, maximum))
    ptx.when(whole ^ 1, lambda: keep_share(f, state, unit, place, total, maximum))


def speaks(f, place):
    """Whether this lane has the statistics of a head of its own to write: one lane of one warp does."""
    return ptx.equal(f.wid, Int32(0)) & ptx.less(place.lane, Int32(4 * f.size.nv))


def thread_heads(f, place):
    """Of each of a thread's heads: its number among the accumulators, itself."""
    c = place.lane & 3
    return [(i, 8 * (i >> 1) + 2 * c + (i & 1)) for i in range(f.size.nv)]


def write_whole(f, p, state, unit, place, total, maximum):
    """Normalised output and lse. A row without keys: 0 and +inf."""
    g, c = place.lane >> 2, place.lane & 3
    empty = ptx.equal(ptx.as_bits(total), Int32(0))
    lse = ptx.fmul(ptx.fadd(maximum, ptx.lg2(total)), Float32(LN_2))
    lse = ptx.pickf(empty, Float32(float("inf")), lse)
    there = ptx.less(place.head, place.heads)
    ptx.stg32f_if(place.lse + ptx.wide(place.head, p.lse_h) * 4, lse, speaks(f, place) & there)
    sink_at = ptx.at(p.sink, (place.head0 + place.head) * 4)
    sink = ptx.as_float(ptx.ldg32_if(sink_at, ptx.given(p.sink) & there, Int32(0xFF800000 - (1 << 32))))
    weight = ptx.fadd(total, ptx.ex2(ptx.fma(sink, Float32(LOG2_E), -maximum)))
    norm = ptx.pickf(empty, Float32(0.0), ptx.rcp(weight))
    for i, head in thread_heads(f, place):
        factor = ptx.shfl(norm, c + 4 * i)
        here = ptx.less(head, place.heads)
        row = ptx.at(place.out + ptx.wide(head, p.out_h) * 2, f.wid * 32)
        scale = ptx.fmul(factor, unit)
        for group in range(8):
            z = group * f.size.n + 4 * (i >> 1) + (i & 1)
            by = factor if group == 7 else scale
            pair = ptx.pack_bf16(ptx.fmul(state.acc[z], by), ptx.fmul(state.acc[z + 2], by))
            if group < 7:
                ptx.stg32_if(ptx.at(row, group * 128 + g * 4), pair, here)
            else:
                at = ptx.at(row, group * 128 + g * 2)
                ptx.stg16_if(at, pair, here)
                ptx.stg16_if(at + 16, ptx.shr(pair, 16), here)


def keep_share(f, state, unit, place, total, maximum):
    """Sums as they are, and the maximum they are relative to, in shared memory, over q, weights and rows."""
    g, base, heads = place.lane >> 2, f.q, f.size.heads
    peak = ptx.pickf(ptx.equal(ptx.as_bits(total), Int32(0)), Float32(float("-inf")), maximum)
    at = hopper_cluster.statistics_at(base, heads, place.head)
    ptx.when(speaks(f, place), lambda: ptx.sts64f(at, [peak, total]))
    for i, head in thread_heads(f, place):
        for group in range(8):
            z = group * f.size.n + 4 * (i >> 1) + (i & 1)
            at = hopper_cluster.value_at(base, head, group * 64) + f.wid * 64
            a, b = state.acc[z], state.acc[z + 2]
            if group < 7:
                ptx.sts64f(at + g * 8, [ptx.fmul(a, unit), ptx.fmul(b, unit)])
            else:
                ptx.sts32f(at + g * 4, a)
                ptx.sts32f(at + g * 4, b, 32)


class Place:
    """Where this CTA's row, heads and share stand in the call's tensors; computed anew at both ends of a row."""

    def __init__(self, p, size, r):
        x, split = ptx.block(), ptx.block_y()
        unit = ptx.quotient(x, p.head_tiles)
        row, heads, head_tile = unit * size.rows + r, size.heads, x - unit * p.head_tiles
        b = ptx.divide(row, p.magic_s, p.shift_s)
        s = row - b * p.s_q
        self.head0 = head_tile * heads
        self.heads = ptx.min32(p.h_q - self.head0, Int32(heads))
        h = ptx.wide(self.head0, p.q_h)
        self.q = p.q + (ptx.wide(b, p.q_b) + ptx.wide(s, p.q_s) + h) * 2
        self.out = p.out + (ptx.wide(b, p.out_b) + ptx.wide(s, p.out_s) + ptx.wide(self.head0, p.out_h)) * 2
        self.lse = p.lse + (ptx.wide(b, p.lse_b) + ptx.wide(s, p.lse_s) + ptx.wide(self.head0, p.lse_h)) * 4
        self.share = (row * p.splits + split) * p.h_q + self.head0


def native(heads, **changes):
    """The kernel for CTAs of ``heads`` heads; ``changes`` replace fields of its `Size`."""
    size = replace(SIZES[heads], **changes)

    @cute.kernel
    def sparse_mla_native(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        f = places(p, size, base, tid, wid)
        state = State(size)
        if size.rows > 1:
            leave_packed(p)
        for r in cutlass.range(0, rows_here(p, size), unroll=1):
            end = cute.arch.make_warp_uniform(begin_row(f, p, r, tid))
            clear(state)
            for it in cutlass.range(0, end, unroll=1):
                tile(f, it, end, 0, state, False)
            ptx.sync(THREADS)
            if ptx.lds32(f.unusual) == 0:
                finish(f, p, state, Float32(2.0**-10), r)
            else:
                g = places(p, size, base, ptx.thread(), cute.arch.make_warp_uniform(ptx.thread() >> 5))
                begin_again(g, p, r, end)
                clear(state)
                for it in cutlass.range(0, end, unroll=1):
                    tile(g, it, end, end, state, True)
                ptx.sync(THREADS)
                finish(g, p, state, Float32(1.0), r)
            end_row(f, p, tid)

    return Traced(sparse_mla_native, threads=THREADS, smem=size.offsets()[-1], min_blocks=size.min_blocks)


def places(p, size, base, tid, wid):
    """This thread's places. The second pass has its own, so that none is kept in a register for it all the time."""
    f = Frame(size, base, tid, wid)
    f.keys = Keys(p, f, wid)
    return f


def rows_here(p, size):
    """Rows that this CTA computes."""
    return 1 if size.rows == 1 else ptx.min32(p.rows - ptx.quotient(ptx.block(), p.head_tiles) * 8, Int32(8))


def begin_row(f, p, r, tid):
    """Barriers, queries and the first tile; returns the number of tiles."""
    unit = ptx.quotient(ptx.block(), p.head_tiles)
    end = f.keys.open(unit * f.size.rows + r, ptx.block_y(), tid)
    starts = ptx.equal(tid, Int32(0))
    for barrier, count in (
        (f.full, ARRIVALS),
        (f.full + 8, ARRIVALS),
        (f.first_half_free, WARPS),
        (f.second_half_free, WARPS),
    ):
        ptx_async.mbarrier_init_if(barrier, count, starts)
    ptx_async.mbarrier_init_done()
    ptx.when(starts, lambda: ptx.sts32(f.unusual, Int32(0)))
    chunks = fetch_queries(f, p, Place(p, f.size, r))
    ptx.sync(THREADS)
    first_tile(f.keys, end, Int32(0))
    store_queries(f, p, chunks, False)
    ptx_async.fence_async()
    ptx.sync(THREADS)
    return end


def begin_again(f, p, r, end):
    """Queries as they are and the first tile, for the second pass; the barriers go on from the first."""
    store_queries(f, p, fetch_queries(f, p, Place(p, f.size, r)), True)
    ptx_async.fence_async()
    first_tile(f.keys, end, end)
    ptx.sync(THREADS)


def end_row(f, p, tid):
    """Where another row follows, take the barriers down; where this one is split, make its result of the shares."""
    if f.size.rows > 1:
        ptx.sync(THREADS)
        for i in range(4):
            ptx_async.mbarrier_end_if(f.full + 8 * i, ptx.equal(tid, Int32(0)))
        return
    warp = cute.arch.make_warp_uniform(ptx.thread() >> 5)
    split = ptx.equal(p.splits, Int32(1)) ^ 1
    place = lambda: Place(p, f.size, Int32(0))  # noqa: E731
    ptx.when(split, lambda: hopper_cluster.close_share(p, f.size.heads, f.q, place(), warp))


def leave_packed(p):
    """End where the packed kernel has computed the group of eight rows of this CTA: its flag in ``p.work`` is 1."""
    group = ptx.quotient(ptx.block(), p.head_tiles)
    done = ptx.ldg32_if(p.work + ptx.wide(group, Int64(4)), Int32(1), Int32(0))
    ptx.exit_if(ptx.equal(done, Int32(1)))
