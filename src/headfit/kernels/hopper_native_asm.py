"""The matrix unit as the native-width kernel calls it: its second operand's descriptor moves from product to product.

Belongs here: inline assembly that only ``hopper_native_tile.py`` needs. Conventions are those of ``ptx.py``.
"""

# mypy: ignore-errors

from cutlass import Float32, Int64

from headfit.kernels.ptx import asm


class Operand:
    """The second operands of a row of products: places in shared memory, counted in bytes from ``low``'s.

    Its two descriptors take turns. Each is the last one moved, which costs one uniform instruction; made of its two
    words for each product, it costs two or three. ``low``: the low word of the descriptor of place 0.
    """

    def __init__(self, low):
        made = asm([Int64], [low], "mov.b64 $0, {$1, 0x40000040};", "=l,r", False)[0]
        self._descriptors, self._places = [made, made], [0, 0]

    def product(self, acc, a, place, kind, start=False, turn=0):
        """``acc + a b``: a from registers (64 x 16), b (16 x N, rows of 128 swizzled bytes, K-major) from ``place``.

        ``acc`` are N / 2 float32 of this thread; ``start`` leaves the old ones out. ``kind`` is "f16" or "bf16".
        """
        step, self._places[turn] = place - self._places[turn], place
        if step:
            code = f"{{ .reg .b32 l,h; mov.b64 {{l,h}}, $1; add.s32 l, l, {step >> 4}; mov.b64 $0, {{l,h}}; }}"
            self._descriptors[turn] = asm([Int64], [self._descriptors[turn]], code, "=l,l")[0]
        n = len(acc)
        d, operand = ",".join(f"${i}" for i in range(n)), ",".join(f"${2 * n + i}" for i in range(4))
        code = (
            f"{{ .reg .pred p; setp.ne.b32 p, {0 if start else 1}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.{kind}.{kind} {{{d}}}, {{{operand}}}, ${2 * n + 4}, "
            "p, 1, 1, 0; }"
        )
        constraints = ",".join(["=f"] * n + [str(i) for i in range(n)]) + ",r,r,r,r,l,~{memory}"
        return asm([Float32] * n, [*acc, *a, self._descriptors[turn]], code, constraints)
