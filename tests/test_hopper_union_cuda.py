"""The union prepass of packing on an SM90: flags, counts and entries, against lists that are counted on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import headfit
from headfit.call import KeySet, SparseCall
from headfit.kernels import cubin, hopper, hopper_abi

WHY_NOT = hopper.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hopper: {WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]

SECOND = 1 << 31  # what tells a key of the second set
MANY = 1 << 20  # slots
JUNK = -7
Row = list[int]  # keys
Entries = list[tuple[int, int]]


@dataclass
class Case:
    """Lists ``[rows, topk]`` of one or two sets, on the host; lengths for each ``s_q`` rows."""

    lists: list[Tensor]
    lengths: list[Tensor | None] = field(default_factory=lambda: [None, None])
    slots: tuple[int, ...] = (MANY, MANY)
    s_q: int = 1
    shift: int = 0  # words by which rows lie apart from where they lay closely, and from a multiple of 16 bytes

    @property
    def rows(self) -> int:
        return self.lists[0].shape[0]

    def lanes(self, row: int) -> list[Tensor]:
        found = []
        for lanes, length in zip(self.lists, self.lengths, strict=False):
            most = lanes.shape[1]
            n = most if length is None else min(max(int(length[row // self.s_q]), 0), most)
            found.append(lanes[row, :n])
        return found

    def keys(self, row: int) -> Row:
        """Of both sets, in order, with multiplicity."""
        sets = enumerate(zip(self.lanes(row), self.slots, strict=False))
        return [x | i * SECOND for i, (lanes, slots) in sets for x in lanes.tolist() if 0 <= x < slots]

    def group(self, group: int) -> tuple[list[Row], int]:
        """Keys of its rows, and the most union keys that pay."""
        rows = range(8 * group, min(8 * group + 8, self.rows))
        listed = sum(len(lanes) for row in rows for lanes in self.lanes(row))
        capacity = min(2 * sum(lanes.shape[1] for lanes in self.lists), hopper.UNION_LIMIT)
        return [self.keys(row) for row in rows], min(capacity, listed // 4)

    def key_set(self, lanes: Tensor, length: Tensor | None, slots: int) -> KeySet:
        rows, topk = lanes.shape
        wide = torch.full((rows, topk + self.shift), JUNK, dtype=torch.int32, device="cuda")
        indices = wide[:, self.shift :]
        indices.copy_(lanes)
        indices = indices.unflatten(0, (-1, self.s_q))
        data = torch.zeros(16, dtype=torch.uint8, device="cuda")  # not read
        return KeySet(data, "v4", 1, 1152, 576, slots, indices, None if length is None else length.int().cuda())

    def unite(self) -> list[Entries | None]:
        """What the kernel makes of it: entries of each group, None where it is not packed."""
        sets = [self.key_set(*each) for each in zip(self.lists, self.lengths, self.slots, strict=False)]
        q = torch.zeros(self.rows // self.s_q, self.s_q, 1, 512, device="cuda", dtype=torch.bfloat16)
        lse = torch.zeros(self.rows // self.s_q, 1, self.s_q, device="cuda")
        call = SparseCall(q, tuple(sets), 1.0, None, q, lse, None, False, "prefill")
        topk = sum(keys.topk for keys in sets)
        groups = -(-self.rows // 8)
        work = torch.full((hopper.work_words(self.rows, topk),), JUNK, dtype=torch.int32, device="cuda")
        buffer = hopper_abi.Buffer()
        hopper_abi.pack(buffer, call, head_tiles=1, work=work.data_ptr())
        device = torch.cuda.current_device()
        hopper._kernel(hopper.UNION, device).launch((groups, 1), cubin.current_stream(device), buffer.pointers)
        flags, counts, entries = work.tolist()[:groups], work.tolist()[groups : 2 * groups], work[2 * groups :]
        found: list[Entries | None] = []
        for flag, count, words in zip(flags, counts, entries.view(groups, -1, 2).tolist(), strict=True):
            assert flag in (0, 1)
            assert (count > 0) == bool(flag)
            assert all(pair == [JUNK, JUNK] for pair in words[count:])
            found.append([(key % 2**32, mask) for key, mask in words[:count]] if flag else None)
        return found


def union(rows: list[Row]) -> Entries:
    """In order of set, row, lane."""
    found: dict[int, int] = {}
    for second in (False, True):
        for i, row in enumerate(rows):
            for key in row:
                if (key >= SECOND) == second:
                    found[key] = found.get(key, 0) | 1 << i
    return list(found.items())


def window(rows: int, width: int = 128, step: int = 1, base: int = 0) -> Tensor:
    return base + step * torch.arange(rows)[:, None] + torch.arange(width)


def dense(rows: int, keys: int) -> Tensor:
    return torch.arange(keys).expand(rows, -1).clone()


def causal(rows: int, keys: int, ratio: int = 4, before: int = 0) -> Tensor:
    """All compressed rows so far, -1 behind them."""
    lanes = dense(rows, keys)
    return torch.where(lanes < (before + torch.arange(rows)[:, None]) // ratio, lanes, -1)


def start(rows: int, width: int = 128, base: int = 0) -> Tensor:
    """The window at the beginning of a sequence, oldest first, -1 behind."""
    here = torch.arange(rows)[:, None]
    lanes = (here - width + 1).clamp_min(0) + torch.arange(width)
    return torch.where(lanes <= here, base + lanes, -1)


def right(rows: int, width: int = 128) -> Tensor:
    return (torch.arange(rows)[:, None] - width + 1 + torch.arange(width)).clamp_min(-1)


def ring(rows: int, size: int = 128) -> Tensor:
    """A rotating buffer in the order of its lanes: each row replaces one slot's token, named by its position."""
    lane = torch.arange(size)
    here = torch.arange(size, size + rows)[:, None]
    return here - (here - lane) % size


