"""Checks at size: more rows than a grid dim holds, caches above 2**31 bytes, and no hidden copies of q or out."""

from __future__ import annotations

import torch

from headfit.cache import page_bytes, write_rows
from headfit.testing.calls import D_V, CallSpec
from headfit.testing.checks_meaning import set_lanes
from headfit.testing.compare import Truth, require, require_accurate
from headfit.testing.pages import CacheSpec, Route
from headfit.testing.runner import Setup, check


@check("Rows: any number, above 65535 too.", large=True, lean=("v4", "prefill_512"))
def check_many_rows(setup: Setup, route: Route) -> None:
    """65 537 rows of one head and one key each; every row has its own key among a few hundred, so a mix-up shows."""
    rows = 65_537
    caches = (CacheSpec(1, 7, 60),) * route.caches
    call = setup.build(CallSpec(route, batch=rows, heads=1, caches=caches, invalid=0.0, trap_slot_0=False))
    for cache in call.caches[1:]:
        cache.indices.fill_(-1)
    first = call.caches[0]
    pool = first.listed().nonzero()[:, 0]
    pick = torch.arange(rows, device=setup.device) * 7919 % len(pool)
    first.indices.copy_(pool[pick].to(torch.int32).reshape(first.indices.shape))
    result = call.remember().run(setup.backend)
    keys = first.rows(pool)
    logits = (call.q_rows()[:, 0].float() * keys[pick].float()).sum(-1, keepdim=True).double() * call.sm_scale
    out = keys[pick, None, :D_V].double()
    truth = Truth(out, logits, logits, out.abs(), torch.zeros_like(logits))
    require_accurate(result.out, result.lse, result.max_logits, truth, normal=True)


@check("64-bit addressing: caches above 2**31 bytes (bf16: 2**31 elements).", large=True)
def check_huge_cache(setup: Setup, route: Route) -> None:
    """Keys on both sides of 2**31 and at the very end; no page in between is touched, so a CPU need not back it."""
    page_size = 1 if route.entry == "sparse" else 64
    page = page_bytes(page_size, route.layout) if route.packed else page_size * route.d_qk
    pages = 2**31 // page + 4000 // page_size + 3
    dtype = torch.uint8 if route.packed else torch.bfloat16
    call = setup.build(CallSpec(route, batch=2, heads=8, caches=(CacheSpec(12, 4, 8),) * route.caches))
    try:
        storage = torch.empty(pages * page, dtype=dtype, device=setup.device)
    except RuntimeError as error:
        raise MemoryError(f"this machine cannot reserve {pages * page} elements of {dtype}: {error}") from error
    width = call.caches[0].view.shape[-1]
    edge = 2**31 // page * page_size
    last = pages * page_size
    slots = [0, 1, 5, edge - 1, edge, edge + 1, edge + page_size, last - page_size, last - 2, last - 1]
    rows = torch.randn(len(slots), route.d_qk, generator=torch.Generator().manual_seed(call.spec.seed)).to(setup.device)
    lists = []
    for cache in call.caches:
        cache.view = storage.as_strided((pages, page_size, 1, width), (page, width, width, 1))
        cache.storage = storage
        write_rows(cache.view, torch.tensor(slots, device=setup.device), rows)
        lists.append([slots, [*slots[5:], last, -1, 2**31 - 1, slots[4], slots[3]]])
    set_lanes(call, lists)
    result = call.run(setup.backend)
    require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)


@check("64-bit addressing: q and out above 2**31 elements.", cuda=True, large=True, routes=("v4", "prefill_512"))
def check_huge_q(setup: Setup, route: Route) -> None:
    """Rows so far apart that the last one starts beyond 2**31 elements of q and of out."""
    rows, heads = 5, 8
    call = setup.build(CallSpec(route, batch=rows, heads=heads, sink="normal"))
    stride = 2**29 + 4096
    storage = torch.empty(stride * (rows - 1) + heads * 512, dtype=torch.bfloat16, device=setup.device)
    shape, strides = tuple(call.q.shape), [*call.q.stride()]
    strides[0], strides[-2], strides[-1] = stride, 512, 1
    q = storage.as_strided(shape, strides)
    q.copy_(call.q)
    out_storage = torch.empty_like(storage)
    out = out_storage.as_strided(shape, strides)
    wanted = call.run(setup.backend)
    call.run(setup.backend, q=q, out=out).require_same(wanted, "q and out beyond 2**31 elements")


@check("A head slice of a padded buffer is read and written in place, without a copy.", cuda=True, large=True)
def check_no_copy(setup: Setup, route: Route) -> None:
    """A call on slices of padded buffers may allocate less than a copy of q takes."""
    rows, heads = 8192, 8
    caches = (CacheSpec(32, 16, 20),) * route.caches
    call = setup.build(CallSpec(route, batch=rows, heads=heads, caches=caches, q_heads=64, out_heads=64, out=True))
    call.run(setup.backend)
    torch.cuda.synchronize()
    from headfit.testing.calls import call_entry

    arguments = call.arguments()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call_entry(route, setup.backend, arguments)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    copy = rows * heads * route.d_qk * 2
    require(extra < copy // 2, f"the call allocated {extra} bytes; a copy of q would be {copy}, so q or out was copied")
