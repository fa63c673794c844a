"""Byte layouts of packed KV caches: the only file that knows where a byte of a page stands.

Belongs here: layouts, packing, unpacking, writing and gathering rows, on any device, in plain torch. Does not
belong here: attention, checks of attention arguments, kernels (they read the strides that `Layout` states).

Two layouts, told apart by the bytes a token takes:

* ``v4`` (584 B): a page is ``page_size`` rows of 576 B (448 e4m3, then 64 bf16), then a footer of ``page_size`` rows
  of 8 B (7 e8m0 scales, one for 64 values, and a pad byte). A page rounds up to a multiple of 576 B. The view is
  ``[pages, page_size, 1, 584]`` with ``stride(1) == 584`` by convention: it covers the bytes, it does not address rows.
* ``v32`` (656 B): every row is 512 e4m3, 4 float32 scales (one for 128 values), 64 bf16. No footer.

Source of both conventions: FlashMLA (``tests/quant.py``), which names them MODEL1 and V32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

E4M3_MAX = 448.0
MIN_SCALE = 1e-4  # floor of amax / 448 before it is rounded up to a power of two
_E4M3_NAN = 0x7F
_PACK_ROWS = 16384  # rows quantised at once: bounds the float32 copies (about 100 MB) whatever the cache


@dataclass(frozen=True)
class Layout:
    """Where the parts of a packed row stand. All sizes in bytes, except the dims and `group` (elements).

    `data_bytes` is the pitch of the rows inside a page, `scale_bytes` that of the footer (0: no footer) and
    `page_multiple` what a page rounds up to.
    """

    name: str
    bytes_per_token: int
    d_qk: int
    d_nope: int
    d_rope: int
    group: int
    data_bytes: int
    scale_bytes: int
    page_multiple: int

    @property
    def groups(self) -> int:
        """Scales of a row: one for `group` nope dims."""
        return self.d_nope // self.group

    @property
    def rope_start(self) -> int:
        """Byte of a row at which the 64 bf16 rope dims start; they always end the row."""
        return self.data_bytes - 2 * self.d_rope


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "v4": Layout("v4", 584, 512, 448, 64, 64, 576, 8, 576),
        "v32": Layout("v32", 656, 576, 512, 64, 128, 656, 0, 1),
    }
)


def layout_of(bytes_per_token: int) -> Layout:
    """The layout of a cache whose last dimension has `bytes_per_token` bytes.

    Raises:
        ValueError: no layout has that many bytes a token.
    """
    for layout in LAYOUTS.values():
        if layout.bytes_per_token == bytes_per_token:
            return layout
    known = ", ".join(f"{x.bytes_per_token} ({x.name})" for x in LAYOUTS.values())
    raise ValueError(f"k_cache: {bytes_per_token} bytes a token; accepted: {known}. Pack rows with headfit.pack_kv.")


def _named(layout: str | Layout) -> Layout:
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; accepted: {', '.join(LAYOUTS)}.")
    return LAYOUTS[layout]


def page_bytes(page_size: int, layout: str | Layout = "v4") -> int:
    """Bytes from one page to the next: `page_size` tokens, rounded up to the layout's multiple.

    ``v4``: 64 -> 37440, 256 -> 149760, 2 -> 1728, 1 -> 1152. ``v32`` does not round.

    Raises:
        ValueError: `page_size` below 1 or unknown layout. TypeError: `page_size` is no integer.
    """
    fmt = _named(layout)
    if isinstance(page_size, bool) or not hasattr(page_size, "__index__"):
        raise TypeError(f"page_size: got {page_size!r}; accepted: an integer, 1 and above.")
    if page_size < 1:
        raise ValueError(f"page_size: got {page_size}; accepted: 1 and above.")
    used = page_size * fmt.bytes_per_token
    return -(-used // fmt.page_multiple) * fmt.page_multiple


def empty_cache(
    pages: int,
    page_size: int,
    layout: str | Layout = "v4",
    device: torch.device | str | None = None,
    page_stride: int | None = None,
) -> Tensor:
    """A zero-filled packed cache: uint8 view ``[pages, page_size, 1, bytes_per_token]``.

    ``stride(1)`` is `bytes_per_token` and ``stride(0)`` is `page_stride` bytes, `page_bytes(page_size, layout)` if
    None. A wider stride leaves room for another cache in the same allocation.

    Raises:
        ValueError: negative `pages`, `page_size` below 1, or a `page_stride` shorter than the bytes a page uses.
    """
    fmt = _named(layout)
    stride = page_bytes(page_size, fmt) if page_stride is None else page_stride
    used = page_size * fmt.bytes_per_token
    if pages < 0:
        raise ValueError(f"pages: got {pages}; accepted: 0 and above.")
    if page_size < 1 or stride < used:
        raise ValueError(f"page_stride: got {stride} bytes; a page of {page_size} {fmt.name} rows uses {used}.")
    storage = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
    token = fmt.bytes_per_token
    return storage.as_strided((pages, page_size, 1, token), (stride, token, token, 1))


def row_views(k_cache: Tensor, layout: str | Layout | None = None) -> tuple[Tensor, Tensor | None]:
    """Byte views of a packed cache: rows ``[pages, page_size, data_bytes]`` and the footer, or None if there is none.

    Both alias `k_cache` and address its bytes as they stand (the strides of `k_cache` do not, for ``v4``).
    """
    fmt = _check_packed(k_cache, layout)
    raw = k_cache.view(torch.uint8)
    pages, page_size = raw.shape[:2]
    stride = raw.stride(0) if pages > 1 else page_size * fmt.bytes_per_token
    start = raw.storage_offset()
    data = raw.as_strided((pages, page_size, fmt.data_bytes), (stride, fmt.data_bytes, 1), start)
    if not fmt.scale_bytes:
        return data, None
    footer = start + page_size * fmt.data_bytes if pages else start
    return data, raw.as_strided((pages, page_size, fmt.scale_bytes), (stride, fmt.scale_bytes, 1), footer)


def quantize_rows(kv: Tensor, layout: str | Layout = "v4") -> tuple[Tensor, Tensor]:
    """Rows as bytes: kv ``[n, d_qk]`` of any float dtype -> (uint8 ``[n, data_bytes]``, uint8 ``[n, scale_bytes]``).

    The scale of a group is ``2^ceil(log2(max(amax / 448, 1e-4)))``; values round to nearest even. A value that is not
    finite becomes an e4m3 NaN where it stands and takes no part in the amax. Rope dims are rounded to bf16.

    Raises:
        ValueError: `kv` is not ``[n, d_qk]``, or unknown layout.
        TypeError: `kv` is not floating point.
    """
    fmt = _named(layout)
    _check_rows("kv", kv, fmt.d_qk)
    n = kv.shape[0]
    nope = kv[:, : fmt.d_nope].float().reshape(n, fmt.groups, fmt.group)
    finite = nope.isfinite()
    amax = torch.where(finite, nope.abs(), 0.0).amax(-1)
    # frexp: x = m * 2^e with m in [0.5, 1), so ceil(log2(x)) is e, or e - 1 exactly at a power of two
    mantissa, exponent = torch.frexp((amax / E4M3_MAX).clamp_min(MIN_SCALE))
    exponent = exponent.to(torch.int32) - (mantissa == 0.5).to(torch.int32)
    scale_byte = (exponent + 127).to(torch.uint8)
    scale = e8m0_to_float(scale_byte)
    # versions of torch differ in whether an infinite float saturates: say it
    quantised = (nope / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(~finite, _E4M3_NAN)
    data = kv.new_empty((n, fmt.data_bytes), dtype=torch.uint8)
    data[:, : fmt.d_nope] = quantised.reshape(n, fmt.d_nope)
    rope = kv[:, fmt.d_nope :].to(torch.bfloat16).contiguous()
    data[:, fmt.rope_start :] = rope.view(torch.uint8).reshape(n, 2 * fmt.d_rope)
    scales = kv.new_zeros((n, fmt.scale_bytes), dtype=torch.uint8)
    if fmt.scale_bytes:
        scales[:, : fmt.groups] = scale_byte
    else:
        data[:, fmt.d_nope : fmt.rope_start] = scale.contiguous().view(torch.uint8).reshape(n, 4 * fmt.groups)
    return data, scales


def dequantize_rows(data: Tensor, scales: Tensor | None, layout: str | Layout = "v4") -> Tensor:
    """Inverse of `quantize_rows`: bf16 ``[n, d_qk]``, each nope value the float32 product e4m3 * scale rounded to bf16.

    `scales` is the footer ``[n, scale_bytes]``; None for a layout without one.
    """
    fmt = _named(layout)
    n = data.shape[0]
    if fmt.scale_bytes:
        if scales is None:
            raise ValueError(f"scales: got None; layout {fmt.name} needs its footer, [n, {fmt.scale_bytes}] uint8.")
        scale = e8m0_to_float(scales[:, : fmt.groups])
    else:
        # a copy first: a foreign page may start at an address that float32 cannot be read from
        scale = _copy(data[:, fmt.d_nope : fmt.rope_start]).view(torch.float32)
    rows = data.new_empty((n, fmt.d_qk), dtype=torch.bfloat16)
    nope = _copy(data[:, : fmt.d_nope]).view(torch.float8_e4m3fn).to(torch.float32)
    rows[:, : fmt.d_nope] = (nope.view(n, fmt.groups, fmt.group) * scale[..., None]).view(n, fmt.d_nope)
    rows[:, fmt.d_nope :] = _copy(data[:, fmt.rope_start :]).view(torch.bfloat16)
    return rows


def e8m0_to_float(scales: Tensor) -> Tensor:
    """uint8 e8m0 -> float32 2^(byte - 127). Byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, 0x00400000, bits)
    return torch.where(scales == 255, 0x7FC00000, bits).view(torch.float32)


