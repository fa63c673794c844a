"""What the packed kernel needs of PTX and of control flow beyond ``ptx.py``: loops, both-operands-in-memory products.

Belongs here: inline assembly and structured control flow, one function each, in the conventions of ``ptx.py``. Does not
belong here: layouts and decisions (``hopper_packed*.py``).
"""

# mypy: ignore-errors

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf

from headfit.kernels.ptx import asm

SWIZZLE_128 = 0x40000040  # high word of a descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows


def loop(begin, end, state, body, step=None):
    """``for i in range(begin, end, step): state = body(i, state)`` at run time.

    ``state`` is a list of DSL scalars; ``step`` 1 without.
    """
    kinds = [type(v) for v in state]
    step = Int32(1) if step is None else step
    op = scf.ForOp(begin.ir_value(), end.ir_value(), step.ir_value(), [v.ir_value() for v in state])
    op.attributes["loop_annotation"] = ir.Attribute.parse("#llvm.loop_annotation<unroll = <disable = true>>")
    with ir.InsertionPoint(op.body):
        inner = [k(v) for k, v in zip(kinds, op.inner_iter_args, strict=True)]
        out = body(Int32(op.induction_variable), inner)
        scf.yield_([v.ir_value() for v in out])
    return [k(v) for k, v in zip(kinds, op.results, strict=True)]


def either(flag, state, yes, no):
    """``yes(state)`` where ``flag`` is not 0, else ``no(state)``; uniform over the warp or wider."""
    kinds = [type(v) for v in state]
    op = scf.IfOp((flag != 0).ir_value(), [k.mlir_type for k in kinds], has_else=True)
    for block, branch in ((op.then_block, yes), (op.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_([v.ir_value() for v in branch(state)])
    return [k(v) for k, v in zip(kinds, op.results, strict=True)]


def choose(flag, state, block):
    """``block(state)`` where ``flag`` is not 0, else ``state`` as it is; uniform over the warp or wider."""
    return either(flag, state, block, lambda same: same)


def again(x):
    """``x``, as if it were another value: what follows from it is computed anew instead of being kept in registers."""
    return asm([Int32], [x], "mov.b32 $0, $1;", "=r,r")[0]


def set_registers(count, more):
    """Change the registers of each thread of this warpgroup; ``more``: ask for more, else give back."""
    asm([], [], f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", "~{memory}")


def products(acc, a, b, steps, columns_first=False, start=False, commit=True):
    """``acc + sum of a_k b_k`` over k16 steps: both operands from shared memory, bf16, under way when this returns.

    ``acc``: N / 2 float32 of this thread; ``a``, ``b``: low words of the operands' descriptors; ``steps``: byte offsets
    (of a, of b) of each step; ``columns_first``: b is stored with N running fastest; ``start``: leave out the old acc.
    """
    n = len(acc)
    d = ",".join(f"${i}" for i in range(n))
    code = (
        "{ .reg .pred p; .reg .b32 la,lb,h; .reg .b64 da,db; "
        f"mov.b32 h, {SWIZZLE_128}; setp.ne.b32 p, {0 if start else 1}, 0; wgmma.fence.sync.aligned; "
    )
    for i, (off_a, off_b) in enumerate(steps):
        if start and i == 1:
            code += "setp.ne.b32 p, 1, 0; "
        code += (
            f"add.s32 la, ${2 * n}, {off_a >> 4}; add.s32 lb, ${2 * n + 1}, {off_b >> 4}; "
            "mov.b64 da, {la,h}; mov.b64 db, {lb,h}; "
            f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.bf16.bf16 {{{d}}}, da, db, p, 1, 1, 0, "
            f"{int(columns_first)}; "
        )
    code += ("wgmma.commit_group.sync.aligned; " if commit else "") + "}"
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)]) + ",r,r,~{memory}"
    return asm([Float32] * n, [*acc, a, b], code, constraints)


def keep_where(word, bit, x):
    """``x`` where the constant bit of ``word`` is set, else -inf."""
    code = f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << bit}; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $3, p; }}"
    return asm([Float32], [x, word, Float32(float("-inf"))], code, "=f,f,r,f", False)[0]


def stmatrix4(a, v):
    """Four 8x8 matrices of 16-bit units, as they are."""
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    asm([], [a, *v], code, "r,r,r,r,r,~{memory}")


def greater(a, b):
    """``a > b`` of float32, false for NaN."""
    return asm([Int32], [a, b], "{ .reg .pred p; setp.gt.f32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,f,f", False)[0]


def shift_right(a, n):
    """Logical shift right by a register."""
    return asm([Int32], [a, n], "shr.u32 $0, $1, $2;", "=r,r,r", False)[0]


