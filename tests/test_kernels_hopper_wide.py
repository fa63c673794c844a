"""The backend ``hopper_wide`` without a GPU: which calls it takes, how it plans them, and what it launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_kernels_hopper import a_call, held, launched, made, with_keys  # noqa: F401

from headfit import arch as archs
from headfit import kernels
from headfit.kernels import hopper, hopper_build, hopper_wide

ROWS = hopper_wide.LEAST_ROWS


@pytest.fixture(autouse=True)
def plans_anew():
    """Plans made with other settings are forgotten."""
    hopper_wide._planned.cache_clear()
    yield
    hopper_wide._planned.cache_clear()


def with_slots(call, *slots):
    sets = (dataclasses.replace(keys, slots=n) for keys, n in zip(call.key_sets, slots, strict=True))
    return dataclasses.replace(call, key_sets=tuple(sets))


# --------------------------------------------------------------------------------------------------------------- plans


def test_the_workspace_has_room_for_all_slots() -> None:
    found = hopper_wide.plan(with_slots(a_call(4096, 64), 4352, 8190))
    words = 416  # 136 and 256, and up to a multiple of 32
    assert found.room == 4352 + 8190
    assert found.cleared == 128 + 4 * words
    assert found.flags == found.cleared + 128 * words + 1024 * (64 + found.room)
    assert found.size == found.flags + 4 * 512
    assert not found.rest
    assert found.specs == hopper_wide.SPECS


def test_no_more_slots_are_listed_than_there_are_lanes() -> None:
    found = hopper_wide.plan(with_slots(a_call(ROWS, 64, topk=(3,)), 100_000))
    assert (found.room, found.rest) == (3 * ROWS, False)
    assert hopper_wide.plan(with_slots(a_call(ROWS, 64, topk=(0,)), 100_000)).room == 0


def test_more_slots_than_the_limit_need_the_native_kernel_behind() -> None:
    limit = hopper_wide.ROOM_LIMIT
    assert not hopper_wide.plan(with_slots(a_call(4096, 64), limit - 5, 5)).rest
    found = hopper_wide.plan(with_slots(a_call(4096, 64), limit - 5, 6))
    assert (found.room, found.rest) == (limit, True)
    assert [spec.name for spec in found.specs] == ["wide mark", "wide spread", "wide attend", "rest heads=32"]


def test_a_workspace_is_at_most_as_large_as_its_documentation_says() -> None:
    half = hopper_wide.SLOTS_LIMIT // 2
    assert hopper_wide.plan(with_slots(a_call(1 << 17, 128), half, half)).size < 330 << 20


@pytest.mark.parametrize("h_q", [1, 64, 128])
def test_ready_binaries_are_all_that_calls_launch(h_q) -> None:
    calls = [with_slots(a_call(ROWS, h_q), n, n) for n in (64, hopper_wide.ROOM_LIMIT)]
    launches = {spec for call in calls for spec in hopper_wide.plan(call).specs}
    assert launches == set(hopper_wide.binaries(h_q))


@pytest.mark.skipif(hopper_build.why_no_compiler() is not None, reason="the DSL is not installed")
def test_host_and_kernels_agree() -> None:
    from headfit.kernels import hopper_wide_mark, hopper_wide_place

    assert hopper_wide_place.ZERO_ROWS == hopper_wide.ZERO_ROWS
    assert hopper_wide_place.ROW_BYTES == hopper_wide.ROW_BYTES
    assert hopper_wide_place.COUNT_BYTES == 128
    assert archs.named("sm_90").shared_bytes >= hopper_wide_place.SMEM
    assert archs.named("sm_90").shared_bytes >= hopper_wide_mark.SMEM


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (a_call(ROWS - 1), "takes 512 rows and more, got 511"),
        (a_call(ROWS // 3, s_q=3), "takes 512 rows and more, got 510"),
        (a_call(ROWS, batch_invariant=True), "takes no batch-invariant calls"),
        (with_slots(a_call(ROWS), 1 << 24, 64), "takes caches of 16777216 slots and fewer together, got 16777280"),
        (with_keys(a_call(ROWS), layout="v32"), "takes packed v4 pages, got v32"),
        (a_call(ROWS, max_logits=torch.empty(1)), "does not return max_logits"),
    ],
    ids=["rows", "rows of requests", "invariant", "slots", "layout", "max_logits"],
)
def test_what_it_refuses(call, says) -> None:
    assert says in str(hopper_wide.why_not_taken(call))


def test_what_it_takes() -> None:
    for call in (a_call(ROWS), a_call(ROWS // 4, s_q=4), a_call(70_000, 128, topk=(5,)), a_call(ROWS, topk=(0, 0))):
        assert hopper_wide.why_not_taken(call) is None


def test_only_on_an_sm90() -> None:
    assert hopper_wide.unsupported(a_call(ROWS)) == "runs on cuda tensors, q is on meta"
    here, elsewhere = hopper_wide.capability((9, 0)), hopper_wide.capability((10, 0))
    assert (here.family, here.row_split, here.layouts) == ("hopper_wide", 0, ("v4",))
    assert here.heads("prefill") == here.heads("decode") == frozenset(range(1, 129))
    assert not elsewhere.heads("prefill")
    assert elsewhere.problems == ("needs compute capability (9, 0)",)


def test_the_registry_has_it_behind_hopper() -> None:
    names = list(kernels.REGISTRY)
    assert names.index("hopper") < names.index("hopper_wide")
    assert kernels.REGISTRY["hopper_wide"].device_types == ("cuda",)


def test_available_names_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda: None)
    monkeypatch.setattr(hopper_build, "in_cache", lambda spec: spec.name != "wide mark")
    monkeypatch.setattr(hopper_build, "why_no_compiler", lambda: "no compiler")
    hopper.why_missing.cache_clear()
    reason = str(hopper_wide.available())
    hopper.why_missing.cache_clear()
    assert reason.startswith("wide mark: not in ")
    assert reason.endswith("no compiler")
    monkeypatch.setattr(hopper, "available", lambda: "no CUDA device")
    assert hopper_wide.available() == "no CUDA device"


# ------------------------------------------------------------------------------------------------------------ launches


def run(call) -> list[str]:
    with archs.override("sm_90"), hopper_wide.record_variants() as names:
        hopper_wide.run(call)
    return names


def test_three_launches_over_one_workspace(launched, made) -> None:  # noqa: F811
    call = a_call(520, h_q=64, device="cpu")
    made.clear()
    assert run(call) == ["wide mark", "wide spread", "wide attend"]
    (work,) = made
    found = hopper_wide.plan(call)
    assert work.numel() * 4 == found.size
    assert not work[: found.cleared // 4].any()
    sms = archs.named("sm_90").sms
    assert [(one["name"], one["grid"]) for one in launched] == [
        ("wide mark", (sms, 1)), ("wide spread", (3 * sms, 1)), ("wide attend", (sms, 1)),
    ]  # fmt: skip
    for one in launched:
        assert (one["work"], one["splits"], one["partial"]) == (work.data_ptr(), 512, 0)
        assert (one["early"], one["cluster"], one["rows"], one["h_q"]) == (False, 1, 520, 64)


def test_what_has_no_room_is_left_to_the_native_kernel(launched, made, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(hopper_wide, "ROOM_LIMIT", 100)
    call = a_call(521, h_q=96, device="cpu")
    made.clear()
    assert run(call)[-1] == "rest heads=32"
    found = hopper_wide.plan(call)
    rest = launched[-1]
    assert launched[0]["splits"] == found.room == 100
    assert rest["grid"] == (66 * 3, 1)
    assert (rest["splits"], rest["head_tiles"], rest["work"]) == (1, 3, made[0].data_ptr() + found.flags)
    assert rest["zeros"] != 0
