"""What the SGLang plug-in does in a call: the wrappers, and what they know about the call that is running.

Belongs here: the wrapper functions and their per-process state. Does not belong here: which functions are wrapped and
how that is undone (``sglang.py``), the choice of kernel and width (``routes.py``). Imports no part of SGLang.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from headfit.capability import Call, Capability, is_sm12x
from headfit.engines import hooks, routes
from headfit.engines.hooks import Found
from headfit.engines.routes import Route
from headfit.width import Policy

MODEL = "sglang.srt.models.deepseek_v4"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
SM120 = "sglang.kernels.ops.attention.flash_mla_sm120"
# SGLang's names of forward modes -> the contract's. A mode that is not here is left alone.
MODES: Final = {
    "EXTEND": "extend",
    "MIXED": "mixed",
    "SPLIT_PREFILL": "split_prefill",
    "DRAFT_EXTEND_V2": "draft_extend",
    "DRAFT_EXTEND": "draft_extend",
    "TARGET_VERIFY": "target_verify",
    "DECODE": "decode",
    "IDLE": "idle",
    "DLLM_EXTEND": "dllm_extend",
}
V4_BYTES: Final = 584  # of a cached row; V4.1 pools, which later releases serve too, have other sizes
_FOREIGN: Final = frozenset({"flashinfer", "flashmla", "cpu"})  # adapters of the engine's kernels, and no GPU kernel


@dataclass
class Plugin:
    """What this process installed. One instance; `register` fills it, `unregister` empties it."""

    active: bool = False
    policy: Policy = field(default_factory=Policy.padded)
    explicit: bool = False
    installed: list[tuple[Found, Callable[..., Any]]] = field(default_factory=list)
    sm12x: bool = False  # whether the boundary of that kernel is wrapped; a width must not promise what it would refuse
    flashmla: bool = False
    n_heads: int = 0  # of the model, as its layers say
    # Answered on first use, never at start-up: asking opens a CUDA context.
    compute_capability: tuple[int, int] | None = None
    backends: tuple[str, ...] | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class _Now:
    """The attention call that is running: ``draft`` calls pass through, ``call`` is None where nothing is known."""

    draft: bool = False
    call: Call | None = None
    paged: bool = False  # headfit takes this prefill call: SGLang must not gather its pages
    plain: bool = True  # the backend reaches FlashMLA's boundary, and not another kernel family
    inside: bool = False  # a headfit kernel is running: its adapters may call what we wrapped


state = Plugin()
_now: ContextVar[_Now] = ContextVar("headfit_sglang", default=_Now())  # noqa: B039  (frozen)


def reset() -> None:
    """Turn every wrapper inert and forget what is known of this process."""
    global state
    state = Plugin()
    _capability.cache_clear()


# ------------------------------------------------------------------------------------------- what is running


def _mode(value: Any) -> str | None:
    return MODES.get(getattr(value, "name", ""))


def _in_breakable_graph() -> bool:
    """SGLang's own flag, read where its model reads it; a release without it is not in one."""
    flag = getattr(importlib.import_module(MODEL), "is_in_breakable_cuda_graph", None)
    return bool(flag()) if callable(flag) else False


def _lanes(backend: Any, ratio: Any) -> tuple[int, int]:
    """Widths of the two key lists that this step's metadata holds for a layer of this compression."""
    core = getattr(getattr(backend, "forward_metadata", None), "core_attn_metadata", None)
    second = {4: "c4_sparse_page_indices", 128: "c128_page_indices"}.get(ratio, "")
    widths = [getattr(getattr(core, name, None), "shape", (0,))[-1] for name in ("swa_page_indices", second)]
    return widths[0] or 128, widths[1]


def _describe(rows: int, n_local: int, n_heads: int, batch: Any, lanes: tuple[int, int]) -> Call | None:
    mode = _mode(getattr(batch, "forward_mode", None))
    before = getattr(batch, "_original_forward_mode", None)
    original = None if before is None else _mode(before)
    if mode is None or (before is not None and original is None) or n_local < 1 or n_heads % n_local:
        return None
    return Call(rows, n_local, n_heads, mode, original, _in_breakable_graph(), *lanes)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """An argument of a wrapped function, however the caller passed it."""
    return args[position] if len(args) > position else kwargs.get(name)


