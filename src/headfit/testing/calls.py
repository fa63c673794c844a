"""One description of an attention call, the tensors it stands for, and the ways to run and to judge it.

A :class:`CallSpec` is a few numbers a person can read; ``build`` (in ``build.py``) makes a :class:`BuiltCall` of it,
always the same one for one seed. Tests and benchmarks share both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

import headfit
from headfit.testing.compare import Truth, require, require_same_bits
from headfit.testing.oracle import batched_truth, oracle_device
from headfit.testing.pages import BuiltCache, CacheSpec, Route

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
D_V = 512


@dataclass(frozen=True)
class CallSpec:
    """One sparse-attention call in numbers.

    ``batch * s_q`` query rows of ``heads`` heads, and as many caches as the route has. ``q_heads`` and ``out_heads``
    are the heads of the buffers of which q and out are slices (None: exactly ``heads``), ``head_offset`` is where the
    slices begin and ``pitch`` counts elements between the end of a head and the next. ``invalid`` is the share of lanes
    that hold an index outside the cache. ``trap_slot_0`` keeps slot 0 unlisted, hence NaN.
    """

    route: Route
    batch: int = 2
    s_q: int = 1
    heads: int = 8
    caches: tuple[CacheSpec, ...] = ()
    q_heads: int | None = None
    out_heads: int | None = None
    head_offset: int = 0
    pitch: int = 0
    out: bool = False
    interleaved: bool = False
    lengths: Literal["none", "random", "edges"] = "none"
    invalid: float = 0.2
    sink: Literal["none", "normal", "edges"] = "none"
    data: Literal["normal", "large_q", "wide_scales"] = "normal"
    trap_slot_0: bool = True
    index_pitch: int = 0
    fp8_view: bool = False
    batch_invariant: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.batch * self.s_q

    def __str__(self) -> str:
        default = CallSpec(self.route)
        shown = ("route", "batch", "s_q", "heads", "caches")
        rest = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name not in shown and value != getattr(default, name)
        ]
        caches = " + ".join(f"{c.topk} lanes of {c.pages} pages x {c.page_size}" for c in self.caches)
        return (
            f"{self.route.name}: {self.batch} x {self.s_q} rows, {self.heads} heads, {caches} {' '.join(rest)}".strip()
        )


@dataclass(frozen=True)
class Result:
    """What a call returned, seen as rows: out ``[rows, h, 512]``, lse and max_logits ``[rows, h]``."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None
    returned: tuple[Tensor, ...]

    def require_same(self, other: Result, what: str, *, heads: int | None = None, rows: Any = slice(None)) -> None:
        """Fail unless the first ``heads`` heads hold the same bits as ``rows`` of ``other``."""
        h = slice(0, heads)
        require_same_bits(self.out[:, h], other.out[rows, h], f"{what}: out")
        require_same_bits(self.lse[:, h], other.lse[rows, h], f"{what}: lse")
        if self.max_logits is not None and other.max_logits is not None:
            require_same_bits(self.max_logits[:, h], other.max_logits[rows, h], f"{what}: max_logits")


def call_entry(route: Route, backend: str | None, arguments: dict[str, Any], batch_invariant: bool = False) -> Result:
    """Call the public function of ``route`` and hold shapes, dtypes and devices of what it returns to the contract."""
    q = arguments["q"]
    if route.entry == "sparse":
        if "enable_batch_invariant" in inspect.signature(headfit.flash_mla_sparse_fwd).parameters:
            arguments = arguments | {"enable_batch_invariant": batch_invariant}
        out, max_logits, lse = headfit.flash_mla_sparse_fwd(**arguments, backend=backend)
        rows, heads = q.shape[:2]
        _require_form("out", out, torch.bfloat16, (rows, heads, D_V), q)
        _require_form("max_logits", max_logits, torch.float32, (rows, heads), q)
        _require_form("lse", lse, torch.float32, (rows, heads), q)
        return Result(out, lse, max_logits, (out, max_logits, lse))
    out, lse = headfit.flash_mla_with_kvcache(**arguments, enable_batch_invariant=batch_invariant, backend=backend)
    b, s_q, heads = q.shape[:3]
    _require_form("out", out, torch.bfloat16, (b, s_q, heads, D_V), q)
    _require_form("lse", lse, torch.float32, (b, heads, s_q), q)
    rows = b * s_q
    return Result(out.reshape(rows, heads, D_V), lse.transpose(1, 2).reshape(rows, heads), None, (out, lse))


def _require_form(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: Tensor) -> None:
    got, wanted = (t.dtype, tuple(t.shape), t.device), (dtype, shape, q.device)
    require(got == wanted, f"{name} returned as {got}, the contract says {wanted}")


def _without(buffer: Tensor, view: Tensor) -> Tensor:
    """A copy of ``buffer`` with zeros where ``view`` lies in it."""
    copy = buffer.clone()
    copy.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return copy


@dataclass
class CallLog:
    """What became of a case's calls: how many ran, and why the backend refused others."""

    ran: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass
class BuiltCall:
    """The tensors of a spec. Change them freely, then call :meth:`remember` before the next :meth:`run`."""

    spec: CallSpec
    q: Tensor
    q_buffer: Tensor
    out: Tensor | None
    out_buffer: Tensor | None
    caches: list[BuiltCache]
    sink: Tensor | None
    sm_scale: float
    log: CallLog = field(default_factory=CallLog)
    _before: list[tuple[str, Callable[[], Tensor], Tensor]] = field(default_factory=list)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the entry that the route names."""
        first = self.caches[0]
        shared: dict[str, Any] = {
            "q": self.q,
            "indices": first.indices,
            "attn_sink": self.sink,
            "topk_length": first.lengths,
            "out": self.out,
        }
        if self.spec.route.entry == "sparse":
            return shared | {"kv": first.view[:, 0], "sm_scale": self.sm_scale}
        packed = self.spec.route.packed
        shared |= {"k_cache": first.view, "softmax_scale": self.sm_scale, "is_fp8_kvcache": packed}
        if len(self.caches) == 2:
            second = self.caches[1]
            shared |= {
                "extra_k_cache": second.view,
                "extra_indices_in_kvcache": second.indices,
                "extra_topk_length": second.lengths,
            }
        return shared

    def run(self, backend: str | None, **changes: Any) -> Result:
        """Call the public entry; ``changes`` replace arguments by name. Inputs and guards are checked afterwards."""
        invariant = changes.pop("enable_batch_invariant", self.spec.batch_invariant)
        result = call_entry(self.spec.route, backend, self.arguments() | changes, invariant)
        self.log.ran += 1
        self.require_untouched()
        return result

    def remember(self) -> BuiltCall:
        """Keep copies of everything that a backend must not write."""
        self._before = []
        self._keep("q's buffer", lambda: self.q_buffer)
        for i, cache in enumerate(self.caches):
            if cache.storage.numel() < 2**28:
                self._keep(f"the allocation of cache {i}", lambda cache=cache: cache.storage)  # type: ignore[misc]
            self._keep(f"the indices of cache {i}", lambda cache=cache: cache.indices)  # type: ignore[misc]
            if cache.lengths is not None:
                self._keep(f"the lengths of cache {i}", lambda cache=cache: cache.lengths)  # type: ignore[misc]
        if self.sink is not None:
            self._keep("attn_sink", lambda: self.sink)  # type: ignore[arg-type,return-value]
        if self.out is not None and self.out_buffer is not None:
            view, buffer = self.out, self.out_buffer
            self._keep("the buffer of out, outside the view,", lambda: _without(buffer, view))
        return self

    def _keep(self, name: str, read: Callable[[], Tensor]) -> None:
        self._before.append((name, read, read().clone()))

    def require_untouched(self) -> None:
        """Fail if an input, or an element of out's buffer outside the view, changed since :meth:`remember`."""
        for name, read, copy in self._before:
            require_same_bits(read(), copy, f"{name} must stay untouched")

    def row_lanes(self, cache: BuiltCache) -> tuple[Tensor, Tensor | None]:
        """Indices ``[rows, topk]`` and lengths ``[rows]`` of one cache, where the oracle reads them."""
        where = oracle_device(self.q.device)
        lanes = cache.indices.reshape(self.spec.rows, cache.indices.shape[-1]).to(where)
        if cache.lengths is None:
            return lanes, None
        repeat = self.spec.rows // max(cache.lengths.shape[0], 1)
        return lanes, cache.lengths.to(where).repeat_interleave(repeat)

    def q_rows(self) -> Tensor:
        """Q as ``[rows, h, d_qk]``."""
        return self.q.reshape(self.spec.rows, self.q.shape[-2], self.q.shape[-1])

    def truth(self, rows: Tensor | None = None, keys: list[Tensor] | None = None) -> Truth:
        """The oracle's answer, on q's device; computed there if that is a CUDA GPU.

        Args:
            rows: numbers of the rows to judge; None: all.
            keys: rows ``[slots, d_qk]`` for each cache instead of the cache's own (the originals before packing).
        """
        where = oracle_device(self.q.device)
        pick = torch.arange(self.spec.rows, device=where) if rows is None else rows.to(where)
        all_keys, all_lanes, all_lengths = [], [], []
        for i, cache in enumerate(self.caches):
            lanes, lengths = self.row_lanes(cache)
            lanes = lanes[pick]
            valid = (lanes >= 0) & (lanes < cache.slots)
            # a huge cache is read where it is listed only
            used, inverse = torch.unique(lanes[valid], return_inverse=True)
            compact = torch.full_like(lanes, -1)
            compact[valid] = inverse.to(lanes.dtype)
            source = cache.rows(used.to(cache.view.device)) if keys is None else keys[i].to(where)[used.long()]
            all_keys.append(source.to(where))
            all_lanes.append(compact)
            all_lengths.append(None if lengths is None else lengths[pick])
        sink = None if self.sink is None else self.sink.to(where)
        truth = batched_truth(self.q_rows().to(where)[pick], all_keys, all_lanes, all_lengths, self.sm_scale, sink)
        return Truth(*(t.to(self.q.device) for t in vars(truth).values()))
