"""Conformance cases shared by processes: the same report as in one, and a process that dies is an error, not a hang."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from headfit.testing import CaseResult, Setup, conformance_cases, run_conformance
from headfit.testing.__main__ import main
from headfit.testing.workers import Outcome, run_in_processes

SOME = ["index_strides", "no_rows", "one_list_empty", "fp8_view"]


@pytest.fixture(autouse=True)
def _new_processes_find_this_file(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def test_the_same_report_as_in_one_process():
    seen: list[CaseResult] = []
    alone = run_conformance("cpu", scale="small", seed=3, only=SOME)
    shared = run_conformance("cpu", scale="small", seed=3, only=SOME, progress=seen.append, jobs=2)
    assert shared.ok
    assert [r.id for r in shared.results] == [r.id for r in alone.results]
    assert sorted(r.id for r in seen) == sorted(r.id for r in alone.results)
    assert shared.variants == alone.variants
    assert shared.seconds > 0


def dies(check: str, route: str, setup: Setup) -> Outcome:
    """What a kernel that takes its process with it looks like."""
    if check == "one_list_empty":
        os._exit(7)
    status = "failed" if check == "fp8_view" else "passed"
    return CaseResult(f"{check}[{route}]", "", status, str(os.getpid()), 0.0), Counter({check: 1})


def test_a_process_that_dies_is_an_error_of_its_case():
    cases = conformance_cases("cpu", "full", SOME)
    setup = Setup("cpu", torch.device("cpu"), "full", 1)
    outcomes = {result.id: result for result, _ in run_in_processes(cases, setup, 2, dies)}
    assert sorted(outcomes) == sorted(case.id for case in cases)
    wrong = {name: r for name, r in outcomes.items() if r.status == "error"}
    assert list(wrong) == ["one_list_empty[v4_two_caches]"]
    assert "exit code 7" in wrong["one_list_empty[v4_two_caches]"].message
    assert {r.status for name, r in outcomes.items() if name.startswith("fp8_view")} == {"failed"}


def cannot_start(check: str, route: str, setup: Setup) -> Outcome:
    raise SystemExit(3)


def test_processes_that_all_die_end_the_run():
    cases = conformance_cases("cpu", "small", ["no_rows"])[:2]
    setup = Setup("cpu", torch.device("cpu"), "small", 1)
    outcomes = [result for result, _ in run_in_processes(cases, setup, 2, cannot_start)]
    assert [r.status for r in outcomes] == ["error"] * 2


def errs(check: str, route: str, setup: Setup) -> Outcome:
    status = "error" if check == "no_rows" else "passed"
    return CaseResult(f"{check}[{route}]", "", status, str(os.getpid()), 0.0), Counter()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_with_an_error_on_a_gpu_is_replaced(device):
    """No GPU is touched: the setup only names one."""
    cases = conformance_cases("cpu", "full", ["no_rows"])[:2]
    setup = Setup("cpu", torch.device(device), "full", 1)
    outcomes = [result for result, _ in run_in_processes(cases, setup, 1, errs)]
    assert [r.status for r in outcomes] == ["error"] * 2
    assert len({r.message for r in outcomes}) == (2 if device == "cuda" else 1)


def test_slow_checks_start_first():
    cases = conformance_cases("cpu", "full", ["no_rows", "random_calls", "every_head_count"])
    outcomes = run_in_processes(cases, Setup("cpu", torch.device("cpu"), "full", 1), 1, errs)
    order = [result.id.partition("[")[0] for result, _ in outcomes]
    assert order == sorted(order, key=["every_head_count", "random_calls", "no_rows"].index)


def test_the_command(capsys):
    assert main(["--backend", "cpu", "--scale", "small", "--seed", "3", "--jobs", "2", "--only", "no_rows"]) == 0
    assert "7 of 7 cases passed" in capsys.readouterr().out
    assert main(["--backend", "cpu", "--jobs", "0"]) == 2
    assert "jobs: got 0" in capsys.readouterr().err
