"""Marshalling that foreign kernels share: from the contract's call to what a closed kernel takes, and back.

Belongs here: lanes folded to -1 or compacted, lists padded to an alignment, heads copied into a legal width, rows
staged into pages a kernel can address, results written back. Does not belong here: knowing any one foreign package
(``flashmla.py``, ``flashinfer.py``), launching.

Every step is tensor arithmetic on the call's device: no value is read on the host, so all of it replays in a CUDA
graph. Scratch comes from PyTorch's allocator, call by call: its cache makes that cheap, and unlike one buffer kept for
ever it is safe under several streams and inside a graph's private pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headfit.cache import LAYOUTS, empty_cache, page_bytes, row_views
from headfit.call import D_V, KeySet, SparseCall

INT_MAX = 2**31 - 1
LN2 = math.log(2.0)
STAGED_PAGE = 64  # the one page size that every foreign kernel takes


def row_chunks(call: SparseCall, limit: int) -> Iterator[SparseCall]:
    """The call cut into calls of at most ``limit`` rows (views, no copies), so that scratch does not grow with rows."""
    b, s_q = call.q.shape[:2]
    if b * s_q <= limit:
        yield call
        return
    step_s = min(s_q, limit)
    step_b = max(1, limit // s_q)
    for b0 in range(0, b, step_b):
        for s0 in range(0, s_q, step_s):
            yield _sub_call(call, slice(b0, b0 + step_b), slice(s0, s0 + step_s))


def _sub_call(call: SparseCall, b: slice, s: slice) -> SparseCall:
    sets = tuple(
        replace(keys, indices=keys.indices[b, s], lengths=None if keys.lengths is None else keys.lengths[b])
        for keys in call.key_sets
    )
    max_logits = None if call.max_logits is None else call.max_logits[b, :, s]
    return replace(
        call, q=call.q[b, s], key_sets=sets, out=call.out[b, s], lse=call.lse[b, :, s], max_logits=max_logits
    )


def lane_lists(keys: KeySet) -> Tensor:
    """The lists as int32 ``[rows, topk]``, contiguous, with -1 for every lane that is invalid or past its length."""
    b, s_q, topk = keys.indices.shape
    valid = keys.indices >= 0
    if keys.slots <= INT_MAX:
        valid &= keys.indices < keys.slots
    if keys.lengths is not None:
        lane = torch.arange(topk, dtype=torch.int32, device=keys.indices.device)
        valid &= lane < keys.lengths[:, None, None]
    return torch.where(valid, keys.indices, -1).reshape(b * s_q, topk)


def row_lengths(keys: KeySet) -> Tensor | None:
    """Lengths clamped to [0, topk], one for each row: int32 ``[rows]``, or None."""
    if keys.lengths is None:
        return None
    b, s_q, topk = keys.indices.shape
    return keys.lengths.clamp(0, topk)[:, None].expand(b, s_q).reshape(b * s_q).contiguous()


def round_up(n: int, multiple: int) -> int:
    """The smallest positive multiple of ``multiple`` that is >= n."""
    return max(1, -(-n // multiple)) * multiple


def padded_lists(lanes: Tensor, width: int) -> Tensor:
    """``[rows, topk]`` -> contiguous ``[rows, width]``, the new lanes -1."""
    if lanes.shape[1] == width:
        return lanes.contiguous()
    return torch.nn.functional.pad(lanes, (0, width - lanes.shape[1]), value=-1)


def compacted_lists(lanes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Valid lanes first, in their order, and how many there are: (int32 ``[rows, width]``, int32 ``[rows]``).

    For kernels that gather every lane of a list, -1 or not, and weigh it 0 afterwards, where 0 x NaN poisons the row.
    Lanes past the count repeat a slot that the row lists, so such a kernel reads nothing that the row does not read
    anyway; the count, passed as the length, keeps their weight 0. A row without valid lanes names slot 0: its result is
    to be overwritten.
    """
    rows, topk = lanes.shape
    valid = lanes >= 0
    count = valid.sum(1, dtype=torch.int32)
    if topk == 0:
        return lanes.new_zeros(rows, width), count
    first = lanes.gather(1, valid.to(torch.uint8).argmax(1, keepdim=True)).clamp_min(0)
    lists = first.expand(rows, width + 1).contiguous()
    place = torch.where(valid, valid.cumsum(1) - 1, width)  # the last column collects what is thrown away
    lists.scatter_(1, place, lanes)
    return lists[:, :width].contiguous(), count


