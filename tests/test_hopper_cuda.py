"""The Hopper backend on an SM90, beyond the conformance suite: exactness at serving sizes, graphs, streams."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from exact import same
from torch import Tensor

import headfit
from headfit.cache import empty_cache, write_rows
from headfit.kernels import cubin, hopper, hopper_build
from headfit.testing import ROUTES, CacheSpec, CallSpec, Setup
from headfit.testing.checks_shapes import hold

WHY_NOT = hopper.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hopper: {WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]

WIDTHS = (1, 4, 8, 12, 16, 24, 32, 64, 128)
ROWS = (1, 64, 65, 4096)
MOST = max(ROWS)
ROUTE = ROUTES["v4_two_caches"]


class Inputs:
    """128 + 512 lanes over two v4 caches, for ``rows`` rows of 128 heads; lengths of each row are drawn."""

    def __init__(self, rows: int, *, page_size: int = 64, device: str = "cuda") -> None:
        self.q = torch.randn(rows, 1, 128, 512, device=device).bfloat16()
        self.window = headfit.pack_kv(torch.randn(1024, 512, device=device), page_size)
        self.chosen = headfit.pack_kv(torch.randn(2048, 512, device=device), page_size)
        self.lanes1 = torch.randint(-1, 1024, (rows, 1, 128), device=device, dtype=torch.int32)
        self.lanes2 = torch.randint(-1, 2048, (rows, 1, 512), device=device, dtype=torch.int32)
        self.length1 = torch.randint(0, 129, (rows,), device=device, dtype=torch.int32)
        self.length2 = torch.randint(0, 513, (rows,), device=device, dtype=torch.int32)
        self.sink = torch.randn(128, device=device)

    def call(self, heads: int, rows: int | slice | None = None, **options: object) -> tuple[Tensor, Tensor]:
        some = rows if isinstance(rows, slice) else slice(0, rows)
        arguments = {
            "q": self.q[some, :, :heads], "k_cache": self.window, "indices": self.lanes1[some],
            "topk_length": self.length1[some], "attn_sink": self.sink[:heads], "extra_k_cache": self.chosen,
            "extra_indices_in_kvcache": self.lanes2[some], "extra_topk_length": self.length2[some],
        }  # fmt: skip
        return headfit.flash_mla_with_kvcache(**(arguments | options), backend="hopper")


@pytest.mark.parametrize("rows", ROWS)
def test_width_and_repeat_exact_at_serving_sizes(rows: int) -> None:
    x = Inputs(rows)
    out, lse = x.call(128)
    assert not torch.isnan(out).any()
    for heads in WIDTHS:
        same(x.call(heads), (out[:, :, :heads], lse[:, :heads]), f"{heads} heads")
    for _ in range(10):
        torch.full((1 << 22,), torch.nan, device="cuda")  # other junk in freed memory
        same(x.call(128), (out, lse), "again")


@pytest.mark.parametrize("rows", [1, 5, 16, 32, 64, 128])
def test_a_cluster_and_two_launches_make_the_same_bits(rows: int, monkeypatch) -> None:
    """Shares of 1 to 5 tiles, some without a key, a row without any; at every head tile, with sinks and without."""
    x = Inputs(rows)
    if rows > 1:
        x.length1[-1], x.length2[-1] = 70, 0  # of 10 shares 2 have keys
        x.length1[0], x.length2[0] = 0, 0
    lanes = [None, *(x.lanes2[:, :, : 64 * tiles - 5].contiguous() for tiles in (2, 3, 7, 8))]
    calls = [
        {"heads": heads, "attn_sink": sink[:heads] if sink is not None else None}
        | ({} if some is None else {"extra_indices_in_kvcache": some})
        for heads in (1, 8, 13, 16, 32, 40, 128) for sink in (x.sink, None) for some in lanes
    ]  # fmt: skip
    with hopper.record_variants() as names:
        x.call(8)
    assert "merge" not in names
    got = [x.call(**options) for options in calls]
    repeated = [x.call(**options) for options in calls]
    monkeypatch.setattr(cubin.Kernel, "clusters", lambda self, size: 0)
    with hopper.record_variants() as names:
        for options, one, other in zip(calls, got, repeated, strict=True):
            two = x.call(**options)
            same(one, two, options["heads"])
            same(other, two, "again")
            assert bool(torch.isinf(two[1][0]).all()) is (rows > 1)
            assert bool(two[0][0].any()) is (rows == 1)
    assert "merge" in names


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("rows", [1, 16, 64, 150])
def test_bits_do_not_depend_on_the_head_tile(rows: int, heads: int, monkeypatch) -> None:
    """Few rows take narrower tiles than their heads need."""
    x = Inputs(rows)
    calls = [{}, {"enable_batch_invariant": True}]
    got = [x.call(heads, **options) for options in calls]
    try:
        for most in (0, 100):  # CTAs an SM: never narrower; the narrowest, where a row is split
            monkeypatch.setattr(hopper, "NARROW_CTAS", most)
            hopper._planned.cache_clear()
            for options, one in zip(calls, got, strict=True):
                same(x.call(heads, **options), one, (most, options))
    finally:
        hopper._planned.cache_clear()


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_a_row_keeps_its_bits_whatever_rows_share_the_call(heads: int) -> None:
    """Alone, among few, and among a chunk of prefill."""
    x = Inputs(MOST)
    out, lse = x.call(heads, enable_batch_invariant=True)
    parts = [slice(0, rows) for rows in (1, 7, 64, 65, 133)] + [slice(r, r + 1) for r in (1, 64, MOST - 1)]
    for part in [*parts, slice(MOST - 300, MOST), slice(5, MOST - 6)]:
        same(x.call(heads, part, enable_batch_invariant=True), (out[part], lse[part]), part)


@pytest.mark.parametrize("rows", [3, 70, 600])
def test_a_captured_graph_replays_with_other_contents(rows: int) -> None:
    """Queries, lists, lengths, sinks and pages are rewritten in place; one row count splits rows, another does not."""
    x = Inputs(rows)
    x.call(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = x.call(16)
    for _ in range(3):
        new = Inputs(rows)
        for name, tensor in vars(x).items():
            tensor.copy_(getattr(new, name))
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        same(captured, new.call(16), "replay")


def test_compiled_without_graph_breaks_it_equals_eager() -> None:
    x = Inputs(65)

    def twice(q: Tensor) -> tuple[Tensor, ...]:
        return *x.call(16, q=q), *x.call(16, q=q * 2, enable_batch_invariant=True)

    q = x.q[:, :, :16]
    for got, want in zip(torch.compile(twice, fullgraph=True)(q), twice(q), strict=True):
        assert torch.equal(got, want)


def test_lengths_and_sizes_make_no_new_binary() -> None:
    x = Inputs(MOST)
    known = {spec.name for spec in hopper.SPECS}
    for spec in hopper.SPECS:
        hopper_build.binary(spec)
    before = hopper_build._binary.cache_info().misses
    with hopper.record_variants() as launched:
        for i in range(20):
            x.length1.fill_(7 * i)
            cache = headfit.pack_kv(torch.randn(64 * (i + 3), 512, device="cuda"), (64, 1, 31, 128)[i % 4])
            lanes = torch.randint(-1, 64, (MOST, 1, 31 * i + 1), device="cuda", dtype=torch.int32)
            for rows in (1 + i, MOST - i):
                x.call(1 + 6 * i, rows, k_cache=cache, indices=lanes[:rows])
    assert set(launched) <= known
    assert hopper_build._binary.cache_info().misses == before
    assert len(cubin._kernels) <= len(known) * torch.cuda.device_count()


@pytest.mark.parametrize("rows", [5, 300])
def test_strided_queries_and_outputs(rows: int) -> None:
    """Slices of wider buffers, rows in another order, and lists that lie apart; junk around out survives."""
    x = Inputs(rows)
    want = x.call(12)
    heads_first = x.q[:, :, :12].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.full((rows, 2, 40, 520), 7.0, device="cuda", dtype=torch.bfloat16)
    out = wide[:, :1, 3:15, :512]
    lists = torch.full((rows, 1, 700), -5, device="cuda", dtype=torch.int32)
    lists[..., 33:545] = x.lanes2
    got = x.call(12, q=heads_first, out=out, extra_indices_in_kvcache=lists[..., 33:545])
    assert got[0] is out
    same(got, want, "strided")
    out.fill_(7.0)
    assert bool((wide == 7.0).all())


@pytest.mark.parametrize("page_size", [1, 2, 3, 31, 65, 100, 256])
def test_odd_pages_give_the_bits_of_64(page_size: int) -> None:
    """The same rows in pages of another size, with room after each page."""
    x = Inputs(70)
    want = x.call(20)
    for name in ("window", "chosen"):
        rows = headfit.unpack_kv(getattr(x, name))
        pages = -(-rows.shape[0] // page_size)
        stride = page_size * 584 + (-page_size * 584) % 16 + 48
        cache = empty_cache(pages, page_size, device="cuda", page_stride=stride)
        write_rows(cache, torch.arange(rows.shape[0], device="cuda"), rows)
        assert torch.equal(headfit.unpack_kv(cache)[: rows.shape[0]], rows)
        setattr(x, name, cache)
    same(x.call(20), want, f"pages of {page_size}")


@pytest.mark.parametrize("data", ["normal", "wide_scales", "large_q"])
@pytest.mark.parametrize(("rows", "heads", "topk"), [(2, 33, (640, 70)), (70, 8, (128, 512)), (300, 16, (130, 65))])
def test_against_the_oracle(data: str, rows: int, heads: int, topk: tuple[int, int], seed: int) -> None:
    """Scales of 2^-100 to 2^60 in one row, queries to 1e4; slots that nobody lists are NaN."""
    setup = Setup("hopper", torch.device("cuda"), seed=seed)
    caches = tuple(CacheSpec(n, 16, n // 8 + 4) for n in topk)
    spec = CallSpec(ROUTE, rows, 1, heads, caches, sink="edges", lengths="edges", data=data)
    hold(setup, spec)
    hold(setup, replace(spec, batch_invariant=True))
    assert not setup.log.refused
    assert setup.log.ran == 2


@pytest.mark.parametrize("rows", [3, 200])
def test_keys_that_nobody_lists_may_be_nan(rows: int) -> None:
    """Every even slot is NaN, slot 0 too; lanes past a length and outside the cache name them or nothing."""
    x = Inputs(rows)
    for lanes, length in ((x.lanes1, x.length1), (x.lanes2, x.length2)):
        lanes |= 1  # -1 stays
        past = torch.arange(lanes.shape[-1], device="cuda") >= length[:, None, None]
        lanes.copy_(torch.where(past, lanes & ~1, lanes))
        lanes[0, 0, ::5] = 2**31 - 1
        lanes[-1, 0, ::7] = -(2**31)
    want = x.call(24)
    assert not torch.isnan(want[0]).any()
    nan = torch.full((512, 512), torch.nan, device="cuda")
    for cache, slots in ((x.window, 1024), (x.chosen, 2048)):
        for first in range(0, slots, 1024):
            write_rows(cache, torch.arange(first, first + 1024, 2, device="cuda"), nan)
    same(x.call(24), want, "NaN in slots that nobody lists")


def test_streams_and_threads_do_not_disturb_each_other() -> None:
    """Four threads, each with a stream of its own, over calls that split rows and calls that do not."""
    inputs = [Inputs(rows) for rows in (1, 17, 64, 500)]
    want = [x.call(8 * (i + 1)) for i, x in enumerate(inputs)]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = [inputs[i].call(8 * (i + 1)) for _ in range(50)]
            stream.synchronize()
            wrong.extend(f"thread {i}" for pair in got if not all(map(torch.equal, pair, want[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("rows", [5, 300])
def test_a_second_gpu_while_the_first_is_current(rows: int) -> None:
    x, y = Inputs(rows), Inputs(rows, device="cuda:1")
    for name, tensor in vars(x).items():
        getattr(y, name).copy_(tensor)
    want, got = x.call(16), y.call(16)
    assert torch.cuda.current_device() == 0
    same((got[0].cpu(), got[1].cpu()), (want[0].cpu(), want[1].cpu()), "cuda:1")
