"""What rank processes of tests/test_launch.py run. Not a test file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from headfit.ranks import Event, InputError, Rank, join_group, leave_group

Emit = Callable[[Event], None]


def add(rank: Rank, payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    print("a library talks on stdout")
    group = join_group(rank, torch.device("cpu"))
    value = torch.tensor([float(rank.rank + payload["start"])])
    if group is not None:
        dist.all_reduce(value, group=group)
    emit({"event": "progress", "rank": rank.rank})
    leave_group()
    return {"sum": value.item(), "threads": os.environ["OMP_NUM_THREADS"]}


def fail(rank: Rank, payload: dict[str, Any], emit: Emit) -> None:
    """One rank fails in the given way; the others wait for it, in a collective as in a forward pass, or asleep."""
    group = None
    if payload["collective"]:
        import torch

        group = join_group(rank, torch.device("cpu"))
    if rank.rank == payload["who"]:
        how = payload["how"]
        print("last words", file=sys.stderr)
        if how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
        if how == "memory":
            raise MemoryError
        if how == "input":
            raise InputError("the thing is wrong: use another thing")
        raise RuntimeError("something\nbroke")
    if group is None:
        time.sleep(600)
    else:
        import torch.distributed as dist

        dist.barrier(group)


def wait(rank: Rank, payload: dict[str, Any], emit: Emit) -> None:
    """Announce the process id in a file, then wait for ever."""
    with open(os.path.join(payload["folder"], f"{rank.rank}"), "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(60)


def stall(rank: Rank, payload: dict[str, Any], emit: Emit) -> None:
    """Rank 1 never comes to the barrier."""
    import torch
    import torch.distributed as dist

    group = join_group(rank, torch.device("cpu"))
    if rank.rank == 1:
        time.sleep(600)
    dist.barrier(group)
