"""Every listed slot once as 512 bf16 in the workspace of ``hopper_wide``, and a table of where each one stands.

Belongs here: the kernel that numbers and dequantises what ``hopper_wide_mark.py`` marked. The rows are exactly what
``headfit.unpack_kv`` gives, NaN and infinities included: only rows that list a key read it.

A warp takes eight slots at a time, a byte of the bitmap, up to 32 bytes in one turn. The numbers of its keys come from
one counter, so that they differ from launch to launch; nothing that is computed depends on them.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_expand as expand
from headfit.kernels import hopper_expand_asm as easm
from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_expand_sums import scan
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import ROW_BYTES, caches

THREADS = 256
WARPS = THREADS // 32
AT_ONCE = expand.AT_ONCE


def spread(notes=False):
    """The kernel; launch three CTAs an SM. ``notes``: the table says of a key too whether it is not finite."""

    @cute.kernel
    def sparse_mla_spread(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        keys = Keys(p, tid & 31, notes)
        warp, warps = cta + wid * ctas, ctas * WARPS
        pasm.loop(warp, Int32(place.ZERO_ROWS), [], keys.write_zeros, warps)
        units = keys.work.words * 4

        def turn(first, state):
            unit = first + keys.lane * warps
            word = ptx.ldg32_if(keys.work.bitmap + ptx.wide(unit >> 2, Int64(4)), ptx.less(unit, units), Int32(0))
            keys.of_units(unit, pasm.shift_right(word, (unit & 3) << 3) & 0xFF)
            return state

        pasm.loop(warp, units, [], turn, warps * 32)

    return Traced(sparse_mla_spread, threads=THREADS, smem=0, min_blocks=3)


class Keys(expand.Jobs):
    """A lane of a warp that dequantises: eight dims of the first 256, and eight of the others."""

    def __init__(self, p, lane, notes):
        self.p, self.lane, self.notes = p, lane, notes
        self.work = place.Work(p)
        self.rope = ptx.less(Int32(expand.ROPE_LANE - 1), lane)

    def write_zeros(self, row, state):
        """Row ``row`` is zeros."""
        self.write_row(row, [Int32(0)] * 8, Int32(1))
        return state

    def write_row(self, row, words, here):
        """This lane's dims of a row, where ``here``."""
        target = ptx.at(self.work.rows + ptx.wide(row, Int64(place.ROW_BYTES)), self.lane * 16)

        def write():
            ptx.stg128(target, words[:4])
            ptx.stg128(target + Int64(512), words[4:])

        ptx.when(here, write)

    def of_units(self, unit, byte):
        """Number and dequantise the marked slots of the lanes' units."""
        count = uasm.popc(byte)
        up_to = scan(count)
        last = ptx.equal(self.lane, Int32(31))
        begin = uasm.from_lane(wasm.add_global_if(self.work.count, up_to, last & (up_to != 0)), Int32(31))
        first = begin + up_to - count

        def one(i, state):
            left = state[0]
            lane = uasm.lowest(left)
            args = [uasm.from_lane(x, lane) for x in (unit, byte, first)]
            pasm.loop(Int32(0), Int32(8), [], lambda bit, state: self.four(*args, bit, state), Int32(AT_ONCE))
            return [left & (left - 1)]

        some = ptx.ballot(byte)
        pasm.loop(Int32(0), uasm.popc(some), [some], one)

    def four(self, unit, byte, first, bit, state):
        """The marked ones of four slots, from bit ``bit`` of a unit's on."""
        bits = pasm.shift_right(byte, bit) & 0xF
        first = first + uasm.popc(byte & ((Int32(1) << bit) - 1))
        ptx.when(bits, lambda: self.dequantise(unit * 8 + bit, bits, first))
        return state

    def dequantise(self, number, bits, first):
        """Up to four neighbours: ``bits`` says which there are, the lowest becomes key ``first``."""
        lane, work = self.lane, self.work
        here = [(bits >> i) & 1 for i in range(AT_ONCE)]
        keys = [first + uasm.popc(bits & ((1 << i) - 1)) for i in range(AT_ONCE)]
        here = [flag & ptx.less(key, self.p.splits) for flag, key in zip(here, keys, strict=True)]
        turn = lane >> 3
        mine = expand.pick(turn, here)
        row, scale = self.locate_slot(number + turn, mine)
        key = expand.pick(turn, keys) + place.ZERO_ROWS
        leads = mine & ptx.equal(lane & 7, Int32(0))
        ptx.stg32_if(work.table + ptx.wide(number + turn, Int64(4)), key, leads)
        raw = [self.read(row, i, here[i]) for i in range(AT_ONCE)]
        factor = easm.factor_of(scale)
        words = []
        for i, (low, high) in enumerate(raw):
            words += easm.e4m3_to_bf16(low, uasm.from_lane(factor, self.scale_lane(i)))
            words += easm.e4m3_to_bf16(high[:2], uasm.from_lane(factor, self.scale_lane(i) + 4))
        unusual = ptx.ballot(ptx.less(Int32(easm.PLAIN_SCALE), scale))
        nothing = [Int32(0)] * AT_ONCE
        state = pasm.choose(unusual, words + nothing, lambda state: self.scale_further(state, scale))
        broken = []
        for i, (low, high) in enumerate(raw):
            made = wasm.make_nan(state[8 * i : 8 * i + 8], low + high[:2])
            second = [ptx.pick32(self.rope, *each) for each in zip(high, made[4:], strict=True)]
            self.write_row(keys[i] + place.ZERO_ROWS, made[:4] + second, here[i])
            broken.append(ptx.pick32(here[i], easm.any_not_finite(made[:4] + second, Int32(1)), Int32(0)))
        if self.notes:
            ptx.when(ptx.ballot(expand.any_of(broken)), lambda: self.note(number, broken, keys))

    def note(self, number, broken, keys):
        """Say in the table which of four neighbours' keys are not finite."""
        for i, (bad, key) in enumerate(zip(broken, keys, strict=True)):
            entry = self.work.table + ptx.wide(number + i, Int64(4))
            leads = ptx.equal(self.lane, Int32(8 * i)) & ptx.less(Int32(0), uasm.popc(ptx.ballot(bad)))
            ptx.stg32_if(entry, (key + place.ZERO_ROWS) | place.NOT_FINITE, leads)  # the lane that wrote it before

    def locate_slot(self, number, here):
        """The address, as two words, of slot ``number`` of both caches, and this lane's scale of it: 0 without."""
        first, other = caches(self.p)
        second = ptx.less(number, self.work.second) ^ 1
        slot = number - ptx.pick32(second, self.work.second, Int32(0))
        kv, stride = (ptx.pick64(second, b, a) for a, b in zip(first[:2], other[:2], strict=True))
        magic, shift, page = (ptx.pick32(second, b, a) for a, b in zip(first[2][:3], other[2][:3], strict=True))
        page_number = ptx.divide(slot, magic, shift)
        offset = slot - page_number * page
        page_start = kv + ptx.wide(page_number, stride)
        scales = page_start + ptx.wide(page, Int64(ROW_BYTES)) + ptx.wide(offset, Int64(8))
        byte = self.lane & 7
        scale = ptx.ldg8_if(ptx.at(scales, byte), here & ptx.less(byte, Int32(7)))
        return ptx.words(page_start + ptx.wide(offset, Int64(ROW_BYTES))), scale
