"""The loading warpgroup of ``hopper_wide``: three warps copy rows of the workspace, the fourth tells them which.

Belongs here: the way from the lists of a row to a tile of keys in shared memory. Does not belong here: making the rows
(``hopper_wide_spread.py``).

The fourth warp also announces tiles and queries to the matrix unit: a fence towards it waits for what its thread has
under way, and those that copy always have something.
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx, ptx_async

AHEAD = at.STAGES  # tiles whose locations are told before the first of them is there
TURNS = -(-16 // place.COPYING)  # of a copying warp, in which it brings four queries


class Copier:
    """A thread of a copying warp: one 16-byte column of 64 dims, of every fourth of the warp's 16 keys."""

    def __init__(self, tasks, base, number, lane):
        self.tasks, self.base, self.number = tasks, base, number
        self.column, self.row = lane & 7, lane >> 3
        self.source = tasks.work.rows + Int64(self.column * 16)
        self.told = base + number * (16 * 4) + self.row * 16
        first = base + at.K + number * (2 * at.CHUNK_BYTES) + self.row * 128
        self.places = [first + 512 * odd + ((self.column ^ (self.row + 4 * odd)) << 4) for odd in range(2)]

    def run(self):
        """All tasks. The first tile has room before the queries are there, which the last scores have to be for."""

        def task(i, state):
            it, lanes = state
            following = self.tasks.lanes(i + 1)[1]
            it = self.copy_tile(it)
            self.copy_queries(i)
            tiles = at.tiles_of(place.at_least_one(lanes))
            it = pasm.loop(Int32(1), tiles, [it], lambda t, it: [self.copy_tile(*it)])[0]
            return [it, following]

        first = Int32(0)
        pasm.loop(first, self.tasks.count, [first, self.tasks.lanes(first)[1]], task)

    def copy_tile(self, it):
        """This warp's keys of tile ``it``, when there is room for them; the number of the next tile."""
        stage, phase = at.ring(it)
        ptx_async.mbarrier_wait(self.base + place.LOCATED + 8 * stage, phase)
        rows = ptx.lds128(self.told + place.locations(stage))
        ptx_async.mbarrier_wait(self.base + at.EMPTY + 8 * stage, phase ^ 1)

        def copy():
            for i, row in enumerate(rows):
                source = self.source + ptx.wide(row, Int64(place.ROW_BYTES))
                target = self.places[i & 1] + stage * at.TILE_BYTES
                for plane in range(8):
                    to = (i >> 1) * at.CHUNK_BYTES + plane * at.PLANE_BYTES
                    ptx_async.copy_async(target, source, 16, to=to, off=plane * 128)

        ptx.when(ptx.positive(rows[0]), copy)
        ptx_async.mbarrier_arrive_after_copies(self.base + place.LOADED + 8 * stage)
        return it + 1

    def copy_queries(self, i):
        """Queries of the i-th task, when those of the one before are read: 128 bytes a row at a time."""
        tasks, p = self.tasks, self.tasks.p
        copies = []
        for turn in range(TURNS):
            four = self.number + place.COPYING * turn
            m = four * 4 + self.row
            query = tasks.query(i, m)
            source = ptx.at(query.address(p.q, p.q_b, p.q_s, p.q_h, 2), self.column * 16)
            target = self.base + at.Q + m * 128 + ((self.column ^ (m & 7)) << 4)
            copies.append((target, source, query.valid * 16, ptx.less(four, Int32(16))))
        ptx_async.mbarrier_wait(self.base + at.Q_EMPTY, (i & 1) ^ 1)
        for target, source, size, some in copies:

            def copy(target=target, source=source, size=size):
                for block in range(8):
                    ptx_async.copy_async(target, source, 16, size, block * at.BLOCK_BYTES, block * 128)

            ptx.when(some, copy)
        ptx_async.mbarrier_arrive_after_copies(self.base + place.Q_LOADED)


