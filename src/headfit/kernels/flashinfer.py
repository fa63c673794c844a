"""FlashInfer's SM120 sparse MLA (RTX Blackwell, GB10) as a backend under headfit's contract.

Belongs here: which of its kernels serves a call, at which width, list widths and pages. Does not belong here: reading
what an installed FlashInfer accepts (``headfit.flashinfer_facts``), marshalling that others share (``adapt.py``).

Read in the releases 0.6.14, 0.6.17, 0.6.18 and 0.7.4 (0.6.13 has no such kernels); no SM12x was at hand to run them.
What the contract needs, and what is done for it:

- *Fork*: rows up to ``_DECODE_MAX_TOKENS`` run ``sparse_mla_sm120_decode_dsv4``, more the paged prefill. The number of
  64-key chunks a block of the decode kernel takes is fixed here: left alone it follows heads and rows, and so do bits.
- *Shapes*: q and out contiguous, lists dense; head counts and list widths of closed switches, so both are padded.
- *Invalid lanes*: up to 0.6.18 every lane of a started chunk is gathered, -1 as slot 0, and weighed 0: a NaN there
  poisons the row. Lists are compacted and their rest repeats a slot that the row lists (`adapt.compacted_lists`).
- *lse*: base 2 with the sink folded in; run without a sink, which is applied afterwards (`adapt.contract_results`).
- *Empty rows*: out 0 and lse -1e30 (0.6) or -inf (0.7) become 0 and +inf.
- *Pages*: 64 tokens, a second cache 64 or 2, in 0.6; others, and misaligned ones, are staged. 0.7 takes any.

Not within the contract: the kernels quantise q and the probabilities to FP8 for lists of 512 and more, and round
partial results to bfloat16; their own tests allow 5e-2. This backend is used only where it is asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from types import ModuleType

import torch
from torch import Tensor

from headfit import arch
from headfit import flashinfer_facts as facts
from headfit.call import D_V, KeySet, SparseCall
from headfit.capability import Capability, smallest_listed, words
from headfit.kernels import adapt

FAMILY = "flashinfer"
CHUNK = 64  # keys in a chunk of the decode kernel
CHUNKS_PER_BLOCK = 1  # fixed, not tuned: more would merge fewer partial results
_DUAL_MAIN = 128  # 0.6: the prefill over two caches exists for a first list of 128 only


@dataclass(frozen=True)
class Installed:
    """An installed FlashInfer and what it accepts. ``any_page``: page sizes are run-time values (0.7)."""

    module: ModuleType
    version: str | None
    split: int
    decode: facts.SideFacts
    prefill: facts.SideFacts
    any_page: bool


@dataclass(frozen=True)
class Plan:
    """How a call is launched: kernel, heads, list widths (one or two), whether two caches become one."""

    decode: bool
    heads: int
    widths: tuple[int, ...]
    merged: bool


@cache
def installed() -> Installed | str:
    """The installed FlashInfer, or why it cannot be used. A broken package may raise anything, and even exit."""
    try:
        module = import_module(facts.MODULE)
    except (Exception, SystemExit) as error:
        return f"import {facts.MODULE}: {type(error).__name__}: {' '.join(str(error).split())}"
    try:
        return describe(module)
    except Exception as error:  # a table of another form than the known ones may fail in any way
        return f"FlashInfer is here, but what it accepts could not be read: {type(error).__name__}: {error}"


def describe(module: ModuleType) -> Installed:
    """What ``module``, FlashInfer's SM120 module, accepts.

    Raises:
        facts.NotReadableError: a fact is not where it is known to stand.
    """
    for name in ("sparse_mla_sm120_decode_dsv4", "_sparse_mla_sm120_paged_attention"):
        if not callable(getattr(module, name, None)):
            raise facts.NotReadableError(f"{facts.MODULE} has no {name}")
    try:
        version: str | None = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        version = None
    query = getattr(module, "supported_sparse_mla_sm120_configs", None)
    any_page = query is not None and getattr(query()["dsv4"], "page_block_size_is_runtime", False) is True
    return Installed(
        module,
        version,
        facts.row_split(module),
        facts.decode_facts(module),
        facts.prefill_facts(facts.package_root(module)),
        any_page,
    )


def available() -> str | None:
    """None where an SM12x and a FlashInfer with readable SM120 kernels are present, else what is missing."""
    if not torch.cuda.is_available():
        return "needs a CUDA device of compute capability 12.x"
    if not any(_served(torch.device("cuda", i)) for i in range(torch.cuda.device_count())):
        return "needs a CUDA device of compute capability 12.x; no device here has it"
    found = installed()
    return found if isinstance(found, str) else None


def _served(device: torch.device) -> bool:
    return arch.current(device).capability[0] == 12


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot run here, or None."""
    if call.q.is_cuda and not _served(call.q.device):
        major, minor = arch.current(call.q.device).capability
        return f"its kernels are for compute capability 12.x, {call.q.device} has {major}.{minor}"
    found = installed()
    answer = found if isinstance(found, str) else plan(found, call)
    return answer if isinstance(answer, str) else None


def capability(compute_capability: tuple[int, int] | None) -> Capability:
    """What the installed FlashInfer launches for this backend; every pad kept where it cannot be read."""
    found = installed()
    if isinstance(found, str):
        return Capability.unreadable(FAMILY, compute_capability, found)
    none: frozenset[int] = frozenset()
    served = compute_capability is None or compute_capability[0] == 12
    return Capability(
        FAMILY,
        compute_capability,
        found.split,
        found.prefill.heads if served else none,
        found.decode.heads if served else none,
        version=found.version,
        sources={
            "row_split": f"{facts.MODULE}.{facts.SPLIT_NAME}",
            "prefill_heads": found.prefill.source,
            "decode_heads": found.decode.source,
        },
    )


