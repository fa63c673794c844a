"""The Hopper backend ``hopper_pairs``: many rows of V4 pages on SM90, two neighbouring rows over one list of keys.

Belongs here: which calls it takes, the plan of a call (from shapes alone) and its launches. Does not belong here:
traced code (``hopper_pairs_*.py``, ``hopper_wide_*.py``), and what it shares with ``hopper_wide`` and ``hopper``.

It is ``hopper_wide`` with a kernel between: ``merge`` makes one list of the keys of two rows, and ``attend`` computes
both over it. Two rows of 32 heads fill the 64 lanes of the matrix unit that a row alone leaves half empty, and what
neighbours list both is computed once: made for 17 to 32 heads. Which keys are computed together depends on the lists
of a pair, never on the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headfit import arch as archs
from headfit.call import SparseCall
from headfit.capability import Capability
from headfit.kernels import hopper, hopper_wide
from headfit.kernels.hopper_build import Spec
from headfit.kernels.recording import Recorder

SPREAD: Final = Spec("pairs spread", "headfit.kernels.hopper_wide_spread", "spread", (("notes", 1),))
MERGE: Final = Spec("pairs merge", "headfit.kernels.hopper_pairs_merge", "merge")
ATTEND: Final = Spec("pairs attend", "headfit.kernels.hopper_pairs_attend", "attend")
SPECS: Final = (SPREAD, MERGE, ATTEND)  # beside those of `hopper` and `hopper_wide`
LAUNCHES: Final = (hopper_wide.MARK, *SPECS, hopper_wide.REST)
LANES_LIMIT: Final = 1536  # of a row, as `hopper_pairs_merge` has room for
_launched = Recorder()
record_variants = _launched.listen  # a context manager that yields the names


@dataclass(frozen=True)
class Plan:
    """A call's workspace, in bytes: that of `hopper_wide`, and ``size`` with what stands behind it."""

    wide: hopper_wide.Plan
    size: int

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The binaries, in the order of their launches."""
        return LAUNCHES


def available() -> str | None:
    """None where an SM90 is there, and the kernels are compiled or can be; else why not, with the remedy."""
    return hopper_wide.available() or hopper.why_missing(SPECS)


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot be taken, or None. The first call compiles the binaries where it has to."""
    return hopper.first_reason(call, why_not_taken, lambda arch: LAUNCHES)


def why_not_taken(call: SparseCall) -> str | None:
    """Why a call of this form is not taken, on whatever device; None where it is."""
    reason = hopper_wide.why_not_taken(call)
    if reason is not None:
        return reason
    lanes = sum(keys.topk for keys in call.key_sets)
    if lanes > LANES_LIMIT:
        return f"takes {LANES_LIMIT} lanes a row and fewer, got {lanes}"
    if hopper.meet(call.q, call.out):
        return "takes no out that lies over q: rows may be computed again, from q"
    return None


def capability(compute_capability: tuple[int, int] | None = None) -> Capability:
    """As of `hopper`. Row counts below `hopper_wide.LEAST_ROWS` are refused call by call."""
    return hopper.capability(compute_capability, "hopper_pairs")


def plan(call: SparseCall) -> Plan:
    """The workspace and launches of a call, from its shapes alone."""
    wide = hopper_wide.plan(call)
    pairs = -(-call.rows // 2)
    entries = pairs * 2 * sum([keys.topk for keys in call.key_sets])
    groups = -(-call.rows // hopper.GROUP)
    return Plan(wide, wide.flags + 4 * (_words(groups) + _words(pairs) + entries))


def _words(count: int) -> int:
    """As `hopper_pairs_place` rounds them."""
    return -(-count // 32) * 32


def binaries(h_q: int) -> tuple[Spec, ...]:
    """All that calls of ``h_q`` heads may launch, whatever their rows and lists."""
    return LAUNCHES


def run(call: SparseCall) -> None:
    """Launch the kernels of one checked call on the current stream."""
    chosen = plan(call)
    hopper.on_its_device(call, lambda device: _launch(call, chosen, device))
    _launched.add(lambda: [spec.name for spec in chosen.specs])


def _launch(call: SparseCall, chosen: Plan, device: int) -> None:
    work = hopper_wide.prepare(call, chosen.wide, chosen.size, device, SPREAD)
    groups = -(-call.rows // hopper.GROUP)
    hopper.launch(MERGE, device, (groups, 1))
    hopper.launch(ATTEND, device, (archs.current(call.q.device).sms, 1))
    hopper_wide.leave_rest(call, chosen.wide, work, device)
