"""The backend ``hopper_pairs`` without a GPU: what it takes beside ``hopper_wide``, its workspace, its launches."""

from __future__ import annotations

import pytest
from test_kernels_hopper import a_call, held, launched, made  # noqa: F401
from test_kernels_hopper_wide import with_slots

from headfit import arch as archs
from headfit import kernels
from headfit.kernels import hopper, hopper_build, hopper_pairs, hopper_wide

ROWS = hopper_wide.LEAST_ROWS
LAUNCHES = ["wide mark", "pairs spread", "pairs merge", "pairs attend", "rest heads=32"]


def test_counts_and_lists_stand_behind_the_workspace_of_hopper_wide() -> None:
    call = with_slots(a_call(4099, 32, topk=(128, 512)), 4352, 8190)
    found = hopper_pairs.plan(call)
    assert found.wide == hopper_wide.plan(call)
    groups, pairs = 544, 2080  # 513 and 2050, and up to a multiple of 32
    assert found.size == found.wide.flags + 4 * (groups + pairs + 2050 * 2 * 640)
    assert [spec.name for spec in found.specs] == LAUNCHES


@pytest.mark.parametrize("h_q", [1, 32, 128])
def test_ready_binaries_are_all_that_calls_launch(h_q: int) -> None:
    assert set(hopper_pairs.plan(a_call(ROWS, h_q)).specs) == set(hopper_pairs.binaries(h_q))


@pytest.mark.skipif(hopper_build.why_no_compiler() is not None, reason="the DSL is not installed")
def test_host_and_kernels_agree() -> None:
    from headfit.kernels import hopper_pairs_merge, hopper_pairs_place, hopper_wide_place

    assert hopper_pairs_merge.LANES_LIMIT == hopper_pairs.LANES_LIMIT
    assert hopper_pairs_place.GROUP == hopper.GROUP
    assert hopper_wide.ROOM_LIMIT + hopper_wide.ZERO_ROWS <= hopper_pairs_place.ROW_BITS
    assert archs.named("sm_90").shared_bytes >= hopper_wide_place.SMEM
    assert archs.named("sm_90").shared_bytes >= 3 * (hopper_pairs_merge.SMEM + 1024)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (a_call(ROWS - 1), "takes 512 rows and more, got 511"),
        (a_call(ROWS, batch_invariant=True), "takes no batch-invariant calls"),
        (a_call(ROWS, topk=(128, 1409)), "takes 1536 lanes a row and fewer, got 1537"),
    ],
    ids=["rows", "invariant", "lanes"],
)
def test_what_it_refuses(call, says) -> None:
    assert says in str(hopper_pairs.why_not_taken(call))


def test_out_over_q_is_refused() -> None:
    call = a_call(ROWS, device="cpu")
    assert hopper_pairs.why_not_taken(call) is None
    over = a_call(ROWS, device="cpu", q=call.q, out=call.q)
    assert "takes no out that lies over q" in str(hopper_pairs.why_not_taken(over))


def test_the_registry_has_it_behind_hopper() -> None:
    names = list(kernels.REGISTRY)
    assert names.index("hopper") < names.index("hopper_pairs")
    assert hopper_pairs.capability((9, 0)).family == "hopper_pairs"


def test_five_launches_over_one_workspace(launched, made) -> None:  # noqa: F811
    call = a_call(521, h_q=40, device="cpu")
    made.clear()
    with archs.override("sm_90"), hopper_pairs.record_variants() as names:
        hopper_pairs.run(call)
    assert names == LAUNCHES
    (work,) = made
    found = hopper_pairs.plan(call)
    assert work.numel() * 4 == found.size
    assert not work[: found.wide.cleared // 4].any()
    sms = archs.named("sm_90").sms
    assert [(one["name"], one["grid"]) for one in launched] == [
        ("wide mark", (sms, 1)), ("pairs spread", (3 * sms, 1)), ("pairs merge", (66, 1)), ("pairs attend", (sms, 1)),
        ("rest heads=32", (66 * 2, 1)),
    ]  # fmt: skip
    for one in launched[:-1]:
        assert (one["work"], one["splits"]) == (work.data_ptr(), found.wide.room)
    assert launched[-1]["work"] == work.data_ptr() + found.wide.flags
