"""The `cpu` backend: vectorised torch in float32, straight from the packed bytes, in bounded memory.

Belongs here: how a call is cut into pieces and multiplied on a CPU. Does not belong here: checks (`ops` did them), or
the meaning of a packed row (`cache.unpack_kv` defines it; `_decode` must agree, and a test compares every byte value).

How it goes: the slots that a span of rows lists are decoded, once each, into a float32 table; each small group of rows
then gathers its keys from the table, 128 to a tile, and runs two products and a softmax over them.

Why bits repeat. BLAS picks its blocking by shape, so a head's bits are safe only if its products have one shape for any
`h_q`. Heads are therefore cut at fixed places (`HEAD_TILES`): head i always stands at the same place of the same
tile, in buffers of the same shape and stride, and a tile of 16 to 64 rows is multiplied whole. Keys are cut into tiles
of 128 lanes from the start of each key set. Rows are multiplied in groups (one batched product) whose size follows from
the key lists; with `batch_invariant` a group is one row, so that nothing of the other rows enters the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

import torch
from torch import Tensor

from headfit.cache import LAYOUTS, Layout, e8m0_to_float
from headfit.call import D_V, KeySet, SparseCall
from headfit.width import Capability

# Cuts over the heads: legal for any h_q, exact for 16, 32, 64, 128. Measured on an AVX2 EPYC (Zen 3, MKL 2024.2, one
# thread, GFLOP/s of [T, 512] x [512, 128]): T = 8: 43, 16: 60, 32: 73, 64: 81. So one tile of 64 would pay 4/5 of a
# 64-head call for 8 heads, tiles of 16 throughout would lose a quarter at 64 heads; these cuts lose 23 % there.
HEAD_TILES = (16, 16, 32, 64)
KEY_TILE = 128  # lanes of a product: 256 KB of float32 keys, what an L2 holds; 64 loses 7 %, 640 loses 20 %
BLOCK_TILES = 16  # tiles gathered before a softmax step: 4.5 MB for one row, and 2048 keys without a rescale
GROUP_TILES = 10  # rows x tiles of a group: batches a product over rows, and stays below the L3
SPAN_LANES = 1 << 18  # lanes whose slots are looked up at once
TABLE_ROWS = 1 << 15  # decoded rows held at once: 64 MB at 512 dims, 72 MB at 576
TABLE_TILES = TABLE_ROWS // KEY_TILE  # what fits a table even if no slot repeats
DECODE_ROWS = 1024  # rows decoded at once: fewer pays the overhead of an operator, more leaves the cache
DENSE_SLOTS = 1 << 23  # up to here a map over all slots finds the repeated ones (5 bytes a slot)
DENSE_RATIO = 16  # and only where the map is at most this many times longer than the list of lanes

_CPU: Final = torch.device("cpu")  # stated at every allocation: a caller may have set other defaults, bfloat16 or a GPU
_F32: Final = torch.float32
_E4M3_IN_F32 = 0x87F00000 - (1 << 32)  # sign, and the low bits of the exponent with the mantissa, as int32
_E4M3_BIAS = 120  # the exponent of float32 less that of e4m3: bits moved over are 2^-120 of their value


def available() -> str | None:
    """None: torch's own operators are all it takes."""
    return None


def unsupported(call: SparseCall) -> str | None:
    """None for every checked call on CPU tensors."""
    if call.q.device.type != "cpu":
        return f"runs on cpu tensors, q is on {call.q.device}"
    return None


def capability(compute_capability: tuple[int, int] | None = None) -> Capability:
    """Every head count from 1 to 128, one kernel for all row counts."""
    heads = range(1, 129)
    return Capability("cpu", compute_capability, row_split=0, prefill_heads=heads, decode_heads=heads)


@dataclass(frozen=True)
class _Set:
    """A key set over the rows of a segment."""

    keys: KeySet
    indices: Tensor  # int32 [rows, topk]
    lengths: Tensor | None  # int32 [rows]
    tiles: int


