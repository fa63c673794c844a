"""Checks of the contract's section "Meaning": invalid lanes, lengths, empty rows, lse, max_logits, sink.

Where a closed form exists (one key; q = 0; equal keys) it is used instead of the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headfit.cache import write_rows
from headfit.testing.calls import D_V, INT_MAX, INT_MIN, BuiltCall, CallSpec
from headfit.testing.compare import (
    REL_L2,
    fail,
    require,
    require_accurate,
    require_close_scalar,
    require_equal,
    require_same_bits,
)
from headfit.testing.pages import CacheSpec, Route
from headfit.testing.runner import KVCACHE, LEAN, PREFILL, Setup, check

INF = float("inf")


def set_lanes(call: BuiltCall, lists: list[list[list[int]]], lengths: Sequence[list[int] | None] | None = None) -> None:
    """Replace every index list: ``lists[cache][row]``; and the lengths, ``lengths[cache]``."""
    for i, (cache, rows) in enumerate(zip(call.caches, lists, strict=True)):
        lanes = torch.tensor(rows, dtype=torch.int32, device=call.q.device)
        cache.indices = lanes.reshape(*cache.indices.shape[:-1], lanes.shape[-1])
        given = None if lengths is None else lengths[i]
        cache.lengths = None if given is None else torch.tensor(given, dtype=torch.int32, device=call.q.device)
    call.remember()


def finite_slots(call: BuiltCall, cache: int = 0) -> list[int]:
    """Slots that hold numbers; all others hold NaN."""
    return call.caches[cache].listed().nonzero()[:, 0].tolist()


def plain_call(setup: Setup, route: Route, rows: int, heads: int = 4, **changes: object) -> BuiltCall:
    """A call with a dozen finite slots in each cache, to write lists for by hand."""
    caches = (CacheSpec(topk=24, page_size=5, pages=8),) * route.caches
    spec = CallSpec(route, batch=rows, heads=heads, caches=caches, invalid=0.0, **changes)  # type: ignore[arg-type]
    return setup.build(spec)


def same_as(
    setup: Setup, call: BuiltCall, lists: list[list[list[int]]], wanted: list[list[list[int]]], what: str
) -> None:
    """Two sets of lists must mean the same: both are held against the oracle's answer for ``wanted``."""
    set_lanes(call, wanted)
    truth = call.truth()
    set_lanes(call, lists)
    result = call.run(setup.backend)
    try:
        require_accurate(result.out, result.lse, result.max_logits, truth, normal=True)
    except AssertionError as failure:
        fail(f"{what}: {failure}")


@check(
    "An index < 0 or >= number of slots is invalid: it touches no cache memory and adds nothing.",
    lean=("v4_two_caches", "prefill_576"),
)
def check_invalid_indices(setup: Setup, route: Route) -> None:
    """INT_MIN, -123456, -1, slots, slots + 1, INT_MAX among good lanes, alone, in front and at the end."""
    call = plain_call(setup, route, rows=4)
    lists, wanted = [], []
    for i, cache in enumerate(call.caches):
        good = finite_slots(call, i)[:4]
        bad = [INT_MIN, -123456, -1, cache.slots, cache.slots + 1, INT_MAX, -cache.slots, cache.slots * 2]
        mixed = [x for pair in zip(bad, (good * 2), strict=True) for x in pair]
        lists.append([mixed, bad + good * 2, good * 2 + bad, bad * 2])
        wanted.append([good * 2 + [-1] * 8, good * 2 + [-1] * 8, good * 2 + [-1] * 8, [-1] * 16])
    same_as(setup, call, lists, wanted, "lists with invalid lanes")


@check("A lane at or past its length is never read, whatever it holds.", lean=LEAN)
def check_lanes_past_length(setup: Setup, route: Route) -> None:
    """Past the length stand valid indices of good rows, of NaN rows, and invalid ones; none may count."""
    call = plain_call(setup, route, rows=4)
    lists, wanted, lengths = [], [], []
    for i, cache in enumerate(call.caches):
        good = finite_slots(call, i)
        poisoned = sorted(set(range(cache.slots)) - set(good))
        filler = [good[0], poisoned[0], INT_MAX, poisoned[-1], -1, good[1], poisoned[0], good[2]]
        counts = [0, 1, 3, 8] if i == 0 else [2, 0, 8, 1]
        lists.append([good[:n] + filler[n:] for n in counts])
        wanted.append([good[:n] + [-1] * (8 - n) for n in counts])
        lengths.append(counts)
    set_lanes(call, wanted)
    truth = call.truth()
    set_lanes(call, lists, lengths)
    result = call.run(setup.backend)
    require_accurate(result.out, result.lse, result.max_logits, truth, normal=True)


