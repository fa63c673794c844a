"""The parameter list of the Hopper kernels: exact division, and every value where a kernel looks for it."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headfit.cache import empty_cache
from headfit.call import KeySet, SparseCall
from headfit.kernels import hopper_abi as abi

TOP = 2**31 - 1
NUMBERS = st.integers(0, TOP)


def quotient(n: int, multiplier: int, shift: int) -> int:
    """What a kernel computes: 32-bit unsigned arithmetic."""
    return n if multiplier == 0 else (n * multiplier >> 32) >> shift


@given(st.integers(1, TOP) | st.integers(0, 30).map(lambda k: 2**k), NUMBERS, NUMBERS)
@example(1, TOP, 0)
@example(2, TOP, 1)
@example(3, TOP, 2)
@example(7, TOP, TOP - 1)
@example(2**30, TOP, 2**30 - 1)
@example(2**30 + 1, TOP, 2**30)
@example(TOP, TOP, TOP - 1)
def test_division_is_exact(d: int, n: int, other: int) -> None:
    multiplier, shift = abi.magic(d)
    assert 0 <= multiplier < 2**32
    assert 0 <= shift < 32
    last = TOP // d * d  # the quotient changes at multiples of d
    for number in (n, other % d, last, last - 1, min(last + d - 1, TOP), n // d * d, max(n // d * d - 1, 0)):
        if number >= 0:
            assert quotient(number, multiplier, shift) == number // d


@pytest.mark.parametrize("d", [0, -1, 2**31])
def test_division_by_what_does_not_fit_is_refused(d: int) -> None:
    with pytest.raises(ValueError, match=f"d: got {d}, accepted are 1 to {TOP}"):
        abi.magic(d)


def a_call(sets: int = 2, *, sink: bool = True, page_size: int = 48) -> SparseCall:
    keys = []
    for topk, lengths in ((128, None), (512, torch.zeros(3, dtype=torch.int32)))[:sets]:
        data = empty_cache(4, page_size, "v4", "cpu")
        lanes = torch.zeros(3, 5, 2 * topk, dtype=torch.int32)[:, :, :topk]
        keys.append(KeySet(data, "v4", page_size, data.stride(0), 576, 4 * page_size, lanes, lengths))
    q = torch.zeros(3, 5, 64, 512, dtype=torch.bfloat16)[:, :, :8]
    out = torch.zeros(3, 5, 16, 512, dtype=torch.bfloat16)[:, :, :8]
    lse = torch.zeros(3, 8, 5)
    return SparseCall(q, tuple(keys), 0.25, torch.zeros(8) if sink else None, out, lse, None, False, "decode")


def values(buffer: abi.Buffer) -> dict[str, int | float]:
    """Each parameter as the driver would read it: through its pointer, as a value of its kind."""
    kinds = {"i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
    return {
        name: kinds[kind].from_address(address).value
        for (name, kind), address in zip(abi.PARAMETERS, buffer.pointers, strict=True)
    }


def test_every_parameter_stands_behind_its_pointer() -> None:
    call, buffer = a_call(), abi.Buffer()
    places = {name: i << 40 for i, name in enumerate(("partial", "peaks", "totals", "work", "zeros"), 1)}
    abi.pack(buffer, call, head_tiles=1, splits=4, **places)
    first, second = call.key_sets
    multiplier, shift = abi.magic(48)
    assert multiplier > TOP  # so that the sign bit is in use
    rows, rows_shift = abi.magic(5)
    page = {"page1": 48, "shift1": shift, "page2": 48, "shift2": shift}
    assert values(buffer) == {
        "q": call.q.data_ptr(), "out": call.out.data_ptr(), "lse": call.lse.data_ptr(),
        "sink": call.attn_sink.data_ptr(), "kv1": first.data.data_ptr(), "idx1": first.indices.data_ptr(), "len1": 0,
        "kv2": second.data.data_ptr(), "idx2": second.indices.data_ptr(), "len2": second.lengths.data_ptr(),
        **places,
        "q_b": 5 * 64 * 512, "q_s": 64 * 512, "q_h": 512, "out_b": 5 * 16 * 512, "out_s": 16 * 512, "out_h": 512,
        "lse_b": 40, "lse_h": 5, "lse_s": 1, "idx1_b": 5 * 256, "idx1_s": 256, "idx2_b": 5 * 1024, "idx2_s": 1024,
        "page_stride1": first.page_stride, "page_stride2": second.page_stride, "slots1": 192, "slots2": 192,
        **page, "magic1": multiplier - 2**32, "magic2": multiplier - 2**32, "topk1": 128, "topk2": 512,
        "s_q": 5, "magic_s": rows - 2**32, "shift_s": rows_shift, "rows": 15, "h_q": 8, "head_tiles": 1, "splits": 4,
        "scale_log2": struct.unpack("f", struct.pack("f", 0.25 * abi.LOG2_E))[0],
    }  # fmt: skip


def test_what_is_absent_is_zero() -> None:
    buffer = abi.Buffer()
    abi.pack(buffer, a_call(), head_tiles=1, splits=4, partial=1, peaks=2, totals=3, work=4)
    abi.pack(buffer, a_call(1, sink=False), head_tiles=1)
    found = values(buffer)
    absent = ("sink", "len1", "kv2", "idx2", "len2", "partial", "peaks", "totals", "work", "topk2", "slots2")
    assert {name: found[name] for name in absent} == dict.fromkeys(absent, 0)
    assert (found["splits"], found["page2"], found["magic2"]) == (1, 1, 0)


def test_slots_beyond_32_bits_are_clamped() -> None:
    import dataclasses

    call = a_call(1)
    call = dataclasses.replace(call, key_sets=(dataclasses.replace(call.key_sets[0], slots=2**33),))
    buffer = abi.Buffer()
    abi.pack(buffer, call, head_tiles=1)
    assert buffer.value("slots1") == TOP


def test_each_thread_has_its_own_buffer() -> None:
    buffer, seen = abi.Buffer(), []
    other = threading.Thread(target=lambda: seen.append(ctypes.addressof(buffer.data)))
    other.start()
    other.join()
    assert seen != [ctypes.addressof(buffer.data)]


def test_the_layout_is_that_of_a_c_struct() -> None:
    assert abi.LAYOUT.size == struct.calcsize("29q17ifq")
    assert all(offset % size == 0 for offset, size in abi.PLACES)
    assert len({name for name, _ in abi.PARAMETERS}) == len(abi.PARAMETERS)
