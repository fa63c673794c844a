"""The portable backend ``triton``: any NVIDIA GPU from SM80 on, any head count, and the interpreter on a CPU.

Belongs here: the plan of a call (from shapes alone) and its launches. Does not belong here: device code (``common.py``,
``triton_prefill.py``, ``triton_decode.py``, ``merge.py``), settings (``configs.py``), argument checks.

No value of a tensor is read on the host, nothing is allocated outside PyTorch's allocator, and no argument but dtype,
layout and alignment makes another binary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import log2
from typing import Any

import torch
from torch import Tensor

from headfit import arch as archs
from headfit.call import KeySet, SparseCall
from headfit.capability import Capability
from headfit.kernels import common, configs
from headfit.kernels.merge import sparse_mla_merge
from headfit.kernels.recording import Recorder
from headfit.kernels.triton_decode import sparse_mla_split
from headfit.kernels.triton_prefill import sparse_mla_prefill

LAYOUTS = {  # (layout, d_qk) -> what the device code calls it
    ("bf16", 512): common.BF16.value,
    ("v4", 512): common.V4.value,
    ("v32", 576): common.V32.value,
    ("bf16", 576): common.BF16_TAIL.value,
}
INTERPRETED = not hasattr(sparse_mla_prefill, "device_caches")  # decorated under TRITON_INTERPRET=1
LOG2_E = 1.4426950408889634
MERGE_WARPS = 4  # 128 threads x 4 dims: a warp reads 512 B of a share at once
_launched = Recorder()
record_variants = _launched.listen  # a context manager that yields the names


@dataclass(frozen=True)
class Plan:
    """How a call is launched. ``splits`` 0: the prefill kernel; else the split kernel and the merge."""

    config: configs.Config
    head_tiles: int
    splits: int
    tiles_per_split: int  # 0: the tiles a row has are dealt evenly
    constants: tuple[tuple[str, Any], ...]

    @property
    def variant(self) -> str:
        """A name for the binary that a person can read."""
        kernel = "split" if self.splits else "prefill"
        return " ".join([kernel, *(f"{k.lower()}={v}" for k, v in self.constants), f"warps={self.config.warps}"])


def available() -> str | None:
    """None where a CUDA device of compute capability 8.0 or more is there, or the interpreter is on; else why not."""
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device; on a CPU, set TRITON_INTERPRET=1 before importing headfit (slow, for tests)"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 0) else f"compute capability {capability}, needs 8.0 or more"


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot be taken, or None."""
    device = call.q.device.type
    if device != ("cpu" if INTERPRETED else "cuda"):
        return f"runs on {'cpu' if INTERPRETED else 'cuda'} tensors here, q is on {device}"
    layouts = {k.layout for k in call.key_sets}
    known = {name for name, _ in LAYOUTS}
    if len(layouts) > 1 or not layouts <= known:
        return f"takes one layout a call, out of {', '.join(sorted(known))}; got {', '.join(sorted(layouts))}"
    return None


def capability(compute_capability: tuple[int, int] | None = None) -> Capability:
    """Every head count from 1 to 128, in one family for all row counts."""
    heads = range(1, 129)
    return Capability("triton", compute_capability, 0, heads, heads, sources={"heads": "headfit's own kernels"})


