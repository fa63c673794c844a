"""Engine plug-ins: one file an engine, and the versions each was tested with.

Nothing is patched by importing this package or a file in it: every engine has one named function that changes
something and one that changes it back. Kernels and width rules do not belong here.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Engine:
    """An engine that headfit plugs into.

    Attributes:
        package: distribution name.
        oldest: first version that works; older ones are refused.
        newest: last version whose tests were run; newer ones warn once.
        install_hint: how to get it.
    """

    package: str
    oldest: str
    newest: str
    install_hint: str


ENGINES = {
    "transformers": Engine("transformers", "5.17.0", "5.24.0", "pip install 'headfit[compare]'"),
}


def require(name: str) -> Version:
    """The installed version of an engine, if it is one that this headfit can drive.

    Warns (once per call site) where the version is newer than every tested one.

    Raises:
        ValueError: no engine has that name.
        ImportError: it is missing or too old; the message says what to install.
    """
    if name not in ENGINES:
        raise ValueError(f"engine: got {name!r}, accepted are {', '.join(map(repr, ENGINES))}")
    engine = ENGINES[name]
    try:
        version = Version(importlib.metadata.version(engine.package))
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{engine.package} is not installed; {engine.install_hint}") from None
    if version < Version(engine.oldest):
        raise ImportError(
            f"{engine.package}: got {version}, accepted is {engine.oldest} and newer; {engine.install_hint}"
        )
    newest = Version(engine.newest)
    if version.release[:2] > newest.release[:2]:
        warnings.warn(
            f"{engine.package} {version} is newer than {newest}, the last version headfit was tested with", stacklevel=3
        )
    return version
