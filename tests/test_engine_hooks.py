"""The machinery of the plug-ins: targets are checked before they are touched, and everything comes off again."""

from __future__ import annotations

import importlib
import logging
import sys
import types

import pytest

from headfit.engines import hooks
from headfit.engines.hooks import Patches, Target, TargetError


@pytest.fixture
def engine(monkeypatch):
    module = types.ModuleType("fake_engine")

    def plain(q, k_cache, *, indices=None):
        return "plain", q

    class Base:
        def inherited(self, x):
            return "base", x

    class Layer(Base):
        @classmethod
        def pad(cls, num_heads):
            return 64

        def forward(self, x, positions, forward_batch, extra=None):
            return "forward", x

    module.plain, module.Base, module.Layer = plain, Base, Layer
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    return module


@pytest.mark.parametrize(
    ("path", "parameters", "needs"),
    [
        ("fake_engine.plain", ("q", "k_cache"), ("indices",)),
        ("fake_engine.Layer.pad", ("num_heads",), ()),
        ("fake_engine.Layer.forward", ("x", "positions", "forward_batch"), ()),
        ("fake_engine.Layer.inherited", ("x",), ()),
    ],
)
def test_a_target_that_is_as_tested_is_found(engine, path, parameters, needs):
    found = hooks.resolve(Target(path, parameters, needs))
    assert found.name == path.rpartition(".")[2]
    assert found.inherited == path.endswith("inherited")


@pytest.mark.parametrize(
    ("path", "parameters", "needs", "said"),
    [
        ("fake_engine.gone", (), (), "is not there"),
        ("fake_engine_missing.plain", (), (), "is not there"),
        ("fake_engine.plain", ("query",), (), r"takes \(q, k_cache, indices\), tested was \(query"),
        ("fake_engine.plain", ("q", "k_cache"), ("attn_sink",), "takes no attn_sink"),
        ("fake_engine.Layer.forward", ("x",), (), "requires positions, forward_batch"),
        ("fake_engine.plain", ("**kwargs",), (), "takes"),
    ],
)
def test_anything_else_is_refused_with_the_difference(engine, path, parameters, needs, said):
    with pytest.raises(TargetError, match=said):
        hooks.resolve(Target(path, parameters, needs))


def test_a_module_that_fails_in_any_way_is_a_missing_target(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("raise SystemExit('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TargetError, match=r"half_installed\.run is not there \(SystemExit"):
        hooks.resolve(Target("half_installed.run", ()))


def test_patches_restore_the_very_same_objects(engine):
    patches, layer = Patches(), engine.Layer
    before = dict(vars(layer)), engine.plain
    patches.replace(hooks.resolve(Target("fake_engine.plain", ("q", "k_cache"))), lambda *a, **k: "ours")
    patches.replace(hooks.resolve(Target("fake_engine.Layer.pad", ("num_heads",))), classmethod(lambda cls, n: n))
    patches.replace(hooks.resolve(Target("fake_engine.Layer.inherited", ("x",))), lambda self, x: "ours")
    assert (engine.plain(1, 2), layer.pad(8), layer().inherited(1)) == ("ours", 8, "ours")
    assert engine.Base().inherited(1) == ("base", 1)
    assert patches.restore() == []
    assert (dict(vars(layer)), engine.plain) == before


def test_somebody_elses_wrapper_is_left_standing(engine):
    patches = Patches()
    patches.replace(hooks.resolve(Target("fake_engine.plain", ("q", "k_cache"))), lambda *a, **k: "ours")
    ours, engine.plain = engine.plain, lambda *a: ("theirs", ours(*a))
    assert patches.restore() == ["fake_engine.plain"]
    assert engine.plain(1, 2) == ("theirs", "ours")


def test_a_callback_comes_right_after_the_import_and_once(tmp_path, monkeypatch):
    (tmp_path / "late_engine.py").write_text("def run(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    hooks.when_imported("late_engine", lambda module: seen.append(module.run(3)))
    assert "late_engine" not in sys.modules
    assert seen == []
    finders = len(sys.meta_path)
    module = importlib.import_module("late_engine")
    assert (seen, len(sys.meta_path)) == ([3], finders - 1)
    assert importlib.reload(module).run(4) == 4
    hooks.when_imported("late_engine", lambda module: seen.append("at once"))
    assert seen == [3, "at once"]
    monkeypatch.delitem(sys.modules, "late_engine")


def test_a_watch_can_be_cancelled(tmp_path, monkeypatch):
    (tmp_path / "late_engine_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    hooks.when_imported("late_engine_two", seen.append)()
    importlib.import_module("late_engine_two")
    assert seen == []


def test_one_line_a_process(caplog, monkeypatch):
    monkeypatch.setattr(hooks, "_said", set())
    with caplog.at_level(logging.INFO, logger="headfit"):
        hooks.say_once("an engine", "first")
        hooks.say_once("an engine", "second")
        hooks.say_once("another", "third", warn=True)
    assert [record.getMessage().partition(", ")[2] for record in caplog.records] == [
        "an engine: first",
        "another: third",
    ]


def test_calls_are_counted_by_phase_width_kernel_and_reason():
    hooks.reset_calls()
    hooks.count("prefill", 8, "triton", "native")
    hooks.count("prefill", 8, "triton", "native")
    hooks.count("decode", 64, "flashmla", "slower")
    assert hooks.calls() == {("prefill", 8, "triton", "native"): 2, ("decode", 64, "flashmla", "slower"): 1}
    hooks.reset_calls()
    assert hooks.calls() == {}


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.5.15", False), ("0.5.16", True), ("0.5.16.post1", True), ("0.5.23", True), ("0.5.23rc1", True),
        ("0.5.24", False), ("0.6.0", False), ("not a version", False), (None, False),
    ],
)  # fmt: skip
def test_versions_outside_the_tested_range_are_named(monkeypatch, version, fits):
    def installed(package):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    problem = hooks.version_problem("sglang", "0.5.16", "0.5.23")
    assert (problem is None) == fits
    assert fits or "sglang" in problem


@pytest.mark.parametrize("refused", [{"first": "takes 512 rows and more"}, {}])
def test_a_backend_that_refuses_a_call_leaves_it_to_the_next_one_that_cannot_run_does_not(monkeypatch, refused):
    """A route names a backend by shapes alone; a missing one is an error of the installation."""
    from headfit import kernels, ops

    asked = []

    def call(q, k_cache, *, backend, **rest):
        asked.append(backend)
        if backend == "first":
            raise kernels.BackendUnavailable("no", refused)
        return q, rest

    monkeypatch.setattr(ops, "flash_mla_with_kvcache", call)
    if refused:
        assert hooks.launch(("first", "second", "first"), 1, 2, out=3) == ((1, {"out": 3}), "second")
        assert asked == ["first", "second"]
        with pytest.raises(kernels.BackendUnavailable, match="first: takes 512 rows and more"):
            hooks.launch(("first",), 1, 2)
        with pytest.raises(kernels.BackendUnavailable, match="none was named"):
            hooks.launch((), 1, 2)
    else:
        with pytest.raises(kernels.BackendUnavailable):
            hooks.launch(("first", "second"), 1, 2)
