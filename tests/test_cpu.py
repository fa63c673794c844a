"""The cpu backend: accuracy, what it reads, and equal bits over widths, rows, threads and internal cuts."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch

import headfit
from headfit.cache import LAYOUTS, empty_cache, pack_kv, row_views, unpack_kv
from headfit.call import KeySet
from headfit.kernels import cpu
from headfit.reference import sparse_mla_reference

WIDTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128)


@dataclasses.dataclass
class Case:
    """Arguments of flash_mla_with_kvcache, and of the oracle."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    indices: list[torch.Tensor]
    lengths: list[torch.Tensor | None]
    sink: torch.Tensor | None = None
    layout: str = "v4"

    def run(self, **overrides):
        q = overrides.pop("q", self.q)
        kwargs = {
            "k_cache": self.caches[0],
            "indices": self.indices[0],
            "topk_length": self.lengths[0],
            "attn_sink": None if self.sink is None else self.sink[: q.shape[2]].contiguous(),
            "is_fp8_kvcache": self.layout != "bf16",
            "backend": "cpu",
        }
        if len(self.caches) > 1:
            kwargs |= {
                "extra_k_cache": self.caches[1],
                "extra_indices_in_kvcache": self.indices[1],
                "extra_topk_length": self.lengths[1],
            }
        return headfit.flash_mla_with_kvcache(q, **(kwargs | overrides))

    def oracle(self):
        rows = [unpack_kv(c) for c in self.caches]
        return sparse_mla_reference(self.q, rows, self.indices, self.lengths, self.q.shape[-1] ** -0.5, self.sink)


def make(b, s_q, h_q, topks, layout="v4", pages=(9, 5), page_sizes=(7, 64), sink=True, invalid=0.2) -> Case:
    """Random rows, lanes of which `invalid` are out of range, ragged lengths and a sink."""
    d_qk = 512 if layout == "bf16" else LAYOUTS[layout].d_qk
    caches, indices, lengths = [], [], []
    for topk, page, size in zip(topks, pages, page_sizes, strict=False):
        kv = torch.randn(page * size, d_qk)
        caches.append(kv.bfloat16().view(page, size, 1, d_qk) if layout == "bf16" else pack_kv(kv, size, layout))
        index = torch.randint(0, max(page * size, 1), (b, s_q, topk))
        junk = torch.tensor([-1, page * size, 2**31 - 1, -(2**31)])[torch.randint(0, 4, index.shape)]
        indices.append(torch.where(torch.rand(index.shape) < invalid, junk, index).int())
        lengths.append(torch.randint(-1, topk + 2, (b,)).int() if invalid else None)
    q = torch.randn(b, s_q, h_q, d_qk).bfloat16()
    return Case(q, caches, indices, lengths, torch.randn(h_q) if sink else None, layout)