@check("Lengths are clamped to [0, topk] in the kernel.", lean=LEAN)
def check_lengths_clamped(setup: Setup, route: Route) -> None:
    """Negative lengths mean 0, lengths above topk mean topk, to the bit."""
    wild = [INT_MIN, -1, 0, 5, 6, INT_MAX]
    call = plain_call(setup, route, rows=len(wild), sink="normal")
    lists = [[finite_slots(call, i)[:5]] * len(wild) for i in range(route.caches)]
    set_lanes(call, lists, [wild] * route.caches)
    got = call.run(setup.backend)
    set_lanes(call, lists, [[min(max(n, 0), 5) for n in wild]] * route.caches)
    got.require_same(call.run(setup.backend), "lengths outside [0, topk] against clamped ones")
    require_accurate(got.out, got.lse, got.max_logits, call.truth(), normal=True)


@check("A NaN in a slot nobody lists never reaches an output.")
def check_unlisted_nan(setup: Setup, route: Route) -> None:
    """Slot 0 and every slot but one is NaN, lanes are mostly -1: out is the one listed row."""
    for topk in setup.pick([1, 7, 64, 130], [1, 33]):
        call = plain_call(setup, route, rows=2, lengths="none", trap_slot_0=True)
        lists = []
        for i in range(route.caches):
            good = finite_slots(call, i)[0]
            require(good != 0, "the test's slot 0 is listed")
            lists.append([[-1] * (topk - 1) + [good], [good] + [-1] * (topk - 1)])
        set_lanes(call, lists)
        result = call.run(setup.backend)
        require(not bool(result.out.isnan().any()), f"NaN of an unlisted slot reached out (topk {topk}, lanes -1)")
        require(not bool(result.lse.isnan().any()), f"NaN of an unlisted slot reached lse (topk {topk}, lanes -1)")
        require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)


@check("A NaN in a listed slot reaches the rows that list it and no other.", lean=LEAN)
def check_nan_stays_in_its_row(setup: Setup, route: Route) -> None:
    """Rows 0 and 2 list good slots, row 1 lists a NaN row: rows 0 and 2 keep their bits."""
    call = plain_call(setup, route, rows=3)
    lists = [[finite_slots(call, i)[:3]] * 3 for i in range(route.caches)]
    set_lanes(call, lists)
    clean = call.run(setup.backend)
    good = set(finite_slots(call))
    poisoned = next(s for s in range(call.caches[0].slots) if s not in good)
    lists[0] = [lists[0][0], [poisoned, *lists[0][1][1:]], lists[0][2]]
    set_lanes(call, lists)
    got = call.run(setup.backend)
    for row in (0, 2):
        require_same_bits(got.out[row], clean.out[row], f"row {row} beside a row that lists a NaN: out")
        require_same_bits(got.lse[row], clean.lse[row], f"row {row} beside a row that lists a NaN: lse")


@check("Duplicates count as often as they stand.", lean=("v4_two_caches", "prefill_576"))
def check_duplicates(setup: Setup, route: Route) -> None:
    """With q = 0 all keys weigh the same: out is the mean with multiplicity, lse the log of the number of lanes."""
    call = plain_call(setup, route, rows=1)
    call.q.zero_()
    lists, total, count = [], torch.zeros(D_V, dtype=torch.float64, device=call.q.device), 0
    for i, cache in enumerate(call.caches):
        a, b, c = finite_slots(call, i)[:3]
        lanes = [a, b, a, a, -1, c, a, b]
        lists.append([lanes])
        listed = torch.tensor([s for s in lanes if s >= 0], device=call.q.device)
        total += cache.rows(listed)[:, :D_V].double().sum(0)
        count += len(listed)
    set_lanes(call, lists)
    result = call.run(setup.backend)
    require_close_scalar(
        result.lse, torch.full_like(result.lse, math.log(count)), "lse of equal weights with duplicates"
    )
    require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)
    mean = (total / count).expand_as(result.out)
    relative = float((result.out.double() - mean).norm() / mean.norm())
    require(
        relative <= REL_L2, f"out is not the mean of the lanes with their multiplicity: relative error {relative:.3g}"
    )


