"""Which slots the rows of a call list: the bitmap in the workspace of ``hopper_wide``.

Belongs here: the kernel that marks them. Does not belong here: numbering and dequantising (``hopper_wide_spread.py``).

Thousands of rows list the same few slots, so that no index touches the bitmap in global memory: every CTA collects
those of its rows in shared memory, and merges what it has at the end. Caches of more slots than there are bits take
several passes over the lists.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import RowLists

THREADS = 1024
WARPS = THREADS // 32
AT_ONCE = 8  # indices that a lane has under way
SMEM = 208 * 1024
WORDS = SMEM // 4  # of the bitmap, in a pass


def mark():
    """The kernel; launch one CTA an SM."""

    @cute.kernel
    def sparse_mla_mark(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        work = place.Work(p)

        def one_pass(first, state):
            words = ptx.min32(work.words - first, Int32(WORDS))
            every(tid, words, lambda i: ptx.sts32(base + i * 4, Int32(0)))
            ptx.sync(THREADS)
            rows = Rows(p, base, tid & 31, work.second, first << 5, words << 5)
            pasm.loop(cta + wid * ctas, p.rows, [], rows.mark, ctas * WARPS)
            ptx.sync(THREADS)
            every(tid, words, lambda i: merge(work, base, first, words, cta, i))
            ptx.sync(THREADS)
            return state

        pasm.loop(Int32(0), work.words, [], one_pass, Int32(WORDS))

    return Traced(sparse_mla_mark, threads=THREADS, smem=SMEM, min_blocks=1)


def every(tid, count, body):
    """``body`` of this thread's numbers below ``count``."""

    def one(i, state):
        body(i)
        return state

    pasm.loop(tid, count, [], one, Int32(THREADS))


def merge(work, base, first, words, cta, i):
    """Add a word of this CTA's bits. CTAs begin at different words, so as not to queue up."""
    i = i + cta * 8
    i = i - ptx.quotient(i, words) * words
    bits = ptx.lds32(base + i * 4)
    wasm.or_global_if(work.bitmap + ptx.wide(first + i, Int64(4)), bits, bits)


class Rows:
    """A lane of a warp that marks rows; the bitmap in shared memory has ``bits`` from number ``first`` on."""

    def __init__(self, p, base, lane, second, first, bits):
        self.p, self.base, self.lane = p, base, lane
        self.second, self.first, self.bits = second, first, bits

    def mark(self, row, state):
        """Mark what a row lists."""
        p = self.p
        lists = RowLists(p, row)
        lanes, places = lists.read_lengths(), lists.places()
        self.mark_list(places[0], lanes[0], p.slots1, Int32(0) - self.first)
        self.mark_list(places[1], lanes[1], p.slots2, self.second - self.first)
        return state

    def mark_list(self, start, lanes, slots, offset):
        """Mark one list."""

        def some(i, state):
            places = [i + self.lane + 32 * k for k in range(AT_ONCE)]
            indices = [ptx.ldg32_if(ptx.at(start, 4 * k), ptx.less(k, lanes), Int32(-1)) for k in places]
            for index in indices:
                wasm.mark(self.base, index, slots, offset, self.bits)
            return state

        pasm.loop(Int32(0), lanes, [], some, Int32(32 * AT_ONCE))
