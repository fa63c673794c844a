"""PTX instructions as Python functions, for kernels traced by CuTe DSL: a function is one instruction, or a few.

Belongs here: inline assembly and nothing else; every function takes and returns DSL scalars (``Int32``, ``Int64``,
``Float32``), so a kernel reads as arithmetic. Does not belong here: layouts, loops, decisions. Importing this module
imports the DSL; only code that compiles a kernel does.

Conventions: addresses of shared memory are ``Int32``, of global memory ``Int64``; ``off`` is a constant in bytes;
truth values are ``Int32`` 0 or 1. Arithmetic that must keep subnormals says so (no ``.ftz``).
"""

# mypy: ignore-errors

from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, scf

SHARED_STATE = "~{memory}"


def asm(outs, ins, code, constraints, effects=True):
    """One piece of inline assembly: ``outs`` are result types; returns the list of wrapped results."""
    values = [x.ir_value() if hasattr(x, "ir_value") else x for x in ins]
    options = {"has_side_effects": effects, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    if not outs:
        llvm.inline_asm(None, values, code, constraints, **options)
        return []
    types = [o.mlir_type for o in outs]
    if len(outs) == 1:
        return [outs[0](llvm.inline_asm(types[0], values, code, constraints, **options))]
    packed = llvm.inline_asm(llvm.StructType.get_literal(types), values, code, constraints, **options)
    return [o(llvm.extractvalue(t, packed, [i])) for i, (o, t) in enumerate(zip(outs, types, strict=True))]


def when(flag, block, otherwise=None):
    """Run ``block()`` at run time where ``flag`` is not 0 (uniform over the warp or wider, as the block needs)."""
    branch = scf.IfOp((flag != 0).ir_value(), has_else=otherwise is not None)
    for place, body in ((branch.then_block, block), (branch.else_block if otherwise else None, otherwise)):
        if body is not None:
            with ir.InsertionPoint(place):
                body()
                scf.yield_([])


# --- shared memory


def lds32(a, off=0):
    """One 32-bit word."""
    return asm([Int32], [a], f"ld.shared.b32 $0, [$1+{off}];", "=r,r,~{memory}")[0]


def lds64(a, off=0):
    """Two 32-bit words."""
    return asm([Int32] * 2, [a], f"ld.shared.v2.b32 {{$0,$1}}, [$2+{off}];", "=r,=r,r,~{memory}")


def lds128(a, off=0):
    """Four 32-bit words."""
    return asm([Int32] * 4, [a], f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{off}];", "=r,=r,=r,=r,r,~{memory}")


def lds32f(a, off=0):
    """One float32."""
    return asm([Float32], [a], f"ld.shared.f32 $0, [$1+{off}];", "=f,r,~{memory}")[0]


def lds64f(a, off=0):
    """Two float32."""
    return asm([Float32] * 2, [a], f"ld.shared.v2.f32 {{$0,$1}}, [$2+{off}];", "=f,=f,r,~{memory}")


def lds128f(a, off=0):
    """Four float32."""
    return asm([Float32] * 4, [a], f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{off}];", "=f,=f,=f,=f,r,~{memory}")


def sts32(a, v, off=0):
    """Store one word."""
    asm([], [a, v], f"st.shared.b32 [$0+{off}], $1;", "r,r,~{memory}")


def sts64(a, v, off=0):
    """Store two words."""
    asm([], [a, *v], f"st.shared.v2.b32 [$0+{off}], {{$1,$2}};", "r,r,r,~{memory}")


def sts128(a, v, off=0):
    """Store four words."""
    asm([], [a, *v], f"st.shared.v4.b32 [$0+{off}], {{$1,$2,$3,$4}};", "r,r,r,r,r,~{memory}")


def sts32f(a, v, off=0):
    """Store one float32."""
    asm([], [a, v], f"st.shared.f32 [$0+{off}], $1;", "r,f,~{memory}")


def sts64f(a, v, off=0):
    """Store two float32."""
    asm([], [a, *v], f"st.shared.v2.f32 [$0+{off}], {{$1,$2}};", "r,f,f,~{memory}")


def ldmatrix4(a, off=0):
    """Four 8x8 matrices of 16-bit units, as they are."""
    code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{off}];"
    return asm([Int32] * 4, [a], code, "=r,=r,=r,=r,r,~{memory}")


def ldmatrix_trans4(a, off=0):
    """Four 8x8 matrices of 16-bit units, each transposed."""
    code = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0,$1,$2,$3}}, [$4+{off}];"
    return asm([Int32] * 4, [a], code, "=r,=r,=r,=r,r,~{memory}")


