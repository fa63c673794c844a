"""The layer and the Transformers engine on a GPU; skipped without one. Same bounds as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_v4
import torch
from test_layer import HEADS, Inputs, make, whole
from tiny_v4 import Choices, left_padding, relative, tokens
from torch import Tensor

from headfit import Policy, backends
from headfit.cache import empty_cache
from headfit.kernels import REGISTRY
from headfit.layer import Keys, LaneRecord, MQALayer, set_observer, set_policy

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def usable() -> list[str]:
    """Backends that take calls of few rows, which two refuse."""
    names = [name for name in backends() if DEVICE in REGISTRY[name].device_types and REGISTRY[name].automatic]
    return [name for name in names if name not in ("hopper_wide", "hopper_pairs")]


@pytest.fixture(autouse=True)
def _plain_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        yield
    torch.set_float32_matmul_precision(before)


def on_device(x: Inputs) -> Inputs:
    def move(keys: Keys) -> Keys:
        if keys.cache.dtype == torch.uint8:
            cache = empty_cache(*keys.cache.shape[:2], "v4", DEVICE)
            cache.copy_(keys.cache)
        else:
            cache = keys.cache.to(DEVICE)
        lengths = None if keys.lengths is None else keys.lengths.to(DEVICE)
        return Keys(cache, keys.indices.to(DEVICE), lengths)

    for name in ("hidden", "cos", "sin", "slots"):
        setattr(x, name, getattr(x, name).to(DEVICE))
    x.window, x.extra = move(x.window), move(x.extra)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 1), (8, 3), (16, 5), (64, 63)])
def test_layer_agrees_with_the_cpu_and_padding_changes_nothing(world: int, rank: int, dtype: torch.dtype) -> None:
    source = whole(dtype=dtype)
    want = Inputs(dtype=dtype).call(make(world, rank, source=source))
    lanes: dict[str, LaneRecord] = {}
    outs: dict[str, Tensor] = {}
    for policy in (Policy.padded(), Policy.native()):
        layer = MQALayer(make().geometry, shard=(rank, world), policy=policy).load(source).eval().to(DEVICE)
        layer.observer = lambda record, kind=policy.kind: lanes.__setitem__(kind, record)
        outs[policy.kind] = on_device(Inputs(dtype=dtype)).call(layer)
    assert lanes["padded"].decision.width == 64
    assert HEADS // world <= lanes["native"].decision.width <= 64
    assert torch.equal(lanes["padded"].out, lanes["native"].out)
    assert torch.equal(lanes["padded"].lse, lanes["native"].lse)
    assert torch.equal(outs["padded"], outs["native"])
    assert lanes["native"].seconds > 0
    assert relative(outs["native"].cpu(), want) < (1e-2 if dtype == torch.bfloat16 else 3e-3)


def test_engine_agrees_with_eager() -> None:
    pytest.importorskip("transformers")
    from test_engine_transformers import PROMPT, check, chunked, convert, eager, forward, new_cache, replay, revert

    made = tiny_v4.model().to(DEVICE)
    ids = tokens(PROMPT).to(DEVICE)
    want, choice = eager(made, ids)
    cuts = [3, 40, 41, 42, 60]
    for backend in (None, *usable()):
        for layout in ("bf16", "v4"):
            if layout == "bf16" and backend in ("flashmla", "hopper"):
                continue  # their packed entries take FP8 pages only
            convert(made, cache_layout=layout, backend=backend, page_size=64)
            with Choices(made, choice):
                once = forward(made, ids, new_cache(made))
            with Choices(made, replay(choice, cuts, PROMPT)):
                pieces = chunked(made, ids, cuts)
            revert(made)
            print(f"\n{backend} {layout}: {relative(once, want):.2e} from eager, pieces {relative(pieces, once):.2e}")
            assert relative(pieces, once) < 3e-3
            if layout == "bf16":
                check(once, want)
            else:
                assert relative(once, want) < 0.15


def test_left_padding_and_generate() -> None:
    pytest.importorskip("transformers")
    from test_engine_transformers import convert

    made = tiny_v4.model(index_topk=64, pad_token_id=0).to(DEVICE)
    lengths = (35, 3, 22)
    call: dict[str, Any] = {
        "attention_mask": left_padding(*lengths).to(DEVICE),
        "max_new_tokens": 6,
        "do_sample": False,
    }
    ids = tokens(*lengths).to(DEVICE)
    want = made.generate(ids, **call)
    convert(made, cache_layout="bf16")
    lanes: list[LaneRecord] = []
    set_observer(made, lanes.append)
    assert torch.equal(made.generate(ids, **call), want)
    assert {r.phase for r in lanes} == {"prefill", "decode"}
    set_policy(made, Policy.padded())
    assert torch.equal(made.generate(ids, **call), want)
