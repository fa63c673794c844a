"""FlashMLA's facts: libraries in miniature with the names and texts of the real ones, and what must not be guessed."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

import headfit
from headfit import flashmla_facts, probes
from headfit.width import NO_BATCH_EXCEEDS, Call, Policy, plan_width

SCHEMAS = (
    b"sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
    b"Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]\0"
    b"sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    b"Tensor(a)? tile_scheduler_metadata, int d_v, bool enable_batch_invariant=False) -> (Tensor, Tensor)\0"
)
OLD_SCHEMAS = b"sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v) -> Tensor[]\0"
SM90 = (
    b"".join(
        b"_ZN6legacy4sm906decode6sparse14KernelTemplateIL9ModelType%dELi%dEE3run\0" % (model, heads)
        for model in (0, 1)
        for heads in (64, 128)
    )
    + b"_ZN6legacy4sm907prefill10sparse_fwd14KernelTemplateILi512ELb1EE\0"
)
V4 = b"KVCacheFormatIL9ModelType0EELi512ELi512E\0KVCacheFormatIL9ModelType1EELi448ELi448E\0"
SM100 = (
    b"21Fwd_Sm100_Head64_Impl\00033Fwd_Sm100_Head128_Small_TopK_Impl\00024Decode_Sm100_Head64_Impl\0"
    b"33Decode_Sm100_Head64x2_Legacy_Impl\0KVCacheFormatIL9ModelType2EELi1ELi0E\0"
)
TOPK = b": topk (%d) mod B_TOPK (%d) must be 0\0"
SMALL = b"SM90a supports 8, 16, 32, 64 and 128 heads; SM100f supports 64 and 128.\0"
VLLM = b"\x7fELF\0" + SCHEMAS + SM90 + V4 + SM100 + TOPK + SMALL
SGL = VLLM.replace(SMALL, b"")
FAMILY = "flashmla_vllm"


def library(root: Path, content: bytes) -> Path:
    path = root / "_flashmla_C.abi3.so"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "cc", "prefill", "layouts"),
    [
        (VLLM, (9, 0), {8, 16, 32, 64, 128}, ("v32", "v4")),
        (VLLM, (10, 0), {64, 128}, ("v32", "v4", "v41")),
        (VLLM, None, {64, 128}, ("v32", "v4")),  # legal on both
        (SGL, (9, 0), {64, 128}, ("v32", "v4")),
        (SGL, (10, 3), {64, 128}, ("v32", "v4", "v41")),
    ],
)
def test_heads_topk_and_layouts_are_read(
    tmp_path: Path, content: bytes, cc: tuple[int, int] | None, prefill: set[int], layouts: tuple[str, ...]
) -> None:
    found = flashmla_facts.capability(FAMILY, library(tmp_path, content), cc, "1.0")
    assert (found.prefill_heads, found.decode_heads) == (prefill, {64, 128})
    assert (found.prefill_topk, found.decode_topk) == (range(128, 2**31, 128), range(64, 2**31, 64))
    assert found.layouts == layouts
    assert (found.fork, found.row_split, found.page_sizes, found.problems) == ("entry", 0, None, ())
    for fact in ("prefill_heads", "decode_heads", "topk", "page_sizes", "layouts"):
        assert found.source(fact) != "not stated"
    assert plan_width(Call(4096, 8, 64), found, Policy.native()).width == (8 if 8 in prefill else 64)
    assert plan_width(Call(1, 8, 64, "decode"), found, Policy.native()).width == 64


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty file"),
        (VLLM.replace(SCHEMAS, b""), "no schema"),
        (VLLM.replace(SCHEMAS, OLD_SCHEMAS), "before 2026, whose lse is log2"),
        (VLLM.replace(V4, b""), "does not show"),  # ModelType 1 may be another format
        (VLLM.replace(b"4sm906decode6sparse", b"4sm906decode5other"), "no sparse decode kernel"),
        (SGL.replace(b"4sm907prefill10sparse_fwd", b"4sm907prefill9dense_fwd"), "no sparse prefill kernel"),
    ],
)
def test_a_library_of_another_form_keeps_every_pad_and_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    found = flashmla_facts.capability(FAMILY, library(tmp_path, content), (9, 0))
    assert why in found.problems[0]
    assert found.row_split == NO_BATCH_EXCEEDS
    assert {plan_width(Call(rows, 8, 64), found, Policy.native()).width for rows in (1, 4096)} == {64}


def test_an_unnamed_alignment_is_taken_as_the_strictest(tmp_path: Path) -> None:
    found = flashmla_facts.capability(FAMILY, library(tmp_path, VLLM.replace(TOPK, b"")), (9, 0))
    assert found.decode_topk == found.prefill_topk == range(128, 2**31, 128)
    assert "aligned" in found.problems[0]


def test_a_python_extension_is_known_by_its_interface(tmp_path: Path) -> None:
    path = library(tmp_path, VLLM.replace(SCHEMAS, b""))
    interface = tmp_path / "flash_mla_interface.py"
    interface.write_text(
        "def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None): ...\n"
        "def flash_mla_with_kvcache(q, k_cache, attn_sink=None, topk_length=None): ...\n"
    )
    assert flashmla_facts.capability(FAMILY, path, (9, 0)).problems == ()
    interface.write_text("def flash_mla_sparse_fwd(q, kv): ...\nraise SystemExit\n")
    assert "lacks attn_sink, topk_length" in flashmla_facts.capability(FAMILY, path, (9, 0)).problems[0]


def test_probe_lists_installed_copies_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("vllm", "_flashmla_C.abi3.so"), ("flash_mla", "_C_legacy.abi3.so")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit(f'{__name__} was imported')\n")
        (tmp_path / package / name).write_bytes(VLLM if package == "vllm" else SGL)
    (tmp_path / "flash_mla" / "cuda.abi3.so").write_bytes(b"newer pages only")
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("vllm", "flash_mla"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    found = {name: c for name, c in headfit.probe("cpu").items() if name.startswith("flashmla_")}
    assert set(found) == {"flashmla_vllm", "flashmla_sgl"}
    assert found["flashmla_vllm"].version == "9.9"
    assert "vllm" not in sys.modules
    assert "flash_mla" not in sys.modules
    assert probes.flashmla_capabilities((12, 0)) == ()
