"""One tile of 64 keys of the native-width kernel: logits, weights, and what they add to the output.

Belongs here: the arithmetic of a tile and the hand-over to the next one. Does not belong here: the life of a row
(``hopper_native.py``), instructions (``ptx.py``).

Orientation. Keys are the rows (M) of both products and heads their columns (N): ``S^T = K Q^T``, ``O^T += K^T P^T``, so
no padded head is computed and a head's bits do not depend on the others. One warpgroup does it all. Keys come out of
shared memory as they lie in the cache, are converted in registers and go into the matrix unit as its register operand.
Few warps run on an SM (8 to 16), so a warp overlaps its own work: while a product runs, the operands of the next are
converted and those of a later one are read.

Key r of a tile stands in shared row r. Row ``i`` of a product is key ``permuted(i)``: with it, 16-byte reads of eight
neighbouring rows and transposed reads are both free of bank conflicts. A thread has two rows of the first product, g
and g + 8 of its warp's 16: its two own keys.

Two kinds of arithmetic, chosen by the row's scales alone:

* usual: every e8m0 byte of the row is in [112, 127]. Values are f16, weights carry the scale times 2^10 as f16.
* any: everything is bf16, for q, scales and weights in every exponent; scales join in float32.

Usual logits are f16 products per group of 64 dims (e4m3 is exact in f16; q is brought into f16's range by a power of
two per head), with the group's scale in float32. Either half of the dims, four groups, is summed up on its own.
"""

# mypy: ignore-errors

import functools

from cutlass import Float32, Int32

from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_native_asm import Operand

PITCH = 592  # bytes between rows in shared memory: 576 of the row, 2 x 8 for the scales of this tile and the next
SCALES = 576
WARPS = 4
THREADS = 32 * WARPS
LAZY = 0x40800000  # 4.0: a maximum is only replaced when a logit exceeds it by 2^4 (f16 weights stay below 2^15)
# The test whether a logit exceeds is made for a thread's two keys of a head together, on the weights (2^4 and 1; a
# little less, as they are rounded). Passed by mistake it changes no bit.
TOGETHER, SINGLE = 0x417F0000, 0x3F7F0000
MINUS_INFINITY = float("-inf")
# Steps of the second product: 32 keys of a group of 64 dims. The rope group is not last, as its operands are more.
STEPS = [(group, half) for half in range(2) for group in (0, 1, 2, 3, 7, 4, 5, 6)]


def permuted(i):
    """The key of row ``i``: bit 0 moves to bit 2, bits 1 and 2 down."""
    return (i & 0x7FFFFFF8) | ((i & 1) << 2) | ((i & 6) >> 1)


def scale_bits(word, i):
    """The bits of float32 2^(b-127) of byte ``i``, 1 to 254."""
    return ptx.shr(ptx.prmt(word, Int32(0), (i << 12) | 0x444), 1)


def scale_of(word, i):
    """float32 2^(b-127) of byte ``i``, also where it is 0 (subnormal) or 255 (NaN)."""
    bits = scale_bits(word, i)
    bits = ptx.pick32(ptx.equal(bits, Int32(0)), Int32(0x00400000), bits)
    bits = ptx.pick32(ptx.equal(bits, Int32(0x7F800000)), Int32(0x7FC00000), bits)
    return ptx.as_float(bits)


def weight_factor(shifted, i):
    """The f16 pair 2^(b-117) twice, of byte ``i`` of ``(word - 0x66...) << 2``."""
    return ptx.prmt(shifted, Int32(0), (i << 12) | (4 << 8) | (i << 4) | 4)


def gathered(values, g, op):
    """Reduce each value over the eight lanes of one ``c``; lane g keeps value ``g % len(values)``.

    The order of operations is the same for 2, 4 and 8 values, so that heads keep their bits over widths.
    """
    masks = {2: (4,), 4: (8, 4), 8: (16, 8, 4)}[len(values)]
    for mask in (m for m in (16, 8) if m not in masks):
        values = [op(x, ptx.shfl_xor(x, mask)) for x in values]
    for mask in masks:
        half = len(values) // 2
        upper = (g << 2) & mask
        send = [ptx.pickf(upper, values[i], values[i + half]) for i in range(half)]
        keep = [ptx.pickf(upper, values[i + half], values[i]) for i in range(half)]
        values = [op(k, ptx.shfl_xor(s, mask)) for k, s in zip(keep, send, strict=True)]
    return values[0]


