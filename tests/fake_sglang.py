"""A SGLang of two hundred lines: the functions that the plug-in wraps, with the signatures and rules of real releases.

The real ones run in ``make compat``; docs/compat.md holds what came out. Here: no download, no GPU.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from types import SimpleNamespace
from typing import ClassVar

import torch

from headfit import cache
from headfit.ops import flash_mla_sparse_fwd, flash_mla_with_kvcache

DIM, PAGE, N_HEADS = 512, 4, 64


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, PREBUILT, SPLIT_PREFILL, DLLM_EXTEND = range(1, 10)


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """Registered hooks wrap when they are applied, once a target, as SGLang's do."""

    _hooks: ClassVar[dict] = {}
    _patched: ClassVar[set] = set()

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
        cls._hooks.setdefault(target, []).append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls):
        import pkgutil

        for target, hooks in list(cls._hooks.items()):
            if target in cls._patched or not hooks:
                continue
            owner_path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner_path)
            wrapped = getattr(owner, name)
            for _, hook, _ in hooks:
                wrapped = _around(wrapped, hook)
            setattr(owner, name, wrapped)
            cls._patched.add(target)


def _around(original, hook):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapper


def _pages(pages, seed):
    view = cache.empty_cache(pages, PAGE)
    rows = torch.randn(pages * PAGE, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    cache.write_rows(view, torch.arange(pages * PAGE), rows)
    return view


class FakeSGLang:
    """Modules in ``sys.modules``, one layer of one rank, and what its kernels saw."""

    def __init__(self, monkeypatch, *, picks_width, tp=8):
        self.launches, self.in_graph, self.sm120 = [], False, False
        self.context = None
        self._modules(monkeypatch, picks_width)
        HookRegistry._hooks, HookRegistry._patched = {}, set()
        self.layer = self.model.MQALayer(tp)
        self.draft = self.dspark.DSparkAttention(tp)

    def _modules(self, monkeypatch, picks_width):
        def module(name, **names):
            made = types.ModuleType(name)
            made.__path__ = []
            made.__spec__ = types.SimpleNamespace(name=name, loader=None, submodule_search_locations=[])
            for key, value in names.items():
                setattr(made, key, value)
            monkeypatch.setitem(sys.modules, name, made)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, made)
            return made

        for name in (
            "sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.models", "sglang.srt.layers",
            "sglang.srt.layers.attention", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention",
        ):  # fmt: skip
            module(name)
        module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)

        class EnvBool:
            def get(self):
                return True

        module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=EnvBool()))
        self.kernel = module("sgl_kernel")
        self.kernel = module("sgl_kernel.flash_mla", **self._flashmla())
        self.sm120_module = module(
            "sglang.kernels.ops.attention.flash_mla_sm120",
            flash_mla_with_kvcache_sm120=self._sm120_entry(),
            _sm120_default_backend="flashinfer",
        )
        self.backend = module(
            "sglang.srt.layers.attention.deepseek_v4_backend", _LARGE_INDEXER_QUERY_THRESHOLD=1000, **self._backend()
        )
        self.model = module("sglang.srt.models.deepseek_v4", **self._model(picks_width))
        self.dspark = module("sglang.srt.models.deepseek_v4_dspark", **self._dspark())

    def _flashmla(fake):
        def note(q, sink, name):
            fake.launches.append((name, q.shape[-2], q, sink))
            if q.shape[-2] not in (64, 128):
                raise RuntimeError(f"Unsupported h_q: {q.shape[-2]}")

        def flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
            softmax_scale=None, causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None,
            attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
            extra_topk_length=None,
        ):  # fmt: skip
            note(q, attn_sink, "flashmla")
            return flash_mla_with_kvcache_cpu(
                q, k_cache, softmax_scale=softmax_scale, indices=indices, attn_sink=attn_sink,
                extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
                topk_length=topk_length, extra_topk_length=extra_topk_length, backend="cpu",
            )  # fmt: skip

        def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
            note(q, attn_sink, "gathered")
            return sparse_cpu(q, kv, indices, sm_scale, attn_sink=attn_sink, backend="cpu")

        return {"flash_mla_with_kvcache": flash_mla_with_kvcache, "flash_mla_sparse_fwd": flash_mla_sparse_fwd}

    def _sm120_entry(fake):
        def flash_mla_with_kvcache_sm120(**kwargs):
            q, sink = kwargs["q"], kwargs["attn_sink"]
            fake.launches.append(("flashinfer", q.shape[-2], q, sink))
            if sink.shape[0] != q.shape[-2] or not q.is_contiguous():
                raise RuntimeError("attn_sink.size(0) must be num_heads")
            out, _ = flash_mla_with_kvcache_cpu(
                q, kwargs["k_cache"], indices=kwargs["indices"], attn_sink=sink, topk_length=kwargs["topk_length"],
                softmax_scale=kwargs["softmax_scale"], backend="cpu",
            )  # fmt: skip
            return out, None

        return flash_mla_with_kvcache_sm120

    def _backend(fake):
        class DeepseekV4AttnBackend:
            def __init__(self):
                self.pages = _pages(3, 1)
                lists = torch.randint(-1, 3 * PAGE, (200, 1, 64), generator=torch.Generator().manual_seed(2)).int()
                self.lists, self.lens = lists, torch.full((200,), 9, dtype=torch.int32)
                core = SimpleNamespace(swa_page_indices=lists[:, 0], c4_sparse_page_indices=None)
                self.forward_metadata = SimpleNamespace(core_attn_metadata=core)

            def forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
                rows = q.shape[0]
                environ = sys.modules["sglang.srt.environ"].envs
                extend = forward_batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
                if extend and not fake.sm120 and environ.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get():
                    kernel = sys.modules["sgl_kernel.flash_mla"].flash_mla_sparse_fwd
                    lane = torch.arange(64)
                    lists = torch.where(lane < self.lens[:rows, None, None], self.lists[:rows], -1).int()
                    kv = cache.unpack_kv(self.pages)[:, None]
                    return kernel(q=q, kv=kv, indices=lists, sm_scale=DIM**-0.5, attn_sink=attn_sink)[0]
                common = {
                    "q": q.unsqueeze(1), "k_cache": self.pages, "head_dim_v": DIM, "softmax_scale": DIM**-0.5,
                    "indices": self.lists[:rows], "topk_length": self.lens[:rows], "attn_sink": attn_sink,
                    "extra_k_cache": None, "extra_indices_in_kvcache": None, "extra_topk_length": None,
                }  # fmt: skip
                if fake.sm120:
                    out = sys.modules["sglang.kernels.ops.attention.flash_mla_sm120"].flash_mla_with_kvcache_sm120(
                        **common
                    )[0]
                else:
                    kernel = sys.modules["sgl_kernel.flash_mla"].flash_mla_with_kvcache
                    out = kernel(
                        block_table=None,
                        cache_seqlens=None,
                        tile_scheduler_metadata=None,
                        is_fp8_kvcache=True,
                        **common,
                    )[0]
                return out.squeeze(1)

        DeepseekV4AttnBackend.__module__ = "sglang.srt.layers.attention.deepseek_v4_backend"
        fake.attention = DeepseekV4AttnBackend()
        return {"DeepseekV4AttnBackend": DeepseekV4AttnBackend}

    def _model(fake, picks_width):
        class Base:
            def __init__(self, tp):
                self.n_heads, self.n_local_heads, self.attn_tp_size = N_HEADS, N_HEADS // tp, tp
                self.compress_ratio = 0
                self.attn_mqa = SimpleNamespace(tp_q_head_num=self.n_local_heads, layer_id=0)
                self.sink = torch.linspace(-1, 1, 64)

        if picks_width:

            def _kernel_num_heads(self, num_tokens):
                return self.n_local_heads if self.attn_tp_size == 1 else 64

            def _local_attn_sink(self, kernel_num_heads=None):
                return self.sink[: kernel_num_heads or 64]

            Base._kernel_num_heads, Base._local_attn_sink = _kernel_num_heads, _local_attn_sink

        class MQALayer(Base):
            def forward(self, x, positions, forward_batch, x_quant=None):
                width = self._kernel_num_heads(x.shape[0]) if picks_width else 64
                padded = x.new_full((x.shape[0], width, DIM), torch.nan)
                padded[:, : self.n_local_heads] = fake.queries(x.shape[0], self.n_local_heads)
                self.buffer = padded
                sink = self._local_attn_sink(width) if picks_width else self.sink
                out = fake.attention.forward(
                    q=padded, k=padded, v=padded, layer=self.attn_mqa, forward_batch=forward_batch, compress_ratio=0,
                    attn_sink=sink,
                )  # fmt: skip
                fake.returned = out
                return out[:, : self.n_local_heads]

        return {
            "MQALayer": MQALayer,
            "is_in_breakable_cuda_graph": lambda: fake.in_graph,
            "get_attn_backend": lambda: fake.attention,
        }

    def _dspark(fake):
        class DSparkAttention:
            def __init__(self, tp):
                self.n_local_heads, self.attn = N_HEADS // tp, SimpleNamespace(tp_q_head_num=N_HEADS // tp, layer_id=9)

            def forward(self, positions, hidden_states, forward_batch):
                rows = hidden_states.shape[0]
                padded = torch.zeros(rows, 64, DIM, dtype=torch.bfloat16)
                padded[:, : self.n_local_heads] = fake.queries(rows, self.n_local_heads)
                return fake.attention.forward(
                    q=padded, k=padded, v=padded, layer=self.attn, forward_batch=forward_batch, compress_ratio=0,
                    attn_sink=fake.layer.sink,
                )[:, : self.n_local_heads]  # fmt: skip

        return {"DSparkAttention": DSparkAttention}

    @staticmethod
    def queries(rows, heads):
        return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(4)).bfloat16()

    def run(self, rows=3, mode="EXTEND", original=None, layer=None):
        """One forward; returns the owned heads' output."""
        self.launches.clear()
        batch = SimpleNamespace(
            forward_mode=ForwardMode[mode],
            _original_forward_mode=None if original is None else ForwardMode[original],
        )
        x = torch.zeros(rows, DIM, dtype=torch.bfloat16)
        if layer is not None:
            return layer.forward(torch.arange(rows), x, batch)
        return self.layer.forward(x, torch.arange(rows), forward_batch=batch).clone()


flash_mla_with_kvcache_cpu, sparse_cpu = flash_mla_with_kvcache, flash_mla_sparse_fwd
