"""Probing: FlashInfer faked at module level in every state it may be in, its sources as stand-ins, our backends."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headfit
from headfit import flashinfer_facts, kernels, probes
from headfit.width import NO_BATCH_EXCEEDS, Call, Capability, Policy, plan_width

NAME = "flashinfer.mla._sparse_mla_sm120"
QUERY = "supported_sparse_mla_sm120_configs"
PAIRS = frozenset((h, k) for h in (8, 16, 32, 64, 128) for k in (128, 512, 1024))

# The dispatch of up to 0.6.18 in miniature: the shape that is read, with comments and other functions that mislead.
PREFILL_06 = """
inline bool dispatch_v32(int num_heads) { switch (num_heads) { case 4: return true; default: return false; } }
inline bool dispatch_dsv4_single(int num_heads, int topk) {
#define BY_HEADS(TK)                \\
  do {                              \\
    switch (num_heads) {            \\
%s      case 16: return run<16, TK>(); \\
      case 32: return run<32, TK>();  \\
      case 64: return run<64, TK>();  \\
      case 128: return run<128, TK>(); \\
      default: return false;        \\
    }                               \\
  } while (0)
  // case 1: a comment, and topk == 4096
  if (topk == 128) BY_HEADS(128); else if (topk == 512) BY_HEADS(512);
  return false;
}
inline bool dispatch_dsv4_dual(int num_heads, int topk) {
  if (topk == 128) {
    switch (num_heads) { case 8: case 16: case 32: case 64: case 128: return go(); default: return 0; }
  }
  if (topk != 128) return false;
  if (extra_page_block_size == 64) go(); else if (extra_page_block_size == 2) go();
  switch (num_heads) { /* case 2: */ case 16: case 32: case 64: case 128: %s return go(); default: return false; }
}
bool launch(int n) { return dispatch_dsv4_single(n, 128) || dispatch_dsv4_dual(n, 128); }
"""
PREFILL_07 = """
template <ModelType MT, int Variant, typename F>
PrefillLaunchResult visit_prefill_heads(int heads, F&& call) {
  constexpr bool mg = Variant == 2 || Variant == 3;
#define HEAD(H) \\
  if (heads == H) return call(std::integral_constant<int, H>{});
  if constexpr ((sg && is_dsv41(MT)) || (mg && MT == ModelType::DSV4)) {
    HEAD(8) HEAD(16)
  }
  if constexpr (sg && MT == ModelType::DSV4_1) {
    HEAD(24)
  }
  if constexpr (mg && MT == ModelType::DSV4_1) {
    HEAD(40)
  }
  if constexpr (mg && (inline_scale || MT == ModelType::DSV4)) {
    HEAD(32) HEAD(64)
  }
  if constexpr (swap && inline_scale) {
    HEAD(96)
  }
  return false;
}
inline bool has_prefill_heads(int heads) { return visit_prefill_heads<M, 1>(heads, present).supported; }
"""
RESOLVE_07 = "CHECK(m.variant >= 1 && m.topk % 64 == 0); full = m.extra_topk % 32 == 0; // m.topk % 7 == 0"


def module(**attributes: Any) -> ModuleType:
    fake = ModuleType(NAME)
    vars(fake).update(attributes)
    return fake


@pytest.fixture(autouse=True)
def no_real_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]  # import and find_spec: not there
    monkeypatch.setattr(probes, "_logged", set())


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(fake: object) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
        monkeypatch.setitem(sys.modules, "flashinfer.mla", ModuleType("flashinfer.mla"))
        monkeypatch.setitem(sys.modules, NAME, fake)  # type: ignore[arg-type]

    return put


class Finder:
    """Makes the import of FlashInfer's module raise what it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == NAME:
            raise self.error


# -------------------------------------------------------------------------------------------- decode_max_rows


