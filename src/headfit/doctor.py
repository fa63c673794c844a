"""`headfit doctor`: what is here, what each kernel family accepts, and which width would run for a model and a TP.

Belongs here: collecting (`doctor_command`). Does not belong here: option parsing, deciding (`headfit.width`), probing
(`headfit.probes`), how the result looks (`headfit.diagnosis`). Nothing here needs a GPU; a machine's oddity becomes a
line of the report and never an exception, while bad input raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from headfit import gpus, recorded, stacks
from headfit import layouts as splits
from headfit import machine as here
from headfit.capability import Call, Capability, is_sm12x
from headfit.diagnosis import Report, Row
from headfit.diagnosis import render as render
from headfit.diagnosis import to_json as to_json
from headfit.geometry import Geometry
from headfit.width import NoLegalWidthError, Policy, plan_width

# (phase, mode, rows): both sides of FlashInfer's row limit, a full chunk, and the batches that decode sees.
SITUATIONS: Final = (
    ("prefill", "extend", 4096),
    ("prefill", "extend", 65),
    ("prefill", "extend", 64),
    ("verify", "target_verify", 256),
    ("decode", "decode", 256),
    ("decode", "decode", 1),
)
_SHORT: Final = (SITUATIONS[0], SITUATIONS[-1])  # where every TP is listed
POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "native": Policy.native,
    "sm12x-prefill": Policy.sm12x_prefill,
    "padded": Policy.padded,
}
NODE: Final = 8  # GPUs that layouts are compared on where no TP was asked for
Chip = tuple[int, int] | None


@dataclass(frozen=True)
class Stack:
    """An engine of the table: its version, where that comes from, its record, and the FlashInfer beside it."""

    engine: str
    version: str
    origin: str
    release: recorded.Release | None
    flashinfer: Capability


def doctor_command(
    *,
    model: str | Path | Mapping[str, Any] = "deepseek-v4-flash",
    tp: int | None = None,
    gpu: str | None = None,
    policy: str | None = None,
    family: str | None = None,
    flashinfer: str | None = None,
    sglang: str | None = None,
    vllm: str | None = None,
) -> Report:
    """Collect the report.

    Args:
        model: ``deepseek-v4-flash``, ``deepseek-v4-pro``, the folder of a checkpoint, or its config.
        tp: tensor-parallel size; None lists every size the model can be split into, in fewer situations.
        gpu: a GPU that need not be here, such as ``h200``, ``sm_120``, ``9.0``; None for this machine.
        policy: ``native``, ``sm12x-prefill`` or ``padded``; None for what the environment says.
        family: one kernel family only, such as ``triton``; None for what headfit would use, and FlashInfer on SM12x.
        flashinfer, sglang, vllm: releases that need not be here, answered from recorded facts; a release that is not
            recorded keeps its pad and says so. None: what is installed, else what that engine release requires, else
            the newest that is recorded.

    Raises:
        ValueError, FileNotFoundError: naming the argument, what came and what is accepted.
    """
    geometry = Geometry.from_config(model)
    sizes = _sizes(geometry, tp)
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}, accepted are {', '.join(POLICIES)}")
    _check_releases(flashinfer=flashinfer, sglang=sglang, vllm=vllm)
    chosen = Policy.from_env() if policy is None else POLICIES[policy]()
    cc, name, local = _gpu(gpu, flashinfer, sglang or vllm)
    asked = {"sglang": sglang, "vllm": vllm}
    used = tuple(_stacks(cc, asked, flashinfer))
    beside = _flashinfer(cc, flashinfer, [s.version for s in used if asked[s.engine]], used)
    families = tuple(_families(cc, family, beside))
    situations = _SHORT if tp is None else SITUATIONS
    table = tuple(
        _row(capability, size, phase, mode, rows, geometry, chosen, cc, used)
        for capability in families
        for size in sizes
        for phase, mode, rows in situations
    )
    others = tuple(_others(cc, families, beside, asked, used, flashinfer is not None))
    ways = _layouts(geometry, NODE if tp is None or tp == 1 else tp, families[-1], chosen, cc, used)
    return Report(
        tuple(here.facts()), name, cc, local, families, others, geometry.name, geometry.n_heads, chosen.kind, table,
        tuple(_lines(cc, used)), ways,
    )  # fmt: skip


def _sizes(geometry: Geometry, tp: int | None) -> tuple[int, ...]:
    sizes = geometry.worlds()
    if tp is not None and tp not in sizes:
        fits = ", ".join(map(str, sizes))
        raise ValueError(f"tp: got {tp}, which does not split the {geometry.n_heads} heads; choose one of {fits}")
    return sizes if tp is None else (tp,)


def _check_releases(**asked: str | None) -> None:
    for name, version in asked.items():
        if version is None:
            continue
        try:
            Version(version)
        except InvalidVersion:
            newest = recorded.versions(recorded.FLASHINFER if name == "flashinfer" else name)[-1]
            raise ValueError(f"{name}: got {version!r}, need a release such as {newest}") from None


def _gpu(gpu: str | None, flashinfer: str | None, engine: str | None) -> tuple[Chip, str, bool]:
    """The GPU that is asked about: the one named, the one here, else the one that FlashInfer's kernels are for."""
    if gpu is not None:
        return gpus.compute_capability_of(gpu), gpu, False
    cc, name = here.gpu_here()
    if cc is not None or (flashinfer is None and engine is None):
        return cc, name, True
    if flashinfer is not None:
        return (12, 0), "sm_120, as there is no GPU here and FlashInfer's kernels are for it", False
    raise ValueError("gpu: there is none here, and engines differ by GPU; say which with --gpu, such as --gpu h200")


