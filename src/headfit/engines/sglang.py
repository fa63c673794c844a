"""The SGLang plug-in: DeepSeek-V4 attention at the heads a rank owns. Entry point of group ``sglang.srt.plugins``.

Belongs here: which functions of SGLang are wrapped, what each wrapper does, and how to take them off again. Does not
belong here: the choice of kernel and width (``routes.py``), generic hook machinery (``hooks.py``). Importing this
module imports no part of SGLang; `register` does.

How the wrappers work together:

- ``MQALayer.forward`` and ``DeepseekV4AttnBackend.forward`` only note what is being run (mode, rows, owned heads).
- ``MQALayer._kernel_num_heads`` (SGLang 0.5.20 and later) answers with the width of the route, so that queries and
  output are allocated at it. Earlier releases pad inline, and nothing is changed there.
- The kernel boundary (``flash_mla_with_kvcache``, ``flash_mla_sparse_fwd``, the SM120 entry) looks at the query that
  arrives, padded or not, and runs the route: SGLang's kernel as it was, SGLang's kernel on a narrower view, or a
  headfit kernel on a view of the owned heads that writes into a buffer of the width the caller expects.
- SGLang's sparse prefill gathers pages into a bfloat16 workspace first. Where headfit takes a prefill call, its own
  switch for that is answered with off, so that SGLang builds the paged call instead, and the pages are read directly.
- The DSPARK draft attention is left alone: its calls pass every wrapper through.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from headfit.engines import hooks, routes
from headfit.engines import sglang_calls as calls
from headfit.engines.hooks import Found, Target, TargetError
from headfit.width import Policy

OLDEST, NEWEST = "0.5.16", "0.5.23"  # the releases that `make compat` runs; docs/compat.md holds its results
LINE: Final = "SGLang"
REGISTRY: Final = "sglang.srt.plugins.hook_registry"
_FLASHMLA = ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla")  # 0.5.21 on, and before
_DECODE_NEEDS = (
    "q", "k_cache", "head_dim_v", "softmax_scale", "is_fp8_kvcache", "indices", "topk_length", "attn_sink",
    "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length",
)  # fmt: skip

LAYER = Target(f"{calls.MODEL}.MQALayer.forward", ("x", "positions", "forward_batch"), passes_on=True)
NUM_HEADS = Target(f"{calls.MODEL}.MQALayer._kernel_num_heads", ("num_tokens",))
SINK = Target(f"{calls.MODEL}.MQALayer._local_attn_sink", ("kernel_num_heads",))
ATTENTION = Target(
    f"{calls.BACKEND}.DeepseekV4AttnBackend.forward", ("q", "k", "v", "layer", "forward_batch"), passes_on=True
)
DRAFT = Target("sglang.srt.models.deepseek_v4_dspark.DSparkAttention.forward", (), passes_on=True)
GATHER = Target("sglang.srt.environ.envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get", ())
SM120 = Target(f"{calls.SM120}.flash_mla_with_kvcache_sm120", ("**kwargs",))

Pair = tuple[Found, Callable[..., Any]]


# ------------------------------------------------------------------------------------------------- on and off


def register() -> None:
    """The entry point: wrap what this SGLang and this environment call for. Never raises.

    One line in the log says what was installed, or what was skipped and why. Calling it again changes nothing.
    """
    try:
        problem = _register()
    except Exception as error:  # a plug-in must not take the server down
        calls.reset()  # what was registered before the failure passes every call through
        problem = f"nothing installed: {type(error).__name__}: {error}"
    if problem is not None:
        hooks.say_once(LINE, problem, warn=True)


def _register() -> str | None:
    if calls.state.active:
        return None
    problem = hooks.version_problem("sglang", OLDEST, NEWEST)
    if problem is not None:
        return f"nothing installed: {problem}"
    from headfit import env

    policy = Policy.from_env()
    if routes.is_off(policy):
        hooks.say_once(LINE, f"nothing installed: {policy.origin} asks for the pad")
        return None
    wanted, skipped = _targets()
    if not wanted:
        return f"nothing installed: {'; '.join(skipped)}"
    registry = importlib.import_module(REGISTRY)
    calls.state.active, calls.state.policy = True, policy
    calls.state.explicit = env.read("HEADFIT_WIDTH") is not None
    arounds = {around for _, around in wanted}
    calls.state.sm12x = calls.around_sm120 in arounds
    calls.state.flashmla = calls.around_decode in arounds
    for found, around in wanted:
        registry.HookRegistry.register(found.target.path, around, registry.HookType.AROUND)
        calls.state.installed.append((found, around))
    names = ", ".join(found.target.short for found, _ in wanted)
    left = f"; skipped: {'; '.join(skipped)}" if skipped else ""
    version = hooks.version_of("sglang")
    hooks.say_once(LINE, f"{version}: wrapped {names} by {policy.origin} ({policy.kind}){left}")
    return None


def unregister() -> list[str]:
    """Turn everything off and put SGLang's functions back; returns the paths that could not be put back.

    From here on every wrapper passes its call through. An original is restored where our wrapper is exactly what
    stands there; where another plug-in wrapped the same function, the chain is left standing, with ours inert.
    """
    left = []
    installed = list(calls.state.installed)
    calls.reset()
    registry = importlib.import_module(REGISTRY) if installed else None
    for found, around in reversed(installed):
        path = found.target.path
        entries = registry.HookRegistry._hooks.get(path, []) if registry is not None else []
        entries[:] = [entry for entry in entries if entry[1] is not around]
        wrapper = inspect.getattr_static(found.owner, found.name, None)
        if wrapper is found.raw:
            continue  # never applied
        if not _wraps(wrapper, around, found):
            left.append(path)
            continue
        _put_back_everywhere(found, wrapper)
        if registry is not None and not entries:
            registry.HookRegistry._patched.discard(path)
    hooks.forget_line(LINE)
    return left


def _wraps(wrapper: Any, around: Callable[..., Any], found: Found) -> bool:
    """Whether ``wrapper`` is the registry's closure over exactly our function and the original that we found."""
    cells = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    original = getattr(found.raw, "__func__", found.raw)
    inner = getattr(wrapper, "__wrapped__", None)
    same = inner is original or getattr(inner, "__func__", None) is getattr(original, "__func__", original)
    return around in cells and same


