"""The command as a user starts it: results, files, exit codes, one-line errors, no process and no half file left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

import headfit
from headfit import cli, launch, ranks, subject
from headfit import comparison as data

pytest.importorskip("transformers")

HEADFIT = [sys.executable, "-m", "headfit"]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    return {**clean, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **more}


def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HEADFIT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more)
    )


def headfit_says(*arguments: str, **more: str) -> tuple[int, str, str]:
    process = start(*arguments, **more)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def ranks_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a short run: a checkpoint of one sliding and one compressed-sparse layer, 90 tokens of text."""
    from headfit import demo_model

    folder = tmp_path_factory.mktemp("model")
    demo_model.build(1, layer_types=("sliding_attention", "compressed_sparse_attention")).save_pretrained(folder)
    prompt = folder / "prompt.txt"
    prompt.write_bytes(Path(subject.__file__).read_bytes()[:90])
    return [
        "--model",
        str(folder),
        "--prompt",
        str(prompt),
        "--prefill-chunk",
        "64",
        "--new-tokens",
        "2",
        "--device",
        "cpu",
    ]


# ---------------------------------------------------------------- the main job


def test_compare_end_to_end(small, tmp_path):
    """From the shell to the files: all bits equal, one set of figures everywhere, nothing but progress on stderr."""
    page, record = tmp_path / "report" / "index.html", tmp_path / "deep" / "compare.json"
    code, out, err = headfit_says("compare", "--tp", "2", *small, "--report", str(page.parent), "--json", str(record))
    assert code == 0, err
    assert all(line.startswith("headfit: ") for line in err.splitlines())
    made = data.from_dict(json.loads(record.read_text()))
    assert (made.options.tp, made.environment.group, len(made.environment.devices)) == (2, "gloo", 2)
    assert {(lane.heads, lane.width_off, lane.width_on) for lane in made.lanes} == {(32, 64, 32)}
    assert {(lane.phase, lane.kind) for lane in made.lanes} == {
        (phase, kind) for phase in ("prefill", "decode") for kind in ("sliding", "compressed_sparse")
    }
    assert all(lane.identical and len(lane.seconds_on) == 2 for lane in made.lanes)
    assert made.tokens_on == made.tokens_off
    html = page.read_text()
    for row in data.lane_table(made).rows:
        line = next(line for line in out.splitlines() if line.startswith(row[0]) and row[1] in line)
        for cell in row:
            assert cell in line  # not cut off: the table stands in 80 columns
            assert cell.replace(">", "&gt;") in html
    assert "every surviving bit equal  yes" in out
    assert "greedy text identical      yes, 2 tokens" in out
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["compare.json", "index.html"]


def test_torchrun_ranks_are_joined(small, tmp_path):
    record = tmp_path / "compare.json"
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "headfit"]
    done = subprocess.run(
        [*runner, "compare", *small, "--json", str(record)],
        capture_output=True, text=True, env=environment(), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every surviving bit equal") == 1  # rank 0 alone prints
    made = data.from_dict(json.loads(record.read_text()))
    assert (made.options.tp, len(made.environment.devices), made.exit_code) == (2, 2, 0)


# ---------------------------------------------------------------- a rank that dies, a user who stops


def test_nothing_is_left_when_a_rank_is_killed(small, tmp_path):
    """Killed in the middle of the run, with both outputs asked for."""
    outputs = ["--report", str(tmp_path / "report"), "--json", str(tmp_path / "compare.json")]
    process = start("compare", "--tp", "2", *small, "--new-tokens", "100000", *outputs)
    assert process.stderr is not None
    seen = ""
    while "decode" not in seen:
        line = process.stderr.readline()
        assert line, f"ended early: {seen}"
        seen += line
    pids = ranks_of(process.pid)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("headfit: rank 1 was killed by SIGKILL")
    assert err.count("\n") == 1
    assert out == ""
    assert gone(pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "headfit: interrupted; all ranks were stopped, nothing was written\n"),
        (SystemExit(143), 143, ""),
        (launch.RankError("rank 1 failed:\nwhy", "log"), 2, "headfit: rank 1 failed: why\n"),
    ],
)
def test_how_a_run_ends_is_the_exit_code(raised, code, says, monkeypatch, capfd):
    """That the processes really end is shown in test_launch.py."""
    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)

    def end(*arguments, **options):
        raise raised

    monkeypatch.setattr(launch, "run_ranks", end)
    assert cli.run(["compare"]) == code
    assert capfd.readouterr().err == says
    if isinstance(raised, launch.RankError):
        assert cli.run(["compare", "--debug"]) == code
        assert capfd.readouterr().err == "log" + says


