"""The gate: at which query-head width a call may run, and why. Pure decisions only.

Belongs here: `Policy`, `WidthDecision`, the published gate term by term, and `plan_width`. Does not belong here:
tensors, torch, CUDA, device queries, imports of kernel packages, environment reads (`Policy.from_env` asks
`headfit.env`, when called).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headfit.capability import MODES as MODES
from headfit.capability import NO_BATCH_EXCEEDS as NO_BATCH_EXCEEDS
from headfit.capability import Call as Call
from headfit.capability import Capability as Capability
from headfit.capability import Side as Side
from headfit.capability import above_split, is_sm12x, kernel_of, side_of, smallest_listed, topk_problem, words
from headfit.capability import allocation_width as allocation_width
from headfit.capability import padded_width as padded_width

# Scope of the published gate. Not "is_extend": that is also true for target-verify, which must keep its kernel.
PREFILL_MODES: Final = frozenset({"extend", "mixed", "split_prefill"})

Rejected = tuple[tuple[int, str, str], ...]


class NoLegalWidthError(ValueError):
    """The kernel accepts no head count that this policy could run this call at."""


@dataclass(frozen=True)
class Policy:
    """Which widths we want; `Capability` says which are possible. Use the constructors, not the fields.

    ``kind`` is ``native``, ``sm12x-prefill`` or ``padded``; ``modes`` the gate's allow-list; ``enabled`` its env
    switch; ``origin`` where the policy came from, quoted in reasons.
    """

    kind: Literal["native", "sm12x-prefill", "padded"]
    modes: frozenset[str] = PREFILL_MODES
    enabled: bool = True
    origin: str = "Policy"

    def __post_init__(self) -> None:
        if self.kind not in ("native", "sm12x-prefill", "padded"):
            raise ValueError(
                f"kind: got {self.kind!r}, accepted are native, sm12x-prefill and padded; "
                "use Policy.native(), Policy.sm12x_prefill() or Policy.padded()"
            )
        if not isinstance(self.enabled, bool):  # a string "0" is true: the switch would open what it should keep shut
            raise TypeError(f"enabled: got {self.enabled!r}, need True or False; Policy.from_env() reads the variables")

    @classmethod
    def sm12x_prefill(
        cls, *, enabled: bool = True, draft_extend: bool = False, origin: str = "Policy.sm12x_prefill()"
    ) -> Policy:
        """The published SGLang gate, term by term, plus head-count legality.

        The pad is dropped, to exactly ``n_local``, where ALL of these hold: the switch is on (``enabled``); compute
        capability major is 12; mode and original mode are plain extend, mixed or split-prefill (draft-extend only with
        ``draft_extend=True``); no breakable CUDA graph; rows strictly above the capability's ``row_split``; the kernel
        above the split lists ``n_local`` heads and the call's topk. Otherwise the call keeps the width it had.
        """
        modes = PREFILL_MODES | {"draft_extend"} if draft_extend else PREFILL_MODES
        return cls("sm12x-prefill", frozenset(modes), enabled, origin)

    @classmethod
    def native(cls, *, origin: str = "Policy.native()") -> Policy:
        """Any phase, mode and chip: the smallest width >= n_local that the capability lists for that side."""
        return cls("native", origin=origin)

    @classmethod
    def padded(cls, *, origin: str = "Policy.padded()") -> Policy:
        """Off: n_heads at TP1, else 64 where n_local <= 64, else n_heads."""
        return cls("padded", origin=origin)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """From ``HEADFIT_WIDTH`` (native, sm12x-prefill, padded) and ``SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS``.

        ``HEADFIT_WIDTH`` decides where it is set, the switch then being the env term of ``sm12x-prefill``. Where it
        is not set, a switch that is off keeps the pad everywhere, and otherwise the policy is native.

        Args:
            environ: variables to read, by default those of the process.

        Raises:
            ValueError: for a value that is none of the accepted ones.
        """
        from headfit import env

        kind = env.read("HEADFIT_WIDTH", environ)
        switch = bool(env.read(env.UNPAD_SWITCH, environ))
        if kind == "native" or (kind is None and switch):
            return cls.native(origin="HEADFIT_WIDTH=native" if kind else "the default, native")
        if kind == "padded":
            return cls.padded(origin="HEADFIT_WIDTH=padded")
        return cls.sm12x_prefill(enabled=switch, origin=f"{env.UNPAD_SWITCH}={int(switch)}")


@dataclass(frozen=True)
class WidthDecision:
    """What to launch, and why.

    ``width``: head count to launch at. ``padded``: whether that is more than the rank owns. ``reason``: a sentence a
    person can act on. ``family``: the kernel family. ``rule``: the rule that decided (see `plan_width`). ``side``: the
    kernel, prefill or decode. ``n_local``: heads owned. ``padded_width``: what a stack that always pads would launch.
    ``rejected``: widths that were wanted and not taken, as (width, rule, why).
    """

    width: int
    padded: bool
    reason: str
    family: str
    rule: str
    side: Side
    n_local: int
    padded_width: int
    rejected: Rejected = ()

    @property
    def wasted(self) -> float:
        """Share of the attention arithmetic that is thrown away, from 0 to below 1."""
        return 1 - self.n_local / self.width


# The published gate: each term says None (it passes), or in words why the pad stays.


def _switch_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    return None if policy.enabled else f"unpadding is switched off by {policy.origin}; set that to 1 to allow it"


def _chip_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    cc = capability.compute_capability
    if is_sm12x(cc):
        return None
    chip = "there is no CUDA device" if cc is None else f"this is {cc[0]}.{cc[1]}"
    return f"the gate is for compute capability 12.x and {chip}; HEADFIT_WIDTH=native covers other chips"


def _mode_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    if call.mode in policy.modes:
        return None
    return f"mode {call.mode} keeps the kernel it ran; the gate covers {', '.join(sorted(policy.modes))}"


def _original_mode_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    original = call.original_mode
    if original is None or original in policy.modes:
        return None
    return f"the batch was {original} before it was rewritten to {call.mode}, and {original} keeps the kernel it ran"


def _graph_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    if not call.in_breakable_graph:
        return None
    return (
        "a breakable CUDA graph is being captured or replayed and its shape key holds no mode; "
        "run prefill outside such graphs to drop the pad"
    )


def _rows_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    split, family = capability.row_split, capability.family
    if capability.fork == "entry":
        if side_of(call, capability) == "prefill":
            return None
        return f"{family} serves mode {call.mode} by its decode entry; the gate covers its prefill entry"
    if above_split(call.rows, split):
        return None
    if split == 0:
        return "a call of 0 rows launches nothing"
    if not above_split(split + 1, split):
        return f"the row count up to which {family} decodes could not be read; `headfit doctor` says why"
    return f"{call.rows} rows do not exceed the {split} that still run the decode kernel of {family}; use larger chunks"


def _topk_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    return topk_problem(call, capability)


def _heads_term(call: Call, capability: Capability, policy: Policy) -> str | None:
    heads = capability.heads(side_of(call, capability))
    if call.n_local in heads:
        return None
    return (
        f"{kernel_of(call, capability)} takes {words(heads)} heads, not {call.n_local}; "
        "another tp, another release or HEADFIT_WIDTH=native may fit"
    )


GATE: Final[tuple[tuple[str, Callable[[Call, Capability, Policy], str | None]], ...]] = (
    ("switch", _switch_term),
    ("chip", _chip_term),
    ("mode", _mode_term),
    ("original_mode", _original_mode_term),
    ("graph", _graph_term),
    ("rows", _rows_term),
    ("topk", _topk_term),
    ("heads", _heads_term),
)


def _decide(
    call: Call, capability: Capability, width: int, rule: str, reason: str, rejected: Rejected = ()
) -> WidthDecision:
    return WidthDecision(
        width=width,
        padded=width > call.n_local,
        reason=reason,
        family=capability.family,
        rule=rule,
        side=side_of(call, capability),
        n_local=call.n_local,
        padded_width=call.padded_width,
        rejected=rejected,
    )


def _keep_pad(call: Call, capability: Capability, rule: str, why: str, rejected: Rejected = ()) -> WidthDecision:
    # Never narrower than the pad: what must keep its pad is not to be unpadded by a gap in a table.
    heads, want = capability.heads(side_of(call, capability)), call.padded_width
    kernel = kernel_of(call, capability)
    width = smallest_listed(heads, want)
    if width is None:
        narrower = smallest_listed(heads, call.n_local)
        remedy = "choose another backend" if narrower is None else f"HEADFIT_WIDTH=native would run {narrower} heads"
        raise NoLegalWidthError(
            f"width: {kernel} takes {words(heads)} heads, and the pad needs at least "
            f"{want} ({call.n_local} owned of {call.n_heads}); {remedy}. The pad is kept because {why}"
        )
    if width > want:
        gap = f"{kernel} takes no {want} heads, {width} is the next it takes"
        why, rejected = f"{why}; {gap}", (*rejected, (want, "heads", gap))
    owned = f"for the {call.n_local} owned heads" if width > call.n_local else "which is what the rank owns"
    return _decide(call, capability, width, rule, f"launched at {width} {owned}: {why}", rejected)


def _native(call: Call, capability: Capability) -> WidthDecision:
    trouble = topk_problem(call, capability)
    if trouble is not None:
        return _keep_pad(call, capability, "topk", trouble, ((call.n_local, "topk", trouble),))
    heads = capability.heads(side_of(call, capability))
    kernel = f"{kernel_of(call, capability)} takes {words(heads)} heads"
    if capability.problems:
        kernel += ", as far as could be read (`headfit doctor` says what could not)"
    width = smallest_listed(heads, call.n_local)
    if width is None:
        raise NoLegalWidthError(
            f"width: {kernel}, and none of these holds the {call.n_local} heads that this rank owns; "
            "use a larger tp or another backend"
        )
    if width == call.n_local:
        return _decide(call, capability, width, "native", f"{kernel}: launched at the {width} that the rank owns")
    gap = f"{kernel}; {width} is the smallest of these that holds the {call.n_local} owned"
    return _decide(call, capability, width, "native", gap, ((call.n_local, "heads", gap),))


def plan_width(call: Call, capability: Capability, policy: Policy) -> WidthDecision:
    """Decide the width to launch ``call`` at, on a kernel of ``capability``, under ``policy``. Pure: no device, no I/O.

    ``rule`` of the answer: ``native``; ``unpadded`` (the gate opened); ``padded`` (the policy asks for the pad);
    ``no_pad`` (the padded width is what the rank owns anyway); or the term of the gate that kept the pad: ``switch``,
    ``chip``, ``mode``, ``original_mode``, ``graph``, ``rows``, ``topk``, ``heads``; every failed term stands in
    ``rejected``.

    Always: the width is one that the capability lists for that side of the split; it is never below n_local; and under
    `Policy.sm12x_prefill` it is below the padded width only strictly above the split. Where the padded width is not
    listed, the next listed one above it is taken; where there is none, the call is refused, not silently narrowed.

    Raises:
        NoLegalWidthError: (a ValueError) no listed head count is one this policy may use; the text says what would be.
    """
    given: tuple[object, ...] = (call, capability, policy)
    if not all(map(isinstance, given, (Call, Capability, Policy))):
        got = ", ".join(type(x).__name__ for x in given)
        raise TypeError(f"plan_width: got ({got}), need (Call, Capability, Policy) in this order")
    return _plan(call, capability, policy)


@functools.lru_cache(maxsize=4096)  # an engine asks the same question in every layer of every step
def _plan(call: Call, capability: Capability, policy: Policy) -> WidthDecision:
    if policy.kind == "native":
        return _native(call, capability)
    if policy.kind == "padded":
        return _keep_pad(call, capability, "padded", f"{policy.origin} asks for the pad")
    if call.padded_width == call.n_local:
        return _keep_pad(call, capability, "no_pad", "there is no pad to drop")
    checked = ((rule, term(call, capability, policy)) for rule, term in GATE)
    failed = tuple((call.n_local, rule, why) for rule, why in checked if why is not None)
    if failed:
        return _keep_pad(call, capability, failed[0][1], failed[0][2], failed)
    split = capability.row_split
    rows = f"{call.rows} rows exceed its decode limit of {split}" if split else "no row count selects another kernel"
    why = f"{kernel_of(call, capability)} takes the {call.n_local} owned heads and {rows}"
    return _decide(call, capability, call.n_local, "unpadded", why)