# ------------------------------------------------------------------------------------------------------- the releases


def _stacks(cc: Chip, asked: Mapping[str, str | None], flashinfer: str | None) -> Iterator[Stack]:
    """The engines to compare with: as asked for, else as installed, else the newest that is recorded."""
    if not stacks.serves(cc):
        return
    for engine, wanted in asked.items():
        present = here.version_of(engine)
        if wanted is not None:
            version, origin = wanted, "asked for"
        elif present is not None:
            version, origin = present, "installed here"
        else:
            version, origin = recorded.versions(engine)[-1], "not installed, the newest that is recorded"
        release = recorded.release(engine, version)
        if release is None:
            origin += f"; {recorded.unknown(stacks.NAMES[engine], version, engine)}"
        pin = flashinfer or (None if release is None else release.flashinfer)
        beside = _release_of_flashinfer(cc, pin, flashinfer is None and version == present)
        if is_sm12x(cc):
            origin += f", with FlashInfer {beside.version or 'not installed'}"
        yield Stack(engine, version, origin, release, beside)


def _lines(cc: Chip, used: tuple[Stack, ...]) -> Iterator[str]:
    for stack in used:
        yield f"{stacks.NAMES[stack.engine]} {stack.version}: {stack.origin}"
    if used and not is_sm12x(cc):
        yield (
            "inside an engine headfit takes the calls that were measured to be faster on this GPU; "
            "HEADFIT_WIDTH=native takes all"
        )


def _release_of_flashinfer(cc: Chip, version: str | None, installed: bool = False) -> Capability:
    """FlashInfer ``version``, as installed where it is that, else as recorded; ``installed``: whichever is here."""
    from headfit import probes

    present = here.version_of("flashinfer-python")
    if present is not None and (present == version or installed or version is None):
        return probes.flashinfer_capability(cc) or recorded.flashinfer(present, cc)
    if version is None:
        return Capability.unreadable(recorded.FLASHINFER, cc, "FlashInfer is not installed, and no release was named")
    return recorded.flashinfer(version, cc)


def _flashinfer(cc: Chip, asked: str | None, engines: list[str], used: tuple[Stack, ...]) -> Capability | None:
    """The FlashInfer of the table: as asked for, as an engine that was asked for pins it, or as installed."""
    from headfit import probes

    if asked is not None:
        return _release_of_flashinfer(cc, asked)
    installed = probes.flashinfer_capability(cc)
    if installed is not None and not engines:
        return installed
    pinned = [s.flashinfer for s in used if s.version in engines and s.release is not None]
    return pinned[0] if pinned else installed


