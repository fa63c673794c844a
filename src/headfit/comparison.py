"""What `headfit compare` was asked and what it found, as plain data, and the one table that screen, JSON and page are
made of.

Belongs here: frozen records, derived numbers, (de)serialisation, formatting of figures. Must not: torch, processes,
drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headfit.capability import MAX_HEADS, Capability
from headfit.width import Call, Policy, plan_width

SCHEMA = "headfit.compare/1"
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "native": Policy.native,
    "sm12x-prefill": Policy.sm12x_prefill,
    "padded": Policy.padded,
}
KIND_NAMES = {
    "sliding": "sliding window",
    "compressed_sparse": "compressed sparse",
    "heavily_compressed": "heavily compressed",
}
# From a value of `limit` on, in `unit`: this many digits.
_SPANS = (
    (99.95, 1.0, 0, "s"),
    (9.995, 1.0, 1, "s"),
    (0.9995, 1.0, 2, "s"),
    (99.95, 1e3, 0, "ms"),
    (9.995, 1e3, 1, "ms"),
    (0.9995, 1e3, 2, "ms"),
    (99.95, 1e6, 0, "us"),
)
_LAUNCH = (
    " On a GPU each runs from one synchronisation to the next and so holds the launch from Python, which is most of a "
    "short call: the kernels alone take less."
)
TP_AXIS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Options:
    """One request. `prompt` and `model` are paths as typed (None:

    the default), `prompt_tokens` 0 means all, `command` is for the record.
    """

    tp: int = 2
    model: str | None = None
    prompt: str | None = None
    prompt_tokens: int = 2560
    prefill_chunk: int = 512
    new_tokens: int = 24
    policy: str = "native"
    seed: int = 0
    backend: str | None = None
    cache_layout: str = "v4"
    device: str = "auto"
    command: str = "headfit compare"


@dataclass(frozen=True)
class Environment:
    """Where the figures come from.

    `packages` are (name, version) pairs, `devices` one entry a rank, `commit` "" outside a checkout.
    """

    packages: tuple[tuple[str, str], ...]
    commit: str
    platform: str
    cpu: str
    cores: int
    threads_per_rank: int
    devices: tuple[str, ...]
    group: str
    started: str


@dataclass(frozen=True)
class Workload:
    """What ran: tokens, chunks, decode steps, the model in words, its heads, who computed the attention."""

    model: str
    layers: int
    heads: int
    dtype: str
    prompt: str
    prompt_tokens: int
    prompt_tokens_all: int
    chunks: int
    new_tokens: int
    backend: str
    cache_layout: str
    policy_off: str
    policy_on: str
    sparse: bool


@dataclass(frozen=True)
class LaneRow:
    """All attention calls of one phase and layer kind that were decided alike.

    `rows` are query tokens over all `calls`; times are seconds of the attention call alone, one figure a rank;
    `identical` says whether every surviving bit of output and log-sum-exp was the same on every rank.
    """

    phase: str
    kind: str
    layers: int
    calls: int
    rows: int
    heads: int
    width_off: int
    width_on: int
    reason_off: str
    reason: str
    seconds_off: tuple[float, ...]
    seconds_on: tuple[float, ...]
    identical: bool

    @property
    def off(self) -> float:
        """Seconds of the slowest rank, padded."""
        return max(self.seconds_off)

    @property
    def on(self) -> float:
        """Seconds of the slowest rank, at the planned width."""
        return max(self.seconds_on)

    @property
    def saved(self) -> float:
        """Share of the padded lane's time that is gone, -inf..1."""
        return 1 - self.on / self.off if self.off > 0 else 0.0


@dataclass(frozen=True)
class PhaseTotal:
    """A phase over all its layer kinds: the slowest rank's sum, off and on, in seconds."""

    phase: str
    off: float
    on: float

    @property
    def saved(self) -> float:
        """Share of the padded lane's time that is gone."""
        return 1 - self.on / self.off if self.off > 0 else 0.0


@dataclass(frozen=True)
class FirstDifference:
    """Where the runs part first, in words and in numbers (see `headfit.verify.Difference`)."""

    step: int
    token: int
    layer: int | None
    stage: str
    rank: int
    sentence: str