def head_block(q: Tensor, first: int, width: int, *, sign: float = 1.0, zero_pad: bool = False) -> Tensor:
    """Heads from ``first`` of q ``[b, s_q, h_q, d]`` as contiguous ``[rows, width, d]``; in place if that is possible.

    Rows of pad heads are left as the allocator gives them unless ``zero_pad``: a kernel whose heads do not mix throws
    them away. ``sign`` multiplies q: -1 or 0 move a softmax scale that a kernel does not take into q, exactly.
    """
    b, s_q, h_q, d = q.shape
    heads = min(width, h_q - first)
    part = q[:, :, first : first + heads]
    if sign == 1.0 and heads == width and part.is_contiguous() and part.data_ptr() % 16 == 0:
        return part.reshape(b * s_q, width, d)
    block = q.new_empty(b, s_q, width, d)
    if sign == 1.0:
        block[:, :, :heads].copy_(part)
    elif sign == -1.0:
        torch.neg(part, out=block[:, :, :heads])
    else:
        block.zero_()
    if zero_pad and heads < width:
        block[:, :, heads:].zero_()
    return block.view(b * s_q, width, d)


def positive_scale(sm_scale: float) -> tuple[float, float]:
    """(scale > 0, sign for q): kernels that scale a running maximum are right for positive scales only."""
    if sm_scale > 0:
        return sm_scale, 1.0
    return (-sm_scale, -1.0) if sm_scale < 0 else (1.0, 0.0)


def sink_block(sink: Tensor | None, first: int, width: int) -> Tensor | None:
    """Sinks of the heads from ``first``, float32 ``[width]``; pad heads get -inf, which has no effect."""
    if sink is None:
        return None
    part = sink[first : first + width]
    if part.shape[0] == width:
        return part.contiguous()
    return torch.nn.functional.pad(part, (0, width - part.shape[0]), value=-math.inf)


def write_block(call: SparseCall, first: int, out: Tensor, lse: Tensor, max_logits: Tensor | None) -> None:
    """Write a block of heads back: out ``[rows, width, 512]``, lse and max_logits ``[rows, width]``.

    Pad heads are dropped; elements of the call's views outside these heads are not touched. An ``out`` that is the
    call's own memory is not copied.
    """
    b, s_q, h_q = call.q.shape[:3]
    width = out.shape[1]
    heads = min(width, h_q - first)
    target = call.out[:, :, first : first + heads]
    if out.data_ptr() != target.data_ptr():
        target.copy_(out.view(b, s_q, width, D_V)[:, :, :heads])
    call.lse[:, first : first + heads].copy_(lse.reshape(b, s_q, width)[:, :, :heads].transpose(1, 2))
    if call.max_logits is not None and max_logits is not None:
        logits = max_logits.reshape(b, s_q, width)[:, :, :heads]
        call.max_logits[:, first : first + heads].copy_(logits.transpose(1, 2))


