"""The parameter list of ``hopper_abi.py`` as traced code sees it, and how a kernel is handed over for compilation.

Belongs here: what every Hopper kernel file needs of the DSL to be compiled. Does not belong here: instructions
(``ptx.py``), kernels. This module imports the DSL, so only kernel files import it, and they only to compile.

A kernel file has a function that ``hopper_build.Spec`` names; it defines the kernel and returns it::

    def native(heads):
        @cute.kernel
        def sparse_mla_native(p: Params):
            x, y, _ = cute.arch.block_idx()
            ...  # p.q is an Int64, p.topk1 an Int32, p.scale_log2 a Float32

        return Traced(sparse_mla_native, threads=128, smem=SMEM, min_blocks=2)

No ``from __future__ import annotations`` there: the DSL reads the annotation of ``p`` as it stands.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from headfit.kernels.hopper_abi import PARAMETERS

KINDS = {"i64": cutlass.Int64, "i32": cutlass.Int32, "f32": cutlass.Float32}


class Params:
    """All launch parameters as one argument: an attribute each, in the order of the table.

    The DSL flattens it into scalar kernel parameters by the protocol below.
    """

    def __init__(self, values):
        for (name, _), value in zip(PARAMETERS, values, strict=True):
            setattr(self, name, value)

    def __get_mlir_types__(self):
        return [KINDS[kind].mlir_type for _, kind in PARAMETERS]

    def __extract_mlir_values__(self):
        return [v for name, _ in PARAMETERS for v in getattr(self, name).__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values):
        return Params([KINDS[kind](v) for (_, kind), v in zip(PARAMETERS, values, strict=True)])

    def __c_pointers__(self):
        return [p for name, _ in PARAMETERS for p in getattr(self, name).__c_pointers__()]


def placeholder() -> Params:
    """A value for each parameter, to compile with: none of them ends up in the binary."""
    return Params([KINDS[kind](0) for _, kind in PARAMETERS])


@dataclass(frozen=True)
class Traced:
    """A kernel that is ready to be compiled.

    ``kernel`` is a ``@cute.kernel`` of one argument of type `Params`; ``smem`` bytes of dynamic shared memory;
    ``min_blocks`` CTAs that have to fit an SM, which bounds the registers of a thread.
    """

    kernel: Any
    threads: int
    smem: int
    min_blocks: int = 1


def host(traced: Traced) -> Any:
    """The ``@cute.jit`` function that launches it. It is compiled and never called: `cubin` launches."""

    @cute.jit
    def launch(p: Params):
        traced.kernel(p).launch(
            grid=(1, 1, 1),
            block=(traced.threads, 1, 1),
            smem=traced.smem,
            min_blocks_per_mp=traced.min_blocks,
            preferred_smem_carveout=100,
        )

    return launch