def stmatrix_trans(a, v, off=0):
    """One, two or four 8x8 matrices of 16-bit units, each transposed."""
    n = len(v)
    names = ",".join(f"${i + 1}" for i in range(n))
    code = f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [$0+{off}], {{{names}}};"
    asm([], [a, *v], code, "r," + "r," * n + "~{memory}")


# --- global memory


def ldg32_if(p, flag, other):
    """One word where ``flag``, else ``other``; the address is not touched then."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, $3; @p ld.global.nc.b32 $0, [$1]; }"
    return asm([Int32], [p, flag, other], code, "=&r,l,r,r")[0]


def ldg128_if(p, flag):
    """Four words where ``flag``, else zeros."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4]; }"
    )
    return asm([Int32] * 4, [p, flag], code, "=&r,=&r,=&r,=&r,l,r")


def stg16_if(p, v, flag):
    """Store the low 16 bits where ``flag``."""
    code = "{ .reg .pred p; .reg .b16 a,b; setp.ne.s32 p, $2, 0; mov.b32 {a,b}, $1; @p st.global.b16 [$0], a; }"
    asm([], [p, v, flag], code, "l,r,r,~{memory}")


def stg32_if(p, v, flag):
    """Store one word where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }"
    asm([], [p, v, flag], code, "l,r,r,~{memory}")


def stg64(p, v):
    """Store two words."""
    asm([], [p, *v], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r,~{memory}")


def stg64_if(p, v, flag):
    """Store two words where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.v2.b32 [$0], {$1,$2}; }"
    asm([], [p, *v, flag], code, "l,r,r,r,~{memory}")


def stg32f_if(p, v, flag):
    """Store one float32 where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.f32 [$0], $1; }"
    asm([], [p, v, flag], code, "l,f,r,~{memory}")


def at(p, i):
    """Global address ``p + i`` for a 32-bit signed byte offset."""
    return asm([Int64], [p, i], "{ .reg .b64 t; cvt.s64.s32 t, $2; add.s64 $0, $1, t; }", "=l,l,r", False)[0]


def words(p):
    """Low and high word of a 64-bit integer."""
    return asm([Int32] * 2, [p], "mov.b64 {$0,$1}, $2;", "=r,=r,l", False)


def address(low, high):
    """The 64-bit integer of two words."""
    return asm([Int64], [low, high], "mov.b64 $0, {$1,$2};", "=l,r,r", False)[0]


def wide(a, b):
    """64-bit product of an unsigned 32-bit and a 64-bit integer."""
    code = "{ .reg .b64 t; cvt.u64.u32 t, $1; mul.lo.s64 $0, t, $2; }"
    return asm([Int64], [a, b], code, "=l,r,l", False)[0]


# --- integers


def divide(n, magic, shift):
    """``n / d`` for ``0 <= n < 2^31`` by the host's magic number of d; magic 0 stands for d = 1."""
    code = (
        "{ .reg .pred p; .reg .b32 t; setp.eq.s32 p, $2, 0; mul.hi.u32 t, $1, $2; shr.u32 t, t, $3; "
        "selp.b32 $0, $1, t, p; }"
    )
    return asm([Int32], [n, magic, shift], code, "=r,r,r,r", False)[0]


def quotient(a, b):
    """``a / b`` of non-negative integers, by the slow division."""
    return asm([Int32], [a, b], "div.u32 $0, $1, $2;", "=r,r,r", False)[0]


def min32(a, b):
    """Signed minimum."""
    return asm([Int32], [a, b], "min.s32 $0, $1, $2;", "=r,r,r", False)[0]


def max32(a, b):
    """Signed maximum."""
    return asm([Int32], [a, b], "max.s32 $0, $1, $2;", "=r,r,r", False)[0]


def max_u16x2(a, b):
    """Maximum of two pairs of unsigned 16-bit integers."""
    return asm([Int32], [a, b], "max.u16x2 $0, $1, $2;", "=r,r,r", False)[0]


def less(a, b):
    """``a < b``, signed."""
    return asm([Int32], [a, b], "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,r,r", False)[0]


def positive(a):
    """``a >= 0``, signed."""
    return asm([Int32], [a], "{ .reg .pred p; setp.ge.s32 p, $1, 0; selp.s32 $0, 1, 0, p; }", "=r,r", False)[0]


def equal(a, b):
    """``a == b``."""
    return asm([Int32], [a, b], "{ .reg .pred p; setp.eq.s32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,r,r", False)[0]


