"""FlashMLA (DeepSeek's SM90 and SM100 kernels) as a backend under headfit's contract.

Belongs here: which of its two kernels serves a call, in which width, lists and pages. Does not belong here: finding an
installed copy (``flashmla_copies.py``), marshalling that other kernels need too (``adapt.py``).

Heads run in blocks of 64, always: h_q 1..64 is one launch, 65..128 are two. The decode kernel plans its splits from the
width it is launched with, so 64 and 128 give other bits; blocks of one width make a head's bits independent of h_q. The
prefill of some copies also takes 8, 16 and 32 heads; measured on an H200 these cost as much as 64 or twice that
(4096 rows, 640 keys: 0.704, 0.711, 1.281 ms against 0.656), so they are not used.

Packed pages go to ``sparse_decode_fwd``, plain bfloat16 rows to ``sparse_prefill_fwd``, whatever the phase. The decode
kernel checks no upper bound and knows only -1, its V3.2 form takes no lengths: invalid lanes and lanes past their
length become -1 on the device first. For a -1 lane on SM90 it loads one row of page 0 and replaces what it loaded by
zeros before use, so NaN there is harmless but page 0 must be mapped: a cache without slots is replaced by a page of
zeros. Pages that are not aligned to 16 bytes, rows at an irregular pitch, and second caches where the kernel takes one
only are staged: the listed rows are copied, byte for byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headfit import arch
from headfit.cache import empty_cache, page_bytes
from headfit.call import KeySet, SparseCall
from headfit.capability import Capability
from headfit.kernels import adapt, flashmla_copies
from headfit.kernels.flashmla_copies import Copy

BLOCK = 64  # heads a launch
DECODE_LANES = 64  # B_TOPK: lists are whole blocks of it
PREFILL_LANES = 128  # 2 * B_TOPK
ROWS = 4096  # rows a launch: its float32 partials take 128 KB a row, its scheduler 12 bytes of shared memory
_HEADS = frozenset({64, 128})


def _served(compute_capability: tuple[int, int]) -> bool:
    """SM90a and SM100f, from the kernels' own checks. Run here: 9.0 only."""
    return compute_capability == (9, 0) or compute_capability[0] == 10


def available() -> str | None:
    """None where a CUDA device of compute capability 9.0 or 10.x and a FlashMLA that can be called are present."""
    if not torch.cuda.is_available():
        return "needs a CUDA device of compute capability 9.0 or 10.x"
    if not any(_served(arch.current(torch.device("cuda", i)).capability) for i in range(torch.cuda.device_count())):
        return "needs compute capability 9.0 or 10.x; no device here has it"
    found = flashmla_copies.search()
    return found if isinstance(found, str) else None


def load_library(path: str | Path) -> str:
    """Use the operator library at ``path``, a build outside an installed package, from now on; returns its name.

    Raises:
        NoCopyError: it cannot be loaded, or its operators are not known.
    """
    flashmla_copies.load(Path(path))
    flashmla_copies.search.cache_clear()
    return flashmla_copies.find().name  # looks among the loaded operators first


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot run here, or None."""
    if call.batch_invariant:
        return "FlashMLA's split plan depends on the rows that share a call; its batch-invariant mode refuses SM90"
    if call.q.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            # seen on an H200 with vLLM 0.33's copy: benchmarks/check_flashmla.py
            return "FlashMLA's split plan depends on the lengths it was made for: a replayed graph gave other bits"
        cc = arch.current(call.q.device).capability
        if not _served(cc):
            return f"its kernels are for compute capability 9.0 and 10.x, {call.q.device} has {cc[0]}.{cc[1]}"
    return None


def capability(compute_capability: tuple[int, int] | None) -> Capability:
    """What the backend launches: 64 heads, or 128 as two blocks, through either of its two entries."""
    none: frozenset[int] = frozenset()
    if compute_capability is not None and not _served(compute_capability):
        problem = f"no kernel for compute capability {compute_capability[0]}.{compute_capability[1]}"
        return Capability("flashmla", compute_capability, 0, none, none, fork="entry", problems=(problem,))
    return Capability(
        "flashmla",
        compute_capability,
        0,
        _HEADS,
        _HEADS,
        fork="entry",
        sources={"heads": _heads_source(), "topk": "any: headfit.kernels.flashmla pads it to 64 or 128"},
    )


def _heads_source() -> str:
    text = "headfit.kernels.flashmla launches blocks of 64 heads"
    copy = flashmla_copies.search()
    if isinstance(copy, str):
        return f"{text}; {copy}"
    native = flashmla_copies.small_prefill_heads(copy.library)
    also = "its prefill also takes 8, 16, 32 on SM90, which costs no less" if native else "it takes 64 and 128"
    return f"{text}; {copy.name}: {also}"


def run(call: SparseCall) -> None:
    """Run a call that ``unsupported`` accepts; writes ``out``, ``lse`` and ``max_logits``."""
    run_with(flashmla_copies.find(), call)


def run_with(copy: Copy, call: SparseCall) -> None:
    """`run` on the given copy."""
    for part in adapt.row_chunks(call, ROWS):
        if part.key_sets[0].layout == "bf16":
            _prefill(copy, part)
        else:
            _decode(copy, part)


def _prefill(copy: Copy, call: SparseCall) -> None:
    kv, lanes = _plain_rows(call.key_sets)
    lists = adapt.padded_lists(lanes, adapt.round_up(lanes.shape[1], PREFILL_LANES))[:, None]
    length = adapt.row_lengths(call.key_sets[0]) if len(call.key_sets) == 1 else None
    scale, sign = adapt.positive_scale(call.sm_scale)
    for first in range(0, call.h_q, BLOCK):
        q = adapt.head_block(call.q, first, BLOCK, sign=sign)
        sink = adapt.sink_block(call.attn_sink, first, BLOCK)
        out, max_logits, lse = copy.prefill(q, kv, lists, scale, sink, length, _own_memory(copy, call))
        adapt.write_block(call, first, out, lse, max_logits)


def _decode(copy: Copy, call: SparseCall) -> None:
    sets, lanes = _pages(call.key_sets, call.q.device)
    lists = [adapt.padded_lists(x, adapt.round_up(x.shape[1], DECODE_LANES))[:, None] for x in lanes]
    # V3.2 pages: the SM90 kernel has no lengths; the lists hold -1 past them already, the lengths only save time
    lengths = [None if keys.layout == "v32" else adapt.row_lengths(keys) for keys in sets]
    views = [adapt.page_view(keys) for keys in sets]
    extra = (views[1], lists[1], lengths[1]) if len(sets) == 2 else (None, None, None)
    scale, sign = adapt.positive_scale(call.sm_scale)
    plan = None
    for first in range(0, call.h_q, BLOCK):
        q = adapt.head_block(call.q, first, BLOCK, sign=sign)[:, None]
        sink = adapt.sink_block(call.attn_sink, first, BLOCK)
        own = _own_memory(copy, call)
        out, lse, plan = copy.decode(
            q, views[0], lists[0], lengths[0], sink, plan, *extra, scale, None if own is None else own[:, None]
        )
        adapt.write_block(call, first, out[:, 0], lse[:, :, 0], None)


def _own_memory(copy: Copy, call: SparseCall) -> Tensor | None:
    """The call's out as ``[rows, 64, 512]`` where the kernel may write into it, else None."""
    out = call.out
    if not copy.takes_out or call.h_q != BLOCK or not out.is_contiguous() or out.data_ptr() % 16:
        return None
    return out.view(call.rows, BLOCK, out.shape[-1])


