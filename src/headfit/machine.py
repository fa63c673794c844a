"""What stands on this machine: GPU, driver, packages, backends, engines with their plug-ins, environment variables.

Belongs here: one `Fact` a line for `headfit doctor`. Does not belong here: what kernels accept (`headfit.probes`). A
machine's oddity becomes a fact and never an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headfit import env

# Distributions whose version matters to what runs, and what each is.
PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "sglang",
    "vllm",
    "sgl-flash-mla",
    "tokenspeed-flashmla",
    "flash-mla",
    "nvidia-cutlass-dsl",
)


@dataclass(frozen=True)
class Fact:
    """One line about the machine: ``name``, ``value``, and ``ok`` False where it is a problem."""

    name: str
    value: str
    ok: bool = True


@dataclass(frozen=True)
class Plugin:
    """A plug-in of ours: the engine, the entry point's group, our module, the engine's variable that restricts them."""

    engine: str
    group: str
    module: str
    only: str


PLUGINS: Final = (
    Plugin("sglang", "sglang.srt.plugins", "headfit.engines.sglang", "SGLANG_PLUGINS"),
    Plugin("vllm", "vllm.general_plugins", "headfit.engines.vllm", "VLLM_PLUGINS"),
)


def gpu_here() -> tuple[tuple[int, int] | None, str]:
    """Compute capability and name of the current CUDA device; None and why, where there is none."""
    try:
        import torch

        from headfit import probes

        cc = probes.compute_capability()
        return cc, "no CUDA device" if cc is None else torch.cuda.get_device_name()
    except Exception as error:  # a broken driver must not keep the doctor from speaking
        return None, f"no CUDA device ({type(error).__name__}: {error})"


def facts() -> Iterator[Fact]:
    """All lines about this machine."""
    from headfit import kernels

    cc, name = gpu_here()
    yield Fact("GPU", name if cc is None else f"{name}, compute capability {cc[0]}.{cc[1]}", cc is not None)
    loaded = driver()
    yield Fact("driver", loaded or "none found", loaded is not None or cc is None)
    yield Fact("python", platform.python_version())
    for package in PACKAGES:
        version = version_of(package)
        if version is not None or package in ("torch", "triton"):
            yield Fact(package, version or "not installed", version is not None)
    for backend in kernels.REGISTRY:
        problem = _problem(lambda backend=backend: kernels.why_not(backend))  # type: ignore[misc]
        yield Fact(f"backend {backend}", problem or "usable", problem is None)
    for plugin in PLUGINS:
        problem = _problem(lambda plugin=plugin: plugin_problem(plugin))  # type: ignore[misc]
        absent = version_of(plugin.engine) is None
        value = "active: the engine loads it when it starts" if problem is None else f"not active: {problem}"
        yield Fact(f"plug-in {plugin.engine}", value, problem is None or absent)
    for variable in env.VARIABLES.values():
        problem = _problem(lambda variable=variable: env.read(variable.name) and None)  # type: ignore[misc]
        yield Fact(variable.name, problem or _value(variable), problem is None)
    for stray, meant in env.unknown().items():
        yield Fact(stray, "nothing reads this" + (f"; {meant} was perhaps meant" if meant else ""), False)


def plugin_problem(plugin: Plugin) -> str | None:
    """Why the engine would not run with our plug-in here, or None. Imports our module, no part of the engine."""
    from headfit.engines import hooks, routes
    from headfit.width import Policy

    if version_of(plugin.engine) is None:
        return f"{plugin.engine} is not installed here"
    points = importlib.metadata.entry_points(group=plugin.group)
    if not any(point.value.partition(":")[0] == plugin.module for point in points):
        return f"this environment has no entry point of headfit in {plugin.group}; pip install headfit into it"
    only = os.environ.get(plugin.only)
    if only is not None and "headfit" not in [name.strip() for name in only.split(",")]:
        return f"{plugin.only}={only} leaves headfit out"
    policy = Policy.from_env()
    if routes.is_off(policy):
        return f"{policy.origin} asks for the pad"
    module = importlib.import_module(plugin.module)
    return hooks.version_problem(plugin.engine, module.OLDEST, module.NEWEST)


def _value(variable: env.Variable) -> str:
    value = env.read(variable.name)
    text = {None: "not set", True: "on", False: "off"}.get(value, str(value))  # type: ignore[arg-type]
    return f"{text} (default)" if value == variable.default and value is not None else text


def _problem(check: Callable[[], object]) -> str | None:
    try:
        answer = check()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None if answer is None else str(answer)


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's kernel driver, or None."""
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", path.read_text())
    except OSError:
        return None
    return found[0] if found else None
