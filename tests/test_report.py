"""The records of a comparison and the page made of them:

one set of figures, self-contained, written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headfit import comparison as data
from headfit import report


def make(**changes) -> data.Comparison:
    """A comparison with round figures: TP 2, three layer kinds, two phases."""
    lanes = []
    for phase, rows, scale in (("prefill", 3072, 1.0), ("decode", 23, 0.01)):
        for kind, layers, full in (("sliding", 1, 2.0), ("compressed_sparse", 2, 12.0), ("heavily_compressed", 1, 3.0)):
            seconds = full * scale
            lanes.append(
                data.LaneRow(
                    phase=phase,
                    kind=kind,
                    layers=layers,
                    calls=6 * layers,
                    rows=rows * layers,
                    heads=32,
                    width_off=64,
                    width_on=32,
                    reason_off="pad",
                    reason="the kernel <takes> exactly the 32 owned heads",
                    seconds_off=(seconds, 0.9 * seconds),
                    seconds_on=(0.5 * seconds, 0.6 * seconds),
                    identical=True,
                )
            )
    packages, devices = (("python", "3.11"), ("torch", "2.13")), ("CPU, 1 thread(s)",) * 2
    values = {
        "options": data.Options(command="headfit compare --prompt 'a & b.txt'"),
        "environment": data.Environment(
            packages, "abc123", "Linux", "A CPU", 2, 1, devices, "gloo", "2026-01-01T00:00:00Z"
        ),
        "workload": data.Workload(
            model="DeepSeek-V4 <test>",
            layers=4,
            heads=64,
            dtype="float32",
            prompt="README.md",
            prompt_tokens=3072,
            prompt_tokens_all=5000,
            chunks=6,
            new_tokens=24,
            backend="cpu",
            cache_layout="v4",
            policy_off="padded",
            policy_on="native",
            sparse=True,
        ),
        "lanes": tuple(lanes),
        "tokens_off": (1, 2, 3),
        "tokens_on": (1, 2, 3),
        "text_off": "<b>text</b>",
        "text_on": "<b>text</b>",
        "first_difference": None,
        "checked_elements": 123456,
        "wall_seconds": 61.5,
        "forward_seconds_off": 20.0,
        "forward_seconds_on": 12.0,
        "waste": data.waste_of(64),
    }
    values.update(changes)
    return data.Comparison(**values)


def test_records_survive_json():
    made = make(first_difference=data.FirstDifference(1, 2, None, "logits", 0, "token 2"))
    assert data.from_dict(json.loads(json.dumps(data.to_dict(made), allow_nan=False))) == made


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema is 'x', accepted is 'headfit\.compare/1'"):
        data.from_dict({"schema": "x"})


def test_the_slowest_rank_counts():
    lane = make().lanes[0]
    assert (lane.off, lane.on) == (2.0, 1.2)
    assert lane.saved == pytest.approx(0.4)


def test_phase_totals_are_sums_of_one_rank():
    prefill, decode = make().phases()
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.off, prefill.on) == (pytest.approx(17.0), pytest.approx(10.2))
    lanes = make().lanes
    crossed = (
        dataclasses.replace(lanes[0], seconds_off=(1.0, 3.0), seconds_on=(1.0, 1.0)),
        dataclasses.replace(lanes[1], seconds_off=(3.0, 1.0), seconds_on=(1.0, 1.0)),
    )
    assert make(lanes=crossed).phases()[0].off == 4.0  # not 6: no rank waited for both


def broken(lane: int) -> tuple[data.LaneRow, ...]:
    lanes = list(make().lanes)
    lanes[lane] = dataclasses.replace(lanes[lane], identical=False)
    return tuple(lanes)


FIRST = data.FirstDifference(
    3, 40, 1, "lse", 0, "token 40, layer 1, lse on rank 0, heads 5: 1 elements differ, by up to 0.5"
)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"tokens_on": (1, 2, 4)}, 1), ({"lanes": broken(2)}, 1), ({"first_difference": FIRST}, 1)],
)
def test_exit_code(changes, code):
    made = make(**changes)
    assert made.exit_code == code
    assert data.to_dict(made)["verdict"]["exit_code"] == code


def test_waste_is_the_pad_of_each_size():
    points = {point.tp: (point.heads, point.width, point.wasted) for point in data.waste_of(64)}
    assert points == {
        1: (64, 64, 0.0),
        2: (32, 64, 0.5),
        4: (16, 64, 0.75),
        8: (8, 64, 0.875),
        16: (4, 64, 0.9375),
        32: (2, 64, 0.96875),
        64: (1, 64, 0.984375),
    }
    pro = {point.tp: point.width for point in data.waste_of(128)}
    assert pro == {1: 128, 2: 64, 4: 64, 8: 64, 16: 64, 32: 64, 64: 64}


def test_table_has_one_line_a_lane_and_each_reason_once():
    table = data.lane_table(make())
    assert len(table.rows) == 6
    assert all(len(row) == len(table.headers) for row in table.rows)
    assert table.notes == ("the kernel <takes> exactly the 32 owned heads",)
    assert table.rows[0] == (
        "prefill",
        "sliding window",
        "3072",
        "32",
        "64 -> 32",
        "2.00 s",
        "1.20 s",
        "40.0 %",
        "yes",
        "1",
    )
    assert data.lane_table(make(lanes=broken(0))).rows[0][8] == "NO"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (123.4, "123 s"),
        (99.96, "100 s"),
        (1.5, "1.50 s"),
        (0.9478, "948 ms"),
        (0.0123, "12.3 ms"),
        (4.5e-5, "45.0 us"),
        (0.0, "0.0 us"),
    ],
)
def test_duration(seconds, text):
    assert data.duration(seconds) == text


class Reader(html.parser.HTMLParser):
    """Collects what a browser would fetch, ids, and visible text; checks that tags close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "path", "use", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.used: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                (self.used if value.startswith("#") else self.fetched).append(value)
            if name == "id":
                self.ids.append(value)
            self.used += re.findall(r"url\((#[^)]*)\)", value or "")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_well_formed():
    page = report.render(make())
    reader = Reader(page)
    assert reader.open == []
    assert reader.fetched == []
    assert "http" not in page
    assert "@import" not in page
    assert page.count("<svg") == 2
    assert len(reader.ids) == len(set(reader.ids))
    assert {use[1:] for use in reader.used} <= set(reader.ids)


