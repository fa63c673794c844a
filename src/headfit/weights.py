"""Attention weights of one DeepSeek-V4 layer: where they come from and which part a rank owns.

Two sources are read: a Transformers ``DeepseekV4Attention`` (or any object with the same attribute names) and a state
dict under the official checkpoint names (``attn.wq_a.weight``, ``attn.q_norm.weight``, ..., ``attn.attn_sink``; FP8
weights come with ``<name>.scale``, one scale per 128 x 128 block). Nothing here runs a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headfit.geometry import Geometry, Shard

# Our name -> (Transformers' module, official name). Transformers' own conversion table (`deepseek_v4`) renames the
# second to the first and changes no layout, so both sources give the same tensors.
_NAMES = {
    "q_a": ("q_a_proj", "wq_a"),
    "q_a_norm": ("q_a_norm", "q_norm"),
    "q_b": ("q_b_proj", "wq_b"),
    "kv": ("kv_proj", "wkv"),
    "kv_norm": ("kv_norm", "kv_norm"),
    "o_a": ("o_a_proj", "wo_a"),
    "o_b": ("o_b_proj", "wo_b"),
}
_BLOCK = 128  # block edge of the FP8 scales in DeepSeek's checkpoints (`weight_block_size` [128, 128])
_SCALE_SUFFIXES = ("weight_scale_inv", "scale")  # Transformers' and the official name of the companion


@dataclass(frozen=True)
class AttentionWeights:
    """The tensors of one attention layer, whole (a checkpoint's) or one rank's part of them.

    Shapes of a whole layer: q_a ``[q_lora, hidden]``, q_a_norm ``[q_lora]``, q_b ``[heads * 512, q_lora]``, kv
    ``[512, hidden]``, kv_norm ``[512]``, o_a ``[groups, o_lora, heads / groups * 512]``, o_b ``[hidden, groups *
    o_lora]``, sinks float32 ``[heads]``.
    """

    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv: Tensor
    kv_norm: Tensor
    o_a: Tensor
    o_b: Tensor
    sinks: Tensor


def dequantize_blocks(weight: Tensor, scale: Tensor, name: str = "weight") -> Tensor:
    """An FP8 weight ``[out, in]`` times its block scales, float32.

    Args:
        weight: float8_e4m3fn (or any float) ``[out, in]``.
        scale: ``[ceil(out / 128), ceil(in / 128)]`` float32, bfloat16 or e8m0 (also as uint8 exponents: value
            ``2 ** (byte - 127)``, as DeepSeek stores them).
        name: what the error calls the weight.

    Raises:
        ValueError: the scale's shape does not fit 128 x 128 blocks.
    """
    rows, cols = weight.shape
    blocks = (-(-rows // _BLOCK), -(-cols // _BLOCK))
    if tuple(scale.shape) != blocks:
        raise ValueError(
            f"{name}: got scales of shape {tuple(scale.shape)} for a weight {tuple(weight.shape)}, accepted is "
            f"{blocks}, one per {_BLOCK} x {_BLOCK} block; convert other quantisations to bfloat16 first"
        )
    factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    wide = factors.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :cols]
    return weight.float() * wide


def from_transformers(attention: Any, geometry: Geometry) -> AttentionWeights:
    """The weights of a Transformers ``DeepseekV4Attention``: the same tensors, not copies, unless they are FP8.

    Raises:
        ValueError: a module or its weight is missing, or has another shape than ``geometry`` says.
    """
    found: dict[str, Tensor] = {}
    for ours, (module_name, _) in _NAMES.items():
        module: Any = getattr(attention, module_name, None)
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise ValueError(
                f"attention: got {type(attention).__name__} without {module_name}.weight, accepted is a Transformers "
                f"DeepseekV4Attention"
            )
        scales = {s: getattr(module, s, None) for s in _SCALE_SUFFIXES}
        found[ours] = _plain(module_name, module.weight, scales)
    found["sinks"] = attention.sinks
    return _checked(found, geometry)


def from_official(state: Mapping[str, Tensor], geometry: Geometry, prefix: str = "attn.") -> AttentionWeights:
    """The weights of one layer from a state dict under DeepSeek's own names.

    Args:
        state: name to tensor, for example one shard of the checkpoint opened with safetensors.
        geometry: the shapes to expect.
        prefix: what stands before ``wq_a.weight``: ``"layers.3.attn."`` in a whole checkpoint.

    Raises:
        ValueError: a name is missing (the message lists which), or a shape does not fit ``geometry``.
    """
    wanted = {ours: f"{prefix}{official}.weight" for ours, (_, official) in _NAMES.items()}
    wanted["sinks"] = f"{prefix}attn_sink"
    missing = sorted(name for name in wanted.values() if name not in state)
    if missing:
        raise ValueError(
            f"state: got no {', '.join(missing)}; accepted are DeepSeek-V4's official names under prefix {prefix!r} "
            f"(such as 'layers.0.attn.')"
        )
    found = {}
    for ours, name in wanted.items():
        stem = name.removesuffix("weight")
        found[ours] = _plain(name, state[name], {s: state.get(stem + s) for s in _SCALE_SUFFIXES})
    return _checked(found, geometry)


def _plain(name: str, weight: Tensor, scales: Mapping[str, Tensor | None]) -> Tensor:
    """The weight as it computes: FP8 is dequantised to bfloat16, everything else stays what it is."""
    scale = next((s for s in scales.values() if isinstance(s, Tensor)), None)
    if weight.dtype.itemsize > 1:
        return weight
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or weight.dim() != 2:
        raise ValueError(
            f"{name}: got dtype {weight.dtype}, accepted are floating-point weights and block-scaled float8"
        )
    if scale is None:
        raise ValueError(
            f"{name}: got {weight.dtype} without a companion scale, accepted is FP8 with {_SCALE_SUFFIXES}"
        )
    return dequantize_blocks(weight.detach(), scale.detach(), name).to(torch.bfloat16)


def _checked(found: dict[str, Tensor], geometry: Geometry) -> AttentionWeights:
    g = geometry
    shapes = {
        "q_a": (g.q_lora_rank, g.hidden_size),
        "q_a_norm": (g.q_lora_rank,),
        "q_b": (g.n_heads * g.head_dim, g.q_lora_rank),
        "kv": (g.head_dim, g.hidden_size),
        "kv_norm": (g.head_dim,),
        "o_a": (g.o_groups, g.o_lora_rank, g.heads_per_group * g.head_dim),
        "o_b": (g.hidden_size, g.o_groups * g.o_lora_rank),
        "sinks": (g.n_heads,),
    }
    for name, shape in shapes.items():
        numel = 1
        for size in shape:
            numel *= size
        flat_ok = name == "o_a" and found[name].dim() == 2 and found[name].shape[-1] == shape[-1]
        if found[name].numel() != numel or (tuple(found[name].shape) != shape and not flat_ok):
            raise ValueError(f"{name}: got shape {tuple(found[name].shape)}, accepted is {shape} for {geometry}")
    return AttentionWeights(**found)


def take_shard(weights: AttentionWeights, geometry: Geometry, shard: Shard) -> AttentionWeights:
    """One rank's part of a whole layer: its heads of q_b, o_a and sinks, its groups of o_a and o_b; the rest is whole.

    Beyond ``o_groups`` ranks a rank owns some heads of one group: it gets those columns of the group's o_a and the
    group's whole o_b. Both output projections are linear, so the sum over ranks of what they give is the layer's
    output.
    """
    if shard.world == 1:
        return weights
    g = geometry
    dim = g.head_dim
    heads, groups = shard.heads, shard.groups
    whole = weights.o_a.reshape(g.o_groups, g.o_lora_rank, -1)
    width = shard.heads_per_local_group
    first = shard.group_part * width  # the rank's first head, counted inside its first group
    part = {
        "q_b": weights.q_b[heads.start * dim : heads.stop * dim],
        "o_a": whole[groups.start : groups.stop, :, first * dim : (first + width) * dim],
        "o_b": weights.o_b[:, groups.start * g.o_lora_rank : groups.stop * g.o_lora_rank],
        "sinks": weights.sinks[heads.start : heads.stop],
    }
    # Copies: a view would keep the whole layer's memory alive on every rank.
    copies = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in part.items()}
    rest = {f.name: getattr(weights, f.name) for f in fields(weights) if f.name not in part}
    return AttentionWeights(**rest, **copies)
