"""Our GPU kernels against FlashMLA's best legal launch, shape by shape, with the floor of each beside it.

    python benchmarks/kernels.py --library PATH/_flashmla_C.abi3.so [--json OUT.json] [--rows 1,64] [--heads 8,16]
                                 [--backend hopper,triton]

For every key set, row count and head count: headfit straight from packed `v4` pages; FlashMLA (the library that vLLM
ships) by each route it has for that many heads, native or padded to 64 or 128, prefill on bf16 rows that somebody else
gathered before, decode on packed pages; the fastest counts. Results are checked before they are timed: ours against
the float64 oracle on three rows, FlashMLA's against ours. All candidates of a shape alternate, each as a captured CUDA
graph of several calls over different rows' lists, so host time is not counted; L2 is as the calls leave it (hot).
FlashMLA's scheduler metadata is made once, outside. Figures are medians in microseconds. Several backends of headfit
are timed beside the same launches of FlashMLA; bf16 rows only where a backend takes them.

A key set is "128" (a window), "128 + 512" (and as many chosen keys, drawn for each row), "128 + 256 dense" (and all
keys there are), "128 + 512 overlap 60" (60 % of the chosen keys are those of the row before) or "128 + 512 recorded"
(what an indexer chose: `--lists`, made by `benchmarks/patterns.py record`).

`--json` writes what `benchmarks/crossover.py` and `benchmarks/model_time.py` read, anew after each row count: a run
that is ended early leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import patterns
import torch
from torch import Tensor

import headfit
from headfit.cache import unpack_kv
from headfit.kernels import BackendUnavailable
from headfit.reference import sparse_mla_reference

D = 512
SCALE = D**-0.5
PAGE = 64
# One H200, measured: a gather kernel's best rate from L2, a device copy, a large bf16 product (docs/kernels/triton.md).
L2_BYTES_S, HBM_BYTES_S, TENSOR_FLOP_S = 5.9e12, 4.3e12, 790e12
ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
HEADS = (8, 16, 32, 64, 128)
SLOTS = 8192  # compressed rows that chosen keys are drawn from: 32k tokens, 4 a row
KEY_SETS = ("128", "128 + 512", "128 + 1024", "128 + 256 dense")
KEY_SET = re.compile(r"(?P<window>\d+)(?: \+ (?P<extra>\d+)(?: (?P<kind>dense|recorded|overlap (?P<share>\d+)))?)?")
DECODE_WIDTHS = (64, 128)
ROUTES = ("prefill", "decode")  # of FlashMLA
Call = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """Inputs of one key set at one row count, shared by all head counts and both libraries."""

    q: Tensor  # bf16 [rows, 128, 512]; narrower calls read their own copy
    sink: Tensor
    caches: tuple[Tensor, ...]  # packed pages
    lanes: tuple[Tensor, ...]  # int32 [rows, topk] into each
    rows_bf16: Tensor  # the same keys as one list of bf16 rows
    lanes_bf16: Tensor

    @property
    def keys(self) -> int:
        """Keys a row."""
        return self.lanes_bf16.shape[1]


@dataclass(frozen=True)
class KeySet:
    """What a key set's name says: keys of the window, further keys, and how those are chosen."""

    window: int
    extra: int = 0
    kind: str = ""  # "", "dense", "recorded" or "overlap"
    share: int = 0  # per cent of a row's further keys that the row before has too

    @property
    def slots(self) -> int:
        """Rows of the cache of further keys."""
        return self.extra if self.kind == "dense" else max(SLOTS, self.extra) if self.extra else 0


def key_set(name: str) -> KeySet:
    """The key set of that name.

    Raises:
        ValueError: the name is of no known form.
    """
    found = KEY_SET.fullmatch(name)
    if found is None or int(found["share"] or 0) > 100:
        raise ValueError(f"keys: got {name!r}, accepted are {', '.join(KEY_SETS)}, '... overlap 60', '... recorded'")
    kind = (found["kind"] or "").split()[:1]
    return KeySet(int(found["window"]), int(found["extra"] or 0), kind[0] if kind else "", int(found["share"] or 0))


