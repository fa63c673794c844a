"""How results are compared: bit equality, and the one place where every tolerance of the contract stands.

No other file of the suite holds a numeric tolerance. Failures are :class:`ConformanceFailure` and name the first
element that is off, so that a backend's author can act without a debugger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

# CONTRACT, Exactness 4: against the float64 oracle on the dequantised rows, for N(0,1) data.
REL_L2 = 4e-3  # of a head's 512 outputs
ULPS = 2  # bf16 units in the last place of the head's largest output
LSE_ABS = 1e-4  # natural-log units; also max_logits
# A bf16 probability and a bf16 result round to 2**-8 relative each: together a bound for any correct kernel's elements.
ELEMENT_REL = 2.0**-7
# Where the output is divided by the sum of the rounded probabilities, that sum is off by as much again. Relative to the
# output itself, which is smaller where keys cancel.
ROUNDED_SUM_REL = 2.0**-8
# float32 accumulation of 512 or 576 products, relative to the sum of their absolute values (truncating tensor cores).
DOT_REL = 16 * 2.0**-24
# Weights may be f16: what a key adds is then off by 2**-25 of the largest weight, and some hundred keys add up.
# Relative to the largest output of 64 dims, which share a scale (the contract allows 2**-7 of the head's largest).
WEIGHT_FLOOR = 2.0**-15
SCALED_DIMS = 64
# Outputs below the smallest normal bf16 may be flushed to zero.
TINY = 2.0**-126
# Packing error against the original rows: e4m3 keeps 3 mantissa bits (2**-4 at worst, about 2.6 % rms), once in the
# logits and once in the values.
PACKED_REL_L2 = 0.08

_BIT_VIEW = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}


class ConformanceFailure(AssertionError):
    """A backend broke a sentence of the contract; the message says where and by how much."""


def fail(message: str) -> NoReturn:
    """Raise :class:`ConformanceFailure`."""
    raise ConformanceFailure(message)


def require(condition: bool, message: str) -> None:
    """Fail with ``message`` unless ``condition`` holds."""
    if not condition:
        fail(message)


@dataclass(frozen=True)
class Truth:
    """Float64 results for some rows of a call, and what float32 arithmetic may add to them.

    ``out`` ``[n, h, 512]``, ``lse`` and ``max_logits`` ``[n, h]``; ``spread`` ``[n, h, 512]`` is the sum of
    probability times absolute value (the scale of rounding errors in ``out``); ``logit_error`` ``[n, h]`` bounds the
    error of a float32 logit.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor
    spread: Tensor
    logit_error: Tensor


def bits(t: Tensor) -> Tensor:
    """``t`` as integers of its width: equality then also holds for NaN and tells -0 from 0."""
    return t.contiguous().view(_BIT_VIEW[t.dtype]) if t.dtype in _BIT_VIEW else t


def require_same_bits(got: Tensor, wanted: Tensor, what: str) -> None:
    """Fail unless both tensors hold the same bits."""
    require(got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)} is not {tuple(wanted.shape)}")
    if torch.equal(bits(got), bits(wanted)):
        return
    where = (bits(got) != bits(wanted)).nonzero()
    first = tuple(where[0].tolist())
    fail(
        f"{what}: {len(where)} of {got.numel()} elements differ in their bits; "
        f"first at {first}: {got[first].item()!r} is not {wanted[first].item()!r}"
    )


def require_equal(got: Tensor, value: float, what: str) -> None:
    """Fail unless every element of ``got`` equals ``value`` (an infinity included)."""
    if bool((got == value).all()):
        return
    where = (got != value).nonzero()
    first = tuple(where[0].tolist())
    fail(f"{what}: expected {value} everywhere, {len(where)} elements differ; first at {first}: {got[first].item()!r}")


def require_close_scalar(got: Tensor, wanted: Tensor, what: str, allowance: Tensor | float = 0.0) -> None:
    """lse or max_logits within ``LSE_ABS`` plus an allowance; infinities must match exactly."""
    got64, wanted64 = got.double(), wanted.double()
    infinite = wanted64.isinf()
    error = torch.where(infinite | (got64 == wanted64), 0.0, (got64 - wanted64).abs())
    bad = torch.where(infinite, got64 != wanted64, ~(error <= LSE_ABS + allowance))
    if not bool(bad.any()):
        return
    first = tuple(bad.nonzero()[0].tolist())
    fail(
        f"{what}: {int(bad.sum())} of {bad.numel()} values are off; first at {first}: got {got64[first].item()}, "
        f"wanted {wanted64[first].item()}, allowed {LSE_ABS} natural-log units"
    )


