"""What a person sees of `headfit compare`, and an output that refuses: closed, full, or of few characters.

Belongs here: drawing on stdout and stderr. Must not: decide, compute, format a figure that `comparison`
formats already.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from headfit import comparison as data

if TYPE_CHECKING:
    from headfit.ranks import Event

CLOSED = 141  # what a shell reports for a program that SIGPIPE ended
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


# ---------------------------------------------------------------- an output that refuses


def show_any_character() -> None:
    """From now on stdout shows `?` for what its encoding lacks, and for the odd bytes of a file's name."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def refusal(error: BaseException) -> str | None:
    """What to tell of a stream that could not be written; None for any other error."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _REFUSED:
        return f"the output cannot be written ({error.strerror}): send it to another place"
    return None


def flush() -> None:
    """Write out what waits for stdout and stderr.

    Raises OSError if stdout fails, once: after that the stream leads nowhere, and the interpreter's own flush at its
    end has nothing to complain about.
    """
    failed: OSError | None = None
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            failed = error if stream is sys.stdout else failed
            with suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    if failed is not None:
        raise failed


# ---------------------------------------------------------------- compare


def print_result(comparison: data.Comparison, files: Sequence[str] = ()) -> None:
    """The table, the verdicts, and one line for each of `files`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
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
    for line in files:
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(stream: IO[str] | None = None, *, quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """A bar on a terminal; elsewhere one plain line whenever the stage changes. `stream` None is stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=stream, stderr=stream is None, quiet=quiet)
    if not console.is_terminal:
        said: list[str] = []

        def tell(event: Event) -> None:
            text = event["text"].partition(",")[0]
            if text not in said and not quiet:
                said.append(text)
                with suppress(OSError):  # nobody listens; that must not end the run
                    print(f"headfit: {text}", file=console.file, flush=True)

        yield tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)

        def show(event: Event) -> None:
            if event["event"] == "progress":
                bar.update(task, description=event["text"], completed=event["done"], total=event["total"])
            else:
                bar.update(task, description=event["text"])

        yield show