# ---------------------------------------------------------------- bad input: one line, what to do, exit 2


def folder_without(tmp_path: Path, config: dict | str | None, weights: bool = False) -> str:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes(b"x")
    return str(folder)


V4 = {"model_type": "deepseek_v4", "num_attention_heads": 64}
BAD = {
    "no prompt": (lambda at: ["--prompt", str(at / "none.txt")], "No such file or directory; give a text file"),
    "prompt is a folder": (lambda at: ["--prompt", str(at)], "is a folder; give a text file"),
    "no model": (lambda at: ["--model", str(at / "none")], "no such folder; give a local checkpoint folder"),
    "no config": (lambda at: ["--model", folder_without(at, None)], "config.json is missing; give the folder"),
    "torn config": (lambda at: ["--model", folder_without(at, "{")], "config.json cannot be read"),
    "odd config": (lambda at: ["--model", folder_without(at, "[]")], "config.json cannot be read"),
    "other model": (lambda at: ["--model", folder_without(at, {"model_type": "llama"})], "model_type is 'llama'"),
    "no weights": (lambda at: ["--model", folder_without(at, V4)], "no weights (*.safetensors) beside config.json"),
    "odd heads": (lambda at: ["--model", folder_without(at, {**V4, "num_attention_heads": "x"}, True)], "is 'x'"),
    "heads by tp": (lambda at: ["--tp", "3"], "--tp 3 does not divide the model's 64 heads: use one of 1, 2, 4, 8"),
    "no tp": (lambda at: ["--tp", "0"], "--tp is 0 but must be at least 1"),
    "tp is no number": (lambda at: ["--tp", "two"], "--tp"),
    "no policy": (lambda at: ["--policy", "wide"], "got 'wide', accepted are native, sm12x-prefill, padded"),
    "no layout": (lambda at: ["--cache-layout", "v9"], "got 'v9', accepted are v4, bf16"),
    "no device": (lambda at: ["--device", "tpu"], "got 'tpu', accepted are auto, cpu, cuda"),
    "no option": (lambda at: ["--wide"], "--wide"),
    "no chunk": (lambda at: ["--prefill-chunk", "0"], "--prefill-chunk"),
    "port out of range": (lambda at: ["--port", "70000"], "--port is 70000 but must be in 0..65535"),
    "json is a folder": (lambda at: ["--json", str(at)], "is a folder; give a file name"),
    "report is a file": (lambda at: ["--report", __file__], "is a file; give a folder"),
    "report below a file": (lambda at: ["--report", f"{__file__}/x"], "cannot be written (Not a directory)"),
    "json in no real folder": (lambda at: ["--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
    "report in no real folder": (lambda at: ["--report", "/proc/x/y"], "--report /proc/x/y: cannot be written"),
    "json name too long": (lambda at: ["--json", str(at / ("x" * 300))], "cannot be written (File name too long)"),
    "no backend": (lambda at: ["--backend", "foo"], "--backend foo: no such backend, accepted are hopper, triton, "),
    "seed too large": (lambda at: ["--seed", "99999999999999999999999"], "18446744073709551615"),
    "seed below 0": (lambda at: ["--seed", "-1"], "--seed"),
    "timeout too long": (lambda at: ["--timeout", "1e30"], "86400"),
    "timeout is infinite": (lambda at: ["--timeout", "inf"], "86400"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_says_what_to_do(name, tmp_path, capfd, monkeypatch):
    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)
    if name != "port out of range":  # which is found when the first process is about to start
        monkeypatch.setattr(launch, "run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    make, says = BAD[name]
    arguments = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert cli.run(["compare", *arguments]) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert err.startswith("headfit: ")
    assert says in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_without_transformers_the_remedy_comes_before_any_rank(monkeypatch, capfd):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(launch, "run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    assert cli.run(["compare"]) == 2
    assert capfd.readouterr().err == "headfit: transformers is not installed; pip install 'headfit[compare]'\n"


def test_prompt_from_a_pipe_is_read_once_and_handed_on(small, tmp_path, monkeypatch):
    """As in `--prompt <(command)`: a second reader of a FIFO would wait for ever."""
    from headfit import compare

    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)
    pipe, record, text = tmp_path / "pipe", tmp_path / "a.json", b"thirty bytes of text: 0123456789"
    os.mkfifo(pipe)

    def run_ranks(target: str, payload: dict, world: int, **options: object) -> dict | None:
        return compare.rank_main(ranks.Rank(0, 1), json.loads(json.dumps(payload)), lambda event: None)

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)
    writer.start()
    assert cli.run(["compare", *small, "--tp", "1", "--prompt", str(pipe), "--json", str(record)]) == 0
    writer.join(timeout=10)
    made = data.from_dict(json.loads(record.read_text()))
    assert (made.workload.prompt, made.workload.prompt_tokens_all) == ("pipe", len(text))


def test_only_rank_0_takes_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert subject.read_prompt(data.Options(prompt=str(tmp_path / "pipe")), rank=1) == b""
    (tmp_path / "text").write_bytes(b"text")
    for rank in (0, 1):
        assert subject.read_prompt(data.Options(prompt=str(tmp_path / "text")), rank) == b"text"
        with pytest.raises(ranks.InputError, match="No such file"):  # every rank says so before it waits for others
            subject.read_prompt(data.Options(prompt=str(tmp_path / "none")), rank)


def test_empty_prompt(tmp_path, capfd):
    (tmp_path / "empty").touch()
    assert cli.run(["compare", "--prompt", str(tmp_path / "empty")]) == 2
    assert "is empty; give a file with at least one byte" in capfd.readouterr().err


@pytest.fixture
def taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_port_in_use(taken, capfd):
    assert cli.run(["compare", "--port", str(taken)]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"headfit: port {taken} cannot be used (Address already in use): pass another --port")
    assert err.count("\n") == 1


def test_master_port_in_use(taken, small):
    group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}
    code, out, err = headfit_says("compare", *small, **group)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "headfit: rank 0 failed: the rendezvous port is in use: set another MASTER_PORT"
    )


def test_peer_that_never_comes(small):
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    code, out, err = headfit_says("compare", *small, "--timeout", "3", **group)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "lost another rank or waited too long for it" in err
    assert "raise --timeout" in err


def test_tp_that_contradicts_torchrun(monkeypatch, capfd):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["compare", "--tp", "4"]) == 2
    assert "--tp is 4 but torchrun started 2 ranks: leave --tp out, or start 4 ranks" in capfd.readouterr().err


