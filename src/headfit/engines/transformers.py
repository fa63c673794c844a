"""Transformers' DeepSeek-V4 on headfit: swap every attention for one that runs the planned width from packed pages.

What belongs here: the swap and its reversal, the key rows of a Transformers cache mirrored into pages, the lanes of
each row (sliding mask, sparse choice). What does not: projections and attention (``layer``), bytes (``cache``).

The model's own compressor and indexer run unchanged and decide what is compressed and chosen. The Transformers cache
stays the truth and is updated as before; the pages are a mirror of it, kept on the cache object's own layers, so two
caches can be used in turn, ``reset`` and ``reorder_cache`` are seen, and a cache outlives :func:`revert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headfit.engines import require
from headfit.geometry import Geometry
from headfit.layer import Keys, MQALayer
from headfit.pages import LAYOUTS, PagedRows, WindowRows
from headfit.width import Policy

_ATTRIBUTE = "headfit_pages"  # where a cache layer of Transformers carries its mirror
_FAR = torch.iinfo(torch.int32).max  # sorts after every row


def convert(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    policy: Policy | None = None,
    *,
    cache_layout: str = "v4",
    page_size: int = 64,
    backend: str | None = None,
    keep_original: bool = True,
) -> nn.Module:
    """Swap every attention of a DeepSeek-V4 model for headfit's, in place; returns the model.

    Args:
        model: a Transformers ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model`` with eager attention, already on its
            device and in its dtype. Everything but attention stays replicated and untouched.
        group: tensor-parallel process group; every rank converts the same model and feeds it the same tokens. None:
            one rank.
        policy: which widths are wanted; None reads the environment. :func:`headfit.layer.set_policy` changes it later.
        cache_layout: ``"v4"``, FP8 pages of 584 bytes a row, or ``"bf16"``, plain pages.
        page_size: rows a page, >= 1.
        backend: a name from :func:`headfit.backends`, or None for the first on the model's device.
        keep_original: keep the untouched attentions so that :func:`revert` works. False lets go of the weights that
            other ranks own.

    Masks are read as allowed or not: the sliding window with any padding, as Transformers builds it. Additive values in
    between, masks that reach beyond the window, attention dropout and gradients are not supported.

    Raises:
        ImportError: Transformers is missing or too old.
        TypeError: not a DeepSeek-V4 model.
        ValueError: already converted, unknown layout or page size, a geometry the kernels do not take, or a group
            that does not divide the heads; the model is then unchanged.
    """
    require("transformers")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, accepted is a Transformers DeepseekV4ForCausalLM")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy: got {policy!r}, accepted is None or a headfit.Policy such as Policy.native()")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    config: Any = getattr(model, "config", None)
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, DeepseekV4Attention)]
    if any(isinstance(m, MQAAttention) for m in model.modules()):
        raise ValueError("model: got a converted model, accepted is an untouched one; call revert(model) first")
    if not found:
        raise TypeError(
            f"model: got {type(model).__name__} (model_type {getattr(config, 'model_type', None)!r}), accepted is a "
            f"Transformers DeepseekV4ForCausalLM or DeepseekV4Model"
        )
    if cache_layout not in LAYOUTS:
        raise ValueError(f"cache_layout: got {cache_layout!r}, accepted are {' and '.join(map(repr, LAYOUTS))}")
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise ValueError(f"page_size: got {page_size}, accepted is a number of rows >= 1")
    geometry = Geometry.from_config(config)
    made = []
    for name, attention in found:
        layer = MQALayer(
            geometry,
            layer=attention.layer_idx,
            kind=geometry.layer_kinds[attention.layer_idx],
            eps=config.rms_norm_eps,
            group=group,
            policy=policy,
            backend=backend,
        ).load_transformers(attention)
        made.append((name, MQAAttention(attention, layer, cache_layout, page_size, keep_original).eval()))
    for name, module in made:
        _replace(model, name, module)
    return model


def revert(model: nn.Module) -> nn.Module:
    """Put the untouched attentions back, in place; returns the model. Caches filled meanwhile stay usable.

    Raises:
        ValueError: the model is not converted, or was converted with ``keep_original=False``.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, MQAAttention)]
    if not found:
        raise ValueError(
            f"model: got {type(model).__name__} without converted attentions, accepted is a converted model"
        )
    if any(m.original is None for _, m in found):
        raise ValueError("model: converted with keep_original=False, so its attentions are gone; load the model again")
    for name, module in found:
        _replace(model, name, module.original)
    return model


def _replace(model: nn.Module, name: str, module: nn.Module | None) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


