"""What is installed here and what it accepts, each fact with its source. What cannot be read keeps the pad.

Belongs here: `decode_max_rows`, `probe` and the assembling of a `Capability`. Does not belong here: deciding a width,
running a kernel, knowing how a particular package writes its tables (`headfit.flashinfer_facts`,
`headfit.flashmla_facts`).

Importing this module imports nothing foreign; calling it may import FlashInfer, if that is installed. (Its name is not
`probe`, because a submodule of that name would take the place of the public function `headfit.probe`.)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Final

from headfit import flashinfer_facts as facts
from headfit import flashmla_facts
from headfit.capability import MAX_HEADS, NO_BATCH_EXCEEDS, PAD_HEADS, Capability

if TYPE_CHECKING:
    import torch

FLASHINFER: Final = "flashinfer_sm120"
# Families that read the head count from the query or have separate entry points: no row count selects their kernel.
NO_SPLIT: Final = frozenset(
    {"triton", "torch", "cpu", "reference", "flashmla", "hopper", "hopper_wide", "hopper_pairs"}
)

_log = logging.getLogger("headfit")
_logged: set[str] = set()


@dataclass(frozen=True)
class RowSplit:
    """The row split of a family: ``rows``, the ``source`` it was read from, and the ``problem`` if it was not."""

    rows: int
    source: str
    problem: str | None = None


def decode_max_rows(family: str = FLASHINFER) -> int:
    """The largest row count that still runs the decode kernel of ``family``.

    For FlashInfer on SM120 this is the constant of the installed package, read and not copied: if a release raised it,
    a copied 64 would unpad rows that still decode, a silent change of kernel. 0 for families whose kernel no row count
    selects. Where it cannot be read (no FlashInfer, a failing import of any kind, the constant gone or no count), it is
    a value that no batch exceeds, so everything keeps its pad; the reason is logged once and stands in `row_split`.

    Not cached: read it once at start-up and keep the number.

    Args:
        family: ``"flashinfer_sm120"``, one of ``headfit.backends()``, or ``"torch"``, ``"flashmla"``, ``"reference"``.

    Raises:
        ValueError: no such family. (0 would be wrong for a misspelt one: it allows unpadding.)
    """
    return row_split(family).rows


def row_split(family: str = FLASHINFER) -> RowSplit:
    """`decode_max_rows` with its source, and the problem where there is one."""
    if family != FLASHINFER:
        from headfit import kernels

        if family not in NO_SPLIT and family not in kernels.REGISTRY:
            known = ", ".join(sorted({FLASHINFER, *NO_SPLIT, *kernels.REGISTRY}))
            raise ValueError(f"family: got {family!r}, accepted are {known}; check the spelling")
        if family in NO_SPLIT:
            return RowSplit(0, "no row count selects its kernel")
        capability = backend_capability(family, None)
        return RowSplit(capability.row_split, capability.source("row_split"), next(iter(capability.problems), None))
    module, problem = _import_flashinfer()
    if module is not None:
        try:
            rows = min(facts.row_split(module), NO_BATCH_EXCEEDS)
            return RowSplit(rows, f"{facts.MODULE}.{facts.SPLIT_NAME}")
        except Exception as error:
            problem = _text(error)
    _log_once(f"the decode row limit of {family} could not be read, so every call keeps its head pad: {problem}")
    return RowSplit(NO_BATCH_EXCEEDS, "not readable, so no batch exceeds it", problem)


def probe(device: torch.device | str | int | None = None) -> dict[str, Capability]:
    """What the kernel families installed here accept on ``device``: family -> `Capability`, each fact with its source.

    Covered: every backend of headfit that is usable here; FlashInfer's SM120 sparse MLA (``flashinfer_sm120``) where
    it is installed and the device is an SM12x, or there is none; and each installed copy of FlashMLA
    (``flashmla_vllm``, ``flashmla_sgl``, ``flashmla_standalone``, ``flashmla_sgl_kernel``) where the device is an SM90
    or SM100, or there is none. A backend says what headfit launches through it, these what the package itself takes. A
    family that is there but cannot be read is listed with every pad kept, and says so in ``problems``.

    Args:
        device: a CUDA device or its index, ``"cpu"``, or None for the current CUDA device, if there is one.
    """
    cc = compute_capability(device)
    found: dict[str, Capability] = {}
    from headfit import kernels

    for name in kernels.backends():
        found[name] = backend_capability(name, cc)
    if cc is None or cc[0] == 12:
        flashinfer = flashinfer_capability(cc)
        if flashinfer is not None:
            found[FLASHINFER] = flashinfer
    for copy in flashmla_capabilities(cc):
        found[copy.family] = copy
    return found


def flashmla_capabilities(cc: tuple[int, int] | None) -> tuple[Capability, ...]:
    """What the installed copies of FlashMLA accept on ``cc``; empty where it has no kernels for that GPU."""
    copies = tuple(flashmla_facts.installed(cc)) if flashmla_facts.served(cc) else ()
    for copy in copies:
        for problem in copy.problems:
            _log_once(f"what {copy.family} accepts could not be read, so it keeps its pad: {problem}")
    return copies


def backend_capability(name: str, cc: tuple[int, int] | None) -> Capability:
    """What headfit's backend ``name`` accepts on a device of compute capability ``cc``, which need not be here."""
    from headfit import kernels

    module = kernels.REGISTRY[name].module
    try:
        answer: Capability = importlib.import_module(module).capability(cc)
    except Exception as error:
        _log_once(f"backend {name} cannot say what it accepts, so it keeps every head pad: {_text(error)}")
        return Capability.unreadable(name, cc, _text(error))
    return answer if answer.sources else replace(answer, sources={"heads": f"{module}.capability"})


