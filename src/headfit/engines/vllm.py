"""The vLLM plug-in: DeepSeek-V4's FlashMLA attention at the heads a rank owns. Entry point of ``vllm.general_plugins``.

Belongs here: which functions of vLLM are wrapped, what each wrapper does, and how to take them off again. Does not
belong here: the choice of kernel and width (``routes.py``), generic hook machinery (``hooks.py``). Importing this
module imports no part of vLLM.

vLLM loads plug-ins before it forks and in every process, so nothing is imported, and no device asked, at that time: the
wrappers go on right after vLLM itself imports ``vllm.models.deepseek_v4.nvidia.flashmla``. They are:

- ``get_padded_num_q_heads``: the owned heads, where headfit takes every decode and every prefill call of this head
  count; queries, output and sinks are then allocated at that width. Else vLLM's 64 or 128.
- ``_forward_decode`` and the ``flash_mla_with_kvcache`` it calls: a headfit kernel on views of the owned heads.
- ``_forward_prefill``: the same straight from the FP8 pages, without the bfloat16 gather workspace, where that was
  measured to win or was asked for; ``forward_mqa`` then reserves no workspace in the dummy run either.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from torch import Tensor

from headfit.capability import Call, Capability, padded_width
from headfit.engines import hooks, routes
from headfit.engines.hooks import Patches, Target, TargetError
from headfit.engines.routes import Phase, Route
from headfit.width import Policy

OLDEST, NEWEST = "0.33", "0.33"  # any patch release; docs/compat.md holds the results of `make compat`
LINE: Final = "vLLM"
MODULE: Final = "vllm.models.deepseek_v4.nvidia.flashmla"
_CLASS = f"{MODULE}.DeepseekV4FlashMLAAttention"
PAD = Target(f"{_CLASS}.get_padded_num_q_heads", ("num_heads",))
WARM = Target(f"{_CLASS}.forward_mqa", ("q", "kv", "positions", "output"))
DECODE = Target(f"{_CLASS}._forward_decode", ("q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output"))
PREFILL = Target(
    f"{_CLASS}._forward_prefill",
    ("q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata"),
)
KERNEL = Target(
    f"{MODULE}.flash_mla_with_kvcache",
    ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
    ("softmax_scale", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache",
     "topk_length", "extra_topk_length", "out"),
)  # fmt: skip
SPARSE = Target(
    f"{MODULE}.flash_mla_sparse_fwd", ("q", "kv", "indices", "sm_scale"), ("attn_sink", "topk_length", "out")
)
GLOBAL_LISTS = Target(
    f"{MODULE}.compute_global_topk_indices_and_lens",
    ("topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token"),
)
V4_BYTES: Final = 584
_FOREIGN: Final = frozenset({"flashinfer", "flashmla", "cpu"})  # adapters of the engine's kernels, and no GPU kernel
_ENGINE_HEADS: Final = frozenset({64, 128})


@dataclass
class Plugin:
    """What this process installed; `register` fills it, `unregister` empties it."""

    active: bool = False
    policy: Policy = field(default_factory=Policy.padded)
    explicit: bool = False
    patches: Patches = field(default_factory=Patches)
    cancel: Callable[[], None] = lambda: None
    # Answered on first use, in the worker: vLLM forks after plug-ins were loaded.
    compute_capability: tuple[int, int] | None = None
    backends: tuple[str, ...] | None = None
    gpu: str | None = None


state = Plugin()
_layer: ContextVar[Any] = ContextVar("headfit_vllm", default=None)  # the attention layer whose decode is running


# ------------------------------------------------------------------------------------------------- on and off


def register() -> None:
    """The entry point: wrap the attention once vLLM imports it. Never raises; calling it again changes nothing."""
    try:
        _register()
    except Exception as error:  # a plug-in must not take the server down
        reset()
        hooks.say_once(LINE, f"nothing installed: {type(error).__name__}: {error}", warn=True)


def _register() -> None:
    if state.active:
        return
    problem = hooks.version_problem("vllm", OLDEST, NEWEST)
    if problem is not None:
        hooks.say_once(LINE, f"nothing installed: {problem}", warn=True)
        return
    from headfit import env

    policy = Policy.from_env()
    if routes.is_off(policy) or policy.kind != "native":
        hooks.say_once(LINE, f"nothing installed: {policy.origin} keeps the pad here")
        return
    state.active, state.policy, state.explicit = True, policy, env.read("HEADFIT_WIDTH") is not None
    state.cancel = hooks.when_imported(MODULE, _install)


def _install(module: ModuleType) -> None:
    try:
        targets = [hooks.resolve(t) for t in (PAD, WARM, DECODE, PREFILL, KERNEL, SPARSE, GLOBAL_LISTS)]
    except TargetError as error:
        reset()
        hooks.say_once(LINE, f"nothing installed: {error}", warn=True)
        return
    pad, warm, decode, prefill, kernel, sparse, _ = targets
    put = state.patches.replace
    put(pad, classmethod(_wrapped(pad.raw.__func__, _pad)))
    for found, around in ((warm, _warm), (decode, _decode), (prefill, _prefill), (kernel, _kernel), (sparse, _sparse)):
        put(found, _wrapped(found.raw, around))
    names = ", ".join(found.target.short for found, _ in state.patches.done)
    version, policy = hooks.version_of("vllm"), state.policy
    hooks.say_once(LINE, f"{version}: wrapped {names} of {module.__name__} by {policy.origin} ({policy.kind})")


def unregister() -> list[str]:
    """Turn everything off and put vLLM's functions back; returns the paths where somebody else's wrapper stands.

    Layers that were built at the owned width keep it, and need the plug-in: unregister before a model is built.
    """
    patches = state.patches
    reset()
    hooks.forget_line(LINE)
    return patches.restore()


def reset() -> None:
    """Turn every wrapper inert and forget what is known of this process."""
    global state
    state.cancel()
    state = Plugin()


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper


# ------------------------------------------------------------------------------------------------- routes


def _compute_capability() -> tuple[int, int]:
    """From vLLM's platform, which asks the driver and opens no CUDA context; (0, 0) where there is no GPU."""
    if state.compute_capability is None:
        found = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
        state.compute_capability = (0, 0) if found is None else (int(found.major), int(found.minor))
    return state.compute_capability


