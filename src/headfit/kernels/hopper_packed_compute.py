"""The computing warpgroups of the packed kernel: scores, softmax, output of a task.

Belongs here: everything between a tile of bf16 keys in shared memory and ``out``. Both warpgroups own all 64 lanes and
256 of the 512 dims. A tile's scores are computed by one of them, in turn; the weights go through shared memory, so
that the matrix unit works for one warpgroup while the other is at its softmax.

The maximum of a lane is raised only where a score exceeds it by 2^8; decided for each lane alone, so that the bits of a
head depend on no other head.
"""

# mypy: ignore-errors

from cutlass import Float32, Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async

MINUS_INF, PLUS_INF = float("-inf"), float("inf")
SLACK = 8.0  # log2: how far a score may exceed the maximum it is relative to
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634
FACTORS_BARRIER = 1  # named barrier of both computing warpgroups
SCORE_STEPS = [(b * at.BLOCK_BYTES + 32 * k,) * 2 for b in range(4) for k in range(4)]
VALUE_STEPS = [(32 * k, 2048 * k) for k in range(4)]
ACC, SUM = 128, 2  # float32 of a thread: output, and sums of its two lanes


class Frame:
    """A thread's places, fixed for the life of the kernel."""

    def __init__(self, p, base, wid, lane):
        self.p, self.base = p, base
        self.wg, self.warp = wid >> 2, wid & 3
        self.g, self.c = lane >> 2, lane & 3
        self.leader = ptx.equal(lane, Int32(0))
        self.speaker = ptx.equal(self.c, Int32(0))
        self.m = self.warp * 16 + self.g  # the first of this thread's lanes of M; the other is m + 8
        self.q = ((base + at.Q) >> 4) | 0x10000
        row = self.warp * 16 + (lane & 15)
        self.weights = base + at.P + row * 128 + (((lane >> 4) ^ (row & 7)) << 4)

    def full(self, stage, half):
        """Barrier: that half of a tile's dims is in shared memory."""
        return self.base + at.FULL + stage * 16 + 8 * half

    def release(self, it):
        """This warpgroup's half of tile ``it`` is read."""
        ptx_async.mbarrier_arrive_if(self.base + at.EMPTY + (it & 1) * 16 + self.wg * 8, self.leader)

    def wait_released(self, it):
        """The other warpgroup has read tile ``it``, and with it that tile's weights."""
        place = self.base + at.EMPTY + (it & 1) * 16 + 8 - self.wg * 8
        ptx_async.mbarrier_wait(place, (it >> 1) & 1)


def scores(f, it):
    """q k^T of a tile, under way when this returns."""
    stage, phase = it & 1, (it >> 1) & 1
    k = ((f.base + at.K + stage * at.TILE_BYTES) >> 4) | 0x10000
    ptx_async.mbarrier_wait(f.full(stage, 0), phase)
    s = pasm.products([Float32(0.0)] * 32, f.q, k, SCORE_STEPS, start=True, commit=False)
    ptx_async.mbarrier_wait(f.full(stage, 1), phase)
    return pasm.products(s, f.q, k, [(a + 4 * at.BLOCK_BYTES, b + 4 * at.BLOCK_BYTES) for a, b in SCORE_STEPS])