def paged(lanes: Tensor, page: int = 64) -> Tensor:
    pages = torch.randperm(4096 // page)
    return torch.where(lanes < 0, lanes, pages[lanes.clamp_min(0) // page] * page + lanes % page)


def holes(lanes: Tensor, share: float) -> Tensor:
    return torch.where(torch.rand(lanes.shape) < share, -1, lanes)


def shuffled(lanes: Tensor) -> Tensor:
    return torch.stack([row[torch.randperm(len(row))] for row in lanes])


def requests() -> Tensor:
    """Three sequences side by side, none of a multiple of 8 rows."""
    return torch.cat([window(101), window(102, base=5000), start(93, base=9000)])


KINDS: dict[str, Callable[[], Case]] = {
    "window": lambda: Case([paged(window(264))]),
    "window and dense": lambda: Case([paged(window(267)), paged(dense(267, 256))]),
    "lists off 16 bytes": lambda: Case([window(131, 101), dense(131, 37)], shift=3),
    "lists apart": lambda: Case([window(131), dense(131, 256)], shift=4),
    "growing": lambda: Case([paged(window(264)), paged(causal(264, 256, before=500))]),
    "start of a sequence": lambda: Case([start(200), causal(200, 100)]),
    "start, by lengths": lambda: Case(
        [start(200).clamp_min(0), dense(200, 60)], [torch.arange(1, 201), torch.arange(200) // 4]
    ),
    "start, right aligned": lambda: Case([right(200)]),
    "every 18th row": lambda: Case([window(80, 256, step=18)]),
    "every 33rd row": lambda: Case([window(80, 512, step=33)]),
    "rows of three": lambda: Case([window(81), dense(81, 70)], [torch.full((27,), 128), None], s_q=3),
    "sequences side by side": lambda: Case([requests()]),
    "sequences and dense": lambda: Case([requests(), dense(296, 256)]),
    "no first list": lambda: Case([window(40), dense(40, 256)], [torch.zeros(40), None]),
    "some lists empty": lambda: Case([window(80), dense(80, 256)], [torch.tensor([128, 0] * 40), None]),
    "all lists empty": lambda: Case([torch.full((40, 128), -1), dense(40, 64)], [None, torch.zeros(40)]),
    "keys outside": lambda: Case([window(80), dense(80, 256)], slots=(100, 200)),
    "no slots": lambda: Case([window(80), dense(80, 256)], slots=(0, 256)),
    "last slots": lambda: Case([2**31 - 2 - window(40).flip(1)] * 2, slots=(2**31 - 1,) * 2),
    "any words": lambda: Case([torch.where(torch.rand(40, 64) < 0.1, -(2**31), window(40, 64)), dense(40, 64)]),
    "few lanes": lambda: Case([window(27, 7), dense(27, 3)], shift=1),
    "one lane": lambda: Case([window(27, 1)]),
    "one row": lambda: Case([window(1), dense(1, 64)]),
    "as many lanes as fit": lambda: Case([window(24), dense(24, 640)]),
    "newest first": lambda: Case([window(80).flip(1)]),
    "back in time": lambda: Case([window(80).flip(0)]),
    "rotating": lambda: Case([ring(80)]),
    "rotating, oldest first": lambda: Case([window(300) % 144]),
    "holes": lambda: Case([holes(window(80), 0.05), dense(80, 256)]),
    "the same holes": lambda: Case([window(80), holes(dense(1, 256), 0.2).expand(80, -1)]),
    "in any order": lambda: Case([window(80), shuffled(dense(80, 256))]),
    "in any order, many": lambda: Case([window(24), shuffled(dense(24, 640))]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_overlap_are_packed_and_no_others(kind: str) -> None:
    """To the entry and its place; what does not pay is left to the native kernel."""
    case = KINDS[kind]()
    found = case.unite()
    for group, entries in enumerate(found):
        rows, limit = case.group(group)
        want = union(rows)
        assert entries == (want if 0 < len(want) <= limit else None), f"group {group}"
    assert case.unite() == found


def test_lists_too_long_for_the_prepass_are_not_packed() -> None:
    assert Case([window(24), dense(24, 641)]).unite() == [None] * 3


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_chosen_lists_that_overlap_little_are_not_packed(share: float) -> None:
    base = torch.randperm(MANY)[:256]
    chosen = torch.where(torch.rand(40, 256) < share, base, torch.randint(MANY, (40, 256)))
    assert Case([window(40), chosen]).unite() == [None] * 5


def hold(case: Case) -> list[Entries | None]:
    """Each row of a packed group has its keys, as often as it lists them."""
    found = case.unite()
    for group, entries in enumerate(found):
        if entries is not None:
            rows, limit = case.group(group)
            assert len(entries) <= limit
            for i in range(8):
                got = sorted(key for key, mask in entries if mask >> i & 1)
                assert got == (sorted(rows[i]) if i < len(rows) else []), f"group {group}, row {i}"
    return found


def test_a_key_listed_twice() -> None:
    """Two entries where rows continue one another; through the table such a group is not packed."""
    same = torch.full((24, 128), 7)
    mirrored = torch.cat([dense(24, 64), dense(24, 64).flip(1)], 1)
    assert None not in hold(Case([same])) + hold(Case([mirrored]))
    twice = window(24).flip(1)
    twice[13, 5] = twice[13, 9]
    assert [entries is None for entries in hold(Case([twice]))] == [False, True, False]


def walk(rows: int, topk: int) -> Tensor:
    """Each row follows from the one before by a step of some kind."""
    lanes, row, count = [], int(torch.randint(500, ())) + torch.arange(topk), topk
    for _ in range(rows):
        step = float(torch.rand(()))
        if step < 0.5:
            row = row + 1
        elif step < 0.6:
            row = row + int(torch.randint(-3, 40, ()))
        elif step < 0.63:
            row = torch.randint(600, (topk,))
        elif step < 0.7:
            count = int(torch.randint(topk + 1, ()))
        elif step < 0.8:
            count = min(count + 1, topk)
        made = torch.where(torch.arange(topk) < count, row, -1)
        if step > 0.97:
            made[: int(torch.randint(topk, ()))] = -1
        lanes.append(holes(made, 0.1) if step > 0.99 else made)
    return torch.stack(lanes)


@pytest.mark.parametrize("number", range(20))
def test_lists_of_all_kinds_side_by_side(number: int) -> None:
    """What is not packed does not pay, comes close to it, or has a row with a key twice."""
    rows, sets = int(torch.randint(1, 60, ())), 1 + number % 2
    topk = torch.randint(1, 380, (sets,)).tolist()
    lengths = [torch.randint(-2, k + 4, (rows,)) if torch.rand(()) < 0.2 else None for k in topk]
    slots = tuple(torch.tensor([400, 1000, MANY])[torch.randint(3, (2,))].tolist())
    case = Case([walk(rows, k) for k in topk], lengths, slots, shift=number % 5)
    for group, entries in enumerate(hold(case)):
        keys, limit = case.group(group)
        distinct = all(len(set(row)) == len(row) for row in keys)
        assert entries or not distinct or not 0 < len(union(keys)) < 0.8 * limit, f"group {group}"


def test_what_is_packed_anew_gives_the_results_of_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences side by side, the beginning of one, keys listed twice."""
    rows = 592
    lanes = torch.cat([requests(), requests() + 1])[:, None].int().cuda()
    lanes[200:264] = lanes[200:264] // 2 * 2  # pairs
    lanes[264:272] = lanes[264]
    lanes[264:272, :, 64:] = lanes[264, :, :64]
    cache = headfit.pack_kv(torch.randn(9216, 512, device="cuda"), 64)
    q = torch.randn(rows, 1, 16, 512, device="cuda").bfloat16()
    results = []
    for packing in ("1", "0"):
        monkeypatch.setenv("HEADFIT_PACKING", packing)
        results.append(headfit.flash_mla_with_kvcache(q, cache, indices=lanes, backend="hopper"))
    (out, lse), (want, want_lse) = results
    assert not torch.equal(out, want)  # both ways were taken
    assert float((out - want).float().norm() / want.float().norm()) < 1e-2
    assert float((lse - want_lse).abs().max()) < 1e-4