def plan(found: Installed, call: SparseCall) -> Plan | str:
    """How to launch ``call`` on ``found``, or why it cannot be. Pure."""
    if call.batch_invariant:
        return "FlashInfer forks on the row count, so a row's bits depend on the rows that share its call"
    layouts = {keys.layout for keys in call.key_sets}
    if layouts != {"v4"}:
        return f"this backend serves pages of layout v4 (584 B a token), not {', '.join(sorted(layouts))}"
    decode = call.rows <= found.split
    side = found.decode if decode else found.prefill
    name = "decode" if decode else "prefill"
    heads = smallest_listed(side.heads, call.h_q)
    if heads is None:
        return f"its {name} kernel takes {words(side.heads)} heads, none of which holds {call.h_q}"
    lanes = [keys.topk for keys in call.key_sets]
    widths = _separate(lanes, side, decode)
    if widths is not None:
        return Plan(decode, heads, widths, merged=False)
    total = _legal_width(sum(lanes), side)
    if total is None:
        return f"its {name} kernel takes lists of {words(_listed(side))}, not {sum(lanes)}"
    return Plan(decode, heads, (total,), merged=len(lanes) > 1)


def _separate(lanes: list[int], side: facts.SideFacts, decode: bool) -> tuple[int, ...] | None:
    """Widths of the lists as they are, if the kernel takes that many caches at such widths."""
    first = _legal_width(lanes[0], side)
    if first is None:
        return None
    if len(lanes) == 1:
        return (first,)
    if not decode and not isinstance(side.topk, range) and first != _DUAL_MAIN:
        return None
    return (first, adapt.round_up(lanes[1], CHUNK))


def _legal_width(lanes: int, side: facts.SideFacts) -> int | None:
    if side.topk is None:
        return max(lanes, 1)
    if isinstance(side.topk, range):
        return adapt.round_up(lanes, side.topk.step)
    return smallest_listed(side.topk, lanes)


def _listed(side: facts.SideFacts) -> frozenset[int]:
    return side.topk if isinstance(side.topk, frozenset) else frozenset()


def run(call: SparseCall) -> None:
    """Run a call that ``unsupported`` accepts; writes ``out`` and ``lse``."""
    found = installed()
    if isinstance(found, str):
        raise RuntimeError(f"flashinfer: {found}")
    run_with(found, call)


def run_with(found: Installed, call: SparseCall) -> None:
    """`run` on the given FlashInfer."""
    launch = plan(found, call)
    if isinstance(launch, str):
        raise ValueError(f"flashinfer: {launch}; ask unsupported() first")
    sets, lanes = _pages(found, call, launch)
    lists = [adapt.compacted_lists(x, width) for x, width in zip(lanes, launch.widths, strict=True)]
    scale, sign = adapt.positive_scale(call.sm_scale)
    # zeros in the pad heads: what the allocator left there is nothing to quantise
    q = adapt.head_block(call.q, 0, launch.heads, sign=sign, zero_pad=True)
    out = q.new_empty(call.rows, launch.heads, D_V)
    lse = q.new_empty(call.rows, launch.heads, dtype=torch.float32)
    _launch(found, launch, q, sets, lists, out, lse, scale)
    heads = call.h_q
    count = lists[0][1] if len(lists) == 1 else lists[0][1] + lists[1][1]
    out, lse = adapt.contract_results(out[:, :heads], lse[:, :heads], count == 0, call.attn_sink)
    adapt.write_block(call, 0, out, lse, None)


def _launch(
    found: Installed,
    launch: Plan,
    q: Tensor,
    sets: list[KeySet],
    lists: list[tuple[Tensor, Tensor]],
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    indices, length = lists[0]
    extra: dict[str, Tensor] = {}
    if len(sets) == 2:
        extra = {
            "extra_kv_cache": adapt.page_view(sets[1]),
            "extra_indices": lists[1][0],
            "extra_topk_length": lists[1][1],
        }
    kv = adapt.page_view(sets[0])
    if not launch.decode:
        found.module._sparse_mla_sm120_paged_attention(
            q, kv, indices, out, lse, scale, topk_length=length, attn_sink=None, **extra
        )
        return
    splits = sum(-(-width // CHUNK) for width in launch.widths)
    stored = 8 if launch.heads == 8 else adapt.round_up(launch.heads, 16)  # the kernels' stride over heads
    mid_out = q.new_empty(q.shape[0], stored, splits, D_V)
    mid_lse = q.new_empty(q.shape[0], stored, splits, dtype=torch.float32)
    found.module.sparse_mla_sm120_decode_dsv4(
        q, kv, indices, mid_out, mid_lse, out, lse, scale,
        topk_length=length, attn_sink=None, chunks_per_block=CHUNKS_PER_BLOCK, **extra,
    )  # fmt: skip


def _pages(found: Installed, call: SparseCall, launch: Plan) -> tuple[list[KeySet], list[Tensor]]:
    """The caches as the kernel can address them, and their lists."""
    lanes = [adapt.lane_lists(keys) for keys in call.key_sets]
    if launch.merged:
        merged, parts = adapt.staged_pages(call.key_sets, lanes)
        return [merged], [torch.cat(parts, 1)]
    ready, lists = [], []
    for number, (keys, list_) in enumerate(zip(call.key_sets, lanes, strict=True)):
        sizes = (adapt.STAGED_PAGE, 2) if number else (adapt.STAGED_PAGE,)
        legal = (found.any_page or keys.page_size in sizes) and keys.slots > 0 and adapt.is_aligned(keys)
        if not legal:
            staged, (list_,) = adapt.staged_pages([keys], [list_])
            keys = replace(staged, indices=keys.indices)
        ready.append(keys)
        lists.append(list_)
    return ready, lists
