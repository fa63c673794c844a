"""The Triton backend on a GPU, beyond the conformance suite: compiled graphs, binaries, exactness at serving sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headfit
from headfit import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTHS = (1, 4, 8, 12, 16, 24, 32, 64, 128)
ROWS = (1, 64, 65, 4096)
SCALE = 512**-0.5


class Inputs:
    """128 + 512 lanes over two v4 caches, for up to 4096 rows of 128 heads."""

    def __init__(self, rows: int) -> None:
        self.q = torch.randn(rows, 1, 128, 512, device="cuda").bfloat16()
        self.window = headfit.pack_kv(torch.randn(1024, 512, device="cuda"), 64)
        self.chosen = headfit.pack_kv(torch.randn(2048, 512, device="cuda"), 64)
        self.lanes1 = torch.randint(-1, 1024, (rows, 1, 128), device="cuda", dtype=torch.int32)
        self.lanes2 = torch.randint(-1, 2048, (rows, 1, 512), device="cuda", dtype=torch.int32)
        self.sink = torch.randn(128, device="cuda")

    def call(self, heads: int, rows: int | None = None, **options: object) -> tuple[Tensor, Tensor]:
        some = slice(0, rows)
        return headfit.flash_mla_with_kvcache(
            self.q[some, :, :heads], self.window, indices=self.lanes1[some], attn_sink=self.sink[:heads],
            extra_k_cache=self.chosen, extra_indices_in_kvcache=self.lanes2[some], backend="triton", **options,
        )  # fmt: skip


@pytest.mark.parametrize("rows", ROWS)
def test_width_and_repeat_exact_at_serving_sizes(rows: int, seed: int) -> None:
    x = Inputs(rows)
    out, lse = x.call(128)
    for heads in WIDTHS:
        got, got_lse = x.call(heads)
        assert torch.equal(got, out[:, :, :heads]), heads
        assert torch.equal(got_lse, lse[:, :heads]), heads
    again = x.call(128)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


@pytest.mark.parametrize("heads", [8, 32])
def test_a_row_keeps_its_bits_whatever_rows_share_the_call(heads: int, seed: int) -> None:
    x = Inputs(4096)
    out, lse = x.call(heads, enable_batch_invariant=True)
    for rows in ROWS:
        got, got_lse = x.call(heads, rows, enable_batch_invariant=True)
        assert torch.equal(got, out[:rows]), rows
        assert torch.equal(got_lse, lse[:rows]), rows


def test_compiled_without_graph_breaks_it_equals_eager(seed: int) -> None:
    x = Inputs(65)
    rows = torch.randn(512, 1, 512, device="cuda").bfloat16()
    lanes = torch.randint(-1, 512, (65, 1, 200), device="cuda", dtype=torch.int32)

    def both(q: Tensor) -> tuple[Tensor, ...]:
        first = headfit.flash_mla_with_kvcache(
            q, x.window, indices=x.lanes1, attn_sink=x.sink[:16],
            extra_k_cache=x.chosen, extra_indices_in_kvcache=x.lanes2, backend="triton",
        )  # fmt: skip
        return *first, *headfit.flash_mla_sparse_fwd(q[:, 0], rows, lanes, SCALE, backend="triton")

    q = x.q[:, :, :16]
    compiled = torch.compile(both, fullgraph=True)
    for name, got, want in zip(("out", "lse", "out", "max_logits", "lse"), compiled(q), both(q), strict=True):
        assert torch.equal(got, want), name


def test_the_operator_passes_opcheck(seed: int) -> None:
    x = Inputs(3)
    out, lse = torch.empty(3, 1, 8, 512, device="cuda").bfloat16(), torch.empty(3, 8, 1, device="cuda")
    arguments = (x.q[:, :, :8], x.window, x.lanes1, None, x.chosen, x.lanes2, None, x.sink[:8], out, lse, None)
    torch.library.opcheck(ops.sparse_mla, (*arguments, SCALE, False, "decode", "triton"))
    assert not torch.isnan(out).any()


def test_lengths_and_sizes_make_no_new_binary(seed: int) -> None:
    from headfit.kernels.triton_decode import sparse_mla_split
    from headfit.kernels.triton_prefill import sparse_mla_prefill

    def binaries() -> int:
        return sum(len(c[0]) for f in (sparse_mla_split, sparse_mla_prefill) for c in f.device_caches.values())

    x = Inputs(4096)
    for rows in (1, 4096):
        x.call(8, rows)
    before = binaries()
    for i in range(20):
        lengths = torch.full((4096,), 7 * i, dtype=torch.int32, device="cuda")
        cache = headfit.pack_kv(torch.randn(64 * (i + 3), 512, device="cuda"), 64)
        lanes = torch.randint(-1, 64, (4096, 1, 31 * i + 1), device="cuda", dtype=torch.int32)
        for rows in (1 + i, 4096 - i):
            headfit.flash_mla_with_kvcache(
                x.q[:rows, :, :8], cache, indices=lanes[:rows], topk_length=lengths[:rows],
                extra_k_cache=x.chosen, extra_indices_in_kvcache=x.lanes2[:rows], backend="triton",
            )  # fmt: skip
    assert binaries() == before
