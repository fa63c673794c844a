"""A planted bug must be caught: each wrong backend of ``planted_bugs`` fails the check of its sentence.

The unspoilt wrapper passes the same checks, so a failure is the bug's own.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from planted_bugs import BUGS

from headfit import checks, kernels
from headfit.kernels import cpu
from headfit.testing import CHECKS, conformance_cases, run_conformance

NAME = "planted"


def register(monkeypatch, run) -> None:
    module = ModuleType("headfit_planted_backend")
    module.available = lambda: None
    module.unsupported = cpu.unsupported
    module.capability = cpu.capability
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = kernels.Backend(NAME, module.__name__, ("cpu",), "a test plants it")
    monkeypatch.setitem(kernels.REGISTRY, NAME, entry)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bug_is_caught(monkeypatch, bug):
    register(monkeypatch, bug.run)
    report = run_conformance(NAME, scale=bug.scale, seed=1, only=[bug.check])
    failed = [r for r in report.results if r.status == "failed"]
    assert failed, f"{bug.check} did not notice:\n{report}"
    assert not [r for r in report.results if r.status == "error"], report


def test_unspoilt_wrapper_passes(monkeypatch):
    register(monkeypatch, cpu.run)
    names = {bug.check for bug in BUGS.values() if bug.scale == "small"}
    report = run_conformance(NAME, scale="small", seed=1, only=names)
    assert report.ok, report


def test_every_check_of_a_backend_has_a_bug():
    """A check nobody saw fail may check nothing. Listed are those that hold the code before a backend."""
    conformance_cases()
    before_backends = {"bad_input", "bad_input_without_rows", "default_scale", "fp8_view", "no_rows"}
    shared = {"unusual_q_strides": "head_slice_views", "odd_page_stride": "page_strides"}
    on_cuda = {name for name, check in CHECKS.items() if check.cuda}
    assert set(CHECKS) - on_cuda - before_backends - set(shared) == {bug.check for bug in BUGS.values()}


@pytest.mark.parametrize("rule", ["attn_sink", "lengths", "indices", "output"])
def test_a_missing_rule_is_caught(monkeypatch, rule):
    """Without one of the argument checks, the table of bad inputs fails."""
    accepted = {
        "attn_sink": lambda value, h_q, device: value,
        "lengths": lambda name, value, count, device: value,
        "indices": lambda name, value, lead, shape, device: value,
        "output": lambda out, shape, q: out,
    }
    register(monkeypatch, lambda call: None)
    monkeypatch.setattr(checks, rule, accepted[rule])
    report = run_conformance(NAME, scale="small", seed=1, only=["bad_input"])
    assert len(report.failures) == len(report.results), report
