"""The backends ``hopper_wide`` and ``hopper_pairs`` on an SM90: what both have to do, with calls of many rows.

The conformance suite has few rows in most of its calls, which these backends refuse.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from exact import same, weights_alike
from torch import Tensor

import headfit
from headfit.cache import empty_cache, row_views, write_rows
from headfit.kernels import BackendUnavailable, crossover, hopper, hopper_pairs, hopper_wide
from headfit.reference import sparse_mla_reference
from headfit.testing import ROUTES, CacheSpec, CallSpec, Setup
from headfit.testing.checks_shapes import hold

WHY_NOT = hopper_wide.available() or hopper_pairs.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]

WIDTHS = (1, 8, 33, 64, 96, 128)
SCALE = 512**-0.5
LAUNCHES = {
    "hopper_wide": ["wide mark", "wide spread", "wide attend"],
    "hopper_pairs": ["wide mark", "pairs spread", "pairs merge", "pairs attend", "rest heads=32"],
}
both = pytest.mark.parametrize("backend", LAUNCHES)


class Inputs:
    """128 + 512 lanes over two v4 caches, for ``rows`` rows of 128 heads; lengths of each request are drawn.

    Lanes hold -1 and slots beyond the cache as well, slots stand twice, and the first row has no keys.
    """

    def __init__(
        self, backend: str, rows: int, *, s_q: int = 1, page_size: int = 64, slots: tuple[int, int] = (1024, 4096)
    ) -> None:
        self.backend, requests = backend, rows // s_q
        self.q = torch.randn(requests, s_q, 128, 512, device="cuda").bfloat16()
        self.caches = [headfit.pack_kv(torch.randn(n, 512, device="cuda"), page_size) for n in slots]
        self.lanes = [
            torch.randint(-1, n + 2, (requests, s_q, topk), device="cuda", dtype=torch.int32)
            for n, topk in zip(slots, (128, 512), strict=True)
        ]
        self.lengths = [
            torch.randint(0, topk + 9, (requests,), device="cuda", dtype=torch.int32) for topk in (128, 512)
        ]
        for lengths in self.lengths:
            lengths[0] = 0
        self.sink = torch.randn(128, device="cuda")

    def call(self, heads: int = 64, some: slice = slice(None), **options: object) -> tuple[Tensor, Tensor]:
        q = self.q[some, :, :heads]
        arguments = {
            "q": q, "k_cache": self.caches[0], "indices": self.lanes[0][some], "topk_length": self.lengths[0][some],
            "extra_k_cache": self.caches[1], "extra_indices_in_kvcache": self.lanes[1][some],
            "extra_topk_length": self.lengths[1][some], "attn_sink": self.sink[:heads],
            "out": torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device="cuda"),
        }  # fmt: skip
        return headfit.flash_mla_with_kvcache(**({"backend": self.backend} | arguments | options))

    def check(self, got: tuple[Tensor, Tensor], heads: int, rows: int = 40) -> None:
        """Compare some requests with the oracle, and the first, which has no keys."""
        some = torch.randperm(self.q.shape[0] - 1, device="cuda")[: rows - 1] + 1
        some = torch.cat([torch.zeros_like(some[:1]), some])
        keys = [headfit.unpack_kv(cache) for cache in self.caches]
        out, _, lse = sparse_mla_reference(
            self.q[some, :, :heads], keys, [x[some] for x in self.lanes], [x[some] for x in self.lengths], SCALE,
            self.sink[:heads],
        )  # fmt: skip
        near(got[0][some], got[1][some], out, lse)


def module_of(backend: str) -> ModuleType:
    return importlib.import_module(f"headfit.kernels.{backend}")


def near(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> None:
    """The contract's tolerances; NaN where the oracle has it."""
    out, lse, want, want_lse = (t.double().cpu() for t in (out, lse, want, want_lse))
    assert torch.equal(out.isnan(), want.isnan())
    error = torch.where(want.isnan(), 0.0, out - want).norm() / torch.where(want.isnan(), 0.0, want).norm()
    assert error <= 4e-3
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-4, equal_nan=True)


@both
@pytest.mark.parametrize("rows", [512, 601, 4096])
def test_width_and_repeat_exact(backend: str, rows: int) -> None:
    x = Inputs(backend, rows)
    with module_of(backend).record_variants() as names:
        out, lse = x.call(128)
    assert names == LAUNCHES[backend]
    assert not torch.isnan(out).any()
    assert torch.isposinf(lse[0]).all()
    assert not out[0].any()
    for heads in WIDTHS:
        same(x.call(heads), (out[:, :, :heads], lse[:, :heads]), f"{heads} heads")
    for _ in range(5):
        torch.full((1 << 24,), torch.nan, device="cuda")  # other junk in freed memory
        same(x.call(128), (out, lse), "again")


