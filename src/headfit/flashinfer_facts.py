"""What an installed FlashInfer says about its SM120 sparse-MLA kernels: read from it, not assumed from its version.

Belongs here: where FlashInfer keeps its row split, its head switches and its topk sets, in the releases that have these
kernels (0.6.14 and newer), and how to read each. Does not belong here: running FlashInfer, deciding a width.

Where each fact stands:

- row split: ``_DECODE_MAX_TOKENS`` of `MODULE`, a file up to 0.6.18 and a package with the same name in 0.7;
- decode heads and topk: up to 0.6.18 the pairs in ``_DECODE_DSV4_DISPATCH``; in 0.7 the public function
  ``supported_sparse_mla_sm120_configs()``, because the pairs have become an envelope;
- prefill heads and topk: only in the shipped CUDA source. Up to 0.7.0 two functions of ``sparse_mla_sm120_prefill.cu``
  switch over ``num_heads``; from 0.7.1 ``visit_prefill_heads`` of ``attention_plan.h`` lists them. From 0.7.0 topk has
  to be a multiple only. In all of 0.7.0 to 0.7.4 decode takes any 1..128 heads, and prefill a closed list;
- topk with two caches: up to 0.6.18 the prefill over two caches returns early unless the first list is 128 wide;
- page sizes: ``_DECODE_DSV4_PAGE_BLOCK_SIZE`` and the comparisons of ``dispatch_dsv4_dual`` up to 0.7.0, after that
  ``page_block_size_is_runtime`` of the public function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

MODULE: Final = "flashinfer.mla._sparse_mla_sm120"
SPLIT_NAME: Final = "_DECODE_MAX_TOKENS"
_PREFILL_06: Final = "data/csrc/sparse_mla_sm120_prefill.cu"
_PREFILL_07: Final = "data/include/flashinfer/attention/sparse_mla_sm120/execution/attention_plan.h"
_BINDING_070: Final = "sparse_mla_sm120.cu"
_TOPK_07: Final = "data/csrc/sparse_mla_sm120/attention_resolve.cu"


class NotReadableError(Exception):
    """A fact is not where it is known to stand; the text says what was looked for and where."""


@dataclass(frozen=True)
class SideFacts:
    """Head counts and index widths of one kernel, and where they were read. ``topk`` None: any.

    ``dual_topk``: widths of the first list where there are two caches; None: the same.
    """

    heads: frozenset[int]
    topk: frozenset[int] | range | None
    source: str
    dual_topk: frozenset[int] | None = None


@dataclass(frozen=True)
class PageFacts:
    """Tokens a page of the first and of the second cache, None for any, and where they were read."""

    sizes: frozenset[int] | None
    extra_sizes: frozenset[int] | None
    source: str


def row_split(module: ModuleType) -> int:
    """The largest row count that still decodes.

    Raises:
        NotReadableError: the constant is missing, or is no count.
    """
    value = getattr(module, SPLIT_NAME, None)
    if value is None:
        raise NotReadableError(f"{MODULE} has no {SPLIT_NAME}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise NotReadableError(f"{MODULE}.{SPLIT_NAME} is {value!r}, not a row count")
    return value


def decode_facts(module: ModuleType) -> SideFacts:
    """Head counts and topk of the split-K decode kernel of the 584-byte DeepSeek-V4 cache.

    Raises:
        NotReadableError: neither of the two known tables is there in a known form.
    """
    query = getattr(module, "supported_sparse_mla_sm120_configs", None)
    if query is not None:
        config = query()["dsv4"]
        topk = None if config.topk_is_runtime else _counts(config.topks, "topks")
        heads = _counts(config.supported_num_heads(), "supported_num_heads()")
        return SideFacts(heads, topk, f"{MODULE}.supported_sparse_mla_sm120_configs()['dsv4']")
    table = getattr(module, "_DECODE_DSV4_DISPATCH", None)
    if not isinstance(table, (set, frozenset)):
        raise NotReadableError(
            f"{MODULE} has neither supported_sparse_mla_sm120_configs nor a _DECODE_DSV4_DISPATCH set"
        )
    pairs = {pair for pair in table if isinstance(pair, tuple) and len(pair) == 2}
    heads = _counts((h for h, _ in pairs), "_DECODE_DSV4_DISPATCH")
    # A topk counts only if every listed head count has it: the two sets must be legal in any combination.
    topk = frozenset(k for _, k in pairs if all((h, k) in pairs for h in heads))
    if len(pairs) != len(table) or not topk:
        raise NotReadableError(f"{MODULE}._DECODE_DSV4_DISPATCH holds something else than (heads, topk) pairs")
    return SideFacts(heads, topk, f"{MODULE}._DECODE_DSV4_DISPATCH")


def prefill_facts(root: Path) -> SideFacts:
    """Head counts and topk of the paged prefill kernel, from the CUDA source under ``root``, the package's folder.

    Raises:
        NotReadableError: neither source is there, or it does not have the known form.
    """
    old, new = root / _PREFILL_06, root / _PREFILL_07
    if new.is_file():
        return _prefill_07(new, root / _TOPK_07)
    if old.is_file():
        return _prefill_06(old)
    raise NotReadableError(f"the package ships neither {_PREFILL_06} nor {_PREFILL_07}")


def page_facts(module: ModuleType, root: Path) -> PageFacts:
    """Page sizes of the 584-byte DeepSeek-V4 caches; ``root`` is the package's folder.

    Raises:
        NotReadableError: they are not where they are known to stand.
    """
    query = getattr(module, "supported_sparse_mla_sm120_configs", None)
    config = query()["dsv4"] if query is not None else None
    if getattr(config, "page_block_size_is_runtime", False) is True:
        return PageFacts(None, None, f"{MODULE}.supported_sparse_mla_sm120_configs()['dsv4']")
    source = f"{MODULE}._DECODE_DSV4_PAGE_BLOCK_SIZE"
    size = getattr(module, "_DECODE_DSV4_PAGE_BLOCK_SIZE", None)
    if size is None and config is not None:
        size = getattr(config, "page_block_size", None)
        source = f"{MODULE}.supported_sparse_mla_sm120_configs()['dsv4']"
    path = root / _PREFILL_06
    if not path.is_file():
        raise NotReadableError(f"pages are of fixed sizes, and the package does not ship {_PREFILL_06}")
    body = _body(_source(path), r"\bbool\s+dispatch_dsv4_dual\s*\(", path.name)
    extra = {int(n) for n in re.findall(r"\bextra_page_block_size\s*==\s*(\d+)", body)}
    extra_source = f"flashinfer/{_PREFILL_06}: extra_page_block_size in dispatch_dsv4_dual"
    return PageFacts(_counts([size], source), _counts(extra, extra_source), f"{source}; {extra_source}")


def package_root(module: ModuleType) -> Path:
    """The ``flashinfer`` folder that ``module`` was loaded from.

    Raises:
        NotReadableError: the module has no file, or none below such a folder.
    """
    file = getattr(module, "__file__", None)
    for folder in Path(file).parents if isinstance(file, str) else ():
        if folder.name == "flashinfer":
            return folder
    raise NotReadableError(f"{MODULE} was loaded from {file!r}, not from a flashinfer folder")


def _counts(values: Iterable[object], what: str) -> frozenset[int]:
    counts = list(values)
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise NotReadableError(f"{what} of {MODULE} is {counts!r}, not a list of counts")
    return frozenset(n for n in counts if isinstance(n, int))


def _body(text: str, opening: str, where: str) -> str:
    """The brace-balanced body of the one function whose definition matches ``opening``."""
    found = list(re.finditer(opening, text))
    if len(found) != 1:
        raise NotReadableError(f"{where}: {len(found)} functions match {opening!r}, need one")
    start = text.index("{", found[0].end())
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start : at + 1]
    raise NotReadableError(f"{where}: the braces of {opening!r} do not balance")


def _source(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", " ", text)


def _prefill_06(path: Path) -> SideFacts:
    text, where = _source(path), path.name
    heads: frozenset[int] | None = None
    topk: frozenset[int] | range = frozenset()
    dual: frozenset[int] | None = None
    for function in ("dispatch_dsv4_single", "dispatch_dsv4_dual"):  # one cache, and window + extra cache
        body = _body(text, rf"\bbool\s+{function}\s*\(", where)
        switches = re.split(r"switch\s*\(\s*num_heads\s*\)", body)[1:]
        if not switches:
            raise NotReadableError(f"{where}: {function} does not switch over num_heads")
        for switch in switches:
            listed = frozenset(int(n) for n in re.findall(r"\bcase\s+(\d+)\s*:", switch.split("default")[0]))
            heads = listed if heads is None else heads & listed
        if function == "dispatch_dsv4_single":
            topk = frozenset(int(n) for n in re.findall(r"\btopk\s*==\s*(\d+)", body))
        elif topk:  # topk is a template argument here, so an early return has to name those that exist
            dual = frozenset(int(n) for n in re.findall(r"\btopk\s*!=\s*(\d+)\s*\)\s*return\s+false", body))
            if len(dual) != 1:
                raise NotReadableError(f"{where}: {function} does not return early for all topk but one")
    if not topk:  # 0.7.0: topk has become an argument of the kernel, and the binding asks for a multiple
        topk = _multiple(path.with_name(_BINDING_070), r"ICHECK_EQ\(\s*topk\s*%\s*(\d+)\s*,\s*0\s*\)")
    if not heads or not topk:
        raise NotReadableError(f"{where}: no head count or no topk is common to its dispatch functions")
    source = f"flashinfer/{_PREFILL_06}: switch (num_heads) in dispatch_dsv4_single and _dual"
    return SideFacts(heads, topk, source, dual)


def _prefill_07(path: Path, topk_path: Path) -> SideFacts:
    text, where = _source(path), path.name
    body = _body(text, r"\bPrefillLaunchResult\s+visit_prefill_heads\s*\(", where)
    heads: set[int] = set()
    # `if constexpr (condition) { HEAD(8) HEAD(16) }`, where the condition names a variant and model types
    for condition, block in re.findall(r"if\s+constexpr\s*\((.*?)\)\s*\{([^{}]*)\}", body, flags=re.S):
        if re.search(r"\bmg\b", condition) and re.search(r"\bMT\s*==\s*ModelType::DSV4\b(?!_)", condition):
            heads |= {int(n) for n in re.findall(r"\bHEAD\(\s*(\d+)\s*\)", block)}
    if not heads:
        raise NotReadableError(f"{where}: visit_prefill_heads lists no head count for the mg variant of DSV4")
    topk = _multiple(topk_path, r"\bm\.topk\s*%\s*(\d+)\s*==\s*0")
    source = f"flashinfer/{_PREFILL_07}: visit_prefill_heads, variant MG, model DSV4; topk: {topk_path.name}"
    return SideFacts(frozenset(heads), topk, source)


def _multiple(path: Path, pattern: str) -> range:
    steps = {int(n) for n in re.findall(pattern, _source(path))} if path.is_file() else set()
    if len(steps) != 1:
        raise NotReadableError(f"{path.name}: it asks for topk in multiples of {sorted(steps)}, need one number")
    step = steps.pop()
    return range(step, 2**31, step)
