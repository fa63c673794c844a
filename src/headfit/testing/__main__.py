"""``python -m headfit.testing --backend NAME``: run the conformance suite, print what failed and what was refused.

Calls that a backend refuses by name are no failure; one that took none has not passed.
"""

from __future__ import annotations

import argparse
import sys

from headfit import kernels
from headfit.testing.runner import CaseResult, run_conformance


def _show(result: CaseResult) -> None:
    print(f"{result.status:7} {result.seconds:6.2f} s  {result.id}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse, run, print; 0 if the backend conforms, 1 if not, 2 if it cannot run here or a name is unknown."""
    parser = argparse.ArgumentParser(prog="python -m headfit.testing", description=__doc__)
    parser.add_argument("--backend", required=True, help=f"one of {', '.join(kernels.REGISTRY)}")
    parser.add_argument("--device", default="cpu", help="where the tensors lie: cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--scale", default="full", choices=("full", "small"), help="small: for the Triton interpreter")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run (default: a fresh seed, printed)")
    parser.add_argument("--only", nargs="+", default=None, metavar="CHECK", help="names of checks")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the cases (default: 1)")
    args = parser.parse_args(argv)
    try:
        report = run_conformance(args.backend, args.device, args.scale, args.seed, args.only, _show, args.jobs)
    except (ValueError, kernels.BackendUnavailable) as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