@both
def test_a_row_keeps_its_bits_whatever_rows_share_the_call(backend: str) -> None:
    """Or 8 rows together, where rows are paired."""
    x = Inputs(backend, 2048)
    out, lse = x.call(64)
    for some in (slice(0, 512), slice(8 if backend == "hopper_pairs" else 1, 704), slice(1000, 2048)):
        same(x.call(64, some), (out[some], lse[some]), some)


@both
@pytest.mark.parametrize("page_size", [1, 7, 64, 100])
@pytest.mark.parametrize(("rows", "s_q", "heads"), [(512, 1, 64), (513, 3, 33), (1040, 520, 128)])
def test_against_the_oracle(backend: str, rows: int, s_q: int, heads: int, page_size: int) -> None:
    x = Inputs(backend, rows, s_q=s_q, page_size=page_size, slots=(1400, 2100))
    x.check(x.call(heads), heads, rows=2 if s_q > 100 else 40)


@both
@pytest.mark.parametrize("data", ["normal", "wide_scales", "large_q"])
@pytest.mark.parametrize(("batch", "s_q", "heads", "topk"), [(520, 1, 64, (100, 37)), (171, 3, 9, (16, 1))])
def test_edges_against_the_oracle(
    backend: str, data: str, batch: int, s_q: int, heads: int, topk: tuple[int, int], seed: int
) -> None:
    """Scales of 2^-100 to 2^60 in one row, queries to 1e4; slots that nobody lists are NaN."""
    setup = Setup(backend, torch.device("cuda"), seed=seed)
    caches = tuple(CacheSpec(n, 16, n // 8 + 4) for n in topk)
    hold(setup, CallSpec(ROUTES["v4_two_caches"], batch, s_q, heads, caches, sink="edges", lengths="edges", data=data))
    assert not setup.log.refused


@both
@pytest.mark.parametrize("lanes", [0, 1, 15, 16, 17, 47, 48, 49, 96, 97, 145])
def test_lists_of_any_length(backend: str, lanes: int) -> None:
    """Of one cache: whole tiles of 48 keys, and what is left over."""
    q = torch.randn(512, 1, 64, 512, device="cuda").bfloat16()
    cache = headfit.pack_kv(torch.randn(640, 512, device="cuda"), 64)
    lists = torch.randint(0, 640, (512, 1, lanes), device="cuda", dtype=torch.int32)
    got = headfit.flash_mla_with_kvcache(q, cache, indices=lists, backend=backend)
    out, _, lse = sparse_mla_reference(q[:20], [headfit.unpack_kv(cache)], [lists[:20]], [None], SCALE)
    if lanes:
        near(got[0][:20], got[1][:20], out, lse)
    else:
        assert not got[0].any()
        assert torch.isposinf(got[1]).all()


@both
def test_keys_that_are_not_finite_reach_the_rows_that_list_them_alone(backend: str) -> None:
    """NaN in e4m3, as a scale and in rope dims, and an infinity: other rows have the same bits as without.

    Where rows are paired, the 8 rows beside such a one are computed by another kernel: they are as right as before.
    """
    x = Inputs(backend, 512)
    data, scales = row_views(x.caches[1])
    bad = (5, 70, 1000, 4000)
    lists = x.lanes[1]
    for slot in bad:
        lists[lists == slot] = slot + 1
    want = x.call(64)
    data[bad[0] // 64, bad[0] % 64, 300] = 0x7F
    scales[bad[1] // 64, bad[1] % 64, 6] = 255
    data[bad[2] // 64, bad[2] % 64, 448:450] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8, device="cuda")
    data[bad[3] // 64, bad[3] % 64, 574:576] = torch.tensor([0x80, 0x7F], dtype=torch.uint8, device="cuda")
    same(x.call(64), want, "not listed")
    for row, slot in enumerate(bad, 10):
        x.lengths[1][row] = 512
        lists[row, 0, 100 * (row - 9)] = slot
    got = x.call(64)
    kept = torch.ones(512, dtype=torch.bool, device="cuda")
    kept[8:16] = False
    same((got[0][kept], got[1][kept]), (want[0][kept], want[1][kept]), "other rows")
    for row in (8, 9, 14, 15):
        near(got[0][row], got[1][row], want[0][row], want[1][row])
    assert got[0][10:13].isnan().all()
    assert got[0][13].isnan().any()


@both
def test_a_captured_graph_replays_with_other_contents(backend: str) -> None:
    x = Inputs(backend, 600)
    x.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = x.call()
    for _ in range(3):
        new = Inputs(backend, 600)
        for name in ("q", "sink"):
            getattr(x, name).copy_(getattr(new, name))
        for name in ("caches", "lanes", "lengths"):
            for mine, other in zip(getattr(x, name), getattr(new, name), strict=True):
                mine.copy_(other)
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        same(captured, new.call(), "replay")


@both
def test_strided_queries_and_outputs(backend: str) -> None:
    """Slices of wider buffers, rows in another order, and lists that lie apart; junk around out survives."""
    x = Inputs(backend, 512)
    want = x.call(72)
    heads_first = x.q[:, :, :72].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.full((512, 2, 80, 520), 7.0, device="cuda", dtype=torch.bfloat16)
    out = wide[:, :1, 3:75, :512]
    lists = torch.full((512, 1, 700), -5, device="cuda", dtype=torch.int32)
    lists[..., 33:545] = x.lanes[1]
    got = x.call(72, q=heads_first, out=out, extra_indices_in_kvcache=lists[..., 33:545])
    assert got[0] is out
    same(got, want, "strided")
    out.fill_(7.0)
    assert bool((wide == 7.0).all())


@both
@pytest.mark.parametrize("room", [0, 100, 5110])
def test_more_keys_than_there_is_room_for_are_left_to_the_native_kernel(backend: str, room: int, monkeypatch) -> None:
    """Of 5120 slots all are listed, but for a few perhaps."""
    x = Inputs(backend, 515)
    monkeypatch.setattr(hopper_wide, "ROOM_LIMIT", room)
    hopper_wide._planned.cache_clear()
    try:
        with module_of(backend).record_variants() as names:
            got = x.call(96)
        assert names[-1] == "rest heads=32"
        x.check(got, 96)
        same(x.call(96), got, "again")
    finally:
        hopper_wide._planned.cache_clear()


@both
def test_caches_of_more_slots_than_a_pass_marks(backend: str) -> None:
    """2 million slots, of which few are listed, from everywhere; what is not listed is NaN."""
    pages, rows = 1 << 15, 512
    cache = empty_cache(pages, 64, device="cuda")
    cache.fill_(0xFF)
    slots = torch.randperm(pages * 64, device="cuda")[:3000]
    slots[:2] = torch.tensor([0, pages * 64 - 1], device="cuda")
    keys = torch.randn(3000, 512, device="cuda")
    write_rows(cache, slots, keys)
    number = torch.randint(0, 2944, (rows, 1, 130), device="cuda")
    q = torch.randn(rows, 1, 64, 512, device="cuda").bfloat16()
    got = headfit.flash_mla_with_kvcache(q, cache, indices=slots[number].int(), backend=backend)
    small = headfit.unpack_kv(headfit.pack_kv(keys[:2944], 64))
    out, _, lse = sparse_mla_reference(q[:20], [small], [number[:20]], [None], SCALE)
    near(got[0][:20], got[1][:20], out, lse)


@both
def test_weights_that_round_alike_leave_no_error(backend: str) -> None:
    weights_alike(backend)


def test_many_rows_of_64_heads_are_taken_without_a_name() -> None:
    """`crossover.json` has measured it the fastest there, and `hopper` for few rows."""
    if torch.cuda.get_device_name() not in crossover.load():
        pytest.skip(f"no measured table for {torch.cuda.get_device_name()}")
    x = Inputs("hopper_wide", 4096)
    want = x.call(64)
    with hopper_wide.record_variants() as wide:
        same(x.call(64, backend=None), want, "by itself")
    with hopper.record_variants() as native:
        x.call(64, slice(0, 64), backend=None)
    assert wide == LAUNCHES["hopper_wide"]
    assert native == ["native heads=32"]


@both
def test_few_rows_and_invariant_calls_are_refused_by_name(backend: str) -> None:
    x = Inputs(backend, 512)
    with pytest.raises(BackendUnavailable, match="takes 512 rows and more, got 511"):
        x.call(64, slice(0, 511))
    with pytest.raises(BackendUnavailable, match="takes no batch-invariant calls"):
        x.call(64, enable_batch_invariant=True)