def check_close(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The bounds of the contract, and exact agreement about which rows are empty."""
    expected, _, expected_lse = case.oracle()
    full = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), full)
    assert lse[~full].eq(math.inf).all()
    assert out.transpose(1, 2)[~full].eq(0).all()
    if full.any():
        assert (out.double() - expected).norm() <= 4e-3 * expected.norm()
        assert (lse[full].double() - expected_lse[full]).abs().max() <= 1e-4


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", ["v4", "v32", "bf16"])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topks"),
    [
        (1, 1, 1, (1,)),
        (3, 2, 8, (0,)),
        (2, 3, 16, (0, 5)),
        (1, 5, 17, (128, 130)),
        (5, 1, 64, (37, 300)),
        (2, 2, 127, (127,)),
        (1, 2, 128, (129, 128)),
        (2, 1, 3, (2200, 7)),
    ],
)
def test_against_the_oracle(layout, b, s_q, h_q, topks, seed):
    case = make(b, s_q, h_q, topks, layout)
    check_close(case, *case.run())
    check_close(case, *case.run(enable_batch_invariant=True))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("layout", "topks"), [("v4", (128, 200)), ("v32", (77,)), ("bf16", (2100, 3))])
def test_a_heads_bits_do_not_depend_on_the_width(layout, topks, batch_invariant, seed):
    case = make(2, 2, 128, topks, layout)
    out, lse = case.run(enable_batch_invariant=batch_invariant)
    for width in WIDTHS:
        narrow = case.run(q=case.q[:, :, :width], enable_batch_invariant=batch_invariant)
        assert same(narrow, (out[:, :, :width], lse[:, :width])), width
        again = case.run(q=case.q[:, :, :width].clone(), enable_batch_invariant=batch_invariant)
        assert same(narrow, again), width


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e38])
def test_a_heads_bits_do_not_depend_on_the_other_heads(junk, seed):
    case = make(1, 3, 96, (130, 40))
    out, lse = case.run()
    spoilt = torch.rand(96) < 0.5
    q = case.q.clone()
    q[:, :, spoilt] = junk
    got, got_lse = case.run(q=q)
    assert torch.equal(got[:, :, ~spoilt], out[:, :, ~spoilt])
    assert torch.equal(got_lse[:, ~spoilt], lse[:, ~spoilt])


@pytest.mark.parametrize("layout", ["v4", "bf16"])
def test_a_rows_bits_do_not_depend_on_the_other_rows(layout, seed):
    """One query row alone, in batches, along either dim; and through the prefill entry on the same (bf16) rows."""
    case = make(23, 1, 20, (128, 150), layout, sink=False)
    out, lse = case.run(enable_batch_invariant=True)
    for first, last in [(0, 1), (22, 23), (3, 5), (4, 17)]:
        part = dataclasses.replace(
            case,
            q=case.q[first:last],
            indices=[i[first:last] for i in case.indices],
            lengths=[n[first:last] for n in case.lengths],
        )
        assert same(part.run(enable_batch_invariant=True), (out[first:last], lse[first:last]))
    one = dataclasses.replace(
        case,
        q=case.q.transpose(0, 1),
        indices=[torch.where(torch.arange(i.shape[2]) < n[:, None, None], i, -1).transpose(0, 1)
                 for i, n in zip(case.indices, case.lengths, strict=True)],
        lengths=[None, None],
    )  # fmt: skip
    got, got_lse = one.run(enable_batch_invariant=True)
    assert torch.equal(got.transpose(0, 1), out)
    assert torch.equal(got_lse.permute(2, 1, 0), lse)


def test_prefill_and_decode_agree_bit_by_bit(seed):
    case = make(9, 1, 33, (300,))
    rows = unpack_kv(case.caches[0])
    out, lse = case.run(enable_batch_invariant=True)
    got, top, got_lse = headfit.flash_mla_sparse_fwd(
        case.q[:, 0], rows[:, None], case.indices[0], 512**-0.5, attn_sink=case.sink,
        topk_length=case.lengths[0], backend="cpu", enable_batch_invariant=True,
    )  # fmt: skip
    assert torch.equal(got, out[:, 0])
    assert torch.equal(got_lse, lse[..., 0])
    expected = case.oracle()[1][..., 0]
    assert torch.equal(top.isinf(), expected.isinf())
    assert torch.allclose(top.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_threads_and_repeats_do_not_change_a_bit(batch_invariant, seed):
    case = make(1, 12, 64, (128, 512))
    kept = torch.get_num_threads()
    try:
        expected = case.run(enable_batch_invariant=batch_invariant)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same(case.run(enable_batch_invariant=batch_invariant), expected), threads
    finally:
        torch.set_num_threads(kept)
    assert same(case.run(enable_batch_invariant=batch_invariant), expected)


@pytest.mark.parametrize(
    "constants",
    [
        {"DENSE_RATIO": 0},  # no map over the slots: repeated ones are decoded as often as they stand
        {"SPAN_LANES": 1024},
        {"TABLE_ROWS": 400},  # spans are halved until their slots fit
        {"DECODE_ROWS": 5},
    ],
    ids=str,
)
def test_internal_cuts_do_not_change_a_bit(constants, monkeypatch, seed):
    case = make(1, 30, 9, (130, 300), pages=(9, 11))
    expected = case.run(enable_batch_invariant=True)
    for name, value in constants.items():
        monkeypatch.setattr(cpu, name, value)
    assert same(case.run(enable_batch_invariant=True), expected)


def test_keys_of_a_row_in_several_tables(monkeypatch, seed):
    case = make(1, 6, 9, (700, 300), pages=(9, 11))
    monkeypatch.setattr(cpu, "BLOCK_TILES", 2)
    expected = case.run(enable_batch_invariant=True)
    monkeypatch.setattr(cpu, "TABLE_TILES", 4)
    monkeypatch.setattr(cpu, "TABLE_ROWS", 512)
    got = case.run(enable_batch_invariant=True)
    assert same(got, expected)
    check_close(case, *got)


def test_more_keys_than_a_table_holds(seed):
    case = make(2, 1, 2, (cpu.TABLE_ROWS + 300, 50), pages=(150, 3), page_sizes=(256, 9))
    case.indices[0][:, :, ::3] = 17  # duplicates, and so many that each counts
    for keep in ([None, None], [torch.tensor([40000, 5]).int(), torch.tensor([1, 0]).int()]):
        case.lengths = keep
        check_close(case, *case.run())


def test_decode_equals_unpack_for_every_byte():
    k_cache = empty_cache(256, 4)
    data, scales = row_views(k_cache)
    data[:, :, :448] = torch.arange(256, dtype=torch.uint8).view(1, 4, 64).repeat(1, 1, 7)
    data[:, :, 448:] = torch.randint(0, 256, (256, 4, 128), dtype=torch.uint8)
    scales[:] = torch.arange(256, dtype=torch.uint8)[:, None, None]
    order = torch.randperm(1024)
    keys = KeySet(k_cache, "v4", 4, k_cache.stride(0), 576, 1024, torch.empty(0), None)
    got = torch.empty(1024, 512)
    cpu._decode(keys, order, got)
    expected = unpack_kv(k_cache)[order].float()
    assert torch.equal(got.isnan(), expected.isnan())
    # float32 keeps products below the last bit of a bf16 subnormal, 2^-133
    assert torch.equal(got.bfloat16().float().nan_to_num(0.0), expected.nan_to_num(0.0))


def test_decode_v32_rounds_like_unpack(seed):
    k_cache = pack_kv(torch.randn(20, 576), 3, "v32")
    raw = k_cache.view(-1, 656)
    raw[:, 512:528] = (torch.randn(21, 4) * torch.exp2(torch.randint(-60, 60, (21, 4)))).view(torch.uint8)
    raw[5, 7], raw[6, 8] = 0x7F, 0xFF
    keys = KeySet(k_cache, "v32", 3, k_cache.stride(0), 656, 21, torch.empty(0), None)
    got = torch.empty(21, 576)
    cpu._decode(keys, torch.arange(21), got)
    expected = unpack_kv(k_cache).float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("layout", ["v4", "v32", "bf16"])
def test_unlisted_slots_are_never_seen(layout, seed):
    """Slot 0 and every slot that no valid lane names hold NaN; lanes past the length hold junk and NaN slots."""
    case = make(3, 2, 10, (40, 130), layout)
    clean = case.run()
    for cache_, index, length in zip(case.caches, case.indices, case.lengths, strict=True):
        slots = cache_.shape[0] * cache_.shape[1]
        past = torch.arange(index.shape[2]) >= length[:, None, None]
        live = index[(index >= 0) & (index < slots) & ~past].long().unique()
        dead = torch.ones(slots, dtype=torch.bool)
        dead[live] = False
        index[past.expand_as(index)] = int(dead.nonzero()[0]) if dead.any() else 0
        for slot in dead.nonzero().view(-1).tolist():
            page, row = divmod(slot, cache_.shape[1])
            if layout == "bf16":
                cache_[page, row] = math.nan
                continue
            data, scales = row_views(cache_)
            data[page, row] = 0xFF
            if scales is not None:
                scales[page, row] = 0xFF
    assert same(case.run(), clean)
    assert clean[0].isfinite().all()


def test_a_listed_nan_stays_in_its_row(seed):
    case = make(1, 4, 5, (64,), invalid=0.0)
    clean = case.run()
    case.caches[0][0, 0, 0, 3] = 0x7F
    case.indices[0][case.indices[0] == 0] = 1
    clean = case.run()
    case.indices[0][0, 2, 9] = 0
    out, lse = case.run()
    keep = [0, 1, 3]
    assert torch.equal(out[:, keep], clean[0][:, keep])
    assert torch.equal(lse[..., keep], clean[1][..., keep])
    assert lse[..., 2].isnan().all()
    assert out[:, 2].isnan().all()


def test_writes_into_strided_views_only(seed):
    case = make(3, 2, 8, (30,))
    expected = case.run()
    padded_q = torch.full((3, 2, 64, 512), math.nan).bfloat16()
    padded_q[:, :, 4:12] = case.q
    padded_out = torch.full((3, 2, 64, 512), math.nan).bfloat16()
    out, lse = case.run(q=padded_q[:, :, 4:12], out=padded_out[:, :, 20:28])
    assert out.data_ptr() == padded_out[:, :, 20:28].data_ptr()
    assert same((padded_out[:, :, 20:28], lse), expected)
    assert padded_out[:, :, :20].isnan().all()
    assert padded_out[:, :, 28:].isnan().all()
    swapped = torch.full((2, 8, 3, 512), math.nan).bfloat16().permute(2, 0, 1, 3)
    assert same(case.run(q=case.q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), out=swapped), expected)
    shared = case.indices[0][:1].expand(3, 2, 30)
    case.indices = [shared]
    expected = dataclasses.replace(case, indices=[shared.clone()]).run()
    assert same(case.run(), expected)


@pytest.mark.parametrize(("layout", "page_size"), [("v4", 1), ("v4", 3), ("v4", 576), ("v32", 1), ("v32", 10)])
def test_foreign_page_strides(layout, page_size, seed):
    case = make(2, 2, 6, (50,), layout, pages=(6,), page_sizes=(page_size,))
    expected = case.run()
    used = page_size * LAYOUTS[layout].bytes_per_token
    stride = used + 1 + int(torch.randint(0, 4000, ()))
    storage = torch.full((5 + 6 * stride,), 0xFF, dtype=torch.uint8)
    view = storage.as_strided(case.caches[0].shape, (stride, *case.caches[0].stride()[1:]), 5)
    view.copy_(case.caches[0])
    assert same(dataclasses.replace(case, caches=[view]).run(), expected)
    assert same(dataclasses.replace(case, caches=[view.view(torch.float8_e4m3fn)]).run(), expected)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 0.0, 1e4, -1e4])
def test_sinks(sink, seed):
    case = make(2, 2, 5, (9, 0), invalid=0.5)
    case.sink = torch.full((5,), sink)
    out, lse = case.run()
    expected, _, _ = case.oracle()
    assert (out.double() - expected).abs().max() <= 4e-3 * max(1.0, expected.abs().max().item())
    case.sink = None
    assert torch.equal(case.run()[1], lse), "the sink is not in lse"


def test_empty_caches_and_empty_lists(seed):
    empty = empty_cache(0, 5)
    index = torch.tensor([[[0, 1, -1]]], dtype=torch.int32)
    q = torch.randn(1, 1, 4, 512).bfloat16()
    for lanes in (index, index[..., :0]):
        out, lse = Case(q, [empty], [lanes], [None], torch.full((4,), -math.inf)).run()
        assert out.eq(0).all()
        assert lse.eq(math.inf).all()


def test_wide_range_of_scales_and_large_queries(seed):
    """Groups scaled from 2^-100 to 2^40 in one row, and |q| up to 1e4: one key wins, the sums stay finite."""
    kv = torch.randn(64, 7, 64) * torch.exp2(torch.tensor([-100.0, -60, -20, 0, 10, 30, 40]))[:, None]
    kv = torch.cat([kv.view(64, 448), torch.randn(64, 64)], 1)
    case = make(2, 2, 9, (40,), sink=False)
    case.caches = [pack_kv(kv, 4)]
    case.q = (case.q * 3e3).clamp(-1e4, 1e4)
    case.indices = [torch.randint(0, 64, (2, 2, 40)).int()]
    case.lengths = [None]
    out, lse = case.run()
    expected, _, expected_lse = case.oracle()
    assert (out.double() - expected).norm() <= 4e-3 * expected.norm()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6)
    assert same(case.run(q=case.q[:, :, :1]), (out[:, :, :1], lse[:, :1]))
    case.caches = [pack_kv(torch.randn(64, 512), 4)]
    out, lse = case.run()
    expected, _, expected_lse = case.oracle()
    assert (out.double() - expected).norm() <= 4e-3 * expected.norm()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_and_device_change_no_bit(dtype, seed):
    case = make(3, 2, 9, (130, 40))
    before = case.run()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            after = case.run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(before, after)


def test_capability():
    found = cpu.capability(None)
    assert found.family == "cpu"
    assert found.row_split == 0
    assert all(h in found.prefill_heads and h in found.decode_heads for h in range(1, 129))
    assert 0 not in found.prefill_heads
    assert 129 not in found.decode_heads


WORKSPACE = """
import resource, torch, headfit
from headfit.cache import empty_cache
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def call(b, s_q, h, topk, pages, distinct):
    q = torch.zeros(b, s_q, h, 512, dtype=torch.bfloat16)
    index = (torch.arange(topk) % distinct).int().expand(b, s_q, topk)
    k_cache = empty_cache(pages, 64)
    k_cache.fill_(1)
    out = torch.zeros_like(q)
    headfit.flash_mla_with_kvcache(q[:, :1, :1], k_cache, indices=index[:, :1, :1], backend="cpu")
    before = peak()
    headfit.flash_mla_with_kvcache(q, k_cache, indices=index, out=out, backend="cpu")
    print(f"{b} {s_q} {h} {topk}: {peak() - before:.0f} MiB")
    return peak() - before
assert max(
    call(1, 1, 1, 300_000, 4000, 256_000),
    call(1, 60, 128, 640, 1000, 64_000),
    call(1, 3, 16, 40_000, 1000, 40_000),
) <= 256
"""


def test_workspace_is_bounded():
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in other units elsewhere")
    done = subprocess.run(
        [sys.executable, "-c", WORKSPACE], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
