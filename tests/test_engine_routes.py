"""What the shipped table makes of an engine's calls."""

from __future__ import annotations

import pytest

from headfit.engines import routes
from headfit.kernels import REGISTRY, crossover
from headfit.kernels.crossover import Point, Shape

GPU = "NVIDIA H200"
OWN = tuple(name for name in REGISTRY if name not in ("flashmla", "flashinfer", "cpu"))
KEYS = ((128, 0), (128, 256), (128, 512), (128, 1024))
ROWS = (*range(257, 9000, 97), 12000, 16000)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_a_prefill_is_judged_by_two_times_of_one_size(heads: int) -> None:
    """Each verdict's times stand in the table for one and the same number of rows."""
    points = routes.points_of(GPU)
    v4 = {(p.shape.rows, p.shape.heads, p.shape.lanes): dict(p.times) for p in points if p.shape.layout == "v4"}
    bf16 = {(p.shape.rows, p.shape.heads, p.shape.lanes): dict(p.times) for p in points if p.shape.layout == "bf16"}
    for topk, extra in KEYS:
        for rows in ROWS:
            found = routes.verdict(points, OWN, "prefill", rows, heads, topk, extra)
            assert found is not None
            same = [
                size
                for size, times in v4.items()
                if times.get(found.backend) == found.ours and bf16.get(size, {}).get("flashmla") == found.engine
            ]
            assert same, (topk, extra, rows)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_prefill_of_many_rows_pays(heads: int) -> None:
    """As README's table says for 4096 rows; from 363 rows on, whose nearest measurement is 512."""
    points = routes.points_of(GPU)
    for topk, extra in KEYS:
        for rows in range(363, 16384, 97):
            found = routes.verdict(points, OWN, "prefill", rows, heads, topk, extra)
            assert found is not None
            assert found.pays, (topk, extra, rows, found)


def test_points_of_many_rows_know_all_hopper_backends() -> None:
    """A backend that a point does not know is tried behind all that it knows."""
    family = {"hopper", "hopper_wide", "hopper_pairs"}
    points = [p for p in routes.points_of(GPU) if p.shape.layout == "v4" and p.shape.rows >= 512]
    assert {p.shape.rows for p in points} >= {512, 1024, 2048, 4096, 8192}
    for p in points:
        assert family <= {name for name, _ in p.times}, p.shape


def test_a_v4_point_without_a_gathered_one_says_nothing_of_a_prefill() -> None:
    point = Point(Shape("v4", 2, 2048, 8, 640), (("hopper", 1.0), ("flashmla", 2.0)))
    assert routes.verdict((point,), OWN, "prefill", 2048, 8, 128, 512) is None
    assert routes.verdict((point,), OWN, "decode", 2048, 8, 128, 512) == routes.Verdict("hopper", 1.0, 2.0)
    twin = Point(Shape("bf16", 1, 1024, 8, 640), (("flashmla", 0.5),))
    assert routes.verdict((point, twin), OWN, "prefill", 2048, 8, 128, 512) is None


def test_the_table_is_that_of_the_crossover() -> None:
    assert routes.points_of(GPU) == crossover.load()[GPU]
    assert routes.points_of(None) == ()
