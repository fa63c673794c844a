"""Where the lists of a row stand, and what a cache is described by, for every Hopper kernel that reads keys.

Belongs here: reading the parameter list. Does not belong here: tiles, copies, tables.
"""

# mypy: ignore-errors

from cutlass import Int32, Int64

from headfit.kernels import ptx

ROW_BYTES = 576  # e4m3 and rope; the scales, 8 bytes a row, stand behind all rows of a page


class RowLists:
    """Lanes and addresses of a row's two lists."""

    def __init__(self, p, row):
        self.p = p
        self.b = ptx.divide(row, p.magic_s, p.shift_s)
        self.s = row - self.b * p.s_q

    def read_lengths(self):
        """Lanes of each list."""
        return [lanes_of(self.p.len1, self.b, self.p.topk1), lanes_of(self.p.len2, self.b, self.p.topk2)]

    def places(self):
        """Addresses of the first index of each list."""
        p, b, s = self.p, self.b, self.s
        first = p.idx1 + (ptx.wide(b, p.idx1_b) + ptx.wide(s, p.idx1_s)) * 4
        second = p.idx2 + (ptx.wide(b, p.idx2_b) + ptx.wide(s, p.idx2_s)) * 4
        return first, second


def lanes_of(lengths, b, topk):
    """clamp(length, 0, topk), or topk where there are no lengths."""
    n = ptx.ldg32_if(lengths + ptx.wide(b, Int64(4)), ptx.given(lengths), topk)
    return ptx.min32(ptx.max32(n, Int32(0)), topk)


def caches(p):
    """Of each set: address, page stride, the numbers that divide by the page size, that, and slots."""
    return (
        (p.kv1, p.page_stride1, (p.magic1, p.shift1, p.page1, p.slots1)),
        (p.kv2, p.page_stride2, (p.magic2, p.shift2, p.page2, p.slots2)),
    )
