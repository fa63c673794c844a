"""What dequantising keys needs of PTX beyond ``ptx.py``: e4m3 to bf16, and scales of any size.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: which bytes
belong together (``hopper_expand.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels import ptx
from headfit.kernels.ptx import asm

PLAIN_SCALE = 134  # the largest scale byte that one factor can hold


def e4m3_to_bf16(words, factor):
    """Words of e4m3 as bf16 pairs in order, times the bf16 pair ``factor``; NaN bytes become numbers.

    The fields of a byte are put into a bf16, whose exponent is then 120 too low, so ``factor`` is 2^120 times the
    scale; the product is rounded once, subnormals kept.
    """
    n = len(words)
    code, outs = "{ .reg .b32 x; ", 2 * n
    for i in range(n):
        for half, selector in enumerate((0x9180, 0xB3A2)):  # a byte, and eight times its sign in front of it
            code += (
                f"prmt.b32 x, ${outs + i}, 0, {selector}; shl.b32 x, x, 4; and.b32 x, x, 0x87f087f0; "
                f"mul.rn.bf16x2 ${2 * i + half}, x, ${outs + n}; "
            )
    return asm([Int32] * outs, [*words, factor], code + "}", "=&r," * outs + ",".join(["r"] * (n + 1)), False)


def factor_of(scale):
    """The bf16 pair 2^(min(scale, 134) - 7): 2^120 times the scale 2^(scale - 127)."""
    code = "{ .reg .b32 b; min.u32 b, $1, 134; mad.lo.u32 $0, b, 0x00800080, 0x3c003c00; }"
    return asm([Int32], [scale], code, "=r,r", False)[0]


def scale_further(words, scale):
    """The pairs times what `factor_of` left out for scales above 134; 255 gives NaN."""
    n = len(words)
    code = (
        f"{{ .reg .pred p; .reg .b32 m; max.u32 m, ${2 * n}, 134; sub.u32 m, m, 7; mul.lo.u32 m, m, 0x00800080; "
        f"setp.eq.s32 p, ${2 * n}, 255; selp.b32 m, 0x7fff7fff, m, p; "
    )
    code += "".join(f"mul.rn.bf16x2 ${i}, ${i + n}, m; " for i in range(n)) + "}"
    return asm([Int32] * n, [*words, scale], code, ",".join(["=&r"] * n + ["r"] * (n + 1)), False)


def any_not_finite(words, is_bf16):
    """Not 0 where one of the words has an infinity or a NaN: of bf16 where ``is_bf16``, else of e4m3."""
    fields, one, top = (ptx.pick32(is_bf16, Int32(signed(a)), Int32(signed(b))) for a, b in FINITE_TESTS)
    found = Int32(0)
    for word in words:
        found = found | ((word & fields) + one)  # a carry out of fields that are all ones
    return found & top


FINITE_TESTS = ((0x7F807F80, 0x7F7F7F7F), (0x00800080, 0x01010101), (0x80008000, 0x80808080))  # of bf16, of e4m3


def signed(bits):
    """A word's bits as the number that stands for them in ``Int32``."""
    return bits - (1 << 32) if bits >> 31 else bits