@check("A row with no valid key: out 0 whatever the sink, lse +inf, max_logits -inf.", lean=LEAN)
def check_empty_rows(setup: Setup, route: Route) -> None:
    """Rows empty by invalid lanes and by length 0, beside a row with keys, for every kind of sink."""
    heads = 6
    sinks = torch.tensor([INF, -INF, 0.0, 30.0, -30.0, 1e30], device=setup.device)
    same = [torch.full_like(sinks, value) for value in setup.pick((-INF, INF), ())]
    for sink in (None, sinks, *same):
        call = plain_call(setup, route, rows=3, heads=heads)
        call.sink = sink
        lists = [
            [[-1] * 40, [*finite_slots(call, i)[:3]] + [-1] * 37, finite_slots(call, i)[:1] * 40]
            for i in range(route.caches)
        ]
        set_lanes(call, lists, [[40, 40, 0]] * route.caches)
        result = call.run(setup.backend)
        for row, why in ((0, "invalid lanes only"), (2, "length 0")):
            require_equal(result.out[row], 0.0, f"out of a row without keys ({why}, sink {sink})")
            require_equal(result.lse[row], INF, f"lse of a row without keys ({why}, sink {sink})")
            if result.max_logits is not None:
                require_equal(result.max_logits[row], -INF, f"max_logits of a row without keys ({why})")
        require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)


@check("lse: natural log.", lean=LEAN)
def check_lse_natural(setup: Setup, route: Route) -> None:
    """One key: lse is the scaled logit; the key n times: plus ln n."""
    call = plain_call(setup, route, rows=4)
    counts = [1, 2, 3, 16]
    slot = finite_slots(call)[0]
    lists = [[[slot] * n + [-1] * (16 - n) for n in counts]] + [[[-1]] * 4] * (route.caches - 1)
    set_lanes(call, lists)
    result = call.run(setup.backend)
    key = call.caches[0].rows(torch.tensor([slot], device=call.q.device))[0].double()
    logit = call.q_rows().double() @ key * call.sm_scale
    wanted = logit + torch.tensor(counts, device=call.q.device).double().log()[:, None]
    require_close_scalar(result.lse, wanted, "lse of one key n times (natural log: logit + ln n)")


@check("max_logits: natural units, scaled.", routes=PREFILL, lean=("prefill_512",))
def check_max_logits(setup: Setup, route: Route) -> None:
    """The largest scaled logit of the row, sink or not."""
    for sink in ("none", "edges"):
        call = setup.build(CallSpec(route, batch=4, heads=7, sink=sink, lengths="random"))
        result = call.run(setup.backend)
        if result.max_logits is None:
            fail("flash_mla_sparse_fwd returned no max_logits")
        require_close_scalar(result.max_logits, call.truth().max_logits, "max_logits")


@check("lse: sink NOT included; max_logits neither.", lean=LEAN)
def check_lse_without_sink(setup: Setup, route: Route) -> None:
    """lse and max_logits keep their bits whatever sink is given."""
    call = plain_call(setup, route, rows=2, lengths="random")
    plain = call.run(setup.backend)
    for value in setup.pick((0.0, 5.0, -5.0, INF, -INF), (2.0, INF)):
        sink = torch.full((call.spec.heads,), value, device=setup.device)
        got = call.run(setup.backend, attn_sink=sink)
        require_same_bits(got.lse, plain.lse, f"lse with sink {value} against lse without a sink")
        if got.max_logits is not None and plain.max_logits is not None:
            require_same_bits(got.max_logits, plain.max_logits, f"max_logits with sink {value}")


