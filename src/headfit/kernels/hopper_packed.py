"""The packed kernel of Hopper: queries are M, 64 lanes of (row, head), against keys that the lanes' rows share.

Belongs here: the kernel and its roles. It serves groups of 8 rows whose lists the union prepass (``hopper_union.py``)
found to overlap, from keys that ``hopper_expand.py`` dequantised. Does not belong here: the computing
(``hopper_packed_compute.py``) and loading (``hopper_packed_load.py``) sides, shared memory and tasks
(``hopper_packed_place.py``), launching (``hopper.py``).

A persistent CTA of three warpgroups an SM: two compute, one loads. Launch any number of CTAs along x, best one an SM.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_packed_compute import Frame, run_task
from headfit.kernels.hopper_packed_load import Loader
from headfit.kernels.hopper_params import Params, Traced

COMPUTE_REGISTERS, LOAD_REGISTERS = 224, 56  # of a thread; 2 x 224 + 56 warpgroups fill the register file

BARRIERS = (  # as `persistent` has them; a warp arrives once
    (at.FULL, at.STAGES, 1), (at.EMPTY, at.STAGES, 8), (at.P_READY, 2, 4), (at.Q_FULL, 1, 4), (at.Q_EMPTY, 1, 8),
)  # fmt: skip


def packed():
    """The kernel for groups of rows with keys in sequences, prepared in the workspace ``work``."""

    @cute.kernel
    def sparse_mla_packed(p: Params):
        def load(tasks, base, tid, wid):
            Loader(tasks, base, tid & 127).run(ptx.equal(wid, Int32(8)))

        persistent(p, BARRIERS, at.Tasks, Frame, run_task, load)

    return Traced(sparse_mla_packed, threads=at.THREADS, smem=at.SMEM, min_blocks=1)


def persistent(p, barriers, tasks_of, frame_of, run_task, load):
    """The life of a CTA: it waits for the kernel before, then two warpgroups compute all its tasks and one loads.

    ``barriers``: where they stand, how many, arrivals of each; ``tasks_of`` and ``frame_of`` make the tasks of a CTA
    and the places of a computing thread; ``run_task`` computes one; ``load(tasks, base, tid, wid)`` brings all.
    """
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
    wid = cute.arch.make_warp_uniform(tid >> 5)
    start_barriers(base, barriers, ptx.equal(tid, Int32(0)))
    ptx_async.wait_for_kernel_before()
    ptx.sync(at.THREADS)
    tasks = tasks_of(p, cta, ctas)

    def compute():
        pasm.set_registers(COMPUTE_REGISTERS, True)
        frame = frame_of(p, base, wid, tid & 31)
        pasm.loop(Int32(0), tasks.count, [Int32(0)], lambda i, state: run_task(frame, tasks, i, state))

    def bring():
        pasm.set_registers(LOAD_REGISTERS, False)
        load(tasks, base, tid, wid)

    ptx.when(ptx.less(wid, Int32(8)), compute, bring)


def start_barriers(base, barriers, flag):
    """Initialise all barriers, where ``flag``."""
    for place, number, arrivals in barriers:
        for i in range(number):
            ptx_async.mbarrier_init_if(base + place + 8 * i, arrivals, flag)
    ptx_async.mbarrier_init_done()
