"""The table that backend=None chooses from: its form, the look-up, and what it must not change."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headfit import kernels
from headfit.call import KeySet, SparseCall
from headfit.kernels import crossover
from headfit.kernels.crossover import Shape

GPU = "NVIDIA H200"
NAMES = ("triton", "flashmla", "cpu")


def point(rows, heads, lanes=(128, 512), layout="v4", **us):
    return {"layout": layout, "lanes": list(lanes), "rows": rows, "heads": heads, "us": us}


def content(*points, gpu=GPU):
    return {"schema": 1, "tables": [{"gpu": gpu, "measured": {"command": "a test"}, "points": list(points)}]}


TABLES = crossover.parse(
    content(
        point(64, 8, triton=30.0, flashmla=44.0),
        point(64, 64, triton=90.0, flashmla=43.0),
        point(4096, 8, triton=400.0, flashmla=1200.0),
        point(4096, 64, triton=2600.0, flashmla=1210.0),
        point(4096, 64, lanes=(640,), layout="bf16", flashmla=656.0, triton=2000.0),
    )
)


def meta_call(rows=64, heads=8, lanes=(128, 512), layout="v4", **changes):
    """A call of shapes only; its device says cuda, and nothing on it exists."""
    q = torch.empty(rows, 1, heads, 512, dtype=torch.bfloat16, device="meta")
    sets = tuple(
        KeySet(
            data=torch.empty(1, device="meta"),
            layout=layout,
            page_size=64,
            page_stride=37440,
            row_stride=576,
            slots=64,
            indices=torch.empty(rows, 1, n, dtype=torch.int32, device="meta"),
            lengths=None,
        )
        for n in lanes
    )
    lse = torch.empty(rows, heads, 1, device="meta")
    values = {"batch_invariant": False, "phase": "decode"} | changes
    return SparseCall(q, sets, 1.0, None, q, lse, None, **values)


class CudaLike:
    """A call whose tensors claim to be on the GPU that the table was measured on."""

    def __init__(self, call, device="cuda:0"):
        self._call = call
        self.q = type("Q", (), {"device": torch.device(device), "shape": call.q.shape})()

    def __getattr__(self, name):
        return getattr(self._call, name)


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(crossover, "_gpu_name", lambda index: GPU)


def test_nearest_point_decides(on_h200):
    def first(**shape):
        return crossover.order(CudaLike(meta_call(**shape)), NAMES, TABLES)[0]

    assert first(rows=64, heads=8) == "triton"
    assert first(rows=64, heads=64) == "flashmla"
    assert first(rows=100, heads=7) == "triton"
    assert first(rows=100, heads=9) == "flashmla"  # heads are computed in whole tiles: the next count above speaks
    assert first(rows=3000, heads=48) == "flashmla"
    assert first(rows=4096, heads=64, lanes=(640,), layout="bf16") == "flashmla"


def test_others_follow_in_registry_order(on_h200):
    call = CudaLike(meta_call(rows=64, heads=64))
    assert crossover.order(call, ("new", "triton", "flashmla"), TABLES) == ("flashmla", "triton", "new")
    assert crossover.order(call, ("new", "triton"), TABLES) == ("triton", "new")  # a name that is not asked for: no


@pytest.mark.parametrize(
    "shape",
    [
        {"rows": 31},
        {"rows": 8193},
        {"heads": 3},
        {"heads": 129},
        {"lanes": (128, 1153)},
        {"lanes": (640,)},
        {"layout": "v32"},
    ],
)
def test_says_nothing_outside_the_measured_range(on_h200, shape):
    assert crossover.order(CudaLike(meta_call(**shape)), NAMES, TABLES) == NAMES


def test_another_gpu_keeps_registry_order(monkeypatch):
    monkeypatch.setattr(crossover, "_gpu_name", lambda index: "NVIDIA H20")
    assert crossover.order(CudaLike(meta_call(heads=64)), NAMES, TABLES) == NAMES


def test_no_table_keeps_registry_order(on_h200):
    assert crossover.order(CudaLike(meta_call(heads=64)), NAMES, {}) == NAMES


def test_cpu_calls_ask_no_device(monkeypatch):
    monkeypatch.setattr(crossover, "_gpu_name", lambda index: pytest.fail("asked for a GPU's name"))
    assert crossover.order(meta_call(), NAMES, TABLES) == NAMES


def test_shipped_table_is_well_formed():
    tables = crossover.load()
    for points in tables.values():
        for p in points:
            assert {name for name, _ in p.times} <= set(kernels.REGISTRY)
            assert all(kernels.REGISTRY[name].automatic for name, _ in p.times)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ([], "schema"),
        ({"schema": 2, "tables": []}, "schema"),
        ({"schema": 1, "tables": [{"gpu": GPU}]}, "measured"),
        (content(point(0, 8, triton=1.0)), "rows and heads"),
        (content(point(8, 8, lanes=(), triton=1.0)), r"points\[0\].lanes"),
        (content(point(8, 8, layout="v5", triton=1.0)), "accepted are v4, v32, bf16"),
        (content(point(8, 8)), "microseconds"),
        (content(point(8, 8, triton=float("nan"))), "microseconds"),
        (content(7), "need an object"),
    ],
)
def test_broken_tables_say_where(broken, says):
    with pytest.raises(ValueError, match=says):
        crossover.parse(broken)


def test_one_table_a_gpu():
    twice = content()
    twice["tables"] *= 2
    with pytest.raises(ValueError, match="has a table already"):
        crossover.parse(twice)


def test_load(tmp_path):
    assert crossover.load(tmp_path / "none.json") == {}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content(point(8, 8, triton=1.0))))
    assert crossover.load(path)[GPU][0].shape == Shape("v4", 2, 8, 8, 640)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        crossover.load(path)


class Choices:
    """A registry of three backends on CPU tensors: what they refuse is set by hand."""

    def __init__(self, monkeypatch):
        self.refuse = {}
        entries = {}
        for name in ("one", "two", "by_name"):
            module = ModuleType(f"headfit_choice_{name}")
            module.available = lambda: None
            module.unsupported = lambda call, name=name: self.refuse.get(name)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            entries[name] = kernels.Backend(name, module.__name__, ("meta",), "", automatic=name != "by_name")
        monkeypatch.setattr(kernels, "REGISTRY", entries)


def test_choose_follows_the_measured_order(monkeypatch):
    choices = Choices(monkeypatch)
    call = meta_call()
    assert kernels.choose(call)[0] == "one"
    monkeypatch.setattr(crossover, "order", lambda call, names: tuple(reversed(names)))
    assert kernels.choose(call)[0] == "two"
    choices.refuse["two"] = "no"  # a fast backend that refuses (batch_invariant, say) is passed over
    assert kernels.choose(call)[0] == "one"
    choices.refuse["one"] = "no"
    with pytest.raises(kernels.BackendUnavailable, match="two: no; one: no"):
        kernels.choose(call)


def test_a_named_backend_never_falls_back_and_asks_no_table(monkeypatch):
    choices = Choices(monkeypatch)
    monkeypatch.setattr(crossover, "order", lambda call, names: pytest.fail("asked the table"))
    assert kernels.choose(meta_call(), "two")[0] == "two"
    choices.refuse["two"] = "not this call"
    with pytest.raises(kernels.BackendUnavailable, match="two: not this call"):
        kernels.choose(meta_call(), "two")


def test_a_backend_outside_the_contract_is_chosen_by_name_only(monkeypatch):
    choices = Choices(monkeypatch)
    choices.refuse |= {"one": "no", "two": "no"}
    with pytest.raises(kernels.BackendUnavailable):
        kernels.choose(meta_call())
    assert kernels.choose(meta_call(), "by_name")[0] == "by_name"
    assert not kernels.load("by_name").unsupported(None)
    assert "flashinfer" not in [n for n, b in kernels.REGISTRY.items() if b.automatic]


def load_writer():
    path = Path(__file__).parent.parent / "benchmarks" / "crossover.py"
    spec = importlib.util.spec_from_file_location("benchmarks_crossover", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(*rows, gpu=GPU):
    keys = ("backend", "layout", "lanes", "rows", "heads", "us")
    return {"gpu": gpu, "command": "a test", "records": [dict(zip(keys, row, strict=True)) for row in rows]}


def test_the_table_is_written_from_records():
    first = records(
        ("triton", "v4", [128, 512], 64, 8, 30.0),
        ("flashmla", "v4", [128, 512], 64, 8, 44.0),
        ("triton", "v4", [128], 64, 8, 9.0),  # timed alone: no order
    )
    second = records(("triton", "bf16", [640], 64, 64, 90.0), ("flashmla", "bf16", [640], 64, 64, 43.0))
    tables = crossover.parse(load_writer().table([first, second]))
    assert [p.times[0][0] for p in tables[GPU]] == ["flashmla", "triton"]
    assert [p.shape for p in tables[GPU]] == [Shape("bf16", 1, 64, 64, 640), Shape("v4", 2, 64, 8, 640)]


def test_the_table_holds_no_backend_that_is_chosen_by_name_only():
    with pytest.raises(ValueError, match="'flashinfer' is not one"):
        load_writer().table([records(("flashinfer", "v4", [128], 64, 8, 1.0))])
