"""The cases of a run in several processes: a GPU backend spends its time compiling and launching on one CPU core each.

Does not belong here: what a case is and what a result says (``runner``).
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from headfit import kernels
from headfit.testing.pages import ROUTES
from headfit.testing.runner import CHECKS, Case, CaseResult, Setup, conformance_cases, run_counted

Outcome = tuple[CaseResult, Counter[str]]
# Started first, so that none of them is alone at the end: many binaries, or much data.
SLOW = (
    "every_head_count",
    "random_calls",
    "many_rows",
    "width_exact",
    "page_sizes",
    "no_copy",
    "huge_cache",
    "page_strides",
    "strided_rows",
    "repeat_exact",
)


def run_named(check: str, route: str, setup: Setup) -> Outcome:
    """Run the case of that name; in a worker, where functions of checks do not travel but names do."""
    conformance_cases(setup.device, setup.scale, [check])  # registers
    return run_counted(Case(CHECKS[check], ROUTES[route]), setup)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    case: Case | None = None


def run_in_processes(
    cases: Sequence[Case], setup: Setup, jobs: int, run: Callable[[str, str, Setup], Outcome] = run_named
) -> Iterator[Outcome]:
    """Run each case in one of ``jobs`` spawned processes; outcomes come as they are ready.

    A process that dies makes its case an error, and another takes its place. One that reports an error on a GPU is
    replaced too: after an illegal access every later call of that process would fail. ``run`` must be importable by
    name in a new process; the main module of the program must be guarded by ``if __name__ == "__main__"``.
    """
    waiting = deque(sorted(cases, key=lambda c: SLOW.index(c.check.name) if c.check.name in SLOW else len(SLOW)))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < min(jobs, len(cases)):
                workers.append(_start(setup, jobs, run))
            for worker in workers:
                if worker.case is None and waiting:
                    _give(worker, waiting.popleft())
            for worker in [w for w in workers if w.case is None]:
                _retire(worker, workers)
            ready = wait([w.pipe for w in workers]) if workers else []
            for worker in [w for w in workers if w.pipe in ready]:
                outcome, alive = _take(worker)
                if not alive or (outcome[0].status == "error" and setup.device.type == "cuda"):
                    _retire(worker, workers)
                yield outcome
    finally:
        for worker in list(workers):
            worker.process.terminate()
            _retire(worker, workers)


def _start(setup: Setup, jobs: int, run: Callable[[str, str, Setup], Outcome]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    process = context.Process(target=_work, args=(theirs, setup, threads, run), daemon=True)
    process.start()
    theirs.close()  # or the end of the process would not be the end of the pipe
    return _Worker(process, ours)


def _work(pipe: Connection, setup: Setup, threads: int, run: Callable[[str, str, Setup], Outcome]) -> None:
    torch.set_num_threads(threads)
    kernels.load(setup.backend)
    while True:
        try:
            check, route = pipe.recv()
        except EOFError:
            return
        pipe.send(run(check, route, setup))


def _give(worker: _Worker, case: Case) -> None:
    worker.case = case
    try:
        worker.pipe.send((case.check.name, case.route.name))
    except OSError:
        return  # it died before its first case: reading says so


def _take(worker: _Worker) -> tuple[Outcome, bool]:
    """The outcome of a worker whose pipe is readable, and whether the process still serves."""
    case, worker.case = worker.case, None
    if case is None:
        raise RuntimeError("a worker without a case wrote")
    try:
        outcome: Outcome = worker.pipe.recv()
        return outcome, True
    except (EOFError, OSError):
        worker.process.join()
        message = f"the process of this case ended with exit code {worker.process.exitcode}"
        return (CaseResult(case.id, case.check.sentence, "error", message, 0.0), Counter()), False


def _retire(worker: _Worker, workers: list[_Worker]) -> None:
    workers.remove(worker)
    worker.pipe.close()
    worker.process.join(10)  # it ends when its pipe does
    if worker.process.is_alive():
        worker.process.kill()
