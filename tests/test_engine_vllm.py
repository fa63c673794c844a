"""The vLLM plug-in on a small module with the real signatures; the real classes run in `make compat`."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from headfit import cache, ops
from headfit.engines import hooks, routes, vllm
from headfit.kernels.crossover import Point, Shape

DIM, PAGE, TOKENS, HEADS = 512, 4, 5, 64
FAKE = '''
"""The functions that the plug-in wraps, as vLLM 0.33 has them."""
import torch
import tests_vllm_kernels as kernels


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
                           extra_topk_length=None, out=None, enable_batch_invariant=False):
    return kernels.paged(q, k_cache, softmax_scale, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
                         topk_length, extra_topk_length, out)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None):
    return kernels.sparse(q, kv, indices, sm_scale, attn_sink, topk_length, out)


def compute_global_topk_indices_and_lens(topk_indices, token_to_req_indices, block_table, block_size, is_valid_token):
    return topk_indices, (topk_indices >= 0).sum(1).int()


def get_forward_context():
    return kernels.context


class DeepseekV4FlashMLAAttention:
    @classmethod
    def get_padded_num_q_heads(cls, num_heads):
        return 64 if num_heads <= 64 else 128

    def forward_mqa(self, q, kv, positions, output):
        meta = get_forward_context().attn_metadata
        if meta is None:
            kernels.reserved.append(q.shape)
            output.zero_()
            return
        common = {"q": q, "swa_metadata": meta, "attn_metadata": None, "output": output}
        if meta.num_prefill_tokens:
            self._forward_prefill(positions=positions, compressed_k_cache=None, swa_k_cache=self.pages, **common)
        else:
            self._forward_decode(kv_cache=None, swa_only=True, **common)

    def _forward_decode(self, q, kv_cache, swa_metadata, attn_metadata, swa_only, output):
        flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=self.pages.unsqueeze(-2), block_table=None, head_dim_v=512,
            tile_scheduler_metadata=object(), cache_seqlens=None, is_fp8_kvcache=True,
            indices=swa_metadata.decode_swa_indices, topk_length=swa_metadata.decode_swa_lens,
            softmax_scale=self.scale, attn_sink=self.attn_sink, extra_k_cache=None, extra_indices_in_kvcache=None,
            extra_topk_length=None, out=output.unsqueeze(1))

    def _forward_prefill(self, q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata):
        kv, lists = kernels.gather(self.pages, swa_metadata)
        flash_mla_sparse_fwd(q=q, kv=kv, indices=lists, sm_scale=self.scale, attn_sink=self.attn_sink,
                             topk_length=None, out=output)
'''


class Kernels:
    """FlashMLA's functions, by headfit's CPU kernel: 64 and 128 heads only, and what they saw."""

    def __init__(self):
        self.launches, self.reserved, self.context = [], [], None

    def paged(self, q, k_cache, scale, indices, sink, extra, extra_indices, lengths, extra_lengths, out):
        self._note("paged", q)
        return ops.flash_mla_with_kvcache(
            q, k_cache, softmax_scale=scale, indices=indices, attn_sink=sink, topk_length=lengths, out=out,
            backend="cpu",
        )  # fmt: skip

    def sparse(self, q, kv, indices, scale, sink, lengths, out):
        self._note("gathered", q)
        return ops.flash_mla_sparse_fwd(q, kv, indices, scale, attn_sink=sink, out=out, backend="cpu")

    def _note(self, name, q):
        self.launches.append((name, q.shape[-2]))
        if q.shape[-2] not in (64, 128):
            raise RuntimeError("FP8 decode kernel requires h_q in {64, 128}")

    @staticmethod
    def gather(pages, meta):
        lane = torch.arange(meta.prefill_swa_indices.shape[-1])
        keep = lane < meta.prefill_swa_lens[:, None, None]
        return cache.unpack_kv(pages.unsqueeze(-2))[:, None], torch.where(keep, meta.prefill_swa_indices, -1).int()


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    folder = tmp_path
    for name in ("vllm", "models", "deepseek_v4", "nvidia"):
        folder = folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / "flashmla.py").write_text(FAKE)
    (tmp_path / "vllm" / "envs.py").write_text("VLLM_BATCH_INVARIANT = False\n")
    (tmp_path / "vllm" / "platforms.py").write_text("current_platform = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    made = Kernels()
    monkeypatch.setitem(sys.modules, "tests_vllm_kernels", made)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda p: "0.33.1" if p == "vllm" else version(p))
    monkeypatch.setattr(hooks, "_said", set())
    monkeypatch.delenv("HEADFIT_WIDTH", raising=False)
    yield made
    vllm.unregister()
    hooks.reset_calls()
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        del sys.modules[name]


def load(monkeypatch, width=None, chip=(9, 0), gpu=""):
    if width:
        monkeypatch.setenv("HEADFIT_WIDTH", width)
    vllm.register()
    module = importlib.import_module(vllm.MODULE)
    vllm.state.compute_capability, vllm.state.backends, vllm.state.gpu = chip, ("cpu",), gpu
    return module


def layer_of(module, n_local=8):
    layer = module.DeepseekV4FlashMLAAttention()
    layer.padded_heads = layer.get_padded_num_q_heads(n_local)
    pages = cache.empty_cache(3, PAGE)
    rows = torch.randn(3 * PAGE, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    cache.write_rows(pages, torch.arange(3 * PAGE), rows)
    layer.pages, layer.scale, layer.n_heads, layer.n_local_heads = pages.squeeze(2), DIM**-0.5, HEADS, n_local
    layer.attn_sink = torch.linspace(-1, 1, 64)[: layer.padded_heads]
    layer.compress_ratio, layer.window_size, layer.max_image_tokens = 1, 16, 0
    return layer


def run(kernels, layer, phase):
    kernels.launches.clear()
    prefill = phase == "prefill"
    lists = torch.randint(-1, 3 * PAGE, (TOKENS, 1, 16), generator=torch.Generator().manual_seed(2)).int()
    lens = torch.full((TOKENS,), 7, dtype=torch.int32)
    meta = SimpleNamespace(
        num_prefill_tokens=TOKENS if prefill else 0, num_decode_tokens=0 if prefill else TOKENS,
        decode_swa_indices=lists, decode_swa_lens=lens, prefill_swa_indices=lists, prefill_swa_lens=lens,
        prefill_left_visible=None,
    )  # fmt: skip
    kernels.context = SimpleNamespace(attn_metadata=meta)
    q = torch.full((TOKENS, layer.padded_heads, DIM), torch.nan).bfloat16()
    n = layer.n_local_heads
    q[:, :n] = torch.randn(TOKENS, n, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.full_like(q, 7.0)
    layer.forward_mqa(q, None, None, out)
    return out


@pytest.mark.parametrize("n_local", [4, 8, 16, 32])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_native_is_owned_heads_with_the_bits_of_64(kernels, monkeypatch, phase, n_local):
    plain = importlib.import_module(vllm.MODULE)
    before = run(kernels, layer_of(plain, n_local), phase)
    layer = layer_of(load(monkeypatch, "native"), n_local)
    assert layer.padded_heads == n_local
    after = run(kernels, layer, phase)
    assert after.shape[1] == n_local
    assert torch.equal(before[:, :n_local], after)
    assert kernels.launches == []
    assert set(hooks.calls()) == {(phase, n_local, "cpu", "asked")}


def test_nothing_is_imported_before_vllm_does(kernels, monkeypatch):
    vllm.register()
    assert vllm.MODULE not in sys.modules
    module = importlib.import_module(vllm.MODULE)
    assert module.flash_mla_with_kvcache.__wrapped__


def test_without_a_measurement_the_default_leaves_vllm_alone(kernels, monkeypatch):
    layer = layer_of(load(monkeypatch))
    assert layer.padded_heads == 64
    run(kernels, layer, "decode")
    assert kernels.launches == [("paged", 64)]
    run(kernels, layer, "prefill")
    assert kernels.launches == [("gathered", 64)]
    assert {key.reason for key in hooks.calls()} == {"not_measured"}


def table(ours_decode, ours_prefill):
    """A measured table of one GPU: microseconds of our kernel against FlashMLA's 20 (decode) and 600 (prefill)."""
    return tuple(
        Point(Shape(layout, 1, rows, 8, 16), times)
        for layout, rows, times in (
            ("v4", 4, (("cpu", ours_decode), ("flashmla", 20.0))),
            ("v4", 4096, (("cpu", ours_prefill), ("flashmla", 1200.0))),
            ("bf16", 4096, (("flashmla", 600.0),)),
        )
    )


