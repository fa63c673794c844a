"""What the GPU tests of several backends ask of two results."""

from __future__ import annotations

import torch
from torch import Tensor


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: object) -> None:
    """Out and lse are equal, bit for bit."""
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert torch.equal(a, b), f"{what}: {name}"
