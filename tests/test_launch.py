"""Rank processes: results come back, a failure is one line that names its cause, and no process survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headfit import launch, ranks

TESTS = Path(__file__).parent


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ranks find tests/rank_targets.py; no thread count of the caller's."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children() -> set[int]:
    """Processes that this one started and that still run."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid() and alive(int(entry.name)):
                found.add(int(entry.name))
    return found


def until(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_rank_0_answers_and_its_events_arrive(env):
    events = []
    before = children()
    result = launch.run_ranks("rank_targets:add", {"start": 10}, 2, env=env, on_event=events.append)
    assert result == {"sum": 21.0, "threads": str(max(1, ranks.usable_cores() // 2))}
    assert [event["rank"] for event in events] == [0]  # what libraries print is no event, and other ranks stay silent
    assert children() == before


def test_one_rank_needs_no_group(env):
    assert launch.run_ranks("rank_targets:add", {"start": 5}, 1, env=env)["sum"] == 5.0


def test_thread_count_of_the_user_wins(env):
    result = launch.run_ranks("rank_targets:add", {"start": 0}, 1, env={**env, "OMP_NUM_THREADS": "3"}, threads=2)
    assert result["threads"] == "3"


@pytest.mark.parametrize(
    ("how", "who", "kind", "says"),
    [
        ("kill in a collective", 1, launch.RankError, "rank 1 was killed by SIGKILL"),
        ("kill", 0, launch.RankError, "rank 0 was killed by SIGKILL"),
        ("exit", 1, launch.RankError, "rank 1 exited with code 7"),
        ("raise", 1, launch.RankError, "rank 1 failed: RuntimeError: something broke"),
        ("memory", 0, launch.RankError, "rank 0 failed: out of memory: lower --prefill-chunk"),
        ("input", 1, ranks.InputError, "the thing is wrong: use another thing"),
    ],
)
def test_a_failing_rank_is_named_and_takes_the_others_with_it(env, how, who, kind, says):
    before = children()
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        launch.run_ranks(
            "rank_targets:fail", {"how": how, "who": who, "collective": "collective" in how}, 2, env=env, timeout_s=300
        )
    message = str(caught.value)
    assert message.startswith(says)
    assert "\n" not in message
    if kind is launch.RankError:
        assert "last words" in caught.value.log
    assert time.monotonic() - begun < 200  # the cause ended the wait, not the timeout
    assert children() == before


def test_a_rank_that_never_comes_is_given_up(env):
    with pytest.raises(launch.RankError, match="rank 0 failed: lost another rank or waited too long"):
        launch.run_ranks("rank_targets:stall", {}, 2, env=env, timeout_s=10)


def test_port_in_use_is_found_before_anything_starts():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        before = children()
        with pytest.raises(ranks.InputError, match=rf"port {port} cannot be used .*--port"):
            launch.run_ranks("rank_targets:add", {"start": 0}, 2, port=port)
        assert children() == before


def test_a_given_port_is_the_rendezvous(env):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert launch.run_ranks("rank_targets:add", {"start": 1}, 2, port=port, env=env)["sum"] == 3.0


PARENT = """
import sys
from headfit import launch
with launch.terminate_as_exit():
    launch.run_ranks("rank_targets:wait", {"folder": sys.argv[1]}, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_parent(env, tmp_path, number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env=env,
        stderr=subprocess.DEVNULL,
        # a shell's background job ignores SIGINT, and its children with it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"))
        pids = [int((tmp_path / name).read_text()) for name in "01"]
        assert all(alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(timeout=30)
        assert until(lambda: not any(alive(pid) for pid in pids), 10)
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "no number where one is needed"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, r"must be in 0\.\.1"),
    ],
)
def test_half_a_torchrun_environment_is_refused(monkeypatch, variables, says):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.rank_from_env() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ranks.InputError, match=says):
        ranks.rank_from_env()


def test_torchrun_environment_is_read(monkeypatch):
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29",
    }.items():
        monkeypatch.setenv(name, value)
    assert ranks.rank_from_env(7.0) == ranks.Rank(5, 8, 1, 4, "host", 29, None, True, 7.0)


def test_what_the_user_set_wins_over_silence():
    quiet = ranks.quiet_environment({"TRANSFORMERS_VERBOSITY": "info"})
    assert quiet["TRANSFORMERS_VERBOSITY"] == "info"
    assert quiet["HF_HUB_OFFLINE"] == "1"