def test_measured_wins_in_both_phases_need_no_pad(kernels, monkeypatch):
    monkeypatch.setattr(routes, "points_of", lambda gpu: table(10.0, 300.0))
    routes.route.cache_clear()
    layer = layer_of(load(monkeypatch, gpu="measured"))
    assert layer.padded_heads == 8
    run(kernels, layer, "decode")
    assert (kernels.launches, set(hooks.calls())) == ([], {("decode", 8, "cpu", "measured")})


def test_a_win_in_decode_alone_keeps_buffers_and_reads_views(kernels, monkeypatch):
    plain = importlib.import_module(vllm.MODULE)
    before = run(kernels, layer_of(plain), "decode")
    monkeypatch.setattr(routes, "points_of", lambda gpu: table(10.0, 900.0))
    routes.route.cache_clear()
    layer = layer_of(load(monkeypatch, gpu="decode only"))
    assert layer.padded_heads == 64
    after = run(kernels, layer, "decode")
    assert kernels.launches == []
    assert torch.equal(before[:, :8], after[:, :8])
    assert (after[:, 8:] == 7.0).all()  # pad heads are not computed and not written
    routes.route.cache_clear()


def test_the_dummy_run_reserves_no_workspace_where_none_is_used(kernels, monkeypatch):
    layer = layer_of(load(monkeypatch, "native"))
    kernels.context = SimpleNamespace(attn_metadata=None)
    out = torch.ones(3, 8, DIM)
    layer.forward_mqa(torch.ones(3, 8, DIM), None, None, out)
    assert kernels.reserved == []
    assert not out.any()
    layer.max_image_tokens = 16  # images: the gather may follow
    layer.forward_mqa(torch.ones(3, 8, DIM), None, None, out)
    assert kernels.reserved == [(3, 8, DIM)]


