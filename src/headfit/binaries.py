"""What is said of binaries that were compiled for a GPU that is not here, whichever compiler made them.

Belongs here: what forbids to ship one, and the committed table of figures. Does not belong here: compiling them
(``compile_report.py``, ``hopper_report.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headfit.arch import Arch


def faults(arch: Arch, stack: int, shared: int, unwritten: int | None) -> list[str]:
    """What the figures of a binary forbid: spilled registers, too much shared memory, a miscompilation of ptxas."""
    found = []
    if stack:
        found.append(f"spills: a stack of {stack} B")
    if shared > arch.shared_bytes:
        found.append(f"{shared} B of shared memory, {arch.name} has {arch.shared_bytes}")
    if unwritten:
        found.append(f"ptxas reads {unwritten} uniform registers that nothing wrote")
    return found


def put_figures(path: Path, version: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Put figures, by binary, into the JSON table at ``path``, under a compiler's ``version``; others stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[version] = known.get(version, {}) | table
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def unwritten_reads(sass: str) -> list[str]:
    """Uniform registers of a Hopper binary that are read before, in program order, anything writes them.

    The first pass through a loop then computes with whatever they hold. Code here has no forward branch over a write
    that matters, so program order is the order of a first pass.
    """
    written: set[int] = set()
    bad = []
    for line in sass.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", line)
        if found is None:
            continue
        operation, arguments = found.groups()
        if operation == "ELECT":  # writes a predicate first
            arguments = arguments.partition(",")[2].strip()
        first, _, rest = arguments.partition(",")
        writes = operation.startswith(("U", "R2UR", "S2UR", "LDCU", "VOTEU", "ELECT")) and re.fullmatch(
            r"UR\d+", first.strip()
        )
        reads = rest if writes else arguments
        wanted = {int(r) + i for r in re.findall(r"gdesc\[UR(\d+)\]", reads) for i in range(4)}
        wanted |= {int(r) for r in re.findall(r"(?<!gdesc\[)\bUR(\d+)\b", reads)}
        bad += [f"{line.strip()}  # UR{r}" for r in sorted(wanted - written)]
        if writes:
            width = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
            written |= {int(first.strip()[2:]) + i for i in range(width)}
    return bad
