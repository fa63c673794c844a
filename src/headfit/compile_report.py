"""Compile every default configuration of the Triton kernels with no GPU, and report what each one takes.

``python -m headfit.compile_report`` prints registers, stack (spills) and shared memory of each binary; ``--write FILE``
puts them into the committed table, under the version of Triton that is installed. Belongs here: offline compilation and
what can be read off a binary. Does not belong here: launches, or settings (``kernels/configs.py``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headfit import arch as archs
from headfit.binaries import faults, put_figures, unwritten_reads
from headfit.kernels import common, configs
from headfit.kernels import triton as backend
from headfit.kernels.merge import sparse_mla_merge
from headfit.kernels.triton_decode import sparse_mla_split
from headfit.kernels.triton_prefill import sparse_mla_prefill

POINTERS = {
    "q": "*bf16", "out": "*bf16", "idx1": "*i32", "idx2": "*i32", "len1": "*i32", "len2": "*i32", "sink": "*fp32",
    "lse": "*fp32", "max_logits": "*fp32", "partial": "*fp32", "peaks": "*fp32", "totals": "*fp32",
}  # fmt: skip
ALIGNED = ("q", "out", "kv1", "kv2", "partial")  # the other pointers are declared not to be specialised on alignment


@dataclass(frozen=True)
class Variant:
    """One default binary: a kernel for an architecture, a layout and a head tile."""

    arch: archs.Arch
    kernel: str  # "prefill", "split" or "merge"
    layout: str
    d_qk: int
    config: configs.Config

    @property
    def name(self) -> str:
        """As the committed table calls it."""
        if self.kernel == "merge":
            return f"{self.arch.name} merge"
        return f"{self.arch.name} {self.kernel} {self.layout}-{self.d_qk} heads {self.config.head_tile}"


@dataclass(frozen=True)
class Resources:
    """What one program of a binary takes. ``stack`` above 0 means that registers are spilled.

    ``unwritten`` counts reads of a uniform register that nothing has written yet, a miscompilation by ptxas that was
    seen with Triton 3.6 on sm_90; None where the binary could not be disassembled or has no such registers.
    """

    registers: int
    stack: int
    shared: int
    unwritten: int | None


def variants() -> Iterator[Variant]:
    """Every default binary of every known architecture."""
    for arch in archs.KNOWN.values():
        for split in (False, True):
            for layout, dims in configs.LAYOUT_DIMS.items():
                for d_qk in dims:
                    for config in configs.table(arch, layout, d_qk, split=split):
                        yield Variant(arch, "split" if split else "prefill", layout, d_qk, config)
        yield Variant(arch, "merge", "v4", 512, configs.table(arch, "v4", 512, split=True)[0])


def constants(variant: Variant) -> dict[str, Any]:
    """The compile-time arguments a launch would pass: pages of a power of two, everything aligned to 16 bytes."""
    math = (common.CONVERT if variant.arch.converts_e4m3 else common.INTEGER).value
    if variant.kernel == "merge":
        return {"UNIT": 8, "MATH": math}
    config = variant.config
    return {
        "LAYOUT": backend.LAYOUTS[variant.layout, variant.d_qk],
        "H": config.head_tile,
        "BLOCK": config.block,
        "POW2": True,
        "ALIGN": 16,
        "UNIT": 8,
        "MATH": math,
        "WIDE": config.wide,
        "STAGES": config.stages,
        "AHEAD": config.ahead if variant.layout != "bf16" else 0,
        "AT_ONCE": config.at_once,
    }


def compile_variant(variant: Variant) -> Resources:
    """Compile one binary for its architecture, on any machine, and read its resources.

    Raises:
        RuntimeError: under TRITON_INTERPRET=1, where kernels are not compiled. Triton's errors otherwise.
    """
    if backend.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET: set, so kernels are interpreted; unset it to compile")
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    kernel: Any = {"prefill": sparse_mla_prefill, "split": sparse_mla_split, "merge": sparse_mla_merge}[variant.kernel]
    values = constants(variant)
    signature, attributes = _signature(kernel, variant.layout)
    places = {(kernel.arg_names.index(name),): value for name, value in values.items()}
    major, minor = variant.arch.capability
    warps = backend.MERGE_WARPS if variant.kernel == "merge" else variant.config.warps
    built = triton_compile(
        ASTSource(kernel, signature, places, attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": warps, "num_stages": variant.config.stages, "enable_fp_fusion": True},
    )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(built.asm["cubin"])
        usage = _run([knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)])
        sass = _run([knobs.nvidia.nvdisasm.path, "-c", str(binary)]) if variant.arch.warpgroup_mma else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump: no resource usage in its answer for {variant.name}: {usage[:200]!r}")
    unwritten = len(unwritten_reads(sass)) if sass else None
    return Resources(int(found[1]), int(found[2]), built.metadata.shared, unwritten)


def _signature(kernel: Any, layout: str) -> tuple[dict[str, str], dict[tuple[int], list[list[object]]]]:
    cache = "*bf16" if layout == "bf16" else "*u8"
    pointers = POINTERS | {"kv1": cache, "kv2": cache}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for place, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
        elif parameter.name in pointers:
            signature[parameter.name] = pointers[parameter.name]
            if parameter.name in ALIGNED:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    return signature, attributes


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def problems(variant: Variant, resources: Resources) -> list[str]:
    """What forbids to ship this binary."""
    found = []
    illegal = None if variant.kernel == "merge" else configs.why_illegal(variant.config, variant.arch)
    if illegal is not None:
        found.append(illegal)
    found += faults(variant.arch, resources.stack, resources.shared, resources.unwritten)
    return [f"{variant.name}: {text}" for text in found]


def main(argv: list[str] | None = None) -> int:
    """Compile all, print a line each; 1 if a binary may not be shipped."""
    import triton

    parser = argparse.ArgumentParser(prog="python -m headfit.compile_report", description=__doc__)
    parser.add_argument("--arch", nargs="+", choices=tuple(archs.KNOWN), default=tuple(archs.KNOWN))
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the figures into this JSON table")
    arguments = parser.parse_args(argv)
    table: dict[str, dict[str, int | None]] = {}
    bad: list[str] = []
    for variant in variants():
        if variant.arch.name not in arguments.arch:
            continue
        resources = compile_variant(variant)
        table[variant.name] = vars(resources)
        bad += problems(variant, resources)
        print(f"{variant.name:44} {resources.registers:4} registers {resources.stack:4} B stack "
              f"{resources.shared:7} B shared", flush=True)  # fmt: skip
    if arguments.write is not None:
        put_figures(arguments.write, ".".join(triton.__version__.split(".")[:2]), table)
    print(*bad, sep="\n", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
