"""What an installed FlashMLA says about its sparse kernels: read from the library's bytes, which are never loaded.

Belongs here: which copies there are, and what their operator schemas, error texts and symbol names say. Does not belong
here: calling FlashMLA (``kernels/flashmla_copies.py``), deciding a width.

Where each fact stands, in vLLM 0.33.0, sgl-flash-mla 1.0.0 and tokenspeed-flashmla 1.0.0.post20260924:

- arguments: the schema text of the two operators; in a Python extension the signatures of ``flash_mla_interface.py``.
  A copy without sink and lengths (sgl-kernel) is from before 2026 and returns log2: it is refused, as in
  ``flashmla_copies``;
- decode heads on SM90, and the layouts: the names of ``sm90::decode::sparse::KernelTemplate<ModelType, heads>``;
- prefill heads: the error text "SM90a supports 8, 16, ... heads; SM100f supports 64 and 128" where there is one. Other
  copies name none for SM90, so only the widths that stacks pad to are listed;
- heads on SM100: the classes ``Fwd_Sm100_Head64_Impl``, ``Decode_Sm100_Head64x2_Impl`` and their like;
- topk: the text "topk (%d) mod B_TOPK (%d) must be 0". The number is not in it: 64, and twice that in the prefill of
  SM90, are from FlashMLA's source (``csrc/sm90``). Page sizes are run-time values of these kernels.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headfit.capability import MAX_HEADS, PAD_HEADS, Capability

Chip = tuple[int, int]

PREFILL: Final = "sparse_prefill_fwd"
DECODE: Final = "sparse_decode_fwd"
_INTERFACE: Final = {PREFILL: "flash_mla_sparse_fwd", DECODE: "flash_mla_with_kvcache"}
# Without these a copy has other lse conventions, and nothing is to be concluded from one release about the other.
_NEEDED: Final = frozenset({"attn_sink", "topk_length"})
# The enum ModelType of FlashMLA. Builds that dropped the V4 format number it anew, so a library has to show that its 1
# is the format of 448 e4m3 bytes: by the name of the tensor map KVCacheFormat<1>, 448, 448.
_V4_SHOWN: Final = b"KVCacheFormatIL9ModelType1EELi448ELi448E"
_LAYOUTS: Final = {0: "v32", 1: "v4", 2: "v41", 3: "v41-fp4"}
_V4: Final = 1
_PAD: Final = frozenset({PAD_HEADS, MAX_HEADS})
_DECODE_90: Final = re.compile(rb"4sm906decode6sparse14KernelTemplateIL9ModelType(\d+)ELi(\d+)E")
_PREFILL_90: Final = b"4sm907prefill10sparse_fwd"
_FORMATS_100: Final = re.compile(rb"KVCacheFormatIL9ModelType(\d+)E")
_CLASS_100: Final = re.compile(rb"_Sm100_Head(\d+)(?:x(\d))?(?:_\w+)?_Impl")  # begins with a literal: found fast
_HEADS_TEXT: Final = re.compile(rb"SM90a supports ([\d, and]+) heads; SM100f supports ([\d, and]+)\.")
_TOPK_TEXT: Final = b"topk (%d) mod B_TOPK (%d) must be 0"
B_TOPK: Final = 64


class NotReadableError(Exception):
    """A fact is not where it is known to stand; the text says what was looked for and where."""


@dataclass(frozen=True)
class Place:
    """Where a copy stands: family name, the package that holds the library, its file pattern, its distributions."""

    family: str
    package: str
    pattern: str
    distributions: tuple[str, ...]


PLACES: Final = (
    Place("flashmla_vllm", "vllm", "_flashmla_C*.so", ("vllm",)),
    Place("flashmla_sgl", "flash_mla", "_C_legacy*.so", ("sgl-flash-mla",)),
    Place("flashmla_standalone", "flash_mla", "cuda*.so", ("tokenspeed-flashmla", "flash-mla", "flash_mla")),
    Place("flashmla_sgl_kernel", "sgl_kernel", "flashmla_ops*.so", ("sglang-kernel", "sgl-kernel")),
)


def served(cc: Chip | None) -> bool:
    """Whether FlashMLA has kernels for this GPU: SM90a and SM100f. None: any GPU is asked about."""
    return cc is None or cc == (9, 0) or cc[0] == 10


def installed(cc: Chip | None) -> Iterator[Capability]:
    """What each installed copy accepts on ``cc``. Nothing is imported or loaded; what cannot be read keeps its pad."""
    found = set()
    for place in PLACES:
        library = find(place)
        if library is None or (place.family == "flashmla_standalone" and "flashmla_sgl" in found):
            continue  # sgl-flash-mla has a cuda.abi3.so too, for newer pages only
        found.add(place.family)
        yield capability(place.family, library, cc, _version(place))


def find(place: Place) -> Path | None:
    """The library of a copy, or None where it is not installed."""
    try:
        spec = importlib.util.find_spec(place.package)  # of a top-level package: finds without importing
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(place.pattern)):
            return path
    return None


def _version(place: Place) -> str | None:
    for name in place.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def capability(family: str, library: Path, cc: Chip | None, version: str | None = None) -> Capability:
    """What the copy at ``library`` accepts on ``cc``; with None, what it accepts on SM90 and SM100 both."""
    try:
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check_signatures(library, content)
            if content.find(_V4_SHOWN) < 0:
                raise NotReadableError("it does not show that it has kernels for 584-byte DeepSeek-V4 pages")
            chips = ((9, 0), (10, 0)) if cc is None else (cc,)
            sides = [_read(content, library.name, chip) for chip in chips]
            aligned = content.find(_TOPK_TEXT) >= 0
    except Exception as error:  # a damaged file may fail in any way
        return Capability.unreadable(family, cc, f"{library.name}: {type(error).__name__}: {error}", version)
    first = sides[0]
    topk = f"{library.name}: 'topk mod B_TOPK must be 0'; 64 and 2 x 64: FlashMLA's source"
    return Capability(
        family,
        cc,
        0,
        frozenset.intersection(*(side.prefill for side in sides)),
        frozenset.intersection(*(side.decode for side in sides)),
        fork="entry",
        prefill_topk=_multiples(2 * B_TOPK),
        decode_topk=_multiples(B_TOPK if aligned else 2 * B_TOPK),
        version=version,
        sources={
            "prefill_heads": first.prefill_source,
            "decode_heads": first.decode_source,
            "topk": topk if aligned else "not named in the library: the strictest that is known, 128",
            "page_sizes": f"{library.name}: no sparse kernel's name holds a page size",
            "layouts": first.layouts_source,
        },
        problems=() if aligned else (f"{library.name} does not say that topk has to be aligned",),
        layouts=tuple(name for name in _LAYOUTS.values() if all(name in side.layouts for side in sides)),
    )


@dataclass(frozen=True)
class _Sides:
    prefill: frozenset[int]
    prefill_source: str
    decode: frozenset[int]
    decode_source: str
    layouts: frozenset[str]
    layouts_source: str


def _multiples(step: int) -> range:
    return range(step, 2**31, step)


def _read(content: mmap.mmap, name: str, cc: Chip) -> _Sides:
    if not served(cc):
        raise NotReadableError(f"it has no kernels for compute capability {cc[0]}.{cc[1]}")
    text = _HEADS_TEXT.search(content)
    if cc[0] == 9:
        pairs = {(int(model), int(heads)) for model, heads in _DECODE_90.findall(content)}
        decode = frozenset(heads for model, heads in pairs if model == _V4)
        prefill = _PAD if content.find(_PREFILL_90) >= 0 else frozenset()
        layouts = {model for model, _ in pairs}
        where = f"{name}: sm90::decode::sparse::KernelTemplate<ModelType, heads>"
        prefill_source = "the library names no head count for it: only the widths that stacks pad to"
    else:
        classes = [
            (content[max(m.start() - 6, 0) : m.start()], int(m[1]) * int(m[2] or 1))
            for m in _CLASS_100.finditer(content)
        ]
        prefill = frozenset(heads for before, heads in classes if before.endswith(b"Fwd"))
        decode = frozenset(heads for before, heads in classes if before.endswith(b"Decode"))
        layouts = {int(model) for model in _FORMATS_100.findall(content)}
        where = f"{name}: classes Decode_Sm100_Head.._Impl"
        prefill_source = f"{name}: classes Fwd_Sm100_Head.._Impl"
    if text is not None:
        prefill = frozenset(int(n) for n in re.findall(rb"\d+", text[1 if cc[0] == 9 else 2]))
        prefill_source = f"{name}: {text[0].decode()!r}"
    if not prefill or not decode:
        missing = "prefill" if not prefill else "decode"
        raise NotReadableError(f"no sparse {missing} kernel of compute capability {cc[0]}.{cc[1]} is named in it")
    names = frozenset(_LAYOUTS[model] for model in layouts if model in _LAYOUTS)
    source = f"{name}: ModelType in the names of its kernels"
    return _Sides(prefill, prefill_source, decode, where, names, source)


def _check_signatures(library: Path, content: mmap.mmap) -> None:
    """Refuse a copy whose operators take no sink or no lengths, or are not there."""
    interface = library.with_name("flash_mla_interface.py")
    for operator in (PREFILL, DECODE):
        schema = re.search(operator.encode() + rb"\(([^()\0]*(?:\([^()\0]*\)[^()\0]*)*)\) ->", content)
        if schema is not None:
            arguments = set(re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", schema[1].decode()))
        elif interface.is_file():
            arguments = _parameters(interface, _INTERFACE[operator])
        else:
            raise NotReadableError(f"no schema of {operator} in it: a copy from before 2026, or another build")
        missing = sorted(_NEEDED - arguments)
        if missing:
            raise NotReadableError(f"{operator} lacks {', '.join(missing)}: a copy from before 2026, whose lse is log2")


def _parameters(interface: Path, name: str) -> set[str]:
    for node in ast.parse(interface.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    raise NotReadableError(f"{interface.name} defines no {name}")
