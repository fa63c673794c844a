"""The page of a comparison: one HTML file that needs nothing else, written whole or not at all.

Belongs here: plots, the template's inputs, atomic writing. Must not: measure, decide, format a figure that
`comparison` formats already.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headfit import comparison as data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "index.html"
_INK = "#010203"  # stands for the page's text colour: replaced by currentColor, so that a plot follows light and dark
_OFF, _ON = "#9aa0a8", "#3d85d6"  # readable on both grounds
_REMEDY = "install the page's extra: pip install 'headfit[compare]'"


def check_installed() -> None:
    """Raise ImportError with the remedy when the page's libraries are missing;

    called before the work, not after it.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--report needs {error.name}: {_REMEDY}") from None


def check_writable(path: Path) -> None:
    """Raise OSError where `write_atomically` could not write `path`, by making and removing a temporary file where it
    would go; makes no folder.
    """
    if _is_special(path):
        with open(path, "ab"):
            return
    there = next(parent for parent in path.absolute().parents if parent.exists())
    handle, name = tempfile.mkstemp(prefix=_prefix(path), dir=there)
    os.close(handle)
    os.unlink(name)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` through a temporary file in the same folder and a rename; makes the folder where
    it is missing. A pipe or a device is written to as it is. Lone surrogates come out escaped.

    A reader sees the old file or the whole new one. Raises OSError, leaving no temporary file.
    """
    if _is_special(path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _prefix(path: Path) -> str:
    return f".{path.name[:50]}."  # the whole of a long name and more would be too long a name


def _is_special(path: Path) -> bool:
    """Whether `path` is there and no file that can be replaced: /dev/stdout, a FIFO."""
    return path.exists() and not path.is_file()


def render(comparison: data.Comparison) -> str:
    """The page as text. Raises ImportError with the remedy when jinja2 or matplotlib is missing."""
    check_installed()
    import jinja2

    source = resources.files("headfit").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        c=comparison,
        headline=headline(comparison),
        facts=_facts(comparison),
        table=data.lane_table(comparison),
        verdicts=data.verdicts(comparison),
        timing_note=data.timing_note(comparison),
        record=_record(comparison),
        lane_plot=lane_plot(comparison),
        waste_plot=waste_plot(comparison),
    )


def headline(comparison: data.Comparison) -> str:
    """The result in one sentence."""
    first = comparison.phases()[0]
    cost = (
        f"{first.phase} attention takes {data.percent(first.saved)} less time"
        if first.saved > 0
        else f"no {first.phase} time saved"
    )
    if comparison.exit_code == 0:
        return f"Without the pad, {cost}, and no bit changes"
    return f"Without the pad, {cost}, but the results differ"


def _facts(comparison: data.Comparison) -> list[tuple[str, str, str]]:
    lanes = comparison.lanes
    facts = []
    for total in comparison.phases():
        facts.append(
            (
                data.percent(total.saved),
                f"of the {total.phase} lane saved ({data.duration(total.off)} to {data.duration(total.on)})",
                "",
            )
        )
    narrow = data.distinct(str(lane.width_on) for lane in lanes)
    wide = data.distinct(str(lane.width_off) for lane in lanes)
    facts.append((f"{wide} to {narrow}", f"heads launched, for {lanes[0].heads} owned", ""))
    same = comparison.exit_code == 0
    facts.append(
        (
            "identical" if same else "different",
            f"bits and text, over {len(comparison.tokens_on)} new tokens",
            "good" if same else "bad",
        )
    )
    return facts


def _record(comparison: data.Comparison) -> list[tuple[str, str]]:
    env, work = comparison.environment, comparison.workload
    return [
        ("model", f"{work.model}, {work.layers} layers, {work.heads} heads, {work.dtype}"),
        ("prompt", data.prompt_line(comparison)),
        ("attention", f"{work.backend} backend, {work.cache_layout} cache"),
        ("policies", f"off: {work.policy_off}, on: {work.policy_on}"),
        ("seed", str(comparison.options.seed)),
        ("ranks", f"{comparison.options.tp} ({env.group}): {data.distinct(env.devices)}"),
        ("processor", f"{env.cpu}, {env.cores} cores; threads a rank: {env.threads_per_rank}"),
        ("system", env.platform),
        ("packages", ", ".join(f"{name} {version}" for name, version in env.packages)),
        ("commit", env.commit or "not run from a checkout"),
        ("started", env.started),
    ]


# ---------------------------------------------------------------- plots


def _figure(width: float, height: float, rows: int = 1, ratios: list[int] | None = None) -> tuple[Figure, list[Any]]:
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no backend, no global state

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: it takes the page's font and can be searched
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    grid = figure.subplots(rows, 1, squeeze=False, gridspec_kw={"height_ratios": ratios} if ratios else None)
    axes = [row[0] for row in grid]
    for axis in axes:
        axis.patch.set_alpha(0.0)
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.tick_params(colors=_INK, length=0, labelsize=11)
    return figure, axes


def _svg(figure: Figure, salt: str, label: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": salt}
    ):  # the same figures give the same bytes, and two plots share no id
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", opening)
    rest = rest.replace("xlink:href", "href").replace(_INK, "currentColor")
    rest = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font-size: \1px", rest)
    rest = re.sub(r'id="(figure|axes|patch|matplotlib|xtick|ytick|text|line2d)[\w.]*"', "", rest)
    return f'{opening} role="img" aria-label="{label}">{rest}'.strip()


def _label(axis: Any, text: str, at: tuple[float, float], shift: tuple[int, int], **alignment: str) -> None:
    axis.annotate(text, at, shift, textcoords="offset points", fontsize=10.5, color=_INK, **alignment)


def lane_plot(comparison: data.Comparison) -> str:
    """SVG: lane time per phase (one panel each) and layer kind, off above on, with what was saved."""
    totals = comparison.phases()
    bars = {total.phase: _by_kind(comparison, total.phase) for total in totals}
    figure, axes = _figure(
        6.2, 1.0 + 0.72 * sum(len(kinds) for kinds in bars.values()), len(totals), [len(bars[t.phase]) for t in totals]
    )
    for axis, total in zip(axes, totals, strict=True):
        kinds = bars[total.phase]
        for place, (_, off, on) in enumerate(kinds):
            saved = data.saving(1 - on / off if off > 0 else 0.0)
            for shift, value, text, colour, name in (
                (-0.19, off, data.duration(off), _OFF, "padded (off)"),
                (0.19, on, f"{data.duration(on)}, {saved}", _ON, "planned width (on)"),
            ):
                axis.barh(place + shift, value, height=0.34, color=colour, label=name if place == 0 else None)
                _label(axis, text, (value, place + shift), (5, 0), va="center")
        axis.set_yticks(range(len(kinds)), [data.KIND_NAMES.get(kind, kind) for kind, _, _ in kinds])
        axis.invert_yaxis()
        widest = max(off for _, off, _ in kinds)
        axis.set_xlim(0, max(1.18 * widest, *(on + 0.42 * widest for _, _, on in kinds)))  # room for the labels
        axis.set_xticks([])
        axis.set_title(total.phase, loc="left", fontsize=12, color=_INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=10.5,
        labelcolor=_INK,
        handlelength=1.1,
    )
    return _svg(figure, "lane", "Attention-lane time by phase and layer kind")


def _by_kind(comparison: data.Comparison, phase: str) -> list[tuple[str, float, float]]:
    lanes = [lane for lane in comparison.lanes if lane.phase == phase]
    kinds = []
    for kind in dict.fromkeys(lane.kind for lane in lanes):
        mine = [lane for lane in lanes if lane.kind == kind]
        off = max(sum(times) for times in zip(*(lane.seconds_off for lane in mine), strict=True))
        on = max(sum(times) for times in zip(*(lane.seconds_on for lane in mine), strict=True))
        kinds.append((kind, off, on))
    return kinds


def waste_plot(comparison: data.Comparison) -> str:
    """SVG: share of the attention arithmetic thrown away by the pad, against the number of ranks."""
    points = comparison.waste
    figure, (axis,) = _figure(6.2, 3.9)
    places = range(len(points))
    colours = [_ON if point.tp == comparison.options.tp else _OFF for point in points]
    axis.bar(places, [100 * point.wasted for point in points], width=0.62, color=colours)
    for place, point in zip(places, points, strict=True):
        _label(axis, f"{100 * point.wasted:.3g} %", (place, 100 * point.wasted), (0, 4), ha="center")
    axis.set_xticks(places, [f"TP {point.tp}\n{point.heads} of {point.width}" for point in points])
    axis.set_yticks([])
    axis.set_ylim(0, 108)
    axis.set_title(f"wasted arithmetic, {comparison.workload.heads} heads", loc="left", fontsize=12, color=_INK)
    return _svg(figure, "waste", "Arithmetic wasted by padding against tensor-parallel ranks")
