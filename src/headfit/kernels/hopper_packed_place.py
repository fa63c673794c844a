"""The workspace and the shared memory of packing, its tasks, and which query a lane of M stands for.

Belongs here: what the kernels of packing, and the roles of the packed one, have to agree on. ``GROUP`` rows make a
group; a task is a group and one tile of 64 lanes out of its (row, head) pairs in that order.

Keys are dequantised once for all rows that list them: those of each set stand in one sequence, in the order in which
the rows of packed groups add them, and a row has an interval of it (``hopper_union.py``). ``CHUNK`` neighbours of a
sequence make a chunk, as it lies in global and in shared memory: bf16 [64 dims a plane][key], with the 128-byte
swizzle. A group's keys are the chunks of its interval of the first set, then those of the second.

Workspace, for G groups, G up to the next multiple of 64 (`Work`), in this order:
flags      int32 [G]       1: packed, 0: the native kernel has to compute the rows
sums       int32 [G][4]    of either set: keys that the group adds behind the group before, and all; -1: does not pay
rows       int32 [G][64]   [set][row]: lane of the first key, keys, how many of them the row before has not, and how
                           many the group's rows behind it add
groups     int32 [G][64]   where the flag is 1: keys (8 a chunk), chunks of the first set, first chunk of either set,
                           [row]: begin and end of its interval of the first set, and of the second, counted from the
                           first key of the group's first chunk, the second set's behind the chunks of the first
sequences  bf16            of the first set, then of the second: `Work.room` keys each
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import ptx

GROUP = 8  # rows that share a union of keys: always, whatever the heads, so that a head's bits do not depend on them
LANES = 64  # of M
CHUNK = 8  # keys
PLANE_BYTES = 1024  # 64 dims of a chunk, the unit of the 128-byte swizzle
CHUNK_BYTES = 8 * PLANE_BYTES
TILE = 48  # keys: three tiles fit beside the queries
TILE_BYTES = TILE // CHUNK * CHUNK_BYTES
BLOCK_BYTES = 8192  # 64 dims of the queries, or a tile's weights
STAGES = 3
THREADS = 384  # two computing warpgroups, then a loading one
RECORD = 64  # words of a group or of its rows in the workspace
CAPACITY_LIMIT = 1536  # union keys of a group, at most

Q = 0  # [64 dims][lane]
K = Q + 8 * BLOCK_BYTES  # [stage][chunk][64 dims][key]
P = K + STAGES * TILE_BYTES  # [parity of the tile][lane] weights, 96 of 128 bytes
ROUNDED = P  # in the last 16 of a lane: [parity of the task][warpgroup] sum of rounded weights
ALPHA = P + 2 * BLOCK_BYTES  # [parity of the tile][lane] what the sums so far are multiplied by
PEAK = ALPHA + 2 * 256  # [parity of the task][lane]
SUMS = PEAK + 2 * 256  # [parity of the task][warpgroup][lane] sum of weights
RAISED = SUMS + 4 * 256  # [parity of the tile][warp] whether a factor is not 1
TASK = RAISED + 32  # [parity of the task] the group's record, then its keys, 0 where it is not packed
KEYS = 4 * 40  # within
FULL = TASK + 2 * 4 * RECORD  # [stage]
EMPTY = FULL + 8 * STAGES  # [stage]
P_READY = EMPTY + 8 * STAGES  # [parity of the tile]
Q_FULL = P_READY + 16
Q_EMPTY = Q_FULL + 8
SMEM = Q_EMPTY + 8


class Work:
    """Where the kernels of packing keep what they say of groups and keys: addresses in the workspace."""

    def __init__(self, p):
        self.p = p
        self.groups = (p.rows + GROUP - 1) >> 3
        self.padded = (self.groups + 63) & ~63

    @property
    def room(self):
        """Keys of a sequence: 7 / 4 of the rows and 1024, which windows need not even where requests have 170 rows."""
        return ((7 * self.p.rows >> 2) + 1024 + CHUNK - 1) & ~(CHUNK - 1)

    def part(self, words_before):
        """Address of what stands behind so many words a group."""
        return self.p.work + ptx.wide(self.padded, Int64(4 * words_before))

    def flag(self, group):
        """Of a group."""
        return self.p.work + ptx.wide(group, Int64(4))

    def sums(self, group):
        """Of a group: 4 words."""
        return self.part(1) + ptx.wide(group, Int64(16))

    def rows(self, group):
        """Of a group: `RECORD` words about its rows."""
        return self.part(5) + ptx.wide(group, Int64(4 * RECORD))

    def record(self, group):
        """Of a group: `RECORD` words for the packed kernel."""
        return self.part(5 + RECORD) + ptx.wide(group, Int64(4 * RECORD))

    def chunk(self, number):
        """Of a chunk; those of the second sequence are numbered on from ``room / CHUNK``."""
        return self.part(5 + 2 * RECORD) + ptx.wide(number, Int64(CHUNK_BYTES))


def ring(it):
    """Stage of the it-th tile of this CTA, and the parity of its use."""
    turn = ptx.shr(pasm.high_product(it, 0xAAAAAAAB), 1)  # it / 3
    return it - STAGES * turn, turn & 1


def tiles_of(keys):
    """Tiles of so many keys."""
    chunks = (keys + TILE - 1) >> 3
    return ptx.shr(pasm.high_product(chunks, 0xAAAAAAAB), 2)  # chunks / 6


class Tasks:
    """The tasks of a CTA: every ``ctas``-th, beginning with its own number."""

    def __init__(self, p, cta, ctas):
        self.p, self.cta, self.ctas = p, cta, ctas
        self.per_group = (p.h_q + 7) >> 3
        self.work = Work(p)
        self.count = ptx.quotient(self.work.groups * self.per_group - cta + ctas - 1, ctas)

    def place(self, i):
        """Group and first lane of the i-th task of this CTA."""
        number = self.cta + i * self.ctas
        group = ptx.quotient(number, self.per_group)
        return group, (number - group * self.per_group) << 6


class Query:
    """The row and head of lane ``m`` of a task's tile. ``member``: its row in the group, 0 for a lane that is none."""

    GROUP = GROUP

    def __init__(self, tasks, group, lane0, m):
        p = tasks.p
        lane = lane0 + m
        inside = ptx.quotient(lane, p.h_q)
        self.head = lane - inside * p.h_q
        row = group * self.GROUP + inside
        self.valid = ptx.less(inside, Int32(self.GROUP)) & ptx.less(row, p.rows)
        self.member = ptx.pick32(self.valid, inside, Int32(0))
        row = ptx.pick32(self.valid, row, Int32(0))
        self.head = ptx.pick32(self.valid, self.head, Int32(0))
        self.b = ptx.divide(row, p.magic_s, p.shift_s)
        self.s = row - self.b * p.s_q

    def address(self, base, b, s, h, size):
        """Of this query in a tensor of those strides."""
        return base + (ptx.wide(self.b, b) + ptx.wide(self.s, s) + ptx.wide(self.head, h)) * size
