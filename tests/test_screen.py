"""An output that refuses and errors nobody foresaw: one line, no traceback, never the exit code of a difference."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import FIRST, make

from headfit import cli, doctor, launch, screen
from headfit import comparison as data

TESTS = Path(__file__).parent
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The command as it is, with the ranks' work replaced by its result.
STUBBED = """
import sys
from headfit import cli, comparison, launch, subject
from test_report import FIRST, make

def run_ranks(*arguments, on_event, **options):
    on_event({"event": "status", "text": "loading the model"})
    return comparison.to_dict(make(first_difference=FIRST))

launch.run_ranks = run_ranks
subject.check_options = lambda options: None
cli.main()
"""


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)


def shell(line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`line` in bash, where `$headfit` is the command and `$stubbed` the command without ranks; its pipes' first code
    is the exit code.
    """
    env = {
        **os.environ,
        "COLUMNS": "80",
        "PYTHONPATH": str(TESTS),
        "headfit": f"{sys.executable} -m headfit",
        "STUBBED": STUBBED,
        "python": sys.executable,
        **more,
    }
    script = f'stubbed() {{ "$python" -c "$STUBBED" "$@"; }}; {line}; exit "${{PIPESTATUS[0]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["$headfit doctor", "$headfit --help", "$headfit --version", "stubbed compare"])
def test_full_disk_is_one_line_and_code_2(command):
    done = shell(f"{command} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "headfit: the output cannot be written (No space left on device): send it to another place"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["$headfit doctor", "$headfit doctor --json", "$headfit --help"])
def test_closed_pipe_ends_quietly(command):
    done = shell(f"{command} | true")
    assert (done.returncode, done.stderr) == (screen.CLOSED, "")


@pytest.mark.parametrize("both", ["", "2>&1"])
def test_closed_pipe_costs_no_file(both, tmp_path):
    """Also where the progress lines meet the closed pipe, before the result does."""
    done = shell(f"stubbed compare --json {tmp_path}/a.json --report {tmp_path} {both} | true")
    assert done.returncode == screen.CLOSED
    assert done.stderr == ("" if both else "headfit: loading the model\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "index.html"]


def test_closed_stdout_is_no_failure():
    done = shell("$headfit doctor >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_few_characters_are_enough():
    done = shell("$headfit doctor", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "wasted" in done.stdout
    assert done.stdout.isascii()


def test_without_arguments_comes_the_help_alone(capfd):
    assert cli.run([]) == 0
    out, err = capfd.readouterr()
    assert "doctor" in out
    assert err == ""


@pytest.mark.parametrize("error", [KeyError("who"), MemoryError(), RecursionError("deep"), ZeroDivisionError()])
def test_an_unexpected_error_is_one_line_with_a_way_to_the_traceback(error, monkeypatch, capfd):
    def fail(**options):
        raise error

    monkeypatch.setattr(doctor, "doctor_command", fail)
    assert cli.run(["doctor", "--tp", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"headfit: {type(error).__name__}")
    assert "; run headfit --debug doctor --tp 2 for the traceback" in err
    assert err.count("\n") == 1
    assert cli.run(["--debug", "doctor", "--tp", "2"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("Traceback")
    assert "in fail\n" in err
    assert err.splitlines()[-1].startswith(f"headfit: {type(error).__name__}")


@pytest.mark.parametrize("code", [1, "text"])
def test_exit_code_1_is_kept_for_a_difference(code, monkeypatch):
    def end(*arguments, **options):
        raise SystemExit(code)

    monkeypatch.setattr(launch, "run_ranks", end)
    monkeypatch.setattr("headfit.subject.check_options", lambda options: None)
    assert cli.run(["compare"]) == 2


def test_debug_before_the_command_shows_the_logs_of_ranks_too(monkeypatch, capfd):
    def end(*arguments, **options):
        raise launch.RankError("rank 1 failed: why", "log\n")

    monkeypatch.setattr(launch, "run_ranks", end)
    monkeypatch.setattr("headfit.subject.check_options", lambda options: None)
    assert cli.run(["--debug", "compare"]) == 2
    assert capfd.readouterr().err == "log\nheadfit: rank 1 failed: why\n"


def test_only_a_refusing_stream_is_called_so():
    assert screen.refusal(OSError(errno.ENOSPC, "No space left on device")) is not None
    assert screen.refusal(OSError(errno.ENOSPC, "No space left on device", "file")) is None
    assert screen.refusal(OSError(errno.ENOENT, "No such file")) is None
    assert screen.refusal(ValueError("x")) is None


# ---------------------------------------------------------------- names that are no text


def test_a_name_that_is_no_text_stands_escaped_in_every_output(tmp_path, monkeypatch):
    """A record of a prompt named by bytes that are no UTF-8 is text for the page, JSON and the screen."""
    name = os.fsdecode(b"\xff.txt")
    made = make(options=data.Options(prompt=name, command=f"headfit compare --prompt {name}"))
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments, **options: json.loads(json.dumps(data.to_dict(made))))
    monkeypatch.setattr("headfit.subject.check_options", lambda options: None)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.run(["compare", "--json", str(tmp_path / "a.json"), "--report", str(tmp_path)]) == 0
    assert r"\udcff.txt" in (tmp_path / "index.html").read_text(encoding="utf-8")
    record = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert record["options"]["prompt"] == r"\udcff.txt"
    assert data.from_dict(record).options.command == r"headfit compare --prompt \udcff.txt"


def test_first_difference_is_still_code_1(monkeypatch, capsys):
    monkeypatch.setattr(launch, "run_ranks", lambda *a, **o: data.to_dict(make(first_difference=FIRST)))
    monkeypatch.setattr("headfit.subject.check_options", lambda options: None)
    assert cli.run(["compare"]) == 1
