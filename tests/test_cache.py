"""Byte layouts: golden bytes worked out by hand, every byte value, any page size, foreign strides."""

import math

import pytest
import torch

from headfit import cache
from headfit.cache import LAYOUTS, empty_cache, gather_rows, layout_of, pack_kv, page_bytes, unpack_kv, write_rows


def whole_page_bytes(k_cache: torch.Tensor) -> torch.Tensor:
    """All bytes of a packed cache, padding included: [pages, page stride]."""
    return k_cache.as_strided((k_cache.shape[0], k_cache.stride(0)), (k_cache.stride(0), 1))


@pytest.mark.parametrize(
    ("layout", "page_size", "expected"),
    [
        ("v4", 1, 1152),
        ("v4", 2, 1728),
        ("v4", 64, 37440),
        ("v4", 72, 42048),  # 72 * 584 = 73 * 576: the one size up to 576 below 73 that needs no padding
        ("v4", 256, 149760),
        ("v32", 1, 656),
        ("v32", 64, 41984),
    ],
)
def test_page_bytes(layout, page_size, expected):
    assert page_bytes(page_size, layout) == expected
    view = empty_cache(3, page_size, layout)
    token = LAYOUTS[layout].bytes_per_token
    assert view.shape == (3, page_size, 1, token)
    assert view.stride() == (expected, token, token, 1)


def test_layouts_are_told_apart_by_bytes():
    assert layout_of(584).name == "v4"
    assert layout_of(656).name == "v32"
    with pytest.raises(ValueError, match=r"528 bytes a token; accepted: 584 \(v4\), 656 \(v32\)"):
        layout_of(528)


def test_v4_golden_bytes():
    """Three rows in pages of two: data pitch 576, rope at 448, scales from 2 * 576 on, second page at 1728."""
    kv = torch.zeros(3, 512)
    kv[0, 0:64] = 1.0  # 1 / 448 -> 2^-8, byte 119; 1 / 2^-8 = 256 = 2^8 -> exponent 15, 0x78
    kv[0, 64] = 448.0  # scale 1, byte 127; the largest e4m3, 0x7e
    kv[0, 65] = 2.0**-9  # the smallest subnormal at scale 1
    kv[0, 128] = -3.0  # 3 / 448 -> 2^-7, byte 120; -384 = -1.5 * 2^8 -> 0xfc
    kv[0, 192] = 449.0  # just above 448 -> scale 2, byte 128; 224.5 rounds to 224 = 1.75 * 2^7 -> 0x76
    kv[0, 448] = 1.0  # bf16 0x3f80
    kv[0, 511] = -2.0  # bf16 0xc000
    kv[1, 447] = 0.01  # below 1e-4 * 448: scale 2^-13, byte 114; 81.92 rounds to 80 = 1.25 * 2^6 -> 0x6a
    kv[2, 0] = 448.0 * 2**20  # byte 147
    page = whole_page_bytes(pack_kv(kv, 2))
    assert page.shape == (2, 1728)
    first, second = page[0], page[1]
    assert first[0:64].tolist() == [0x78] * 64
    assert first[64:67].tolist() == [0x7E, 0x01, 0x00]
    assert first[128] == 0xFC
    assert first[192] == 0x76
    assert first[448:450].tolist() == [0x80, 0x3F]
    assert first[574:576].tolist() == [0x00, 0xC0]
    assert first[576 + 447] == 0x6A
    assert first[1152:1160].tolist() == [119, 127, 120, 128, 114, 114, 114, 0]
    assert first[1160:1168].tolist() == [114] * 7 + [0]
    assert first[1168:].tolist() == [0] * (1728 - 1168)
    assert second[0] == 0x7E
    assert second[1152:1160].tolist() == [147] + [114] * 6 + [0]
    assert second[1160:1168].tolist() == [0] * 8  # a slot that was never written


def test_v32_golden_bytes():
    kv = torch.zeros(2, 576)
    kv[1, 0:128] = 1.0  # scale 2^-8, float32 0x3b800000
    kv[1, 128] = 448.0  # scale 1, 0x3f800000
    kv[1, 512] = 1.0
    kv[1, 575] = -2.0
    page = whole_page_bytes(pack_kv(kv, 2, "v32"))
    assert page.shape == (1, 1312)
    row = page[0, 656:]
    assert row[0:128].tolist() == [0x78] * 128
    assert row[128] == 0x7E
    smallest = [0x00, 0x00, 0x00, 0x39]  # 2^-13
    assert row[512:528].tolist() == [0, 0, 0x80, 0x3B, 0, 0, 0x80, 0x3F, *smallest, *smallest]
    assert row[528:530].tolist() == [0x80, 0x3F]
    assert row[654:656].tolist() == [0x00, 0xC0]


