"""The computing warpgroups of the packed kernel: scores, softmax, output of a task.

Belongs here: everything between a tile of bf16 keys in shared memory and ``out``. Both warpgroups own all 64 lanes and
256 of the 512 dims. A tile's scores are computed by one of them, in turn; the weights go through shared memory, so
that the matrix unit works for one warpgroup while the other is at its softmax.

The maximum of a lane is raised only where a score exceeds it by 2^8; decided for each lane alone, so that the bits of a
head depend on no other head.
"""

# mypy: ignore-errors

import functools

from cutlass import Float32, Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async

MINUS_INF, PLUS_INF = float("-inf"), float("inf")
SLACK = 8.0  # log2: how far a score may exceed the maximum it is relative to
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634
SUMS_BARRIER = 1  # named barrier of both computing warpgroups
SCORE_STEPS = [(b * at.BLOCK_BYTES + 32 * k, b * at.PLANE_BYTES + 32 * k) for b in range(8) for k in range(4)]
KEY_STEPS = at.TILE // 16  # of p v, for a whole tile
PITCHES = (1024, at.CHUNK_BYTES)  # bytes between 8 lanes of queries or weights, and between 8 keys
ACC = 128  # float32 of a thread: output of its two lanes
SUMS = 4  # float32 behind those: sums of its weights of either lane, then of the weights as rounded to bf16


