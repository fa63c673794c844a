"""Compile the kernels that a rank will launch before it serves: ``headfit.kernels.warmup.warmup(...)``.

Belongs here: which calls to make ahead. Does not belong here: the kernels, or settings. Lengths, strides and page
counts make no further binaries, so one small call a variant is enough; rows choose among those of `hopper`, which are
made ready without a call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from headfit.cache import LAYOUTS, empty_cache
from headfit.call import KeySet, SparseCall
from headfit.kernels import hopper, hopper_pairs, hopper_wide
from headfit.kernels import triton as backend
from headfit.kernels.hopper_build import Spec


def warmup(
    heads: Iterable[int],
    layouts: Iterable[str] = ("v4",),
    page_sizes: Iterable[int] = (64,),
    device: torch.device | str = "cuda",
) -> dict[str, float]:
    """Compile (or load from the caches) and run once every variant of the given heads, layouts and page sizes.

    On an SM90 the binaries of the Hopper backends for ``v4`` pages are among them, named ``hopper ...``.

    Args:
        heads: query heads a rank launches, each 1 to 128.
        layouts: ``"v4"``, ``"v32"``, ``"bf16"`` (rows of 512 dims) or ``"bf16-576"``.
        page_sizes: powers of two share their binaries, all other sizes share another.
        device: where to compile for; a few MB are allocated there and given back (half a MB a head for ``hopper``).

    Returns:
        Seconds by variant name, in the order in which they were made ready; about 3 s each the first time on a machine.
        Triton binaries that one call launches share its time.

    Raises:
        ValueError: unknown layout, or a head count outside 1 to 128.
    """
    done: dict[str, float] = {}
    where = torch.device(device)
    for layout in layouts:
        if layout not in ("v4", "v32", "bf16", "bf16-576"):
            raise ValueError(f"layouts: got {layout!r}, accepted are 'v4', 'v32', 'bf16' and 'bf16-576'")
        for h_q in heads:
            if not 1 <= h_q <= 128:
                raise ValueError(f"heads: got {h_q}, accepted are 1 to 128")
            for page_size in page_sizes:
                for topk, invariant in ((640, False), (16, False), (16, True)):
                    # split and merge; one pass; shares of one size
                    _once(layout, h_q, page_size, topk, invariant, where, done)
    return done


def _once(
    layout: str, h_q: int, page_size: int, topk: int, invariant: bool, device: torch.device, done: dict[str, float]
) -> None:
    d_qk = LAYOUTS[layout].d_qk if layout in LAYOUTS else 576 if layout == "bf16-576" else 512
    if layout in LAYOUTS:
        data = empty_cache(1, page_size, layout, device)
        kind, row_stride = layout, LAYOUTS[layout].data_bytes
    else:
        data = torch.zeros((1, page_size, 1, d_qk), dtype=torch.bfloat16, device=device)
        kind, row_stride = "bf16", d_qk
    lanes = torch.full((1, 1, topk), -1, dtype=torch.int32, device=device)  # no valid lane: nothing is read
    keys = KeySet(data, kind, page_size, data.stride(0), row_stride, page_size, lanes, None)
    q = torch.zeros((1, 1, h_q, d_qk), dtype=torch.bfloat16, device=device)
    out = torch.empty((1, 1, h_q, 512), dtype=torch.bfloat16, device=device)
    lse = torch.empty((1, h_q, 1), dtype=torch.float32, device=device)
    call = SparseCall(q, (keys,), d_qk**-0.5, None, out, lse, None, invariant, "decode")
    start = time.perf_counter()
    with backend.record_variants() as names:
        backend.run(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for name in names:
        done.setdefault(name, time.perf_counter() - start)
    if device.type == "cuda" and hopper.available() is None:
        _once_hopper(call, done)


def _once_hopper(call: SparseCall, done: dict[str, float]) -> None:
    """All Hopper binaries for calls of this width, if they take such calls; and one call, which makes what is kept."""
    h_q = call.q.shape[2]
    if hopper.why_not_taken(call) is not None:
        return
    before = len(done)
    if not _ready(call, hopper.binaries(h_q), done):
        return
    if len(done) > before:
        hopper.run(call)
        torch.cuda.synchronize(call.q.device)
    _ready(call, (*hopper_wide.binaries(h_q), *hopper_pairs.binaries(h_q)), done)


def _ready(call: SparseCall, specs: Iterable[Spec], done: dict[str, float]) -> bool:
    """Make binaries ready on the device of a call, up to the first that cannot be; whether all are."""
    for spec in specs:
        if f"hopper {spec.name}" in done:
            continue
        start = time.perf_counter()
        with torch.cuda.device(call.q.device):
            if hopper.make_ready(spec, torch.cuda.current_device()) is not None:
                return False
        done[f"hopper {spec.name}"] = time.perf_counter() - start
    return True
