"""What `headfit doctor` found, as data, and its two forms: `render` for a terminal, `to_json`.

Belongs here: `Row`, `Report` and how they look. Does not belong here: finding anything out (`headfit.doctor`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headfit.capability import NO_BATCH_EXCEEDS, Capability, words
from headfit.layouts import ASSUMPTION, Layout, advice
from headfit.machine import Fact
from headfit.stacks import NAMES, StackWidth

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Row:
    """One situation: what padding and today's stacks launch, what headfit launches, what each wastes, and why."""

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
    stacks: tuple[StackWidth, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that `headfit doctor` says.

    ``families``: the kernel families that the table is about; ``others``: further ones that are here or were asked for.
    ``stacks``: the engines of the table, and where their versions come from.
    """

    machine: tuple[Fact, ...]
    gpu: str
    compute_capability: tuple[int, int] | None
    here: bool  # whether the table is about this machine
    families: tuple[Capability, ...]
    others: tuple[Capability, ...]
    model: str
    n_heads: int
    policy: str
    table: tuple[Row, ...]
    stacks: tuple[str, ...]
    layouts: tuple[Layout, ...]

    @property
    def advice(self) -> tuple[str, ...]:
        """Which TP x DP layout wastes least: a sentence for today's stacks, one with headfit."""
        return advice(self.layouts, self.families[-1].family)


def to_json(report: Report) -> str:
    """The report as JSON: the fields of `Report`, head sets as sorted lists, an unreadable row split as null."""
    fields = dataclasses.asdict(report)
    for family in (*fields["families"], *fields["others"]):
        if family["row_split"] == NO_BATCH_EXCEEDS:
            family["row_split"] = None
        family["sources"] = dict(family["sources"])
    fields["advice"] = [*report.advice, ASSUMPTION]
    return json.dumps(fields, indent=1, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, range):
        return {"from": value.start, "step": value.step}
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def render(report: Report) -> RenderableType:
    """The report for a terminal: machine, what each family accepts, widths, layouts, and the reasons."""
    from rich.console import Group
    from rich.text import Text

    where = "this machine" if report.here else "not necessarily here"
    cc = report.compute_capability
    gpu = report.gpu if cc is None else f"{report.gpu}, compute capability {cc[0]}.{cc[1]}"
    parts: list[RenderableType] = [_facts(report.machine), Text()]
    for family in (*report.families, *report.others):
        parts += [_family(family), *(Text(f"problem: {p}", "yellow") for p in family.problems), Text()]
    parts.append(Text(f"{report.model}: {report.n_heads} heads on {gpu} ({where}), policy {report.policy}", "bold"))
    parts += [Text(line, "dim") for line in report.stacks]
    table, notes = _table(report)
    parts += [table, *(Text(note, "dim") for note in notes), Text()]
    if report.layouts:
        parts += [_layouts(report.layouts), *(Text(line) for line in report.advice), Text(ASSUMPTION, "dim")]
    return Group(*parts)


def _facts(facts: tuple[Fact, ...]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for fact in facts:
        grid.add_row(fact.name, Text(fact.value, "" if fact.ok else "yellow"))
    return grid


_ROWS_WORDS: Final = {
    0: "one kernel for every row count",
    NO_BATCH_EXCEEDS: "could not be read: every call keeps its pad",
}


def _family(family: Capability) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(overflow="fold")
    title = f"{family.family} {family.version}" if family.version else family.family
    rows = _ROWS_WORDS.get(family.row_split, f"up to {family.row_split} rows decode, more prefill")
    if family.fork == "entry":
        rows = "prefill and decode are two entries"
    grid.add_row(Text(title, "bold"), Text("what it accepts", "dim"), Text("read from", "dim"))
    grid.add_row("rows", rows, Text(family.source("row_split") if family.fork == "rows" else "", "dim"))
    for side in ("prefill", "decode"):
        if side == "decode" and family.row_split == 0 and family.fork == "rows":
            continue
        heads, topk = family.heads(side), family.topk(side)
        accepts = f"{words(heads)} heads" + ("" if topk is None else f", topk {words(topk)}")
        if side == "prefill" and family.dual_prefill_topk is not None:
            accepts += f" ({words(family.topk(side, two_caches=True) or ())} with two caches)"
        source = dict(family.sources).get(f"{side}_heads") or family.source("heads")
        grid.add_row(side, accepts, Text(source, "dim"))
    sources = dict(family.sources)
    if "page_sizes" in sources:
        pages = "any size" if family.page_sizes is None else f"{_counts(family.page_sizes)} tokens"
        if family.extra_page_sizes is not None:
            pages += f", second cache {_counts(family.extra_page_sizes)}"
        grid.add_row("pages", f"{pages}; layouts {', '.join(family.layouts)}", Text(sources["page_sizes"], "dim"))
    if "topk" in sources:
        grid.add_row("topk", "", Text(sources["topk"], "dim"))
    return grid


def _counts(sizes: Container[int]) -> str:
    return words(sizes) if isinstance(sizes, Iterable) else str(sizes)


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"z{number}"


def _cell(width: int | None, wasted: float | None, mark: str) -> str:
    return f"none {mark}" if width is None or wasted is None else f"{width} {wasted:4.0%} {mark}"


def _table(report: Report) -> tuple[RenderableType, list[str]]:
    """The widths, each with the share it wastes and the mark of its reason; and the reasons."""
    from rich.table import Table

    marks: dict[tuple[str, str], str] = {}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    several = len({row.family for row in report.table}) > 1
    headers = ["TP", "phase", "rows", "heads\nowned"]
    for stack in report.table[0].stacks if report.table else ():
        headers.append(f"{NAMES.get(stack.stack, stack.stack)}\n{stack.version or 'width'}")
    headers.append("headfit\nwidth, waste")
    for header in ["kernel", *headers] if several else headers:
        left = header in ("kernel", "phase")
        table.add_column(header, justify="left" if left else "right", no_wrap=True)
    reasons: dict[str, int] = {}
    for row in report.table:
        cells = [str(row.tp), row.phase, str(row.rows), str(row.heads_owned)]
        for stack in row.stacks:
            key = (NAMES.get(stack.stack, stack.stack), stack.reason)
            cells.append(_cell(stack.width, stack.wasted, marks.setdefault(key, _letter(len(marks)))))
        number = str(reasons.setdefault(row.reason, len(reasons) + 1))
        cells.append(_cell(row.width, row.wasted, number))
        table.add_row(*([row.family, *cells] if several else cells))
    notes = [f"{mark}  {stack}: {reason}" for (stack, reason), mark in marks.items()]
    notes += [f"{number}  why: {reason}" for reason, number in reasons.items()]
    return table, notes


def _layouts(options: Iterable[Layout]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    headers = (
        "layout", "heads\nowned", "wasted\ntoday", "wasted\nheadfit", "copies of\nthe cache",
        "cache B a token,\nall GPUs", "attention weights,\nGB a GPU",
    )  # fmt: skip
    for header in headers:
        table.add_column(header, justify="left" if header == "layout" else "right", no_wrap=True)
    for layout in options:
        waste = ["none" if w is None else f"{w:.0%}" for w in (layout.wasted_today, layout.wasted)]
        figures = (str(layout.kv_copies), str(layout.kv_bytes), f"{layout.weight_bytes / 1e9:.2f}")
        table.add_row(layout.name, str(layout.heads_owned), *waste, *figures)
    return table
