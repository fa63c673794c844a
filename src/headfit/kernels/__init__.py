"""The registry of backends: which kernel families exist, which are usable here, and which one takes a call.

A backend is a module with four functions: ``available()`` (None, or why not here), ``unsupported(call)`` (None, or why
not this call), ``capability(compute_capability)`` and ``run(call)``. New hardware is one file in this folder and one
line in ``REGISTRY``; listing backends imports no kernel that is not usable.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from headfit.call import SparseCall
from headfit.capability import Capability
from headfit.kernels import crossover


@dataclass(frozen=True)
class Backend:
    """A kernel family: where its code is and what makes it usable.

    ``automatic`` False: ``backend=None`` never chooses it, because its numbers are not within the contract.
    ``rounded_sum``: it may divide by the sum of the weights as rounded to bf16, which the conformance suite allows for.
    """

    name: str
    module: str
    device_types: tuple[str, ...]
    install_hint: str
    automatic: bool = True
    rounded_sum: bool = False


_HOPPER_HINT = "pip install 'headfit[hopper]', on an SM90"
REGISTRY: dict[str, Backend] = {
    b.name: b
    for b in (  # order of preference
        Backend("hopper", "headfit.kernels.hopper", ("cuda",), _HOPPER_HINT, rounded_sum=True),
        Backend("triton", "headfit.kernels.triton", ("cuda", "cpu"), "pip install 'headfit[triton]', on an NVIDIA GPU"),
        Backend("hopper_wide", "headfit.kernels.hopper_wide", ("cuda",), _HOPPER_HINT, rounded_sum=True),
        Backend("hopper_pairs", "headfit.kernels.hopper_pairs", ("cuda",), _HOPPER_HINT, rounded_sum=True),
        Backend("flashmla", "headfit.kernels.flashmla", ("cuda",), "pip install vllm, or sgl-flash-mla, on an SM90"),
        Backend(
            "flashinfer", "headfit.kernels.flashinfer", ("cuda",), "pip install flashinfer-python, on an SM12x", False
        ),
        Backend("cpu", "headfit.kernels.cpu", ("cpu",), "comes with headfit"),
    )
}


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot run here, or cannot take this call.

    ``refused`` holds what each backend's ``unsupported(call)`` said of the call; it is empty where one could not run at
    all.
    """

    def __init__(self, message: str, refused: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.refused: dict[str, str] = dict(refused or {})


def why_not(name: str) -> str | None:
    """Say why backend ``name`` is not usable on this machine; None when it is."""
    entry = REGISTRY[name]
    try:
        module = importlib.import_module(entry.module)
        reason: str | None = module.available()
    except ImportError as error:
        return f"{error}; {entry.install_hint}"
    except Exception as error:  # a broken installation raises anything, and must not take the other backends with it
        return f"it cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return reason


def backends() -> tuple[str, ...]:
    """Names of the backends usable on this machine, best first. Opens no CUDA context beyond asking for a device."""
    return tuple(name for name in REGISTRY if why_not(name) is None)


def load(name: str) -> ModuleType:
    """The module of backend ``name``.

    Raises:
        ValueError: no backend has that name.
        BackendUnavailable: it exists, but not here; the message says what is missing.
    """
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(f"backend: got {name!r}, accepted are None (choose) or {', '.join(map(repr, REGISTRY))}")
    reason = why_not(name)
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    return importlib.import_module(REGISTRY[name].module)


def choose(call: SparseCall, name: str | None = None) -> tuple[str, ModuleType]:
    """The backend for a call: the one named, or the first that is usable here and takes it.

    An explicit request never falls back. Without a name, the backends are tried in the order that was measured on this
    GPU for calls of this shape (`crossover.order`), or in registry order where nothing was. That order may depend on
    the number of heads; bits are the same over head counts for each backend, not between two of them. Whoever compares
    widths to the bit names a backend.

    Raises:
        ValueError: ``name`` is unknown.
        BackendUnavailable: the named one cannot take the call, or none can; the message lists each reason.
    """
    reasons: dict[str, str] = {}
    refused: dict[str, str] = {}
    for candidate in [name] if name is not None else _automatic(call):
        reason = _why_not_for(candidate, call, explicit=name is not None)
        if reason is None:
            module = importlib.import_module(REGISTRY[candidate].module)
            reason = module.unsupported(call)
            if reason is None:
                return candidate, module
            refused[candidate] = reason
        reasons[candidate] = reason
    raise BackendUnavailable(_no_backend_text(call, reasons), refused)


def first_reading(layout: str, names: Iterable[str], compute_capability: tuple[int, int] | None) -> str | None:
    """The first of ``names`` that says it reads pages of ``layout``; one that states no layouts reads them all."""
    for name in names:
        capability: Capability = importlib.import_module(REGISTRY[name].module).capability(compute_capability)
        if not capability.layouts or layout in capability.layouts:
            return name
    return None


def _automatic(call: SparseCall) -> tuple[str, ...]:
    return crossover.order(call, [name for name, entry in REGISTRY.items() if entry.automatic])


def _why_not_for(name: str, call: SparseCall, *, explicit: bool) -> str | None:
    """Why the backend cannot run where the tensors are; None where it can."""
    device = call.q.device.type
    if explicit:
        load(name)  # raises with the remedy
    if device not in REGISTRY[name].device_types:
        return f"runs on {' or '.join(REGISTRY[name].device_types)} tensors, q is on {device}"
    return None if explicit else why_not(name)


def _no_backend_text(call: SparseCall, reasons: Mapping[str, str]) -> str:
    shape = f"q {tuple(call.q.shape)} on {call.q.device}, layouts {[k.layout for k in call.key_sets]}"
    return f"no backend takes this call ({shape}): " + "; ".join(f"{n}: {r}" for n, r in reasons.items())
