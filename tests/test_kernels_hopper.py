"""The Hopper backend without a GPU: which calls it takes, how it plans them, and what it launches."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from headfit import arch as archs
from headfit import kernels
from headfit.call import KeySet, SparseCall
from headfit.doctor import doctor_command
from headfit.kernels import configs, cubin, hopper, hopper_abi, hopper_build, hopper_pairs, hopper_wide, warmup
from headfit.kernels.hopper_build import Spec

SMS = archs.named("sm_90").sms


def a_call(rows=1, h_q=8, topk=(128, 512), *, device="meta", s_q=1, sink=True, page_size=64, **changes) -> SparseCall:
    """A call of layout v4, by default on no device at all: whatever looks at a value of it fails."""
    pages, stride = 4, page_size * 576 + -(-page_size * 8 // 576) * 576
    sets = []
    for lanes in topk:
        data = torch.empty(pages * stride, dtype=torch.uint8, device=device)
        view = data.as_strided((pages, page_size, 1, 584), (stride, 584, 584, 1))
        indices = torch.empty(rows, s_q, lanes, dtype=torch.int32, device=device)
        sets.append(KeySet(view, "v4", page_size, stride, 576, pages * page_size, indices, None))
    q = torch.empty(rows, s_q, h_q, 512, dtype=torch.bfloat16, device=device)
    out, lse = torch.empty_like(q), torch.empty(rows, h_q, s_q, device=device)
    sinks = torch.empty(h_q, device=device) if sink else None
    call = SparseCall(q, tuple(sets), 0.04, sinks, out, lse, None, False, "decode")
    return dataclasses.replace(call, **changes)


@pytest.fixture(autouse=True)
def plans_anew():
    """Plans made with other settings are forgotten."""
    hopper._planned.cache_clear()
    yield
    hopper._planned.cache_clear()


def plan(*arguments, **named) -> hopper.Plan:
    return hopper.plan(a_call(*arguments, **named), archs.named("sm_90"))


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("h_q", "heads", "tiles"),
    [(1, 8, 1), (8, 8, 1), (9, 16, 1), (16, 16, 1), (17, 32, 1), (32, 32, 1), (33, 32, 2), (64, 32, 2), (128, 32, 4)],
)
def test_the_smallest_head_tile_that_holds_the_heads(h_q, heads, tiles) -> None:
    chosen = plan(4096, h_q)
    assert (chosen.heads, chosen.head_tiles, chosen.splits) == (heads, tiles, 1)


@pytest.mark.parametrize(
    ("rows", "h_q", "heads", "tiles"),
    [(1, 1, 8, 1), (1, 16, 8, 2), (1, 128, 8, 16), (16, 16, 8, 2), (16, 32, 16, 2), (16, 40, 32, 2), (64, 16, 16, 1),
     (2, 128, 8, 16), (4, 128, 16, 8), (8, 128, 32, 4), (133, 16, 16, 1)],
)  # fmt: skip
def test_few_rows_take_narrower_head_tiles_than_their_heads_need(rows, h_q, heads, tiles) -> None:
    chosen = plan(rows, h_q)
    assert (chosen.heads, chosen.head_tiles) == (heads, tiles)


def test_rows_that_are_not_split_take_narrower_tiles_up_to_one_an_sm() -> None:
    assert [plan(rows, 16, batch_invariant=True).heads for rows in (1, 66, 67, 200)] == [8, 8, 16, 16]
    assert [plan(rows, 128, batch_invariant=True).heads for rows in (8, 9, 16, 17)] == [8, 16, 16, 32]


def test_narrower_tiles_never_fill_the_chip_beyond_the_limit() -> None:
    for rows in (1, 2, 3, 7, 16, 40, 64, 132, 200, 331, 4096):
        for h_q in range(1, 129):
            chosen = plan(rows, h_q)
            natural = next((tile for tile in hopper.NATIVE if tile >= h_q), 32)
            assert chosen.heads * (chosen.head_tiles - 1) < h_q <= chosen.heads * chosen.head_tiles
            assert chosen.heads <= natural
            if chosen.heads < natural:
                assert rows * chosen.splits * chosen.head_tiles <= hopper.NARROW_CTAS * SMS


def test_shares_do_not_depend_on_the_heads() -> None:
    for rows in (1, 3, 17, 64, 130, 300, 4096):
        for topk in ((0,), (64,), (128, 512), (128, 2048)):
            assert len({plan(rows, h_q, topk).splits for h_q in (1, 7, 8, 16, 31, 32, 64, 100, 128)}) == 1


def test_few_rows_are_split_and_many_are_not() -> None:
    assert [plan(rows).splits for rows in (1, 16, 64, 132, 133, 4096)] == [10, 10, 4, 2, 1, 1]
    assert plan(1, topk=(128, 8192)).splits == 130
    assert plan(1, topk=(0, 0)).splits == 1
    assert plan(configs.ONE_PASS_ROWS, topk=(128,)).splits == 1
    assert plan(2, s_q=32).splits == plan(64).splits  # rows are rows, however they are shaped


def test_no_share_is_empty_and_the_workspace_is_bounded() -> None:
    for rows in range(1, 300):
        for tiles in (0, 1, 2, 3, 7, 10, 11, 33, 128, 1000):
            splits = hopper.split_count(rows, tiles, SMS)
            assert splits >= 1
            if splits > 1:
                share = -(-tiles // splits)
                assert share * (splits - 1) < tiles <= share * splits
                assert rows * splits <= hopper.CTAS_PER_SM * SMS


def test_up_to_16_shares_are_a_cluster() -> None:
    for rows, topk, splits in ((1, (128, 512), 10), (64, (128, 512), 4), (128, (128, 512), 2), (1, (1024,), 16)):
        for h_q in (1, 16, 128):
            chosen = plan(rows, h_q, topk)
            assert (chosen.splits, chosen.clustered) == (splits, True)
            assert [spec.function for spec in chosen.specs] == ["native", "merge"]  # where no cluster fits
    for chosen in (plan(200), plan(1, topk=(64,)), plan(1, batch_invariant=True)):
        assert (chosen.splits, chosen.clustered) == (1, False)
    long = plan(1, topk=(128, 8192))
    assert (long.splits, long.clustered) == (130, False)
    assert [spec.function for spec in long.specs] == ["native", "merge"]


def test_two_tiles_a_share_where_that_makes_a_cluster() -> None:
    assert plan(1, topk=(128, 1024)).splits == 9
    assert plan(1, topk=(2048,)).splits == 16
    assert plan(1, topk=(2112,)).splits == 33
    assert plan(100, topk=(128, 1024)).splits == 2


def test_batch_invariant_calls_are_never_split() -> None:
    for rows in (1, 2, 64, 4096):
        for topk in ((128, 512), (128, 8192)):
            assert plan(rows, topk=topk, batch_invariant=True).splits == 1


def packed(rows=4096, topk=(128,), **named) -> bool:
    chosen = plan(rows, topk=topk, **named)
    assert chosen.packed in (0, SMS)
    names = [spec.name for spec in chosen.specs if not spec.name.startswith(("native", "merge", "rest"))]
    assert names == (["union", "expand", "packed"] if chosen.packed else [])
    return chosen.packed > 0


def test_many_rows_of_short_lists_are_packed() -> None:
    for topk in ((128,), (1,), (448,), (128, 0), (128, 32), (128, 256), (128, 320)):
        assert packed(topk=topk), topk
    assert packed(rows=hopper.PACKED_ROWS)
    assert packed(rows=hopper.PACKED_ROWS // 4, s_q=4)  # rows are rows, however they are shaped


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_invariant": True}, {"rows": 1}, {"rows": 64}, {"rows": hopper.PACKED_ROWS - 1}, {"topk": (0,)},
        {"topk": (449,)}, {"topk": (128, 321)}, {"topk": (128, 512)}, {"topk": (128, 1024)}, {"topk": (2048,)},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_packed(changes) -> None:
    assert not packed(**changes)


def test_whether_rows_are_packed_does_not_depend_on_the_heads() -> None:
    for rows in (1, 8, 132, 511, 512, 4096, 100_000, 1_000_000):
        for topk in ((0,), (1,), (128,), (128, 256), (128, 512)):
            assert len({(c.packed, c.splits) for h in range(1, 129) for c in [plan(rows, h, topk)]}) == 1


def test_an_output_over_its_queries_is_not_packed() -> None:
    """What is computed again reads q again. Other tensors of one allocation do not count."""
    call = a_call(521, topk=(16,), device="cpu")
    chip = archs.named("sm_90")
    buffer = torch.empty(3 * 521, 1, 8, 512, dtype=torch.bfloat16)
    q = buffer[521 : 2 * 521]
    for out, on in (
        (q, False), (torch.from_dlpack(q), False), (buffer[522 : 522 + 521], False), (buffer[: 521 + 1][1:], False),
        (buffer[:521], True), (buffer[2 * 521 :], True), (torch.empty_like(q), True),
    ):  # fmt: skip
        assert (hopper.plan(dataclasses.replace(call, q=q, out=out), chip).packed > 0) is on
    interleaved = torch.empty(521, 1, 16, 512, dtype=torch.bfloat16)
    apart = dataclasses.replace(call, q=interleaved[:, :, :8], out=interleaved[:, :, 8:])
    assert not hopper.plan(apart, chip).packed  # disjoint, but that is not looked for


def test_packing_is_switched_off_by_the_environment(monkeypatch) -> None:
    for text, on in (("off", False), ("0", False), ("on", True), ("", True)):
        monkeypatch.setenv("HEADFIT_PACKING", text)
        assert packed() is on
    monkeypatch.setenv("HEADFIT_PACKING", "perhaps")
    assert not packed(rows=64)  # few rows ask nothing
    with pytest.raises(ValueError, match="HEADFIT_PACKING: got 'perhaps', accepted are 1, true"):
        packed()


def test_rows_are_never_both_packed_and_split() -> None:
    larger = dataclasses.replace(archs.named("sm_90"), sms=4096)  # room for shares of 512 rows
    chosen = hopper.plan(a_call(512, topk=(448,)), larger)
    assert chosen.splits > 1
    assert not chosen.packed


def test_the_workspace_of_packing_is_bounded() -> None:
    """By groups, in sixty-fours, and by two sequences of 256 words a key."""
    assert hopper.work_words(1) == 64 * 133 + 2 * 256 * 1032
    assert hopper.work_words(512) == 64 * 133 + 2 * 256 * 1920
    assert hopper.work_words(513) == 128 * 133 + 2 * 256 * 1928
    assert hopper.work_words(4096) == 512 * 133 + 2 * 256 * 8192
    most = 8 * hopper.GROUPS_LIMIT
    assert hopper.work_words(most) * 4 < 150 << 20
    assert packed(rows=most)
    assert not packed(rows=most + 1)


@pytest.mark.skipif(hopper_build.why_no_compiler() is not None, reason="the DSL is not installed")
def test_host_and_kernels_agree_on_groups() -> None:
    from headfit.kernels import hopper_expand_sums, hopper_packed_place, hopper_union_place

    assert hopper_packed_place.GROUP == hopper.GROUP
    assert 1 + 4 + 2 * hopper_packed_place.RECORD == hopper.GROUP_WORDS
    assert hopper_expand_sums.GROUPS_LIMIT == hopper.GROUPS_LIMIT
    for rows in (1, 8, 512, 513, 4096, 32768):
        work = hopper_packed_place.Work(SimpleNamespace(rows=rows, work=0))
        assert hopper.work_words(rows) == work.padded * hopper.GROUP_WORDS + 2 * work.room * 256
    assert hopper_union_place.LANES_LIMIT >= hopper.PACKED_LANES


# ------------------------------------------------------------------------------------------------------ which are taken


def with_keys(call: SparseCall, place: int = 0, **changes) -> SparseCall:
    sets = list(call.key_sets)
    sets[place] = dataclasses.replace(sets[place], **changes)
    return dataclasses.replace(call, key_sets=tuple(sets))


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape, that many elements further on."""
    flat = torch.empty(t.numel() + elements, dtype=t.dtype)
    return flat[elements:].view(t.shape)


