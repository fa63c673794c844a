"""The doctor: the table for a GPU that is not here, its two forms, odd machines and bad input."""

from __future__ import annotations

import importlib.metadata
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from headfit import doctor, gpus, kernels, machine, probes
from headfit.doctor import doctor_command, render, to_json
from headfit.width import NO_BATCH_EXCEEDS, Capability


def shown(report: doctor.Report, width: int = 100) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(render(report))
    return out.getvalue()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU, engines and their kernels."""
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    monkeypatch.setattr(machine, "gpu_here", lambda: (None, "no CUDA device"))
    monkeypatch.setattr(probes, "flashinfer_capability", lambda cc: None)
    monkeypatch.setattr(probes, "flashmla_capabilities", lambda cc: ())


@pytest.fixture
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU backend that takes every head count, whatever stands in the registry today."""

    def capability(name: str, cc: tuple[int, int] | None) -> Capability:
        return Capability(name, cc, 0, range(1, 129), range(1, 129), sources={"heads": "its table"})

    monkeypatch.setattr(probes, "backend_capability", capability)
    monkeypatch.setattr(probes, "flashinfer_capability", lambda cc: None)
    for name in ("HEADFIT_WIDTH", "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("any_width")
@pytest.mark.parametrize(("model", "heads"), [("deepseek-v4-flash", 64), ("deepseek-v4-pro", 128)])
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100", "sm_120", "h200", "gb10"])
def test_the_table_for_a_gpu_that_is_not_here(model: str, heads: int, gpu: str) -> None:
    report = doctor_command(model=model, tp=8, gpu=gpu)
    assert not report.here
    assert report.compute_capability == gpus.compute_capability_of(gpu)
    assert [(r.phase, r.rows) for r in report.table] == [(p, n) for p, _, n in doctor.SITUATIONS]
    for row in report.table:
        assert (row.heads_owned, row.padded_width, row.width) == (heads // 8, 64, heads // 8)
        assert (row.wasted_padded, row.wasted) == (1 - heads / 512, 0)
        assert row.reason


@pytest.mark.usefixtures("any_width")
def test_without_tp_every_size_is_listed() -> None:
    report = doctor_command(model="deepseek-v4-pro", gpu="h200")
    assert sorted({r.tp for r in report.table}) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert {r.tp: r.padded_width for r in report.table} == {1: 128, **dict.fromkeys((2, 4, 8, 16, 32, 64, 128), 64)}


@pytest.mark.usefixtures("any_width")
@pytest.mark.parametrize(("policy", "widths"), [("native", {8}), ("sm12x-prefill", {64}), ("padded", {64})])
def test_policies_and_the_environment(policy: str, widths: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor_command(tp=8, gpu="h200", policy=policy)
    assert {r.width for r in report.table} == widths
    monkeypatch.setenv("HEADFIT_WIDTH", policy)
    again = doctor_command(tp=8, gpu="h200")
    assert [(r.width, r.rule) for r in again.table] == [(r.width, r.rule) for r in report.table]


def test_flashinfer_on_sm12x_has_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def flashinfer(cc: tuple[int, int] | None) -> Capability:
        sources = {"row_split": "a constant", "prefill_heads": "a switch", "decode_heads": "a set"}
        listed = {8, 16, 32, 64, 128}
        return Capability(probes.FLASHINFER, cc, 64, {16, 64}, listed, version="0.6.17", sources=sources)

    monkeypatch.setattr(probes, "flashinfer_capability", flashinfer)
    both = doctor_command(tp=4, gpu="gb10", policy="sm12x-prefill")
    assert [f.family for f in both.families][-1] == probes.FLASHINFER
    assert len(both.table) == 2 * len(doctor.SITUATIONS)
    widths = {(r.phase, r.rows): r.width for r in both.table if r.family == probes.FLASHINFER}
    assert widths[("prefill", 4096)] == widths[("prefill", 65)] == 16
    assert widths[("prefill", 64)] == widths[("decode", 1)] == widths[("verify", 256)] == 64
    text = shown(both)
    assert "up to 64 rows decode, more prefill" in text
    assert "a switch" in text
    assert "flashinfer_sm120 0.6.17" in text
    assert {f.family for f in doctor_command(tp=4, gpu="h200").families} != {probes.FLASHINFER}
    only = doctor_command(tp=4, gpu="gb10", family=probes.FLASHINFER)
    assert [f.family for f in only.families] == [probes.FLASHINFER]


# ------------------------------------------------------------------------------- releases that need not be here


@pytest.mark.usefixtures("nothing_installed")
def test_a_flashinfer_that_is_not_here_answers_from_its_record() -> None:
    report = doctor_command(tp=8, gpu="gb10", flashinfer="0.6.17", policy="native")
    family = report.families[-1]
    assert (family.family, family.version, family.prefill_heads) == (probes.FLASHINFER, "0.6.17", {16, 32, 64, 128})
    widths = {(r.phase, r.rows): r.width for r in report.table if r.family == probes.FLASHINFER}
    assert widths[("prefill", 4096)] == 16
    assert widths[("decode", 1)] == 8
    assert doctor_command(tp=8, flashinfer="0.6.17").compute_capability == (12, 0)  # its kernels' GPU, if none is here
    elsewhere = doctor_command(tp=8, gpu="h200", flashinfer="0.6.17")
    assert [f.family for f in elsewhere.others] == [probes.FLASHINFER]
    assert "recorded: flashinfer" in shown(elsewhere, 200)


@pytest.mark.usefixtures("nothing_installed")
def test_releases_that_are_not_recorded_keep_the_pad_and_are_named() -> None:
    report = doctor_command(tp=8, gpu="gb10", flashinfer="0.6.99", sglang="0.5.99", policy="native")
    assert {r.width for r in report.table if r.family == probes.FLASHINFER} == {64}
    assert {s.width for r in report.table for s in r.stacks if s.stack == "sglang"} == {64}
    text = " ".join(shown(report, 200).split())
    assert "flashinfer_sm120 0.6.99 is not recorded" in text
    assert "SGLang 0.5.99 is not recorded" in text
    assert "no other release is taken for it" in text


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("gpu", "sglang", "prefill", "decode"),
    [
        ("h200", "0.5.18", 64, 64),
        ("b200", "0.5.23", 64, 64),
        ("gb10", "0.5.18", 64, 64),
        ("gb10", "0.5.20", 16, 16),
    ],
)
def test_what_todays_stacks_launch(gpu: str, sglang: str, prefill: int, decode: int) -> None:
    report = doctor_command(tp=4, gpu=gpu, sglang=sglang, vllm="0.33.0", family="triton")
    assert [s.stack for s in report.table[0].stacks] == ["sglang", "vllm"]
    ours = {r.rows: r.stacks[0] for r in report.table if r.phase != "verify"}
    assert (ours[4096].width, ours[1].width) == (prefill, decode)
    assert ours[4096].wasted == 1 - 16 / prefill
    text = shown(report)
    assert sglang in text
    assert "0.33.0" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.usefixtures("nothing_installed")
def test_the_kernels_that_an_engine_brings_are_shown() -> None:
    report = doctor_command(tp=8, gpu="h200", sglang="0.5.23", vllm="0.33.0")
    heads = {f.family: f.prefill_heads for f in report.others}
    assert heads == {"flashmla_vllm": {8, 16, 32, 64, 128}, "flashmla_sgl": {64, 128}}
    on_sm12x = doctor_command(tp=8, gpu="gb10", sglang="0.5.18")
    assert on_sm12x.families[-1].version == "0.6.17"  # what that SGLang requires
    assert on_sm12x.others == ()


@pytest.mark.usefixtures("nothing_installed")
def test_layouts_and_the_advice_are_in_both_forms() -> None:
    report = doctor_command(gpu="h200", policy="native")
    assert [(x.tp, x.dp) for x in report.layouts] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [x.wasted_today for x in report.layouts] == [0, 0.5, 0.75, 0.875]
    assert {x.wasted for x in report.layouts} == {0}
    text = " ".join(shown(report).split())
    assert "today: TP1 x DP8 wastes least" in text
    assert "TP8 x DP1 wastes 88% and holds 8 copies of the cache" in text
    assert "assumed:" in text
    data = json.loads(to_json(report))
    assert data["layouts"][3]["kv_copies"] == 8
    assert data["advice"][0].startswith("today: TP1 x DP8")
    assert data["table"][0]["stacks"][0]["stack"] == "sglang"
    assert [(x.tp, x.dp) for x in doctor_command(tp=2, gpu="h200").layouts] == [(1, 2), (2, 1)]


def test_a_release_that_is_installed_is_asked_and_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "version_of", lambda name: {"flashinfer-python": "0.6.17", "sglang": "0.5.20"}.get(name)
    )
    mine = Capability(probes.FLASHINFER, (12, 0), 64, {4, 64}, {4, 64}, version="0.6.17")
    monkeypatch.setattr(probes, "flashinfer_capability", lambda cc: mine)
    report = doctor_command(tp=16, gpu="sm_120")
    assert "installed here, with FlashInfer 0.6.17" in report.stacks[0]
    assert {r.stacks[0].width for r in report.table} == {4}
    asked = doctor_command(tp=16, gpu="sm_120", flashinfer="0.6.18")
    assert asked.families[-1].prefill_heads == {8, 16, 32, 64, 128}
    assert {r.stacks[0].width for r in asked.table} == {None, 64}  # SGLang 0.5.20 launches 4 in prefill, unasked


# ------------------------------------------------------------------------------------------------------------ plug-ins


@pytest.mark.parametrize("plugin", machine.PLUGINS, ids=lambda p: p.engine)
def test_plug_ins_say_why_they_are_not_active(plugin: machine.Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {"sglang": "0.5.20", "vllm": "0.33.0"}[plugin.engine]
    installed = {plugin.engine: tested}
    points = [importlib.metadata.EntryPoint("headfit", f"{plugin.module}:register", plugin.group)]
    monkeypatch.setattr(machine, "version_of", installed.get)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name, "1.0"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == plugin.group else [])
    for name in ("HEADFIT_WIDTH", "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS", plugin.only):
        monkeypatch.delenv(name, raising=False)
    assert machine.plugin_problem(plugin) is None
    monkeypatch.setenv(plugin.only, "other, headfit")
    assert machine.plugin_problem(plugin) is None
    monkeypatch.setenv(plugin.only, "other")
    assert "leaves headfit out" in str(machine.plugin_problem(plugin))
    monkeypatch.delenv(plugin.only)
    monkeypatch.setenv("HEADFIT_WIDTH", "padded")
    assert "asks for the pad" in str(machine.plugin_problem(plugin))
    monkeypatch.delenv("HEADFIT_WIDTH")
    installed[plugin.engine] = "0.1.0"
    assert "outside" in str(machine.plugin_problem(plugin))
    points.clear()
    assert "no entry point" in str(machine.plugin_problem(plugin))
    installed.clear()
    assert "not installed here" in str(machine.plugin_problem(plugin))


def test_the_command_takes_the_releases(capsys: pytest.CaptureFixture[str]) -> None:
    from headfit import cli

    options = ["--gpu", "h200", "--sglang", "0.5.18", "--vllm", "0.33.0", "--flashinfer", "0.6.17", "--json"]
    assert cli.run(["doctor", "--tp", "8", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [s["version"] for s in data["table"][0]["stacks"]] == ["0.5.18", "0.33.0"]
    assert cli.run(["doctor", "--sglang", "new"]) == 2
    assert "sglang: got 'new', need a release such as" in capsys.readouterr().err


def test_a_refused_call_is_shown_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "backend_capability", lambda name, cc: Capability(name, cc, 0, {8, 16}, ()))
    report = doctor_command(tp=8, gpu="h200", policy="padded")
    assert {(r.width, r.wasted, r.rule) for r in report.table} == {(None, None, "refused")}
    assert "none" in shown(report)
    json.loads(to_json(report))


@pytest.mark.usefixtures("any_width")
def test_json_is_plain_and_complete() -> None:
    report = doctor_command(tp=8, gpu="h200")
    data = json.loads(to_json(report))
    assert data["compute_capability"] == [9, 0]
    assert data["families"][0]["prefill_heads"] == list(range(1, 129))
    assert data["families"][0]["sources"] == {"heads": "its table"}
    assert len(data["table"]) == len(report.table)
    assert data["table"][0]["width"] == 8
    assert {f["name"] for f in data["machine"]} >= {"GPU", "driver", "python", "torch", "triton", "HEADFIT_WIDTH"}


def test_json_of_ranges_and_an_unreadable_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def capability(name: str, cc: tuple[int, int] | None) -> Capability:
        return Capability(name, cc, NO_BATCH_EXCEEDS, {64}, {64}, decode_topk=range(64, 2**31, 64), problems=("why",))

    monkeypatch.setattr(probes, "backend_capability", capability)
    report = doctor_command(tp=8, gpu="h200")
    family = json.loads(to_json(report))["families"][0]
    assert family["row_split"] is None
    assert family["decode_topk"] == {"from": 64, "step": 64}
    assert "topk multiples of 64" in shown(report)
    assert "could not be read" in shown(report)


@pytest.mark.usefixtures("any_width")
@pytest.mark.parametrize("width", [80, 100, 200])
def test_rendering_says_what_a_person_needs(width: int) -> None:
    text = shown(doctor_command(model="deepseek-v4-flash", tp=8, gpu="h200"), width)
    for word in ("GPU", "torch", "triton", "backend cpu", "wasted", "prefill", "4096", "88%", "why"):
        assert word in text


def test_this_machine() -> None:
    report = doctor_command(tp=2)
    assert report.here
    assert report.families
    assert [r.heads_owned for r in report.table] == [32] * len(doctor.SITUATIONS)
    assert {f.name for f in report.machine} >= {f"backend {name}" for name in kernels.REGISTRY}
    shown(report)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpu() -> None:
    report = doctor_command(tp=8)
    facts = {f.name: f for f in report.machine}
    assert report.compute_capability == torch.cuda.get_device_capability()
    assert facts["GPU"].ok
    assert facts["driver"].ok
    assert probes.compute_capability(0) == probes.compute_capability("cuda:0") == report.compute_capability
    assert probes.compute_capability("cpu") is None


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    from headfit.geometry import PRESETS

    config = {**PRESETS["deepseek-v4-flash"], "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = doctor_command(model=tmp_path, tp=4, gpu="sm_90")
    assert (report.n_heads, report.model) == (32, tmp_path.name)
    assert report.table[0].heads_owned == 8


def test_odd_machines_are_reported_and_do_not_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def boom(*_: Any) -> Any:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(probes, "compute_capability", boom)
    monkeypatch.setattr(kernels, "why_not", lambda name: boom())
    monkeypatch.setattr(kernels, "backends", lambda: ("cpu",))
    monkeypatch.setenv("HEADFIT_WITDH", "native")
    facts = {f.name: f for f in doctor_command(tp=8, policy="native").machine}
    assert "driver too old" in facts["GPU"].value
    assert facts["backend cpu"].value == "RuntimeError: driver too old"
    assert facts["HEADFIT_WITDH"].value == "nothing reads this; HEADFIT_WIDTH was perhaps meant"
    assert not facts["HEADFIT_WITDH"].ok
    monkeypatch.setenv("HEADFIT_WIDTH", "wide")
    facts = {f.name: f for f in doctor_command(tp=8, policy="native").machine}
    assert "accepted are native" in facts["HEADFIT_WIDTH"].value
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep\nGCC version: 12.3.0\n")
    assert machine.driver(version) == "580.95.05"
    assert machine.driver(tmp_path / "nope") is None


def test_a_broken_flashinfer_does_not_break_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.mla", "flashinfer.mla._sparse_mla_sm120"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    report = doctor_command(tp=8, gpu="sm_120")
    broken = report.families[-1]
    assert broken.family == probes.FLASHINFER
    assert broken.problems
    assert {r.width for r in report.table if r.family == probes.FLASHINFER} == {64}
    assert "problem" in shown(report)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"tp": 3}, ValueError, "tp: got 3, which does not split the 64 heads; choose one of 1, 2, 4"),
        ({"tp": 128}, ValueError, "tp: got 128"),
        ({"tp": 0}, ValueError, "tp: got 0"),
        ({"model": "no-such-model"}, FileNotFoundError, "there is no such file or folder"),
        ({"gpu": "h300"}, ValueError, "gpu: got 'h300', accepted are"),
        ({"gpu": ""}, ValueError, "gpu: got ''"),
        ({"policy": "wide"}, ValueError, "policy: got 'wide', accepted are native"),
        ({"flashinfer": "newest"}, ValueError, "flashinfer: got 'newest', need a release such as 0.7"),
        ({"vllm": "", "gpu": "h200"}, ValueError, "vllm: got '', need a release such as 0.33.0"),
        ({"family": "nope", "gpu": "h200"}, ValueError, "family: got 'nope', accepted for this GPU are"),
        ({"family": "cpu", "gpu": "h200"}, ValueError, "family: got 'cpu', accepted for this GPU are"),
    ],
)
def test_bad_input_raises(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        doctor_command(**arguments)


@pytest.mark.parametrize(
    ("name", "cc"),
    [
        ("h200", (9, 0)),
        ("NVIDIA H100", (9, 0)),
        ("sm_90", (9, 0)),
        ("sm90a", (9, 0)),
        ("9.0", (9, 0)),
        ("SM_100", (10, 0)),
        ("sm_103a", (10, 3)),
        ("B200", (10, 0)),
        ("RTX PRO 6000", (12, 0)),
        ("GeForce RTX 5090", (12, 0)),
        ("sm_121", (12, 1)),
        ("12.1", (12, 1)),
        ("DGX Spark", (12, 1)),
        ("A100", (8, 0)),
    ],
)
def test_gpu_names(name: str, cc: tuple[int, int]) -> None:
    assert gpus.compute_capability_of(name) == cc


@pytest.mark.parametrize("name", ["", "sm_", "sm_70", "7.5", "h", "9", "900", "sm_999"])
def test_unknown_gpus_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="gpu: got"):
        gpus.compute_capability_of(name)
