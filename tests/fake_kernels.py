"""Stand-ins for foreign kernels: their signatures, demands on arguments and conventions; the arithmetic is exact.

A stand-in refuses what the real kernel refuses, fails on what the real kernel would answer with a fault or with poison,
and returns what the real kernel returns. So what is tested against it is the marshalling, and nothing else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headfit import kernels
from headfit.cache import gather_rows

NAN = float("nan")
# As the libraries state them: vllm/_flashmla_C.abi3.so of vLLM 0.33.0, _C_legacy.abi3.so of sgl-flash-mla 1.0.0.
FLASHMLA_SCHEMAS = {
    "vllm": (
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
        "Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]",
        "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
        "Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_=None, "
        "bool enable_batch_invariant=False) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)",
    ),
    "sgl": (
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink=None, "
        "Tensor? topk_length=None, bool return_log2_stats=False, bool return_stats=True) -> Tensor?[]",
        "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
        "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
        "Tensor? extra_topk_length, int d_v, float sm_scale, str? kv_format=None) "
        "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)",
    ),
    # sgl-kernel 0.3.21: before the sink, base-2 lse
    "old": (
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v) -> Tensor[]",
        "sparse_decode_fwd(Tensor q, Tensor kv) -> Tensor[]",
    ),
}


def demand(condition: bool, what: str) -> None:
    """What the real kernel checks, or would break on."""
    if not condition:
        raise RuntimeError(f"the kernel: {what}")


def attend(q: Tensor, rows: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 out ``[n, h, 512]``, lse and max ``[n, h]`` (natural log, no sink) over rows ``[n, k, d]``.

    Rows that are not valid weigh 0 and are still multiplied, as on a tensor core: what they hold must be finite.
    """
    rows64 = rows.double()
    logits = torch.einsum("nhd,nkd->nhk", q.double(), rows64) * scale
    logits = logits.masked_fill(~valid[:, None], -math.inf)
    peak = logits.amax(-1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(valid.any(1)[:, None], lse, 0.0)[..., None])
    return torch.einsum("nhk,nkd->nhd", p, rows64[..., :512]), lse, peak


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return out
    return out * (1 / (1 + torch.exp(sink.double() - lse)))[..., None]


def check_common(q: Tensor, sink: Tensor | None, heads: tuple[int, ...]) -> None:
    demand(q.dtype == torch.bfloat16 and q.stride(-1) == 1, "q must be bfloat16 with a contiguous last dim")
    demand(q.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in q.stride()[:-1]), "q: TMA needs multiples of 16 bytes")
    demand(q.shape[-2] in heads, f"Unsupported h_q: {q.shape[-2]}")
    demand(sink is None or (sink.is_contiguous() and sink.shape == (q.shape[-2],)), "attn_sink must be [h_q]")


def flashmla_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None, out_: Tensor | None = None, **flags: object,
) -> list[Tensor]:  # fmt: skip
    """SM90 sparse prefill: bounds checked, invalid lanes not copied, natural log, +inf / -inf / 0 for an empty row."""
    rows, _, d = q.shape
    check_common(q, attn_sink, (8, 16, 32, 64, 128))
    demand(d_v == 512 and sm_scale > 0, "the running maximum is scaled: scales are positive")
    demand(kv.dim() == 3 and kv.shape[1:] == (1, d) and kv.stride(2) == 1, "kv must be [s_kv, 1, d_qk]")
    demand(kv.data_ptr() % 16 == 0 and kv.stride(0) % 8 == 0, "kv rows are loaded 16 bytes at a time")
    topk = indices.shape[-1]
    demand(topk > 0 and topk % 128 == 0 and indices.shape == (rows, 1, topk), "params.topk % (2*B_TOPK) == 0")
    demand(topk_length is None or (topk_length.is_contiguous() and topk_length.shape == (rows,)), "topk_length [s_q]")
    demand(not flags.get("return_log2_stats", False), "natural-log statistics were not asked for")
    lanes = indices[:, 0].long()
    valid = (lanes >= 0) & (lanes < kv.shape[0])
    if topk_length is not None:
        demand(bool(((topk_length >= 0) & (topk_length <= topk)).all()), "lengths run over the list")
        valid &= torch.arange(topk) < topk_length[:, None]
    listed = kv[torch.where(valid, lanes, 0), 0].masked_fill(~valid[..., None], 0)  # zero fill by predicate
    out, lse, peak = attend(q, listed, valid, sm_scale)
    empty = ~valid.any(1)[:, None]
    out = with_sink(out, lse, attn_sink).masked_fill(empty[..., None], 0).to(torch.bfloat16)
    if out_ is not None:
        demand(out_.is_contiguous() and out_.shape == out.shape, "out must be contiguous")
        out = out_.copy_(out)
    return [out, peak.float(), lse.masked_fill(empty, math.inf).float()]


