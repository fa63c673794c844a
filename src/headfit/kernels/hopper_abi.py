"""The parameters of the Hopper kernels: one table, from which the traced signature and the launch buffer both come.

Belongs here: names, kinds and order, exact division by a launch constant, packing of one call. Does not belong here:
the DSL (``hopper_params.py`` shows the table to traced code), launching (``cubin.py``), deciding (``hopper.py``).

Every kernel of the family takes the whole list, so that one buffer serves all launches of a call. An absent tensor is
the pointer 0; a call with one key set has ``topk2`` 0.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Final, Literal

from torch import Tensor

from headfit.call import KeySet, SparseCall

Kind = Literal["i64", "i32", "f32"]
POINTERS: Final = (
    "q", "out", "lse", "sink", "kv1", "idx1", "len1", "kv2", "idx2", "len2", "partial", "peaks", "totals", "work",
)  # fmt: skip
STRIDES: Final = (  # in elements; of pages in bytes
    "q_b", "q_s", "q_h", "out_b", "out_s", "out_h", "lse_b", "lse_h", "lse_s", "idx1_b", "idx1_s", "idx2_b", "idx2_s",
    "page_stride1", "page_stride2",
)  # fmt: skip
NUMBERS: Final = (
    "slots1", "slots2", "page1", "magic1", "shift1", "page2", "magic2", "shift2", "topk1", "topk2",
    "s_q", "magic_s", "shift_s", "rows", "h_q", "head_tiles", "splits",
)  # fmt: skip
PARAMETERS: Final[tuple[tuple[str, Kind], ...]] = (
    *((name, "i64") for name in (*POINTERS, *STRIDES)),
    *((name, "i32") for name in NUMBERS),
    ("scale_log2", "f32"),
    ("zeros", "i64"),  # 256 rows of 576 zero bytes
)
# Widest first (an even number of words before the last), so that the natural layout of the list has no holes and one
# format string writes it whole.
LAYOUT: Final = struct.Struct("<" + "".join({"i64": "q", "i32": "i", "f32": "f"}[kind] for _, kind in PARAMETERS))
SIZES: Final = tuple({"i64": 8, "i32": 4, "f32": 4}[kind] for _, kind in PARAMETERS)
OFFSETS: Final = tuple(sum(SIZES[:i]) for i in range(len(SIZES)))
PLACES: Final = tuple(zip(OFFSETS, SIZES, strict=True))  # in the buffer, and in the parameter space of a kernel
LOG2_E: Final = 1.4426950408889634
INT_MAX: Final = 2**31 - 1
FLOAT_MAX: Final = (2 - 2.0**-23) * 2.0**127


def magic(d: int) -> tuple[int, int]:
    """(multiplier, shift) that divide every unsigned n < 2^31 by ``d``: ``umulhi(n, multiplier) >> shift``.

    ``d`` 1 gives multiplier 0, by which a kernel knows that the quotient is n. Else, with ``2^(l-1) < d <= 2^l``, the
    multiplier is ``ceil(2^(31+l) / d)``: its excess over the true reciprocal, times n < 2^31, stays below one quotient
    step (Granlund and Montgomery, Division by invariant integers using multiplication, theorem 4.2).

    Args:
        d: 1 to 2^31 - 1.

    Raises:
        ValueError: ``d`` is outside that range.
    """
    if not 1 <= d <= INT_MAX:
        raise ValueError(f"d: got {d}, accepted are 1 to {INT_MAX}")
    if d == 1:
        return 0, 0
    bits = (d - 1).bit_length()
    return -(-(1 << (31 + bits)) // d), bits - 1


@functools.lru_cache(maxsize=1024)
def _divisor(d: int) -> tuple[int, int]:
    """`magic`, the multiplier as the int32 that has its bits."""
    multiplier, shift = magic(d)
    return multiplier - (1 << 32) if multiplier > INT_MAX else multiplier, shift


class Buffer(threading.local):
    """The launch parameters of one thread: a buffer, and the array of pointers into it that the driver takes.

    The driver copies the values during the launch call, also under graph capture, so that one buffer serves every
    launch of its thread.
    """

    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(LAYOUT.size)
        start = ctypes.addressof(self.data)
        self.pointers = (ctypes.c_void_p * len(OFFSETS))(*(start + offset for offset in OFFSETS))

    def value(self, name: str) -> int | float:
        """The parameter ``name`` as it stands in the buffer."""
        index = [n for n, _ in PARAMETERS].index(name)
        result: int | float = LAYOUT.unpack_from(self.data)[index]
        return result


def pack(
    buffer: Buffer,
    call: SparseCall,
    *,
    head_tiles: int,
    splits: int = 1,
    partial: int = 0,
    peaks: int = 0,
    totals: int = 0,
    work: int = 0,
    zeros: int = 0,
) -> None:
    """Write the parameters of ``call`` into ``buffer``. No tensor is read, only pointers, shapes and strides.

    Args:
        buffer: of the calling thread.
        call: a checked call of layout ``v4``.
        head_tiles: CTAs that share the heads of a row.
        splits: CTAs that share the keys of a row; 1: the kernel writes ``out`` and ``lse`` itself.
        partial, peaks, totals: addresses of the float32 shares ``[rows, splits, h_q(, 512)]``, 0 without. With more
            than one share 0 says that the CTAs of a row are launched as a cluster, which writes ``out`` and ``lse``.
        work: address of the int32 workspace of packing, 0: packing is off.
        zeros: address of 256 x 576 zero bytes, copied from where a lane has no key; nobody writes them.
    """
    q, out, lse = call.q, call.out, call.lse
    first = call.key_sets[0]
    second = call.key_sets[1] if len(call.key_sets) == 2 else None
    b, s_q, h_q, _ = q.shape
    q_b, q_s, q_h, _ = q.stride()
    out_b, out_s, out_h, _ = out.stride()
    lse_b, lse_h, lse_s = lse.stride()
    kv1, idx1, len1, idx1_b, idx1_s, page_stride1, slots1, page1, magic1, shift1, topk1 = _key_set(first)
    kv2, idx2, len2, idx2_b, idx2_s, page_stride2, slots2, page2, magic2, shift2, topk2 = _key_set(second)
    magic_s, shift_s = _divisor(s_q)
    LAYOUT.pack_into(
        buffer.data, 0,
        q.data_ptr(), out.data_ptr(), lse.data_ptr(), _pointer(call.attn_sink),
        kv1, idx1, len1, kv2, idx2, len2, partial, peaks, totals, work,
        q_b, q_s, q_h, out_b, out_s, out_h, lse_b, lse_h, lse_s, idx1_b, idx1_s, idx2_b, idx2_s,
        page_stride1, page_stride2,
        slots1, slots2, page1, magic1, shift1, page2, magic2, shift2, topk1, topk2,
        s_q, magic_s, shift_s, b * s_q, h_q, head_tiles, splits,
        min(max(call.sm_scale * LOG2_E, -FLOAT_MAX), FLOAT_MAX), zeros,
    )  # fmt: skip


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _key_set(keys: KeySet | None) -> tuple[int, ...]:
    """kv, idx, len, idx_b, idx_s, page_stride, slots, page, magic, shift, topk of one set."""
    if keys is None:
        return 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0
    indices = keys.indices
    idx_b, idx_s, _ = indices.stride()
    multiplier, shift = _divisor(keys.page_size)
    return (
        keys.data.data_ptr(), indices.data_ptr(), _pointer(keys.lengths), idx_b, idx_s, keys.page_stride,
        min(keys.slots, INT_MAX), keys.page_size, multiplier, shift, indices.shape[-1],
    )  # fmt: skip
