"""Which GPU the kernels are compiled and planned for: the only device query of the kernels, and its override.

Belongs here: facts per architecture that a plan needs. Does not belong here: launch settings (``kernels/configs.py``),
what other packages accept (``probes.py``). Importing this module asks no device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arch:
    """One GPU model, as far as a plan depends on it.

    ``shared_bytes`` is what one block may use after opting in (CUDA C++ Programming Guide, table of technical
    specifications per compute capability); ``sms`` is the number of multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_bytes: int

    @property
    def converts_e4m3(self) -> bool:
        """Whether the hardware converts e4m3 (compute capability 8.9 and later)."""
        return self.capability >= (8, 9)

    @property
    def warpgroup_mma(self) -> bool:
        """Whether matrix products run on warpgroups with operands in shared memory (Hopper)."""
        return self.capability[0] == 9


# Targets of offline compilation. SM counts: A100, H100/H200 SXM, B200, RTX PRO 6000, GB10.
KNOWN: dict[str, Arch] = {
    a.name: a
    for a in (
        Arch("sm_80", (8, 0), 108, 163 * 1024),
        Arch("sm_90", (9, 0), 132, 227 * 1024),
        Arch("sm_100", (10, 0), 148, 227 * 1024),
        Arch("sm_120", (12, 0), 188, 99 * 1024),
        Arch("sm_121", (12, 1), 48, 99 * 1024),
    )
}
SHARED_BYTES = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}  # KiB; else 227

_override: ContextVar[Arch | None] = ContextVar("headfit_arch", default=None)


def named(name: str) -> Arch:
    """The architecture called ``name``, such as ``"sm_90"``.

    Raises:
        ValueError: it is not one of ``KNOWN``.
    """
    if name not in KNOWN:
        raise ValueError(f"arch: got {name!r}, accepted are {', '.join(KNOWN)}")
    return KNOWN[name]


@contextmanager
def override(arch: Arch | str) -> Iterator[Arch]:
    """Plan and compile for ``arch`` inside the block, whatever device is there; for compiling without one."""
    chosen = named(arch) if isinstance(arch, str) else arch
    token = _override.set(chosen)
    try:
        yield chosen
    finally:
        _override.reset(token)


def current(device: torch.device | None = None) -> Arch:
    """The architecture to plan for: the override, else that of a CUDA device, else (no GPU: the interpreter) sm_80."""
    chosen = _override.get()
    if chosen is not None:
        return chosen
    if device is None or device.type != "cuda":
        return KNOWN["sm_80"]
    return _of_device(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_device(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    shared = SHARED_BYTES.get(capability, 227) * 1024
    return Arch(f"sm_{capability[0]}{capability[1]}", capability, properties.multi_processor_count, shared)
