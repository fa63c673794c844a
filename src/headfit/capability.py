"""What a call asks for and what a kernel family accepts: `Call`, `Capability`, and one predicate per rule about them.

Belongs here: the two frozen facts that the gate compares, and the predicates that gate, tables, tests and command line
share. Does not belong here: wishes (`headfit.width.Policy`), tensors, torch, device queries, kernel packages.

Vocabulary. A rank *owns* ``n_local = n_heads / tp`` query heads. A kernel is *launched at* a width, the number of query
rows per token that it computes. Width above ``n_local`` is padding: computed, then thrown away.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

MODES: Final = (
    "extend",
    "mixed",
    "split_prefill",
    "draft_extend",
    "target_verify",
    "decode",
    "idle",
    "dllm_extend",
)
# Modes that an engine serves through its decode entry. Consulted only for families whose prefill and decode are two
# entry points; where one entry forks on the row count, the mode plays no part in the choice of kernel.
DECODE_MODES: Final = frozenset({"decode", "target_verify", "idle"})
PAD_HEADS: Final = 64  # the smallest head count that every closed kernel accepts, hence what serving stacks pad to
MAX_HEADS: Final = 128
# A row split no batch can exceed. It stands for "could not be read": every call then stays on the decode side, so
# everything keeps its pad.
NO_BATCH_EXCEEDS: Final = sys.maxsize

Side = Literal["prefill", "decode"]


def _integer(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), need an integer >= {least}; pass a plain int")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}: got {number}, need an integer >= {least}; pass the true count, not a sentinel")
    return number


def _check_mode(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in MODES:
        raise ValueError(
            f"{name}: got {value!r}, accepted are {', '.join(MODES)}; map the engine's forward mode to one of these"
        )


@dataclass(frozen=True)
class Call:
    """One attention call of one rank, as far as the width depends on it.

    Args:
        rows: query rows (tokens) in the call, >= 0. This, not the mode, is what FlashInfer's SM120 entry forks on.
        n_local: query heads this rank owns, >= 1; divides ``n_heads``.
        n_heads: query heads of the model.
        mode: what the engine runs, one of `MODES`.
        original_mode: the mode before data-parallel padding rewrote it, or None where nothing rewrites it. Such padding
            can turn a verify or idle batch into ``extend``, so both are checked.
        in_breakable_graph: a breakable CUDA graph is being captured or replayed; its shape key holds no forward mode.
        topk: width of the index row into the first cache, >= 0.
        extra_topk: width of the index row into the second cache, 0 where there is none.

    Raises:
        TypeError, ValueError: naming the argument, what came, what is accepted and what to do.
    """

    rows: int
    n_local: int
    n_heads: int
    mode: str = "extend"
    original_mode: str | None = None
    in_breakable_graph: bool = False
    topk: int = 128
    extra_topk: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 0), ("n_local", 1), ("n_heads", 1), ("topk", 0), ("extra_topk", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # a call is made per layer and step: the common case is short
                object.__setattr__(self, name, _integer(name, value, least))
        if self.n_heads % self.n_local:
            raise ValueError(
                f"n_local: got {self.n_local}, which does not divide n_heads = {self.n_heads}; "
                "n_local is n_heads / tp, choose a tp that divides the heads"
            )
        _check_mode("mode", self.mode)
        if self.original_mode is not None:
            _check_mode("original_mode", self.original_mode)
        if not isinstance(self.in_breakable_graph, bool):
            raise TypeError(
                f"in_breakable_graph: got {self.in_breakable_graph!r}, need True or False; pass a plain bool"
            )

    @property
    def padded_width(self) -> int:
        """What a stack that pads would launch: see the function of the same name."""
        return padded_width(self.n_local, self.n_heads)


def _counts(name: str, counts: object) -> frozenset[int]:
    if not isinstance(counts, (str, bytes)):
        if isinstance(counts, Iterable):
            return frozenset(_integer(name, h, 1) for h in counts)
        if isinstance(counts, Container):  # membership only: ask for every count there can be
            return frozenset(h for h in range(1, MAX_HEADS + 1) if h in counts)
    raise TypeError(f"{name}: got {counts!r}, need a container of ints such as {{16, 32, 64}} or range(1, 129)")


def _widths(name: str, widths: object) -> range | frozenset[int]:
    """As `_counts`, but a range stays one: "every multiple of 64" is too long to write out."""
    return widths if isinstance(widths, range) and widths and min(widths[0], widths[-1]) > 0 else _counts(name, widths)


@dataclass(frozen=True)
class Capability:
    """What one kernel family accepts. Facts come from a probe, each with its source, and not from a version alone.

    Args:
        family: the kernel family, such as ``"flashinfer_sm120"`` or ``"triton"``.
        compute_capability: (major, minor) of the device the facts hold for; None for no CUDA device.
        row_split: the largest row count that still runs the decode kernel. 0: one kernel serves all row counts.
            `NO_BATCH_EXCEEDS`: a split that could not be read: every call counts as decode and keeps its pad.
        prefill_heads: head counts that the kernel above ``row_split`` accepts: any container of ints, kept as a
            frozenset. With ``row_split`` 0 they hold for every row count.
        decode_heads: head counts of the kernel at and below ``row_split``. With ``row_split`` 0 nothing forks on rows,
            and these are not consulted unless ``fork`` is ``"entry"``.
        fork: what selects the kernel. ``"rows"``: one entry that looks at the row count, or one kernel for all.
            ``"entry"``: prefill and decode are two functions, and the engine's mode says which one it calls (FlashMLA:
            decode, target_verify and idle call the decode entry); ``row_split`` is then 0.
        prefill_topk, decode_topk: index widths that side accepts, None for any; a frozenset, or a range such as
            ``range(64, 2**31, 64)`` for every multiple of 64.
        dual_prefill_topk: index widths into the first cache that prefill accepts where there are two caches; None: the
            same as with one. (FlashInfer 0.6 prefills two caches for a first list of 128 only.)
        page_sizes, extra_page_sizes: tokens a page of the first and the second cache; None for any. No width depends on
            these: adapters stage what does not fit.
        layouts: packed cache layouts, names as in ``headfit.cache``; empty where that is not stated.
        version: of the installed package, where it has one.
        sources: fact name -> where it was read; a mapping or pairs, kept as a tuple of pairs.
        problems: what could not be read; shown by ``headfit doctor``.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """

    family: str
    compute_capability: tuple[int, int] | None
    row_split: int
    prefill_heads: Container[int]
    decode_heads: Container[int]
    fork: Literal["rows", "entry"] = "rows"
    prefill_topk: Container[int] | None = None
    decode_topk: Container[int] | None = None
    version: str | None = None
    sources: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    dual_prefill_topk: Container[int] | None = None
    page_sizes: Container[int] | None = None
    extra_page_sizes: Container[int] | None = None
    layouts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.family, str) or not self.family:
            raise TypeError(f"family: got {self.family!r}, need the kernel family's name, such as 'triton'")
        cc: object = self.compute_capability
        if cc is not None:
            if not isinstance(cc, tuple) or len(cc) != 2:
                raise TypeError(
                    f"compute_capability: got {cc!r}, need (major, minor) such as (9, 0), or None for no GPU"
                )
            pair = tuple(_integer("compute_capability", part, 0) for part in cc)
            object.__setattr__(self, "compute_capability", pair)
        object.__setattr__(self, "row_split", _integer("row_split", self.row_split, 0))
        for name in ("prefill_heads", "decode_heads"):
            object.__setattr__(self, name, _counts(name, getattr(self, name)))
        for name in ("prefill_topk", "decode_topk", "dual_prefill_topk", "page_sizes", "extra_page_sizes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _widths(name, getattr(self, name)))
        if self.fork not in ("rows", "entry"):
            raise ValueError(f"fork: got {self.fork!r}, accepted are 'rows' and 'entry'")
        if self.fork == "entry" and self.row_split:
            raise ValueError(
                f"row_split: got {self.row_split} with fork='entry', need 0; such a family ignores row counts"
            )
        pairs = self.sources.items() if isinstance(self.sources, Mapping) else self.sources
        object.__setattr__(self, "sources", tuple((str(k), str(v)) for k, v in pairs))
        object.__setattr__(self, "problems", tuple(str(p) for p in self.problems))
        object.__setattr__(self, "layouts", tuple(str(name) for name in self.layouts))

    @classmethod
    def unreadable(
        cls, family: str, compute_capability: tuple[int, int] | None, why: str, version: str | None = None
    ) -> Capability:
        """A family that is there but cannot be read: all calls are decode, and only what stacks pad to is listed."""
        heads = frozenset({PAD_HEADS, MAX_HEADS})
        sources = {
            "row_split": "not readable, so no batch exceeds it",
            "heads": "not readable, so only the widths that serving stacks pad to",
        }
        return cls(
            family,
            compute_capability,
            NO_BATCH_EXCEEDS,
            heads,
            heads,
            version=version,
            sources=sources,
            problems=(why,),
        )

    def source(self, fact: str) -> str:
        """Where ``fact`` was read, or ``"not stated"``."""
        return dict(self.sources).get(fact, "not stated")

    def heads(self, side: Side) -> frozenset[int]:
        """Head counts that the kernel of this side accepts."""
        return cast("frozenset[int]", self.prefill_heads if side == "prefill" else self.decode_heads)

    def topk(self, side: Side, two_caches: bool = False) -> range | frozenset[int] | None:
        """Index widths into the first cache that the kernel of this side accepts, None for any."""
        if two_caches and side == "prefill" and self.dual_prefill_topk is not None:
            return cast("range | frozenset[int]", self.dual_prefill_topk)
        return cast("range | frozenset[int] | None", self.prefill_topk if side == "prefill" else self.decode_topk)


# One predicate per rule.


def padded_width(n_local: int, n_heads: int) -> int:
    """The pad of today's stacks: n_heads at TP1, else 64 where n_local <= 64, else n_heads."""
    if n_local == n_heads:
        return n_heads
    return PAD_HEADS if n_local <= PAD_HEADS else n_heads


