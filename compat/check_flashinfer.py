"""Real FlashInfer and FlashMLA releases against ``src/headfit/recorded.json``, and the page of what they accept.

Fetches wheels without dependencies into ``.cache/wheels``, unpacks what is read, and asks each release through
`headfit.probes` and `headfit.flashmla_facts`, as on a user's machine: FlashInfer's module is imported (in a process of
its own, on a CPU), FlashMLA's libraries are read. Engines: which releases they pin and which of the known width rules
stands in their model file. Fails where a release says something else than what is recorded; ``--write`` records it and
writes ``docs/compat-flashinfer.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headfit import flashinfer_facts, flashmla_facts, probes, recorded
from headfit.capability import Call, Capability, words
from headfit.width import NoLegalWidthError, Policy, plan_width

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
PAGE = ROOT / "docs" / "compat-flashinfer.md"
FLASHINFER = (
    "0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post4", "0.6.17", "0.6.18", "0.6.18.post1",
    "0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4",
)  # fmt: skip
WITHOUT_KERNELS = "0.6.13"
# (family, distribution, version, library within the wheel)
FLASHMLA = (
    ("flashmla_vllm", "vllm", "0.33.0", r"vllm/_flashmla_C\..*so"),
    ("flashmla_sgl", "sgl-flash-mla", "1.0.0", r"flash_mla/_C_legacy\..*so"),
    ("flashmla_standalone", "tokenspeed-flashmla", "1.0.0.post20260924", r"flash_mla/cuda\..*so"),
)
SGLANG = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
VLLM = ("0.33.0",)
# What FlashInfer imports at the top, beside torch and numpy.
NEEDS = (
    "apache-tvm-ffi==0.1.15.post2", "einops", "nvidia-ml-py", "requests", "urllib3", "idna", "certifi",
    "charset-normalizer", "tqdm", "click", "packaging", "tabulate", "ninja", "filelock", "typing-extensions",
)  # fmt: skip
RULES = {
    "kernel_num_heads": ("def _kernel_num_heads(self, num_tokens", "flashinfer_dsv4_decode_supports_num_heads"),
    "inline": ("padded_num_heads = 64 if self.n_local_heads <= 64 else self.n_heads",),
}


def main() -> int:
    """Check every release; 0 if all say what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what the releases say, and write the page")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.describe:
        return describe()
    fresh = collect()
    page = render(fresh)
    if options.write:
        recorded.PATH.write_text(dumps(fresh), encoding="utf-8")
        PAGE.write_text(page, encoding="utf-8")
        print(f"wrote {recorded.PATH.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
        return 0
    wrong = differences(json.loads(recorded.PATH.read_text(encoding="utf-8")), fresh)
    if PAGE.read_text(encoding="utf-8") != page:
        wrong.append(f"{PAGE.relative_to(ROOT)} is not what these releases give")
    print("\n".join(wrong) or f"{len(FLASHINFER)} FlashInfer releases, {len(FLASHMLA)} FlashMLA copies: as recorded")
    return 1 if wrong else 0


def collect() -> dict[str, Any]:
    """What all releases say, in the form of ``recorded.json``."""
    deps = CACHE / "flashinfer" / "deps"
    if not deps.is_dir():
        pip("install", "--no-deps", "--target", str(deps), *NEEDS)
    fresh: dict[str, Any] = {"schema": 1, recorded.FLASHINFER: {}}
    for version in FLASHINFER:
        answer = ask(version, deps)
        if answer["problems"]:
            raise SystemExit(f"flashinfer-python {version}: {'; '.join(answer['problems'])}")
        fresh[recorded.FLASHINFER][version] = answer["facts"]
        print(f"flashinfer-python {version}: read", flush=True)
    if not ask(WITHOUT_KERNELS, deps)["problems"]:
        raise SystemExit(
            f"flashinfer-python {WITHOUT_KERNELS} has no SM120 sparse MLA, and yet no problem was reported"
        )
    for family, distribution, version, pattern in FLASHMLA:
        library = unpack(wheel(distribution, version), CACHE / "flashmla" / distribution, rf"{pattern}|.*interface\.py")
        chips = {}
        for cc in ((9, 0), (10, 0)):
            found = flashmla_facts.capability(family, library(pattern), cc, version)
            if found.problems:
                raise SystemExit(f"{distribution} {version}: {'; '.join(found.problems)}")
            chips[f"sm{cc[0]}0"] = recorded.encode(found)
        fresh[family] = {version: chips}
        print(f"{distribution} {version}: read", flush=True)
    fresh["sglang"] = {version: sglang(version) for version in SGLANG}
    fresh["vllm"] = {version: vllm(version) for version in VLLM}
    return fresh


# ------------------------------------------------------------------------------------------------------ the releases


def pip(*arguments: str) -> None:
    """Run pip of this environment, quietly."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def wheel(distribution: str, version: str) -> Path:
    """The wheel of a release, fetched without dependencies unless it is there."""
    folder = CACHE / "wheels"
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "_2_28", "_2_34")]
        where = ["--only-binary=:all:", "--python-version=3.11", *platforms, "-d", str(folder)]
        pip("download", "--no-deps", *where, f"{distribution}=={version}")
    return next(folder.glob(pattern))


def unpack(archive: Path, folder: Path, pattern: str) -> Any:
    """Unpack the files whose whole names match; returns a function that finds one of them."""
    with zipfile.ZipFile(archive) as content:
        for name in content.namelist():
            if re.fullmatch(pattern, name) and not (folder / name).is_file():
                content.extract(name, folder)

    def find(wanted: str) -> Path:
        return next(p for p in sorted(folder.rglob("*")) if re.fullmatch(wanted, p.relative_to(folder).as_posix()))

    return find


def ask(version: str, deps: Path) -> dict[str, Any]:
    """What `probes` says where this FlashInfer is installed: a process of its own."""
    folder = CACHE / "flashinfer" / version / "x"  # as tests/test_kernels_flashinfer.py looks for it
    kept = r"flashinfer/.*\.py|flashinfer/data/.*sparse_mla_sm120.*|[^/]*\.dist-info/METADATA"
    unpack(wheel("flashinfer-python", version), folder, kept)
    path = os.pathsep.join((str(folder), str(deps)))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "FLASHINFER_LOGLEVEL": "0"}
    command = [sys.executable, __file__, "--describe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"flashinfer-python {version}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if answer["version"] != version:
        raise SystemExit(f"flashinfer-python {version}: the process found {answer['version']}")
    return answer


def describe() -> int:
    """In the process of one release: print what is read from the FlashInfer that is installed."""
    # Where CuTe DSL is installed FlashInfer asks for the GPU as it is imported, and this machine has none.
    sys.modules["cutlass"] = None  # type: ignore[assignment]
    found = probes.flashinfer_capability((12, 0))
    if found is None:
        raise SystemExit("no flashinfer on the path")
    if not found.problems:
        check_adapter(found)
    facts = recorded.encode(found)
    print(json.dumps({"version": found.version, "problems": found.problems, "facts": facts}))
    return 0


def check_adapter(found: Capability) -> None:
    """The backend that calls FlashInfer has to read the same facts."""
    import importlib

    from headfit.kernels import flashinfer

    adapter = flashinfer.describe(importlib.import_module(flashinfer_facts.MODULE))
    ours = (found.row_split, found.prefill_heads, found.decode_heads, found.page_sizes is None)
    theirs = (adapter.split, adapter.prefill.heads, adapter.decode.heads, adapter.any_page)
    if ours != theirs:
        raise SystemExit(f"the probe reads {ours}, the backend {theirs}")


def pinned(archive: zipfile.ZipFile, distribution: str) -> str | None:
    """The version that a wheel requires exactly, or None."""
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    spelt = distribution.replace("-", "[-_]")
    found = re.search(rf"^Requires-Dist: {spelt}(?:\[[\w,]+\])?==([\w.]+)", text, re.MULTILINE)
    return found[1] if found else None


def sglang(version: str) -> dict[str, Any]:
    """The width rule and the pins of an SGLang release."""
    with zipfile.ZipFile(wheel("sglang", version)) as archive:
        source = archive.read("sglang/srt/models/deepseek_v4.py").decode()
        rule = next((name for name, marks in RULES.items() if all(mark in source for mark in marks)), "unknown")
        copy = pinned(archive, "sgl-flash-mla")
        flashmla = None if copy is None else ["flashmla_sgl", copy]
        return {"rule": rule, "flashinfer": pinned(archive, "flashinfer-python"), "flashmla": flashmla}


def vllm(version: str) -> dict[str, Any]:
    """The same for vLLM, whose FlashMLA is its own."""
    with zipfile.ZipFile(wheel("vllm", version)) as archive:
        folder = "vllm/models/deepseek_v4/nvidia/"
        flashmla, flashinfer, model = (
            archive.read(f"{folder}{name}.py").decode() for name in ("flashmla", "flashinfer_sparse", "model")
        )
        known = (
            "return 64 if num_heads <= 64 else 128" in flashmla
            and "_SPARSE_MLA_SUPPORTED_Q_HEADS = (8, 16, 32, 64, 128)" in flashinfer
            and "device_capability.major == 12:\n        return DeepseekV4FlashInferSM120Attention" in model
        )
        rule = "padded_num_q_heads" if known else "unknown"
        pin = pinned(archive, "flashinfer-python")
        return {"rule": rule, "flashinfer": pin, "flashmla": ["flashmla_vllm", version]}


# ----------------------------------------------------------------------------------------------- record, compare, page


def dumps(data: Mapping[str, Any]) -> str:
    """JSON with short lists on one line."""
    text = json.dumps(data, indent=1)
    return (
        re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n"
    )


def differences(old: Any, new: Any, where: str = "recorded.json") -> list[str]:
    """Every place where the two disagree, as a line."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{where} {key}")]
    return [] if old == new else [f"{where}: recorded {old!r}, the release says {new!r}"]


