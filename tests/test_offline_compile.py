"""Compiles default Triton configurations for architectures that are not there, and holds them to the committed table.

The whole table is `python -m headfit.compile_report --write docs/kernels/triton_resources.json`; here a part of it that
covers every architecture, kernel, layout and head tile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import triton

from headfit import arch as archs
from headfit import compile_report
from headfit.kernels import configs

pytestmark = pytest.mark.skipif(compile_report.backend.INTERPRETED, reason="kernels are interpreted here")
TABLE = json.loads((Path(__file__).parent.parent / "docs/kernels/triton_resources.json").read_text())
VERSION = ".".join(triton.__version__.split(".")[:2])


def part() -> list[compile_report.Variant]:
    """For each architecture: each kernel, layout and head tile at least once, not each combination."""
    chosen, seen = [], defaultdict(set)
    for v in compile_report.variants():
        facts = {v.kernel, (v.layout, v.d_qk), ("tile", v.config.head_tile)}
        if v.arch.name == "sm_121":  # the code of sm_120 under another name: one of it shows that it assembles
            facts = {v.kernel} if v.kernel == "prefill" else set()
        if v.arch.name == "sm_90":  # the one that was seen to be miscompiled
            facts = {(v.kernel, v.layout, v.d_qk, v.config.head_tile)}
        if facts - seen[v.arch.name]:
            seen[v.arch.name] |= facts
            chosen.append(v)
    return chosen


@pytest.mark.parametrize("variant", part(), ids=lambda v: v.name.replace(" ", "-"))
def test_default_configuration_compiles(variant: compile_report.Variant) -> None:
    resources = compile_report.compile_variant(variant)
    assert compile_report.problems(variant, resources) == []
    known = TABLE.get(VERSION)
    if known is not None:
        assert vars(resources) == known[variant.name], "rerun: python -m headfit.compile_report --write ..."


def test_table_covers_every_default_variant() -> None:
    names = {v.name for v in compile_report.variants()}
    for version, table in TABLE.items():
        assert set(table) == names, version
        for variant in compile_report.variants():
            resources = compile_report.Resources(**table[variant.name])
            assert compile_report.problems(variant, resources) == [], version


def test_every_configuration_is_legal() -> None:
    for arch in archs.KNOWN.values():
        for layout, dims in configs.LAYOUT_DIMS.items():
            for d_qk in dims:
                for split in (False, True):
                    for config in configs.table(arch, layout, d_qk, split=split):
                        assert configs.why_illegal(config, arch) is None


def test_illegal_configurations_are_named() -> None:
    assert "head_tile 12" in str(configs.why_illegal(configs.Config(12, 64, 4), archs.named("sm_80")))
    assert "at least 16 heads" in str(configs.why_illegal(configs.Config(8, 64, 4), archs.named("sm_90")))
    assert "shared memory" in str(configs.why_illegal(configs.Config(32, 128, 4), archs.named("sm_120")))
    assert "warps 3" in str(configs.why_illegal(configs.Config(16, 64, 3), archs.named("sm_90")))


def test_unwritten_uniform_register_is_found() -> None:
    good = "/*0010*/ UMOV UR4, 0x1 ;\n/*0020*/ UIADD3 UR5, UR4, 0x2, URZ ;"
    bad = "/*0010*/ UMOV UR4, 0x1 ;\n/*0020*/ UIADD3 UR5, UR60, 0x2, URZ ;\n/*0030*/ UMOV UR60, UR4 ;"
    descriptor = "/*0010*/ UMOV UR4, 0x1 ;\n/*0020*/ HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;"
    assert compile_report.unwritten_reads(good) == []
    assert len(compile_report.unwritten_reads(bad)) == 1
    assert len(compile_report.unwritten_reads(descriptor)) == 3


def test_split_count_depends_on_shapes_alone() -> None:
    arch = archs.named("sm_90")
    config = configs.choose(8, arch, "v4", 512, split=True)
    assert configs.split_count(1, 10, config, arch) == 10
    assert configs.split_count(64, 10, config, arch) == 4
    assert configs.split_count(4096, 10, config, arch) == 1
    assert configs.split_count(1, 0, config, arch) == 1
    for h_q in range(1, 129):
        other = configs.choose(h_q, arch, "v4", 512, split=True)
        assert all(
            configs.split_count(rows, 10, other, arch) == configs.split_count(rows, 10, config, arch)
            for rows in (1, 3, 64, 128, 4096)
        )


def test_importing_the_kernels_opens_no_device() -> None:
    code = "import headfit.kernels.triton, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
