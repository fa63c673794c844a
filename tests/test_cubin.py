"""The driver's side of a launch against a stand-in for libcuda, and the facts of a cubin against cuobjdump."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import threading

import pytest

from headfit.kernels import cubin, cubin_info
from headfit.kernels.hopper_build import Binary

BINARY = Binary("native heads=8", "symbol_of_it", 256, 70000, 64, 0, b"\x7fELF image")


class Function:
    """One function of the stand-in: records what came, answers what it is told to."""

    def __init__(self, name, library):
        self.name, self.library = name, library
        self.argtypes, self.restype = None, None

    def __call__(self, *arguments):
        return self.library.answer(self.name, arguments)


def attributes_of(config):
    """Id and x, y, z of each."""
    return [(config.attributes[i].id, tuple(config.attributes[i].value)) for i in range(config.count)]


class FakeLibrary:
    """libcuda with one module and one function. ``codes``: name -> codes of its next calls, 0 once they are used up."""

    def __init__(self, **codes):
        self.codes = {name: list(values) for name, values in codes.items()}
        self.calls: list[str] = []
        self.launched: list[dict] = []
        self.mode = 0
        self.slots = 100  # CTAs in clusters

    def __getattr__(self, name):
        if not name.startswith("cu") or name in self.__dict__.get("lacks", ()):
            raise AttributeError(f"undefined symbol: {name}")
        return Function(name, self)

    def answer(self, name, arguments):
        self.calls.append(name)
        code = self.codes[name].pop(0) if self.codes.get(name) else 0
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_%d" % arguments[0]
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"words of the driver"
        if name == "cuModuleGetFunction":
            arguments[0]._obj.value = 77
            self.symbol = arguments[2]
        if name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            arguments[0]._obj.value = 3
        if name == "cuOccupancyMaxActiveClusters" and code == 0:
            size = next(value[1] for number, value in attributes_of(arguments[2]) if number == 4)
            arguments[0]._obj.value = self.slots // size
            self.calls[-1] += f" {size}"
        if name == "cuThreadExchangeStreamCaptureMode":
            self.mode, arguments[0]._obj.value = arguments[0]._obj.value, self.mode
        if name == "cuModuleLoadData":
            self.mode_at_load = self.mode
        if name == "cuLaunchKernelEx" and code == 0:
            config = arguments[0]
            self.launched.append(
                {
                    "grid": (config.grid_x, config.grid_y, config.grid_z),
                    "block": (config.block_x, config.block_y, config.block_z),
                    "shared": config.shared, "stream": config.stream, "attributes": attributes_of(config),
                    "function": arguments[1].value, "parameters": arguments[2],
                }
            )  # fmt: skip
        if name == "cuFuncSetAttribute":
            self.calls[-1] += f" {arguments[1]}={arguments[2]}"
        return code


def test_a_kernel_is_loaded_and_launched() -> None:
    library = FakeLibrary()
    made = cubin.Kernel(cubin.Driver(library), BINARY, 0)
    assert (library.symbol, made.ctas_per_sm) == (b"symbol_of_it", 3)
    assert "cuFuncSetAttribute 8=70000" in library.calls  # bytes of dynamic shared memory
    assert "cuFuncSetAttribute 9=100" in library.calls  # all of the carveout
    parameters = (ctypes.c_void_p * 2)(1, 2)
    made.launch((12, 5), 0xABC, parameters)
    made.launch((7, 1), 0xABC, parameters, early=True)
    plain, early = library.launched
    assert plain == {
        "grid": (12, 5, 1), "block": (256, 1, 1), "shared": 70000, "stream": 0xABC, "attributes": [], "function": 77,
        "parameters": parameters,
    }  # fmt: skip
    assert (early["grid"], early["attributes"]) == ((7, 1, 1), [(6, (1, 0, 0))])
    assert not any("Synchronize" in name for name in library.calls)


def test_clusters_are_an_attribute_of_the_launch() -> None:
    library = FakeLibrary()
    made = cubin.Kernel(cubin.Driver(library), BINARY, 0)
    made.launch((6, 10), 0xABC, None, cluster=10)
    made.launch((6, 10), 0xABC, None, early=True, cluster=5)
    made.launch((6, 1), 0xABC, None, cluster=1)
    assert [one["grid"] for one in library.launched] == [(6, 10, 1), (6, 10, 1), (6, 1, 1)]
    along_y, balanced, early = (4, (1, 10, 1)), (5, (2, 0, 0)), (6, (1, 0, 0))
    assert [one["attributes"] for one in library.launched] == [
        [along_y, balanced], [early, (4, (1, 5, 1)), balanced], [],
    ]  # fmt: skip
    library = FakeLibrary(cuLaunchKernelEx=[912])
    made = cubin.Kernel(cubin.Driver(library), BINARY, 0)
    with pytest.raises(cubin.DriverError, match=r"grid \(6, 10\), clusters of 10: CUDA_ERROR_912"):
        made.launch((6, 10), 0, None, cluster=10)


def test_the_driver_is_asked_once_how_many_clusters_a_device_holds() -> None:
    library = FakeLibrary()
    made = cubin.Kernel(cubin.Driver(library), BINARY, 0)
    assert [made.clusters(size) for size in (4, 10, 16, 4, 10)] == [25, 10, 6, 25, 10]
    asked = [call for call in library.calls if "Clusters" in call or "14=" in call]
    # more CTAs than every device allows have to be allowed first
    assert asked == [
        "cuOccupancyMaxActiveClusters 4", "cuFuncSetAttribute 14=1", "cuOccupancyMaxActiveClusters 10",
        "cuFuncSetAttribute 14=1", "cuOccupancyMaxActiveClusters 16",
    ]  # fmt: skip


@pytest.mark.parametrize("codes", [{"cuOccupancyMaxActiveClusters": [912]}, {"cuFuncSetAttribute": [0, 0, 1]}])
def test_a_device_that_refuses_a_cluster_holds_none_and_is_asked_again(codes) -> None:
    made = cubin.Kernel(cubin.Driver(FakeLibrary(**codes)), BINARY, 0)
    assert [made.clusters(10), made.clusters(10)] == [0, 10]
    assert made.clusters(2) == 50


def test_a_thread_without_a_context_may_ask_for_clusters() -> None:
    library = FakeLibrary(cuOccupancyMaxActiveClusters=[201])
    made = cubin.Kernel(cubin.Driver(library), BINARY, 1)
    assert made.clusters(4) == 25
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_loading_does_not_disturb_a_graph_under_capture() -> None:
    library = FakeLibrary()
    cubin.Kernel(cubin.Driver(library), BINARY, 0)
    assert (library.mode_at_load, library.mode) == (cubin.RELAXED, 0)
    library = FakeLibrary(cuModuleLoadData=[209])
    with pytest.raises(cubin.DriverError):
        cubin.Kernel(cubin.Driver(library), BINARY, 0)
    assert library.mode == 0


def test_errors_have_the_name_that_the_driver_gives_them() -> None:
    library = FakeLibrary(cuModuleLoadData=[209])
    text = r"native heads=8: cannot be loaded: CUDA_ERROR_209: words of the driver"
    with pytest.raises(cubin.DriverError, match=text):
        cubin.Kernel(cubin.Driver(library), BINARY, 0)
    library = FakeLibrary(cuLaunchKernelEx=[1], cuFuncSetAttribute=[0, 0])
    made = cubin.Kernel(cubin.Driver(library), BINARY, 0)
    with pytest.raises(cubin.DriverError, match=r"native heads=8, grid \(4, 1\): CUDA_ERROR_1: words"):
        made.launch((4, 1), 0, None)
    library = FakeLibrary(cuFuncSetAttribute=[1])
    with pytest.raises(cubin.DriverError, match=r"cuFuncSetAttribute: CUDA_ERROR_1"):
        cubin.Kernel(cubin.Driver(library), BINARY, 0)


def test_a_thread_without_a_context_gets_that_of_pytorch() -> None:
    library = FakeLibrary(cuModuleLoadData=[201], cuLaunchKernelEx=[201])
    made = cubin.Kernel(cubin.Driver(library), BINARY, 1)
    made.launch((1, 1), 0, None)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 2  # once to load, once to launch
    assert len(library.launched) == 1
    library = FakeLibrary(cuLaunchKernelEx=[201, 201])  # a context alone does not help
    made = cubin.Kernel(cubin.Driver(library), BINARY, 1)
    with pytest.raises(cubin.DriverError, match="CUDA_ERROR_201"):
        made.launch((1, 1), 0, None)


def test_a_device_loads_a_binary_once(monkeypatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(cubin, "driver", lambda: made)
    monkeypatch.setattr(cubin, "_kernels", {})
    made = cubin.Driver(library)
    built: list[int] = []

    def build() -> Binary:
        built.append(1)
        return BINARY

    found: list[cubin.Kernel] = []
    threads = [threading.Thread(target=lambda: found.append(cubin.kernel("a", 0, build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(built), len({id(k) for k in found})) == (1, 1)
    assert cubin.kernel("a", 1, build) is not found[0]  # another device, another module
    assert library.calls.count("cuModuleLoadData") == 2


def test_no_driver_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(cubin, "LIBRARY", "libcuda-that-is-not-here.so.1")
    cubin.driver.cache_clear()
    assert "install an NVIDIA driver" in str(cubin.is_there())
    old = FakeLibrary()
    old.lacks = ("cuLaunchKernelEx",)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    assert "cuLaunchKernelEx" in str(cubin.is_there())
    cubin.driver.cache_clear()


def test_structures_are_as_the_header_has_them() -> None:
    assert ctypes.sizeof(cubin.Attribute) == 72
    assert ctypes.sizeof(cubin.Config) == 56
    assert (cubin.Config.shared.offset, cubin.Config.stream.offset, cubin.Config.attributes.offset) == (24, 32, 40)


# ---------------------------------------------------------------------------------------------------------- cubin_info

KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry spilling(.param .u64 out, .param .u32 n, .param .u64 far)
.reqntid 64, 2, 1
{
    .local .align 8 .b8 stack[64];
    .shared .align 4 .b8 kept[512];
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .b64 %a;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [n];
    mov.u64 %a, stack; cvt.u64.u32 %rd2, %r1; add.u64 %rd2, %a, %rd2;
    st.local.u32 [%rd2], %r1; ld.param.u64 %rd3, [far]; add.u64 %rd3, %a, %rd3; ld.local.u32 %r2, [%rd3];
    mov.u32 %r3, kept; st.shared.u32 [%r3], %r2; bar.sync 0; ld.shared.u32 %r2, [%r3+8];
    st.global.u32 [%rd1], %r2;
    ret;
}
"""


