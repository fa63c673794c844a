"""The public surface against the contract: names, signatures, docstrings, imports, and the error of every bad argument.

What a backend must compute is in ``headfit.testing``; what stands before a backend is here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headfit
from headfit import checks, kernels
from headfit.cache import page_bytes
from headfit.geometry import Geometry
from headfit.kernels import cpu
from headfit.testing import ROUTES, CacheSpec, CallSpec, build, conformance_cases
from headfit.testing.checks_errors import bad_inputs

ROOT = Path(headfit.__file__).parent
NO_DEFAULT = inspect.Parameter.empty

# CONTRACT, "Public API": parameters in order, with their defaults.
SIGNATURES = {
    "flash_mla_with_kvcache": (
        "q k_cache block_table=None cache_seqlens=None head_dim_v=512 tile_scheduler_metadata=None num_splits=None "
        "softmax_scale=None causal=False is_fp8_kvcache=True indices=None attn_sink=None extra_k_cache=None "
        "extra_indices_in_kvcache=None topk_length=None extra_topk_length=None out=None enable_batch_invariant=False "
        "backend=None"
    ),
    "flash_mla_sparse_fwd": "q kv indices sm_scale d_v=512 attn_sink=None topk_length=None out=None backend=None",
    "pack_kv": "kv page_size layout='v4'",
    "unpack_kv": "k_cache layout=None",
    "plan_width": "call capability policy",
    "probe": "device=None",
    "decode_max_rows": "family='flashinfer_sm120'",
    "Call": ("rows n_local n_heads mode='extend' original_mode=None in_breakable_graph=False topk=128 extra_topk=0"),
    "SinkCache": "attn_sink rank n_local padded",
}
PUBLIC = [*SIGNATURES, "get_mla_metadata", "MQALayer", "Capability", "Policy", "WidthDecision", "backends"]
MODES = ["extend", "mixed", "split_prefill", "draft_extend", "target_verify", "decode", "idle", "dllm_extend"]


def parameters(function) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    wanted = [part.partition("=") for part in SIGNATURES[name].split()]
    wanted = [(key, ast.literal_eval(value) if sign else NO_DEFAULT) for key, sign, value in wanted]
    found = parameters(getattr(headfit, name))
    positional = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    if name == "unpack_kv":  # the contract gives the argument no default; recognising the layout is ours
        wanted = [("k_cache", NO_DEFAULT), ("layout", None)]
    assert positional == wanted
    more = [p for p in found if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not NO_DEFAULT for p in more), "additions must be optional"


def test_remaining_shapes_of_the_contract():
    assert [p.name for p in parameters(headfit.Capability)][:5] == [
        "family", "compute_capability", "row_split", "prefill_heads", "decode_heads",
    ]  # fmt: skip
    assert [p.kind.name for p in parameters(headfit.get_mla_metadata)] == ["VAR_POSITIONAL", "VAR_KEYWORD"]
    assert parameters(headfit.SinkCache.__call__)[0].name == "width"
    assert parameters(headfit.SinkCache.__call__)[0].default is None
    for constructor in ("sm12x_prefill", "native", "padded", "from_env"):
        assert all(p.default is not NO_DEFAULT for p in parameters(getattr(headfit.Policy, constructor)))
    for name in ("Call", "Capability", "Policy", "WidthDecision"):
        assert dataclasses.is_dataclass(getattr(headfit, name))
        assert getattr(headfit, name).__dataclass_params__.frozen, f"{name} is not frozen"
    assert {"width", "padded", "reason", "family"} <= {f.name for f in dataclasses.fields(headfit.WidthDecision)}
    assert [headfit.Call(1, 8, 64, mode).mode for mode in MODES] == MODES


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name):
    assert name in headfit.__all__
    assert name in dir(headfit)
    assert getattr(headfit, name).__doc__.strip()


@pytest.mark.parametrize(
    "name", ["flash_mla_with_kvcache", "flash_mla_sparse_fwd", "pack_kv", "unpack_kv", "SinkCache"]
)
def test_docstring_of_a_tensor_function_is_the_contract(name):
    text = getattr(headfit, name).__doc__
    assert "[" in text, "no shape"
    assert any(dtype in text for dtype in ("bf16", "bfloat16", "float32", "uint8")), "no dtype"
    if name != "unpack_kv":
        assert "Raises" in text, "no errors"
    if name.startswith("flash"):
        for word in ("natural", "sink", "invalid", "no valid key", "stride", "FlashMLA", "ValueError"):
            assert word in text, word


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"has no attribute 'flash_mla'.*flash_mla_with_kvcache"):
        headfit.flash_mla  # noqa: B018


def test_import_does_nothing():
    """No CUDA context, no kernel, no engine, no environment write, no foreign patch."""
    code = """
