"""Device code that prefill and decode share: which tiles a row reads, how bytes become bf16 rows, one softmax step.

Belongs here: ``triton.jit`` helpers and the constants they share. Does not belong here: launches, tables of settings,
anything that runs on the host. (No ``from __future__ import annotations``: Triton reads the annotations.)

Orientation. Keys are the rows of a tile (M), heads its columns (N): ``S^T = K Q^T`` and ``O^T += K^T P^T``. A head is
then one column of every matrix product: its bits depend neither on how many columns stand beside it nor on what they
hold. The 512 dims of V are cut into pieces of 128 or 64, each with an accumulator of its own.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM109 -- Triton code concatenates tuples and compares one by one

import triton
import triton.language as tl

BF16 = tl.constexpr(0)  # plain bf16 rows of 512 dims
V4 = tl.constexpr(1)  # 448 e4m3, 64 bf16, scales in the footer of the page
V32 = tl.constexpr(2)  # 512 e4m3, 4 float32 scales, 64 bf16
BF16_TAIL = tl.constexpr(3)  # plain bf16 rows of 576 dims
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


@triton.constexpr_function
def nope_end(layout):
    """The first dim that is not e4m3 in a packed row; 512 in a bf16 row."""
    return 448 if layout == 1 else 512


@triton.constexpr_function
def piece_start(p, layout, wide):
    """First dim of piece ``p`` of a row: it is cut into ``wide`` dims as far as ``nope_end``, then into 64."""
    pieces = (448 if layout == 1 else 512) // wide
    return p * wide if p < pieces else pieces * wide + (p - pieces) * 64


@triton.constexpr_function
def piece_size(p, layout, wide):
    """Dims of piece ``p``."""
    return wide if p < (448 if layout == 1 else 512) // wide else 64


@triton.constexpr_function
def v_pieces(layout, wide):
    """Pieces of the 512 dims of V."""
    pieces = (448 if layout == 1 else 512) // wide
    return pieces + (512 - pieces * wide) // 64


@triton.constexpr_function
def piece_count(layout, wide):
    """Pieces of a row: those of V, and one more where a row has 576 dims."""
    pieces = (448 if layout == 1 else 512) // wide
    return pieces + (512 - pieces * wide) // 64 + (1 if layout >= 2 else 0)


@triton.constexpr_function
def piece_end(p, layout, wide):
    """``p``, or the number of pieces where that is less."""
    pieces = (448 if layout == 1 else 512) // wide
    return min(p, pieces + (512 - pieces * wide) // 64 + (1 if layout >= 2 else 0))


@triton.jit
def piece_dims(p: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr):
    """The dims of piece ``p``."""
    return tl.arange(0, piece_size(p, LAYOUT, WIDE)) + piece_start(p, LAYOUT, WIDE)


@triton.jit
def load_q(q, column, mask, LAYOUT: tl.constexpr, WIDE: tl.constexpr):
    """The query row of each head in pieces ``[dims, H heads]``; columns past the last head are 0, never stored."""
    pointers = q + column[None, :]
    pieces = ()
    for p in tl.static_range(piece_count(LAYOUT, WIDE)):
        place = pointers + piece_dims(p, LAYOUT, WIDE)[:, None]
        pieces = pieces + (tl.load(place, mask=mask[None, :], other=0.0),)
    return pieces


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
        begin = tl.multiple_of(begin, 8 if LAYOUT == BF16 or LAYOUT == BF16_TAIL else 16)
        scales = tl.multiple_of(scales, 8)
    return begin, scales, valid


@triton.jit
def load_words(rows, word, mask, ALIGN: tl.constexpr):
    """32-bit word ``word`` of each row; byte by byte where the cache's alignment allows no wider load."""
    if ALIGN == 16:
        words = tl.load(rows.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    else:
        words = tl.load(rows + word * 4, mask=mask, other=0).to(tl.int32)
        for i in tl.static_range(1, 4):
            words |= tl.load(rows + (word * 4 + i), mask=mask, other=0).to(tl.int32) << (8 * i)
    return words


@triton.jit
def fetch(cache, begin, valid, p: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr):
    """Piece ``p`` of each row as it stands in memory; lanes that are not valid load nothing and are 0.

    Of a packed cache: the words of a piece of e4m3 dims, or two times 16 words of the rope dims. Words, because they
    wait in registers for their turn, and single bytes would take a register each.
    """
    mask = valid[:, None]
    rows = (cache + begin)[:, None]
    if LAYOUT == BF16 or LAYOUT == BF16_TAIL:
        raw = (tl.load(rows + piece_dims(p, LAYOUT, WIDE)[None, :], mask=mask, other=0.0),)
    elif piece_start(p, LAYOUT, WIDE) < nope_end(LAYOUT):
        word = tl.arange(0, piece_size(p, LAYOUT, WIDE) // 4) + piece_start(p, LAYOUT, WIDE) // 4
        raw = (load_words(rows, word[None, :], mask, ALIGN),)
    else:
        # Column c of the first half is word 8 * (c // 4) + c % 4, of the second half the word 4 further on: a thread
        # that holds 4 columns of both then holds 16 dims in a row, as it does in the other pieces.
        column = tl.arange(0, 16)[None, :]
        half = (column // 4) * 8 + column % 4 + (112 if LAYOUT == V4 else 132)
        raw = (load_words(rows, half, mask, ALIGN), load_words(rows, half + 4, mask, ALIGN))
    return raw


@triton.jit
def load_scales(cache, begin, scales, valid, LAYOUT: tl.constexpr, ALIGN: tl.constexpr):
    """v4: the footer's 7 e8m0 bytes as one integer; v32: four float32."""
    out = ()
    if LAYOUT == V4:
        if ALIGN == 16:
            packed = tl.load((cache + scales).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
        else:
            packed = tl.load(cache + scales, mask=valid, other=0).to(tl.int64)
            for i in tl.static_range(1, 7):
                packed |= tl.load(cache + scales + i, mask=valid, other=0).to(tl.int64) << (8 * i)
        out = (packed,)
    if LAYOUT == V32:
        for g in tl.static_range(4):
            out = out + (load_words(cache + begin, 128 + g, valid, ALIGN).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def e8m0(packed, g: tl.constexpr):
    """The float32 scale of v4's group ``g`` of each row.

    A byte b means 2^(b-127). Shifted into a float32 exponent it is that value for 1..254; byte 0 is the subnormal
    2^-127 and byte 255 is NaN, which both want the same mantissa bit.
    """
    byte = ((packed >> (8 * g)) & 255).to(tl.int32)
    extreme = (byte == 0) | (byte == 255)
    return tl.where(extreme, (byte << 23) | 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(scales, p: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr):
    """The float32 scales of the dims of piece ``p``, to be broadcast over them."""
    if LAYOUT == V4:
        scale = e8m0(scales[0], piece_start(p, LAYOUT, WIDE) // 64)[:, None]
        if piece_size(p, LAYOUT, WIDE) == 128:
            second = e8m0(scales[0], piece_start(p, LAYOUT, WIDE) // 64 + 1)[:, None]
            scale = tl.where(tl.arange(0, 128)[None, :] < 64, scale, second)
    else:
        scale = scales[piece_start(p, LAYOUT, WIDE) // 128][:, None]
    return scale


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
    """e4m3 bytes times their scales, rounded to bf16: the same two float32 steps as ``cache.unpack_kv``.

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
    return to_bf16(value * scale, MATH)


@triton.jit
def unpack_bytes(words):
    """Words ``[keys, n]`` as bytes ``[keys, 4 * n]``, the low byte first."""
    low = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    high = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return tl.reshape(tl.join(low, high), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def unpack_rope(first, second):
    """The two halves of the rope words, as ``fetch`` cut them, as bf16 ``[keys, 64]``."""
    KEYS: tl.constexpr = first.shape[0]
    a = tl.join(first.to(tl.int16), (first >> 16).to(tl.int16))
    b = tl.join(second.to(tl.int16), (second >> 16).to(tl.int16))
    both = tl.join(tl.reshape(a, (KEYS, 32)), tl.reshape(b, (KEYS, 32)))
    both = tl.permute(tl.reshape(both, (KEYS, 4, 8, 2)), (0, 1, 3, 2))
    return tl.reshape(both, (KEYS, 64)).to(tl.bfloat16, bitcast=True)


@triton.jit
def anchor(tile, cache, never):
    """``tile`` itself, as the result of a load that never happens.

    Triton keeps the left operand of a Hopper matrix product in shared memory, one copy for both products, when it comes
    from a load; when it comes from arithmetic, it moves the arithmetic behind layout conversions and does it twice. A
    load also fixes the layout of its result: 16 elements of a row to a thread, as the bytes were read.
    ``never`` is 0 in no case, which Triton's own passes do not see and LLVM does: no instruction is left of the load.
    """
    KEYS: tl.constexpr = tile.shape[0]
    pointers = (cache + tl.arange(0, KEYS) * 64).to(tl.pointer_type(tile.dtype))
    pointers = pointers[:, None] + tl.arange(0, tile.shape[1])[None, :]
    return tl.load(pointers, mask=(tl.zeros(tile.shape, tl.int32) + never) == 0, other=tile)


@triton.jit
def decode(
    raw, scales, valid, cache, never,
    p: tl.constexpr, LAYOUT: tl.constexpr, WIDE: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Piece ``p`` as ``fetch`` returned it, as bf16 ``[keys, dims]``.

    The tail of a 576-dim row is no V and comes last. It alone is not to come from a load: its place in shared memory
    would be given to the weights of the second product, and the ptxas of Triton 3.6 then reads the descriptor of that
    product from registers that it writes later.
    """
    if LAYOUT == BF16 or LAYOUT == BF16_TAIL:
        piece = raw[0]
        if piece_start(p, LAYOUT, WIDE) == 512:
            piece = tl.where(valid[:, None], piece, 0.0)
    elif piece_start(p, LAYOUT, WIDE) < nope_end(LAYOUT):
        data = anchor(unpack_bytes(raw[0]), cache, never)
        piece = anchor(dequantise(data, scale_of(scales, p, LAYOUT, WIDE), MATH), cache, never)
    else:
        piece = unpack_rope(raw[0], raw[1])
        if LAYOUT == V4:
            piece = anchor(piece, cache, never)
    return piece


@triton.jit
def product(a, b, acc, MATH: tl.constexpr):
    """``acc + a b`` in float32. Triton's interpreter multiplies the bits of bf16 as integers, so it gets float32."""
    if MATH == INTERPRETER:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def listed_keys(t, end, full1, idx1, idx2, lanes1, lanes2, BLOCK: tl.constexpr):
    """The indices of tile ``t``, -1 past the row's lanes and in a tile at or past ``end``."""
    one = t < full1
    lane = tl.where(one, t, t - full1) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.where(t < end, tl.where(one, lanes1, lanes2), 0)
    return tl.load(tl.where(one, idx1, idx2) + lane, mask=lane < lanes, other=-1)


@triton.jit
def locate_tile(
    t, end, full1, idx1, idx2, lanes1, lanes2,
    slots1, slots2, page1, page2, page_stride1, page_stride2, row_stride1, row_stride2,
    LAYOUT: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``locate`` for the keys of tile ``t`` of a row."""
    one = t < full1
    return locate(
        listed_keys(t, end, full1, idx1, idx2, lanes1, lanes2, BLOCK), tl.where(one, slots1, slots2),
        tl.where(one, page1, page2), tl.where(one, page_stride1, page_stride2), tl.where(one, row_stride1, row_stride2),
        LAYOUT, POW2, ALIGN,
    )  # fmt: skip


@triton.jit
def attend_tiles(
    q, kv1, kv2, idx1, idx2, lanes1, lanes2, tile0, tiles, full1,
    slots1, slots2, page1, page2, page_stride1, page_stride2, row_stride1, row_stride2, scale_log2, h_q,
    LAYOUT: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, POW2: tl.constexpr,
    ALIGN: tl.constexpr, MATH: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Online softmax over ``tiles`` tiles of a row, from tile ``tile0`` of its list: first set, then second set.

    The first ``full1`` tiles of a row are those of the first set. Returns accumulators ``[dims, H]``, one a piece
    of the first 512 dims, the running maximum (in log2 units) and the sum of the weights; nothing is normalised. With
    AHEAD, that many pieces are on their way at any time, in registers, the next tile's among them; the barrier of each
    product keeps the compiler from having more, which would not fit. Without, AT_ONCE pieces are loaded at a time.
    """
    PIECES: tl.constexpr = piece_count(LAYOUT, WIDE)
    peak = tl.full((H,), float("-inf"), tl.float32)
    weights = tl.zeros((BLOCK, H), tl.float32)
    acc = ()
    for p in tl.static_range(v_pieces(LAYOUT, WIDE)):
        acc = acc + (tl.zeros((piece_size(p, LAYOUT, WIDE), H), tl.float32),)
    end = tile0 + tiles
    if AHEAD:
        begin, footer, valid = locate_tile(
            tile0, end, full1, idx1, idx2, lanes1, lanes2, slots1, slots2, page1, page2, page_stride1, page_stride2,
            row_stride1, row_stride2, LAYOUT, BLOCK, POW2, ALIGN,
        )  # fmt: skip
        cache = tl.where(tile0 < full1, kv1, kv2)
        scales = load_scales(cache, begin, footer, valid, LAYOUT, ALIGN)
        flight = ()
        for p in tl.static_range(AHEAD):
            flight = flight + (fetch(cache, begin, valid, p, LAYOUT, WIDE, ALIGN),)
    # Loop-invariant code motion would keep dozens of matrix descriptors in registers, and spill them.
    for t in tl.range(tile0, end, num_stages=STAGES, disable_licm=True):
        k = ()
        s = tl.zeros((BLOCK, H), tl.float32)
        if AHEAD:
            cache = tl.where(t < full1, kv1, kv2)
            now = scales
            for p in tl.static_range(PIECES):
                piece = decode(flight[0], now, valid, kv1, h_q | 1, p, LAYOUT, WIDE, MATH)
                s = product(piece, q[p], s, MATH)
                k = k + (piece,)
                if p + AHEAD == PIECES:
                    begin, footer, valid = locate_tile(
                        t + 1, end, full1, idx1, idx2, lanes1, lanes2, slots1, slots2, page1, page2, page_stride1,
                        page_stride2, row_stride1, row_stride2, LAYOUT, BLOCK, POW2, ALIGN,
                    )  # fmt: skip
                    cache = tl.where(t + 1 < full1, kv1, kv2)
                    scales = load_scales(cache, begin, footer, valid, LAYOUT, ALIGN)
                moved = ()
                for i in tl.static_range(1, AHEAD):
                    moved = moved + (flight[i],)
                flight = moved + (fetch(cache, begin, valid, (p + AHEAD) % PIECES, LAYOUT, WIDE, ALIGN),)
        else:
            begin, footer, valid = locate_tile(
                t, end, full1, idx1, idx2, lanes1, lanes2, slots1, slots2, page1, page2, page_stride1, page_stride2,
                row_stride1, row_stride2, LAYOUT, BLOCK, POW2, ALIGN,
            )  # fmt: skip
            cache = tl.where(t < full1, kv1, kv2)
            scales = load_scales(cache, begin, footer, valid, LAYOUT, ALIGN)
            for first in tl.static_range(0, PIECES, AT_ONCE):
                flight = ()
                for p in tl.static_range(first, piece_end(first + AT_ONCE, LAYOUT, WIDE)):
                    flight = flight + (fetch(cache, begin, valid, p, LAYOUT, WIDE, ALIGN),)
                for p in tl.static_range(first, piece_end(first + AT_ONCE, LAYOUT, WIDE)):
                    k = k + (decode(flight[p - first], scales, valid, kv1, h_q | 1, p, LAYOUT, WIDE, MATH),)
                for p in tl.static_range(first, piece_end(first + AT_ONCE, LAYOUT, WIDE)):
                    s = product(k[p], q[p], s, MATH)
        listed = listed_keys(t, end, full1, idx1, idx2, lanes1, lanes2, BLOCK)
        here = (listed >= 0) & (listed.to(tl.int64) < tl.where(t < full1, slots1, slots2))
        s = tl.where(here[:, None], s * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no valid key yet: every weight is exp2(-inf) = 0
        weight = tl.exp2(s - base[None, :])
        decay = tl.exp2(peak - base)
        weights = weights * decay[None, :] + weight
        rounded = to_bf16(weight, MATH)
        new_acc = ()
        for p in tl.static_range(v_pieces(LAYOUT, WIDE)):
            new_acc = new_acc + (product(tl.trans(k[p]), rounded, acc[p] * decay[None, :], MATH),)
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
