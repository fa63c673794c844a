"""What the ranks of ``test_tensor_parallel`` run, in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tiny_v4
import torch
import torch.distributed as dist
from test_engine_transformers import PROMPT, chunked, forward, new_cache
from test_layer import GEOMETRY, Inputs, whole
from tiny_v4 import Choices, left_padding, tokens

from headfit import Policy
from headfit.engines.transformers import convert
from headfit.layer import LaneRecord, MQALayer, set_observer, set_policy

CUTS = [40, 41, 60]
LENGTHS = (35, 3, 22)


def rank(index: int, world: int, folder: str) -> None:
    """One rank: run everything, save what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=world)
    with torch.no_grad():
        results = {"layer": layer(), "model": model(folder), "generate": generate(), "refused": refused()}
    torch.save(results, Path(folder) / f"rank{index}.pt")
    dist.destroy_process_group()
    os._exit(0)  # nothing is left to tear down, and a teardown that hangs would hide the result


def layer() -> dict[str, Any]:
    reduced = []
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, **kw: (reduced.append(tuple(tensor.shape)), original(tensor, **kw))[1]
    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        for policy in (Policy.native(), Policy.padded()):
            made = MQALayer(GEOMETRY, group=dist.group.WORLD, policy=policy, backend="cpu")
            made.load(whole(dtype=dtype)).eval()
            out[dtype, policy.kind] = Inputs(dtype=dtype).call(made)
    dist.all_reduce = original
    return {"out": out, "reduced": reduced}


def model(folder: str) -> dict[str, Any]:
    choice = torch.load(Path(folder) / "choice.pt")
    ids = tokens(PROMPT)
    made = tiny_v4.model()
    out: dict[str, Any] = {}
    for layout in ("bf16", "v4"):
        made = convert(tiny_v4.model(), dist.group.WORLD, cache_layout=layout, page_size=8)
        for policy in (Policy.native(), Policy.padded()):
            lanes: list[LaneRecord] = []
            set_policy(made, policy)
            set_observer(made, lanes.append)
            with Choices(made, choice):
                once = forward(made, ids, new_cache(made))
            out[layout, policy.kind] = once
            out[layout, policy.kind, "lanes"] = [(r.out.clone(), r.lse.clone(), r.decision.width) for r in lanes]
    replayed = [c[:, a:b] for a, b in zip([0, *CUTS], [*CUTS, PROMPT], strict=True) for c in choice]
    with Choices(made, replayed):
        out["v4 in pieces"] = chunked(made, ids, CUTS)
    return out


def generate() -> torch.Tensor:
    made = convert(tiny_v4.model(index_topk=64, pad_token_id=0), dist.group.WORLD, cache_layout="bf16", page_size=8)
    mask = left_padding(*LENGTHS)
    return made.generate(tokens(*LENGTHS), attention_mask=mask, max_new_tokens=8, do_sample=False)


def refused() -> str:
    made = tiny_v4.model(heads=3, o_groups=3, layers=(tiny_v4.S,))
    try:
        convert(made, dist.group.WORLD)
    except ValueError as error:
        return f"{type(made.model.layers[0].self_attn).__name__}: {error}"
    return "nothing was refused"
