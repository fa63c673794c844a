"""One tile of 64 keys of the native-width kernel: logits, weights, and what they add to the output.

Belongs here: the arithmetic of a tile and the hand-over to the next one. Does not belong here: the life of a row
(``hopper_native.py``), instructions (``ptx.py``).

Orientation. Keys are the rows (M) of both products and heads their columns (N): ``S^T = K Q^T``, ``O^T += K^T P^T``, so
no padded head is computed and a head's bits do not depend on the others. Eight warps, two warpgroups; each owns four of
the eight groups of 64 dims, in both products. Keys come out of shared memory as they lie in the cache, are converted in
registers and go into the matrix unit as its register operand.

Key r of a tile stands in shared row r. Row ``i`` of a product is key ``permuted(i)``: with it, 16-byte reads of eight
neighbouring rows and transposed reads are both free of bank conflicts.

Two kinds of arithmetic, chosen by the row's scales alone:

* usual: every e8m0 byte of the row is in [112, 127]. Values are f16, weights carry the scale times 2^10 as f16.
* any: everything is bf16, for q, scales and weights in every exponent; scales join in float32.

Usual logits are f16 products per group of 64 dims (e4m3 is exact in f16; q is brought into f16's range by a power of
two per head), with the group's scale in float32.
"""

# mypy: ignore-errors

from cutlass import Float32, Int32

from headfit.kernels import ptx, ptx_async

PITCH = 592  # bytes between rows in shared memory: 576 of the row, 2 x 8 for the scales of this tile and the next
SCALES = 576
THREADS = 256
LAZY = 0x40800000  # 4.0: a maximum is only replaced when a logit exceeds it by 2^4 (f16 weights stay below 2^15)
ONE = 0x3F800000  # the bits of 1.0
MINUS_INFINITY = float("-inf")


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
    """The raw bytes of this thread's two rows: 16 dims of each (a rope group: the first 8 of 32 dims twice)."""
    return [ptx.lds128(f.rows, 64 * group), ptx.lds128(f.rows, 64 * group + 8 * PITCH)]


def key_fragments(f, group, words, half):
    """Two register operands (64 keys x 16 dims each) of half a group, and their type."""
    if group == 7:
        upper, lower = words if half == 0 else (ptx.lds128(f.rows, 512), ptx.lds128(f.rows, 512 + 8 * PITCH))
        return [[upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1]] for s in range(2)], "bf16"
    fragments = []
    for s in (2 * half, 2 * half + 1):
        a0, a2 = ptx.e4m3_to_f16(words[0][s])
        a1, a3 = ptx.e4m3_to_f16(words[1][s])
        fragments.append([a0, a1, a2, a3])
    return fragments, "f16"


def rescaled(acc, factors):
    """Accumulators times the factor of their row (the thread has two)."""
    return [ptx.fmul(v, factors[(i >> 1) & 1]) for i, v in enumerate(acc)]


def group_steps(word, wg):
    """Exponent bytes of what the sum is multiplied by after each of four groups: scale over next scale; then the scale.

    ``word`` are the scale bytes of a row's four groups, each in [112, 127], so no byte borrows from its neighbour. The
    fourth group of the second warpgroup is rope, which has no scale.
    """
    if wg:
        word = word & 0x00FFFFFF
    return word + (0x00007F7F if wg else 0x007F7F7F) - ptx.shr(word, 8)


