"""Shared memory of the union prepass, and how a warp goes through a list in it.

Belongs here: where lists and numbers stand. Does not belong here: comparing (``hopper_union.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import ptx

ROWS = at.GROUP + 1  # the row before the group, then its own
THREADS = 32 * ROWS  # a warp a row
AT_ONCE = 4  # words of a list that a lane has under way
LANES_LIMIT = 768  # of both lists of a row: what there is room for
PITCH = 4 * (LANES_LIMIT + 4)  # bytes of a row; the second list begins at a multiple of 16

LISTS = 0  # [row] both lists
TOLD = LISTS + ROWS * PITCH  # [row][set] lane of the first key, keys, those that the row before has not, lanes
SMEM = TOLD + ROWS * 32 + 128 * AT_ONCE  # what stands behind is read, to no effect, from behind the last list


class Group:
    """A group of rows, as a thread of its CTA sees it; ``wid`` is the number of the thread's row, see `ROWS`."""

    def __init__(self, p, base, tid, wid, group):
        self.p, self.base, self.tid, self.wid, self.group = p, base, tid, wid, group
        self.lane = tid & 31
        self.first = ptx.equal(self.lane, Int32(0))
        self.sets = ptx.less(Int32(0), p.topk2) + 1
        self.pitch = ((p.topk1 + 3) >> 2) << 4  # of the sets within a row
        self.own = base + wid * PITCH

    def list(self, second):
        """Address of this warp's list of a set."""
        return self.own + second * self.pitch

    def told(self, second):
        """Address of what is said of this warp's list of a set, see `TOLD`; a row's are 32 bytes from the next's."""
        return self.base + self.wid * 32 + second * 16 + TOLD

    def words(self, begin, count, state, note):
        """``state`` after ``note(state, word, i)`` for ``count`` words from ``begin`` on, and for some behind."""

        def some(i, state):
            first = i * (32 * AT_ONCE) + self.lane
            words = [ptx.lds32(begin + first * 4, 128 * k) for k in range(AT_ONCE)]
            for k, word in enumerate(words):
                state = note(state, word, first + 32 * k)
            return state

        return pasm.loop(Int32(0), (count + (32 * AT_ONCE - 1)) >> 7, state, some)