@pytest.fixture(scope="module")
def tools():
    return pytest.importorskip("triton").knobs.nvidia


@pytest.fixture(scope="module")
def image(tools, tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernel.ptx").write_text(KERNEL)
    command = [tools.ptxas.path, "-arch=sm_90a", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "kernel.cubin").read_bytes()


def test_facts_of_a_cubin_are_those_of_cuobjdump(tools, image, tmp_path) -> None:
    found = cubin_info.read(image)
    assert (found.symbol, found.threads) == ("spilling", 128)
    assert found.parameters == ((0, 8), (8, 4), (16, 8))
    (tmp_path / "kernel.cubin").write_bytes(image)
    command = [tools.cuobjdump.path, "-res-usage", str(tmp_path / "kernel.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", text))
    assert (found.registers, found.stack) == (int(usage["REG"]), int(usage["STACK"]))
    assert found.stack >= 64
    assert found.shared == int(usage["SHARED"]) >= 512


def test_what_is_no_cubin_is_refused(image) -> None:
    for bad in (b"", b"\x7fELF", image[:200], b"MZ" + image[2:], image.replace(b".text.", b".tixt.")):
        with pytest.raises(ValueError, match="image: "):
            cubin_info.read(bad)


def test_importing_opens_no_driver() -> None:
    code = (
        "import ctypes, torch; ctypes.CDLL = None\n"
        "import sys, headfit.kernels.cubin, headfit.kernels.hopper\n"
        "assert not torch.cuda.is_initialized() and 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