def around_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``MQALayer.forward``: note the call that its layer makes."""
    if not state.active or torch.compiler.is_compiling():
        return original(*args, **kwargs)
    layer, x, batch = args[0], _given(args, kwargs, 1, "x"), _given(args, kwargs, 3, "forward_batch")
    state.n_heads = int(layer.n_heads)
    backend = _attention_backend()
    lanes = _lanes(backend, getattr(layer, "compress_ratio", None))
    call = _describe(x.shape[0], layer.n_local_heads, layer.n_heads, batch, lanes)
    token = _now.set(_Now(call=call, plain=_is_plain(backend)))
    try:
        return original(*args, **kwargs)
    finally:
        _now.reset(token)


def around_draft(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``DSparkAttention.forward``: its calls pass every other wrapper through, padded as they are."""
    if not state.active or torch.compiler.is_compiling():
        return original(self, *args, **kwargs)
    token = _now.set(_Now(draft=True))
    try:
        return original(self, *args, **kwargs)
    finally:
        _now.reset(token)


def around_attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``DeepseekV4AttnBackend.forward``: note the call, also where a captured graph replays it."""
    if not state.active or _now.get().draft:
        return original(*args, **kwargs)
    backend, q = args[0], _given(args, kwargs, 1, "q")
    layer, batch = _given(args, kwargs, 4, "layer"), _given(args, kwargs, 5, "forward_batch")
    n_local = int(getattr(layer, "tp_q_head_num", 0))
    lanes = _lanes(backend, _given(args, kwargs, 6, "compress_ratio"))
    call = _describe(q.shape[0], n_local, state.n_heads or q.shape[-2], batch, lanes)
    plain = _is_plain(backend)
    # A breakable graph replays this function with the buffers it was captured with; only the kernel is chosen here.
    paged = call is not None and plain and _takes_pages(backend, call, q.shape[-2])
    token = _now.set(_Now(call=call, paged=paged, plain=plain))
    try:
        return original(*args, **kwargs)
    finally:
        _now.reset(token)


def _attention_backend() -> Any:
    context = importlib.import_module(MODEL)
    get = getattr(context, "get_attn_backend", None)
    try:
        return get() if callable(get) else None
    except AssertionError:  # no forward context: an empty batch returns before it is needed
        return None


def _is_plain(backend: Any) -> bool:
    """Whether calls end at FlashMLA's boundary (or its SM120 twin) with V4 pages, and not in another kernel family."""
    kind = type(backend)
    named = kind.__name__ == "DeepseekV4AttnBackend" and kind.__module__ == BACKEND
    other = getattr(backend, "trtllm_attn", False) or getattr(backend, "mega_attn", False)
    return named and not other and _is_v4(backend)


def _takes_pages(backend: Any, call: Call, engine_width: int) -> bool:
    """Whether headfit takes this prefill call from the pages. SGLang builds page lists up to a row count only."""
    if is_sm12x(_compute_capability()) or routes.phase_of(call) == "decode":
        return False
    module = importlib.import_module(BACKEND)
    q8kv8 = getattr(module, "use_dsv4_q8kv8_sparse_prefill", None)  # a choice of the user's, where it is on
    if callable(q8kv8) and q8kv8(getattr(backend, "dsv4_prefill_backend", "auto")):
        return False
    limit = getattr(module, "_LARGE_INDEXER_QUERY_THRESHOLD", None)
    if not isinstance(limit, int) or call.rows > limit:
        return False
    return _route(call, engine_width, "flashmla").ours


def _is_v4(backend: Any) -> bool:
    """Whether its cache holds the 584-byte rows of V4 (later releases also serve V4.1 pools)."""
    size = getattr(getattr(backend, "token_to_kv_pool", None), "get_swa_key_bytes_per_token", None)
    return not callable(size) or size() == V4_BYTES


# ------------------------------------------------------------------------------------- routes, with what they need


def _compute_capability() -> tuple[int, int] | None:
    if state.compute_capability is None:
        from headfit import probes

        state.compute_capability = probes.compute_capability() or (0, 0)
    return None if state.compute_capability == (0, 0) else state.compute_capability