import os, sys
before = dict(os.environ)
import headfit
headfit.Call, headfit.Policy.native(), headfit.plan_width
assert dict(os.environ) == before, "import headfit wrote to the environment"
for name in ("triton", "transformers", "sglang", "vllm", "flashinfer", "flash_mla", "matplotlib", "headfit.testing"):
    assert name not in sys.modules, f"import headfit imported {name}"
assert not [m for m in sys.modules if m.startswith("headfit.kernels.") or m.startswith("headfit.engines")]
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "import headfit opened a CUDA context"
headfit.flash_mla_with_kvcache, headfit.MQALayer, headfit.SinkCache, headfit.probe
torch = sys.modules["torch"]
assert not torch.cuda.is_initialized(), "a public name opened a CUDA context"
assert dict(os.environ) == before
assert "triton" not in sys.modules or "torch._inductor" in sys.modules, "a public name imported triton"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_the_gate_needs_no_torch():
    """plan_width is pure: it works where torch cannot be imported."""
    code = """
import sys
sys.modules["torch"] = None
import headfit
d = headfit.plan_width(headfit.Call(4096, 8, 64), headfit.Capability("x", (9, 0), 0, range(1, 129), range(1, 129)),
                       headfit.Policy.native())
assert (d.width, d.padded) == (8, False), d
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- import direction


def imports(path: Path) -> set[str]:
    """Modules of headfit that ``path`` imports at import time (functions and TYPE_CHECKING blocks left out)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(a.name for a in child.names)
            if isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{a.name}" for a in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


