"""The flashinfer backend against stand-ins with the calls, tables and conventions of releases; no SM12x was at hand."""

from __future__ import annotations

import ast
import dataclasses
import os
import random
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import fake_kernels as fake
import pytest
import torch

from headfit import checks, kernels
from headfit.flashinfer_facts import NotReadableError, SideFacts, decode_facts, prefill_facts
from headfit.kernels import adapt, flashinfer
from headfit.kernels.flashinfer import Installed
from headfit.testing import ROUTES, SMALL, CacheSpec, CallSpec, RandomDraw, build, conformance_cases, draw_spec
from headfit.testing.checks_shapes import hold
from headfit.testing.runner import Setup, run_case

REFUSAL = "FlashInfer forks on the row count"


def release(name: str) -> tuple[Installed, fake.FakeFlashInfer]:
    """The facts of a release, as its own tables state them, on a stand-in."""
    if name == "0.7.4":
        module = fake.FakeFlashInfer(tuple(range(1, 129)), None, poison_by_slot_0=False)
        topk: frozenset[int] | range = range(64, 2**31, 64)
        module.prefill_heads = heads = (8, 16, 32, 64, 128)
    else:
        topks = (128, 512, 1024) if name == "0.6.17" else (128, 192, 256, 512, 1024)
        module = fake.FakeFlashInfer((8, 16, 32, 64, 128), topks, poison_by_slot_0=True)
        topk = frozenset({*topks, 2048})
        module.prefill_heads = heads = (16, 32, 64, 128) if name == "0.6.17" else (8, 16, 32, 64, 128)
    prefill = SideFacts(frozenset(heads), topk, "the test")
    return Installed(module, name, 64, decode_facts(module), prefill, any_page=name == "0.7.4"), module


def registered(found: Installed) -> AbstractContextManager[str]:
    """The adapter on a stand-in, as a backend of CPU tensors."""

    def unsupported(call):
        answer = flashinfer.plan(found, call)
        return answer if isinstance(answer, str) else None

    return fake.registered(
        "fake-flashinfer",
        unsupported=unsupported,
        capability=flashinfer.capability,
        run=lambda call: flashinfer.run_with(found, call),
    )


SOME_CHECKS = ["empty_rows", "sink_formula", "lse_natural", "unlisted_nan", "lanes_past_length", "second_cache"]


@pytest.mark.parametrize(("version", "only"), [("0.6.17", None), ("0.7.4", SOME_CHECKS)])
def test_conformance(version, only):
    # the arithmetic of the stand-in is exact, so what is held to the contract is the marshalling
    failed, refused = [], set()
    with registered(release(version)[0]) as name:
        setup = Setup(name, torch.device("cpu"), "small", seed=5)
        for case in conformance_cases("cpu", "small", only):
            if case.route.name not in ("v4", "v4_two_caches"):
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


@pytest.mark.parametrize("version", ["0.6.17", "0.6.18", "0.7.4"])
def test_random_calls(version):
    rng = RandomDraw(random.Random(11))
    with registered(release(version)[0]) as name:
        for _ in range(12):
            spec = draw_spec(rng, rng.choice([ROUTES["v4"], ROUTES["v4_two_caches"]]), SMALL)
            hold_taken(name, 3, dataclasses.replace(spec, batch_invariant=False))


@pytest.mark.parametrize("route", ["v4", "v4_two_caches"])
@pytest.mark.parametrize("version", ["0.6.17", "0.6.18", "0.7.4"])
def test_both_sides_of_the_fork(version, route):
    found, module = release(version)
    with registered(found) as name:
        for rows in (64, 65):
            caches = (CacheSpec(100, 64, 4), CacheSpec(70, 2, 60))[: ROUTES[route].caches]
            spec = CallSpec(ROUTES[route], batch=rows, heads=8, caches=caches, lengths="edges", sink="edges", seed=rows)
            hold_taken(name, 3, spec)
    heads = 16 if version == "0.6.17" else 8  # 8 heads: that release decodes them and aborts on them in prefill
    topk = 128 if version != "0.7.4" else 100
    assert module.calls[0] == f"decode 8 heads, topk {topk}"
    assert module.calls[1] == f"prefill {heads} heads, topk 128{' dual' if route == 'v4_two_caches' else ''}"


def test_lists_wider_than_the_dual_prefill_takes_become_one_cache():
    found, module = release("0.6.18")
    caches = (CacheSpec(130, 64, 4), CacheSpec(70, 5, 30))
    with registered(found) as name:
        spec = CallSpec(ROUTES["v4_two_caches"], batch=66, heads=3, caches=caches, lengths="edges", seed=2)
        hold_taken(name, 3, spec)
    assert module.calls == ["prefill 8 heads, topk 256"]


def test_pages_are_staged_only_where_they_must_be(monkeypatch):
    staged = []
    real = adapt.staged_pages
    monkeypatch.setattr(adapt, "staged_pages", lambda *a: staged.append(a) or real(*a))
    for version, page_size, gap, count in (
        ("0.6.18", 64, 0, 0),
        ("0.6.18", 64, 5, 1),  # misaligned
        ("0.6.18", 256, 0, 1),
        ("0.7.4", 256, 0, 0),
    ):
        staged.clear()
        with registered(release(version)[0]) as name:
            caches = (CacheSpec(9, page_size, 3, gap=gap),)
            build(CallSpec(ROUTES["v4"], batch=3, heads=4, caches=caches, seed=4)).run(name)
        assert len(staged) == count, (version, page_size, gap)


