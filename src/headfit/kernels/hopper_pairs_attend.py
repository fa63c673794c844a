"""The last kernel of ``hopper_pairs``: attention of two rows at a time, over the keys that they have between them.

Belongs here: what differs from ``hopper_wide_attend.py`` and its sides: one list a pair, and a mask for each row.
Launch it behind ``hopper_pairs_merge.merge``.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import hopper_packed_compute as packed
from headfit.kernels import hopper_packed_place as at
from headfit.kernels import hopper_pairs_place as place
from headfit.kernels import hopper_wide_asm as wasm
from headfit.kernels import hopper_wide_attend, hopper_wide_compute, hopper_wide_load, ptx
from headfit.kernels import hopper_wide_place as wide
from headfit.kernels.hopper_params import Params, Traced


def attend():
    """The kernel."""

    @cute.kernel
    def sparse_mla_pairs(p: Params):
        hopper_wide_attend.run(p, place.Tasks, Frame, Guide)

    return Traced(sparse_mla_pairs, threads=at.THREADS, smem=wide.SMEM, min_blocks=1)


class Ahead(hopper_wide_compute.Ahead):
    """What the softmax of a tile needs beside its scores."""

    def look(self, members, parity, t):
        """Which keys either lane's row has, from this thread's first on; whether it has not all."""
        shift, self.bits, some = 2 * self.f.c, [], Int32(0)
        for member in members:
            low, high = ptx.lds64(self.mask_at + 8 * member)
            self.bits.append((pasm.shift_right(low, shift), pasm.shift_right(high, shift)))
            some = some | (low ^ hopper_wide_compute.ALL_LOW) | (high ^ hopper_wide_compute.ALL_HIGH)
        return ptx.ballot(some)

    def keep(self, x, i):
        """The thread's i-th score, -inf where its lane's row has not the key."""
        eight = i >> 2
        return wasm.keep_where(x, self.bits[(i >> 1) & 1][eight >> 2], 8 * (eight & 3) + (i & 1))


class Frame(packed.Frame):
    """A thread's places."""

    AHEAD = Ahead


class Guide(hopper_wide_load.Guide):
    """A lane of the warp that finds keys: of a pair's list, which says where they are."""

    load_masks, store_masks = staticmethod(ptx.lds128), staticmethod(ptx.sts128)

    def say_who_computes(self):
        """The merging kernel has said it."""

    def open(self, i, first, both):
        """A cursor at the first tile of the i-th task, as of two lists that are the same."""
        source = ptx.at(self.tasks.work.list(self.tasks.place(i)[0]), self.lane * 4)
        source = ptx.pick64(ptx.less(i, self.tasks.count), source, Int64(0))
        return [i, source, source, first, both, *self.tasks.lanes(i + 1)]

    def find(self, indices):
        """The rows of a tile's entries, as in lists of one row; which keys the first row has, and which the second."""
        a, b, _, keys = indices
        end = self.end_of(keys)
        found, listed = [], [[], []]
        for half, (entry, may) in enumerate(((a, Int32(1)), (b, self.also))):
            k = self.lane + 32 * half
            valid = may & ptx.less(k, keys)
            other = ptx.pick32(ptx.less(k, end), k, Int32(-1))
            found.append(ptx.pick32(valid, entry & place.ROW_BITS, other))
            for member, bit in enumerate(place.MEMBERS):
                listed[member].append(ptx.ballot(ptx.pick32(valid, entry & bit, Int32(0))))
        return [*found, *listed[0], *listed[1]]