MODULES = {
    ".".join(["headfit", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
GRAPH = {name: {m for m in imports(path) if m in MODULES and m != name} for name, path in MODULES.items()}
PURE = ["geometry", "env", "capability", "width", "cache", "reference", "call", "checks", "sinks"]
TOP = ["cli", "compare", "launch", "verify", "report", "doctor", "engines", "testing", "__main__"]


def test_imports_have_no_circle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import circle: {' -> '.join([*path, name])}"
        if name not in done:
            for target in GRAPH[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in GRAPH:
        visit(name, ())


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_only_pure_modules(name):
    allowed = {f"headfit.{other}" for other in PURE}
    assert GRAPH[f"headfit.{name}"] <= allowed | {"headfit"}


@pytest.mark.parametrize("name", ["geometry", "env", "capability", "width"])
def test_the_gate_imports_no_tensor_library(name):
    assert not {"torch", "numpy", "triton"} & {m.split(".")[0] for m in imports(MODULES[f"headfit.{name}"])}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {f"headfit.{t}" for t in TOP}))
def test_nothing_below_imports_what_sits_on_top(name):
    if any(name.startswith(f"headfit.{t}.") for t in TOP):
        return
    on_top = [
        m
        for m in GRAPH[name]
        if any(m == f"headfit.{t}" or m.startswith(f"headfit.{t}.") for t in ("cli", "engines", "testing"))
    ]
    assert not on_top or name in {"headfit.cli", "headfit.__main__", "headfit.compare", "headfit.subject"}, on_top


def test_kernels_know_neither_ops_nor_layers():
    for name, targets in GRAPH.items():
        if name.startswith("headfit.kernels"):
            assert not targets & {"headfit.ops", "headfit.layer", "headfit.checks"}, name


def test_listing_backends_names_only_usable_ones():
    assert isinstance(headfit.backends(), tuple)
    assert "cpu" in headfit.backends()
    assert all(kernels.why_not(name) is None for name in headfit.backends())


# ---------------------------------------------------------------- before any backend


@pytest.fixture
def spy(monkeypatch):
    """A backend that only remembers the calls it was given."""
    module = ModuleType("headfit_spy_backend")
    module.calls = []
    module.available = lambda: None
    module.unsupported = lambda call: None
    module.capability = cpu.capability
    module.run = module.calls.append
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(kernels.REGISTRY, "spy", kernels.Backend("spy", module.__name__, ("cpu",), "a test"))
    return module


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_no_bad_input_reaches_a_backend(spy, route):
    call = build(CallSpec(route, batch=2, heads=8, out=True, lengths="random", sink="normal"))
    for bad in bad_inputs(route):
        changes = bad.spoil(call.arguments())
        with pytest.raises((TypeError, ValueError)):
            call.run(changes.pop("backend", "spy"), **changes)
    assert spy.calls == []


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_slices_reach_the_backend_in_place(spy, route):
    """q, out, caches and lists arrive as the memory that was passed: no copy on the way."""
    spec = CallSpec(route, batch=3, heads=8, q_heads=64, out_heads=64, out=True, lengths="random", index_pitch=5)
    call = build(spec)
    call.run("spy")
    (got,) = spy.calls
    assert (got.q.data_ptr(), got.out.data_ptr()) == (call.q.data_ptr(), call.out.data_ptr())
    assert got.q.stride(2) == call.q.stride(-2)
    for keys, cache in zip(got.key_sets, call.caches, strict=True):
        assert keys.data.data_ptr() == cache.view.data_ptr()
        assert keys.indices.data_ptr() == cache.indices.data_ptr()
        assert keys.lengths.data_ptr() == cache.lengths.data_ptr()
        assert keys.slots == cache.slots


class NoValues(TorchDispatchMode):
    """Fails at any operator that brings a tensor's value to the host, or that computes on values at all."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        bad = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "isfinite", "max", "min", "_to_copy")
        assert not any(name.startswith(f"aten.{b}.") for b in bad), f"a value was read before the launch: {name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_checks_read_no_value(spy, route):
    call = build(CallSpec(route, batch=3, heads=8, out=True, lengths="edges", sink="edges"))
    entry = headfit.flash_mla_sparse_fwd if route.entry == "sparse" else headfit.flash_mla_with_kvcache
    with NoValues():
        entry(**call.arguments(), backend="spy")
    assert len(spy.calls) == 1


def test_no_rows_no_launch(spy):
    call = build(CallSpec(ROUTES["v4"], batch=0))
    call.run("spy")
    assert spy.calls == []


def test_a_broken_kernel_package_takes_no_other_backend_with_it(monkeypatch):
    def broken() -> str:
        raise RuntimeError("no libcuda")

    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: ModuleType(name))
    assert "AttributeError" in (kernels.why_not("triton") or "")
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: broken())
    assert kernels.why_not("triton") == "it cannot be loaded: RuntimeError: no libcuda"
    assert kernels.backends() == ()


@pytest.mark.parametrize("scale", [10**400, -(10**400), 1e39])
def test_a_scale_that_float32_cannot_hold(scale):
    with pytest.raises(ValueError, match=r"sm_scale: got -?1.*accepted is a finite float32 number"):
        checks.softmax_scale("sm_scale", scale, 512)


def test_a_compiled_call_takes_another_scale():
    q, kv = torch.randn(2, 3, 512).bfloat16(), torch.randn(4, 1, 512).bfloat16()
    lanes = torch.zeros(2, 1, 3, dtype=torch.int32)

    def call(scale: float) -> torch.Tensor:
        return headfit.flash_mla_sparse_fwd(q, kv, lanes, scale, backend="cpu")[2]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(scale), call(scale))


def test_an_explicit_backend_never_falls_back(spy):
    call = build(CallSpec(ROUTES["v4"]))
    spy.unsupported = lambda call: "not today"
    with pytest.raises(kernels.BackendUnavailable, match="not today"):
        call.run("spy")
    spy.available = lambda: "no such chip"
    with pytest.raises(kernels.BackendUnavailable, match="no such chip"):
        call.run("spy")
    with pytest.raises(ValueError, match=r"backend: got 'nonsense'.*'cpu'"):
        call.run("nonsense")
    call.run(None)


def test_metadata_is_accepted_and_ignored():
    metadata = headfit.get_mla_metadata(torch.zeros(3), 64, 1, num_heads_k=1)
    assert isinstance(metadata, tuple)
    assert metadata[1] is None
    call = build(CallSpec(ROUTES["v4"]))
    plain = call.run("cpu")
    given = call.run(
        "cpu", tile_scheduler_metadata=metadata[0], num_splits=metadata[1], block_table=None, cache_seqlens=None
    )
    given.require_same(plain, "with scheduler metadata")


# ---------------------------------------------------------------- every other public function's errors

SINK = torch.zeros(8)
CAPABILITY = headfit.Capability("x", (9, 0), 0, range(1, 129), range(1, 129))
ERRORS = [
    ("pack_kv width", lambda: headfit.pack_kv(torch.zeros(3, 500), 64), ValueError, ("kv", "500", "512")),
    ("pack_kv page", lambda: headfit.pack_kv(torch.zeros(3, 512), 0), ValueError, ("page_size", "0", "1")),
    ("pack_kv layout", lambda: headfit.pack_kv(torch.zeros(3, 512), 4, "v9"), ValueError, ("layout", "v9", "v4")),
    ("pack_kv dtype", lambda: headfit.pack_kv(torch.zeros(3, 512).int(), 4), TypeError, ("kv", "int32", "float")),
    ("unpack_kv bytes", lambda: headfit.unpack_kv(torch.zeros(1, 2, 1, 600).byte()), ValueError,
        ("k_cache", "600", "584")),
    ("unpack_kv dtype", lambda: headfit.unpack_kv(torch.zeros(1, 2, 1, 584)), TypeError,
        ("k_cache", "float32", "uint8")),
    ("unpack_kv rank", lambda: headfit.unpack_kv(torch.zeros(2, 584).byte()), ValueError, ("k_cache", "shape")),
    ("Call mode", lambda: headfit.Call(1, 8, 64, "prefill"), ValueError, ("mode", "prefill", "extend")),
    ("Call heads", lambda: headfit.Call(1, 7, 64), ValueError, ("n_local", "7", "64")),
    ("Call rows", lambda: headfit.Call(-1, 8, 64), ValueError, ("rows", "-1", "0")),
    ("Call type", lambda: headfit.Call(1.5, 8, 64), TypeError, ("rows", "1.5", "integer")),
    ("Capability", lambda: headfit.Capability("x", None, 0, 64, {64}), TypeError, ("prefill_heads", "64", "container")),
    ("plan_width", lambda: headfit.plan_width(1, CAPABILITY, headfit.Policy.native()), TypeError, ("int", "Call")),
    ("plan_width heads", lambda: headfit.plan_width(
        headfit.Call(1, 64, 64), headfit.Capability("x", None, 0, {8}, {8}), headfit.Policy.native()),
        ValueError, ("width", "8", "64")),
    ("Policy", lambda: headfit.Policy.from_env({"HEADFIT_WIDTH": "wide"}), ValueError,
        ("HEADFIT_WIDTH", "wide", "native")),
    ("decode_max_rows", lambda: headfit.decode_max_rows("flashinfre"), ValueError,
        ("family", "flashinfre", "flashinfer_sm120")),
    ("SinkCache list", lambda: headfit.SinkCache([0.0], 0, 8, 64), TypeError, ("attn_sink", "list", "Tensor")),
    ("SinkCache heads", lambda: headfit.SinkCache(SINK[:7], 0, 8, 64), ValueError, ("attn_sink", "7", "8")),
    ("SinkCache rank", lambda: headfit.SinkCache(SINK, -1, 8, 64), ValueError, ("rank", "-1", "0")),
    ("SinkCache padded", lambda: headfit.SinkCache(SINK, 0, 8, 4), ValueError, ("padded", "4", "8")),
    ("SinkCache width", lambda: headfit.SinkCache(SINK, 0, 8, 64)(128), ValueError, ("width", "128", "64")),
    ("MQALayer kind", lambda: headfit.MQALayer(Geometry.from_config("deepseek-v4-flash"), kind="dense"),
        ValueError, ("kind", "dense", "sliding")),
    ("MQALayer backend", lambda: headfit.MQALayer(Geometry.from_config("deepseek-v4-flash"), backend="nonsense"),
        ValueError, ("backend", "nonsense", "cpu")),
]  # fmt: skip


@pytest.mark.parametrize(("act", "error", "words"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_error_names_argument_got_and_accepted(act, error, words):
    with pytest.raises(error) as caught:
        act()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# ---------------------------------------------------------------- figures of the contract


@pytest.mark.parametrize(("page_size", "size"), [(64, 37440), (256, 149760), (2, 1728), (32, 19008), (128, 74880)])
def test_page_bytes(page_size, size):
    assert page_bytes(page_size, "v4") == size
    cache = headfit.pack_kv(torch.zeros(page_size + 1, 512), page_size)
    assert (tuple(cache.shape), cache.stride(0), cache.stride(1)) == ((2, page_size, 1, 584), size, 584)


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(448.0, 127), (449.0, 128), (224.0, 126), (0.0, 114), (448e-4, 114), (1.0, 119), (448 * 2.0**60, 187)],
)
def test_scale_rule(amax, byte):
    """2^ceil(log2(max(amax / 448, 1e-4))): 1e-4 rounds up to 2^-13, byte 114."""
    rows = torch.zeros(1, 512)
    rows[0, 64] = amax
    cache = headfit.pack_kv(rows, 1)
    assert int(cache.flatten()[576 + 1]) == byte
    assert int(cache.flatten()[576 + 0]) == 114


@pytest.mark.parametrize(
    ("preset", "numbers"),
    [
        ("deepseek-v4-flash", (64, 4096, 1024, 512, 64, 128, 512, 8, 1024, 43)),
        ("deepseek-v4-pro", (128, 7168, 1536, 512, 64, 128, 1024, 16, 1024, 61)),
    ],
)
def test_geometry_table(preset, numbers):
    g = Geometry.from_config(preset)
    assert numbers == (
        g.n_heads, g.hidden_size, g.q_lora_rank, g.head_dim, g.rope_dim, g.window, g.index_topk, g.o_groups,
        g.o_lora_rank, g.n_layers,
    )  # fmt: skip
    assert g.softmax_scale == 512**-0.5


def test_sink_cache_hands_out_views_of_one_allocation():
    cache = headfit.SinkCache(torch.arange(8.0), 0, 8, 64)
    assert cache() is cache(64)
    assert cache(None) is cache()
    assert cache(8).data_ptr() == cache().data_ptr()
    assert torch.equal(cache(8), torch.arange(8.0))
    assert headfit.SinkCache(torch.arange(64.0), 3, 8, 64)(8).tolist() == list(range(24, 32))


# ---------------------------------------------------------------- the suite refuses to fool itself


def test_sparse_equal_to_dense_is_refused():
    one_slot = CacheSpec(topk=3, page_size=1, pages=1)
    with pytest.raises(ValueError, match="sparse equals dense"):
        build(CallSpec(ROUTES["v4"], caches=(one_slot,)))


def test_unlisted_slots_are_poisoned():
    for route in ROUTES.values():
        call = build(CallSpec(route, batch=3, lengths="random"))
        for cache in call.caches:
            rows = headfit.unpack_kv(cache.view)
            assert torch.equal(rows.isfinite().all(1), cache.listed())
            assert not cache.listed().all()
            assert not cache.listed()[0]


def test_cases_are_named_and_selected():
    ids = [case.id for case in conformance_cases()]
    assert len(ids) == len(set(ids))
    assert all(case.check.sentence for case in conformance_cases())
    assert {c.check.name for c in conformance_cases(only=["accuracy"])} == {"accuracy"}
    with pytest.raises(ValueError, match="only: got"):
        conformance_cases(only=["no_such_check"])
    with pytest.raises(ValueError, match="scale: got"):
        conformance_cases(scale="medium")
