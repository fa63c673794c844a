"""Pages of a batch: slot arithmetic, growth that moves nothing, and the ring over a window."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from headfit.cache import gather_rows
from headfit.pages import PagedRows, WindowRows


def rows(batch: int, n: int, seed: int = 0) -> Tensor:
    """Rows that FP8 pages hold exactly: small integers over 16."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, (batch, n, 512), generator=draw) / 16


def read(pages: PagedRows, first: int, n: int) -> Tensor:
    sequence = torch.arange(pages.batch)[:, None]
    slots = pages.slots_of(sequence, torch.arange(first, first + n)[None])
    return gather_rows(pages.data, slots.reshape(-1)).view(pages.batch, n, 512).float()


@pytest.mark.parametrize(("batch", "page_size", "layout"), list(itertools.product([1, 3], [1, 4, 64], ["v4", "bf16"])))
def test_growth_moves_no_row(batch: int, page_size: int, layout: str) -> None:
    pages = PagedRows(batch, layout=layout, page_size=page_size)
    want = rows(batch, 70)
    seen: set[int] = set()
    for start, stop in itertools.pairwise([0, 1, 2, 9, 40, 70]):
        before = pages.slots(torch.arange(batch)[:, None], torch.arange(start)[None]).tolist()
        pages.reserve(stop)
        assert pages.capacity >= stop
        pages.write(start, want[:, start:stop])
        assert pages.slots(torch.arange(batch)[:, None], torch.arange(start)[None]).tolist() == before
        assert torch.equal(read(pages, 0, stop), want[:, :stop])
        seen.add(pages.capacity)
    slots = pages.slots(torch.arange(batch)[:, None], torch.arange(70)[None])
    assert slots.unique().numel() == batch * 70
    assert int(slots.max()) < pages.data.shape[0] * page_size
    assert not pages.reserve(70)


@pytest.mark.parametrize("layout", ["v4", "bf16"])
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_the_ring_holds_the_window(layout: str, page_size: int) -> None:
    batch, window = 2, 7
    ring = WindowRows(batch, layout=layout, page_size=page_size)
    want = rows(batch, 60)
    for start, stop in itertools.pairwise([0, 2, 3, 14, *range(15, 40), 60]):
        kept = want[:, max(0, start - window + 1) : start] if start else None
        ring.extend(start, want[:, start:stop], kept)
        oldest = max(0, start - window + 1)
        assert torch.equal(read(ring, oldest, stop - oldest), want[:, oldest:stop])
    assert ring.capacity < window + 20 + page_size
    ring.refill(60, want[:, 50:54])
    assert torch.equal(read(ring, 56, 4), want[:, 50:54])


def test_pages_cross_inference_mode() -> None:
    with torch.inference_mode():
        pages = PagedRows(1, page_size=4)
        pages.reserve(4)
        pages.write(0, rows(1, 2))
    pages.write(2, rows(1, 2, seed=1))
    assert torch.equal(read(pages, 2, 2), rows(1, 2, seed=1))


def test_bad_pages() -> None:
    with pytest.raises(ValueError, match="cache_layout: got 'v32', accepted are 'v4' and 'bf16'"):
        PagedRows(1, layout="v32")
    with pytest.raises(ValueError, match="page_size: got 0"):
        PagedRows(1, page_size=0)
    with pytest.raises(ValueError, match="exceed the 2147483647 slots"):
        PagedRows(2, page_size=64).reserve(2**30 + 64)
    assert PagedRows(1).capacity == 0
    PagedRows(1).write(0, torch.empty(1, 0, 512))
