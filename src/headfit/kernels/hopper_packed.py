"""The packed kernel of Hopper: queries are M, 64 lanes of (row, head), against keys that the lanes' rows share.

Belongs here: the kernel and its roles. It serves groups of 8 rows whose lists the union prepass (``hopper_union.py``)
found to overlap. Does not belong here: the computing (``hopper_packed_compute.py``) and loading
(``hopper_packed_load.py``) sides, shared memory and tasks (``hopper_packed_place.py``), launching (``hopper.py``).

A persistent CTA of four warpgroups an SM: two compute, two load. Launch any number of CTAs along x, best one an SM.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_packed_compute import Frame
from headfit.kernels.hopper_packed_compute import run_task as compute_task
from headfit.kernels.hopper_packed_load import Loader
from headfit.kernels.hopper_params import Params, Traced

COMPUTE_REGISTERS, LOAD_REGISTERS = 192, (56, 72)  # of a thread; 2 x 192 + 56 + 72 warpgroups fill the register file


def packed():
    """The kernel for groups of rows with a union of keys, prepared in the workspace ``work``."""

    @cute.kernel
    def sparse_mla_packed(p: Params):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        base = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint())
        wid = cute.arch.make_warp_uniform(tid >> 5)
        start_barriers(base, ptx.equal(tid, Int32(0)))
        at.write_sets(p, base, ptx.equal(tid, Int32(32)))
        ptx_async.wait_for_kernel_before()
        ptx_async.start_dependents()
        ptx.sync(at.THREADS)
        tasks = at.Tasks(p, cta, ctas)
        lane = tid & 31
        if wid < 8:
            pasm.set_registers(COMPUTE_REGISTERS, True)
            frame = Frame(p, base, wid, lane)
            run(tasks, lambda task, tile, number: compute_task(frame, tasks, task, tile, number))
        else:
            if wid < 12:
                load(p, tasks, base, 0, tid, wid, lane)
            else:
                load(p, tasks, base, 1, tid, wid, lane)

    return Traced(sparse_mla_packed, threads=at.THREADS, smem=at.SMEM, min_blocks=1)


def start_barriers(base, flag):
    """Initialise all barriers; a warp arrives once, where queries arrive every loading thread does."""
    for place, number, warps in (
        (at.FULL, 2 * at.STAGES, 4), (at.EMPTY, 2 * at.STAGES, 4), (at.P_READY, 2, 4),
        (at.Q_FULL, 1, 256), (at.Q_EMPTY, 1, 8),
    ):  # fmt: skip
        for i in range(number):
            ptx_async.mbarrier_init_if(base + place + 8 * i, warps, flag)
    ptx_async.mbarrier_init_done()


def load(p, tasks, base, half, tid, wid, lane):
    """A loading warpgroup."""
    pasm.set_registers(LOAD_REGISTERS[half], False)
    loader = Loader(p, tasks, base, half, tid, wid, lane)
    run(tasks, loader.run_task)


def run(tasks, body):
    """``body(task, tiles done before, tasks done before)`` for every task that has keys."""

    def step(i, state):
        task = tasks.task(i)

        def work(state):
            body(task, state[0], state[1])
            return [state[0] + task.tiles, state[1] + 1]

        return pasm.choose(ptx.less(Int32(0), task.keys), state, work)

    pasm.loop(Int32(0), tasks.count, [Int32(0), Int32(0)], step)
