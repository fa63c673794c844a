"""The workspace of ``hopper_pairs``, its tasks, and which query a lane of M stands for.

Belongs here: what its kernels have to agree on beyond ``hopper_wide_place.py``, whose workspace and shared memory they
share. A task is a pair of neighbouring rows and one tile of 64 out of their (row, head) pairs in that order; its keys
are those of the first row, then those of the second that the first has not, in the order of the lists.

The workspace goes on behind that of ``hopper_wide``:
counts     int32 [pairs]: keys of a pair; 0 where its rows are left to ``rest``. To the next multiple of 32
lists      int32 [pairs][twice a row's lanes]: the workspace row of each key, and `MEMBERS`: which rows list it
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_place as wide
from headfit.kernels import ptx

PAIR = 2  # rows
GROUP = 8  # rows that ``rest`` computes together, where the keys of one of them are not finite
MEMBERS = (1 << 28, 1 << 29)  # of an entry: whether the first row lists the key, whether the second does
ROW_BITS = MEMBERS[0] - 1
NO_KEY = 1 << 30  # an entry of a lane without a key, while lists are merged; its row is 0, of zeros, which is no key's


class Work(wide.Work):
    """Addresses in the workspace."""

    def __init__(self, p):
        super().__init__(p)
        self.pairs = (p.rows + 1) >> 1
        groups = (p.rows + GROUP - 1) >> 3
        self.counts = self.flags + ptx.wide((groups + 31) & ~31, Int64(4))
        self.lists = self.counts + ptx.wide((self.pairs + 31) & ~31, Int64(4))

    def keys_of(self, pair):
        """Address of a pair's number of keys."""
        return self.counts + ptx.wide(pair, Int64(4))

    def list(self, pair):
        """Address of a pair's first entry."""
        return self.lists + ptx.wide(pair, ptx.wide(self.p.topk1 + self.p.topk2, Int64(4 * PAIR)))


class Query(at.Query):
    """The row and head of lane ``m`` of a task's tile."""

    GROUP = PAIR


class Tasks(wide.Tasks):
    """The tasks of a CTA: every ``ctas``-th, beginning with its own number; none where there is no room for keys."""

    def __init__(self, p, cta, ctas):
        self.p, self.cta, self.ctas = p, cta, ctas
        self.per_row = (PAIR * p.h_q + at.LANES - 1) >> 6  # of a pair
        self.work = Work(p)
        self.fits = self.work.fits()
        count = ptx.quotient(self.work.pairs * self.per_row - cta + ctas - 1, ctas)
        self.count = ptx.pick32(self.fits, count, Int32(0))

    def lanes(self, i):
        """Keys of the i-th task, twice: a pair has one list."""
        keys = ptx.ldg32_if(self.work.keys_of(self.place(i)[0]), ptx.less(i, self.count), Int32(0))
        return keys, keys

    def query(self, i, m):
        """The query of lane ``m`` of the i-th task's tile."""
        return Query(self, *self.place(i), m)
