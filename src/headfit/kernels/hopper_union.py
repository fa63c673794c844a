"""The prepass of packing: which keys the rows of a group have between them, and whether packing the group pays.

Belongs here: the kernel that writes the workspace ``work``, the format of it, and the union of lists that continue one
another. Does not belong here: the union of other lists (``hopper_union_table.py``). Launch one CTA a group of 8 rows,
before ``hopper_packed.packed``, on the same stream; the native kernel follows and takes the groups whose flag is 0.

Workspace, in int32 words, for G groups of a call and C = `capacity` entries: G flags (1: packed, 0: the native kernel
has to compute the rows; the packed kernel takes a 1 back where a key is not finite), G counts of union keys (0: not
packed), then per group C pairs (slot, with the set as bit 31; mask of the rows that have it). Entries stand in order
of the first lane that names them: set, then row, then lane. So the same lists give the same bits.

Nearly all lists that overlap enough continue one another: the keys of a row, in their order, are those of the row
before from one of the first 32 on, then new ones. Windows do that, whatever their slots are, and so do lists of all
keys so far. Then the union of a set is a sequence, each row has the interval of it that ends where the sequence ended
after that row, and two numbers a row say everything: its keys, and how many of them are new. All keys are new in a row
that does not continue the one before. Should that come to more than pays, or should a list have lanes without a key
between others, the table decides.

Packed is a group whose union is at most a quarter of its rows' lanes and at most ``CAPACITY_LIMIT``, of lists of at
most `LANES_LIMIT` lanes. A key that a row lists twice has two entries, and so may one of a row that does not continue
the one before; through the table no group is packed that has a row with a key twice.
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
from headfit.kernels.hopper_union_place import ADDED, COUNTS, ENDS, LANES, LANES_LIMIT, THREADS
from headfit.kernels.hopper_union_table import Table

HOLES = 4000  # keys of a list that has lanes without a key between others: more than pay, whatever is shared
NONE = 0x7FFFFFFF


def union():
    """The kernel."""

    @cute.kernel
    def sparse_mla_union(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        base = pasm.again(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()))
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        ptx_async.start_dependents()
        g = place.Group(p, base, tid, wid, group)
        toolong = ptx.less(Int32(LANES_LIMIT), p.topk1 + p.topk2)
        ptx.when(toolong, lambda: g.tell(Int32(0), Int32(0)), otherwise=lambda: unite(g))

    return Traced(sparse_mla_union, threads=THREADS, smem=place.SMEM, min_blocks=4)


def unite(g):
    """Flag, count and entries of a group."""
    row = Row(g)
    row.copy()
    g.clear()
    row.know_lengths()
    uasm.wait_copies()
    row.examine()
    ptx.sync(THREADS)
    row.compare()
    ptx.sync(THREADS)
    added1, count, listed = totals(g)
    limit = ptx.min32(at.capacity(g.p), ptx.shr(listed, 2))
    packed = ptx.less(Int32(0), count) & (ptx.less(limit, count) ^ 1)

    def entries():
        g.tell(Int32(1), count)
        write(g, added1, count)

    ptx.when(packed, entries, otherwise=Table(g, row.lanes, limit).unite)


class Row(RowLists):
    """The two lists of this warp's row; no lanes past the last row. The lengths are read after the lists."""

    def __init__(self, g):
        row = (g.group << 3) + g.wid
        self.g, self.here = g, ptx.less(row, g.p.rows)
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
                    uasm.copy_async(target + off, ptx.at(source, off), width)
                    return state

                pasm.loop(Int32(0), (size - begin + (32 * width - 1)) >> (32 * width).bit_length() - 1, [], one)

            odd = (ptx.words(source)[0] | size) & 15
            ptx.when(odd, lambda f=pieces: f(4), otherwise=lambda f=pieces: f(16))

    def know_lengths(self):
        """Lanes of each list; none past the last row."""
        self.lanes = [ptx.pick32(self.here, n, Int32(0)) for n in self.read_lengths()]

    def examine(self):
        """Where the keys of each list begin and end."""
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
                return [begin, ptx.pick32(ptx.less(first, begin), Int32(HOLES), count)]

            some_have_none = ptx.ballot(uasm.outside(high, slots))
            begin, count = pasm.choose(some_have_none, [Int32(0), lanes], look)

            def tell():
                mine = g.base + second * 32 + g.wid * 4
                ptx.sts32(mine, here + (begin + count) * 4, ENDS)
                ptx.sts32(mine, count, COUNTS)

            ptx.when(g.first, tell)
            return state

        both = self.lanes[0] + self.lanes[1]
        ptx.when(g.first, lambda: ptx.sts32(g.base + g.wid * 4, both, LANES))
        pasm.loop(Int32(0), g.sets, [], one_set)

    def compare(self):
        """How many keys each list adds to those of the row before."""
        g = self.g

        def one_set(second, state):
            mine = g.base + second * 32 + g.wid * 4
            count, before = ptx.lds32(mine, COUNTS), ptx.lds32(mine, COUNTS - 4)
            begin = ptx.lds32(mine, ENDS) - count * 4
            # The first row reads no further than its own list, and finds nothing.
            begin_before = ptx.pick32(g.wid, ptx.lds32(mine, ENDS - 4) - before * 4, begin)
            before = ptx.pick32(g.wid, before, Int32(0))
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
            ptx.when(g.first, lambda: ptx.sts32(mine, added, ADDED))
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)


def totals(g):
    """Of all rows: keys added to the first set, to both; lanes."""
    added = ptx.lds32(g.base + (g.lane & 15) * 4, ADDED)
    lanes = ptx.lds32(g.base + (g.lane & 7) * 4, LANES)
    low, zero = ptx.less(g.lane, Int32(8)), Int32(0)
    both = ptx.pick32(ptx.less(g.lane, Int32(16)), added, zero)
    return [uasm.total(x, "add") for x in (ptx.pick32(low, added, zero), both, ptx.pick32(low, lanes, zero))]


def write(g, added1, count):
    """The entries of sets whose rows continue one another."""
    listed = g.entries()

    def entry(i, state):
        number = g.tid + i * THREADS
        second = ptx.less(number, added1) ^ 1
        rows = g.base + second * 32
        ends = ptx.lds128(rows, ADDED) + ptx.lds128(rows, ADDED + 16)
        counts = ptx.lds128(rows, COUNTS) + ptx.lds128(rows, COUNTS + 16)
        mask, behind = uasm.covering(ends, counts, number - ptx.pick32(second, added1, Int32(0)))
        end = ptx.lds32(rows + uasm.lowest(mask) * 4, ENDS)
        key = ptx.lds32(end - behind * 4, -4) | (second << 31)
        ptx.stg64(listed + ptx.wide(number, Int64(8)), [key, mask])
        return state

    pasm.loop(Int32(0), (count - g.tid + (THREADS - 1)) >> 8, [], entry)
