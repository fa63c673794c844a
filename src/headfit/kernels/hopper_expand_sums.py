"""Where the keys of every group end in either sequence: running sums over all groups, made anew by each CTA.

Belongs here: the sums, the group that a place of a sequence belongs to, the groups that the sequences have room for.
Does not belong here: keys (``hopper_expand.py``).

A group adds what its ``sums`` say for a group behind a packed one, or for one that is not. One that does not pay adds
nothing. Each warp has 32 neighbours, or two, four or eight times 32 where there are more groups than threads.
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import ptx

THREADS = 512
WARPS = THREADS // 32  # at most 32: one lane knows the sums of one warp
GROUPS_LIMIT = 4096
TURNS = 1 << (-(-GROUPS_LIMIT // THREADS) - 1).bit_length()  # of a warp, at most

ENDS = 0  # [set][group] keys up to the group's last
TOTALS = ENDS + 2 * 4 * THREADS * TURNS  # [warp][set] keys that a warp's groups add
SMEM = TOTALS + 8 * WARPS


class Ends:
    """As a thread sees them. ``all``: keys of either sequence; ``packed``: groups before the first without room."""

    def __init__(self, p, base, tid, wid):
        self.base, self.wid, self.lane = base, wid, tid & 31
        self.work = at.Work(p)
        self.groups = self.work.groups
        self.turns_log2 = Int32(0)
        for i in range(TURNS.bit_length() - 1):
            self.turns_log2 = self.turns_log2 + ptx.less(Int32(THREADS << i), self.groups)
        self.turns = Int32(1) << self.turns_log2
        self.first = (wid << (self.turns_log2 + 5)) + self.lane

    def send(self):
        """Send for the sums of this thread's groups, all at once, and for whether the groups before them pay."""

        def read(turn):
            group = self.first + 32 * turn
            here = ptx.less(group, self.groups) & ptx.less(Int32(turn), self.turns)
            source = self.work.sums(group)
            before = ptx.ldg32_if(source - 16, here & ptx.less(Int32(0), group), Int32(-1))
            return [before, *ptx.ldg128_if(source, here)]

        others = [Int32(0)] * (5 * (TURNS - 1))
        self.read = read(0)
        self.read += self.where_several(others, lambda _: [w for turn in range(1, TURNS) for w in read(turn)])

    def where_several(self, state, block):
        """``block(state)`` where warps have several turns, else ``state``."""
        return pasm.choose(ptx.less(Int32(1), self.turns), state, block)

    def add_up(self):
        """The sums; with two barriers."""
        first = added_up([Int32(0)] * 2, self.read[:5])

        def go_on(state):
            running, made = state[:2], []
            for turn in range(1, TURNS):
                running = added_up(running, self.read[5 * turn : 5 * turn + 5])
                made += running
                running = [uasm.from_lane(x, Int32(31)) for x in running]
            return running + made

        totals = [uasm.from_lane(x, Int32(31)) for x in first]
        totals = self.where_several(totals + [Int32(0)] * (2 * (TURNS - 1)), go_on)
        mine = first + totals[2:]
        leads = ptx.equal(self.lane, Int32(0))
        ptx.when(leads, lambda: ptx.sts64(self.base + self.wid * 8, totals[:2], TOTALS))
        ptx.sync(THREADS)
        self.place(mine)
        ptx.sync(THREADS)
        self.close([uasm.from_lane(x, Int32(31)) for x in self.by_warp])

    def place(self, mine):
        """Write the sums of this thread's groups, and keep those of all warps, a lane each."""
        present = ptx.less(self.lane, Int32(WARPS))
        totals = ptx.lds64(self.base + ptx.pick32(present, self.lane, Int32(0)) * 8, TOTALS)
        totals = [ptx.pick32(present, x, Int32(0)) for x in totals]
        self.by_warp = [scan(x) for x in totals]
        before = [uasm.from_lane(end - x, self.wid) for end, x in zip(self.by_warp, totals, strict=True)]

        def store(turn):
            target = self.base + (self.first + 32 * turn) * 4
            for i in range(2):
                ptx.sts32(target, before[i] + mine[2 * turn + i], ENDS + 4 * THREADS * TURNS * i)

        def others(state):
            for turn in range(1, TURNS):
                ptx.when(ptx.less(Int32(turn), self.turns), lambda turn=turn: store(turn))
            return state

        store(0)
        self.where_several([], others)

    def close(self, totals):
        """Leave out groups from the first on that ends behind the room of a sequence."""
        room = self.work.room

        def leave_out(_):
            packed = self.groups
            for i in range(2):
                over = ptx.less(room, totals[i])
                group = self.find(Int32(i), [ptx.min32(room, totals[i] - 1)])[0]
                packed = ptx.min32(packed, ptx.pick32(over, group, self.groups))
            last, some = ptx.max32(packed - 1, Int32(0)), ptx.less(Int32(0), packed)
            return [packed, *(ptx.pick32(some, self.of(Int32(i), last), Int32(0)) for i in range(2))]

        too_many = ptx.less(room, ptx.max32(*totals))
        self.packed, *self.all = pasm.choose(too_many, [self.groups, *totals], leave_out)

    def of(self, second, group):
        """Where a group's keys of a set end."""
        return ptx.lds32(self.base + (second * (THREADS * TURNS) + group) * 4, ENDS)

    def find(self, second, places):
        """The group that each place, of any before the end of all, belongs to: how many end before it.

        By what each warp's groups come to, which a lane knows of each, and then among one warp's groups.
        """
        ends = ptx.pick32(second, self.by_warp[1], self.by_warp[0])
        first = [how_many(ends, x) << (self.turns_log2 + 5) for x in places]

        def turn(i, found):
            among = [self.of(second, group + i * 32 + self.lane) for group in first]
            return [n + how_many(end, x) for n, end, x in zip(found, among, places, strict=True)]

        return pasm.loop(Int32(0), self.turns, first, turn)


def added_up(running, read):
    """For either set the keys up to this lane's group, from those of before 32 groups on."""
    before, *sums = read
    pays, behind_packed = ptx.positive(sums[0]), ptx.positive(before)
    added = [ptx.pick32(behind_packed, sums[2 * i], sums[2 * i + 1]) for i in range(2)]
    both = scan(ptx.pick32(pays, added[0] | (added[1] << 16), Int32(0)))  # 32 groups add less than 2^16 keys
    return [running[0] + (both & 0xFFFF), running[1] + ptx.shr(both, 16)]


def scan(x):
    """The sum of the warp's words up to this lane's."""
    for n in (1, 2, 4, 8, 16):
        x = uasm.add_from_below(x, n)
    return x


def how_many(end, x):
    """Of the warp's words: those that are at most x, which all have."""
    return uasm.popc(ptx.ballot(ptx.less(x, end) ^ 1))
