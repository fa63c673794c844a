"""Packed pages that hold latent rows for a batch of sequences: growing, or as a ring over a sliding window.

Only slot arithmetic and growth live here; bytes are ``cache``'s business. Pages of the sequences of a batch alternate
(page ``p`` of sequence ``b`` is physical page ``p * batch + b``), so growing appends pages and moves no row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headfit import cache as packed

D_ROW = 512  # a latent row of DeepSeek-V4: key and value at once
LAYOUTS = ("v4", "bf16")
_MAX_SLOTS = 2**31 - 1  # indices are int32


def new_pages(pages: int, page_size: int, layout: str, device: torch.device) -> Tensor:
    """Zeroed pages: ``v4`` uint8 ``[pages, page_size, 1, 584]``, ``bf16`` bfloat16 ``[pages, page_size, 1, 512]``."""
    with torch.inference_mode(False):  # pages made in one call are written in later ones, of any mode
        if layout == "bf16":
            return torch.zeros(pages, page_size, 1, D_ROW, dtype=torch.bfloat16, device=device)
        return packed.empty_cache(pages, page_size, layout, device)


class PagedRows:
    """Rows of ``batch`` sequences in pages, addressed by (sequence, row); capacity grows on demand by doubling.

    Attributes:
        data: the pages, as ``headfit.flash_mla_with_kvcache`` reads them; replaced when capacity grows.
        capacity: rows each sequence has room for.
    """

    def __init__(
        self, batch: int, *, layout: str = "v4", page_size: int = 64, device: torch.device | str = "cpu"
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"cache_layout: got {layout!r}, accepted are {' and '.join(map(repr, LAYOUTS))}")
        if page_size < 1:
            raise ValueError(f"page_size: got {page_size}, accepted is a number of rows >= 1")
        self.batch = batch
        self.layout = layout
        self.page_size = page_size
        self.data = new_pages(0, page_size, layout, torch.device(device))

    @property
    def capacity(self) -> int:
        """Rows each sequence has room for."""
        return self.data.shape[0] // max(self.batch, 1) * self.page_size

    def reserve(self, rows: int, *, keep: bool = True, exact: bool = False) -> bool:
        """Make room for ``rows`` rows a sequence; True when the pages were replaced.

        With ``keep`` the rows written so far stay where they are; ``exact`` grows to the next whole page only.
        """
        if rows <= self.capacity:
            return False
        pages = -(-rows // self.page_size)
        if not exact:
            pages = max(pages, 2 * (self.capacity // self.page_size))
        if pages * self.batch * self.page_size > _MAX_SLOTS:
            raise ValueError(
                f"{rows} rows for {self.batch} sequences exceed the {_MAX_SLOTS} slots int32 indices can name"
            )
        old = self.data
        self.data = new_pages(pages * self.batch, self.page_size, self.layout, old.device)
        if keep and old.shape[0]:
            self.data[: old.shape[0]].copy_(old)
        return True

    def slots(self, sequence: Tensor, row: Tensor) -> Tensor:
        """Slots ``page * page_size + offset`` of rows; both integer tensors, broadcast; row must be >= 0."""
        page = torch.div(row, self.page_size, rounding_mode="floor")
        return (page * self.batch + sequence) * self.page_size + row % self.page_size

    def slots_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Slots of absolute positions (>= 0); here position ``p`` stands in row ``p``."""
        return self.slots(sequence, position)

    def write(self, first: int, rows: Tensor) -> None:
        """Write positions ``first .. first + n - 1`` of every sequence; there must be room (:meth:`reserve`).

        ``rows`` is ``[batch, n, 512]``, any float dtype.
        """
        batch, n, _ = rows.shape
        if n == 0:
            return
        device = self.data.device
        sequence = torch.arange(batch, device=device)[:, None]
        slots = self.slots_of(sequence, torch.arange(first, first + n, device=device)[None])
        packed.write_rows(self.data, slots.reshape(-1), rows.reshape(batch * n, -1))


class WindowRows(PagedRows):
    """The last rows of each sequence as a ring: position ``p`` stands in row ``p % capacity``.

    The ring is as large as one call needs: the window before the call plus the call's own rows.
    """

    def slots_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Slots of absolute positions (>= 0); only those that are still in the ring hold their row."""
        return self.slots(sequence, position % self.capacity)

    def extend(self, past: int, rows: Tensor, kept: Tensor | None) -> None:
        """Append ``rows`` ``[batch, n, 512]`` at positions ``past ..``.

        Args:
            past: positions seen before.
            rows: the new rows, any float dtype.
            kept: the window before them, ``[batch, k, 512]``, positions ``past - k .. past - 1``, to be written again
                when the ring must grow; None when it already holds them or there are none.
        """
        have = 0 if kept is None else kept.shape[1]
        if self.reserve(have + rows.shape[1], keep=False, exact=True) and kept is not None:
            self.write(past - have, kept)
        self.write(past, rows)

    def refill(self, past: int, kept: Tensor) -> None:
        """Write the window anew, ``kept`` ``[batch, k, 512]`` at positions ``past - k .. past - 1``."""
        self.reserve(kept.shape[1], keep=False, exact=True)
        self.write(past - kept.shape[1], kept)
