"""Loading and launching cubins through the CUDA driver, by ctypes: no compiler and no CUDA package is needed.

Belongs here: the driver's functions, a kernel per device, launches on PyTorch's current stream. Does not belong here:
what is launched (``hopper.py``), memory (PyTorch's allocator). Nothing here waits for a device, and a launch may be
captured into a CUDA graph; the module of a kernel is loaded at its first launch on a device and stays.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from headfit.kernels.hopper_build import Binary

LIBRARY: Final = "libcuda.so.1"
MAX_DYNAMIC_SHARED, CARVEOUT, NON_PORTABLE_CLUSTERS = 8, 9, 14  # CUfunction_attribute
CLUSTER_DIMENSION, CLUSTER_SCHEDULING_POLICY, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 5, 6  # CUlaunchAttributeID
LOAD_BALANCING: Final = 2  # CUclusterSchedulingPolicy: by default 64 clusters of 4 take two turns where one would do
PORTABLE_CLUSTER: Final = 8  # CTAs; more have to be allowed kernel by kernel
RELAXED: Final = 2  # CUstreamCaptureMode: loading a module is no part of the graph that may be under capture
INVALID_CONTEXT: Final = 201
_lock = threading.Lock()


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the text has its name for the error."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and in a union of 64 bytes a number, or x, y and z."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuModuleLoadData": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p),
    "cuFuncSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
        ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t,
    ),
    "cuOccupancyMaxActiveClusters": (ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.POINTER(Config)),
    "cuLaunchKernelEx": (ctypes.POINTER(Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
}  # fmt: skip


class Driver:
    """The functions used of the CUDA driver; each raises `DriverError` where the driver says no."""

    def __init__(self, library: Any) -> None:
        self._functions = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def status(self, name: str, *arguments: Any) -> int:
        """Call, and return the driver's code as it is."""
        code: int = self._functions[name](*arguments)
        return code

    def call(self, name: str, *arguments: Any) -> None:
        """Call, and raise where the code is not 0."""
        code = self._functions[name](*arguments)
        if code:
            raise DriverError(f"{name}: {self.meaning(code)}")

    def meaning(self, code: int) -> str:
        """The driver's name and words for an error code."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self._functions[name](code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode(errors="replace"))
        return ": ".join(words) or f"error {code}, which the driver has no name for"

    def enter(self, device: int) -> None:
        """Make the context that PyTorch uses on ``device`` current in this thread."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self.call("cuCtxSetCurrent", context)


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        DriverError: there is none, or it is too old to have a function (``cuLaunchKernelEx`` came with CUDA 11.8).
    """
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise DriverError(f"{LIBRARY}: {error}; install an NVIDIA driver of CUDA 12 or newer") from None


class Kernel:
    """A binary on one device, ready to be launched.

    ``ctas_per_sm`` is what the driver says fits one multiprocessor at once.
    """

    def __init__(self, cuda: Driver, binary: Binary, device: int) -> None:
        self._cuda, self._device = cuda, device
        self.binary = binary
        self.function = self._load(binary)
        cuda.call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, binary.shared)
        cuda.call("cuFuncSetAttribute", self.function, CARVEOUT, 100)
        count = ctypes.c_int()
        cuda.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(count), self.function, binary.threads,
            binary.shared,
        )  # fmt: skip
        self.ctas_per_sm = count.value
        self._clusters: dict[int, int] = {}

    def _load(self, binary: Binary) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        mode = ctypes.c_int(RELAXED)
        self._cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            code = self._status("cuModuleLoadData", ctypes.byref(module), binary.image)
            if code:
                raise DriverError(f"{binary.name}: cannot be loaded: {self._cuda.meaning(code)}")
        finally:
            self._cuda.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self._cuda.call("cuModuleGetFunction", ctypes.byref(function), module, binary.symbol.encode())
        return function

    def clusters(self, size: int) -> int:
        """How many clusters of ``size`` CTAs the device, which is current, holds at once; asked once a size."""
        known = self._clusters.get(size)
        if known is None:
            count = ctypes.c_int()
            code = 0
            if size > PORTABLE_CLUSTER:
                code = self._status("cuFuncSetAttribute", self.function, NON_PORTABLE_CLUSTERS, 1)
            if code == 0:
                config = self._config((1, size), 0, early=False, cluster=size)
                code = self._status("cuOccupancyMaxActiveClusters", ctypes.byref(count), self.function, config)
            if code:  # not kept: it may be the error of something before
                return 0
            known = self._clusters[size] = count.value
        return known

    def launch(
        self, grid: tuple[int, int], stream: int, parameters: Any, *, early: bool = False, cluster: int = 1
    ) -> None:
        """Launch ``grid`` CTAs on ``stream``, on the device that is current.

        Args:
            grid: x and y.
            stream: the handle, as PyTorch's ``cuda_stream`` has it.
            parameters: the array of pointers to the values; the driver copies them before it returns.
            early: let the kernel start while the one before it in the stream still runs: it has to wait for that by
                itself (programmatic dependent launch).
            cluster: CTAs, neighbours in y, that are at work together and see each other's shared memory. A divisor of
                y, and a size of which `clusters` counts some.
        """
        config = self._config(grid, stream, early=early, cluster=cluster)
        code = self._status("cuLaunchKernelEx", config, self.function, parameters, None)
        if code:
            clusters = f", clusters of {cluster}" if cluster > 1 else ""
            raise DriverError(f"{self.binary.name}, grid {grid}{clusters}: {self._cuda.meaning(code)}")

    def _config(self, grid: tuple[int, int], stream: int, *, early: bool, cluster: int) -> Config:
        attributes = _attributes(early, cluster)
        return Config(
            grid[0], grid[1], 1, self.binary.threads, 1, 1, self.binary.shared, stream, attributes, len(attributes)
        )

    def _status(self, name: str, *arguments: Any) -> int:
        """The driver's code for a call that needs a context: a thread that has none yet is given PyTorch's."""
        code = self._cuda.status(name, *arguments)
        if code == INVALID_CONTEXT:  # the first CUDA call of a thread
            self._cuda.enter(self._device)
            code = self._cuda.status(name, *arguments)
        return code


@functools.cache
def _attributes(early: bool, cluster: int) -> ctypes.Array[Attribute]:
    """What a launch says beyond its sizes; kept, since launches point to it."""
    found = []
    if early:
        found.append(Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0), b""))
    if cluster > 1:
        found.append(Attribute(CLUSTER_DIMENSION, 0, (1, cluster, 1), b""))
        found.append(Attribute(CLUSTER_SCHEDULING_POLICY, 0, (LOAD_BALANCING, 0, 0), b""))
    return (Attribute * len(found))(*found)


_kernels: dict[tuple[str, int], Kernel] = {}


def kernel(name: str, device: int, build: Callable[[], Binary]) -> Kernel:
    """The kernel ``name`` on ``device``, which is the current one; ``build`` is asked for it the first time."""
    found = _kernels.get((name, device))
    if found is None:
        with _lock:
            found = _kernels.get((name, device))
            if found is None:
                found = _kernels[name, device] = Kernel(driver(), build(), device)
    return found


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream on ``device``."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def is_there() -> str | None:
    """None where a driver can be loaded, else why not."""
    try:
        driver()
    except DriverError as error:
        return str(error)
    return None
