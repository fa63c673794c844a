"""The default model of `headfit compare`: DeepSeek-V4-Flash's attention geometry on a body small enough for a CPU.

Belongs here: its configuration and its seeded weights. Must not: file reads, downloads, the conversion to MQALayer.

What is true to V4-Flash: 64 query heads x 512 (64 rotary), one shared KV row, window 128, index_topk 512 with 64 x 128
indexer heads, compress ratios 4 and 128, 8 output groups, sinks, hyper-connections, a hash-routed and top-k routed
MoE. What is small: hidden size, LoRA ranks, experts, depth, vocabulary (bytes).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCAB = 256  # one token a byte
LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
_KV_GAIN = 2.0  # |kv| above sqrt(512): scores of N(0, 2), so a row attends to some keys, not to the mean of all


def config(
    *, layer_types: tuple[str, ...] = LAYER_TYPES, hidden_size: int = 256, max_position: int = 65536
) -> DeepseekV4Config:
    """The configuration of the default model; `layer_types` as Transformers names them, one a layer."""
    from transformers import DeepseekV4Config

    layers = len(layer_types)
    made = DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=128,
        o_groups=8,
        o_lora_rank=32,
        sliding_window=128,
        index_topk=512,
        index_n_heads=64,
        index_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        layer_types=list(layer_types),
        mlp_layer_types=(["hash_moe"] + ["moe"] * layers)[:layers],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        max_position_embeddings=max_position,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"  # grouped GEMMs want bf16, which a CPU without AVX-512 emulates
    return made


def build(
    seed: int = 0,
    *,
    layer_types: tuple[str, ...] = LAYER_TYPES,
    device: torch.device | str = "cpu",
) -> DeepseekV4ForCausalLM:
    """A DeepseekV4ForCausalLM with weights that depend on `seed` and nothing else, in eval mode.

    Each tensor draws from its own generator, seeded by `seed` and its name: every rank builds the same weights, and a
    model with fewer layers shares the weights of its first ones. Weights are float32 on every device: a CPU without
    native bfloat16 emulates it some fifty times slower, and the attention kernel is handed bfloat16 either way.
    """
    from transformers import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(config(layer_types=layer_types))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(name, tensor, seed)
    return model.to(device).eval()


def _fill(name: str, tensor: torch.Tensor, seed: int) -> None:
    """Write seeded values: what a trained model has away from zero (sinks, biases, gates, hash tables) must not be
    zero here.
    """
    # One 32-bit number of both: torch's CPU generator looks at no more bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))

    def normal(mean: float, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    last = name.rsplit(".", 1)[-1]
    if last == "tid2eid":
        # A hash layer sends a token to distinct experts.
        ranks = torch.rand(tensor.shape[0], 8, generator=generator).argsort(dim=1)
        tensor.copy_(ranks[:, : tensor.shape[1]])
    elif "inv_freq" in last:
        return  # rotary tables follow from the configuration
    elif last == "sinks":
        normal(6.0, 1.5)  # the log-sum-exp of a full row is about 8: the sink takes a visible, uneven share
    elif last == "position_bias":
        normal(0.0, 1.0)
    elif last == "e_score_correction_bias":
        normal(0.0, 0.05)
    elif "kv_norm" in name and "indexer" not in name:
        normal(_KV_GAIN, 0.2)
    elif "norm" in name:
        normal(1.0, 0.1)
    elif last in ("base", "hc_base"):
        normal(0.0, 0.3)
    elif last in ("scale", "hc_scale"):
        normal(1.0, 0.05)
    elif "embed_tokens" in name:
        normal(0.0, 1.0)
    elif "lm_head" in name:
        normal(0.0, 2.5 * tensor.shape[-1] ** -0.5)
    else:  # every projection keeps unit variance
        normal(0.0, tensor.shape[-1] ** -0.5)
