"""Packed rows end to end on an SM90: what `test_hopper_cuda.py` asks of the native kernel, of lists that are packed.

Widths, accuracy, graphs, streams, sinks, lengths, strides, keys that are not finite. Every call is checked to launch
the packed kernel; which groups it takes is what `test_hopper_union_cuda.py` tests.
"""

from __future__ import annotations

import threading

import pytest
import torch
from exact import same, weights_alike
from torch import Tensor

import headfit
from headfit.cache import write_rows
from headfit.kernels import hopper
from headfit.reference import sparse_mla_reference

WHY_NOT = hopper.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hopper: {WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]
WIDTHS = (1, 3, 7, 8, 9, 12, 16, 17, 24, 33, 40, 64, 100, 128)  # also such whose lanes do not fill a tile of 64
WINDOW, DENSE = 128, 200
LSE_BOUND, OUT_BOUND = 1e-4, 4e-3  # the contract's


class Inputs:
    """Requests of 150 rows side by side: a window, which grows where each begins, and ``DENSE`` keys of the request."""

    def __init__(self, rows: int = 600, s_q: int = 1, *, request: int = 150, device: str = "cuda") -> None:
        row = torch.arange(rows)[:, None]
        at, number = row % request, row // request
        lanes = (at - WINDOW + 1).clamp_min(0) + torch.arange(WINDOW)
        window = torch.where(lanes <= at, number * request + lanes, -1)
        dense = (number * DENSE + torch.arange(DENSE)).expand(rows, -1)
        self.lanes = [x.int().to(device).unflatten(0, (-1, s_q)) for x in (window, dense)]
        count = rows // s_q
        reached = (torch.arange(count) * s_q) % request + 40
        self.lengths = [torch.full((count,), WINDOW, dtype=torch.int32, device=device), reached.int().to(device)]
        slots = rows + WINDOW, -(-rows // request) * DENSE + 64
        self.caches = [headfit.pack_kv(torch.randn(n, 512, device=device), 64) for n in slots]
        self.q = torch.randn(count, s_q, 128, 512, device=device).bfloat16()
        self.sink = torch.randn(128, device=device)
        self.sink[::5], self.sink[1::7] = -torch.inf, 30.0

    def tensors(self) -> list[Tensor]:
        return [self.q, self.sink, *self.lanes, *self.lengths, *self.caches]

    def call(self, heads: int, *, packed: bool = True, **options: object) -> tuple[Tensor, Tensor]:
        arguments = {
            "q": self.q[:, :, :heads], "k_cache": self.caches[0], "indices": self.lanes[0],
            "topk_length": self.lengths[0], "attn_sink": self.sink[:heads], "extra_k_cache": self.caches[1],
            "extra_indices_in_kvcache": self.lanes[1], "extra_topk_length": self.lengths[1],
        }  # fmt: skip
        with hopper.record_variants() as names:
            got = headfit.flash_mla_with_kvcache(**(arguments | options), backend="hopper")
        assert ("packed" in names) is packed
        return got


def first(pair: tuple[Tensor, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    return pair[0][:, :, :heads], pair[1][:, :heads]


@pytest.mark.parametrize(("rows", "s_q"), [(600, 1), (603, 3), (4096, 1)])
def test_bits_of_a_head_are_the_same_at_every_width(rows: int, s_q: int) -> None:
    x = Inputs(rows, s_q)
    want = x.call(128)
    for heads in WIDTHS:
        same(x.call(heads), first(want, heads), heads)
    x.q[:, :, 8:] = torch.nan
    same(first(x.call(128), 8), first(want, 8), "NaN beside")


@pytest.mark.parametrize("heads", [5, 16, 40])
@pytest.mark.parametrize("s_q", [1, 3])
def test_as_accurate_as_the_contract_says(heads: int, s_q: int) -> None:
    x = Inputs(603, s_q)
    out, lse = x.call(heads)
    some = torch.arange(0, 603 // s_q, 7)
    lists = [[y[some] for y in z] for z in (x.lanes, x.lengths)]
    rows = [headfit.unpack_kv(cache).flatten(0, -2) for cache in x.caches]
    want, _, want_lse = sparse_mla_reference(x.q[some, :, :heads], rows, *lists, 512**-0.5, x.sink[:heads])
    assert float((out[some].double().cpu() - want).norm() / want.norm()) <= OUT_BOUND
    assert float((lse[some].double().cpu() - want_lse).abs().max()) <= LSE_BOUND


def test_a_captured_graph_replays_with_other_lists() -> None:
    """Lists that pack in one replay do not in the next, and do again; nothing is left over in the workspace."""
    given = [Inputs(), Inputs()]
    given[1].lanes[0].copy_(given[1].lanes[0].flip(-1))
    wants = [x.call(16) for x in given]
    y = Inputs()
    y.call(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = y.call(16)
    for number in (0, 1, 0, 1, 1, 0):
        for mine, its in zip(y.tensors(), given[number].tensors(), strict=True):
            mine.copy_(its)
        graph.replay()
        same(got, wants[number], number)


def test_streams_do_not_disturb_each_other() -> None:
    inputs = [Inputs(rows) for rows in (512, 600, 1024, 4096)]
    want = [x.call(16) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                got = [inputs[i].call(16) for _ in range(30)]
                torch.cuda.current_stream().synchronize()
            wrong.extend(i for pair in got if not all(map(torch.equal, pair, want[i])))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("number", [0, 1])
def test_keys_that_are_not_finite_reach_their_rows_alone(number: int) -> None:
    x = Inputs()
    want = x.call(16)
    slots = torch.tensor([3, 200, 201, 477], device="cuda")
    write_rows(x.caches[number], slots, torch.full((4, 512), torch.nan, device="cuda"))
    out, _ = x.call(16)
    lanes = torch.arange(x.lanes[number].shape[-1], device="cuda") < x.lengths[number][:, None, None]
    hit = (torch.isin(x.lanes[number], slots.int()) & lanes).any(-1)[:, 0]
    assert 0 < int(hit.sum()) < len(hit)
    assert bool(out[hit].isnan().all())
    assert not bool(out[~hit].isnan().any())
    off = (out[~hit] - want[0][~hit]).float().norm() / want[0][~hit].float().norm()
    assert float(off) <= OUT_BOUND  # their groups went to the other kernel


def test_strided_queries_and_outputs() -> None:
    x = Inputs()
    want = x.call(12)
    q = x.q[:, :, :12].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.full((600, 2, 40, 520), 7.0, device="cuda", dtype=torch.bfloat16)
    out = wide[:, :1, 3:15, :512]
    same(x.call(12, q=q, out=out), want, "strided")
    out.fill_(7.0)
    assert bool((wide == 7.0).all())
    one = x.q[:1, :, :12]
    same(x.call(12, q=one.expand(600, -1, -1, -1)), x.call(12, q=one.repeat(600, 1, 1, 1)), "one query for all rows")


def test_weights_that_round_alike_leave_no_error() -> None:
    with hopper.record_variants() as names:
        weights_alike("hopper")
    assert "packed" in names


def test_an_output_over_its_queries_is_not_packed() -> None:
    x = Inputs()
    want = x.call(16, packed=False, enable_batch_invariant=True)
    q = torch.zeros(601, 1, 16, 512, device="cuda", dtype=torch.bfloat16)[1:]
    q.copy_(x.q[:, :, :16])
    same(x.call(16, packed=False, q=q, out=torch.from_dlpack(q)), want, "in place")
