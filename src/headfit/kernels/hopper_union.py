"""The prepass of packing: which keys the rows of a group have between them, and whether packing the group pays.

Belongs here: the kernel that writes the workspace ``work`` and the format of it. Launch one CTA a group of 8 rows,
before ``hopper_packed.packed``, on the same stream; the native kernel follows and takes the groups whose flag is 0.

Workspace, in int32 words, for G groups of a call and C = `capacity` entries: G flags (1: packed, 0: the native kernel
has to compute the rows; the packed kernel takes a 1 back where a key is not finite), G counts of union keys (0: not
packed), then per group C pairs (slot, with the set as bit 31; mask of the rows that have it). Entries stand in order
of the first lane that names them: set, then row, then lane. So the same lists give the same bits.

Not packed are: a row that lists a key twice, a union above a quarter of the rows' lanes or above ``CAPACITY_LIMIT``,
lists of more than `LANES_LIMIT` lanes. Lists that do not overlap cost little: a sample of each row is looked up among
the first row's keys before anything else.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import ptx
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import RowLists

THREADS = 256  # a warp a row
SLOTS = 2048  # of the hash table: never full, so that a search ends
BITS = 11
LANES_LIMIT = 2048  # of both lists of a row: what the map of positions holds
AT_ONCE = 4  # lanes of a thread whose index is read at once

KEYS = 0  # [slot of the table] the key, -1: free
POSITIONS = KEYS + 4 * SLOTS  # where it stands first
MASKS = POSITIONS + 4 * SLOTS  # rows that have it
MAP = MASKS + 4 * SLOTS  # a bit a position: some key stands there first
BEFORE = MAP + LANES_LIMIT  # keys before each word of the map
TOTALS = BEFORE + LANES_LIMIT  # of the warps
NUMBERS = TOTALS + 64
SMEM = NUMBERS + 32
# Union keys; whether packing is out; lanes of all rows; samples; samples found; keys entered; bits set in masks, as
# many as keys entered unless a row has one twice.
COUNT, OUT, LISTED, SAMPLES, FOUND, ENTERED, HELD = (NUMBERS + 4 * i for i in range(7))


def union():
    """The kernel."""

    @cute.kernel
    def sparse_mla_union(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        wid = cute.arch.make_warp_uniform(tid >> 5)
        table = Table(p, base, tid, group)
        own, first = Lists(p, (group << 3) + wid), Lists(p, group << 3)
        firsts = first.keys(tid, THREADS)
        sampled = own.key(ptx.shr((tid & 31) * own.lanes, 5))
        owns = own.keys(tid & 31, 32)
        table.clear()
        ptx.sync(THREADS)
        table.count_keys(own)
        table.insert(first, Int32(0), tid, THREADS, firsts, Int32(1))
        ptx.sync(THREADS)
        table.sample(sampled[0], wid)
        ptx.sync(THREADS)
        table.judge_sample()
        ptx.sync(THREADS)
        table.insert(own, wid, tid & 31, 32, owns, ptx.less(Int32(0), wid))
        ptx.sync(THREADS)
        table.mark()
        ptx.sync(THREADS)
        table.judge()
        table.write()

    return Traced(sparse_mla_union, threads=THREADS, smem=SMEM, min_blocks=4)


class Lists:
    """The two lists of a row; no lanes past the last row."""

    def __init__(self, p, row):
        self.p = p
        here = ptx.less(row, p.rows)
        row = ptx.pick32(here, row, Int32(0))
        lists = RowLists(p, row)
        self.lanes1 = ptx.pick32(here, lists.lanes[0], Int32(0))
        self.lanes = ptx.pick32(here, lists.lanes[0] + lists.lanes[1], Int32(0))
        self.list1, self.list2 = lists.places()

    def key(self, lane):
        """Slot of a lane with the set as bit 31, and the lane within its set; -1 for a lane without a key."""
        p = self.p
        second = ptx.less(lane, self.lanes1) ^ 1
        local = lane - ptx.pick32(second, self.lanes1, Int32(0))
        place = ptx.at(ptx.pick64(second, self.list2, self.list1), local * 4)
        index = ptx.ldg32_if(place, ptx.less(lane, self.lanes), Int32(-1))
        valid = ptx.within(index, ptx.pick32(second, p.slots2, p.slots1))
        return ptx.pick32(valid, index | (second << 31), Int32(-1)), second, local

    def keys(self, begin, stride):
        """`key` of `AT_ONCE` lanes, ``stride`` apart."""
        return [self.key(begin + stride * k) for k in range(AT_ONCE)]


class Table:
    """The hash table of a group, in shared memory."""

    def __init__(self, p, base, tid, group):
        self.p, self.base, self.tid, self.group = p, base, tid, group
        self.lane = tid & 31
        self.lanes = p.topk1 + p.topk2

    def number(self, offset):
        """One of the numbers of the group."""
        return ptx.lds32(self.base + offset)

    def clear(self):
        """An empty table."""
        free, zero = [Int32(-1)] * 4, [Int32(0)] * 4
        place = self.base + self.tid * 16
        for i in range(SLOTS // (4 * THREADS)):
            ptx.sts128(place, free, KEYS + 16 * THREADS * i)
            ptx.sts128(place, [Int32(0x7FFFFFFF)] * 4, POSITIONS + 16 * THREADS * i)
            ptx.sts128(place, zero, MASKS + 16 * THREADS * i)
        ptx.when(ptx.less(self.tid, Int32(LANES_LIMIT // 16)), lambda: ptx.sts128(place, zero, MAP))
        toolong = ptx.less(Int32(LANES_LIMIT), self.lanes)
        here = ptx.equal(self.tid, Int32(0))
        ptx.when(here, lambda: ptx.sts128(self.base, [Int32(0), toolong, Int32(0), Int32(0)], NUMBERS))
        ptx.when(here, lambda: ptx.sts128(self.base, zero, FOUND))

    def insert(self, lists, row, begin, stride, keys, flag):
        """Enter a row's keys ``begin``, ``begin + stride``, ... where ``flag``; ``keys`` are the first of them."""
        p = self.p
        each = stride * AT_ONCE
        flag = flag & (self.number(OUT) ^ 1)
        rounds = (lists.lanes - begin + (each - 1)) >> (each.bit_length() - 1)
        places, bit = (KEYS, POSITIONS, MASKS, COUNT), uasm.bit(row)

        def enter(keys):
            entered = Int32(0)
            for key, second, local in keys:
                position = ptx.pick32(second, 8 * p.topk1 + row * p.topk2, row * p.topk1) + local
                valid = ptx.equal(key, Int32(-1)) ^ 1
                one = (self.base, key, position, bit, places, BITS, at.CAPACITY_LIMIT)
                ptx.when(valid, lambda one=one: uasm.hash_enter(*one))
                entered = entered + valid
            return entered

        def all_keys():
            more = lambda i, n: [n[0] + enter(lists.keys(begin + i * each, stride))]  # noqa: E731
            entered = pasm.loop(Int32(1), rounds, [enter(keys)], more)[0]
            ptx.when(entered, lambda: uasm.shared_add(self.base + ENTERED, entered))

        ptx.when(flag, all_keys)

    def count_keys(self, own):
        """Add this row's keys to the number of all; a lane without a key counts too."""
        ptx.when(ptx.equal(self.lane, Int32(0)), lambda: uasm.shared_add(self.base + LISTED, own.lanes))

    def sample(self, key, row):
        """Look a key of each lane, spread over a row, up among those of the first row."""
        taken = ptx.less(Int32(0), row) & (ptx.equal(key, Int32(-1)) ^ 1)
        found = uasm.hash_find(self.base + KEYS, key, BITS) & taken
        samples, hits = uasm.popc(ptx.ballot(taken)), uasm.popc(ptx.ballot(found))

        def add():
            uasm.shared_add(self.base + SAMPLES, samples)
            uasm.shared_add(self.base + FOUND, hits)

        ptx.when(ptx.equal(self.lane, Int32(0)), add)

    def judge_sample(self):
        """Packing is out where fewer than half of the samples were found."""
        out = ptx.less(self.number(FOUND) * 2, self.number(SAMPLES))
        ptx.when(out & ptx.equal(self.tid, Int32(0)), lambda: ptx.sts32(self.base, Int32(1), OUT))

    def mark(self):
        """The map of first positions, and how many bits the masks have."""

        def look():
            held = Int32(0)
            for i in range(SLOTS // THREADS):
                place = self.base + self.tid * 4
                position = ptx.lds32(place, POSITIONS + 4 * THREADS * i)
                held = held + uasm.popc(ptx.lds32(place, MASKS + 4 * THREADS * i))
                used = ptx.equal(position, Int32(0x7FFFFFFF)) ^ 1
                word = self.base + MAP + ptx.shr(position, 5) * 4
                ptx.when(used, lambda w=word, x=position: uasm.shared_or(w, uasm.bit(x & 31)))
            ptx.when(held, lambda: uasm.shared_add(self.base + HELD, held))

        ptx.when(self.number(OUT) ^ 1, look)

    def judge(self):
        """Whether the group is packed: flag and count."""
        count = self.number(COUNT)
        limit = ptx.min32(at.capacity(self.p), ptx.shr(self.number(LISTED), 2))
        good = ptx.less(Int32(0), count) & (ptx.less(limit, count) ^ 1) & (self.number(OUT) ^ 1)
        self.packed = good & ptx.equal(self.number(ENTERED), self.number(HELD))
        work = at.Work(self.p)

        def tell():
            ptx.stg32_if(work.flag(self.group), self.packed, Int32(1))
            ptx.stg32_if(work.count(self.group), ptx.pick32(self.packed, count, Int32(0)), Int32(1))

        ptx.when(ptx.equal(self.tid, Int32(0)), tell)

    def write(self):
        """The entries, each at the number of keys that stand before it."""
        ptx.when(self.packed, lambda: (self.scan(), ptx.sync(THREADS, 1), self.entries()))

    def scan(self):
        """Keys before each word of the map: two words a thread, then the warps' totals."""
        words = ptx.lds64(self.base + self.tid * 8, MAP)
        counts = [uasm.popc(w) for w in words]
        own = counts[0] + counts[1]
        upto = own
        for distance in (1, 2, 4, 8, 16):
            upto = upto + uasm.from_below(upto, distance)
        last = ptx.equal(self.lane, Int32(31))
        ptx.when(last, lambda: ptx.sts32(self.base + TOTALS + (self.tid >> 5) * 4, upto))
        ptx.sync(THREADS, 1)
        before = upto - own
        for warp in range(THREADS // 32 - 1):
            total = ptx.lds32(self.base + TOTALS, 4 * warp)
            before = before + ptx.pick32(ptx.less(Int32(warp), self.tid >> 5), total, Int32(0))
        ptx.sts64(self.base + self.tid * 8, [before, before + counts[0]], BEFORE)

    def entries(self):
        """Every used slot of the table to its place in the workspace."""
        listed = at.Work(self.p).list(self.group)
        for i in range(SLOTS // THREADS):
            place = self.base + self.tid * 4
            key = ptx.lds32(place, KEYS + 4 * THREADS * i)
            position = ptx.lds32(place, POSITIONS + 4 * THREADS * i)
            mask = ptx.lds32(place, MASKS + 4 * THREADS * i)

            def put(key=key, position=position, mask=mask):
                word = self.base + ptx.shr(position, 5) * 4
                below = uasm.popc(ptx.lds32(word, MAP) & (uasm.bit(position & 31) - 1))
                rank = ptx.lds32(word, BEFORE) + below
                uasm.store64(listed + ptx.wide(rank, Int64(8)), [key, mask])

            ptx.when(ptx.equal(position, Int32(0x7FFFFFFF)) ^ 1, put)
