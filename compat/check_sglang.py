"""One SGLang release, its real classes, on a CPU: what our plug-in changes, what it leaves alone, and that bits agree.

Runs inside the release's environment (``compat/run.py``) and prints one JSON object. Real: SGLang's plug-in loader and
hook registry, ``MQALayer.forward``, ``_kernel_num_heads``, ``_local_attn_sink``, ``DeepseekV4AttnBackend.forward``,
``DSparkAttention.forward``, forward modes, the breakable-graph flag, FlashInfer's tables. Stood in for: the GPU (its
compute capability is set), compiled kernels, projections before and after attention.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import standins
import torch

from headfit import cache, kernels
from headfit.engines import hooks, sglang_calls
from headfit.engines import sglang as plugin
from headfit.width import Policy

N_HEADS, DIM, PAGE, SWA_LANES, EXTRA_LANES = 64, 512, 256, 128, 64
CHIPS = {"SM90": (9, 0), "SM100": (10, 0), "SM120": (12, 0)}
MODES = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2", "TARGET_VERIFY", "DECODE", "DLLM_EXTEND")
ROWS = (1, 64, 65, 96)


class Stop(Exception):
    """Carries the attention output out of a forward, whose rest needs a GPU."""


def stop_at_rope(x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """In place of the inverse rotation: ``x`` is the rope part of the output; hand all of it out."""
    heads = x.shape[1]
    raise Stop(x.as_strided((x.shape[0], heads, DIM), x.stride(), x.storage_offset() - (DIM - 64)))


class Release:
    """The real modules of the installed SGLang, with the GPU stood in for."""

    def __init__(self) -> None:
        self.version = importlib.metadata.version("sglang")
        if importlib.util.find_spec("sglang.kernels.ops.attention.flash_mla_interface"):
            standins.install_flash_mla()
        else:
            standins.install_sgl_kernel()
        self._register_on_cpu()
        self.model = importlib.import_module("sglang.srt.models.deepseek_v4")
        self.backend = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
        self.sm120 = importlib.import_module("sglang.kernels.ops.attention.flash_mla_sm120")
        self.dspark = importlib.import_module("sglang.srt.models.deepseek_v4_dspark")
        self.pool = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
        self.modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.context = importlib.import_module("sglang.srt.model_executor.forward_context")
        self.graph = importlib.import_module(
            "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context"
        )
        fi = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
        fi._sparse_mla_sm120_paged_attention = standins.flashinfer_attention
        self.sm120._split_kv_pages_to_64 = lambda kv, *a, **k: kv
        for module in (self.model, self.dspark):
            module.fused_rope_inplace = stop_at_rope
        self.model.get_attn_tp_context = lambda: SimpleNamespace(input_scattered=False)

    def _register_on_cpu(self) -> None:
        """SGLang registers its operators for CUDA; the same functions for the CPU, so that attention can run as one."""
        common = importlib.import_module("sglang.srt.utils.common")
        register, self.libraries = common.direct_register_custom_op, []

        def both(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> None:
            register(op_name, op_func, *args, **kwargs)
            if op_name == "deepseek_v4_attention_with_output":
                library = torch.library.Library("sglang", "FRAGMENT")
                library.impl(op_name, op_func, "CPU")
                self.libraries.append(library)

        common.direct_register_custom_op = both

    def set_chip(self, chip: str) -> None:
        """Let SGLang believe in this GPU."""
        facts = SimpleNamespace(
            is_sm120=chip == "SM120", is_sm100=chip == "SM100", is_blackwell=chip != "SM90", is_sm90=chip == "SM90"
        )
        for module in (self.model, self.backend, self.dspark):
            if hasattr(module, "get_platform"):
                module.get_platform = lambda: facts
            if hasattr(module, "_is_sm120"):
                module._is_sm120 = facts.is_sm120
            if hasattr(module, "is_cp_active"):
                module.is_cp_active = lambda batch: False
        if chip != "SM120" and hasattr(self.backend, "flash_mla_interface"):
            raise RuntimeError("unexpected module attribute")


class World:
    """One rank of one layer: a packed cache, a real backend, a real layer."""

    def __init__(self, release: Release, tp: int, rank: int = 0, ratio: int = 4) -> None:
        self.release, self.tp, self.rank, self.ratio = release, tp, rank, ratio
        self.n_local = N_HEADS // tp
        self.seed = torch.Generator().manual_seed(7)
        self.pool = self._pool()
        self.attention = self._backend()
        self.layer = self._layer(release.model.MQALayer)
        self.draft = self._draft()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.seed).bfloat16()

    def _pages(self, pages: int, page: int) -> torch.Tensor:
        raw = torch.zeros(pages, cache.page_bytes(page), dtype=torch.uint8)
        view = raw[:, : page * 584].view(pages, page, 1, 584)
        cache.write_rows(view, torch.arange(pages * page), self._random(pages * page, DIM))
        return raw

    def _pool(self) -> Any:
        swa, extra = self._pages(2, PAGE), self._pages(4, PAGE // 4)
        base = self.release.pool.DeepSeekV4TokenToKVPool
        names: dict[str, Any] = {
            "__init__": lambda self: None,
            "get_swa_key_buffer_radix": lambda self, layer: swa,
            "get_extra_key_buffer": lambda self, layer: extra,
            "get_extra_key_page_size": lambda self, layer: PAGE // 4,
            "get_swa_key_page_size": lambda self: PAGE,
            "get_swa_key_bytes_per_token": lambda self: 584,
            "get_extra_key_bytes_per_token": lambda self, layer: 584,
            "swa_window_size": PAGE,
            "swa_page_size": PAGE,
            "page_size": PAGE,
            "request_window": None,
            "uniform_fp8": False,
            "swa_kv_pool": SimpleNamespace(kv_cache_total_dim=584),
        }
        return type("Pool", (base,), names)()

    def _backend(self) -> Any:
        module = self.release.backend
        backend = object.__new__(module.DeepseekV4AttnBackend)
        core = object.__new__(module.DSV4AttnMetadata)
        limit = max(ROWS)
        fields = {
            "swa_page_indices": torch.randint(-1, 2 * PAGE, (limit, SWA_LANES), generator=self.seed).int(),
            "swa_topk_lengths": torch.randint(1, SWA_LANES, (limit,), generator=self.seed).int(),
            "c4_sparse_page_indices": torch.randint(-1, PAGE, (limit, EXTRA_LANES), generator=self.seed).int(),
            "c4_sparse_topk_lengths": torch.randint(1, EXTRA_LANES, (limit,), generator=self.seed).int(),
            "c4_sparse_raw_indices": None,
            **{f"c{ratio}_flashmla_metadata": module._create_flashmla_metadata() for ratio in (0, 1, 4, 128)},
            "positions_casual": torch.arange(limit),
        }
        for name, value in fields.items():
            object.__setattr__(core, name, value)
        metadata = SimpleNamespace(core_attn_metadata=core, late_layer_tail=None, sparse_prefill_cache=None)
        for name, value in {
            "mtp_enabled": False,
            "forward_metadata": metadata,
            "token_to_kv_pool": self.pool,
            "head_dim_v": DIM,
            "softmax_scale": DIM**-0.5,
            "trtllm_attn": False,
            "mega_attn": False,
            "is_dspark_draft": False,
            "is_dsv41": False,
            "dsv4_prefill_backend": "auto",
            "_swa_interleaved": False,
            "hisparse_coordinator": None,
        }.items():
            object.__setattr__(backend, name, value)
        if hasattr(module.DeepseekV4AttnBackend, "_mega_paged_prefill"):
            object.__setattr__(backend, "_mega_paged_prefill", lambda *a, **k: False)
        # The gathered prefill needs a request table; its kernel's route is what matters here.
        object.__setattr__(backend, "_forward_prefill_sparse", self._gathered)
        return backend

    def bind_kernel(self) -> None:
        """What the backend of later releases does when it is built, which is after plug-ins were loaded."""
        name = "sglang.kernels.ops.attention.flash_mla_interface"
        if importlib.util.find_spec(name) is not None:
            import functools

            interface = importlib.import_module(name)
            bound = functools.partial(interface.flash_mla_with_kvcache, use_legacy=True)
            object.__setattr__(self.attention, "_flash_mla_with_kvcache", bound)

    def _gathered(self, q: torch.Tensor, attn_sink: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """SGLang's gathered prefill, with the gather done by headfit: bfloat16 rows, then its own sparse entry."""
        module = (
            sys.modules.get("sglang.kernels.ops.attention.flash_mla_interface") or sys.modules["sgl_kernel.flash_mla"]
        )
        core = self.attention.forward_metadata.core_attn_metadata
        rows = q.shape[0]
        if standins.echo:
            empty = torch.zeros(1, 1, DIM, dtype=torch.bfloat16)
            lists = torch.zeros(rows, 1, SWA_LANES, dtype=torch.int32)
            return module.flash_mla_sparse_fwd(
                q=q.squeeze(1), kv=empty, indices=lists, sm_scale=DIM**-0.5, attn_sink=attn_sink
            )[0]
        flat, ids = [], []
        sets = [(self.pool.get_swa_key_buffer_radix(0), PAGE, core.swa_page_indices, core.swa_topk_lengths)]
        if kwargs["compress_ratio"] == 4:
            sets.append(
                (self.pool.get_extra_key_buffer(0), PAGE // 4, core.c4_sparse_page_indices, core.c4_sparse_topk_lengths)
            )
        base = 0
        for raw, page, lists, lengths in sets:
            bf16 = cache.unpack_kv(raw[:, : page * 584].view(raw.shape[0], page, 1, 584))
            lane = torch.arange(lists.shape[1])
            keep = (lists[:rows] >= 0) & (lane[None] < lengths[:rows, None])
            ids.append(torch.where(keep, lists[:rows] + base, -1))
            flat.append(bf16)
            base += bf16.shape[0]
        out, _, _ = module.flash_mla_sparse_fwd(
            q=q.squeeze(1), kv=torch.cat(flat)[:, None], indices=torch.cat(ids, 1)[:, None].int(),
            sm_scale=DIM**-0.5, d_v=DIM, attn_sink=attn_sink, topk_length=None,
        )  # fmt: skip
        return out

    def _layer(self, kind: type) -> Any:
        layer = object.__new__(kind)
        torch.nn.Module.__init__(layer)
        radix = SimpleNamespace(layer_id=0, tp_q_head_num=self.n_local, v_head_dim=DIM, head_dim=DIM)
        for name, value in {
            "tp_size": self.tp, "tp_rank": self.rank, "attn_tp_size": self.tp, "attn_tp_rank": self.rank,
            "n_heads": N_HEADS, "n_local_heads": self.n_local, "n_local_groups": 8, "head_dim": DIM,
            "qk_rope_head_dim": 64, "rope_head_dim": 64, "layer_id": 0, "compress_ratio": self.ratio,
            "alt_streams": None, "_multi_stream_bs_limit": 64, "dsa_enable_prefill_cp": False, "compressor": None,
            "attn_mqa": radix, "attn": radix, "eps": 1e-6, "use_mega_attention": False, "is_dsv41": False,
            "q_head_norm": True, "wo_a_fp8": False, "use_fused_wo_a": False, "freqs_cis": None,
        }.items():  # fmt: skip
            object.__setattr__(layer, name, value)
        layer.attn_sink = torch.nn.Parameter(torch.randn(N_HEADS, generator=self.seed), requires_grad=False)
        sink = layer.attn_sink if self.tp == 1 else None
        object.__setattr__(layer, "_attn_sink_local", sink)
        object.__setattr__(layer, "use_flashinfer_mxfp8_wo_b", False)
        object.__setattr__(layer, "_forward_prepare", self._prepare)
        return layer

    def _draft(self) -> Any:
        draft = self._layer(self.release.dspark.DSparkAttention)
        object.__setattr__(draft, "_use_fast_kernel", True)
        object.__setattr__(draft, "kv_proj_only", lambda x: x[:, :DIM])
        object.__setattr__(draft, "_store_block_kv", lambda **k: None)

        def compute(x: torch.Tensor, positions: Any, q_out: Any = None) -> torch.Tensor:
            if q_out is None:
                return self.queries[: x.shape[0]].clone()
            q_out.copy_(self.queries[: x.shape[0]])
            return q_out

        object.__setattr__(draft, "_compute_q", compute)
        self.release.dspark._resolve_dspark_pool = lambda: self.pool
        return draft

    @property
    def queries(self) -> torch.Tensor:
        """The owned heads' queries, the same whatever buffer they are written to."""
        return torch.randn(max(ROWS), self.n_local, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()

    def _prepare(self, x: Any, positions: Any, batch: Any, attn_backend: Any, q_out: Any, **kwargs: Any) -> Any:
        if q_out is None:
            self.q_buffer = self.queries[: x.shape[0]].clone()
            return self.q_buffer, None
        q_out.copy_(self.queries[: x.shape[0]])
        self.q_buffer = q_out
        return q_out, None

    def batch(self, mode: str, original: str | None = None) -> Any:
        """A forward batch of one mode; ``original`` is what it was before padding rewrote it."""
        modes = self.release.modes
        return SimpleNamespace(
            forward_mode=modes[mode], _original_forward_mode=None if original is None else modes[original],
            batch_size=1, spec_info=None, out_cache_loc=torch.zeros(1), num_token_non_padded_cpu=max(ROWS),
        )  # fmt: skip

    def run(self, rows: int, mode: str, original: str | None = None, draft: bool = False, graph: bool = False) -> dict:
        """One forward: what was launched, and the owned heads' output."""
        standins.launches.clear()
        hooks.reset_calls()
        self.bind_kernel()
        context = self.release.context.ForwardContext(attn_backend=self.attention)
        x = torch.zeros(rows, DIM, dtype=torch.bfloat16)
        batch = self.batch(mode, original)
        batch.num_token_non_padded_cpu = batch.global_num_token_non_padded_cpu = rows
        layers = SimpleNamespace(forward_batch=batch, attention_layers=[self.layer.attn_mqa])
        self.release.model.get_tc_piecewise_forward_context = lambda: layers  # a breakable graph looks them up
        previous = self.release.context.set_forward_context(context)
        flag = self.release.graph
        flag._in_breakable_cuda_graph = graph
        try:
            with torch.no_grad():
                if draft:
                    self.draft.forward(torch.arange(rows), x, batch)
                else:
                    self.layer.forward(x, torch.arange(rows), batch)
        except Stop as stop:
            out = stop.args[0]
        finally:
            flag._in_breakable_cuda_graph = False
            self.release.context.set_forward_context(previous)
        seen = list(standins.launches)
        ours = [key for key in hooks.calls() if key.kernel == "cpu"]
        return {
            "kernel": "headfit" if ours else seen[-1].kernel,
            "width": ours[0].width if ours else seen[-1].heads,
            "why": next(iter(hooks.calls())).reason if hooks.calls() else "",
            "out": out.clone(),
            "launch": seen[-1] if seen else None,
        }


def load(policy: str | None) -> None:
    """Load our plug-in as SGLang does, under a policy."""
    os.environ.pop("HEADFIT_WIDTH", None)
    if policy:
        os.environ["HEADFIT_WIDTH"] = policy
    registry = importlib.import_module("sglang.srt.plugins")
    registry._plugins_loaded = False
    registry.load_plugins()


def set_state(chip: str) -> None:
    """The device that headfit sees; its CPU backend plays the GPU kernel, except on SM12x, where FlashInfer runs."""
    sglang_calls.state.compute_capability = CHIPS[chip]
    sglang_calls.state.backends = ("cpu",)
    sglang_calls.state.gpu = ""
    sglang_calls._capability.cache_clear()


def check_release() -> dict[str, Any]:
    """All checks of one release."""
    release = Release()
    result: dict[str, Any] = {"sglang": release.version, "flashinfer": importlib.metadata.version("flashinfer-python")}
    result["checks"], result["cells"], result["lines"] = {}, [], []
    handler = logging.Handler()
    handler.emit = lambda record: result["lines"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headfit").addHandler(handler)
    logging.getLogger("headfit").setLevel(logging.INFO)
    targets = [(f.target.path, f) for f, _ in plugin._targets()[0]]
    originals = {path: getattr(found.owner, found.name) for path, found in targets}
    checks = result["checks"]
    checks["targets"] = len(targets)
    for policy in (None, "native", "sm12x-prefill"):
        load(policy)
        for chip in CHIPS:
            for tp in (1, 2, 4, 8):
                result["cells"] += cells(release, chip, tp, policy)
        if policy == "native":
            checks.update(special(release))
        left = plugin.unregister()
        same = all(getattr(found.owner, found.name) == originals[path] for path, found in targets)
        checks[f"originals restored after {policy or 'default'}"] = same and not left
    load("padded")
    checks["HEADFIT_WIDTH=padded wraps nothing"] = not sglang_calls.state.installed
    return result


def cells(release: Release, chip: str, tp: int, policy: str | None) -> list[dict[str, Any]]:
    """Every mode and row count of one chip and TP: kernel, width, reason, and whether the bits are the engine's."""
    release.set_chip(chip)
    world = World(release, tp)
    standins.echo, choose = True, kernels.choose
    kernels.choose = lambda call, name=None: (name, standins.EchoBackend)  # type: ignore[assignment,return-value]
    try:
        return [cell(world, chip, tp, policy, mode, rows) for mode in MODES for rows in ROWS]
    finally:
        standins.echo, kernels.choose = False, choose  # type: ignore[assignment]


def cell(world: World, chip: str, tp: int, policy: str | None, mode: str, rows: int) -> dict[str, Any]:
    """One call with the plug-in off and on."""
    sglang_calls.state.active = False
    base = world.run(rows, mode)
    sglang_calls.state.active = True
    set_state(chip)
    got = world.run(rows, mode)
    launch, buffer = got["launch"], world.layer._attn_sink_local
    sink_ok = launch is None or tp == 1 or launch.sink_pointer == buffer.data_ptr()
    return {
        "chip": chip, "tp": tp, "policy": policy or "default", "mode": mode, "rows": rows,
        "engine": [base["kernel"], base["width"]], "ours": [got["kernel"], got["width"]],
        "why": got["why"], "bits": bool(torch.equal(base["out"], got["out"])), "sink": bool(sink_ok),
    }  # fmt: skip


def special(release: Release) -> dict[str, Any]:
    """Rewritten batches, breakable graphs, the DSPARK draft, views and sinks, under HEADFIT_WIDTH=native."""
    done: dict[str, Any] = {}
    release.set_chip("SM90")
    world = World(release, 8)
    sglang_calls.state.active = True
    set_state("SM90")
    world.run(1, "DECODE")  # fills the layer's sink
    got = world.run(5, "DECODE", draft=True)
    done["DSPARK draft stays padded"] = (got["kernel"], got["width"]) == ("flashmla", 64)
    pad = world.layer._local_attn_sink() if hasattr(world.layer, "_local_attn_sink") else world.layer._attn_sink_local
    done["sink without a width is the padded one"] = pad.shape[0] == 64 and (
        pad.data_ptr() == world.layer._attn_sink_local.data_ptr() if world.layer._attn_sink_local is not None else True
    )
    seen: list[Any] = []
    run = kernels.choose

    def spy(call: Any, name: Any = None) -> Any:
        seen.append(call)
        return run(call, name)

    kernels.choose = spy  # type: ignore[assignment]
    try:
        world.run(5, "EXTEND")
    finally:
        kernels.choose = run  # type: ignore[assignment]
    call = seen[-1]
    done["queries are a view of SGLang's buffer"] = call.q.data_ptr() == world.q_buffer.data_ptr()
    done["sink is a prefix view of SGLang's"] = call.attn_sink.data_ptr() == world.layer._attn_sink_local.data_ptr()
    for mode in ("EXTEND", "DECODE", "TARGET_VERIFY"):
        on = world.run(5, mode)
        sglang_calls.state.active = False
        off = world.run(5, mode)
        sglang_calls.state.active = True
        done[f"attention bits, {mode}: {on['kernel']} {on['width']} as {off['kernel']} {off['width']}"] = bool(
            torch.equal(on["out"], off["out"]) and on["width"] == 8
        )
    on = world.run(5, "EXTEND", graph=True)
    buffer = world.q_buffer.stride(0) // DIM
    sglang_calls.state.active = False
    off = world.run(5, "EXTEND", graph=True)
    sglang_calls.state.active = True
    done[f"breakable graph: buffers stay {buffer} wide, kernel {on['kernel']} {on['width']}, same bits"] = bool(
        buffer == 64 and torch.equal(on["out"], off["out"])
    )
    release.set_chip("SM120")
    standins.echo = True
    for mode, original, rows, graph, want in (
        ("EXTEND", "IDLE", 96, False, 64),
        ("EXTEND", "TARGET_VERIFY", 96, False, 64),
        ("EXTEND", None, 96, True, 64),
        ("EXTEND", None, 96, False, 16),
    ):
        sglang_calls.state.policy = Policy.sm12x_prefill()
        set_state("SM120")
        world = World(release, 4)
        got = world.run(rows, mode, original, graph=graph)
        sglang_calls.state.active = False
        own = world.run(rows, mode, original, graph=graph)["width"]
        sglang_calls.state.active = True
        what = f"{mode} that was {original or mode}{', in a breakable graph' if graph else ''}"
        done[f"published gate, {what}: {min(want, own)} heads, SGLang alone {own}"] = got["width"] == min(want, own)
    standins.echo = False
    return done


if __name__ == "__main__":
    print("RESULT " + json.dumps(check_release()))
