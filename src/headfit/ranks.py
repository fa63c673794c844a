"""Inside one rank process: who it is, how it joins its group, what its failures mean, how it talks to its parent.

Belongs here: everything that runs in a rank whatever its job. Must not: start processes (`launch`), know the job.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Event = dict[str, Any]
Target = Callable[["Rank", dict[str, Any], Callable[[Event], None]], Any]

_LIBRARY_ENV = {
    # A rank loads local files only, and what its libraries announce would tear the progress display.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "PYTHONSAFEPATH": "1",  # a json.py in the folder one happens to stand in is not the json a rank wants
}


class InputError(ValueError):
    """What the user asked for cannot be done; the message is one line and says what to do instead."""


@dataclass(frozen=True)
class Rank:
    """One process of the group and how it finds the others.

    `listen_fd` is the already listening socket of rank 0 (None: join by the torchrun environment, `env://`).
    `timeout_s` bounds the rendezvous and every collective, in seconds.
    """

    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    from_env: bool = False
    timeout_s: float = 120.0


def rank_from_env(timeout_s: float = 120.0) -> Rank | None:
    """The rank that torchrun (or a hand-written launcher) gave this process; None when it gave none.

    Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them. Raises
    InputError when RANK and WORLD_SIZE are set but the rest is missing or no number.
    """
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise InputError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: "
            "start with torchrun, or unset RANK and WORLD_SIZE"
        )
    try:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        port = int(env["MASTER_PORT"])
        local_rank = int(env.get("LOCAL_RANK", rank))
        local_world = int(env.get("LOCAL_WORLD_SIZE", world))
    except ValueError as error:
        raise InputError(
            f"the torchrun environment holds no number where one is needed ({error}): start with torchrun"
        ) from None
    if not 0 <= rank < world:
        raise InputError(f"RANK is {rank} but must be in 0..{world - 1} (WORLD_SIZE is {world}): start with torchrun")
    return Rank(rank, world, local_rank, local_world, env["MASTER_ADDR"], port, None, True, timeout_s)


def quiet_environment(env: Mapping[str, str]) -> dict[str, str]:
    """`env` plus the switches that keep libraries offline and silent; what the user set already wins."""
    return {**_LIBRARY_ENV, **env}


def usable_cores() -> int:
    """Cores this process may run on (the affinity mask, not the machine's count)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def native_silence(enabled: bool = True) -> Iterator[IO[str]]:
    """Send what libraries write to file descriptor 2 to nowhere inside, and yield a stream that still reaches the real
    stderr.

    For a rank that something else started: C++ code of torch prints there, past every Python-level switch.
    """
    if not enabled:
        yield sys.stderr
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with (
        os.fdopen(os.dup(kept), "w", buffering=1, encoding="utf-8", errors="replace") as stream,
        open(os.devnull, "wb") as nowhere,
    ):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield stream
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def describe_failure(error: BaseException) -> tuple[str, bool]:
    """(one line for a person, whether it only says that another rank is gone)."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    lowered = text.lower()
    if (
        isinstance(error, MemoryError)
        or "outofmemory" in name.lower()
        or "can't allocate memory" in lowered
        or "out of memory" in lowered
    ):
        return "out of memory: lower --prefill-chunk, use more ranks (--tp), or free memory", False
    if "eaddrinuse" in lowered or "address already in use" in lowered:
        return "the rendezvous port is in use: set another MASTER_PORT (or --port)", False
    peer_signs = (
        "connection closed by peer",
        "connection reset",
        "connection refused",
        "timed out waiting",
        "socket timeout",
        "broken pipe",
    )
    if name in ("DistNetworkError", "DistStoreError", "DistBackendError") or any(
        sign in lowered for sign in peer_signs
    ):
        return (
            f"lost another rank or waited too long for it ({text[:160]}): see that rank's error, or raise --timeout",
            True,
        )
    return f"{name}: {text[:300]}; run again with --debug for the traceback", False


def join_group(rank: Rank, device: torch.device) -> ProcessGroup | None:
    """The process group of all ranks: gloo for a CPU device, NCCL for CUDA; None for a world of one.

    Rank 0 serves the store from the socket it inherited; under torchrun the existing environment rendezvous is joined.
    """
    if rank.world == 1 and not rank.from_env:
        return None
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=rank.timeout_s)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if rank.from_env:
        dist.init_process_group(backend, init_method="env://", timeout=timeout, **options)
    else:
        listening: dict[str, Any] = {}
        if rank.listen_fd is not None:
            listening = {"master_listen_fd": rank.listen_fd, "use_libuv": True}
        store = dist.TCPStore(  # type: ignore[attr-defined]
            rank.host, rank.port, rank.world, rank.rank == 0, timeout, wait_for_workers=False, **listening
        )
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout, **options)
    return dist.group.WORLD


def leave_group() -> None:
    """Tear the default process group down if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def load_target(target: str) -> Target:
    """The function named "module:function"."""
    module, _, name = target.partition(":")
    function: Target = getattr(importlib.import_module(module), name)
    return function


def _exit_with_parent(stdin: IO[bytes]) -> None:
    stdin.read()  # returns only at end-of-file: the parent closed the pipe or died
    os._exit(143)


def rank_main() -> None:
    """What a rank process runs: read the job from stdin, do it, send events, leave. Never returns."""
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # from here on, anything printed lands in the log
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            channel.write(json.dumps(event) + "\n")
            channel.flush()

    try:
        value = load_target(job["target"])(Rank(**job["rank"]), job["payload"], emit)
        emit({"event": "result", "value": value})
        code = 0
    except InputError as error:
        emit({"event": "error", "kind": "input", "peer": False, "message": str(error)})
        code = 2
    except BaseException as error:  # also SystemExit: whatever ends a rank early is told to the parent
        traceback.print_exc()
        message, peer = describe_failure(error)
        emit({"event": "error", "kind": "failure", "peer": peer, "message": message})
        code = 2
    sys.stderr.flush()
    channel.close()
    # Straight out: interpreter teardown of a group whose peer died can block on its threads.
    os._exit(code)