def value_operands(f, it):
    """Descriptors of the weights and of this warpgroup's half of a tile."""
    v = f.base + at.K + (it & 1) * at.TILE_BYTES + f.wg * (at.TILE_BYTES // 2)
    return ((f.base + at.P) >> 4) | 0x10000, (v >> 4) | (at.BLOCK_BYTES >> 4 << 16)


def value_products(acc, p, v, steps):
    """acc + p v in two halves of 128 dims, since one product of 256 needs more registers than a thread starts with."""
    low = pasm.products(acc[:64], p, v, steps, columns_first=True, commit=False)
    return low + pasm.products(acc[64:], p, v, [(a, b + 2 * at.BLOCK_BYTES) for a, b in steps], columns_first=True)


def values(f, it, acc):
    """acc + p v of a tile, under way when this returns."""
    return value_products(acc, *value_operands(f, it), VALUE_STEPS)


def values_done(f, it, acc, steps):
    """`values`, complete; a partial tile takes ``steps`` products of 16 keys, what lies beyond is not even written."""

    def few(acc):
        p, v = value_operands(f, it)

        def step(k, acc):
            return ptx_async.wgmma_wait_for(0, value_products(acc, p + k * 2, v + k * 128, VALUE_STEPS[:1]))

        return pasm.loop(Int32(0), steps, acc, step)

    return pasm.either(ptx.less(steps, Int32(4)), acc, few, lambda acc: ptx_async.wgmma_wait_for(0, values(f, it, acc)))


def rescale(state, low, high):
    """Sums and output of both lanes times their factors."""
    acc = [ptx.fmul(x, high if i & 2 else low) for i, x in enumerate(state[:ACC])]
    return [*acc, ptx.fmul(state[ACC], low), ptx.fmul(state[ACC + 1], high)]


def wait_weights(f, it):
    """The weights of tile ``it`` are in shared memory."""
    ptx_async.mbarrier_wait(f.base + at.P_READY + (it & 1) * 8, (it >> 1) & 1)


def others_factors(f, it, state):
    """Follow the other warpgroup's tile ``it``: its weights are there, its factors are in ``state``."""
    wait_weights(f, it)
    raised = ptx.lds32(f.base + at.RAISED + (it & 1) * 16 + f.warp * 4)
    alpha = f.base + at.ALPHA + (it & 1) * 256 + f.m * 4
    return pasm.choose(raised, state, lambda v: rescale(v, ptx.lds32f(alpha), ptx.lds32f(alpha, 32)))


def others_values(f, it, state):
    """`others_factors` and the product of that tile, under way when this returns."""
    state = others_factors(f, it, state)
    return values(f, it, state[:ACC]) + state[ACC:]


class Ahead:
    """What the softmax of a tile needs beside its scores: read while they are computed."""

    def __init__(self, f, task_rows, parity, first, it):
        self.f, self.first, self.buffer = f, first, it & 1
        table = f.base + at.MEMBERS + self.buffer * 64
        self.words = [ptx.lds64(table + row * 8) for row in task_rows]
        all_set = ptx.equal(self.words[0][0] & self.words[0][1] & self.words[1][0] & self.words[1][1], Int32(-1))
        self.some = ptx.ballot(all_set ^ 1)
        self.peaks = f.base + at.PEAK + parity * 256 + f.m * 4
        self.old = [Float32(MINUS_INF) if first else ptx.lds32f(self.peaks, 32 * lane) for lane in range(2)]

    def mask(self, s):
        """Scores times the scale, -inf where the lane's row does not have the key."""
        s = [ptx.fmul(x, self.f.p.scale_log2) for x in s]

        def select(v):
            v = list(v)
            for lane in range(2):
                shifted = [pasm.shift_right(w, self.f.c * 2) for w in self.words[lane]]
                for j in range(8):
                    for e in range(2):
                        i = 4 * j + 2 * lane + e
                        v[i] = pasm.keep_where(shifted[j >> 2], 8 * (j & 3) + e, v[i])
            return v

        return pasm.choose(self.some, s, select)

    def raise_peak(self, s, lane):
        """A lane's new maximum, the finite one its weights are relative to, the factor of its sums, raised or not."""
        top = [ptx.fmax(s[4 * j + 2 * lane], s[4 * j + 2 * lane + 1]) for j in range(8)]
        while len(top) > 1:
            top = [ptx.fmax(a, b) for a, b in zip(top[::2], top[1::2], strict=True)]
        top = top[0]
        for distance in (1, 2):
            top = ptx.fmax(top, ptx.shfl_xor(top, distance))
        old = self.old[lane]
        need = pasm.greater(top, ptx.fadd(old, Float32(SLACK)))
        peak = ptx.pickf(need, top, old)
        base = ptx.pickf(ptx.equal(ptx.as_bits(peak), Int32(0xFF800000 - (1 << 32))), Float32(0.0), peak)
        alpha = ptx.pickf(need, ptx.ex2(ptx.fadd(old, -base)), Float32(1.0))
        return peak, base, alpha, need

    def publish(self, lanes, raised):
        """Tell the other warpgroup maxima and factors."""
        f = self.f

        def write():
            for lane in range(2):
                ptx.sts32f(self.peaks, lanes[lane][0], 32 * lane)
                ptx.sts32f(f.base + at.ALPHA + self.buffer * 256 + f.m * 4, lanes[lane][2], 32 * lane)

        ptx.when(f.speaker, write)
        ptx.when(f.leader, lambda: ptx.sts32(f.base + at.RAISED + self.buffer * 16 + f.warp * 4, raised))

    def weights(self, s):
        """Weights of a tile as bf16 pairs; this thread's sums, the lanes' factors and whether any is not 1."""
        s = self.mask(s)
        lanes = [self.raise_peak(s, lane) for lane in range(2)]
        raised = Int32(0) if self.first else ptx.ballot(lanes[0][3] | lanes[1][3])
        self.publish(lanes, raised)
        sums, pairs = [Float32(0.0)] * 2, []
        for i in range(4):
            w = [ptx.ex2(ptx.fadd(s[8 * i + k], -lanes[(k >> 1) & 1][1])) for k in range(8)]
            pairs.append([ptx.pack_bf16(w[2 * k], w[2 * k + 1]) for k in range(4)])
            for lane in range(2):
                four = ptx.fadd(ptx.fadd(w[2 * lane], w[2 * lane + 1]), ptx.fadd(w[2 * lane + 4], w[2 * lane + 5]))
                sums[lane] = ptx.fadd(sums[lane], four)
        return pairs, sums, [lanes[0][2], lanes[1][2]], raised

    def store(self, pairs):
        """Put the weights where both warpgroups read them."""
        for i, four in enumerate(pairs):
            pasm.stmatrix4(self.f.weights ^ (32 * i), four)
        ptx_async.fence_async()
        ptx.sync_warp()


def own_values(f, it, steps, state, ahead, pairs, sums, alpha, raised):
    """Announce this warpgroup's weights of tile ``it`` and add its product; complete when this returns.

    Nothing waits for the other warps' weights here: a warp's product reads the 16 lanes that it wrote itself.
    """
    ahead.store(pairs)
    ptx_async.mbarrier_arrive_if(f.base + at.P_READY + (it & 1) * 8, f.leader)
    state = pasm.choose(raised, state, lambda v: rescale(v, *alpha))
    state[ACC], state[ACC + 1] = ptx.fadd(state[ACC], sums[0]), ptx.fadd(state[ACC + 1], sums[1])
    acc = values_done(f, it, state[:ACC], steps)
    f.release(it)
    return acc + state[ACC:]


def free_queries(f, flag):
    """This warpgroup needs q no more."""
    ptx_async.mbarrier_arrive_if(f.base + at.Q_EMPTY, f.leader & flag)


def run_task(f, tasks, task, first_tile, number):
    """All tiles of a task, then its result."""
    parity = number & 1
    rows = [at.Query(tasks, task, f.m + 8 * i).member for i in range(2)]
    tiles = task.tiles
    state = [Float32(0.0)] * (ACC + SUM)
    ptx_async.mbarrier_wait(f.base + at.Q_FULL, number & 1)
    ptx_async.fence_async()  # the queries were copied by ordinary writes

    def steps(t):
        """Products of 16 keys that tile t takes."""
        return ptx.min32((task.keys - t * at.TILE + 15) >> 4, Int32(4))

    def opening(state):
        """Tile 0, by warpgroup 0."""
        s = scores(f, first_tile)
        ahead = Ahead(f, rows, parity, True, first_tile)
        s = ptx_async.wgmma_wait_for(0, s)
        free_queries(f, ptx.less(tiles, Int32(3)))
        return own_values(f, first_tile, steps(Int32(0)), state, ahead, *ahead.weights(s))

    state = pasm.choose(f.wg ^ 1, state, opening)

    def pair(i, state):
        """This warpgroup's i-th further tile, and before it the other's."""
        t = 2 * i + 2 - f.wg
        it = first_tile + t
        state = others_values(f, it - 1, state)
        s = scores(f, it)
        ahead = Ahead(f, rows, parity, False, it)
        state = ptx_async.wgmma_wait_for(1, state[:ACC]) + state[ACC:]
        f.release(it - 1)
        s = ptx_async.wgmma_wait_for(0, s)
        free_queries(f, ptx.less(tiles, t + 3))
        weights = ahead.weights(s)
        f.wait_released(it - 1)
        return own_values(f, it, steps(t), state, ahead, *weights)

    state = pasm.loop(Int32(0), (tiles - 1 + f.wg) >> 1, state, pair)
    free_queries(f, f.wg & ptx.less(tiles, Int32(2)))

    def closing(state):
        """The last tile, if it is the other's."""
        last = first_tile + tiles - 1
        state = others_factors(f, last, state)
        state = values_done(f, last, state[:ACC], steps(tiles - 1)) + state[ACC:]
        f.release(last)
        return state

    state = pasm.choose((tiles & 1) ^ (f.wg ^ 1), state, closing)
    finish(f, tasks, task, parity, state)


def finish(f, tasks, task, parity, state):
    """Add up the sums of lanes and warpgroups and write out and lse."""
    m = pasm.again(f.m)
    place = f.base + at.SUMS + parity * 512 + f.m * 4
    for lane in range(2):
        total = state[ACC + lane]
        for distance in (1, 2):
            total = ptx.fadd(total, ptx.shfl_xor(total, distance))
        ptx.when(f.speaker, lambda total=total, lane=lane: ptx.sts32f(place + f.wg * 256, total, 32 * lane))
    ptx.sync(256, FACTORS_BARRIER)
    for lane in range(2):
        total = ptx.fadd(ptx.lds32f(place, 32 * lane), ptx.lds32f(place, 256 + 32 * lane))
        peak = ptx.lds32f(f.base + at.PEAK + parity * 256 + f.m * 4, 32 * lane)
        query = at.Query(tasks, task, m + 8 * lane)
        factor = statistics(f, query, peak, total)
        write_lane(f, query, [ptx.fmul(x, factor) for i, x in enumerate(state[:ACC]) if (i >> 1) & 1 == lane])


def statistics(f, query, peak, total):
    """Write lse; returns what the output is multiplied by. A row without keys: lse +inf, factor 0."""
    p = f.p
    empty = ptx.equal(ptx.as_bits(total), Int32(0))
    lse = ptx.fmul(ptx.fadd(peak, ptx.lg2(total)), Float32(LN_2))
    lse = ptx.pickf(empty, Float32(PLUS_INF), lse)
    speaks = f.speaker & query.valid & (f.wg ^ 1)
    ptx.stg32f_if(query.address(p.lse, p.lse_b, p.lse_s, p.lse_h, 4), lse, speaks)
    given = ptx.given(p.sink) & query.valid
    sink = ptx.as_float(ptx.ldg32_if(ptx.at(p.sink, query.head * 4), given, Int32(0xFF800000 - (1 << 32))))
    base = ptx.pickf(ptx.equal(ptx.as_bits(peak), Int32(0xFF800000 - (1 << 32))), Float32(0.0), peak)
    weight = ptx.fadd(total, ptx.ex2(ptx.fma(sink, Float32(LOG2_E), -base)))
    return ptx.pickf(empty, Float32(0.0), ptx.rcp(weight))


def write_lane(f, query, x):
    """One lane's 64 dims of this thread; neighbours swap so that each stores four dims that follow one another."""
    p = f.p
    row = query.address(p.out, p.out_b, p.out_s, p.out_h, 2)
    odd = f.c & 1
    row = ptx.at(row, f.wg * 512 + (f.c >> 1) * 8 + odd * 16)
    for j in range(0, 32, 2):
        low, high = ptx.pack_bf16(x[2 * j], x[2 * j + 1]), ptx.pack_bf16(x[2 * j + 2], x[2 * j + 3])
        got = ptx.shfl_xor_bits(ptx.pick32(odd, low, high), 1)
        pair = [ptx.pick32(odd, got, low), ptx.pick32(odd, high, got)]
        ptx.stg64_if(row + Int64(16 * j), pair, query.valid)
