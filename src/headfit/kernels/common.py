"""Device code that prefill and decode share: which tiles a row reads, how bytes become bf16 rows, one softmax step.

Belongs here: ``triton.jit`` helpers and the constants they share. Does not belong here: launches, tables of settings,
anything that runs on the host. (No ``from __future__ import annotations``: Triton reads the annotations.)

Orientation. Keys are the rows of a tile (M), heads its columns (N): ``S^T = K Q^T`` and ``O^T += K^T P^T``. A head is
then one column of every matrix product: its bits depend neither on how many columns stand beside it nor on what they
hold. The 512 dims of V are eight chunks of 64, each with an accumulator of its own.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 -- Triton code concatenates tuples, it does not unpack them

import triton
import triton.language as tl

BF16 = tl.constexpr(0)  # plain bf16 rows
V4 = tl.constexpr(1)  # 448 e4m3, 64 bf16, scales in the footer of the page
V32 = tl.constexpr(2)  # 512 e4m3, 4 float32 scales, 64 bf16
CHUNK = tl.constexpr(64)  # dims of a chunk: one scale group of v4, half of one of v32
# What the target computes with: e4m3 conversions, else integer steps; and whether bf16 products exist at all.
INTERPRETER = tl.constexpr(0)
INTEGER = tl.constexpr(1)
CONVERT = tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Bits of the ``flags`` argument: what is optional in a call is chosen at run time, so it makes no further binaries.
HAS_SINK = tl.constexpr(1)
HAS_MAX_LOGITS = tl.constexpr(2)
HAS_LENGTHS_1 = tl.constexpr(4)
HAS_LENGTHS_2 = tl.constexpr(8)


@triton.jit
def clamped_length(lengths, position, present, topk):
    """Lanes of a row that may be read: ``clamp(length, 0, topk)``, or topk where the call has no lengths."""
    n = tl.load(lengths + position, mask=present != 0, other=topk)
    return tl.minimum(tl.maximum(n, 0), topk)


@triton.jit
def load_q(q, column, mask, D_QK: tl.constexpr):
    """The query row of each head as chunks ``[64 dims, H heads]``; columns past the last head are 0, never stored."""
    dims = tl.arange(0, CHUNK)
    pointers = q + column[None, :] + dims[:, None]
    chunks = ()
    for g in tl.static_range(D_QK // CHUNK):
        chunks = chunks + (tl.load(pointers + g * CHUNK, mask=mask[None, :], other=0.0),)
    return chunks


@triton.jit
def locate(index, slots, page, page_stride, row_stride, LAYOUT: tl.constexpr, POW2: tl.constexpr, ALIGN: tl.constexpr):
    """Where the row of each index begins and, for v4, where its scales do, in elements of the cache; and its validity.

    ``page`` is log2 of the page size where POW2, else the page size. All offsets are 64 bit.
    """
    valid = (index >= 0) & (index.to(tl.int64) < slots)
    if POW2:
        number = index >> page
        row = index - (number << page)
        page_size = tl.full((), 1, tl.int64) << page.to(tl.int64)
    else:
        number = index // page
        row = index - number * page
        page_size = page.to(tl.int64)
    first = number.to(tl.int64) * page_stride
    if LAYOUT == V4:
        begin = first + row * 576
    elif LAYOUT == V32:
        begin = first + row * 656
    else:
        begin = first + row.to(tl.int64) * row_stride
    scales = first + page_size * 576 + row * 8
    if ALIGN == 16:
        begin = tl.multiple_of(begin, 8 if LAYOUT == BF16 else 16)
        scales = tl.multiple_of(scales, 8)
    return begin, scales, valid


@triton.jit
def little_endian(cache, begin, valid, BYTES: tl.constexpr):
    """An integer of BYTES bytes at each address, for caches whose alignment allows no wider load."""
    value = tl.load(cache + begin, mask=valid, other=0).to(tl.int64)
    for i in tl.static_range(1, BYTES):
        value |= tl.load(cache + begin + i, mask=valid, other=0).to(tl.int64) << (8 * i)
    return value


@triton.jit
def load_bf16_chunk(cache, begin, valid, ALIGN: tl.constexpr):
    """64 bf16 dims of each row, from a byte cache."""
    dims = tl.arange(0, CHUNK)
    if ALIGN > 1:
        rows = (cache + begin).to(tl.pointer_type(tl.bfloat16))
        return tl.load(rows[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
    pointers = (cache + begin)[:, None] + 2 * dims[None, :]
    low = tl.load(pointers, mask=valid[:, None], other=0).to(tl.int16)
    high = tl.load(pointers + 1, mask=valid[:, None], other=0).to(tl.int16)
    return (low | (high << 8)).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_scales(cache, begin, scales, valid, LAYOUT: tl.constexpr, ALIGN: tl.constexpr):
    """One float32 scale for each chunk of e4m3 dims.

    An e8m0 byte b means 2^(b-127). Shifted into a float32 exponent it is that value for 1..254; byte 0 is the subnormal
    2^-127 and byte 255 is NaN, which both want the same mantissa bit.
    """
    out = ()
    if LAYOUT == V4:
        if ALIGN == 16:
            packed = tl.load((cache + scales).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
        else:
            packed = little_endian(cache, scales, valid, 7)
        for g in tl.static_range(7):
            byte = ((packed >> (8 * g)) & 255).to(tl.int32)
            extreme = (byte == 0) | (byte == 255)
            out = out + (tl.where(extreme, (byte << 23) | 0x400000, byte << 23).to(tl.float32, bitcast=True),)
    if LAYOUT == V32:
        for g in tl.static_range(4):
            if ALIGN == 16:
                place = (cache + begin + 512).to(tl.pointer_type(tl.float32)) + g
                scale = tl.load(place, mask=valid, other=0.0)
            else:
                scale = little_endian(cache, begin + 512 + 4 * g, valid, 4).to(tl.int32).to(tl.float32, bitcast=True)
            out = out + (scale, scale)
    return out


@triton.jit
def to_bf16(x, MATH: tl.constexpr):
    """float32 rounded to nearest, ties to even. Triton's interpreter would cut the low bits off instead."""
    if MATH == INTERPRETER:
        bits = x.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(x == x, upper, 0x7FC0)
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def dequantise(raw, scale, MATH: tl.constexpr):
    """e4m3 bytes times a scale per row, rounded to bf16: the same two float32 steps as ``cache.unpack_kv``.

    Without conversion instructions (SM80, the interpreter) the byte's fields are placed in a float32, whose
    exponent is then 120 too low: multiplying by 2^120 is exact, also for e4m3 subnormals.
    """
    if MATH == CONVERT:
        value = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = raw.to(tl.int32)
        field = byte & 0x7F
        bits = ((byte & 0x80) << 24) | (field << 20)
        value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        value = tl.where(field == 0x7F, float("nan"), value)
    return to_bf16(value * scale[:, None], MATH)


