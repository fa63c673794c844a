"""Key lists of a call, made or recorded, and what they say about neighbouring rows.

    python benchmarks/patterns.py record [--tokens 32768] [--rows 4096] [--lists .cache/patterns.npz]
    python benchmarks/patterns.py stats [--lists .cache/patterns.npz]

Belongs here: which keys each row of a benchmark reads. Does not belong here: tensors on a device, timing.

How much a kernel gains from keys that rows share depends on how alike the lists of neighbouring rows are. Made lists
(:func:`window`, :func:`dense`, :func:`chosen`) have a given likeness; recorded ones are what the lightning indexer of a
DeepSeek-V4 forward in Transformers chose. The recorded model has V4-Flash's attention and indexer geometry on a small
body with random weights (`headfit.demo_model`): its lists come from the real code on real text, but no training made
neighbouring tokens ask alike. Two equal bytes in a row share most of their keys, others hardly more than chance; a
trained model's lists may be far more alike.

`record` writes the lists of the last rows (int16, as the indexer ordered them) to an ignored file and
`benchmarks/results/patterns.json`: the statistics of recorded and made lists.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / ".cache" / "patterns.npz"
STATISTICS = ROOT / "benchmarks" / "results" / "patterns.json"
RATIO = 4  # tokens a compressed row of a chosen layer stands for
OVERLAPS = (0, 30, 60, 90)  # per cent
NONE = -1


def window(rows: int, width: int) -> np.ndarray:
    """Sliding window: row r of the chunk lists slots r to r + width - 1 of a cache of rows + width; int32."""
    return np.arange(rows, dtype=np.int32)[:, None] + np.arange(width, dtype=np.int32)


def dense(rows: int, keys: int) -> np.ndarray:
    """A heavily compressed layer late in a long context: every row lists every key, in order; int32."""
    return np.broadcast_to(np.arange(keys, dtype=np.int32), (rows, keys)).copy()


def visible(rows: int, slots: int, ratio: int = RATIO) -> np.ndarray:
    """Compressed rows that each of the last ``rows`` tokens of a context of ``slots * ratio`` may choose from."""
    return np.maximum(slots - (rows - 1 - np.arange(rows)) // ratio, 0)


def chosen(rows: int, topk: int, slots: int, overlap: float, seed: int, ratio: int = RATIO) -> np.ndarray:
    """Lists of which each row shares a given part with the row before it.

    Args:
        rows: the last tokens of the context, a chunk of prefill.
        topk: keys a row.
        slots: compressed rows at the end of the context; a row chooses among those complete at its position.
        overlap: share of the previous row's keys that a row keeps, 0 to 1. The others are drawn anew, without repeats,
            from those that the previous row did not have, so the share is exact; where fewer than that are left, more
            are kept.
        seed: of everything drawn.
        ratio: tokens a compressed row stands for.

    Returns:
        int32 ``[rows, topk]`` in no order, as an indexer's top-k leaves them; -1 behind the keys of a row that sees
        fewer than topk.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"overlap: got {overlap}, accepted is a share from 0 to 1")
    draw = np.random.default_rng(seed)
    lists = np.full((rows, topk), NONE, dtype=np.int32)
    had = np.zeros(0, dtype=np.int32)
    for r, count in enumerate(visible(rows, slots, ratio)):
        take = min(topk, int(count))
        other = np.setdiff1d(np.arange(count, dtype=np.int32), had, assume_unique=True)
        keep = 0 if r == 0 else min(len(had), max(round(overlap * len(had)), take - len(other)))
        kept = draw.choice(had, min(keep, take), replace=False)
        had = np.concatenate([kept, draw.choice(other, take - len(kept), replace=False)])
        lists[r, :take] = draw.permutation(had)
    return lists


def membership(lists: np.ndarray, slots: int | None = None) -> np.ndarray:
    """Bool ``[rows, slots]``: which keys each row lists."""
    slots = int(lists.max(initial=0)) + 1 if slots is None else slots
    found = np.zeros((lists.shape[0], slots + 1), dtype=bool)
    np.put_along_axis(found, np.where(lists < 0, slots, lists).astype(np.int64), True, axis=1)
    return found[:, :slots]


def neighbour_overlap(lists: np.ndarray) -> np.ndarray:
    """For each row but the first: the share of its keys that the row before lists too; NaN for a row without keys."""
    member = membership(lists)
    with np.errstate(invalid="ignore"):
        return (member[1:] & member[:-1]).sum(1) / member[1:].sum(1)