@dataclass(eq=False)
class LayerPages:
    """The pages of one layer of one Transformers cache, and which of its tensors they mirror."""

    window: WindowRows
    compressed: PagedRows
    keys: Tensor | None = None  # the cache layer's `keys` after our last write
    source: Tensor | None = None  # its compressed rows, likewise
    written: int = 0  # compressed rows in pages

    @classmethod
    def empty(cls, batch: int, layout: str, page_size: int, device: torch.device) -> LayerPages:
        """No rows yet."""
        window = WindowRows(batch, layout=layout, page_size=page_size, device=device)
        return cls(window, PagedRows(batch, layout=layout, page_size=page_size, device=device))

    def fits(self, batch: int, layout: str, page_size: int, device: torch.device) -> bool:
        """Whether the pages are of this shape."""
        w = self.window
        return (w.batch, w.layout, w.page_size, w.data.device) == (batch, layout, page_size, device)


class MQAAttention(nn.Module):
    """Stands where a ``DeepseekV4Attention`` stood, with the same forward.

    Attributes:
        layer: the :class:`headfit.MQALayer`.
        compressor: the model's own, or None for a sliding layer.
        original: the untouched attention, or None. Not a submodule: it takes no part in ``parameters()`` or ``to()``.
    """

    def __init__(self, original: Any, layer: MQALayer, cache_layout: str, page_size: int, keep: bool) -> None:
        super().__init__()
        self.layer = layer
        self.compressor: Any = original.compressor
        self.config = original.config
        self.layer_idx: int = original.layer_idx
        self.layer_type: str = original.layer_type
        self.rope_layer_type: str = original.rope_layer_type
        self.sliding_window: int = original.sliding_window
        self.cache_layout = cache_layout
        self.page_size = page_size
        self._kept: tuple[nn.Module, ...] = (original,) if keep else ()

    @property
    def original(self) -> nn.Module | None:
        """The attention that stood here before."""
        return self._kept[0] if self._kept else None

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # what Transformers called `cache` before 5.18
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As ``DeepseekV4Attention.forward``: hidden ``[batch, length, hidden]`` in and out; no attention weights."""
        cache = past_key_values if cache is None else cache
        batch, length, width = hidden_states.shape
        flat = hidden_states.reshape(batch * length, width)
        cos, sin = (
            table.expand(batch, length, -1).reshape(batch * length, -1)
            for table in position_embeddings[self.rope_layer_type]
        )
        q_latent = self.layer.query_latent(flat)
        kv = self.layer.key_rows(flat, cos, sin).view(batch, length, -1)
        pages, past = self._write_window(cache, kv)
        positions, lengths = window_lanes(past, length, self.sliding_window, attention_mask, batch, flat.device)
        sequence = torch.arange(batch, device=flat.device)[:, None, None]
        window = _keys(pages.window, pages.window.slots_of(sequence, positions), lengths)
        compressed = None
        if self.compressor is not None:
            residual = q_latent.view(batch, length, -1)
            compressed = self._compress(pages, cache, hidden_states, residual, position_ids)
        mode = "decode" if length == 1 and past > 0 else "extend"
        out = self.layer.attend(q_latent, cos, sin, window, compressed, mode=mode)
        return out.view(batch, length, width), None

    def _write_window(self, cache: Any, kv: Tensor) -> tuple[LayerPages, int]:
        """Update the Transformers cache and its mirror with new rows ``[batch, n, 512]``; positions seen before."""
        shape = (kv.shape[0], self.cache_layout, self.page_size, kv.device)
        if cache is None:
            pages = LayerPages.empty(*shape)
            pages.window.extend(0, kv, None)
            return pages, 0
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        self._check_cache(cache, layer)
        past = int(cache.get_seq_length(self.layer_idx))
        keys = getattr(layer, "keys", None)
        kept = None
        if past and isinstance(keys, Tensor) and keys.numel():
            kept = keys[:, 0, max(keys.shape[2] - self.sliding_window + 1, 0) :].to(kv.device)
        mirror = getattr(layer, _ATTRIBUTE, None)
        pages = mirror if mirror is not None and mirror.fits(*shape) else LayerPages.empty(*shape)
        if kept is not None and pages.keys is not keys:
            pages.window.refill(past, kept)
        cache.update(kv[:, None], kv[:, None], self.layer_idx)
        pages.window.extend(past, kv, kept)
        layer = cache.layers[self.layer_idx]
        pages.keys = layer.keys
        setattr(layer, _ATTRIBUTE, pages)
        return pages, past

    def _check_cache(self, cache: Any, layer: Any) -> None:
        if self.compressor is not None and not hasattr(layer, "store_compression_weights"):
            raise TypeError(
                f"cache: got {type(cache).__name__} whose layer {self.layer_idx} is {type(layer).__name__}, accepted "
                f"is DeepSeek-V4's own cache; make it with DynamicCache(config=model.config)"
            )

    def _compress(
        self, pages: LayerPages, cache: Any, hidden: Tensor, q_residual: Tensor, position_ids: Tensor
    ) -> Keys | None:
        """Run the model's compressor, mirror its new rows, and turn its choice into lanes; None without rows."""
        layer = None if cache is None else cache.layers[self.layer_idx]
        if layer is None or layer.compressed_kv["compressor"] is not pages.source:
            pages.written = 0
        chosen: list[Tensor] = []
        indexer = getattr(self.compressor, "indexer", None)
        hook = None if indexer is None else indexer.register_forward_hook(lambda m, a, out: chosen.append(out))
        try:
            rows, bias = self.compressor(hidden, q_residual, position_ids, cache, self.layer_idx)
        finally:
            if hook is not None:
                hook.remove()
        count = rows.shape[2]
        pages.compressed.reserve(count)
        pages.compressed.write(pages.written, rows[:, 0, pages.written :])
        pages.written = count
        pages.source = None if layer is None else layer.compressed_kv["compressor"]
        if count == 0:
            return None
        batch, length = hidden.shape[:2]
        sequence = torch.arange(batch, device=hidden.device)[:, None, None]
        if indexer is not None:
            row, lengths = sorted_choice(chosen[0])
            row = row.expand(batch, -1, -1)
        else:
            row, lengths = causal_prefix(bias, count, batch, length, hidden.device)
        return _keys(pages.compressed, pages.compressed.slots(sequence, row).expand(batch, length, -1), lengths)


