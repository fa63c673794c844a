"""Small wrong backends, each of which breaks one sentence of the contract; ``test_conformance_catches`` runs them.

Every bug wraps the ``cpu`` backend and is wrong in one way, which its name says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headfit.cache import LAYOUTS, e8m0_to_float, row_views, unpack_kv, write_rows
from headfit.call import D_V, SparseCall
from headfit.kernels import cpu

INF = float("inf")


@dataclass(frozen=True)
class Bug:
    """A wrong ``run``, the check that must catch it, and the scale at which that check exists."""

    run: Callable[[SparseCall], None]
    check: str
    scale: str = "small"


BUGS: dict[str, Bug] = {}


def plant(check: str, scale: str = "small"):
    def register(run):
        BUGS[run.__name__] = Bug(run, check, scale)
        return run

    return register


def with_keys(call: SparseCall, change) -> SparseCall:
    return replace(call, key_sets=tuple(change(k) for k in call.key_sets))


def empty_rows(call: SparseCall) -> torch.Tensor:
    """[b, h, s_q]: rows without keys."""
    return call.lse == INF


@plant("lanes_past_length")
def length_off_by_one(call):
    cpu.run(with_keys(call, lambda k: k if k.lengths is None else replace(k, lengths=k.lengths.clamp(0, k.topk) + 1)))


@plant("lanes_past_length")
def lengths_ignored(call):
    cpu.run(with_keys(call, lambda k: replace(k, lengths=None)))


@plant("lengths_clamped")
def negative_lengths_count_from_the_end(call):
    def change(k):
        return k if k.lengths is None else replace(k, lengths=torch.where(k.lengths < 0, k.topk - 1, k.lengths))

    cpu.run(with_keys(call, change))


@plant("duplicates")
def duplicates_count_once(call):
    def unique(k):
        lanes = k.indices.clone()
        same = lanes[..., :, None] == lanes[..., None, :]
        lanes[same.tril(-1).any(-1)] = -1
        return replace(k, indices=lanes)

    cpu.run(with_keys(call, unique))


@plant("unlisted_nan")
def invalid_lanes_gather_slot_0(call):
    cpu.run(call)
    for k in call.key_sets:
        if k.slots and bool((k.indices < 0).any()):
            call.out.add_(unpack_kv(k.data)[0, :D_V] * 0)


@plant("invalid_indices")
def upper_bound_unchecked(call):
    def wrap(k):
        return replace(k, indices=torch.where(k.indices >= k.slots, k.indices % max(k.slots, 1), k.indices))

    cpu.run(with_keys(call, wrap))


@plant("invalid_indices")
def only_minus_one_is_invalid(call):
    def wrap(k):
        return replace(k, indices=torch.where(k.indices < -1, k.indices.abs() % max(k.slots, 1), k.indices))

    cpu.run(with_keys(call, wrap))


@plant("lse_without_sink")
def sink_in_lse(call):
    cpu.run(call)
    if call.attn_sink is not None:
        with_sink = torch.logaddexp(call.lse, call.attn_sink[:, None].expand_as(call.lse))
        call.lse.copy_(torch.where(empty_rows(call), call.lse, with_sink))


@plant("lse_natural")
def lse_base_2(call):
    cpu.run(call)
    call.lse.mul_(1.4426950408889634)


@plant("empty_rows")
def minus_infinity_for_empty_rows(call):
    cpu.run(call)
    call.lse.masked_fill_(empty_rows(call), -INF)


@plant("empty_rows")
def empty_rows_are_nan(call):
    cpu.run(call)
    call.out.masked_fill_(empty_rows(call).transpose(1, 2)[..., None], float("nan"))


@plant("empty_rows")
def sink_scales_empty_rows(call):
    cpu.run(call)
    if call.attn_sink is not None:
        call.out.add_((call.attn_sink - call.attn_sink)[:, None])


@plant("width_exact")
def another_rounding_at_eight_heads(call):
    cpu.run(call)
    if call.h_q <= 8:
        call.out.view(torch.int16).bitwise_and_(-2)


@plant("width_exact")
def lse_rounds_by_width(call):
    cpu.run(call)
    if call.h_q > 8:
        call.lse.mul_(1 + 2**-23)


@plant("width_whatever_other_heads_hold")
def amax_over_heads(call):
    cpu.run(call)
    call.out.add_(call.q.abs().amax() * 0)


@plant("row_exact")
def batch_changes_rounding(call):
    cpu.run(call)
    if call.q.shape[0] > 2:
        call.out.view(torch.int16).bitwise_or_(1)


@plant("row_exact_over_s_q")
def s_q_changes_rounding(call):
    cpu.run(call)
    if call.q.shape[1] > 1:
        call.lse.mul_(1 + 2**-23)


@plant("prefill_equals_decode")
def prefill_rounds_otherwise(call):
    cpu.run(call)
    if call.phase == "prefill":
        call.out.view(torch.int16).bitwise_and_(-2)


@plant("repeat_exact")
def random_order_of_sums(call):
    cpu.run(call)
    noise = torch.empty_like(call.lse).random_(0, 2).mul_(2**-22)
    call.lse.add_(call.lse.nan_to_num(0, 0, 0) * noise)


@plant("out_views")
def writes_outside_out(call):
    cpu.run(call)
    h, d = call.out.shape[2:]
    wide = call.out.stride(1) // max(call.out.stride(2), 1)
    if wide > h and call.out.storage_offset() + h * call.out.stride(2) + d < call.out.untyped_storage().nbytes() // 2:
        call.out.as_strided((d,), (1,), call.out.storage_offset() + h * call.out.stride(2)).zero_()


@plant("out_views")
def empty_rows_not_written(call):
    before = call.out.clone()
    cpu.run(call)
    call.out.copy_(torch.where(empty_rows(call).transpose(1, 2)[..., None], before, call.out))


@plant("head_slice_views")
def q_taken_as_contiguous(call):
    q = call.q
    flat = q.as_strided((q.untyped_storage().nbytes() // 2 - q.storage_offset(),), (1,))
    cpu.run(replace(call, q=flat[: q.numel()].view(q.shape)))


@plant("second_cache")
def second_cache_ignored(call):
    cpu.run(replace(call, key_sets=call.key_sets[:1]))


@plant("second_cache")
def second_cache_has_the_first_ones_lengths(call):
    first = call.key_sets[0]
    cpu.run(with_keys(call, lambda k: replace(k, lengths=first.lengths)))


@plant("one_list_empty")
def an_empty_list_empties_the_row(call):
    if any(k.topk == 0 for k in call.key_sets):
        call = with_keys(call, lambda k: replace(k, indices=k.indices[..., :0]))
    cpu.run(call)


def rows_with_scales_inline(k):
    """V4 rows read as if each token's 584 bytes stood together."""
    data = k.data.view(torch.uint8)
    rows = data.reshape(-1, 584)
    nope = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
    scale = e8m0_to_float(rows[:, 576:583])[..., None]
    rope = rows[:, 448:576].contiguous().view(torch.bfloat16)
    return torch.cat([(nope * scale).view(-1, 448).to(torch.bfloat16), rope], 1)


