"""Checks of the contract's section "Exactness": width, row, repeat, accuracy."""

from __future__ import annotations

import torch

from headfit.testing.calls import BuiltCall, CallSpec, Result, call_entry
from headfit.testing.checks_shapes import hold
from headfit.testing.compare import require_accurate, require_same_bits
from headfit.testing.pages import ROUTES, CacheSpec, Route
from headfit.testing.runner import LEAN, Setup, check

NAN = float("nan")


def _widths(setup: Setup, rows: int) -> list[int]:
    full = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127]
    if setup.device.type == "cpu" and rows > 3:
        full = [1, 4, 8, 12, 16, 33, 64]
    return setup.pick(full, [1, 8, 17])


def _row_counts(setup: Setup) -> list[int]:
    if setup.device.type == "cuda":
        return [1, 64, 65, 4096]
    return setup.pick([1, 3, 65], [1])


def _keys(setup: Setup, route: Route, rows: int) -> tuple[CacheSpec, ...]:
    """Enough lanes for several blocks of keys where that is cheap; fewer where rows are many."""
    topk = setup.pick(200 if rows < 64 else 70, 21)
    if setup.device.type == "cuda":
        topk = 1100 if rows <= 65 else 300
    return (CacheSpec(topk, 16, topk // 8 + 4), CacheSpec(topk // 3, 8, topk // 8 + 4))[: route.caches]


@check("Width: head i's bits are the same for every h_q that a backend is launched with.", lean=LEAN)
def check_width_exact(setup: Setup, route: Route) -> None:
    """The widest launch against narrower ones, q and out as slices of padded buffers and as compact tensors."""
    widest = setup.pick(128, 20)
    for rows in _row_counts(setup):
        caches = _keys(setup, route, rows)
        call = setup.build(CallSpec(route, rows, 1, widest, caches, sink="normal", lengths="random"))
        for invariant in (False, True):
            with setup.part():
                wide = call.run(setup.backend, enable_batch_invariant=invariant)
                for width in _widths(setup, rows):
                    _hold_width(setup, call, wide, width, invariant)


def _hold_width(setup: Setup, call: BuiltCall, wide: Result, width: int, invariant: bool) -> None:
    """The first ``width`` heads alone, as a slice and compact, against the same heads of ``wide``."""
    what = f"{call.spec.rows} rows, h_q {width} against {call.spec.heads}, batch invariant {invariant}"
    few = {"attn_sink": None if call.sink is None else call.sink[:width], "enable_batch_invariant": invariant}
    q = call.q[..., :width, :]
    with setup.part():
        call.run(setup.backend, q=q, **few).require_same(wide, f"{what}, q a slice", heads=width)
    with setup.part():
        compact = call.run(setup.backend, q=q.contiguous(), out=_strided_out(wide, width, call.spec.route), **few)
        compact.require_same(wide, f"{what}, q compact", heads=width)


def _strided_out(wide: Result, width: int, route: Route) -> torch.Tensor:
    """A fresh out whose heads lie in a buffer of another width."""
    shape = list(wide.returned[0].shape)
    shape[-2] = width + 3
    return torch.full(shape, NAN, dtype=torch.bfloat16, device=wide.out.device)[..., :width, :]


@check("Width: padded or not, whatever the other heads hold (NaN included).", lean=LEAN)
def check_width_whatever_other_heads_hold(setup: Setup, route: Route) -> None:
    """Pad heads of NaN, infinity, junk and zero, with sinks of NaN, leave the real heads' bits alone."""
    for real, padded in setup.pick([(8, 64), (5, 16), (32, 64), (16, 128), (1, 64)], [(3, 12)]):
        spec = CallSpec(route, batch=setup.pick(4, 1), heads=padded, caches=_keys(setup, route, 4), sink="normal")
        call = setup.build(spec)
        if call.sink is None:
            raise ValueError("the case needs a sink")
        alone = call.run(setup.backend, q=call.q[..., :real, :].contiguous(), attn_sink=call.sink[:real])
        for junk in (NAN, float("inf"), 0.0, 3e38):
            call.q[..., real:, :] = junk
            call.sink[real:] = junk
            call.remember()
            got = call.run(setup.backend)
            alone.require_same(got, f"{real} heads alone against the same beside heads of {junk}", heads=real)


def _rows_of(call: BuiltCall, pick: list[int]) -> dict[str, object]:
    """Arguments that keep only the entries ``pick`` of the first dim of q, indices and lengths."""
    index = torch.tensor(pick, device=call.q.device)
    args = call.arguments()
    changes: dict[str, object] = {"q": call.q.index_select(0, index)}
    for name in ("indices", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"):
        value = args.get(name)
        if value is not None:
            changes[name] = value.index_select(0, index)
    return changes


@check("Row: with enable_batch_invariant=True a row's bits do not depend on which rows share the call.", lean=LEAN)
def check_row_exact(setup: Setup, route: Route) -> None:
    """Each row alone, in pairs, reversed, and repeated past every threshold of row counts, against the batch."""
    spec = CallSpec(
        route, batch=6, heads=setup.pick(16, 4), caches=_keys(setup, route, 6), sink="normal", lengths="random",
        batch_invariant=True,
    )  # fmt: skip
    call = setup.build(spec)
    batch = call.run(setup.backend)
    many = setup.pick([2, 17, 64, 65, 130], [])
    if setup.device.type == "cuda":
        many += [1024, 4097]
    groups = [[r] for r in setup.pick(range(6), (0, 5))] + [[0, 3], [5, 4, 3, 2, 1, 0]]
    groups += [[i % 6 for i in range(n)] for n in many]
    for group in groups:
        what = f"rows {group}" if len(group) < 8 else f"{len(group)} rows"
        with setup.part():
            got = call.run(setup.backend, **_rows_of(call, group))
            got.require_same(batch, f"{what} against the batch of six", rows=group)


@check(
    "Row: however rows are divided into b and s_q.",
    routes=("v4", "v4_two_caches", "v32", "bf16_512", "bf16_576"),
    lean=("v4",),
)
def check_row_exact_over_s_q(setup: Setup, route: Route) -> None:
    """The same six rows as 6 x 1, 3 x 2, 2 x 3 and 1 x 6."""
    spec = CallSpec(route, batch=6, heads=setup.pick(12, 3), caches=_keys(setup, route, 6), batch_invariant=True)
    call = setup.build(spec)
    batch = call.run(setup.backend)
    args = call.arguments()
    for b, s_q in setup.pick(((3, 2), (2, 3), (1, 6)), ((3, 2),)):
        names = [n for n in ("q", "indices", "extra_indices_in_kvcache") if args.get(n) is not None]
        got = call.run(setup.backend, **{n: args[n].reshape(b, s_q, *args[n].shape[2:]) for n in names})
        got.require_same(batch, f"six rows as {b} x {s_q}")


@check("Row: nor on prefill/decode.", routes=("bf16_512", "bf16_576"), lean=("bf16_512",))
def check_prefill_equals_decode(setup: Setup, route: Route) -> None:
    """The same bf16 rows through flash_mla_with_kvcache and through flash_mla_sparse_fwd, one row and many."""
    for batch in setup.pick([1, 2, 65], [1, 2]):
        for topk in setup.pick([1, 64, 65, 200, 700], [1, 70]):
            caches = (CacheSpec(topk, 4, topk // 2 + 3),)
            spec = CallSpec(
                route, batch=batch, heads=setup.pick(16, 3), caches=caches, sink="normal", lengths="edges",
                batch_invariant=True,
            )  # fmt: skip
            call = setup.build(spec)
            decode = call.run(setup.backend)
            cache = call.caches[0]
            arguments = {
                "q": call.q[:, 0],
                "kv": cache.view.reshape(cache.slots, 1, route.d_qk),
                "indices": cache.indices,
                "sm_scale": call.sm_scale,
                "attn_sink": call.sink,
                "topk_length": cache.lengths,
            }
            prefill = call_entry(ROUTES[f"prefill_{route.d_qk}"], setup.backend, arguments, batch_invariant=True)
            prefill.require_same(
                decode, f"{batch} rows, {topk} lanes: flash_mla_sparse_fwd against flash_mla_with_kvcache"
            )


@check("Repeat: same call, same bits, always.", lean=LEAN)
def check_repeat_exact(setup: Setup, route: Route) -> None:
    """Runs with other calls in between, which leave other junk in freed memory."""
    for rows in _row_counts(setup):
        spec = CallSpec(route, batch=rows, heads=setup.pick(24, 3), caches=_keys(setup, route, rows), sink="normal")
        call = setup.build(spec)
        first = call.run(setup.backend)
        other = setup.build(CallSpec(route, batch=1, heads=3))
        for i in range(20 if setup.device.type == "cuda" else setup.pick(3, 2)):
            other.run(setup.backend)
            torch.full((1 << 16,), NAN, device=setup.device)
            call.run(setup.backend).require_same(first, f"{rows} rows, repeat {i + 1}")


@check(
    "Accuracy against the float64 oracle on the dequantised rows: relative L2 <= 4e-3, max abs <= 2 bf16 ulp of the "
    "row's largest value for N(0,1) data; lse abs <= 1e-4."
)
def check_accuracy(setup: Setup, route: Route) -> None:
    """N(0,1) data at the shapes models have: window, window + chosen, many heads."""
    shapes = setup.pick(
        [(1, 128, 64, (128, 512)), (3, 64, 64, (128, 512)), (5, 8, 64, (640, 64)), (2, 16, 2, (700, 1))],
        [(1, 5, 16, (70, 20)), (2, 17, 4, (33, 8))],
    )
    for rows, heads, page_size, topk in shapes:
        caches = tuple(CacheSpec(n, page_size, max(4, 2 * n // page_size + 2)) for n in topk)
        hold(setup, CallSpec(route, batch=rows, heads=heads, caches=caches[: route.caches], sink="normal"))


@check("Accuracy holds at any magnitude a bf16 q and a packed row can have: |q| up to 1e4.", lean=LEAN)
def check_large_queries(setup: Setup, route: Route) -> None:
    """Logits of tens of thousands: softmax must subtract the maximum, and keep float32 logits."""
    for heads in setup.pick([8, 33], [3]):
        hold(setup, CallSpec(route, batch=2, heads=heads, caches=_keys(setup, route, 2), data="large_q", sink="normal"))


@check("Accuracy holds for scales 2^-100 to 2^60 mixed in one row.")
def check_wide_scales(setup: Setup, route: Route) -> None:
    """Values that no float16 intermediate holds; q carries the inverse, so logits are ordinary."""
    for heads in setup.pick([8, 33], [3]):
        hold(
            setup,
            CallSpec(route, batch=2, heads=heads, caches=_keys(setup, route, 2), data="wide_scales", sink="normal"),
        )


@check(
    "Softmax over logits that rise and fall along the list: a running maximum must rescale what came before.", lean=LEAN
)
def check_order_of_logits(setup: Setup, route: Route) -> None:
    """The same keys listed by rising and by falling logit, each against the oracle."""
    spec = CallSpec(route, batch=1, heads=2, caches=_keys(setup, route, 1), invalid=0.0)
    call = setup.build(spec)
    call.q.mul_(8)
    rank_q = call.q_rows()[0, 0].double()
    for falling in (False, True):
        for cache in call.caches:
            flat = cache.indices.reshape(-1)
            logits = cache.rows(flat.long()).double() @ rank_q
            order = logits.argsort(descending=falling)
            cache.indices = flat[order].reshape(cache.indices.shape)
        result = call.remember().run(setup.backend)
        require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=False)
    require_same_bits(call.q, call.q, "q")
