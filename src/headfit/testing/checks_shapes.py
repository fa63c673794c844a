"""Checks of the contract's section "Shapes": head counts, views, page sizes and strides, empty calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headfit import kernels
from headfit.testing.calls import CallSpec
from headfit.testing.compare import require, require_accurate, require_equal, require_same_bits
from headfit.testing.draws import FULL, SMALL, RandomDraw, draw_spec
from headfit.testing.pages import ROUTES, CacheSpec, Route
from headfit.testing.runner import ALL, KVCACHE, LEAN, PACKED, Setup, check


def hold(setup: Setup, spec: CallSpec) -> None:
    """Run ``spec`` and hold the result against the oracle; guards and input copies are checked by the call itself.

    A backend may refuse it: that is noted, and the case goes on.
    """
    with setup.part():
        _hold(setup, spec)


def _hold(setup: Setup, spec: CallSpec) -> None:
    call = setup.build(spec)
    result = call.run(setup.backend)
    normal, rounded_sum = spec.data == "normal", kernels.REGISTRY[setup.backend].rounded_sum
    try:
        require_accurate(
            result.out, result.lse, result.max_logits, call.truth(), normal=normal, rounded_sum=rounded_sum
        )
    except AssertionError as failure:
        raise type(failure)(f"{call.spec}\n  {failure}") from None
    if spec.out:
        require(result.returned[0] is call.out, f"{call.spec}\n  the returned out is not the tensor passed as out=")


@check("h_q: every integer 1..128.")
def check_every_head_count(setup: Setup, route: Route) -> None:
    """All 128 counts; at scale "small" the bf16 routes share them, and packed ones take both ends."""
    cheap = [name for name in ALL if not ROUTES[name].packed]
    counts: Sequence[int] = range(1, 129)
    if setup.scale == "small":
        counts = range(1 + cheap.index(route.name), 129, len(cheap)) if route.name in cheap else (1, 17, 128)
    for heads in counts:
        caches = (CacheSpec(topk=5, page_size=3, pages=4),) * route.caches
        hold(setup, CallSpec(route, batch=setup.pick(2, 1), heads=heads, caches=caches))


@check(
    "q: last dim contiguous, other strides free (a head slice buf[:, :, :8] of a padded buffer is legal input).",
    lean=LEAN,
)
def check_head_slice_views(setup: Setup, route: Route) -> None:
    """A slice of a wider buffer whose other heads are NaN gives the bits of its contiguous copy."""
    for heads, buffer, offset, pitch in setup.pick(
        [(8, 64, 0, 0), (8, 64, 8, 0), (5, 16, 1, 0), (16, 64, 0, 64), (3, 4, 0, 1), (32, 128, 32, 0)],
        [(5, 8, 2, 3)],
    ):
        spec = CallSpec(route, batch=2, heads=heads, q_heads=buffer, head_offset=offset, pitch=pitch)
        call = setup.build(spec)
        require(not call.q.is_contiguous(), "the test's q is no strided view")
        with setup.part():
            got = call.run(setup.backend)
            copy = call.run(setup.backend, q=call.q.contiguous())
            got.require_same(copy, f"{call.spec}: view against contiguous copy")
            require_accurate(got.out, got.lse, got.max_logits, call.truth(), normal=True)


@check("q: other strides free: an expanded q (stride 0) and a transposed one.", lean=LEAN)
def check_unusual_q_strides(setup: Setup, route: Route) -> None:
    """Stride 0 over rows, and heads stored outside rows."""
    call = setup.build(CallSpec(route, batch=2, heads=setup.pick(16, 4)))
    expanded = call.q[:1].expand_as(call.q)
    head = call.q.dim() - 2
    stored = call.q.transpose(0, head).contiguous().transpose(0, head)
    for what, q in (("expanded q", expanded), ("q stored with heads outside rows", stored)):
        with setup.part():
            call.run(setup.backend, q=q).require_same(call.run(setup.backend, q=q.contiguous()), what)


@check("out= may be such a view too and rows outside it stay untouched.", lean=LEAN)
def check_out_views(setup: Setup, route: Route) -> None:
    """Slices of a junk-filled buffer: same bits as without out=, the same object comes back, junk outside survives."""
    for heads, buffer, offset, pitch in setup.pick(
        [(8, 64, 0, 0), (8, 9, 1, 0), (5, 16, 1, 8), (3, 4, 0, 1), (33, 64, 0, 0), (16, 16, 0, 0)],
        [(5, 8, 2, 3)],
    ):
        for lengths in setup.pick(("none", "edges"), ("edges",)):
            spec = CallSpec(
                route, 3, 1, heads, out_heads=buffer, head_offset=offset, pitch=pitch, out=True, lengths=lengths
            )  # fmt: skip
            call = setup.build(spec)
            with setup.part():
                got = call.run(setup.backend)
                require(got.returned[0] is call.out, f"{call.spec}: the returned out is not the tensor passed as out=")
                require(not bool(got.out.isnan().any()), f"{call.spec}: NaN that stood in out before the call is left")
                got.require_same(call.run(setup.backend, out=None), f"{call.spec}: out= against a fresh out")


@check("page_size: any >= 1.", lean=("v4_two_caches", "v32", "bf16_512"))
def check_page_sizes(setup: Setup, route: Route) -> None:
    """Small, odd, usual and large pages."""
    for page_size in setup.pick([1, 2, 3, 5, 16, 31, 64, 65, 100, 128, 256, 576], [1, 3, 64]):
        pages = max(2, 40 // page_size)
        caches = [CacheSpec(setup.pick(21, 9), page_size, pages)]
        if route.caches == 2:
            caches.append(CacheSpec(7, setup.pick({64: 2, 256: 64}, {}).get(page_size, page_size + 1), pages))
        hold(setup, CallSpec(route, heads=setup.pick(9, 3), caches=tuple(caches)))


@check("page stride free (two caches may interleave in one allocation).", lean=("v4_two_caches", "v32", "bf16_512"))
def check_page_strides(setup: Setup, route: Route) -> None:
    """Gaps after pages, gaps after bf16 rows, and two caches side by side; every gap is NaN."""
    for gap in setup.pick([576, 1152, 16, 64, 1040, 37440], [16]):
        row_gap = 0 if route.packed else gap % 96
        caches = (CacheSpec(9, 5, 6, gap, row_gap), CacheSpec(6, 2, 6, gap, row_gap))[: route.caches]
        for interleaved in (False, True)[: route.caches]:
            hold(setup, CallSpec(route, heads=setup.pick(8, 3), caches=caches, interleaved=interleaved))


@check(
    "page stride free: a stride that is no multiple of anything is read right or refused by name.",
    routes=PACKED,
    lean=("v4", "v32"),
)
def check_odd_page_stride(setup: Setup, route: Route) -> None:
    """Odd byte strides: bf16 parts are then unaligned; reading them is not required, a silent misread is a failure."""
    for gap in setup.pick((1, 2, 6), (1,)):
        try:
            hold(setup, CallSpec(route, heads=3, caches=(CacheSpec(5, 3, 5, gap),) * route.caches))
        except ValueError as error:
            require("k_cache" in str(error), f"the refusal of page stride + {gap} does not name k_cache: {error}")


@check("k_cache uint8 or fp8 view.", routes=PACKED, lean=("v4",))
def check_fp8_view(setup: Setup, route: Route) -> None:
    """The same bytes seen as float8_e4m3fn give the same bits."""
    spec = CallSpec(route, heads=setup.pick(16, 4), seed=setup.number("fp8 view"))
    plain = setup.build(spec).run(setup.backend)
    setup.build(replace(spec, fp8_view=True)).run(setup.backend).require_same(plain, "float8_e4m3fn view")


@check("indices int32 = page * page_size + offset; rows of indices may lie apart.", lean=LEAN)
def check_index_strides(setup: Setup, route: Route) -> None:
    """A list that is a slice of a wider one."""
    for pitch in setup.pick((1, 7, 64), (7,)):
        hold(setup, CallSpec(route, batch=2, heads=3, index_pitch=pitch))


@check("topk: any >= 0, no alignment.", lean=("v4_two_caches", "prefill_576"))
def check_any_topk(setup: Setup, route: Route) -> None:
    """Around every power of two, and 0."""
    counts = setup.pick(
        [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 512, 640, 700],
        [0, 1, 16, 33, 65],
    )
    for topk in counts:
        caches = [CacheSpec(topk, 16, topk // 8 + 2)]
        if route.caches == 2:
            caches.append(CacheSpec(counts[(counts.index(topk) + 3) % len(counts)], 8, 40))
        hold(setup, CallSpec(route, batch=setup.pick(2, 1), heads=setup.pick(12, 2), caches=tuple(caches)))


@check("topk 0 in one cache while the other has keys.", routes=("v4_two_caches",))
def check_one_list_empty(setup: Setup, route: Route) -> None:
    """Either list may be empty, or both."""
    for first, second in ((0, 5), (5, 0), (0, 0)):
        hold(setup, CallSpec(route, heads=4, caches=(CacheSpec(first), CacheSpec(second)), sink="edges"))


@check("q [b, s_q, h_q, d_qk]; lengths [b]: shared by the s_q rows of an entry.", routes=KVCACHE, lean=("v4",))
def check_several_rows_per_entry(setup: Setup, route: Route) -> None:
    """s_q 1 to 3 with lengths, so that a row that takes its neighbour's length is caught."""
    for s_q in setup.pick((1, 2, 3), (2,)):
        for lengths in ("random", "edges"):
            hold(
                setup,
                CallSpec(route, batch=setup.pick(3, 2), s_q=s_q, heads=setup.pick(7, 2), lengths=lengths, out=True),
            )