def _families(cc: Chip, family: str | None, flashinfer: Capability | None) -> Iterator[Capability]:
    from headfit import kernels, probes

    device = "cpu" if cc is None else "cuda"
    ours = [b.name for b in kernels.REGISTRY.values() if device in b.device_types]
    if cc is None:  # a GPU backend may run on CPU tensors too, in an interpreter; then it has to be usable here
        ours = [name for name in ours if name in kernels.backends()]
    known = [*ours, probes.FLASHINFER]
    if family is not None and family not in known:
        raise ValueError(f"family: got {family!r}, accepted for this GPU are {', '.join(known)}")
    if family != probes.FLASHINFER:
        found = [probes.backend_capability(name, cc) for name in ([family] if family else ours)]
        yield next((c for c in found if c.prefill_heads), found[0])
    if family == probes.FLASHINFER and flashinfer is None:
        raise ValueError(
            f"family: got {family!r}, but FlashInfer is not installed; pip install flashinfer-python, or name a "
            "release with --flashinfer"
        )
    if flashinfer is not None and (family == probes.FLASHINFER or (family is None and is_sm12x(cc))):
        yield flashinfer


def _others(
    cc: Chip,
    families: tuple[Capability, ...],
    flashinfer: Capability | None,
    asked: Mapping[str, str | None],
    used: tuple[Stack, ...],
    wanted: bool,
) -> Iterator[Capability]:
    """Kernel families beside those of the table: FlashMLA's copies, and a FlashInfer that was asked about."""
    from headfit import probes

    if wanted and flashinfer is not None and flashinfer not in families:
        yield flashinfer
    if cc is None or is_sm12x(cc):
        return
    present = {copy.family: copy for copy in probes.flashmla_capabilities(cc)}
    for stack in used:
        copy = None if stack.release is None or asked[stack.engine] is None else stack.release.flashmla
        if copy is not None and copy[0] not in present:
            present[copy[0]] = recorded.flashmla(copy[0], copy[1], cc)
    yield from present.values()


# ---------------------------------------------------------------------------------------------------------- the table


def _plan(capability: Capability, call: Call, policy: Policy) -> tuple[int | None, float | None, str, str]:
    """Width, waste, rule and reason; a refusal is an answer too."""
    try:
        decision = plan_width(call, capability, policy)
    except NoLegalWidthError as error:
        return None, None, "refused", str(error)
    return decision.width, decision.wasted, decision.rule, decision.reason


def _today(call: Call, cc: Chip, used: tuple[Stack, ...]) -> tuple[stacks.StackWidth, ...]:
    if cc is None or not used:
        return (stacks.padding(call),)
    return tuple(stacks.width_of(s.engine, s.version, s.release, call, cc, s.flashinfer) for s in used)


def _row(
    capability: Capability,
    tp: int,
    phase: str,
    mode: str,
    rows: int,
    geometry: Geometry,
    policy: Policy,
    cc: Chip,
    used: tuple[Stack, ...],
) -> Row:
    n_local = geometry.n_heads // tp
    call = Call(rows, n_local, geometry.n_heads, mode)
    width, wasted, rule, reason = _plan(capability, call, policy)
    pad = call.padded_width
    return Row(
        capability.family, tp, phase, rows, n_local, pad, width, 1 - n_local / pad, wasted, rule, reason,
        _today(call, cc, used),
    )  # fmt: skip


def _layouts(
    geometry: Geometry, count: int, capability: Capability, policy: Policy, cc: Chip, used: tuple[Stack, ...]
) -> tuple[splits.Layout, ...]:
    def call(tp: int) -> Call:
        return Call(splits.ROWS, geometry.n_heads // tp, geometry.n_heads)

    def today(tp: int) -> float | None:
        wasted = [stack.wasted for stack in _today(call(tp), cc, used)]
        known = [w for w in wasted if w is not None]
        return max(known) if len(known) == len(wasted) else None

    def ours(tp: int) -> float | None:
        return _plan(capability, call(tp), policy)[1]

    return splits.layouts(geometry, count, today, ours)
