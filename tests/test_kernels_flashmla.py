"""The flashmla backend against stand-ins that have the real operators' schemas, demands and conventions."""

from __future__ import annotations

import dataclasses
import random
from contextlib import AbstractContextManager

import fake_kernels as fake
import pytest
import torch

from headfit import kernels
from headfit.kernels import adapt, flashmla, flashmla_copies
from headfit.kernels.flashmla_copies import NoCopyError
from headfit.testing import ROUTES, SMALL, CacheSpec, CallSpec, RandomDraw, build, conformance_cases, draw_spec
from headfit.testing.checks_shapes import hold
from headfit.testing.runner import Setup, run_case

REFUSAL = "split plan depends on the rows"
_LIBRARIES: list[torch.library.Library] = []


def copy_of(schema: str) -> flashmla_copies.Copy:
    """A copy whose operators are registered under a namespace of their own, with that release's schemas."""
    namespace = f"_flashmla_fake_{schema}"
    if not hasattr(getattr(torch.ops, namespace), flashmla_copies.PREFILL):
        library = torch.library.Library(namespace, "DEF")
        for text in fake.FLASHMLA_SCHEMAS[schema]:
            library.define(text)
        library.impl(flashmla_copies.PREFILL, fake.flashmla_prefill, "CPU")
        library.impl(flashmla_copies.DECODE, fake.flashmla_decode, "CPU")
        _LIBRARIES.append(library)
    return flashmla_copies.operators(namespace, None)


def registered(copy: flashmla_copies.Copy) -> AbstractContextManager[str]:
    """The adapter on a stand-in, as a backend of CPU tensors."""
    return fake.registered(
        "fake-flashmla",
        unsupported=flashmla.unsupported,
        capability=flashmla.capability,
        run=lambda call: flashmla.run_with(copy, call),
    )


SOME_CHECKS = ["empty_rows", "sink_formula", "lse_natural", "max_logits", "invalid_indices", "lanes_past_length"]


@pytest.mark.parametrize(
    ("schema", "only", "routes"),
    [
        ("vllm", None, ("v4", "v4_two_caches", "prefill_512")),  # one for each of the two kernels
        ("sgl", SOME_CHECKS, ("v4", "v32", "bf16_576", "prefill_576")),
    ],
)
def test_conformance(schema, only, routes):
    # all of the contract but batch_invariant, which the backend refuses
    failed, refused = [], set()
    with registered(copy_of(schema)) as name:
        setup = Setup(name, torch.device("cpu"), "small", seed=7)
        for case in conformance_cases("cpu", "small", only):
            if case.route.name not in routes:
                continue
            result = run_case(case, setup)
            if result.status == "refused" and REFUSAL in result.message:
                refused.add(case.check.name)
            elif result.status != "passed":
                failed.append(f"{result.id}: {result.message}")
    assert not failed, "\n".join(failed)
    assert only or {"row_exact", "width_exact"} <= refused


def hold_taken(name: str, seed: int, spec: CallSpec) -> None:
    """`hold` of a call that must not be refused."""
    setup = Setup(name, torch.device("cpu"), "small", seed=seed)
    hold(setup, spec)
    assert not setup.log.refused


def test_random_calls():
    rng = RandomDraw(random.Random(3))
    with registered(copy_of("vllm")) as name:
        for _ in range(40):
            spec = dataclasses.replace(draw_spec(rng, rng.choice(list(ROUTES.values())), SMALL), batch_invariant=False)
            hold_taken(name, 3, spec)


@pytest.mark.parametrize("route", ["v4", "prefill_512"])
def test_width_exact_over_both_launches(route):
    # 65 heads and more are two launches of 64: every head sees the launch that it sees in a call of its own
    spec = CallSpec(ROUTES[route], batch=3, heads=128, caches=(CacheSpec(40, 5, 12),), sink="edges", seed=1)
    call = build(spec)
    with registered(copy_of("vllm")) as name:
        full = call.run(name)
        for heads in (1, 8, 63, 64, 65, 100):
            part = call.run(name, q=call.q[..., :heads, :], attn_sink=call.sink[:heads])
            full.require_same(part, f"{heads} heads against 128", heads=heads)