@check("attn_sink float32 [h_q], natural-log units: out *= 1 / (1 + exp(sink - lse)).", lean=LEAN)
def check_sink_formula(setup: Setup, route: Route) -> None:
    """Sinks around lse, one a head, against the formula in float64."""
    call = plain_call(setup, route, rows=3, heads=9)
    plain = call.run(setup.backend)
    sink = torch.linspace(-6, 6, 9, device=setup.device)
    got = call.run(setup.backend, attn_sink=sink)
    factor = 1 / (1 + torch.exp(sink.double() - plain.lse.double()))
    wanted = plain.out.double() * factor[..., None]
    relative = (got.out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    worst = float(relative.max())
    require(
        worst <= REL_L2, f"out with a sink differs from out * 1 / (1 + exp(sink - lse)) by {worst:.3g} (relative L2)"
    )
    call.sink = sink
    require_accurate(got.out, got.lse, got.max_logits, call.truth(), normal=True)


@check("attn_sink: -inf no effect, +inf gives 0.", lean=LEAN)
def check_sink_infinities(setup: Setup, route: Route) -> None:
    """-inf keeps every bit; +inf gives zeros; mixed over heads each head gets its own."""
    call = plain_call(setup, route, rows=2, heads=4)
    plain = call.run(setup.backend)
    nothing = call.run(setup.backend, attn_sink=torch.full((4,), -INF, device=setup.device))
    nothing.require_same(plain, "sink -inf against no sink")
    everything = call.run(setup.backend, attn_sink=torch.full((4,), INF, device=setup.device))
    require_equal(everything.out, 0.0, "out with sink +inf")
    mixed = call.run(setup.backend, attn_sink=torch.tensor([INF, -INF, INF, -INF], device=setup.device))
    require_equal(mixed.out[:, ::2], 0.0, "heads with sink +inf")
    require_same_bits(mixed.out[:, 1::2], plain.out[:, 1::2], "heads with sink -inf")


@check(
    "Keys come from both caches: each list reads its own, with its own page size, lengths and slots.",
    routes=("v4_two_caches",),
)
def check_second_cache(setup: Setup, route: Route) -> None:
    """Closed form over two caches of different page sizes: q = 0, out is the mean over both lists."""
    caches = (CacheSpec(4, 64, 2), CacheSpec(9, 2, 40))
    call = setup.build(CallSpec(route, batch=3, heads=3, caches=caches, invalid=0.0))
    result = call.run(setup.backend)
    require_accurate(result.out, result.lse, result.max_logits, call.truth(), normal=True)
    call.q.zero_()
    lists = [[finite_slots(call, i)[:1] * cache.topk] * 3 for i, cache in enumerate(caches)]
    for lengths, count in (((4, 9), 13), ((4, 0), 4), ((0, 9), 9), ((3, 2), 5)):
        set_lanes(call, lists, [[n] * 3 for n in lengths])
        wanted = torch.full_like(result.lse, math.log(count))
        require_close_scalar(call.run(setup.backend).lse, wanted, f"lse of {lengths[0]} + {lengths[1]} equal weights")


@check("The softmax scale defaults to d_qk ** -0.5.", routes=KVCACHE, lean=("v4", "v32"))
def check_default_scale(setup: Setup, route: Route) -> None:
    """softmax_scale=None gives the bits of d_qk ** -0.5; another scale scales lse."""
    call = plain_call(setup, route, rows=2)
    default = call.run(setup.backend, softmax_scale=None)
    default.require_same(call.run(setup.backend, softmax_scale=route.d_qk**-0.5), "softmax_scale=None")
    for scale in setup.pick((0.0, -0.03, 0.5), (-0.03,)):
        call.sm_scale = scale
        got = call.run(setup.backend)
        require_accurate(got.out, got.lse, got.max_logits, call.truth(), normal=True)


@check("A sparse selection matters: the result is that of the listed rows, not of all rows.", lean=LEAN)
def check_selection_matters(setup: Setup, route: Route) -> None:
    """All slots hold numbers here, and the dense answer is far from the sparse one; such a case alone is accepted."""
    call = plain_call(setup, route, rows=2, heads=4)
    for cache in call.caches:
        rows = torch.randn(cache.slots, route.d_qk, generator=torch.Generator().manual_seed(call.spec.seed))
        slots = torch.arange(cache.slots, device=setup.device)
        write_rows(cache.view, slots, rows.to(setup.device))
    call.remember()
    truth = call.truth()
    result = call.run(setup.backend)
    picked = [cache.indices for cache in call.caches]
    for cache in call.caches:
        dense = torch.arange(cache.slots, dtype=torch.int32, device=setup.device)
        cache.indices = dense.expand(*cache.indices.shape[:-1], cache.slots).contiguous()
    dense_out = call.truth().out
    if float((dense_out - truth.out).norm() / truth.out.norm()) < 0.1:
        raise ValueError("the case cannot tell sparse from dense: draw other lists")
    for cache, indices in zip(call.caches, picked, strict=True):
        cache.indices = indices
    require_accurate(result.out, result.lse, result.max_logits, truth, normal=True)
