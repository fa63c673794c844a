"""From a kernel's source to its cubin: compiled by CuTe DSL without a GPU, and kept on disk by source and version.

Belongs here: `Spec`, `Binary`, the cache, the one call of the compiler. Does not belong here: the table of kernels
(``hopper.py``), loading (``cubin.py``). The DSL is imported only where a binary is not in the cache, so a machine that
gets the cache folder filled needs no compiler at all.

A file of the cache is a line of JSON (the facts of the binary and a digest) followed by the cubin. It is written under
another name and then renamed, so that processes that start together never see half of one; a file that does not match
its digest is compiled anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import re
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from headfit import env
from headfit.kernels import cubin_info, hopper_abi

PACKAGE: Final = "nvidia-cutlass-dsl"
OLDEST: Final = Version("4.8.1")  # the first whose options and dumps are as used here
REMEDY: Final = "pip install 'headfit[hopper]'"
ARCH: Final = "sm_90a"
SOURCES: Final = ("hopper_*.py", "ptx*.py")  # of this folder: whatever may be traced
_log = logging.getLogger("headfit")
_lock = threading.Lock()  # the DSL traces into state of the process


@dataclass(frozen=True)
class Spec:
    """A binary of the family: ``function(**options)`` of ``module`` returns a `hopper_params.Traced`.

    ``name`` is what a person reads, such as ``"native heads=8"``; together with the options it names the cache file.
    """

    name: str
    module: str
    function: str
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: its image, and what a launch and a report need to know of it.

    ``threads`` a CTA, ``shared`` bytes of dynamic shared memory, ``registers`` a thread, ``stack`` bytes a thread
    (above 0: spills).
    """

    name: str
    symbol: str
    threads: int
    shared: int
    registers: int
    stack: int
    image: bytes = field(repr=False)


class CannotBuildError(RuntimeError):
    """A binary is neither in the cache nor can it be compiled here; the text says why and what to do."""


def folder() -> Path:
    """Where binaries are kept: ``HEADFIT_CACHE_DIR``, else ``headfit`` in the user's cache folder."""
    chosen = env.read("HEADFIT_CACHE_DIR")
    if chosen is not None:
        return Path(str(chosen)) / "hopper"
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "headfit" / "hopper"


def dsl_version() -> str | None:
    """The installed version of the DSL, or None; it is not imported."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_no_compiler() -> str | None:
    """Why nothing can be compiled here, with the remedy; None where it can."""
    version = dsl_version()
    if version is None:
        return f"{PACKAGE} is not installed: {REMEDY}"
    try:
        old = Version(version) < OLDEST
    except InvalidVersion:
        return f"{PACKAGE} has the version {version!r}, which says nothing: {REMEDY}"
    return f"{PACKAGE} {version} is installed, {OLDEST} or newer is needed: {REMEDY}" if old else None


def binary(spec: Spec) -> Binary:
    """The binary of ``spec``: from the cache, else compiled (seconds) and kept. Safe in threads and processes.

    Raises:
        CannotBuildError: it is not in the cache, and the DSL is missing, too old, or fails.
    """
    return _binary(spec, folder())


def in_cache(spec: Spec) -> bool:
    """Whether the binary of ``spec`` would come from the cache."""
    return any(_load(path) is not None for path in _places(spec, folder()))


@functools.cache
def _binary(spec: Spec, where: Path) -> Binary:
    with _lock:
        for path in _places(spec, where):
            found = _load(path)
            if found is not None:
                return found
        reason = why_no_compiler()
        if reason is not None:
            raise CannotBuildError(f"{spec.name}: not in {where}, and {reason}")
        start = time.perf_counter()
        try:
            made = compile_spec(spec)
        except Exception as error:  # whatever a compiler raises: the call goes to another backend
            text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:300]
            raise CannotBuildError(f"{spec.name}: {PACKAGE} {dsl_version()} fails: {text}") from error
        seconds = time.perf_counter() - start
        kept = _keep(made, _places(spec, where)[0])
        _log.info("hopper: compiled %s in %.1f s, %s", spec.name, seconds, kept)
        return made


def compile_spec(spec: Spec) -> Binary:
    """Compile ``spec``, on any machine, whatever the cache holds. Raises what the DSL raises."""
    import cutlass.cute as cute

    from headfit.kernels import hopper_params

    traced = getattr(importlib.import_module(spec.module), spec.function)(**dict(spec.options))
    with tempfile.TemporaryDirectory() as place:
        options = f"--keep-cubin --dump-dir={place} --gpu-arch {ARCH}"
        compiled = cute.compile(hopper_params.host(traced), hopper_params.placeholder(), options=options)
        image = _image(compiled, Path(place))
    info = cubin_info.read(image)
    if info.parameters != hopper_abi.PLACES:
        raise RuntimeError(
            f"the parameters of {spec.name} are not laid out as hopper_abi writes them: {info.parameters}"
        )
    return Binary(spec.name, info.symbol, traced.threads, traced.smem, info.registers, info.stack, image)


def _image(compiled: Any, place: Path) -> bytes:
    """The cubin: the bytes that the compiled object carries, else the one file that was dumped."""
    held = getattr(compiled, "__cubin__", None)
    if isinstance(held, bytes) and held:
        return held
    found = sorted(place.glob("*.cubin"))
    if len(found) != 1:
        raise RuntimeError(f"the DSL left {len(found)} cubins in its dump folder, need one")
    return found[0].read_bytes()


# ------------------------------------------------------------------------------------------------------------ the cache


@functools.cache
def _sources() -> str:
    """A digest of everything that may be traced."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(p for pattern in SOURCES for p in here.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _places(spec: Spec, where: Path) -> list[Path]:
    """Files that may hold the binary, best first: of the installed DSL, or of any where none here can compile."""
    digest = hashlib.sha256(f"{_sources()} {spec} {ARCH}".encode()).hexdigest()[:20]
    stem = "-".join(spec.name.replace("=", "").split()) + f"-{digest}"
    if why_no_compiler() is None:
        return [where / f"{stem}-{dsl_version()}.bin"]
    return sorted(where.glob(f"{stem}-*.bin"), reverse=True)


def _load(path: Path) -> Binary | None:
    """The binary in ``path``; None where there is none, or where the file is not whole."""
    try:
        line, _, image = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        if hashlib.sha256(image).hexdigest() != facts.pop("sha256"):
            return None
        return Binary(**facts, image=image)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(made: Binary, path: Path) -> str:
    """Write ``made`` to ``path``, whole or not at all; a folder that cannot be written is no error. Says which."""
    facts = {k: v for k, v in asdict(made).items() if k != "image"}
    facts["sha256"] = hashlib.sha256(made.image).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(facts).encode() + b"\n" + made.image)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {path.parent}"
