"""The `headfit` command: options in, files, one-line errors and exit codes out.

Belongs here: parsing, checks of the options, exit codes. Must not: import torch before a command needs it, compute or
draw anything (`screen` draws).

Exit codes: 0 fine, 1 the comparison found a difference and nothing else, 2 bad input or any failure, 130 / 143
interrupted / terminated, 141 whoever read the output is gone.
"""

from __future__ import annotations

import base64
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import headfit
from headfit import comparison as data
from headfit import launch, ranks, screen, subject

_LAYOUTS = ("v4", "bf16")
_DEVICES = ("auto", "cpu", "cuda")
_MAX_SEED = 2**64 - 1  # what a generator of torch takes
_MAX_TIMEOUT_S = 86400  # a day; far beyond that the C++ side overflows

app = typer.Typer(
    help="Sparse MLA attention at the number of query heads a tensor-parallel rank really has.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `headfit` command and of `python -m headfit`. Never returns."""
    screen.show_any_character()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command on `arguments` (none: the help) and return its exit code.

    Every failure is one line on stderr. 1 is returned for a difference that `compare` found and for nothing else.
    """
    try:
        with launch.terminate_as_exit():
            code = app(arguments or ["--help"], prog_name="headfit", standalone_mode=False)
        if code == 130:  # typer turned Ctrl-C into this code, without a word
            raise KeyboardInterrupt
        code = code if isinstance(code, int) else 0
    except (ranks.InputError, ImportError, launch.RankError) as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted; all ranks were stopped, nothing was written", 130)
    except SystemExit as error:
        if error.code == 1 and isinstance(error.__context__, BrokenPipeError):  # typer and rich end a closed pipe so
            code = screen.CLOSED
        else:
            code = error.code if isinstance(error.code, int) and error.code != 1 else 2
    except Exception as error:
        code = _unexpected(error, arguments)
    try:
        screen.flush()
    except BrokenPipeError:
        return screen.CLOSED if code in (0, 1) else code
    except OSError as error:
        return _fail(screen.refusal(error) or str(error))
    return code


def _unexpected(error: Exception, arguments: list[str]) -> int:
    usage = getattr(error, "format_message", None)  # a usage error, of typer's own click or the separate one
    if usage is not None:
        return _fail(f"{usage()} (see headfit --help)")
    refusal = screen.refusal(error)
    if refusal is not None:
        return _fail(refusal)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if "--debug" not in arguments:
        return _fail(f"{text}; run headfit --debug {shlex.join(arguments)} for the traceback, and please report it")
    with suppress(OSError):
        traceback.print_exc()
    return _fail(f"{text}; please report it with the traceback above")


def _fail(message: str, code: int = 2) -> int:
    with suppress(OSError):  # nobody reads it; the exit code still says it
        if sys.stderr is not None:
            print(f"headfit: {' '.join(message.split())}", file=sys.stderr, flush=True)
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
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
    context: typer.Context,
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
    seed: Annotated[int, typer.Option(min=0, max=_MAX_SEED, help="Seed of the default model's weights.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page into this folder.")] = None,
    port: Annotated[int, typer.Option(help="Rendezvous port on this machine; 0 takes a free one.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, max=_MAX_TIMEOUT_S, help="Seconds a rank waits for another before it gives up.")
    ] = 120,
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
    content = subject.read_prompt(options, 0 if joined is None else joined.rank)
    payload = {"options": asdict(options), "prompt": base64.b64encode(content).decode()}
    debug = debug or bool(context.find_root().params.get("debug"))
    if joined is not None:
        return _compare_joined(payload, joined, json_file, report, debug)
    try:
        with screen.progress() as show:
            result = launch.run_ranks(
                "headfit.compare:rank_main", payload, options.tp, port=port, timeout_s=timeout, on_event=show
            )
    except launch.RankError as error:
        if debug:
            sys.stderr.write(error.log)
        raise
    return _finish(data.from_dict(result), json_file, report)


def _compare_joined(
    payload: dict[str, Any], rank: ranks.Rank, json_file: Path | None, report: Path | None, debug: bool
) -> int:
    """This process is one rank of a group that something else started."""
    os.environ.update(ranks.quiet_environment(os.environ))
    try:
        with ranks.native_silence(not debug) as stderr:
            from headfit import compare as job

            with screen.progress(stderr, quiet=rank.rank != 0) as show:
                result = job.rank_main(rank, payload, show)
    except ranks.InputError:
        if rank.rank == 0:
            raise
        return 2  # every rank found the same; one line is enough
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _fail(f"rank {rank.rank} failed: {ranks.describe_failure(error)[0]}")
        os._exit(code)  # threads of a group whose peer is gone can block the interpreter's way out
    return 0 if result is None else _finish(data.from_dict(result), json_file, report)


def _check_outputs(json_file: Path | None, report: Path | None) -> None:
    """Find out now, not after the run, that a result could not be written."""
    from headfit import report as pages

    if report is not None:
        pages.check_installed()
    for option, path, file in (
        ("--report", report, report and report / pages.PAGE),
        ("--json", json_file, json_file),
    ):
        if path is None or file is None:
            continue
        try:
            if option == "--report" and path.exists() and not path.is_dir():
                raise ranks.InputError(f"--report {path}: is a file; give a folder, it is made where it is missing")
            if file.is_dir():
                raise ranks.InputError(f"{option} {file}: is a folder; give a file name")
            pages.check_writable(file)
        except OSError as error:
            raise _no_place(option, path, error) from None


def _no_place(option: str, path: Path, error: OSError) -> ranks.InputError:
    return ranks.InputError(f"{option} {path}: cannot be written ({error.strerror or error}); choose another place")


def _finish(comparison: data.Comparison, json_file: Path | None, report: Path | None) -> int:
    """Write the files, each whole or not at all, then print; a reader that leaves early costs no file."""
    import json

    from headfit import report as pages

    lines: list[str] = []
    failed: ranks.InputError | None = None
    if report is not None:
        try:
            pages.write_atomically(report / pages.PAGE, pages.render(comparison))
            lines.append(f"page: {report / pages.PAGE}")
        except OSError as error:
            failed = _no_place("--report", report, error)
    if json_file is not None:
        try:
            pages.write_atomically(json_file, json.dumps(data.to_dict(comparison), indent=1, allow_nan=False) + "\n")
            lines.append(f"json: {json_file}")
        except OSError as error:
            failed = failed or _no_place("--json", json_file, error)
    screen.print_result(comparison, lines)
    if failed is not None:
        raise failed
    return comparison.exit_code


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


# ---------------------------------------------------------------- warmup


@app.command()
def warmup(
    model: Annotated[
        str, typer.Option(help="deepseek-v4-flash, deepseek-v4-pro, or a checkpoint folder.")
    ] = "deepseek-v4-flash",
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size. Default: every size that fits.")] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"Width policy: {', '.join(data.POLICIES)}. Default: as the environment says.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Latent cache: v4 (default), v32, bf16 or bf16-576. May be repeated.")
    ] = None,
    page_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens a page (default 64). May be repeated; powers of two are one."),
    ] = None,
    gpu: Annotated[int, typer.Option(min=0, help="Number of the GPU to compile on; one of each kind is enough.")] = 0,
) -> int:
    """Compile the Triton and Hopper kernels that the ranks of a model launch into their caches, ahead of serving."""
    if policy is not None:
        _one_of(*data.POLICIES)(policy)
    from headfit import prepare

    reason = prepare.why_not(gpu)
    if reason is not None:
        raise ranks.InputError(f"nothing was compiled: {reason}")
    from headfit.kernels.warmup import warmup as compile_all

    ready: dict[str, float] = {}
    try:
        heads = prepare.heads_to_launch(model, tp, policy)
        with screen.progress() as show:
            for done, count in enumerate(heads):
                text = f"compiling for {count} heads"
                show({"event": "progress", "done": done, "total": len(heads), "text": text})
                made = compile_all([count], layout or ["v4"], page_size or [64], f"cuda:{gpu}")
                for name, seconds in made.items():
                    ready.setdefault(name, seconds)  # later it is only launched
    except (ValueError, OSError) as error:
        raise ranks.InputError(str(error)) from None
    for name, seconds in ready.items():
        print(f"{data.duration(seconds):>8}  {name}")
    print(f"{len(ready)} kernels ready for {', '.join(map(str, heads))} heads, in {prepare.cache_folders()}")
    return 0
