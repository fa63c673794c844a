"""From a :class:`CallSpec` to tensors, with the traps that every test gets without asking.

Slots that no row lists hold NaN, and so do page gaps, scale padding, heads of a padded q outside the call and the
elements of ``out`` before it is written; ``out`` outside the call holds junk that must survive; lanes past a row's
length hold valid indices, mostly of NaN rows. All is drawn on the CPU from one seed: every device sees the same bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headfit.cache import write_rows
from headfit.testing.calls import D_V, INT_MAX, INT_MIN, BuiltCall, CallSpec
from headfit.testing.pages import BuiltCache, CacheSpec, Route, allocate, poison_scale_padding, write_bytes


def build(spec: CallSpec, device: torch.device | str = "cpu") -> BuiltCall:
    """The tensors of ``spec`` on ``device``; the same values for the same spec, wherever they lie.

    Raises:
        ValueError: the spec leaves no slot unlisted, so a dense kernel could pass for a sparse one.
    """
    if not spec.caches:
        spec = replace(spec, caches=(CacheSpec(),) * spec.route.caches)
    if spec.route.entry == "sparse":  # kv has no pages: one row each
        spec = replace(spec, caches=tuple(replace(c, page_size=1, pages=c.slots) for c in spec.caches))
    if len(spec.caches) != spec.route.caches:
        raise ValueError(f"caches: got {len(spec.caches)}, route {spec.route.name} has {spec.route.caches}")
    g = torch.Generator().manual_seed(spec.seed)
    caches, exponents = _caches(spec, g, torch.device(device))
    q_buffer, q = _head_slice(spec, spec.q_heads, spec.route.d_qk)
    q_buffer.fill_(float("nan"))
    q.copy_(_queries(spec, g, exponents))
    out_buffer, out = None, None
    if spec.out:
        out_buffer, out = _head_slice(spec, spec.out_heads, D_V)
        out_buffer.view(torch.int16).random_(-(2**15), 2**15, generator=g)
        out.fill_(float("nan"))
        out_buffer, out = _move(out_buffer, out, device)
    q_buffer, q = _move(q_buffer, q, device)
    sink = _sink(spec, g)
    return BuiltCall(
        spec=spec,
        q=q,
        q_buffer=q_buffer,
        out=out,
        out_buffer=out_buffer,
        caches=caches,
        sink=None if sink is None else sink.to(device),
        sm_scale=spec.route.d_qk**-0.5,
    ).remember()


def _move(buffer: Tensor, view: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    moved = buffer.to(device)
    return moved, moved.as_strided(view.shape, view.stride(), view.storage_offset())


def _lead(spec: CallSpec) -> tuple[int, ...]:
    return (spec.rows,) if spec.route.entry == "sparse" else (spec.batch, spec.s_q)


def _head_slice(spec: CallSpec, buffer_heads: int | None, width: int) -> tuple[Tensor, Tensor]:
    """A buffer and the slice of it that the call uses: [lead, heads, width], one spare row an entry if they are few."""
    heads = spec.head_offset + spec.heads if buffer_heads is None else buffer_heads
    if heads < spec.head_offset + spec.heads:
        raise ValueError(f"{spec}: the buffer's {heads} heads do not hold the slice")
    lead = _lead(spec)
    spare = 1 if spec.rows <= 64 else 0
    buffer = torch.empty(*lead[:-1], lead[-1] + spare, heads, width + spec.pitch, dtype=torch.bfloat16)
    return buffer, buffer[..., : lead[-1], spec.head_offset : spec.head_offset + spec.heads, :width]


def _queries(spec: CallSpec, g: torch.Generator, exponents: Tensor) -> Tensor:
    q = torch.randn(*_lead(spec), spec.heads, spec.route.d_qk, generator=g)
    if spec.data == "large_q":
        return (q * 2500).clamp(-1e4, 1e4)
    if spec.data == "wide_scales":
        # the inverse of the keys' exponents: logits stay of order one while values span 160 powers of two
        return q.double().mul(torch.exp2(-exponents.double())).float()
    return q


def _sink(spec: CallSpec, g: torch.Generator) -> Tensor | None:
    if spec.sink == "none":
        return None
    sink = torch.randn(spec.heads, generator=g) * 2
    if spec.sink == "edges":
        edges = torch.tensor([float("inf"), float("-inf"), 1e4, -1e4])
        pick = torch.randint(0, 8, (spec.heads,), generator=g)
        sink = torch.where(pick < 4, edges[pick % 4], sink)
    return sink


def _caches(spec: CallSpec, g: torch.Generator, device: torch.device) -> tuple[list[BuiltCache], Tensor]:
    """The caches of the call on ``device``, and the exponent of two that each dim of their rows was scaled by."""
    exponents = torch.zeros(spec.route.d_qk)
    if spec.data == "wide_scales":
        group = 128 if spec.route.layout == "v32" else 64
        drawn = torch.randint(-100, 61, (-(-spec.route.d_qk // group),), generator=g)
        drawn[:2] = torch.tensor([-100, 60])
        drawn[-1] = 0  # the rope dims are plain bf16 near one
        exponents = drawn.repeat_interleave(group)[: spec.route.d_qk].float()
    found: list[BuiltCache] = []
    moved: dict[int, Tensor] = {}
    for cache, (view, storage) in zip(
        spec.caches, allocate(spec.route, spec.caches, interleaved=spec.interleaved), strict=True
    ):
        indices, lengths = _lanes(spec, cache, g)
        built = BuiltCache(spec.route, view, storage, indices, lengths)
        _fill(spec, built, exponents, g)
        found.append(built)
    for built in found:
        moved.setdefault(built.storage.data_ptr(), built.storage.to(device))
        storage = moved[built.storage.data_ptr()]
        view = storage.as_strided(built.view.shape, built.view.stride(), built.view.storage_offset())
        built.view = view.view(torch.float8_e4m3fn) if spec.fp8_view and spec.route.packed else view
        built.storage = storage
        # a move to another device would make a strided list contiguous
        wide = torch.empty(*built.indices.shape[:-1], built.indices.shape[-1] + spec.index_pitch, dtype=torch.int32)
        wide.random_(0, INT_MAX, generator=g)
        wide = wide.to(device)
        wide[..., : built.indices.shape[-1]] = built.indices.to(device)
        built.indices = wide[..., : built.indices.shape[-1]]
        built.lengths = None if built.lengths is None else built.lengths.to(device)
    return found, exponents


def _lanes(spec: CallSpec, cache: CacheSpec, g: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Indices in the entry's shape, and lengths."""
    rows, topk, slots = spec.rows, cache.topk, cache.slots
    pool = _pool(spec, cache, g)
    lanes = pool[torch.randint(0, max(len(pool), 1), (rows, topk), generator=g)] if len(pool) else None
    if lanes is None:
        lanes = torch.full((rows, topk), -1)
    outside = torch.tensor([INT_MIN, -123456, -1, -1, slots, slots + 1, INT_MAX])
    share = torch.rand(rows, topk, generator=g)
    lanes = torch.where(share < spec.invalid, outside[torch.randint(0, 7, (rows, topk), generator=g)], lanes)
    lengths = _lengths(spec, topk, g)
    if lengths is not None and slots:
        past = torch.arange(topk) >= lengths.repeat_interleave(rows // max(len(lengths), 1))[:, None]
        lanes = torch.where(past, torch.randint(0, slots, (rows, topk), generator=g), lanes)
    shape = (rows, 1, topk) if spec.route.entry == "sparse" else (spec.batch, spec.s_q, topk)
    return lanes.to(torch.int32).reshape(shape), None if lengths is None else lengths.to(torch.int32)


def _pool(spec: CallSpec, cache: CacheSpec, g: torch.Generator) -> Tensor:
    """The slots that lanes may list: never all of them, and not slot 0 where it is a trap."""
    if cache.slots == 0 or cache.topk == 0:
        return torch.zeros(0, dtype=torch.long)
    order = torch.randperm(cache.slots, generator=g)
    if spec.trap_slot_0 and cache.slots > 1:
        order = order[order != 0]
    if cache.slots < 2:
        raise ValueError(f"{spec}: every slot may be listed, so sparse equals dense; give the cache more slots")
    return order[: min(max(1, cache.slots * 3 // 4), 4 * cache.topk + 8)]


def _lengths(spec: CallSpec, topk: int, g: torch.Generator) -> Tensor | None:
    count = spec.rows if spec.route.entry == "sparse" else spec.batch
    if spec.lengths == "none":
        return None
    lengths = torch.randint(0, topk + 1, (count,), generator=g)
    if spec.lengths == "edges":
        edges = torch.tensor([INT_MIN, -1, 0, 1, topk - 1, topk, topk + 1, INT_MAX])
        pick = torch.randint(0, 12, (count,), generator=g)
        lengths = torch.where(pick < 8, edges[pick % 8], lengths)
    return lengths


def _fill(spec: CallSpec, built: BuiltCache, exponents: Tensor, g: torch.Generator) -> None:
    """Write the listed slots; all others keep the NaN they were allocated with."""
    slots = built.listed().nonzero()[:, 0]
    if len(slots) == 0:
        return
    rows = torch.randn(len(slots), spec.route.d_qk, generator=g)
    if spec.data == "wide_scales":
        rows = rows * torch.exp2(exponents)
        if spec.route.packed:
            _write_wide(spec.route, built.view, slots, rows, exponents, g)
        else:
            write_rows(built.view, slots, rows)
    else:
        write_rows(built.view, slots, rows)
    poison_scale_padding(built.view)


def _write_wide(route: Route, view: Tensor, slots: Tensor, rows: Tensor, exponents: Tensor, g: torch.Generator) -> None:
    """Packed rows whose scales differ by up to 160 powers of two in one row, and a little from key to key."""
    nope, group = (448, 64) if route.layout == "v4" else (512, 128)
    jitter = torch.randint(-3, 4, (len(slots), nope // group), generator=g)
    power = exponents[:nope:group].long() + jitter
    values = (rows[:, :nope].double() / torch.exp2(exponents[:nope].double())).float().to(torch.float8_e4m3fn)
    scales = (power + 127).to(torch.uint8) if route.layout == "v4" else torch.exp2(power.float())
    write_bytes(view, slots, values.view(torch.uint8), scales, rows[:, nope:].to(torch.bfloat16))
