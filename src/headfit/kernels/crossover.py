"""The measured crossover: in which order ``backend=None`` tries the backends, from a table and not by taste.

Belongs here: the table's form, its loader, the look-up. Does not belong here: measuring (``benchmarks/kernels.py``),
asking whether a backend takes a call (``kernels.choose`` does, in the order given here).

``crossover.json`` beside this file::

    {"schema": 1,
     "tables": [{"gpu": "NVIDIA H200",                   what torch.cuda.get_device_name says: an H20 is another GPU
                 "measured": {"command": "...", ...},    provenance, free form, required
                 "points": [{"layout": "v4", "lanes": [128, 512], "rows": 4096, "heads": 8,
                             "us": {"triton": 402.0, "flashmla": 1212.0}}]}]}

``lanes`` are the lanes of each key set. A call is looked up at the nearest point of its layout and number of key sets,
in log2 of rows, heads and lanes, of those with as many heads or more; outside twice the measured range of any of the
three the table says nothing. No table for a GPU, or no word for a call: registry order. The look-up sees shapes only: a
captured graph and its replay agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from headfit.call import SparseCall

PATH: Final = Path(__file__).with_name("crossover.json")
LAYOUTS: Final = ("v4", "v32", "bf16")
REACH: Final = 2.0  # a point speaks for calls up to this factor outside the measured range


@dataclass(frozen=True)
class Shape:
    """A call, as far as the choice depends on it."""

    layout: str
    sets: int
    rows: int
    heads: int
    lanes: int


@dataclass(frozen=True)
class Point:
    """One measured call: backends with their microseconds, fastest first."""

    shape: Shape
    times: tuple[tuple[str, float], ...]


Tables = Mapping[str, tuple[Point, ...]]


def order(call: SparseCall, names: Sequence[str], tables: Tables | None = None) -> tuple[str, ...]:
    """``names`` in the order to try them for ``call``: the measured ones by time, then the others as they come.

    Args:
        call: only its shapes are read. Calls on a CPU keep the order given.
        names: backends in registry order.
        tables: GPU name -> points; None: the table that is shipped.
    """
    if call.q.device.type != "cuda":
        return tuple(names)
    device = call.q.device
    gpu = _gpu_name(torch.cuda.current_device() if device.index is None else device.index)
    points = (_shipped() if tables is None else tables).get(gpu, ())
    return ranked(names, fastest(points, shape_of(call)))


def shape_of(call: SparseCall) -> Shape:
    """What the table is asked about ``call``."""
    lanes = sum(keys.topk for keys in call.key_sets)
    return Shape(call.key_sets[0].layout, len(call.key_sets), call.rows, call.h_q, lanes)


def ranked(names: Sequence[str], measured: Sequence[str]) -> tuple[str, ...]:
    """``names`` with the measured ones first, in the order of ``measured``."""
    first = [name for name in measured if name in names]
    return (*first, *(name for name in names if name not in first))


@lru_cache(maxsize=4096)
def fastest(points: tuple[Point, ...], shape: Shape) -> tuple[str, ...]:
    """Backends at the point nearest to ``shape``, fastest first; empty where no point speaks for it."""
    point = nearest(points, shape)
    return () if point is None else tuple(name for name, _ in point.times)


def nearest(points: Sequence[Point], shape: Shape) -> Point | None:
    """The measured point that speaks for ``shape``, or None: the nearest of as many heads or more, if there is one."""
    family = [p for p in points if (p.shape.layout, p.shape.sets) == (shape.layout, shape.sets)]
    for axis in ("rows", "heads", "lanes"):
        value, known = getattr(shape, axis), [getattr(p.shape, axis) for p in family]
        if not known or not min(known) / REACH <= value <= max(known) * REACH:
            return None
    enough = [p for p in family if p.shape.heads >= shape.heads]  # kernels compute whole tiles of heads
    return min(enough or family, key=lambda p: _distance(p.shape, shape))


def _distance(a: Shape, b: Shape) -> float:
    pairs = ((a.rows, b.rows), (a.heads, b.heads), (a.lanes, b.lanes))
    return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in pairs)


def load(path: Path = PATH) -> dict[str, tuple[Point, ...]]:
    """The tables of ``path``, by GPU name; none where the file is missing.

    Raises:
        ValueError: the file is not of the form above; the text says where.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: not JSON: {error}") from None
    return parse(content, path.name)


def parse(content: Any, where: str = "crossover table") -> dict[str, tuple[Point, ...]]:
    """`load` of a file's content.

    Raises:
        ValueError: it is not of the form above; the text says where.
    """
    if not isinstance(content, dict) or content.get("schema") != 1 or not isinstance(content.get("tables"), list):
        raise ValueError(f'{where}: need {{"schema": 1, "tables": [...]}}')
    tables: dict[str, tuple[Point, ...]] = {}
    for number, table in enumerate(content["tables"]):
        at = f"{where}: tables[{number}]"
        if not isinstance(table, dict) or not isinstance(table.get("gpu"), str) or not table.get("measured"):
            raise ValueError(f"{at}: need gpu, a name, and measured, how the figures were made")
        if table["gpu"] in tables:
            raise ValueError(f"{at}: {table['gpu']} has a table already")
        tables[table["gpu"]] = tuple(_point(p, f"{at}.points[{i}]") for i, p in enumerate(table.get("points", ())))
    return tables


def _point(raw: Any, at: str) -> Point:
    if not isinstance(raw, dict):
        raise ValueError(f"{at}: got {raw!r}, need an object")
    layout, lanes, times = raw.get("layout"), raw.get("lanes"), raw.get("us")
    if layout not in LAYOUTS:
        raise ValueError(f"{at}.layout: got {layout!r}, accepted are {', '.join(LAYOUTS)}")
    if not isinstance(lanes, list) or not 1 <= len(lanes) <= 2 or not all(_count(n) for n in lanes):
        raise ValueError(f"{at}.lanes: got {lanes!r}, need the lanes of one or two key sets")
    if not _count(raw.get("rows")) or not _count(raw.get("heads")):
        raise ValueError(f"{at}: rows and heads are counts, got {raw.get('rows')!r} and {raw.get('heads')!r}")
    if not isinstance(times, dict) or not times or not all(_time(t) for t in times.values()):
        raise ValueError(f"{at}.us: got {times!r}, need microseconds by backend name")
    ordered = tuple(sorted(((name, float(t)) for name, t in times.items()), key=lambda pair: pair[1]))
    return Point(Shape(layout, len(lanes), raw["rows"], raw["heads"], sum(lanes)), ordered)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


@cache
def _shipped() -> dict[str, tuple[Point, ...]]:
    return load()


@cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)
