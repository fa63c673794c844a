"""Names of GPUs and their compute capabilities, so that questions about a GPU can be answered without that GPU.

Belongs here: the table and its reader. Does not belong here: asking a device anything.
"""

from __future__ import annotations

import re
from typing import Final

# Names as people write them, without case, spaces, dashes and vendor. Capabilities: NVIDIA's list of CUDA GPUs.
_NAMES: Final[dict[tuple[int, int], tuple[str, ...]]] = {
    (8, 0): ("a100", "a800", "a30"),
    (8, 6): ("a10", "a40", "a6000", "rtx3090"),
    (8, 9): ("l4", "l40", "l40s", "rtx4090"),
    (9, 0): ("h100", "h200", "h20", "h800", "gh200"),
    (10, 0): ("b200", "gb200"),
    (10, 3): ("b300", "gb300"),
    (12, 0): ("rtxpro6000", "rtx5090"),
    (12, 1): ("gb10", "dgxspark"),
}
_BY_NAME: Final = {name: cc for cc, names in _NAMES.items() for name in names}


def compute_capability_of(gpu: str) -> tuple[int, int]:
    """(major, minor) of a GPU named ``h200``, ``RTX PRO 6000``, ``sm_90``, ``sm90a`` or ``9.0``.

    Raises:
        ValueError: no such GPU in the table and no compute capability either.
    """
    word = re.sub(r"[\s_\-]+|nvidia|geforce", "", gpu.strip().lower())
    if word in _BY_NAME:
        return _BY_NAME[word]
    number = re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)[af]?", word)
    if number:
        cc = int(number[1]), int(number[2])
        if cc[0] in {known[0] for known in _NAMES}:
            return cc
    known = ", ".join(sorted(_BY_NAME))
    raise ValueError(f"gpu: got {gpu!r}, accepted are sm_80, sm_90, sm_100, sm_120, ... and {known}; name one of these")