@check("Rows: any number, 0 too.")
def check_no_rows(setup: Setup, route: Route) -> None:
    """b = 0: empty results of the right form, out= comes back."""
    for out in (False, True):
        call = setup.build(CallSpec(route, batch=0, heads=8, out=out, lengths="random", sink="normal"))
        result = call.run(setup.backend)
        require(result.out.numel() == 0, "no rows went in, rows came out")


@check("A cache of no pages is legal: every index is invalid.")
def check_no_pages(setup: Setup, route: Route) -> None:
    """Zero slots: every row is empty."""
    caches = (CacheSpec(topk=5, page_size=1 if route.entry == "sparse" else 4, pages=0),) * route.caches
    call = setup.build(CallSpec(route, heads=4, caches=caches, sink="normal"))
    for cache in call.caches:
        cache.indices.copy_(torch.arange(5, dtype=torch.int32).expand_as(cache.indices))
    result = call.remember().run(setup.backend)
    require_equal(result.out, 0.0, "out of a call over no pages")
    require_equal(result.lse, float("inf"), "lse of a call over no pages")


@check("Any legal call agrees with the oracle, leaves inputs and everything outside out as they were.")
def check_random_calls(setup: Setup, route: Route) -> None:
    """Drawn calls: everything at once."""
    draw = RandomDraw(setup.random("random calls", route.name))
    for _ in range(setup.pick(40, 4)):
        hold(setup, draw_spec(draw, route, setup.pick(FULL, SMALL)))


@check(
    "bf16 rows: kv and k_cache may be slices of wider rows.",
    routes=("bf16_512", "bf16_576", "prefill_512", "prefill_576"),
    lean=("prefill_512",),
)
def check_strided_rows(setup: Setup, route: Route) -> None:
    """Row pitches wider than a row; what lies between rows is NaN."""
    for row_gap in setup.pick((8, 64, 1), (8,)):
        spec = CallSpec(route, heads=4, caches=(CacheSpec(9, 4, 5, 0, row_gap),), seed=setup.number("rows", row_gap))
        call = setup.build(spec)
        got = call.run(setup.backend)
        tight = setup.build(replace(spec, caches=(CacheSpec(9, 4, 5),))).run(setup.backend)
        require_same_bits(got.out, tight.out, f"rows {row_gap} elements apart against rows without a gap")
