"""The computing warpgroups of ``hopper_wide``: those of the packed kernel, with keys that belong to one row.

Belongs here: what differs from ``hopper_packed_compute.py``: which scores count, and which queries a task has. A key of
a tile counts for all lanes or for none: where the list has none, bit by bit.
"""

# mypy: ignore-errors

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_compute as packed
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_place as place
from headfit.kernels import ptx, ptx_async

ALL_LOW, ALL_HIGH = -1, (1 << at.TILE - 32) - 1  # the bits of a tile whose keys are all there


class Ahead(packed.Ahead):
    """What the softmax of a tile needs beside its scores."""

    def __init__(self, f, members, parity, t, it):
        self.mask_at = f.base + place.MASK + place.MASK_BYTES * at.ring(it)[0]
        super().__init__(f, members, parity, t, it)

    def look(self, members, parity, t):
        """Which keys are there, from this thread's first on; whether any is not."""
        low, high = ptx.lds64(self.mask_at)
        shift = 2 * self.f.c
        self.bits = pasm.shift_right(low, shift), pasm.shift_right(high, shift)
        return ptx.ballot((low ^ ALL_LOW) | (high ^ ALL_HIGH))

    def keep(self, x, i):
        """The thread's i-th score, -inf where its key is not there."""
        eight = i >> 2
        return wasm.keep_where(x, self.bits[eight >> 2], 8 * (eight & 3) + (i & 1))


class Frame(packed.Frame):
    """A thread's places."""

    AHEAD = Ahead


def run_task(f, tasks, i, state):
    """All tiles of the i-th task, then its result. ``state``: tiles done before."""
    parity = i & 1
    queries = [tasks.query(i, f.m + 8 * lane) for lane in range(2)]
    sinks = [packed.sink_of(f.p, query) for query in queries]
    ptx_async.mbarrier_wait(f.base + at.Q_FULL, parity)
    keys = ptx.lds32(f.base + place.KEYS + parity * 4)
    packed.compute(f, queries, sinks, parity, keys, state[0])
    return [state[0] + at.tiles_of(keys)]