def as_plain(k, rows):
    view = rows.view(-1, 1, 1, rows.shape[-1])
    return replace(k, data=view, layout="bf16", page_size=1, page_stride=rows.shape[-1], row_stride=rows.shape[-1])


@plant("golden_bytes")
def footer_forgotten(call):
    cpu.run(with_keys(call, lambda k: as_plain(k, rows_with_scales_inline(k)) if k.layout == "v4" else k))


@plant("golden_bytes")
def scale_groups_of_128_in_v4(call):
    def change(k):
        if k.layout != "v4":
            return k
        rows = unpack_kv(k.data).clone()
        rows[:, 64:128] = rows[:, 64:128] * 2
        return as_plain(k, rows)

    cpu.run(with_keys(call, change))


@plant("page_strides")
def pages_taken_as_dense(call):
    def change(k):
        size = k.page_size * LAYOUTS[k.layout].bytes_per_token if k.layout in LAYOUTS else k.page_size * k.row_stride
        if k.layout in LAYOUTS:
            size = -(-size // LAYOUTS[k.layout].page_multiple) * LAYOUTS[k.layout].page_multiple
        strides = (size, *k.data.stride()[1:])
        return replace(k, data=k.data.as_strided(k.data.shape, strides), page_stride=size)

    cpu.run(with_keys(call, change))


@plant("every_byte")
def scale_byte_0_is_zero(call):
    def change(k):
        if k.layout != "v4":
            return k
        rows = unpack_kv(k.data).clone()
        rows[rows.abs() < 2.0**-118] = 0
        return as_plain(k, rows)

    cpu.run(with_keys(call, change))


@plant("every_byte")
def e4m3_subnormals_flushed(call):
    def change(k):
        if k.layout == "bf16":
            return k
        rows = unpack_kv(k.data).clone()
        codes = row_views(k.data)[0].reshape(k.slots, -1)[:, : LAYOUTS[k.layout].d_nope]
        rows[:, : codes.shape[1]][(codes & 0x78) == 0] = 0
        return as_plain(k, rows)

    cpu.run(with_keys(call, change))


@plant("every_byte_as_key", scale="full")
def keys_flush_subnormals(call):
    """K loses what is below the smallest normal bf16; V keeps it."""

    def change(k):
        rows = unpack_kv(k.data).clone()
        rows[rows.abs() < 2.0**-126] = 0
        return as_plain(k, rows)

    lse = call.lse
    cpu.run(call)
    flushed = replace(with_keys(call, change), out=torch.empty_like(call.out), lse=torch.empty_like(lse))
    cpu.run(flushed)
    lse.copy_(flushed.lse)


@plant("selection_matters")
def attends_to_every_slot(call):
    def dense(k):
        lanes = torch.arange(k.slots, dtype=torch.int32).expand(*k.indices.shape[:-1], k.slots)
        return replace(k, indices=lanes, lengths=None)

    cpu.run(with_keys(call, dense))


@plant("nan_stays_in_its_row")
def nan_crosses_rows(call):
    cpu.run(call)
    call.out.add_(call.out.nan_to_num(0, 0, 0).sum() * 0 + call.out.sum() * 0)


@plant("max_logits")
def max_logits_unscaled(call):
    cpu.run(call)
    if call.max_logits is not None:
        call.max_logits.div_(call.sm_scale)


@plant("sink_formula")
def sink_dropped(call):
    cpu.run(replace(call, attn_sink=None))


@plant("sink_formula")
def sink_in_base_2(call):
    cpu.run(replace(call, attn_sink=None if call.attn_sink is None else call.attn_sink * 0.6931471805599453))


@plant("sink_infinities")
def infinite_sinks_clamped(call):
    sink = None if call.attn_sink is None else call.attn_sink.clamp(-10, 10)
    cpu.run(replace(call, attn_sink=sink))


@plant("accuracy")
def logits_in_bf16(call):
    rounded = (call.q.float() * 1.004).to(torch.bfloat16)
    cpu.run(replace(call, q=rounded))


@plant("accuracy")
def lse_in_bf16(call):
    cpu.run(call)
    call.lse.copy_(call.lse.to(torch.bfloat16).float())


@plant("large_queries")
def softmax_without_maximum(call):
    cpu.run(call)
    overflown = (call.lse > 88) & (call.lse != INF)
    call.out.masked_fill_(overflown.transpose(1, 2)[..., None], float("nan"))


@plant("wide_scales")
def values_in_float16(call):
    cpu.run(call)
    call.out.copy_(call.out.half().to(torch.bfloat16))


@plant("order_of_logits")
def accumulator_not_rescaled(call):
    """The first key's share is kept as if no larger logit came later."""
    cpu.run(call)
    out, lse = call.out.clone(), call.lse.clone()
    for k in call.key_sets:
        first = replace(call, key_sets=(replace(k, indices=k.indices[..., :1], lengths=None),), attn_sink=None)
        first = replace(first, out=torch.empty_like(out), lse=torch.empty_like(lse), max_logits=None)
        cpu.run(first)
        call.out.add_(torch.where((first.lse < lse - 1).transpose(1, 2)[..., None], 0.05 * first.out, 0))


@plant("several_rows_per_entry")
def lengths_taken_per_row(call):
    def change(k):
        if k.lengths is None or call.q.shape[1] == 1:
            return k
        rows = torch.arange(call.rows).reshape(call.q.shape[:2])
        length = k.lengths[(rows % k.lengths.shape[0])]
        lanes = torch.where(torch.arange(k.topk) < length[..., None], k.indices, -1)
        return replace(k, indices=lanes, lengths=None)

    cpu.run(with_keys(call, change))


@plant("every_head_count")
def head_100_is_lost(call):
    cpu.run(call)
    call.out[:, :, 100:] = 0


@plant("page_sizes")
def page_sizes_rounded_to_even(call):
    def change(k):
        if k.page_size % 2 == 0 or k.page_size == 1 or k.layout == "bf16":
            return k
        page, offset = k.indices // k.page_size, k.indices % k.page_size
        return replace(k, indices=torch.where(k.indices < 0, k.indices, page * (k.page_size + 1) + offset).int())

    cpu.run(with_keys(call, change))


@plant("any_topk")
def topk_rounded_down_to_16(call):
    cpu.run(with_keys(call, lambda k: replace(k, indices=k.indices[..., : k.topk // 16 * 16])))


@plant("index_strides")
def indices_taken_as_dense(call):
    def change(k):
        lanes = k.indices
        shape, dense = lanes.shape, (lanes.shape[1] * lanes.shape[2], lanes.shape[2], 1)
        return replace(k, indices=lanes.as_strided(shape, dense))

    cpu.run(with_keys(call, change))


@plant("strided_rows")
def rows_taken_as_dense(call):
    def change(k):
        width = k.data.shape[-1]
        strides = (k.page_size * width, width, width, 1)
        return replace(k, data=k.data.as_strided(k.data.shape, strides), page_stride=strides[0], row_stride=width)

    cpu.run(with_keys(call, change))


@plant("pad_bytes_mean_nothing")
def pad_byte_is_a_scale(call):
    cpu.run(call)
    for k in call.key_sets:
        if k.layout == "v4":
            pad = k.data.view(torch.uint8).as_strided((1,), (1,), k.data.storage_offset() + k.page_size * 576 + 7)
            call.out.mul_(1 + float(pad) / 255)
        if k.layout == "v32":
            gap = k.data.as_strided((1,), (1,), k.data.storage_offset() + k.page_size * 656)
            call.out.mul_(1 + float(gap) / 255)


@plant("two_references")
def rows_lose_a_mantissa_bit(call):
    def change(k):
        rows = unpack_kv(k.data)
        return as_plain(k, (rows.view(torch.int16) & ~0x0010).view(torch.bfloat16))

    cpu.run(with_keys(call, change))


@plant("random_calls")
def cache_is_used_as_workspace(call):
    cpu.run(call)
    for k in call.key_sets:
        if k.slots and k.layout == "bf16":
            write_rows(k.data, torch.tensor([0]), torch.zeros(1, call.d_qk))
        elif k.slots:
            k.data.view(torch.uint8)[0, 0, 0, 0] = 1


@plant("random_calls")
def q_is_scaled_in_place(call):
    cpu.run(call)
    call.q.mul_(call.sm_scale)


@plant("no_pages")
def no_pages_means_no_write(call):
    if all(k.slots for k in call.key_sets):
        cpu.run(call)
    else:
        call.out.fill_(1)


@plant("huge_cache", scale="full")
def offsets_in_32_bits(call):
    def change(k):
        reach = k.indices.long() // k.page_size * k.page_stride
        return replace(k, indices=torch.where(reach >= 2**31, 0, k.indices).int())

    cpu.run(with_keys(call, change))


@plant("many_rows", scale="full")
def a_grid_of_65535_rows(call):
    call.out.zero_()
    call.lse.zero_()
