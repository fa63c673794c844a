"""The conformance suite over the Triton backend in Triton's interpreter: no GPU, small shapes, a subprocess a part."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from headfit import arch
from headfit.testing import run_conformance
with arch.override(sys.argv[1]):
    report = run_conformance("triton", "cpu", "small", 7, sys.argv[2:])
print(report)
sys.exit(not report.ok)
"""
# sm_80: tiles of 32 keys, all pieces at once. sm_90: tiles of 64 keys and pieces on their way (the split kernel).
PARTS = {
    "sm_80": ["any_topk", "one_list_empty", "empty_rows", "unlisted_nan", "invalid_indices", "lengths_clamped",
              "sink_formula", "page_sizes", "odd_page_stride", "out_views", "prefill_equals_decode", "row_exact"],
    "sm_90": ["any_topk", "lanes_past_length", "duplicates", "max_logits", "nan_stays_in_its_row", "width_exact",
              "wide_scales", "golden_bytes", "every_byte", "head_slice_views"],
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", PARTS)
def test_conformance_in_the_interpreter(arch: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, arch, *PARTS[arch]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_warmup_names_what_it_made_ready() -> None:
    code = (
        "from headfit.kernels.warmup import warmup\n"
        "names = warmup([3], ['v4'], [4], 'cpu')\n"
        "assert {n.split()[0] for n in names} == {'split', 'prefill'} and all(s >= 0 for s in names.values()), names\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