def above_split(rows: int, row_split: int) -> bool:
    """Whether ``rows`` run the prefill kernel: STRICTLY above the split, and never where the split is not known."""
    return row_split < NO_BATCH_EXCEEDS and rows > row_split


def side_of(call: Call, capability: Capability) -> Side:
    """The kernel that serves this call: by entry point, or by row count, or the only one there is (prefill)."""
    if capability.fork == "entry":
        modes = {call.mode, call.original_mode or call.mode}
        return "decode" if modes & DECODE_MODES else "prefill"
    return "prefill" if capability.row_split == 0 or above_split(call.rows, capability.row_split) else "decode"


def kernel_of(call: Call, capability: Capability) -> str:
    """That kernel's name in a sentence: "the decode kernel of flashinfer_sm120 0.6.17" or "the kernel of triton"."""
    name = f"{capability.family} {capability.version}" if capability.version else capability.family
    one = capability.fork == "rows" and capability.row_split == 0
    return f"the kernel of {name}" if one else f"the {side_of(call, capability)} kernel of {name}"


def is_sm12x(compute_capability: tuple[int, int] | None) -> bool:
    """Compute capability major 12: RTX Blackwell (12.0) and GB10 (12.1)."""
    return compute_capability is not None and compute_capability[0] == 12


def smallest_listed(heads: frozenset[int], at_least: int) -> int | None:
    """The smallest listed head count >= ``at_least``; None if there is none."""
    return min((h for h in heads if h >= at_least), default=None)


