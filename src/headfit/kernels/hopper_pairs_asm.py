"""What ``hopper_pairs`` needs of PTX beyond ``ptx.py``: bitmaps of keys in shared memory.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: which keys are
marked, and what it means that two meet (``hopper_pairs_merge.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels.ptx import asm

WORD_AND_BIT = "shr.u32 a, $2, 5; shl.b32 a, a, 2; add.u32 a, a, $1; and.b32 b, $2, 31; "  # of bit $2 of a bitmap at $1


def mark_once(bitmap, number, size):
    """Set a bit, where the bitmap of a constant ``size`` has it; not 0 where it was set."""
    code = (
        f"{{ .reg .pred p; .reg .b32 a,b; setp.lt.u32 p, $2, {size}; {WORD_AND_BIT} shl.b32 b, 1, b; mov.b32 $0, 0; "
        "@p atom.shared.or.b32 $0, [a], b; and.b32 $0, $0, b; }"
    )
    return asm([Int32], [bitmap, number], code, "=&r,r,r,~{memory}")[0]


def marked(bitmap, number, size):
    """Whether the bitmap of a constant ``size`` has a bit, and it is set."""
    code = (
        f"{{ .reg .pred p; .reg .b32 a,b; setp.lt.u32 p, $2, {size}; {WORD_AND_BIT} mov.b32 $0, 0; "
        "@p ld.shared.b32 $0, [a]; shr.u32 $0, $0, b; and.b32 $0, $0, 1; }"
    )
    return asm([Int32], [bitmap, number], code, "=&r,r,r,~{memory}")[0]


def lds32_if(a, flag):
    """One word of shared memory where ``flag``, else 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }"
    return asm([Int32], [a, flag], code, "=&r,r,r,~{memory}")[0]
