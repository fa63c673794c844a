"""The loading warpgroup of the packed kernel: chunks of keys by the copy engine, queries and records by its threads.

Belongs here: what comes from global memory for a task. Does not belong here: making the chunks (``hopper_expand.py``).
The keys of a task are on their way while the one before is computed, its queries as soon as its last scores are there.
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async

TILE_CHUNKS = at.TILE // at.CHUNK
RECORD_PIECES = 9  # of 16 bytes: what a record has
ROWS = 16  # lanes of M that a warp brings


def keys_of(tasks, i):
    """Keys, chunks of the first set and first chunks of the i-th task of this CTA; no keys where it is not packed."""
    group, _ = tasks.place(i)
    here = ptx.less(i, tasks.count)
    words = ptx.ldg128_if(tasks.work.record(group), here)
    flag = ptx.ldg32_if(tasks.work.flag(group), here, Int32(0))
    return [ptx.pick32(flag, words[0], Int32(0)), *words[1:]]


class Loader:
    """A thread of the loading warpgroup: one 16-byte column of 64 dims, of every fourth of a warp's 16 lanes of M."""

    def __init__(self, tasks, base, thread):
        self.tasks, self.base, self.thread = tasks, base, thread
        self.lane = thread & 31
        self.column, row = thread & 7, self.lane >> 3
        self.row = (thread >> 5) * ROWS + row
        place = base + at.Q + self.row * 128
        self.places = [place + ((self.column ^ (row + 4 * odd)) << 4) for odd in range(2)]

    def run(self, keys_too):
        """All tasks. ``keys_too``: this warp copies the keys as well."""

        def task(i, state):
            it, keys, *chunks = state
            following = keys_of(self.tasks, i + 1)

            def tiles(it, begin, end):
                return pasm.loop(begin, end, [it], lambda t, it: [self.copy_tile(t, *it, keys, *chunks)])[0]

            last = ptx.pick32(keys_too, at.tiles_of(keys), Int32(0))
            # The first two tiles have room before the queries have: the last scores of the task before read those.
            it = tiles(it, Int32(0), ptx.min32(last, Int32(1)))
            self.copy_queries(i, keys)
            it = tiles(it, Int32(1), ptx.min32(last, Int32(2)))
            self.arrived()
            it = tiles(it, Int32(2), last)
            return [it, *following]

        first = Int32(0)
        pasm.loop(first, self.tasks.count, [first, *keys_of(self.tasks, first)], task)

    def copy_tile(self, t, it, keys, first_chunks, first1, first2):
        """Tile ``t`` of a task when there is room for it, a chunk a lane; the number of the next tile."""
        base, leader = self.base, ptx.equal(self.lane, Int32(0))
        stage, phase = at.ring(it)
        full = base + at.FULL + 8 * stage
        left = (keys >> 3) - t * TILE_CHUNKS
        # Two chunks at a time, 16 keys, are a step of p v: what it reads beside the last has to be finite.
        count = ptx.min32((left + 1) & ~1, Int32(TILE_CHUNKS))
        j = t * TILE_CHUNKS + ptx.min32(self.lane, left - 1)
        number = ptx.pick32(ptx.less(j, first_chunks), first1 + j, first2 + j - first_chunks)
        target = base + at.K + stage * at.TILE_BYTES + self.lane * at.CHUNK_BYTES
        ptx_async.mbarrier_wait(base + at.EMPTY + 8 * stage, phase ^ 1)
        ptx_async.mbarrier_expect_if(full, count * at.CHUNK_BYTES, leader)
        ptx.sync_warp()
        source = self.tasks.work.chunk(number)
        pasm.copy_bulk_if(target, source, at.CHUNK_BYTES, full, ptx.less(self.lane, count))
        return it + 1

    def copy_queries(self, i, keys):
        """Queries and record of the i-th task, when those of the one before are read: 128 bytes a row at a time."""
        tasks, thread, p = self.tasks, self.thread, self.tasks.p
        group, lane0 = tasks.place(i)
        record = self.base + at.TASK + (i & 1) * (4 * at.RECORD)
        sources = []
        for n in range(ROWS // 4):
            query = at.Query(tasks, group, lane0, self.row + 4 * n)
            source = ptx.at(query.address(p.q, p.q_b, p.q_s, p.q_h, 2), self.column * 16)
            sources.append((source, query.valid * 16))
        ptx_async.mbarrier_wait(self.base + at.Q_EMPTY, (i & 1) ^ 1)

        def copy():
            of_record = ptx.at(tasks.work.record(group), thread * 16)
            some = ptx.less(thread, Int32(RECORD_PIECES))
            ptx.when(some, lambda: ptx_async.copy_async(record + thread * 16, of_record, 16))
            for block in range(8):
                for n, (source, size) in enumerate(sources):
                    to = block * at.BLOCK_BYTES + n * 512
                    ptx_async.copy_async(self.places[n & 1], source, 16, size, to, block * 128)

        ptx.when(keys, copy)
        ptx.when(ptx.equal(thread, Int32(0)), lambda: ptx.sts32(record, keys, at.KEYS))

    def arrived(self):
        """What this warp copied for a task is there, for the matrix unit too."""
        ptx_async.wait_copies()
        ptx_async.fence_async()
        ptx.sync_warp()
        ptx_async.mbarrier_arrive_if(self.base + at.Q_FULL, ptx.equal(self.lane, Int32(0)))