def flashmla_decode(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, attn_sink: Tensor | None,
    tile_scheduler_metadata: Tensor | None, num_splits: Tensor | None, extra_kv: Tensor | None,
    extra_indices: Tensor | None, extra_topk_length: Tensor | None, d_v: int, sm_scale: float,
    out_: Tensor | None = None, **flags: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """SM90 FP8 sparse decode: only -1 is invalid and reads a row of page 0, which is then replaced by zeros."""
    b, s_q, heads, d = q.shape
    check_common(q, attn_sink, (64, 128))
    demand(sm_scale > 0 and b <= 19000, "scales are positive; the scheduler keeps 12 bytes a row in shared memory")
    demand(d == 512 or (extra_kv is None and topk_length is None), "V3.2 supports no lengths and no extra KV cache")
    demand((tile_scheduler_metadata is None) == (num_splits is None), "metadata comes in two parts")
    demand(not flags.get("enable_batch_invariant", False), "SM90 has no unsplit path")
    parts, masks = [], []
    for cache, lanes, length in ((kv, indices, topk_length), (extra_kv, extra_indices, extra_topk_length)):
        if cache is None:
            continue
        row, valid = flashmla_rows(cache, lanes.reshape(b * s_q, -1), length, s_q)
        parts.append(row)
        masks.append(valid)
    rows, valid = torch.cat(parts, 1), torch.cat(masks, 1)
    out, lse, _ = attend(q.reshape(b * s_q, heads, d), rows, valid, sm_scale)
    empty = ~valid.any(1)[:, None]
    out = with_sink(out, lse, attn_sink).masked_fill(empty[..., None], 0).to(torch.bfloat16).view(b, s_q, heads, 512)
    if out_ is not None:
        demand(out_.is_contiguous() and out_.shape == out.shape, "out must be contiguous")
        out = out_.copy_(out)
    lse = lse.masked_fill(empty, math.inf).float().view(b, s_q, heads).transpose(1, 2)
    return out, lse, torch.zeros(1, 8, dtype=torch.int32), torch.zeros(b + 1, dtype=torch.int32)


def flashmla_rows(cache: Tensor, lanes: Tensor, length: Tensor | None, s_q: int) -> tuple[Tensor, Tensor]:
    """Rows ``[n, topk, d]`` and their validity, as the producer warps make them."""
    token, topk = cache.shape[-1], lanes.shape[1]
    demand(cache.shape[2] == 1 and cache.stride(1) == token, "each page block in the KV cache must be contiguous")
    demand(cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0, "misaligned address")
    demand(topk > 0 and topk % 64 == 0, "params.topk % B_TOPK == 0")
    demand(cache.shape[0] > 0, "page 0 must be mapped")
    if length is not None:
        demand(bool(((length >= 0) & (length <= topk)).all()) and length.is_contiguous(), "lengths run over the list")
        past = torch.arange(topk) >= length.repeat_interleave(s_q)[:, None]
        lanes = torch.where(past, -1, lanes)
    slots = cache.shape[0] * cache.shape[1]
    demand(bool(((lanes >= -1) & (lanes < slots)).all()), "illegal memory access")
    valid = lanes >= 0
    at = torch.where(valid, lanes, (2**32 - 1) % cache.shape[1])
    rows = gather_rows(cache, at.reshape(-1)).view(*lanes.shape, -1)
    return rows.masked_fill(~valid[..., None], 0), valid


class FakeFlashInfer(ModuleType):
    """FlashInfer's ``_sparse_mla_sm120`` as a release has it; notes its launches in ``calls``."""

    def __init__(self, decode_heads: tuple[int, ...], topks: tuple[int, ...] | None, poison_by_slot_0: bool) -> None:
        super().__init__("flashinfer.mla._sparse_mla_sm120")
        self.poison_by_slot_0 = poison_by_slot_0
        self.calls: list[str] = []
        self._DECODE_MAX_TOKENS = 64
        if topks is None:  # 0.7
            dsv4 = SimpleNamespace(
                topk_is_runtime=True, topks=frozenset({128}), page_block_size_is_runtime=True,
                supported_num_heads=lambda: decode_heads,
            )  # fmt: skip
            self.supported_sparse_mla_sm120_configs = lambda: {"dsv4": dsv4}
        else:
            self._DECODE_DSV4_DISPATCH = frozenset((h, k) for h in decode_heads for k in topks)
        self.decode_heads, self.topks = decode_heads, topks
        self.prefill_heads: tuple[int, ...] = (8, 16, 32, 64, 128)

    def sparse_mla_sm120_decode_dsv4(
        self, q: Tensor, kv_cache: Tensor, indices: Tensor, mid_out: Tensor, mid_lse: Tensor, output: Tensor,
        out_lse: Tensor, sm_scale: float, *, topk_length: Tensor | None = None, attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None, extra_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None, chunks_per_block: int | None = None,
    ) -> Tensor:  # fmt: skip
        rows, heads, _ = q.shape
        topk = indices.shape[-1]
        demand(rows <= 64 and heads in self.decode_heads, f"decode-dsv4 launch failed: {rows} rows, {heads} heads")
        demand(self.topks is None or topk in self.topks, f"decode-dsv4 launch failed: topk {topk}")
        splits = -(-topk // 64) + (0 if extra_indices is None else -(-extra_indices.shape[-1] // 64))
        stored = 8 if heads == 8 else -(-heads // 16) * 16
        demand(mid_out.shape == (rows, stored, splits, 512) and mid_out.dtype == torch.bfloat16, "mid_out")
        demand(mid_lse.shape == (rows, stored, splits) and mid_lse.dtype == torch.float32, "mid_lse")
        demand(mid_out.is_contiguous() and mid_lse.is_contiguous(), "scratch must be contiguous")
        demand(
            chunks_per_block is not None and 1 <= chunks_per_block <= splits, "the split would follow heads and rows"
        )
        self.calls.append(f"decode {heads} heads, topk {topk}")
        self._attend(q, kv_cache, indices, output, out_lse, sm_scale, topk_length, attn_sink,
                     extra_kv_cache, extra_indices, extra_topk_length, extra_pages=None)  # fmt: skip
        return output

    def _sparse_mla_sm120_paged_attention(
        self, q: Tensor, kv_cache: Tensor, indices: Tensor, output: Tensor, out_lse: Tensor, sm_scale: float, *,
        d_v: int = 512, kv_scale_format: str = "auto", topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None, extra_kv_cache: Tensor | None = None, extra_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None, mid_out: Tensor | None = None, mid_lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        rows, heads, _ = q.shape
        topk = indices.shape[-1]
        demand(rows > 64, "Decode (num_tokens <= 64) must go through sparse_mla_sm120_decode_dsv4")
        legal = topk % 64 == 0 if self.topks is None else topk in {*self.topks, 2048}
        dual = extra_kv_cache is not None
        if self.topks is not None and dual:
            legal = topk == 128
        demand(legal and heads in self.prefill_heads, f"Unsupported sparse-MLA prefill configuration: {heads}, {topk}")
        demand(extra_indices is None or extra_indices.shape[-1] > 0, "extra_topk must be positive")
        self.calls.append(f"prefill {heads} heads, topk {topk}{' dual' if dual else ''}")
        self._attend(q, kv_cache, indices, output, out_lse, sm_scale, topk_length, attn_sink,
                     extra_kv_cache, extra_indices, extra_topk_length, extra_pages=(64, 2))  # fmt: skip

    def _attend(
        self, q: Tensor, kv: Tensor, indices: Tensor, output: Tensor, out_lse: Tensor, scale: float,
        length: Tensor | None, sink: Tensor | None, extra: Tensor | None, extra_indices: Tensor | None,
        extra_length: Tensor | None, *, extra_pages: tuple[int, ...] | None,
    ) -> None:  # fmt: skip
        for name, t in (("q", q), ("output", output), ("out_lse", out_lse), ("indices", indices)):
            demand(t.is_contiguous(), f"{name} must be contiguous")
        demand(scale > 0, "the running maximum is scaled: scales are positive")
        parts, masks = [], []
        for number, (cache, lanes, n) in enumerate(((kv, indices, length), (extra, extra_indices, extra_length))):
            if cache is None or lanes is None:
                continue
            pages = None if self.topks is None else extra_pages if number else (64,)
            row, valid = self._rows(cache, lanes, n, pages)
            parts.append(row)
            masks.append(valid)
        rows, valid = torch.cat(parts, 1), torch.cat(masks, 1)
        out, lse, _ = attend(q, rows, valid, scale)
        empty = ~valid.any(1)[:, None]
        log2 = lse / math.log(2)
        if sink is not None:  # folded in: log2(2^lse + 2^sink)
            out = with_sink(out, lse, sink)
            log2 = torch.logaddexp(lse, sink.double().expand_as(lse)) / math.log(2)
        output.copy_(out.masked_fill(empty[..., None], 0))
        if sink is None:
            log2 = log2.masked_fill(empty, -1e30 if self.topks is not None else -math.inf)
        out_lse.copy_(log2)

    def _rows(
        self, cache: Tensor, lanes: Tensor, length: Tensor | None, pages: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor]:
        demand(cache.dtype == torch.uint8 and cache.shape[2] == 1 and cache.shape[-1] == 584, "packed FP8 pages")
        demand(pages is None or cache.shape[1] in pages, f"page_block_size {cache.shape[1]}")
        demand(cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0, "misaligned address")
        topk = lanes.shape[-1]
        valid = lanes >= 0
        if length is not None:
            valid = valid & (torch.arange(topk) < length.clamp(0, topk)[:, None])
        demand(bool((lanes < cache.shape[0] * cache.shape[1]).all()), "illegal memory access")
        rows = gather_rows(cache, lanes.clamp_min(0).reshape(-1)).view(*lanes.shape, 512)
        if self.poison_by_slot_0:  # every lane of a started chunk of 64 is gathered, valid or not
            lane = torch.arange(topk)
            started = lane // 64 * 64 < (topk if length is None else length.clamp(0, topk)[:, None])
            return rows.masked_fill(~started.expand(valid.shape)[..., None], 0), valid
        return rows.masked_fill(~valid[..., None], 0), valid


@contextmanager
def registered(name: str, **functions: Callable[..., Any]) -> Iterator[str]:
    """A backend of CPU tensors made of these functions, for as long as the block lasts; yields its name."""
    module = ModuleType(f"headfit_{name.replace('-', '_')}")
    module.__dict__.update(available=lambda: None, **functions)
    sys.modules[module.__name__] = module
    kernels.REGISTRY[name] = kernels.Backend(name, module.__name__, ("cpu",), "a stand-in")
    try:
        yield name
    finally:
        del kernels.REGISTRY[name], sys.modules[module.__name__]