def plan(call: SparseCall, arch: archs.Arch) -> Plan:
    """The launches of a call, from shapes, strides and the chip alone."""
    layout = call.key_sets[0].layout
    config = configs.choose(call.h_q, arch, layout, call.d_qk, split=True)
    tiles = sum(-(-k.topk // config.block) for k in call.key_sets)
    if call.batch_invariant:
        tiles_per_split = max(1, configs.INVARIANT_KEYS // config.block)
        splits = max(1, -(-tiles // tiles_per_split))
    else:
        splits, tiles_per_split = configs.split_count(call.rows, tiles, config, arch), 0
        if splits == 1:
            splits, config = 0, configs.choose(call.h_q, arch, layout, call.d_qk, split=False)
    align = min(_alignment(k) for k in call.key_sets)
    constants = {
        "LAYOUT": LAYOUTS[layout, call.d_qk],
        "H": config.head_tile,
        "BLOCK": config.block,
        "POW2": all(k.page_size & (k.page_size - 1) == 0 for k in call.key_sets),
        "ALIGN": align,
        "UNIT": _unit(call),
        "MATH": _math(arch),
        "STAGES": config.stages,
        "WIDE": config.wide,
        "AHEAD": config.ahead if layout != "bf16" and align == 16 else 0,
        "AT_ONCE": config.at_once,
    }
    return Plan(config, -(-call.h_q // config.head_tile), splits, tiles_per_split, tuple(constants.items()))


def _math(arch: archs.Arch) -> int:
    if INTERPRETED:
        return int(common.INTERPRETER.value)
    return int((common.CONVERT if arch.converts_e4m3 else common.INTEGER).value)


def _alignment(keys: KeySet) -> int:
    """16 where every row can be read 16 bytes at a time, else 2 or 1: the alignment its loads may assume."""
    size = keys.data.element_size()
    places = [keys.data.data_ptr()]
    if keys.slots > keys.page_size:
        places.append(keys.page_stride * size)
    if keys.layout == "bf16" and keys.page_size > 1:
        places.append(keys.row_stride * size)
    return next(a for a in (16, 2, 1) if all(p % a == 0 for p in places))


def _unit(call: SparseCall) -> int:
    """8 where q and out can be read and written 16 bytes at a time, else 1."""
    for t in (call.q, call.out):
        if t.data_ptr() % 16 or any(
            stride % 8 for stride, size in zip(t.stride()[:3], t.shape[:3], strict=True) if size > 1
        ):
            return 1
    return 8


def run(call: SparseCall) -> None:
    """Launch the kernels of one checked call on the current stream."""
    arch = archs.current(call.q.device)
    chosen = plan(call, arch)
    _launched.add(lambda: [chosen.variant])
    guard = torch.cuda.device(call.q.device) if call.q.device.type == "cuda" else nullcontext()
    with guard:
        if chosen.splits:
            _run_split(call, chosen)
        else:
            _run_prefill(call, chosen)


def _run_prefill(call: SparseCall, chosen: Plan) -> None:
    grid = (call.rows * chosen.head_tiles,)
    unit = dict(chosen.constants)["UNIT"]
    max_logits = call.lse if call.max_logits is None else call.max_logits
    sparse_mla_prefill[grid](
        call.q, **_caches(call), sink=_sink(call), out=call.out, lse=call.lse, max_logits=max_logits,
        **_strides("q", call.q, unit), **_strides("out", call.out, unit), **_statistics(call, max_logits),
        **_lists(call, dict(chosen.constants)["POW2"]), row0=0, s_q=call.q.shape[1], h_q=call.h_q,
        head_tiles=chosen.head_tiles, flags=_flags(call), scale_log2=call.sm_scale * LOG2_E,
        **dict(chosen.constants), **_options(chosen.config),
    )  # fmt: skip


def _run_split(call: SparseCall, chosen: Plan) -> None:
    rows, h_q, splits = call.rows, call.h_q, chosen.splits
    slab = min(rows, max(1, configs.WORKSPACE_BYTES // (splits * h_q * 512 * 4)))
    partial = torch.empty(slab * splits * h_q * 512, dtype=torch.float32, device=call.q.device)
    peaks = torch.empty(slab * splits * h_q, dtype=torch.float32, device=call.q.device)
    totals = torch.empty_like(peaks)
    unit = dict(chosen.constants)["UNIT"]
    max_logits = call.lse if call.max_logits is None else call.max_logits
    flags = _flags(call)
    for row0 in range(0, rows, slab):
        count = min(slab, rows - row0)
        sparse_mla_split[(count * chosen.head_tiles, splits)](
            call.q, **_caches(call), partial=partial, peaks=peaks, totals=totals, **_strides("q", call.q, unit),
            **_lists(call, dict(chosen.constants)["POW2"]), row0=row0, s_q=call.q.shape[1], h_q=h_q,
            head_tiles=chosen.head_tiles, flags=flags, splits=splits, tiles_per_split=chosen.tiles_per_split,
            scale_log2=call.sm_scale * LOG2_E, **dict(chosen.constants), **_options(chosen.config),
        )  # fmt: skip
        sparse_mla_merge[(count * h_q,)](
            partial, peaks, totals, _sink(call), call.out, call.lse, max_logits, **_strides("out", call.out, unit),
            **_statistics(call, max_logits), row0=row0, s_q=call.q.shape[1], h_q=h_q, flags=flags, splits=splits,
            UNIT=unit, MATH=dict(chosen.constants)["MATH"],
            num_warps=MERGE_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _options(config: configs.Config) -> dict[str, Any]:
    # Fusion is stated because Triton 3.10 will change its default, and with it the bits of a result.
    return {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def _second(call: SparseCall) -> KeySet:
    return call.key_sets[-1]


def _caches(call: SparseCall) -> dict[str, Tensor]:
    """The tensors of both key sets; a call with one set names it twice, with no lane in the second."""
    tensors: dict[str, Tensor] = {}
    for i, k in ((1, call.key_sets[0]), (2, call.key_sets[-1])):
        lengths = k.indices if k.lengths is None else k.lengths
        tensors |= {f"kv{i}": k.data, f"idx{i}": k.indices, f"len{i}": lengths}
    return tensors


def _lists(call: SparseCall, pow2: bool) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for i, k in ((1, call.key_sets[0]), (2, call.key_sets[-1])):
        numbers |= {
            f"idx{i}_b": k.indices.stride(0),
            f"idx{i}_s": k.indices.stride(1),
            f"page_stride{i}": k.page_stride,
            f"row_stride{i}": k.row_stride,
            f"slots{i}": k.slots,
            f"page{i}": int(log2(k.page_size)) if pow2 else k.page_size,
            f"topk{i}": k.topk if i == 1 or len(call.key_sets) == 2 else 0,
        }
    return numbers


def _strides(name: str, t: Tensor, unit: int) -> dict[str, int]:
    return {f"{name}_{axis}": t.stride(i) // unit for i, axis in enumerate("bsh")}


def _statistics(call: SparseCall, max_logits: Tensor) -> dict[str, int]:
    pairs = (("lse", call.lse), ("max", max_logits))
    return {f"{name}_{axis}": t.stride(i) for name, t in pairs for i, axis in enumerate("bhs")}


def _sink(call: SparseCall) -> Tensor:
    return call.lse if call.attn_sink is None else call.attn_sink


def _flags(call: SparseCall) -> int:
    first, second = call.key_sets[0], call.key_sets[-1]
    two = len(call.key_sets) == 2
    return (
        (call.attn_sink is not None) * common.HAS_SINK.value
        | (call.max_logits is not None) * common.HAS_MAX_LOGITS.value
        | (first.lengths is not None) * common.HAS_LENGTHS_1.value
        | (two and second.lengths is not None) * common.HAS_LENGTHS_2.value
    )
