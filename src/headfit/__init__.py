"""headfit: sparse MLA attention at the number of query heads a tensor-parallel rank really has.

This file holds the version and the public names, each imported on first use, so that ``import headfit`` opens no CUDA
context, imports no kernel and patches nobody. What each name means stands in its own docstring.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. One table serves attribute access, dir() and __all__.
_PUBLIC = {
    "Call": "headfit.width",
    "Capability": "headfit.width",
    "Geometry": "headfit.geometry",
    "MQALayer": "headfit.layer",
    "Policy": "headfit.width",
    "SinkCache": "headfit.sinks",
    "WidthDecision": "headfit.width",
    "backends": "headfit.kernels",
    "decode_max_rows": "headfit.probes",
    "flash_mla_sparse_fwd": "headfit.ops",
    "flash_mla_with_kvcache": "headfit.ops",
    "get_mla_metadata": "headfit.ops",
    "pack_kv": "headfit.cache",
    "plan_width": "headfit.width",
    "probe": "headfit.probes",
    "unpack_kv": "headfit.cache",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from headfit.cache import pack_kv as pack_kv
    from headfit.cache import unpack_kv as unpack_kv
    from headfit.geometry import Geometry as Geometry
    from headfit.kernels import backends as backends
    from headfit.layer import MQALayer as MQALayer
    from headfit.ops import flash_mla_sparse_fwd as flash_mla_sparse_fwd
    from headfit.ops import flash_mla_with_kvcache as flash_mla_with_kvcache
    from headfit.ops import get_mla_metadata as get_mla_metadata
    from headfit.probes import decode_max_rows as decode_max_rows
    from headfit.probes import probe as probe
    from headfit.sinks import SinkCache as SinkCache
    from headfit.width import Call as Call
    from headfit.width import Capability as Capability
    from headfit.width import Policy as Policy
    from headfit.width import WidthDecision as WidthDecision
    from headfit.width import plan_width as plan_width


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'headfit' has no attribute {name!r}; public names: {', '.join(_PUBLIC)}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