def _pages(sets: tuple[KeySet, ...], device: torch.device) -> tuple[list[KeySet], list[Tensor]]:
    """The caches as the decode kernel can address them, and their lists."""
    lanes = [adapt.lane_lists(keys) for keys in sets]
    if len(sets) == 2 and sets[0].layout == "v32":  # "V3.2 does not support extra KV cache"
        merged, parts = adapt.staged_pages(sets, lanes)
        return [merged], [torch.cat(parts, 1)]
    ready, lists = [], []
    for keys, list_ in zip(sets, lanes, strict=True):
        if keys.slots == 0:
            keys = _empty_page(keys, device)
        elif not _addressable(keys, device):
            staged, (list_,) = adapt.staged_pages([keys], [list_])
            keys = replace(staged, lengths=keys.lengths)
        ready.append(keys)
        lists.append(list_)
    return ready, lists


def _addressable(keys: KeySet, device: torch.device) -> bool:
    """16-byte loads on SM90; on SM100 the page stride must be whole rows as well (a TMA descriptor over rows)."""
    sm100 = device.type == "cuda" and arch.current(device).capability[0] == 10
    return adapt.is_aligned(keys, keys.row_stride if sm100 else 16)


def _empty_page(keys: KeySet, device: torch.device) -> KeySet:
    data = empty_cache(1, keys.page_size, keys.layout, device)
    return replace(keys, data=data, page_stride=page_bytes(keys.page_size, keys.layout), slots=keys.page_size)


def _plain_rows(sets: tuple[KeySet, ...]) -> tuple[Tensor, Tensor]:
    """Bfloat16 rows at one pitch, ``[n, 1, d]``, and the lists in terms of them."""
    lanes = [adapt.lane_lists(keys) for keys in sets]
    if len(sets) == 1:
        view = _one_pitch(sets[0], lanes[0])
        if view is not None:
            return view
    rows, parts = adapt.staged_rows(sets, lanes)
    return rows, torch.cat(parts, 1)


def _one_pitch(keys: KeySet, lanes: Tensor) -> tuple[Tensor, Tensor] | None:
    """The cache in place, if every row stands at a multiple of one aligned pitch from the first; else None."""
    pages = keys.slots // keys.page_size
    if pages == 0:
        return None
    pitch = keys.page_stride if keys.page_size == 1 else keys.row_stride
    regular = pages == 1 or keys.page_size == 1 or keys.page_stride % max(pitch, 1) == 0
    if pitch <= 0 or not regular or pitch % 8 or keys.data.data_ptr() % 16:
        return None
    between = keys.page_stride // pitch if pages > 1 and keys.page_size > 1 else keys.page_size
    count = (pages - 1) * between + keys.page_size
    if count > adapt.INT_MAX:
        return None
    d = keys.data.shape[-1]
    rows = keys.data.as_strided((count, 1, d), (pitch, pitch, 1))
    if between == keys.page_size:
        return rows, lanes
    moved = lanes // keys.page_size * between + lanes % keys.page_size
    return rows, torch.where(lanes >= 0, moved, -1)
