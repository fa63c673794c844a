"""What the serving-engine plug-ins share: targets checked before they are touched, patches that come off again, one log
line a process, and the counter of calls.

Belongs here: machinery that knows no engine. Does not belong here: names inside an engine (``sglang.py``, ``vllm.py``),
the choice of a width or a kernel (``routes.py``). Importing this module imports no engine and no kernel.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import pkgutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("headfit")


def launch(backends: Sequence[str], q: Tensor, k_cache: Tensor, **kwargs: Any) -> tuple[tuple[Tensor, Tensor], str]:
    """`headfit.flash_mla_with_kvcache` by the first of ``backends`` that takes the call, and which that was.

    A route knows shapes: a backend may still refuse a call for its strides, its caches or its mode. Call it eagerly:
    under ``torch.compile`` a refusal comes when the graph runs.

    Raises:
        BackendUnavailable: none of them takes it.
    """
    from headfit.kernels import BackendUnavailable
    from headfit.ops import flash_mla_with_kvcache

    refused: dict[str, str] = {}
    for name in dict.fromkeys(backends):
        try:
            return flash_mla_with_kvcache(q, k_cache, **kwargs, backend=name), name
        except BackendUnavailable as error:
            if not error.refused:
                raise
            refused |= error.refused
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise BackendUnavailable(f"no backend takes this call: {reasons or 'none was named'}", refused)


# ------------------------------------------------------------------------------------------------- the counter of calls


class CallKey(NamedTuple):
    """What a call is counted under.

    ``phase``: prefill or decode. ``width``: query heads launched. ``kernel``: the engine's kernel family or a headfit
    backend. ``reason``: the rule that decided, such as ``native``, ``mode`` or ``not_measured`` (see ``routes.py``).
    """

    phase: str
    width: int
    kernel: str
    reason: str


_calls: Counter[CallKey] = Counter()


def count(phase: str, width: int, kernel: str, reason: str) -> None:
    """Count one attention call. A CUDA graph's replay runs no Python: a captured call counts once, at capture."""
    _calls[CallKey(phase, width, kernel, reason)] += 1


def calls() -> Mapping[CallKey, int]:
    """How many attention calls of this process went where: a copy, safe to keep."""
    return dict(_calls)


def reset_calls() -> None:
    """Start counting from zero."""
    _calls.clear()


# ---------------------------------------------------------------------------------------------- one log line a process

_said: set[str] = set()


def say_once(engine: str, text: str, *, warn: bool = False) -> None:
    """The one line that this process gets to read about ``engine``; later ones are dropped.

    It goes to the logger ``headfit``; where nobody configured logging, Python prints warnings to stderr and drops the
    rest. Engines configure the root logger, which shows both.
    """
    if engine in _said:
        log.debug("%s: %s", engine, text)
        return
    _said.add(engine)
    from headfit import __version__

    log.log(logging.WARNING if warn else logging.INFO, "headfit %s, %s: %s", __version__, engine, text)


def forget_line(engine: str) -> None:
    """Allow the next `say_once`: for the line of a new registration."""
    _said.discard(engine)


# ------------------------------------------------------------------------------------------------- engines and versions


def version_of(package: str) -> Version | None:
    """The installed version of a distribution, or None where it is missing or not a version."""
    try:
        return Version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def version_problem(package: str, oldest: str, newest: str) -> str | None:
    """Why ``package`` as installed is none that this plug-in knows, or None. Pre-releases and local builds count."""
    version = version_of(package)
    if version is None:
        return f"{package} is not installed here, or states no version"
    low, high = Version(oldest), Version(newest)
    if low.release <= version.release[: len(low.release)] and version.release[: len(high.release)] <= high.release:
        return None
    return f"{package} {version} is outside {oldest} to {newest}, the versions this headfit was tested with"