def within(i, n):
    """``0 <= i < n``, by one unsigned comparison."""
    return asm([Int32], [i, n], "{ .reg .pred p; setp.lt.u32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,r,r", False)[0]


def given(p):
    """1 where a 64-bit pointer is not 0."""
    return asm([Int32], [p], "{ .reg .pred p; setp.ne.s64 p, $1, 0; selp.s32 $0, 1, 0, p; }", "=r,l", False)[0]


def pick32(flag, a, b):
    """``a`` where flag, else ``b``: words."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.b32 $0, $1, $2, p; }"
    return asm([Int32], [a, b, flag], code, "=r,r,r,r", False)[0]


def pick64(flag, a, b):
    """``a`` where flag, else ``b``: 64 bits."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.b64 $0, $1, $2, p; }"
    return asm([Int64], [a, b, flag], code, "=l,l,l,r", False)[0]


def pickf(flag, a, b):
    """``a`` where flag, else ``b``: float32."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.f32 $0, $1, $2, p; }"
    return asm([Float32], [a, b, flag], code, "=f,f,f,r", False)[0]


def prmt(a, b, selector):
    """Bytes of a (0..3) and b (4..7) by ``selector``, a constant."""
    return asm([Int32], [a, b], f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", False)[0]


def shr(a, n):
    """Logical shift right by a constant."""
    return asm([Int32], [a], f"shr.u32 $0, $1, {n};", "=r,r", False)[0]


# --- float32


def ex2(x):
    """2^x."""
    return asm([Float32], [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False)[0]


def lg2(x):
    """log2(x)."""
    return asm([Float32], [x], "lg2.approx.f32 $0, $1;", "=f,f", False)[0]


def rcp(x):
    """1 / x."""
    return asm([Float32], [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f", False)[0]


def fmul(a, b):
    """``a * b``, subnormals kept."""
    return asm([Float32], [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f", False)[0]


def fma(a, b, c):
    """``a * b + c``, rounded once, subnormals kept."""
    return asm([Float32], [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", False)[0]


def fadd(a, b):
    """``a + b``, subnormals kept."""
    return asm([Float32], [a, b], "add.rn.f32 $0, $1, $2;", "=f,f,f", False)[0]


def fmax(a, b):
    """Maximum; a NaN gives way."""
    return asm([Float32], [a, b], "max.f32 $0, $1, $2;", "=f,f,f", False)[0]


def above(a, bits):
    """``a > constant`` (its float32 bits in hex)."""
    code = f"{{ .reg .pred p; setp.gt.f32 p, $1, 0f{bits:08x}; selp.s32 $0, 1, 0, p; }}"
    return asm([Int32], [a], code, "=r,f", False)[0]


def as_float(bits):
    """A word's bits as float32."""
    return asm([Float32], [bits], "mov.b32 $0, $1;", "=f,r", False)[0]


def as_bits(x):
    """A float32's bits."""
    return asm([Int32], [x], "mov.b32 $0, $1;", "=r,f", False)[0]


# --- 16-bit pairs and e4m3


def unusual_scales(low, high):
    """Not 0 where one of seven scale bytes is outside [112, 127]."""
    code = (
        "{ .reg .b32 a,b; and.b32 a, $1, 0xf0f0f0f0; xor.b32 a, a, 0x70707070; and.b32 b, $2, 0x00f0f0f0; "
        "xor.b32 b, b, 0x00707070; or.b32 $0, a, b; }"
    )
    return asm([Int32], [low, high], code, "=r,r,r", False)[0]


