"""vLLM's real DeepSeek-V4 FlashMLA attention on a CPU: what our plug-in changes, what it leaves alone, that bits agree.

Runs inside the release's environment (``compat/run.py``) and prints one JSON object. Real: vLLM's plug-in loader,
``DeepseekV4FlashMLAAttention`` with its metadata classes. Stood in for: the GPU, FlashMLA's library, the Triton kernel
that maps local to global slots.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import standins
import torch

from headfit import cache
from headfit.engines import hooks
from headfit.engines import vllm as plugin

N_HEADS, DIM, PAGE, WINDOW, TOPK, TOKENS = 64, 512, 256, 128, 64, 6


def stand_in_flashmla() -> None:
    """vLLM's FlashMLA functions, with the signature of its own copy of the interface."""
    ops = importlib.import_module("vllm.v1.attention.ops.flashmla")
    for name in ("vllm._flashmla_C", "vllm._flashmla_extension_C"):  # compiled for CUDA, imported for their operators
        sys.modules[name] = ModuleType(name)
    real = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")

    def copy_out(function: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        result = function(*args, **kwargs)
        if out is not None and result[0] is not out:
            out.copy_(result[0])
        return result

    for name, stand in (("flash_mla_with_kvcache", standins.paged_any), ("flash_mla_sparse_fwd", standins.sparse)):
        function = functools.partial(copy_out, stand)
        function.__signature__ = inspect.signature(getattr(real, name))  # type: ignore[attr-defined]
        setattr(ops, name, function)


def global_slots(
    topk_indices: Any, token_to_req_indices: Any, block_table: Any, block_size: int, is_valid_token: Any
) -> Any:
    """In torch what vLLM's Triton kernel does: local row -> slot, and how many are valid."""
    request = token_to_req_indices.long()[:, None]
    block = block_table[request, topk_indices.clamp(min=0).long() // block_size]
    slots = torch.where(topk_indices >= 0, block * block_size + topk_indices % block_size, -1).int()
    return slots, torch.where(is_valid_token, (topk_indices >= 0).sum(1), 0).int()


class World:
    """One rank of one layer: packed caches and the metadata of six tokens of two requests."""

    def __init__(self, module: Any, tp: int, ratio: int) -> None:
        self.module, self.ratio, self.n_local = module, ratio, N_HEADS // tp
        self.seed = torch.Generator().manual_seed(5)
        kind = module.DeepseekV4FlashMLAAttention
        layer = object.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.padded_heads = kind.get_padded_num_q_heads(self.n_local)
        sinks = torch.full((layer.padded_heads,), -torch.inf)
        sinks[: self.n_local] = torch.randn(self.n_local, generator=self.seed)
        layer.attn_sink = torch.nn.Parameter(sinks, requires_grad=False)
        block = PAGE // ratio if ratio > 1 else PAGE
        lists = torch.randint(-1, 4 * block, (TOKENS, TOPK), generator=self.seed).int()
        lists = lists.sort(1, descending=True).values
        for name, value in {
            "n_local_heads": self.n_local, "n_heads": N_HEADS, "compress_ratio": ratio, "window_size": WINDOW,
            "scale": DIM**-0.5, "prefix": "layer", "max_image_tokens": 0, "topk_indices_buffer": lists,
            "kv_cache": self.pages(8, block), "max_model_len": 4096, "max_num_batched_tokens": 64, "head_dim": DIM,
            "swa_cache_layer": SimpleNamespace(prefix="swa", kv_cache=self.pages(1, PAGE)),
        }.items():  # fmt: skip
            object.__setattr__(layer, name, value)
        self.layer, self.lists = layer, lists
        self.swa = torch.randint(0, PAGE, (TOKENS, 1, WINDOW), generator=self.seed).int()
        self.lens = torch.randint(1, WINDOW, (TOKENS,), generator=self.seed).int()

    def pages(self, pages: int, page: int) -> torch.Tensor:
        """Packed pages as vLLM keeps them, ``[blocks, block_size, bytes]``."""
        view = cache.empty_cache(pages, page)
        rows = torch.randn(pages * page, DIM, generator=self.seed).bfloat16()
        cache.write_rows(view, torch.arange(pages * page), rows)
        return view.squeeze(2)  # vLLM keeps [blocks, block_size, bytes]

    def run(self, phase: str) -> dict[str, Any]:
        """One forward_mqa over the six tokens, as decodes or as prefills."""
        standins.launches.clear()
        hooks.reset_calls()
        decode = phase == "decode"
        table = torch.arange(8).view(2, 4).int()
        swa = SimpleNamespace(
            num_decodes=2 if decode else 0, num_prefills=0 if decode else 2,
            num_decode_tokens=TOKENS if decode else 0, num_prefill_tokens=0 if decode else TOKENS,
            is_valid_token=torch.ones(TOKENS, dtype=torch.bool), block_size=PAGE,
            token_to_req_indices=torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32),
            decode_swa_indices=self.swa, decode_swa_lens=self.lens,
            prefill_swa_indices=None if decode else self.swa, prefill_swa_lens=self.lens,
            prefill_left_visible=None, tile_sched_swaonly=object(), tile_sched_c4a=object(), tile_sched_c128a=object(),
        )  # fmt: skip
        attn = SimpleNamespace(block_table=table, block_size=PAGE)
        slots, lens = global_slots(self.lists, swa.token_to_req_indices, table, PAGE // self.ratio, swa.is_valid_token)
        attn.c128a_global_decode_topk_indices, attn.c128a_decode_topk_lens = slots.view(TOKENS, 1, -1), lens
        attn.c128a_prefill_topk_indices = self.lists
        metadata = {"swa": swa, **({"layer": attn} if self.ratio > 1 else {})}
        self.module.get_forward_context = lambda: SimpleNamespace(attn_metadata=metadata)
        width = self.layer.padded_heads
        q = torch.full((TOKENS, width, DIM), torch.nan, dtype=torch.bfloat16)
        q[:, : self.n_local] = torch.randn(
            TOKENS, self.n_local, DIM, generator=torch.Generator().manual_seed(1)
        ).bfloat16()
        if width != self.n_local:
            q[:, self.n_local :] = 0
        out = torch.full_like(q, 7.0)
        with torch.no_grad():
            self.layer.forward_mqa(q, None, torch.arange(TOKENS), out)
        counted = next(iter(hooks.calls()), None)
        ours = counted is not None and counted.kernel == "cpu"
        heads = counted.width if ours and counted else standins.launches[-1].heads
        return {"kernel": "headfit" if ours else "flashmla", "width": heads, "buffer": width,
                "why": "" if counted is None else counted.reason, "out": out[:, : self.n_local].clone()}  # fmt: skip


def check_release() -> dict[str, Any]:
    """All checks of vLLM."""
    stand_in_flashmla()
    result: dict[str, Any] = {"vllm": importlib.metadata.version("vllm"), "checks": {}, "cells": [], "lines": []}
    checks = result["checks"]
    handler = logging.Handler()
    handler.emit = lambda record: result["lines"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headfit").addHandler(handler)
    logging.getLogger("headfit").setLevel(logging.INFO)
    plugins = importlib.import_module("vllm.plugins")
    checks["module not imported by loading plug-ins"] = plugin.MODULE not in sys.modules
    for policy in (None, "native", "padded"):
        os.environ.pop("HEADFIT_WIDTH", None)
        if policy:
            os.environ["HEADFIT_WIDTH"] = policy
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
        if policy is None:
            checks["still not imported after load_general_plugins()"] = plugin.MODULE not in sys.modules
        module = importlib.import_module(plugin.MODULE)
        kind = module.DeepseekV4FlashMLAAttention
        before = {name: inspect.getattr_static(kind, name) for name in ("get_padded_num_q_heads", "_forward_decode")}
        module.compute_global_topk_indices_and_lens = global_slots
        for chip, pair in (("SM90", (9, 0)), ("SM100", (10, 0))):
            for tp in (1, 2, 4, 8, 16):
                for ratio in (1, 4, 128) if chip == "SM90" else (4,):
                    result["cells"] += cells(module, chip, pair, tp, ratio, policy)
        wrapped = bool(plugin.state.patches.done)
        left = plugin.unregister()
        after = {name: inspect.getattr_static(kind, name) for name in before}
        if policy == "native":
            checks["originals restored"] = not left and wrapped and all(after[n] is not before[n] for n in before)
            plugin.register()
            plugin.unregister()
            again = {name: inspect.getattr_static(kind, name) for name in before}
            checks["on and off again leaves the very same functions"] = all(again[n] is after[n] for n in after)
        if policy == "padded":
            checks["HEADFIT_WIDTH=padded wraps nothing"] = not wrapped
    return result


def cells(module: Any, chip: str, pair: tuple[int, int], tp: int, ratio: int, policy: str | None) -> list[dict]:
    """Both phases: kernel, launched width, buffer width, and whether the bits are those of 64 heads."""
    active = plugin.state.active
    plugin.state.active = False
    base = World(module, tp, ratio).run("decode")  # prefill and decode of the same lists have the same answer
    plugin.state.active = active
    plugin.state.compute_capability, plugin.state.backends, plugin.state.gpu = pair, ("cpu",), ""
    found = []
    for phase in ("prefill", "decode"):
        world = World(module, tp, ratio)
        if phase == "prefill" and world.layer.padded_heads == 64:
            continue  # vLLM's own gather, in Triton
        got = world.run(phase)
        found.append(
            {
                "chip": chip, "tp": tp, "ratio": ratio, "policy": policy or "default", "phase": phase,
                "engine": base["width"], "kernel": got["kernel"], "width": got["width"], "buffer": got["buffer"],
                "why": got["why"], "bits": bool(torch.equal(base["out"], got["out"])),
            }
        )  # fmt: skip
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(check_release()))
