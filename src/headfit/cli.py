"""The `headfit` command: options in, one-line errors and tables out.

Belongs here: parsing, what goes to the screen, exit codes. Must not: import torch before a command needs it, compute
anything.

Exit codes: 0 fine, 1 the comparison found a difference, 2 bad input or a rank that failed, 130 / 143 interrupted /
terminated.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import headfit
from headfit import comparison as data
from headfit import launch, ranks, subject

if TYPE_CHECKING:
    from rich.console import Console

_LAYOUTS = ("v4", "bf16")
_DEVICES = ("auto", "cpu", "cuda")

app = typer.Typer(
    help="Sparse MLA attention at the number of query heads a tensor-parallel rank really has.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `headfit` command and of `python -m headfit`. Never returns."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command on `arguments` and return its exit code; every failure is one line on stderr."""
    try:
        with launch.terminate_as_exit():
            code = app(arguments, prog_name="headfit", standalone_mode=False)
        if code == 130:  # typer turned Ctrl-C into this code, without a word
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (ranks.InputError, ImportError) as error:
        return _fail(str(error))
    except launch.RankError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; all ranks were stopped, nothing was written", 130)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error, of typer's own click or the separate one
        if message is None:
            raise
        return _fail(f"{message()} (see headfit --help)")


def _fail(message: str, code: int = 2) -> int:
    print(f"headfit: {' '.join(message.split())}", file=sys.stderr)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headfit {headfit.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _one_of(*accepted: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in accepted:
            raise typer.BadParameter(f"got {value!r}, accepted are {', '.join(accepted)}")
        return value

    return check


# ---------------------------------------------------------------- compare


@app.command()
def compare(
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks to start (default 2); under torchrun, the world size.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Local DeepSeek-V4 checkpoint folder. Default: a small model with V4-Flash's attention."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text file to read. Default: headfit's README.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Use at most the first N tokens of it; 0 is all.")] = 2560,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Rows per prefill call.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate greedily.")] = 24,
    policy: Annotated[
        str,
        typer.Option(
            callback=_one_of(*data.POLICIES), help=f"Width policy of the second run: {', '.join(data.POLICIES)}."
        ),
    ] = "native",
    backend: Annotated[
        str | None, typer.Option(help="Attention backend. Default: the first that runs on the device.")
    ] = None,
    cache_layout: Annotated[
        str, typer.Option(callback=_one_of(*_LAYOUTS), help="Latent cache: v4 (FP8 pages) or bf16.")
    ] = "v4",
    device: Annotated[
        str, typer.Option(callback=_one_of(*_DEVICES), help="auto, cpu, or cuda (one GPU a rank).")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the default model's weights.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page into this folder.")] = None,
    port: Annotated[int, typer.Option(help="Rendezvous port on this machine; 0 takes a free one.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a rank waits for another before it gives up.")] = 120,
    debug: Annotated[bool, typer.Option("--debug", help="When a rank fails, show what all ranks printed.")] = False,
) -> int:
    """Run a prompt with and without the head pad: what the pad costs, and whether a bit or a token changes."""
    joined = ranks.rank_from_env(timeout)
    if joined is not None and tp not in (None, joined.world):
        raise ranks.InputError(
            f"--tp is {tp} but torchrun started {joined.world} ranks: leave --tp out, or start {tp} ranks"
        )
    options = data.Options(
        tp=joined.world if joined is not None else 2 if tp is None else tp,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        prefill_chunk=prefill_chunk,
        new_tokens=new_tokens,
        policy=policy,
        seed=seed,
        backend=backend,
        cache_layout=cache_layout,
        device=device,
        command=shlex.join(["headfit", *sys.argv[1:]]),
    )
    subject.check_options(options)
    _check_outputs(json_file, report)
    if joined is not None:
        return _compare_joined(options, joined, json_file, report, debug)
    from rich.console import Console

    try:
        with _progress(Console(stderr=True)) as show:
            result = launch.run_ranks(
                "headfit.compare:rank_main", asdict(options), options.tp, port=port, timeout_s=timeout, on_event=show
            )
    except launch.RankError as error:
        if debug:
            sys.stderr.write(error.log)
        raise
    return _finish(data.from_dict(result), json_file, report)


def _compare_joined(
    options: data.Options, rank: ranks.Rank, json_file: Path | None, report: Path | None, debug: bool
) -> int:
    """This process is one rank of a group that something else started."""
    os.environ.update(ranks.quiet_environment(os.environ))
    from rich.console import Console

    try:
        with ranks.native_silence(not debug) as stderr:
            from headfit import compare as job

            with _progress(Console(file=stderr, quiet=rank.rank != 0)) as show:
                result = job.rank_main(rank, asdict(options), show)
    except ranks.InputError:
        if rank.rank == 0:
            raise
        return 2  # every rank found the same; one line is enough
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _fail(f"rank {rank.rank} failed: {ranks.describe_failure(error)[0]}")
        sys.stderr.flush()
        os._exit(code)  # threads of a group whose peer is gone can block the interpreter's way out
    return 0 if result is None else _finish(data.from_dict(result), json_file, report)


def _check_outputs(json_file: Path | None, report: Path | None) -> None:
    """Find out now, not after the run, that a result could not be written."""
    from headfit import report as pages

    if report is not None:
        pages.check_installed()
        if report.exists() and not report.is_dir():
            raise ranks.InputError(f"--report {report}: is a file; give a folder, it is made where it is missing")
    if json_file is not None and json_file.is_dir():
        raise ranks.InputError(f"--json {json_file}: is a folder; give a file name")
    for option, folder in (("--report", report), ("--json", json_file.parent if json_file is not None else None)):
        if folder is None:
            continue
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ranks.InputError(f"{option}: {there} cannot be written; choose another place")


def _finish(comparison: data.Comparison, json_file: Path | None, report: Path | None) -> int:
    """Write the files, each whole or not at all, then print; a reader that leaves early costs no file."""
    import json

    from rich.console import Console

    from headfit import report as pages

    written: list[str] = []
    failed: OSError | None = None
    try:
        if report is not None:
            pages.write_atomically(report / pages.PAGE, pages.render(comparison))
            written.append(f"page: {report / pages.PAGE}")
        if json_file is not None:
            pages.write_atomically(json_file, json.dumps(data.to_dict(comparison), indent=1, allow_nan=False) + "\n")
            written.append(f"json: {json_file}")
    except OSError as error:
        failed = error
    console = Console()
    _print_result(console, comparison)
    for line in written:
        console.print(line, style="dim", highlight=False, soft_wrap=True)
    if failed is not None:
        where, why = failed.filename, failed.strerror or failed
        raise ranks.InputError(f"{where}: {why}; choose another place for --report or --json")
    return comparison.exit_code


def _print_result(console: Console, comparison: data.Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(data.subject_line(comparison), "bold"))
    console.print(Text(f"prompt: {data.prompt_line(comparison)}", "dim"))
    cells = data.lane_table(comparison)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for place, header in enumerate(cells.headers):
        # Two lines of heading and one space between columns: the whole table stands in 80 columns.
        table.add_column(header.replace("lane ", "lane\n"), justify="left" if place < 2 else "right", no_wrap=True)
    for row in cells.rows:
        table.add_row(*(Text(cell, "bold red" if cell == "NO" else "") for cell in row))
    console.print()
    console.print(table)
    for number, note in enumerate(cells.notes, 1):
        console.print(Text(f"why {number}: {note}", "dim"))
    console.print(Text(data.timing_note(comparison), "dim"))
    console.print()
    style = {True: "green", False: "bold red", None: ""}
    lines = data.verdicts(comparison)
    width = max(len(question) for question, _, _ in lines)
    for question, answer, good in lines:
        console.print(Text.assemble(f"{question:<{width}}  ", (answer, style[good])))


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[ranks.Event], None]]:
    """A bar on a terminal; elsewhere one plain line whenever the stage changes."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        said: list[str] = []

        def tell(event: ranks.Event) -> None:
            text = event["text"].partition(",")[0]
            if text not in said:
                said.append(text)
                console.print(f"headfit: {text}", highlight=False)

        yield tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(event: ranks.Event) -> None:
            if event["event"] == "progress":
                progress.update(task, description=event["text"], completed=event["done"], total=event["total"])
            else:
                progress.update(task, description=event["text"])

        yield show


# ---------------------------------------------------------------- doctor


@app.command()
def doctor(
    model: Annotated[
        str, typer.Option(help="deepseek-v4-flash, deepseek-v4-pro, or a checkpoint folder.")
    ] = "deepseek-v4-flash",
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size. Default: every size that fits.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU that need not be here: h200, sm_120, 9.0.")] = None,
    policy: Annotated[str | None, typer.Option(help=f"Width policy: {', '.join(data.POLICIES)}.")] = None,
    family: Annotated[str | None, typer.Option(help="One kernel family only, such as triton.")] = None,
    flashinfer: Annotated[str | None, typer.Option(help="A FlashInfer release that need not be here: 0.6.17.")] = None,
    sglang: Annotated[str | None, typer.Option(help="An SGLang release that need not be here: 0.5.18.")] = None,
    vllm: Annotated[str | None, typer.Option(help="A vLLM release that need not be here: 0.33.0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Say what is installed here, which head counts each kernel takes, and which width a model would run at."""
    from rich.console import Console

    from headfit import doctor as clinic

    try:
        found = clinic.doctor_command(
            model=model, tp=tp, gpu=gpu, policy=policy, family=family, flashinfer=flashinfer, sglang=sglang, vllm=vllm
        )
    except (ValueError, OSError) as error:
        raise ranks.InputError(str(error)) from None
    if as_json:
        print(clinic.to_json(found))
    else:
        Console().print(clinic.render(found))
    return 0
