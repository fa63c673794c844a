"""Bit comparison: what counts as equal, and that the first place where two runs part is the one named."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from headfit import verify
from headfit.verify import Difference, Stage, bits_equal, first_difference

ROWS, HEADS, DIM = 5, 4, 8


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0]), True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0])), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), False),
        (torch.zeros(2, 1), torch.zeros(1, 2), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(4, 8)[:, ::2], torch.zeros(4, 4), True),
        (torch.tensor([3]), torch.tensor([3]), True),
        (torch.tensor([True]), torch.tensor([False]), False),
    ],
)
def test_bits_equal(a, b, same):
    assert bits_equal(a, b) is same


def trace(seed: int = 0) -> list[Stage]:
    generator = torch.Generator().manual_seed(seed)
    stages = []
    for layer in range(2):
        stages.append(Stage(layer, verify.ATTENTION_OUT, torch.randn(ROWS, HEADS, DIM, generator=generator).bfloat16()))
        stages.append(Stage(layer, verify.LSE, torch.randn(ROWS, HEADS, generator=generator)))
        stages.append(Stage(layer, verify.LAYER_OUTPUT, torch.randn(ROWS, 2, DIM, generator=generator)))
    stages.append(Stage(None, verify.LOGITS, torch.randn(1, 10, generator=generator)))
    stages.append(Stage(None, verify.TOKEN, torch.tensor([3])))
    return stages


def compare(off: list[Stage], on: list[Stage]) -> Difference | None:
    return first_difference(off, on, step=7, position=100, rows=ROWS, rank=1, first_head=HEADS)


def test_equal_traces_have_no_difference():
    assert compare(trace(), trace()) is None


@pytest.mark.parametrize("seed", range(20))
def test_one_flipped_bit_anywhere_is_found_where_it_is(seed):
    print(f"seed {seed}")
    draw = random.Random(seed)
    off, on = trace(), trace()
    place = draw.randrange(len(on) - 1)
    bits = verify.as_bits(on[place].value)
    index = tuple(draw.randrange(n) for n in bits.shape)
    bits[index] ^= 1 << draw.randrange(8)
    found = compare(off, on)
    assert found is not None
    assert (found.layer, found.stage, found.step, found.rank, found.count) == (on[place].layer, on[place].name, 7, 1, 1)
    assert found.token == (100 + ROWS - 1 if on[place].layer is None else 100 + index[0])
    assert found.heads == ((HEADS + index[1],) if on[place].name in (verify.ATTENTION_OUT, verify.LSE) else ())
    assert found.sentence().startswith(f"token {found.token}, ")


def test_the_first_stage_and_the_first_row_are_named():
    off, on = trace(), trace()
    on[3].value[2, 0] += 1
    on[3].value[4] += 1
    on[1].value[3, 1:3] += 1  # an earlier stage, a later row
    found = compare(off, on)
    assert found is not None
    assert (found.layer, found.stage, found.token, found.heads, found.count) == (0, verify.LSE, 103, (5, 6), 2)
    assert found.largest == pytest.approx(1.0, abs=1e-5)
    assert "heads 5-6" in found.sentence()


def test_another_token_with_equal_logits_is_a_difference():
    off, on = trace(), trace()
    on[-1] = Stage(None, verify.TOKEN, torch.tensor([4]))
    found = compare(off, on)
    assert found is not None
    assert found.stage == verify.TOKEN


def test_not_a_number_on_one_side_is_a_difference():
    off, on = trace(), trace()
    on[0].value[0, 0, 0] = float("nan")
    found = compare(off, on)
    assert found is not None
    assert found.token == 100


def test_another_shape_is_a_difference():
    off, on = trace(), trace()
    on[0] = Stage(0, verify.ATTENTION_OUT, on[0].value[:, :2])
    found = compare(off, on)
    assert found is not None
    assert found.stage == verify.ATTENTION_OUT


def test_traces_of_different_programs_are_refused():
    with pytest.raises(ValueError, match="recorded different stages"):
        compare(trace(), trace()[1:])


def test_order_is_the_order_of_computation():
    base = Difference(3, 50, 1, verify.LSE, 0, (), 1, 1.0)
    later = [
        dataclasses.replace(base, rank=1),
        dataclasses.replace(base, stage=verify.LAYER_OUTPUT, token=2),
        dataclasses.replace(base, layer=2, stage=verify.ATTENTION_OUT),
        dataclasses.replace(base, layer=None, stage=verify.LOGITS),
        dataclasses.replace(base, layer=None, stage=verify.TOKEN),
        dataclasses.replace(base, step=4, layer=0, stage=verify.ATTENTION_OUT),
    ]
    everything = [base, *later]
    shuffled = everything[:]
    random.Random(0).shuffle(shuffled)
    assert sorted(shuffled, key=Difference.order) == everything
