"""The last kernel of ``hopper_wide``: attention of a row's heads, 64 at a time, over rows that are bf16 by now.

Belongs here: the kernel and its roles. Does not belong here: the computing (``hopper_wide_compute.py``) and loading
(``hopper_wide_load.py``) sides, shared memory, workspace and tasks (``hopper_wide_place.py``).

A persistent CTA of three warpgroups an SM, as the packed kernel's. Launch it behind ``hopper_wide_spread.spread``.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32

from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx
from headfit.kernels.hopper_packed import persistent
from headfit.kernels.hopper_params import Params, Traced
from headfit.kernels.hopper_wide_compute import Frame, run_task
from headfit.kernels.hopper_wide_load import Copier, Guide

COPY_ARRIVALS = 32 * place.COPYING
BARRIERS = (  # as `persistent` has them
    (at.FULL, at.STAGES, 1), (at.EMPTY, at.STAGES, 8), (at.P_READY, 2, 4), (at.Q_FULL, 1, 1), (at.Q_EMPTY, 1, 8),
    (place.LOCATED, at.STAGES, 1), (place.LOADED, at.STAGES, COPY_ARRIVALS), (place.Q_LOADED, 1, COPY_ARRIVALS),
)  # fmt: skip


def attend():
    """The kernel."""

    @cute.kernel
    def sparse_mla_wide(p: Params):
        run(p, place.Tasks, Frame, Guide)

    return Traced(sparse_mla_wide, threads=at.THREADS, smem=place.SMEM, min_blocks=1)


def run(p, tasks_of, frame_of, guide_of):
    """The life of a CTA, with its own kind of tasks, and of those who find its keys and know what rows list."""

    def load(tasks, base, tid, wid):
        copier, guide = Copier(tasks, base, wid - 8, tid & 31), guide_of(tasks, base, tid & 31)
        ptx.when(ptx.less(wid, Int32(8 + place.COPYING)), copier.run, guide.run)

    persistent(p, BARRIERS, tasks_of, frame_of, run_task, load)
