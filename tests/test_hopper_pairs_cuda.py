"""The backend ``hopper_pairs`` on an SM90: lists of neighbouring rows that overlap, much or little.

What it shares with ``hopper_wide`` is in ``test_hopper_wide_cuda.py``, whose lists name keys twice, so that no keys are
put together there.
"""

from __future__ import annotations

import pytest
import torch
from exact import same
from test_hopper_wide_cuda import SCALE, WIDTHS, near
from torch import Tensor

import headfit
from headfit.cache import write_rows
from headfit.kernels import BackendUnavailable, hopper_pairs
from headfit.reference import sparse_mla_reference

WHY_NOT = hopper_pairs.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hopper_pairs: {WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]
WINDOW, CHOSEN = 128, 512


def draw(rows: int, slots: int, topk: int, share: float) -> Tensor:
    """Lists of ``topk`` slots, none twice; of every second row ``share`` is in the list before, in another order.

    ``slots`` has to be twice ``topk`` at least.
    """
    lists = torch.rand(rows, slots, device="cuda").argsort(1)
    kept = int(topk * share)
    for row in range(1, rows, 2):
        before = lists[row - 1, :topk]
        shared = before[torch.randperm(topk, device="cuda")[:kept]]
        others = lists[row][~torch.isin(lists[row], before)][: topk - kept]
        lists[row, :topk] = torch.cat([shared, others])[torch.randperm(topk, device="cuda")]
    return lists[:, :topk].int()


class Inputs:
    """A window, which grows where it begins, and chosen keys; ``slots`` of the cache that these are of."""

    def __init__(self, rows: int, share: float, *, slots: int = 2048, chosen: int = CHOSEN) -> None:
        lanes = torch.arange(rows, device="cuda")[:, None] - WINDOW + 1 + torch.arange(WINDOW, device="cuda")
        self.lanes = [torch.where(lanes < 0, -1, lanes).int(), draw(rows, slots, chosen, share)]
        self.caches = [headfit.pack_kv(torch.randn(n, 512, device="cuda"), 64) for n in (rows + 5, slots)]
        self.q = torch.randn(rows, 1, 128, 512, device="cuda").bfloat16()
        self.sink = torch.randn(128, device="cuda")

    def call(self, heads: int, **options: object) -> tuple[Tensor, Tensor]:
        q = self.q[:, :, :heads]
        arguments = {
            "q": q, "k_cache": self.caches[0], "indices": self.lanes[0][:, None], "extra_k_cache": self.caches[1],
            "extra_indices_in_kvcache": self.lanes[1][:, None], "attn_sink": self.sink[:heads],
            "out": torch.full(q.shape, torch.nan, dtype=torch.bfloat16, device="cuda"),
        }  # fmt: skip
        return headfit.flash_mla_with_kvcache(**({"backend": "hopper_pairs"} | arguments | options))

    def check(self, heads: int, rows: slice = slice(0, 40)) -> tuple[Tensor, Tensor]:
        got = self.call(heads)
        keys = [headfit.unpack_kv(cache) for cache in self.caches]
        lanes = [x[rows, None] for x in self.lanes]
        q = self.q[rows, :, :heads]
        out, _, lse = sparse_mla_reference(q, keys, lanes, [None, None], SCALE, self.sink[:heads])
        near(got[0][rows], got[1][rows], out, lse)
        return got


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("rows", [512, 777])
def test_neighbours_that_share_keys(rows: int, share: float) -> None:
    x = Inputs(rows, share)
    want = x.check(128)
    x.check(32, slice(rows - 9, rows))
    for heads in WIDTHS:
        same(x.call(heads), (want[0][:, :, :heads], want[1][:, :heads]), heads)
    for _ in range(3):
        torch.full((1 << 24,), torch.nan, device="cuda")  # other junk in freed memory
        same(x.call(128), want, "again")


def test_keys_of_several_ranges_meet() -> None:
    """More keys are listed than a bitmap of `hopper_pairs_merge` has bits: 512 rows list nearly all of 60,000 slots."""
    x = Inputs(512, 0.6, slots=60000)
    assert len(x.lanes[1].unique()) > 2 * 16384
    x.check(32)
    x.check(64, slice(480, 512))


@pytest.mark.parametrize("chosen", [1, 31, 33, 129, 1024, 1408])
def test_lists_of_any_length(chosen: int) -> None:
    Inputs(512, 0.5, slots=6000, chosen=chosen).check(32)


@pytest.mark.parametrize(
    ("rows", "lanes"), [((10,), (5, 9)), ((11,), (5, 9)), ((10, 11), (0, 511)), ((11,), (100, 101))]
)
def test_keys_named_twice_count_twice(rows: tuple[int, ...], lanes: tuple[int, int]) -> None:
    """By the first row of a pair, by the second, by both; the other rows' bits stay, but for those of the 8 beside."""
    x = Inputs(512, 0.8)
    before = x.call(32)
    for row in rows:
        x.lanes[1][row, lanes[0]] = x.lanes[1][10, lanes[1]]
        x.lanes[1][row, lanes[1]] = x.lanes[1][10, lanes[1]]
    got = x.check(32)
    kept = torch.ones(512, dtype=torch.bool, device="cuda")
    kept[8:16] = False
    same((got[0][kept], got[1][kept]), (before[0][kept], before[1][kept]), "other rows")
    same(x.call(17), (got[0][:, :, :17], got[1][:, :17]), "width")


def test_a_key_that_is_not_finite_reaches_the_row_that_lists_it_alone() -> None:
    """Of two rows that share most of their keys: the other one's result is as right as without."""
    x = Inputs(512, 0.8)
    before = x.call(32)
    mine = x.lanes[1][20][~torch.isin(x.lanes[1][20], x.lanes[1][21])]
    slot = int(mine[0])
    others = (x.lanes[1] == slot) & (torch.arange(512, device="cuda") != 20)[:, None]
    x.lanes[1][others] = -1
    without = x.call(32)
    write_rows(x.caches[1], torch.tensor([slot], device="cuda"), torch.full((1, 512), torch.nan, device="cuda"))
    got = x.call(32)
    assert got[0][20].isnan().all()
    kept = torch.ones(512, dtype=torch.bool, device="cuda")
    kept[16:24] = False
    same((got[0][kept], got[1][kept]), (without[0][kept], without[1][kept]), "other rows")
    for row in (16, 21, 23):
        near(got[0][row], got[1][row], without[0][row], without[1][row])
    assert torch.isfinite(before[0]).all()


def test_one_row_of_a_pair_without_keys() -> None:
    x = Inputs(512, 0.5)
    for lanes in x.lanes:
        lanes[20], lanes[31] = -1, 1 << 30
    out, lse = x.check(24)
    for row in (20, 31):
        assert not out[row].any()
        assert torch.isposinf(lse[row]).all()
    assert torch.isfinite(lse[[21, 30]]).all()


def test_refused_are_long_lists_and_outputs_over_queries() -> None:
    x = Inputs(512, 0.5)
    with pytest.raises(BackendUnavailable, match="takes 1536 lanes a row and fewer, got 1537"):
        Inputs(512, 0.5, slots=6000, chosen=1409).call(32)
    q = x.q[:, :, :32].contiguous()
    with pytest.raises(BackendUnavailable, match="takes no out that lies over q"):
        x.call(32, q=q, out=q)
