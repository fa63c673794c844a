"""Which FlashMLA is installed, and how it is called: read from its operators' schemas, not from a version.

Belongs here: finding a copy, checking that its signature is one whose conventions are known, two functions to call it.
Does not belong here: the contract (``flashmla.py``).

Copies known, and where each was read:

- vLLM 0.33.0, ``vllm/_flashmla_C.abi3.so``, operators ``_flashmla_C``: takes ``out_``; prefill 8, 16, 32, 64, 128
  heads on SM90 (its own error text), decode 64, 128. Loading the library does not import vLLM.
- sgl-flash-mla 1.0.0, ``flash_mla/_C_legacy.abi3.so``, operators ``flash_mla_legacy``: SM90 and the 656 and 584 byte
  pages; 64 and 128 heads. (``flash_mla/cuda.abi3.so`` beside it has SM100 kernels for newer pages only.)
- builds of FlashMLA from 2026-01 to 2026-09, such as tokenspeed-flashmla 1.0.0.post20260924: a Python extension
  ``flash_mla.cuda`` below ``flash_mla_interface.py``; 64 and 128 heads.

All of these return natural-log lse and max_logits without the sink, and +inf / -inf / 0 for a row without keys. Older
copies (sgl-kernel 0.3.21, ``sparse_prefill_fwd(q, kv, indices, sm_scale, d_v)``) return log2, know no sink and no
lengths; they are refused by that signature.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headfit.call import D_V

PREFILL: Final = "sparse_prefill_fwd"
DECODE: Final = "sparse_decode_fwd"
_NEEDED: Final = {
    PREFILL: frozenset({"q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"}),
    DECODE: frozenset(
        {
            "q", "kv", "indices", "topk_length", "attn_sink", "tile_scheduler_metadata", "num_splits",
            "extra_kv", "extra_indices", "extra_topk_length", "d_v", "sm_scale",
        }
    ),
}  # fmt: skip
# Further arguments of known meaning, and what is passed for them; `out_` is passed where there is one to write to.
_KNOWN: Final[Mapping[str, object]] = {
    "return_log2_stats": False,
    "return_stats": True,
    "kv_format": None,
    "enable_batch_invariant": False,
}
_SMALL_HEADS_TEXT: Final = b"SM90a supports 8, 16, 32, 64 and 128 heads"


class NoCopyError(Exception):
    """No FlashMLA that can be called; the text says what was looked for, and what to install."""


@dataclass(frozen=True)
class Copy:
    """One FlashMLA that can be called.

    ``prefill(q, kv, indices, sm_scale, attn_sink, topk_length, out)`` gives (out ``[rows, heads, 512]``, max_logits and
    lse ``[rows, heads]``). ``decode(q, kv, indices, topk_length, attn_sink, plan, extra_kv, extra_indices,
    extra_topk_length, sm_scale, out)`` gives (out ``[b, 1, heads, 512]``, lse ``[b, heads, 1]``, plan); with ``plan``
    None it has one made.
    """

    name: str
    library: str | None
    takes_out: bool
    prefill: Callable[..., tuple[Tensor, Tensor, Tensor]]
    decode: Callable[..., tuple[Tensor, Tensor, Any]]


def find() -> Copy:
    """The copy to use: the operators that are loaded already, else vLLM's, else an installed ``flash_mla``.

    Raises:
        NoCopyError: there is none, or none whose signature is known.
    """
    found = search()
    if isinstance(found, str):
        raise NoCopyError(found)
    return found


@cache
def search() -> Copy | str:
    """`find`, once a process: the copy, or why there is none."""
    tried: list[str] = []
    for look in (_loaded, _from_vllm, _from_flash_mla):
        try:
            return look()
        except NoCopyError as error:
            tried.append(str(error))
    return "; ".join(tried) + "; install vllm >= 0.33 or sgl-flash-mla"


@cache
def small_prefill_heads(library: str | None) -> bool:
    """Whether the copy says itself that its SM90 prefill takes 8, 16 and 32 heads: from the library's error text."""
    if library is None or not Path(library).is_file():
        return False
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_SMALL_HEADS_TEXT) >= 0


def operators(namespace: str, library: str | None) -> Copy:
    """A copy whose two operators are registered under ``torch.ops.<namespace>``.

    Raises:
        NoCopyError: an operator is missing, or its schema is not one whose conventions are known.
    """
    found: dict[str, Any] = {}
    for name in (PREFILL, DECODE):
        op = getattr(getattr(torch.ops, namespace), name, None)
        if op is None:
            raise NoCopyError(f"torch.ops.{namespace} has no {name}")
        arguments = [a.name for a in op.default._schema.arguments]
        _check_arguments(f"torch.ops.{namespace}.{name}", arguments, _NEEDED[name], (*_KNOWN, "out_"))
        found[name] = (op.default, arguments)
    return _from_functions(f"torch.ops.{namespace}", library, found[PREFILL], found[DECODE])


def _check_arguments(what: str, arguments: Iterable[str], needed: frozenset[str], known: Iterable[str]) -> None:
    got = set(arguments)
    missing, strange = sorted(needed - got), sorted(got - needed - set(known))
    if missing:
        raise NoCopyError(f"{what} lacks {', '.join(missing)}: a copy from before 2026, with other lse conventions")
    if strange:
        raise NoCopyError(f"{what} takes {', '.join(strange)}, which is not known here")


