"""What the union prepass needs of PTX beyond ``ptx.py``: a hash table in shared memory, counts and bits.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: what is
entered and why (``hopper_union.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels.ptx import asm


def bit(n):
    """1 << n."""
    return asm([Int32], [n], "shl.b32 $0, 1, $1;", "=r,r", False)[0]


def popc(x):
    """Bits set."""
    return asm([Int32], [x], "popc.b32 $0, $1;", "=r,r", False)[0]


def shared_add(a, v):
    """Add to a word of shared memory, whatever the order."""
    asm([], [a, v], "red.shared.add.u32 [$0], $1;", "r,r,~{memory}")


def shared_or(a, v):
    """Set bits of a word of shared memory."""
    asm([], [a, v], "red.shared.or.b32 [$0], $1;", "r,r,~{memory}")


def from_below(x, distance):
    """The word of the lane ``distance`` below, 0 where there is none."""
    code = f"{{ .reg .pred p; shfl.sync.up.b32 $0|p, $1, {distance}, 0, 0xffffffff; @!p mov.b32 $0, 0; }}"
    return asm([Int32], [x], code, "=r,r")[0]


def store64(p, v):
    """Store two words to global memory."""
    asm([], [p, *v], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r,~{memory}")


def hash_enter(base, key, position, row_bit, offsets, bits, limit):
    """Enter a key of a row into the table of 2^``bits`` slots: its first position and the mask of rows that have it.

    ``offsets``: of the keys (-1: free), first positions, masks, and the number of keys, from ``base``. Nothing is
    entered once there are more than ``limit`` keys, so a search always meets a free slot.
    """
    keys, positions, masks, count = offsets
    size = (1 << bits) - 1
    code = (
        "{ .reg .pred p,q; .reg .b32 h,a,k,o; "
        f"ld.volatile.shared.u32 o, [$0+{count}]; setp.gt.u32 p, o, {limit}; @p bra E${{:uid}}; "
        f"mul.lo.u32 h, $1, 0x9E3779B1; shr.u32 h, h, {32 - bits}; "
        f"L${{:uid}}: shl.b32 a, h, 2; add.u32 a, a, $0; ld.volatile.shared.u32 k, [a+{keys}]; "
        "setp.eq.u32 p, k, $1; @p bra F${:uid}; setp.ne.u32 q, k, 0xffffffff; @q bra N${:uid}; "
        f"add.u32 o, a, {keys}; atom.shared.cas.b32 k, [o], 0xffffffff, $1; "
        f"setp.eq.u32 p, k, 0xffffffff; @p red.shared.add.u32 [$0+{count}], 1; @p bra F${{:uid}}; "
        "setp.eq.u32 p, k, $1; @p bra F${:uid}; "
        f"N${{:uid}}: add.u32 h, h, 1; and.b32 h, h, {size}; bra L${{:uid}}; "
        f"F${{:uid}}: ld.volatile.shared.u32 o, [a+{positions}]; setp.gt.u32 p, o, $2; "
        f"@p red.shared.min.u32 [a+{positions}], $2; red.shared.or.b32 [a+{masks}], $3; E${{:uid}}: }}"
    )
    asm([], [base, key, position, row_bit], code, "r,r,r,r,~{memory}")


def hash_find(keys, key, bits):
    """Whether a key is in the table."""
    code = (
        f"{{ .reg .pred p; .reg .b32 h,a,k; mul.lo.u32 h, $2, 0x9E3779B1; shr.u32 h, h, {32 - bits}; "
        "L${:uid}: shl.b32 a, h, 2; add.u32 a, a, $1; ld.volatile.shared.u32 k, [a]; mov.b32 $0, 1; "
        "setp.eq.u32 p, k, $2; @p bra F${:uid}; mov.b32 $0, 0; setp.eq.u32 p, k, 0xffffffff; @p bra F${:uid}; "
        f"add.u32 h, h, 1; and.b32 h, h, {(1 << bits) - 1}; bra L${{:uid}}; F${{:uid}}: }}"
    )
    return asm([Int32], [keys, key], code, "=&r,r,r,~{memory}")[0]