def contract_results(out: Tensor, lse_log2: Tensor, empty: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results of a kernel that ran without a sink and returns a base-2 lse, as the contract states them.

    A sink that such a kernel folds into its lse cannot be taken out again (log2(2^lse + 2^sink) says nothing about lse
    where the sink is much larger), so the kernel is not given it; it is applied here.

    Args:
        out: bfloat16 ``[rows, heads, 512]``.
        lse_log2: float32 ``[rows, heads]``.
        empty: bool ``[rows]``: rows without a valid key, whatever the kernel wrote for them.
        sink: float32 ``[heads]`` in natural-log units, or None.

    Returns:
        (out, lse): ``out *= 1 / (1 + exp(sink - lse))``, 0 in empty rows; lse in natural log, +inf in empty rows.
    """
    lse = lse_log2 * LN2
    if sink is not None:
        out = (out.float() * (1 / (1 + torch.exp(sink - lse)))[..., None]).to(out.dtype)
    gone = empty[:, None]
    return out.masked_fill(gone[..., None], 0), lse.masked_fill(gone, math.inf)


def page_view(keys: KeySet) -> Tensor:
    """A packed cache as ``[pages, page_size, 1, bytes]`` with the strides FlashMLA asks for, also where a size is 1."""
    token = LAYOUTS[keys.layout].bytes_per_token
    shape = (keys.slots // keys.page_size, keys.page_size, 1, token)
    return keys.data.as_strided(shape, (keys.page_stride, token, token, 1))


def is_aligned(keys: KeySet, multiple: int = 16) -> bool:
    """Whether base address and page stride are multiples of 16 bytes, and the stride of ``multiple`` too."""
    stride = keys.page_stride * keys.data.element_size()
    return keys.data.data_ptr() % 16 == 0 and stride % 16 == 0 and stride % multiple == 0


def staged_pages(sets: Sequence[KeySet], lanes: Sequence[Tensor]) -> tuple[KeySet, list[Tensor]]:
    """Packed rows that the lists name, copied byte for byte into aligned pages of 64 tokens, and new lists.

    Several sets of one layout become one. Copied are the listed rows, lane by lane, or where the lists are longer than
    the cache all of its rows: never more than either. Lanes of -1 stay -1; the rows they would have named are not used.
    """
    layout = LAYOUTS[sets[0].layout]
    sources = [_staged_source(keys, list_) for keys, list_ in zip(sets, lanes, strict=True)]
    pages = max(1, -(-sum(len(slots) for slots, _ in sources) // STAGED_PAGE))
    pages_view = empty_cache(pages, STAGED_PAGE, layout, sets[0].data.device)
    targets = row_views(pages_view)
    new, start = [], 0
    for keys, (slots, list_) in zip(sets, sources, strict=True):
        new.append(torch.where(list_ >= 0, list_ + start, -1))
        if len(slots):
            page, offset = slots // keys.page_size, slots % keys.page_size
            at = torch.arange(start, start + len(slots), device=slots.device)
            for source, target in zip(row_views(page_view(keys)), targets, strict=True):
                if source is not None and target is not None:
                    target[at // STAGED_PAGE, at % STAGED_PAGE] = source[page, offset]
        start += len(slots)
    stride = page_bytes(STAGED_PAGE, layout)
    first = replace(
        sets[0], data=pages_view, page_size=STAGED_PAGE, page_stride=stride, slots=pages * STAGED_PAGE, lengths=None
    )
    return first, new


def staged_rows(sets: Sequence[KeySet], lanes: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The same for plain bfloat16 rows: (rows ``[n, 1, d]``, contiguous, n >= 1; lists)."""
    sources = [_staged_source(keys, list_) for keys, list_ in zip(sets, lanes, strict=True)]
    new, start, parts = [], 0, []
    for keys, (slots, list_) in zip(sets, sources, strict=True):
        new.append(torch.where(list_ >= 0, list_ + start, -1))
        start += len(slots)
        parts.append(keys.data[slots // keys.page_size, slots % keys.page_size] if len(slots) else keys.data[:0, 0])
    rows = torch.cat(parts)
    return (rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])), new


def _staged_source(keys: KeySet, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """(slots to copy, int64 ``[n]``; the lists in terms of their positions, int32)."""
    device = lanes.device
    if keys.slots == 0:
        return torch.zeros(0, dtype=torch.int64, device=device), lanes
    if lanes.numel() <= keys.slots:
        position = torch.arange(lanes.numel(), dtype=torch.int32, device=device).view_as(lanes)
        return lanes.reshape(-1).long().clamp_min(0), torch.where(lanes >= 0, position, -1)
    return torch.arange(keys.slots, device=device), lanes
