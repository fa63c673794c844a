"""What the union prepass needs of PTX beyond ``ptx.py``: comparisons of lists, steps of a warp, bits.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: what is
compared or added up, and why (``hopper_union.py``, ``hopper_expand.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels.ptx import asm

# --- lists


def highest_if(high, word, i, n):
    """The higher, unsigned, of ``high`` and ``word`` where ``i < n``, else ``high``."""
    code = "{ .reg .pred p; setp.lt.s32 p, $3, $4; @p max.u32 $0, $0, $2; }"
    return asm([Int32], [high, word, i, n], code, "=r,0,r,r,r", False)[0]


def difference_if(bits, a, b, i, n):
    """``bits`` and those that differ between a and b where ``i < n``, else ``bits``."""
    code = "{ .reg .pred p; .reg .b32 t; setp.lt.s32 p, $4, $5; xor.b32 t, $2, $3; @p or.b32 $0, $0, t; }"
    return asm([Int32], [bits, a, b, i, n], code, "=r,0,r,r,r,r", False)[0]


def note_key(found, word, i, n, slots):
    """How many lanes have a key, the first and the last; with lane ``i``, whose index is ``word``, where ``i < n``."""
    code = (
        "{ .reg .pred p; setp.lt.s32 p, $7, $8; setp.lt.and.u32 p, $6, $9, p; "
        "@p add.s32 $0, $0, 1; @p min.s32 $1, $1, $7; @p mov.b32 $2, $7; }"
    )
    return asm([Int32] * 3, [*found, word, i, n, slots], code, "=r,=r,=r,0,1,2,r,r,r,r", False)


def total(x, kind):
    """Sum (``add``), ``min`` or ``max`` of the warp's words."""
    return asm([Int32], [x], f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", "=r,r")[0]


def add_from_above(x, n):
    """The word plus that of the lane ``n`` further within its eight lanes, where there is one."""
    code = (
        "{ .reg .pred p; .reg .b32 t; "
        + f"shfl.sync.down.b32 t|p, $1, {n}, 0x181f, 0xffffffff; @p add.s32 $0, $1, t; }}"
    )
    return asm([Int32], [x], code, "=r,0")[0]


def add_from_below(x, n):
    """The word plus that of the lane ``n`` before, where there is one."""
    code = "{ .reg .pred p; .reg .b32 t; " + f"shfl.sync.up.b32 t|p, $1, {n}, 0, 0xffffffff; @p add.s32 $0, $1, t; }}"
    return asm([Int32], [x], code, "=r,0")[0]


def from_lane(x, lane):
    """The word of lane ``lane``."""
    return asm([Int32], [x, lane], "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r")[0]


# --- bits


def outside(word, n):
    """``word >= n``, unsigned."""
    return asm([Int32], [word, n], "{ .reg .pred p; setp.ge.u32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,r,r", False)[0]


def popc(x):
    """Bits set."""
    return asm([Int32], [x], "popc.b32 $0, $1;", "=r,r", False)[0]


def lowest(x):
    """Number of the lowest bit set; 32 where there is none."""
    return asm([Int32], [x], "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", False)[0]
