"""How the keys of a tile get into shared memory: index, address, scales, bulk copies; for the native-width kernel.

Belongs here: who looks up which key when, and what is copied where.

Looking up is done by two warps a tile, in turn: one lane a key. They leave 64 addresses in shared memory and send for
the scales; then each of the four warps has 16 of the 64 rows copied, eight of the first half and eight of the second,
and expects them at the tile's barrier once its products of the tile before are done. A lane without a key (past the
list, negative, beyond the cache) touches no cache memory: its row is copied from zeros, spread over many, since copies
of one row from everywhere would queue up, and its scales are neutral ones.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_native_tile import PITCH, SCALES
from headfit.kernels.hopper_rows import ROW_BYTES, RowLists, caches

ZERO_ROWS = 256  # of 576 bytes behind the parameter `zeros`; then 7 scale bytes of 120, as good as any, and 255
RECORD = 48  # bytes
TURNS = 2  # pairs of warps that look up tiles in turn
ARRIVALS = 68  # at a tile's barrier: 64 lanes once their scales are there, 4 warps that expect their rows


class Keys:
    """The two lists of a CTA's share of a row; its tiles are counted from 0.

    They lie in shared memory, so that they occupy no registers: a record each of the address of the list (less its
    offset in tiles), its end in lanes, and the tiles before the second list; address and page stride of the cache; page
    size, the numbers that divide by it, and slots.
    """

    def __init__(self, p, f, wid):
        self.p, self.f, self.wid = p, f, wid
        self.index = cute.make_rmem_tensor((1,), Int32)  # of a key of this warp's next turn
        self.index[0] = Int32(-1)

    def open(self, row, split, thread):
        """Write the records (thread 0 does); returns the number of tiles. A barrier must follow."""
        p = self.p
        lists = RowLists(p, row)
        lanes = lists.read_lengths()
        tiles = [(n + 63) >> 6 for n in lanes]
        each = ptx.quotient(tiles[0] + tiles[1] + p.splits - 1, p.splits)
        begin = split * each
        count = ptx.max32(ptx.min32(each, tiles[0] + tiles[1] - begin), Int32(0))
        before = tiles[0] - begin  # tiles of this share in the first list; negative: it begins so far into the second
        first, second = lists.places()
        starts = [
            (ptx.at(first, begin * 256), lanes[0] - begin * 64),
            (ptx.at(second, before * -256), lanes[1] + before * 64),
        ]

        def write():
            for i, ((place, lanes_end), (kv, stride, numbers)) in enumerate(zip(starts, caches(p), strict=True)):
                record = self.f.lists + RECORD * i
                ptx.sts128(record, [*ptx.words(place), lanes_end, before])
                ptx.sts128(record, [*ptx.words(kv), *ptx.words(stride)], 16)
                ptx.sts128(record, numbers, 32)

        ptx.when(ptx.equal(thread, Int32(0)), write)
        return count

    def record(self, it):
        """The record of the list that tile ``it`` belongs to."""
        first = ptx.less(it, ptx.lds32(self.f.lists, 12))
        return self.f.lists + ptx.pick32(first, Int32(0), Int32(RECORD))

    def turn(self, it, end):
        """Whether this warp looks up tile ``it``; nobody does where there is none."""
        return ptx.equal(it & (TURNS - 1), self.wid >> 1) & ptx.less(it, end)

    def key(self):
        """The key of the tile for which this lane works, in its turn."""
        return (self.wid & 1) * 32 + ptx.lane()

    def send_index(self, it, end):
        """Send for the index of a key of tile ``it``; -1 past the list and where there is no such tile."""
        low, high, lanes, _ = ptx.lds128(self.record(it))
        position = it * 64 + self.key()
        source = ptx.at(ptx.address(low, high), position * 4)
        self.index[0] = ptx.ldg32_if(source, ptx.less(position, lanes) & ptx.less(it, end), Int32(-1))

    def locate(self, it, end, parity):
        """Turn the index into an address, leave it in shared memory, send for the scales; then send for the index of
        this warp's next turn.

        Of the eight scale bytes of a key seven are copied and the last becomes 0; a lane without a key has neutral
        ones, and 255 in the last.
        """

        def find():
            p, f, record, index = self.p, self.f, self.record(it), self.index[0]
            magic, shift, page, slots = ptx.lds128(record, 32)
            kv_low, kv_high, stride_low, stride_high = ptx.lds128(record, 16)
            valid = ptx.within(index, slots)
            number = ptx.divide(index, magic, shift)
            offset = index - number * page
            begin = ptx.address(kv_low, kv_high) + ptx.wide(number, ptx.address(stride_low, stride_high))
            scales = begin + ptx.wide(page, Int64(ROW_BYTES)) + ptx.wide(offset, Int64(8))
            key = self.key()
            zero_row = (it * 64 + key + ptx.block()) & (ZERO_ROWS - 1)
            nothing = p.zeros + ptx.wide(zero_row, Int64(ROW_BYTES))
            source = ptx.pick64(valid, begin + ptx.wide(offset, Int64(ROW_BYTES)), nothing)
            ptx.sts64(f.sources + parity * 512 + key * 8, ptx.words(source))
            scales = ptx.pick64(valid, scales, p.zeros + Int64(ZERO_ROWS * ROW_BYTES))
            ptx_async.copy_async(f.raw + key * PITCH + SCALES + parity * 8, scales, 8, 8 - valid)
            ptx_async.mbarrier_arrive_after_copies(f.full + parity * 8)
            self.send_index(it + TURNS, end)

        ptx.when(self.turn(it, end), find)

    def copy(self, half, part, parity):
        """Send for four rows: of the two fours of a half that are this warp's, from the addresses in shared memory."""
        row = half * 32 + part * 4
        sources = self.f.sources + parity * 512 + self.wid * 64
        target = self.f.raw + self.wid * 8 * PITCH
        ptx_async.copy_four_rows(
            sources, 8 * row, target + row * PITCH, self.f.full + parity * 8, ROW_BYTES, PITCH
        )  # fmt: skip

    def copy_half(self, half, parity):
        """Send for all of this warp's rows of a half."""
        for part in range(2):
            self.copy(half, part, parity)

    def expect(self, parity, flag):
        """Where ``flag``: expect this warp's rows of a tile, there already or not; its barrier waits for that too."""
        expects = ptx.leader() & flag
        ptx_async.mbarrier_expect_if(self.f.full + parity * 8, Int32(16 * ROW_BYTES), expects)
