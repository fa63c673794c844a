"""Every environment variable that headfit reads: one table, one reader, and a bad value raises.

Belongs here: names, accepted values, defaults, what each does. Does not belong here: acting on them. Nothing is read at
import and nothing is ever written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = "HEADFIT_"
UNPAD_SWITCH: Final = "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS"

Value = str | bool | int | None


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "y", "on"):
        return True
    if word in ("0", "false", "no", "n", "off"):
        return False
    raise ValueError("1, true, yes, on, 0, false, no or off")


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("integers >= 0")
    return int(text)


def _folder(text: str) -> str:
    folder = os.path.expanduser(text.strip())
    if not os.path.isabs(folder) or os.path.isfile(folder):
        raise ValueError("absolute paths of folders, which may begin with ~ and need not exist")
    return folder


def _one_of(*accepted: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in accepted:
            raise ValueError(", ".join(accepted[:-1]) + f" or {accepted[-1]}")
        return word

    return parse


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``parse`` raises ValueError with the accepted values as its text."""

    name: str
    parse: Callable[[str], Value]
    default: Value
    meaning: str


VARIABLES: Final[Mapping[str, Variable]] = {
    v.name: v
    for v in (
        Variable(
            "HEADFIT_WIDTH",
            _one_of("native", "sm12x-prefill", "padded"),
            None,
            "the width policy: native (any phase and chip), sm12x-prefill (the published gate) or padded (off)",
        ),
        Variable(
            UNPAD_SWITCH,
            _boolean,
            True,
            "SGLang's switch of the published gate; off keeps the pad, unless HEADFIT_WIDTH asks for another policy",
        ),
        Variable(
            "HEADFIT_CACHE_DIR",
            _folder,
            None,
            "where compiled Hopper kernels are kept; by default headfit in XDG_CACHE_HOME, or in ~/.cache",
        ),
        Variable(
            "HEADFIT_PACKING",
            _boolean,
            True,
            "off: the Hopper kernels compute every row by itself, also where neighbouring rows list the same keys",
        ),
        Variable(
            "HEADFIT_TEST_SEED",
            _count,
            None,
            "the seed of the conformance suite's data, to repeat a run that failed; without it every run draws its own",
        ),
    )
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Value:
    """The value of variable ``name``, or its default where it is not set or empty.

    Args:
        name: one of `VARIABLES`.
        environ: where to look, by default the process's environment.

    Raises:
        KeyError: the variable is not in the table.
        ValueError: its value is not accepted; the text says which are.
    """
    variable = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name, "")
    if not text.strip():
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as accepted:
        raise ValueError(f"{name}: got {text!r}, accepted are {accepted}; correct it or unset it") from None


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """``HEADFIT_*`` variables that are set but that nothing reads -> the name that was probably meant, or ``""``."""
    names = os.environ if environ is None else environ
    ours = {n.removeprefix(_PREFIX): n for n in VARIABLES if n.startswith(_PREFIX)}
    stray = sorted(n for n in names if n.startswith(_PREFIX) and n not in VARIABLES)
    near = {n: difflib.get_close_matches(n.removeprefix(_PREFIX), ours, 1) for n in stray}
    return {n: ours[near[n][0]] if near[n] else "" for n in stray}
