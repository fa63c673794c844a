"""The conformance suite, shipped with the package: what a backend must do, as checks that need no test framework.

A backend's author runs ``python -m headfit.testing --backend NAME --device cuda`` or calls :func:`run_conformance`.
Every check names the sentence of the contract that it protects; a report states the seed that repeats it.
Shapes come from :func:`draw_spec`, tensors from :func:`build`; benchmarks use the same two.
"""

from __future__ import annotations

from headfit.testing.build import build
from headfit.testing.calls import BuiltCall, CallSpec, Result
from headfit.testing.compare import ConformanceFailure, Truth, require_accurate, require_same_bits
from headfit.testing.draws import FULL, SMALL, Draw, Limits, RandomDraw, draw_spec
from headfit.testing.pages import ROUTES, CacheSpec, Route
from headfit.testing.runner import (
    CHECKS,
    Case,
    CaseResult,
    Check,
    Report,
    Setup,
    check,
    conformance_cases,
    run_conformance,
)

__all__ = [
    "CHECKS",
    "FULL",
    "ROUTES",
    "SMALL",
    "BuiltCall",
    "CacheSpec",
    "CallSpec",
    "Case",
    "CaseResult",
    "Check",
    "ConformanceFailure",
    "Draw",
    "Limits",
    "RandomDraw",
    "Report",
    "Result",
    "Route",
    "Setup",
    "Truth",
    "build",
    "check",
    "conformance_cases",
    "draw_spec",
    "require_accurate",
    "require_same_bits",
    "run_conformance",
]
