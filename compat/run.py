"""``make compat``: one throw-away environment per engine release, our plug-in in it, the engine's real classes, a page.

Builds below ``.cache/compat`` (ignored by git, about 3 GB): the release's wheel and the Python packages it imports,
without dependencies; torch and triton come from the project's own environment. Then runs ``check_sglang.py`` and
``check_vllm.py`` in each and writes ``docs/compat.md`` from what they print.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "compat"
PAGE = ROOT / "docs" / "compat.md"
# Packages that the engines import, found by importing: one missing name after the other.
SHARED = (ROOT / "compat" / "packages.txt").read_text().split()
VLLM = (ROOT / "compat" / "packages_vllm.txt").read_text().split()


@dataclass(frozen=True)
class Release:
    """An engine release, with the packages it pins whose Python it runs here."""

    engine: str
    version: str
    transformers: str
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its environment."""
        return f"{self.engine}-{self.version}"

    @property
    def site(self) -> Path:
        """Its site-packages."""
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return CACHE / self.name / "lib" / python / "site-packages"


RELEASES = (
    Release("sglang", "0.5.16", "5.12.1", ("flashinfer-python==0.6.14",)),
    Release("sglang", "0.5.18", "5.12.1", ("flashinfer-python==0.6.17",)),
    Release("sglang", "0.5.20", "5.12.1", ("flashinfer-python==0.6.18",)),
    Release("sglang", "0.5.23", "5.19.0", ("flashinfer-python==0.7.2", "sgl-flash-mla==1.0.0")),
    Release("vllm", "0.33.0", "5.19.0"),
)


