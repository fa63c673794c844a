"""Every usable backend against every sentence of the contract; a new backend is covered by being registered.

The checks live in ``headfit.testing``. This file only spreads them over backends and devices, and lets Hypothesis draw
calls. ``HEADFIT_TEST_SEED`` repeats a run; a failure prints the seed.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headfit
from headfit import kernels
from headfit.testing import FULL, ROUTES, SMALL, Setup, conformance_cases, draw_spec
from headfit.testing.checks_shapes import hold
from headfit.testing.runner import fresh_seed, run_case

SEED = fresh_seed()


def _targets() -> list[tuple[str, str, str]]:
    """(backend, device, scale) for every usable backend and every device type that it names and that is here."""
    found = []
    for name in headfit.backends():
        for device in kernels.REGISTRY[name].device_types:
            if device == "cuda" and torch.cuda.is_available():
                found.append((name, device, "full"))
            if device == "cpu" and not (name != "cpu" and torch.cuda.is_available()):
                # a kernel that runs on CPU tensors but is not the CPU backend runs in an interpreter
                found.append((name, device, "full" if name == "cpu" else "small"))
    return found


TARGETS = _targets()
CASES = [
    pytest.param(case, Setup(backend, torch.device(device), scale, SEED), id=f"{backend}-{device}-{case.id}")
    for backend, device, scale in TARGETS
    for case in conformance_cases(device, scale)
]


@pytest.mark.parametrize(("case", "setup"), CASES)
def test_contract(case, setup):
    result = run_case(case, setup)
    if result.status == "refused":
        pytest.skip(f"{setup.backend} does not take it: {result.message}")
    if result.status != "passed":
        text = (
            f"{result.status}, protects: {result.sentence}\n{result.message}\nHEADFIT_TEST_SEED={setup.seed} repeats it"
        )
        pytest.fail(text, pytrace=False)


class HypothesisDraw:
    """Hypothesis as the source of choices for :func:`headfit.testing.draw_spec`."""

    def __init__(self, data):
        self._data = data

    def integer(self, low, high):
        return self._data.draw(st.integers(low, high))

    def choice(self, options):
        return self._data.draw(st.sampled_from(list(options)))


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize(("backend", "device", "scale"), TARGETS)
def test_drawn_calls(backend, device, scale, route):
    setup = Setup(backend, torch.device(device), scale, SEED)

    @settings(max_examples=setup.pick(30, 3), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data):
        hold(setup, draw_spec(HypothesisDraw(data), route, setup.pick(FULL, SMALL)))

    run()


def test_no_backend_is_left_out():
    """A registered backend that is usable here has cases; cpu always is."""
    assert {backend for backend, _, _ in TARGETS} == set(headfit.backends())
    assert "cpu" in headfit.backends()
