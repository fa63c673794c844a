"""Attention time of a whole V4-Flash, from measured times of its layers; needs no GPU.

    python benchmarks/model_time.py RECORDS.json [MORE.json ...] [--chosen "128 + 512 overlap 60"] [--json OUT.json]

A records file is what `benchmarks/kernels.py --json` writes: of one or several backends; figures of later files replace
earlier ones. A chunk of prefill goes through every layer once: V4-Flash has 2 window-only layers, 21 that read
a window and 512 chosen rows, and 20 that read a window and every heavily compressed row, of which a context of 32k
tokens has 256. The sums are attention kernels alone, back to back; projections, communication and host time are not in
them.

Compared is FlashMLA by its best legal launch of each layer, whose bf16 route does not count the gather it needs, and by
its decode kernel on packed pages padded to 64 heads: the one route that reads the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADS = 64  # of V4-Flash; a rank of TP n has HEADS / n
CHOSEN = "128 + 512"
FASTEST = "fastest"
LAYERS: Mapping[str, int] = {"128": 2, CHOSEN: 21, "128 + 256 dense": 20}
ROWS = 4096
Lines = Mapping[tuple[str, str, int], Mapping[str, Any]]  # (backend, key set, heads) -> a line of the benchmark


@dataclass(frozen=True)
class ModelTime:
    """One backend at one number of heads; times in milliseconds for all layers of one chunk.

    ``best`` and ``packed`` are FlashMLA's best legal launches and its padded decode kernel; None where the records
    lack them. ``routes`` counts the layers of each best launch.
    """

    backend: str
    heads: int
    ours: float
    best: float | None
    packed: float | None
    routes: Mapping[str, int]

    @property
    def label(self) -> str:
        """The tensor-parallel size that leaves a rank so many heads of V4-Flash."""
        return f"TP{HEADS // self.heads}"


def lines_of(files: Sequence[Mapping[str, Any]], rows: int = ROWS) -> Lines:
    """The lines at ``rows`` rows of several records files; a later file's stand.

    Raises:
        ValueError: a file has no lines, or does not say whose they are.
    """
    found: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for content in files:
        if not content.get("lines"):
            raise ValueError(
                "records: got a file without 'lines', accepted is what benchmarks/kernels.py --json writes"
            )
        # files of the first forms name one backend for all lines, or only in their records
        names = {r["backend"] for r in content.get("records", ())} - {"flashmla"}
        one = content.get("backend") or (names.pop() if len(names) == 1 else None)
        for line in content["lines"]:
            backend = line.get("backend", one)
            if backend is None:
                raise ValueError("records: got lines that name no backend, accepted are lines with a 'backend' entry")
            if line["rows"] == rows:
                found[backend, line["keys"], line["heads"]] = line
    return found


def layers(chosen: str = CHOSEN) -> dict[str, int]:
    """How many layers of V4-Flash read each key set, ``chosen`` standing for those with chosen keys."""
    return {chosen if name == CHOSEN else name: count for name, count in LAYERS.items()}


def model_times(lines: Lines, chosen: str = CHOSEN) -> list[ModelTime]:
    """The whole model for every backend and number of heads that all its key sets were measured at.

    Where several were, ``FASTEST`` too: each key set by the backend that was the fastest at it, as ``backend=None``
    runs it. Only numbers of heads that a rank of V4-Flash has: divisors of 64.

    Raises:
        ValueError: no backend was measured at all key sets with one number of heads.
    """
    wanted = layers(chosen)
    times = []
    lines = {**lines, **_fastest(lines)}
    for backend, heads in sorted({(b, h) for b, _, h in lines if HEADS % h == 0}):
        found = {name: lines[backend, name, heads] for name in wanted if (backend, name, heads) in lines}
        if len(found) < len(wanted):
            continue
        best = {name: line.get("best_us") for name, line in found.items()}
        packed = {name: line.get("flashmla", {}).get(f"decode {HEADS}") for name, line in found.items()}
        routes: dict[str, int] = {}
        for name, line in found.items():
            if best[name] is not None:
                routes[line["best_route"]] = routes.get(line["best_route"], 0) + wanted[name]
        ours = {name: line["us"] for name, line in found.items()}
        total = _total(ours, wanted)
        if total is None:
            raise ValueError(f"records: got a line of {backend} without 'us'")
        times.append(ModelTime(backend, heads, total, _total(best, wanted), _total(packed, wanted), routes))
    if not times:
        raise ValueError(f"records: got no backend measured at all of {', '.join(map(repr, wanted))} and these rows")
    return times


def _fastest(lines: Lines) -> Lines:
    """Of each key set and number of heads that several backends were measured at, the line with the least time."""
    by_shape: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for (_, name, heads), line in lines.items():
        by_shape.setdefault((name, heads), []).append(line)
    return {
        (FASTEST, name, heads): min(found, key=lambda line: float(line["us"]))
        for (name, heads), found in by_shape.items()
        if len(found) > 1
    }


def _total(microseconds: Mapping[str, float | None], count: Mapping[str, int]) -> float | None:
    """Milliseconds over all layers; None if a key set has no time."""
    total = 0.0
    for name, us in microseconds.items():
        if us is None:
            return None
        total += us * count[name] / 1e3
    return total


def table(times: Sequence[ModelTime]) -> str:
    """One line for each backend and number of heads; a ratio above 1 means headfit is faster."""

    def against(ours: float, theirs: float | None) -> str:
        return f"{'-':>9}{'-':>7}" if theirs is None else f"{theirs:>9.1f}{theirs / ours:>7.2f}"

    rows = [f"{'backend':<13}{'':<6}{'heads':>5}{'ms':>9}{'best':>9}{'ratio':>7}{'packed':>9}{'ratio':>7}  best routes"]
    for t in times:
        routes = ", ".join(f"{name} x {n}" for name, n in t.routes.items())
        rows.append(
            f"{t.backend:<13}{t.label:<6}{t.heads:>5}{t.ours:>9.1f}{against(t.ours, t.best)}"
            f"{against(t.ours, t.packed)}  {routes}"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the chunk (default: %(default)s)")
    parser.add_argument("--chosen", default=CHOSEN, help="key set of the 21 layers with chosen keys")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        lines = lines_of([json.loads(path.read_text(encoding="utf-8")) for path in options.records], options.rows)
        times = model_times(lines, options.chosen)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    parts = " + ".join(f"{n} x '{name}'" for name, n in layers(options.chosen).items())
    print(f"V4-Flash, a chunk of {options.rows} rows: {parts}; milliseconds, FlashMLA's beside ours")
    print(table(times))
    if options.json:
        content = {"rows": options.rows, "layers": layers(options.chosen), "times": [vars(t) for t in times]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