def union_share(lists: np.ndarray, group: int = 8) -> np.ndarray:
    """For each full group of rows: distinct keys over keys; 1 where no two rows share any, 1 / group where all are."""
    member = membership(lists)
    member = member[: len(member) // group * group].reshape(-1, group, member.shape[1])
    return member.any(1).sum(1) / member.sum((1, 2))


def statistics(lists: np.ndarray) -> dict[str, Any]:
    """What `benchmarks/results/patterns.json` says of one set of lists."""

    def spread(values: np.ndarray) -> dict[str, float]:
        found = {"mean": values.mean()}
        found |= {f"p{p}": np.percentile(values, p) for p in (1, 10, 50, 90, 99)}
        return {name: round(float(value), 4) for name, value in found.items()}

    return {
        "rows": lists.shape[0],
        "topk": lists.shape[1],
        "distinct_keys": int(membership(lists).any(0).sum()),
        "neighbour_overlap": spread(neighbour_overlap(lists)),
        "union_of_8_over_sum": spread(union_share(lists)),
    }


def made_statistics(rows: int, topk: int, slots: int) -> dict[str, Any]:
    """Statistics of made lists at the shape of the recorded ones."""
    made = {f"chosen, overlap {o}": chosen(rows, topk, slots, o / 100, seed=0) for o in OVERLAPS}
    return {name: statistics(x) for name, x in {**made, "window": window(rows, 128), "dense": dense(rows, 256)}.items()}


def default_text() -> bytes:
    """The package's own sources, in the order of their names: text with the repetition that code has."""
    files = sorted((ROOT / "src" / "headfit").rglob("*.py")) + sorted((ROOT / "docs").rglob("*.md"))
    return b"".join(path.read_bytes() for path in files)


def record(text: bytes, rows: int, chunk: int, seed: int) -> dict[str, np.ndarray]:
    """Run the default model of `headfit compare` over ``text`` and keep the last rows' choices of every chosen layer.

    One byte is one token. Attention runs on headfit's CPU backend: eager attention over a long text would take hours,
    and the model's own compressor and indexer, which decide what is chosen, run unchanged either way.
    """
    import torch
    from transformers import DynamicCache

    from headfit import demo_model
    from headfit.engines.transformers import convert

    made = convert(demo_model.build(seed), backend="cpu", cache_layout="bf16")
    kept: dict[str, list[np.ndarray]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, arguments: Any, out: torch.Tensor) -> None:
            wide = torch.full((out.shape[1], module.index_topk), NONE, dtype=torch.int16)
            wide[:, : out.shape[2]] = out[0]
            kept.setdefault(name, []).append(wide.numpy())

        return hook

    for name, module in made.named_modules():
        if type(module).__name__ == "DeepseekV4Indexer":
            module.register_forward_hook(keep(f"layer {name.split('.')[2]}"))
    cache = DynamicCache(config=made.config)
    ids = torch.tensor(list(text))[None]
    start = time.perf_counter()
    with torch.no_grad():
        for begin in range(0, len(text), chunk):
            made.model(ids[:, begin : begin + chunk], past_key_values=cache, use_cache=True)
            print(f"{begin + chunk} of {len(text)} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    return {name: np.concatenate(parts)[-rows:] for name, parts in kept.items()}


def load(path: Path, layer: str | None = None) -> np.ndarray:
    """Recorded lists of one layer, int32 ``[rows, topk]``; None takes the first layer.

    Raises:
        ValueError: the file has no such layer.
    """
    with np.load(path) as file:
        names = [name for name in file.files if name.startswith("layer ")]
        if (layer or names[0]) not in names:
            raise ValueError(f"layer: got {layer!r}, {path.name} has {', '.join(names)}")
        return file[layer or names[0]].astype(np.int32)


def _record(options: argparse.Namespace) -> None:
    import torch
    import transformers

    text = (options.text.read_bytes() if options.text else default_text())[: options.tokens]
    if len(text) < options.tokens:
        raise SystemExit(f"--tokens: the text has {len(text)} bytes, {options.tokens} were asked for")
    lists = record(text, options.rows, options.chunk, options.seed)
    options.lists.parent.mkdir(parents=True, exist_ok=True)
    how = {
        "command": f"python benchmarks/patterns.py record --tokens {options.tokens} --rows {options.rows}",
        "model": "headfit.demo_model.build: V4-Flash's attention and indexer geometry, hidden 256, random weights",
        "seed": options.seed,
        "text": options.text.name if options.text else "sources and pages of headfit, one byte a token",
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "tokens": options.tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    np.savez_compressed(options.lists, how=np.array(json.dumps(how)), **lists)
    print(f"{options.lists}: {options.lists.stat().st_size / 2**20:.1f} MiB")


def _stats(options: argparse.Namespace) -> None:
    with np.load(options.lists) as file:
        how = json.loads(str(file["how"]))
        lists = {name: file[name].astype(np.int32) for name in file.files if name != "how"}
    recorded = {f"chosen, {name}": statistics(x) for name, x in lists.items()}
    shape = next(iter(lists.values())).shape
    slots = how["tokens"] // RATIO
    content = {
        "how": how,
        "chance_overlap": round(shape[1] / slots, 4),
        "recorded": recorded,
        "made": made_statistics(*shape, slots),
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, values in {**recorded, **content["made"]}.items():
        overlap, union = values["neighbour_overlap"], values["union_of_8_over_sum"]
        print(
            f"{name:<20} neighbour overlap {overlap['mean']:.3f} (p10 {overlap['p10']:.3f}, p90 {overlap['p90']:.3f}), "
            f"union of 8 over sum {union['mean']:.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "stats"):
        command = commands.add_parser(name)
        command.add_argument("--lists", type=Path, default=LISTS)
        command.add_argument("--json", type=Path, default=STATISTICS)
        if name == "record":
            command.add_argument("--text", type=Path, default=None)
            command.add_argument("--tokens", type=int, default=32768)
            command.add_argument("--rows", type=int, default=4096)
            command.add_argument("--chunk", type=int, default=512)
            command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command == "record":
        _record(options)
    _stats(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
