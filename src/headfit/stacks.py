"""The width that SGLang and vLLM launch by themselves, by release and GPU: what headfit is compared with. Pure.

Belongs here: the engines' own rules, restated from their model files. Does not belong here: what headfit would do
(`headfit.width`), which releases follow which rule (``recorded.json``, checked against the wheels by
``compat/check_flashinfer.py``), looking for engines.

The rules, by the names that ``recorded.json`` uses:

- ``inline`` (SGLang 0.5.16 to 0.5.19, ``MQALayer.forward``): 64, or all heads where a rank owns more; no pad at TP1;
- ``kernel_num_heads`` (SGLang 0.5.20 and later, ``MQALayer._kernel_num_heads``): on SM12x the owned heads for more than
  64 rows, and below that where FlashInfer's decode lists them; else as ``inline``;
- ``padded_num_q_heads`` (vLLM 0.33, ``get_padded_num_q_heads``): FlashMLA at 64 or 128 on SM90 and SM100, FlashInfer at
  the next of 8, 16, 32, 64, 128 on SM12x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headfit.capability import MAX_HEADS, PAD_HEADS, Call, Capability, is_sm12x, side_of, smallest_listed, words
from headfit.recorded import Release, unknown

NAMES: Final = {"sglang": "SGLang", "vllm": "vLLM"}
SGLANG_DECODE_ROWS: Final = 64  # SM120_DECODE_MAX_TOKENS of SGLang 0.5.20 to 0.5.23, a copy of FlashInfer's
VLLM_SM12X_HEADS: Final = frozenset({8, 16, 32, 64, 128})


@dataclass(frozen=True)
class StackWidth:
    """What a stack launches for one call: ``wasted`` is the share of arithmetic thrown away; None: it cannot run it."""

    stack: str
    version: str | None
    width: int | None
    wasted: float | None
    reason: str


def serves(cc: tuple[int, int] | None) -> bool:
    """Whether these stacks have DeepSeek-V4 kernels for this GPU: SM90, SM100 or SM12x."""
    return cc is not None and (cc == (9, 0) or cc[0] in (10, 12))


def padding(call: Call) -> StackWidth:
    """A stack that always pads."""
    return _answer("padded", None, call, call.padded_width, "the pad: 64, or all heads where a rank owns more")


def width_of(
    engine: str, version: str, release: Release | None, call: Call, cc: tuple[int, int], flashinfer: Capability
) -> StackWidth:
    """The width that ``engine`` launches ``call`` at on ``cc``; with ``release`` None (not recorded) it is the pad.

    Args:
        engine, version, release: which stack; ``release`` from `recorded.release`.
        call: one attention call.
        cc: compute capability of the GPU.
        flashinfer: what the FlashInfer beside it accepts; asked on SM12x only.
    """
    if release is None or release.rule not in _RULES:
        return _answer(engine, version, call, call.padded_width, f"{unknown(NAMES[engine], version, engine)}: the pad")
    width, reason = _RULES[release.rule](call, cc, flashinfer)
    if width is not None and is_sm12x(cc) and flashinfer.problems:
        reason = f"{reason}; whether this FlashInfer takes it is not known"
    elif width is not None and is_sm12x(cc):
        side = side_of(call, flashinfer)
        listed = flashinfer.heads(side)
        if width not in listed:
            name = f"FlashInfer {flashinfer.version or ''}".strip()
            reason = f"{reason}: it launches {width}, and the {side} of {name} takes {words(listed)} only: it aborts"
            width = None
    return _answer(engine, version, call, width, reason)


def _answer(engine: str, version: str | None, call: Call, width: int | None, reason: str) -> StackWidth:
    return StackWidth(engine, version, width, None if width is None else 1 - call.n_local / width, reason)


Answer = tuple[int | None, str]


def _inline(call: Call, cc: tuple[int, int], flashinfer: Capability) -> Answer:
    return call.padded_width, "pads to 64, or to all heads where a rank owns more, on every GPU"


def _kernel_num_heads(call: Call, cc: tuple[int, int], flashinfer: Capability) -> Answer:
    if not is_sm12x(cc):
        return call.padded_width, "pads to 64 outside SM12x, or to all heads where a rank owns more"
    if call.n_local == call.n_heads:
        return call.n_local, "TP1: there is no pad"
    if call.rows > SGLANG_DECODE_ROWS:
        return call.n_local, f"above {SGLANG_DECODE_ROWS} rows it launches the owned heads, without asking FlashInfer"
    if not flashinfer.problems and call.rows <= flashinfer.row_split and call.n_local in flashinfer.decode_heads:
        return call.n_local, "FlashInfer's decode lists the owned heads"
    return call.padded_width, "FlashInfer's decode does not list the owned heads, or could not be read: the pad"


def _padded_num_q_heads(call: Call, cc: tuple[int, int], flashinfer: Capability) -> Answer:
    if is_sm12x(cc):
        return smallest_listed(VLLM_SM12X_HEADS, call.n_local), "the next of 8, 16, 32, 64, 128, for FlashInfer"
    if call.n_local > MAX_HEADS:
        return None, "FlashMLA takes 128 heads at most"
    return PAD_HEADS if call.n_local <= PAD_HEADS else MAX_HEADS, "64 or 128, for FlashMLA"


_RULES: Final = {"inline": _inline, "kernel_num_heads": _kernel_num_heads, "padded_num_q_heads": _padded_num_q_heads}
