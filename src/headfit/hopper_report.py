"""Compile every Hopper binary with no GPU, and report what each one takes.

``python -m headfit.hopper_report`` prints a line each; ``--write FILE`` puts the figures into the committed table,
under the version of the DSL; ``--keep FOLDER`` leaves the cubins there. Belongs here: figures of binaries and what
forbids to ship one. Does not belong here: compiling (``kernels/hopper_build.py``), launching.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headfit import arch as archs
from headfit.binaries import faults, put_figures, unwritten_reads
from headfit.kernels import hopper, hopper_build, hopper_pairs, hopper_wide
from headfit.kernels.hopper_build import Binary, Spec

CHIP = archs.named("sm_90")
SPECS = (*hopper.SPECS, *hopper_wide.SPECS, *hopper_pairs.SPECS)
REGISTERS, THREADS = 64 * 1024, 2048  # of an SM
RESERVED = 1024  # bytes of shared memory that each CTA takes beside its own


@dataclass(frozen=True)
class Resources:
    """What one CTA of a binary takes. ``stack`` above 0: registers are spilled. ``ctas``: how many an SM holds.

    From the disassembly, None where there is no nvdisasm: ``fences``, waits and fences of the matrix unit (they double
    where ptxas runs the products one after another); ``unwritten``, as in ``binaries``.
    """

    registers: int
    stack: int
    shared: int
    threads: int
    ctas: int
    fences: int | None
    unwritten: int | None


def resources(binary: Binary) -> Resources:
    """The figures of a binary."""
    by_registers = REGISTERS // (-(-binary.registers // 8) * 8 * binary.threads)
    by_shared = (CHIP.shared_bytes + RESERVED) // (binary.shared + RESERVED)
    ctas = min(by_registers, by_shared, THREADS // binary.threads)
    sass = _disassembly(binary.image)
    fences = unwritten = None
    if sass is not None:
        fences, unwritten = sass.count(" WARPGROUP."), len(unwritten_reads(sass))
    return Resources(binary.registers, binary.stack, binary.shared, binary.threads, ctas, fences, unwritten)


def _disassembly(image: bytes) -> str | None:
    """The instructions, by the nvdisasm that Triton brings; None without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.cubin"
        place.write_bytes(image)
        done = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(place)], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def problems(spec: Spec, found: Resources) -> list[str]:
    """What forbids to ship this binary."""
    bad = faults(CHIP, found.stack, found.shared, found.unwritten)
    return [f"{spec.name}: {text}" for text in bad]


def main(argv: list[str] | None = None) -> int:
    """Compile all, print a line each; 1 if a binary may not be shipped."""
    parser = argparse.ArgumentParser(prog="python -m headfit.hopper_report", description=__doc__)
    names = [spec.name for spec in SPECS]
    parser.add_argument("names", nargs="*", default=names, help=f"binaries: {', '.join(names)}; all of them by default")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the cubins there")
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the figures into this JSON table")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"names: got {', '.join(sorted(unknown))}, accepted are {', '.join(names)}")
    table: dict[str, dict[str, int | None]] = {}
    bad: list[str] = []
    for spec in SPECS:
        if spec.name not in arguments.names:
            continue
        binary = hopper_build.compile_spec(spec)
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{spec.name.replace(' ', '-')}.cubin").write_bytes(binary.image)
        found = resources(binary)
        table[spec.name] = vars(found)
        bad += problems(spec, found)
        print(f"{spec.name:24} {found.registers:4} registers {found.stack:4} B stack {found.shared:7} B shared "
              f"{found.ctas:3} CTAs an SM {found.fences!s:>5} fences", flush=True)  # fmt: skip
    if arguments.write is not None:
        put_figures(arguments.write, str(hopper_build.dsl_version()), table)
    print(*bad, sep="\n", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
