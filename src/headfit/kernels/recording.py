"""Which binaries a backend launches, for tests and reports: one recorder a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Recorder:
    """Collects names while somebody listens."""

    def __init__(self) -> None:
        self._listening: dict[int, list[str]] = {}  # by id: lists of different listeners may be equal

    @contextmanager
    def listen(self) -> Iterator[list[str]]:
        """Collect the name of each binary launched inside the block."""
        names: list[str] = []
        self._listening[id(names)] = names
        try:
            yield names
        finally:
            del self._listening[id(names)]

    def add(self, names: Callable[[], Iterable[str]]) -> None:
        """Binaries are being launched; ``names`` is called only where somebody listens, for this is a hot path."""
        for heard in list(self._listening.values()):  # other threads come and go
            heard.extend(names())
