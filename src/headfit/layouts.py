"""Tensor or data parallel attention: what each way to split a model over some GPUs wastes. Pure arithmetic.

Belongs here: `Layout`, its figures, the choice of the least wasteful. Does not belong here: widths (they come in).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headfit.geometry import Geometry

ROWS: Final = 4096  # a full prefill chunk: attention is arithmetic-bound there, and padding is arithmetic
KV_BYTES: Final = 584  # a row of the v4 layout
ASSUMPTION: Final = (
    f"assumed: arithmetic counts in prefill ({ROWS} rows a call), requests enough for every DP rank, a TP rank "
    "holds the whole latent cache of its sequences (one KV head), FP8 weights; windows and index keys not counted"
)


@dataclass(frozen=True)
class Layout:
    """Attention TP ``tp`` within each of ``dp`` groups.

    ``wasted_today``, ``wasted``: share of prefill attention that is padding, with the stacks of today (the worst of
    those shown) and with headfit; None: it cannot run. ``kv_copies``: GPUs that hold each sequence's latent cache.
    ``kv_bytes``: bytes of cache for a token, all GPUs together. ``weight_bytes``: attention weights on a GPU.
    """

    tp: int
    dp: int
    heads_owned: int
    wasted_today: float | None
    wasted: float | None
    kv_copies: int
    kv_bytes: int
    weight_bytes: int

    @property
    def name(self) -> str:
        """As it is written: ``TP2 x DP4``."""
        return f"TP{self.tp} x DP{self.dp}"


def layouts(
    geometry: Geometry, gpus: int, today: Callable[[int], float | None], ours: Callable[[int], float | None]
) -> tuple[Layout, ...]:
    """Every split of ``gpus`` into TP x DP that the model allows; ``today``, ``ours``: the waste at a TP size."""
    row = sum(KV_BYTES / ratio for ratio in geometry.compress_ratios if ratio)
    return tuple(
        Layout(
            tp,
            gpus // tp,
            geometry.n_heads // tp,
            today(tp),
            ours(tp),
            tp,
            round(tp * row),
            weight_bytes(geometry, tp),
        )
        for tp in geometry.worlds()
        if gpus % tp == 0
    )


def weight_bytes(geometry: Geometry, tp: int) -> int:
    """Bytes of FP8 attention projections on a GPU: those of the heads are split by TP, those of the latent row not."""
    g = geometry
    whole = g.hidden_size * (g.q_lora_rank + g.head_dim)
    heads = g.n_heads * g.head_dim * (g.q_lora_rank + g.o_lora_rank)
    out = g.o_groups * g.o_lora_rank * g.hidden_size
    return len(g.layer_kinds) * (whole + heads // tp + out // min(tp, g.o_groups))


def least(options: Sequence[Layout], ours: bool) -> Layout | None:
    """The layout that wastes least arithmetic, then holds fewest copies of the cache; None where none can run."""

    def waste(layout: Layout) -> float | None:
        return layout.wasted if ours else layout.wasted_today

    runs = [(w, layout.kv_copies, layout) for layout in options if (w := waste(layout)) is not None]
    return min(runs, key=lambda run: run[:2])[2] if runs else None


def advice(options: Sequence[Layout], kernel: str) -> tuple[str, ...]:
    """One sentence for the stacks of today, one with headfit on ``kernel``."""
    said = []
    for who, ours in (("today", False), (f"with headfit on {kernel}", True)):
        best, most = least(options, ours), options[-1]
        if best is None:
            said.append(f"{who}: no layout of these runs")
            continue
        waste = best.wasted if ours else best.wasted_today
        text = f"{who}: {best.name} wastes least ({waste:.0%} of prefill attention, {_copies(best)})"
        worst = most.wasted if ours else most.wasted_today
        if most is not best and worst is not None:
            text += f"; {most.name} wastes {worst:.0%} and holds {_copies(most)}"
        said.append(text)
    return tuple(said)


def _copies(layout: Layout) -> str:
    return "1 copy of the cache" if layout.kv_copies == 1 else f"{layout.kv_copies} copies of the cache"
