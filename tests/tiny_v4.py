"""A small DeepSeek-V4 for tests: true head and row dims (512), everything else small, seeded float32 weights.

Two settings keep a comparison about attention: hash-routed experts (a router's near-tie would otherwise turn a rounding
difference into another expert), and :class:`Choices`, which replays the sparse choice of one run in another.
"""

from __future__ import annotations

import zlib
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

S, C, H = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB = 128


def config(heads: int = 8, layers: tuple[str, ...] = (S, C, H, C), **changes: Any) -> Any:
    from transformers import DeepseekV4Config

    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "head_dim": 512,
        "q_lora_rank": 48,
        "o_groups": 4,
        "o_lora_rank": 24,
        "sliding_window": 16,
        "index_topk": 8,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": list(layers),
        "mlp_layer_types": ["hash_moe"] * len(layers),
        "compress_rates": {C: 4, H: 32},
        "max_position_embeddings": 4096,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    made = DeepseekV4Config(**{**fields, **changes})
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    return made


def model(seed: int = 0, **changes: Any) -> Any:
    from transformers import DeepseekV4ForCausalLM

    made = DeepseekV4ForCausalLM(config(**changes))
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            _fill(name, tensor, seed)
    return made.eval()


def _fill(name: str, tensor: Tensor, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(name.encode()))
    last = name.rsplit(".", 1)[-1]
    noise = torch.randn(tensor.shape, generator=draw)
    if "inv_freq" in last:
        return
    if last == "tid2eid":
        order = torch.rand(tensor.shape[0], 4, generator=draw).argsort(-1)
        tensor.copy_(order[:, : tensor.shape[1]])
    elif last == "sinks":
        tensor.copy_(noise + 2)
    elif last in ("position_bias", "base", "hc_base"):
        tensor.copy_(noise * 0.3)
    elif "norm" in name or last in ("scale", "hc_scale"):
        tensor.copy_(1 + noise * 0.1)
    elif "embed" in name:
        tensor.copy_(noise)
    else:
        tensor.copy_(noise * tensor.shape[-1] ** -0.5)


def tokens(*lengths: int, seed: int = 0) -> Tensor:
    """Random tokens ``[len(lengths), max]``; use with :func:`left_padding` when lengths differ."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=draw)


def left_padding(*lengths: int) -> Tensor:
    """The 2-D mask ``[len(lengths), max]`` of sequences padded on the left."""
    n = max(lengths)
    return (torch.arange(n)[None] >= (n - torch.tensor(lengths))[:, None]).long()


class Choices:
    """Records what every indexer of a model chooses, or replays a record, while the context is open.

    A sparse choice is a sort: a rounding difference may flip a near-tie and change a row by more than rounding. With
    the choice replayed, what is left is attention.
    """

    def __init__(self, made: nn.Module, replay: list[Tensor] | None = None) -> None:
        self.made, self.replay = made, replay
        self.seen: list[Tensor] = []

    def __enter__(self) -> Choices:
        indexers = [m for m in self.made.modules() if type(m).__name__ == "DeepseekV4Indexer"]
        self.hooks = [m.register_forward_hook(self._hook) for m in indexers]
        return self

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        self.seen.append(out)
        return None if self.replay is None else self.replay[len(self.seen) - 1]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 error over everything."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def argmax_differs(got: Tensor, want: Tensor) -> tuple[int, int]:
    """Rows whose argmax differs although the reference's top-two gap exceeds three times the measured error, and all
    rows with such a gap. The error is the largest root-mean-square error of a row's logits."""
    error = (got - want).square().mean(-1).sqrt().max()
    top = want.topk(2, -1).values
    clear = top[..., 0] - top[..., 1] > 3 * error
    return int((clear & (got.argmax(-1) != want.argmax(-1))).sum()), int(clear.sum())