# --- the first product


def key_words(f, group):
    """The raw bytes of this thread's two rows: 16 dims of each. A rope group: both operands of its first half."""
    if group == 7:
        return rope_operands(f, 0)
    return [ptx.lds128(f.rows, 64 * group), ptx.lds128(f.rows, 64 * group + 8 * PITCH)]


def rope_operands(f, half):
    """Two register operands of half of the rope dims, as they are read."""
    return [ptx.ldmatrix4(f.rope_rows, 448 + 64 * half + 32 * s) for s in range(2)]


def key_fragments(f, group, words, half):
    """Two register operands (64 keys x 16 dims each) of half a group, and their type."""
    if group == 7:
        return rope_operands(f, 1) if half else words, "bf16"
    fragments = []
    for s in (2 * half, 2 * half + 1):
        a0, a2 = ptx.e4m3_to_f16(words[0][s])
        a1, a3 = ptx.e4m3_to_f16(words[1][s])
        fragments.append([a0, a1, a2, a3])
    return fragments, "f16"


def row_factors(steps, i):
    """Float32 of byte ``i`` of the thread's two rows."""
    return [ptx.as_float(scale_bits(word, i)) for word in steps]


def rescaled(acc, steps, i):
    """Accumulators times the power of two of their row (the thread has two), byte ``i`` of its `group_steps`."""
    factors = row_factors(steps, i)
    return [ptx.fmul(v, factors[(k >> 1) & 1]) for k, v in enumerate(acc)]


def group_steps(word, side):
    """Exponent bytes of what the sum is multiplied by after each of four groups: scale over next scale; then the scale.

    ``word`` are the scale bytes of a row's four groups, each in [112, 127], so no byte borrows from its neighbour. The
    fourth group of the second half is rope, which has no scale.
    """
    if side:
        word = word & 0x00FFFFFF
    return word + (0x00007F7F if side else 0x007F7F7F) - ptx.shr(word, 8)


def scale_words(f):
    """The scale bytes of the thread's two rows, of either half of the dims: [half][row]."""
    place = f.scales_row()
    return [[ptx.lds32(place, SCALES + 8 * PITCH * i + 4 * side) for i in range(2)] for side in range(2)]


def usual_logits(f, words):
    """S^T: ``n`` float32 of 64 keys x H heads. ``words``: of `scale_words`.

    Either half of the dims is summed up on its own, in units of the scale of the group at hand, which costs no second
    accumulator: between two groups a sum is multiplied by the exact power of two between their scales. While the
    products of one half's group run, those of the other's are prepared.
    """
    acc = [[Float32(0.0)] * f.size.n for _ in range(2)]
    steps = [[group_steps(word, side) for word in words[side]] for side in range(2)]
    raw = [key_words(f, 0), key_words(f, 4)]
    for i in range(4):
        for batch in ((0, 1),) if f.size.whole_groups else ((0,), (1,)):
            for side in range(2):
                group = 4 * side + i
                made = [key_fragments(f, group, raw[side], half) for half in batch]
                if batch[-1] and i < 3:
                    raw[side] = key_words(f, group + 1)
                if i or batch[0]:
                    acc[side] = ptx_async.wgmma_wait_for(1, acc[side])
                if i and not batch[0]:
                    acc[side] = rescaled(acc[side], steps[side], i - 1)
                multiply_keys(f, acc, side, group, batch, made)
    first, second = ptx_async.wgmma_wait_for(1, acc[0]), ptx_async.wgmma_wait_for(0, acc[1])
    factors = row_factors(steps[0], 3)
    return [ptx.fma(a, factors[(k >> 1) & 1], b) for k, (a, b) in enumerate(zip(first, second, strict=True))]


def multiply_keys(f, acc, side, group, batch, made):
    """Send the products of some halves of a group on their way."""
    ptx_async.wgmma_fence()
    for half, (fragments, kind) in zip(batch, made, strict=True):
        for s, fragment in enumerate(fragments):
            place = group * f.size.group_bytes + 64 * half + 32 * s
            start = group % 4 + half + s == 0
            acc[side] = f.queries.product(acc[side], fragment, place, kind, start, side)
    ptx_async.wgmma_commit()