def partial_logits(f, wg, words0, words1):
    """This warpgroup's share of S^T over its four groups of dims: ``n`` float32 of 64 keys x H heads.

    ``words0``, ``words1``: the scale bytes of this warpgroup's groups, of the thread's two rows. The sum is kept in
    units of the scale of the group at hand, which costs no second accumulator; between two groups it is multiplied by
    the exact power of two between their scales. Half a group is under way at a time.
    """
    acc = [Float32(0.0)] * f.size.n
    words = key_words(f, 4 * wg)
    steps = [group_steps(w, wg) for w in (words0, words1)]
    for k in range(8):
        i, half = k >> 1, k & 1
        group = 4 * wg + i
        fragments, kind = key_fragments(f, group, words, half)
        if half and i < 3:
            words = key_words(f, group + 1)
        ptx_async.wgmma_fence()
        for s in range(2):
            place = group * f.size.group_bytes + 64 * half + 32 * s
            acc = ptx_async.wgmma(acc, fragments[s], f.q_descriptor, place, kind, k == 0 and s == 0)
        ptx_async.wgmma_commit()
        if not half:
            ptx_async.wgmma_wait(0)
            continue
        acc = ptx_async.wgmma_wait_for(0, acc)
        if group < 7:
            acc = rescaled(acc, [ptx.as_float(scale_bits(w, i)) for w in steps])
    return acc


def partial_logits_any(f, wg, words0, words1):
    """``partial_logits`` for every scale byte and q in every exponent: bf16 keys as `headfit.unpack_kv` has them."""
    acc = [Float32(0.0)] * f.size.n
    for k in range(8):
        i, half = k >> 1, k & 1
        group = 4 * wg + i
        if not half:
            words = key_words(f, group)
        fragments, kind = key_fragments(f, group, words, half)
        if kind == "f16" and not half:
            scales = [scale_of(w, i) for w in (words0, words1)]
        for s, fragment in enumerate(fragments):
            if kind == "f16":
                fragment = [ptx.f16_to_bf16(x, scales[j & 1]) for j, x in enumerate(fragment)]
            ptx_async.wgmma_fence()
            place = group * f.size.group_bytes + 64 * half + 32 * s
            acc = ptx_async.wgmma(acc, fragment, f.q_descriptor, place, "bf16", k == 0 and s == 0)
            ptx_async.wgmma_commit()
            acc = ptx_async.wgmma_wait_for(0, acc)
    return acc


