"""Facts of releases that are not installed here: what `headfit doctor` answers from for another machine.

Belongs here: the form of ``recorded.json``, its loader. Does not belong here: reading packages (``flashinfer_facts``,
``flashmla_facts``), deciding. ``compat/check_flashinfer.py`` writes the file from the real packages and fails where
they say something else. A release that is not in it is unknown: the nearest one is not assumed.

``recorded.json``::

    {"schema": 1,
     "flashinfer_sm120": {"0.6.17": {"row_split": 64, "prefill_heads": [16, 32, 64, 128], ...}},
     "flashmla_vllm": {"0.33.0": {"sm90": {...}, "sm100": {...}}},
     "sglang": {"0.5.18": {"rule": "inline", "flashinfer": "0.6.17", "flashmla": null}},
     "vllm": {"0.33.0": {"rule": "padded_num_q_heads", "flashinfer": "0.7.2.post1", "flashmla": [family, version]}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from headfit.capability import Capability

PATH: Final = Path(__file__).with_name("recorded.json")
FLASHINFER: Final = "flashinfer_sm120"
_SETS: Final = (
    "prefill_heads",
    "decode_heads",
    "prefill_topk",
    "decode_topk",
    "dual_prefill_topk",
    "page_sizes",
    "extra_page_sizes",
)
Chip = tuple[int, int] | None


@dataclass(frozen=True)
class Release:
    """A release of an engine: ``rule`` names how it chooses widths, ``flashinfer`` and ``flashmla`` what it pins."""

    engine: str
    version: str
    rule: str
    flashinfer: str | None
    flashmla: tuple[str, str] | None


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    if data.get("schema") != 1:
        raise ValueError(f"{PATH.name}: got schema {data.get('schema')!r}, need 1; reinstall headfit")
    return data


def versions(name: str) -> tuple[str, ...]:
    """Recorded releases of a kernel family or engine, oldest first."""
    return tuple(_data().get(name, {}))


def unknown(name: str, version: str, key: str | None = None) -> str:
    """What to say of a release that is not recorded; ``key``: what the file calls it, where that is not ``name``."""
    return (
        f"{name} {version} is not recorded (recorded: {', '.join(versions(key or name))}) and no other release is "
        "taken for it; run the doctor where it is installed"
    )


def flashinfer(version: str, cc: Chip) -> Capability:
    """What FlashInfer ``version`` accepts in its SM120 sparse MLA; every pad kept where that is not recorded."""
    facts = _data()[FLASHINFER].get(version)
    if facts is None:
        return Capability.unreadable(FLASHINFER, cc, unknown(FLASHINFER, version), version)
    return decode(facts, FLASHINFER, cc, version)


def flashmla(family: str, version: str, cc: Chip) -> Capability:
    """What that copy of FlashMLA accepts on ``cc``; every pad kept where that is not recorded."""
    chip = f"sm{cc[0]}0" if cc is not None else "sm90"
    facts = _data().get(family, {}).get(version, {}).get(chip)
    if facts is None:
        return Capability.unreadable(family, cc, unknown(family, version), version)
    return decode(facts, family, cc, version)


def release(engine: str, version: str) -> Release | None:
    """A recorded release of ``"sglang"`` or ``"vllm"``, or None."""
    entry = _data()[engine].get(version)
    if entry is None:
        return None
    copy = entry["flashmla"]
    return Release(engine, version, entry["rule"], entry["flashinfer"], None if copy is None else (copy[0], copy[1]))


def encode(capability: Capability) -> dict[str, Any]:
    """The facts of ``capability`` as JSON: sets as sorted lists, all multiples of n as ``{"multiples_of": n}``."""
    out: dict[str, Any] = {"row_split": capability.row_split, "fork": capability.fork}
    for name in _SETS:
        value = getattr(capability, name)
        if isinstance(value, range):
            value = {"multiples_of": value.step}
        out[name] = sorted(value) if isinstance(value, frozenset) else value
    out["layouts"] = list(capability.layouts)
    out["sources"] = dict(capability.sources)
    return out


def decode(facts: Mapping[str, Any], family: str, cc: Chip, version: str) -> Capability:
    """The inverse of `encode`."""
    values = dict(facts)
    for name in _SETS:
        if isinstance(values[name], dict):
            step = values[name]["multiples_of"]
            values[name] = range(step, 2**31, step)
    values["layouts"] = tuple(values["layouts"])
    sources = {fact: f"recorded: {where}" for fact, where in values.pop("sources").items()}
    return Capability(family, cc, version=version, sources=sources, **values)