def pip(target: Path, *packages: str, upgrade: bool = False) -> None:
    """Install packages without their dependencies into a folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *packages]
    subprocess.run([*command, *(["--upgrade"] if upgrade else [])], check=True)


def once(folder: Path, stamp: str, *packages: str) -> Path:
    """Install into ``folder`` unless exactly this was installed there before."""
    mark = folder / ".installed"
    if not mark.is_file() or mark.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pip(folder, *packages)
        mark.write_text(stamp)
    return folder


def build(release: Release, headfit: Path) -> Path:
    """The environment of a release; returns its Python."""
    python = CACHE / release.name / "bin" / "python"
    stamp = " ".join((release.version, *release.pins))
    mark = release.site / ".installed"
    if not mark.is_file() or mark.read_text() != stamp:
        shutil.rmtree(CACHE / release.name, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(CACHE / release.name)], check=True)
        pip(release.site, f"{release.engine}=={release.version}", *release.pins)
        mark.write_text(stamp)
    hub = ("huggingface-hub<2.0", "tokenizers==0.22.2") if release.transformers.startswith("5.12") else ()
    later = (
        once(CACHE / f"transformers-{release.transformers}", release.transformers,
             f"transformers=={release.transformers}", *hub),
        *([once(CACHE / "shared-vllm", " ".join(VLLM), *VLLM)] if release.engine == "vllm" else []),
        once(CACHE / "shared", " ".join(SHARED), *SHARED),
        ROOT / "compat" / "stubs",
        Path(sysconfig.get_paths()["purelib"]),  # torch, triton and what headfit needs
    )  # fmt: skip
    (release.site / "headfit_compat.pth").write_text("".join(f"{path}\n" for path in later))
    pip(release.site, str(headfit), upgrade=True)
    return python


def wheel() -> Path:
    """headfit as a user installs it: `pip install headfit` is the whole installation."""
    out = CACHE / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT)], check=True)
    return next(out.glob("*.whl"))


def check(release: Release, python: Path) -> dict[str, Any]:
    """Run the checks of a release; its result."""
    script = ROOT / "compat" / f"check_{release.engine}.py"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HEADFIT_", "SGLANG_", "PYTHONPATH"))}
    done = subprocess.run([str(python), str(script)], env=clean, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{release.name}: {script.name} failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return answer


def page(results: dict[str, dict[str, Any]]) -> str:
    """The committed table of results."""
    out = [
        "# Tested engine releases",
        "",
        "Written by `make compat`, which loads the plug-in through each engine's own loader and runs the engine's",
        "real classes on a CPU: real forwards, real metadata, real FlashInfer tables. Stood in for: the GPU, compiled",
        "kernels, the projections around attention. In the wide table kernels echo query and sink, so that a wrong",
        "head, row or sink shows; the checks below it run attention in full. No GPU kernel runs here, and nothing is",
        "timed.",
        "",
        "Cells read `kernel width`: which kernel was launched at how many query heads, for 64 heads (V4-Flash). One",
        "value where the plug-in left the engine as it was; `a -> b` where it changed something. *default* is an",
        "installation without settings, on a GPU for which nothing was measured; elsewhere the measured table decides",
        "(see the pages of [SGLang](engines/sglang.md) and [vLLM](engines/vllm.md)).",
    ]
    for name, result in results.items():
        out += ["", f"## {name.replace('-', ' ')}", ""]
        out += _sglang(result) if name.startswith("sglang") else _vllm(result)
        wrong = [cell for cell in result["cells"] if not cell["bits"] or not cell.get("sink", True)]
        out += [
            "",
            f"{len(result['cells'])} calls: output of the owned heads bit-identical with the plug-in off and on in "
            f"{len(result['cells']) - len(wrong)}.",
            "",
            *(f"- {text}: {_word(value)}" for text, value in result["checks"].items()),
            "",
            "```",
            *result["lines"],
            "```",
        ]
    return "\n".join(out) + "\n"


def _word(value: Any) -> str:
    return {True: "yes", False: "**NO**"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _sglang(result: dict[str, Any]) -> list[str]:
    out = [f"FlashInfer {result['flashinfer']} (pinned by this release).", ""]
    columns = [(chip, tp) for chip in ("SM90", "SM100", "SM120") for tp in (1, 2, 4, 8)]
    out += ["| policy | mode | rows | " + " | ".join(f"{chip} TP{tp}" for chip, tp in columns) + " |"]
    out += ["|---" * (3 + len(columns)) + "|"]
    table: dict[tuple[str, str], dict[int, list[str]]] = {}
    for cell in result["cells"]:
        rows = table.setdefault((cell["policy"], cell["mode"]), {})
        rows.setdefault(cell["rows"], []).append(_arrow(cell["engine"], cell["ours"]))
    grouped: dict[tuple[str, tuple[str, ...]], list[tuple[str, int]]] = {}
    for (policy, mode), by_rows in table.items():
        for count, values in by_rows.items():
            grouped.setdefault((policy, tuple(values)), []).append((mode, count))
    for (policy, values), where in grouped.items():
        modes = _sets(where)
        out += [f"| {policy} | {modes} | " + " | ".join(values) + " |"]
    return out


def _sets(where: Iterable[tuple[str, int]]) -> str:
    by_rows: dict[str, list[int]] = {}
    for mode, count in where:
        by_rows.setdefault(mode.lower(), []).append(count)
    same: dict[tuple[int, ...], list[str]] = {}
    for mode, counts in by_rows.items():
        same.setdefault(tuple(counts), []).append(mode)
    modes = "; ".join(", ".join(names) for names in same.values())
    rows = "; ".join(", ".join(map(str, counts)) for counts in same)
    return f"{modes} | {rows}"


def _arrow(engine: list[Any], ours: list[Any]) -> str:
    before, after = f"{engine[0]} {engine[1]}", f"{ours[0]} {ours[1]}"
    return before if before == after else f"{before} -> **{after}**"


def _vllm(result: dict[str, Any]) -> list[str]:
    out = [
        "| policy | phase | layers compressed by | chip | " + " | ".join(f"TP{tp}" for tp in (1, 2, 4, 8, 16)) + " |"
    ]
    out += ["|---" * 9 + "|"]
    rows: dict[tuple[Any, ...], dict[int, str]] = {}
    for cell in result["cells"]:
        key = (cell["policy"], cell["phase"], cell["ratio"], cell["chip"])
        text = _arrow(["flashmla", cell["engine"]], [cell["kernel"], cell["width"]])
        rows.setdefault(key, {})[cell["tp"]] = f"{text} (buffers {cell['buffer']})"
    for key, cells in rows.items():
        values = " | ".join(cells.get(tp, "vLLM's own") for tp in (1, 2, 4, 8, 16))
        out += ["| " + " | ".join(map(str, key)) + f" | {values} |"]
    return out


def main() -> None:
    """Build, check, write the page; fails if a check does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="one release, such as sglang-0.5.20; the page is not written")
    only = parser.parse_args().only
    headfit, results, failed = wheel(), {}, []
    for release in RELEASES:
        if only in (None, release.name):
            results[release.name] = result = check(release, build(release, headfit))
            bad = [text for text, value in result["checks"].items() if value is False]
            bad += [str(c) for c in result["cells"] if not c["bits"] or not c.get("sink", True)]
            print(f"{release.name}: {len(result['cells'])} calls, {len(bad)} wrong")
            failed += [f"{release.name}: {text}" for text in bad]
    if only is None:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(results), encoding="utf-8")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