def further_lanes(keys: KeySet, rows: int, lists: np.ndarray | None) -> np.ndarray | None:
    """Lists of the further keys that are no draw of this file, int32 ``[rows, extra]``; None where they are.

    ``lists`` are recorded ones: the last rows of them, from the start again where more are wanted.

    Raises:
        ValueError: recorded lists are asked for and not given, or of another width, or beyond the cache.
    """
    if keys.kind == "dense":
        return patterns.dense(rows, keys.extra)
    if keys.kind == "overlap":
        return patterns.chosen(rows, keys.extra, keys.slots, keys.share / 100, seed=rows)
    if keys.kind != "recorded":
        return None
    if lists is None or lists.shape[1] != keys.extra or lists.max() >= keys.slots:
        got = "none" if lists is None else f"lists of {lists.shape[1]} keys up to slot {lists.max()}"
        raise ValueError(f"lists: got {got}, accepted are lists of {keys.extra} keys below slot {keys.slots}")
    return np.resize(lists[-rows:], (rows, keys.extra))


def problem(name: str, rows: int, lists: np.ndarray | None = None) -> Problem:
    """Window keys are those before each row; chosen keys are drawn without repeats unless the name says otherwise."""
    keys = key_set(name)
    draw = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda").bfloat16()

    caches = [headfit.pack_kv(normal(rows + keys.window, D), PAGE)]
    lanes = [torch.from_numpy(patterns.window(rows, keys.window)).cuda()]
    if keys.extra:
        caches.append(headfit.pack_kv(normal(keys.slots, D), PAGE))
        given = further_lanes(keys, rows, lists)
        if given is None:
            drawn = torch.rand(rows, keys.slots, generator=draw, device="cuda").topk(keys.extra, dim=1).indices
            lanes.append(drawn.to(torch.int32))
        else:
            lanes.append(torch.from_numpy(given).cuda())
    rows_bf16 = torch.cat([unpack_kv(c) for c in caches])
    start = caches[0].shape[0] * PAGE
    moved = [lanes[0], *(torch.where(x < 0, x, x + start) for x in lanes[1:])]
    sink = torch.randn(128, generator=draw, device="cuda")
    return Problem(normal(rows, 128, D), sink, tuple(caches), tuple(lanes), rows_bf16, torch.cat(moved, 1))


def ours(p: Problem, heads: int, backend: str) -> tuple[Tensor, Call]:
    """The output buffer and the call: packed pages in, out written in place."""
    q, sink = p.q[:, None, :heads].contiguous(), p.sink[:heads].contiguous()
    out = torch.full_like(q, torch.nan)
    extra: dict[str, Any] = {}
    if len(p.caches) == 2:
        extra = {"extra_k_cache": p.caches[1], "extra_indices_in_kvcache": p.lanes[1][:, None]}
    return out[:, 0], lambda: headfit.flash_mla_with_kvcache(
        q, p.caches[0], indices=p.lanes[0][:, None], attn_sink=sink, out=out, backend=backend, **extra
    )


def ours_bf16(p: Problem, heads: int, backend: str) -> Call:
    """The same keys as plain rows."""
    q, sink = p.q[:, :heads].contiguous(), p.sink[:heads].contiguous()
    out = torch.empty_like(q)
    rows, lanes = p.rows_bf16[:, None], p.lanes_bf16[:, None]
    return lambda: headfit.flash_mla_sparse_fwd(q, rows, lanes, SCALE, attn_sink=sink, out=out, backend=backend)


def flashmla_prefill(p: Problem, width: int) -> Call:
    """FlashMLA's kernel for bf16 rows; the gather that makes them is not in it."""
    q, sink = p.q[:, :width].contiguous(), p.sink[:width].contiguous()
    rows, lanes = p.rows_bf16[:, None], p.lanes_bf16[:, None].contiguous()
    fwd = torch.ops._flashmla_C.sparse_prefill_fwd
    return lambda: fwd(q, rows, lanes, SCALE, D, sink, None, None)[0]


def flashmla_decode(p: Problem, width: int) -> Call:
    """FlashMLA's kernel for packed pages, its plan made once."""
    q, sink = p.q[:, None, :width].contiguous(), p.sink[:width].contiguous()
    lanes = [x[:, None].contiguous() for x in p.lanes]
    cache2, lanes2 = (p.caches[1], lanes[1]) if len(lanes) == 2 else (None, None)
    fwd = torch.ops._flashmla_C.sparse_decode_fwd
    tail = (cache2, lanes2, None, D, SCALE, None, False)
    _, _, plan, splits = fwd(q, p.caches[0], lanes[0], None, sink, None, None, *tail)
    return lambda: fwd(q, p.caches[0], lanes[0], None, sink, plan, splits, *tail)[0][:, 0]


