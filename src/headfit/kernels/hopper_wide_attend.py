"""The last kernel of ``hopper_wide``: attention of a row's heads, 64 at a time, over rows that are bf16 by now.

Belongs here: the kernel and its roles. Does not belong here: the computing (``hopper_wide_compute.py``) and loading
(``hopper_wide_load.py``) sides, shared memory, workspace and tasks (``hopper_wide_place.py``).

A persistent CTA of three warpgroups an SM, as the packed kernel's. Launch it behind ``hopper_wide_spread.spread``.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_packed import COMPUTE_REGISTERS, LOAD_REGISTERS, start_barriers
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_wide_compute import Frame, run_task
from headfit.kernels.hopper_wide_load import Copier, Guide

COPY_ARRIVALS = 32 * place.COPYING
BARRIERS = (  # where they stand, how many, arrivals of each
    (at.FULL, at.STAGES, 1), (at.EMPTY, at.STAGES, 8), (at.P_READY, 2, 4), (at.Q_FULL, 1, 1), (at.Q_EMPTY, 1, 8),
    (place.LOCATED, at.STAGES, 1), (place.LOADED, at.STAGES, COPY_ARRIVALS), (place.Q_LOADED, 1, COPY_ARRIVALS),
)  # fmt: skip


def attend():
    """The kernel."""

    @cute.kernel
    def sparse_mla_wide(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        wid = cute.arch.make_warp_uniform(tid >> 5)
        start_barriers(base, BARRIERS, ptx.equal(tid, Int32(0)))
        ptx_async.wait_for_kernel_before()
        ptx.sync(at.THREADS)
        tasks = place.Tasks(p, cta, ctas)
        lane = tid & 31
        if wid < 8:
            pasm.set_registers(COMPUTE_REGISTERS, True)
            frame = Frame(p, base, wid, lane)
            pasm.loop(Int32(0), tasks.count, [Int32(0)], lambda i, state: run_task(frame, tasks, i, state))
        else:
            pasm.set_registers(LOAD_REGISTERS, False)
            if wid < 8 + place.COPYING:
                Copier(tasks, base, wid - 8, lane).run()
            else:
                Guide(tasks, base, lane).run()

    return Traced(sparse_mla_wide, threads=at.THREADS, smem=place.SMEM, min_blocks=1)