def topk_problem(call: Call, capability: Capability) -> str | None:
    """Why the kernel takes this topk at no head count, or None. Such a call keeps its pad: width is not the matter."""
    two = call.extra_topk > 0
    listed = capability.topk(side_of(call, capability), two)
    if listed is None or call.topk in listed:
        return None
    where = " into the first of two caches" if two and listed is capability.dual_prefill_topk else ""
    return (
        f"{kernel_of(call, capability)} takes topk {words(listed)}{where}, not {call.topk}, at any head count; "
        "pad the index rows or choose another backend"
    )


def words(counts: Iterable[int]) -> str:
    """Sorted counts as a person writes them, runs of three or more joined: ``1-128`` or ``16, 32, 64``."""
    if isinstance(counts, range) and counts.start == counts.step > 1:
        return f"multiples of {counts.step}"
    runs: list[list[int]] = []
    for n in sorted(counts):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts) if parts else "nothing"


def allocation_width(n_local: int, n_heads: int, capability: Capability) -> int:
    """The widest launch any policy can plan on this capability: heads that a `SinkCache` or query buffer must hold."""
    pad = padded_width(n_local, n_heads)
    both = (capability.heads("prefill"), capability.heads("decode"))
    listed = [smallest_listed(heads, least) for heads in both for least in (pad, n_local)]
    return max([pad, *(width for width in listed if width is not None)])
