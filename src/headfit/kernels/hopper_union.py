"""The prepass of packing: which keys the rows of a group have between them, and whether packing the group pays.

Belongs here: the kernel that compares the lists of neighbouring rows, and what it says of them. Does not belong here:
where the keys of all groups stand in the end (``hopper_expand.py``). Launch one CTA a group of 8 rows, before
``hopper_expand.expand``, on the same stream.

Lists that overlap enough for packing continue one another: the keys of a row, in their order, are those of the row
before from one of the first 32 on, then new ones. Windows do that, whatever their slots are, and so do lists of all
keys so far. Then the keys of a set, as rows add them, are a sequence; each row has the interval of it that ends where
the sequence ended after that row, and two numbers a row say everything: its keys, and how many of them are new. All
keys are new in a row that does not continue the one before. The first row of a group is compared with the last of the
group before as well, so that neighbours share keys where both are packed.

A group pays where its rows add at most a quarter of their lanes, and at most ``CAPACITY_LIMIT`` keys, even if the group
before does not pay; no list may have lanes without a key between others, nor both more than `LANES_LIMIT` lanes.

In the workspace (``hopper_packed_place.py``) a group has, from here: its flag, 1 where it pays; in ``sums`` for either
set the keys that it adds to those of the group before, and those it has if that is not packed; in ``rows`` for either
set, row after row: lane of the first key, keys, how many of them the row before has not, and how many the rows behind
it in the group add.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import hopper_union_place as place
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import RowLists
from headfit.kernels.hopper_union_place import LANES_LIMIT, PITCH, THREADS

NONE = 0x7FFFFFFF
# In place of its lanes, of a list that has some without a key between others: below any sum of lanes.
HOLES = -(1 << 20)


def union():
    """The kernel."""

    @cute.kernel
    def sparse_mla_union(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        base = pasm.again(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()))
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        g = place.Group(p, base, tid, wid, group)
        toolong = ptx.less(Int32(LANES_LIMIT), p.topk1 + p.topk2)
        leads = ptx.less(g.wid, Int32(1))
        ptx.when(toolong, lambda: ptx.when(leads, lambda: pays_not(g)), otherwise=lambda: compare(g, leads))

    return Traced(sparse_mla_union, threads=THREADS, smem=place.SMEM, min_blocks=4)


def pays_not(g):
    """Say so of a group whose lists are not looked at."""
    work = at.Work(g.p)
    ptx.stg32_if(work.flag(g.group), Int32(0), g.first)
    ptx.stg32_if(work.sums(g.group) + ptx.wide(g.lane, Int64(4)), Int32(-1), ptx.less(g.lane, Int32(4)))


def compare(g, leads):
    """All that the workspace gets of a group."""
    row = Row(g)
    row.copy()
    row.know_lengths()
    ptx_async.wait_copies()
    ptx.sync_warp()
    row.examine()
    ptx.sync(THREADS)
    ptx.when(leads ^ 1, row.compare)
    ptx.sync(THREADS)
    ptx.when(leads, lambda: tell(g))


class Row(RowLists):
    """The two lists of this warp's row; no lanes before the first row and past the last. Lengths are read later."""

    def __init__(self, g):
        row = (g.group << 3) + g.wid - 1
        self.g, self.here = g, ptx.within(row, g.p.rows)
        super().__init__(g.p, ptx.pick32(self.here, row, Int32(0)))

    def copy(self):
        """Begin to copy both lists to shared memory: whole, so that nothing waits for the lengths."""
        g, p = self.g, self.p
        for source, topk, target in zip(self.places(), (p.topk1, p.topk2), (g.own, g.own + g.pitch), strict=True):
            size = ptx.pick32(self.here, topk, Int32(0)) * 4

            def pieces(width, source=source, target=target, size=size):
                begin = g.lane * width

                def one(i, state):
                    off = i * (32 * width) + begin
                    ptx_async.copy_async(target + off, ptx.at(source, off), width)
                    return state

                pasm.loop(Int32(0), (size - begin + (32 * width - 1)) >> (32 * width).bit_length() - 1, [], one)

            odd = (ptx.words(source)[0] | size) & 15
            ptx.when(odd, lambda f=pieces: f(4), otherwise=lambda f=pieces: f(16))

    def know_lengths(self):
        """Lanes of each list; none where there is no row."""
        self.lanes = [ptx.pick32(self.here, n, Int32(0)) for n in self.read_lengths()]

    def examine(self):
        """Where the keys of each list begin, and how many there are; none in a list with holes."""
        g, p = self.g, self.p

        def one_set(second, state):
            lanes = ptx.pick32(second, self.lanes[1], self.lanes[0])
            slots = ptx.pick32(second, p.slots2, p.slots1)
            here = g.list(second)
            high = g.words(here, lanes, [Int32(0)], lambda h, w, i: [uasm.highest_if(h[0], w, i, lanes)])[0]

            def look(state):
                found = [Int32(0), Int32(NONE), Int32(-1)]
                found = g.words(here, lanes, found, lambda f, w, i: uasm.note_key(f, w, i, lanes, slots))
                kinds = ("add", "min", "max")
                count, first, last = (uasm.total(x, kind) for x, kind in zip(found, kinds, strict=True))
                begin = last + 1 - count
                holes = ptx.less(first, begin)
                return [begin, ptx.pick32(holes, Int32(0), count), ptx.pick32(holes, Int32(HOLES), lanes)]

            some_have_none = ptx.ballot(uasm.outside(high, slots))
            begin, count, listed = pasm.choose(some_have_none, [Int32(0), lanes, lanes], look)
            ptx.when(g.first, lambda: ptx.sts128(g.told(second), [begin, count, count, listed]))
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)

    def compare(self):
        """How many keys each list adds to those of the row before."""
        g = self.g

        def one_set(second, state):
            mine = g.told(second)
            begin, count = ptx.lds64(mine)
            begin_before, before = ptx.lds64(mine, -32)
            begin = g.list(second) + begin * 4
            begin_before = g.list(second) - PITCH + begin_before * 4
            same = ptx.equal(ptx.lds32(begin), ptx.lds32(begin_before + g.lane * 4))
            skipped = uasm.lowest(ptx.ballot(same & ptx.less(g.lane, before)))
            common = before - skipped
            may = ptx.less(skipped, Int32(32)) & (ptx.less(count, common) ^ 1)
            shift = begin_before + skipped * 4 - begin

            def look(state):
                def note(bits, word, i):
                    return [uasm.difference_if(bits[0], word, ptx.lds32(begin + shift + i * 4), i, common)]

                different = ptx.ballot(g.words(begin, common, [Int32(0)], note)[0])
                return [ptx.pick32(different, count, count - common)]

            added = pasm.choose(may, [count], look)[0]
            ptx.when(g.first, lambda: ptx.sts32(mine, added, 8))
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)


