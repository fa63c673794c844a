"""DeepSeek-V4's attention layer, tensor-parallel over query heads, at the width the gate plans for each call.

What belongs here: projections, norms, the planned attention call, the output projection and its one all-reduce. What
    does
not: page bookkeeping (``pages``), the sparse choice and positions (the engine's), weight formats (``weights``),
    globals.

The flow of one call on one rank, ``rows`` tokens, ``n_local`` of ``n_heads`` heads::

    hidden -> q latent (q_a, norm)            replicated; an indexer may want it
           -> latent KV row (kv, norm, rope)  replicated; the caller writes it into pages
    q latent -> q_b GEMM -> [rows, n_local * 512], one contiguous buffer whatever the width
             -> per-head norm, rotary -> rows [:, :n_local] of the kernel's buffer [rows, width, 512]
             -> sparse attention at ``width`` -> inverse rotary -> o_a, o_b -> all-reduce
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from headfit import arch, kernels, ops, weights
from headfit import cache as packed
from headfit.call import D_V
from headfit.capability import DECODE_MODES, Call, Capability, allocation_width
from headfit.geometry import Geometry, LayerKind, Shard
from headfit.rotary import rms, rotate_into
from headfit.sinks import SinkCache
from headfit.width import Policy, WidthDecision, plan_width

KINDS = get_args(LayerKind)
# Bytes of float32 workspace for the elementwise steps. Small on a CPU, where a block that stays in the cache is also
# faster; large on a GPU, where a block is a launch.
_WORKSPACE = {"cpu": 16 << 20}
_WORKSPACE_GPU = 1 << 30


@dataclass(frozen=True)
class LaneRecord:
    """What one attention call of one layer did; handed to ``MQALayer.observer``.

    Attributes:
        layer: index of the layer in its model.
        kind: ``sliding``, ``compressed_sparse`` or ``heavily_compressed``.
        phase: ``prefill`` or ``decode``, from the call's mode.
        rows: tokens of the call.
        n_local: query heads this rank owns.
        decision: the planned width and why.
        seconds: wall time of the attention call alone (on CUDA between two synchronisations).
        out: bfloat16 ``[rows, n_local, 512]``, the surviving heads, before the inverse rotary. A view of the call's own
            buffer, which nothing writes again.
        lse: float32 ``[rows, n_local]``.
    """

    layer: int
    kind: str
    phase: Literal["prefill", "decode"]
    rows: int
    n_local: int
    decision: WidthDecision
    seconds: float
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Keys:
    """The lanes of one cache that a call reads.

    Attributes:
        cache: pages, packed ``v4`` or plain bfloat16, as :func:`headfit.flash_mla_with_kvcache` takes them.
        indices: int32 ``[rows, topk]``, ``page * page_size + offset``; negative is no key.
        lengths: int32 ``[rows]``, lanes at or past it are not read; None reads all.
    """

    cache: Tensor
    indices: Tensor
    lengths: Tensor | None = None

    @property
    def topk(self) -> int:
        """Lanes a row."""
        return self.indices.shape[-1]


class MQALayer(nn.Module):
    """One DeepSeek-V4 attention layer on one tensor-parallel rank. Inference only: outputs carry no gradient.

    Args:
        geometry: heads, dims and groups of the model.
        layer: index of the layer, for records.
        kind: ``sliding``, ``compressed_sparse`` or ``heavily_compressed``, for records.
        eps: of the three norms.
        group: the tensor-parallel process group; None is one rank, unless ``shard`` is given.
        shard: build the part of an explicit ``(rank, world)`` without a group. ``forward`` then returns that rank's
            partial output: the sum over ranks is the layer's output.
        policy: which widths are wanted; None reads the environment (:meth:`headfit.Policy.from_env`).
        backend: a name from :func:`headfit.backends`, or None for the first that runs on the layer's device. The width
            is planned for that backend and every call goes to it: bits are equal over widths for one backend, not
            between two, so a layer never changes or falls back.
        batch_invariant: ask the kernel for bits that do not depend on the other rows of the call.

    World sizes: any divisor of ``n_heads`` that keeps each rank's heads inside whole groups or one group (1, 2, 4,
    ... 64 for the released models). Beyond ``o_groups`` ranks a rank owns part of a group.

    Weights come in by :meth:`load` and keep their dtype: bfloat16, or float32 with bfloat16 only at the kernel's door.
    """

    observer: Callable[[LaneRecord], None] | None
    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv: Tensor
    kv_norm: Tensor
    o_a: Tensor
    o_b: Tensor
    sinks: Tensor
    _sink_cache: SinkCache | None

    def __init__(
        self,
        geometry: Geometry,
        *,
        layer: int = 0,
        kind: LayerKind = "sliding",
        eps: float = 1e-6,
        group: dist.ProcessGroup | None = None,
        shard: Shard | tuple[int, int] | None = None,
        policy: Policy | None = None,
        backend: str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, accepted are {', '.join(KINDS)}")
        if group is not None and shard is not None:
            raise ValueError("shard: given together with group; pass one of them, a group knows its rank and world")
        if backend is not None:
            kernels.load(backend)  # raises with the remedy
        if geometry.head_dim != D_V:
            raise ValueError(f"geometry: got head_dim {geometry.head_dim}, accepted is {D_V}, DeepSeek-V4's latent row")
        self.geometry = geometry
        self.eps = eps
        self.layer = layer
        self.kind = kind
        self.group = group
        self.shard = _shard(geometry, group, shard)
        self.n_local = self.shard.n_local
        self.policy = Policy.from_env() if policy is None else policy
        self.backend = backend
        self.batch_invariant = batch_invariant
        self.observer = None
        self._kernels: dict[tuple[torch.device, str], tuple[str, Capability]] = {}
        self._sink_cache: SinkCache | None = None

    def extra_repr(self) -> str:
        """Which layer, which part, which policy."""
        return f"layer={self.layer}, kind={self.kind}, shard={self.shard}, policy={self.policy.kind}"

    # -------------------- weights

    def load(self, whole: weights.AttentionWeights) -> MQALayer:
        """Take this rank's part of a whole layer's weights (:func:`headfit.weights.from_transformers`,
        ``from_official``).

        On one rank the tensors are shared with the source, not copied; on several the sharded ones are copies.
        """
        mine = weights.take_shard(whole, self.geometry, self.shard)
        for name in ("q_a", "q_a_norm", "q_b", "kv", "kv_norm", "o_a", "o_b", "sinks"):
            value = getattr(mine, name)
            self.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value, False))
        self._sink_cache = None
        return self

    def load_transformers(self, attention: nn.Module) -> MQALayer:
        """Take the weights of a Transformers ``DeepseekV4Attention``."""
        return self.load(weights.from_transformers(attention, self.geometry))

    def load_official(self, state: Any, prefix: str = "attn.") -> MQALayer:
        """Take the weights from a state dict under DeepSeek's own names; ``prefix`` such as ``"layers.3.attn."``."""
        return self.load(weights.from_official(state, self.geometry, prefix))

    # -------------------- the call

    @torch.no_grad()
    def query_latent(self, hidden: Tensor) -> Tensor:
        """The low-rank query ``[rows, q_lora]`` of hidden ``[rows, hidden]``; the sparse indexer reads it too."""
        self._require_weights()
        return rms(F.linear(hidden, self.q_a), self.q_a_norm, self.eps)

    @torch.no_grad()
    def key_rows(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Latent rows ``[rows, 512]``, key and value at once, normed and rotated; cos, sin ``[rows, 32]``."""
        kv = rms(F.linear(hidden, self.kv), self.kv_norm, self.eps)
        out = torch.empty_like(kv)
        rotate_into(out[:, None], kv[:, None], cos, sin)
        return out

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        window: Keys,
        compressed: Keys | None = None,
        *,
        mode: str = "extend",
        original_mode: str | None = None,
        in_breakable_graph: bool = False,
    ) -> Tensor:
        """Write the rows' latent KV into ``window.cache`` at ``slots``, attend, project, reduce.

        Args:
            hidden: ``[rows, hidden]``.
            cos, sin: ``[rows, rope / 2]`` at each row's position, of this layer's rotary kind.
            slots: integer ``[rows]``: where the new rows go in ``window.cache``; negative writes nothing.
            window: the sliding-window lanes of each row, among them its own.
            compressed: the lanes into the compressed rows, or None for a sliding layer. Writing those is the caller's
                part.
            mode, original_mode, in_breakable_graph: as in :class:`headfit.Call`.

        Returns:
            ``[rows, hidden]`` in hidden's dtype, the same on every rank; with ``shard``, this rank's part of the sum.
        """
        self._require_weights()
        packed.write_rows(window.cache, slots, self.key_rows(hidden, cos, sin))
        return self.attend(
            self.query_latent(hidden), cos, sin, window, compressed,
            mode=mode, original_mode=original_mode, in_breakable_graph=in_breakable_graph,
        )  # fmt: skip

    @torch.no_grad()
    def attend(
        self,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        window: Keys,
        compressed: Keys | None = None,
        *,
        mode: str = "extend",
        original_mode: str | None = None,
        in_breakable_graph: bool = False,
    ) -> Tensor:
        """As :meth:`forward` from the query latent ``[rows, q_lora]`` on, with every key row already in its cache."""
        rows = q_latent.shape[0]
        if self.training:
            raise RuntimeError(
                "MQALayer: got training mode, accepted is inference; call model.eval() before the forward"
            )
        extra = 0 if compressed is None else compressed.topk
        decision = self.plan(
            Call(
                rows, self.n_local, self.geometry.n_heads, mode, original_mode, in_breakable_graph,
                topk=window.topk, extra_topk=extra,
            ),
            q_latent.device,
        )  # fmt: skip
        flat = F.linear(q_latent, self.q_b)  # the same GEMM into the same buffer at every width
        q = self._kernel_query(flat, cos, sin, decision.width)
        del flat
        out = self._attention(q, window, compressed, decision, mode)
        return self._project(out, cos, sin, q_latent.dtype)

    def plan(self, call: Call, device: torch.device) -> WidthDecision:
        """The width this layer would launch ``call`` at on ``device``, under its policy and backend."""
        _, capability = self._backend_on(device)
        return plan_width(call, capability, self.policy)

    # -------------------- the steps

    def _require_weights(self) -> None:
        if "q_a" not in self._parameters:
            raise RuntimeError(
                "MQALayer: got a call before its weights; call load(), load_transformers() or load_official() first"
            )

    def _kernel_query(self, flat: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
        """Per-head norm and rotary from the GEMM's buffer into rows ``[:, :n_local]`` of the kernel's own, bfloat16."""
        rows, dim = flat.shape[0], self.geometry.head_dim
        heads = flat.view(rows, self.n_local, dim)
        q = torch.empty(rows, width, dim, dtype=torch.bfloat16, device=flat.device)
        q[:, self.n_local :].zero_()  # a pad row costs the same whatever it holds, but denormals would cost more
        for part in _blocks(rows, self.n_local * dim, flat.device):
            wide = heads[part].float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            rotate_into(q[part, : self.n_local], wide, cos[part], sin[part])
        return q

    def _attention(
        self, q: Tensor, window: Keys, compressed: Keys | None, decision: WidthDecision, mode: str
    ) -> Tensor:
        """The planned launch: ``[rows, width, 512]`` in, the surviving heads ``[rows, n_local, 512]`` out."""
        name, _ = self._backend_on(q.device, "bf16" if window.cache.dtype == torch.bfloat16 else "v4")
        out = torch.empty_like(q)
        arguments: dict[str, Any] = {
            "indices": window.indices[:, None],
            "topk_length": window.lengths,
            "is_fp8_kvcache": window.cache.dtype != torch.bfloat16,
            "softmax_scale": self.geometry.head_dim**-0.5,
            "attn_sink": self._sinks(decision.width, q.device),
            "out": out[:, None],
            "enable_batch_invariant": self.batch_invariant,
            "backend": name,
        }
        if compressed is not None:
            arguments |= {
                "extra_k_cache": compressed.cache,
                "extra_indices_in_kvcache": compressed.indices[:, None],
                "extra_topk_length": compressed.lengths,
            }
        started = self._clock(q.device)
        _, lse = ops.flash_mla_with_kvcache(q[:, None], window.cache, **arguments)
        if self.observer is not None:
            seconds = self._clock(q.device) - started
            phase: Literal["prefill", "decode"] = "decode" if mode in DECODE_MODES else "prefill"
            mine = slice(0, self.n_local)
            self.observer(
                LaneRecord(
                    self.layer, self.kind, phase, q.shape[0], self.n_local, decision, seconds,
                    out[:, mine], lse[:, mine, 0],
                )
            )  # fmt: skip
        return out[:, : self.n_local]

    def _project(self, out: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse rotary, grouped low-rank projection, the one reduction over ranks: ``[rows, hidden]``."""
        rows, dim = out.shape[0], self.geometry.head_dim
        groups = len(self.shard.groups)
        o_a = self.o_a.view(groups, self.geometry.o_lora_rank, self.n_local // groups * dim)
        latent = torch.empty(rows, groups, self.geometry.o_lora_rank, dtype=dtype, device=out.device)
        for part in _blocks(rows, self.n_local * dim, out.device):
            turned = torch.empty(out[part].shape, dtype=dtype, device=out.device)
            rotate_into(turned, out[part], cos[part], sin[part], inverse=True)
            grouped = turned.view(-1, groups, o_a.shape[-1]).transpose(0, 1)
            latent[part] = torch.bmm(grouped, o_a.transpose(1, 2)).transpose(0, 1)
        result = F.linear(latent.flatten(1), self.o_b)
        if self.group is not None and self.shard.world > 1:
            dist.all_reduce(result, group=self.group)
        return result

    # -------------------- small state

    def _backend_on(self, device: torch.device, layout: str = "v4") -> tuple[str, Capability]:
        """The backend that was asked for, else the first usable one that reads caches of ``layout``."""
        if (device, layout) not in self._kernels:
            name = self.backend if self.backend is not None else _first_backend(device, layout)
            self._kernels[device, layout] = (name, kernels.load(name).capability(_compute_capability(device)))
        return self._kernels[device, layout]

    def _sinks(self, width: int, device: torch.device) -> Tensor:
        """This rank's sinks at a width: prefix views of one allocation, in which the parameter itself lives.

        So whatever writes the parameter in place writes what the next launch reads, also one inside a captured graph,
        and nothing is copied per call. A parameter that was replaced, cast or moved is taken over anew.
        """
        cache = self._sink_cache
        if cache is not None and cache().data_ptr() == self.sinks.data_ptr():
            return cache(width)
        with torch.inference_mode(False):  # made in one call, written in later ones, of any mode
            if cache is None or cache().device != device:
                widest = allocation_width(self.n_local, self.geometry.n_heads, self._backend_on(device)[1])
                cache = self._sink_cache = SinkCache(self.sinks.detach(), self.shard.rank, self.n_local, widest)
            else:
                cache.refresh(self.sinks.detach())
            own = cache(self.n_local)
            if self.sinks.dtype == own.dtype and self.sinks.device == own.device and not self.sinks.is_inference():
                self.sinks.data = own  # the same Parameter object: whoever shares it still does
            else:
                self.sinks = nn.Parameter(own, requires_grad=False)
        return cache(width)

    def _clock(self, device: torch.device) -> float:
        if self.observer is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def set_policy(model: nn.Module, policy: Policy) -> int:
    """Give every :class:`MQALayer` inside ``model`` (or ``model`` itself) the policy; returns how many there were.

    Raises:
        ValueError: the model has no MQALayer.
    """
    return _each(model, lambda layer: setattr(layer, "policy", policy))


def set_observer(model: nn.Module, observer: Callable[[LaneRecord], None] | None) -> int:
    """Call ``observer`` with a :class:`LaneRecord` after each attention call of each layer; None stops that.

    Raises:
        ValueError: the model has no MQALayer.
    """
    return _each(model, lambda layer: setattr(layer, "observer", observer))


def _each(model: nn.Module, action: Callable[[MQALayer], None]) -> int:
    layers = [m for m in model.modules() if isinstance(m, MQALayer)]
    if not layers:
        raise ValueError(
            f"model: got {type(model).__name__} without an MQALayer, accepted is a converted model; call "
            f"headfit.engines.transformers.convert(model) first"
        )
    for layer in layers:
        action(layer)
    return len(layers)


def _shard(geometry: Geometry, group: dist.ProcessGroup | None, shard: Shard | tuple[int, int] | None) -> Shard:
    if isinstance(shard, Shard):
        return shard
    if shard is not None:
        rank, world = shard
    elif group is not None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
    else:
        rank, world = 0, 1
    return geometry.shard(rank, world)


def _first_backend(device: torch.device, layout: str) -> str:
    usable = kernels.backends()
    fits = [n for n in usable if kernels.REGISTRY[n].automatic and device.type in kernels.REGISTRY[n].device_types]
    name = kernels.first_reading(layout, fits, _compute_capability(device))
    if name is not None:
        return name
    raise kernels.BackendUnavailable(
        f"no backend runs on {device.type} here; usable are {', '.join(usable) or 'none'}; `headfit doctor` says why"
    )


def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    return arch.current(device).capability if device.type == "cuda" else None


def _blocks(rows: int, elements: int, device: torch.device) -> list[slice]:
    """Row slices whose float32 copies stay within the workspace of the device."""
    budget = _WORKSPACE.get(device.type, _WORKSPACE_GPU)
    step = max(1, budget // (4 * elements))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
