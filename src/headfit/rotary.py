"""Rotary position embedding on the last dims of a head, DeepSeek-V4's way: interleaved pairs, half-sized tables.

Source of the convention: dims ``(2i, 2i + 1)`` of the rotary part turn by the angle ``position * inv_freq[i]``, as in
DeepSeek's own inference code and in Transformers' ``deepseek_v4``. Keys are values too, so an attention output
carries the keys' angles and is turned back by the query's (``inverse=True``). Nothing here knows about caches or ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Plain (unscaled) tables: cos and sin, float32 ``[*positions.shape, dim // 2]``.

    Args:
        positions: integer tensor of any shape.
        dim: rotary dims of a head, even (64 in DeepSeek-V4).
        theta: the base, 10000 for sliding layers. Compressed layers of released checkpoints scale theirs (YaRN): pass
            the model's own tables there.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim: got {dim}, accepted is an even number of rotary dims >= 2")
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angles = positions[..., None].float() * inverse
    return angles.cos(), angles.sin()


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> None:
    """Write ``x`` with its last ``2 * cos.shape[-1]`` dims rotated into ``out``; the leading dims are copied.

    Args:
        out: ``[rows, heads, dim]``, any float dtype, any strides; written once, rounded once from float32.
        x: ``[rows, heads, dim]``, any float dtype.
        cos, sin: ``[rows, rope / 2]``, one entry a pair.
        inverse: turn back by the same angles.
    """
    rope = 2 * cos.shape[-1]
    plain = x.shape[-1] - rope
    out[..., :plain].copy_(x[..., :plain])
    c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    if inverse:
        s = -s
    even, odd = x[..., plain::2].float(), x[..., plain + 1 :: 2].float()
    out[..., plain::2].copy_(even * c - odd * s)
    out[..., plain + 1 :: 2].copy_(odd * c + even * s)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dim in float32, rounded once to ``x.dtype``; ``weight`` None is all ones."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = weight.float() * wide
    return wide.to(x.dtype)