@dataclass(frozen=True)
class _Segment:
    """Rows of a call with one leading dim, all views: one batch item, or one query position of every item."""

    q: Tensor  # [rows, h_q, d_qk]
    out: Tensor  # [rows, h_q, 512]
    lse: Tensor  # [rows, h_q]
    max_logits: Tensor | None
    sets: tuple[_Set, ...]

    @property
    def tiles(self) -> int:
        return sum(s.tiles for s in self.sets)


@dataclass(frozen=True)
class _Span:
    """The decoded keys of rows from `start` on, over a range of key tiles.

    `lanes` int64 ``[rows, tiles, 128]`` points into `table` ``[n + 1, d_qk]``, whose last row is zero and stands for
    every invalid lane; `used` counts, for each row, the tiles up to its last valid lane.
    """

    start: int
    table: Tensor
    lanes: Tensor
    used: list[int]


class _Buffers:
    """Scratch of a group, allocated once a segment: one buffer for each head tile, so that no stride follows h_q."""

    def __init__(self, rows: int, tiles: int, h_q: int, d_qk: int) -> None:
        self.cuts = list(_head_cuts(h_q))
        sizes = [size for _, size in self.cuts]
        self.keys = torch.empty(rows * tiles * KEY_TILE * d_qk, dtype=_F32, device=_CPU)
        self.scores = [torch.empty(rows * tiles * KEY_TILE * size, dtype=_F32, device=_CPU) for size in sizes]
        self.q = [torch.zeros(rows, size, d_qk, dtype=_F32, device=_CPU) for size in sizes]  # pad heads stay zero
        self.acc = [torch.empty(rows, size, D_V, dtype=_F32, device=_CPU) for size in sizes]
        none = torch.empty(0, dtype=_F32, device=_CPU)
        self.top: list[Tensor] = [none] * len(sizes)  # of the group at hand: largest logit, sum of weights
        self.total: list[Tensor] = [none] * len(sizes)


def run(call: SparseCall) -> None:
    """Computes `call` into its outputs. The workspace stays below 256 MiB whatever the shapes."""
    with torch.no_grad():
        for segment in _segments(call):
            if segment.tiles:
                _run_segment(segment, call)
            else:
                _write_empty(segment)


