"""Small kernels of the Hopper family for tests: imported by the compiler alone, as the real ones are."""

# No `from __future__ import annotations`: the DSL reads the annotations.

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir.dialects import llvm

from headfit.kernels.hopper_params import Params, Traced


def store(place, value):
    """One word to global memory."""
    values = [place.ir_value(), value.ir_value()]
    llvm.inline_asm(None, values, "st.global.b32 [$0], $1;", "l,r,~{memory}", has_side_effects=True,
                    is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT)  # fmt: skip


def small(threads):
    """Writes the first and the last parameters, and a sum over a loop of a length that is known at run time."""

    @cute.kernel
    def write_some(p: Params):
        thread, _, _ = cute.arch.thread_idx()
        total = thread
        for i in cutlass.range(p.topk1, unroll=1):
            total = total + i * p.topk2
        if thread < p.rows:
            store(p.q + Int64(thread) * 4, total)
        store(p.zeros, p.h_q)

    return Traced(write_some, threads=threads, smem=2048, min_blocks=2)


def broken():
    """Cannot be traced."""
    raise RuntimeError("\x1b[91mthis kernel\x1b[0m\n is broken")