def pack_kv(kv: Tensor, page_size: int, layout: str | Layout = "v4") -> Tensor:
    """Packs rows into a fresh cache.

    Args:
        kv: ``[..., d_qk]`` of any float dtype and strides; leading dims are flattened into rows.
        page_size: tokens a page, 1 and above. The last page is filled up with zero bytes.
        layout: ``v4`` (d_qk 512) or ``v32`` (d_qk 576).

    Returns:
        uint8 ``[ceil(n / page_size), page_size, 1, bytes_per_token]`` on the device of `kv`; row i is slot i. The scale
        rule is `quantize_rows`'s.

    Raises:
        ValueError: width other than d_qk, page_size below 1, unknown layout.
        TypeError: `kv` is no tensor or not floating point, or page_size no integer.
    """
    fmt = _named(layout)
    _check_tensor("kv", kv)
    if kv.dim() == 0:
        raise ValueError(f"kv: got a scalar; accepted: [..., {fmt.d_qk}].")
    n = prod(kv.shape[:-1])
    rows = kv.reshape(n, kv.shape[-1])
    _check_rows("kv", rows, fmt.d_qk)
    page_bytes(page_size, fmt)
    cache = empty_cache(-(-n // page_size), page_size, fmt, kv.device)
    write_rows(cache, torch.arange(n, device=kv.device), rows)
    return cache


def unpack_kv(k_cache: Tensor, layout: str | Layout | None = None) -> Tensor:
    """The rows a cache stands for: bf16 ``[pages * page_size, d_qk]``. The oracle reads these and nothing else.

    `k_cache` is packed (uint8 or float8_e4m3fn) or plain bf16 pages ``[pages, page_size, 1, d_qk]``; `layout` None
    recognises the layout by the bytes a token takes.

    Raises:
        ValueError: another shape, bytes a token or layout; packed pages whose rows do not follow one another.
        TypeError: `k_cache` is no tensor, or of another dtype.
    """
    _check_tensor("k_cache", k_cache)
    if k_cache.dtype == torch.bfloat16:
        _check_pages(k_cache)
        if layout is not None:
            raise ValueError(f"layout: got {_named(layout).name}, but k_cache holds plain bfloat16 rows; pass None.")
    else:
        fmt = _check_packed(k_cache, layout)
        token = fmt.bytes_per_token
        if k_cache.stride(3) != 1 or (k_cache.shape[1] > 1 and k_cache.stride(1) != token):
            raise ValueError(
                f"k_cache: got strides {k_cache.stride()}; accepted: stride(1) = {token} and stride(3) = 1, "
                "the page stride is free."
            )
    slots = torch.arange(k_cache.shape[0] * k_cache.shape[1], device=k_cache.device)
    chunks = [gather_rows(k_cache, part, layout) for part in torch.split(slots, _PACK_ROWS)]
    return torch.cat(chunks)


def gather_rows(k_cache: Tensor, slots: Tensor, layout: str | Layout | None = None) -> Tensor:
    """Dequantised rows of valid slots: bf16 ``[n, d_qk]``.

    `slots` is ``[n]`` of an int dtype, each page * page_size + offset. Nothing is checked about their values: a caller
    leaves invalid ones out.
    """
    index = slots.long()
    page, offset = index // k_cache.shape[1], index % k_cache.shape[1]
    if k_cache.dtype == torch.bfloat16:
        return k_cache[page, offset, 0]
    data, scales = row_views(k_cache, layout)
    footer = None if scales is None else scales[page, offset]
    return dequantize_rows(data[page, offset], footer, _check_packed(k_cache, layout))


def write_rows(k_cache: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Writes kv ``[n, d_qk]`` into `slots` ``[n]`` (page * page_size + offset), in place, without a host sync.

    `k_cache` is packed, or plain bf16 pages ``[pages, page_size, 1, d_qk]``. A negative slot, or one past the end, is
    skipped. A slot that stands twice gets one of its rows: which one is not defined.

    Raises:
        ValueError: shapes that do not fit. TypeError: unknown dtype.
    """
    pages = k_cache.shape[0]
    width = k_cache.shape[-1] if k_cache.dtype == torch.bfloat16 else _check_packed(k_cache, None).d_qk
    _check_rows("kv", kv, width)
    if slots.shape != kv.shape[:1]:
        raise ValueError(f"slots: got shape {list(slots.shape)}; accepted: [{kv.shape[0]}], one for a row of kv.")
    if pages == 0:
        return
    for part, rows in zip(torch.split(slots, _PACK_ROWS), torch.split(kv, _PACK_ROWS), strict=True):
        if part.numel() == 0:
            continue
        if k_cache.dtype == torch.bfloat16:
            _scatter(k_cache[:, :, 0], part, rows.to(torch.bfloat16))
            continue
        fmt = _check_packed(k_cache, None)
        data, scales = row_views(k_cache, fmt)
        row_bytes, scale_bytes = quantize_rows(rows, fmt)
        _scatter(data, part, row_bytes)
        if scales is not None:
            _scatter(scales, part, scale_bytes)


def _scatter(target: Tensor, slots: Tensor, rows: Tensor) -> None:
    """target[slot // page_size, slot % page_size] = row, for valid slots, without reading a slot on the host.

    A skipped row repeats the first valid one, so that equal bytes are written twice; with no valid row at all, slot 0
    is written with what it holds.
    """
    page_size = target.shape[1]
    slots = slots.long()
    valid = (slots >= 0) & (slots < target.shape[0] * page_size)
    first = valid.to(torch.uint8).argmax().view(1)
    source = torch.where(valid, torch.arange(slots.numel(), device=slots.device), first)
    slots = torch.where(valid, slots, slots.index_select(0, first)).where(valid.any(), 0)
    page, offset = slots // page_size, slots % page_size
    target[page, offset] = torch.where(valid.any(), rows.index_select(0, source), target[0, 0])


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _check_rows(name: str, rows: Tensor, width: int) -> None:
    if not rows.is_floating_point():
        raise TypeError(f"{name}: got {rows.dtype}; accepted: a floating-point dtype.")
    if rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"{name}: got shape {list(rows.shape)}; accepted: [n, {width}].")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; accepted: a torch.Tensor.")


def _check_pages(k_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape[2] != 1:
        raise ValueError(f"k_cache: got shape {list(k_cache.shape)}; accepted: [pages, page_size, 1, bytes_per_token].")


def _check_packed(k_cache: Tensor, layout: str | Layout | None) -> Layout:
    if k_cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise TypeError(f"k_cache: got {k_cache.dtype}; accepted: uint8 or float8_e4m3fn pages.")
    _check_pages(k_cache)
    found = layout_of(k_cache.shape[3])
    if layout is not None and _named(layout) != found:
        asked = _named(layout).name
        raise ValueError(f"layout: got {asked}, but k_cache has {k_cache.shape[3]} bytes a token ({found.name}).")
    return found
