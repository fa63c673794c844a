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
# A list of one or two tiles (a window alone) is not worth a merge once a few rows share the launch. One H200,
# CUDA-graph replay, 128 keys, one pass against two shares, us at 8 / 16 / 32 heads: 1 row 9.2 / 9.2 / 10.9 against
# 8.7 / 9.0 / 10.2, 16 rows 9.3 / 9.4 / 11.2 against 9.3 / 9.5 / 11.5, 64 rows 9.9 / 10.1 / 11.6 against
# 11.1 / 13.4 / 18.5.
ONE_PASS_TILES, ONE_PASS_ROWS = 2, 16
WORKSPACE_BYTES = 256 << 20  # partials held at once: above, the rows of a call go in slabs


@dataclass(frozen=True)
class Config:
    """Settings of one kernel variant.

    ``head_tile`` heads (columns) and ``block`` keys (rows) a tile; ``warps`` a program; a key row in pieces of ``wide``
    dims (of 64 where that does not divide them), ``ahead`` of which are on their way from memory at any time (packed
    caches; 0: ``at_once`` pieces at a time, then the next); ``stages`` of Triton's own software pipelining (1: none);
    ``programs_per_sm`` that registers and shared memory leave room for. Only ``block`` and what the architecture
    multiplies with can change a result's bits.
    """

    head_tile: int
    block: int
    warps: int
    ahead: int = 0
    at_once: int = 16
    wide: int = 64
    stages: int = 1
    programs_per_sm: int = 2


def _same(*configs: Config) -> Mapping[str, tuple[Config, ...]]:
    return MappingProxyType({f"{layout}-{d}": configs for layout, dims in LAYOUT_DIMS.items() for d in dims})


# Head tiles in ascending order: a call takes the smallest that holds its heads, else several of the largest.
#
# Hopper, measured on one H200 (torch 2.11, Triton 3.6, driver 580, 2026-11-29): 4096 rows x (128 + 512) keys, page 64,
# microseconds under CUDA-graph replay, 16 heads unless stated:
#   block 64, 4 warps, ahead 0 / 4 / 8: 677 / 722 / 687; 8 warps: 1200; stages 2 (cp.async, one program an SM): 1260;
#   pieces of 128 dims, ahead 0 / 5: 743 / 784. 32 heads, ahead 0 / 2 / 3 / 4 / 8: 844 / 836 / 812 / 810 / 878 (spilling
#   from 4 on). bf16 rows, 16 / 32 heads, all pieces at once: 676 / 776; with 32 heads that spills under Triton 3.9, so
#   they come 3 or 2 at a time, which was not measured. 64 heads as two tiles of 32: 1583; as one of 64, 8 warps: 1968.
# Split kernel at 64 rows, ahead 0 / 4 / 8: 23.3 / 21.7 / 21.2. A head tile of 8 would not run on warpgroups.
# The other architectures: compiled and inspected, not measured; tiles of 32 keys leave no spill and fit 99 KiB.
PREFILL: Mapping[int, Mapping[str, tuple[Config, ...]]] = MappingProxyType(
    {
        8: _same(Config(8, 32, 4), Config(16, 32, 4)),
        9: MappingProxyType(
            {
                "v4-512": (Config(16, 64, 4), Config(32, 64, 4, ahead=3)),
                "v32-576": (Config(16, 64, 4), Config(32, 64, 4, ahead=1)),
                "bf16-512": (Config(16, 64, 4), Config(32, 64, 4, at_once=3)),
                "bf16-576": (Config(16, 64, 4), Config(32, 64, 4, at_once=2)),
            }
        ),
        10: {**_same(Config(16, 64, 4), Config(32, 64, 4)), "bf16-512": (Config(32, 64, 4),)},
        12: {**_same(Config(8, 32, 4), Config(16, 32, 4)), "v32-576": (Config(16, 32, 4),)},
    }
)
SPLIT: Mapping[int, Mapping[str, tuple[Config, ...]]] = MappingProxyType(
    {
        **PREFILL,
        9: MappingProxyType(
            {
                "v4-512": (Config(16, 64, 4, ahead=8), Config(32, 64, 4, ahead=3)),
                "v32-576": (Config(16, 64, 4, ahead=8), Config(32, 64, 4, ahead=1)),
                "bf16-512": (Config(16, 64, 4), Config(32, 64, 4, at_once=3)),
                "bf16-576": (Config(16, 64, 4), Config(32, 64, 4, at_once=2)),
            }
        ),
    }
)


def why_illegal(config: Config, arch: Arch) -> str | None:
    """Why ``config`` cannot run on ``arch``, or None: the one rule that table, heuristic and tests share."""
    if config.head_tile not in (8, 16, 32, 64) or config.block not in (16, 32, 64, 128):
        return (
            f"head_tile {config.head_tile} and block {config.block}: accepted are powers of two, 8 to 64 and 16 to 128"
        )
    if config.warps not in (1, 2, 4, 8):
        return f"warps {config.warps}: accepted are 1, 2, 4 and 8"
    if arch.warpgroup_mma and (config.head_tile < 16 or config.block % 64 or config.warps % 4):
        return f"{arch.name} multiplies 64 keys by at least 16 heads with 4 warps"
    rows = config.block * 512 * 2 + config.head_tile * 512 * 2
    if rows > arch.shared_bytes:
        return f"a tile of keys and queries takes {rows} B of shared memory, {arch.name} has {arch.shared_bytes}"
    return None


def table(arch: Arch, layout: str, d_qk: int, *, split: bool) -> tuple[Config, ...]:
    """The settings for an architecture and a layout, by head tile. An unknown architecture gets the smallest ones."""
    majors = SPLIT if split else PREFILL
    return majors.get(arch.capability[0], majors[12])[f"{layout}-{d_qk}"]


def choose(h_q: int, arch: Arch, layout: str, d_qk: int, *, split: bool) -> Config:
    """The settings for ``h_q`` heads."""
    fits = table(arch, layout, d_qk, split=split)
    return next((c for c in fits if c.head_tile >= h_q), fits[-1])


def split_count(rows: int, tiles: int, config: Config, arch: Arch) -> int:
    """Programs that share one row: from shapes and the chip alone, and not from the heads (width exactness)."""
    if tiles <= ONE_PASS_TILES and rows >= ONE_PASS_ROWS:
        return 1
    room = config.programs_per_sm * arch.sms
    splits = max(1, min(tiles, room // max(rows, 1)))
    share = -(-tiles // splits) if tiles else 1
    return max(1, -(-tiles // share))
