"""The attention geometry of a model, and what one tensor-parallel rank owns of it.

Belongs here: `Geometry` (heads, dims, layer kinds, read from a config.json), the two presets, `Shard` (head and output
group ranges of a rank). Does not belong here: weights, tensors, kernels, process groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

LayerKind = Literal["sliding", "compressed_sparse", "heavily_compressed"]

# Transformers' names of the three kinds (configuration_deepseek_v4.py).
_HF_KINDS: Final[Mapping[str, LayerKind]] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "heavily_compressed",
}
# The ratio of a layer names its kind: published checkpoints write 0 for sliding-window layers, 4 for those whose rows
# the indexer chooses, 128 for those that read every compressed row.
_RATIO_KINDS: Final[Mapping[int, LayerKind]] = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}

# Field -> its names, in the published config.json and Transformers first, then the official inference config.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "n_heads": ("num_attention_heads", "n_heads"),
    "hidden_size": ("hidden_size", "dim"),
    "q_lora_rank": ("q_lora_rank",),
    "head_dim": ("head_dim",),
    "rope_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "window": ("sliding_window", "window_size"),
    "index_topk": ("index_topk",),
    "o_groups": ("o_groups",),
    "o_lora_rank": ("o_lora_rank",),
    "n_layers": ("num_hidden_layers", "n_layers"),
}


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: got {value!r}, need an integer >= 1; correct the model's config.json")
    return value


@dataclass(frozen=True)
class Shard:
    """What rank ``rank`` of ``world`` ranks owns: see `Geometry.shard`.

    ``heads``: global indices of its query heads. ``groups``: global indices of the output groups that its heads touch;
    each is owned whole while world <= o_groups. Beyond that a rank owns part of one group, which ``group_ranks`` ranks
    share, ``group_part`` being its place among them. Both output projections are linear, so partial sums of a shared
    group add up exactly in the one all-reduce at the end.
    """

    rank: int
    world: int
    heads: range
    groups: range
    group_ranks: int
    group_part: int

    @property
    def n_local(self) -> int:
        """Query heads owned."""
        return len(self.heads)

    @property
    def heads_per_local_group(self) -> int:
        """Owned heads in each owned (part of a) group."""
        return len(self.heads) // len(self.groups)


@dataclass(frozen=True)
class Geometry:
    """DeepSeek-V4's attention as numbers.

    Args:
        n_heads: query heads; one latent key-value row serves them all.
        hidden_size: width of the residual stream.
        q_lora_rank: rank of the query projection.
        head_dim: width of a query head and of the latent row, which is key and value both.
        rope_dim: how many of these, the last ones, are rotated.
        window: keys of the sliding window.
        index_topk: compressed rows that a compressed-sparse layer chooses per query.
        o_groups: groups of heads in the output projection; divides ``n_heads``.
        o_lora_rank: rank of the output projection, per group.
        compress_ratios: per layer, rows merged into one: 0 for a sliding-window layer.
        layer_kinds: per layer, ``sliding``, ``compressed_sparse`` or ``heavily_compressed``.
        mtp_layers: further multi-token-prediction layers, not counted in the two tuples.
        name: what to call the model in tables.

    Raises:
        ValueError: a number is not positive, or two do not fit together; the text names both.
    """

    n_heads: int
    hidden_size: int
    q_lora_rank: int
    head_dim: int
    rope_dim: int
    window: int
    index_topk: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: tuple[int, ...]
    layer_kinds: tuple[LayerKind, ...]
    mtp_layers: int = 0
    name: str = "model"

    def __post_init__(self) -> None:
        for name in _NAMES:
            _positive(name, getattr(self, name))
        if self.rope_dim > self.head_dim or self.rope_dim % 2:
            raise ValueError(f"rope_dim: got {self.rope_dim}, need an even number up to head_dim = {self.head_dim}")
        if self.n_heads % self.o_groups:
            raise ValueError(f"o_groups: got {self.o_groups}, need a divisor of n_heads = {self.n_heads}")
        if len(self.compress_ratios) != len(self.layer_kinds):
            raise ValueError(
                f"compress_ratios: got {len(self.compress_ratios)} entries for {len(self.layer_kinds)} layer kinds; "
                "give one of each per layer"
            )
        for layer, (kind, ratio) in enumerate(zip(self.layer_kinds, self.compress_ratios, strict=True)):
            if kind not in _HF_KINDS.values():
                raise ValueError(
                    f"layer_kinds: layer {layer} is {kind!r}, accepted are {', '.join(_HF_KINDS.values())}"
                )
            if (ratio == 0) != (kind == "sliding") or ratio < 0:
                raise ValueError(
                    f"compress_ratios: layer {layer} is {kind} with ratio {ratio}; need 0 for sliding, else 1 or more"
                )

    @property
    def n_layers(self) -> int:
        """Layers, without those for multi-token prediction."""
        return len(self.layer_kinds)

    @property
    def nope_dim(self) -> int:
        """Dims of a head that are not rotated: the first ones."""
        return self.head_dim - self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """``head_dim ** -0.5``."""
        return float(self.head_dim**-0.5)

    @property
    def heads_per_group(self) -> int:
        """Query heads in an output group."""
        return self.n_heads // self.o_groups

    def keys(self, kind: LayerKind, context: int) -> tuple[int, int]:
        """Keys that the last query of ``context`` tokens reads in a layer of ``kind``: (window, compressed).

        Only complete groups of ``compress_ratio`` tokens have a compressed row.
        """
        rows = min(self.window, context)
        if kind == "sliding":
            return rows, 0
        ratios = [r for k, r in zip(self.layer_kinds, self.compress_ratios, strict=True) if k == kind]
        if not ratios:
            raise ValueError(f"kind: got {kind!r}, but {self.name} has no such layer; it has {set(self.layer_kinds)}")
        compressed = context // ratios[0]
        return rows, min(self.index_topk, compressed) if kind == "compressed_sparse" else compressed

    def shard(self, rank: int, world: int) -> Shard:
        """What ``rank`` of ``world`` tensor-parallel ranks owns: consecutive heads, whole groups or a part of one.

        Raises:
            ValueError: ``world`` does not divide the heads or cuts across group borders, or ``rank`` is not in it.
        """
        for name, value, least in (("world", world, 1), ("rank", rank, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, need an integer >= {least}")
        if rank >= world:
            raise ValueError(f"rank: got {rank}, need 0 to {world - 1} for world = {world}")
        if self.n_heads % world:
            fits = ", ".join(str(w) for w in self.worlds())
            raise ValueError(f"world: got {world}, which does not divide {self.n_heads} heads; choose one of {fits}")
        n_local = self.n_heads // world
        if n_local % self.heads_per_group and self.heads_per_group % n_local:
            fits = ", ".join(str(w) for w in self.worlds())
            raise ValueError(
                f"world: got {world}, whose {n_local} heads a rank cut across the output projection's groups "
                f"of {self.heads_per_group} heads; choose one of {fits}"
            )
        first = rank * n_local
        group_ranks = max(1, self.heads_per_group // n_local)
        first_group = first // self.heads_per_group
        groups = range(first_group, first_group + max(1, n_local // self.heads_per_group))
        return Shard(rank, world, range(first, first + n_local), groups, group_ranks, rank % group_ranks)

    def worlds(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that this model can be split into."""
        per_group = self.heads_per_group
        sizes = (w for w in range(1, self.n_heads + 1) if self.n_heads % w == 0)
        return tuple(w for w in sizes if (n := self.n_heads // w) % per_group == 0 or per_group % n == 0)

    @classmethod
    def from_config(cls, config: object, name: str | None = None) -> Geometry:
        """Read the geometry of a model.

        Args:
            config: a preset's name (``"deepseek-v4-flash"``, ``"deepseek-v4-pro"``); the path of a config.json or of
                the folder that holds it; its content as a dict; or a Transformers config object. Both ways of naming
                are read: that of Transformers and the published config.json (``num_attention_heads``, ``layer_types``
                or ``compress_ratios``), and that of DeepSeek's inference code (``n_heads``, ``dim``). What a
                ``compress_ratios`` list holds beyond the layers belongs to the multi-token-prediction layers.
            name: what to call it in tables; by default the preset's, folder's or model type's name.

        Raises:
            FileNotFoundError: there is no such file, folder or preset.
            ValueError: it is no JSON object, lacks a field or holds a bad one; the text names it.
        """
        fields, found = _load(config)
        numbers = {field: _number(fields, field, names) for field, names in _NAMES.items()}
        layers = numbers.pop("n_layers")
        kinds, ratios, mtp = _layers(fields, layers)
        return cls(compress_ratios=ratios, layer_kinds=kinds, mtp_layers=mtp, name=name or found, **numbers)


def _load(config: object) -> tuple[Mapping[str, Any], str]:
    if isinstance(config, Mapping):
        return config, str(config.get("model_type", "model"))
    if isinstance(config, (str, Path)):
        preset = PRESETS.get(str(config).lower())
        if preset is not None:
            return preset, str(config).lower()
        return _load_file(Path(config))
    if hasattr(config, "to_dict"):
        fields = dict(config.to_dict())
        for names in _NAMES.values():  # some fields of a Transformers config live on the object only
            fields.update({n: getattr(config, n) for n in names if n not in fields and hasattr(config, n)})
        return fields, str(fields.get("model_type", "model"))
    raise TypeError(
        f"config: got {type(config).__name__}, need {' or '.join(PRESETS)}, a path, a dict or a Transformers config"
    )


def _load_file(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        hint = "the folder holds no config.json" if path.is_dir() else "there is no such file or folder"
        raise FileNotFoundError(f"config: got {str(path)!r}, {hint}; accepted are {', '.join(PRESETS)} and such paths")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config: {file} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(fields, dict):
        raise ValueError(f"config: {file} holds a {type(fields).__name__}, need a JSON object")
    return fields, file.resolve().parent.name


def _number(fields: Mapping[str, Any], field: str, names: tuple[str, ...]) -> int:
    for name in names:
        if fields.get(name) is not None:
            return _positive(name, fields[name])
    factor = fields.get("partial_rotary_factor")
    if field == "rope_dim" and factor is not None:
        head_dim = _positive("head_dim", fields.get("head_dim"))
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor: got {factor!r}, need a number above 0 and up to 1")
        return _positive("partial_rotary_factor x head_dim", int(head_dim * factor))
    raise ValueError(
        f"config: lacks {' or '.join(names)}; need the config.json of a DeepSeek-V4 model "
        f"(this one says model_type {fields.get('model_type')!r})"
    )


def _layers(fields: Mapping[str, Any], layers: int) -> tuple[tuple[LayerKind, ...], tuple[int, ...], int]:
    ratios = fields.get("compress_ratios")
    types = fields.get("layer_types")
    mtp = fields.get("num_nextn_predict_layers", fields.get("n_mtp_layers")) or 0
    if isinstance(mtp, bool) or not isinstance(mtp, int) or mtp < 0:
        raise ValueError(f"num_nextn_predict_layers: got {mtp!r}, need an integer >= 0")
    for name, value in (("compress_ratios", ratios), ("layer_types", types)):
        if value is not None and not isinstance(value, (list, tuple)):
            raise ValueError(f"{name}: got {value!r}, need a list with one entry per layer")
    if types is not None:
        unknown = sorted({str(t) for t in types} - set(_HF_KINDS))
        if unknown:
            raise ValueError(f"layer_types: got {', '.join(unknown)}, accepted are {', '.join(_HF_KINDS)}")
        rates = {"compressed_sparse": 4, "heavily_compressed": 128}
        given = fields.get("compress_rates") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"compress_rates: got {given!r}, need an object that maps layer types to integers")
        rates.update({_HF_KINDS[k]: v for k, v in given.items() if k in _HF_KINDS})
        for kind, old in (("compressed_sparse", "compress_rate_csa"), ("heavily_compressed", "compress_rate_hca")):
            rates[kind] = fields.get(old) or rates[kind]
        kinds = tuple(_HF_KINDS[t] for t in types)
        ratios = [_positive("compress_rates", rates[kind]) if kind in rates else 0 for kind in kinds]
    elif ratios is not None:
        strange = [r for r in ratios if isinstance(r, bool) or not isinstance(r, int) or r not in _RATIO_KINDS]
        if strange:
            raise ValueError(f"compress_ratios: got {strange}, accepted are 0, 4 and 128, one per layer")
        kinds = tuple(_RATIO_KINDS[r] for r in ratios)
    else:
        raise ValueError("config: lacks compress_ratios or layer_types; need one entry per layer")
    if len(kinds) < layers:
        raise ValueError(f"config: {layers} layers, but compress_ratios or layer_types has {len(kinds)} entries")
    return kinds[:layers], tuple(ratios[:layers]), max(mtp, len(kinds) - layers)


_FLASH: Final[Mapping[str, Any]] = {
    "num_attention_heads": 64,
    "hidden_size": 4096,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
# Read from the published config.json of DeepSeek-V4-Flash and DeepSeek-V4-Pro. The last ratio is that of the
# multi-token-prediction layer.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek-v4-flash": _FLASH,
    "deepseek-v4-pro": {
        **_FLASH,
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "index_topk": 1024,
        "o_groups": 16,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
}
