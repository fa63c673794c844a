"""Which kernel serves an engine's attention call, and at which width: one table of measured wins, one pure function.

Belongs here: `Win`, the table, `route`. Does not belong here: engine names, tensors, device queries, environment reads.

An engine pads because its kernel takes 64 or 128 heads only. There are two ways out: its own kernel at a narrower
width, where that kernel's capability lists one, and headfit's kernels, which take any. The second is faster at some
sizes and slower at others, so by default a call is taken away from the engine only where the table has a measurement
that says it pays; ``HEADFIT_WIDTH=native`` takes every call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from headfit.capability import DECODE_MODES, Call, Capability, is_sm12x
from headfit.width import NoLegalWidthError, Policy, plan_width

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Win:
    """A measured region in which a headfit backend beats what the engine would run.

    ``major``: of the compute capability. ``heads``, ``rows``: inclusive bounds. ``evidence``: card and figures.
    """

    backend: str
    major: int
    phase: Phase
    heads: tuple[int, int]
    rows: tuple[int, int]
    evidence: str

    def holds(self, call: Call, phase: Phase) -> bool:
        """Whether the call lies in the region."""
        return (
            self.phase == phase
            and self.heads[0] <= call.n_local <= self.heads[1]
            and self.rows[0] <= call.rows <= self.rows[1]
        )


ANY_ROWS: Final = (0, 1 << 30)

# Against FlashMLA at 64 heads, which is the fastest legal route of both engines at any h_q <= 64 on SM90.
WINS: Final[tuple[Win, ...]] = ()


@dataclass(frozen=True)
class Route:
    """Where a call goes.

    ``kernel``: ``"engine"``, or the headfit backend. ``width``: heads to launch. ``rule``: a word to count under.
    ``reason``: a sentence.
    """

    kernel: str
    width: int
    rule: str
    reason: str

    @property
    def ours(self) -> bool:
        """Whether a headfit kernel runs it."""
        return self.kernel != "engine"


def phase_of(call: Call) -> Phase:
    """Decode, target-verify and idle calls are decode, all others prefill; a rewritten batch counts as what it was."""
    return "decode" if {call.mode, call.original_mode or call.mode} & DECODE_MODES else "prefill"


def is_off(policy: Policy) -> bool:
    """Whether this policy can change nothing, so that there is nothing to install."""
    return policy.kind == "padded" or not policy.enabled


def measured(backends: Iterable[str], major: int, call: Call, phase: Phase, wins: tuple[Win, ...] = WINS) -> Win | None:
    """The measurement that says a backend of ``backends`` should take the call, best backend first; or None."""
    for name in backends:
        for win in wins:
            if win.backend == name and win.major == major and win.holds(call, phase):
                return win
    return None


def wins_everywhere(backends: Iterable[str], major: int, n_local: int, wins: tuple[Win, ...] = WINS) -> bool:
    """Whether one backend was measured to win both phases at ``n_local`` heads, whatever the row count."""
    for name in backends:
        held = {
            win.phase
            for win in wins
            if (win.backend, win.major, win.rows) == (name, major, ANY_ROWS) and win.heads[0] <= n_local <= win.heads[1]
        }
        if held == {"prefill", "decode"}:
            return True
    return False


@functools.lru_cache(maxsize=8192)  # the same few shapes come back for every layer of every step
def route(
    call: Call,
    engine_width: int,
    capability: Capability | None,
    compute_capability: tuple[int, int] | None,
    backends: tuple[str, ...],
    policy: Policy,
    explicit: bool,
    wins: tuple[Win, ...] = WINS,
) -> Route:
    """Where ``call`` goes. Pure.

    Args:
        call: what the engine runs.
        engine_width: heads that the engine would launch.
        capability: of the engine's own kernel; None where nothing is known about it, which leaves it as it is.
        compute_capability: of the device.
        backends: headfit's own backends usable here, best first.
        policy: from the environment.
        explicit: whether the user asked for this policy, rather than it being the default.
        wins: the table.

    Never wider than the engine's width, except where the engine's own kernel would refuse that width.
    """
    if is_off(policy):
        return Route("engine", engine_width, "off", f"{policy.origin} changes nothing")
    if is_sm12x(compute_capability):
        return _sm12x(call, engine_width, capability, policy, explicit)
    if policy.kind != "native":
        return Route("engine", engine_width, "chip", f"{policy.origin} is for compute capability 12.x")
    if call.n_local >= engine_width and (capability is None or engine_width in _listed(call, capability)):
        return Route("engine", engine_width, "no_pad", "the engine launches just the owned heads")
    phase = phase_of(call)
    win = measured(backends, (compute_capability or (0, 0))[0], call, phase, wins)
    if win is not None:
        return Route(win.backend, call.n_local, "measured", f"measured to be faster: {win.evidence}")
    if explicit and backends:
        return Route(backends[0], call.n_local, "asked", f"{policy.origin}")
    if explicit and capability is not None and call.n_local in _listed(call, capability):
        return Route("engine", call.n_local, "native", f"{capability.family} takes {call.n_local} heads in {phase}")
    if not backends:
        return Route("engine", engine_width, "no_kernel", "no headfit kernel runs here")
    where = f"{call.n_local} heads, {call.rows} rows, {phase}"
    return Route("engine", engine_width, "not_measured", f"no measurement says that {backends[0]} pays at {where}")


def _listed(call: Call, capability: Capability) -> frozenset[int]:
    return capability.heads(phase_of(call)) if capability.fork == "entry" else capability.heads("prefill")


def _sm12x(call: Call, engine_width: int, capability: Capability | None, policy: Policy, explicit: bool) -> Route:
    """The engine's FlashInfer, by the published gate unless the user asked for more; never a width it would refuse."""
    if capability is None:
        return Route("engine", engine_width, "unreadable", "nothing is known about the engine's kernel")
    if policy.kind == "native" and not explicit:
        policy = Policy.sm12x_prefill(origin="the default on compute capability 12.x")
    try:
        decision = plan_width(call, capability, policy)
    except NoLegalWidthError as error:
        return Route("engine", engine_width, "heads", str(error))
    if decision.width < engine_width:
        return Route("engine", decision.width, decision.rule, decision.reason)
    refused = engine_width not in capability.heads(decision.side) and not capability.problems
    if decision.width > engine_width and refused:
        # The engine narrowed by its own rule to a count that the installed release of the kernel aborts on.
        wider = min((h for h in capability.heads(decision.side) if h >= call.n_local), default=engine_width)
        return Route("engine", wider, "legality", f"{decision.reason}; {engine_width} heads would be refused")
    return Route("engine", engine_width, decision.rule, decision.reason)
