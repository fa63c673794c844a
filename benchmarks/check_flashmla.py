"""Hold the flashmla backend to the contract on the GPU that is here, and say how its launches compare.

    python benchmarks/check_flashmla.py [--library PATH/_flashmla_C.abi3.so] [--seconds 80] [--json OUT.json]

Runs what the conformance suite cannot ask of a backend without batch invariance (bits over head counts and repeats, a
captured graph replayed with other lists and lengths, drawn calls), then the suite itself on CUDA tensors; what the
backend refuses by name is counted apart. Exits 1 if anything failed, 2 if nothing could be run. Ends by itself when the
seconds are spent and says how much was not reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import headfit
from headfit import kernels
from headfit.kernels import flashmla, flashmla_copies
from headfit.testing import FULL, ROUTES, CacheSpec, CallSpec, RandomDraw, build, conformance_cases, draw_spec
from headfit.testing.checks_shapes import hold
from headfit.testing.runner import Setup, run_case

REFUSAL = "split plan depends on"


class Run:
    """Outcomes, and the clock that they run against."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.passed: list[str] = []
        self.refused: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: list[str] = []
        self.broken = False

    def attempt(self, name: str, job: Callable[[], None]) -> None:
        """Run one job; after a CUDA error nothing that follows means anything."""
        if self.broken or time.monotonic() > self.end:
            self.skipped.append(name)
            return
        try:
            job()
            torch.cuda.synchronize()
            self.passed.append(name)
        except Exception as error:
            if REFUSAL in str(error):
                self.refused.append(name)
                return
            self.failed[name] = f"{type(error).__name__}: {error}"
            self.broken = "CUDA error" in str(error)
            print(f"FAILED {name}: {self.failed[name][:2000]}", flush=True)


def suite(run: Run, setup: Setup) -> None:
    """The conformance suite; a case that makes a batch-invariant call counts as refused."""
    for case in conformance_cases("cuda", setup.scale):

        def job(case=case) -> None:
            result = run_case(case, setup)
            if result.status != "passed":
                raise RuntimeError(result.message)

        run.attempt(case.id, job)


def random_calls(run: Run, setup: Setup, count: int) -> None:
    """Drawn calls without batch invariance."""
    draw = RandomDraw(random.Random(setup.seed))
    for number in range(count):
        spec = draw_spec(draw, draw.choice(list(ROUTES.values())), FULL)
        spec = dataclasses.replace(spec, batch_invariant=False)
        run.attempt(f"random call {number}: {spec}", lambda spec=spec: hold(setup, spec))


def exactness(run: Run, setup: Setup) -> None:
    """Bits over head counts and repeats, for few rows (split) and many."""
    for route in ROUTES.values():
        for rows in (3, 200):
            caches = (CacheSpec(128, 64, 40), CacheSpec(500, 64, 90))[: route.caches]
            spec = CallSpec(route, batch=rows, heads=128, caches=caches, lengths="random", sink="edges", seed=rows)

            def job(spec=spec) -> None:
                call = build(spec, "cuda")
                full = call.run(setup.backend)
                full.require_same(call.run(setup.backend), "the same call again")
                axis = call.q.dim() - 2
                for heads in (1, 8, 16, 17, 32, 63, 64, 65, 100):
                    q = call.q.narrow(axis, 0, heads)
                    part = call.run(setup.backend, q=q, attn_sink=call.sink[:heads])
                    full.require_same(part, f"{heads} heads against 128", heads=heads)

            run.attempt(f"width and repeat, {route.name}, {rows} rows", job)


def graph(run: Run) -> None:
    """Capture at one set of lists and lengths, replay with another: bits as in an eager call."""

    def job() -> None:
        spec = CallSpec(
            ROUTES["v4_two_caches"], batch=64, heads=8, caches=(CacheSpec(128, 64, 40), CacheSpec(500, 64, 90)), seed=9
        )
        call = build(dataclasses.replace(spec, lengths="random"), "cuda")
        arguments = call.arguments() | {"backend": "flashmla"}
        headfit.flash_mla_with_kvcache(**arguments)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out, lse = headfit.flash_mla_with_kvcache(**arguments)
        for cache in call.caches:
            cache.indices.copy_(cache.indices.flip(0).contiguous())
            cache.lengths.copy_((cache.lengths * 7 + 3) % (cache.indices.shape[-1] + 1))
        captured.replay()
        wanted_out, wanted_lse = headfit.flash_mla_with_kvcache(**arguments)
        torch.cuda.synchronize()
        if not (torch.equal(out.view(torch.int16), wanted_out.view(torch.int16)) and torch.equal(lse, wanted_lse)):
            raise AssertionError("a replayed graph differs from an eager call with the same lists and lengths")

    run.attempt("a captured graph replays with other lists and lengths", job)


def times(run: Run) -> list[dict[str, object]]:
    """Milliseconds of whole calls through the adapter, marshalling included; CUDA events, median of 20."""
    found: list[dict[str, object]] = []
    for rows, heads in ((64, 8), (64, 64), (1024, 8), (1024, 64)):

        def job(rows=rows, heads=heads) -> None:
            caches = (CacheSpec(128, 64, 200), CacheSpec(512, 64, 128))
            spec = CallSpec(ROUTES["v4_two_caches"], batch=rows, heads=heads, caches=caches, invalid=0.0, seed=1)
            call = build(spec, "cuda")
            record: dict[str, object] = {"rows": rows, "heads": heads, "lanes": [128, 512], "layout": "v4"}
            for name in ("flashmla", "triton"):
                if name in headfit.backends():
                    arguments = call.arguments() | {"backend": name}
                    record[f"{name}_ms"] = median_ms(lambda a=arguments: headfit.flash_mla_with_kvcache(**a))
            found.append(record)
            print(json.dumps(record), flush=True)

        run.attempt(f"times, {rows} rows, {heads} heads", job)
    return found


def median_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Median over ``repeats``, each between two events."""
    for _ in range(3):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return round(sorted(a.elapsed_time(b) for a, b in pairs)[repeats // 2], 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="a _flashmla_C.abi3.so that no installed package brings")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", choices=("small", "full"), default="small", help="of the conformance suite")
    parser.add_argument("--json", type=Path, help="where to write the outcome")
    options = parser.parse_args()
    try:
        name = flashmla.load_library(options.library) if options.library else flashmla_copies.find().name
        kernels.load("flashmla")
    except (flashmla_copies.NoCopyError, kernels.BackendUnavailable) as error:
        print(f"nothing to check: {error}")
        return 2
    print(f"{name} on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(flashmla.capability(torch.cuda.get_device_capability()).source("heads"), flush=True)
    run, setup = Run(options.seconds), Setup("flashmla", torch.device("cuda"), options.scale, options.seed)
    exactness(run, setup)
    graph(run)
    measured = times(run)
    random_calls(run, setup, 30)
    suite(run, setup)
    print(
        f"{len(run.passed)} passed, {len(run.failed)} failed, {len(run.refused)} refused (batch_invariant, graphs), "
        f"{len(run.skipped)} not reached"
    )
    if options.json:
        outcome = {
            "copy": name,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "seed": options.seed,
            "scale": options.scale,
            "passed": run.passed,
            "refused": run.refused,
            "failed": run.failed,
            "not_reached": run.skipped,
            "times": measured,
        }
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