@pytest.mark.parametrize("constant", [64, 128, 0, 1])
def test_the_constant_is_read_and_not_copied(install: Any, constant: int) -> None:
    install(module(_DECODE_MAX_TOKENS=constant))
    assert headfit.decode_max_rows() == constant
    assert headfit.decode_max_rows("flashinfer_sm120") == constant
    assert probes.row_split().problem is None
    assert probes.row_split().source == f"{NAME}._DECODE_MAX_TOKENS"


def test_a_raised_constant_keeps_the_pad_of_rows_that_still_decode(install: Any) -> None:
    def width(rows: int) -> int:
        capability = Capability("flashinfer_sm120", (12, 0), headfit.decode_max_rows(), {32, 64}, {64})
        return plan_width(Call(rows, 32, 64), capability, Policy.sm12x_prefill()).width

    install(module(_DECODE_MAX_TOKENS=64))
    assert [width(rows) for rows in (64, 65, 128, 129)] == [64, 32, 32, 32]
    install(module(_DECODE_MAX_TOKENS=128))
    assert [width(rows) for rows in (64, 65, 128, 129)] == [64, 64, 64, 32]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, "has no _DECODE_MAX_TOKENS"),
        ({"_DECODE_MAX_TOKENS": None}, "has no _DECODE_MAX_TOKENS"),
        ({"_DECODE_MAX_TOKENS": "64"}, "is '64', not a row count"),
        ({"_DECODE_MAX_TOKENS": 64.0}, "is 64.0, not a row count"),
        ({"_DECODE_MAX_TOKENS": True}, "is True, not a row count"),
        ({"_DECODE_MAX_TOKENS": -1}, "is -1, not a row count"),
    ],
)
def test_a_lost_or_strange_constant_fails_closed(
    install: Any, attributes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(module(**attributes))
    with caplog.at_level(logging.WARNING, "headfit"):
        assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
        assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
    assert reason in (probes.row_split().problem or "")
    assert len(caplog.records) == 1  # once, however often it is asked
    assert reason in caplog.records[0].message


def test_a_constant_beyond_any_batch_is_capped(install: Any) -> None:
    install(module(_DECODE_MAX_TOKENS=2**80))
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS


@pytest.mark.parametrize(
    "error", [ImportError("no libcuda"), RuntimeError("no driver"), OSError("lib"), AttributeError("x"), SystemExit(3)]
)
def test_a_failing_import_of_any_kind_fails_closed(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__path__=[], __spec__=None))  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(__path__=[], __spec__=None))  # type: ignore[misc]
    monkeypatch.setattr(sys, "meta_path", [Finder(error), *sys.meta_path])
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
    assert type(error).__name__ in (probes.row_split().problem or "")