def width(found: Capability, rows: int, heads: int, policy: Policy) -> str:
    """The width of a V4-Flash call, as a cell."""
    try:
        return str(plan_width(Call(rows, heads, 64, "extend" if rows > 64 else "decode"), found, policy).width)
    except NoLegalWidthError:
        return "none"


def topk_words(topk: Any) -> str:
    """An index-width set as a cell."""
    return "any" if topk is None else words(topk)


def render(data: Mapping[str, Any]) -> str:
    """The page, from the facts alone."""
    lines = [
        "# What FlashInfer and FlashMLA releases accept",
        "",
        "Written by `make compat-flashinfer-write` from the real wheels; `make compat-flashinfer` fails where one of",
        "them says something else. Nothing here is taken from a version number: each row was read from that release's",
        "own tables, functions and CUDA source, as `headfit.probe()` reads an installed one.",
        "",
        "## FlashInfer's SM120 sparse MLA, 584-byte pages",
        "",
        "| release | rows that decode | decode heads | decode topk | prefill heads | prefill topk"
        " | first topk of two caches | pages, second cache |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = {v: recorded.decode(f, recorded.FLASHINFER, (12, 0), v) for v, f in data[recorded.FLASHINFER].items()}
    for version, c in found.items():
        dual = topk_words(c.topk("prefill", two_caches=True)) if c.dual_prefill_topk else "same"
        pages = "any, any" if c.page_sizes is None else f"{words(c.page_sizes)}; {words(c.extra_page_sizes or ())}"
        sides = (words(c.decode_heads), topk_words(c.decode_topk), words(c.prefill_heads), topk_words(c.prefill_topk))
        lines.append(f"| {version} | up to {c.row_split} | {' | '.join(sides)} | {dual} | {pages} |")
    lines += [
        "",
        f"{WITHOUT_KERNELS} has no such kernels: every pad is kept.",
        "",
        "Widths of a V4-Flash layer that follow: 4096 rows by the published gate (`sm12x-prefill`) and natively, 1 row",
        "natively, for 32, 16, 8 and 4 owned heads (TP 2, 4, 8, 16).",
        "",
        "| release | gate, 4096 rows | native, 4096 rows | native, 1 row |",
        "|---|---|---|---|",
    ]
    gate, native = Policy.sm12x_prefill(), Policy.native()
    for version, c in found.items():
        cells = [
            ", ".join(width(c, rows, heads, policy) for heads in (32, 16, 8, 4))
            for rows, policy in ((4096, gate), (4096, native), (1, native))
        ]
        lines.append(f"| {version} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_flashmla_lines(data), *_engine_lines(data)]) + "\n"


def _flashmla_lines(data: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        "## FlashMLA",
        "",
        "| copy | GPU | prefill heads | decode heads | prefill topk | decode topk | layouts |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, distribution, version, _ in FLASHMLA:
        for chip, facts in data[family][version].items():
            c = recorded.decode(facts, family, (int(chip[2:-1]), 0), version)
            topk = f"{topk_words(c.prefill_topk)} | {topk_words(c.decode_topk)}"
            heads = f"{words(c.prefill_heads)} | {words(c.decode_heads)}"
            lines.append(f"| {distribution} {version} | {chip} | {heads} | {topk} | {', '.join(c.layouts)} |")
    return [
        *lines,
        "",
        "Page sizes are run-time values of its sparse kernels. The topk steps stand in FlashMLA's source.",
    ]


def _engine_lines(data: Mapping[str, Any]) -> list[str]:
    lines = ["", "## Engines", "", "| engine | width rule | FlashInfer | FlashMLA |", "|---|---|---|---|"]
    for engine in ("sglang", "vllm"):
        for version, entry in data[engine].items():
            copy = "not read" if entry["flashmla"] is None else " ".join(entry["flashmla"])
            lines.append(f"| {engine} {version} | `{entry['rule']}` | {entry['flashinfer']} | {copy} |")
    return [
        *lines,
        "",
        "`inline`: 64, or all heads above that, prefill and decode, on every GPU. `kernel_num_heads`: the owned heads",
        "on SM12x (prefill always, decode where FlashInfer lists them), else the same pad. `padded_num_q_heads`: 64 or",
        '128 on SM90 and SM100, the next of 8, 16, 32, 64, 128 on SM12x. FlashMLA "not read": SGLang then uses that of',
        "sglang-kernel, which is from before 2026 (no sink, no lengths) and is refused.",
    ]


if __name__ == "__main__":
    sys.exit(main())