def _keys(pages: PagedRows, slots: Tensor, lengths: Tensor) -> Keys:
    """Lanes ``[batch, length, n]`` as the layer takes them, one row each."""
    rows = lengths.numel()
    return Keys(pages.data, slots.to(torch.int32).reshape(rows, -1), lengths.to(torch.int32).reshape(rows))


def window_lanes(
    past: int, length: int, window: int, mask: Tensor | None, batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions each new row may see in its sliding window, oldest first, invalid ones behind.

    Args:
        past: positions before this call. Row ``i`` stands at position ``past + i``.
        length: rows a sequence.
        window: keys a row may see at most, itself included.
        mask: ``[batch or 1, 1 or more, length, columns]``, boolean (True is allowed) or additive (0 is allowed),
            whose last column is the last new row; None is the plain sliding window.
        batch, device: of the call.

    Returns:
        positions int64 ``[batch, length, window]`` (0 where there is none) and how many are valid, ``[batch, length]``.
    """
    here = past + torch.arange(length, device=device)
    lane = torch.arange(window, device=device)
    if mask is None:
        oldest = (here - window + 1).clamp_min(0)
        count = here - oldest + 1
        positions = torch.where(lane < count[:, None], oldest[:, None] + lane, 0)
        return positions.expand(batch, -1, -1), count.expand(batch, -1)
    if mask.dim() != 4 or mask.shape[2] != length:
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, accepted is [batch, 1, {length}, keys], as the model "
            f"builds it with eager attention; pass the 2-D padding mask to the model, not to the layer"
        )
    positions = here[:, None] - window + 1 + lane
    column = positions - (past + length - mask.shape[-1])
    inside = (positions >= 0) & (column >= 0)
    open_ = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
    allowed = open_.expand(batch, -1, -1).gather(-1, column.clamp_min(0).expand(batch, -1, -1)) & inside
    # Valid lanes move to the front, the others to a spare one at the end.
    place = torch.where(allowed, allowed.cumsum(-1) - 1, window)
    packed = torch.zeros(batch, length, window + 1, dtype=torch.int64, device=device)
    packed.scatter_(-1, place, positions.expand(batch, -1, -1))
    return packed[..., :window], allowed.sum(-1)


def sorted_choice(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The indexer's rows ``[batch, length, k]`` (-1 is none) in ascending order, and how many are valid.

    Ascending, so that a row's result does not depend on the order in which equal scores came, and gathers run forward.
    """
    order = torch.where(chosen < 0, _FAR, chosen).to(torch.int32).sort(-1).values
    valid = order != _FAR
    return torch.where(valid, order, 0).long(), valid.sum(-1)


def causal_prefix(
    bias: Tensor | None, count: int, batch: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Lanes of a heavily compressed layer: all rows in order, of which each query sees as many as its bias leaves open.

    ``bias`` is the compressor's ``[batch, 1, length, count]``, 0 where open; None opens all, as in a decode step.
    """
    row = torch.arange(count, device=device).expand(batch, 1, count)
    if bias is None:
        return row, torch.full((batch, length), count, device=device)
    return row, (bias[:, 0] == 0).sum(-1).expand(batch, length)
