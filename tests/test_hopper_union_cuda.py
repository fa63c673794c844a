"""The prepasses of packing on an SM90: which groups are packed, where their keys stand, and the keys as bf16.

Against lists that are compared on the host, and rows that `headfit.unpack_kv` makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import headfit
from headfit.cache import row_views
from headfit.call import KeySet, SparseCall
from headfit.kernels import cubin, hopper, hopper_abi

WHY_NOT = hopper.available()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hopper: {WHY_NOT}"),
    pytest.mark.usefixtures("cuda_seed"),
]

SLOTS = 1 << 14
RECORD = 64  # words
CAPACITY_LIMIT = 1536
Keys = list[int]
Interval = tuple[int, int]


@dataclass
class Case:
    """Lists ``[rows, topk]`` of one or two sets, on the host; lengths for each ``s_q`` rows.

    Caches have pages of ``page`` keys, as many as `slots` needs, and slots behind the last page's are not there.
    """

    lists: list[Tensor]
    lengths: list[Tensor | None] = field(default_factory=lambda: [None, None])
    slots: tuple[int, int] = (SLOTS, SLOTS)
    s_q: int = 1
    shift: int = 0  # words by which rows lie apart from where they lay closely, and from a multiple of 16 bytes
    page: int = 64
    ctas: int = 0  # of the second kernel; 0: one an SM
    spoil: Callable[[int, Tensor, Tensor], None] | None = None  # given a set's number, its rows' bytes and scales

    def __post_init__(self) -> None:
        self.rows = self.lists[0].shape[0]
        self.groups = -(-self.rows // 8)
        self.room = ((7 * self.rows >> 2) + 1024 + 7) // 8 * 8
        self.caches = [self.cache(i) for i in range(len(self.lists))]
        self.keys = [headfit.unpack_kv(cache) for cache in self.caches]

    def cache(self, number: int) -> Tensor:
        """Any finite keys, of all scales; the padding byte of the scales is anything."""
        pages = -(-self.slots[number] // self.page)
        stride = -(-self.page * 584 // 16) * 16 + 16 * self.shift
        raw = torch.randint(256, (pages * stride + stride,), dtype=torch.uint8, device="cuda")
        made = raw.as_strided((pages, self.page, 1, 584), (stride, 584, 584, 1))
        data, scales = row_views(made)
        assert scales is not None
        e4m3, rope = data[..., :448], data[..., 448:]
        e4m3.copy_(torch.where(e4m3 & 0x7F == 0x7F, 0, e4m3))
        words = rope.contiguous().view(torch.bfloat16)
        rope.copy_(torch.where(words.isfinite(), words, 0).view(torch.uint8))
        scales[..., :7] = torch.randint(240, scales[..., :7].shape, dtype=torch.uint8, device="cuda")
        if self.spoil is not None:
            self.spoil(number, data, scales)
        return made

    def lanes(self, number: int) -> list[tuple[Keys, int, int | None]]:
        """Of each row: keys, lanes, and the lane of the first key; None where lanes without a key are between."""
        lists, length = self.lists[number], self.lengths[number]
        count = self.caches[number].shape[0] * self.page
        found = []
        for row, lanes in enumerate(lists.tolist()):
            n = len(lanes) if length is None else min(max(int(length[row // self.s_q]), 0), len(lanes))
            at = [i for i, x in enumerate(lanes[:n]) if 0 <= x < count]
            keys = [lanes[i] for i in at]
            begin = at[0] if at else 0
            found.append((keys, n, begin if not at or at[-1] - begin + 1 == len(at) else None))
        return found

    def key_set(self, number: int) -> KeySet:
        lanes, cache, length = self.lists[number], self.caches[number], self.lengths[number]
        rows, topk = lanes.shape
        wide = torch.full((rows, topk + self.shift), -7, dtype=torch.int32, device="cuda")
        indices = wide[:, self.shift :]
        indices.copy_(lanes)
        indices = indices.unflatten(0, (-1, self.s_q))
        length = None if length is None else length.int().cuda()
        slots = cache.shape[0] * self.page
        return KeySet(cache, "v4", self.page, cache.stride(0), 576, slots, indices, length)

    def expand(self) -> Found:
        """What the kernels make of it, in a workspace that holds anything before."""
        sets = [self.key_set(i) for i in range(len(self.lists))]
        q = torch.zeros(self.rows // self.s_q, self.s_q, 1, 512, device="cuda", dtype=torch.bfloat16)
        lse = torch.zeros(self.rows // self.s_q, 1, self.s_q, device="cuda")
        call = SparseCall(q, tuple(sets), 1.0, None, q, lse, None, False, "prefill")
        padded = -(-self.groups // 64) * 64
        parts = [padded, 4 * padded, RECORD * padded, RECORD * padded, 2 * self.room * 256]
        junk = torch.randint(-(2**31), 2**31, (sum(parts),), dtype=torch.int32, device="cuda")
        work = junk.clone()
        buffer = hopper_abi.Buffer()
        hopper_abi.pack(buffer, call, head_tiles=1, work=work.data_ptr())
        device = torch.cuda.current_device()
        ctas = self.ctas or torch.cuda.get_device_properties(device).multi_processor_count
        for spec, grid in ((hopper.UNION, self.groups), (hopper.EXPAND, ctas)):
            hopper._kernel(spec, device).launch((grid, 1), cubin.current_stream(device), buffer.pointers)
        flags, sums, _, groups, words = work.split(parts)
        records = groups.view(padded, RECORD)[: self.groups, :36].tolist()
        return Found(
            flags.tolist()[: self.groups], sums.view(-1, 4).tolist()[: self.groups], records,
            unswizzled(words, self.room), unswizzled(junk.split(parts)[-1], self.room),
        )  # fmt: skip

    def check(self) -> list[bool]:
        """Run it twice and compare it with what it should be; which groups are packed."""
        want, found = Want(self), self.expand()
        assert found.sums == want.sums
        assert found.flags == [int(packed) for packed in want.packed]
        for group, (packed, record) in enumerate(zip(want.packed, found.records, strict=True)):
            if packed:
                assert record_of(want.intervals[group], self.room) == described(record), f"group {group}"
            elif not want.spoilt[group]:
                assert record[0] == 0, f"group {group}"
        for number, (keys, got, junk) in enumerate(zip(want.sequences, found.sequences, found.junk, strict=False)):
            rows = self.keys[number][torch.tensor(keys, dtype=torch.long, device="cuda")]
            whole = -(-len(keys) // 8) * 8
            assert torch.equal(got[whole:].view(torch.int16), junk[whole:].view(torch.int16))
            rows = torch.nn.functional.pad(rows, (0, 0, 0, whole - len(keys)))
            rows[~rows.isfinite().all(1)] = 0
            assert torch.equal(got[:whole].view(torch.int16), rows.view(torch.int16))
        again = self.expand()
        assert again.flags == found.flags
        for number, keys in enumerate(want.sequences):
            assert torch.equal(*[x.sequences[number][: len(keys)].view(torch.int16) for x in (again, found)])
        return want.packed


@dataclass
class Found:
    """The workspace, read back. ``sequences`` and ``junk``, what stood there before: ``[set][place][dim]``."""

    flags: list[int]
    sums: list[list[int]]
    records: list[list[int]]
    sequences: Tensor
    junk: Tensor


def unswizzled(words: Tensor, room: int) -> Tensor:
    chunks = words.view(torch.bfloat16).view(2, room // 8, 8, 8, 8, 8)  # set, chunk, plane, key, column, dim
    key, column = torch.arange(8)[:, None], torch.arange(8)[None]
    chunks = chunks[:, :, :, key, column ^ key]
    return chunks.permute(0, 1, 3, 2, 4, 5).reshape(2, room, 512)


def described(record: list[int]) -> list[object]:
    """Keys, chunks of the first set, first chunks, and the intervals that are not empty."""
    keys, chunks, *firsts = record[:4]
    pairs = [(record[i], record[i + 1]) for i in range(4, 36, 2)]
    firsts = [first if there else -1 for first, there in zip(firsts, (chunks, keys - 8 * chunks), strict=True)]
    return [keys, chunks, *firsts, [pair if pair[0] < pair[1] else None for pair in pairs]]


def record_of(intervals: list[list[Interval]], room: int) -> list[object]:
    """The same of the intervals ``[set][row]`` of a group in the sequences."""
    firsts, counts, origin = [-1, -1], [0, 0], 0
    moved: list[list[Interval | None]] = []
    for number, rows in enumerate([*intervals, [(0, 0)] * 8][:2]):
        some = [row for row in rows if row[0] < row[1]]
        moved.append([None] * 8)
        if some:
            first, end = some[0][0] // 8, -(-max(row[1] for row in some) // 8)
            by = origin - 8 * first
            moved[-1] = [(a + by, b + by) if a < b else None for a, b in rows]
            firsts[number], counts[number] = first + number * room // 8, end - first
        origin = 8 * counts[0]
    pairs = [moved[number][row] for row in range(8) for number in range(2)]
    return [8 * sum(counts), counts[0], *firsts, pairs]


def common(before: Keys, keys: Keys) -> int:
    """How many keys a row has from the row before, if it continues that."""
    for skipped, key in enumerate(before[:32]):
        if keys and key == keys[0]:
            rest = before[skipped:]
            return len(rest) if keys[: len(rest)] == rest else 0
    return 0


class Want:
    """What the kernels should say of a case."""

    def __init__(self, case: Case) -> None:
        groups = range(case.groups)
        none: tuple[Keys, int, int | None] = ([], 0, 0)
        sets = [[*case.lanes(i), *[none] * (-case.rows % 8)] for i in range(len(case.lists))]
        counts, added = [], []
        for rows in sets:
            keys = [row[0] if row[2] is not None else [] for row in rows]
            counts.append([len(x) for x in keys])
            added.append([len(x) - common(before, x) for before, x in itertools.pairwise([[], *keys])])
        self.sums, pays = [], []
        for g in groups:
            part = slice(8 * g, 8 * g + 8)
            told: list[int] = []
            for count, news in zip(counts, added, strict=True):
                told += [sum(news[part]), sum(news[part]) + count[8 * g] - news[8 * g]]
            told += [0] * (4 - len(told))
            limit = min(CAPACITY_LIMIT, sum(row[1] for rows in sets for row in rows[part]) // 4)
            holes = any(row[2] is None for rows in sets for row in rows[part])
            pays.append(0 < told[1] + told[3] <= limit and not holes and sum(x.shape[1] for x in case.lists) <= 768)
            self.sums.append(told if pays[-1] else [-1] * 4)
        self.sequences: list[Keys] = [[] for _ in sets]
        self.intervals: dict[int, list[list[Interval]]] = {}
        self.packed: list[bool] = []
        self.spoilt: list[bool] = []
        open_ = True
        finite = [keys.isfinite().all(1).tolist() for keys in case.keys]
        for g in groups:
            follows = bool(self.packed) and pays[g - 1]
            news = [self.sums[g][2 * i + 1 - follows] for i in range(len(sets))]
            fits = all(len(seq) + new <= case.room for seq, new in zip(self.sequences, news, strict=True))
            open_ = open_ and (fits or not pays[g])
            self.packed.append(open_ and pays[g])
            self.spoilt.append(False)
            if not self.packed[-1]:
                continue
            self.intervals[g] = []
            for number, rows in enumerate(sets):
                sequence, places = self.sequences[number], []
                for row in range(8 * g, 8 * g + 8):
                    new = added[number][row] if row % 8 or follows else counts[number][row]
                    sequence += rows[row][0][counts[number][row] - new :]
                    places.append((len(sequence) - counts[number][row], len(sequence)))
                    assert sequence[slice(*places[-1])] == rows[row][0]
                    self.spoilt[g] |= not all(finite[number][key] for key in rows[row][0])
                self.intervals[g].append(places)
            self.packed[-1] = not self.spoilt[g]


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


def chosen(rows: int, topk: int) -> Tensor:
    return torch.randint(SLOTS, (rows, topk))


def sometimes(rows: int) -> Tensor:
    """Windows, of which every third group lists chosen keys."""
    group = torch.arange(rows)[:, None] // 8
    return torch.where(group % 3 == 1, chosen(rows, 128), window(rows))


def apart(rows: int) -> Tensor:
    """Each group's rows have the same keys, and no other group's."""
    return torch.arange(rows)[:, None] // 8 * 128 + torch.arange(128)


KINDS: dict[str, Callable[[], Case]] = {
    "window": lambda: Case([paged(window(264))]),
    "window and dense": lambda: Case([paged(window(267)), paged(dense(267, 256))]),
    "lists off 16 bytes": lambda: Case([window(131, 101), dense(131, 37)], shift=3),
    "lists apart": lambda: Case([window(131), dense(131, 256)], shift=4),
    "pages of seven": lambda: Case([paged(window(131)), paged(dense(131, 256))], page=7),
    "pages of one": lambda: Case([paged(window(64)), dense(64, 100)], slots=(4096, 100), page=1),
    "one page": lambda: Case([paged(window(64)), dense(64, 100)], slots=(4096, 4096), page=4096),
    "growing": lambda: Case([paged(window(264)), paged(causal(264, 256, before=500))]),
    "start of a sequence": lambda: Case([start(200), causal(200, 100)]),
    "start, by lengths": lambda: Case(
        [start(200).clamp_min(0), dense(200, 60)], [torch.arange(1, 201), torch.arange(200) // 4]
    ),
    "start, right aligned": lambda: Case([right(200)]),
    "every 18th row": lambda: Case([window(80, 256, step=18)]),
    "every 33rd row": lambda: Case([window(80, 512, step=33)]),
    "rows of three": lambda: Case([window(81), dense(81, 70)], [torch.full((27,), 128), None], s_q=3),
    "one sequence of many rows": lambda: Case([window(81), dense(81, 70)], [torch.tensor([100]), None], s_q=81),
    "sequences side by side": lambda: Case([requests()]),
    "sequences and dense": lambda: Case([requests(), dense(296, 256)]),
    "a request a row": lambda: Case([200 * torch.arange(40)[:, None] + torch.arange(128)]),
    "no first list": lambda: Case([window(40), dense(40, 256)], [torch.zeros(40), None]),
    "some lists empty": lambda: Case([window(80), dense(80, 256)], [torch.tensor([128, 0] * 40), None]),
    "first of groups empty": lambda: Case([window(80)], [torch.tensor([0, *[128] * 7] * 10), None]),
    "a group empty": lambda: Case([window(80), dense(80, 64)], [torch.tensor([128] * 40 + [0] * 8 + [128] * 32)] * 2),
    "all lists empty": lambda: Case([torch.full((40, 128), -1), dense(40, 64)], [None, torch.zeros(40)]),
    "keys outside": lambda: Case([window(80), dense(80, 256)], slots=(100, 200), page=4),
    "any words": lambda: Case([torch.where(torch.rand(40, 64) < 0.1, -(2**31), window(40, 64)), dense(40, 64)]),
    "few lanes": lambda: Case([window(27, 7), dense(27, 3)], shift=1),
    "one lane": lambda: Case([window(27, 1)]),
    "one row": lambda: Case([window(1), dense(1, 64)]),
    "as many lanes as fit": lambda: Case([window(24), dense(24, 640)]),
    "more lanes than fit": lambda: Case([window(24), dense(24, 641)]),
    "newest first": lambda: Case([window(80).flip(1)]),
    "back in time": lambda: Case([window(80).flip(0)]),
    "rotating": lambda: Case([ring(80)]),
    "rotating, oldest first": lambda: Case([window(300) % 144]),
    "holes": lambda: Case([holes(window(80), 0.05), dense(80, 256)]),
    "few holes": lambda: Case([holes(window(400), 0.0005), holes(dense(400, 256), 0.0001)]),
    "the same holes": lambda: Case([window(80), holes(dense(1, 256), 0.2).expand(80, -1)]),
    "in any order": lambda: Case([window(80), shuffled(dense(80, 256))]),
    "keys twice": lambda: Case([torch.full((24, 128), 7), torch.cat([dense(24, 64), dense(24, 64).flip(1)], 1)]),
    "chosen": lambda: Case([window(40), chosen(40, 256)]),
    "some groups chosen": lambda: Case([sometimes(500), dense(500, 100)]),
    "more keys than room": lambda: Case([apart(512)]),
    "more keys than room in the second": lambda: Case([window(512), apart(512)]),
    "few CTAs": lambda: Case([paged(window(264)), paged(dense(264, 256))], ctas=3),
    "many CTAs": lambda: Case([paged(window(264)), paged(dense(264, 256))], ctas=999),
    "more groups than threads": lambda: Case([window(5000, 32)]),
    "twice as many": lambda: Case([window(8241, 32), dense(8241, 100)]),
    "four times as many": lambda: Case([sometimes(16900) % 9000]),
    "as many groups as may be": lambda: Case([window(32768, 16) % SLOTS, dense(32768, 8)]),
}
PACKED = {"window", "window and dense", "lists apart", "pages of seven", "growing", "rows of three", "keys twice"}
NOT_PACKED = {"all lists empty", "more lanes than fit", "newest first", "chosen", "in any order", "the same holes"}


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_continue_one_another_are_packed_and_no_others(kind: str) -> None:
    """To the key and its place; what does not pay is left to the native kernel."""
    packed = KINDS[kind]().check()
    if kind in PACKED:
        assert all(packed[:-1])
    if kind in NOT_PACKED:
        assert not any(packed)


def walk(rows: int, topk: int) -> Tensor:
    """Each row follows from the one before by a step of some kind."""
    lanes, row, count = [], int(torch.randint(500, ())) + torch.arange(topk), topk
    for _ in range(rows):
        step = float(torch.rand(()))
        if step < 0.8:
            row = row + 1
        elif step < 0.85:
            row = row + int(torch.randint(-3, 40, ()))
        elif step < 0.86:
            row = torch.randint(600, (topk,))
        elif step < 0.9:
            count = int(torch.randint(topk + 1, ()))
        elif step < 0.96:
            count = min(count + 1, topk)
        made = torch.where(torch.arange(topk) < count, row, -1)
        if step > 0.98:
            made[: int(torch.randint(topk, ()))] = -1
        lanes.append(holes(made, 0.1) if step > 0.99 else made)
    return torch.stack(lanes)


@pytest.mark.parametrize("number", range(20))
def test_lists_of_all_kinds_side_by_side(number: int) -> None:
    rows, sets = int(torch.randint(1, 200, ())), 1 + number % 2
    topk = torch.randint(1, 380, (sets,)).tolist()
    lengths = [torch.randint(-2, k + 4, (rows,)) if torch.rand(()) < 0.2 else None for k in topk]
    slots = torch.tensor([400, 1000, SLOTS])[torch.randint(3, (2,))].tolist()
    page = (1, 3, 64, 256)[number % 4]
    Case([walk(rows, k) for k in topk], [*lengths, None][:2], (slots[0], slots[1]), shift=number % 5, page=page).check()


def spoiler(number: int, slots: list[int]) -> Callable[[int, Tensor, Tensor], None]:
    """Make some keys of a set not finite, in one way or another."""

    def spoil(this: int, data: Tensor, scales: Tensor) -> None:
        if this != number:
            return
        for slot in slots:
            page, offset = divmod(slot, data.shape[1])
            dim, way = int(torch.randint(448, ())), int(torch.randint(6, ()))
            if way < 2:  # NaN
                data[page, offset, dim] = 0x7F | way << 7
            elif way == 2:  # of a scale, all dims
                scales[page, offset, dim // 64] = 255
            elif way == 3:  # too large for bf16
                data[page, offset, dim], scales[page, offset, dim // 64] = 0x7E, 254
            else:  # infinity or NaN
                word = torch.tensor([0x80, 0x7F] if way == 4 else [0xC1, 0xFF], dtype=torch.uint8)
                data[page, offset, 448:].view(-1, 2)[dim % 64] = word.cuda()

    return spoil


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("many", [False, True])
def test_groups_with_keys_that_are_not_finite_are_left_out(number: int, many: bool) -> None:
    slots = torch.randperm(900)[: 40 if many else 3].tolist()
    packed = Case([window(801), window(801, 100)], spoil=spoiler(number, slots)).check()
    assert many or (any(packed) and not all(packed))


def test_a_key_of_all_groups_that_is_not_finite() -> None:
    assert not any(Case([window(2000, 16), dense(2000, 200)], spoil=spoiler(1, [77])).check())
    assert not any(Case([window(400)], spoil=spoiler(0, list(range(600)))).check())


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
