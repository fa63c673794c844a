"""The merging kernel of ``hopper_pairs``: the keys that two neighbouring rows have between them, each once.

Belongs here: the kernel that makes a list for each pair out of its rows' lists and the table of ``hopper_wide_spread``.
Launch it behind that, a CTA for 8 rows.

The keys of a pair are those of its first row, then those of the second that the first has not, both in the order of
the lists. A key that the list of a row names twice cannot be told from its twin: then none of the 8 rows' keys are put
together, and the second row's stand behind the first's. Keys that are not finite would reach the row that does not
list them (0 x NaN): the 8 rows are left to ``rest``. Which keys meet is found by bitmaps in shared memory, by their
rows in the workspace; these are others in each launch, but nothing that is written depends on them.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_pairs_asm as masm
from headfit.kernels import hopper_pairs_place as place
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_place as wide
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_expand_sums import scan
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import RowLists

WARPS = 4  # of a pair
PAIRS = place.GROUP // place.PAIR
THREADS = 32 * WARPS * PAIRS
LANES_LIMIT = 1536  # of a row
CHUNKS = LANES_LIMIT // 32
AT_ONCE = 5  # chunks of 32 lanes whose keys a warp has under way: all of 640 lanes
RANGE = 16384  # rows of the workspace that a bitmap has; where there are more, several passes meet

# Shared memory of a pair
BITMAPS = 0  # [row] bit k: the row lists key k of the range
BITMAP_BYTES = RANGE // 8
LISTS = BITMAPS + 2 * BITMAP_BYTES  # [row][lane] entries, `NO_KEY` where the lane has none
LIST_BYTES = 4 * LANES_LIMIT
MASKS = LISTS + 2 * LIST_BYTES  # [row][chunk] bit k: lane k of the chunk has a key
MASK_BYTES = 4 * CHUNKS
REST = MASKS + 2 * MASK_BYTES  # [chunk] the same of the second row, where the first has not the key
BYTES = REST + MASK_BYTES
SMEM = PAIRS * BYTES


def merge():
    """The kernel."""

    @cute.kernel
    def sparse_mla_merge_pairs(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        base = pasm.again(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()))
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        work = place.Work(p)
        first = ptx.equal(tid, Int32(0))

        def leave():
            ptx.stg32_if(work.flags + ptx.wide(group, Int64(4)), Int32(0), first)

        ptx.when(work.fits(), lambda: join(work, base, group, wid, tid & 31, first), leave)

    return Traced(sparse_mla_merge_pairs, threads=THREADS, smem=SMEM, min_blocks=3)


def join(work, base, group, wid, lane, first):
    """All that the workspace gets of a group of 8 rows."""
    pair = Pair(work, base, group, wid, lane)
    pair.clear()
    ptx.sync(THREADS)
    broken, twice = [a | b for a, b in zip(pair.look_up(0), pair.look_up(1), strict=True)]
    broken = ptx.sync_or(broken, THREADS)
    pair.meet(Int32(0))

    def further(begin, state):
        ptx.sync(THREADS)
        pair.clear()
        ptx.sync(THREADS)
        again = pair.mark(0, begin) | pair.mark(1, begin)
        ptx.sync(THREADS)
        pair.meet(begin)
        return [state[0] | again]

    end = wasm.load32(work.count) + wide.ZERO_ROWS
    twice = pasm.loop(Int32(RANGE), end, [twice], further, Int32(RANGE))[0]
    pair.find_rest()
    twice = ptx.sync_or(twice, THREADS)
    pair.write(twice, broken)
    ptx.stg32_if(work.flags + ptx.wide(group, Int64(4)), broken ^ 1, first)


class Pair:
    """A lane of one of the four warps of a pair."""

    def __init__(self, work, base, group, wid, lane):
        self.work, self.p, self.lane = work, work.p, lane
        self.warp, number = wid & (WARPS - 1), ptx.shr(wid, 2)
        self.pair = group * PAIRS + number
        self.base = base + number * BYTES
        self.bitmaps, self.lists, self.masks = (
            [self.base + first + size * row for row in range(2)]
            for first, size in ((BITMAPS, BITMAP_BYTES), (LISTS, LIST_BYTES), (MASKS, MASK_BYTES))
        )
        self.rows = [self.pair * 2 + row for row in range(2)]
        self.lanes = [wide.lanes_of_row(self.p, row, ptx.less(row, self.p.rows)) for row in self.rows]

    def clear(self):
        """No bits."""
        nothing = [Int32(0)] * 4
        for i in range(2 * BITMAP_BYTES // (16 * 32 * WARPS)):
            ptx.sts128(self.base + (self.warp * 32 + self.lane) * 16, nothing, BITMAPS + i * (16 * 32 * WARPS))

    def chunks(self, row, body, state, at_once=1):
        """``body(first, state)`` for this warp's chunks of a row, ``at_once`` of them, ``WARPS`` apart."""
        count = (self.lanes[row][1] + 31) >> 5
        return pasm.loop(self.warp, count, state, body, Int32(WARPS * at_once))

    def look_up(self, row):
        """Write down the entries of a row's list, and which keys of the first range they are.

        Whether one is not finite; whether one stands there twice.
        """
        p, work = self.p, self.work
        first, both = self.lanes[row]
        here = ptx.less(self.rows[row], p.rows)
        place1, place2 = RowLists(p, ptx.pick32(here, self.rows[row], Int32(0))).places()
        place2 = place2 - ptx.wide(first, Int64(4))

        def some(chunk, state):
            ks = [(chunk + WARPS * j) * 32 + self.lane for j in range(AT_ONCE)]
            words = []
            for k in ks:
                in_first = ptx.less(k, first)
                source = ptx.at(ptx.pick64(in_first, place1, place2), k * 4)
                index = ptx.ldg32_if(source, ptx.less(k, both), Int32(-1))
                valid = ptx.within(index, ptx.pick32(in_first, p.slots1, p.slots2))
                number = index + ptx.pick32(in_first, Int32(0), work.second)
                words.append(ptx.ldg32_if(work.table + ptx.wide(number, Int64(4)), valid, Int32(place.NO_KEY)))
            broken, twice = state
            for k, word in zip(ks, words, strict=True):
                entry = word & ~wide.NOT_FINITE
                broken = broken | (word ^ entry)
                valid = ptx.less(entry, Int32(place.NO_KEY))
                mask = ptx.ballot(valid)
                inside = ptx.less(k - self.lane, both)
                wasm.sts32_if(self.lists[row] + k * 4, entry, inside)
                wasm.sts32_if(self.masks[row] + (k >> 5) * 4, mask, inside & ptx.equal(self.lane, Int32(0)))
                twice = twice | masm.mark_once(self.bitmaps[row], entry, RANGE)
            return [broken, twice]

        return self.chunks(row, some, [Int32(0)] * 2, AT_ONCE)

    def mark(self, row, begin):
        """Which keys of a range a row lists; whether one stands there twice."""

        def some(chunk, state):
            entry = ptx.lds32(self.lists[row] + (chunk * 32 + self.lane) * 4) & place.ROW_BITS
            return [state[0] | masm.mark_once(self.bitmaps[row], entry - begin, RANGE)]

        return self.chunks(row, some, [Int32(0)])[0]

    def meet(self, begin):
        """Note with each key of a range that the other row lists it."""
        for row in range(2):

            def some(chunk, state, row=row):
                entry_at = self.lists[row] + (chunk * 32 + self.lane) * 4
                entry = ptx.lds32(entry_at)
                found = masm.marked(self.bitmaps[1 - row], (entry & place.ROW_BITS) - begin, RANGE)
                wasm.sts32_if(entry_at, entry | place.MEMBERS[1 - row], found)
                return state

            self.chunks(row, some, [])

    def find_rest(self):
        """Which keys of the second row the first has not."""

        def some(chunk, state):
            entry = ptx.lds32(self.lists[1] + (chunk * 32 + self.lane) * 4)
            left = ptx.ballot(ptx.less(entry, Int32(place.MEMBERS[0])))  # neither has the bit nor is `NO_KEY`
            wasm.sts32_if(self.base + REST + chunk * 4, left, ptx.equal(self.lane, Int32(0)))
            return state

        self.chunks(1, some, [])

    def write(self, twice, broken):
        """The pair's list and its length."""
        target = self.work.list(self.pair)
        here = ptx.less(self.rows[0], self.p.rows)
        kept = ptx.pick32(twice, Int32(place.ROW_BITS), Int32(place.ROW_BITS | place.MEMBERS[1]))
        rest = ptx.pick32(twice, self.masks[1], self.base + REST)
        done = self.write_row(0, self.masks[0], target, kept, place.MEMBERS[0])
        all_of = done + self.write_row(1, rest, ptx.at(target, done * 4), Int32(place.ROW_BITS), place.MEMBERS[1])
        leads = here & ptx.equal(self.warp, Int32(0)) & ptx.equal(self.lane, Int32(0))
        ptx.stg32_if(self.work.keys_of(self.pair), ptx.pick32(broken, Int32(0), all_of), leads)

    def write_row(self, row, masks, target, kept, member):
        """Entries of a row where its masks say so, one behind the other; how many."""
        count = (self.lanes[row][1] + 31) >> 5
        sums, total = [], Int32(0)
        for half in range(2):
            chunk = self.lane + 32 * half
            bits = uasm.popc(masm.lds32_if(masks + chunk * 4, ptx.less(chunk, count)))
            up_to = scan(bits)
            sums.append(total + up_to - bits)
            total = total + uasm.from_lane(up_to, Int32(31))

        def some(chunk, state):
            mask = ptx.lds32(masks + chunk * 4)
            before = [uasm.from_lane(x, chunk & 31) for x in sums]
            before = ptx.pick32(ptx.less(chunk, Int32(32)), *before)
            before = before + uasm.popc(mask & ((Int32(1) << self.lane) - 1))
            entry = ptx.lds32(self.lists[row] + (chunk * 32 + self.lane) * 4)
            flag = pasm.shift_right(mask, self.lane) & 1
            ptx.stg32_if(ptx.at(target, before * 4), (entry & kept) | member, flag)
            return state

        self.chunks(row, some, [])
        return total
