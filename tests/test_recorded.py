"""Recorded facts of releases that are not here, the engines' width rules on top of them, and the layouts."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from headfit import layouts, probes, recorded, stacks
from headfit.geometry import Geometry
from headfit.width import NO_BATCH_EXCEEDS, Call, Policy, plan_width

CLOSED = {16, 32, 64, 128}
RTX, GB10, H200, B200 = (12, 0), (12, 1), (9, 0), (10, 0)


def flashinfer(version: str):
    return recorded.flashinfer(version, GB10)


# ---------------------------------------------------------------------------------------------------------- the facts


@pytest.mark.parametrize(
    ("version", "prefill", "decode", "topk", "dual"),
    [  # written from the releases' CUDA sources, not from the record
        ("0.6.14", CLOSED, CLOSED | {8}, {128, 512, 1024, 2048}, {128}),
        ("0.6.17", CLOSED, CLOSED | {8}, {128, 512, 1024, 2048}, {128}),
        ("0.6.18", CLOSED | {8}, CLOSED | {8}, {128, 192, 256, 512, 1024, 2048}, {128}),
        ("0.7.0", CLOSED | {8}, set(range(1, 129)), range(64, 2**31, 64), None),
        ("0.7.2", CLOSED | {8}, set(range(1, 129)), range(64, 2**31, 64), None),
        ("0.7.4", CLOSED | {8}, set(range(1, 129)), range(64, 2**31, 64), None),
    ],
)
def test_flashinfer_releases(version: str, prefill: set, decode: set, topk: object, dual: object) -> None:
    found = flashinfer(version)
    assert (found.row_split, found.prefill_heads, found.decode_heads) == (64, prefill, decode)
    assert (found.prefill_topk, found.dual_prefill_topk) == (topk, dual)
    assert (found.version, found.problems) == (version, ())
    for fact in ("row_split", "prefill_heads", "decode_heads", "page_sizes"):
        assert found.source(fact).startswith("recorded: flashinfer")


@pytest.mark.parametrize(
    ("family", "version", "cc", "prefill"),
    [
        ("flashmla_vllm", "0.33.0", H200, CLOSED | {8}),
        ("flashmla_vllm", "0.33.0", (10, 3), {64, 128}),
        ("flashmla_sgl", "1.0.0", H200, {64, 128}),
        ("flashmla_standalone", "1.0.0.post20260924", H200, {64, 128}),
    ],
)
def test_flashmla_copies(family: str, version: str, cc: tuple[int, int], prefill: set[int]) -> None:
    found = recorded.flashmla(family, version, cc)
    assert (found.prefill_heads, found.decode_heads, found.fork) == (prefill, {64, 128}, "entry")
    assert {"v4", "v32"} <= set(found.layouts)
    assert found.problems == ()


@pytest.mark.parametrize("version", ["0.6.16.post1", "0.6.99", "0.8.0"])
@pytest.mark.parametrize("rows", [1, 64, 65, 4096])
def test_a_release_that_is_not_recorded_keeps_its_pad_and_says_so(version: str, rows: int) -> None:
    found = flashinfer(version)
    assert found.row_split == NO_BATCH_EXCEEDS
    assert f"{version} is not recorded" in found.problems[0]
    assert {plan_width(Call(rows, 8, 64), found, p()).width for p in (Policy.native, Policy.sm12x_prefill)} == {64}
    assert recorded.flashmla("flashmla_sgl", version, H200).problems
    assert recorded.release("sglang", version) is None


def test_at_least_six_flashinfer_releases_and_every_pin_of_an_engine_are_recorded() -> None:
    assert len(recorded.versions(recorded.FLASHINFER)) >= 6
    for engine in ("sglang", "vllm"):
        for version in recorded.versions(engine):
            entry = recorded.release(engine, version)
            assert entry is not None
            assert entry.flashinfer in recorded.versions(recorded.FLASHINFER)
            assert entry.rule in stacks._RULES
            assert entry.flashmla is None or entry.flashmla[1] in recorded.versions(entry.flashmla[0])


def test_what_is_written_is_what_is_read() -> None:
    for version in recorded.versions(recorded.FLASHINFER):
        found = dataclasses.replace(flashinfer(version), sources={})
        text = json.loads(json.dumps(recorded.encode(found)))
        assert recorded.decode(text, recorded.FLASHINFER, GB10, version) == found


def test_an_installed_flashinfer_says_what_is_recorded_of_its_release() -> None:
    found = probes.flashinfer_capability(GB10)
    if found is None or found.version not in recorded.versions(recorded.FLASHINFER):
        pytest.skip("no recorded FlashInfer is installed here; `make compat-flashinfer` checks all of them")
    assert recorded.encode(dataclasses.replace(found, sources={})) == recorded.encode(
        dataclasses.replace(flashinfer(found.version), sources={})
    )


# ------------------------------------------------------------------------------- two caches, as the CUDA source has it


def two_caches_gate(version: str, rows: int, topk: int, extra: int, n_local: int) -> int:
    """The published gate on 0.6: above 64 rows prefill, over two caches for a first list of 128 only."""
    listed = {16, 32, 64, 128} | ({8} if version == "0.6.18" else set())
    single = {128, 512, 1024, 2048} | ({192, 256} if version == "0.6.18" else set())
    legal = topk == 128 if extra else topk in single
    return n_local if rows > 64 and n_local in listed and legal else 64


@pytest.mark.parametrize("version", ["0.6.14", "0.6.17", "0.6.18"])
def test_two_caches_truth_table(version: str) -> None:
    opened = set()
    for rows, topk, extra, n_local in itertools.product(
        (1, 64, 65, 4096), (64, 128, 192, 256, 512, 2048), (0, 64, 512), (8, 16, 32)
    ):
        call = Call(rows, n_local, 64, topk=topk, extra_topk=extra)
        decision = plan_width(call, flashinfer(version), Policy.sm12x_prefill())
        assert decision.width == two_caches_gate(version, rows, topk, extra, n_local), call
        if decision.rule == "unpadded" and extra:
            opened.add(topk)
    assert opened == {128}


def test_the_rule_of_two_caches_is_given_as_the_reason() -> None:
    call = Call(4096, 16, 64, topk=512, extra_topk=512)
    decision = plan_width(call, flashinfer("0.6.17"), Policy.sm12x_prefill())
    assert decision.rule == "topk"
    assert "takes topk 128 into the first of two caches, not 512" in decision.reason
    assert plan_width(call, flashinfer("0.7.0"), Policy.sm12x_prefill()).width == 16
    assert plan_width(dataclasses.replace(call, rows=64), flashinfer("0.6.17"), Policy.native()).width == 16


# ------------------------------------------------------------------------------------------------- what engines launch


def today(engine: str, version: str, call: Call, cc: tuple[int, int], beside: str | None = None) -> stacks.StackWidth:
    entry = recorded.release(engine, version)
    pin = beside or (entry.flashinfer if entry else "0.6.17")
    return stacks.width_of(engine, version, entry, call, cc, recorded.flashinfer(pin or "", cc))


@pytest.mark.parametrize(
    ("engine", "version", "cc", "rows", "n_local", "width"),
    [
        *(("sglang", v, cc, r, 8, 64) for v in ("0.5.16", "0.5.18") for cc in (H200, B200, GB10) for r in (1, 4096)),
        *(("sglang", v, cc, r, 8, 64) for v in ("0.5.20", "0.5.23") for cc in (H200, B200) for r in (1, 4096)),
        *(("sglang", "0.5.20", GB10, r, 16, 16) for r in (1, 64, 65, 4096)),
        ("sglang", "0.5.20", GB10, 64, 4, 64),  # decode lists 8 at least: the pad
        ("sglang", "0.5.20", GB10, 65, 4, None),  # prefill is not asked, and lists 8 at least: it aborts
        ("sglang", "0.5.23", GB10, 64, 4, 4),  # decode of 0.7 takes any
        *(("sglang", v, GB10, r, 64, 64) for v in ("0.5.16", "0.5.23") for r in (1, 4096)),
        *(("vllm", "0.33.0", cc, r, 8, 64) for cc in (H200, B200) for r in (1, 4096)),
        *(("vllm", "0.33.0", RTX, r, n, max(n, 8)) for n in (4, 8, 32) for r in (1, 4096)),
    ],
)
def test_widths_of_today(
    engine: str, version: str, cc: tuple[int, int], rows: int, n_local: int, width: int | None
) -> None:
    found = today(engine, version, Call(rows, n_local, 64, "extend" if rows > 64 else "decode"), cc)
    assert found.width == width
    assert found.wasted == (None if width is None else 1 - n_local / width)
    assert found.reason
    assert (width is None) == ("aborts" in found.reason)


def test_a_flashinfer_beside_an_engine_that_it_does_not_fit_aborts() -> None:
    found = today("sglang", "0.5.20", Call(4096, 8, 64), GB10, beside="0.6.17")
    assert found.width is None
    assert "the prefill of FlashInfer 0.6.17 takes 16, 32, 64, 128 only" in found.reason


def test_an_engine_that_is_not_recorded_is_given_the_pad() -> None:
    found = today("sglang", "0.5.99", Call(4096, 8, 64), GB10)
    assert found.width == 64
    assert "SGLang 0.5.99 is not recorded" in found.reason


def test_more_heads_than_a_kernel_has_are_refused() -> None:
    assert today("vllm", "0.33.0", Call(1, 256, 256), H200).width is None
    assert today("vllm", "0.33.0", Call(1, 256, 256), GB10).width is None


# ------------------------------------------------------------------------------------------------------------- layouts


def test_layouts_cover_the_node_and_count_what_is_held_twice() -> None:
    flash = Geometry.from_config("deepseek-v4-flash")
    found = layouts.layouts(flash, 8, lambda tp: 0.0 if tp == 1 else 1 - 64 / tp / 64, lambda tp: 0.0)
    assert [(x.tp, x.dp, x.heads_owned, x.kv_copies) for x in found] == [
        (1, 8, 64, 1), (2, 4, 32, 2), (4, 2, 16, 4), (8, 1, 8, 8),
    ]  # fmt: skip
    kinds = flash.layer_kinds
    sparse, heavy = kinds.count("compressed_sparse"), kinds.count("heavily_compressed")
    assert found[0].kv_bytes == round(584 * (sparse / 4 + heavy / 128))
    assert found[-1].kv_bytes == round(8 * 584 * (sparse / 4 + heavy / 128))
    assert found[0].weight_bytes > found[1].weight_bytes > found[-1].weight_bytes > found[0].weight_bytes / 8
    best = layouts.least(found, ours=False)
    assert best is not None
    assert best.name == "TP1 x DP8"
    said = layouts.advice(found, "triton")
    assert "TP8 x DP1 wastes 88% and holds 8 copies" in said[0]
    assert said[1].startswith("with headfit on triton: TP1 x DP8")


def test_a_layout_that_cannot_run_is_not_recommended() -> None:
    flash = Geometry.from_config("deepseek-v4-flash")
    found = layouts.layouts(flash, 2, lambda tp: None, lambda tp: None if tp == 1 else 0.5)
    assert layouts.least(found, ours=False) is None
    best = layouts.least(found, ours=True)
    assert best is not None
    assert best.tp == 2
    assert layouts.advice(found, "triton")[0] == "today: no layout of these runs"
