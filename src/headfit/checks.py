"""Argument checks: every rule a public attention call must satisfy, with the remedy in the message.

All validation happens here, before any backend sees the call. Nothing in this file launches, allocates or reads a value
of a tensor: only dtypes, shapes, strides and devices are looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headfit.cache import LAYOUTS
from headfit.cache import layout_of as layout_of
from headfit.call import D_V, KeySet

D_QK = (512, 576)  # DeepSeek-V4; DeepSeek-V3.2 and GLM (CONTRACT, Shapes)
MAX_HEADS = 128
MAX_SCALE = torch.finfo(torch.float32).max  # kernels multiply in float32


def tensor(name: str, value: Any, dtype: torch.dtype | tuple[torch.dtype, ...], shape: str) -> Tensor:
    """``value`` if it is a tensor of one of the dtypes with the dims ``shape`` names; else TypeError/ValueError."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    dims = shape.count(",") + 1
    if isinstance(value, Tensor) and value.dtype in dtypes and value.dim() == dims:
        return value
    accepted = f"{' or '.join(str(d) for d in dtypes)} {shape}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, accepted is a torch.Tensor, {accepted}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, accepted is {accepted}; convert it before the call")
    raise ValueError(f"{name}: got shape {tuple(value.shape)} ({value.dim()} dims), accepted is {accepted}")


def last_dim_contiguous(name: str, value: Tensor) -> None:
    """ValueError unless neighbours in the last dim are neighbours in memory."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name}: got stride {value.stride(-1)} in the last dim, accepted is 1 (other strides are free); "
            f"pass {name}.contiguous()"
        )


def same_device(name: str, value: Tensor, device: torch.device) -> None:
    """ValueError unless ``value`` lies where q lies."""
    if value.device != device:
        raise ValueError(f"{name}: got device {value.device}, accepted is {device}, where q is; move it first")


def exact_shape(name: str, value: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """ValueError unless the shape is exactly this one; ``meaning`` says which argument it follows from."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, accepted is {shape} = {meaning}")


def query(q: Any, shape: str) -> Tensor:
    """A legal q: bfloat16, 1..128 heads, 512 or 576 dims, last dim contiguous."""
    q = tensor("q", q, torch.bfloat16, shape)
    h_q, d_qk = q.shape[-2:]
    if not 1 <= h_q <= MAX_HEADS:
        raise ValueError(f"q: got {h_q} heads (shape {tuple(q.shape)}), accepted is 1 to {MAX_HEADS}; split the heads")
    if d_qk not in D_QK:
        raise ValueError(f"q: got {d_qk} dims (shape {tuple(q.shape)}), accepted are 512 (V4) and 576 (V3.2, GLM)")
    last_dim_contiguous("q", q)
    return q


def flag(name: str, value: Any) -> bool:
    """A Python bool; a string such as "no" would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), accepted is True or False")
    return value


def head_dim_v(name: str, value: Any) -> None:
    """V is the first 512 dims of a row."""
    if not isinstance(value, int) or value != D_V:
        raise ValueError(f"{name}: got {value!r}, accepted is {D_V}: V is the first {D_V} dims of a key row")


def softmax_scale(name: str, value: Any, d_qk: int) -> float:
    """A finite real number, ``d_qk ** -0.5`` for None."""
    if value is None:
        return d_qk**-0.5
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, accepted is a Python float, or None for d_qk ** -0.5")
    if not -MAX_SCALE <= value <= MAX_SCALE:  # NaN too; not math.isfinite, which torch.compile cannot trace
        raise ValueError(f"{name}: got {value}, accepted is a finite float32 number")
    return float(value)


def attn_sink(value: Any, h_q: int, device: torch.device) -> Tensor | None:
    """None, or float32 [h_q] on q's device."""
    if value is None:
        return None
    sink = tensor("attn_sink", value, torch.float32, "[h_q]")
    exact_shape("attn_sink", sink, (h_q,), f"[h_q], one sink a head of q ({h_q}); slice a padded sink: sink[:h_q]")
    same_device("attn_sink", sink, device)
    last_dim_contiguous("attn_sink", sink)
    return sink


def lengths(name: str, value: Any, count: int, device: torch.device) -> Tensor | None:
    """None, or int32 [count] on q's device; values are clamped in the kernel and never read here."""
    if value is None:
        return None
    out = tensor(name, value, torch.int32, "[b]")
    exact_shape(name, out, (count,), f"one length for each of the {count} entries of q's first dim")
    same_device(name, out, device)
    last_dim_contiguous(name, out)
    return out