# ------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """A function of an engine that a plug-in wants to wrap.

    Attributes:
        path: dotted path, as ``pkgutil.resolve_name`` takes it.
        parameters: names that its signature must start with, ``self`` and ``cls`` left out; ``**name`` stands for a
            catch-all. Parameters beyond these must have defaults, unless they are named in ``needs``.
        needs: further names that must be among its parameters, anywhere.
        passes_on: the wrapper hands every argument on as it came, so that further parameters do not matter.
    """

    path: str
    parameters: tuple[str, ...]
    needs: tuple[str, ...] = ()
    passes_on: bool = False

    @property
    def short(self) -> str:
        """The function, with its class where it has one."""
        *_, holder, name = self.path.split(".")
        return f"{holder}.{name}" if holder[:1].isupper() and not holder.isupper() else name


@dataclass(frozen=True)
class Found:
    """A target that was resolved: ``owner`` holds ``name``; ``raw`` is what stands there, descriptor included."""

    target: Target
    owner: Any
    name: str
    raw: Any
    inherited: bool


class TargetError(Exception):
    """A target cannot be wrapped; the text says which and why."""


def resolve(target: Target) -> Found:
    """Find a target and check its signature. Imports the engine module it lives in.

    Raises:
        TargetError: it is not there, its module cannot be imported (whatever the import raises), or its signature is
            not the one that was tested.
    """
    owner_path, _, name = target.path.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
        value = getattr(owner, name)
    except (Exception, SystemExit) as error:  # a half-installed package may raise anything while it is imported
        raise TargetError(f"{target.path} is not there ({type(error).__name__}: {error})") from error
    problem = signature_problem(value, target)
    if problem is not None:
        raise TargetError(f"{target.path} {problem}")
    own = vars(owner) if isinstance(owner, (type, ModuleType)) else getattr(owner, "__dict__", {})
    inherited = name not in own
    raw = inspect.getattr_static(owner, name) if inherited else own[name]
    return Found(target, owner, name, raw, inherited)


def signature_problem(function: Any, target: Target) -> str | None:
    """How the signature of ``function`` differs from what ``target`` was tested with, or None."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        return f"has no readable signature ({error})"
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    catch_all: dict[Any, str] = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    names = [catch_all.get(p.kind, "") + p.name for p in parameters]
    want = target.parameters
    if tuple(names[: len(want)]) != want:
        return f"takes ({', '.join(names)}), tested was ({', '.join(want)}, ...)"
    missing = [name for name in target.needs if name not in names]
    if missing:
        return f"takes no {', '.join(missing)}, which it did when it was tested"
    if target.passes_on:
        return None
    extra = [p.name for p in parameters[len(want) :] if p.default is p.empty and p.kind not in catch_all]
    extra = [name for name in extra if name not in target.needs]
    if extra:
        return f"requires {', '.join(extra)}, which it did not when it was tested"
    return None


# -------------------------------------------------------------------------------------------------------------- patches


@dataclass
class Patches:
    """Attributes that were replaced, and how to put the originals back."""

    done: list[tuple[Found, Any]] = field(default_factory=list)

    def replace(self, found: Found, new: Any) -> None:
        """Put ``new`` (a descriptor where the original was one) in place of what was found."""
        setattr(found.owner, found.name, new)
        self.done.append((found, new))

    def restore(self) -> list[str]:
        """Put every original back where our replacement still stands; returns the paths where something else does.

        Whoever wrapped ours after us keeps working: what we installed passes calls through once the plug-in is off.
        """
        left = []
        for found, new in reversed(self.done):
            if not put_back(found, new):
                left.append(found.target.path)
        self.done.clear()
        return left


def put_back(found: Found, ours: Any) -> bool:
    """Restore one original if ``ours`` is exactly what stands in its place; whether it was."""
    if inspect.getattr_static(found.owner, found.name, None) is not ours:
        return False
    if found.inherited:
        delattr(found.owner, found.name)
    else:
        setattr(found.owner, found.name, found.raw)
    return True


# ------------------------------------------------------------------------------------- acting when a module is imported


class _Watch(importlib.abc.MetaPathFinder):
    """Calls back right after a module was executed, so that nothing is imported that would not have been anyway."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name, self.callback = name, callback
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or getattr(self._busy, "now", False):
            return None
        self._busy.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.now = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, watch: _Watch) -> None:
        self._inner, self._watch = inner, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        if self._watch in sys.meta_path:
            sys.meta_path.remove(self._watch)
            self._watch.callback(module)


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback(module)`` once ``name`` has been imported: now, if it has been; returns a function that cancels.

    The callback must not raise: it runs inside somebody else's import statement.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return lambda: None
    watch = _Watch(name, callback)
    sys.meta_path.insert(0, watch)

    def cancel() -> None:
        if watch in sys.meta_path:
            sys.meta_path.remove(watch)

    return cancel
