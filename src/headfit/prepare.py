"""`headfit warmup`: which head counts the ranks of a model launch, and whether their kernels can be made ready here.

Belongs here: choosing what to compile. Must not: compile (`kernels.warmup` does), print.
"""

from __future__ import annotations

import os

from headfit.capability import Call
from headfit.doctor import POLICIES, SITUATIONS
from headfit.geometry import Geometry
from headfit.width import Policy, plan_width


def heads_to_launch(model: str, tp: int | None = None, policy: str | None = None) -> tuple[int, ...]:
    """The query heads that headfit's kernels are launched with, rising.

    Args:
        model: a preset's name, or the folder of a checkpoint.
        tp: tensor-parallel size; None for every size that the model can be split into.
        policy: ``native``, ``sm12x-prefill`` or ``padded``; None for what the environment says.

    Raises:
        ValueError, FileNotFoundError: naming the argument, what came and what is accepted.
    """
    from headfit.kernels import triton

    geometry = Geometry.from_config(model)
    sizes = geometry.worlds()
    if tp is not None and tp not in sizes:
        fits = ", ".join(map(str, sizes))
        raise ValueError(f"--tp {tp} does not split the {geometry.n_heads} heads: use one of {fits}")
    chosen = Policy.from_env() if policy is None else POLICIES[policy]()
    calls = (
        Call(rows, geometry.n_heads // size, geometry.n_heads, mode)
        for size in (sizes if tp is None else (tp,))
        for _, mode, rows in SITUATIONS
    )
    return tuple(sorted({plan_width(call, triton.capability(), chosen).width for call in calls}))


def why_not(gpu: int) -> str | None:
    """Why nothing can be compiled for GPU number ``gpu`` of this machine, with the remedy; None where it can."""
    import torch

    from headfit import kernels

    reason = kernels.why_not("triton")
    if not torch.cuda.is_available():
        # Before the interpreter's leave to run on a CPU, which compiles nothing.
        found = "no CUDA device" if torch.version.cuda else "no CUDA device, and this torch is a build without CUDA"
        return f"{found}: kernels are compiled for the GPU at hand; run it where the model will be served"
    if reason is not None:
        return reason
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, which interprets kernels: unset it"
    count = torch.cuda.device_count()
    if gpu >= count:
        return f"--gpu {gpu} is not here: accepted are 0 to {count - 1}"
    return None


def cache_folders() -> str:
    """Where Triton keeps what it compiled, and where the Hopper kernels are kept if they run here."""
    from triton import knobs

    from headfit import kernels
    from headfit.kernels import hopper_build

    triton = str(knobs.cache.dir)
    return f"{triton} and {hopper_build.folder()}" if kernels.why_not("hopper") is None else triton
