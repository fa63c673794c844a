"""Shared memory of the union prepass, and what both of its ways to a union ask of a group.

Belongs here: where lists, numbers and the table stand. Does not belong here: comparing (``hopper_union.py``), entering
(``hopper_union_table.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx

THREADS = 256  # a warp a row
AT_ONCE = 4  # words of a list that a lane has under way
LANES_LIMIT = 768  # of both lists of a row: what there is room for
PITCH = 4 * (LANES_LIMIT + 4)  # bytes of a row; the second list begins at a multiple of 16
SLOTS = 4096  # of the hash table: never full, so that a search ends
BITS = 12

LISTS = 0  # [row] both lists; then slots of the table in place of indices
KEYS = LISTS + at.GROUP * PITCH  # [slot of the table] the key, -1: free
MASKS = KEYS + 4 * SLOTS  # [slot of the table] 16 bits: rows that have it
ENDS = MASKS + 2 * SLOTS  # [set][row] address behind the list's last key
COUNTS = ENDS + 64  # [set][row] its keys
LANES = COUNTS + 64  # [row] of both sets
ADDED = LANES + 32  # [set][row] the keys that no row before it has; from here on cleared
COUNT = ADDED + 64  # keys in the table
TWICE = COUNT + 4  # not 0: a row has a key twice
MARKS = COUNT + 16  # 4096 bits
SMEM = MARKS + 512


class Group:
    """A group of rows, as a thread of its CTA sees it; ``wid`` is the thread's row within the group."""

    def __init__(self, p, base, tid, wid, group):
        self.p, self.base, self.tid, self.wid, self.group = p, base, tid, wid, group
        self.lane = tid & 31
        self.first = ptx.equal(self.lane, Int32(0))
        self.sets = ptx.less(Int32(0), p.topk2) + 1
        self.pitch = ((p.topk1 + 3) >> 2) << 4  # of the sets within a row
        self.own = base + wid * PITCH

    def clear(self):
        """What is added to is 0; before the first barrier."""
        here = ptx.less(self.tid, Int32((SMEM - ADDED) // 16))
        ptx.when(here, lambda: ptx.sts128(self.base + self.tid * 16, [Int32(0)] * 4, ADDED))

    def list(self, second):
        """Address of this warp's list of a set."""
        return self.own + second * self.pitch

    def words(self, begin, count, state, note, first_of_round=lambda state: state):
        """``state`` after ``note(state, word, i)`` for the words from ``begin`` on; it is called for some behind them.

        ``first_of_round(state)`` is called before every `AT_ONCE` of them.
        """

        def some(i, state):
            state = first_of_round(state)
            first = i * (32 * AT_ONCE) + self.lane
            words = [ptx.lds32(begin + first * 4, 128 * k) for k in range(AT_ONCE)]
            for k, word in enumerate(words):
                state = note(state, word, first + 32 * k)
            return state

        return pasm.loop(Int32(0), (count + (32 * AT_ONCE - 1)) >> 7, state, some)

    def entries(self):
        """Address of the group's entries in the workspace."""
        return at.Work(self.p).list(self.group)

    def tell(self, packed, count):
        """The group's flag and number of union keys to the workspace."""
        work = at.Work(self.p)

        def write():
            ptx.stg32_if(work.flag(self.group), packed, Int32(1))
            ptx.stg32_if(work.count(self.group), ptx.pick32(packed, count, Int32(0)), Int32(1))

        ptx.when(ptx.equal(self.tid, Int32(0)), write)