def test_an_attribute_that_raises_fails_closed(install: Any) -> None:
    class Raising(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("jit")

    install(Raising(NAME))
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS


def test_not_installed_fails_closed() -> None:
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
    assert "import flashinfer.mla._sparse_mla_sm120" in (probes.row_split().problem or "")


def test_parts_left_by_an_import_that_failed_half_way_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "flashinfer" / "mla"
    package.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").write_text("from . import mla\nimport a_package_that_is_not_there\n")
    (package / "__init__.py").write_text("from . import _sparse_mla_sm120\n")
    (package / "_sparse_mla_sm120.py").write_text("_DECODE_MAX_TOKENS = 64\n")
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
    assert NAME in sys.modules  # and yet:
    assert headfit.decode_max_rows() == NO_BATCH_EXCEEDS
    for name in [n for n in sys.modules if n.startswith("flashinfer")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("family", ["triton", "torch", "cpu", "reference", "flashmla", "hopper"])
def test_families_without_a_split_say_zero_whatever_flashinfer_does(family: str, install: Any) -> None:
    assert headfit.decode_max_rows(family) == 0
    install(module())
    assert headfit.decode_max_rows(family) == 0


def test_a_registered_backend_says_its_own_split(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = kernels.Backend("forked", "forked_backend", ("cuda",), "no hint")
    monkeypatch.setitem(kernels.REGISTRY, "forked", entry)
    assert headfit.decode_max_rows("forked") == NO_BATCH_EXCEEDS  # its module cannot be imported
    fake = ModuleType("forked_backend")
    fake.capability = lambda cc: Capability("forked", cc, 48, {64}, {64})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forked_backend", fake)
    assert headfit.decode_max_rows("forked") == 48


@pytest.mark.parametrize("family", ["flashinfer_sm121", "flashinfer_sm12O", "", "Triton"])
def test_a_misspelt_family_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"family: got .*accepted are"):
        headfit.decode_max_rows(family)


# ------------------------------------------------------------------------------------------ FlashInfer's facts


def tree(root: Path, **files: str) -> Path:
    paths = {
        "prefill_06": flashinfer_facts._PREFILL_06,
        "prefill_07": flashinfer_facts._PREFILL_07,
        "resolve_07": flashinfer_facts._TOPK_07,
        "binding_070": str(Path(flashinfer_facts._PREFILL_06).with_name(flashinfer_facts._BINDING_070)),
    }
    package = root / "flashinfer"
    for name, text in files.items():
        file = package / paths[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return package


@pytest.mark.parametrize(
    ("single", "dual", "heads"),
    [
        ("", "", {16, 32, 64, 128}),  # as in 0.6.17
        ("      case 8: return run<8, TK>(); \\\n", "case 8:", {8, 16, 32, 64, 128}),  # as in 0.6.18
        ("      case 8: return run<8, TK>(); \\\n", "", {16, 32, 64, 128}),  # must be legal with one cache and with two
    ],
)
def test_prefill_switch_of_06(tmp_path: Path, single: str, dual: str, heads: set[int]) -> None:
    facts = flashinfer_facts.prefill_facts(tree(tmp_path, prefill_06=PREFILL_06 % (single, dual)))
    assert facts.heads == heads
    assert facts.topk == {128, 512}
    assert facts.dual_topk == {128}
    assert "sparse_mla_sm120_prefill.cu" in facts.source


def test_prefill_of_070_has_the_old_switch_and_topk_as_an_argument(tmp_path: Path) -> None:
    source = PREFILL_06.replace("topk == ", "topk <= ") % ("      case 8: return run<8, TK>(); \\\n", "case 8:")
    binding = "TVM_FFI_ICHECK_EQ(topk % 64, 0) << text;"
    facts = flashinfer_facts.prefill_facts(tree(tmp_path, prefill_06=source, binding_070=binding))
    assert facts.heads == {8, 16, 32, 64, 128}
    assert facts.topk == range(64, 2**31, 64)
    assert facts.dual_topk is None


def test_prefill_heads_of_07(tmp_path: Path) -> None:
    facts = flashinfer_facts.prefill_facts(tree(tmp_path, prefill_07=PREFILL_07, resolve_07=RESOLVE_07))
    assert facts.heads == {8, 16, 32, 64}
    assert facts.topk == range(64, 2**31, 64)
    assert "attention_plan.h" in facts.source


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"prefill_06": ""},
        {"prefill_06": PREFILL_06.replace("num_heads)", "heads)") % ("", "")},
        {"prefill_06": PREFILL_06.replace("dispatch_dsv4_dual(int", "dispatch_dual(int") % ("", "")},
        {"prefill_06": PREFILL_06.replace("topk == ", "topk <= ") % ("", "")},
        {"prefill_06": (PREFILL_06 % ("", "")).partition("#define")[0]},
        {"prefill_06": PREFILL_06.replace("topk != 128", "topk < 128") % ("", "")},
        {"prefill_07": PREFILL_07},
        {"prefill_07": PREFILL_07, "resolve_07": "m.topk % 64 == 0 m.topk % 32 == 0"},
        {"prefill_07": PREFILL_07.replace("DSV4)", "V4)"), "resolve_07": RESOLVE_07},
        {"prefill_07": PREFILL_07.replace("visit_prefill", "visit"), "resolve_07": RESOLVE_07},
    ],
)
def test_sources_of_another_form_are_not_guessed_at(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises((flashinfer_facts.NotReadableError, FileNotFoundError)):
        flashinfer_facts.prefill_facts(tree(tmp_path, **files))


@pytest.mark.parametrize(
    ("attributes", "sizes"),
    [
        ({"_DECODE_DSV4_PAGE_BLOCK_SIZE": 64}, ({64}, {2, 64})),
        ({QUERY: lambda: {"dsv4": SimpleNamespace(page_block_size=64)}}, ({64}, {2, 64})),
        ({QUERY: lambda: {"dsv4": SimpleNamespace(page_block_size_is_runtime=True)}}, (None, None)),
    ],
)
def test_page_sizes_of_06_and_07(tmp_path: Path, attributes: dict[str, Any], sizes: tuple[Any, Any]) -> None:
    root = tree(tmp_path, prefill_06=PREFILL_06 % ("", ""))
    facts = flashinfer_facts.page_facts(module(**attributes), root)
    assert (facts.sizes, facts.extra_sizes) == sizes


@pytest.mark.parametrize("attributes", [{}, {"_DECODE_DSV4_PAGE_BLOCK_SIZE": "64"}])
def test_page_sizes_of_another_form_are_not_guessed_at(tmp_path: Path, attributes: dict[str, Any]) -> None:
    root = tree(tmp_path, prefill_06=PREFILL_06 % ("", ""))
    with pytest.raises(flashinfer_facts.NotReadableError):
        flashinfer_facts.page_facts(module(**attributes), root)


def config(heads: Any, topks: Any = (), runtime: bool = True) -> Any:
    entry = SimpleNamespace(topk_is_runtime=runtime, topks=topks, supported_num_heads=lambda: heads)
    return lambda: {"dsv4": entry}


@pytest.mark.parametrize(
    ("attributes", "heads", "topk"),
    [
        ({"_DECODE_DSV4_DISPATCH": PAIRS}, {8, 16, 32, 64, 128}, {128, 512, 1024}),
        ({"_DECODE_DSV4_DISPATCH": PAIRS | {(64, 192)}}, {8, 16, 32, 64, 128}, {128, 512, 1024}),
        ({"supported_sparse_mla_sm120_configs": config(range(1, 129))}, set(range(1, 129)), None),
        ({"supported_sparse_mla_sm120_configs": config((8, 64), {128}, False)}, {8, 64}, {128}),
    ],
)
def test_decode_facts(attributes: dict[str, Any], heads: set[int], topk: set[int] | None) -> None:
    facts = flashinfer_facts.decode_facts(module(**attributes))
    assert (facts.heads, facts.topk) == (heads, topk)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"_DECODE_DSV4_DISPATCH": frozenset()},
        {"_DECODE_DSV4_DISPATCH": {(8, 128), 3}},
        {"_DECODE_DSV4_DISPATCH": {(8, 128), (16, 512)}},
        {"_DECODE_DSV4_DISPATCH": {("8", 128)}},
        {"_DECODE_DSV4_DISPATCH": object()},
        {"supported_sparse_mla_sm120_configs": config(())},
        {"supported_sparse_mla_sm120_configs": config((True,))},
    ],
)
def test_decode_tables_of_another_form_are_not_guessed_at(attributes: dict[str, Any]) -> None:
    with pytest.raises(flashinfer_facts.NotReadableError):
        flashinfer_facts.decode_facts(module(**attributes))


