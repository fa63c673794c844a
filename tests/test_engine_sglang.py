"""The SGLang plug-in on a small SGLang with the real signatures; the real ones run in `make compat`."""

from __future__ import annotations

import importlib.metadata
import logging
import sys

import pytest
import torch
from fake_sglang import FakeSGLang, HookRegistry

from headfit.capability import Capability
from headfit.engines import hooks, sglang, sglang_calls

EVERY = range(1, 129)


@pytest.fixture
def start(monkeypatch):
    """Build a SGLang, load the plug-in into it under a policy and on a chip, and clean up."""
    version = importlib.metadata.version

    def installed(package):
        return "0.5.20" if package == "sglang" else version(package)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(hooks, "_said", set())
    monkeypatch.delenv("HEADFIT_WIDTH", raising=False)

    def build(*, width=None, chip=(9, 0), picks_width=False, tp=8, switch=None, load=True):
        if width:
            monkeypatch.setenv("HEADFIT_WIDTH", width)
        if switch is not None:
            monkeypatch.setenv("SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS", switch)
        fake = FakeSGLang(monkeypatch, picks_width=picks_width, tp=tp)
        fake.sm120 = chip[0] == 12
        if load:
            sglang.register()
            HookRegistry.apply_hooks()
        state = sglang_calls.state
        state.compute_capability, state.backends, state.gpu = chip, ("cpu",), ""
        return fake

    yield build
    sglang.unregister()
    hooks.reset_calls()


def with_flashinfer(monkeypatch, row_split=64, prefill=(16, 32, 64, 128), decode=(16, 32, 64, 128)):
    found = Capability("flashinfer_sm120", (12, 0), row_split, prefill, decode, version="0.6.17")
    monkeypatch.setattr("headfit.probes.flashinfer_capability", lambda cc: found)
    sglang_calls._capability.cache_clear()


def reasons():
    return {(key.phase, key.width, key.kernel, key.reason) for key in hooks.calls()}


@pytest.mark.parametrize("picks_width", [False, True])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_hopper_runs_owned_heads_with_the_bits_of_64(start, picks_width, mode):
    before = start(picks_width=picks_width, load=False).run(mode=mode)
    fake = start(width="native", picks_width=picks_width)
    after = fake.run(mode=mode)
    assert torch.equal(before, after)
    assert fake.launches == []  # neither FlashMLA entry, nor the gather before one
    phase = "decode" if mode in ("DECODE", "TARGET_VERIFY") else "prefill"
    assert reasons() == {(phase, 8, "cpu", "asked")}
    assert fake.layer.buffer.shape[1] == (8 if picks_width else 64)
    assert fake.returned.shape[1] == fake.layer.buffer.shape[1]  # the width that the caller allocated


def test_queries_and_sinks_are_views(start, monkeypatch):
    fake, seen = start(width="native"), []
    from headfit import kernels

    choose = kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda call, name=None: (seen.append(call), choose(call, name))[1])
    fake.run(mode="DECODE")
    assert seen[0].q.data_ptr() == fake.layer.buffer.data_ptr()
    assert seen[0].attn_sink.data_ptr() == fake.layer.sink.data_ptr()
    assert seen[0].attn_sink.shape == (8,)


@pytest.mark.parametrize("picks_width", [False, True])
def test_without_a_measurement_the_default_leaves_hopper_alone(start, picks_width):
    fake = start(picks_width=picks_width)
    fake.run(mode="EXTEND")
    assert [launch[:2] for launch in fake.launches] == [("gathered", 64)]
    fake.run(mode="DECODE")
    assert [launch[:2] for launch in fake.launches] == [("flashmla", 64)]
    assert {key.reason for key in hooks.calls()} == {"not_measured"}


def test_the_dspark_draft_stays_padded(start):
    fake = start(width="native")
    fake.run(mode="DECODE", layer=fake.draft)
    assert [launch[:2] for launch in fake.launches] == [("flashmla", 64)]
    assert hooks.calls() == {}


@pytest.mark.parametrize("picks_width", [False, True])
def test_a_breakable_graph_keeps_its_buffers(start, picks_width):
    fake = start(width="native", picks_width=picks_width)
    fake.in_graph = True
    fake.run(mode="EXTEND")
    assert fake.layer.buffer.shape[1] == 64
    assert fake.returned.shape[1] == 64


