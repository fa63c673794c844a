"""Shared memory of the packed kernel, its tasks, and which query a lane of M stands for.

Belongs here: what the loading and the computing warpgroups have to agree on. A task is one group of rows and one tile
of 64 lanes out of its (row, head) pairs in that order; ``GROUP`` rows make a group. Both sides
read the number of keys of a task from the same place and never from what the kernel itself writes.
"""

# mypy: ignore-errors

from dataclasses import dataclass

from cutlass import Int32, Int64

from headfit.kernels import ptx
from headfit.kernels.hopper_rows import caches

GROUP = 8  # rows that share a union of keys: always, whatever the heads, so that a head's bits do not depend on them
LANES = 64  # of M
TILE = 64  # keys
BLOCK_BYTES = 8192  # 64 rows of 64 dims, the unit of the 128-byte swizzle
TILE_BYTES = 8 * BLOCK_BYTES
STAGES = 2
THREADS = 512  # two computing warpgroups, then two loading ones

Q = 0
K = Q + TILE_BYTES
P = K + STAGES * TILE_BYTES
RAW = P + BLOCK_BYTES  # bytes of every second key on their way, 16 a thread and piece: 4 pieces of the first half, 5
MEMBERS = RAW + 9 * 128 * 16  # [stage][row of the group] 64 bits: the keys of the tile that the row has
ALPHA = MEMBERS + STAGES * 64  # [buffer][lane] what the sums so far are multiplied by
PEAK = ALPHA + 2 * 256  # [parity of the task][lane]
SUMS = PEAK + 2 * 256  # [parity of the task][warpgroup][lane]
RAISED = SUMS + 4 * 256  # [buffer][warp] whether a factor is not 1
FULL = RAISED + 32  # [stage][half of the dims]
EMPTY = FULL + 8 * 2 * STAGES
P_READY = EMPTY + 8 * 2 * STAGES  # [buffer]
Q_FULL = P_READY + 16
Q_EMPTY = Q_FULL + 8
SETS = Q_EMPTY + 8  # [set] cache address, page stride, magic, shift, page, slots: picked by address, not by selects
ENTRIES = SETS + 64  # [half][parity of the tile][key] (index or union slot, mask of rows), of a loading warp's own keys
SCALES = ENTRIES + 4 * 512  # [half][thread] four scale bytes of the key in RAW
SMEM = SCALES + 2 * 512

CAPACITY_LIMIT = 1536  # union keys of a group, at most


def write_sets(p, base, flag):
    """What differs between the key sets, where the loading threads look it up."""

    def write():
        for i, (kv, stride, numbers) in enumerate(caches(p)):
            ptx.sts128(base + SETS + 32 * i, [*ptx.words(kv), *ptx.words(stride)])
            ptx.sts128(base + SETS + 32 * i + 16, numbers)

    ptx.when(flag, write)


def capacity(p):
    """Union entries a group has room for in the workspace, and the most that pay: a quarter of its rows' lanes."""
    return ptx.min32((p.topk1 + p.topk2) * (GROUP // 4), Int32(CAPACITY_LIMIT))


class Work:
    """Where the union prepass and this kernel keep what they say of groups; see `hopper_union`."""

    def __init__(self, p):
        self.groups = (p.rows + GROUP - 1) >> 3
        self.flags = p.work
        self.counts = p.work + ptx.wide(self.groups, Int64(4))
        self.entries = p.work + ptx.wide(self.groups, Int64(8))
        self.capacity = capacity(p)

    def flag(self, group):
        """Address of the word that says 1: packed, 0: the native kernel has to compute the rows."""
        return self.flags + ptx.wide(group, Int64(4))

    def count(self, group):
        """Address of the number of union keys; 0 where the group is not packed."""
        return self.counts + ptx.wide(group, Int64(4))

    def list(self, group):
        """Address of the group's entries: (slot | set << 31, mask of the rows that have it), 8 bytes each."""
        return self.entries + ptx.wide(group, Int64(8)) * ptx.wide(self.capacity, Int64(1))


@dataclass
class Task:
    """One group and tile of lanes. ``keys``: how many."""

    group: Int32
    lane0: Int32
    keys: Int32

    @property
    def tiles(self):
        """Tiles of keys; one without keys where the row has none, so that its output is written."""
        return ptx.max32((self.keys + TILE - 1) >> 6, Int32(1))


class Tasks:
    """The tasks of a CTA: every ``ctas``-th, beginning with its own number."""

    def __init__(self, p, cta, ctas):
        self.p, self.cta, self.ctas = p, cta, ctas
        self.per_group = (p.h_q + 7) >> 3
        self.work = Work(p)
        self.count = ptx.quotient(self.work.groups * self.per_group - cta + ctas - 1, ctas)

    def task(self, i):
        """The i-th task of this CTA."""
        number = self.cta + i * self.ctas
        group = ptx.quotient(number, self.per_group)
        lane0 = (number - group * self.per_group) << 6
        return Task(group, lane0, ptx.ldg32_if(self.work.count(group), Int32(1), Int32(0)))


class Query:
    """The row and head of lane ``m`` of a task's tile. ``member``: its row in the group, 0 for a lane that is none."""

    def __init__(self, tasks, task, m):
        p = tasks.p
        lane = task.lane0 + m
        inside = ptx.quotient(lane, p.h_q)
        self.head = lane - inside * p.h_q
        row = (task.group << 3) + inside
        self.valid = ptx.less(inside, Int32(GROUP)) & ptx.less(row, p.rows)
        self.member = ptx.pick32(self.valid, inside, Int32(0))
        row = ptx.pick32(self.valid, row, Int32(0))
        self.head = ptx.pick32(self.valid, self.head, Int32(0))
        self.b = ptx.divide(row, p.magic_s, p.shift_s)
        self.s = row - self.b * p.s_q

    def address(self, base, b, s, h, size):
        """Of this query in a tensor of those strides."""
        return base + (ptx.wide(self.b, b) + ptx.wide(self.s, s) + ptx.wide(self.head, h)) * size