def flashinfer_capability(cc: tuple[int, int] | None) -> Capability | None:
    """What the installed FlashInfer's SM120 sparse MLA accepts; None where FlashInfer is not installed.

    A side whose head counts cannot be read lists only the widths that serving stacks pad to.
    """
    if not _installed("flashinfer"):
        return None
    version = _version("flashinfer-python")
    split = row_split(FLASHINFER)
    module, _ = _import_flashinfer()
    if split.problem is not None or module is None:
        return Capability.unreadable(FLASHINFER, cc, split.problem or "it cannot be imported", version)
    problems: list[str] = []
    decode = _side(lambda: facts.decode_facts(module), "decode", problems)
    prefill = _side(lambda: facts.prefill_facts(facts.package_root(module)), "prefill", problems)
    pages = _pages(module, problems)
    return Capability(
        FLASHINFER,
        cc,
        split.rows,
        prefill.heads,
        decode.heads,
        prefill_topk=prefill.topk,
        decode_topk=decode.topk,
        version=version,
        sources={
            "row_split": split.source,
            "prefill_heads": prefill.source,
            "decode_heads": decode.source,
            "page_sizes": pages.source,
            "layouts": "these are its functions for the 584-byte DeepSeek-V4 cache",
        },
        problems=tuple(problems),
        dual_prefill_topk=prefill.dual_topk,
        page_sizes=pages.sizes,
        extra_page_sizes=pages.extra_sizes,
        layouts=("v4",),
    )


def compute_capability(device: torch.device | str | int | None = None) -> tuple[int, int] | None:
    """(major, minor) of ``device``, by default the current CUDA device; None for a CPU or where there is no GPU."""
    import torch

    if isinstance(device, bool):
        raise TypeError(f"device: got {device!r}, need a torch.device, 'cuda', 'cpu', an index or None")
    where = torch.device("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)
    if where.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(where)


def _side(read: Callable[[], facts.SideFacts], side: str, problems: list[str]) -> facts.SideFacts:
    try:
        return read()
    except Exception as error:
        problems.append(f"{side} heads: {_text(error)}")
        _log_once(
            f"the {side} head counts of {FLASHINFER} could not be read, so that side keeps its pad: {_text(error)}"
        )
        return facts.SideFacts(
            frozenset({PAD_HEADS, MAX_HEADS}), None, "not readable, so only the widths stacks pad to"
        )


def _pages(module: ModuleType, problems: list[str]) -> facts.PageFacts:
    try:
        return facts.page_facts(module, facts.package_root(module))
    except Exception as error:
        problems.append(f"page sizes: {_text(error)}")
        known = frozenset({64})  # every release takes pages of 64; no width depends on this
        return facts.PageFacts(known, known, "not readable, so only what every release takes")


def _import_flashinfer() -> tuple[ModuleType | None, str]:
    """FlashInfer's SM120 module, or None and why. A broken package may raise anything, and even exit."""
    try:
        module = importlib.import_module(facts.MODULE)
    except (Exception, SystemExit) as error:
        return None, f"import {facts.MODULE}: {_text(error)}"
    package = facts.MODULE.partition(".")[0]
    # Where importing the package failed half-way, submodules stay behind, and a second import of one "succeeds".
    if getattr(module, "__spec__", None) is not None and package not in sys.modules:
        return None, f"import {package}: it failed earlier in this process and left only parts behind"
    return module, ""


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module object without a spec stands in sys.modules
        return True


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _log.warning(message)
