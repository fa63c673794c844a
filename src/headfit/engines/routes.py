"""Which kernel serves an engine's attention call, and at which width: one function over the measured table.

Belongs here: `route` and what the table (`headfit.kernels.crossover`) says against the kernel an engine would run. Does
not belong here: engine names, tensors, device queries, environment reads.

An engine pads because its kernel takes 64 or 128 heads only. There are two ways out: its own kernel at a narrower
width, where that kernel's capability lists one, and headfit's kernels, which take any. The second is faster at some
sizes and slower at others, so by default a call is taken away from the engine only where the table has a measurement
that says it pays; ``HEADFIT_WIDTH=native`` takes every call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal

from headfit.capability import DECODE_MODES, Call, Capability, is_sm12x
from headfit.kernels import crossover
from headfit.kernels.crossover import Point, Shape
from headfit.width import NoLegalWidthError, Policy, plan_width

Phase = Literal["prefill", "decode"]


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


@dataclass(frozen=True)
class Verdict:
    """What the measured table says of a call: the fastest headfit backend, its time and the engine's, in us."""

    backend: str
    ours: float
    engine: float

    @property
    def pays(self) -> bool:
        """Whether the headfit backend is the faster one."""
        return self.ours < self.engine


@functools.cache
def points_of(gpu: str | None) -> tuple[Point, ...]:
    """The points measured on the GPU of this name (``torch.cuda.get_device_name``), from the shipped table."""
    return crossover.load().get(gpu or "", ())


def verdict(
    points: tuple[Point, ...], backends: tuple[str, ...], phase: Phase, rows: int, heads: int, topk: int, extra: int
) -> Verdict | None:
    """Our kernels against FlashMLA at 64 heads for one call, or None where the table does not speak for it.

    Ours read packed pages in both phases. FlashMLA decodes packed pages, and prefills bfloat16 rows that the engine
    gathered before: the gather is not counted, which favours the engine. Both times are of one number of rows, heads
    and lanes.
    """
    sets, lanes = (2, topk + extra) if extra else (1, topk)
    gathered = _gathered(points)
    if phase == "prefill":
        points = tuple(p for p in points if _size(p) in gathered)
    ours = crossover.nearest(points, Shape("v4", sets, rows, heads, lanes))
    if ours is None:
        return None
    mine = [(time, name) for name, time in ours.times if name in backends]
    engine = gathered[_size(ours)] if phase == "prefill" else dict(ours.times).get("flashmla")
    return None if not mine or engine is None else Verdict(min(mine)[1], min(mine)[0], engine)


def _size(point: Point) -> tuple[int, int, int]:
    return point.shape.rows, point.shape.heads, point.shape.lanes


@functools.lru_cache(maxsize=8)
def _gathered(points: tuple[Point, ...]) -> dict[tuple[int, int, int], float]:
    """FlashMLA's times over bfloat16 rows, by `_size`."""
    times = {_size(p): dict(p.times).get("flashmla") for p in points if p.shape.layout == "bf16"}
    return {size: us for size, us in times.items() if us is not None}


DECODE_ROWS: Final = 256  # the most rows that a decode step is expected to have, and the least of a prefill worth it


def wins_everywhere(points: tuple[Point, ...], backends: tuple[str, ...], heads: int) -> bool:
    """Whether ours won at every measured size of both phases at ``heads`` heads: then no buffer needs the pad."""
    verdicts: dict[Phase, list[Verdict]] = {"decode": [], "prefill": []}
    for shape in {p.shape for p in points if p.shape.layout == "v4" and p.shape.heads == heads}:
        topk, extra = (shape.lanes, 0) if shape.sets == 1 else (128, shape.lanes - 128)
        phases: list[Phase] = [p for p in verdicts if (shape.rows <= DECODE_ROWS) == (p == "decode")]
        for phase in phases:
            found = verdict(points, backends, phase, shape.rows, heads, topk, extra)
            if found is not None:
                verdicts[phase].append(found)
    return all(found and all(v.pays for v in found) for found in verdicts.values())


@functools.lru_cache(maxsize=8192)  # the same few shapes come back for every layer of every step
def route(
    call: Call,
    engine_width: int,
    capability: Capability | None,
    compute_capability: tuple[int, int] | None,
    backends: tuple[str, ...],
    policy: Policy,
    explicit: bool,
    gpu: str | None = None,
) -> Route:
    """Where ``call`` goes. Depends on nothing but its arguments and the shipped table.

    Args:
        call: what the engine runs.
        engine_width: heads that the engine would launch.
        capability: of the engine's own kernel; None where nothing is known about it, which leaves it as it is.
        compute_capability: of the device.
        backends: headfit's own backends usable here, best first.
        policy: from the environment.
        explicit: whether the user asked for this policy, rather than it being the default.
        gpu: name of the GPU, for the measured table; None: no table.

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
    found = verdict(points_of(gpu), backends, phase, call.rows, call.n_local, call.topk, call.extra_topk)
    where = f"{call.n_local} heads, {call.rows} rows, {call.topk} + {call.extra_topk} keys, {phase}"
    if found is not None and found.pays:
        text = f"{found.backend} takes {found.ours:.0f} us and FlashMLA {found.engine:.0f} us at {where}, on {gpu}"
        return Route(found.backend, call.n_local, "measured", text)
    if explicit and backends:
        return Route(found.backend if found else backends[0], call.n_local, "asked", f"{policy.origin} asks for it")
    if explicit and capability is not None and call.n_local in _listed(call, capability):
        return Route("engine", call.n_local, "native", f"{capability.family} takes {call.n_local} heads in {phase}")
    if not backends:
        return Route("engine", engine_width, "no_kernel", "no headfit kernel runs here")
    if found is not None:
        return Route("engine", engine_width, "slower", f"FlashMLA takes {found.engine:.0f} us, {found.ours:.0f} ours")
    return Route("engine", engine_width, "not_measured", f"nothing was measured on {gpu} near {where}")


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