def test_page_shows_the_figures_of_the_table():
    made = make()
    text = " ".join(Reader(report.render(made)).text)
    for row in data.lane_table(made).rows:
        for cell in row:
            assert cell in text
    for _, answer, _ in data.verdicts(made):
        assert answer in text
    for point in made.waste:
        assert f"TP {point.tp}" in text
    assert "headfit compare --prompt 'a & b.txt'" in text
    assert "<b>text</b>" in text  # escaped, hence visible as text
    assert "takes 40.0 % less time" in text
    assert "no bit changes" in text


def test_page_of_a_difference_says_so():
    text = " ".join(
        Reader(report.render(make(lanes=broken(1), first_difference=FIRST, tokens_on=(1, 2, 9), text_on="other"))).text
    )
    for part in ("the results differ", "NO", FIRST.sentence, "other", "different"):
        assert part in text


def test_page_of_one_phase_and_of_no_saving():
    lanes = tuple(dataclasses.replace(lane, seconds_on=lane.seconds_off, width_on=64) for lane in make().lanes[:1])
    assert "no prefill time saved" in report.render(make(lanes=lanes))


def test_same_figures_same_bytes():
    assert report.render(make()) == report.render(make())


def test_file_is_written_whole(tmp_path: Path):
    target = tmp_path / "new" / "folder" / "index.html"
    report.write_atomically(target, "one \u00d7")
    report.write_atomically(target, "two")
    assert target.read_text(encoding="utf-8") == "two"
    assert [path.name for path in target.parent.iterdir()] == ["index.html"]


def test_a_long_name_and_odd_text_are_written(tmp_path: Path):
    target = tmp_path / ("x" * 250 + ".json")
    report.check_writable(target)
    report.write_atomically(target, "\udcff")
    assert target.read_text() == r"\udcff"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path):
    read, write = os.pipe()
    target = Path(f"/dev/fd/{write}")
    if not target.exists():
        pytest.skip("no /dev/fd here")
    report.check_writable(target)
    report.write_atomically(target, "text")
    os.close(write)
    with open(read) as file:
        assert file.read() == "text"


def test_check_writable_leaves_nothing(tmp_path: Path):
    report.check_writable(tmp_path / "a" / "b" / "c.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("group", "backend", "said"), [("NCCL", "triton", True), ("gloo", "cpu", False)])
def test_text_says_that_gpu_times_hold_the_launch(group: str, backend: str, said: bool):
    made = make()
    made = dataclasses.replace(
        made,
        environment=dataclasses.replace(made.environment, group=group),
        workload=dataclasses.replace(made.workload, backend=backend),
    )
    words = "holds the launch from Python"
    assert (words in data.timing_note(made)) is said
    assert (words in report.render(made)) is said


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "index.html"
    report.write_atomically(target, "old")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        report.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"--report needs jinja2: .*pip install 'headfit\[compare\]'"):
        report.check_installed()


def test_reading_records_needs_no_torch():
    code = "import sys, headfit.report, headfit.cli; print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