def load128(p, flag):
    """Four words where ``flag``, else zeros; not kept in L1."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4]; }"
    )
    return asm([Int32] * 4, [p, flag], code, "=&r,=&r,=&r,=&r,l,r")


def copy16_async(target, source, size):
    """Begin to copy 16 bytes from global to shared memory; ``size`` 0 writes zeros and reads nothing."""
    code = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    asm([], [target, source, size], code, "r,l,r,~{memory}")


def copy4_async(target, source, size):
    """Begin to copy 4 bytes; ``size`` 0 writes zeros and reads nothing."""
    asm([], [target, source, size], "cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r,~{memory}")


def copy_small(target, source, size, flag, other):
    """Begin to copy ``size`` (4 or 8, a constant) bytes where ``flag``; else store the words ``other`` at once."""
    words = ",".join(str(x) for x in other)
    kind = "st.shared.b32 [$0], " + words if size == 4 else f"st.shared.v2.b32 [$0], {{{words}}}"
    code = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.ca.shared.global [$0], [$1], {size}; @!p {kind}; }}"
    asm([], [target, source, flag], code, "r,l,r,~{memory}")


def close_copies():
    """Make a group of the copies begun so far."""
    asm([], [], "cp.async.commit_group;", "~{memory}")


def wait_copies():
    """Wait for all of this thread's groups of copies."""
    asm([], [], "cp.async.wait_group 0;", "~{memory}")


def store16(a, v, off):
    """Store the low 16 bits to shared memory."""
    code = f"{{ .reg .b16 l,h; mov.b32 {{l,h}}, $1; st.shared.b16 [$0+{off}], l; }}"
    asm([], [a, v], code, "r,r,~{memory}")


def e4m3_to_bf16(words, factor, top):
    """Words of e4m3 as bf16 pairs in order, times the bf16 pair ``factor``, and the largest magnitude fields seen.

    The fields of a byte are put into a bf16, whose exponent is then 120 too low, so ``factor`` is 2^120 times the
    scale; the product is rounded once, subnormals kept. ``top`` is a pair of 16-bit maxima: 0x7f0 tells a NaN byte.
    """
    n = len(words)
    code, outs = "{ .reg .b32 x,u; ", 2 * n
    for i in range(n):
        for half, selector in enumerate((0x1404, 0x3424)):
            out = 2 * i + half
            code += (
                f"prmt.b32 x, ${outs + 1 + i}, 0, {selector}; and.b32 u, x, 0x7f007f00; shr.u32 u, u, 4; "
                f"max.u16x2 ${outs}, ${outs if out else outs + n + 2}, u; lop3.b32 x, x, 0x80008000, u, 0xea; "
                f"mul.rn.bf16x2 ${out}, x, ${outs + n + 1}; "
            )
    constraints = "=&r," * (outs + 1) + ",".join(["r"] * (n + 2))
    got = asm([Int32] * (outs + 1), [*words, factor, top], code + "}", constraints)
    return got[:outs], got[outs]


def scale_further(words, scales, index):
    """The pairs times what `factor_of` left out for scale bytes above 134; byte 255 gives NaN."""
    n = len(words)
    code = (
        f"{{ .reg .pred p; .reg .b32 b,m; bfe.u32 b, ${2 * n}, {8 * index}, 8; max.u32 m, b, 134; sub.u32 m, m, 7; "
        "mul.lo.u32 m, m, 0x00800080; setp.eq.s32 p, b, 255; selp.b32 m, 0x7fff7fff, m, p; "
    )
    code += "".join(f"mul.rn.bf16x2 ${i}, ${i + n}, m; " for i in range(n)) + "}"
    return asm([Int32] * n, [*words, scales], code, ",".join(["=&r"] * n + ["r"] * (n + 1)), False)


def factor_of(scales, index):
    """The bf16 pair 2^(min(b, 134) - 7) for scale byte ``index`` of the word: 2^120 times the scale 2^(b - 127)."""
    code = (
        f"{{ .reg .b32 b; bfe.u32 b, $1, {8 * index}, 8; min.u32 b, b, 134; "
        "mad.lo.u32 $0, b, 0x00800080, 0x3c003c00; }"
    )
    return asm([Int32], [scales], code, "=r,r", False)[0]


def any_byte_above(word, limit):
    """Whether one of the four bytes is above the constant ``limit`` (127 to 254)."""
    code = "{ .reg .pred p,q; .reg .b32 b; setp.ne.b32 p, 0, 0; "
    for i in range(4):
        code += f"bfe.u32 b, $1, {8 * i}, 8; setp.gt.u32 q, b, {limit}; or.pred p, p, q; "
    return asm([Int32], [word], code + "selp.s32 $0, 1, 0, p; }", "=r,r", False)[0]