def _from_functions(
    name: str, library: str | None, prefill: tuple[Any, list[str]], decode: tuple[Any, list[str]]
) -> Copy:
    def extra(arguments: list[str], out: Tensor | None) -> dict[str, object]:
        known = {key: value for key, value in _KNOWN.items() if key in arguments}
        return known | ({"out_": out} if "out_" in arguments else {})

    def run_prefill(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, sink: Tensor | None, length: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        op, arguments = prefill
        results = op(
            q=q, kv=kv, indices=indices, sm_scale=sm_scale, d_v=D_V, attn_sink=sink, topk_length=length,
            **extra(arguments, out),
        )  # fmt: skip
        return results[0], results[1], results[2]

    def run_decode(
        q: Tensor, kv: Tensor, indices: Tensor, length: Tensor | None, sink: Tensor | None, plan: Any,
        extra_kv: Tensor | None, extra_indices: Tensor | None, extra_length: Tensor | None, sm_scale: float,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
        op, arguments = decode
        meta, splits = plan or (None, None)
        result, lse, meta, splits = op(
            q=q, kv=kv, indices=indices, topk_length=length, attn_sink=sink, tile_scheduler_metadata=meta,
            num_splits=splits, extra_kv=extra_kv, extra_indices=extra_indices, extra_topk_length=extra_length,
            d_v=D_V, sm_scale=sm_scale, **extra(arguments, out),
        )  # fmt: skip
        return result, lse, (meta, splits)

    takes_out = all("out_" in arguments for _, arguments in (prefill, decode))
    return Copy(name, library, takes_out, run_prefill, run_decode)


def _loaded() -> Copy:
    libraries = {Path(p).name: p for p in torch.ops.loaded_libraries}
    for namespace, stem in (("_flashmla_C", "_flashmla_C"), ("flash_mla_legacy", "_C_legacy")):
        if hasattr(getattr(torch.ops, namespace), DECODE):
            library = next((p for name, p in libraries.items() if name.startswith(stem)), None)
            return operators(namespace, library)
    raise NoCopyError("no FlashMLA operators are loaded")


def _from_vllm() -> Copy:
    library = _library("vllm", "_flashmla_C*.so")
    load(library)
    return operators("_flashmla_C", str(library))


def _from_flash_mla() -> Copy:
    try:
        library = _library("flash_mla", "_C_legacy*.so")
    except NoCopyError as no_legacy:
        if importlib.util.find_spec("flash_mla") is None:
            raise
        return _python_copy(str(no_legacy))
    load(library)
    return operators("flash_mla_legacy", str(library))


def _python_copy(no_legacy: str) -> Copy:
    """A build with a Python extension: its two interface functions, checked by their signatures."""
    try:
        module = importlib.import_module("flash_mla.flash_mla_interface")
    except Exception as error:
        raise NoCopyError(f"import flash_mla: {type(error).__name__}: {error}") from error
    needed = {
        "flash_mla_sparse_fwd": {"q", "kv", "indices", "sm_scale", "attn_sink", "topk_length"},
        "flash_mla_with_kvcache": {"k_cache", "extra_k_cache", "extra_topk_length", "attn_sink", "topk_length"},
    }
    for name, parameters in needed.items():
        function = getattr(module, name, None)
        have = set(inspect.signature(function).parameters) if callable(function) else set()
        if "use_legacy" in have:
            raise NoCopyError(f"{no_legacy}: this flash_mla was built without its SM90 kernels")
        if parameters - have:
            raise NoCopyError(f"flash_mla.{name} lacks {', '.join(sorted(parameters - have))}")

    def run_prefill(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, sink: Tensor | None, length: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        result: tuple[Tensor, Tensor, Tensor] = module.flash_mla_sparse_fwd(
            q, kv, indices, sm_scale, attn_sink=sink, topk_length=length
        )
        return result

    def run_decode(
        q: Tensor, kv: Tensor, indices: Tensor, length: Tensor | None, sink: Tensor | None, plan: Any,
        extra_kv: Tensor | None, extra_indices: Tensor | None, extra_length: Tensor | None, sm_scale: float,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
        plan = plan or module.get_mla_metadata()[0]
        result, lse = module.flash_mla_with_kvcache(
            q, kv, None, None, D_V, plan, softmax_scale=sm_scale, is_fp8_kvcache=True, indices=indices, attn_sink=sink,
            extra_k_cache=extra_kv, extra_indices_in_kvcache=extra_indices, topk_length=length,
            extra_topk_length=extra_length,
        )  # fmt: skip
        return result, lse, plan

    return Copy("flash_mla", getattr(module, "__file__", None), False, run_prefill, run_decode)


def _library(package: str, pattern: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
    except (ImportError, ValueError) as error:
        raise NoCopyError(f"{package}: {error}") from error
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    raise NoCopyError(f"{package} is not installed" if spec is None else f"{package} ships no {pattern}")


def load(library: Path) -> None:
    """Load an operator library.

    Raises:
        NoCopyError: it does not load.
    """
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        raise NoCopyError(f"{library.name} does not load: {error.__cause__ or error}") from error
