"""The union of lists in any order: an estimate of its size, and a hash table of its keys.

Belongs here: what a group takes whose rows do not continue one another (``hopper_union.py``); its lists are in shared
memory by then.
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import ptx
from headfit.kernels.hopper_union_place import (
    ADDED,
    BITS,
    COUNT,
    ENDS,
    KEYS,
    LANES_LIMIT,
    MARKS,
    MASKS,
    SLOTS,
    THREADS,
    TWICE,
)


class Table:
    """The lists of a group, without regard to their order.

    ``lanes``: of this warp's row, of both sets; ``limit``: the most union keys that pay.
    """

    def __init__(self, g, lanes, limit):
        self.g, self.lanes, self.limit = g, lanes, limit

    def unite(self):
        """Flag, count and entries of the group."""
        g = self.g
        ptx.when(self.too_many(), lambda: g.tell(Int32(0), Int32(0)), otherwise=self.build)

    def of(self, second):
        """Lanes and slots of a set."""
        p = self.g.p
        return ptx.pick32(second, self.lanes[1], self.lanes[0]), ptx.pick32(second, p.slots2, p.slots1)

    def too_many(self):
        """Whether the union looks larger than what pays: by the distinct keys among a fourth of all there could be.

        The margin is three standard deviations and more, so nearly nothing is lost that would be packed.
        """
        g = self.g
        marks = g.base + MARKS

        def one_set(second, state):
            lanes, slots = self.of(second)
            mine = g.base + second * 32 + g.wid * 4
            added = ptx.lds32(mine, ADDED)
            # What a row has from the one before is marked by that one.
            whole = ptx.less(Int32(LANES_LIMIT), added)
            begin = ptx.pick32(whole, g.list(second), ptx.lds32(mine, ENDS) - added * 4)
            count = ptx.pick32(whole, lanes, added)

            def note(state, word, i):
                uasm.mark_if(marks, word, second << 31, i, count, slots)
                return state

            return g.words(begin, count, state, note)

        pasm.loop(Int32(0), g.sets, [], one_set)
        ptx.sync(THREADS)
        words = ptx.lds128(marks + g.lane * 16)
        found = uasm.total(sum((uasm.popc(w) for w in words[1:]), uasm.popc(words[0])), "add")
        return ptx.less(self.limit + (self.limit >> 2) + 16, found * 4)

    def build(self):
        """The table, and from it the entries."""
        g = self.g
        self.clear()
        ptx.sync(THREADS)
        self.insert()
        ptx.sync(THREADS)
        count, twice = ptx.lds64(g.base, COUNT)
        packed = ptx.less(Int32(0), count) & (ptx.less(self.limit, count) ^ 1) & ptx.equal(twice, Int32(0))
        g.tell(packed, count)
        ptx.when(packed, lambda: (self.number(), ptx.sync(THREADS), self.write()))

    def clear(self):
        """An empty table."""
        g = self.g
        place = g.base + g.tid * 16
        for i in range(SLOTS // (4 * THREADS)):
            ptx.sts128(place, [Int32(-1)] * 4, KEYS + 16 * THREADS * i)
        for i in range(SLOTS // (8 * THREADS)):
            ptx.sts128(place, [Int32(0)] * 4, MASKS + 16 * THREADS * i)

    def insert(self):
        """Enter this warp's keys; their slots take the place of the lists."""
        g = self.g

        def one_set(second, state):
            lanes, slots = self.of(second)
            here = g.list(second)

            def room(state):
                # Where there are more than the limit, no more: at most those that all threads have in hand.
                return [ptx.less(ptx.lds32(g.base, COUNT), Int32(at.CAPACITY_LIMIT + 1))]

            def note(state, word, i):
                inside = ptx.less(i, lanes)
                flag = inside & ptx.within(word, slots) & state[0]
                offsets = (KEYS, MASKS, COUNT, TWICE)
                slot = uasm.enter_if(g.base, word | (second << 31), g.wid, flag, offsets, BITS)
                uasm.sts32_if(here + i * 4, slot, inside)
                return state

            g.words(here, lanes, [Int32(0)], note, room)
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)

    def firsts(self, second, state, note):
        """``state`` after ``note(state, first, slot, mask)`` for this warp's lanes.

        ``first``: the lane has a key, and no row before has that.
        """
        g = self.g
        lanes, _ = self.of(second)
        before = uasm.bit(g.wid) - 1

        def one(state, slot, i):
            valid = ptx.less(i, lanes) & ptx.positive(slot)
            slot = ptx.pick32(valid, slot, Int32(0))
            mask = uasm.lds16(g.base + slot * 2, MASKS)
            return note(state, valid & ptx.equal(mask & before, Int32(0)), slot, mask)

        return g.words(g.list(second), lanes, state, one)

    def number(self):
        """How many entries are this row's."""
        g = self.g

        def one_set(second, state):
            def note(state, first, slot, mask):
                return [state[0] + uasm.popc(ptx.ballot(first))]

            found = self.firsts(second, [Int32(0)], note)[0]
            ptx.when(g.first, lambda: ptx.sts32(g.base + second * 32 + g.wid * 4, found, ADDED))
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)

    def write(self):
        """This row's entries, behind those of the rows before."""
        g = self.g
        entries = g.entries()
        found = ptx.lds32(g.base + (g.lane & 15) * 4, ADDED)
        below = uasm.bit(g.lane) - 1

        def one_set(second, state):
            start = uasm.total(ptx.pick32(ptx.less(g.lane, second * 8 + g.wid), found, Int32(0)), "add")

            def note(state, first, slot, mask):
                these = ptx.ballot(first)
                number = state[0] + uasm.popc(these & below)
                key = ptx.lds32(g.base + slot * 4, KEYS)
                ptx.stg64_if(entries + ptx.wide(number, Int64(8)), [key, mask], first)
                return [state[0] + uasm.popc(these)]

            self.firsts(second, [start], note)
            return state

        pasm.loop(Int32(0), g.sets, [], one_set)
