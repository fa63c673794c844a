"""Calls that a backend refuses by name: a result of their own, which hides no wrong result and no broken backend."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headfit import kernels
from headfit.call import SparseCall
from headfit.kernels import cpu
from headfit.testing import (
    ROUTES,
    CallSpec,
    Case,
    CaseResult,
    Check,
    Report,
    Setup,
    build,
    conformance_cases,
    run_conformance,
)
from headfit.testing.__main__ import main
from headfit.testing.runner import run_case
from headfit.testing.workers import Outcome, run_in_processes, run_named

NAME = "picky"
MODULE = "headfit_picky_backend"


def packed_only(call: SparseCall) -> str | None:
    """Like a kernel of one layout that copies 16 bytes at a time."""
    if call.key_sets[0].layout != "v4":
        return f"takes packed v4 pages, got {call.key_sets[0].layout}"
    if any(stride % 8 for stride in call.q.stride()[:-1]):
        return "q has to step at multiples of 16 bytes"
    return None


def module(run=cpu.run, unsupported=packed_only) -> ModuleType:
    made = ModuleType(MODULE)
    made.available = lambda: None
    made.capability = cpu.capability
    made.run, made.unsupported = run, unsupported
    return made


def register(monkeypatch, made: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, MODULE, made)
    monkeypatch.setitem(kernels.REGISTRY, NAME, kernels.Backend(NAME, MODULE, ("cpu",), "a test plants it"))


def wrong(call: SparseCall) -> None:
    cpu.run(call)
    if call.rows:
        call.out[0, 0, 0, 0] += 1.0


def statuses(report: Report) -> dict[str, str]:
    return {r.id: r.status for r in report.results}


def test_refused_calls_are_counted_with_their_reasons(monkeypatch):
    register(monkeypatch, module())
    report = run_conformance(NAME, scale="small", seed=1, only=["any_topk", "accuracy"])
    assert statuses(report) == {
        "any_topk[v4_two_caches]": "passed",
        "any_topk[prefill_576]": "refused",
        **{f"accuracy[{route}]": "passed" for route in ("v4", "v4_two_caches")},
        **{f"accuracy[{r}]": "refused" for r in ("v32", "bf16_512", "bf16_576", "prefill_512", "prefill_576")},
    }
    assert report.ok
    assert not report.failures
    assert report.refusals()["prefill_576", "takes packed v4 pages, got bf16"] == 2
    text = str(report)
    assert "3 of 9 cases passed, 6 refused in" in text
    assert "refused 2 x prefill_576: takes packed v4 pages, got bf16" in text
    assert "refused 1 x v32: takes packed v4 pages, got v32" in text


def test_a_refused_part_is_no_end_of_the_case(monkeypatch):
    """The slices of wider buffers among which one is not aligned: the others run, and a wrong one fails the case."""
    taken: list[int] = []

    def counted(call: SparseCall) -> None:
        taken.append(call.h_q)
        cpu.run(call)

    register(monkeypatch, module(counted))
    report = run_conformance(NAME, seed=1, only=["head_slice_views"])
    assert statuses(report)["head_slice_views[v4]"] == "refused"
    assert report.refusals()["v4", "q has to step at multiples of 16 bytes"] == 1
    assert 32 in taken  # the slice after the refused one

    def wrong_after(call: SparseCall) -> None:
        (wrong if call.h_q == 32 else cpu.run)(call)

    register(monkeypatch, module(wrong_after))
    report = run_conformance(NAME, seed=1, only=["head_slice_views"])
    assert statuses(report)["head_slice_views[v4]"] == "failed"
    assert not report.ok


@pytest.mark.parametrize(
    ("check", "scale"),
    [("random_calls", "full"), ("out_views", "full"), ("width_exact", "small"), ("row_exact", "small")],
)
def test_a_wrong_result_fails_beside_refusals(monkeypatch, check, scale):
    """Odd head counts are refused; what runs is wrong at times."""
    calls = iter(range(10**6))

    def refuses(call: SparseCall) -> str | None:
        return packed_only(call) or ("takes no odd number of heads" if call.h_q % 2 else None)

    def at_times(call: SparseCall) -> None:
        (wrong if next(calls) % 3 == 2 else cpu.run)(call)

    register(monkeypatch, module(at_times, refuses))
    report = run_conformance(NAME, scale=scale, seed=1, only=[check])
    assert {s for name, s in statuses(report).items() if name.endswith("[v4]")} == {"failed"}
    assert not report.ok


def test_a_refusal_after_an_unjudged_call_is_an_error(monkeypatch):
    """The second call of a pair is refused, so that nobody looks at what the first one wrote."""
    calls = iter(range(10**6))
    register(monkeypatch, module(unsupported=lambda call: packed_only(call) or (None, "no more")[next(calls) % 2]))
    report = run_conformance(NAME, scale="small", seed=1, only=["fp8_view"])
    assert statuses(report)["fp8_view[v4]"] == "error"
    assert "no more" in report.failures[0].message
    assert not report.ok


def test_a_backend_that_takes_nothing_has_not_passed(monkeypatch):
    register(monkeypatch, module(unsupported=lambda call: "takes nothing"))
    report = run_conformance(NAME, scale="small", seed=1, only=["accuracy"])
    assert set(statuses(report).values()) == {"refused"}
    assert not report.failures
    assert not report.ok
    assert main(["--backend", NAME, "--scale", "small", "--only", "accuracy"]) == 1


def test_a_backend_that_cannot_run_is_an_error_and_no_refusal(monkeypatch):
    made = module()
    register(monkeypatch, made)

    def gone(setup, route):
        made.available = lambda: "the device fell off"
        setup.build(CallSpec(route)).run(NAME)

    result = run_case(Case(Check("gone", "", ("v4",), gone), ROUTES["v4"]), Setup(NAME, torch.device("cpu")))
    assert result.status == "error"
    assert "fell off" in result.message


def test_the_refusal_carries_what_unsupported_said(monkeypatch):
    register(monkeypatch, module())
    with pytest.raises(kernels.BackendUnavailable, match="takes packed v4 pages, got v32") as caught:
        build(CallSpec(ROUTES["v32"], seed=1)).run(NAME)
    assert caught.value.refused == {NAME: "takes packed v4 pages, got v32"}


def test_the_command_prints_refusals(monkeypatch, capsys):
    register(monkeypatch, module())
    assert main(["--backend", NAME, "--scale", "small", "--seed", "1", "--only", "any_topk"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^refused +[\d.]+ s  any_topk\[prefill_576\]$", out, re.M)
    assert "1 of 2 cases passed, 1 refused" in out
    assert "refused 1 x prefill_576: takes packed v4 pages, got bf16" in out


def in_a_new_process(check: str, route: str, setup: Setup) -> Outcome:
    sys.modules[MODULE] = module()
    kernels.REGISTRY[NAME] = kernels.Backend(NAME, MODULE, ("cpu",), "a test plants it")
    return run_named(check, route, replace(setup, backend=NAME))


def test_refusals_come_back_from_processes(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    setup = Setup("cpu", torch.device("cpu"), "small", 1)
    cases = conformance_cases("cpu", "small", ["any_topk"])
    report = Report(NAME, "cpu", "small", 1, [r for r, _ in run_in_processes(cases, setup, 2, in_a_new_process)])
    assert statuses(report) == {"any_topk[v4_two_caches]": "passed", "any_topk[prefill_576]": "refused"}
    assert report.refusals() == {("prefill_576", "takes packed v4 pages, got bf16"): 1}


def test_counts_of_a_report():
    results = [
        CaseResult(f"a[{route}]", "s", status, message, 0.0)
        for route, status, message in (
            ("v4", "passed", ""),
            ("v32", "refused", "why"),
            ("v4", "failed", "off"),
            ("bf16_512", "error", "trace"),
        )
    ]
    report = Report("x", "cpu", "full", 1, results)
    assert not report.ok
    assert [r.status for r in report.failures] == ["failed", "error"]
    assert "1 of 4 cases passed, 1 failed, 1 with an error, 1 refused in" in str(report)
    assert "REFUSED" not in str(report)
    assert Report("x", "cpu", "full", 1, results[:2]).ok
