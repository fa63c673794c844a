"""The suite's fast oracle against the definition in `headfit.reference`, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headfit.reference import D_V, sparse_mla_reference
from headfit.testing import FULL, ROUTES, RandomDraw, Setup, build, draw_spec, oracle
from headfit.testing.compare import DOT_REL
from headfit.testing.oracle import batched_truth


def by_rows(
    q: Tensor, keys: list[Tensor], lanes: list[Tensor], lengths: list[Tensor | None], scale: float, sink: Tensor | None
) -> dict[str, Tensor]:
    """The definition, and spread and logit error as loops over rows."""
    out, top, lse = sparse_mla_reference(q[:, None], keys, [x[:, None] for x in lanes], lengths, scale, sink)
    spread = torch.zeros(*q.shape[:2], D_V, dtype=torch.float64)
    error = torch.zeros(q.shape[:2], dtype=torch.float64)
    for r in range(q.shape[0]):
        chosen = []
        for k, index, length in zip(keys, lanes, lengths, strict=True):
            row = index[r] if length is None else index[r, : max(int(length[r]), 0)]
            chosen.append(k[row[(row >= 0) & (row < k.shape[0])].long()])
        rows = torch.cat(chosen).double()
        if rows.shape[0]:
            logits = q[r].double() @ rows.T * scale
            spread[r] = logits.softmax(-1) @ rows[:, :D_V].abs()
            error[r] = DOT_REL * abs(scale) * (q[r].double().abs() @ rows.abs().T).amax(-1)
    return {"out": out[:, 0], "lse": lse[..., 0], "max_logits": top[..., 0], "spread": spread, "logit_error": error}


def require_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    """Equal within float64 rounding: ``logit_error`` is a float32 logit's, 2**29 times a float64 one's."""
    logit = want["logit_error"].nan_to_num() * 2.0**-29
    largest = want["spread"].nan_to_num().amax(-1)
    allowed = {
        "out": (largest * (1e-12 + 2 * logit))[..., None],
        "spread": (largest * (1e-12 + 2 * logit))[..., None],
        "lse": 1e-12 + logit,
        "max_logits": 1e-12 + logit,
        "logit_error": 1e-12,
    }
    for name, value in want.items():
        assert got[name].dtype == torch.float64
        off = (got[name] - value).abs() > 1e-12 * value.abs() + allowed[name]
        same = (got[name] == value) | (got[name].isnan() & value.isnan())
        assert not bool((off & ~same).any()), f"{what}: {name}"
        assert bool((same | value.isfinite()).all()), f"{what}: {name} where the definition is not finite"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_drawn_calls_agree_with_the_definition(route, device, monkeypatch):
    """Small chunks, so that calls span several. The definition computes on the CPU, whatever the device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setitem(oracle._CHUNK, device, 2**18)
    seed = int(torch.randint(2**31, ()))
    draw = RandomDraw(Setup("cpu", torch.device("cpu"), "full", seed).random("oracle"))
    for _ in range(12):
        spec = draw_spec(draw, route, FULL)
        call = build(spec)
        keys = [cache.rows(torch.arange(cache.slots)) for cache in call.caches]
        lanes, lengths = zip(*(call.row_lanes(cache) for cache in call.caches), strict=True)
        arguments = (call.q_rows(), keys, list(lanes), list(lengths), call.sm_scale, call.sink)
        want = by_rows(*arguments)
        what = f"seed {seed}: {call.spec}"
        require_equal(vars(batched_truth(*arguments)), want, what)
        truth = vars(build(spec, device).truth())
        assert all(t.device.type == device for t in truth.values())
        require_equal({name: t.cpu() for name, t in truth.items()}, want, what)


def test_the_same_at_any_chunk(monkeypatch):
    q, rows = torch.randn(9, 3, 512), torch.randn(40, 512)
    lanes = torch.randint(-2, 42, (9, 30))
    whole = batched_truth(q, [rows], [lanes], [None], 0.1)
    monkeypatch.setitem(oracle._CHUNK, "cpu", 1)
    require_equal(vars(batched_truth(q, [rows], [lanes], [None], 0.1)), vars(whole), "a row at a time")


def test_nothing_to_attend_to():
    """No lanes, no slots, lengths of 0 or less, and a sink of +inf."""
    q, sink = torch.randn(2, 3, 576), torch.tensor([math.inf, -math.inf, 1.0])
    none, rows = torch.empty(2, 0, dtype=torch.int32), torch.randn(5, 576)
    some = torch.zeros(2, 4, dtype=torch.int32)
    for keys, lanes, lengths in (
        ([rows], [none], [None]),
        ([rows[:0]], [some], [None]),
        ([rows], [some], [torch.tensor([0, -7])]),
        ([rows, rows[:0]], [none, some], [None, None]),
    ):
        got = batched_truth(q, keys, lanes, lengths, 1.0, sink)
        assert bool((got.out == 0).all())
        assert bool((got.lse == math.inf).all())
        assert bool((got.max_logits == -math.inf).all())
        assert not got.spread.any()
        assert not got.logit_error.any()


def test_a_nan_stays_with_the_rows_that_list_it():
    q, rows = torch.randn(2, 1, 512), torch.randn(3, 512)
    rows[2] = math.nan
    lanes = torch.tensor([[0, 1, -1], [0, 2, 1]])
    got = batched_truth(q, [rows], [lanes], [None], 0.1)
    want = by_rows(q, [rows], [lanes], [None], 0.1, None)
    require_equal(vars(got), want, "NaN")
    assert got.out[1].isnan().all()


def test_magnitudes_that_float32_does_not_hold():
    """Logits of 1e15 and their neighbours: the largest is subtracted before exp."""
    q = torch.zeros(1, 1, 512, dtype=torch.float64)
    rows = torch.zeros(2, 512, dtype=torch.float64)
    q[..., 0], rows[0, 0], rows[1, 0] = 1e15, 1.0, 1.0 + 2**-49
    lanes = torch.tensor([[0, 1]])
    want = by_rows(q, [rows], [lanes], [None], 1.0, None)
    require_equal(vars(batched_truth(q, [rows], [lanes], [None], 1.0)), want, "large logits")