class Guide:
    """A lane of the warp that finds keys: key ``lane`` of a tile and, of the first 16 lanes, key 32 + ``lane``.

    A tile passes through three hands, a step of the loop each: `fetch` sends for its indices, `find` for the rows of
    those slots, and `tell` writes them down. Their state is a list each.
    """

    load_masks, store_masks = staticmethod(ptx.lds64), staticmethod(ptx.sts64)

    def __init__(self, tasks, base, lane):
        self.tasks, self.base, self.lane = tasks, base, lane
        self.p, self.leader = tasks.p, ptx.equal(lane, Int32(0))
        self.also = ptx.less(lane, Int32(at.TILE - 32))
        self.place = (lane >> 4) * 64 + (lane & 3) * 16 + ((lane >> 2) & 3) * 4

    def run(self):
        """All tasks."""
        tasks, first = self.tasks, Int32(0)
        self.say_who_computes()

        def task(i, state):
            it, lanes, *hands = state
            following = tasks.lanes(i + 1)[1]

            def tile(it, hands):
                self.announce(it)
                return [it + 1, *self.step(it + AHEAD, hands)]

            state = tile(it, hands)
            lanes = place.at_least_one(lanes)
            self.announce_queries(i, lanes)
            state = pasm.loop(Int32(1), at.tiles_of(lanes), state, lambda t, state: tile(state[0], state[1:]))
            return [state[0], following, *state[1:]]

        cursor = self.open(first, *tasks.lanes(first))
        indices, cursor = self.fetch(cursor)
        rows, (indices, cursor) = self.find(indices), self.fetch(cursor)
        hands = [*cursor, *indices, *rows]
        hands = pasm.loop(first, Int32(AHEAD), hands, self.step)
        pasm.loop(first, tasks.count, [first, tasks.lanes(first)[1], *hands], task)

    def say_who_computes(self):
        """Set the flag of every group of rows; a CTA those of some."""
        tasks, work = self.tasks, self.tasks.work

        def some(n, state):
            ptx.stg32_if(work.flags + ptx.wide(n, Int64(4)), tasks.fits, Int32(1))
            return state

        pasm.loop(tasks.cta * 32 + self.lane, (self.p.rows + 7) >> 3, [], some, tasks.ctas * 32)

    def open(self, i, first, both):
        """A cursor at the first tile of the i-th task: its number, this lane's places in both lists, lanes left of
        the first and of both, and those of the next task."""
        lists, lane = self.tasks.lists(i), self.lane
        places = lists.places()
        here = ptx.less(i, self.tasks.count)
        places = [ptx.at(places[0], lane * 4), ptx.at(places[1], (lane - first) * 4)]
        places = [ptx.pick64(here, place, Int64(0)) for place in places]
        return [i, *places, first, both, *self.tasks.lanes(i + 1)]

    def fetch(self, cursor):
        """Send for the indices of the cursor's tile, -1 where it has none; and the cursor at the next tile."""
        place1, place2, first, both = cursor[1:5]
        got = []
        for half, may in enumerate((Int32(1), self.also)):
            k = self.lane + 32 * half
            source = ptx.pick64(ptx.less(k, first), place1, place2)
            got.append(ptx.ldg32_if(source + Int64(128 * half), may & ptx.less(k, both), Int32(-1)))

        def go_on(state):
            i, place1, place2, first, both, *following = state
            step = Int64(4 * at.TILE)
            return [i, place1 + step, place2 + step, first - at.TILE, both - at.TILE, *following]

        more = ptx.less(Int32(at.TILE), both)
        cursor = pasm.either(more, cursor, go_on, lambda state: self.open(state[0] + 1, *state[5:]))
        return [*got, first, both], cursor

    def find(self, indices):
        """Send for the rows of a tile's keys: zeros where a lane has none, -1 in sixteens that have no lanes at all.

        Also which keys there are.
        """
        a, b, first, both = indices
        p, work = self.p, self.tasks.work
        end = self.end_of(both)
        found, listed = [], []
        for half, index in enumerate((a, b)):
            k = self.lane + 32 * half
            in_first = ptx.less(k, first)
            valid = ptx.within(index, ptx.pick32(in_first, p.slots1, p.slots2))
            number = index + ptx.pick32(in_first, Int32(0), work.second)
            other = ptx.pick32(ptx.less(k, end), k, Int32(-1))
            found.append(ptx.ldg32_if(work.table + ptx.wide(number, Int64(4)), valid, other))
            listed.append(ptx.ballot(valid))
        return [*found, *listed]

    def end_of(self, lanes):
        """Where the last sixteen keys of a tile end that have some of so many lanes."""
        return (place.at_least_one(lanes) + (place.STEP - 1)) & ~(place.STEP - 1)

    def tell(self, it, rows):
        """Write down the rows of tile ``it``."""
        stage = at.ring(it)[0]
        a, b, *listed = rows
        target = self.base + place.locations(stage) + self.place
        ptx.sts32(target, a)
        wasm.sts32_if(target, b, self.also, 128)
        ptx.when(self.leader, lambda: self.store_masks(self.base + place.LISTED + place.MASK_BYTES * stage, listed))
        ptx.sync_warp()
        ptx_async.mbarrier_arrive_if(self.base + place.LOCATED + 8 * stage, self.leader)

    def step(self, it, hands):
        """Tell of tile ``it``, find the next, fetch the one after."""
        cursor, indices, rows = hands[:7], hands[7:11], hands[11:]
        self.tell(it, rows)
        rows = self.find(indices)
        indices, cursor = self.fetch(cursor)
        return [*cursor, *indices, *rows]

    def announce(self, it):
        """Tile ``it`` is there, for the matrix unit too."""
        stage, phase = at.ring(it)
        ptx_async.mbarrier_wait(self.base + place.LOADED + 8 * stage, phase)
        ptx_async.fence_async()

        def pass_on():
            masks = self.load_masks(self.base + place.LISTED + place.MASK_BYTES * stage)
            self.store_masks(self.base + place.MASK + place.MASK_BYTES * stage, masks)

        ptx.when(self.leader, pass_on)
        ptx_async.mbarrier_arrive_if(self.base + at.FULL + 8 * stage, self.leader)

    def announce_queries(self, i, lanes):
        """So are the queries of the i-th task."""
        ptx_async.mbarrier_wait(self.base + place.Q_LOADED, i & 1)
        ptx_async.fence_async()
        wasm.sts32_if(self.base + place.KEYS + (i & 1) * 4, lanes, self.leader)
        ptx_async.mbarrier_arrive_if(self.base + at.Q_FULL, self.leader)
