"""The suite as a list of cases, and a runner that needs no test framework.

A check is a function of (:class:`Setup`, :class:`~headfit.testing.pages.Route`) that protects one sentence of the
contract and raises :class:`~headfit.testing.compare.ConformanceFailure`. :func:`check` registers it; every check times
every route it names is one case.
"""

from __future__ import annotations

import importlib
import random
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch

from headfit import env, kernels
from headfit.testing.build import build
from headfit.testing.calls import BuiltCall, CallLog, CallSpec
from headfit.testing.pages import ROUTES, Route

T = TypeVar("T")
Scale = Literal["full", "small"]
Status = Literal["passed", "failed", "refused", "error"]
ALL = tuple(ROUTES)
KVCACHE = tuple(name for name, route in ROUTES.items() if route.entry == "kvcache")
PACKED = tuple(name for name, route in ROUTES.items() if route.packed)
LEAN = ("v4", "prefill_576")
PREFILL = tuple(name for name, route in ROUTES.items() if route.entry == "sparse")


@dataclass(frozen=True)
class Setup:
    """What is tested, where, at which size, from which seed; and, while a case runs, what became of its calls."""

    backend: str
    device: torch.device
    scale: Scale = "full"
    seed: int = 0
    log: CallLog = field(default_factory=CallLog, compare=False, repr=False)

    def pick(self, full: T, small: T) -> T:
        """The value for this run's scale."""
        return full if self.scale == "full" else small

    def number(self, *tag: object) -> int:
        """A seed for one purpose, fixed by the run's seed and ``tag``."""
        return zlib.crc32(repr((self.seed, *tag)).encode())

    def random(self, *tag: object) -> random.Random:
        """A generator for one purpose."""
        return random.Random(self.number(*tag))

    def build(self, spec: CallSpec) -> BuiltCall:
        """The call's tensors on this run's device; a spec without a seed gets one from the run's."""
        if spec.seed == 0:
            spec = CallSpec(**{**vars(spec), "seed": self.number(str(spec))})
        call = build(spec, self.device)
        call.log = self.log
        return call

    @contextmanager
    def part(self) -> Iterator[None]:
        """One of several independent parts of a case: a call that the backend refuses ends this part alone.

        A refusal after a call of the same part ran is an error: nobody would judge what that call wrote.
        """
        ran = self.log.ran
        try:
            yield
        except kernels.BackendUnavailable as error:
            if not error.refused or self.log.ran > ran:
                raise
            self.log.refused += error.refused.values()


@dataclass(frozen=True)
class Check:
    """One sentence of the contract and the function that holds a backend to it.

    ``cuda``: only meaningful there. ``large``: only at scale "full". ``lean``: the routes that stand for all of them
    where a call is dear (scale "small"; large checks on a CPU); None where the layout or the entry may matter.
    """

    name: str
    sentence: str
    routes: tuple[str, ...]
    function: Callable[[Setup, Route], None]
    cuda: bool = False
    large: bool = False
    lean: tuple[str, ...] | None = None

    def routes_on(self, device: torch.device, scale: Scale) -> tuple[str, ...]:
        """The routes that make cases on ``device`` at ``scale``."""
        dear = scale == "small" or (self.large and device.type != "cuda")
        return self.lean if dear and self.lean is not None else self.routes


@dataclass(frozen=True)
class Case:
    """One check on one route."""

    check: Check
    route: Route

    @property
    def id(self) -> str:
        """A name a person can read: ``check[route]``."""
        return f"{self.check.name}[{self.route.name}]"

    def run(self, setup: Setup) -> None:
        """Run it; raises ConformanceFailure where the backend breaks the sentence."""
        self.check.function(setup, self.route)


CHECKS: dict[str, Check] = {}
CheckFunction = Callable[[Setup, Route], None]


