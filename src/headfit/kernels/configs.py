"""Launch settings of the Triton kernels: one table, with where each figure comes from; nothing is tuned at run time.

Belongs here: settings, their one legality predicate, and the choice among them from shapes. Does not belong here:
launches, device queries, ``triton`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headfit.arch import Arch

LAYOUT_DIMS: Mapping[str, tuple[int, ...]] = MappingProxyType({"v4": (512,), "v32": (576,), "bf16": (512, 576)})
INVARIANT_KEYS = 256  # keys of a share under batch_invariant, whatever the call: five times 128 + 512 keys in 3 shares
WORKSPACE_BYTES = 256 << 20  # partials held at once: above, the rows of a call go in slabs


@dataclass(frozen=True)
class Config:
    """Settings of one kernel variant.

    ``head_tile`` heads (columns) and ``block`` keys (rows) a tile; ``warps`` a program; ``stages`` of Triton's own
    software pipelining (1: none); ``programs_per_sm`` that registers and shared memory leave room for.
    """

    head_tile: int
    block: int
    warps: int
    stages: int = 1
    programs_per_sm: int = 2


# Head tiles in ascending order: a call takes the smallest that holds its heads, else as many of the largest as it needs.
HOPPER = (Config(16, 64, 4), Config(32, 64, 4))
AMPERE = (Config(8, 32, 4), Config(16, 32, 4), Config(32, 32, 4))
BLACKWELL = (Config(16, 64, 4), Config(32, 64, 4))
CONSUMER = (Config(8, 32, 4), Config(16, 32, 4), Config(32, 32, 4))

TABLE: Mapping[int, tuple[Config, ...]] = MappingProxyType({8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: CONSUMER})


def why_illegal(config: Config, arch: Arch) -> str | None:
    """Why ``config`` cannot run on ``arch``, or None: the one rule that table, heuristic and tests share."""
    if config.head_tile not in (8, 16, 32, 64) or config.block not in (16, 32, 64, 128):
        return (
            f"head_tile {config.head_tile} and block {config.block}: accepted are 8 to 64 and 16 to 128, powers of two"
        )
    if config.warps not in (1, 2, 4, 8):
        return f"warps {config.warps}: accepted are 1, 2, 4 and 8"
    if arch.warpgroup_mma and (config.head_tile < 16 or config.block % 64 or config.warps % 4):
        return f"{arch.name} multiplies 64 keys by at least 16 heads with 4 warps"
    rows = config.block * 512 * 2 + config.head_tile * 512 * 2
    if rows > arch.shared_bytes:
        return f"a tile of keys and queries takes {rows} B of shared memory, {arch.name} has {arch.shared_bytes}"
    return None


def choose(h_q: int, arch: Arch) -> Config:
    """The settings for ``h_q`` heads."""
    table = TABLE[arch.capability[0]] if arch.capability[0] in TABLE else TABLE[12]
    return next((c for c in table if c.head_tile >= h_q), table[-1])


def split_count(rows: int, tiles: int, config: Config, arch: Arch) -> int:
    """Programs that share one row: from shapes and the chip alone, and not from the heads (width exactness)."""
    room = config.programs_per_sm * arch.sms
    splits = max(1, min(tiles, room // max(rows, 1)))
    share = -(-tiles // splits) if tiles else 1
    return max(1, -(-tiles // share))