class Ahead:
    """What the softmax of a tile needs beside its scores: read while they are computed."""

    def __init__(self, f, members, parity, t, it):
        self.f, self.first, self.buffer = f, t is None, it & 1
        self.some = self.look(members, parity, t)
        self.peaks = f.base + at.PEAK + parity * 256 + f.m * 4
        self.old = [Float32(MINUS_INF) if self.first else ptx.lds32f(self.peaks, 32 * lane) for lane in range(2)]

    def look(self, members, parity, t):
        """Where the lanes' rows have keys; whether one has not all of the tile."""
        record = self.f.base + at.TASK + parity * (4 * at.RECORD)
        begin = Int32(0) if t is None else t * at.TILE
        place, some, self.lanes = begin + 2 * self.f.c, Int32(0), []
        for member in members:
            begin1, end1, begin2, end2 = ptx.lds128(record + 16 * member, 16)
            sides = [(place - begin1, end1 - begin1), (place - begin2, end2 - begin2)]
            self.lanes.append(sides)
            outside = [
                ptx.less(begin, low) | ptx.less(high, begin + at.TILE) for low, high in ((begin1, end1), (begin2, end2))
            ]
            some = some | (outside[0] & outside[1])
        return ptx.ballot(some)

    def keep(self, x, i):
        """The thread's i-th score, -inf where the lane's row does not have the key."""
        return pasm.keep_inside(x, *self.lanes[(i >> 1) & 1], 8 * (i >> 2) + (i & 1))

    def mask(self, s):
        """Scores times the scale, -inf where the lane's row does not have the key."""
        s = [ptx.fmul(x, self.f.p.scale_log2) for x in s]
        return pasm.choose(self.some, s, lambda v: [self.keep(x, i) for i, x in enumerate(v)])

    def raise_peak(self, s, lane):
        """A lane's new maximum, the finite one its weights are relative to, the factor of its sums, raised or not."""
        top = functools.reduce(ptx.fmax, [x for i, x in enumerate(s) if (i >> 1) & 1 == lane])
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
        for i in range(len(s) // 8):
            w = [ptx.ex2(ptx.fadd(s[8 * i + k], -lanes[(k >> 1) & 1][1])) for k in range(8)]
            pairs.append([ptx.pack_bf16(w[2 * k], w[2 * k + 1]) for k in range(4)])
            for lane in range(2):
                four = ptx.fadd(ptx.fadd(w[2 * lane], w[2 * lane + 1]), ptx.fadd(w[2 * lane + 4], w[2 * lane + 5]))
                sums[lane] = ptx.fadd(sums[lane], four)
        return pairs, sums, [lanes[0][2], lanes[1][2]], raised

    def store(self, pairs):
        """Put the weights where both warpgroups read them."""
        place = self.f.weights + self.buffer * at.BLOCK_BYTES
        for i, four in enumerate(pairs):
            pasm.stmatrix4(place ^ (32 * i), four)
        ptx.sync_warp()


def rounded_sums(pairs):
    """Of each lane, this thread's weights as the product has them."""
    lanes = []
    for lane in range(2):
        words = [four[k] for four in pairs for k in (lane, lane + 2)]
        lanes.append(functools.reduce(ptx.fadd, [ptx.fadd(*pasm.halves(word)) for word in words]))
    return lanes


class Frame:
    """A thread's places, fixed for the life of the kernel."""

    AHEAD = Ahead

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

    def ahead(self, members, parity, t, it):
        """What to know ahead of tile ``it``, which is tile ``t`` of its task, None for the first."""
        return self.AHEAD(self, members, parity, t, it)

    def release(self, it):
        """This warp has read tile ``it``."""
        ptx_async.mbarrier_arrive_if(self.base + at.EMPTY + at.ring(it)[0] * 8, self.leader)


def tile_at(f, it):
    """Address of tile ``it``, as a descriptor has it."""
    return (f.base + at.K + at.ring(it)[0] * at.TILE_BYTES) >> 4


def scores(f, it, steps=KEY_STEPS):
    """q k^T of the first 16 ``steps`` keys of a tile, under way when this returns."""
    stage, phase = at.ring(it)
    ptx_async.mbarrier_wait(f.base + at.FULL + 8 * stage, phase)
    nothing = [Float32(0.0)] * (8 * steps)
    return pasm.products(nothing, f.q, tile_at(f, it) | 0x10000, SCORE_STEPS, PITCHES, start=True)


def read_weights(f, it, k):
    """Weights of the k-th 16 keys of tile ``it``: this thread's part of the operand."""
    return ptx.ldmatrix4((f.weights + (it & 1) * at.BLOCK_BYTES) ^ (32 * k))


def others_weights(f, it):
    """All of the tile's weights, once they are there."""
    return [read_weights(f, it, k) for k in range(KEY_STEPS)]


def values(f, it, weights, acc, past=0):
    """acc + p v of this warpgroup's dims, from the ``past``-th 16 keys of a tile on, under way when this returns.

    The weights come from registers, those of the other warpgroup's tile too: written and read by threads alone, they
    need no fence towards the matrix unit, which would wait for the stores of the output before.
    """
    v = tile_at(f, it) + f.wg * (4 * at.PLANE_BYTES >> 4) + past * (2 * at.CHUNK_BYTES >> 4)
    steps = [(0, 2 * at.CHUNK_BYTES * k) for k in range(len(weights))]
    return pasm.products(acc, weights, v | (at.PLANE_BYTES >> 4 << 16), steps, PITCHES, columns_first=True)


def values_done(f, it, weights, acc, steps):
    """`values`, complete; a partial tile takes ``steps`` products of 16 keys, what lies beyond is not even copied."""

    def few(acc):
        def step(k, acc):
            return ptx_async.wgmma_wait_for(0, values(f, it, [read_weights(f, it, k)], acc, k))

        return pasm.loop(Int32(0), steps, acc, step)

    whole = lambda acc: ptx_async.wgmma_wait_for(0, values(f, it, weights(), acc))  # noqa: E731
    return pasm.either(ptx.less(steps, Int32(KEY_STEPS)), acc, few, whole)


def rescale(state, low, high):
    """Sums and output of both lanes times their factors."""
    acc = [ptx.fmul(x, high if i & 2 else low) for i, x in enumerate(state[:ACC])]
    return acc + [ptx.fmul(x, high if i & 1 else low) for i, x in enumerate(state[ACC:])]


def wait_weights(f, it):
    """The weights of tile ``it`` are in shared memory."""
    ptx_async.mbarrier_wait(f.base + at.P_READY + (it & 1) * 8, (it >> 1) & 1)


def others_factors(f, it, state):
    """Follow the other warpgroup's tile ``it``: its weights are there, its factors are in ``state``."""
    wait_weights(f, it)
    raised = ptx.lds32(f.base + at.RAISED + (it & 1) * 16 + f.warp * 4)
    alpha = f.base + at.ALPHA + (it & 1) * 256 + f.m * 4
    return pasm.choose(raised, state, lambda v: rescale(v, ptx.lds32f(alpha), ptx.lds32f(alpha, 32)))


def own_values(f, it, steps, state, ahead, pairs, sums, alpha, raised):
    """Announce this warpgroup's weights of tile ``it`` and add its product; complete when this returns.

    Nothing waits for the other warps' weights here: a warp's product reads the 16 lanes that it wrote itself.
    """
    ahead.store(pairs)
    ptx_async.mbarrier_arrive_if(f.base + at.P_READY + (it & 1) * 8, f.leader)
    state = pasm.choose(raised, state, lambda v: rescale(v, *alpha))
    state[ACC:] = [ptx.fadd(x, y) for x, y in zip(state[ACC:], [*sums, *rounded_sums(pairs)], strict=True)]
    if len(pairs) < KEY_STEPS:
        acc = ptx_async.wgmma_wait_for(0, values(f, it, pairs, state[:ACC]))
    else:
        acc = values_done(f, it, lambda: pairs, state[:ACC], steps)
    f.release(it)
    return acc + state[ACC:]


def free_queries(f, flag):
    """This warpgroup needs q no more."""
    ptx_async.mbarrier_arrive_if(f.base + at.Q_EMPTY, f.leader & flag)


def run_task(f, tasks, i, state):
    """All tiles of the i-th task, then its result. ``state``: tiles done before."""
    parity = i & 1
    queries = [at.Query(tasks, *tasks.place(i), f.m + 8 * lane) for lane in range(2)]
    sinks = [sink_of(f.p, query) for query in queries]
    ptx_async.mbarrier_wait(f.base + at.Q_FULL, parity)
    keys = ptx.lds32(f.base + at.TASK + parity * (4 * at.RECORD), at.KEYS)

    def work(state):
        compute(f, queries, sinks, parity, keys, state[0])
        return [state[0] + at.tiles_of(keys)]

    def nothing(state):
        free_queries(f, Int32(1))
        return state

    return pasm.either(keys, state, work, nothing)


def compute(f, queries, sinks, parity, keys, first_tile):
    """`run_task` of one that has keys."""
    tiles = at.tiles_of(keys)
    turn = f.wg ^ (first_tile & 1)  # 0: this warpgroup has the task's first tile; they take turns across tasks
    members = [query.member for query in queries]
    state = [Float32(0.0)] * (ACC + SUMS)

    def steps(t):
        """Products of 16 keys that tile t takes."""
        return ptx.min32((keys - t * at.TILE + 15) >> 4, Int32(KEY_STEPS))

    def opening(state):
        """Tile 0."""
        s = scores(f, first_tile)
        ahead = f.ahead(members, parity, None, first_tile)
        s = ptx_async.wgmma_wait_for(0, s)
        free_queries(f, ptx.less(tiles, Int32(3)))
        return own_values(f, first_tile, steps(Int32(0)), state, ahead, *ahead.weights(s))

    state = pasm.choose(turn ^ 1, state, opening)

    def one(t, state, width):
        """This warpgroup's tile t, its first 16 ``width`` keys, and meanwhile the weights of the other's before it."""
        it = first_tile + t
        s = scores(f, it, width)
        state = others_factors(f, it - 1, state)
        acc = values(f, it - 1, others_weights(f, it - 1), state[:ACC])
        ahead = f.ahead(members, parity, t, it)
        s = ptx_async.wgmma_wait_for(1, s)
        free_queries(f, ptx.less(tiles, t + 3))
        weights = ahead.weights(s)
        state = ptx_async.wgmma_wait_for(0, acc) + state[ACC:]
        f.release(it - 1)
        return own_values(f, it, steps(t), state, ahead, *weights)

    def further(n, state):
        """The n-th further tile of this warpgroup. The last may have few keys: 8 with 128 + 256 dense."""
        t = 2 * n + 2 - turn
        few = ptx.less(steps(t), Int32(2))
        return pasm.either(few, state, lambda v: one(t, v, 1), lambda v: one(t, v, KEY_STEPS))

    state = pasm.loop(Int32(0), (tiles - 1 + turn) >> 1, state, further)
    free_queries(f, turn & ptx.less(tiles, Int32(2)))

    def closing(state):
        """The last tile, if it is the other's."""
        last = first_tile + tiles - 1
        state = others_factors(f, last, state)
        state = values_done(f, last, lambda: others_weights(f, last), state[:ACC], steps(tiles - 1)) + state[ACC:]
        f.release(last)
        return state

    state = pasm.choose((tiles & 1) ^ (turn ^ 1), state, closing)
    finish(f, queries, sinks, parity, state)


def finish(f, queries, sinks, parity, state):
    """Add up the sums of lanes and warpgroups and write out and lse."""
    sums = f.base + at.SUMS + parity * 512 + f.m * 4
    rounded = f.base + at.ROUNDED + f.m * 128 + ((7 ^ f.g) << 4) + parity * 8
    places = [(sums + 32 * lane, 256) for lane in range(2)] + [(rounded + 1024 * lane, 4) for lane in range(2)]
    for (place, step), total in zip(places, state[ACC:], strict=True):
        for distance in (1, 2):
            total = ptx.fadd(total, ptx.shfl_xor(total, distance))
        ptx.when(f.speaker, lambda place=place, step=step, total=total: ptx.sts32f(place + f.wg * step, total))
    # The next task but one reuses these places: its queries are not there before all warps are past the next one.
    ptx.sync(256, SUMS_BARRIER)
    totals = [ptx.fadd(ptx.lds32f(place), ptx.lds32f(place, step)) for place, step in places]
    factors = []
    for lane in range(2):
        peak = ptx.lds32f(f.base + at.PEAK + parity * 256 + f.m * 4, 32 * lane)
        factors.append(statistics(f, queries[lane], sinks[lane], peak, totals[lane], totals[lane + 2]))
    for lane, factor in enumerate(factors):
        mine = [x for i, x in enumerate(state[:ACC]) if (i >> 1) & 1 == lane]
        write_lane(f, queries[lane], [ptx.fmul(x, factor) for x in mine])


def sink_of(p, query):
    """The sink of a query's head; -inf without."""
    given = ptx.given(p.sink) & query.valid
    return ptx.as_float(ptx.ldg32_if(ptx.at(p.sink, query.head * 4), given, Int32(0xFF800000 - (1 << 32))))


def statistics(f, query, sink, peak, total, rounded):
    """Write lse; returns what the output is multiplied by. A row without keys: lse +inf, factor 0.

    The output is a mean by the weights as rounded, so that weights which round alike leave no error; the sink's share
    goes by the weights as they are, like lse.
    """
    p = f.p
    empty = ptx.equal(ptx.as_bits(total), Int32(0))
    lse = ptx.fmul(ptx.fadd(peak, ptx.lg2(total)), Float32(LN_2))
    lse = ptx.pickf(empty, Float32(PLUS_INF), lse)
    speaks = f.speaker & query.valid & (f.wg ^ 1)
    ptx.stg32f_if(query.address(p.lse, p.lse_b, p.lse_s, p.lse_h, 4), lse, speaks)
    base = ptx.pickf(ptx.equal(ptx.as_bits(peak), Int32(0xFF800000 - (1 << 32))), Float32(0.0), peak)
    weight = ptx.fadd(total, ptx.ex2(ptx.fma(sink, Float32(LOG2_E), -base)))
    share = ptx.fmul(total, ptx.rcp(weight))
    return ptx.pickf(empty, Float32(0.0), ptx.fmul(share, ptx.rcp(rounded)))


def write_lane(f, query, x):
    """One lane's 64 dims of this thread: of each 32 it gets 8 that follow one another, from its neighbours."""
    p, odd, high = f.p, f.c & 1, f.c & 2
    row = query.address(p.out, p.out_b, p.out_s, p.out_h, 2)
    row = ptx.at(row, f.wg * 512 + f.c * 16)
    for n in range(0, 64, 8):
        words = [ptx.pack_bf16(x[n + 2 * j], x[n + 2 * j + 1]) for j in range(4)]
        pairs = []
        for low, other in (words[:2], words[2:]):
            got = ptx.shfl_xor_bits(ptx.pick32(odd, low, other), 1)
            pairs.append([ptx.pick32(odd, got, low), ptx.pick32(odd, other, got)])
        got = [ptx.shfl_xor_bits(ptx.pick32(high, *both), 2) for both in zip(*pairs, strict=True)]
        first = [ptx.pick32(high, g, own) for g, own in zip(got, pairs[0], strict=True)]
        second = [ptx.pick32(high, own, g) for g, own in zip(got, pairs[1], strict=True)]
        ptx.stg128_if(row + Int64(8 * n), first + second, query.valid)