def _segments(call: SparseCall) -> Iterator[_Segment]:
    """Cuts [b, s_q] along its shorter side: what is left has one dim, and is a view whatever the strides."""
    b, s_q = call.q.shape[:2]
    dim = 1 if s_q <= b else 0
    for i in range(min(b, s_q)):
        sets = []
        for keys in call.key_sets:
            lengths = keys.lengths
            if lengths is not None and dim == 0:
                lengths = lengths[i].expand(s_q)
            sets.append(_Set(keys, keys.indices.select(dim, i), lengths, -(-keys.topk // KEY_TILE)))
        lse = call.lse.transpose(1, 2).select(dim, i)
        top = None if call.max_logits is None else call.max_logits.transpose(1, 2).select(dim, i)
        yield _Segment(call.q.select(dim, i), call.out.select(dim, i), lse, top, tuple(sets))


def _head_cuts(h_q: int) -> Iterator[tuple[int, int]]:
    """(first head, heads) of the tiles that cover heads [0, h_q): a prefix of one list, whatever h_q is."""
    first = 0
    for size in HEAD_TILES:
        if first >= h_q:
            return
        yield first, size
        first += size


def _run_segment(segment: _Segment, call: SparseCall) -> None:
    rows, tiles = segment.q.shape[0], segment.tiles
    group = 1 if call.batch_invariant else min(rows, max(1, GROUP_TILES // tiles))
    buffers = _Buffers(group, min(tiles, BLOCK_TILES), call.h_q, call.d_qk)
    if tiles > TABLE_TILES:  # the keys of one row may not fit a table: row by row, through several
        for row in range(rows):
            spans = (_span(segment, row, row + 1, first) for first in range(0, tiles, TABLE_TILES))
            _run_group(segment, call, buffers, row, 1, spans)
        return
    start, step = 0, max(1, SPAN_LANES // (tiles * KEY_TILE))
    while start < rows:
        stop = min(start + step, rows)
        span = _span(segment, start, stop, 0)
        if span is None:  # too many different slots for one table; a row alone always fits
            step = (stop - start + 1) // 2
            continue
        for row in range(start, stop, group):
            _run_group(segment, call, buffers, row, min(group, stop - row), iter((span,)))
        start, span = stop, None


def _run_group(
    segment: _Segment, call: SparseCall, buf: _Buffers, row: int, count: int, spans: Iterator[_Span | None]
) -> None:
    """Rows [row, row + count): online softmax over the blocks of every span, then the outputs."""
    for cut, (head, size) in enumerate(buf.cuts):
        q = segment.q[row : row + count, head : head + size]
        buf.q[cut][:count, : q.shape[1]].copy_(q).mul_(call.sm_scale)
    started = False
    empty = [True] * count
    for span in spans:
        if span is None:
            raise RuntimeError("the keys of one row do not fit a table: TABLE_TILES and TABLE_ROWS disagree")
        at = row - span.start
        used = span.used[at : at + count]
        empty = [e and not u for e, u in zip(empty, used, strict=True)]
        for first in range(0, max(used), BLOCK_TILES):
            _run_block(buf, span, at, count, first, min(first + BLOCK_TILES, max(used)), started)
            started = True
    if not started:
        _write_empty(segment, row, count)
        return
    for cut in range(len(buf.cuts)):
        _write_cut(segment, call, buf, cut, row, count, empty)


def _run_block(buf: _Buffers, span: _Span, at: int, count: int, first: int, last: int, started: bool) -> None:
    """Key tiles [first, last) of rows [at, at + count) of a span: gather, product, softmax step, product."""
    keys, masked = _gather(buf, span, at, count, first, last)
    tiles = last - first
    scores = [
        flat[: tiles * count * size * KEY_TILE].view(tiles, count, size, KEY_TILE)
        for flat, (_, size) in zip(buf.scores, buf.cuts, strict=True)
    ]
    by_tile = list(zip(*(s.unbind(0) for s in scores), strict=True))
    queries = [q[:count] for q in buf.q]
    sums = [acc[:count] for acc in buf.acc]
    # a key tile meets every head tile while it is in the cache
    for key, parts in zip(keys.mT.unbind(0), by_tile, strict=True):
        for q, score in zip(queries, parts, strict=True):
            torch.bmm(q, key, out=score)
    for cut, score in enumerate(scores):
        _softmax_step(buf, cut, score, sums[cut], masked, started)
    for value, parts in zip(keys[..., :D_V].unbind(0), by_tile, strict=True):
        for acc, weight in zip(sums, parts, strict=True):
            if started:
                acc.baddbmm_(weight, value)
            else:
                torch.bmm(weight, value, out=acc)
        started = True


def _gather(buf: _Buffers, span: _Span, at: int, count: int, first: int, last: int) -> tuple[Tensor, Tensor | None]:
    """Keys ``[tiles, rows, 128, d_qk]`` of a block, and its invalid lanes ``[tiles, rows, 1, 128]``, None if none."""
    lanes = span.lanes[at : at + count, first:last].transpose(0, 1).contiguous()
    d_qk = span.table.shape[1]
    keys = buf.keys[: lanes.numel() * d_qk].view(-1, d_qk)
    torch.index_select(span.table, 0, lanes.view(-1), out=keys)
    invalid = lanes == span.table.shape[0] - 1
    return keys.view(*lanes.shape, d_qk), invalid[:, :, None] if bool(invalid.any()) else None


def _softmax_step(buf: _Buffers, cut: int, scores: Tensor, acc: Tensor, masked: Tensor | None, started: bool) -> None:
    """Turns scores ``[tiles, rows, heads, 128]`` into weights, in place, and rescales what came before."""
    if masked is not None:
        scores.masked_fill_(masked, -inf)
    top = scores.amax(3).amax(0)
    if started:
        top = torch.maximum(top, buf.top[cut])
    base = top
    if masked is not None:  # where no key is valid so far: exp(-inf - 0) is 0, exp(-inf - -inf) is not
        base = top.masked_fill(top == -inf, 0.0)
    scores.sub_(base[None, :, :, None]).exp_()
    total = scores.sum(3).sum(0)
    if started:
        shrink = (buf.top[cut] - base).exp_()
        total.add_(buf.total[cut].mul_(shrink))
        acc.mul_(shrink[:, :, None])
    buf.top[cut], buf.total[cut] = top, total


def _write_cut(
    segment: _Segment, call: SparseCall, buf: _Buffers, cut: int, row: int, count: int, empty: list[bool]
) -> None:
    """One head tile of a group into out, lse and max_logits."""
    head, size = buf.cuts[cut]
    rows, heads = slice(row, row + count), slice(head, min(head + size, call.h_q))
    acc, top, total = (x[cut][:count, : heads.stop - head] for x in (buf.acc, buf.top, buf.total))
    lse = top + total.log()
    weight = total.reciprocal()
    if call.attn_sink is not None:
        weight.div_(1.0 + (call.attn_sink[heads] - lse).exp_())
    acc.mul_(weight[:, :, None])
    if any(empty):
        dead = torch.tensor(empty, device=_CPU)[:, None]
        acc.masked_fill_(dead[:, :, None], 0.0)
        lse.masked_fill_(dead, inf)
        top.masked_fill_(dead, -inf)
    segment.out[rows, heads] = acc
    segment.lse[rows, heads] = lse
    if segment.max_logits is not None:
        segment.max_logits[rows, heads] = top


def _write_empty(segment: _Segment, row: int = 0, count: int | None = None) -> None:
    rows = slice(row, None if count is None else row + count)
    segment.out[rows] = 0.0
    segment.lse[rows] = inf
    if segment.max_logits is not None:
        segment.max_logits[rows] = -inf


def _span(segment: _Segment, start: int, stop: int, first: int) -> _Span | None:
    """Looks up and decodes what rows [start, stop) list from key tile `first` on, as many tiles as a table takes.

    None if the slots do not fit a table, which cannot happen to one row.
    """
    last = min(first + TABLE_TILES, segment.tiles)
    lanes = torch.full((stop - start, (last - first) * KEY_TILE), -1, dtype=torch.int64, device=_CPU)
    found: list[tuple[KeySet, Tensor]] = []
    size = tile = 0
    for part in segment.sets:
        begin = max(first - tile, 0) * KEY_TILE
        end = min((last - tile) * KEY_TILE, part.keys.topk)
        if begin < end:
            column = (tile - first) * KEY_TILE + begin
            slots = _look_up(part, start, stop, begin, end, lanes[:, column : column + end - begin], size)
            found.append((part.keys, slots))
            size += slots.numel()
        tile += part.tiles
    if size > TABLE_ROWS and stop - start > 1:
        return None
    lanes.masked_fill_(lanes < 0, size)
    lanes = lanes.view(stop - start, last - first, KEY_TILE)
    numbers = torch.arange(1, last - first + 1, device=_CPU)
    used: list[int] = ((lanes != size).any(2) * numbers).amax(1).tolist()
    table = torch.empty(size + 1, segment.q.shape[2], dtype=_F32, device=_CPU)
    table[size] = 0.0
    at = 0
    for keys, slots in found:
        _decode(keys, slots, table[at : at + slots.numel()])
        at += slots.numel()
    return _Span(start, table, lanes, used)


def _look_up(part: _Set, start: int, stop: int, begin: int, end: int, lanes: Tensor, base: int) -> Tensor:
    """The different valid slots among lanes [begin, end) of rows [start, stop); `lanes` gets their positions + `base`.

    Lanes that are not valid keep what they hold. Where the cache is much longer than the list, slots may repeat.
    """
    keys = part.keys
    index = part.indices[start:stop, begin:end].long()
    valid = (index >= 0) & (index < keys.slots)
    if part.lengths is not None:
        valid &= torch.arange(begin, end, device=_CPU) < part.lengths[start:stop, None]
    chosen = index[valid]
    if keys.slots <= min(DENSE_SLOTS, DENSE_RATIO * index.numel()):
        seen = torch.zeros(keys.slots, dtype=torch.bool, device=_CPU).index_fill_(0, chosen, True)
        slots = seen.nonzero().view(-1)
        place = seen.cumsum(0, dtype=torch.int32).index_select(0, chosen).long() - 1
    else:
        slots, place = chosen, torch.arange(chosen.numel(), device=_CPU)
    lanes.masked_scatter_(valid, place.add_(base))
    return slots


def _decode(keys: KeySet, slots: Tensor, out: Tensor) -> None:
    """Rows `slots` of a key set as float32 into `out` ``[n, d_qk]``: equal to `cache.unpack_kv`, in few passes."""
    for part, rows in zip(torch.split(slots, DECODE_ROWS), torch.split(out, DECODE_ROWS), strict=True):
        if not part.numel():
            continue
        page = part // keys.page_size
        offset = part - page * keys.page_size
        address = page * keys.page_stride + offset * keys.row_stride
        if keys.layout == "bf16":
            rows.copy_(_windows(keys, out.shape[1]).index_select(0, address))
            continue
        layout = LAYOUTS[keys.layout]
        data = _windows(keys, layout.data_bytes).index_select(0, address)
        nope = rows[:, : layout.d_nope].unflatten(1, (layout.groups, layout.group))
        if layout.scale_bytes:
            footer = page * keys.page_stride + keys.page_size * layout.data_bytes + offset * layout.scale_bytes
            scales = _windows(keys, layout.scale_bytes).index_select(0, footer)[:, : layout.groups]
            _decode_e8m0(_e4m3_bits(data, layout), scales, nope)
        else:
            scale = data.view(torch.float32)[:, layout.d_nope // 4 :][:, : layout.groups]
            exact = _e4m3_bits(data, layout).mul_(2.0**_E4M3_BIAS)
            nope.copy_(exact.mul_(scale[:, :, None]).to(torch.bfloat16))
        rows[:, layout.d_nope :] = data.view(torch.bfloat16)[:, layout.rope_start // 2 :]


def _windows(keys: KeySet, width: int) -> Tensor:
    """Every run of `width` elements of the pages as overlapping rows: an address is then an index of index_select."""
    data = keys.data
    last_row = (keys.page_size - 1) * keys.row_stride + width
    if keys.layout != "bf16":
        last_row = keys.page_size * LAYOUTS[keys.layout].bytes_per_token
    length = (keys.slots // keys.page_size - 1) * keys.page_stride + last_row
    return data.as_strided((length - width + 1, width), (1, 1), data.storage_offset())


def _e4m3_bits(data: Tensor, layout: Layout) -> Tensor:
    """The e4m3 values of packed rows times 2^-120, exactly: float32 ``[n, groups, group]``.

    Sign, exponent and mantissa move into a float32 as they stand, subnormals included; only the NaN bytes need a look.
    """
    values = data[:, : layout.d_nope]
    bits = values.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_E4M3_IN_F32)
    floats = bits.view(torch.float32)
    if int((values | 0x80).max()) == 0xFF:
        floats.masked_fill_(values.bitwise_and(0x7F) == 0x7F, float("nan"))
    return floats.unflatten(1, (layout.groups, layout.group))


def _decode_e8m0(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """bits * 2^120 * 2^(scale - 127) into `out`, in one multiplication unless a scale is above 2^7."""
    raised = (scales.to(torch.int32) + _E4M3_BIAS).clamp_(max=254).masked_fill_(scales == 255, 255)
    torch.mul(bits, e8m0_to_float(raised.to(torch.uint8))[:, :, None], out=out)
    rest = scales.to(torch.int32) + _E4M3_BIAS - 254
    if int(rest.max()) > 0:
        out.mul_(e8m0_to_float((rest.clamp_(min=0) + 127).to(torch.uint8))[:, :, None])
