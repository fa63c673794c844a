"""Checks of the contract's section "Packed caches": bytes decoded by hand, every e4m3 byte, two references."""

from __future__ import annotations

import random
import struct

import torch
from torch import Tensor

from headfit.cache import unpack_kv, write_rows
from headfit.testing.calls import D_V, BuiltCall, CallSpec
from headfit.testing.checks_meaning import set_lanes
from headfit.testing.compare import (
    Truth,
    require_accurate,
    require_close_scalar,
    require_same_bits,
    require_within_packing_error,
)
from headfit.testing.pages import CacheSpec, Route, poison_scale_padding, write_bytes
from headfit.testing.runner import PACKED, Setup, check


def e4m3(byte: int) -> float:
    """The value of an e4m3 byte (NaN for 0x7f and 0xff), by the definition of the format."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def bf16(value: float) -> float:
    """``value`` rounded to the nearest bf16, ties to even, as a Python float."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def decode_row(page: bytes, page_size: int, offset: int, layout: str) -> list[float]:
    """The dims of row ``offset`` of a page, from the contract's words alone."""
    if layout == "v4":
        row, nope, group = page[offset * 576 : offset * 576 + 576], 448, 64
        footer = page[page_size * 576 + offset * 8 :]
        scales = [2.0 ** (footer[g] - 127) for g in range(7)]
        rope = row[448:576]
    else:
        row, nope, group = page[offset * 656 : offset * 656 + 656], 512, 128
        scales = list(struct.unpack("<4f", row[512:528]))
        rope = row[528:656]
    values = [bf16(e4m3(row[d]) * scales[d // group]) for d in range(nope)]
    halves = struct.unpack("<64H", rope)
    return values + [struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves]


def _random_pages(r: random.Random, pages: int, page_size: int, layout: str, page_bytes: int) -> bytearray:
    """Pages of random finite rows, written byte by byte."""
    data = bytearray(r.randbytes(pages * page_bytes))
    for p in range(pages):
        for i in range(page_size):
            start = p * page_bytes + i * (576 if layout == "v4" else 656)
            nope = 448 if layout == "v4" else 512
            for d in range(nope):
                if data[start + d] & 0x7F == 0x7F:
                    data[start + d] ^= 0x41
            rope = start + (448 if layout == "v4" else 528)
            data[rope : rope + 128] = struct.pack("<64H", *(int(bf16_bits(r.gauss(0, 1))) for _ in range(64)))
            if layout == "v4":
                footer = p * page_bytes + page_size * 576 + i * 8
                data[footer : footer + 8] = bytes([*(r.randint(117, 123) for _ in range(7)), 0xFF])
            else:
                data[start + 512 : start + 528] = struct.pack("<4f", *(r.uniform(0.001, 0.02) for _ in range(4)))
    return data


def bf16_bits(value: float) -> int:
    """The 16 bits of ``value`` rounded to bf16."""
    return struct.unpack("<I", struct.pack("<f", bf16(value)))[0] >> 16


def single_keys(setup: Setup, route: Route, view: Tensor, storage: Tensor, slots: list[int], heads: int) -> BuiltCall:
    """A call in which row r lists slots[r] alone, in the first cache, and q is zero: out must be that row."""
    spec = CallSpec(route, batch=len(slots), heads=heads, caches=(CacheSpec(1, 4, 4),) * route.caches)
    call = setup.build(spec)
    call.q.zero_()
    call.caches[0].view, call.caches[0].storage = view, storage
    set_lanes(call, [[[s] for s in slots]] + [[[-1]] * len(slots)] * (route.caches - 1))
    return call


def _exactly(rows: Tensor, heads: int, lse: float = 0.0) -> Truth:
    """The truth of single-key rows with q = 0."""
    out = rows[:, None, :D_V].double().expand(-1, heads, -1)
    zero = torch.full(out.shape[:2], lse, dtype=torch.float64, device=rows.device)
    return Truth(out, zero, zero, out.abs(), torch.zeros_like(zero))


@check(
    "v4: a page holds page_size rows of 576 B, then page_size rows of 8 B of scales; v32: 656 B rows, no footer.",
    routes=PACKED,
    lean=("v4", "v32"),
)
def check_golden_bytes(setup: Setup, route: Route) -> None:
    """Random pages decoded in plain Python: unpack_kv agrees to the bit, the backend returns each row."""
    r = setup.random("golden", route.name)
    sizes = {"v4": ((1, 1152), (2, 1728), (7, 4608)), "v32": ((1, 656), (3, 1968))}[route.layout]
    for page_size, page_bytes in sizes:
        pages = 3
        data = _random_pages(r, pages, page_size, route.layout, page_bytes)
        storage = torch.frombuffer(data, dtype=torch.uint8).clone().to(setup.device)
        width = 584 if route.layout == "v4" else 656
        view = storage.as_strided((pages, page_size, 1, width), (page_bytes, width, width, 1))
        rows = []
        for p in range(pages):
            page = bytes(data[p * page_bytes : (p + 1) * page_bytes])
            rows += [decode_row(page, page_size, i, route.layout) for i in range(page_size)]
        wanted = torch.tensor(rows, dtype=torch.float64).to(setup.device)
        require_same_bits(unpack_kv(view), wanted.to(torch.bfloat16), f"unpack_kv of pages of {page_size}")
        heads = 2
        slots = list(range(0, pages * page_size, setup.pick(1, page_size // 2 + 1)))
        call = single_keys(setup, route, view, storage, slots, heads)
        result = call.run(setup.backend)
        require_accurate(result.out, result.lse, result.max_logits, _exactly(wanted[slots], heads), normal=True)


def _byte_rows(scale: float) -> tuple[Tensor, Tensor]:
    """(e4m3 bytes, their bf16 values times ``scale``): every byte that is no NaN and whose product is finite."""
    found = [(b, e4m3(b) * scale) for b in range(256) if b & 0x7F != 0x7F]
    found = [(b, v) for b, v in found if abs(v) < 2.0**128 * (1 - 2.0**-9)]
    return torch.tensor([b for b, _ in found], dtype=torch.uint8), torch.tensor([v for _, v in found]).double()


def _scales(route: Route) -> list[float]:
    if route.layout == "v4":
        return [2.0 ** (byte - 127) for byte in (0, 1, 2, 103, 104, 126, 127, 128, 135, 136, 253, 254)]
    return [2.0**-126, 2.0**-100, 1e-4, 0.0123, 1.0, 1.7, 448.0, 2.0**60, 2.0**119]


@check(
    "Scale value 2^(byte-127) for every byte 0..254, value e4m3 * scale for all 254 finite e4m3 bytes.",
    routes=PACKED,
    lean=("v4", "v32"),
)
def check_every_byte(setup: Setup, route: Route) -> None:
    """As values: a row of single keys with q = 0 returns the products. Each byte meets each scale edge."""
    nope, groups = (448, 7) if route.layout == "v4" else (512, 4)
    spec = CallSpec(route, caches=(CacheSpec(1, 5, 4),) * route.caches)
    scales = _scales(route)
    for part in (scales[i : i + 6] for i in range(0, len(scales), 6)):
        call = setup.build(spec)
        view, storage = call.caches[0].view, call.caches[0].storage
        slots = torch.arange(1, 1 + len(part), device=setup.device)
        data, values = [], []
        for scale in part:
            codes, products = _byte_rows(scale)
            repeat = torch.arange(nope) % len(codes)
            data.append(codes[repeat])
            values.append(products[repeat])
        scale_rows = torch.tensor(part).float()[:, None].expand(-1, groups)
        if route.layout == "v4":
            scale_rows = torch.tensor([round(torch.tensor(s).double().log2().item()) + 127 for s in part])
            scale_rows = scale_rows.to(torch.uint8)[:, None].expand(-1, groups)
        rope = torch.randn(len(part), 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        write_bytes(view, slots, *(t.to(setup.device) for t in (torch.stack(data), scale_rows, rope)))
        poison_scale_padding(view)
        rows = torch.cat([torch.stack(values).float().to(torch.bfloat16).double(), rope.double()], 1).to(setup.device)
        call = single_keys(setup, route, view, storage, slots.tolist(), 2)
        result = call.run(setup.backend)
        require_accurate(result.out, result.lse, result.max_logits, _exactly(rows, 2), normal=False)


@check(
    "e4m3 bytes and scales mean the same in q.k: subnormal products are not flushed.", routes=PACKED, lean=("v4", "v32")
)
def check_every_byte_as_key(setup: Setup, route: Route) -> None:
    """One-hot queries read every byte through lse; q carries the inverse of the scale.

    At scale "small" products stay normal: Triton's interpreter converts bf16 subnormals wrongly by itself.
    """
    heads = setup.pick(64, 16)
    for power in setup.pick((-127, -126, -20, 0, 8, 100), (-117, 0)) if route.layout == "v4" else (-100, 0, 60):
        codes, values = _byte_rows(2.0**power)
        picks = torch.arange(0, len(codes), setup.pick(1, 5))
        picks = picks[: len(picks) // heads * heads].reshape(-1, heads)
        call = setup.build(CallSpec(route, caches=(CacheSpec(1, 3, 4),) * route.caches))
        view, storage = call.caches[0].view, call.caches[0].storage
        nope, groups = (448, 7) if route.layout == "v4" else (512, 4)
        data = codes[torch.arange(nope) % len(codes)][None]
        byte = torch.full((1, groups), power + 127, dtype=torch.uint8)
        scale = byte if route.layout == "v4" else torch.full((1, groups), 2.0**power)
        slot = torch.tensor([4], device=setup.device)
        rope = torch.zeros(1, 64, dtype=torch.bfloat16)
        write_bytes(view, slot, *(t.to(setup.device) for t in (data, scale, rope)))
        poison_scale_padding(view)
        call = single_keys(setup, route, view, storage, [4] * len(picks), heads)
        hot = 2.0 ** min(-power, 120)
        flat = call.q.reshape(len(picks), heads, route.d_qk)
        flat.scatter_(2, picks[..., None].to(setup.device), hot)
        call.q.copy_(flat.reshape(call.q.shape))
        result = call.remember().run(setup.backend)
        wanted = values.float().to(torch.bfloat16).double()[picks] * hot * call.sm_scale
        require_close_scalar(
            result.lse,
            wanted.to(setup.device),
            f"lse of one-hot queries at scale 2^{power}",
            1e-6 * wanted.abs().to(setup.device),
        )


@check(
    "Packed rows against two references: exact on the dequantised rows, bounded on the original ones.",
    routes=PACKED,
    lean=("v4", "v32"),
)
def check_two_references(setup: Setup, route: Route) -> None:
    """write_rows packs N(0,1) rows: the tolerance holds on what they became, the format's error on what they were."""
    caches = (CacheSpec(setup.pick(64, 16), 16, 8),) * route.caches
    call = setup.build(CallSpec(route, batch=3, heads=setup.pick(16, 4), caches=caches, lengths="none"))
    originals = []
    for i, cache in enumerate(call.caches):
        g = torch.Generator().manual_seed(call.spec.seed + i)
        rows = torch.randn(cache.slots, route.d_qk, generator=g).to(torch.bfloat16).to(setup.device)
        write_rows(cache.view, torch.arange(cache.slots, device=setup.device), rows)
        originals.append(rows)
    result = call.remember().run(setup.backend)
    require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)
    require_within_packing_error(result.out, call.truth(keys=originals).out)


@check(
    "Layouts are recognised by bytes per token; bytes outside rows and scales (pad, page rounding) mean nothing.",
    routes=PACKED,
    lean=("v4", "v32"),
)
def check_pad_bytes_mean_nothing(setup: Setup, route: Route) -> None:
    """Pad bytes of 0x00, 0xFF and junk give the same bits."""
    spec = CallSpec(route, heads=3, caches=(CacheSpec(6, 5, 5, 576),) * route.caches, seed=setup.number("pad"))
    first = setup.build(spec).run(setup.backend)
    for fill in (0x00, 0x7F, 0x80):
        call = setup.build(spec)
        for cache in call.caches:
            pages, page_size = cache.view.shape[:2]
            used = page_size * (584 if route.layout == "v4" else 656)
            step = cache.view.stride(0)
            gaps = cache.storage[: pages * step].view(pages, step)[:, used:]
            gaps.fill_(fill)
            if route.layout == "v4":
                start = page_size * 576 + 7
                cache.storage.as_strided((pages, page_size), (step, 8), start).fill_(fill)
        call.remember().run(setup.backend).require_same(first, f"pad bytes {fill:#04x} against 0xFF")