def exchanged_logits(f, wg, part):
    """Add the other warpgroup's share; each keeps one of the thread's two rows: H / 4 float32 for its own key."""
    size = f.size
    keep, send = [], []
    for j in range(size.n // 4):
        first, second = part[4 * j : 4 * j + 2], part[4 * j + 2 : 4 * j + 4]
        keep += second if wg else first
        send += first if wg else second
    mine, other = f.exchange(), []
    if size.nv == 2:
        ptx.sts64f(mine, send, wg * size.exchange_bytes)
    for q in range(size.nv // 4):
        ptx.sts128f(mine, send[4 * q : 4 * q + 4], wg * size.exchange_bytes + q * 2048)
    ptx.sync_pair(f.warp + 1)  # the warps of the same rows in both warpgroups
    if size.nv == 2:
        other = ptx.lds64f(mine, (1 - wg) * size.exchange_bytes)
    for q in range(size.nv // 4):
        other += ptx.lds128f(mine, (1 - wg) * size.exchange_bytes + q * 2048)
    return [ptx.fadd(k, o) for k, o in zip(keep, other, strict=True)]


# --- weights


def put_weights(f, wg, p, own, any_scale):
    """Write P to shared memory, once for each group of dims, times that group's scale of the own key."""
    pairs = [(p[2 * j], p[2 * j + 1]) for j in range(f.size.nv // 2)]
    stride, place = f.size.group_bytes, f.weights(wg)
    ptx.stmatrix_trans(place, [ptx.pack_bf16(a, b) for a, b in pairs], 7 * stride)
    if any_scale:
        for g in range(7):
            s = scale_of(own[g // 4], g % 4)
            packed = [ptx.pack_bf16(ptx.fmul(a, s), ptx.fmul(b, s)) for a, b in pairs]
            ptx.stmatrix_trans(place, packed, g * stride)
    else:
        shifted = ((own[0] - 0x66666666) << 2, (own[1] - 0x00666666) << 2)
        halves = [ptx.pack_f16(a, b) for a, b in pairs]
        for g in range(7):
            factor = weight_factor(shifted[g // 4], g % 4)
            ptx.stmatrix_trans(place, [ptx.mul_f16x2(h, factor) for h in halves], g * stride)
    ptx_async.fence_async()


def weights(f, wg, state, s, own, present, any_scale):
    """P = 2^(S - m) of the own key, written for everyone; maxima and sums are brought up to date.

    The running maximum of a head is only replaced when a logit exceeds it by 2^4 (for any scale: when it exceeds it, so
    that no weight is above 1): then all threads rescale. A head that does not exceed keeps its bits. The same branch
    notes scales that the usual arithmetic does not hold for.
    ``state.total`` is the sum over this warp's keys, of the head that the lane keeps.
    """
    x, _ = log_weights(f, s, present)
    top = x[0]
    for v in x[1:]:
        top = ptx.fmax(top, v)
    p = [ptx.ex2(v) for v in x]
    put_weights(f, wg, p, own, any_scale)
    flag = ptx.above(top, 0 if any_scale else LAZY)
    if not any_scale:
        flag = flag | ptx.unusual_scales(*own)

    def raised():
        if not any_scale:
            ptx.when(ptx.unusual_scales(*own), lambda: ptx.sts32(f.unusual, Int32(1)))
        raise_maxima(f, wg, state, s, present, own, any_scale)

    def kept():
        state.total[0] = ptx.fadd(state.total[0], summed(p))

    ptx.when(ptx.sync_or(flag, THREADS), raised, kept)


def summed(p):
    """Weights over the keys of this warp, of the head that the lane keeps."""
    return gathered(p, ptx.lane() >> 2, ptx.fadd)


def log_weights(f, s, present, maxima=None):
    """log2 of the weights of the own key, -inf without a key; and the scaled logits."""
    factors, known, table = [], [], f.maxima()
    for j in range(f.size.nv // 2):
        factors += ptx.lds64f(table, 128 + 32 * j)
        known += ptx.lds64f(table, 32 * j) if maxima is None else maxima[2 * j : 2 * j + 2]
    # rounded before the maximum is taken off, as the maximum itself was: fused, logits of 2^24 would leave halves
    logits = [ptx.fmul(v, factor) for v, factor in zip(s, factors, strict=True)]
    nothing = Float32(MINUS_INFINITY)
    x = [ptx.pickf(present, ptx.fadd(v, -m), nothing) for v, m in zip(logits, known, strict=True)]
    return x, [ptx.pickf(present, v, nothing) for v in logits]


def raise_maxima(f, wg, state, s, present, own, any_scale):
    """Replace the maximum of each head that is exceeded, rescale what was added, write P anew and add it."""
    size, lane = f.size, ptx.lane()
    _, logits = log_weights(f, s, present, [Float32(0.0)] * size.nv)
    own_maximum = f.head_maxima + f.head(lane) * 4
    old = ptx.lds32f(own_maximum)
    peaks = f.peaks + lane * 4
    ptx.sts32f(peaks + f.wid * 128, gathered(logits, lane >> 2, ptx.fmax))
    ptx.sync(THREADS)
    candidate = ptx.lds32f(peaks)
    for warp in range(1, 8):
        candidate = ptx.fmax(candidate, ptx.lds32f(peaks, 128 * warp))
    new = ptx.pickf(ptx.above(candidate - old, 0 if any_scale else LAZY), candidate, old)
    rescale = ptx.ex2(old - new)
    ptx.sts32f(own_maximum, new)  # every warp writes the same value
    maxima = []
    for i in range(size.nv):
        source = (lane & 3) + 4 * i
        maxima.append(ptx.shfl(new, source))
        factor = ptx.shfl(rescale, source)
        for group in range(4):
            for z in (4 * (i // 2) + (i & 1), 4 * (i // 2) + 2 + (i & 1)):
                k = group * size.n + z
                state.acc[k] = ptx.fmul(state.acc[k], factor)
    p = [ptx.ex2(v) for v in log_weights(f, s, present, maxima)[0]]
    state.total[0] = ptx.fma(state.total[0], rescale, summed(p))
    put_weights(f, wg, p, own, any_scale)
    ptx.sync(THREADS)


# --- the second product


def value_words(f, group, half):
    """32 keys of a group, transposed: four words of e4m3 pairs, or eight of rope dims."""
    if group < 7:
        return ptx.ldmatrix_trans4(f.columns, 64 * group + half * 32 * PITCH)
    place = 448 + half * 32 * PITCH
    return ptx.ldmatrix_trans4(f.rope_columns(), place) + ptx.ldmatrix_trans4(f.rope_columns(), place + 16)


def value_fragment(group, words, s, any_scale):
    """One register operand (64 dims x 16 keys), and its type."""
    if group == 7:
        return [words[2 * s], words[4 + 2 * s], words[2 * s + 1], words[5 + 2 * s]], "bf16"
    values = [*ptx.e4m3_columns_to_f16(words[2 * s]), *ptx.e4m3_columns_to_f16(words[2 * s + 1])]
    return ([ptx.f16_to_bf16(v, Float32(1.0)) for v in values], "bf16") if any_scale else (values, "f16")


def add_values(f, wg, more, state, any_scale):
    """O^T += K^T P^T over this warpgroup's four groups; the next tile, if there is ``more``, is sent for on the way."""
    n, parity = f.size.n, f.parity
    order = [0, 1, 2, 3] if wg == 0 else [3, 0, 1, 2]
    acc = {i: [state.acc[i * n + k] for k in range(n)] for i in range(4)}
    steps = [(i, half) for half in range(2) for i in order]
    words = value_words(f, 4 * wg + steps[0][0], steps[0][1])
    for k, (i, half) in enumerate(steps):
        group = 4 * wg + i
        for batch in [(0,), (1,)] if any_scale else [(0, 1)]:
            fragments = [value_fragment(group, words, s, any_scale) for s in batch]
            ptx_async.wgmma_fence()
            for s, (fragment, kind) in zip(batch, fragments, strict=True):
                place = group * f.size.group_bytes + half * 64 + 32 * s
                acc[i] = ptx_async.wgmma(acc[i], fragment, f.p_descriptor, place, kind)
            ptx_async.wgmma_commit()
            if any_scale:
                ptx_async.wgmma_wait(0)
        if k + 1 < len(steps):
            words = value_words(f, 4 * wg + steps[k + 1][0], steps[k + 1][1])
            ptx_async.wgmma_wait(0)
        if k == 3:
            ptx_async.mbarrier_arrive_if(f.first_half_free, ptx.leader())
        if k == 4:
            ptx_async.mbarrier_wait(f.first_half_free, parity)
            ptx.when(more, lambda: f.keys.copy(0, parity ^ 1))
    ptx_async.mbarrier_arrive_if(f.second_half_free, ptx.leader())
    done = ptx_async.wgmma_wait_for(0, [v for i in range(4) for v in acc[i]])
    for k in range(4 * n):
        state.acc[k] = done[k]
    ptx_async.mbarrier_wait(f.second_half_free, parity)
    ptx.when(more, lambda: f.keys.copy(1, parity ^ 1))


def tile(f, wg, it, end, before, state, any_scale):
    """Everything of tile ``it``; tile ``it + 1`` is on its way afterwards. ``before``: tiles of earlier passes."""

    count = it + before
    f.parity = count & 1
    if f.size.early_lookup:
        f.keys.locate(it + 1, end, f.parity ^ 1)
    ptx_async.mbarrier_wait(f.full + f.parity * 8, (count >> 1) & 1)
    if not f.size.early_lookup:
        f.keys.locate(it + 1, end, f.parity ^ 1)
    row = f.rows - ((ptx.lane() & 3) << 4) + f.parity * 8
    words = [ptx.lds32(row, SCALES + 8 * PITCH * i + 4 * wg) for i in range(2)]
    part = (partial_logits_any if any_scale else partial_logits)(f, wg, *words)
    s = exchanged_logits(f, wg, part)
    own = ptx.lds64(row, SCALES + 8 * wg * PITCH)
    weights(f, wg, state, s, own, ptx.positive(own[1]), any_scale)
    add_values(f, wg, ptx.less(it + 1, end), state, any_scale)
