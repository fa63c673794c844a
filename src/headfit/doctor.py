"""`headfit doctor`: what is here, what each kernel family accepts, and which width would run for a model and a TP.

Belongs here: collecting (`doctor_command`), the result as data, its two forms (`render`, `to_json`). Does not belong
here: option parsing, deciding (that is `headfit.width`), probing (`headfit.probes`). Nothing here needs a GPU; a
machine's oddity becomes a line of the report and never an exception, while bad input raises.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headfit import env, gpus
from headfit.capability import NO_BATCH_EXCEEDS, Call, Capability, words
from headfit.geometry import Geometry
from headfit.width import NoLegalWidthError, Policy, plan_width

if TYPE_CHECKING:
    from rich.console import RenderableType

# Distributions whose version matters to what runs, and what each is.
PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "sglang",
    "vllm",
    "flash-mla",
    "nvidia-cutlass-dsl",
)
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


@dataclass(frozen=True)
class Fact:
    """One line about the machine: ``name``, ``value``, and ``ok`` False where it is a problem."""

    name: str
    value: str
    ok: bool = True


@dataclass(frozen=True)
class Row:
    """One situation: what padding launches, what headfit launches, the share of arithmetic each wastes, and why."""

    family: str
    tp: int
    phase: str
    rows: int
    heads_owned: int
    padded_width: int
    width: int | None  # None: the kernel refuses this call at every width
    wasted_padded: float
    wasted: float | None
    rule: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All that `headfit doctor` says."""

    machine: tuple[Fact, ...]
    gpu: str
    compute_capability: tuple[int, int] | None
    here: bool  # whether the table is about this machine
    families: tuple[Capability, ...]
    model: str
    n_heads: int
    policy: str
    table: tuple[Row, ...]


def doctor_command(
    *,
    model: str | Path | Mapping[str, Any] = "deepseek-v4-flash",
    tp: int | None = None,
    gpu: str | None = None,
    policy: str | None = None,
    family: str | None = None,
) -> Report:
    """Collect the report.

    Args:
        model: ``deepseek-v4-flash``, ``deepseek-v4-pro``, the folder of a checkpoint, or its config.
        tp: tensor-parallel size; None lists every size the model can be split into, in fewer situations.
        gpu: a GPU that need not be here, such as ``h200``, ``sm_120``, ``9.0``; None for this machine.
        policy: ``native``, ``sm12x-prefill`` or ``padded``; None for what the environment says.
        family: one kernel family only, such as ``triton``; None for what headfit would use, and FlashInfer on SM12x.

    Raises:
        ValueError, FileNotFoundError: naming the argument, what came and what is accepted.
    """
    geometry = Geometry.from_config(model)
    sizes = geometry.worlds()
    if tp is not None and tp not in sizes:
        fits = ", ".join(map(str, sizes))
        raise ValueError(f"tp: got {tp}, which does not split the {geometry.n_heads} heads; choose one of {fits}")
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}, accepted are {', '.join(POLICIES)}")
    chosen = Policy.from_env() if policy is None else POLICIES[policy]()
    cc, name = _gpu_here() if gpu is None else (gpus.compute_capability_of(gpu), gpu)
    families = tuple(_families(cc, family))
    sizes = sizes if tp is None else (tp,)
    situations = _SHORT if tp is None else SITUATIONS
    table = tuple(
        _row(capability, size, phase, mode, rows, geometry, chosen)
        for capability in families
        for size in sizes
        for phase, mode, rows in situations
    )
    machine = tuple(_machine())
    return Report(machine, name, cc, gpu is None, families, geometry.name, geometry.n_heads, chosen.kind, table)


def _families(cc: tuple[int, int] | None, family: str | None) -> Iterator[Capability]:
    from headfit import kernels, probes

    device = "cpu" if cc is None else "cuda"
    ours = [b.name for b in kernels.REGISTRY.values() if device in b.device_types]
    if cc is None:  # a GPU backend may run on CPU tensors too, in an interpreter; then it has to be usable here
        ours = [name for name in ours if name in kernels.backends()]
    known = [*ours, probes.FLASHINFER]
    if family is not None and family not in known:
        raise ValueError(f"family: got {family!r}, accepted for this GPU are {', '.join(known)}")
    if family != probes.FLASHINFER:
        name = family or ours[0]
        yield probes.backend_capability(name, cc)
    flashinfer = probes.flashinfer_capability(cc)
    if family == probes.FLASHINFER and flashinfer is None:
        raise ValueError(f"family: got {family!r}, but FlashInfer is not installed; pip install flashinfer-python")
    if flashinfer is not None and (family == probes.FLASHINFER or (family is None and cc is not None and cc[0] == 12)):
        yield flashinfer


def _row(capability: Capability, tp: int, phase: str, mode: str, rows: int, geometry: Geometry, policy: Policy) -> Row:
    n_local = geometry.n_heads // tp
    call = Call(rows, n_local, geometry.n_heads, mode)
    width: int | None = None
    wasted: float | None = None
    try:
        decision = plan_width(call, capability, policy)
        width, wasted, rule, reason = decision.width, decision.wasted, decision.rule, decision.reason
    except NoLegalWidthError as error:
        rule, reason = "refused", str(error)
    pad = call.padded_width
    return Row(capability.family, tp, phase, rows, n_local, pad, width, 1 - n_local / pad, wasted, rule, reason)


# ------------------------------------------------------------------------------------------------ the machine


