"""The Hopper backend ``hopper``: V4 pages on SM90, head tiles of 8, 16 and 32, cubins launched through the driver.

Belongs here: the table of binaries, the plan of a call (from shapes alone) and its launches. Does not belong here:
traced code (the modules that the table names), compiling (``hopper_build.py``), the driver (``cubin.py``).

No value of a tensor is read on the host, nothing is allocated outside PyTorch's allocator, and no shape, stride or
length makes another binary. What this backend does not take goes to ``triton``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from headfit import arch as archs
from headfit import env
from headfit.call import SparseCall
from headfit.capability import Capability
from headfit.kernels import configs, cubin, hopper_abi, hopper_build
from headfit.kernels.hopper_build import Spec
from headfit.kernels.recording import Recorder

KEYS: Final = 64  # of a tile
CHIP: Final = (9, 0)
# CTAs of a split row that an SM is counted to hold. One number for all head tiles, though the narrow ones hold more:
# the number of shares changes a result's last bits, and bits may not depend on the number of heads.
CTAS_PER_SM: Final = 2
# Up to this number of shares the CTAs of a row are a cluster, and merge among themselves: what hardware holds at most.
CLUSTER: Final = 16
# Clusters of more CTAs than this that are too many to be at work at once lose to two launches, smaller ones do not.
TURNS: Final = 4
# Few rows take narrower head tiles than their heads need, up to this number of CTAs an SM: a row is done sooner on more
# SMs. Rows that are not split: up to one. Bits do not depend on it.
NARROW_CTAS: Final = 2.5
NATIVE: Final = {
    heads: Spec(f"native heads={heads}", "headfit.kernels.hopper_native", "native", (("heads", heads),))
    for heads in (8, 16, 32)
}
REST: Final = {  # beside the packed kernel: a CTA for a group of 8 rows, so that few have to come where all are packed
    heads: Spec(f"rest heads={heads}", "headfit.kernels.hopper_native", "native", (("heads", heads), ("rows", 8)))
    for heads in NATIVE
}
MERGE: Final = Spec("merge", "headfit.kernels.hopper_merge", "merge")
UNION: Final = Spec("union", "headfit.kernels.hopper_union", "union")
EXPAND: Final = Spec("expand", "headfit.kernels.hopper_expand", "expand")
PACKED: Final = Spec("packed", "headfit.kernels.hopper_packed", "packed")
# Kernels that are launched before the one before them has ended; they wait for it by themselves
# (`ptx_async.wait_for_kernel_before`). The others wait too, but read what they are given through the read-only path
# (`ld.global.nc`), whose contract does not cover memory that was being written when the kernel started. Starting them
# early as well saved 0.1 to 0.3 us of a decode call, and cost windows 3 us of 59.
EARLY: Final = frozenset({MERGE.name})
SPECS: Final = (*NATIVE.values(), MERGE, UNION, EXPAND, PACKED, *REST.values())
GROUP: Final = 8  # rows that are packed, as `hopper_packed_place` has it
GROUP_WORDS: Final = 1 + 4 + 64 + 64  # int32 words of a group in the workspace, as there
GROUPS_LIMIT: Final = 4096  # of a call, as `hopper_expand_sums` has it
# Packing is tried from this number of rows on: below, the persistent kernel has few tasks for an SM. A first setting.
PACKED_ROWS: Final = 512
# ... and to this number of lanes a row, of both lists. The lists decide group by group on the device, so this is about
# what trying costs. Lists of a window (128) and short ones of a heavily compressed layer overlap nearly whole; those of
# chosen keys, 128 + 512 and more, hardly do, and finding that out takes 7 us and three launches more, of 300 to 570 us
# at 4096 rows. Longer lists of a heavily compressed layer have the shapes of chosen keys, and go with them.
PACKED_LANES: Final = 448
ZEROS: Final = 256 * 576  # bytes: rows that lanes without a key copy, with 8 scale bytes behind them (hopper_keys)
buffer = hopper_abi.Buffer()
_zeros: dict[int, Tensor] = {}
_launched = Recorder()
record_variants = _launched.listen  # a context manager that yields the names
_log = logging.getLogger("headfit")
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How a call is launched: CTAs of ``heads`` heads, ``head_tiles`` to a row, its keys in ``splits`` shares.

    ``packed``: CTAs of the packed kernel, which goes before and takes the groups of rows whose lists overlap, and of
    the one that dequantises its keys; 0: none.
    ``clustered``: the CTAs of a row merge its shares themselves, if the device holds such a cluster.
    """

    heads: int
    head_tiles: int
    splits: int
    packed: int = 0
    clustered: bool = False

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The binaries, in the order of their launches; the last is left out where a cluster merges by itself."""
        if self.packed:
            return UNION, EXPAND, PACKED, REST[self.heads]
        native = NATIVE[self.heads]
        return (native,) if self.splits == 1 else (native, MERGE)


def available() -> str | None:
    """None where an SM90 is there, and the kernels are compiled or can be; else why not, with the remedy."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = torch.cuda.get_device_capability()
    if found != CHIP:
        return f"compute capability {found}, needs {CHIP}"
    return cubin.is_there() or why_missing(SPECS)


