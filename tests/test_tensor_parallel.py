"""Two ranks over gloo: the layer and a whole converted model against one rank and against eager."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import tiny_v4
import torch
from test_layer import Inputs, make, whole
from tiny_v4 import Choices, argmax_differs, left_padding, relative, tokens

pytest.importorskip("transformers")
import parallel_v4
from test_engine_transformers import LIMIT, PROMPT, dequantised_rows, forward

WORLD = 2


@pytest.fixture(scope="module")
def choice() -> list[torch.Tensor]:
    made = tiny_v4.model()
    with torch.no_grad(), Choices(made) as choices:
        forward(made, tokens(PROMPT))
    return choices.seen


@pytest.fixture(scope="module")
def ranks(choice: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(choice, folder / "choice.pt")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=parallel_v4.rank, args=(i, WORLD, str(folder))) for i in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging
    assert [process.exitcode for process in processes] == [0] * WORLD
    return [torch.load(Path(folder) / f"rank{i}.pt", weights_only=False) for i in range(WORLD)]


def test_layer_over_a_group(ranks: list[dict[str, Any]]) -> None:
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        want = Inputs(dtype=dtype).call(make(source=whole(dtype=dtype)))
        native = ranks[0]["layer"]["out"][dtype, "native"]
        assert relative(native, want) < limit
        assert torch.equal(native, ranks[0]["layer"]["out"][dtype, "padded"])
        assert torch.equal(native, ranks[1]["layer"]["out"][dtype, "native"])


def test_one_reduction_a_call(ranks: list[dict[str, Any]]) -> None:
    shape = tuple(Inputs().hidden.shape)
    assert all(r["layer"]["reduced"] == [shape] * 4 for r in ranks)


@torch.no_grad()
def test_model_agrees_with_eager(
    ranks: list[dict[str, Any]], choice: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_v4.model()
    for layout in ("bf16", "v4"):
        if layout == "v4":
            dequantised_rows(monkeypatch)
        with Choices(made, choice):
            want = forward(made, tokens(PROMPT))
        for result in ranks:
            got = result["model"][layout, "native"]
            print(f"\nTP{WORLD} {layout} pages: relative L2 {relative(got, want):.2e}")
            assert relative(got, want) <= LIMIT
            wrong, clear = argmax_differs(got, want)
            assert wrong == 0
            assert clear > PROMPT // 2


def test_padding_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for layout in ("bf16", "v4"):
            assert torch.equal(result["model"][layout, "native"], result["model"][layout, "padded"])
            native, padded = (result["model"][layout, kind, "lanes"] for kind in ("native", "padded"))
            assert [width for *_, width in native] == [4] * 4
            assert [width for *_, width in padded] == [64] * 4
            for mine, other in zip(native, padded, strict=True):
                assert torch.equal(mine[0], other[0])
                assert torch.equal(mine[1], other[1])


def test_ranks_agree_and_pieces_agree(ranks: list[dict[str, Any]]) -> None:
    first, second = (r["model"] for r in ranks)
    for key in (("bf16", "native"), ("v4", "native"), "v4 in pieces"):
        assert torch.equal(first[key], second[key])
    assert relative(first["v4 in pieces"], first["v4", "native"]) < 3e-3


@torch.no_grad()
def test_generate_over_ranks(ranks: list[dict[str, Any]]) -> None:
    made = tiny_v4.model(index_topk=64, pad_token_id=0)
    mask = left_padding(*parallel_v4.LENGTHS)
    ids = tokens(*parallel_v4.LENGTHS)
    want = made.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert all(torch.equal(r["generate"], want) for r in ranks)


def test_ranks_that_do_not_divide_the_heads(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["refused"].startswith("DeepseekV4Attention: world: got 2, which does not divide")
