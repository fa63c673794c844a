"""Write the table that ``backend=None`` chooses from, out of measurements.

    python benchmarks/crossover.py RECORDS.json [MORE.json ...]

A records file is what a benchmark of the backends writes::

    {"gpu": "NVIDIA H200", "command": "...", "commit": "...", "torch": "...", "triton": "...",
     "records": [{"backend": "triton", "layout": "v4", "lanes": [128, 512], "rows": 4096, "heads": 8, "us": 402.0}]}

Everything beside ``gpu``, ``records`` and ``lines`` (a benchmark's own table) is kept as provenance. Records of one
shape become one point, in which a later file's figure stands; a shape that only one backend was timed at says nothing
about an order and is left out. The result is checked by reading it back.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headfit.kernels import REGISTRY, crossover


def table(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of ``crossover.json`` for the given records files; several files of one GPU become one table.

    Raises:
        ValueError: a record names a backend that ``backend=None`` must not choose, or is not of the form above.
    """
    by_gpu: dict[str, dict[str, Any]] = {}
    for content in files:
        entry = by_gpu.setdefault(content["gpu"], {"gpu": content["gpu"], "measured": [], "shapes": {}})
        entry["measured"].append({k: v for k, v in content.items() if k not in ("gpu", "records", "lines")})
        for record in content["records"]:
            if not getattr(REGISTRY.get(record["backend"]), "automatic", False):
                raise ValueError(f"backend: {record['backend']!r} is not one that backend=None may choose")
            shape = (record["layout"], tuple(record["lanes"]), record["rows"], record["heads"])
            entry["shapes"].setdefault(shape, {})[record["backend"]] = record["us"]
    tables = []
    for entry in by_gpu.values():
        points = [
            {"layout": layout, "lanes": list(lanes), "rows": rows, "heads": heads, "us": times}
            for (layout, lanes, rows, heads), times in sorted(entry.pop("shapes").items())
            if len(times) > 1
        ]
        tables.append(entry | {"points": points})
    content = {"schema": 1, "tables": tables}
    crossover.parse(content)
    return content


def text(content: dict[str, Any]) -> str:
    """The file: a line for each point, so that a new measurement reads as a diff."""
    tables = []
    for table in content["tables"]:
        points = ",\n".join("   " + json.dumps(point) for point in table["points"])
        head = json.dumps({k: v for k, v in table.items() if k != "points"})
        tables.append(f'  {head[:-1]}, "points": [\n{points}\n  ]}}')
    return f'{{"schema": {content["schema"]}, "tables": [\n' + ",\n".join(tables) + "\n]}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=crossover.PATH)
    options = parser.parse_args()
    content = table([json.loads(path.read_text(encoding="utf-8")) for path in options.records])
    options.out.write_text(text(content), encoding="utf-8")
    for entry in content["tables"]:
        print(f"{options.out}: {entry['gpu']}, {len(entry['points'])} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