@dataclass(frozen=True)
class WastePoint:
    """At `tp` ranks a rank owns `heads` heads and the pad launches `width`;

    `wasted` of the arithmetic is thrown away, 0..1.
    """

    tp: int
    heads: int
    width: int
    wasted: float


@dataclass(frozen=True)
class Comparison:
    """One run of `headfit compare`."""

    options: Options
    environment: Environment
    workload: Workload
    lanes: tuple[LaneRow, ...]
    tokens_off: tuple[int, ...]
    tokens_on: tuple[int, ...]
    text_off: str
    text_on: str
    first_difference: FirstDifference | None
    checked_elements: int
    wall_seconds: float
    forward_seconds_off: float
    forward_seconds_on: float
    waste: tuple[WastePoint, ...]

    @property
    def same_text(self) -> bool:
        """Whether the greedy continuations are the same, token by token."""
        return self.tokens_off == self.tokens_on

    @property
    def same_bits(self) -> bool:
        """Whether no compared bit differs: attention, log-sum-exp, layer outputs, logits."""
        return self.first_difference is None and all(lane.identical for lane in self.lanes)

    @property
    def exit_code(self) -> int:
        """0 when nothing changed, 1 when a surviving bit or a token did."""
        return 0 if self.same_bits and self.same_text else 1

    def phases(self) -> tuple[PhaseTotal, ...]:
        """Totals in the order in which the phases ran."""
        totals = []
        for phase in dict.fromkeys(lane.phase for lane in self.lanes):
            lanes = [lane for lane in self.lanes if lane.phase == phase]
            off = max(sum(times) for times in zip(*(lane.seconds_off for lane in lanes), strict=True))
            on = max(sum(times) for times in zip(*(lane.seconds_on for lane in lanes), strict=True))
            totals.append(PhaseTotal(phase, off, on))
        return tuple(totals)


# ---------------------------------------------------------------- serialisation


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything JSON can hold, derived figures included, so that a reader need not recompute them.

    A byte of a file's name that is no UTF-8 is shown as `\\udcNN`: a record holds only text that every reader takes.
    """
    data: dict[str, Any] = {"schema": SCHEMA, **_as_text(asdict(comparison))}
    for lane, entry in zip(comparison.lanes, data["lanes"], strict=True):
        entry.update(off=lane.off, on=lane.on, saved=lane.saved)
    data["phases"] = [{**asdict(total), "saved": total.saved} for total in comparison.phases()]
    data["verdict"] = {
        "bit_identical": comparison.same_bits,
        "text_identical": comparison.same_text,
        "exit_code": comparison.exit_code,
    }
    return data


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _as_text(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_text(entry) for entry in value)
    return value


def from_dict(data: Mapping[str, Any]) -> Comparison:
    """The inverse of `to_dict`. Raises ValueError for another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"schema is {data.get('schema')!r}, accepted is {SCHEMA!r}: write the file again with this version"
        )
    environment = dict(data["environment"])
    environment["packages"] = tuple((name, version) for name, version in environment["packages"])
    environment["devices"] = tuple(environment["devices"])
    first = data["first_difference"]
    return Comparison(
        options=Options(**data["options"]),
        environment=Environment(**environment),
        workload=Workload(**data["workload"]),
        lanes=tuple(_lane(entry) for entry in data["lanes"]),
        tokens_off=tuple(data["tokens_off"]),
        tokens_on=tuple(data["tokens_on"]),
        text_off=data["text_off"],
        text_on=data["text_on"],
        first_difference=None if first is None else FirstDifference(**first),
        checked_elements=data["checked_elements"],
        wall_seconds=data["wall_seconds"],
        forward_seconds_off=data["forward_seconds_off"],
        forward_seconds_on=data["forward_seconds_on"],
        waste=tuple(WastePoint(**point) for point in data["waste"]),
    )