def test_staging_copies_only_what_the_lists_name():
    keys_call = build(CallSpec(ROUTES["v4"], batch=3, heads=4, caches=(CacheSpec(9, 256, 40),), seed=4))
    cache = keys_call.caches[0]
    keys = checks.key_set(cache.view, "v4", cache.indices, None)
    staged, _ = adapt.staged_pages([keys], [adapt.lane_lists(keys)])
    assert staged.slots == 64  # 27 lanes, not 10240 slots
    assert staged.page_stride % 16 == 0


def test_compaction_keeps_order_and_repeats_listed_slots():
    lanes = torch.tensor([[-1, 7, -1, 3, 7, -1], [-1] * 6, [1, 2, 3, 4, 5, 6]], dtype=torch.int32)
    lists, count = adapt.compacted_lists(lanes, 8)
    assert count.tolist() == [3, 0, 6]
    assert lists.tolist() == [[7, 3, 7, 7, 7, 7, 7, 7], [0] * 8, [1, 2, 3, 4, 5, 6, 1, 1]]
    assert lists.dtype == torch.int32
    assert lists.is_contiguous()
    empty, none = adapt.compacted_lists(lanes[:, :0], 4)
    assert empty.shape == (3, 4)
    assert none.tolist() == [0, 0, 0]


def test_without_compaction_the_stand_in_is_poisoned(monkeypatch):
    # the hazard is real in the stand-in: a list of -1 lanes beside one good lane gathers slot 0, which is NaN
    monkeypatch.setattr(adapt, "compacted_lists", lambda x, w: (adapt.padded_lists(x, w), (x >= 0).sum(1).int()))
    call = build(CallSpec(ROUTES["v4"], batch=2, heads=4, caches=(CacheSpec(9, 64, 2),), invalid=0.6, seed=4))
    with registered(release("0.6.18")[0]) as name:
        assert call.run(name).out.isnan().any()


def test_the_sink_cannot_be_taken_out_of_a_folded_lse():
    # why the kernel is not given the sink: at float32, log2(2^lse + 2^sink) has forgotten lse
    lse, sink = torch.tensor([3.0, 5.0]), torch.tensor([40.0, 40.0])
    folded = torch.logaddexp(lse, sink)
    assert folded[0] == folded[1]


@pytest.mark.parametrize(
    ("layout", "says"), [("v32", "layout v4"), ("bf16_512", "layout v4"), ("v4", "takes lists of 128, 192, 256")]
)
def test_refusals(layout, says):
    lanes = 1100 if layout == "v4" else 9
    call = build(CallSpec(ROUTES[layout], batch=2, heads=4, caches=(CacheSpec(lanes, 64, 30),), seed=4))
    with (
        registered(release("0.6.18")[0]) as name,
        pytest.raises(kernels.BackendUnavailable, match=says),
    ):
        call.run(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_says_what_is_missing_here():
    assert "compute capability 12" in flashinfer.available()
    with pytest.raises(kernels.BackendUnavailable, match=r"compute capability 12\.x"):
        kernels.load("flashinfer")


def test_a_broken_installation_is_a_reason_and_no_crash(monkeypatch):
    def fail(name):
        raise SystemExit("half an installation")

    monkeypatch.setattr(flashinfer, "import_module", fail)
    monkeypatch.setattr(flashinfer, "installed", flashinfer.installed.__wrapped__)
    assert "SystemExit: half an installation" in flashinfer.installed()
    kept = flashinfer.capability((12, 0))
    assert kept.problems
    assert kept.heads("prefill") == {64, 128}
    with pytest.raises(NotReadableError, match="sparse_mla_sm120_decode_dsv4"):
        flashinfer.describe(ModuleType("flashinfer.mla._sparse_mla_sm120"))


# Unpacked wheels, one folder a release, in HEADFIT_FLASHINFER_SOURCES: the stand-in against the real signatures.
SOURCES = sorted(Path(os.environ.get("HEADFIT_FLASHINFER_SOURCES", "/nonexistent")).glob("*/x/flashinfer"))


@pytest.mark.parametrize("root", SOURCES, ids=lambda p: p.parts[-3])
def test_signatures_of_real_releases(root):
    single, package = root / "mla/_sparse_mla_sm120.py", root / "mla/_sparse_mla_sm120/_api.py"
    source = single if single.is_file() else package
    if not source.is_file():
        pytest.skip("no SM120 sparse MLA in this release")
    functions = {n.name: n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.FunctionDef)}
    for name in ("sparse_mla_sm120_decode_dsv4", "_sparse_mla_sm120_paged_attention"):
        real = functions[name].args
        mine = getattr(fake.FakeFlashInfer, name).__code__
        positional = list(mine.co_varnames[1 : mine.co_argcount])
        assert [a.arg for a in real.args] == positional
        keywords = set(mine.co_varnames[mine.co_argcount : mine.co_argcount + mine.co_kwonlyargcount])
        assert keywords <= {a.arg for a in real.kwonlyargs}
    assert {16, 32, 64, 128} <= prefill_facts(root).heads