def e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_v4_every_value_and_every_scale():
    k_cache = empty_cache(256, 4)
    data, scales = cache.row_views(k_cache)
    nope = torch.arange(256, dtype=torch.uint8)
    for page in range(256):
        for row in range(4):
            data[page, row, : 7 * 64] = nope.view(4, 64)[row].repeat(7)
            scales[page, row, :7] = page
    value = torch.tensor([e4m3_value(b) for b in range(256)], dtype=torch.float64)
    factor = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [math.nan], dtype=torch.float64)
    expected = (value * factor[:, None]).to(torch.float32).to(torch.bfloat16).view(1024, 64)
    rows = unpack_kv(k_cache)
    for group in range(7):
        got = rows[:, group * 64 : group * 64 + 64]
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_v32_scales_are_any_float():
    k_cache = pack_kv(torch.ones(1, 576), 1, "v32")
    k_cache[0, 0, 0, 512:528] = torch.tensor([0.3, -2.0, float("inf"), float("nan")]).view(torch.uint8)
    row = unpack_kv(k_cache)[0]
    assert torch.equal(row[0], torch.tensor(256 * 0.3).bfloat16())
    assert row[128] == -512
    assert row[256] == math.inf
    assert row[384].isnan()


@pytest.mark.parametrize("layout", ["v4", "v32"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 64, 72, 100])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 200])
def test_round_trip(layout, page_size, rows, seed):
    fmt = LAYOUTS[layout]
    scale = torch.exp2(torch.randint(-30, 40, (rows, 1)))
    kv = (torch.randn(rows, fmt.d_qk) * scale).bfloat16()
    k_cache = pack_kv(kv, page_size, layout)
    assert k_cache.shape == (-(-rows // page_size), page_size, 1, fmt.bytes_per_token)
    got = unpack_kv(k_cache)
    assert got.shape == (k_cache.shape[0] * page_size, fmt.d_qk)
    assert got[rows:].eq(0).all()
    got = got[:rows]
    assert torch.equal(got[:, fmt.d_nope :], kv[:, fmt.d_nope :])
    nope = kv[:, : fmt.d_nope].float().view(rows, fmt.groups, fmt.group)
    error = (got[:, : fmt.d_nope].float().view_as(nope) - nope).abs()
    unit = torch.exp2(torch.ceil(torch.log2((nope.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-4))))
    assert (error <= torch.maximum(nope.abs() * 2**-4, unit * 2**-10)).all()
    again = pack_kv(got, page_size, layout)
    assert torch.equal(unpack_kv(again)[:rows], got), "a dequantised row packs to itself"
    assert torch.equal(unpack_kv(k_cache.view(torch.float8_e4m3fn), layout)[:rows], got)


@pytest.mark.parametrize(("layout", "page_size"), [("v4", 1), ("v4", 7), ("v4", 64), ("v32", 1), ("v32", 5)])
def test_two_caches_interleave_in_one_allocation(layout, page_size, seed):
    """Pages of two caches alternate, at odd addresses, with guard bytes between them."""
    fmt = LAYOUTS[layout]
    used, guard, pages = page_size * fmt.bytes_per_token, 3, 4
    stride = 2 * (used + guard)
    storage = torch.full((1 + pages * stride,), 0xAB, dtype=torch.uint8)
    shape = (pages, page_size, 1, fmt.bytes_per_token)
    strides = (stride, fmt.bytes_per_token, fmt.bytes_per_token, 1)
    views = [storage.as_strided(shape, strides, 1 + i * (used + guard)) for i in range(2)]
    rows = [torch.randn(pages * page_size, fmt.d_qk) for _ in views]
    for view, kv in zip(views, rows, strict=True):
        view.zero_()
        write_rows(view, torch.arange(len(kv)).roll(1), kv)
        kept = unpack_kv(view)
        write_rows(view, torch.arange(len(kv)), kv)
        assert not torch.equal(kept, unpack_kv(view)) or len(kv) == 1
    for view, kv in zip(views, rows, strict=True):
        assert torch.equal(unpack_kv(view), unpack_kv(pack_kv(kv, page_size, layout)))
        index = torch.randint(0, len(kv), (9,))
        assert torch.equal(gather_rows(view, index), unpack_kv(view)[index])
    guards = storage.as_strided((2 * pages, guard), (used + guard, 1), 1 + used)
    assert storage[0] == 0xAB
    assert guards.eq(0xAB).all()


@pytest.mark.parametrize("layout", ["v4", "v32", "bf16"])
def test_write_rows_skips_invalid_slots(layout, seed):
    if layout == "bf16":
        k_cache, width = torch.randn(3, 4, 1, 512).bfloat16(), 512
    else:
        width = LAYOUTS[layout].d_qk
        k_cache = pack_kv(torch.randn(12, width), 4, layout)
    before = unpack_kv(k_cache)
    kv = torch.randn(6, width)
    write_rows(k_cache, torch.tensor([-1, 12, -(2**31), 2**31 - 1, -1, -7], dtype=torch.int32), kv)
    assert torch.equal(unpack_kv(k_cache), before), "no valid slot: nothing is written"
    write_rows(k_cache, torch.tensor([-1, 5, 12, 11, -3, 0]), kv)
    after = unpack_kv(k_cache)
    expected = kv.bfloat16() if layout == "bf16" else unpack_kv(pack_kv(kv, 6, layout))
    assert torch.equal(after[[5, 11, 0]], expected[[1, 3, 5]])
    rest = [i for i in range(12) if i not in (5, 11, 0)]
    assert torch.equal(after[rest], before[rest])
    write_rows(k_cache, torch.empty(0, dtype=torch.int64), kv[:0])
    assert torch.equal(unpack_kv(k_cache), after)


def test_not_finite_values_stay_where_they_are():
    kv = torch.ones(1, 512)
    kv[0, 3], kv[0, 70], kv[0, 500] = math.nan, math.inf, -math.inf
    row = unpack_kv(pack_kv(kv, 1))[0]
    assert row[3].isnan()
    assert row[70].isnan()
    assert row[500] == -math.inf
    assert row[[0, 64, 71, 499]].eq(1).all()
    big = torch.full((1, 512), 3.0e38)
    assert unpack_kv(pack_kv(big, 1)).isfinite().all()


def test_pack_takes_strided_and_higher_rank_input(seed):
    wide = torch.randn(2, 5, 1024)
    kv = wide[..., ::2]
    assert torch.equal(pack_kv(kv, 4), pack_kv(kv.reshape(10, 512).contiguous(), 4))
    assert torch.equal(pack_kv(kv.double(), 4), pack_kv(kv, 4))


def test_more_rows_than_one_pass_holds(monkeypatch, seed):
    kv = torch.randn(50, 512)
    expected = pack_kv(kv, 3)
    monkeypatch.setattr(cache, "_PACK_ROWS", 7)
    assert torch.equal(pack_kv(kv, 3), expected)
    assert torch.equal(unpack_kv(expected)[:50], gather_rows(expected, torch.arange(50)))


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        (lambda: pack_kv(torch.zeros(2, 500), 2), ValueError, r"kv: got shape \[2, 500\]; accepted: \[n, 512\]"),
        (lambda: pack_kv(torch.zeros(2, 512, dtype=torch.int32), 2), TypeError, "kv: got torch.int32"),
        (lambda: pack_kv(torch.zeros(2, 512), 0), ValueError, "page_size: got 0"),
        (lambda: pack_kv(torch.zeros(2, 512), 2, "v5"), ValueError, "layout: got 'v5'; accepted: v4, v32"),
        (lambda: pack_kv(torch.tensor(1.0), 2), ValueError, "kv: got a scalar"),
        (lambda: pack_kv(None, 2), TypeError, "kv: got NoneType; accepted: a torch.Tensor"),
        (lambda: pack_kv(torch.zeros(2, 512), 2.0), TypeError, "page_size: got 2.0; accepted: an integer"),
        (lambda: pack_kv(torch.zeros(2, 512), 2, []), ValueError, r"layout: got \[\]"),
        (lambda: unpack_kv(None), TypeError, "k_cache: got NoneType"),
        (lambda: unpack_kv(torch.zeros(584, dtype=torch.uint8)), ValueError, r"k_cache: got shape \[584\]"),
        (lambda: unpack_kv(empty_cache(2, 4).transpose(0, 1)), ValueError, "k_cache: got strides"),
        (lambda: unpack_kv(empty_cache(2, 4)[:, ::2]), ValueError, "k_cache: got strides"),
        (lambda: unpack_kv(torch.zeros(1, 2, 2, 512).bfloat16()), ValueError, r"k_cache: got shape \[1, 2, 2, 512\]"),
        (lambda: unpack_kv(torch.zeros(1, 2, 1, 512).bfloat16(), "v4"), ValueError, "layout: got v4, but k_cache"),
        (lambda: empty_cache(-1, 2), ValueError, "pages: got -1"),
        (lambda: empty_cache(1, 2, page_stride=1167), ValueError, "page_stride: got 1167 bytes"),
        (lambda: unpack_kv(empty_cache(1, 2), "v32"), ValueError, "layout: got v32"),
        (lambda: unpack_kv(torch.zeros(1, 2, 1, 584)), TypeError, "k_cache: got torch.float32"),
        (lambda: cache.row_views(empty_cache(1, 2)[0]), ValueError, r"k_cache: got shape \[2, 1, 584\]"),
        (lambda: write_rows(empty_cache(1, 2), torch.zeros(3), torch.zeros(2, 512)), ValueError, "slots: got shape"),
    ],
)
def test_bad_input_says_what_is_accepted(action, error, words):
    with pytest.raises(error, match=words):
        action()
