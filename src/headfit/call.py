"""What a backend gets: one checked sparse-attention call, as plain data.

``ops`` builds a :class:`SparseCall` after ``checks`` accepted the arguments; a backend reads it and writes ``out``,
``lse`` and ``max_logits``. Nothing here validates, allocates or launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

D_V = 512  # V is the first 512 dims of a row, in V4 (all of them) and in V3.2 (CONTRACT, Shapes)


@dataclass(frozen=True)
class KeySet:
    """One cache and the lanes a call reads from it.

    Row ``i`` (``0 <= i < slots``) starts ``(i // page_size) * page_stride + (i % page_size) * row_stride`` elements
    after the first element of ``data``. For ``v4`` the seven e8m0 scales of that row start at
    ``(i // page_size) * page_stride + page_size * 576 + (i % page_size) * 8`` bytes.
    """

    data: Tensor  # uint8 (packed layouts) or bfloat16 (layout "bf16"), a view [pages, page_size, 1, bytes or d_qk]
    layout: str  # "v4", "v32" or "bf16"
    page_size: int  # rows a page, >= 1
    page_stride: int  # elements of `data` between two pages
    row_stride: int  # elements of `data` between two rows of a page (v4: the data pitch 576, not the view's 584)
    slots: int  # pages * page_size; an index outside [0, slots) is invalid
    indices: Tensor  # int32 [b, s_q, topk], last dim contiguous, other strides free
    lengths: Tensor | None  # int32 [b]; lanes at or past clamp(length, 0, topk) are never read

    @property
    def topk(self) -> int:
        """Lanes per row."""
        return self.indices.shape[-1]


@dataclass(frozen=True)
class SparseCall:
    """One call: ``rows = b * s_q`` query rows of ``h_q`` heads against one or two key sets.

    Keys are ordered by set, then by lane. Each backend writes every element of ``out``, ``lse`` and, where given,
    ``max_logits``, and nothing else.
    """

    q: Tensor  # bfloat16 [b, s_q, h_q, d_qk], last dim contiguous, other strides free
    key_sets: tuple[KeySet, ...]  # one or two, of one d_qk
    sm_scale: float
    attn_sink: Tensor | None  # float32 [h_q], natural-log units
    out: Tensor  # bfloat16 [b, s_q, h_q, 512], last dim contiguous, other strides free
    lse: Tensor  # float32 [b, h_q, s_q], strides free; natural log, sink not included, +inf for a row without keys
    max_logits: Tensor | None  # float32 [b, h_q, s_q], strides free; scaled, natural units, -inf for a row without keys
    batch_invariant: bool
    phase: Literal["prefill", "decode"]  # the entry it came through; flash_mla_sparse_fwd arrives as b = rows, s_q = 1

    @property
    def rows(self) -> int:
        """Query rows of the call."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def h_q(self) -> int:
        """Query heads of the call, 1 to 128."""
        return self.q.shape[2]

    @property
    def d_qk(self) -> int:
        """Dims of a query and of a key row, 512 or 576."""
        return self.q.shape[3]