def test_a_prefill_that_cannot_be_read_from_pages_is_gathered(kernels, monkeypatch):
    plain = importlib.import_module(vllm.MODULE)
    before = run(kernels, layer_of(plain), "prefill")
    layer = layer_of(load(monkeypatch, "native"))
    layer.compress_ratio = 2
    after = run(kernels, layer, "prefill")
    assert torch.equal(before[:, :8], after)
    assert {key.reason for key in hooks.calls()} == {"compress_ratio"}


def test_off_again_means_the_very_same_functions(kernels, monkeypatch):
    module = importlib.import_module(vllm.MODULE)
    before = dict(vars(module)), dict(vars(module.DeepseekV4FlashMLAAttention))
    load(monkeypatch, "native")
    assert vars(module)["flash_mla_with_kvcache"] is not before[0]["flash_mla_with_kvcache"]
    assert vllm.unregister() == []
    assert (dict(vars(module)), dict(vars(module.DeepseekV4FlashMLAAttention))) == before


@pytest.mark.parametrize("width", ["padded", "sm12x-prefill"])
def test_a_policy_that_keeps_the_pad_wraps_nothing(kernels, monkeypatch, caplog, width):
    with caplog.at_level(logging.INFO, logger="headfit"):
        load(monkeypatch, width)
    assert not vllm.state.patches.done
    assert len(caplog.records) == 1
    assert "nothing installed" in caplog.text


def test_a_changed_signature_leaves_everything(kernels, monkeypatch, caplog):
    path = importlib.util.find_spec(vllm.MODULE).origin
    text = FAKE.replace("num_heads):", "num_heads, tp_size):")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    with caplog.at_level(logging.INFO, logger="headfit"):
        module = load(monkeypatch, "native")
    assert not hasattr(module.flash_mla_with_kvcache, "__wrapped__")
    assert "get_padded_num_q_heads requires tp_size" in caplog.text


@pytest.mark.parametrize(
    ("version", "said"), [("0.34.0", "outside 0.33"), ("0.32.0", "outside 0.33"), ("?", "states no")]
)
def test_an_unknown_version_leaves_everything(kernels, monkeypatch, caplog, version, said):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with caplog.at_level(logging.INFO, logger="headfit"):
        load(monkeypatch, "native")
    assert not vllm.state.active
    assert said in caplog.text