def _backends() -> tuple[str, ...]:
    if state.backends is None:
        from headfit import kernels

        state.backends = tuple(name for name in kernels.backends() if name not in _FOREIGN)
    return state.backends


def _gpu() -> str:
    """The GPU's name, by which the measured table goes: from vLLM's platform, too."""
    if state.gpu is None:
        state.gpu = str(importlib.import_module("vllm.platforms").current_platform.get_device_name())
    return state.gpu


def _route(layer: Any, phase: Phase, engine_width: int, rows: int, topk: int, extra: int) -> Route:
    mode = "decode" if phase == "decode" else "extend"
    call = Call(rows, int(layer.n_local_heads), int(layer.n_heads), mode, topk=topk, extra_topk=extra)
    cc = _compute_capability()
    capability = Capability("flashmla", cc, 0, _ENGINE_HEADS, _ENGINE_HEADS, fork="entry")
    found = routes.route(call, engine_width, capability, cc, _backends(), state.policy, state.explicit, _gpu())
    if found.rule == "no_pad" and engine_width not in _ENGINE_HEADS:  # allocated at the owned heads, by `_pad`
        return Route(_backends()[0], call.n_local, "native", "allocated at the owned heads")
    return found


def _native_everywhere(num_heads: int) -> bool:
    """Whether headfit takes every decode and every prefill call at this head count, so that nothing needs the pad."""
    backends = _backends()
    if not backends or num_heads > 128 or num_heads in _ENGINE_HEADS:
        return False
    return state.explicit or routes.wins_everywhere(routes.points_of(_gpu()), backends, num_heads)