def tell(g):
    """Flag, sums and rows, by one warp: lanes 0 to 7 have the rows of the first set, 8 to 15 those of the second."""
    second, row = (g.lane >> 3) & 1, g.lane & 7
    inside = ptx.less(g.lane, Int32(16))
    present = inside & ptx.less(second, g.sets)
    told = ptx.lds128(g.base + row * 32 + second * 16, place.TOLD + 32)
    begin, count, added, lanes = (ptx.pick32(present, x, Int32(0)) for x in told)
    with_behind = added
    for n in (1, 2, 4):
        with_behind = uasm.add_from_above(with_behind, n)
    behind = with_behind - added
    fresh = behind + count
    both = uasm.from_lane(fresh, Int32(0)) + uasm.from_lane(fresh, Int32(8))
    limit = ptx.min32(Int32(at.CAPACITY_LIMIT), uasm.total(lanes, "add") >> 2)
    pays = ptx.less(Int32(0), both) & (ptx.less(limit, both) ^ 1)
    work = at.Work(g.p)
    ptx.stg32_if(work.flag(g.group), pays, g.first)
    sums = [ptx.pick32(pays, x, Int32(-1)) for x in (with_behind, fresh)]
    heads = inside & ptx.equal(row, Int32(0))
    ptx.stg64_if(work.sums(g.group) + ptx.wide(second, Int64(8)), sums, heads)
    place_of_row = work.rows(g.group) + ptx.wide(g.lane, Int64(16))
    ptx.when(inside, lambda: ptx.stg128(place_of_row, [begin, count, added, behind]))