@functools.cache
def why_missing(specs: tuple[Spec, ...]) -> str | None:
    """Why some of ``specs`` are neither compiled nor to be compiled on this machine; None where all are. Asked once."""
    missing = [spec.name for spec in specs if not hopper_build.in_cache(spec)]
    compiler = hopper_build.why_no_compiler() if missing else None
    return None if compiler is None else f"{', '.join(missing)}: not in {hopper_build.folder()}, and {compiler}"


def unsupported(call: SparseCall) -> str | None:
    """Why this call cannot be taken, or None. The first call of a head tile compiles its binary where it has to."""
    return first_reason(call, why_not_taken, lambda arch: plan(call, arch).specs)


def first_reason(
    call: SparseCall,
    not_taken: Callable[[SparseCall], str | None],
    specs: Callable[[archs.Arch], tuple[Spec, ...]],
) -> str | None:
    """Why a Hopper backend cannot take ``call``, or None: where it is, its form, then the binaries that it needs."""
    arch = archs.current(call.q.device)
    reason = why_elsewhere(call, arch) or not_taken(call)
    if reason is not None:
        return reason
    return next((why for why in map(why_not_built, specs(arch)) if why is not None), None)


def why_elsewhere(call: SparseCall, arch: archs.Arch) -> str | None:
    """Why no Hopper kernel runs where the tensors of ``call`` are, on ``arch``, or None."""
    if call.q.device.type != "cuda":
        return f"runs on cuda tensors, q is on {call.q.device.type}"
    return None if arch.capability == CHIP else f"runs on compute capability {CHIP}, q is on {arch.capability}"


@functools.cache
def why_not_built(spec: Spec) -> str | None:
    """Build or load ``spec`` once; a failure is logged once, and its calls go to another backend."""
    try:
        hopper_build.binary(spec)
    except hopper_build.CannotBuildError as error:
        _log.warning("hopper: %s; its calls go to another backend", error)
        return str(error)
    return None


def why_not_taken(call: SparseCall) -> str | None:
    """Why a call of this form is not taken, on whatever device; None where it is."""
    for keys in call.key_sets:
        if keys.layout != "v4":
            return f"takes packed v4 pages, got {keys.layout}"
    if call.max_logits is not None:
        return "does not return max_logits"
    for name, t in (("q", call.q), ("out", call.out)):
        if not _aligned(t):
            return f"{name} has to start, and to step from head to head and row to row, at multiples of 16 bytes"
    for name, keys in zip(("k_cache", "extra_k_cache"), call.key_sets, strict=False):
        if keys.data.data_ptr() % 16 or (keys.slots > keys.page_size and keys.page_stride % 16):
            return f"pages of {name} have to start at multiples of 16 bytes"
    return None if _fits(call) else "rows, lanes or tokens a page do not fit 31 bits"


def _aligned(t: Tensor) -> bool:
    """Whether every head of every row begins at a multiple of 16 bytes."""
    if t.data_ptr() % 16:
        return False
    b, s, h, _ = t.stride()
    if (b | s | h) % 8 == 0:
        return True
    return all(stride % 8 == 0 for stride, size in zip((b, s, h), t.shape, strict=False) if size > 1)


