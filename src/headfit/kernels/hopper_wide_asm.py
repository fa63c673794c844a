"""What ``hopper_wide`` needs of PTX beyond ``ptx.py``: bitmaps, atomic operations on integers, single bits.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: what is marked
and copied, and why (``hopper_wide_*.py``).
"""

# mypy: ignore-errors

from cutlass import Float32, Int32

from headfit.kernels.ptx import asm


def mark(bitmap, index, slots, first, bits):
    """Set the bit of slot ``index``, if it is one, in a bitmap in shared memory.

    ``first``: what its number begins with, less that of the bitmap's first bit; ``bits``: those that the bitmap has.
    """
    code = (
        "{ .reg .pred p; .reg .b32 n,a,b,t; setp.lt.u32 p, $1, $2; add.s32 n, $1, $3; setp.lt.and.u32 p, n, $4, p; "
        "shr.u32 a, n, 5; shl.b32 a, a, 2; add.s32 a, a, $0; and.b32 b, n, 31; shl.b32 b, 1, b; "
        "mov.b32 t, -1; @p ld.shared.b32 t, [a]; and.b32 t, t, b; setp.eq.b32 p, t, 0; @p red.shared.or.b32 [a], b; }"
    )
    asm([], [bitmap, index, slots, first, bits], code, "r,r,r,r,r,~{memory}")


def or_global_if(p, v, flag):
    """Set the bits ``v`` of a word in global memory where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.global.or.b32 [$0], $1; }"
    asm([], [p, v, flag], code, "l,r,r,~{memory}")


def add_global_if(p, v, flag):
    """Add to a word in global memory where ``flag``; returns what it was, else 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; @p atom.global.add.u32 $0, [$1], $2; }"
    return asm([Int32], [p, v, flag], code, "=&r,l,r,r,~{memory}")[0]


def load32(p):
    """One word, not through the read-only path: the kernel before may have written it."""
    return asm([Int32], [p], "ld.global.b32 $0, [$1];", "=r,l,~{memory}")[0]


def make_nan(words, raw):
    """bf16 pairs, NaN where the byte of e4m3 that each was made of is one; two pairs of a word of ``raw``."""
    n = len(words)
    code = "{ .reg .b32 t,m; "
    for i in range(n // 2):
        code += f"and.b32 t, ${2 * n + i}, 0x7f7f7f7f; add.u32 t, t, 0x01010101; "
        for half, selector in enumerate((0x9988, 0xBBAA)):  # the sign of a byte, repeated
            out = 2 * i + half
            code += f"prmt.b32 m, t, 0, {selector}; and.b32 m, m, 0x7fff7fff; or.b32 ${out}, ${n + out}, m; "
    return asm([Int32] * n, [*words, *raw], code + "}", ",".join(["=&r"] * n + ["r"] * (n + n // 2)), False)


def keep_where(x, word, bit):
    """``x`` where bit number ``bit``, a constant, of the word is set, else -inf."""
    code = f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << bit}; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $3, p; }}"
    return asm([Float32], [x, word, Float32(float("-inf"))], code, "=f,f,r,f", False)[0]


def sts32_if(a, v, flag, off=0):
    """Store one word to shared memory where ``flag``."""
    code = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$0+{off}], $1; }}"
    asm([], [a, v, flag], code, "r,r,r,~{memory}")
