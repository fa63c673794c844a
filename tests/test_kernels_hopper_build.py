"""Compiling a kernel without a GPU, and the cache: hits, misses, damage, other versions, no compiler, processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headfit.kernels import hopper_build as build
from headfit.kernels.hopper_build import Spec

SMALL = Spec("small threads=64", "hopper_kernels", "small", (("threads", 64),))
BROKEN = Spec("broken", "hopper_kernels", "broken")
needs_dsl = pytest.mark.skipif(build.why_no_compiler() is not None, reason="the DSL is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path))
    build._binary.cache_clear()
    yield tmp_path / "hopper"
    build._binary.cache_clear()


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Names of what was compiled; the compiler is a stand-in."""
    names: list[str] = []

    def compile_spec(spec):
        names.append(spec.name)
        return build.Binary(spec.name, "symbol", 64, 0, 32, 0, b"image\n of " + spec.name.encode())

    monkeypatch.setattr(build, "compile_spec", compile_spec)
    monkeypatch.setattr(build, "dsl_version", lambda: "4.8.1")
    return names


def again(spec: Spec = SMALL) -> build.Binary:
    """As a new process would get it."""
    build._binary.cache_clear()
    return build.binary(spec)


@needs_dsl
def test_compiles_without_a_gpu_and_twice_the_same() -> None:
    made = build.compile_spec(SMALL)
    assert made.image.startswith(b"\x7fELF")
    assert (made.name, made.threads, made.shared, made.stack) == (SMALL.name, 64, 2048, 0)
    assert "write_some" in made.symbol
    assert 0 < made.registers < 64
    assert build.compile_spec(SMALL) == made
    other = build.compile_spec(Spec("small threads=128", "hopper_kernels", "small", (("threads", 128),)))
    assert (other.threads, other.image == made.image) == (128, False)


@needs_dsl
def test_parameters_that_are_laid_out_otherwise_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(build.hopper_abi, "PLACES", ((0, 8),))
    with pytest.raises(RuntimeError, match="not laid out as hopper_abi writes them"):
        build.compile_spec(SMALL)


PROGRAM = """
import sys
from headfit.kernels import hopper_build as build
made = build.binary(build.Spec("small threads=64", "hopper_kernels", "small", (("threads", 64),)))
print(made.symbol, len(made.image), "cutlass" in sys.modules)
"""


@needs_dsl
def test_processes_that_start_together_then_one_that_needs_no_compiler(cache) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-c", PROGRAM]
    together = [subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=300)[0] for process in together}
    assert [process.returncode for process in together] == [0, 0, 0]
    assert len({answer.rpartition(" ")[0] for answer in answers}) == 1
    assert [path.suffix for path in cache.iterdir()] == [".bin"]
    later = subprocess.run(start, env=environment, capture_output=True, text=True, check=True)
    assert later.stdout.split()[-1] == "False"  # the DSL was not imported
    assert later.stdout.rpartition(" ")[0] in {answer.rpartition(" ")[0] for answer in answers}


def test_a_binary_is_compiled_once_and_then_read(cache, compiled) -> None:
    first = build.binary(SMALL)
    assert build.binary(SMALL) is first
    assert again() == first
    assert compiled == [SMALL.name]
    assert build.in_cache(SMALL)
    assert not build.in_cache(BROKEN)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:-1] + b"?",
        lambda data: data.partition(b"\n")[2],
        lambda data: b"{}\n" + data.partition(b"\n")[2],
        lambda data: data.replace(b'"registers"', b'"registrars"'),
    ],
    ids=["empty", "cut", "flipped", "no-facts", "no-digest", "other-facts"],
)
def test_a_damaged_file_is_compiled_anew(damage, cache, compiled) -> None:
    first = build.binary(SMALL)
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert not build.in_cache(SMALL)
    assert again() == first
    assert compiled == [SMALL.name] * 2
    assert list(cache.iterdir()) == [path]
    assert build.in_cache(SMALL)


def test_another_source_version_or_option_is_another_binary(cache, compiled, monkeypatch) -> None:
    build.binary(SMALL)
    monkeypatch.setattr(build, "_sources", lambda: "other sources")
    again()
    monkeypatch.setattr(build, "dsl_version", lambda: "4.8.2")
    again()
    again(Spec(SMALL.name, SMALL.module, SMALL.function, (("threads", 128),)))
    assert compiled == [SMALL.name] * 4
    assert len(list(cache.iterdir())) == 4


def test_sources_cover_every_file_that_is_traced() -> None:
    here = Path(build.__file__).parent
    covered = {path.name for pattern in build.SOURCES for path in here.glob(pattern)}
    traced = {path.name for path in here.glob("*.py") if "import cutlass" in path.read_text(encoding="utf-8")}
    assert {"hopper_params.py", "hopper_abi.py", "hopper_build.py"} <= covered
    assert traced <= covered


@pytest.mark.parametrize("version", [None, "4.3.0"])
def test_without_a_compiler_a_filled_cache_is_enough(version, cache, compiled, monkeypatch) -> None:
    first = build.binary(SMALL)
    monkeypatch.setattr(build, "dsl_version", lambda: version)
    assert build.in_cache(SMALL)
    assert again() == first
    assert compiled == [SMALL.name]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "nvidia-cutlass-dsl is not installed"),
        ("4.3.0", "nvidia-cutlass-dsl 4.3.0 is installed, 4.8.1 or newer is needed"),
        ("unknown", "nvidia-cutlass-dsl has the version 'unknown'"),
    ],
)
def test_no_compiler_is_said_with_the_remedy(version, says, cache, compiled, monkeypatch) -> None:
    monkeypatch.setattr(build, "dsl_version", lambda: version)
    with pytest.raises(build.CannotBuildError) as error:
        build.binary(SMALL)
    assert says in str(error.value)
    assert str(error.value).endswith("pip install 'headfit[hopper]'")
    assert str(cache) in str(error.value)
    assert compiled == []


@needs_dsl
def test_a_kernel_that_does_not_compile_is_one_readable_line(cache) -> None:
    with pytest.raises(build.CannotBuildError, match=r"^broken: nvidia-cutlass-dsl \S+ fails: this kernel is broken$"):
        build.binary(BROKEN)
    assert not cache.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, compiled, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level("INFO", "headfit"):
        assert again().name == SMALL.name
    assert "compiled small threads=64 in" in caplog.text
    assert "not kept: " in caplog.text


def test_a_write_that_fails_leaves_nothing(cache, compiled, monkeypatch, caplog) -> None:
    def full(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(build.os, "replace", full)
    with caplog.at_level("INFO", "headfit"):
        again()
    assert "not kept: No space left on device" in caplog.text
    assert list(cache.iterdir()) == []


def test_where_binaries_are_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("HEADFIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.folder() == tmp_path / ".cache" / "headfit" / "hopper"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.folder() == tmp_path / "xdg" / "headfit" / "hopper"
    monkeypatch.setenv("HEADFIT_CACHE_DIR", "~/kept")
    assert build.folder() == tmp_path / "kept" / "hopper"
    for bad in ("relative/folder", __file__):
        monkeypatch.setenv("HEADFIT_CACHE_DIR", bad)
        with pytest.raises(ValueError, match=r"HEADFIT_CACHE_DIR: got .* accepted are absolute paths of folders"):
            build.folder()
