"""Rank processes: start them, hand them one job, watch them, and leave none behind.

Belongs here: process start and stop, the rendezvous socket, process groups, what a dead rank means. Must not: know what the job is.

Channels of one rank: its stdin carries the job as one JSON line and then stays open, so that end-of-file there means the parent is gone
(also after `kill -9`); its stdout carries JSON events; whatever libraries print goes to a log that is read only when something fails.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

Event = dict[str, Any]
Target = Callable[["Rank", dict[str, Any], Callable[[Event], None]], Any]

_STOP_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_BLAME_GRACE_S = 3.0  # after "my peer is gone", the time the peer's own cause may take to arrive
_IMPORT_ROOT = str(Path(__file__).resolve().parent.parent)
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


class RankError(RuntimeError):
    """A rank failed; the message is one line, `log` holds what all ranks printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


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

    Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them. Raises InputError
    when RANK and WORLD_SIZE are set but the rest is missing or no number.
    """
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise InputError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not: start with torchrun, or unset RANK and WORLD_SIZE"
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


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A listening TCP socket on `host`:`port` (0: any free port). Raises InputError when the port is taken or not allowed.

    The socket itself is handed to rank 0, so no other program can take the port between the check and the use.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port} but must be in 0..65535: leave it out to take a free one")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise InputError(
            f"port {port} cannot be used ({error.strerror}): pass another --port, or none to take a free one"
        ) from None
    return sock


# ---------------------------------------------------------------- parent


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    pending: bytes = b""
    error: Event | None = None
    finished: bool = False  # it reported its result
    closed: bool = False


@dataclass
class _Watch:
    """What the parent knows so far; `failed_at` is when the first sign of trouble came."""

    children: list[_Child] = field(default_factory=list)
    result: Any = None
    failed_at: float | None = None


def run_ranks(
    target: str,
    payload: Mapping[str, Any],
    world: int,
    *,
    port: int = 0,
    timeout_s: float = 120.0,
    threads: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run `target` ("module:function") in `world` processes of this machine and return what rank 0 returned.

    The function gets (Rank, payload, emit) and returns something JSON can hold. `emit` sends a dict to `on_event` here (rank 0's only).
    `threads` per rank on a CPU (None: usable cores / world, at least 1; OMP_NUM_THREADS in the environment wins).

    Raises InputError for a port that cannot be used or an InputError of a rank, RankError when a rank dies, whatever the cause.
    Every process started here is gone when this returns or raises, KeyboardInterrupt and SystemExit included; if this process
    is killed outright, the ranks notice the closed pipe and exit.
    """
    sock = listen(port)
    child_env = quiet_environment(os.environ if env is None else env)
    child_env.setdefault("OMP_NUM_THREADS", str(threads or max(1, usable_cores() // world)))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # one machine: never depend on what its host name resolves to
        child_env.setdefault("GLOO_SOCKET_IFNAME", loopback)
    watch = _Watch()
    try:
        for rank in range(world):
            job = Rank(
                rank,
                world,
                rank,
                world,
                "127.0.0.1",
                sock.getsockname()[1],
                sock.fileno() if rank == 0 else None,
                False,
                timeout_s,
            )
            watch.children.append(_start(target, payload, job, child_env))
        sock.close()
        _watch(watch, on_event)
        return watch.result
    finally:
        sock.close()
        _stop(watch.children)


def _start(target: str, payload: Mapping[str, Any], job: Rank, env: Mapping[str, str]) -> _Child:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop together with the process
    process = subprocess.Popen(
        # Not `-m`: the module would then exist twice, and a target's InputError would be another class than ours.
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.append({_IMPORT_ROOT!r}); from headfit.launch import rank_main; rank_main()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=dict(env),
        pass_fds=() if job.listen_fd is None else (job.listen_fd,),
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops the ranks in order
    )
    child = _Child(job.rank, process, log)
    line = json.dumps({"target": target, "payload": dict(payload), "rank": asdict(job)}) + "\n"
    with contextlib.suppress(BrokenPipeError):  # it died at once: _watch says so
        if process.stdin is not None:
            process.stdin.write(line.encode())
            process.stdin.flush()
    return child


def _watch(watch: _Watch, on_event: Callable[[Event], None]) -> None:
    with selectors.DefaultSelector() as selector:
        for child in watch.children:
            if child.process.stdout is not None:
                selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while not all(child.closed for child in watch.children):
            for key, _ in selector.select(timeout=0.1):
                child = key.data
                data = os.read(key.fd, 1 << 16)
                if data:
                    _take(watch, child, data, on_event)
                else:
                    selector.unregister(key.fileobj)
                    child.closed = True
                    if not child.finished and watch.failed_at is None:
                        watch.failed_at = time.monotonic()
            if watch.failed_at is not None:
                _blame_when_known(watch)
    if watch.failed_at is not None:
        raise _blame(watch)


def _take(watch: _Watch, child: _Child, data: bytes, on_event: Callable[[Event], None]) -> None:
    *lines, child.pending = (child.pending + data).split(b"\n")
    for line in lines:
        event: Event = json.loads(line)
        if event["event"] == "result":
            child.finished = True
            if child.rank == 0:
                watch.result = event["value"]
        elif event["event"] == "error":
            child.error = event
            watch.failed_at = watch.failed_at or time.monotonic()
        elif child.rank == 0:
            on_event(event)


def _blame_when_known(watch: _Watch) -> None:
    """Raise as soon as the cause is certain; a rank that only lost its peer waits for the peer's own story."""
    waited = time.monotonic() - (watch.failed_at or 0.0)
    certain = any(
        (child.error is not None and not child.error["peer"])
        or (child.closed and not child.finished and child.error is None)
        for child in watch.children
    )
    if certain or waited > _BLAME_GRACE_S:
        raise _blame(watch)


def _blame(watch: _Watch) -> Exception:
    def weight(child: _Child) -> int:
        if child.error is not None:
            return {"input": 0, "failure": 2}[child.error["kind"]] + (2 if child.error["peer"] else 0)
        return 1 if child.closed and not child.finished else 9

    child = min(watch.children, key=lambda c: (weight(c), c.rank))
    if child.error is not None and child.error["kind"] == "input":
        return InputError(child.error["message"])
    log = "".join(_log_of(c) for c in watch.children)
    if child.error is not None:
        return RankError(f"rank {child.rank} failed: {child.error['message']}", log)
    try:
        code = child.process.wait(timeout=_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        return RankError(
            f"rank {child.rank} closed its channel without a result: run again with --debug to see its log", log
        )
    if code < 0:
        name = signal.Signals(-code).name
        cause = (
            "often the out-of-memory killer: free memory or lower --prefill-chunk"
            if name == "SIGKILL"
            else "--debug shows its log"
        )
        return RankError(
            f"rank {child.rank} was killed by {name} ({cause}); all ranks were stopped, nothing was written", log
        )
    return RankError(
        f"rank {child.rank} exited with code {code} without a result: run again with --debug to see its log", log
    )


def _log_of(child: _Child) -> str:
    child.log.seek(0)
    text = child.log.read().decode(errors="replace")
    return f"--- rank {child.rank} ---\n{text}" if text else ""


def _stop(children: list[_Child]) -> None:
    """End every rank that still runs: closed stdin and SIGTERM first, SIGKILL to its whole session after a grace."""
    for child in children:
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()
        if child.process.poll() is None and not child.finished:
            child.process.terminate()
    deadline = time.monotonic() + _STOP_GRACE_S
    for child in children:
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        if child.process.stdout is not None:
            child.process.stdout.close()
        child.log.close()


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit(128 + signal) inside, so that clean-up code runs. Main thread only; restores on leave."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- rank


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
        listening = {} if rank.listen_fd is None else {"master_listen_fd": rank.listen_fd, "use_libuv": True}
        store = dist.TCPStore(
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
