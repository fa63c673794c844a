"""What the union prepass needs of PTX beyond ``ptx.py``: copies of lists, comparisons of them, a hash table, bits.

Belongs here: inline assembly, one function each, in the conventions of ``ptx.py``. Does not belong here: what is
compared or entered, and why (``hopper_union.py``, ``hopper_union_table.py``).
"""

# mypy: ignore-errors

from cutlass import Int32

from headfit.kernels.ptx import asm

# --- lists


def copy_async(target, source, size):
    """Begin to copy 4 or 16 bytes from global to shared memory."""
    cache = "cg" if size == 16 else "ca"
    asm([], [target, source], f"cp.async.{cache}.shared.global [$0], [$1], {size};", "r,l,~{memory}")


def wait_copies():
    """Wait for the copies of this warp."""
    asm([], [], "cp.async.wait_all; bar.warp.sync 0xffffffff;", "~{memory}")


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


def covering(ends, counts, position):
    """Which of 8 intervals hold a position, as bits; and how far it is from the end of the first of them, less one.

    ``ends``: how far each interval ends behind the one before it; ``counts``: their lengths.
    """
    code = "{ .reg .pred p; .reg .b32 t<8>; mov.b32 $0, 0; mov.b32 $1, 0; not.b32 t0, $18; add.s32 t0, t0, $2; "
    code += "".join(f"add.s32 t{r}, t{r - 1}, ${r + 2}; " for r in range(1, 8))
    for r in reversed(range(8)):
        code += f"setp.lt.u32 p, t{r}, ${r + 10}; @p or.b32 $0, $0, {1 << r}; @p mov.b32 $1, t{r}; "
    return asm([Int32] * 2, [*ends, *counts, position], code + "}", "=&r,=&r" + ",r" * 17, False)


def total(x, kind):
    """Sum (``add``), ``min`` or ``max`` of the warp's words."""
    return asm([Int32], [x], f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", "=r,r")[0]


# --- bits


def outside(word, n):
    """``word >= n``, unsigned."""
    return asm([Int32], [word, n], "{ .reg .pred p; setp.ge.u32 p, $1, $2; selp.s32 $0, 1, 0, p; }", "=r,r,r", False)[0]


def bit(n):
    """1 << n."""
    return asm([Int32], [n], "shl.b32 $0, 1, $1;", "=r,r", False)[0]


def popc(x):
    """Bits set."""
    return asm([Int32], [x], "popc.b32 $0, $1;", "=r,r", False)[0]


def lowest(x):
    """Number of the lowest bit set; 32 where there is none."""
    return asm([Int32], [x], "{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", False)[0]


# --- memory


def lds16(a, off=0):
    """16 bits of shared memory."""
    code = f"{{ .reg .b16 h; ld.shared.u16 h, [$1+{off}]; cvt.u32.u16 $0, h; }}"
    return asm([Int32], [a], code, "=r,r,~{memory}")[0]


def sts32_if(a, v, flag):
    """Store one word of shared memory where ``flag``."""
    asm([], [a, v, flag], "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }", "r,r,r,~{memory}")


# --- hashing


FACTOR = "0x9E3779B1"


def mark_if(marks, word, salt, i, n, slots):
    """Set the bit of index ``word`` among the 4096 at ``marks``, if it is one of the fourth of all that are counted so.

    Only where ``i < n`` and ``word < slots``. ``salt`` tells the sets apart.
    """
    code = (
        "{ .reg .pred p; .reg .b32 h,a,b,z; setp.lt.s32 p, $3, $4; setp.lt.and.u32 p, $1, $5, p; "
        f"mad.lo.u32 h, $1, {FACTOR}, $2; and.b32 a, h, 0xc0000; setp.eq.and.s32 p, a, 0, p; "
        "shr.u32 a, h, 23; and.b32 a, a, 0x1fc; add.u32 a, a, $0; "
        "shr.u32 b, h, 20; mov.b32 z, 0; shf.l.wrap.b32 b, z, 1, b; @p red.shared.or.b32 [a], b; }"
    )
    asm([], [marks, word, salt, i, n, slots], code, "r,r,r,r,r,r,~{memory}")


def enter_if(base, key, row, flag, offsets, bits):
    """Enter a key of a row into the table of 2^``bits`` slots, where ``flag``; its slot, else -1.

    ``offsets``, from ``base``: of the keys (-1: free), of the 16-bit masks of rows, of the number of keys, and of what
    is set where a row has the key already. There has to be a free slot.
    """
    keys, masks, count, twice = offsets
    code = (
        "{ .reg .pred p; .reg .b32 a,b,k; mov.b32 $0, -1; setp.eq.s32 p, $4, 0; @p bra E${:uid}; "
        f"mul.lo.u32 $0, $2, {FACTOR}; shr.u32 $0, $0, {32 - bits}; "
        f"L${{:uid}}: shl.b32 a, $0, 2; add.u32 a, a, $1; ld.volatile.shared.u32 k, [a+{keys}]; "
        "setp.eq.u32 p, k, $2; @p bra F${:uid}; setp.ne.u32 p, k, 0xffffffff; @p bra N${:uid}; "
        f"add.u32 b, a, {keys}; atom.shared.cas.b32 k, [b], 0xffffffff, $2; "
        f"setp.eq.u32 p, k, 0xffffffff; @p red.shared.add.u32 [$1+{count}], 1; @p bra F${{:uid}}; "
        "setp.eq.u32 p, k, $2; @p bra F${:uid}; "
        f"N${{:uid}}: add.u32 $0, $0, 1; and.b32 $0, $0, {(1 << bits) - 1}; bra L${{:uid}}; "
        "F${:uid}: and.b32 b, $0, 1; shl.b32 b, b, 4; add.u32 b, b, $3; mov.b32 k, 1; shl.b32 b, k, b; "
        f"shr.u32 a, $0, 1; shl.b32 a, a, 2; add.u32 a, a, $1; add.u32 a, a, {masks}; "
        f"atom.shared.or.b32 k, [a], b; and.b32 k, k, b; setp.ne.b32 p, k, 0; @p st.shared.b32 [$1+{twice}], b; "
        "E${:uid}: }"
    )
    return asm([Int32], [base, key, row, flag], code, "=&r,r,r,r,r,~{memory}")[0]
