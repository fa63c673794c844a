"""The workspace and the shared memory of ``hopper_wide``, its tasks, and which query a lane of M stands for.

Belongs here: what its kernels, and the roles of the last one, have to agree on. A task is a row and one tile of 64 of
its heads; the keys of a row are its first list's and then its second's, in tiles of 48.

The slots of both caches are numbered together, the second cache's from a multiple of 32 on. Each slot that any row
lists is dequantised once, to a row of 512 bf16 in the workspace; in which order does not matter.

Workspace, in this order; ``p.splits`` is its room, in keys:
count      int32 and 124 bytes of nothing: listed slots; cleared before
bitmap     int32 [a word for 32 slots, words to the next multiple of 32]: which slots are listed; cleared before
table      int32 [a slot, to that multiple of 1024]: the row of each listed slot; others were never written. Where
           `hopper_wide_spread` notes it, `NOT_FINITE` is set for keys that are not
rows       bf16 [`ZERO_ROWS` + room][512]: zeros, for lanes without a key, then the keys
flags      int32 [groups of 8 rows]: 1: computed; 0: there is no room for the keys, the rows are left to ``rest``
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import ptx
from headfit.kernels.hopper_rows import RowLists, lanes_of

ROW_BYTES = 1024
ZERO_ROWS = 64  # several, since reads of one row from everywhere would queue up
COUNT_BYTES = 128
NOT_FINITE = -(1 << 31)  # in the table, where `hopper_wide_spread` notes it
COPYING = 3  # warps of the loading warpgroup that copy, 16 keys of a tile each; the fourth tells them what
STEP = at.TILE // COPYING  # keys

# Shared memory is that of the packed kernel, but for the records of its tasks. Those of two stages' locations stand
# among them, the third's behind everything.
MASK_BYTES = 16  # of a stage; of two rows in ``hopper_pairs``, here of one
MASK = at.TASK  # [stage][row] bit k: the tile has a key k of this row
KEYS = MASK + MASK_BYTES * at.STAGES  # [parity of the task] lanes of its row, at least 1
LOCATED = KEYS + 8  # [stage] barriers: it is known where the keys are
LOADED = LOCATED + 8 * at.STAGES  # [stage] the keys are there
Q_LOADED = LOADED + 8 * at.STAGES  # a task's queries are there
LOCATIONS = Q_LOADED + 8  # [stage] [16 keys][key & 3][key / 4 of 16] row in the workspace, -1: not copied
LOCATIONS_BYTES = 4 * at.TILE
LAST_STAGE_GAP = at.SMEM - (LOCATIONS + 2 * LOCATIONS_BYTES)
LISTED = at.SMEM + LOCATIONS_BYTES  # [stage][row] the masks, before the computing warps may have them
SMEM = LISTED + MASK_BYTES * at.STAGES


def locations(stage):
    """Where the locations of a stage's keys stand, behind the base."""
    return LOCATIONS + stage * LOCATIONS_BYTES + (stage >> 1) * LAST_STAGE_GAP


class Work:
    """Addresses in the workspace."""

    def __init__(self, p):
        self.p = p
        self.words1 = (p.slots1 + 31) >> 5
        self.words = self.words1 + ((p.slots2 + 31) >> 5)
        self.padded = (self.words + 31) & ~31
        self.count = p.work
        self.bitmap = p.work + Int64(COUNT_BYTES)
        self.table = self.bitmap + ptx.wide(self.padded, Int64(4))
        self.rows = self.table + ptx.wide(self.padded, Int64(128))
        self.flags = self.rows + ptx.wide(p.splits + ZERO_ROWS, Int64(ROW_BYTES))

    @property
    def second(self):
        """The number of the second cache's first slot."""
        return self.words1 << 5

    def fits(self):
        """Whether there was room for all keys; once they are counted."""
        return ptx.less(self.p.splits, wasm.load32(self.count)) ^ 1


def lanes_of_row(p, row, here):
    """Lanes of the first list of a row, and of both; none where there is no such row."""
    b = ptx.divide(ptx.pick32(here, row, Int32(0)), p.magic_s, p.shift_s)
    first, second = lanes_of(p.len1, b, p.topk1), lanes_of(p.len2, b, p.topk2)
    return ptx.pick32(here, first, Int32(0)), ptx.pick32(here, first + second, Int32(0))


def at_least_one(lanes):
    """What a row is computed from: where it has no lanes, from one without a key."""
    return ptx.max32(lanes, Int32(1))


class Tasks:
    """The tasks of a CTA: every ``ctas``-th, beginning with its own number; none where there is no room for keys."""

    def __init__(self, p, cta, ctas):
        self.p, self.cta, self.ctas = p, cta, ctas
        self.per_row = (p.h_q + 63) >> 6
        self.work = Work(p)
        count = ptx.quotient(p.rows * self.per_row - cta + ctas - 1, ctas)
        self.fits = self.work.fits()
        self.count = ptx.pick32(self.fits, count, Int32(0))

    def place(self, i):
        """Row and first head of the i-th task of this CTA."""
        number = self.cta + i * self.ctas
        row = ptx.quotient(number, self.per_row)
        return row, (number - row * self.per_row) << 6

    def lanes(self, i):
        """`lanes_of_row` of the i-th task's row."""
        return lanes_of_row(self.p, self.place(i)[0], ptx.less(i, self.count))

    def lists(self, i):
        """The lists of the i-th task's row."""
        return RowLists(self.p, self.place(i)[0])

    def query(self, i, m):
        """The query of lane ``m`` of the i-th task's tile."""
        return Query(self, *self.place(i), m)


class Query(at.Query):
    """The row and head of lane ``m`` of a task's tile."""

    member = 0  # of a group of rows, of which there is none

    def __init__(self, tasks, row, head0, m):
        p = tasks.p
        self.valid = ptx.less(head0 + m, p.h_q)
        self.head = ptx.pick32(self.valid, head0 + m, Int32(0))
        self.b = ptx.divide(row, p.magic_s, p.shift_s)
        self.s = row - self.b * p.s_q
