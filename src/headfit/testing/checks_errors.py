"""Checks of "bad input raises before any launch": one table of bad arguments, and that tensor values are never read.

A row of the table is an argument, how to spoil it, the exception, and the words that the message must hold: the
argument's name, what came, what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headfit.testing.calls import D_V, BuiltCall, CallSpec
from headfit.testing.compare import fail, require, require_same_bits
from headfit.testing.pages import Route
from headfit.testing.runner import Setup, check

Arguments = dict[str, Any]


@dataclass(frozen=True)
class BadInput:
    """One way to call wrongly: ``spoil`` returns the arguments to replace."""

    label: str
    argument: str
    error: type[Exception] | tuple[type[Exception], ...]
    words: tuple[str, ...]
    spoil: Callable[[Arguments], Arguments]


def _replace(argument: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda args: {argument: change(args[argument])}


def _every_other(t: Tensor) -> Tensor:
    """The same shape with stride 2 in the last dim."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


def _elsewhere(t: Tensor) -> Tensor:
    return t.to("cpu") if t.device.type != "cpu" else t.to("meta")


def tensor_rows(name: str, dtype: str, wrong: torch.dtype) -> list[BadInput]:
    """Wrong type, dtype, rank, device, last stride: the same five for every tensor argument."""
    return [
        BadInput("a list", name, TypeError, ("list", "Tensor"), _replace(name, lambda t: [1, 2])),
        BadInput(f"{wrong}", name, TypeError, (str(wrong), dtype), _replace(name, lambda t: t.to(wrong))),
        BadInput("a dim too many", name, ValueError, ("shape",), _replace(name, lambda t: t[None])),
        BadInput("another device", name, ValueError, ("device",), _replace(name, _elsewhere)),
        BadInput("last dim strided", name, ValueError, ("stride", "1"), _replace(name, _every_other)),
    ]


def shared_rows(route: Route) -> list[BadInput]:
    """What both entries refuse alike."""
    q_rows = [r for r in tensor_rows("q", "bfloat16", torch.float32) if r.label != "another device"]
    wide = {512: 513, 576: 575}[route.d_qk]
    return [
        *q_rows,
        BadInput("float16 q", "q", TypeError, ("float16", "bfloat16"), _replace("q", lambda t: t.half())),
        BadInput("no heads", "q", ValueError, ("0", "1", "128"), _replace("q", lambda t: t[..., :0, :])),
        BadInput("129 heads", "q", ValueError, ("129", "128"), _replace("q", _heads(129))),
        BadInput("wrong dims", "q", ValueError, (str(wide), "512", "576"), _replace("q", _dims(wide))),
        *tensor_rows("indices", "int32", torch.int64),
        BadInput("None", "indices", (TypeError, ValueError), ("None", "int32"), lambda a: {"indices": None}),
        BadInput("a row short", "indices", ValueError, ("shape",), _replace("indices", lambda t: t[:-1])),
        *tensor_rows("topk_length", "int32", torch.int64),
        BadInput("one short", "topk_length", ValueError, ("shape",), _replace("topk_length", lambda t: t[:-1])),
        *tensor_rows("attn_sink", "float32", torch.bfloat16),
        BadInput(
            "float64", "attn_sink", TypeError, ("float64", "float32"), _replace("attn_sink", lambda t: t.double())
        ),
        BadInput("padded sink", "attn_sink", ValueError, ("64", "8"), _replace("attn_sink", lambda t: t.repeat(8))),
        BadInput("sink too short", "attn_sink", ValueError, ("7", "8"), _replace("attn_sink", lambda t: t[:7])),
        *tensor_rows("out", "bfloat16", torch.float32),
        BadInput("wrong shape", "out", ValueError, ("shape", str(D_V)), _replace("out", lambda t: t[..., :-1])),
        BadInput("other heads", "out", ValueError, ("shape",), _replace("out", lambda t: t[..., :-1, :])),
        BadInput("overlapping", "out", ValueError, ("stride",), _replace("out", lambda t: t[..., :1, :].expand_as(t))),
        BadInput("unknown backend", "backend", ValueError, ("nonsense", "cpu"), lambda a: {"backend": "nonsense"}),
    ]