# -------------------------------------------------------------------------------------------------------- probe


def installed(root: Path, **attributes: Any) -> ModuleType:
    return module(__file__=str(root / "flashinfer" / "mla" / "_sparse_mla_sm120.py"), **attributes)


def test_flashinfer_is_assembled_with_a_source_for_each_fact(
    tmp_path: Path, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, prefill_06=PREFILL_06 % ("", ""))
    table = {"_DECODE_DSV4_DISPATCH": PAIRS, "_DECODE_DSV4_PAGE_BLOCK_SIZE": 64}
    install(installed(tmp_path, _DECODE_MAX_TOKENS=64, **table))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.17")
    capability = probes.flashinfer_capability((12, 1))
    assert capability is not None
    assert (capability.row_split, capability.version, capability.problems) == (64, "0.6.17", ())
    assert capability.prefill_heads == {16, 32, 64, 128}
    assert capability.decode_heads == {8, 16, 32, 64, 128}
    assert (capability.page_sizes, capability.extra_page_sizes, capability.layouts) == ({64}, {2, 64}, ("v4",))
    assert capability.dual_prefill_topk == {128}
    facts = ("row_split", "prefill_heads", "decode_heads", "page_sizes", "layouts")
    assert all(capability.source(f) != "not stated" for f in facts)
    eight = plan_width(Call(4096, 8, 64), capability, Policy.sm12x_prefill())
    assert (eight.width, eight.rule) == (64, "heads")
    assert plan_width(Call(4096, 16, 64), capability, Policy.sm12x_prefill()).width == 16