def _put_back_everywhere(found: Found, wrapper: Any) -> None:
    """Also in modules that had imported the function by name: the registry replaced those bindings too."""
    if isinstance(found.owner, ModuleType):
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is wrapper and isinstance(module, ModuleType) and module is not found.owner:
                    setattr(module, name, found.raw)
    hooks.put_back(found, wrapper)


def _targets() -> tuple[list[Pair], list[str]]:
    """What can be wrapped in this SGLang, all or nothing a kernel family; and what was skipped."""
    skipped: list[str] = []
    try:
        common: list[Pair] = [
            (hooks.resolve(LAYER), calls.around_layer),
            (hooks.resolve(ATTENTION), calls.around_attention),
            *_draft(),
            *_num_heads(),
        ]
    except TargetError as error:
        return [], [str(error)]
    wanted: list[Pair] = []
    try:
        wanted.append((hooks.resolve(SM120), calls.around_sm120))
    except TargetError as error:
        skipped.append(f"SM12x: {error}")
    flashmla, problem = _flashmla()
    if problem:
        skipped.append(f"SM90, SM100: {problem}")
    wanted += flashmla
    return (wanted + common if wanted else []), skipped


def _num_heads() -> list[Pair]:
    """The width that SGLang picks a call, where it picks one: then its sink must come in that width, too."""
    layer = importlib.import_module(calls.MODEL).MQALayer
    if not hasattr(layer, "_kernel_num_heads"):
        return []
    hooks.resolve(SINK)
    return [(hooks.resolve(NUM_HEADS), calls.around_num_heads)]


def _draft() -> list[Pair]:
    """The DSPARK draft attention, where this SGLang has one: it must be recognised, or nothing may be installed."""
    module, _, _ = DRAFT.path.rpartition(".DSparkAttention")
    if importlib.util.find_spec(module) is None:
        return []
    return [(hooks.resolve(DRAFT), calls.around_draft)]


def _flashmla() -> tuple[list[Pair], str | None]:
    module = next(name for name in _FLASHMLA if name == _FLASHMLA[-1] or importlib.util.find_spec(name) is not None)
    decode = Target(f"{module}.flash_mla_with_kvcache", ("q", "k_cache"), _DECODE_NEEDS)
    sparse = Target(f"{module}.flash_mla_sparse_fwd", ("q", "kv", "indices", "sm_scale"), ("attn_sink",))
    try:
        return [
            (hooks.resolve(_required(decode)), calls.around_decode),
            (hooks.resolve(sparse), calls.around_sparse),
            (hooks.resolve(GATHER), calls.around_gather),
        ], None
    except TargetError as error:
        return [], str(error)


def _required(target: Target) -> Target:
    """FlashMLA's entry requires block_table, cache_seqlens and scheduler metadata, which every caller passes."""
    also = ("block_table", "cache_seqlens", "tile_scheduler_metadata")
    return Target(target.path, target.parameters, (*target.needs, *also))