@pytest.mark.parametrize(
    ("rows", "mode", "original", "graph", "width", "rule"),
    [
        (96, "EXTEND", None, False, 16, "unpadded"),
        (65, "MIXED", None, False, 16, "unpadded"),
        (65, "SPLIT_PREFILL", None, False, 16, "unpadded"),
        (64, "EXTEND", None, False, 64, "rows"),
        (96, "TARGET_VERIFY", None, False, 64, "mode"),
        (96, "DRAFT_EXTEND_V2", None, False, 64, "mode"),
        (96, "DECODE", None, False, 64, "mode"),
        (96, "EXTEND", "IDLE", False, 64, "original_mode"),
        (96, "EXTEND", "TARGET_VERIFY", False, 64, "original_mode"),
        (96, "EXTEND", None, True, 64, "graph"),
    ],
)
@pytest.mark.parametrize("width_setting", [None, "sm12x-prefill"])
def test_the_published_gate_on_sm12x(start, monkeypatch, rows, mode, original, graph, width, rule, width_setting):
    with_flashinfer(monkeypatch)
    before = start(chip=(12, 0), tp=4, load=False).run(rows, mode, original)
    fake = start(width=width_setting, chip=(12, 0), tp=4)
    fake.in_graph = graph
    assert torch.equal(fake.run(rows, mode, original), before)
    assert [launch[:2] for launch in fake.launches] == [("flashinfer", width)]
    assert {key.reason for key in hooks.calls()} == {rule}


def test_a_head_count_that_the_installed_flashinfer_lacks_keeps_the_pad(start, monkeypatch):
    with_flashinfer(monkeypatch)
    fake = start(chip=(12, 0), tp=8)
    fake.run(96)
    assert [launch[1] for launch in fake.launches] == [64]
    assert {key.reason for key in hooks.calls()} == {"heads"}


def test_the_row_split_is_read_and_not_copied(start, monkeypatch):
    with_flashinfer(monkeypatch, row_split=128)
    fake = start(chip=(12, 0), tp=4)
    fake.run(96)
    assert [launch[1] for launch in fake.launches] == [64]


def test_native_on_sm12x_uses_what_each_side_lists(start, monkeypatch):
    with_flashinfer(monkeypatch, decode=(8, 16, 32, 64, 128))
    fake = start(width="native", chip=(12, 0), tp=8)
    fake.run(3, "DECODE")
    assert [launch[1] for launch in fake.launches] == [8]
    fake.run(96)
    assert [launch[1] for launch in fake.launches] == [16]


def test_a_captured_graph_gets_back_the_width_that_it_was_captured_with(start, monkeypatch):
    with_flashinfer(monkeypatch)
    fake = start(width="native", chip=(12, 0), tp=4)
    fake.in_graph = True
    fake.run(96)
    assert [launch[1] for launch in fake.launches] == [16]
    assert fake.returned.shape[1] == 64


def test_an_unreadable_flashinfer_changes_nothing(start, monkeypatch):
    found = Capability.unreadable("flashinfer_sm120", (12, 0), "gone")
    monkeypatch.setattr("headfit.probes.flashinfer_capability", lambda cc: found)
    sglang_calls._capability.cache_clear()
    fake = start(chip=(12, 0), tp=4)
    fake.run(96)
    assert [launch[1] for launch in fake.launches] == [64]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"width": "padded"}, "HEADFIT_WIDTH=padded"), ({"switch": "0"}, "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS")],
)
def test_switched_off_it_wraps_nothing_and_says_so(start, caplog, settings, said):
    with caplog.at_level(logging.INFO, logger="headfit"):
        start(**settings)
    assert HookRegistry._hooks == {}
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_one_line_says_what_was_wrapped(start, caplog):
    with caplog.at_level(logging.INFO, logger="headfit"):
        start(width="native", picks_width=True)
        sglang.register()
    (record,) = caplog.records
    for name in (
        "MQALayer.forward",
        "MQALayer._kernel_num_heads",
        "flash_mla_with_kvcache_sm120",
        "HEADFIT_WIDTH=native",
    ):
        assert name in record.getMessage()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda f: setattr(f.model.MQALayer, "forward", lambda self, hidden: None), "MQALayer.forward takes"),
        (lambda f: sys.modules.__setitem__("sglang.srt.models.deepseek_v4", None), "deepseek_v4"),
        (lambda f: setattr(f.dspark, "DSparkAttention", None), "DSparkAttention.forward is not there"),
    ],
)
def test_a_changed_sglang_is_left_as_it_was(start, caplog, broken, said):
    fake = start(load=False)
    broken(fake)
    with caplog.at_level(logging.INFO, logger="headfit"):
        sglang.register()
    assert HookRegistry._hooks == {}
    assert "nothing installed" in caplog.text
    assert said in caplog.text


