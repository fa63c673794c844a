"""One rank's attention sinks, at every width a kernel may be launched with, from one allocation that never moves.

Belongs here: `SinkCache`. Does not belong here: kernels, policies, choosing a width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _checked(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}, need an integer >= {least}; pass a plain int")
    return value


class SinkCache:
    """Prefix views of one padded sink tensor, so that a pointer baked into a captured CUDA graph stays valid.

    Args:
        attn_sink: floating point ``[n]``, natural-log units: this rank's sinks (``n == n_local``) or those of the whole
            model (``n`` a multiple of ``n_local`` that reaches row ``(rank + 1) * n_local - 1``; the rank's rows are
            taken). Any float dtype comes in, since checkpoints differ; what a kernel sees is float32.
        rank: position in the tensor-parallel group, from 0.
        n_local: query heads this rank owns, >= 1.
        padded: heads of the one allocation, >= n_local: the widest launch (see `headfit.width.allocation_width`).

    The rows of pad heads hold -inf. The sink enters as ``out *= 1 / (1 + exp(sink - lse))``, then times exactly
    1: no pad head can overflow or become NaN through its sink, whatever garbage its query rows hold. FlashInfer's
    comments expect -inf and vLLM's tests use it; SGLang pads with 0.0. They differ only in rows that are thrown away.

    No value is read on the host. A cache does not follow a module to another device: build a new one there.

    Raises:
        TypeError, ValueError: naming the argument, what came, what is accepted and what to do.
    """

    def __init__(self, attn_sink: Tensor, rank: int, n_local: int, padded: int) -> None:
        self.rank = _checked("rank", rank, 0)
        self.n_local = _checked("n_local", n_local, 1)
        self.padded = _checked("padded", padded, 1)
        if padded < n_local:
            raise ValueError(f"padded: got {padded}, need at least n_local = {n_local}; pass the widest launch")
        owned = self._owned(attn_sink)
        # Outside inference mode even where a model is built inside it: an inference tensor could never be refreshed.
        with torch.inference_mode(False), torch.no_grad():
            self._sink = torch.full((padded,), -torch.inf, dtype=torch.float32, device=owned.device)
            self._sink[:n_local].copy_(owned)
        self._views: dict[int, Tensor] = {}

    def _owned(self, attn_sink: Tensor) -> Tensor:
        if not isinstance(attn_sink, Tensor):
            raise TypeError(f"attn_sink: got {type(attn_sink).__name__}, need a torch.Tensor of float32 [heads]")
        n_local, shape = self.n_local, list(attn_sink.shape)
        if attn_sink.dim() != 1 or not attn_sink.is_floating_point():
            raise ValueError(f"attn_sink: got {attn_sink.dtype} {shape}, need float32 [{n_local}] or [all heads]")
        first = 0 if shape[0] == n_local else self.rank * n_local
        if shape[0] < first + n_local or shape[0] % n_local:
            raise ValueError(
                f"attn_sink: got {shape[0]} heads, need the {n_local} of this rank, or all of the model, of which "
                f"rank {self.rank} owns {first} to {first + n_local - 1}; pass one of these"
            )
        return attn_sink.detach()[first : first + n_local]

    def __call__(self, width: int | None = None) -> Tensor:
        """The sinks at ``width`` heads: float32 ``[width]``, contiguous.

        None and the stored width return the very same tensor object; a narrower width returns a prefix view of it. Each
        width returns the same object and the same ``data_ptr`` every time, also after `refresh`.

        Raises:
            ValueError: for a width below n_local or above the stored one.
        """
        if width is None or width == self.padded:
            return self._sink
        view = self._views.get(width)
        if view is None:
            if isinstance(width, bool) or not isinstance(width, int) or not self.n_local <= width <= self.padded:
                raise ValueError(
                    f"width: got {width!r}, need an integer from n_local = {self.n_local} to padded = {self.padded}; "
                    "a wider launch needs a SinkCache built with a larger padded"
                )
            view = self._views[width] = self._sink[:width]
        return view

    def refresh(self, attn_sink: Tensor) -> None:
        """Take new sinks after a weight update, in place: tensors handed out before stay valid and show the new values.

        ``attn_sink`` as for the constructor. On the cache's own device the copy is enqueued; from another device it
        is waited for.
        """
        owned = self._owned(attn_sink)
        with torch.inference_mode(False), torch.no_grad():
            self._sink[: self.n_local].copy_(owned)
