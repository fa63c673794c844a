"""PTX of what runs beside the threads: barriers in shared memory, copies, the matrix unit. As ``ptx.py``."""

# mypy: ignore-errors

from cutlass import Float32, Int32

from headfit.kernels.ptx import SHARED_STATE, asm


def fence_async():
    """Make this thread's ordinary writes to shared memory visible to the matrix unit and the copy engine."""
    asm([], [], "fence.proxy.async.shared::cta;", SHARED_STATE)


def mbarrier_init_if(a, count, flag):
    """Initialise a barrier for ``count`` arrivals where ``flag``."""
    code = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], {count}; }}"
    asm([], [a, flag], code, "r,r,~{memory}")


def mbarrier_init_done():
    """Make initialised barriers visible to the copy engine."""
    asm([], [], "fence.mbarrier_init.release.cluster;", SHARED_STATE)


def mbarrier_end_if(a, flag):
    """Make the barrier's place ordinary memory again, where ``flag``."""
    asm(
        [],
        [a, flag],
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.inval.shared::cta.b64 [$0]; }",
        "r,r,~{memory}",
    )


def mbarrier_wait(a, parity):
    """Wait until the phase of that parity is over."""
    code = "{ .reg .pred p; W${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra W${:uid}; }"
    asm([], [a, parity], code, "r,r,~{memory}")


def mbarrier_arrive_if(a, flag):
    """Arrive where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    asm([], [a, flag], code, "r,r,~{memory}")


def mbarrier_expect_if(a, size, flag):
    """Arrive and expect ``size`` further bytes, where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }"
    asm([], [a, size, flag], code, "r,r,r,~{memory}")


def copy_async(target, source, width, size=None, to=0, off=0):
    """Begin to copy 4, 8 or 16 (``width``, a constant) bytes from global to shared memory, from ``off`` to ``to``.

    With ``size`` only so many bytes are read, and the others become 0.
    """
    cache = "cg" if width == 16 else "ca"
    some, more, kinds = ([], "", "r,l") if size is None else ([size], ", $2", "r,l,r")
    code = f"cp.async.{cache}.shared.global [$0+{to}], [$1+{off}], {width}{more};"
    asm([], [target, source, *some], code, kinds + ",~{memory}")


def wait_copies():
    """Wait for what this thread has begun to copy with `copy_async`."""
    asm([], [], "cp.async.wait_all;", "~{memory}")


def mbarrier_arrive_after_copies(a):
    """Arrive when this thread's earlier ``copy_async`` are done."""
    asm([], [a], "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r,~{memory}")


def copy_four_rows(sources, off, target, barrier, size, pitch):
    """Bulk copies of ``size`` bytes, issued by one elected lane, from the four addresses at ``sources + off``.

    They go to ``target``, ``target + pitch``, ... and complete on ``barrier``.
    """
    # A branch, not predicates: a register that is loaded under a predicate counts as in use from its last use on.
    code = (
        "{ .reg .pred e; .reg .b32 d; .reg .b64 s0,s1,s2,s3; elect.sync _|e, 0xffffffff; @!e bra S${:uid}; "
        f"ld.shared.v2.b64 {{s0,s1}}, [$0+{off}]; ld.shared.v2.b64 {{s2,s3}}, [$0+{off + 16}]; "
    )
    for i in range(4):
        code += (
            f"add.s32 d, $1, {i * pitch}; "
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [d], [s{i}], {size}, [$2]; "
        )
    asm([], [sources, target, barrier], code + "S${:uid}: }", "r,r,r,~{memory}")


def wgmma_fence():
    """Registers written before may be read by the products that follow."""
    asm([], [], "wgmma.fence.sync.aligned;", SHARED_STATE)


def wgmma_commit():
    """Close a group of products."""
    asm([], [], "wgmma.commit_group.sync.aligned;", SHARED_STATE)


def wgmma_wait(pending):
    """Wait until at most ``pending`` groups are under way; their registers stay in use."""
    asm([], [], f"wgmma.wait_group.sync.aligned {pending};", SHARED_STATE)


def wgmma_wait_for(pending, values):
    """``wgmma_wait``, and the accumulators as they are then."""
    n = len(values)
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + [SHARED_STATE])
    return asm([Float32] * n, values, f"wgmma.wait_group.sync.aligned {pending};", constraints)


# --- clusters


def cluster_arrive(release):
    """Arrive at the cluster's barrier; with ``release`` what this thread knows to be written is seen behind it."""
    asm([], [], f"barrier.cluster.arrive.{'release' if release else 'relaxed'}.aligned;", SHARED_STATE)


def cluster_wait():
    """Wait until every thread of the cluster has arrived."""
    asm([], [], "barrier.cluster.wait.acquire.aligned;", SHARED_STATE)


def peer(a, rank):
    """The address, in the CTA ``rank`` of the cluster, of what is at ``a`` in this one."""
    return asm([Int32], [a, rank], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", False)[0]


def peer_lds64f_if(a, flag, other):
    """Two float32 of a CTA of the cluster where ``flag``, else ``other`` and 0."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, $4; mov.b32 $1, 0; "
        "@p ld.shared::cluster.v2.f32 {$0,$1}, [$2]; }"
    )
    return asm([Float32] * 2, [a, flag, other], code, "=&f,=&f,r,r,f,~{memory}")


def peer_lds128f_if(a, flag):
    """Four float32 of a CTA of the cluster where ``flag``, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.shared::cluster.v4.f32 {$0,$1,$2,$3}, [$4]; }"
    )
    return asm([Float32] * 4, [a, flag], code, "=&f,=&f,=&f,=&f,r,r,~{memory}")


# --- kernels that are launched before the one before them has ended


def wait_for_kernel_before():
    """Wait until the kernel before this one is done and its writes are seen.

    Every CTA waits, before it reads or writes global memory and before it ends: a kernel that ended without would let
    the one after it pass what came before both.
    """
    asm([], [], "griddepcontrol.wait;", "~{memory}")
