"""The table of environment variables: defaults, accepted values, bad values, strays."""

from __future__ import annotations

import pytest

from headfit import env

SWITCH = "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS"


def test_defaults_where_nothing_is_set_or_empty() -> None:
    for environ in ({}, dict.fromkeys(env.VARIABLES, " ")):
        assert {name: env.read(name, environ) for name in env.VARIABLES} == {
            name: variable.default for name, variable in env.VARIABLES.items()
        }
    assert env.read("HEADFIT_WIDTH", {}) is None
    assert env.read(SWITCH, {}) is True


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "y", "on", " 1 "])
def test_switch_on(text: str) -> None:
    assert env.read(SWITCH, {SWITCH: text}) is True


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "n", "off"])
def test_switch_off(text: str) -> None:
    assert env.read(SWITCH, {SWITCH: text}) is False


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        (SWITCH, "2", "1, true, yes, on, 0, false, no or off"),
        ("HEADFIT_WIDTH", "sm12x_prefill", "native, sm12x-prefill or padded"),
        ("HEADFIT_WIDTH", "64", "native, sm12x-prefill or padded"),
    ],
)
def test_a_bad_value_raises_and_says_what_is_accepted(name: str, text: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got '{text}', accepted are {accepted}; correct it or unset it"):
        env.read(name, {name: text})


def test_a_variable_outside_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError):
        env.read("HEADFIT_NOPE", {})


def test_strays_are_named_with_a_guess() -> None:
    strays = env.unknown({"HEADFIT_WITDH": "native", "HEADFIT_ZZZ": "1", "PATH": "x", "HEADFIT_WIDTH": "padded"})
    assert strays == {"HEADFIT_WITDH": "HEADFIT_WIDTH", "HEADFIT_ZZZ": ""}


def test_reads_the_process_by_default_and_never_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("HEADFIT_WIDTH", "padded")
    before = dict(os.environ)
    assert env.read("HEADFIT_WIDTH") == "padded"
    assert "HEADFIT_WIDTH" not in env.unknown()
    assert dict(os.environ) == before
