"""The cpu backend against plain torch, by width and by part, and against Transformers' eager attention.

    python benchmarks/cpu.py widths --threads 1      # 128 rows x 640 keys: widths, parts, the cost of equal bits
    python benchmarks/cpu.py widths --threads 2
    python benchmarks/cpu.py eager --rows 512        # a prefill chunk at the end of 4096 tokens of context

Nothing is timed before it was checked: outputs against plain torch in float32, bits across widths. Variants are
interleaved, so that drift of the machine meets all of them alike; least, 20th, 50th and 80th percentile are printed,
and ratios are taken of the `--by` column (the median unless told otherwise). `--json` writes a record with the
environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import headfit
from headfit.cache import pack_kv, unpack_kv
from headfit.kernels import cpu

WIDTHS = (8, 16, 32, 64, 128)
WINDOW, TOPK, CONTEXT, POOL = 128, 512, 4096, 8192
LAYERS = ("sliding", "compressed_sparse", "heavily_compressed")
SCALE = 512**-0.5
STATISTICS = ("least", "p20", "p50", "p80")
Times = dict[str, dict[str, float]]


class Problem:
    """V4-Flash's compressed-sparse layer: a window of 128 keys in one cache, 512 distinct keys of another."""

    def __init__(self, rows: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.caches = pack_kv(torch.randn(CONTEXT, 512), 64), pack_kv(torch.randn(POOL, 512), 64)
        window = torch.randint(0, CONTEXT - WINDOW, (rows, 1)) + torch.arange(WINDOW)
        chosen = torch.stack([torch.randperm(POOL)[:TOPK] for _ in range(rows)])
        self.indices = window.int()[None], chosen.int()[None]
        self.q = torch.randn(1, rows, max(WIDTHS), 512).bfloat16()
        self.dequantised = torch.cat([unpack_kv(c) for c in self.caches])
        self.index = torch.cat([window, chosen + CONTEXT], 1)

    def ours(self, h: int, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """Headfit on the first `h` heads, from the packed bytes."""
        return headfit.flash_mla_with_kvcache(
            self.q[:, :, :h], self.caches[0], indices=self.indices[0], extra_k_cache=self.caches[1],
            extra_indices_in_kvcache=self.indices[1], backend="cpu", enable_batch_invariant=batch_invariant,
        )  # fmt: skip

    def plain(self, h: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Plain torch on rows that were dequantised before: index, bmm, softmax, bmm."""
        rows, q = self.dequantised.to(dtype), self.q[0, :, :h].to(dtype).contiguous()

        def run() -> Tensor:
            keys = rows[self.index]
            return torch.bmm(torch.softmax(torch.bmm(q, keys.mT) * SCALE, -1), keys)

        return run

    def gather(self) -> None:
        """What does not shrink with heads: looking slots up, decoding them, gathering every group's keys."""
        with only_the_gather():
            self.ours(8)


@contextlib.contextmanager
def only_the_gather() -> Iterator[None]:
    """Cuts the products, the softmax and the outputs out of the backend."""
    kept = cpu._run_block, cpu._write_cut
    cpu._run_block = lambda *args: cpu._gather(*args[:-1])  # type: ignore[assignment]
    cpu._write_cut = lambda *args: None
    try:
        yield
    finally:
        cpu._run_block, cpu._write_cut = kept


@contextlib.contextmanager
def head_tiles(*sizes: int) -> Iterator[None]:
    """Other cuts over the heads; one tile of exactly h heads is what a backend without equal bits would do."""
    kept = cpu.HEAD_TILES
    cpu.HEAD_TILES = sizes  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu.HEAD_TILES = kept


def check(p: Problem) -> None:
    """Refuses to time a wrong kernel: against plain float32, and bit by bit across widths."""
    out, lse = p.ours(max(WIDTHS))
    expected = p.plain(max(WIDTHS), torch.float32)()
    error = ((out[0].float() - expected).norm() / expected.norm()).item()
    if error > 4e-3:
        raise SystemExit(f"wrong result, nothing timed: relative L2 {error:.1e} against plain float32")
    for h in WIDTHS:
        got = p.ours(h)
        if not (torch.equal(got[0], out[:, :, :h]) and torch.equal(got[1], lse[:, :h])):
            raise SystemExit(f"bits of {h} heads differ from those of {max(WIDTHS)}, nothing timed")
    print(f"checked: relative L2 {error:.1e} against plain float32; bits equal at widths {WIDTHS}")


def measure(variants: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> Times:
    """Milliseconds of every variant, interleaved: {name: {statistic: ms}}."""
    for run in variants.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = clock()
            run()
            samples[name].append(1e3 * (clock() - start))
    times = {}
    for name, values in samples.items():
        values.sort()
        at = [0, *(round(q * (repeats - 1)) for q in (0.2, 0.5, 0.8))]
        times[name] = {s: values[i] for s, i in zip(STATISTICS, at, strict=True)}
    return times


def widths(args: argparse.Namespace) -> dict[str, Any]:
    """128 rows x 640 keys at every width, beside plain torch, with the gather apart and the cost of equal bits."""
    torch.set_num_threads(args.threads)
    p = Problem(args.rows, args.seed)
    check(p)
    variants: dict[str, Callable[[], object]] = {f"headfit {h}": (lambda h=h: p.ours(h)) for h in WIDTHS}
    variants["headfit 64, batch invariant"] = lambda: p.ours(64, True)
    variants["gather and decode alone"] = p.gather

    def free(h: int) -> None:
        with head_tiles(h):
            p.ours(h)

    variants |= {f"one tile of {h}": (lambda h=h: free(h)) for h in WIDTHS}
    plain = p.plain(64, torch.float32)
    variants["plain float32 64"] = plain
    rows = p.dequantised.float()
    variants["plain float32, its gather"] = lambda: rows[p.index]
    clock = time.process_time if args.cpu_time else time.perf_counter
    times = measure(variants, args.repeats, clock)
    if not args.skip_bf16:
        times |= measure({"plain bfloat16 64": p.plain(64, torch.bfloat16)}, max(1, args.repeats // 10), clock)
    ms = {name: t[args.by] for name, t in times.items()}
    print(f"\n{args.rows} rows x {WINDOW + TOPK} keys, {args.threads} thread(s), ms: " + ", ".join(STATISTICS))
    for name, t in times.items():
        print(f"  {name:28}" + "".join(f"{t[s]:9.1f}" for s in STATISTICS))
    ratios = {f"headfit {h} / headfit 64": ms[f"headfit {h}"] / ms["headfit 64"] for h in (8, 16, 32)}
    ratios |= {
        f"headfit 64 / {name}": ms["headfit 64"] / ms[name]
        for name in ms
        if name.startswith("plain") and "its" not in name
    }
    ratios |= {f"equal bits, {h} heads": ms[f"headfit {h}"] / ms[f"one tile of {h}"] for h in WIDTHS}
    ratios["gather share of headfit 64"] = ms["gather and decode alone"] / ms["headfit 64"]
    print(f"ratios of {args.by}:")
    for name, value in ratios.items():
        print(f"  {name:40}{value:6.2f}")
    return {"times_ms": times, "ratios": ratios}


def _eager_case(rows: int, layer: str, seed: int) -> SimpleNamespace:
    """The last `rows` positions of CONTEXT tokens: window 128, and what the layer has of the rows compressed so far."""
    torch.manual_seed(seed)
    caches, position = [pack_kv(torch.randn(CONTEXT, 512), 64)], torch.arange(CONTEXT - rows, CONTEXT)[:, None]
    window = position - WINDOW + 1 + torch.arange(WINDOW)
    indices = [window.clamp_min(-1).int()[None]]
    if layer != "sliding":
        ratio = 4 if layer == "compressed_sparse" else 128
        compressed = CONTEXT // ratio
        caches.append(pack_kv(torch.randn(compressed, 512), 64))
        seen = torch.arange(compressed) < (position + 1) // ratio
        value, chosen = torch.rand(rows, compressed).masked_fill(~seen, -1.0).topk(min(TOPK, compressed))
        indices.append(chosen.masked_fill(value < 0, -1).int()[None])
    return SimpleNamespace(
        caches=caches, indices=indices, sink=torch.randn(64), q=torch.randn(1, rows, 64, 512).bfloat16(),
        keys=torch.cat([unpack_kv(c) for c in caches]),
    )  # fmt: skip


def _run_ours(c: SimpleNamespace) -> Tensor:
    extra = {"extra_k_cache": c.caches[1], "extra_indices_in_kvcache": c.indices[1]} if len(c.caches) > 1 else {}
    return headfit.flash_mla_with_kvcache(
        c.q, c.caches[0], indices=c.indices[0], attn_sink=c.sink, backend="cpu", **extra
    )[0][0]


def _eager(c: SimpleNamespace, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Transformers' own function, fed with what DeepseekV4Attention feeds it: one KV head and an additive mask."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    mask = torch.full((c.q.shape[1], c.keys.shape[0]), float("-inf"), dtype=dtype)
    for index, base in zip(c.indices, (0, CONTEXT), strict=False):
        row, lane = (index[0] >= 0).nonzero(as_tuple=True)
        mask[row, base + index[0][row, lane].long()] = 0
    module = SimpleNamespace(num_key_value_groups=64, sinks=c.sink.to(dtype), training=False)
    key, q = c.keys.to(dtype)[None, None], c.q.to(dtype).transpose(1, 2)
    return lambda: eager_attention_forward(module, q, key, key, mask[None, None], SCALE)[0][0]  # type: ignore[arg-type]


def _resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (the most since it was reset) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(field + ":")) / 1024


def _eager_worker(name: str, args: argparse.Namespace, layer: str, result: Any) -> None:
    """One variant in a process of its own: (least seconds, MiB above what stood before, the output)."""
    torch.set_num_threads(args.threads)
    case = _eager_case(args.rows, layer, args.seed)
    clock = time.process_time if args.cpu_time else time.perf_counter
    with torch.no_grad():
        run = (lambda: _run_ours(case)) if name == "headfit" else _eager(case, getattr(torch, name))
        before = _resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        seconds = []
        for _ in range(args.repeats):
            start = clock()
            out = run()
            seconds.append(clock() - start)
    result.send((min(seconds), _resident_mib("VmHWM") - before, out.float().numpy()))


def _eager_layer(args: argparse.Namespace, layer: str, names: list[str]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    for name in names:
        receive, send = context.Pipe(False)
        worker = context.Process(target=_eager_worker, args=(name, args, layer, send))
        worker.start()
        send.close()
        try:
            seconds, mib, out = receive.recv()
        except EOFError:
            raise SystemExit(f"{name}: the process died, most likely for want of memory; try fewer --rows") from None
        worker.join()
        outputs[name] = torch.from_numpy(out)
        found[name] = {"seconds": seconds, "extra_mib": mib}
    expected = outputs["float32"]
    error = ((outputs["headfit"] - expected).norm() / expected.norm()).item()
    if error > 4e-3:
        raise SystemExit(f"wrong result: relative L2 {error:.1e} against eager float32")
    print(f"{layer}: relative L2 {error:.1e} against eager float32")
    for name, r in found.items():
        text = f"  {name if name == 'headfit' else f'eager {name}':16}{r['seconds']:9.2f} s{r['extra_mib']:9.0f} MiB"
        if name != "headfit":
            r["speed"] = r["seconds"] / found["headfit"]["seconds"]
            r["memory"] = found["headfit"]["extra_mib"] / r["extra_mib"]
            text += f"; headfit is {r['speed']:.1f} x as fast, in {r['memory']:.3f} of the memory"
        print(text)
    return found | {"relative_l2": error}


def eager(args: argparse.Namespace) -> dict[str, Any]:
    """A prefill chunk at the end of CONTEXT tokens, 64 heads, attention alone: time, and memory beyond the inputs."""
    names = ["headfit", "float32", *(["bfloat16"] if not args.skip_bf16 else [])]
    clock = "the process's own time" if args.cpu_time else "wall time"
    print(f"{args.rows} rows at {CONTEXT} tokens of context, 64 heads, {args.threads} thread(s), least {clock}")
    return {layer: _eager_layer(args, layer, names) for layer in args.layers}


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a figure cannot be read without."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    info = Path("/proc/cpuinfo")
    model = (
        next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), "")
        if info.exists()
        else platform.processor()
    )
    return {
        "arguments": {k: v for k, v in vars(args).items() if not callable(v)},
        "commit": commit,
        "cpu": model,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Parses the command line and runs one of the two jobs."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--threads", type=int, default=1)
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--skip-bf16", action="store_true", help="leave plain bfloat16 out: slow without AVX512-BF16")
    common.add_argument("--cpu-time", action="store_true", help="the process's own time, for a machine that is busy")
    common.add_argument("--json", type=Path)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True)
    job = jobs.add_parser("widths", parents=[common], help=widths.__doc__)
    job.add_argument("--rows", type=int, default=128)
    job.add_argument("--repeats", type=int, default=15)
    job.add_argument("--by", choices=STATISTICS, default="p50", help="the statistic that ratios are taken of")
    job.set_defaults(job=widths)
    job = jobs.add_parser("eager", parents=[common], help=eager.__doc__)
    job.add_argument("--rows", type=int, default=512)
    job.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    job.add_argument("--repeats", type=int, default=2)
    job.set_defaults(job=eager)
    args = parser.parse_args()
    record = environment(args)
    print(json.dumps(record, default=str))
    record |= args.job(args)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
