"""Who listens to a backend's launches hears them, and nobody else's leaving takes that away."""

from __future__ import annotations

import pytest

from headfit.kernels.recording import Recorder


def test_each_listener_hears_what_is_launched_while_it_listens() -> None:
    recorder = Recorder()
    with recorder.listen() as outer:
        recorder.add(lambda: ["a", "b"])
        with recorder.listen() as inner:
            recorder.add(lambda: ["c"])
        recorder.add(lambda: ["d"])
    recorder.add(lambda: pytest.fail("nobody listens"))
    assert (outer, inner) == (["a", "b", "c", "d"], ["c"])


def test_of_listeners_with_equal_lists_the_one_that_leaves_is_gone() -> None:
    """As two threads have them: whoever came first may leave last."""
    recorder = Recorder()
    first, second = recorder.listen(), recorder.listen()
    kept = first.__enter__()
    gone = second.__enter__()
    second.__exit__(None, None, None)
    recorder.add(lambda: ["a"])
    first.__exit__(None, None, None)
    assert (kept, gone) == (["a"], [])
