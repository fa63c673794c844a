"""Rank processes: start them, hand them one job, watch them, and leave none behind.

Belongs here: process start and stop, the rendezvous socket, who is to blame when a rank dies. Must not: know what the
job is.

Channels of one rank: its stdin carries the job as one JSON line and then stays open, so that end-of-file there means
the parent is gone (also after `kill -9`); its stdout carries JSON events; whatever libraries print goes to a log that
is read only when something fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from headfit.ranks import Event, InputError, Rank, quiet_environment, usable_cores

_STOP_GRACE_S = 2.0  # between SIGTERM and SIGKILL
_BLAME_GRACE_S = 3.0  # after "my peer is gone", the time the peer's own cause may take to arrive
_IMPORT_ROOT = str(Path(__file__).resolve().parent.parent)


class RankError(RuntimeError):
    """A rank failed; the message is one line, `log` holds what all ranks printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


def listen(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A listening TCP socket on `host`:`port` (0: any free port). Raises InputError when the port is taken or not
    allowed.

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

    The function gets (Rank, payload, emit) and returns something JSON can hold. `emit` sends a dict to `on_event` here
    (rank 0's only). `threads` per rank on a CPU (None: usable cores / world, at least 1; OMP_NUM_THREADS in the
    environment wins).

    Raises InputError for a port that cannot be used or an InputError of a rank, RankError when a rank dies, whatever
    the cause. Every process started here is gone when this returns or raises, KeyboardInterrupt and SystemExit
    included; if this process is killed outright, the ranks notice the closed pipe and exit.
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
            f"import sys; sys.path.append({_IMPORT_ROOT!r}); from headfit.ranks import rank_main; rank_main()",
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
    """Turn SIGTERM and SIGHUP into SystemExit(128 + signal) inside, so that clean-up code runs.

    Main thread only; restores on leave.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
