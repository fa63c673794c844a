"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A fresh seed for torch, shown when the test fails."""
    value = int(torch.seed() % 2**31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


@pytest.fixture
def cuda_seed(seed: int) -> Iterator[int]:
    """The same; and an error of a kernel is its own test's."""
    yield seed
    torch.cuda.synchronize()
