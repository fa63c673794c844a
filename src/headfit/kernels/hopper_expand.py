"""The keys of packed groups, dequantised once for all rows that list them; and a record of each group.

Belongs here: the kernel that writes ``sequences`` and ``groups`` of the workspace (``hopper_packed_place.py``), from
what the union prepass says of every group. Does not belong here: where a group's keys end (``hopper_expand_sums.py``).
Launch it between ``hopper_union.union`` and ``hopper_packed.packed`` on the same stream, a CTA an SM, for at most
``GROUPS_LIMIT`` groups.

A warp takes `AT_ONCE` places of a sequence, or two groups. For a place it finds the group that ends behind it, in that
the row that adds the key, and in its list the index. All lanes then read the key: 8 dims each of the first 256, and of
the others, which are 16-byte columns of the chunk, so that a warp writes whole lines; dims 448 on are bf16 already.
Behind the end of a sequence its last chunk is zeros.

A key that is not finite becomes zeros, and all groups that have it are left to the native kernel: their flags, 1 from
the union prepass, become 0. The flags of groups that the sequences have no room for do as well. Nothing here ever makes
a flag 1, so that no CTA can be too late.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_expand_asm as easm
from headfit.kernels import hopper_expand_sums as sums
from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_union_asm as uasm
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_expand_sums import THREADS, WARPS
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_rows import ROW_BYTES, caches

AT_ONCE = 4  # neighbours in a sequence; a power of two, at most 4
ROPE = 448  # byte of a row at which its bf16 dims begin
ROPE_LANE = (ROPE - 256) // 8  # the first lane whose second eight dims are such
KEY_BITS = 128 + 16  # by what key k of a chunk differs from key 0: its 128 bytes, and the columns swap places by k

SETS = sums.SMEM  # [set] cache, page stride; numbers of the page size, first chunk; list, its strides
SETS_BYTES = 64
SMEM = SETS + 2 * SETS_BYTES


def expand():
    """The kernel."""

    @cute.kernel
    def sparse_mla_expand(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = pasm.again(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()))
        wid = cute.arch.make_warp_uniform(tid >> 5)
        ptx_async.wait_for_kernel_before()
        ends = sums.Ends(p, base, tid, wid)
        ends.send()
        ptx.when(ptx.equal(tid, Int32(0)), lambda: write_sets(p, base))
        ends.add_up()
        jobs = Jobs(p, base, tid & 31, ends)

        def job(number, state):
            is_keys = ptx.less(number, jobs.of_keys)
            ptx.when(is_keys, lambda: jobs.keys(number), otherwise=lambda: jobs.groups(number - jobs.of_keys))
            return state

        pasm.loop(cta + wid * ctas, jobs.count, [], job, ctas * WARPS)

    return Traced(sparse_mla_expand, threads=THREADS, smem=SMEM, min_blocks=1)


def write_sets(p, base):
    """What keys are found by, to shared memory: there it can be told by the set where it stands."""
    lists = ((p.idx1, p.idx1_b, p.idx1_s), (p.idx2, p.idx2_b, p.idx2_s))
    chunks = (Int32(0), ptx.shr(at.Work(p).room, 3))
    for i, ((kv, stride, numbers), (first, by_b, by_s)) in enumerate(zip(caches(p), lists, strict=True)):
        table = base + SETS + i * SETS_BYTES
        ptx.sts128(table, [*ptx.words(kv), *ptx.words(stride)])
        ptx.sts128(table, [*numbers[:3], chunks[i]], 16)
        ptx.sts64(table, ptx.words(first), 32)
        ptx.sts128(table, [*ptx.words(by_b), *ptx.words(by_s)], 48)


class Jobs:
    """What there is to do, as a lane sees it: first `of_keys` jobs, of `AT_ONCE` places each; then two groups a job."""

    def __init__(self, p, base, lane, ends):
        self.p, self.base, self.lane, self.ends = p, base, lane, ends
        self.work = at.Work(p)
        self.whole = [(end + 7) & ~7 for end in ends.all]  # places up to the end of the last chunk
        self.of_keys = (self.whole[0] + self.whole[1]) >> AT_ONCE.bit_length() - 1
        self.count = self.of_keys + ((ends.groups + 1) >> 1)
        self.rope = ptx.less(Int32(ROPE_LANE - 1), lane)  # whether this lane's second dims are bf16

    def keys(self, number):
        """Dequantise the keys of some places."""
        first = number * AT_ONCE
        second = ptx.less(first, self.whole[0]) ^ 1
        first = first - ptx.pick32(second, self.whole[0], Int32(0))
        end = ptx.pick32(second, self.ends.all[1], self.ends.all[0])
        table = self.base + SETS + second * SETS_BYTES
        groups = self.ends.find(second, [ptx.min32(first + i, end - 1) for i in range(AT_ONCE)])
        turn = (self.lane >> 3) & (AT_ONCE - 1)
        row, scale = self.locate(second, table, first + turn, end, pick(turn, groups))
        raw = [self.read(row, i, ptx.less(first + i, end)) for i in range(AT_ONCE)]
        factor = easm.factor_of(scale)
        words, bad = [], []
        for i, (low, high) in enumerate(raw):
            words += easm.e4m3_to_bf16(low, uasm.from_lane(factor, self.scale_lane(i)))
            made = easm.e4m3_to_bf16(high[:2], uasm.from_lane(factor, self.scale_lane(i) + 4))
            words += [ptx.pick32(self.rope, *each) for each in zip(high, made, strict=True)]
            bad.append(easm.any_not_finite(low, Int32(0)) | easm.any_not_finite(high, self.rope))
        unusual = ptx.ballot(ptx.less(Int32(easm.PLAIN_SCALE), scale))
        state = pasm.choose(unusual, words + bad, lambda state: self.scale_further(state, scale))
        words, bad = [state[8 * i : 8 * i + 8] for i in range(AT_ONCE)], state[8 * AT_ONCE :]
        self.write(table, first, words)
        ptx.when(ptx.ballot(any_of(bad)), lambda: self.spoil(second, table, first, groups, words, bad))

    def locate(self, second, table, x, end, group):
        """The address of the key at place x, and a scale of it; eight lanes look for one key, a row and a scale each.

        Behind the end of the sequence it is the last key, with a scale of 0.
        """
        p, lane = self.p, self.lane
        row, here = lane & 7, ptx.less(x, end)
        x = ptx.min32(x, end - 1)
        record = self.work.rows(group) + ptx.wide(second * 8 + row, Int64(16))
        begin, count, added, behind = ptx.ldg128_if(record, Int32(1))
        end = self.ends.of(second, group) - behind
        older = ptx.less(x, end - added) & ptx.less(Int32(0), row)  # the first row of a group may add all its keys
        has = ptx.less(x, end) & (older ^ 1)
        b = ptx.divide((group << 3) + row, p.magic_s, p.shift_s)
        s = (group << 3) + row - b * p.s_q
        low, high = ptx.lds64(table, 32)
        b_low, b_high, s_low, s_high = ptx.lds128(table, 48)
        start = ptx.wide(b, ptx.address(b_low, b_high)) + ptx.wide(s, ptx.address(s_low, s_high))
        source = ptx.at(ptx.address(low, high) + start * 4, (begin + count + x - end) * 4)
        index = ptx.ldg32_if(source, has, Int32(0))
        eight = lane & 24
        found = pasm.shift_right(ptx.ballot(has), eight) & 0xFF
        index = uasm.from_lane(index, uasm.lowest(found) + eight)
        kv_low, kv_high, stride_low, stride_high = ptx.lds128(table)
        magic, shift, page, _ = ptx.lds128(table, 16)
        number = ptx.divide(index, magic, shift)
        offset = index - number * page
        page_start = ptx.address(kv_low, kv_high) + ptx.wide(number, ptx.address(stride_low, stride_high))
        scales = page_start + ptx.wide(page, Int64(ROW_BYTES)) + ptx.wide(offset, Int64(8))
        scale = ptx.ldg8_if(ptx.at(scales, row), here & ptx.less(row, Int32(7)))
        return ptx.words(page_start + ptx.wide(offset, Int64(ROW_BYTES))), scale

    def scale_lane(self, i):
        """The lane that has the scale of the first eight dims of this lane in the i-th key; four behind: the others."""
        return ptx.shr(self.lane, 3) + 8 * i

    def read(self, row, i, here):
        """This lane's dims of the i-th key as they stand, eight and eight; zeros where there is no key."""
        source = ptx.address(*[uasm.from_lane(word, Int32(8 * i)) for word in row])
        off = self.lane * 8
        low = ptx.ldg64_if(ptx.at(source, off), here)
        source = ptx.at(source, ptx.pick32(self.rope, self.lane * 16 + ROPE - 16 * ROPE_LANE, off + 256))
        return low, ptx.ldg64_if(source, here) + ptx.ldg64_if(source + Int64(8), self.rope & here)

    def scale_further(self, state, scale):
        """The words and whether they are not finite, for scales of any size. Those of rope are 0, as is the eighth."""
        words, bad = [], []
        for i in range(AT_ONCE):
            made = []
            for half in range(2):
                begin = 8 * i + 4 * half
                further = uasm.from_lane(scale, self.scale_lane(i) + 4 * half)
                made += easm.scale_further(state[begin : begin + 4], further)
            bad.append(state[8 * AT_ONCE + i] | easm.any_not_finite(made, Int32(1)))
            words += made
        return words + bad

    def write(self, table, first, keys):
        """This lane's column of either half of each key."""
        chunk = self.work.chunk(ptx.lds32(table, 28) + (first >> 3))
        at_0 = ((self.lane >> 3) * at.PLANE_BYTES + (self.lane & 7) * 16) ^ ((first & 7) * KEY_BITS)
        for i, words in enumerate(keys):
            target = ptx.at(chunk, at_0 ^ (i * KEY_BITS))
            ptx.stg128(target, words[:4])
            ptx.stg128(target + Int64(4 * at.PLANE_BYTES), words[4:])

    def spoil(self, second, table, first, groups, keys, bad):
        """Make zeros of those keys that are not finite, and give their groups back."""
        whole = []
        for i in range(AT_ONCE):
            broken = ptx.ballot(bad[i])
            whole.append([ptx.pick32(broken, Int32(0), word) for word in keys[i]])
            ptx.when(broken, lambda i=i: self.give_back(second, first + i, groups[i]))
        self.write(table, first, whole)

    def give_back(self, second, x, group):
        """Take back the flags of all groups that have the key at place x, which ``group`` adds.

        They are neighbours, as the first keys of groups stand in order; and none has it behind one that is not packed.
        """
        work, lane = self.work, self.lane

        def some(first, going):
            def look(_):
                group = first + lane
                here = ptx.less(group, self.ends.packed)
                pays = ptx.positive(ptx.ldg32_if(work.sums(group), here, Int32(-1)))
                _, count, _, behind = ptx.ldg128_if(work.rows(group) + ptx.wide(second, Int64(128)), here)
                begin = self.ends.of(second, group) - behind - count
                has = pays & (ptx.less(x, begin) ^ 1)
                neighbours = uasm.lowest(ptx.ballot(has ^ 1))
                ptx.stg32_if(work.flag(group), Int32(0), ptx.less(lane, neighbours))
                return [ptx.equal(neighbours, Int32(32))]

            return pasm.choose(going[0], going, look)

        pasm.loop(group, self.ends.packed, [Int32(1)], some, Int32(32))

    def groups(self, number):
        """The records of two groups, by 16 lanes each: 8 have the rows of the first set, 8 those of the second."""
        work, lane = self.work, self.lane
        group = number * 2 + ptx.shr(lane, 4)
        second, row, leads = (lane >> 3) & 1, lane & 7, ptx.equal(lane & 15, Int32(0))
        here = ptx.less(group, self.ends.packed)
        sums_of_group = ptx.ldg128_if(work.sums(group), here)
        _, count, _, behind = ptx.ldg128_if(work.rows(group) + ptx.wide(lane & 15, Int64(16)), here)
        packed = here & ptx.positive(sums_of_group[0])
        end = self.ends.of(second, group)
        begin = end - behind - count
        chunks, firsts = [], []
        for i in range(2):
            source = (lane & 16) + 8 * i
            first = uasm.from_lane(begin, source) >> 3
            last = (uasm.from_lane(end, source) + 7) >> 3
            firsts.append(first)
            chunks.append(ptx.pick32(ptx.less(Int32(0), sums_of_group[1 + 2 * i]), last - first, Int32(0)))
        keys = ptx.pick32(packed, (chunks[0] + chunks[1]) * at.CHUNK, Int32(0))
        origin = ptx.pick32(second, firsts[1] - chunks[0], firsts[0]) * at.CHUNK
        header = [keys, chunks[0], firsts[0], ptx.shr(work.room, 3) + firsts[1]]
        record = work.record(group)
        ptx.stg64_if(ptx.at(record, 16 + 16 * row + 8 * second), [begin - origin, end - behind - origin], packed)
        leads = leads & ptx.less(group, self.ends.groups)
        ptx.when(leads, lambda: ptx.stg128(record, header))
        ptx.stg32_if(work.flag(group), Int32(0), leads & (packed ^ 1))


def pick(number, words):
    """The word of that number, of a few."""
    word = words[0]
    for i in range(1, len(words)):
        word = ptx.pick32(ptx.equal(number, Int32(i)), words[i], word)
    return word


def any_of(words):
    """The bits of all words."""
    found = words[0]
    for word in words[1:]:
        found = found | word
    return found
