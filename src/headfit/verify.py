"""Bit comparison: are two runs of the same step the same, and if not, where do they part first.

Belongs here: comparing tensors and traces bit by bit. Must not: tolerances (a surviving head is equal or it is not),
models, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ATTENTION_OUT = "attention out"
LSE = "lse"
LAYER_OUTPUT = "layer output"
LOGITS = "logits"
TOKEN = "token"
STAGES = (ATTENTION_OUT, LSE, LAYER_OUTPUT, LOGITS, TOKEN)  # the order in which a step produces them

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Stage:
    """One tensor of a step. `layer` is None for logits and token; `value` has one row per token in dimension 0."""

    layer: int | None
    name: str
    value: torch.Tensor


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part.

    `token` is the position in the sequence (prompt included), `step` the forward call, `heads` the differing heads of
    that row on that rank (global numbers; empty where the stage has no heads), `count` the differing elements of the
    stage, `largest` the largest absolute difference among the finite ones.
    """

    step: int
    token: int
    layer: int | None
    stage: str
    rank: int
    heads: tuple[int, ...]
    count: int
    largest: float

    def order(self) -> tuple[int, int, int, int, int]:
        """Sort key: what a forward pass computes first comes first; ranks break ties."""
        layer = self.layer if self.layer is not None else 1 << 30
        return (self.step, layer, STAGES.index(self.stage), self.token, self.rank)

    def sentence(self) -> str:
        """For a person."""
        where = "" if self.layer is None else f"layer {self.layer}, "
        heads = f", heads {_spans(self.heads)}" if self.heads else ""
        size = f"{self.count} elements differ, by up to {self.largest:.3g}"
        return f"token {self.token}, {where}{self.stage} on rank {self.rank}{heads}: {size}"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [...] of any dtype as integers of the same size: NaN equals the same NaN, and -0.0 is not 0.0."""
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(as_bits(a), as_bits(b))


def first_difference(
    off: Sequence[Stage],
    on: Sequence[Stage],
    *,
    step: int,
    position: int,
    rows: int,
    rank: int = 0,
    first_head: int = 0,
) -> Difference | None:
    """The first stage of `off` and `on` (same order) that differs in a bit, or None.

    `position` is the sequence position of row 0 of this step and `rows` its tokens (logits and token belong to the
    last one), `first_head` the global number of this rank's head 0. Raises ValueError when the two traces do not list
    the same stages: then the runs did not execute the same program.
    """
    names = [[(stage.layer, stage.name) for stage in trace] for trace in (off, on)]
    if names[0] != names[1]:
        raise ValueError(
            f"step {step}: the two runs recorded different stages ({len(off)} and {len(on)}); "
            "both must run the same layers"
        )
    for left, right in zip(off, on, strict=True):
        if not bits_equal(left.value, right.value):
            row0 = position + rows - 1 if left.layer is None else position
            return _describe(left, right, step, row0, rank, first_head)
    return None


def _describe(left: Stage, right: Stage, step: int, position: int, rank: int, first_head: int) -> Difference:
    a, b = left.value, right.value
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(step, position, left.layer, left.name, rank, (), max(a.numel(), b.numel()), float("inf"))
    differs = (as_bits(a) != as_bits(b)).reshape(a.shape[0], -1)
    row = int(differs.any(dim=1).nonzero()[0, 0])
    heads: tuple[int, ...] = ()
    if left.name in (ATTENTION_OUT, LSE):
        per_head = differs[row].reshape(a.shape[1], -1).any(dim=1)
        heads = tuple(first_head + int(h) for h in per_head.nonzero()[:, 0])
    gap = (a.double() - b.double()).abs()
    finite = gap[torch.isfinite(gap)]
    largest = float(finite.max()) if finite.numel() else float("nan")
    return Difference(step, position + row, left.layer, left.name, rank, heads, int(differs.sum()), largest)


def _spans(numbers: Sequence[int]) -> str:
    """`0-3, 7` for (0, 1, 2, 3, 7)."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