def test_a_changed_kernel_skips_its_family_only(start, caplog, monkeypatch):
    fake = start(load=False, picks_width=True)
    monkeypatch.setattr(fake.kernel, "flash_mla_with_kvcache", lambda q, cache: None)
    with caplog.at_level(logging.INFO, logger="headfit"):
        sglang.register()
    HookRegistry.apply_hooks()
    assert "skipped: SM90, SM100: sgl_kernel.flash_mla.flash_mla_with_kvcache takes" in caplog.text
    assert any(path.endswith("sm120") for path in HookRegistry._hooks)
    sglang_calls.state.compute_capability, sglang_calls.state.backends = (9, 0), ("cpu",)
    sglang_calls.state.explicit = True
    monkeypatch.setattr(fake.kernel, "flash_mla_with_kvcache", lambda **k: (torch.zeros(3, 1, 64, 512), None))
    fake.run(mode="DECODE")
    assert fake.layer.buffer.shape[1] == 64  # no width is promised that nobody would serve


def test_an_unknown_version_is_left_as_it_was(start, caplog, monkeypatch):
    start(load=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.5.24")
    with caplog.at_level(logging.INFO, logger="headfit"):
        sglang.register()
    assert HookRegistry._hooks == {}
    assert "sglang 0.5.24 is outside 0.5.16 to 0.5.23" in caplog.text


def test_a_bad_setting_is_named_and_the_server_starts(start, caplog):
    with caplog.at_level(logging.INFO, logger="headfit"):
        start(width="narrow")
    assert HookRegistry._hooks == {}
    assert "HEADFIT_WIDTH: got 'narrow'" in caplog.text


def test_off_again_means_the_very_same_functions(start):
    fake = start(load=False, picks_width=True)
    owners = (fake.model.MQALayer, fake.dspark.DSparkAttention, fake.kernel, fake.sm120_module)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        sglang.register()
        HookRegistry.apply_hooks()
        assert [dict(vars(owner)) for owner in owners] != before
        assert sglang.unregister() == []
        assert [dict(vars(owner)) for owner in owners] == before


def test_two_plugins_on_one_function(start):
    fake, seen = start(load=False, width="native"), []

    def theirs(original, *args, **kwargs):
        seen.append("theirs")
        return original(*args, **kwargs)

    target = "sglang.srt.models.deepseek_v4.MQALayer.forward"
    HookRegistry.register(target, theirs)
    sglang.register()
    HookRegistry.apply_hooks()
    state = sglang_calls.state
    state.compute_capability, state.backends, state.gpu = (9, 0), ("cpu",), ""
    on = fake.run(mode="DECODE")
    assert fake.launches == []
    assert sglang.unregister() == [target]  # their wrapper stands on ours: left, and ours is inert
    off = fake.run(mode="DECODE")
    assert [launch[:2] for launch in fake.launches] == [("flashmla", 64)]
    assert torch.equal(on, off)
    assert seen == ["theirs", "theirs"]


def test_importing_the_plugin_imports_no_engine():
    assert not any(name.startswith("sglang.") for name in vars(sglang))


def test_another_cache_layout_stays_with_the_engine(start):
    fake = start(width="native")
    fake.attention.pages = torch.zeros(3, 4, 1, 528, dtype=torch.uint8)
    with pytest.raises(ValueError, match="584"):  # the stand-in kernel cannot read it either; it was asked, not ours
        fake.run(mode="DECODE")
    assert [launch[:2] for launch in fake.launches] == [("flashmla", 64)]
