"""Every Hopper binary compiled without a GPU: spills within bounds, and the committed table of what it takes.

The table is written by `python -m headfit.hopper_report --write docs/kernels/hopper_resources.json`.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from headfit import hopper_report
from headfit.kernels import hopper, hopper_build
from headfit.kernels.hopper_build import Spec

FILE = Path(__file__).parent.parent / "docs/kernels/hopper_resources.json"
TABLE = json.loads(FILE.read_text())
needs_dsl = pytest.mark.skipif(hopper_build.why_no_compiler() is not None, reason="the DSL is not installed")


@needs_dsl
@pytest.mark.parametrize("spec", hopper_report.SPECS, ids=lambda spec: spec.name.replace(" ", "-"))
def test_binary_compiles_and_takes_what_the_table_says(spec: Spec) -> None:
    found = hopper_report.resources(hopper_build.compile_spec(spec))
    assert hopper_report.problems(spec, found) == []
    known = TABLE.get(str(hopper_build.dsl_version()))
    if known is not None:
        read = {name: value for name, value in vars(found).items() if value is not None}
        assert {name: known[spec.name][name] for name in read} == read, f"rerun with --write: {hopper_report.__doc__}"


def test_table_covers_every_binary() -> None:
    for version, table in TABLE.items():
        assert set(table) == {spec.name for spec in hopper_report.SPECS}, version
        for spec in hopper_report.SPECS:
            assert hopper_report.problems(spec, hopper_report.Resources(**table[spec.name])) == [], version


def test_an_sm_holds_as_many_as_a_plan_counts_on() -> None:
    for table in TABLE.values():
        assert all(table[spec.name]["ctas"] >= hopper.CTAS_PER_SM for spec in hopper.NATIVE.values())


@needs_dsl
@pytest.mark.parametrize("spec", hopper_report.SPECS, ids=lambda spec: spec.name.replace(" ", "-"))
def test_nothing_global_is_touched_before_the_kernel_before_is_waited_for(spec: Spec) -> None:
    sass = hopper_report._disassembly(hopper_build.compile_spec(spec).image)
    if sass is None:
        pytest.skip("no nvdisasm")
    found = re.findall(r"\b(ACQBULK|LDG|STG|LDGSTS|UBLKCP|RED|ATOMG|EXIT)\b", sass)
    assert found[0] == "ACQBULK"
    assert {"LDG", "EXIT"} <= set(found)  # the names are those of this disassembler


@needs_dsl
def test_a_share_lies_over_what_is_dead_by_then() -> None:
    cluster = pytest.importorskip("headfit.kernels.hopper_cluster")
    native, tile = (importlib.import_module(f"headfit.kernels.hopper_native{end}") for end in ("", "_tile"))
    for size in native.SIZES.values():
        assert cluster.share_bytes(size.heads) <= size.offsets()[3]  # peaks and tables are read after it is stored
    assert hopper.CLUSTER <= cluster.MOST
    assert cluster.WARPS == tile.WARPS


def test_what_forbids_a_binary_is_named() -> None:
    good = hopper_report.Resources(64, 0, 50000, 256, 4, 64, 0)
    assert hopper_report.problems(hopper.MERGE, good) == []
    bad = hopper_report.Resources(64, 8, 300000, 256, 4, 64, 2)
    texts = hopper_report.problems(hopper.MERGE, bad)
    assert [text.partition(": ")[2].split(" ")[0] for text in texts] == ["spills:", "300000", "ptxas"]
    assert all(text.startswith("merge: ") for text in texts)


def test_ctas_are_bounded_by_registers_shared_memory_and_threads(monkeypatch) -> None:
    monkeypatch.setattr(hopper_report, "_disassembly", lambda image: None)

    def ctas(threads: int, shared: int, registers: int) -> int:
        binary = hopper_build.Binary("x", "x", threads, shared, registers, 0, b"")
        return hopper_report.resources(binary).ctas

    assert ctas(256, 0, 128) == 2
    assert ctas(256, 0, 121) == 2  # registers go in eights
    assert ctas(256, 0, 120) == 2
    assert ctas(256, 0, 80) == 3
    assert ctas(128, 113 * 1024, 32) == 2
    assert ctas(128, 114 * 1024, 32) == 1
    assert ctas(1024, 0, 16) == 2


@needs_dsl
def test_report_prints_writes_and_keeps(tmp_path, monkeypatch, capsys) -> None:
    file, keep = tmp_path / "table.json", tmp_path / "kept"
    file.write_text(json.dumps({"4.0.0": {"merge": {}}}))
    assert hopper_report.main(["merge", "--write", str(file), "--keep", str(keep)]) == 0
    assert capsys.readouterr().out.startswith("merge ")
    written = json.loads(file.read_text())
    assert set(written) == {"4.0.0", hopper_build.dsl_version()}
    assert set(written[hopper_build.dsl_version()]) == {"merge"}
    assert (keep / "merge.cubin").read_bytes().startswith(b"\x7fELF")
    with pytest.raises(SystemExit):
        hopper_report.main(["nothing"])
    assert "accepted are native heads=8" in capsys.readouterr().err


@needs_dsl
def test_report_fails_on_a_bad_binary(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hopper_report, "problems", lambda spec, found: [f"{spec.name}: bad"])
    assert hopper_report.main(["merge"]) == 1
    assert capsys.readouterr().err == "merge: bad\n"