def _own_backends() -> tuple[str, ...]:
    if state.backends is None:
        from headfit import kernels

        state.backends = tuple(name for name in kernels.backends() if name not in _FOREIGN)
    return state.backends


@functools.cache
def _capability(family: str) -> Capability | None:
    """What SGLang's own kernel accepts: FlashInfer as installed; the fallbacks of SM12x take any count; FlashMLA."""
    from headfit import probes

    cc = _compute_capability()
    if family == "flashinfer":
        return probes.flashinfer_capability(cc)
    if family == "any":
        every = range(1, 129)
        return Capability("sglang_sm120_fallback", cc, 0, every, every)
    heads = frozenset({64, 128})
    return Capability("flashmla", cc, 0, heads, heads, fork="entry", sources={"heads": "SGLang's own pad"})


def _route(call: Call, engine_width: int, family: str) -> Route:
    if state.gpu is None:
        state.gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    cc, own = _compute_capability(), _own_backends()
    return routes.route(call, engine_width, _capability(family), cc, own, state.policy, state.explicit, state.gpu)


def _sm120_family() -> str:
    """Which kernel SGLang's SM120 entry calls, by its own setting."""
    name = getattr(importlib.import_module(SM120), "_sm120_default_backend", "flashinfer")
    return "flashinfer" if name == "flashinfer" else "any"


# ------------------------------------------------------------------------------------------------- the wrappers


