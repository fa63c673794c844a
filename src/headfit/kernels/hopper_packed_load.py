"""The loading warpgroups of the packed kernel: indices, packed rows, queries.

Belongs here: everything from a task's list to bf16 tiles in shared memory. The first loading warpgroup brings dims 0
to 255 of every key, the second dims 256 to 511 and the table of members. A thread serves two keys of a tile (its row in
a group of 8 is ``lane / 4``) and 16 dims of each block of 64. The bytes of the next tile are on their way while it
converts this one and waits for room: those of one key to registers, those of the other to shared memory.
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_rows import ROW_BYTES

ROPE = 448  # byte of a row at which its bf16 dims begin
PLAIN_SCALE = 134  # largest scale byte that one factor can hold, see `factor_of`
FINITE_SCALE = 220  # a larger one may give infinities
NAN_FIELD = 0x7F0


class Loader:
    """A thread of a loading warpgroup. ``half``: which dims, a constant."""

    def __init__(self, p, tasks, base, half, tid, wid, lane):
        self.p, self.tasks, self.base, self.half, self.lane = p, tasks, base, half, lane
        self.warp = wid & 3
        self.tid = tid & 255
        self.leader = ptx.equal(lane, Int32(0))
        self.key = self.warp * 16 + (lane >> 2)  # of the tile; the thread's other key is 8 further
        self.column = lane & 3
        swizzled = ((self.column * 2) ^ (lane >> 2)) << 4
        self.target = base + at.K + self.key * 128 + swizzled
        self.blocks = range(4) if half == 0 else range(4, 7)
        self.words = 4 * len(self.blocks) + (8 if half else 0)  # of one key
        self.entries = base + at.ENTRIES + half * 1024
        self.pieces = self.words // 4
        self.raw = base + at.RAW + half * 8192 + (tid & 127) * 16
        self.scales = base + at.SCALES + half * 512 + (tid & 127) * 4

    def fetch(self, task, t):
        """Begin to copy the entries of this warp's 16 keys of tile t; -1 and no rows past the end of the list."""
        local = self.warp * 16 + self.lane
        position = t * at.TILE + local
        here = ptx.less(position, task.keys)
        target = self.entries + (t & 1) * 512 + local * 8

        def copy():
            source = self.tasks.work.list(task.group) + ptx.wide(position, Int64(8))
            pasm.copy_small(target, source, 8, here, (-1, 0))

        ptx.when(ptx.less(self.lane, Int32(16)), copy)

    def locate(self, task, t, which):
        """Address of a key's row in tile t, of four of its scale bytes, and whether there is one."""
        key = self.key + 8 * which
        index = ptx.lds32(self.entries + (t & 1) * 512 + key * 8)
        second = ptx.shr(index, 31)
        index = index & 0x7FFFFFFF  # of the -1 of a missing key remains 2^31 - 1, which no set has
        table = self.base + at.SETS + second * 32
        magic, shift, page, slots = ptx.lds128(table, 16)
        number = ptx.divide(index, magic, shift)
        offset = index - number * page
        kv_low, kv_high, stride_low, stride_high = ptx.lds128(table)
        begin = ptx.address(kv_low, kv_high) + ptx.wide(number, ptx.address(stride_low, stride_high))
        scales = begin + ptx.wide(page, Int64(ROW_BYTES)) + ptx.wide(offset, Int64(8))
        row = begin + ptx.wide(offset, Int64(ROW_BYTES))
        return row, ptx.at(scales, Int32(4 * self.half)), ptx.within(index, slots)

    def places(self, row):
        """Addresses of this thread's 16-byte pieces of a row."""
        near, far = ptx.at(row, self.column * 16), ptx.at(row, self.column * 32)
        pieces = [near + Int64(64 * b) for b in self.blocks]
        return pieces + ([far + Int64(ROPE + 16 * i) for i in range(2)] if self.half else [])

    def read(self, task, t):
        """Begin to read this thread's share of its first key of tile t to registers; zeros without a key."""
        row, scales, valid = self.locate(task, t, 0)
        scales = ptx.ldg32_if(scales, valid, Int32(0))
        return [scales, *(w for place in self.places(row) for w in pasm.load128(place, valid))]

    def copy(self, task, t):
        """Begin to copy this thread's share of its second key of tile t to shared memory; zeros without a key.

        Both ways at once, because reads to registers that wait for each other would all wait for the last.
        """
        row, scales, valid = self.locate(task, t, 1)
        pasm.copy4_async(self.scales, scales, valid * 4)
        for i, place in enumerate(self.places(row)):
            pasm.copy16_async(self.raw + 2048 * i, place, valid * 16)

    def store(self, targets, which, block, words):
        """16 dims of a key as bf16: two 16-byte columns, whose places differ by the swizzle alone."""
        for i, target in enumerate(targets):
            ptx.sts128(target, words[4 * i : 4 * i + 4], which * 1024 + block * at.BLOCK_BYTES)

    def convert(self, task, targets, which, scales, raw):
        """Write this thread's share of a key as bf16; ``raw(i)`` are the words of piece i."""
        if self.half:
            scales = scales & 0x00FFFFFF  # the last byte of a row's scales is padding, whatever it holds
        unusual = ptx.ballot(pasm.any_byte_above(scales, PLAIN_SCALE))
        usual = ptx.equal(unusual, Int32(0))
        ptx.when(usual, lambda: self.write(task, targets, which, scales, raw, False))
        ptx.when(unusual, lambda: self.write(task, targets, which, scales, raw, True))

    def write(self, task, targets, which, scales, raw, unusual):
        """`convert` for scales that are all usual, or for any."""
        top, rope = Int32(0), Int32(0)
        for i, block in enumerate(self.blocks):
            factor, piece = pasm.factor_of(scales, i), raw(i)
            for column, place in enumerate(targets):  # 8 dims at a time: registers are short here
                words, top = pasm.e4m3_to_bf16(piece[2 * column : 2 * column + 2], factor, top)
                if unusual:
                    words = pasm.scale_further(words, scales, i)
                ptx.sts128(place, words, which * 1024 + block * at.BLOCK_BYTES)
        if self.half:
            words = raw(self.pieces - 2) + raw(self.pieces - 1)
            self.store(targets, which, 7, words)
            for w in words:
                rope = rope | (((w & 0x7F807F80) + 0x00800080) & (0x80008000 - (1 << 32)))
        self.spoil(task, top, rope, scales, unusual)

    def spoil(self, task, top, rope, scales, unusual):
        """A key that is not finite: the group is given back to the native kernel."""
        field = ptx.max_u16x2(top, ptx.shr(top, 16)) & 0xFFFF
        nan = ptx.equal(field, Int32(NAN_FIELD))

        def give_back():
            ptx.stg32_if(self.tasks.work.flag(pasm.again(task.group)), Int32(0), Int32(1))

        broken = nan | rope
        if unusual:
            broken = broken | pasm.any_byte_above(scales, FINITE_SCALE)
        ptx.when(broken, give_back)

    def write_members(self, task, t, stage):
        """Which keys each row of the group has: a warp writes the 16 bits of its keys for every row."""
        local = self.warp * 16 + (self.lane & 15)
        place = self.entries + (t & 1) * 512 + local * 8
        mask = ptx.lds32(place, 4)
        bits = [ptx.ballot(mask & (1 << i)) for i in range(at.GROUP)]
        table = self.base + at.MEMBERS + stage * 64 + self.warp * 2

        def write():
            for i, word in enumerate(bits):
                pasm.store16(table, word, 8 * i)

        ptx.when(self.leader, write)

    def copy_queries(self, task, number):
        """Begin to copy a task's queries to shared memory, when the previous ones are read."""
        ptx_async.mbarrier_wait(self.base + at.Q_EMPTY, (number & 1) ^ 1)
        row, chunk = self.tid >> 2, self.tid & 3
        query = at.Query(self.tasks, task, row)
        p = self.p
        source = ptx.at(query.address(p.q, p.q_b, p.q_s, p.q_h, 2), chunk * 16)
        target = self.base + at.Q + row * 128 + ((chunk ^ (row & 7)) << 4)
        size = query.valid * 16
        for i in range(16):
            to = target + (i >> 1) * at.BLOCK_BYTES
            pasm.copy16_async(to ^ 64 if i & 1 else to, source + Int64(64 * i), size)
        ptx_async.mbarrier_arrive_after_copies(self.base + at.Q_FULL)

    def run_task(self, task, first_tile, number):
        """All tiles of a task, and its queries. Carried: scales and words of the first key."""
        self.fetch(task, Int32(0))
        self.arrived()
        state = self.read(task, Int32(0))
        self.copy(task, Int32(0))
        self.fetch(task, Int32(1))
        self.copy_queries(task, number)

        def tile(t, state):
            it = first_tile + t
            stage, phase = it & 1, (it >> 1) & 1
            stage_base = self.target + stage * at.TILE_BYTES
            targets = [stage_base, stage_base ^ 16]
            ptx_async.mbarrier_wait(self.base + at.EMPTY + stage * 16 + 8 * self.half, phase ^ 1)
            here = ptx.less(t * at.TILE + self.warp * 16, task.keys)  # a warp's keys are those of one step of p v
            first = lambda i: state[4 * i + 1 : 4 * i + 5]  # noqa: E731
            ptx.when(here, lambda: self.convert(task, targets, 0, state[0], first))
            self.arrived()
            second = lambda i: ptx.lds128(self.raw, 2048 * i)  # noqa: E731
            ptx.when(here, lambda: self.convert(task, targets, 1, ptx.lds32(self.scales), second))
            if self.half:
                self.write_members(task, t, stage)
            ptx_async.fence_async()  # before the next reads begin: it would wait for them
            ptx.sync_warp()
            ptx_async.mbarrier_arrive_if(self.base + at.FULL + stage * 16 + 8 * self.half, self.leader)
            following = self.read(task, t + 1)
            self.copy(task, t + 1)
            self.fetch(task, t + 2)
            return following

        pasm.loop(Int32(0), task.tiles, state, tile)

    def arrived(self):
        """What this warp sent for is there for all its lanes."""
        pasm.close_copies()
        pasm.wait_copies()
        ptx.sync_warp()