def check(
    sentence: str,
    *,
    routes: Sequence[str] = ALL,
    cuda: bool = False,
    large: bool = False,
    lean: tuple[str, ...] | None = None,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check function under its own name; ``sentence`` is what it protects, in the contract's words."""

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__.removeprefix("check_")
        if name in CHECKS:
            raise ValueError(f"check: the name {name!r} is taken; names are unique")
        CHECKS[name] = Check(name, sentence, tuple(routes), function, cuda, large, lean)
        return function

    return register


def conformance_cases(
    device: torch.device | str = "cpu", scale: Scale = "full", only: Iterable[str] | None = None
) -> list[Case]:
    """Every case that applies on ``device`` at ``scale``.

    Args:
        device: where the tensors of the calls will lie.
        scale: "full", or "small" for interpreters: few rows, heads and lanes, the same sentences.
        only: names of checks; None means all.

    Raises:
        ValueError: ``only`` names an unknown check, or ``scale`` is unknown.
    """
    for topic in ("shapes", "meaning", "exactness", "packed", "errors", "size"):
        importlib.import_module(f"headfit.testing.checks_{topic}")  # importing registers
    if scale not in ("full", "small"):
        raise ValueError(f"scale: got {scale!r}, accepted are 'full' and 'small'")
    wanted = set(CHECKS) if only is None else set(only)
    if wanted - set(CHECKS):
        raise ValueError(f"only: got {sorted(wanted - set(CHECKS))}, accepted are {', '.join(CHECKS)}")
    where = torch.device(device)
    on_cuda = where.type == "cuda"
    return [
        Case(c, ROUTES[route])
        for c in CHECKS.values()
        if c.name in wanted and (on_cuda or not c.cuda) and (scale == "full" or not c.large)
        for route in c.routes_on(where, scale)
    ]


@dataclass(frozen=True)
class CaseResult:
    """How one case went.

    ``status`` is "passed", "failed" (the contract is broken), "refused" (the backend said, before any launch, that it
    does not take a call of the case; what it took was right) or "error" (a call raised). ``message`` says why not
    passed; of a refusal it holds the backend's reasons.
    """

    id: str
    sentence: str
    status: Status
    message: str
    seconds: float

    @property
    def route(self) -> str:
        """The route in the case's name."""
        return self.id.partition("[")[2].rstrip("]")


@dataclass
class Report:
    """The outcome of :func:`run_conformance`."""

    backend: str
    device: str
    scale: Scale
    seed: int
    results: list[CaseResult] = field(default_factory=list)
    variants: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # from start to end; those of the results add up to more when processes share the work

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something passed; a backend may refuse calls."""
        return not self.failures and self.count("passed") > 0

    @property
    def failures(self) -> list[CaseResult]:
        """The cases that failed, errors included; not those that the backend refused."""
        return [r for r in self.results if r.status in ("failed", "error")]

    def count(self, status: Status) -> int:
        """How many cases ended so."""
        return sum(r.status == status for r in self.results)

    def refusals(self) -> Counter[tuple[str, str]]:
        """How many cases of each route were refused with each reason."""
        return Counter((r.route, r.message) for r in self.results if r.status == "refused")

    def __str__(self) -> str:
        ends: tuple[tuple[Status, str], ...]
        ends = (("failed", "failed"), ("error", "with an error"), ("refused", "refused"))
        counts = [f"{self.count('passed')} of {len(self.results)} cases passed"]
        counts += [f"{self.count(status)} {word}" for status, word in ends if self.count(status)]
        lines = [
            f"{self.backend} on {self.device}, scale {self.scale}, seed {self.seed}: "
            f"{', '.join(counts)} in {self.seconds:.1f} s"
        ]
        lines += [f"refused {n} x {route}: {reason}" for (route, reason), n in sorted(self.refusals().items())]
        lines += [f"{r.status.upper()} {r.id}\n  protects: {r.sentence}\n  {r.message}" for r in self.failures]
        if self.variants:
            lines.append("launched: " + ", ".join(f"{name} x {n}" for name, n in sorted(self.variants.items())))
        return "\n".join(lines)


def fresh_seed() -> int:
    """``HEADFIT_TEST_SEED`` where it is set, to repeat a run; a new one otherwise."""
    given = env.read("HEADFIT_TEST_SEED")
    return given if isinstance(given, int) else random.SystemRandom().randrange(2**31)


def run_conformance(
    backend: str,
    device: torch.device | str = "cpu",
    scale: Scale = "full",
    seed: int | None = None,
    only: Iterable[str] | None = None,
    progress: Callable[[CaseResult], None] | None = None,
    jobs: int = 1,
) -> Report:
    """Hold a registered backend to the contract; no test framework needed.

    Args:
        backend: a name in ``headfit.kernels.REGISTRY``.
        device: where the tensors lie, "cuda" for GPU backends.
        scale: "full", or "small" for interpreters.
        seed: of all data; None takes ``HEADFIT_TEST_SEED``, or else a fresh one. The report states it.
        only: names of checks; None means all.
        progress: called with each result as it comes.
        jobs: processes that share the cases. Above 1 they are spawned, so the caller's main module must be guarded by
            ``if __name__ == "__main__"``; a case whose process dies is an error, and a case has the same data in any.
            The checks at size take up to 9 GB of a GPU each: on a small one, run those in one process.

    Returns:
        A :class:`Report`: ``.ok``, ``.failures``, ``.refusals()``, ``str(report)``. Where the backend's module has a
        ``record_variants()`` context manager that yields a list of names, the launches are counted in ``.variants``.

    Raises:
        ValueError: unknown backend, scale or check, or jobs below 1. headfit.kernels.BackendUnavailable: the backend
            cannot run here.
    """
    from headfit.testing.workers import run_in_processes

    if jobs < 1:
        raise ValueError(f"jobs: got {jobs}, accepted are 1 and above")
    kernels.load(backend)
    setup = Setup(backend, torch.device(device), scale, fresh_seed() if seed is None else seed)
    report = Report(backend, str(setup.device), scale, setup.seed)
    cases = conformance_cases(device, scale, only)
    start = time.perf_counter()
    outcomes = run_in_processes(cases, setup, jobs) if jobs > 1 else (run_counted(case, setup) for case in cases)
    for result, launched in outcomes:
        report.results.append(result)
        report.variants.update(launched)
        if progress is not None:
            progress(result)
    order = {case.id: i for i, case in enumerate(cases)}
    report.results.sort(key=lambda r: order[r.id])
    report.seconds = time.perf_counter() - start
    return report


def run_counted(case: Case, setup: Setup) -> tuple[CaseResult, Counter[str]]:
    """:func:`run_case`, and how often each binary was launched where the backend's module tells."""
    recorder = getattr(kernels.load(setup.backend), "record_variants", None)
    with recorder() if recorder is not None else nullcontext([]) as launched:
        result = run_case(case, setup)
    return result, Counter(launched)


def run_case(case: Case, setup: Setup) -> CaseResult:
    """Run one case and catch what it raises.

    A refusal that ends the case before any of its calls ran, or one of its parts (:meth:`Setup.part`), is a result of
    its own. After a call that ran it is an error: it would hide what that call did.
    """
    start = time.perf_counter()
    setup = replace(setup, log=CallLog())
    status: Status = "passed"
    message = ""
    try:
        with setup.part():
            case.run(setup)
        if setup.log.refused:
            status, message = "refused", "; ".join(dict.fromkeys(setup.log.refused))
    except AssertionError as failure:
        status, message = "failed", str(failure)
    except Exception:
        status, message = "error", traceback.format_exc(limit=-6)
    return CaseResult(case.id, case.check.sentence, status, message, time.perf_counter() - start)