def logits_any(f, words):
    """`usual_logits` for every scale byte and q in every exponent: bf16 keys as `headfit.unpack_kv` has them."""
    halves = [half_logits_any(f, side, words[side]) for side in range(2)]
    return [ptx.fadd(a, b) for a, b in zip(*halves, strict=True)]


def half_logits_any(f, side, words):
    """Of one half of the dims."""
    acc = [Float32(0.0)] * f.size.n
    for k in range(8):
        i, half = k >> 1, k & 1
        group = 4 * side + i
        if not half:
            raw = key_words(f, group)
        fragments, kind = key_fragments(f, group, raw, half)
        if kind == "f16" and not half:
            scales = [scale_of(word, i) for word in words]
        for s, fragment in enumerate(fragments):
            if kind == "f16":
                fragment = [ptx.f16_to_bf16(x, scales[j & 1]) for j, x in enumerate(fragment)]
            ptx_async.wgmma_fence()
            place = group * f.size.group_bytes + 64 * half + 32 * s
            acc = f.queries.product(acc, fragment, place, "bf16", k == 0 and s == 0)
            ptx_async.wgmma_commit()
            acc = ptx_async.wgmma_wait_for(0, acc)
    return acc


def own_logits(logits):
    """Those of the first own key and of the second: H / 4 float32 each."""
    keys = [[], []]
    for j in range(0, len(logits), 2):
        keys[(j >> 1) & 1] += logits[j : j + 2]
    return keys


# --- weights


def put_weights(f, p, own, any_scale):
    """Write P to shared memory, once for each group of dims, times that group's scale of the own key.

    ``p`` and ``own``: weights and scales of both own keys. One store takes both where they are four matrices or fewer.
    """
    pairs = [list(zip(q[::2], q[1::2], strict=True)) for q in p]
    together = f.size.heads <= 16
    key = (ptx.lane() >> (f.size.heads.bit_length() - 1)) & 1
    places = [f.weights(key)] if together else [f.weights(0), f.weights(1)]

    def store(group, packed):
        for place, matrices in zip(places, [packed[0] + packed[1]] if together else packed, strict=True):
            ptx.stmatrix_trans(place, matrices, group * f.size.group_bytes)

    store(7, [[ptx.pack_bf16(*pair) for pair in of_key] for of_key in pairs])
    halves = None if any_scale else [[ptx.pack_f16(*pair) for pair in of_key] for of_key in pairs]
    for g in range(7):
        store(g, [scaled_weights(pairs[i], halves and halves[i], own[i], g) for i in range(2)])