CALL = a_call(2, device="cpu")
WIDE = torch.empty(2, 1, 9, 516, dtype=torch.bfloat16)
REFUSED = {
    "layout": (with_keys(CALL, layout="v32"), "takes packed v4 pages, got v32"),
    "plain rows": (with_keys(with_keys(CALL, layout="bf16"), 1, layout="bf16"), "takes packed v4 pages, got bf16"),
    "max_logits": (dataclasses.replace(CALL, max_logits=CALL.lse), "does not return max_logits"),
    "q starts at 8 bytes": (dataclasses.replace(CALL, q=shifted(CALL.q, 4)), "q has to start"),
    "q heads of 1032 bytes": (dataclasses.replace(CALL, q=WIDE[:, :, :8, :512]), "q has to start"),
    "out starts at 2 bytes": (dataclasses.replace(CALL, out=shifted(CALL.out, 1)), "out has to start"),
    "cache at 8 bytes": (with_keys(CALL, data=torch.empty(4 * 37440 + 8, dtype=torch.uint8)[8:]), "pages of k_cache"),
    "page stride": (with_keys(CALL, 1, page_stride=37448), "pages of extra_k_cache"),
    "page of 2^31 tokens": (with_keys(CALL, page_size=2**31, slots=2**31), "do not fit 31 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_said(name) -> None:
    call, says = REFUSED[name]
    assert says in str(hopper.why_not_taken(call))


def test_the_rest_is_taken() -> None:
    assert hopper.why_not_taken(CALL) is None
    padded = torch.empty(2, 1, 64, 512, dtype=torch.bfloat16)[:, :, :8]
    assert hopper.why_not_taken(dataclasses.replace(CALL, q=padded, out=padded.clone())) is None
    # The stride of a dim of one does not matter, nor that between pages where there is one page.
    assert hopper.why_not_taken(dataclasses.replace(CALL, q=CALL.q.as_strided(CALL.q.shape, (4096, 3, 512, 1)))) is None
    assert hopper.why_not_taken(with_keys(CALL, page_stride=37448, slots=64)) is None
    assert hopper.why_not_taken(a_call(2, topk=(0,), sink=False, page_size=1)) is None


def test_device_and_chip_come_first(monkeypatch) -> None:
    assert hopper.unsupported(CALL) == "runs on cuda tensors, q is on cpu"
    on_gpu = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", 0)))
    with archs.override("sm_100"):
        assert hopper.unsupported(on_gpu) == "runs on compute capability (9, 0), q is on (10, 0)"


def test_a_kernel_that_cannot_be_built_hands_over_and_says_so_once(monkeypatch, caplog) -> None:
    def fail(spec):
        raise hopper_build.CannotBuildError(f"{spec.name}: no compiler")

    monkeypatch.setattr(hopper_build, "binary", fail)
    hopper.why_not_built.cache_clear()
    q = CALL.q.as_subclass(type("Cuda", (torch.Tensor,), {"device": torch.device("cuda", 0)}))
    call = dataclasses.replace(CALL, q=q)
    with archs.override("sm_90"):
        assert hopper.unsupported(call) == "native heads=8: no compiler"
        assert hopper.unsupported(call) == "native heads=8: no compiler"
    assert caplog.text.count("native heads=8: no compiler; its calls go to another backend") == 1
    hopper.why_not_built.cache_clear()


def test_capability_is_every_head_count_on_its_chip_alone() -> None:
    here = hopper.capability((9, 0))
    assert (here.family, here.row_split, here.layouts) == ("hopper", 0, ("v4",))
    assert here.prefill_heads == here.decode_heads == frozenset(range(1, 129))
    assert hopper.capability(None).prefill_heads == here.prefill_heads
    for chip in ((8, 0), (10, 0), (12, 0)):
        elsewhere = hopper.capability(chip)
        assert elsewhere.prefill_heads == elsewhere.decode_heads == frozenset()
        assert "needs compute capability (9, 0)" in elsewhere.problems[0]


# ----------------------------------------------------------------------------------------------------------- available


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """A machine with an H200, a driver, and an empty cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cubin, "is_there", lambda: None)
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path))
    hopper.why_missing.cache_clear()
    yield monkeypatch
    hopper.why_missing.cache_clear()


def test_usable_with_a_compiler(h200) -> None:
    h200.setattr(hopper_build, "dsl_version", lambda: "4.8.1")
    assert hopper.available() is None


def test_usable_without_a_compiler_where_all_is_compiled(h200) -> None:
    h200.setattr(hopper_build, "dsl_version", lambda: None)
    h200.setattr(hopper_build, "in_cache", lambda spec: True)
    assert hopper.available() is None


def test_what_is_missing_is_said_with_the_remedy(h200) -> None:
    h200.setattr(hopper_build, "dsl_version", lambda: None)
    h200.setattr(hopper_build, "in_cache", lambda spec: spec.name != "merge")
    reason = str(hopper.available())
    assert reason.startswith("merge: not in ")
    assert reason.endswith("and nvidia-cutlass-dsl is not installed: pip install 'headfit[hopper]'")


def test_other_machines_are_named(h200) -> None:
    h200.setattr(cubin, "is_there", lambda: "libcuda.so.1: not found")
    assert hopper.available() == "libcuda.so.1: not found"
    h200.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert hopper.available() == "compute capability (10, 0), needs (9, 0)"
    h200.setattr(torch.cuda, "is_available", lambda: False)
    assert hopper.available() == "no CUDA device"


# ------------------------------------------------------------------------------------------------------------ launches


@pytest.fixture
def held() -> dict[int, int]:
    """How many clusters of a size the device holds."""
    return {}


@pytest.fixture
def launched(monkeypatch, held) -> list[dict]:
    """What is launched for calls on CPU tensors: name, grid, early, cluster, and the parameters as they stood then.

    The device holds no clusters; `held` changes that.
    """
    seen: list[dict] = []

    def kernel(name, device, build):
        def launch(grid, stream, parameters, *, early=False, cluster=1):
            assert parameters is hopper.buffer.pointers
            values = hopper_abi.LAYOUT.unpack_from(hopper.buffer.data)
            named = dict(zip((n for n, _ in hopper_abi.PARAMETERS), values, strict=True))
            seen.append({"name": name, "grid": grid, "stream": stream, "early": early, "cluster": cluster, **named})

        return SimpleNamespace(launch=launch, clusters=lambda size: held.get(size, 0))

    monkeypatch.setattr(cubin, "kernel", kernel)
    monkeypatch.setattr(cubin, "current_stream", lambda device: 0x57)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper, "_zeros", {})
    return seen


@pytest.fixture
def made(monkeypatch) -> list[torch.Tensor]:
    """What `torch.empty` makes."""
    tensors: list[torch.Tensor] = []
    empty = torch.empty

    def recorded(*shape, **options):
        tensors.append(empty(*shape, **options))
        return tensors[-1]

    monkeypatch.setattr(torch, "empty", recorded)
    return tensors


def run(call: SparseCall) -> list[str]:
    with archs.override("sm_90"), hopper.record_variants() as names:
        hopper.run(call)
    return names


def test_one_pass_is_one_launch(launched) -> None:
    assert run(a_call(200, h_q=40, device="cpu")) == ["native heads=32"]
    (one,) = launched
    assert (one["name"], one["grid"], one["stream"], one["early"]) == (
        "native heads=32", (400, 1), 0x57, False,
    )  # fmt: skip
    assert (one["rows"], one["h_q"], one["head_tiles"], one["splits"]) == (200, 40, 2, 1)
    assert (one["partial"], one["peaks"], one["totals"], one["work"]) == (0, 0, 0, 0)


def same_parameters(first: dict, *others: dict) -> bool:
    own = ("name", "grid", "early", "cluster")
    return all({k: v for k, v in first.items() if k not in own} == {k: v for k, v in other.items() if k not in own}
               for other in others)  # fmt: skip


def test_shares_are_merged_by_a_second_launch(launched, made, monkeypatch) -> None:
    call = a_call(3, h_q=12, s_q=2, device="cpu")
    made.clear()
    monkeypatch.setattr(hopper, "NARROW_CTAS", 0)
    assert run(call) == ["native heads=16", "merge"]
    native, merge = launched
    assert (native["grid"], native["early"], native["cluster"]) == ((6, 10), False, 1)
    assert (merge["grid"], merge["early"], merge["cluster"]) == ((6, 12), True, 1)
    assert same_parameters(native, merge)
    (shares,) = (t for t in made if t.dtype == torch.float32)
    start, end = shares.data_ptr(), shares.data_ptr() + 4 * shares.numel()
    count = 6 * 10 * 12
    assert native["partial"] == start
    assert start % 16 == 0
    assert native["peaks"] == native["partial"] + count * 512 * 4
    assert native["totals"] == native["peaks"] + count * 4
    assert native["totals"] + count * 4 == end


def test_a_cluster_merges_its_shares_itself(launched, made, held) -> None:
    held[10] = 12
    call = a_call(3, h_q=12, s_q=2, device="cpu")
    made.clear()
    assert run(call) == ["native heads=8"]
    (one,) = launched
    assert (one["grid"], one["cluster"], one["splits"], one["head_tiles"]) == ((12, 10), 10, 10, 2)
    assert (one["partial"], one["peaks"], one["totals"]) == (0, 0, 0)
    assert not any(t.dtype == torch.float32 for t in made)


@pytest.mark.parametrize(
    ("rows", "h_q", "topk", "held_of", "clustered"),
    [(6, 12, (128, 512), {10: 11}, False), (6, 12, (128, 512), {10: 12}, True), (6, 12, (128, 512), {}, False),
     (128, 64, (128, 512), {2: 1}, True), (128, 64, (128, 512), {}, False), (1, 8, (128, 8192), {16: 99}, False)],
)  # fmt: skip
def test_large_clusters_that_would_take_turns_are_not_made(launched, held, rows, h_q, topk, held_of, clustered) -> None:
    held.update(held_of)
    names = run(a_call(rows, h_q=h_q, topk=topk, device="cpu"))
    assert ("merge" in names) is not clustered
    assert [one["cluster"] > 1 for one in launched] == ([True] if clustered else [False, False])


def test_merge_alone_starts_early(launched) -> None:
    run(a_call(1, topk=(128, 512), device="cpu"))
    run(a_call(512, topk=(16,), device="cpu"))
    assert [(one["name"], one["early"]) for one in launched] == [
        ("native heads=8", False), ("merge", True), ("union", False), ("expand", False), ("packed", False),
        ("rest heads=8", False),
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "s_q", "h_q", "topk"), [(515, 1, 40, (128, 32)), (172, 3, 8, (16,))])
def test_packed_rows_are_four_launches(launched, made, rows, s_q, h_q, topk) -> None:
    call = a_call(rows, h_q, topk, s_q=s_q, device="cpu")
    made.clear()
    rest = f"rest heads={8 if h_q == 8 else 32}"
    assert run(call) == ["union", "expand", "packed", rest]
    count, tiles = rows * s_q, 1 if h_q == 8 else 2
    groups = -(-count // 8)
    assert [(one["name"], one["grid"]) for one in launched] == [
        ("union", (groups, 1)), ("expand", (SMS, 1)), ("packed", (SMS, 1)),
        (rest, (groups * tiles, 1)),
    ]  # fmt: skip
    assert same_parameters(*launched)
    first = launched[0]
    assert (first["rows"], first["h_q"], first["head_tiles"], first["splits"]) == (count, h_q, tiles, 1)
    assert (first["partial"], first["peaks"], first["totals"]) == (0, 0, 0)
    (work,) = (t for t in made if t.dtype == torch.int32)
    assert first["work"] == work.data_ptr()
    assert work.data_ptr() % 16 == 0
    assert work.numel() == hopper.work_words(count)


def test_rows_that_are_not_packed_have_no_workspace(launched, made, monkeypatch) -> None:
    call = a_call(520, topk=(16,), device="cpu")
    made.clear()
    assert run(dataclasses.replace(call, batch_invariant=True)) == ["native heads=8"]
    monkeypatch.setenv("HEADFIT_PACKING", "off")
    assert run(call) == ["native heads=8"]
    assert [one["work"] for one in launched] == [0, 0]
    assert not any(t.dtype == torch.int32 for t in made)


def test_rows_of_zeros_are_made_once_and_never_under_capture(launched, monkeypatch) -> None:
    call = a_call(200, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(call)
    assert hopper._zeros == {}  # nothing outlives the graph
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run(call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(call)
    (kept,) = hopper._zeros.values()
    assert kept.numel() == 256 * 576 + 8
    assert not kept[:-8].any()
    assert kept[-8:].tolist() == [120] * 7 + [255]  # scales that change nothing, and the mark of a lane without a key
    assert [one["zeros"] for one in launched[1:]] == [kept.data_ptr()] * 2
    assert launched[0]["zeros"] != 0


def test_another_device_is_entered_and_left(launched, monkeypatch) -> None:
    entered = []
    device = type("Device", (), {"__init__": lambda self, index: entered.append(index),
                                 "__enter__": lambda self: None, "__exit__": lambda self, *error: None})  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device", device)
    run(a_call(1, device="cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    run(a_call(1, device="cpu"))
    assert entered == [None]  # the index of a CPU device, which is not 3


def test_threads_do_not_share_parameters(launched) -> None:
    calls = {rows: a_call(rows, device="cpu") for rows in range(200, 240)}
    errors = []

    def many(mine):
        try:
            for rows in mine:
                with archs.override("sm_90"):
                    hopper.run(calls[rows])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=many, args=(range(200 + i, 240, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(one["rows"] for one in launched) == sorted(calls)
    assert all(one["q"] == calls[one["rows"]].q.data_ptr() and one["grid"] == (one["rows"], 1) for one in launched)


# ------------------------------------------------------------------------------------------- registry, doctor, warmup


def test_it_is_preferred_and_bf16_rows_go_elsewhere() -> None:
    names = list(kernels.REGISTRY)
    assert names.index("hopper") < names.index("triton")
    assert kernels.REGISTRY["hopper"].automatic
    assert kernels.REGISTRY["hopper"].device_types == ("cuda",)
    assert "headfit[hopper]" in kernels.REGISTRY["hopper"].install_hint
    assert kernels.first_reading("v4", names, (9, 0)) == "hopper"
    assert kernels.first_reading("bf16", names, (9, 0)) == "triton"
    assert kernels.first_reading("bf16", ["hopper"], (9, 0)) is None


@pytest.mark.parametrize(("gpu", "family"), [("h200", "hopper"), ("sm_100", "triton"), ("sm_80", "triton")])
def test_doctor_shows_it_for_its_chip_alone(gpu, family) -> None:
    assert doctor_command(tp=8, gpu=gpu).families[0].family == family
    assert doctor_command(tp=8, gpu=gpu, family="triton").families[0].family == "triton"


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("h_q", [1, 8, 9, 17, 32, 33, 64, 65, 128])
def test_no_call_launches_a_binary_that_warmup_did_not_make_ready(h_q: int, sms: int) -> None:
    ready = set(hopper.binaries(h_q))
    for rows in (*range(1, 300), 512, 4096):
        for topk in ((64,), (128,), (128, 256), (128, 512), (128, 4096)):
            for invariant in (False, True):
                may = hopper.may_pack(rows, sum(topk)) and not invariant
                assert set(hopper._planned(rows, h_q, topk, invariant, may, sms).specs) <= ready


def every(h_q: int) -> list[Spec]:
    return [spec for family in (hopper, hopper_wide, hopper_pairs) for spec in family.binaries(h_q)]


def test_warmup_makes_ready_what_calls_may_launch(launched, monkeypatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(hopper, "make_ready", lambda spec, device: made.append(spec.name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    done: dict[str, float] = {}
    with archs.override("sm_90"):
        warmup._once_hopper(a_call(1, h_q=20, topk=(16,), device="cpu"), done)
        assert len(launched) == 1  # which makes the zeros
        warmup._once_hopper(a_call(1, h_q=20, topk=(640,), device="cpu"), done)
        assert len(launched) == 1  # ready already
        before = list(made)
        warmup._once_hopper(with_keys(a_call(1, device="cpu"), layout="v32"), done)
        assert made == before == list(dict.fromkeys(s.name for s in every(20)))
        warmup._once_hopper(a_call(1, h_q=64, topk=(16,), device="cpu"), done)
    assert len(made) == len(set(made))
    assert set(made) >= {spec.name for spec in every(64)}
    assert list(done) == [f"hopper {name}" for name in made]
    assert all(seconds >= 0 for seconds in done.values())


def test_warmup_leaves_out_what_cannot_be_built(launched, monkeypatch) -> None:
    monkeypatch.setattr(hopper, "why_not_built", lambda spec: "no compiler" if spec is hopper.MERGE else None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    done: dict[str, float] = {}
    with archs.override("sm_90"):
        warmup._once_hopper(a_call(1, h_q=8, topk=(16,), device="cpu"), done)
    assert list(done) == ["hopper native heads=8"]
    assert launched == []
