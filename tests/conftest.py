"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def cuda_seed() -> Iterator[int]:
    """A fresh seed, shown when the test fails; an error of a kernel is its own test's."""
    value = int(torch.randint(2**31, ()))
    print(f"seed {value}")
    torch.manual_seed(value)
    yield value
    torch.cuda.synchronize()
