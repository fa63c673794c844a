"""Sinks: one allocation, prefix views, addresses that survive a weight update."""

from __future__ import annotations

import pytest
import torch

from headfit.sinks import SinkCache


def test_same_object_for_none_and_for_the_stored_width() -> None:
    cache = SinkCache(torch.randn(64), 1, 32, 64)
    assert cache() is cache(None) is cache(64)
    assert cache().shape == (64,)
    assert cache().dtype == torch.float32


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (3, 4), (7, 8), (63, 64)])
def test_values_are_the_ranks_own_and_pad_heads_hold_minus_infinity(rank: int, world: int) -> None:
    model = torch.randn(64)
    n_local = 64 // world
    for given in (model, model[rank * n_local : (rank + 1) * n_local].clone()):
        cache = SinkCache(given, rank, n_local, 64)
        assert torch.equal(cache()[:n_local], model[rank * n_local : (rank + 1) * n_local])
        assert (cache()[n_local:] == -torch.inf).all()


def test_a_narrow_sink_is_a_prefix_view_of_the_same_memory() -> None:
    cache = SinkCache(torch.randn(8), 3, 8, 64)
    for width in (8, 9, 16, 32, 63):
        view = cache(width)
        assert view.data_ptr() == cache().data_ptr()
        assert view.shape == (width,)
        assert view.is_contiguous()
        assert view is cache(width)
        assert torch.equal(view, cache()[:width])


def test_the_pad_value_is_a_multiplication_by_one() -> None:
    pad = SinkCache(torch.zeros(8), 0, 8, 64)()[-1]
    for lse in (torch.tensor(-1e30), torch.tensor(0.0), torch.tensor(1e30), torch.tensor(torch.inf)):
        assert 1 / (1 + torch.exp(pad - lse)) == 1


def test_refresh_keeps_pointers_and_objects() -> None:
    cache = SinkCache(torch.zeros(64), 1, 16, 64)
    full, narrow = cache(), cache(16)
    addresses = (full.data_ptr(), narrow.data_ptr())
    new = torch.randn(64)
    cache.refresh(new)
    assert cache() is full
    assert cache(16) is narrow
    assert (full.data_ptr(), narrow.data_ptr()) == addresses
    assert torch.equal(narrow, new[16:32])
    assert (full[16:] == -torch.inf).all()
    cache.refresh(new[:16].clone())  # the rank's own
    assert torch.equal(narrow, new[:16])


def test_the_source_is_copied_and_may_be_of_any_float_dtype_or_a_parameter() -> None:
    source = torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
    cache = SinkCache(source, 0, 8, 8)
    expected = source.detach().float().clone()
    with torch.no_grad():
        source.zero_()
    assert torch.equal(cache(), expected)
    assert not cache().requires_grad
    cache.refresh(torch.full((8,), 2.0, dtype=torch.float64))
    assert (cache() == 2).all()
    strided = torch.arange(16.0)[::2]
    cache.refresh(strided)
    assert torch.equal(cache(), strided)


def test_built_in_inference_mode_it_can_still_be_refreshed_outside() -> None:
    with torch.inference_mode():
        cache = SinkCache(torch.ones(8), 0, 8, 16)
        view = cache(8)
    cache.refresh(torch.zeros(8))
    assert (view == 0).all()
    with torch.inference_mode():
        cache.refresh(torch.ones(8))
    assert (view == 1).all()
    cache.refresh(torch.zeros(8))


def test_infinite_sinks_pass_through() -> None:
    given = torch.tensor([torch.inf, -torch.inf, 0.0, 1.0])
    assert torch.equal(SinkCache(given, 0, 4, 64)(4), given)


@pytest.mark.parametrize("width", [7, 0, -1, 65, 8.0, True, "8"])
def test_widths_outside_are_refused(width: object) -> None:
    cache = SinkCache(torch.zeros(8), 0, 8, 64)
    with pytest.raises(ValueError, match=r"width: got .* from n_local = 8 to padded = 64"):
        cache(width)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.zeros(8), -1, 8, 64), "rank: got -1"),
        ((torch.zeros(8), 0, 0, 64), "n_local: got 0"),
        ((torch.zeros(8), 0, 8, 4), "padded: got 4, need at least n_local = 8"),
        ((torch.zeros(8), 0, 8, 64.0), "padded: got 64.0"),
        ((torch.zeros(16), 2, 8, 64), "attn_sink: got 16 heads"),
        ((torch.zeros(12), 0, 8, 64), "attn_sink: got 12 heads"),
        ((torch.zeros(4), 0, 8, 64), "attn_sink: got 4 heads"),
        ((torch.zeros(8, 1), 0, 8, 64), "attn_sink: got torch.float32 .8, 1."),
        ((torch.zeros(8, dtype=torch.int32), 0, 8, 64), "attn_sink: got torch.int32"),
        (([0.0] * 8, 0, 8, 64), "attn_sink: got list"),
    ],
)
def test_arguments_are_checked(arguments: tuple, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        SinkCache(*arguments)


def test_refresh_checks_its_argument_and_leaves_the_old_values() -> None:
    cache = SinkCache(torch.ones(8), 0, 8, 64)
    with pytest.raises(ValueError, match="attn_sink: got 7 heads"):
        cache.refresh(torch.zeros(7))
    assert (cache(8) == 1).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_sees_refreshed_sinks_and_nothing_waits_for_the_device() -> None:
    cache = SinkCache(torch.randn(64, device="cuda"), 1, 8, 64)
    out, new = torch.empty(8, device="cuda"), torch.randn(64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache(8), cache(16), cache()
        cache.refresh(new)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(cache(8) * 2)
    for values in (new, torch.randn(64, device="cuda")):
        cache.refresh(values)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, values[8:16] * 2)
