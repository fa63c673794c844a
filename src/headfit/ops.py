"""The public attention functions, with FlashMLA's call shapes: check -> empty return -> plan -> launch.

No kernel is here. Under ``torch.compile`` the launch goes through the custom op ``headfit::sparse_mla``, whose fake
implementation is what tracing sees; eager calls go straight to the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headfit import checks, kernels
from headfit.call import D_V, KeySet, SparseCall


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    head_dim_v: int = D_V,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = True,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse MLA attention over one or two paged caches, at any number of query heads.

    The argument list is FlashMLA's, so that a caller changes one import. For every row, softmax runs over the listed
    keys of ``k_cache`` and then of ``extra_k_cache``; a key's first 512 dims are also its value.

    Args:
        q: bfloat16 ``[b, s_q, h_q, d_qk]``, h_q 1 to 128, d_qk 512 (V4) or 576 (V3.2, GLM). The last dim is contiguous,
            other strides are free: ``buf[:, :, :8]`` of a padded buffer is read in place.
        k_cache: packed pages ``[pages, page_size, 1, 584 (v4) or 656 (v32)]`` uint8 or float8_e4m3fn, or, with
            ``is_fp8_kvcache=False``, bfloat16 ``[pages, page_size, 1, d_qk]``. Any page_size >= 1, any page stride.
        block_table: ignored, as in FlashMLA's sparse mode: indices name physical slots.
        cache_seqlens: ignored, as in FlashMLA's sparse mode: ``topk_length`` bounds a row.
        head_dim_v: 512.
        tile_scheduler_metadata: accepted and ignored; plans come from shapes alone, so graphs replay with new lengths.
        num_splits: accepted and ignored, likewise.
        softmax_scale: multiplies q.k; None means ``d_qk ** -0.5``.
        causal: must be False: the index lists say what a row may see.
        is_fp8_kvcache: whether the caches are packed FP8 pages.
        indices: int32 ``[b, s_q, topk]``, ``page * page_size + offset``; any topk >= 0. A value < 0 or >= the number of
            slots is invalid: it touches no memory and adds nothing. Duplicates count as often as they stand. Required.
        attn_sink: float32 ``[h_q]``, natural-log units: ``out *= 1 / (1 + exp(sink - lse))``. -inf has no effect, +inf
            gives 0.
        extra_k_cache: a second cache (the compressed rows of V4), of the same kind as ``k_cache``; its page size and
            stride are its own.
        extra_indices_in_kvcache: int32 ``[b, s_q, extra_topk]`` into ``extra_k_cache``; given with it or not at all.
        topk_length: int32 ``[b]``: lanes at or past it are never read. Clamped to [0, topk] in the kernel.
        extra_topk_length: the same for ``extra_indices_in_kvcache``.
        out: where to write the result, a bfloat16 view of its shape; elements outside the view stay untouched. It may
            be q itself (d_qk 512), and must not overlap an argument otherwise.
        enable_batch_invariant: a row's bits then depend neither on the rows that share the call nor on prefill/decode.
        backend: None (choose), or a name from :func:`headfit.backends`; a named one never falls back.

    Returns:
        ``(out, lse)``: out bfloat16 ``[b, s_q, h_q, 512]``; lse float32 ``[b, h_q, s_q]``, natural log, sink not
        included (FlashMLA's convention since 2026-01). A row with no valid key has out 0 whatever the sink and
        lse +inf.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is accepted.
        headfit.kernels.BackendUnavailable: the backend asked for cannot run here or cannot take the call.
    """
    q = checks.query(q, "[b, s_q, h_q, d_qk]")
    b, s_q, h_q, d_qk = q.shape
    checks.head_dim_v("head_dim_v", head_dim_v)
    scale = checks.softmax_scale("softmax_scale", softmax_scale, d_qk)
    is_fp8 = checks.flag("is_fp8_kvcache", is_fp8_kvcache)
    invariant = checks.flag("enable_batch_invariant", enable_batch_invariant)
    if checks.flag("causal", causal):
        raise ValueError("causal: got True, accepted is False: the index lists already say what each row may see")
    key_sets = [
        _key_set(q, ("k_cache", k_cache), ("indices", indices), ("topk_length", topk_length), is_fp8),
    ]
    if extra_k_cache is not None:
        lanes = ("extra_indices_in_kvcache", extra_indices_in_kvcache)
        length = ("extra_topk_length", extra_topk_length)
        key_sets.append(_key_set(q, ("extra_k_cache", extra_k_cache), lanes, length, is_fp8))
    else:
        for name, value in (
            ("extra_indices_in_kvcache", extra_indices_in_kvcache),
            ("extra_topk_length", extra_topk_length),
        ):
            if value is not None:
                raise ValueError(f"{name}: given without extra_k_cache; pass both or neither")
    sink = checks.attn_sink(attn_sink, h_q, q.device)
    shape = (b, s_q, h_q, D_V)
    out = q.new_empty(shape) if out is None else checks.output(out, shape, q)
    lse = torch.empty((b, h_q, s_q), dtype=torch.float32, device=q.device)
    _launch(
        SparseCall(q, tuple(key_sets), scale, sink, out, lse, None, invariant, "decode"),
        backend,
    )
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    *,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse MLA attention over plain bfloat16 rows (FlashMLA's sparse prefill), at any number of query heads.

    Args:
        q: bfloat16 ``[s_q, h_q, d_qk]``, h_q 1 to 128, d_qk 512 or 576; last dim contiguous, other strides free.
        kv: bfloat16 ``[s_kv, 1, d_qk]``, last dim contiguous, row stride free; the first 512 dims are also the value.
        indices: int32 ``[s_q, 1, topk]``, rows of ``kv``; any topk >= 0. < 0 or >= s_kv is invalid and touches no
            memory.
        sm_scale: multiplies q.k.
        d_v: 512.
        attn_sink: float32 ``[h_q]``, natural-log units: ``out *= 1 / (1 + exp(sink - lse))``.
        topk_length: int32 ``[s_q]``: lanes at or past it are never read. Clamped to [0, topk] in the kernel.
        out: where to write the result, a bfloat16 view ``[s_q, h_q, 512]``; elements outside it stay untouched.
        backend: None (choose), or a name from :func:`headfit.backends`; a named one never falls back.
        enable_batch_invariant: as in :func:`flash_mla_with_kvcache`; with both set, the two entries give a row the same
            bits. An addition to FlashMLA's signature.

    Returns:
        ``(out, max_logits, lse)``: out bfloat16 ``[s_q, h_q, 512]``; max_logits and lse float32 ``[s_q, h_q]``, scaled
        and in natural units, the sink in neither (FlashMLA's convention since 2026-01). A row with no valid key: out 0,
        max_logits -inf, lse +inf.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came and what is accepted.
        headfit.kernels.BackendUnavailable: the backend asked for cannot run here or cannot take the call.
    """
    q = checks.query(q, "[s_q, h_q, d_qk]")
    s_q, h_q, d_qk = q.shape
    checks.head_dim_v("d_v", d_v)
    if sm_scale is None:
        raise TypeError("sm_scale: got None, accepted is a Python float, such as d_qk ** -0.5")
    scale = checks.softmax_scale("sm_scale", sm_scale, d_qk)
    kv = checks.tensor("kv", kv, torch.bfloat16, "[s_kv, 1, d_qk]")
    rows = checks.plain_cache("kv", kv[:, None], d_qk, q.device)  # pages of one row each: any row stride
    lanes = checks.indices("indices", indices, (s_q, 1), "[s_q, 1, topk]", q.device)
    length = checks.lengths("topk_length", topk_length, s_q, q.device)
    sink = checks.attn_sink(attn_sink, h_q, q.device)
    shape = (s_q, h_q, D_V)
    out = q.new_empty(shape) if out is None else checks.output(out, shape, q)
    max_logits = torch.empty((s_q, h_q), dtype=torch.float32, device=q.device)
    lse = torch.empty_like(max_logits)
    _launch(
        SparseCall(
            q=q[:, None],
            key_sets=(checks.key_set(rows, "bf16", lanes, length),),
            sm_scale=scale,
            attn_sink=sink,
            out=out[:, None],
            lse=lse[..., None],
            max_logits=max_logits[..., None],
            batch_invariant=checks.flag("enable_batch_invariant", enable_batch_invariant),
            phase="prefill",
        ),
        backend,
    )
    return out, max_logits, lse


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[object, None]:
    """For callers that expect FlashMLA's scheduler metadata: ``(object, None)``, to be passed on and ignored.

    headfit plans from shapes alone, so there is nothing to prepare, nothing bound to lengths, and nothing to rebuild
    before a CUDA graph replays. Any arguments are accepted.
    """
    return object(), None


def _key_set(
    q: Tensor, cache: tuple[str, Any], lanes: tuple[str, Any], length: tuple[str, Any], is_fp8: bool
) -> KeySet:
    b, s_q, _, d_qk = q.shape
    if lanes[1] is None:
        raise ValueError(
            f"{lanes[0]}: got None, accepted is int32 [b, s_q, topk]: headfit runs sparse attention; "
            f"for a dense layer list every row"
        )
    if is_fp8:
        data, layout = checks.packed_cache(*cache, d_qk, q.device)
    else:
        data, layout = checks.plain_cache(*cache, d_qk, q.device), "bf16"
    checked = checks.indices(*lanes, (b, s_q), "[b, s_q, topk]", q.device)
    return checks.key_set(data, layout, checked, checks.lengths(*length, b, q.device))


def _launch(call: SparseCall, backend: str | None) -> None:
    if backend is not None and backend not in kernels.REGISTRY:
        kernels.load(backend)  # raises: names the accepted ones
    if call.rows == 0:
        return
    if torch.compiler.is_compiling():
        _launch_custom_op(call, backend)
        return
    _, module = kernels.choose(call, backend)
    module.run(call)


def _launch_custom_op(call: SparseCall, backend: str | None) -> None:
    first, *rest = call.key_sets
    extra = rest[0] if rest else None
    sparse_mla(
        call.q,
        first.data,
        first.indices,
        first.lengths,
        extra.data if extra else None,
        extra.indices if extra else None,
        extra.lengths if extra else None,
        call.attn_sink,
        call.out,
        call.lse,
        call.max_logits,
        call.sm_scale,
        call.batch_invariant,
        call.phase,
        backend,
    )


@torch.library.custom_op("headfit::sparse_mla", mutates_args=("out", "lse", "max_logits"))
def sparse_mla(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
    sm_scale: float,
    batch_invariant: bool,
    phase: str,
    backend: str | None,
) -> None:
    """The launch as an operator for ``torch.compile``: checked tensors in, ``out``, ``lse``, ``max_logits`` written.

    Shapes as in :class:`headfit.call.SparseCall`; caches as uint8 pages or bfloat16 pages. Call the public functions
    instead: this one assumes that they checked.
    """
    sets = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices is not None:
        sets.append((extra_k_cache, extra_indices, extra_topk_length))
    key_sets = tuple(checks.key_set(data, _layout_name(data), lanes, length) for data, lanes, length in sets)
    call = SparseCall(
        q, key_sets, sm_scale, attn_sink, out, lse, max_logits, batch_invariant,
        "prefill" if phase == "prefill" else "decode",
    )  # fmt: skip
    _, module = kernels.choose(call, backend)
    module.run(call)


@sparse_mla.register_fake
def _(*args: Any, **kwargs: Any) -> None:
    return None


def _layout_name(data: Tensor) -> str:
    return "bf16" if data.dtype == torch.bfloat16 else checks.layout_of(data.shape[-1]).name