def _heads(count: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(*t.shape[:-2], count, t.shape[-1], dtype=t.dtype, device=t.device)


def _dims(count: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(*t.shape[:-1], count, dtype=t.dtype, device=t.device)


def sparse_rows(route: Route) -> list[BadInput]:
    """What flash_mla_sparse_fwd refuses."""
    return [
        *tensor_rows("kv", "bfloat16", torch.float32),
        BadInput("packed rows", "kv", TypeError, ("uint8", "bfloat16"), _replace("kv", lambda t: t.view(torch.uint8))),
        BadInput("two KV heads", "kv", ValueError, ("2", "1"), _replace("kv", lambda t: t.repeat(1, 2, 1))),
        BadInput("other dims", "kv", ValueError, ("64", str(route.d_qk)), _replace("kv", _dims(64))),
        BadInput(
            "two index heads", "indices", ValueError, ("shape",), _replace("indices", lambda t: t.repeat(1, 2, 1))
        ),
        BadInput("a text", "sm_scale", TypeError, ("str", "float"), lambda a: {"sm_scale": "0.1"}),
        BadInput("None", "sm_scale", TypeError, ("None", "float"), lambda a: {"sm_scale": None}),
        BadInput("nan", "sm_scale", ValueError, ("nan", "finite"), lambda a: {"sm_scale": float("nan")}),
        BadInput("256", "d_v", ValueError, ("256", "512"), lambda a: {"d_v": 256}),
    ]


def kvcache_rows(route: Route) -> list[BadInput]:
    """What flash_mla_with_kvcache refuses."""
    dtype = "uint8" if route.packed else "bfloat16"
    rows = [
        *tensor_rows("k_cache", dtype, torch.float16),
        BadInput(
            "two KV heads", "k_cache", ValueError, ("2", "1"), _replace("k_cache", lambda t: t.repeat(1, 1, 2, 1))
        ),
        BadInput("page_size 0", "k_cache", ValueError, ("page_size", "0"), _replace("k_cache", lambda t: t[:, :0])),
        BadInput("unknown width", "k_cache", ValueError, ("600",), _replace("k_cache", _dims(600))),
        BadInput("256", "head_dim_v", ValueError, ("256", "512"), lambda a: {"head_dim_v": 256}),
        BadInput("a text", "softmax_scale", TypeError, ("str", "float"), lambda a: {"softmax_scale": "0.1"}),
        BadInput("inf", "softmax_scale", ValueError, ("inf", "finite"), lambda a: {"softmax_scale": float("inf")}),
        BadInput("causal", "causal", ValueError, ("True", "False"), lambda a: {"causal": True}),
        BadInput(
            "wrong is_fp8_kvcache",
            "k_cache",
            TypeError,
            (dtype,),
            lambda a: {"is_fp8_kvcache": not a["is_fp8_kvcache"]},
        ),
        BadInput(
            "extra lists alone", "extra_indices_in_kvcache", ValueError, ("extra_k_cache",), _extra_lists_without_cache
        ),
        BadInput(
            "extra cache alone", "extra_indices_in_kvcache", (TypeError, ValueError), ("None",), _extra_without_lists
        ),
        BadInput("extra length alone", "extra_topk_length", ValueError, ("extra_k_cache",), _extra_length_alone),
    ]
    if route.packed:
        other = {"v4": 656, "v32": 584}[route.layout]
        rows += [
            BadInput("another layout", "k_cache", ValueError, (str(other),), _replace("k_cache", _dims(other))),
            BadInput("rows apart", "k_cache", ValueError, ("stride",), _replace("k_cache", _rows_apart)),
        ]
    if route.caches == 2:
        rows += [
            *tensor_rows("extra_k_cache", "uint8", torch.bfloat16),
            *tensor_rows("extra_indices_in_kvcache", "int32", torch.int64),
            *tensor_rows("extra_topk_length", "int32", torch.int64),
            BadInput("v32 beside v4", "extra_k_cache", ValueError, ("656",), _replace("extra_k_cache", _dims(656))),
        ]
    return rows


def _rows_apart(t: Tensor) -> Tensor:
    """A packed view whose rows do not follow each other: its bytes are nowhere near where the layout has them."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 16, dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]]


def _extra_lists_without_cache(args: Arguments) -> Arguments:
    return {"extra_k_cache": None, "extra_topk_length": None, "extra_indices_in_kvcache": args["indices"]}


def _extra_without_lists(args: Arguments) -> Arguments:
    return {"extra_k_cache": args["k_cache"], "extra_indices_in_kvcache": None, "extra_topk_length": None}


def _extra_length_alone(args: Arguments) -> Arguments:
    return {"extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": args["topk_length"]}


def bad_inputs(route: Route) -> list[BadInput]:
    """The table for one route."""
    return shared_rows(route) + (sparse_rows(route) if route.entry == "sparse" else kvcache_rows(route))


@check(
    "Bad input (wrong dtype, rank, width, device, non-contiguous last dim, h_q outside 1..128, unknown bytes per "
    "token) raises ValueError/TypeError naming the argument, what came and what is accepted, before any launch. "
    "A sink of another length, dtype or device is an error."
)
def check_bad_input(setup: Setup, route: Route) -> None:
    """Every row of the table; out must keep its bits."""
    call = setup.build(CallSpec(route, batch=2, heads=8, out=True, lengths="random", sink="normal"))
    wrong = [text for bad in bad_inputs(route) if (text := _why_not_refused(setup, call, bad)) is not None]
    if wrong:
        fail(f"{len(wrong)} bad inputs are not refused as they should be:\n  " + "\n  ".join(wrong))


def _why_not_refused(setup: Setup, call: BuiltCall, bad: BadInput) -> str | None:
    what = f"{bad.argument} ({bad.label})"
    if call.out is None:
        raise ValueError("the case needs an out")
    before = call.out.clone()
    changes = bad.spoil(call.arguments())
    try:
        call.run(changes.pop("backend", setup.backend), **changes)
    except (TypeError, ValueError) as error:
        if not isinstance(error, bad.error):
            return f"{what}: raised {type(error).__name__}: {error}; expected {bad.error}"
        missing = [w for w in (bad.argument, *bad.words) if w not in str(error)]
        if missing:
            return f"{what}: the message lacks {missing}: {error}"
    except Exception as error:
        return f"{what}: raised {type(error).__name__}: {error}; expected {bad.error}"
    else:
        return f"{what}: accepted"
    try:
        require_same_bits(call.out, before, f"{what}: out after the error")
    except AssertionError as failure:
        return str(failure)
    return None


@check("Bad input is refused for empty calls too.")
def check_bad_input_without_rows(setup: Setup, route: Route) -> None:
    """b = 0 skips the launch, not the checks."""
    call = setup.build(CallSpec(route, batch=0, heads=8, sink="normal"))
    if call.sink is None:
        raise ValueError("the case needs a sink")
    try:
        call.run(setup.backend, attn_sink=call.sink[:7])
    except ValueError as error:
        require("attn_sink" in str(error), f"the message does not name attn_sink: {error}")
        return
    fail("a sink of 7 for 8 heads was accepted because there are no rows")


@check("Values inside tensors are never read on the host.", cuda=True)
def check_host_reads_nothing(setup: Setup, route: Route) -> None:
    """A warm call under torch.cuda.set_sync_debug_mode("error") makes no synchronising transfer."""
    call = setup.build(CallSpec(route, batch=5, heads=16, lengths="edges", sink="edges", out=True))
    call.run(setup.backend)
    arguments = call.arguments()
    mode = torch.cuda.get_sync_debug_mode()
    from headfit.testing.calls import call_entry

    try:
        torch.cuda.set_sync_debug_mode("error")
        call_entry(route, setup.backend, arguments)
    except RuntimeError as error:
        fail(f"the call synchronises with the host: {error}")
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@check("Values inside tensors are never read on the host: a captured graph replays with other values.", cuda=True)
def check_graph_replay(setup: Setup, route: Route) -> None:
    """Captured once, replayed with other q, lists, lengths and sink: the bits of an eager call."""
    from headfit.testing.calls import call_entry

    spec = CallSpec(route, batch=5, heads=16, lengths="edges", sink="edges", seed=setup.number("graph", 1))
    call = setup.build(spec)
    call.run(setup.backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call_entry(route, setup.backend, call.arguments())
    for i in range(3):
        other = setup.build(CallSpec(**{**vars(spec), "seed": setup.number("graph", 2 + i)}))
        call.q.copy_(other.q)
        for mine, new in zip(call.caches, other.caches, strict=True):
            mine.storage.copy_(new.storage)
            mine.indices.copy_(new.indices)
            if mine.lengths is not None and new.lengths is not None:
                mine.lengths.copy_(new.lengths)
        if call.sink is not None and other.sink is not None:
            call.sink.copy_(other.sink)
        graph.replay()
        torch.cuda.synchronize()
        wanted = other.run(setup.backend)
        for name, got, want in zip(
            ("out", "second result", "third result"), captured.returned, wanted.returned, strict=False
        ):
            require_same_bits(got, want, f"replay {i + 1} of a captured graph: {name}")