def _fits(call: SparseCall) -> bool:
    """Whether what the kernels count in 32 bits fits: CTAs, bytes of a list (rounded up to tiles), tokens of a page."""
    lanes = 4 * sum([k.topk + KEYS for k in call.key_sets])
    pages = max([k.page_size for k in call.key_sets])
    return max(call.rows * -(-call.h_q // 8), lanes, pages) <= hopper_abi.INT_MAX


def capability(compute_capability: tuple[int, int] | None = None, family: str = "hopper") -> Capability:
    """Every head count from 1 to 128 on compute capability 9.0, in one family for all row counts; none elsewhere."""
    if compute_capability not in (None, CHIP):
        none: frozenset[int] = frozenset()
        return Capability(family, compute_capability, 0, none, none, problems=(f"needs compute capability {CHIP}",))
    heads = range(1, 129)
    return Capability(
        family, compute_capability, 0, heads, heads, layouts=("v4",), sources={"heads": "headfit's own kernels"}
    )


def plan(call: SparseCall, arch: archs.Arch) -> Plan:
    """The launches of a call, from its shapes, the chip, ``HEADFIT_PACKING`` and whether out lies over q."""
    b, s_q, h_q, _ = call.q.shape
    topk = tuple([keys.topk for keys in call.key_sets])
    invariant = call.batch_invariant
    packing = not invariant and may_pack(b * s_q, sum(topk)) and bool(env.read("HEADFIT_PACKING"))
    if packing and meet(call.q, call.out):
        packing = False  # a group whose keys turn out not to be finite is computed again, from q
    return _planned(b * s_q, h_q, topk, invariant, packing, arch.sms)


def meet(a: Tensor, b: Tensor) -> bool:
    """Whether the memory from first to last element of one tensor meets that of the other; tensors of the meta device
    have none."""
    (a_begin, a_end), (b_begin, b_end) = _span(a), _span(b)
    return 0 < a_begin < b_end and 0 < b_begin < a_end


def _span(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor with elements, and of the one behind its last."""
    begin = t.data_ptr()
    last = sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])
    return begin, begin + (last + 1) * t.element_size()


def binaries(h_q: int) -> tuple[Spec, ...]:
    """All that calls of ``h_q`` heads may launch, whatever their rows and lists."""
    widest = next((tile for tile in NATIVE if tile >= h_q), max(NATIVE))
    narrower = [spec for tile, spec in NATIVE.items() if tile <= widest]
    return *narrower, MERGE, UNION, EXPAND, PACKED, REST[widest]


def make_ready(spec: Spec, device: int) -> str | None:
    """Build ``spec`` or find it in the cache, and load it on a device, the current one; why not, where that fails."""
    reason = why_not_built(spec)
    if reason is None:
        _kernel(spec, device)
    return reason


@functools.lru_cache(maxsize=4096)
def _planned(rows: int, h_q: int, topk: tuple[int, ...], batch_invariant: bool, packing: bool, sms: int) -> Plan:
    tiles = sum([-(-lanes // KEYS) for lanes in topk])
    splits = 1 if batch_invariant else split_count(rows, tiles, sms)
    most = int((NARROW_CTAS if splits > 1 else min(NARROW_CTAS, 1)) * sms) // (rows * splits)
    heads = next((tile for tile in NATIVE if tile >= h_q or -(-h_q // tile) <= most), max(NATIVE))
    packed = sms if packing and splits == 1 else 0
    return Plan(heads, -(-h_q // heads), splits, packed, clustered=1 < splits <= CLUSTER)


def may_pack(rows: int, lanes: int) -> bool:
    """Whether packing may pay for lists of ``lanes`` a row. Never a matter of heads: bits may not depend on them."""
    return PACKED_ROWS <= rows <= GROUP * GROUPS_LIMIT and 0 < lanes <= PACKED_LANES


def work_words(rows: int) -> int:
    """int32 words of the packing workspace, as `hopper_packed_place` lays it out."""
    groups = -(-rows // GROUP)
    room = -(-((7 * rows >> 2) + 1024) // 8) * 8  # keys of a sequence, of 256 words each
    return -(-groups // 64) * 64 * GROUP_WORDS + 2 * room * 256


def split_count(rows: int, tiles: int, sms: int) -> int:
    """Shares of a row's ``tiles``, none of them empty: as many as the chip has room for, one where rows fill it."""
    if tiles <= configs.ONE_PASS_TILES and rows >= configs.ONE_PASS_ROWS:
        return 1
    most = min(tiles, CTAS_PER_SM * sms // rows)
    if tiles <= 2 * CLUSTER:  # two tiles in one launch are as fast as one in two
        most = min(most, CLUSTER)
    if most <= 1:
        return 1
    share = -(-tiles // most)
    return -(-tiles // share)


def run(call: SparseCall) -> None:
    """Launch the kernels of one checked call on the current stream."""
    chosen = plan(call, archs.current(call.q.device))
    specs = on_its_device(call, lambda device: _launch(call, chosen, device))
    _launched.add(lambda: [spec.name for spec in specs])


def on_its_device(call: SparseCall, go: Callable[[int], T]) -> T:
    """``go`` with the number of the device of ``call``, which is the current one meanwhile."""
    device = call.q.device.index
    if device == torch.cuda.current_device():
        return go(device)
    with torch.cuda.device(device):
        return go(device)


def _launch(call: SparseCall, chosen: Plan, device: int) -> tuple[Spec, ...]:
    """Launch, and return what was launched."""
    if chosen.packed:
        return _launch_packed(call, chosen, device)
    rows, h_q, splits = call.rows, call.h_q, chosen.splits
    spec = NATIVE[chosen.heads]
    grid = (rows * chosen.head_tiles, splits)
    zeros = zero_rows(call.q.device)
    clustered = chosen.clustered and _in_clusters(spec, device, *grid)
    if splits == 1 or clustered:
        hopper_abi.pack(buffer, call, head_tiles=chosen.head_tiles, splits=splits, zeros=zeros.data_ptr())
        launch(spec, device, grid, cluster=splits)
        return (spec,)
    # Rows times shares are at most CTAS_PER_SM an SM, so the shares of a call are small (69 MB at 128 heads).
    count = rows * splits * h_q
    shares = torch.empty(count * 514, dtype=torch.float32, device=call.q.device)
    start = shares.data_ptr()
    hopper_abi.pack(
        buffer, call, head_tiles=chosen.head_tiles, splits=splits,
        partial=start, peaks=start + count * 2048, totals=start + count * 2052, zeros=zeros.data_ptr(),
    )  # fmt: skip
    launch(spec, device, grid)
    launch(MERGE, device, (rows, h_q))
    return spec, MERGE


def _in_clusters(spec: Spec, device: int, count: int, size: int) -> bool:
    """Whether ``count`` clusters of ``size`` are worth it on ``device``. Either way makes the same bits."""
    held = _kernel(spec, device).clusters(size)
    return held >= count if size > TURNS else held > 0


def _launch_packed(call: SparseCall, chosen: Plan, device: int) -> tuple[Spec, ...]:
    """Launch the kernels of packing, and return them."""
    # Nothing has to be cleared. The allocator gives the memory to later work of this stream, or graph, alone.
    work = torch.empty(work_words(call.rows), dtype=torch.int32, device=call.q.device)
    zeros = zero_rows(call.q.device)
    hopper_abi.pack(buffer, call, head_tiles=chosen.head_tiles, work=work.data_ptr(), zeros=zeros.data_ptr())
    groups = -(-call.rows // GROUP)
    grids = groups, chosen.packed, chosen.packed, groups * chosen.head_tiles
    for spec, ctas in zip(chosen.specs, grids, strict=True):
        launch(spec, device, (ctas, 1))
    return chosen.specs


def launch(spec: Spec, device: int, grid: tuple[int, int], cluster: int = 1) -> None:
    """Launch one kernel with the parameters in the buffer, on PyTorch's current stream of ``device``, the current."""
    stream, early = cubin.current_stream(device), spec.name in EARLY
    _kernel(spec, device).launch(grid, stream, buffer.pointers, early=early, cluster=cluster)


def zero_rows(device: torch.device) -> Tensor:
    """Zeros on ``device``, made by its first call and kept.

    The copy from the host waits for the device, once, so that every stream finds them. A call under graph capture can
    do neither, and gets zeros of its own that the graph makes at each replay.
    """
    kept = _zeros.get(device.index)
    if kept is not None:
        return kept
    if torch.cuda.is_current_stream_capturing():
        return _no_keys(device)
    return _zeros.setdefault(device.index, _no_keys(torch.device("cpu")).to(device))


def _no_keys(device: torch.device) -> Tensor:
    """Rows of zeros, and the scales of a lane without a key: usual ones, and the mark 255."""
    made = torch.zeros(ZEROS + 8, dtype=torch.uint8, device=device)
    made[ZEROS : ZEROS + 7].fill_(120)  # not by assignment: under graph capture that would copy from the host
    made[ZEROS + 7 :].fill_(255)
    return made


def _kernel(spec: Spec, device: int) -> cubin.Kernel:
    return cubin.kernel(spec.name, device, functools.partial(hopper_build.binary, spec))
