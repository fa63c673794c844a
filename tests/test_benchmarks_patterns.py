"""The pure parts of the benchmarks: key lists, what they say about neighbouring rows, a model's time from layers'."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from headfit.kernels import BackendUnavailable

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A benchmark as a module, beside the files that it imports."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def by_name(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield by_name
    for name in ("patterns", "kernels", "crossover", "model_time"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_chosen_lists_keep_exactly_the_share_and_see_no_future(load, share):
    patterns = load("patterns")
    rows, topk, slots = 64, 50, 400
    lists = patterns.chosen(rows, topk, slots, share, seed=3)
    assert lists.dtype == np.int32
    assert lists.shape == (rows, topk)
    assert all(len(set(row)) == topk for row in lists)
    assert (lists.max(1) < patterns.visible(rows, slots)).all()
    assert lists.min() >= 0
    assert np.allclose(patterns.neighbour_overlap(lists), share)
    assert (lists == patterns.chosen(rows, topk, slots, share, seed=3)).all()
    assert (lists != patterns.chosen(rows, topk, slots, share, seed=4)).any()


def test_chosen_lists_where_little_is_visible(load):
    """Early rows see fewer keys than topk: all of them are listed, -1 stands behind; then overlap is what is left."""
    patterns = load("patterns")
    lists = patterns.chosen(40, 6, 10, 0.0, seed=1)
    assert patterns.visible(40, 10).tolist() == [max(10 - (39 - r) // 4, 0) for r in range(40)]
    for row, count in zip(lists, patterns.visible(40, 10), strict=True):
        assert set(row[: min(count, 6)]) <= set(range(count))
        assert len(set(row[: min(count, 6)])) == min(count, 6)
        assert (row[min(count, 6) :] == -1).all()
    # 6 of 10: at least 2 must be the previous row's
    assert patterns.neighbour_overlap(lists)[-1] == pytest.approx(2 / 6)
    with pytest.raises(ValueError, match="overlap"):
        patterns.chosen(2, 2, 8, 1.5, seed=0)


def test_statistics_by_hand(load):
    patterns = load("patterns")
    lists = np.array([[0, 1, 2, -1], [2, 3, 1, 0], [4, 5, -1, -1], [4, 0, 5, 1]], dtype=np.int32)
    assert patterns.neighbour_overlap(lists).tolist() == [3 / 4, 0.0, 2 / 4]
    assert patterns.union_share(lists, 2).tolist() == [4 / 7, 4 / 6]
    assert patterns.union_share(patterns.dense(16, 5)).tolist() == [1 / 8] * 2
    window = patterns.window(9, 128)
    assert (window[1:, :-1] == window[:-1, 1:]).all()
    assert patterns.union_share(window).tolist() == [(128 + 7) / (8 * 128)]
    found = patterns.statistics(window)
    assert found["neighbour_overlap"]["mean"] == found["neighbour_overlap"]["p50"] == round(127 / 128, 4)
    assert found["distinct_keys"] == 136


def test_the_committed_statistics_belong_to_this_code(load):
    """What the file says of made lists is what is made now."""
    patterns = load("patterns")
    content = json.loads(patterns.STATISTICS.read_text(encoding="utf-8"))
    recorded = next(iter(content["recorded"].values()))
    assert recorded["rows"] > 0
    assert content["chance_overlap"] == round(recorded["topk"] * 4 / content["how"]["tokens"], 4)
    made = content["made"]
    for share in patterns.OVERLAPS:
        assert made[f"chosen, overlap {share}"]["neighbour_overlap"]["p50"] == pytest.approx(share / 100, abs=1e-3)
    assert made["window"] == patterns.statistics(patterns.window(recorded["rows"], 128))


def test_lists_of_a_file(load, tmp_path):
    patterns = load("patterns")
    path = tmp_path / "lists.npz"
    first, second = np.arange(6, dtype=np.int16).reshape(2, 3), np.full((2, 3), -1, dtype=np.int16)
    np.savez_compressed(path, how=np.array("{}"), **{"layer 1": first, "layer 3": second})
    assert (patterns.load(path) == first).all()
    assert patterns.load(path).dtype == np.int32
    assert (patterns.load(path, "layer 3") == -1).all()
    with pytest.raises(ValueError, match="layer 1, layer 3"):
        patterns.load(path, "layer 2")


def test_names_of_key_sets(load):
    kernels = load("kernels")
    assert [vars(kernels.key_set(n)) | {"slots": kernels.key_set(n).slots} for n in ("128", "128 + 256 dense")] == [
        {"window": 128, "extra": 0, "kind": "", "share": 0, "slots": 0},
        {"window": 128, "extra": 256, "kind": "dense", "share": 0, "slots": 256},
    ]
    overlap = kernels.key_set("128 + 512 overlap 60")
    assert (overlap.kind, overlap.share, overlap.slots) == ("overlap", 60, 8192)
    assert all(kernels.key_set(name) for name in kernels.KEY_SETS)
    for wrong in ("", "128 +", "128 + 512 overlap", "128 + 512 overlap 101", "128 + 512 sparse", "x"):
        with pytest.raises(ValueError, match="keys"):
            kernels.key_set(wrong)


def test_further_lanes(load):
    patterns, kernels = load("patterns"), load("kernels")
    assert kernels.further_lanes(kernels.key_set("128 + 512"), 4, None) is None
    made = kernels.further_lanes(kernels.key_set("128 + 512 overlap 60"), 5, None)
    assert patterns.neighbour_overlap(made) == pytest.approx(0.6, abs=1e-3)
    assert (kernels.further_lanes(kernels.key_set("128 + 256 dense"), 2, None) == np.arange(256)).all()
    recorded = kernels.key_set("128 + 3 recorded")
    lists = np.array([[0, 1, 2], [3, 4, -1]], dtype=np.int32)
    assert kernels.further_lanes(recorded, 1, lists).tolist() == [[3, 4, -1]]
    assert kernels.further_lanes(recorded, 3, lists).tolist() == [[0, 1, 2], [3, 4, -1], [0, 1, 2]]
    for wrong in (None, lists[:, :2], lists + 8192):
        with pytest.raises(ValueError, match="lists"):
            kernels.further_lanes(recorded, 1, wrong)


def test_crossover_records_leave_out_given_likeness(load):
    kernels = load("kernels")
    line = {"backend": "triton", "lanes": [128, 512], "rows": 1, "heads": 8, "us": 2.0, "us_bf16_rows": 3.0}
    line["flashmla"] = {"decode 64": 4.0}
    lines = [line | {"keys": "128 + 512 overlap 60", "us": 1.0}, line | {"keys": "128 + 512"}]
    records = kernels.crossover_records(lines)
    assert [(r["backend"], r["layout"], r["us"]) for r in records] == [
        ("triton", "v4", 2.0), ("flashmla", "v4", 4.0), ("triton", "bf16", 3.0),
    ]  # fmt: skip


def test_one_file_of_several_backends_makes_points_of_all(load):
    """Two of our backends beside one measurement of FlashMLA; the one that takes no bf16 rows has no point there."""
    kernels, crossover_file, model_time = load("kernels"), load("crossover"), load("model_time")
    took = {
        "hopper 8": 1.0,
        "triton 8": 2.0,
        "triton bf16 8": 3.0,
        "prefill 8": 0.5,
        "prefill 64": 5.0,
        "decode 64": 4.0,
    }
    q, lanes = torch.empty(4096, 128, 512, device="meta"), (torch.empty(4096, 128), torch.empty(4096, 512))
    cache = torch.empty(1, 64, 1, 584, device="meta")
    p = kernels.Problem(q, q, (cache, cache), lanes, q, torch.empty(4096, 640, device="meta"))
    lines = [kernels.row("128 + 512", p, backend, 8, took, 1e-3) for backend in ("hopper", "triton")]
    assert [(x["backend"], x["us"], x["us_bf16_rows"]) for x in lines] == [("hopper", 1.0, None), ("triton", 2.0, 3.0)]
    assert {x["best_route"] for x in lines} == {"prefill 8"}
    assert all(x["flashmla"] == {"prefill 8": 0.5, "prefill 64": 5.0, "decode 64": 4.0} for x in lines)
    content = {"gpu": "NVIDIA H200", "command": "c", "records": kernels.crossover_records(lines), "lines": lines}
    (table,) = crossover_file.table([json.loads(json.dumps(content))])["tables"]
    assert [(x["layout"], x["lanes"], x["us"]) for x in table["points"]] == [
        ("bf16", [640], {"triton": 3.0, "flashmla": 5.0}),
        ("v4", [128, 512], {"hopper": 1.0, "flashmla": 4.0, "triton": 2.0}),
    ]
    found = model_time.lines_of([content])
    assert {key[0]: line["us"] for key, line in found.items()} == {"hopper": 1.0, "triton": 2.0}


def test_a_refused_call_is_no_candidate(load):
    kernels = load("kernels")

    def refuse(said: dict[str, str]):
        def call():
            raise BackendUnavailable("no", said)

        return call

    assert kernels.takes(lambda: None)
    assert not kernels.takes(refuse({"hopper": "takes packed v4 pages, got bf16"}))
    with pytest.raises(BackendUnavailable):
        kernels.takes(refuse({}))


def records(us: float, best: float | None, **changes: object) -> dict[str, object]:
    """A records file with one time for all key sets and two numbers of heads."""
    lines = [
        {"keys": keys, "rows": 4096, "heads": heads, "us": us, "best_us": best, "best_route": "prefill 64",
         "flashmla": {} if best is None else {"prefill 64": best, "decode 64": 2 * best}}
        for keys in ("128", "128 + 512", "128 + 256 dense", "128 + 512 overlap 60") for heads in (8, 48)
    ]  # fmt: skip
    return {"backend": "triton", "records": [], "lines": lines} | changes


def test_model_time_by_hand(load):
    model_time = load("model_time")
    (one,) = model_time.model_times(model_time.lines_of([records(100.0, 150.0)]))
    assert (one.label, one.ours, one.best, one.packed) == ("TP8", *(pytest.approx(43 * t) for t in (0.1, 0.15, 0.3)))
    assert one.routes == {"prefill 64": 43}
    assert "1.50" in model_time.table([one])
    slower = records(200.0, 150.0)
    slower["lines"] = [line for line in slower["lines"] if line["keys"] == "128"]
    (both,) = model_time.model_times(model_time.lines_of([records(100.0, 150.0), slower]))
    assert both.ours == pytest.approx(41 * 0.1 + 2 * 0.2)
    other = records(200.0, 150.0, backend="other")
    other["lines"] = [line | {"us": 50.0 if line["keys"] == "128" else 200.0} for line in other["lines"]]
    fastest, _, _ = model_time.model_times(model_time.lines_of([records(100.0, 150.0), other]))
    assert (fastest.backend, fastest.ours) == (model_time.FASTEST, pytest.approx(41 * 0.1 + 2 * 0.05))
    (alone,) = model_time.model_times(model_time.lines_of([records(100.0, None)]), "128 + 512 overlap 60")
    assert (alone.best, alone.packed) == (None, None)
    assert " - " in model_time.table([alone])


def test_model_time_says_what_is_missing(load):
    model_time = load("model_time")
    with pytest.raises(ValueError, match="overlap 90"):
        model_time.model_times(model_time.lines_of([records(1.0, 1.0)]), "128 + 512 overlap 90")
    with pytest.raises(ValueError, match="lines"):
        model_time.lines_of([{"records": []}])
    with pytest.raises(ValueError, match="backend"):
        model_time.lines_of([records(1.0, 1.0, backend=None)])


def test_model_time_of_the_committed_figures(load, capsys, monkeypatch):
    model_time = load("model_time")
    monkeypatch.setattr(sys, "argv", ["model_time.py", str(BENCHMARKS / "results" / "h200-kernels.json")])
    assert model_time.main() == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[2:5]] == [["triton", f"TP{n}"] for n in (8, 4, 2)]
