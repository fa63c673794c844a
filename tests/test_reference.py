"""The oracle against softmax worked out by hand and against dense attention in float64."""

import math

import pytest
import torch

from headfit.cache import pack_kv, unpack_kv
from headfit.reference import sparse_mla_reference

LN2 = math.log(2.0)


def lanes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(1, 1, -1)


def two_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """A query and keys 0, 1 whose logits are 0 and ln 2, so the weights are 1/3 and 2/3; key 2 is NaN."""
    q = torch.zeros(1, 1, 1, 512)
    q[..., 0] = 1.0
    rows = torch.zeros(3, 512)
    rows[1, 0] = LN2
    rows[0, 5], rows[1, 5] = 3.0, 6.0
    rows[2] = math.nan
    return q.double(), rows.double()


def test_by_hand():
    q, rows = two_keys()
    out, top, lse = sparse_mla_reference(q, [rows], [lanes(0, 1)], [None], 1.0)
    assert out[0, 0, 0, 5].item() == pytest.approx(5.0)
    assert top.item() == pytest.approx(LN2)
    assert lse.item() == pytest.approx(math.log(3.0))


def test_duplicates_count_as_often_as_they_stand():
    q, rows = two_keys()
    out, _, lse = sparse_mla_reference(q, [rows], [lanes(0, 1, 0, 0)], [None], 1.0)
    assert lse.item() == pytest.approx(math.log(5.0))
    assert out[0, 0, 0, 5].item() == pytest.approx((3 * 3.0 + 2 * 6.0) / 5)


def test_invalid_lanes_and_lanes_past_the_length_add_nothing():
    q, rows = two_keys()
    expected = sparse_mla_reference(q, [rows], [lanes(0, 1)], [None], 1.0)
    index = lanes(-1, 0, 3, 2**31 - 1, -(2**31), 1, 2, 2)
    got = sparse_mla_reference(q, [rows], [index], [torch.tensor([6])], 1.0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for length, lse in [(-5, math.inf), (0, math.inf), (1, 0.0), (99, math.log(3.0))]:
        got = sparse_mla_reference(q, [rows], [lanes(0, 1)], [torch.tensor([length])], 1.0)
        assert got[2].item() == pytest.approx(lse)


@pytest.mark.parametrize(("sink", "factor"), [(-math.inf, 1.0), (math.inf, 0.0), (math.log(3.0), 0.5), (1e4, 0.0)])
def test_sink(sink, factor):
    q, rows = two_keys()
    out, top, lse = sparse_mla_reference(q, [rows], [lanes(0, 1)], [None], 1.0, torch.tensor([sink]))
    assert out[0, 0, 0, 5].item() == pytest.approx(5.0 * factor)
    assert lse.item() == pytest.approx(math.log(3.0)), "the sink is not in lse"
    assert top.item() == pytest.approx(LN2)
    for empty in (lanes(), lanes(-1, 7)):
        out, top, lse = sparse_mla_reference(q, [rows], [empty], [None], 1.0, torch.tensor([sink]))
        assert out.eq(0).all()
        assert top.item() == -math.inf
        assert lse.item() == math.inf


def test_a_listed_nan_reaches_the_output():
    q, rows = two_keys()
    out, _, _ = sparse_mla_reference(q, [rows], [lanes(0, 2)], [None], 1.0)
    assert out.isnan().all()


@pytest.mark.parametrize("d_qk", [512, 576])
def test_equals_dense_attention_when_every_key_is_listed(d_qk, seed):
    q = torch.randn(2, 3, 5, d_qk)
    rows = torch.randn(40, d_qk)
    order = torch.stack([torch.randperm(40) for _ in range(6)]).view(2, 3, 40).int()
    out, top, lse = sparse_mla_reference(q, [rows], [order], [None], 0.05)
    logits = torch.einsum("bshd,kd->bshk", q.double(), rows.double()) * 0.05
    assert torch.allclose(out, logits.softmax(-1) @ rows[:, :512].double(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(top, logits.amax(-1).transpose(1, 2), rtol=1e-12)
    assert torch.allclose(lse, logits.logsumexp(-1).transpose(1, 2), rtol=1e-12)


def test_two_sets_are_one_softmax(seed):
    q = torch.randn(2, 2, 3, 512)
    near, far = torch.randn(10, 512), torch.randn(20, 512)
    a = torch.randint(-1, 11, (2, 2, 6)).int()
    b = torch.randint(-1, 21, (2, 2, 9)).int()
    joined = torch.cat([torch.where(a < 10, a, -1), torch.where((b >= 0) & (b < 20), b + 10, -1)], -1)
    got = sparse_mla_reference(q, [near, far], [a, b], [None, torch.tensor([9, 9])], 0.1)
    expected = sparse_mla_reference(q, [torch.cat([near, far])], [joined], [None], 0.1)
    assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(got, expected, strict=True))


def test_reads_what_unpack_returns(seed):
    rows = unpack_kv(pack_kv(torch.randn(8, 512), 3))
    out, _, _ = sparse_mla_reference(torch.zeros(1, 1, 2, 512), [rows], [lanes(4)], [None], 1.0)
    assert torch.equal(out[0, 0, 1], rows[4].double())