def indices(name: str, value: Any, lead: tuple[int, ...], shape: str, device: torch.device) -> Tensor:
    """int32 lanes for each row of q, any topk >= 0."""
    out = tensor(name, value, torch.int32, shape)
    if tuple(out.shape[:-1]) != lead:
        raise ValueError(
            f"{name}: got shape {tuple(out.shape)}, accepted is {shape} = {(*lead, 'topk')}: one list a row of q"
        )
    same_device(name, out, device)
    last_dim_contiguous(name, out)
    return out


def output(out: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """A legal ``out``: bfloat16 of the result's shape, last dim contiguous, no element twice."""
    names = "[b, s_q, h_q, 512]" if len(shape) == 4 else "[s_q, h_q, 512]"
    out = tensor("out", out, torch.bfloat16, names)
    exact_shape("out", out, shape, names)
    same_device("out", out, q.device)
    last_dim_contiguous("out", out)
    if _overlaps(out):
        raise ValueError(f"out: got strides {out.stride()} that reach one element twice; pass a view without overlap")
    return out


def _overlaps(t: Tensor) -> bool:
    """Whether two index tuples may reach one address; exact for views made by slicing, narrowing and permuting."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def packed_cache(name: str, value: Any, d_qk: int, device: torch.device) -> tuple[Tensor, str]:
    """A packed cache view [pages, page_size, 1, bytes] as uint8, and the name of its layout."""
    shape = "[pages, page_size, 1, bytes_per_token]"
    cache = tensor(name, value, (torch.uint8, torch.float8_e4m3fn), shape)
    _one_kv_head(name, cache, shape)
    layout = layout_of(cache.shape[-1])
    if layout.d_qk != d_qk:
        wanted = " or ".join(f"{x.name} ({x.bytes_per_token} B a token)" for x in LAYOUTS.values() if x.d_qk == d_qk)
        raise ValueError(
            f"{name}: got layout {layout.name} ({layout.bytes_per_token} B a token, d_qk {layout.d_qk}), "
            f"accepted for q of {d_qk} dims is {wanted}"
        )
    row = layout.bytes_per_token
    if cache.stride(-1) != 1 or (cache.shape[1] > 1 and cache.stride(1) != row):
        raise ValueError(
            f"{name}: got strides {cache.stride()}, accepted is stride(1) = {row} and stride(3) = 1, pages whole and "
            f"in order (the page stride is free); make caches with headfit.pack_kv or as FlashMLA does"
        )
    same_device(name, cache, device)
    return (cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)), layout.name


def plain_cache(name: str, value: Any, d_qk: int, device: torch.device) -> Tensor:
    """Plain bfloat16 pages [pages, page_size, 1, d_qk]; page and row strides are free."""
    shape = "[pages, page_size, 1, d_qk]"
    cache = tensor(name, value, torch.bfloat16, shape)
    _one_kv_head(name, cache, shape)
    if cache.shape[-1] != d_qk:
        raise ValueError(f"{name}: got rows of {cache.shape[-1]} dims, accepted is {d_qk}, the dims of q")
    last_dim_contiguous(name, cache)
    same_device(name, cache, device)
    return cache


def _one_kv_head(name: str, cache: Tensor, shape: str) -> None:
    if cache.shape[2] != 1:
        raise ValueError(f"{name}: got {cache.shape[2]} KV heads, accepted is 1: {shape}; MLA has one latent KV head")
    if cache.shape[1] < 1:
        raise ValueError(f"{name}: got page_size {cache.shape[1]}, accepted is 1 or more: {shape}")
    slots = cache.shape[0] * cache.shape[1]
    if slots > 2**31:
        raise ValueError(f"{name}: got {slots} slots, accepted are up to 2**31, all that int32 can name; split it")


def key_set(cache: Tensor, layout: str, lanes: Tensor, length: Tensor | None) -> KeySet:
    """The cache and its lanes as a backend reads them."""
    page_size = cache.shape[1]
    row_stride = LAYOUTS[layout].data_bytes if layout in LAYOUTS else cache.stride(1)
    return KeySet(
        data=cache,
        layout=layout,
        page_size=page_size,
        page_stride=cache.stride(0),
        row_stride=row_stride,
        slots=cache.shape[0] * page_size,
        indices=lanes,
        lengths=length,
    )