def test_what_both_ranks_find_is_said_once(small, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, out, err = headfit_says("compare", *small, "--device", "cuda", "--json", str(tmp_path / "x.json"))
    assert (code, out) == (2, "")
    assert (
        err
        == "headfit: --device cuda: torch sees no CUDA GPU here; use --device cpu, or install a CUDA build of torch\n"
    )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the rest of the command


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"headfit {headfit.__version__}\n"


def test_help_names_every_option(capsys):
    assert cli.run(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--tp", "--model", "--prompt", "--prefill-chunk", "--new-tokens", "--policy", "--seed", "--json", "--report",
        "--backend", "--cache-layout", "--device", "--port", "--timeout",
    ):  # fmt: skip
        assert option in text


def test_unknown_command(capsys):
    assert cli.run(["compere"]) == 2
    assert "compere" in capsys.readouterr().err


def test_doctor_prints_tables_and_json(capsys):
    assert cli.run(["doctor", "--tp", "2", "--gpu", "sm_90"]) == 0
    assert "wasted" in capsys.readouterr().out
    assert cli.run(["doctor", "--tp", "2", "--gpu", "sm_90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_heads"] == 64


@pytest.mark.parametrize("arguments", [["--tp", "3"], ["--gpu", "abacus"], ["--model", "/no/such"], ["--policy", "x"]])
def test_doctor_refuses_bad_input_in_one_line(arguments, capsys):
    assert cli.run(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headfit: ")
    assert err.count("\n") == 1


WITHOUT_GPU = "headfit: nothing was compiled: no CUDA device"


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_warmup_without_a_gpu_says_so(interpret, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert cli.run(["warmup"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(WITHOUT_GPU)
    assert "run it where the model will be served" in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.fixture
def two_gpus(monkeypatch):
    """What warmup was asked to compile, on a machine that claims two GPUs."""
    import torch

    from headfit import kernels

    pytest.importorskip("triton")
    warm = pytest.importorskip("headfit.kernels.warmup")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(kernels, "why_not", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked: list[tuple] = []

    def compile_all(heads, layouts, page_sizes, device):
        asked.append((list(heads), list(layouts), list(page_sizes), device))
        return {f"split h={-(-heads[0] // 16) * 16}": 3.0 / len(asked)}

    monkeypatch.setattr(warm, "warmup", compile_all)
    return asked


def test_warmup_compiles_what_the_ranks_launch(two_gpus, capsys):
    assert cli.run(["warmup", "--policy", "native"]) == 0
    assert two_gpus == [([h], ["v4"], [64], "cuda:0") for h in (1, 2, 4, 8, 16, 32, 64)]
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["3.00", "s", "split", "h=16"]  # the first time, not the last
    assert out.splitlines()[-1].startswith("3 kernels ready for 1, 2, 4, 8, 16, 32, 64 heads, in ")
    assert err.splitlines()[0] == "headfit: compiling for 1 heads"


@pytest.mark.parametrize(
    ("arguments", "heads"),
    [
        (["--tp", "8", "--policy", "native"], [8]),
        (["--tp", "8", "--policy", "padded"], [64]),
        (["--tp", "8", "--policy", "native", "--model", "deepseek-v4-pro"], [16]),
    ],
)
def test_warmup_follows_policy_and_model(arguments, heads, two_gpus):
    more = ["--gpu", "1", "--layout", "v4", "--layout", "bf16", "--page-size", "48"]
    assert cli.run(["warmup", *arguments, *more]) == 0
    assert two_gpus == [([h], ["v4", "bf16"], [48], "cuda:1") for h in heads]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "3"], "--tp 3 does not split the 64 heads: use one of 1, 2, 4"),
        (["--policy", "wide"], "got 'wide', accepted are native, sm12x-prefill, padded"),
        (["--gpu", "2"], "--gpu 2 is not here: accepted are 0 to 1"),
        (["--gpu", "h200"], "--gpu"),
        (["--model", "/no/such"], "/no/such"),
        (["--page-size", "0"], "--page-size"),
    ],
)
def test_warmup_refuses_bad_input_in_one_line(arguments, says, two_gpus, capsys):
    assert cli.run(["warmup", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headfit: ")
    assert says in err
    assert err.count("\n") == 1
    assert two_gpus == []


def test_warmup_refuses_an_unknown_layout(monkeypatch, two_gpus, capsys):
    from headfit.kernels import warmup as warm

    def refuse(*arguments):
        raise ValueError("layouts: got 'v9', accepted are 'v4'")

    monkeypatch.setattr(warm, "warmup", refuse)
    assert cli.run(["warmup", "--layout", "v9"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "headfit: layouts: got 'v9', accepted are 'v4'"


def test_installed_package_carries_the_readme(monkeypatch, tmp_path):
    """Outside a checkout the default prompt is the package's description."""
    monkeypatch.setattr(subject, "__file__", str(tmp_path / "a" / "b" / "subject.py"))
    description = metadata.metadata("headfit").json.get("description", "")
    assert subject.readme() == str(description).encode()
    assert len(description) > 50


def test_result_is_shown_even_where_it_cannot_be_written(tmp_path, monkeypatch, capsys):
    """A disk that fills during the run: the figures are printed, the error is one line, no part of a file is left."""
    from test_report import make

    def full(*arguments):
        raise OSError(28, "No space left on device", "a temporary file")

    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments, **options: data.to_dict(make()))
    monkeypatch.setattr("headfit.report.os.replace", full)
    assert cli.run(["compare", "--json", str(tmp_path / "compare.json")]) == 2
    out, err = capsys.readouterr()
    assert "every surviving bit equal" in out
    file = tmp_path / "compare.json"  # as it was given, not the temporary file
    assert err == f"headfit: --json {file}: cannot be written (No space left on device); choose another place\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_a_difference_is_exit_code_1_and_still_written(same, code, tmp_path, monkeypatch, capsys):
    from test_report import FIRST, make

    for variable in TORCHRUN:
        monkeypatch.delenv(variable, raising=False)
    made = make() if same else make(first_difference=FIRST)
    monkeypatch.setattr(launch, "run_ranks", lambda *arguments, **options: data.to_dict(made))
    assert cli.run(["compare", "--json", str(tmp_path / "a.json"), "--report", str(tmp_path)]) == code
    assert (FIRST.sentence in " ".join(capsys.readouterr().out.split())) is not same
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "index.html"]