def test_misaligned_pages_are_staged(monkeypatch):
    # a page stride that is no multiple of 16 bytes: the kernel's 16-byte loads would fault
    staged = []
    real = adapt.staged_pages
    monkeypatch.setattr(adapt, "staged_pages", lambda *a: staged.append(1) or real(*a))
    with registered(copy_of("vllm")) as name:
        for gap, count in ((16, 0), (3, 1)):
            caches = (CacheSpec(9, 5, 8, gap=gap),)
            call = build(CallSpec(ROUTES["v4"], batch=3, heads=4, caches=caches, lengths="edges", seed=4))
            hold_taken(name, 4, call.spec)
            staged.clear()
            call.run(name)
            assert len(staged) == count


def test_chunks_of_rows_change_no_bit(monkeypatch):
    for s_q in (1, 7):
        caches = (CacheSpec(9, 5, 12),)
        call = build(CallSpec(ROUTES["v4"], batch=4, s_q=s_q, heads=5, caches=caches, lengths="random", seed=2))
        with registered(copy_of("vllm")) as name:
            whole = call.run(name)
            for limit in (1, 4, 20):
                monkeypatch.setattr(flashmla, "ROWS", limit)
                whole.require_same(call.run(name), f"launches of {limit} rows")
            monkeypatch.undo()


def test_writes_into_the_callers_memory_where_it_can():
    # 64 heads, contiguous: no copy of the result
    written = []
    copy = copy_of("vllm")
    watched = dataclasses.replace(copy, decode=lambda *a: written.append(a[-1]) or copy.decode(*a))
    call = build(CallSpec(ROUTES["v4"], batch=2, heads=64, caches=(CacheSpec(9, 5, 12),), seed=2))
    out = torch.empty(2, 1, 64, 512, dtype=torch.bfloat16)
    with registered(watched) as name:
        call.run(name, out=out)
    assert written[0].data_ptr() == out.data_ptr()


def test_older_copies_are_refused_by_their_signature():
    with pytest.raises(NoCopyError, match="before 2026"):
        copy_of("old")


def test_unknown_arguments_are_refused():
    needed = flashmla_copies._NEEDED[flashmla_copies.PREFILL]
    with pytest.raises(NoCopyError, match="takes fancy, which is not known"):
        flashmla_copies._check_arguments("op", {*needed, "fancy"}, needed, ())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_says_what_is_missing_here():
    assert "compute capability 9.0" in flashmla.available()
    assert "flashmla" not in kernels.backends()
    with pytest.raises(kernels.BackendUnavailable, match=r"compute capability 9\.0"):
        kernels.load("flashmla")


def test_says_what_was_looked_for(monkeypatch):
    monkeypatch.setattr(flashmla_copies.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(flashmla_copies, "search", flashmla_copies.search.__wrapped__)
    with pytest.raises(NoCopyError, match="vllm is not installed; flash_mla is not installed; install vllm"):
        flashmla_copies.find()


def test_capability():
    hopper = flashmla.capability((9, 0))
    assert hopper.heads("prefill") == hopper.heads("decode") == {64, 128}
    assert hopper.fork == "entry"
    assert "blocks of 64" in hopper.source("heads")
    assert not flashmla.capability((8, 0)).heads("decode")


def test_reads_small_heads_from_the_library(tmp_path):
    library = tmp_path / "_flashmla_C.abi3.so"
    library.write_bytes(b"\0ELF. SM90a supports 8, 16, 32, 64 and 128 heads; SM100f supports 64 and 128.\0")
    assert flashmla_copies.small_prefill_heads(str(library))
    other = tmp_path / "other.so"
    other.write_bytes(b"\0ELF")
    assert not flashmla_copies.small_prefill_heads(str(other))
    assert not flashmla_copies.small_prefill_heads(None)


def test_a_library_that_does_not_load(tmp_path):
    broken = tmp_path / "_flashmla_C.abi3.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NoCopyError, match="does not load"):
        flashmla.load_library(broken)