def around_num_heads(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Around ``MQALayer._kernel_num_heads``: the width at which queries are allocated; never wider than SGLang's."""
    width = original(*args, **kwargs)
    now = _now.get()
    if not state.active or torch.compiler.is_compiling() or now.draft or now.call is None or not now.plain:
        return width
    call = now.call
    if call.in_breakable_graph or call.n_local >= width or call.rows != _given(args, kwargs, 1, "num_tokens"):
        return width  # the width of a captured buffer must not depend on the mode
    sm12x = is_sm12x(_compute_capability())
    if not (state.sm12x if sm12x else state.flashmla):
        return width
    route = _route(call, width, _sm120_family() if sm12x else "flashmla")
    if route.ours and routes.phase_of(call) == "prefill" and not _takes_pages(_attention_backend(), call, width):
        return width
    return route.width if route.width < width else width


def around_gather(original: Callable[..., bool]) -> bool:
    """Around SGLang's switch of the gathered prefill: off in a call whose pages headfit reads directly."""
    return False if state.active and _now.get().paged else original()


def around_sm120(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Around SGLang's SM12x entry: its kernel, at the width of the route."""
    q: Tensor = kwargs["q"]
    now = _now.get()
    if not state.active or now.draft or now.call is None or kwargs["k_cache"].shape[-1] != V4_BYTES:
        return original(**kwargs)
    width = q.shape[-2]
    call = _with_lists(now.call, kwargs)
    route = _route(call, width, _sm120_family())
    hooks.count(routes.phase_of(call), route.width, _sm120_family(), route.rule)
    if route.width == width:
        return original(**kwargs)
    sink = kwargs.get("attn_sink")
    if route.width < width:
        # FlashInfer takes contiguous queries only; the caller slices the owned heads off either width.
        kwargs["q"] = q[..., : route.width, :].contiguous()
        kwargs["attn_sink"] = None if sink is None else sink[: route.width]
        out, *rest = original(**kwargs)
        return (_in_width(out, width) if call.in_breakable_graph else out, *rest)
    kwargs["q"] = torch.nn.functional.pad(q, (0, 0, 0, route.width - width))
    kwargs["attn_sink"] = None if sink is None else _wider_sink(sink, route.width)
    out, *rest = original(**kwargs)
    return (out[..., :width, :], *rest)


def _with_lists(call: Call, kwargs: dict[str, Any]) -> Call:
    lists, extra = kwargs.get("indices"), kwargs.get("extra_indices_in_kvcache")
    topk = call.topk if lists is None else int(lists.shape[-1])
    extra_topk = 0 if extra is None else int(extra.shape[-1])
    if (topk, extra_topk) == (call.topk, call.extra_topk):
        return call
    return Call(
        call.rows, call.n_local, call.n_heads, call.mode, call.original_mode, call.in_breakable_graph, topk, extra_topk
    )


def _wider_sink(sink: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(sink, (0, width - sink.shape[0]), value=-torch.inf)


def _in_width(out: Tensor, width: int) -> Tensor:
    """A captured graph expects the width it was captured with; heads beyond the owned ones are thrown away by it."""
    wide = out.new_zeros((*out.shape[:-2], width, out.shape[-1]))
    wide[..., : out.shape[-2], :] = out
    return wide


def around_decode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around FlashMLA's paged entry: a headfit kernel on the owned heads, or FlashMLA as it was."""
    now = _now.get()
    if not state.active or now.draft or now.inside or now.call is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs).arguments if args else kwargs
    q: Tensor = bound["q"]
    route = _route(_with_lists(now.call, bound), q.shape[-2], "flashmla")
    problem = _unfit(bound) if route.ours else None
    phase = routes.phase_of(now.call)
    if problem is None and route.ours:
        result, name = _run_paged(bound, route)
        hooks.count(phase, route.width, name, route.rule)
        return result
    hooks.count(phase, q.shape[-2], "flashmla", problem or route.rule)
    if q.shape[-2] in (64, 128):
        return original(*args, **kwargs)
    return _repadded(original, bound, now.call.padded_width)


def _unfit(bound: dict[str, Any]) -> str | None:
    """A word for why headfit does not take this call though the route would have it: it is not V4's sparse call."""
    if bound.get("indices") is None or not bound.get("is_fp8_kvcache"):
        return "not_sparse_fp8"
    caches = [bound["k_cache"], bound.get("extra_k_cache")]
    if any(cache is not None and cache.shape[-1] != V4_BYTES for cache in caches):
        return "cache_layout"
    if bound.get("descale_q") is not None or bound["q"].dtype != torch.bfloat16:
        return "query_dtype"
    return None


def _run_paged(bound: dict[str, Any], route: Route) -> tuple[tuple[Tensor, Tensor], str]:
    """Owned heads as views of what the caller allocated; the output in the width it expects, the rest unwritten.

    And the backend that ran.
    """
    q, sink, heads = bound["q"], bound.get("attn_sink"), route.width
    out = q.new_empty((*q.shape[:-1], bound["head_dim_v"]))
    token = _now.set(_Now(inside=True))
    try:
        (_, lse), name = hooks.launch(
            (route.kernel, *_own_backends()),
            q[:, :, :heads],
            bound["k_cache"],
            head_dim_v=bound["head_dim_v"],
            softmax_scale=bound.get("softmax_scale"),
            indices=bound["indices"],
            attn_sink=None if sink is None else sink[:heads],
            extra_k_cache=bound.get("extra_k_cache"),
            extra_indices_in_kvcache=bound.get("extra_indices_in_kvcache"),
            topk_length=bound.get("topk_length"),
            extra_topk_length=bound.get("extra_topk_length"),
            out=out[:, :, :heads],
        )
    finally:
        _now.reset(token)
    return (out, lse), name


def _repadded(original: Callable[..., Any], bound: dict[str, Any], width: int) -> Any:
    """A query that was allocated narrow for headfit, in a call that it does not take after all: pad it again."""
    q, sink = bound["q"], bound.get("attn_sink")
    given = {**bound, "q": torch.nn.functional.pad(q, (0, 0, 0, width - q.shape[-2]))}
    given["attn_sink"] = None if sink is None else _wider_sink(sink, width)
    out, *rest = original(**given)
    return (out[..., : q.shape[-2], :], *rest)


def around_sparse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The prefill over a gathered workspace: SGLang's, whatever the route; only a narrow query is padded for it."""
    now = _now.get()
    if not state.active or now.draft or now.inside or now.call is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs).arguments if args else kwargs
    width = bound["q"].shape[-2]
    route = _route(now.call, width, "flashmla")
    rule = "gathered" if route.ours else route.rule
    if width in (64, 128):
        hooks.count("prefill", width, "flashmla", rule)
        return original(*args, **kwargs)
    hooks.count("prefill", now.call.padded_width, "flashmla", rule)
    return _repadded(original, bound, now.call.padded_width)
