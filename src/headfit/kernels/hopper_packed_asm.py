"""What the packed kernel needs of PTX and of control flow beyond ``ptx.py``: loops, products of bf16.

Belongs here: inline assembly and structured control flow, one function each, in the conventions of ``ptx.py``. Does not
belong here: layouts and decisions (``hopper_packed*.py``).
"""

# mypy: ignore-errors

from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import scf

from headfit.kernels.ptx import asm

SWIZZLE_128 = 0x40000000  # high word of a descriptor: 128-byte swizzle, and the bytes / 16 between groups of 8 rows


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


def products(acc, a, b, steps, pitches, columns_first=False, start=False):
    """``acc + sum of a_k b_k`` over k16 steps, bf16, b from shared memory, under way when this returns.

    ``acc``: N / 2 float32 of this thread; ``a``: low word of the operand's descriptor, or, from registers, four words
    for each step; ``b``: low word of its descriptor; ``steps``: byte offsets (of a, of b) of each step; ``pitches``:
    bytes between groups of 8 rows (of a, of b); ``columns_first``: b is stored with N running fastest; ``start``: leave
    out the old acc.
    """
    n = len(acc)
    here = isinstance(a, list)
    operands = [word for fragment in a for word in fragment] if here else [a]
    d = ",".join(f"${i}" for i in range(n))
    high_a, high_b = (SWIZZLE_128 | pitch >> 4 for pitch in pitches)
    code = (
        "{ .reg .pred p; .reg .b32 la,lb,ha,hb; .reg .b64 da,db; "
        f"mov.b32 ha, {high_a}; mov.b32 hb, {high_b}; setp.ne.b32 p, {0 if start else 1}, 0; wgmma.fence.sync.aligned; "
    )
    for i, (off_a, off_b) in enumerate(steps):
        if start and i == 1:
            code += "setp.ne.b32 p, 1, 0; "
        left = "da"
        if here:
            left = "{" + ",".join(f"${2 * n + 4 * i + k}" for k in range(4)) + "}"
        else:
            code += f"add.s32 la, ${2 * n}, {off_a >> 4}; mov.b64 da, {{la,ha}}; "
        code += (
            f"add.s32 lb, ${2 * n + len(operands)}, {off_b >> 4}; mov.b64 db, {{lb,hb}}; "
            f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.bf16.bf16 {{{d}}}, {left}, db, p, 1, 1, "
            f"{'' if here else '0, '}{int(columns_first)}; "
        )
    code += "wgmma.commit_group.sync.aligned; }"
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (len(operands) + 1)) + ",~{memory}"
    return asm([Float32] * n, [*acc, *operands, b], code, constraints)


def keep_inside(x, first, second, off):
    """``x`` where ``off`` behind a place is inside one of two intervals, else -inf.

    ``first``, ``second``: of an interval, how far the place is behind its begin, and its length.
    """
    code = (
        f"{{ .reg .pred p; .reg .b32 t; add.s32 t, $2, {off}; setp.lt.u32 p, t, $3; add.s32 t, $4, {off}; "
        "setp.lt.or.u32 p, t, $5, p; selp.f32 $0, $1, $6, p; }"
    )
    return asm([Float32], [x, *first, *second, Float32(float("-inf"))], code, "=f,f,r,r,r,r,f", False)[0]


def high_product(a, b):
    """The high word of the product of two unsigned words; ``b`` is a constant."""
    return asm([Int32], [a], f"mul.hi.u32 $0, $1, {b};", "=r,r", False)[0]


def halves(word):
    """A bf16 pair as float32."""
    code = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return asm([Float32] * 2, [word], code, "=&f,=f,r", False)


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


def copy_bulk_if(target, source, size, barrier, flag):
    """Begin to copy a constant ``size`` of bytes where ``flag``, by the copy engine; they count on ``barrier``."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; "
        f"@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2]; }}"
    )
    asm([], [target, source, barrier, flag], code, "r,l,r,r,~{memory}")