@triton.jit
def anchor(chunk, cache, begin, never):
    """``chunk`` itself, as the result of a load that never happens.

    Triton keeps the left operand of a Hopper matrix product in shared memory, shared by both products, when it comes
    from a load; when it comes from arithmetic, it moves the arithmetic behind two layout conversions and does it twice.
    ``never`` is false in a way that Triton's own passes do not see and LLVM does, so no instruction is left of it.
    """
    dims = tl.arange(0, CHUNK)
    pointers = (cache + begin).to(tl.pointer_type(tl.bfloat16))[:, None] + dims[None, :]
    return tl.load(pointers, mask=(tl.zeros((chunk.shape[0], CHUNK), tl.int32) + never) == 0, other=chunk)


@triton.jit
def load_rows(
    cache, begin, scales, valid, never,
    LAYOUT: tl.constexpr, D_QK: tl.constexpr, ALIGN: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Rows of a tile as bf16 chunks ``[BLOCK keys, 64 dims]``; lanes that are not valid load nothing and are 0."""
    dims = tl.arange(0, CHUNK)
    chunks = ()
    if LAYOUT == BF16:
        for g in tl.static_range(D_QK // CHUNK):
            pointers = (cache + begin)[:, None] + (dims + g * CHUNK)[None, :]
            chunks = chunks + (tl.load(pointers, mask=valid[:, None], other=0.0),)
    else:
        NOPE: tl.constexpr = 7 if LAYOUT == V4 else 8
        raw = ()
        for g in tl.static_range(NOPE):  # all loads of a tile first, then the arithmetic
            pointers = (cache + begin)[:, None] + (dims + g * CHUNK)[None, :]
            raw = raw + (tl.load(pointers, mask=valid[:, None], other=0),)
        rope = load_bf16_chunk(cache, begin + (448 if LAYOUT == V4 else 528), valid, ALIGN)
        scale = load_scales(cache, begin, scales, valid, LAYOUT, ALIGN)
        for g in tl.static_range(NOPE):
            chunks = chunks + (anchor(dequantise(raw[g], scale[g], MATH), cache, begin, never),)
        chunks = chunks + (rope,)
    return chunks


@triton.jit
def product(a, b, acc, MATH: tl.constexpr):
    """``acc + a b`` in float32. Triton's interpreter multiplies the bits of bf16 as integers, so it gets float32."""
    if MATH == INTERPRETER:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def attend_tiles(
    q, kv1, kv2, idx1, idx2, lanes1, lanes2, tile0, tiles, full1,
    slots1, slots2, page1, page2, page_stride1, page_stride2, row_stride1, row_stride2, scale_log2, h_q,
    LAYOUT: tl.constexpr, D_QK: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    POW2: tl.constexpr, ALIGN: tl.constexpr, MATH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over ``tiles`` tiles of a row, from tile ``tile0`` of its list: first set, then second set.

    The first ``full1`` tiles of a row are those of the first set. Returns eight accumulators ``[64 dims, H]``, the
    running maximum (in log2 units) and the sum of the weights, neither of them normalised.
    """
    peak = tl.full((H,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK, H), tl.float32)
    acc = ()
    for _ in tl.static_range(8):
        acc = acc + (tl.zeros((CHUNK, H), tl.float32),)
    # Loop-invariant code motion would keep dozens of matrix descriptors in registers, and spill them.
    for t in tl.range(tile0, tile0 + tiles, num_stages=STAGES, disable_licm=True):
        one = t < full1
        lane = tl.where(one, t, t - full1) * BLOCK + tl.arange(0, BLOCK)
        listed = tl.load(tl.where(one, idx1, idx2) + lane, mask=lane < tl.where(one, lanes1, lanes2), other=-1)
        begin, scales, valid = locate(
            listed, tl.where(one, slots1, slots2), tl.where(one, page1, page2),
            tl.where(one, page_stride1, page_stride2), tl.where(one, row_stride1, row_stride2), LAYOUT, POW2, ALIGN,
        )  # fmt: skip
        k = load_rows(tl.where(one, kv1, kv2), begin, scales, valid, h_q | 1, LAYOUT, D_QK, ALIGN, MATH)
        s = tl.zeros((BLOCK, H), tl.float32)
        for g in tl.static_range(D_QK // CHUNK):
            s = product(k[g], q[g], s, MATH)
        s = tl.where(valid[:, None], s * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no valid key yet: every weight is exp2(-inf) = 0
        p = tl.exp2(s - base[None, :])
        decay = tl.exp2(peak - base)
        weights = weights * decay[None, :] + p
        p16 = to_bf16(p, MATH)
        new_acc = ()
        for g in tl.static_range(8):
            new_acc = new_acc + (product(tl.trans(k[g]), p16, acc[g] * decay[None, :], MATH),)
        acc = new_acc
        peak = new_peak
    return acc, peak, tl.sum(weights, 0)


@triton.jit
def row_statistics(peak, total):
    """(lse, max_logits) in natural units. A row without keys has a total of exactly 0: +inf and -inf. NaN stays NaN."""
    lse = tl.where(total == 0.0, float("inf"), (peak + tl.log2(total)) * LN_2)
    return lse, tl.where(total == total, peak * LN_2, float("nan"))


@triton.jit
def row_factor(peak, total, sink):
    """What the accumulator of a head is multiplied by: 1 / (total + weight of the sink), 0 for a row without keys."""
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.where(total == 0.0, 0.0, 1.0 / (total + tl.exp2(sink * LOG2_E - base)))