def _batch_invariant() -> bool:
    return bool(getattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", False))


# ------------------------------------------------------------------------------------------------- the wrappers


def _pad(original: Callable[..., int], cls: Any, num_heads: int) -> int:
    if not state.active:
        return original(cls, num_heads)
    return num_heads if _native_everywhere(num_heads) else original(cls, num_heads)


def _warm(original: Callable[..., None], self: Any, q: Tensor, kv: Any, positions: Any, output: Tensor) -> None:
    if state.active and self.padded_heads not in _ENGINE_HEADS and self.max_image_tokens == 0:
        context = importlib.import_module(MODULE).get_forward_context()
        if context.attn_metadata is None:  # the dummy run: no gather follows, so no workspace is reserved
            output.zero_()
            return
    original(self, q, kv, positions, output)


def _decode(original: Callable[..., None], self: Any, q: Tensor, *args: Any, **kwargs: Any) -> None:
    token = _layer.set(self if state.active else None)
    try:
        original(self, q, *args, **kwargs)
    finally:
        _layer.reset(token)


def _kernel(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layer = _layer.get()
    if layer is None or args or kwargs["k_cache"].shape[-1] != V4_BYTES:
        return original(*args, **kwargs)
    q: Tensor = kwargs["q"]
    more = kwargs["extra_indices_in_kvcache"]
    extra = 0 if more is None else more.shape[-1]
    route = _route(layer, "decode", q.shape[2], q.shape[0] * q.shape[1], kwargs["indices"].shape[-1], extra)
    if not route.ours:
        hooks.count("decode", route.width, "flashmla", route.rule)
        return original(**kwargs)
    return _run(
        kwargs["q"], kwargs["out"], layer, route, "decode", kwargs["k_cache"], kwargs["indices"], kwargs["topk_length"],
        (kwargs["extra_k_cache"], kwargs["extra_indices_in_kvcache"], kwargs["extra_topk_length"]),
    )  # fmt: skip


def _prefill(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if not state.active or args:
        original(self, *args, **kwargs)
        return
    q, meta, width = kwargs["q"], kwargs["swa_metadata"], kwargs["q"].shape[1]
    extra = _extra_lanes(self, kwargs["attn_metadata"])
    route = _route(self, "prefill", width, meta.num_prefill_tokens, int(self.window_size), extra)
    why = _unfit(self, meta, kwargs["swa_k_cache"]) if route.ours else None
    if not route.ours or why is not None:
        hooks.count("prefill", padded_width(self.n_local_heads, self.n_heads), "flashmla", why or route.rule)
        token = _layer.set(self)
        try:
            original(self, **kwargs)
        finally:
            _layer.reset(token)
        return
    rows = meta.num_prefill_tokens
    lists = meta.prefill_swa_indices.view(rows, 1, -1)
    second = _compressed(self, kwargs["compressed_k_cache"], kwargs["attn_metadata"], meta)
    output = kwargs["output"][:rows].unsqueeze(1)
    _run(q[:rows].unsqueeze(1), output, self, route, "prefill", kwargs["swa_k_cache"].unsqueeze(-2), lists,
         meta.prefill_swa_lens, second)  # fmt: skip


def _extra_lanes(layer: Any, attn: Any) -> int:
    if attn is None:
        return 0
    return int((layer.topk_indices_buffer if layer.compress_ratio == 4 else attn.c128a_prefill_topk_indices).shape[-1])


def _unfit(layer: Any, meta: Any, cache: Tensor) -> str | None:
    """A word for why this prefill cannot be read from the pages."""
    if getattr(meta, "prefill_left_visible", None) is not None:
        return "image"  # a window that also reaches to the right
    if getattr(meta, "prefill_swa_indices", None) is None or getattr(meta, "prefill_swa_lens", None) is None:
        return "no_page_lists"
    if cache.shape[-1] != V4_BYTES:
        return "cache_layout"
    return None if int(layer.compress_ratio) in (0, 1, 4, 128) else "compress_ratio"


def _compressed(layer: Any, cache: Any, attn: Any, meta: Any) -> tuple[Any, Any, Any]:
    """The second cache with the slots that each prefill row chose in it: vLLM's own map from local to global."""
    if attn is None:
        return None, None, None
    first, rows = meta.num_decode_tokens, meta.num_prefill_tokens
    local = layer.topk_indices_buffer[first : first + rows] if layer.compress_ratio == 4 else None
    local = attn.c128a_prefill_topk_indices if local is None else local
    slots, lengths = importlib.import_module(MODULE).compute_global_topk_indices_and_lens(
        local,
        meta.token_to_req_indices[first : first + rows],
        attn.block_table,
        attn.block_size // layer.compress_ratio,
        meta.is_valid_token[first : first + rows],
    )
    return cache.unsqueeze(-2), slots.view(rows, 1, -1), lengths


def _run(
    q: Tensor, out: Tensor, layer: Any, route: Route, phase: Phase, cache: Tensor, lists: Tensor, lengths: Any,
    extra: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A headfit kernel on the owned heads, read and written as views of what vLLM allocated."""
    heads = route.width
    extra_cache, extra_lists, extra_lengths = extra
    result, name = hooks.launch(
        (route.kernel, *_backends()),
        q[:, :, :heads],
        cache,
        softmax_scale=layer.scale,
        indices=lists if lists.dim() == 3 else lists.unsqueeze(1),
        attn_sink=layer.attn_sink[:heads],
        extra_k_cache=extra_cache,
        extra_indices_in_kvcache=extra_lists,
        topk_length=lengths,
        extra_topk_length=extra_lengths,
        out=out[:, :, :heads],
        enable_batch_invariant=_batch_invariant(),
    )
    hooks.count(phase, heads, name, route.rule)
    return result


def _sparse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The prefill over a gathered workspace: vLLM's, unless the queries are narrower than its kernel takes."""
    layer = _layer.get()
    if layer is None or args or kwargs["q"].shape[1] in _ENGINE_HEADS:
        return original(*args, **kwargs)
    from headfit import kernels
    from headfit.ops import flash_mla_sparse_fwd

    return flash_mla_sparse_fwd(**kwargs, backend=kernels.first_reading("bf16", _backends(), state.compute_capability))
