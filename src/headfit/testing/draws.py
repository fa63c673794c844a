"""Random calls: one generator for Hypothesis, for :func:`headfit.testing.run_conformance` and for benchmarks.

Whatever can say "an integer between" and "one of these" can drive it (:class:`Draw`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headfit.testing.calls import CallSpec
from headfit.testing.pages import CacheSpec, Route

T = TypeVar("T")


class Draw(Protocol):
    """A source of choices."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def choice(self, options: Sequence[T]) -> T:
        """One of ``options``."""


@dataclass
class RandomDraw:
    """Choices from a seeded :class:`random.Random`."""

    random: random.Random

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return self.random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return self.random.choice(options)


@dataclass(frozen=True)
class Limits:
    """How large a drawn call may be; ``topk`` is for one row and cache, ``lanes`` for all rows and caches."""

    heads: int = 128
    topk: int = 700
    batch: int = 4
    s_q: int = 3
    page_size: int = 576
    lanes: int = 12 * 1400  # rows x lanes a row


FULL = Limits()
# The Triton interpreter needs 0.1 to 0.3 s for every block of keys of every tile of heads of every row.
SMALL = Limits(heads=20, topk=40, batch=2, s_q=2, page_size=70, lanes=60)


def draw_spec(draw: Draw, route: Route, limits: Limits = FULL) -> CallSpec:
    """One legal call of ``route``, edges drawn as often as middles."""
    heads = draw.choice((draw.integer(1, limits.heads), draw.integer(1, min(limits.heads, 17))))
    batch, s_q = draw.integer(1, limits.batch), draw.integer(1, limits.s_q)
    rows = batch * s_q
    caches = tuple(_draw_cache(draw, route, limits, rows * route.caches) for _ in range(route.caches))
    padded = draw.choice((False, True))
    offset = draw.choice((0, 0, 1, 3)) if padded else 0
    spare = draw.integer(0, 5) if padded else 0
    return CallSpec(
        route=route,
        batch=batch,
        s_q=s_q,
        heads=heads,
        caches=caches,
        q_heads=offset + heads + spare,
        out_heads=offset + heads + spare,
        head_offset=offset,
        pitch=draw.choice((0, 0, 8, 3)),
        out=draw.choice((False, True)),
        interleaved=route.caches == 2 and draw.choice((False, True)),
        lengths=draw.choice(("none", "random", "edges")),
        invalid=draw.choice((0.0, 0.2, 0.9, 1.0)),
        sink=draw.choice(("none", "normal", "edges")),
        data=draw.choice(("normal", "normal", "large_q", "wide_scales")),
        trap_slot_0=draw.choice((True, True, False)),
        index_pitch=draw.choice((0, 0, 1, 8)),
        fp8_view=draw.choice((False, True)),
        batch_invariant=draw.choice((False, True)),
        seed=draw.integer(0, 2**31 - 1),
    )


def _draw_cache(draw: Draw, route: Route, limits: Limits, share: int) -> CacheSpec:
    most = max(1, min(limits.topk, limits.lanes // share))
    topk = draw.choice((draw.integer(0, most), draw.choice((0, 1, min(64, most), min(65, most), most))))
    page_size = draw.choice((draw.integer(1, limits.page_size), draw.choice((1, 2, 3, 64))))
    if route.entry == "sparse":
        page_size = 1
    fewest = 2 if page_size == 1 else 1  # two slots: one may be listed, one may not
    pages = draw.integer(fewest, max(fewest, min(60 if page_size > 1 else 900, 1 + 2 * (topk + 8) // page_size)))
    gap = draw.choice((0, 0, 16, 576, 1024)) if route.packed else draw.choice((0, 0, 8, 512))
    return CacheSpec(topk, page_size, pages, gap, 0 if route.packed else draw.choice((0, 0, 8, 64)))
