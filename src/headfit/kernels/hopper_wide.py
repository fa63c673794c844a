"""The Hopper backend ``hopper_wide``: many rows of V4 pages on SM90, each listed slot dequantised once for all of them.

Belongs here: which calls it takes, the plan of a call (from shapes alone) and its launches. Does not belong here:
traced code (``hopper_wide_*.py``), and what it shares with the backend ``hopper``: the form of calls, the driver, the
launch parameters.

A prefill of 4096 rows lists a slot of its caches some hundred times. Three kernels: ``mark`` finds out which slots are
listed, ``spread`` dequantises those into a workspace, ``attend`` computes rows from there. It is made for 64 heads
and more. No value of a tensor is read on the host: where the caches have more slots than the workspace has room for,
the kernels decide by what is listed, and leave what has no room to ``rest``, a launch more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch

from headfit import arch as archs
from headfit.call import SparseCall
from headfit.capability import Capability
from headfit.kernels import hopper, hopper_abi
from headfit.kernels.hopper_build import Spec
from headfit.kernels.recording import Recorder

MARK: Final = Spec("wide mark", "headfit.kernels.hopper_wide_mark", "mark")
SPREAD: Final = Spec("wide spread", "headfit.kernels.hopper_wide_spread", "spread")
ATTEND: Final = Spec("wide attend", "headfit.kernels.hopper_wide_attend", "attend")
SPECS: Final = (MARK, SPREAD, ATTEND)  # beside those of `hopper`
REST: Final = hopper.REST[32]
LEAST_ROWS: Final = 512  # below, the persistent kernel has few tasks for an SM, and a slot few rows that list it
ROOM_LIMIT: Final = 1 << 18  # keys of a workspace, of 1 KB each
SLOTS_LIMIT: Final = 1 << 24  # of both caches; the table has a word for each
SPREAD_CTAS: Final = 3  # of an SM
ZERO_ROWS: Final = 64  # as `hopper_wide_place` has them
ROW_BYTES: Final = 1024
_launched = Recorder()
record_variants = _launched.listen  # a context manager that yields the names


@dataclass(frozen=True)
class Plan:
    """A call's workspace, in bytes, and its launches.

    ``room``: keys that it holds; ``cleared``: its first bytes, which have to be 0; ``flags``: where those of ``rest``
    begin; ``size``: all of it; ``rest``: whether more slots may be listed than there is room for.
    """

    room: int
    cleared: int
    flags: int
    size: int
    rest: bool

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The binaries, in the order of their launches."""
        return (*SPECS, REST) if self.rest else SPECS


def available() -> str | None:
    """None where an SM90 is there, and the kernels are compiled or can be; else why not, with the remedy."""
    return hopper.available() or hopper.why_missing(SPECS)


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot be taken, or None. The first call compiles the binaries where it has to."""
    return hopper.first_reason(call, why_not_taken, lambda arch: plan(call).specs)


def why_not_taken(call: SparseCall) -> str | None:
    """Why a call of this form is not taken, on whatever device; None where it is."""
    reason = hopper.why_not_taken(call)
    if reason is not None:
        return reason
    if call.rows < LEAST_ROWS:
        return f"takes {LEAST_ROWS} rows and more, got {call.rows}"
    if call.batch_invariant:
        return f"takes no batch-invariant calls: in one of fewer than {LEAST_ROWS} rows a row's bits would be others"
    slots = sum(keys.slots for keys in call.key_sets)
    if slots > SLOTS_LIMIT:
        return f"takes caches of {SLOTS_LIMIT} slots and fewer together, got {slots}"
    return None


def capability(compute_capability: tuple[int, int] | None = None) -> Capability:
    """As of `hopper`. Row counts below `LEAST_ROWS` are refused call by call."""
    return hopper.capability(compute_capability, "hopper_wide")


def plan(call: SparseCall) -> Plan:
    """The workspace and launches of a call, from its shapes alone."""
    slots = tuple([keys.slots for keys in call.key_sets])
    return _planned(call.rows, sum([keys.topk for keys in call.key_sets]), slots)


@functools.lru_cache(maxsize=1024)
def _planned(rows: int, lanes: int, slots: tuple[int, ...]) -> Plan:
    """As `hopper_wide_place` lays the workspace out."""
    most = min(sum(slots), rows * lanes)  # that can be listed
    room = min(most, ROOM_LIMIT)
    words = -(-sum([-(-n // 32) for n in slots]) // 32) * 32
    cleared = 128 + 4 * words
    flags = cleared + 128 * words + ROW_BYTES * (ZERO_ROWS + room)
    return Plan(room, cleared, flags, flags + 4 * -(-rows // hopper.GROUP), rest=most > room)


def binaries(h_q: int) -> tuple[Spec, ...]:
    """All that calls of ``h_q`` heads may launch, whatever their rows and lists."""
    return (*SPECS, REST)


def run(call: SparseCall) -> None:
    """Launch the kernels of one checked call on the current stream."""
    chosen = plan(call)
    hopper.on_its_device(call, lambda device: _launch(call, chosen, device))
    _launched.add(lambda: [spec.name for spec in chosen.specs])


def _launch(call: SparseCall, chosen: Plan, device: int) -> None:
    work = prepare(call, chosen, chosen.size, device, SPREAD)
    hopper.launch(ATTEND, device, (archs.current(call.q.device).sms, 1))
    if chosen.rest:
        leave_rest(call, chosen, work, device)


def prepare(call: SparseCall, chosen: Plan, size: int, device: int, spread: Spec) -> torch.Tensor:
    """Launch what gathers the keys of a call, by a variant of `SPREAD`; returns the workspace, of ``size`` bytes."""
    # The allocator gives the memory to later work of this stream, or graph, alone.
    work = torch.empty(size // 4, dtype=torch.int32, device=call.q.device)
    work[: chosen.cleared // 4].zero_()
    sms = archs.current(call.q.device).sms
    hopper_abi.pack(hopper.buffer, call, head_tiles=1, splits=chosen.room, work=work.data_ptr())
    for spec, ctas in ((MARK, sms), (spread, SPREAD_CTAS * sms)):
        hopper.launch(spec, device, (ctas, 1))
    return work


def leave_rest(call: SparseCall, chosen: Plan, work: torch.Tensor, device: int) -> None:
    """Launch the native kernel for the groups of rows whose flags are 0."""
    tiles = -(-call.h_q // 32)
    zeros = hopper.zero_rows(call.q.device).data_ptr()
    hopper_abi.pack(hopper.buffer, call, head_tiles=tiles, work=work.data_ptr() + chosen.flags, zeros=zeros)
    hopper.launch(REST, device, (-(-call.rows // hopper.GROUP) * tiles, 1))