@pytest.mark.parametrize("policy", [Policy.sm12x_prefill(), Policy.native(), Policy.padded()])
@pytest.mark.parametrize("rows", [1, 64, 65, 4096])
def test_unreadable_prefill_heads_keep_the_pad_of_that_side_only(
    tmp_path: Path, install: Any, policy: Policy, rows: int
) -> None:
    install(installed(tmp_path, _DECODE_MAX_TOKENS=64, _DECODE_DSV4_DISPATCH=PAIRS))
    capability = probes.flashinfer_capability((12, 0))
    assert capability is not None
    assert "NotReadableError" in capability.problems[0]
    width = plan_width(Call(rows, 16, 64), capability, policy).width
    assert width == (16 if policy.kind == "native" and rows <= 64 else 64)


@pytest.mark.parametrize("policy", [Policy.sm12x_prefill(), Policy.native(), Policy.padded()])
@pytest.mark.parametrize("n_local", [1, 8, 32, 64])
@pytest.mark.parametrize("rows", [0, 64, 65, 10**9])
def test_an_unreadable_family_keeps_every_pad(policy: Policy, n_local: int, rows: int, install: Any) -> None:
    install(module())
    capability = probes.flashinfer_capability((12, 0))
    assert capability is not None
    assert capability.problems
    assert plan_width(Call(rows, n_local, 64), capability, policy).width == 64


def test_probe_lists_usable_backends_and_flashinfer_only_where_it_could_run(
    monkeypatch: pytest.MonkeyPatch, install: Any
) -> None:
    found = headfit.probe("cpu")
    assert set(found) == set(kernels.backends())
    for name, capability in found.items():
        assert capability.family == name
        assert capability.compute_capability is None
        assert capability.source("heads") != "not stated" or capability.sources
    install(module(_DECODE_MAX_TOKENS=64))
    assert "flashinfer_sm120" in headfit.probe("cpu")
    for cc, listed in (((9, 0), False), ((10, 0), False), ((12, 1), True)):
        monkeypatch.setattr(probes, "compute_capability", lambda device, cc=cc: cc)
        assert ("flashinfer_sm120" in headfit.probe()) == listed


def test_a_backend_that_cannot_say_keeps_the_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cc: object) -> Capability:
        raise RuntimeError("boom")

    from headfit.kernels import cpu

    monkeypatch.setattr(cpu, "capability", broken)
    capability = probes.backend_capability("cpu", (9, 0))
    assert capability.row_split == NO_BATCH_EXCEEDS
    assert capability.problems == ("RuntimeError: boom",)
    assert plan_width(Call(1, 8, 64), capability, Policy.native()).width == 64


def test_device_arguments() -> None:
    assert probes.compute_capability("cpu") is None
    with pytest.raises(TypeError, match="device: got True"):
        probes.compute_capability(True)


def test_the_public_function_is_not_shadowed_by_a_module() -> None:
    code = (
        "import sys, headfit; headfit.decode_max_rows('cpu'); import headfit.probes; "
        "assert callable(headfit.probe) and 'flashinfer' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
