"""What the GPU tests of several backends ask of results."""

from __future__ import annotations

import torch
from torch import Tensor

import headfit
from headfit.reference import sparse_mla_reference


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: object) -> None:
    """Out and lse are equal, bit for bit."""
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert torch.equal(a, b), f"{what}: {name}"


def weights_alike(backend: str, device: str = "cuda") -> None:
    """Heads whose large weights are all equal are as good as their rounding to bf16, however that weight rounds.

    A row's first 64 keys are 0 and raise no maximum again; 64 equal ones behind have weights of e^2 to e^5, of another
    value for each head. Where out is a sum of rounded weights over a sum of others, the worst head is off by 4e-3.
    """
    keys = torch.zeros(128, 512, device=device)
    keys[64:] = torch.randn(512, device=device)
    cache = headfit.pack_kv(keys, 64)
    key = headfit.unpack_kv(cache)[64].double()
    logits = torch.linspace(2, 5, 64, device=device, dtype=torch.float64)
    q = (logits[:, None] * key * 512**0.5 / key.square().sum()).bfloat16().expand(512, 1, -1, -1)
    lists = torch.arange(128, device=device, dtype=torch.int32).expand(512, 1, -1).contiguous()
    sink = torch.full((64,), 4.0, device=device)
    out, lse = headfit.flash_mla_with_kvcache(q, cache, indices=lists, attn_sink=sink, backend=backend)
    want, _, want_lse = sparse_mla_reference(q[:8], [headfit.unpack_kv(cache)], [lists[:8]], [None], 512**-0.5, sink)
    out, want = out[:8].double(), want.to(device)
    assert float(((out - want).norm(dim=-1) / want.norm(dim=-1)).max()) <= 2.6e-3
    torch.testing.assert_close(lse[:8].double(), want_lse.double().to(device), rtol=0, atol=1e-4)
