"""Merging the shares of a split row inside a cluster: each share stays in the shared memory of the CTA that made it.

Belongs here: where a share lies in shared memory, and everything from the last share to the row's result; also the way
of a share to global memory, where the CTAs of a row are no cluster. Does not belong here: making a share
(``hopper_native.py``); merging what is in global memory (``hopper_merge.py``), whose order and bits these are.

A cluster is the CTAs of one row and head tile, one a share, along y. A warp merges 128 dims of a head at a time; each
share's 512 bytes come straight out of its CTA's shared memory.
"""

# mypy: ignore-errors

from cutlass import Float32, Int32, Int64

from headfit.kernels import hopper_packed_asm as pasm
from headfit.kernels import ptx, ptx_async
from headfit.kernels.hopper_merge import NONE, not_zero, result

WARPS = 4
PITCH = 2064  # bytes from head to head: 512 float32, and 16 bytes for pairs of 4 x 2 heads to fall into other banks
MOST, FEW = 16, 4  # shares; code of its own for few, which would else pass over a dozen that are not there


def share_bytes(heads):
    """Shared memory of a share: values, then a running maximum and a total a head."""
    return heads * (PITCH + 8)


def value_at(base, head, dim):
    """Address of a value in the share at ``base``; two neighbouring dims may be stored as 8 bytes."""
    return base + head * PITCH + dim * 4


def statistics_at(base, heads, head):
    """Address of a head's maximum (-inf without a key) and, 4 bytes on, total, in the share at ``base``."""
    return base + heads * PITCH + head * 8


def close_share(p, heads, base, place, warp):
    """Make the row's result of its shares, of which this CTA's is being stored at ``base`` by all of its threads.

    Every thread of the CTA comes here, warps whole, in CTAs of 4 warps. Without ``p.partial`` the CTAs of a row are a
    cluster and merge; else the share goes to global memory for ``hopper_merge.py``.

    ``heads``: of the tile; ``base``: 16-byte aligned, the same in every CTA; ``place``: the row's addresses of ``out``
    and ``lse`` at the tile's first head, ``head0``, how many ``heads`` are there, ``share`` as [row, split, head0].
    """
    ptx.when(
        ptx.given(p.partial),
        lambda: send_share(p, heads, base, place, warp),
        lambda: merge_in_cluster(p, heads, base, place, warp),
    )


def every(begin, end, step, body):
    """``body(i)`` for ``i in range(begin, end, step)``, at run time."""

    def one(i, state):
        body(i)
        return state

    pasm.loop(begin, end, [], one, step)


def send_share(p, heads, base, place, warp):
    """Copy the share to global memory: 128 dims of a head a warp at a time; the first warp copies the statistics."""
    lane = ptx.lane()
    ptx.sync(32 * WARPS)

    def values(task):
        source = value_at(base, task >> 2, (task & 3) * 128) + lane * 16
        target = p.partial + ptx.wide(place.share + (task >> 2), Int64(2048))
        ptx.stg128f(ptx.at(target, (task & 3) * 512 + lane * 16), ptx.lds128f(source))

    def statistics():
        here, slot = ptx.less(lane, place.heads), place.share + lane
        peak, total = ptx.lds64f(statistics_at(base, heads, lane & (heads - 1)))
        ptx.stg32f_if(p.peaks + ptx.wide(slot, Int64(4)), peak, here)
        ptx.stg32f_if(p.totals + ptx.wide(slot, Int64(4)), total, here)

    ptx.when(ptx.equal(warp, Int32(0)), statistics)
    every(warp, place.heads * 4, Int32(WARPS), values)


def merge_in_cluster(p, heads, base, place, warp):
    """Wait for all shares of the cluster and merge what falls to this warp; no CTA leaves before all have read."""
    lane = ptx.lane()
    here = ptx.given(p.sink) & ptx.less(lane, place.heads)
    sinks = ptx.ldg32_if(ptx.at(p.sink, (place.head0 + lane) * 4), here, Int32(0xFF800000 - (1 << 32)))
    ptx.sync(32 * WARPS)
    # One warp answers for what the CTA's barrier made known to it: arriving with release is a fence of the whole GPU.
    ptx.when(ptx.equal(warp, Int32(0)), lambda: ptx_async.cluster_arrive(True), lambda: ptx_async.cluster_arrive(False))
    ptx_async.cluster_wait()
    first, tasks, step = ptx.block_y() + p.splits * warp, place.heads * 4, p.splits * WARPS

    def merge(task, most):
        total, acc, peak, low = merged(p, heads, base, task, lane, most)
        sink = ptx.shfl(ptx.as_float(sinks), task >> 2)
        write(p, place, task, lane, result(acc, peak, low, total, sink))

    ptx.when(
        ptx.less(p.splits, Int32(FEW + 1)),
        lambda: every(first, tasks, step, lambda task: merge(task, FEW)),
        lambda: every(first, tasks, step, lambda task: merge(task, MOST)),
    )
    ptx_async.cluster_arrive(False)  # what was read is used up by the stores above
    ptx_async.cluster_wait()


def merged(p, heads, base, task, lane, most):
    """Total, this lane's four dims, maximum and what weights are relative to, of 128 dims of a head.

    A lane reads the statistics of one share; all shares' values are sent for before the first is used.
    """
    own = statistics_at(base, heads, task >> 2)
    rank = lane & (most - 1)
    there = ptx.less(rank, p.splits)
    peak_of, total_of = ptx_async.peer_lds64f_if(
        ptx_async.peer(own, ptx.pick32(there, rank, Int32(0))), there, Float32(NONE)
    )
    values, place = [], value_at(base, task >> 2, (task & 3) * 128) + lane * 16
    for k in range(most):
        flag = Int32(1) if k < (2 if most == FEW else FEW + 1) else ptx.less(Int32(k), p.splits)
        values.append(ptx_async.peer_lds128f_if(ptx_async.peer(place, Int32(k)), flag))
    peak = peak_of
    for mask in (m for m in (8, 4, 2, 1) if m < most):
        peak = ptx.fmax(peak, ptx.shfl_xor(peak, mask))
    low = ptx.pickf(ptx.above(peak, 0xFF800000), peak, Float32(0.0))
    weight_of = ptx.ex2(peak_of - low)
    total, acc = Float32(0.0), [Float32(0.0)] * 4
    for k in range(most):
        weight, part = ptx.shfl(weight_of, Int32(k)), ptx.shfl(total_of, Int32(k))
        total = ptx.fma(part, weight, total)
        acc = ptx.fma_if(values[k], weight, acc, not_zero(part))
    return total, acc, peak, low


def write(p, place, task, lane, found):
    """Four dims of the output a lane; lse by the first lane of a head's first dims."""
    low, high, lse = found
    head, quarter = task >> 2, task & 3
    ptx.stg64(ptx.at(place.out + ptx.wide(head, p.out_h) * 2, quarter * 256 + lane * 8), [low, high])
    first = ptx.equal(quarter, Int32(0)) & ptx.equal(lane, Int32(0))
    ptx.stg32f_if(place.lse + ptx.wide(head, p.lse_h) * 4, lse, first)
