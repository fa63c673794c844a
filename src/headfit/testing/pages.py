"""The caches of a test call: routes through the public API, allocations, poison, bytes written without ``cache.py``.

An allocation starts as nothing but NaN (every byte 0xFF is NaN in e4m3, e8m0, bf16 and float32 alike), then the listed
slots are written. :func:`write_bytes` restates the byte positions of the contract on purpose: were they taken from
``headfit.cache``, a mistake there would hide itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from headfit.cache import LAYOUTS, gather_rows, page_bytes


@dataclass(frozen=True)
class Route:
    """A way into the library: entry point, cache layout, dims of a row, number of caches."""

    name: str
    layout: Literal["v4", "v32", "bf16"]
    d_qk: int
    caches: int = 1
    entry: Literal["kvcache", "sparse"] = "kvcache"

    @property
    def packed(self) -> bool:
        """Whether rows are packed FP8."""
        return self.layout != "bf16"


ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        r.name: r
        for r in (
            Route("v4", "v4", 512),
            Route("v4_two_caches", "v4", 512, caches=2),
            Route("v32", "v32", 576),
            Route("bf16_512", "bf16", 512),
            Route("bf16_576", "bf16", 576),
            Route("prefill_512", "bf16", 512, entry="sparse"),
            Route("prefill_576", "bf16", 576, entry="sparse"),
        )
    }
)


@dataclass(frozen=True)
class CacheSpec:
    """One cache in numbers: lanes a row, page size, pages, and elements left free after a page and after a row.

    ``gap`` counts bytes of packed pages and elements of bf16 pages; ``row_gap`` exists for bf16 rows only.
    """

    topk: int = 8
    page_size: int = 4
    pages: int = 6
    gap: int = 0
    row_gap: int = 0

    @property
    def slots(self) -> int:
        """Rows the cache holds."""
        return self.pages * self.page_size


@dataclass
class BuiltCache:
    """A cache view, the flat allocation it lies in, and the lanes that read it."""

    route: Route
    view: Tensor
    storage: Tensor
    indices: Tensor
    lengths: Tensor | None

    @property
    def slots(self) -> int:
        """Rows the cache holds."""
        return self.view.shape[0] * self.view.shape[1]

    @property
    def page_size(self) -> int:
        """Rows a page."""
        return self.view.shape[1]

    def rows(self, slots: Tensor) -> Tensor:
        """Dequantised rows, bf16 ``[n, d_qk]``."""
        return gather_rows(self.view, slots)

    def listed(self) -> Tensor:
        """Bool ``[slots]``: which slots a valid lane names."""
        flat = self.indices.flatten(0, 1)
        valid = (flat >= 0) & (flat < self.slots)
        if self.lengths is not None:
            repeat = flat.shape[0] // max(self.lengths.shape[0], 1)
            length = self.lengths.repeat_interleave(repeat) if repeat != 1 else self.lengths
            valid &= torch.arange(flat.shape[1], device=flat.device) < length[:, None]
        mask = torch.zeros(self.slots, dtype=torch.bool, device=flat.device)
        mask[flat[valid].long()] = True
        return mask


def allocate(
    route: Route, specs: Sequence[CacheSpec], *, interleaved: bool = False, device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """(view, flat storage) for each spec, filled with NaN; interleaved ones share a storage, page beside page."""
    sizes = [_page_elements(route, s) for s in specs]
    if not interleaved:
        return [_views(route, [s], [n], n + s.gap, device)[0] for s, n in zip(specs, sizes, strict=True)]
    return _views(route, specs, sizes, sum(sizes) + sum(s.gap for s in specs), device)


def _views(
    route: Route, specs: Sequence[CacheSpec], sizes: Sequence[int], stride: int, device: torch.device | str
) -> list[tuple[Tensor, Tensor]]:
    pages = max(s.pages for s in specs)
    dtype = torch.uint8 if route.packed else torch.bfloat16
    storage = torch.empty(max(pages * stride, 1), dtype=dtype, device=device)
    storage.view(torch.uint8).fill_(0xFF)
    start, found = 0, []
    for spec, size in zip(specs, sizes, strict=True):
        width = LAYOUTS[route.layout].bytes_per_token if route.packed else route.d_qk
        pitch = width + spec.row_gap
        offset = start if spec.pages else 0
        view = storage.as_strided((spec.pages, spec.page_size, 1, width), (stride, pitch, pitch, 1), offset)
        found.append((view, storage))
        start += size
    return found


def _page_elements(route: Route, spec: CacheSpec) -> int:
    if route.packed:
        return page_bytes(spec.page_size, route.layout)
    return spec.page_size * (route.d_qk + spec.row_gap)


def poison_scale_padding(view: Tensor) -> None:
    """Set byte 8 of every v4 scale row to 0xFF: it is padding, and a kernel that uses it meets NaN."""
    pages, page_size = view.shape[:2]
    if view.shape[-1] == 584 and pages:
        raw = view.view(torch.uint8)
        start = raw.storage_offset() + page_size * 576 + 7
        raw.as_strided((pages, page_size), (raw.stride(0), 8), start).fill_(0xFF)


def write_bytes(view: Tensor, slots: Tensor, nope: Tensor, scales: Tensor, rope: Tensor) -> None:
    """Write packed rows byte by byte, as the contract places them.

    Args:
        view: a v4 or v32 cache, uint8.
        slots: ``[n]``.
        nope: uint8 e4m3 ``[n, 448 or 512]``.
        scales: uint8 e8m0 ``[n, 7]`` (v4) or float32 ``[n, 4]`` (v32).
        rope: bf16 ``[n, 64]``.
    """
    n, page_size = slots.shape[0], view.shape[1]
    flat = view.as_strided((view.untyped_storage().nbytes(),), (1,), 0)
    page = (slots.long() // page_size) * view.stride(0) + int(view.storage_offset())
    offset = slots.long() % page_size
    rope_bytes = rope.contiguous().view(torch.uint8).reshape(n, 128)
    if view.shape[-1] == 584:
        row = page + offset * 576
        footer = page + page_size * 576 + offset * 8
        parts = [(row, nope), (row + 448, rope_bytes), (footer, scales)]
    else:
        row = page + offset * 656
        scale_bytes = scales.contiguous().view(torch.uint8).reshape(n, 16)
        parts = [(row, nope), (row + 512, scale_bytes), (row + 528, rope_bytes)]
    for start, data in parts:
        flat[start[:, None] + torch.arange(data.shape[1], device=view.device)] = data