def require_accurate(
    out: Tensor, lse: Tensor, max_logits: Tensor | None, truth: Truth, *, normal: bool, rounded_sum: bool = False
) -> None:
    """Hold a result against the oracle.

    Args:
        out: bfloat16 ``[n, h, 512]``.
        lse: float32 ``[n, h]``.
        max_logits: float32 ``[n, h]`` or None.
        truth: the oracle's answer for the same rows.
        normal: whether the data is N(0,1), for which the contract gives numbers; otherwise an elementwise bound holds
            that follows from bf16 probabilities, bf16 results and float32 sums.
        rounded_sum: whether the backend says that it divides by the sum of the rounded probabilities.
    """
    worst = float(truth.logit_error.max()) if truth.logit_error.numel() else 0.0
    if worst > 0.5:
        raise ValueError(f"the case is ill-conditioned: float32 logits may be off by {worst}; draw other data")
    allowance = 0.0 if normal else truth.logit_error
    require_close_scalar(lse, truth.lse, "lse [row, head]", allowance)
    if max_logits is not None:
        require_close_scalar(max_logits, truth.max_logits, "max_logits [row, head]", allowance)
    if normal:
        _require_contract_numbers(out.double(), truth.out)
    _require_elementwise(out.double(), truth, ROUNDED_SUM_REL if rounded_sum else 0.0)


def _require_contract_numbers(out: Tensor, wanted: Tensor) -> None:
    error = out - wanted
    norm = wanted.norm(dim=-1)
    relative = torch.where(norm > 0, error.norm(dim=-1) / norm.clamp_min(1e-300), error.norm(dim=-1))
    bad = ~(relative <= REL_L2)
    if bool(bad.any()):
        row, head = bad.nonzero()[0].tolist()
        fail(f"out: relative L2 error {float(relative[row, head]):.3g} at row {row}, head {head}; allowed {REL_L2}")
    largest = wanted.abs().amax(dim=-1)
    ulp = torch.exp2(torch.floor(torch.log2(largest.clamp_min(TINY))) - 7)
    bad = ~(error.abs().amax(dim=-1) <= ULPS * ulp)
    if bool(bad.any()):
        row, head = bad.nonzero()[0].tolist()
        worst = float(error.abs().amax(dim=-1)[row, head] / ulp[row, head])
        fail(f"out: error of {worst:.3g} bf16 ulp of the largest value at row {row}, head {head}; allowed {ULPS}")


def _require_elementwise(out: Tensor, truth: Truth, sum_rel: float) -> None:
    allowed = (ELEMENT_REL + 2 * truth.logit_error[..., None]) * truth.spread + sum_rel * truth.out.abs() + TINY
    largest = truth.out.abs().unflatten(-1, (-1, SCALED_DIMS)).amax(dim=-1)
    allowed = allowed + WEIGHT_FLOOR * largest.repeat_interleave(SCALED_DIMS, dim=-1)
    bad = ~((out - truth.out).abs() <= allowed)
    if bool(bad.any()):
        first = tuple(bad.nonzero()[0].tolist())
        fail(
            f"out: {int(bad.sum())} of {bad.numel()} elements are off; first at (row, head, dim) {first}: "
            f"got {float(out[first])}, wanted {float(truth.out[first])}, allowed error {float(allowed[first]):.3g}"
        )


def require_within_packing_error(out: Tensor, wanted: Tensor) -> None:
    """``out`` from packed rows against float64 results on the original rows: bounded by the format's own error."""
    relative = float((out.double() - wanted).norm() / wanted.norm())
    require(
        relative <= PACKED_REL_L2, f"out is {relative:.3g} off the original rows; the format allows {PACKED_REL_L2}"
    )
    require(relative > 0, "out equals the result on the original rows exactly: nothing was packed")
