"""What stands in for GPU code when an engine's real Python runs on a machine without one.

Belongs here: stand-ins for compiled packages that engines import (their signatures are those of the real releases) and
for the kernels behind them, computed by headfit's CPU backend. The engine itself is never stood in for.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headfit.ops import flash_mla_sparse_fwd, flash_mla_with_kvcache


@dataclass(frozen=True)
class Launch:
    """One kernel launch that a stand-in saw."""

    kernel: str
    heads: int
    q_pointer: int
    sink_pointer: int | None
    sink_heads: int


launches: list[Launch] = []
echo = False  # answer with a cheap function of query and sink instead of attention: enough to see what was passed


def echoed(q: Tensor, sink: Tensor | None) -> Tensor:
    """Per row and head, so that a wrong head, row or sink shows in the bits."""
    return q[..., :512] + (0 if sink is None else sink[:, None].to(q.dtype))


class EchoBackend:
    """A headfit backend that echoes."""

    @staticmethod
    def run(call: Any) -> None:
        """Write every element of the output, as a backend does."""
        call.out.copy_(echoed(call.q, call.attn_sink))


def _note(kernel: str, q: Tensor, sink: Tensor | None) -> None:
    pointer = None if sink is None else sink.data_ptr()
    launches.append(Launch(kernel, q.shape[-2], q.data_ptr(), pointer, 0 if sink is None else sink.shape[0]))


# Signature of sgl_kernel.flash_mla in sglang-kernel 0.4.5 and 0.4.7, and of flash_mla in sgl-flash-mla 1.0.0.
def _paged(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, **kwargs,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """FlashMLA's paged entry: 64 or 128 heads only, as the real one."""
    _note("flashmla", q, attn_sink)
    if q.shape[2] not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {q.shape[2]}")
    if attn_sink is not None and attn_sink.shape[0] != q.shape[2]:
        raise RuntimeError("attn_sink: wrong size")
    if echo:
        return echoed(q, attn_sink), torch.empty(0)
    return flash_mla_with_kvcache(
        q, k_cache, softmax_scale=softmax_scale, indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length,
        extra_topk_length=extra_topk_length, out=kwargs.get("out"), backend="cpu",
    )  # fmt: skip


def paged_sgl_kernel(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The signature of sglang-kernel."""
    return _paged(**locals())


def paged_any(*args: Any, **kwargs: Any) -> Any:
    """Behind a real interface, which passes its own list of arguments."""
    return _paged(*args, **kwargs)


def sparse(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, **kwargs):  # type: ignore[no-untyped-def]
    """FlashMLA's prefill over gathered rows: 64 or 128 heads only."""
    _note("flashmla_gathered", q, attn_sink)
    if q.shape[1] not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {q.shape[1]}")
    if echo:
        return echoed(q, attn_sink), torch.empty(0), torch.empty(0)
    return flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, attn_sink=attn_sink, topk_length=topk_length, out=kwargs.get("out"), backend="cpu"
    )


def sparse_sgl_kernel(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):  # type: ignore[no-untyped-def]
    """The signature of sglang-kernel."""
    return sparse(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)


def install_sgl_kernel() -> None:
    """``sgl_kernel.flash_mla`` for releases that import it; its compiled part needs a GPU build."""
    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_mla")
    package.__path__ = []
    package.flash_mla = module  # type: ignore[attr-defined]
    for name, value in (
        ("flash_mla_with_kvcache", paged_sgl_kernel),
        ("flash_mla_sparse_fwd", sparse_sgl_kernel),
        ("get_mla_metadata", lambda *a, **k: (object(), None)),
    ):
        setattr(module, name, value)
    for name, value in (("sgl_kernel", package), ("sgl_kernel.flash_mla", module)):
        value.__spec__ = importlib_spec(name)
        sys.modules[name] = value


def importlib_spec(name: str) -> Any:
    """A spec, which ``importlib.util.find_spec`` insists on for a module in ``sys.modules``."""
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


def install_flash_mla() -> None:
    """The real Python of sgl-flash-mla, whose library cannot be loaded without CUDA; its two functions stood in for."""
    load = torch.ops.load_library
    torch.ops.load_library = lambda path: None  # type: ignore[method-assign,assignment]
    try:
        import flash_mla
    finally:
        torch.ops.load_library = load  # type: ignore[method-assign]
    real = inspect.signature(flash_mla.flash_mla_with_kvcache)
    missing = set(inspect.signature(paged_sgl_kernel).parameters) - set(real.parameters)
    if missing:
        raise RuntimeError(f"flash_mla_with_kvcache of sgl-flash-mla takes no {missing}")
    flash_mla.flash_mla_with_kvcache = paged_any
    flash_mla.flash_mla_sparse_fwd = sparse


@functools.cache
def _flashinfer() -> Any:
    from headfit import probes

    return probes.flashinfer_capability((12, 0))


def flashinfer_attention(q, kv, indices, output, out_lse, sm_scale, **kwargs):  # type: ignore[no-untyped-def]
    """FlashInfer's SM120 entry: contiguous queries only, head counts as the installed release lists them."""
    from headfit.capability import above_split

    sink = kwargs.get("attn_sink")
    _note("flashinfer", q, sink)
    found = _flashinfer()
    if found is None:
        raise RuntimeError("FlashInfer is not installed")
    side = "prefill" if above_split(q.shape[0], found.row_split) else "decode"
    if q.shape[1] not in found.heads(side):  # type: ignore[arg-type]
        raise RuntimeError(f"FlashInfer {found.version}: {side} does not take {q.shape[1]} heads")
    if not q.is_contiguous() or not output.is_contiguous():
        raise RuntimeError("FlashInfer: query and output must be contiguous")
    if sink is not None and sink.shape[0] != q.shape[1]:
        raise RuntimeError("FlashInfer: attn_sink.size(0) must be num_heads")
    if echo:
        output.copy_(echoed(q, sink))
        return
    extra = kwargs.get("extra_kv_cache")
    flash_mla_with_kvcache(
        q[:, None], kv, softmax_scale=sm_scale, indices=indices[:, None], attn_sink=sink, extra_k_cache=extra,
        extra_indices_in_kvcache=None if extra is None else kwargs["extra_indices"][:, None],
        topk_length=kwargs.get("topk_length"), extra_topk_length=kwargs.get("extra_topk_length"),
        out=output[:, None], backend="cpu",
    )  # fmt: skip