def oracle(p: Problem) -> tuple[list[int], Tensor]:
    """Three rows of the problem, and their float64 results ``[3, 128, 512]``."""
    some = sorted({0, p.q.shape[0] // 2, p.q.shape[0] - 1})
    rows = [unpack_kv(c).cpu() for c in p.caches]
    lanes = [x[some][:, None].cpu() for x in p.lanes]
    q = p.q[some][:, None].cpu()
    want, _, _ = sparse_mla_reference(q, rows, lanes, [None] * len(rows), SCALE, p.sink.cpu())
    return some, want[:, 0]


def graph(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` calls in one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(calls):
            call()
    return captured


def times(candidates: dict[str, Call], calls: int) -> dict[str, float]:
    """Median microseconds a call; the candidates alternate, about 40 ms for each."""
    graphs = {name: graph(call, calls) for name, call in candidates.items()}
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(24):
        for name, captured in graphs.items():
            if round_ > 6 and sum(taken[name]) * calls > 40e3:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            captured.replay()
            end.record()
            end.synchronize()
            taken[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first replay warms up


def calls_of(rows: int) -> int:
    """Calls of a graph: more than a few, since its start and end, some 10 us, count as theirs."""
    return max(4, min(10, 2048 // rows))


def floors(p: Problem, heads: int) -> dict[str, float]:
    """Microseconds that no kernel can beat: keys through L2, distinct bytes through HBM, the products."""
    rows = p.q.shape[0]
    distinct = rows * heads * D * 2 * 2 + sum(x.numel() * 4 for x in p.lanes)
    distinct += sum(min(c.shape[0] * PAGE, x.numel()) * 584 for c, x in zip(p.caches, p.lanes, strict=True))
    return {
        "L2": rows * p.keys * 584 / L2_BYTES_S * 1e6,
        "HBM": distinct / HBM_BYTES_S * 1e6,
        "tensor": 4 * D * p.keys * rows * heads / TENSOR_FLOP_S * 1e6,
    }


def takes(call: Call) -> bool:
    """Whether the backend takes the call; it is made."""
    try:
        call()
    except BackendUnavailable as error:
        if error.refused:
            return False
        raise
    return True


def our_candidates(
    p: Problem, name: str, heads_list: list[int], backends: list[str]
) -> tuple[dict[str, Call], dict[tuple[str, int], float]]:
    """Every backend at every number of heads that it takes, held against the oracle, and its error."""
    candidates: dict[str, Call] = {}
    errors = {}
    some, truth = oracle(p)
    for backend in backends:
        for heads in heads_list:
            out, call = ours(p, heads, backend)
            if not takes(call):
                continue
            want = truth[:, :heads]
            error = errors[backend, heads] = float((out[some].double().cpu() - want).norm() / want.norm())
            if not error <= 4e-3:
                raise RuntimeError(
                    f"{backend}: {name}, {len(p.q)} rows, {heads} heads: relative error {error:.1e}; nothing timed"
                )
            candidates[f"{backend} {heads}"] = call
            plain = ours_bf16(p, heads, backend)
            if takes(plain):
                candidates[f"{backend} bf16 {heads}"] = plain
    return candidates, errors


def measure(
    name: str, rows: int, heads_list: list[int], backends: list[str], peer: bool, lists: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """All backends and head counts of one key set and row count: checked, then timed in turn."""
    p = problem(name, rows, lists)
    candidates, errors = our_candidates(p, name, heads_list, backends)
    for width in HEADS if peer else ():
        for route, make in (("prefill", flashmla_prefill), ("decode", flashmla_decode)):
            if route == "decode" and width not in DECODE_WIDTHS:
                continue
            call = make(p, width)
            shared = max((h for _, h in errors if h <= width), default=0)
            if shared:
                backend = next(b for b in backends if (b, shared) in errors)
                mine, theirs = ours(p, shared, backend), call()[:, :shared].float()
                mine[1]()
                off = float((mine[0].float() - theirs).norm() / theirs.norm())
                if not off <= 1e-2:
                    raise RuntimeError(
                        f"FlashMLA {route} {width} differs by {off:.1e} from ours at {name}, {rows} rows"
                    )
            candidates[f"{route} {width}"] = call
    took = times(candidates, calls_of(rows))
    return [row(name, p, backend, heads, took, error) for (backend, heads), error in errors.items()]


def row(name: str, p: Problem, backend: str, heads: int, took: dict[str, float], error: float) -> dict[str, Any]:
    """One line of the table."""
    rows = p.q.shape[0]
    routes = {n: n.split() for n in took}
    legal = {n: took[n] for n, (route, *width) in routes.items() if route in ROUTES and int(width[0]) >= heads}
    best = min(legal, key=lambda n: legal[n]) if legal else None
    floor = floors(p, heads)
    limit = max(floor, key=lambda n: floor[n])
    return {
        "backend": backend,
        "keys": name,
        "lanes": [x.shape[1] for x in p.lanes],
        "rows": rows,
        "heads": heads,
        "us": took[f"{backend} {heads}"],
        "us_bf16_rows": took.get(f"{backend} bf16 {heads}"),
        "flashmla": legal,
        "best_route": best,
        "best_us": legal[best] if best else None,
        "error": error,
        "key_bytes": rows * p.keys * 584,
        "flop": 4 * D * p.keys * rows * heads,
        "floor_us": floor,
        "limit": limit,
    }


def crossover_records(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What benchmarks/crossover.py reads: packed pages against FlashMLA's decode, bf16 rows against its prefill.

    The table knows no likeness of rows: key sets that have a given one are left out.
    """
    records = []
    for line in lines:
        if key_set(line["keys"]).kind in ("overlap", "recorded"):
            continue
        width = 64 if line["heads"] <= 64 else 128
        for layout, lanes, mine, route in (
            ("v4", line["lanes"], line["us"], f"decode {width}"),
            ("bf16", [sum(line["lanes"])], line["us_bf16_rows"], f"prefill {width}"),
        ):
            for name, us in ((line["backend"], mine), ("flashmla", line["flashmla"].get(route))):
                if us is not None:
                    shape = {"layout": layout, "lanes": lanes, "rows": line["rows"], "heads": line["heads"]}
                    records.append({"backend": name, **shape, "us": round(us, 2)})
    # two key sets of one total are one point for bf16 rows: the first measured stands
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for r in records:
        seen.setdefault((r["backend"], r["layout"], tuple(r["lanes"]), r["rows"], r["heads"]), r)
    return list(seen.values())


def show(lines: list[dict[str, Any]]) -> None:
    """The table."""
    names = (
        "backend",
        "keys",
        "rows",
        "h",
        "headfit us",
        "FlashMLA us",
        " by",
        "ratio",
        "MB",
        "GFLOP",
        "floor us",
        " of",
        "x floor",
    )
    head = "{:<12}{:<24}{:>5}{:>4}{:>11}{:>12}{:<12}{:>6}{:>8}{:>8}{:>9}{:<7}{:>8}".format(*names)
    print(head)
    for x in lines:
        floor = x["floor_us"][x["limit"]]
        peer = (
            f"{x['best_us']:>12.1f} {x['best_route']:<11}{x['best_us'] / x['us']:>6.2f}"
            if x["best_us"]
            else f"{'-':>12} {'-':<11}{'-':>6}"
        )
        print(
            f"{x['backend']:<12}{x['keys']:<24}{x['rows']:>5}{x['heads']:>4}{x['us']:>11.1f}{peer}"
            f"{x['key_bytes'] / 1e6:>8.1f}{x['flop'] / 1e9:>8.1f}{floor:>9.1f} {x['limit']:<6}{x['us'] / floor:>8.1f}"
        )


def environment() -> dict[str, Any]:
    """What the figures hold for."""
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    return {
        "gpu": torch.cuda.get_device_name(),
        "command": " ".join(["python", "benchmarks/kernels.py", *(a.rpartition("/")[2] for a in sys.argv[1:])]),
        "commit": commit,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver[0] if driver else "",
        "l2": "hot",
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="vLLM's _flashmla_C library; without it only headfit is timed")
    parser.add_argument("--backend", default="triton", help="names with commas; the first is held against FlashMLA")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--heads", default=",".join(map(str, HEADS)))
    parser.add_argument("--keys", default=";".join(KEY_SETS), help="; between names")
    parser.add_argument("--lists", type=Path, help="recorded lists, for key sets that end in 'recorded'")
    parser.add_argument("--layer", help="whose lists to take (default: the first)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark times GPU kernels", file=sys.stderr)
        return 2
    if options.library:
        torch.ops.load_library(str(options.library.resolve()))
    heads = [int(h) for h in options.heads.split(",")]
    lists = patterns.load(options.lists, options.layer) if options.lists else None
    backends = options.backend.split(",")
    where = environment()
    lines: list[dict[str, Any]] = []
    for name in options.keys.split(";"):
        for rows in (int(r) for r in options.rows.split(",")):
            lines += measure(name, rows, heads, backends, bool(options.library), lists)
            torch.cuda.empty_cache()
            if options.json:
                content = {**where, "records": crossover_records(lines), "lines": lines}
                options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