def pack_f16(low, high):
    """Two float32, rounded to f16, low half first."""
    return asm([Int32], [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", False)[0]


def pack_bf16(low, high):
    """Two float32, rounded to bf16, low half first."""
    return asm([Int32], [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False)[0]


def mul_f16x2(a, b):
    """Products of f16 pairs."""
    return asm([Int32], [a, b], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", False)[0]


def mul_bf16x2(a, b):
    """Products of bf16 pairs."""
    return asm([Int32], [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", False)[0]


def e4m3_to_f16(word):
    """Four e4m3 as two f16 pairs: bytes 0 and 1, bytes 2 and 3. Exact."""
    code = "{ .reg .b16 l,h; mov.b32 {l,h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return asm([Int32] * 2, [word], code, "=&r,=&r,r", False)


def e4m3_columns_to_f16(word):
    """Four e4m3 as two f16 pairs: bytes 0 and 2, bytes 1 and 3. Exact."""
    return e4m3_to_f16(prmt(word, Int32(0), 0x3120))


def bf16_pair_to_f16(pair):
    """A bf16 pair rounded to f16."""
    code = (
        "{ .reg .f32 a,b; .reg .b32 l,h; shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; mov.b32 a, l; mov.b32 b, h; "
        "cvt.rn.f16x2.f32 $0, b, a; }"
    )
    return asm([Int32], [pair], code, "=r,r", False)[0]


def f16_to_bf16(pair, scale):
    """An f16 pair times a float32, rounded to bf16 once; subnormals and NaN stay what they are."""
    code = (
        "{ .reg .b16 l,h; .reg .f32 a,b; mov.b32 {l,h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
        "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; cvt.rn.bf16x2.f32 $0, b, a; }"
    )
    return asm([Int32], [pair, scale], code, "=r,r,f", False)[0]


# --- warps and barriers


def lane():
    """This thread's lane, read anew: what is computed from it does not occupy a register from tile to tile."""
    return asm([Int32], [], "mov.u32 $0, %laneid;", "=r")[0]


def thread():
    """This thread's number, read anew."""
    return asm([Int32], [], "mov.u32 $0, %tid.x;", "=r")[0]


def block():
    """This CTA's number in x, read anew."""
    return asm([Int32], [], "mov.u32 $0, %ctaid.x;", "=r")[0]


def block_y():
    """This CTA's number in y, read anew."""
    return asm([Int32], [], "mov.u32 $0, %ctaid.y;", "=r")[0]


def leader():
    """1 in lane 0."""
    return equal(lane(), Int32(0))


def shfl_xor(x, mask):
    """The float32 of the lane whose number differs in ``mask``."""
    return asm([Float32], [x], f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;", "=f,f")[0]


def shfl_xor_bits(x, mask):
    """The word of the lane whose number differs in ``mask``."""
    return asm([Int32], [x], f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;", "=r,r")[0]


def warp_max(x):
    """The largest of the warp's words, unsigned."""
    return asm([Int32], [x], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")[0]


def shfl(x, lane):
    """The float32 of lane ``lane``."""
    return asm([Float32], [x, lane], "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r")[0]


def exit_if(flag):
    """End this thread where ``flag``; uniform over the CTA, before its first barrier."""
    asm([], [flag], "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p exit; }", "r,~{memory}")


def ballot(flag):
    """Bit i: lane i's flag is not 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return asm([Int32], [flag], code, "=r,r")[0]


def sync_warp():
    """Barrier of a warp."""
    asm([], [], "bar.warp.sync 0xffffffff;", SHARED_STATE)


def sync(threads, number=0):
    """Barrier of ``threads`` threads."""
    asm([], [], f"bar.sync {number}, {threads};", SHARED_STATE)


def sync_or(flag, threads, number=0):
    """Barrier that returns 1 where any thread's flag is not 0."""
    code = (
        f"{{ .reg .pred p,q; setp.ne.s32 p, $1, 0; bar.red.or.pred q, {number}, {threads}, p; selp.s32 $0, 1, 0, q; }}"
    )
    return asm([Int32], [flag], code, "=r,r,~{memory}")[0]


def fma_if(a, b, c, flag):
    """``a * b + c`` element by element of lists ``a`` and ``c`` where ``flag``, else ``c``."""
    n = len(a)
    code = f"{{ .reg .pred p; setp.ne.s32 p, ${3 * n + 1}, 0; "
    code += "".join(f"mov.b32 ${i}, ${2 * n + i}; @p fma.rn.f32 ${i}, ${n + i}, ${3 * n}, ${i}; " for i in range(n))
    return asm([Float32] * n, [*a, *c, b, flag], code + "}", "=&f," * n + "f," * (2 * n + 1) + "r", False)


def stg128f(p, v):
    """Store four float32."""
    asm([], [p, *v], "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f,~{memory}")


def stg128_if(p, v, flag):
    """Store four words where ``flag``."""
    code = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.b32 [$0], {$1,$2,$3,$4}; }"
    asm([], [p, *v, flag], code, "l,r,r,r,r,r,~{memory}")


def stg128(p, v):
    """Store four words."""
    asm([], [p, *v], "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r,~{memory}")


def ldg8_if(p, flag):
    """One byte where ``flag``, else 0."""
    code = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }"
    return asm([Int32], [p, flag], code, "=&r,l,r")[0]


def ldg64_if(p, flag):
    """Two words where ``flag``, else zeros."""
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.nc.v2.b32 {$0,$1}, [$2]; }"
    return asm([Int32] * 2, [p, flag], code, "=&r,=&r,l,r")