def scaled_weights(pairs, halves, words, g):
    """Weights of a key times its scale of a group: bf16 of ``pairs``, or f16 of the packed ``halves``, times 2^10."""
    if halves is None:
        scale = scale_of(words[g // 4], g % 4)
        return [ptx.pack_bf16(ptx.fmul(a, scale), ptx.fmul(b, scale)) for a, b in pairs]
    factor = weight_factor((words[g // 4] - (0x00666666 if g // 4 else 0x66666666)) << 2, g % 4)
    return [ptx.mul_f16x2(half, factor) for half in halves]


def weights(f, state, s, own, any_scale):
    """P = 2^(S - m) of the own keys, written for everyone; maxima and sums are brought up to date.

    The running maximum of a head is only replaced when a logit exceeds it by 2^4 (for any scale: when it exceeds it, so
    that no weight is above 1): then all threads rescale. A head that does not exceed keeps its bits. The same branch
    notes scales that the usual arithmetic does not hold for.
    ``s`` and ``own`` are logits and scales of both own keys. ``state.total`` are the sums over this thread's keys; only
    at the end of the row they are added up over threads.
    """
    table = heads_table(f)
    x = [log_weights(f, values, ptx.positive(scales[1]), table)[0] for values, scales in zip(s, own, strict=True)]
    p = [[ptx.ex2(v) for v in of_key] for of_key in x]
    sums = over_own(p, ptx.fadd)
    top = functools.reduce(ptx.fmax, over_own(p, ptx.fmax) if any_scale else sums)
    flag = ptx.above(top, SINGLE if any_scale else TOGETHER)
    unusual = Int32(0) if any_scale else ptx.unusual_scales(*own[0]) | ptx.unusual_scales(*own[1])
    put_weights(f, p, own, any_scale)
    ptx_async.fence_async()

    def raised():
        if not any_scale:
            ptx.when(unusual, lambda: ptx.sts32(f.unusual, Int32(1)))
        raise_maxima(f, state, s, own, any_scale)

    def kept():
        for i, value in enumerate(sums):
            state.total[i] = ptx.fadd(state.total[i], value)

    ptx.when(ptx.sync_or(flag | unusual, THREADS), raised, kept)


def over_own(values, op):
    """Values of both own keys reduced to one a head."""
    return [op(a, b) for a, b in zip(*values, strict=True)]


def over_warps(peaks, op):
    """What all warps left for this lane from ``peaks`` on, reduced."""
    found = ptx.lds32f(peaks)
    for warp in range(1, WARPS):
        found = op(found, ptx.lds32f(peaks, 128 * warp))
    return found


def heads_table(f):
    """Factors and running maxima of the thread's heads."""
    factors, known, table = [], [], f.maxima()
    for j in range(f.size.nv // 2):
        factors += ptx.lds64f(table, 128 + 32 * j)
        known += ptx.lds64f(table, 32 * j)
    return factors, known


def log_weights(f, s, present, table):
    """log2 of the weights of an own key, -inf without a key; and the scaled logits. ``table``: of `heads_table`."""
    factors, known = table
    # rounded before the maximum is taken off, as the maximum itself was: fused, logits of 2^24 would leave halves
    logits = [ptx.fmul(v, factor) for v, factor in zip(s, factors, strict=True)]
    nothing = Float32(MINUS_INFINITY)
    x = [ptx.pickf(present, ptx.fadd(v, -m), nothing) for v, m in zip(logits, known, strict=True)]
    return x, [ptx.pickf(present, v, nothing) for v in logits]


def raise_maxima(f, state, s, own, any_scale):
    """Replace the maximum of each head that is exceeded, rescale what was added, write P anew and add it."""
    size, lane = f.size, ptx.lane()
    own_maximum = f.head_maxima + f.head(lane) * 4
    old = ptx.lds32f(own_maximum)
    peaks, factors = f.peaks + lane * 4, heads_table(f)[0]
    present = [ptx.positive(scales[1]) for scales in own]
    logits = [log_weights(f, s[i], present[i], (factors, [Float32(0.0)] * size.nv))[1] for i in range(2)]
    ptx.sts32f(peaks + f.wid * 128, gathered(over_own(logits, ptx.fmax), lane >> 2, ptx.fmax))
    ptx.sync(THREADS)
    candidate = over_warps(peaks, ptx.fmax)
    new = ptx.pickf(ptx.above(candidate - old, 0 if any_scale else LAZY), candidate, old)
    rescale = ptx.ex2(old - new)
    ptx.sts32f(own_maximum, new)  # every warp writes the same value
    maxima = []
    for i in range(size.nv):
        source = (lane & 3) + 4 * i
        maxima.append(ptx.shfl(new, source))
        factor = ptx.shfl(rescale, source)
        state.total[i] = ptx.fmul(state.total[i], factor)
        for group in range(8):
            for z in (4 * (i // 2) + (i & 1), 4 * (i // 2) + 2 + (i & 1)):
                k = group * size.n + z
                state.acc[k] = ptx.fmul(state.acc[k], factor)
    p = [[ptx.ex2(v) for v in log_weights(f, s[i], present[i], (factors, maxima))[0]] for i in range(2)]
    for i, value in enumerate(over_own(p, ptx.fadd)):
        state.total[i] = ptx.fadd(state.total[i], value)
    put_weights(f, p, own, any_scale)
    ptx_async.fence_async()
    ptx.sync(THREADS)


# --- the second product


def value_words(f, group, half):
    """32 keys of a group, transposed: four words of e4m3 pairs, or both register operands of rope dims."""
    if group < 7:
        return ptx.ldmatrix_trans4(f.columns, 64 * group + half * 32 * PITCH)
    return [ptx.ldmatrix_trans4(f.rope_columns(), 448 + (half * 32 + 16 * s) * PITCH) for s in range(2)]


def value_fragment(group, words, s, any_scale):
    """One register operand (64 dims x 16 keys), and its type."""
    if group == 7:
        return words[s], "bf16"
    values = [*ptx.e4m3_columns_to_f16(words[2 * s]), *ptx.e4m3_columns_to_f16(words[2 * s + 1])]
    return ([ptx.f16_to_bf16(v, Float32(1.0)) for v in values], "bf16") if any_scale else (values, "f16")


def value_fragments(group, words, any_scale):
    """Both register operands of a step."""
    return [value_fragment(group, words, s, any_scale) for s in range(2)]


def first_values(f):
    """What the first steps of the second product read; it needs no weights."""
    return [value_words(f, *step) for step in STEPS[: 1 + f.size.ahead]]


def add_values(f, words, more, state, any_scale):
    """O^T += K^T P^T; the next tile, if there is ``more``, is sent for on the way.

    While a step's products run, the next step is converted and the one ``ahead`` of that is read; ``words`` are those
    read so far. Half of the tile is free once its last step is converted.
    """
    n, parity, ahead = f.size.n, f.parity, f.size.ahead
    middle, last = len(STEPS) // 2, len(STEPS) - 1
    frees = {middle - 1: f.first_half_free, last: f.second_half_free}
    acc = {g: [state.acc[g * n + k] for k in range(n)] for g in range(8)}
    words = list(words)
    fragments = value_fragments(STEPS[0][0], words.pop(0), any_scale)
    for k, (group, half) in enumerate(STEPS):
        acc[group] = multiply_values(f, acc[group], group, half, fragments, any_scale)
        if k < last:
            fragments = value_fragments(STEPS[k + 1][0], words.pop(0), any_scale)
        if k + 1 in frees:
            ptx_async.mbarrier_arrive_if(frees[k + 1], ptx.leader())
        if k + ahead < last:
            words.append(value_words(f, *STEPS[k + ahead + 1]))
        if k == middle:
            ptx_async.mbarrier_wait(f.first_half_free, parity)
        if k in (middle, middle + 2):
            ptx.when(more, lambda part=(k - middle) // 2: f.keys.copy(0, part, parity ^ 1))
        if k < last:
            ptx_async.wgmma_wait(1)
    ptx_async.mbarrier_wait(f.second_half_free, parity)
    ptx.when(more, lambda: f.keys.copy_half(1, parity ^ 1))
    done = ptx_async.wgmma_wait_for(0, [v for g in range(8) for v in acc[g]])
    for k in range(8 * n):
        state.acc[k] = done[k]
    # Only now: no warp passes the next tile's barrier, and writes weights, before all products have read these.
    f.keys.expect(parity ^ 1, more)


def multiply_values(f, acc, group, half, fragments, any_scale):
    """Send a step's two products on their way; for any scale, one at a time, as operands are short of registers."""
    for s, (fragment, kind) in enumerate(fragments):
        if s == 0 or any_scale:
            ptx_async.wgmma_fence()
        place = group * f.size.group_bytes + half * 64 + 32 * s
        acc = f.written.product(acc, fragment, place, kind, turn=s)
        if s or any_scale:
            ptx_async.wgmma_commit()
        if any_scale:
            ptx_async.wgmma_wait(0)
    return acc


def tile(f, it, end, before, state, any_scale):
    """Everything of tile ``it``; tile ``it + 1`` is on its way afterwards. ``before``: tiles of earlier passes."""
    count = it + before
    f.parity = count & 1
    f.keys.locate(it + 1, end, f.parity ^ 1)
    f.queries, f.written = Operand(f.q_descriptor), Operand(f.p_descriptor)
    ptx_async.mbarrier_wait(f.full + f.parity * 8, (count >> 1) & 1)
    scales = scale_words(f)
    s = own_logits((logits_any if any_scale else usual_logits)(f, scales))
    own = list(zip(*scales, strict=True))
    words = first_values(f)
    weights(f, state, s, own, any_scale)
    add_values(f, words, ptx.less(it + 1, end), state, any_scale)