def _gpu_here() -> tuple[tuple[int, int] | None, str]:
    try:
        import torch

        from headfit import probes

        cc = probes.compute_capability()
        return cc, "no CUDA device" if cc is None else torch.cuda.get_device_name()
    except Exception as error:  # a broken driver must not keep the doctor from speaking
        return None, f"no CUDA device ({type(error).__name__}: {error})"


def _machine() -> Iterator[Fact]:
    from headfit import kernels

    cc, name = _gpu_here()
    yield Fact("GPU", name if cc is None else f"{name}, compute capability {cc[0]}.{cc[1]}", cc is not None)
    driver = _driver()
    yield Fact("driver", driver or "none found", driver is not None or cc is None)
    yield Fact("python", platform.python_version())
    for package in PACKAGES:
        version = _version(package)
        if version is not None or package in ("torch", "triton"):
            yield Fact(package, version or "not installed", version is not None)
    for backend in kernels.REGISTRY:
        problem = _problem(lambda backend=backend: kernels.why_not(backend))  # type: ignore[misc]
        yield Fact(f"backend {backend}", problem or "usable", problem is None)
    for variable in env.VARIABLES.values():
        problem = _problem(lambda variable=variable: env.read(variable.name) and None)  # type: ignore[misc]
        yield Fact(variable.name, problem or _value(variable), problem is None)
    for stray, meant in env.unknown().items():
        yield Fact(stray, "nothing reads this" + (f"; {meant} was perhaps meant" if meant else ""), False)


def _value(variable: env.Variable) -> str:
    value = env.read(variable.name)
    text = {None: "not set", True: "on", False: "off"}.get(value, str(value))  # type: ignore[arg-type]
    return f"{text} (default)" if value == variable.default and value is not None else text


def _problem(check: Callable[[], object]) -> str | None:
    try:
        answer = check()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None if answer is None else str(answer)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", path.read_text())
    except OSError:
        return None
    return found[0] if found else None


# -------------------------------------------------------------------------------------------------- two forms


def to_json(report: Report) -> str:
    """The report as JSON: the fields of `Report`, head sets as sorted lists, an unreadable row split as null."""
    fields = dataclasses.asdict(report)
    for family in fields["families"]:
        if family["row_split"] == NO_BATCH_EXCEEDS:
            family["row_split"] = None
        family["sources"] = dict(family["sources"])
    return json.dumps(fields, indent=1, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, range):
        return {"from": value.start, "step": value.step}
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def render(report: Report) -> RenderableType:
    """The report for a terminal: the machine, what each family accepts, the table of widths and the reasons."""
    from rich.console import Group
    from rich.text import Text

    where = "this machine" if report.here else "not necessarily here"
    cc = report.compute_capability
    gpu = report.gpu if cc is None else f"{report.gpu}, compute capability {cc[0]}.{cc[1]}"
    parts: list[RenderableType] = [_facts(report.machine), Text()]
    for family in report.families:
        parts += [_family(family), Text()]
    parts.append(Text(f"{report.model}: {report.n_heads} heads on {gpu} ({where}), policy {report.policy}", "bold"))
    table, reasons = _table(report)
    parts.append(table)
    parts += [Text(f"why {number}: {reason}", "dim") for reason, number in reasons.items()]
    return Group(*parts)


def _facts(facts: tuple[Fact, ...]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for fact in facts:
        grid.add_row(fact.name, Text(fact.value, "" if fact.ok else "yellow"))
    return grid


def _family(family: Capability) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    split = {0: "one kernel for every row count", NO_BATCH_EXCEEDS: "could not be read: every call keeps its pad"}
    grid = Table.grid(padding=(0, 2))
    title = f"{family.family} {family.version}" if family.version else family.family
    grid.add_row(Text(title, "bold"), Text("what it accepts", "dim"), Text("read from", "dim"))
    rows = split.get(family.row_split, f"up to {family.row_split} rows decode, more prefill")
    grid.add_row("rows", rows, Text(family.source("row_split"), "dim"))
    for side in ("prefill", "decode"):
        if side == "decode" and family.row_split == 0 and family.fork == "rows":
            continue
        heads, topk = family.heads(side), family.topk(side)
        accepts = f"{words(heads)} heads" + ("" if topk is None else f", topk {words(topk)}")
        source = dict(family.sources).get(f"{side}_heads") or family.source("heads")
        grid.add_row(side, accepts, Text(source, "dim"))
    for problem in family.problems:
        grid.add_row(Text("problem", "yellow"), Text(problem, "yellow"), "")
    return grid


def _table(report: Report) -> tuple[RenderableType, dict[str, int]]:
    from rich.table import Table

    reasons: dict[str, int] = {}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    several = len(report.families) > 1
    heads = ("TP", "phase", "rows", "heads\nowned", "padded\nwidth", "width", "wasted\npadded", "wasted", "why")
    for header in ("kernel", *heads) if several else heads:
        left = header in ("kernel", "phase")
        table.add_column(header, justify="left" if left else "right", no_wrap=True)
    for row in report.table:
        number = reasons.setdefault(row.reason, len(reasons) + 1)
        cells = [
            str(row.tp),
            row.phase,
            str(row.rows),
            str(row.heads_owned),
            str(row.padded_width),
            "none" if row.width is None else str(row.width),
            f"{row.wasted_padded:.0%}",
            "-" if row.wasted is None else f"{row.wasted:.0%}",
            str(number),
        ]
        table.add_row(*([row.family, *cells] if several else cells))
    return table, reasons