def _lane(entry: Mapping[str, Any]) -> LaneRow:
    values = {name: entry[name] for name in LaneRow.__dataclass_fields__}
    values["seconds_off"], values["seconds_on"] = tuple(entry["seconds_off"]), tuple(entry["seconds_on"])
    return LaneRow(**values)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Table:
    """Formatted cells, the same on the screen and on the page.

    `notes` are the reasons, numbered from 1 in the last column.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def lane_table(comparison: Comparison) -> Table:
    """One line per phase, layer kind and decision."""
    notes: dict[str, int] = {}
    rows = []
    for lane in comparison.lanes:
        note = notes.setdefault(lane.reason, len(notes) + 1)
        rows.append(
            (
                lane.phase,
                KIND_NAMES.get(lane.kind, lane.kind),
                f"{lane.rows}",
                f"{lane.heads}",
                f"{lane.width_off} -> {lane.width_on}",
                duration(lane.off),
                duration(lane.on),
                percent(lane.saved),
                "yes" if lane.identical else "NO",
                f"{note}",
            )
        )
    headers = ("phase", "layers", "rows", "heads", "width", "lane off", "lane on", "saved", "same", "why")
    return Table(headers, tuple(rows), tuple(notes))


def verdicts(comparison: Comparison) -> tuple[tuple[str, str, bool | None], ...]:
    """(question, answer, good / bad / neither) lines that follow the table."""
    lines: list[tuple[str, str, bool | None]] = []
    for total in comparison.phases():
        lines.append(
            (
                f"{total.phase} lane",
                f"{duration(total.off)} -> {duration(total.on)}, {saving(total.saved)}",
                None,
            )
        )
    bits = f"yes, {comparison.checked_elements:,} elements compared" if comparison.same_bits else "NO"
    lines.append(("every surviving bit equal", bits, comparison.same_bits))
    count = len(comparison.tokens_on)
    lines.append(
        ("greedy text identical", f"yes, {count} tokens" if comparison.same_text else "NO", comparison.same_text)
    )
    if comparison.first_difference is not None:
        lines.append(("first difference", comparison.first_difference.sentence, False))
    passes = f"off {comparison.forward_seconds_off:.1f} s, on {comparison.forward_seconds_on:.1f} s"
    lines.append(("wall time", f"{comparison.wall_seconds:.1f} s (forward passes: {passes})", None))
    return tuple(lines)


def timing_note(comparison: Comparison) -> str:
    """How the lane was measured, in one sentence."""
    ranks = comparison.options.tp
    slowest = f"the slowest of {ranks} ranks" if ranks > 1 else "the one rank"
    on_cpu = comparison.environment.group == "gloo" or comparison.workload.backend == "cpu"
    launch = "" if on_cpu else _LAUNCH
    return (
        f"Lane times are the attention call alone, summed over calls, of {slowest}; off and on alternate and swap "
        f"order at every step.{launch}"
    )


def subject_line(comparison: Comparison) -> str:
    """Model and backend."""
    work = comparison.workload
    return (
        f"{work.model}: {work.layers} layers, {work.heads} heads, TP {comparison.options.tp}, {work.backend} backend, "
        f"{work.cache_layout} cache"
    )


def prompt_line(comparison: Comparison) -> str:
    """Prompt, chunks, and whether the sparse choice had anything to choose from."""
    work = comparison.workload
    tokens = f"{work.prompt_tokens:,} of {work.prompt_tokens_all:,} tokens in {work.chunks} chunks"
    choice = "" if work.sparse else "; too short for the indexer to leave a row out"
    return f"{work.prompt}, {tokens} of up to {comparison.options.prefill_chunk}{choice}"


def waste_of(heads: int) -> tuple[WastePoint, ...]:
    """What the pad throws away at each tensor-parallel size that divides `heads`, by the planner itself."""
    any_width = Capability("any", None, 0, range(1, MAX_HEADS + 1), range(1, MAX_HEADS + 1))
    points = []
    for tp in (n for n in TP_AXIS if heads % n == 0):
        decision = plan_width(Call(rows=1, n_local=heads // tp, n_heads=heads), any_width, Policy.padded())
        points.append(WastePoint(tp, heads // tp, decision.width, decision.wasted))
    return tuple(points)


def duration(seconds: float) -> str:
    """Three digits with a unit."""
    for limit, scale, digits, unit in _SPANS:
        if seconds * scale >= limit:
            return f"{seconds * scale:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def percent(share: float) -> str:
    """A share as a signed percentage without a sign where it is positive."""
    return f"{100 * share:.1f} %"


def saving(share: float) -> str:
    """A share of time saved, in words that fit a loss as well."""
    return f"{percent(share)} saved" if share >= 0 else f"{percent(-share)} more"


def distinct(values: Iterable[str]) -> str:
    """Each value once, in order, joined."""
    return ", ".join(dict.fromkeys(values))
