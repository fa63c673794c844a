"""Converted DeepSeek-V4 models against the untouched eager model: all kinds of layer, chunks, caches, padding."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_v4
import torch
from tiny_v4 import C, Choices, H, S, argmax_differs, left_padding, relative, tokens
from torch import Tensor, nn

from headfit import Policy
from headfit.cache import dequantize_rows, quantize_rows
from headfit.engines import ENGINES, require
from headfit.layer import LaneRecord, MQALayer, set_observer, set_policy

pytest.importorskip("transformers")
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from headfit.engines.transformers import MQAAttention, convert, revert, sorted_choice, window_lanes

LIMIT = 1e-2  # relative L2 of the logits, one bfloat16 rounding each of queries, rows and outputs
PROMPT = 90  # 22 compressed rows of 4, of which a query takes 8; 2 of 32; 5 windows of 16


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_v4.model()


@pytest.fixture
def converted(model: Any) -> Iterator[Any]:
    """The shared model on plain bfloat16 pages of 8 rows; put back afterwards."""
    yield convert(model, policy=Policy.native(), cache_layout="bf16", page_size=8)
    revert(model)


def new_cache(model: Any) -> Any:
    return DynamicCache(config=model.config)


def forward(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Tensor:
    name = (
        "cache" if "cache" in inspect.signature(inspect.unwrap(type(model).forward)).parameters else "past_key_values"
    )
    if cache is not None:
        options[name] = cache
    return model(input_ids=ids, use_cache=cache is not None, **options).logits


def chunked(
    model: Any, ids: Tensor, cuts: list[int], cache: Any = None, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Logits of ids [b, n] fed in pieces that end at ``cuts`` and at n."""
    cache = new_cache(model) if cache is None else cache
    parts = []
    for start, stop in itertools.pairwise([0, *cuts, ids.shape[1]]):
        piece = {k: v[:, start:stop] for k, v in options.items()}
        if mask is not None:
            piece["attention_mask"] = mask[:, :stop]
        parts.append(forward(model, ids[:, start:stop], cache, **piece))
    return torch.cat(parts, 1)


def eager(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The untouched model's logits and its sparse choice in each compressed-sparse layer."""
    assert not any(isinstance(m, MQALayer) for m in model.modules())
    with Choices(model) as choices:
        return forward(model, ids, **options), choices.seen


def replay(choice: list[Tensor], cuts: list[int], length: int) -> list[Tensor]:
    """A one-shot choice cut up for a chunked run."""
    return [c[:, a:b] for a, b in itertools.pairwise([0, *cuts, length]) for c in choice]


def check(got: Tensor, want: Tensor) -> None:
    assert relative(got, want) <= LIMIT
    wrong, clear = argmax_differs(got, want)
    assert wrong == 0
    assert clear > want.shape[0] * want.shape[1] // 2  # the check must have had something to say


# -------------------- agreement


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("cached", [False, True])
def test_bf16_pages_agree_with_eager(model: Any, page_size: int, cached: bool) -> None:
    ids = tokens(PROMPT)
    want, choice = eager(model, ids)
    assert all((c[0, -1] >= 0).sum() == 8 < PROMPT // 4 for c in choice)  # sparse, not dense
    convert(model, cache_layout="bf16", page_size=page_size)
    with Choices(model, choice):
        got = forward(model, ids, new_cache(model) if cached else None)
    revert(model)
    check(got, want)


def test_own_choice_agrees(model: Any, converted: Any) -> None:
    """Without the replay: the choices are nearly the same, and a model whose choice is everything agrees as above."""
    ids = tokens(PROMPT)
    with Choices(model) as mine:
        forward(converted, ids)
    revert(model)
    _, choice = eager(model, ids)
    convert(model)  # for the fixture to revert
    rows = [
        (set(mine_row.tolist()), set(row.tolist()))
        for mine_layer, layer in zip(mine.seen, choice, strict=True)
        for mine_row, row in zip(mine_layer[0], layer[0], strict=True)
    ]
    same = [len(a & b) / len(b) for a, b in rows]
    assert sum(same) / len(same) > 0.97

    everything = tiny_v4.model(index_topk=64)
    want, _ = eager(everything, ids)
    check(forward(convert(everything, cache_layout="bf16"), ids), want)


@pytest.mark.parametrize("layers", [(S,), (C,), (H,)])
def test_true_head_count(layers: tuple[str, ...]) -> None:
    """64 heads, 8 groups, windows and rates of the released models, past a window and a heavy compression."""
    real = {"o_groups": 8, "sliding_window": 128, "index_topk": 512, "compress_rates": {C: 4, H: 128}}
    made = tiny_v4.model(heads=64, layers=layers, **real)
    ids = tokens(150)
    want, _ = eager(made, ids)
    check(forward(convert(made, cache_layout="bf16"), ids), want)


def dequantised_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the eager model read what v4 pages would hold: each key row and compressed row, quantised and back."""
    rotate = modeling.apply_rotary_pos_emb

    def through_v4(x: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = rotate(x, cos, sin, *args, **kwargs)
        if x.shape[1] != 1 or x.shape[-1] != 512:  # queries and outputs have 8 heads, indexer rows 64 dims
            return out
        rows = dequantize_rows(*quantize_rows(out.reshape(-1, 512), "v4"), "v4")
        return rows.view(out.shape).to(out.dtype)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", through_v4)


def test_v4_pages_agree_with_eager_on_dequantised_rows(
    model: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    ids = tokens(PROMPT)
    plain, choice = eager(model, ids)
    with monkeypatch.context() as patched:
        dequantised_rows(patched)
        with Choices(model, choice):
            want = forward(model, ids)
    convert(model, cache_layout="v4", page_size=8)
    with Choices(model, choice):
        got = forward(model, ids, new_cache(model))
    revert(model)
    check(got, want)
    format_error = relative(want, plain)
    record_property("v4_format_relative_l2", format_error)
    print(f"\nv4 pages: {relative(got, want):.2e} from eager on the same rows; the format itself: {format_error:.2e}")
    assert LIMIT < format_error < 0.15
    assert relative(got, plain) < 1.5 * format_error


# -------------------- chunks and decode

CUTS = [
    [40],
    [1],
    [3, 4, 5],
    [16, 17, 33, 34, 35, 36, 61],
    [2, *range(28, 38), 70],  # decode across compression borders of both rates
    list(range(70, PROMPT)),  # 20 decode steps, the ring wraps
]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda c: f"{len(c)}cuts")
def test_chunks_agree_with_one_shot(model: Any, cuts: list[int]) -> None:
    ids = tokens(PROMPT)
    want, choice = eager(model, ids)
    for layout, limit in (("bf16", LIMIT), ("v4", None)):
        convert(model, cache_layout=layout, page_size=8)
        with Choices(model, choice):
            once = forward(model, ids)
        with Choices(model, replay(choice, cuts, PROMPT)):
            pieces = chunked(model, ids, cuts)
        revert(model)
        assert relative(pieces, once) < 3e-3
        if limit is not None:
            check(pieces, want)


class SameInputs:
    """Runs a model once and then again in pieces, with the queries, key rows and compressed rows of the first run.

    Matrix products and norms round differently for other row counts (BLAS picks its blocking by shape). With their
    results replayed, every bit of the second run's attention comes from pages, lanes and kernel.
    """

    def __init__(self, made: Any, patch: pytest.MonkeyPatch) -> None:
        self.first: dict[tuple[str, int], Tensor] = {}
        self.at: dict[tuple[str, int], int] = {}
        for name in ("_kernel_query", "key_rows"):
            patch.setattr(MQALayer, name, self._replayed(name, getattr(MQALayer, name)))
        for module in made.modules():
            if isinstance(module, MQAAttention) and module.compressor is not None:
                module.compressor.register_forward_hook(self._compressed(module.layer_idx))

    def _replayed(self, name: str, original: Any) -> Any:
        def call(layer: MQALayer, *args: Any) -> Tensor:
            out, key = original(layer, *args), (name, layer.layer)
            if key not in self.first:
                self.first[key] = out
                return out
            start = self.at.get(key, 0)
            self.at[key] = start + out.shape[0]
            return self.first[key][start : start + out.shape[0]].clone()

        return call

    def _compressed(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            rows = self.first.setdefault(("compressed", layer), out[0])
            return rows[:, :, : out[0].shape[2]], out[1]

        return hook


@pytest.mark.parametrize("layout", ["bf16", "v4"])
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 37], [45, 46, *range(60, 70)]], ids=["short", "steps"])
def test_chunks_and_decode_are_bit_equal_to_one_shot(
    cuts: list[int], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = convert(tiny_v4.model(), cache_layout=layout, page_size=8, policy=Policy.native())
    for module in made.modules():
        if isinstance(module, MQALayer):
            module.batch_invariant = True
    SameInputs(made, monkeypatch)
    lanes: list[LaneRecord] = []
    set_observer(made, lanes.append)
    ids = tokens(PROMPT)
    with Choices(made) as choices:
        forward(made, ids)
    once = list(lanes)
    lanes.clear()
    with Choices(made, replay(choices.seen, cuts, PROMPT)):
        chunked(made, ids, cuts)
    for layer in range(4):
        mine = [r for r in lanes if r.layer == layer]
        assert torch.equal(torch.cat([r.out for r in mine]), once[layer].out)
        assert torch.equal(torch.cat([r.lse for r in mine]), once[layer].lse)
        assert {r.phase for r in mine} == {"prefill", "decode"}


def test_prompts_shorter_than_a_compressed_row(model: Any, converted: Any) -> None:
    for n in (1, 2, 3):
        got = chunked(converted, tokens(n + 6), list(range(n, n + 6)))
        revert(model)
        want, _ = eager(model, tokens(n + 6))
        convert(model, policy=Policy.native(), cache_layout="bf16", page_size=8)
        assert relative(got, want) <= LIMIT


# -------------------- left padding


@pytest.mark.parametrize("shifted", [False, True], ids=["default positions", "positions of generate"])
@pytest.mark.parametrize("lengths", [(50, 3, 37), (41, 41), (6, 40, 1)])
def test_left_padding(model: Any, lengths: tuple[int, ...], shifted: bool) -> None:
    steps = 6
    n = max(lengths)
    ids = tokens(*[n + steps] * len(lengths))
    mask = torch.cat([left_padding(*lengths), torch.ones(len(lengths), steps, dtype=torch.long)], 1)
    options = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if shifted else {}
    cuts = [n // 2, n, *range(n + 1, n + steps)]
    with Choices(model) as choices:
        want = chunked(model, ids, cuts, mask=mask, **options)
    convert(model, cache_layout="bf16", page_size=8)
    with Choices(model, choices.seen):
        got = chunked(model, ids, cuts, mask=mask, **options)
    revert(model)
    real = mask.bool()
    check(got[real][None], want[real][None])


def test_padding_does_not_reach_a_row() -> None:
    """Where positions are shifted, a padded sequence attends in its window to exactly what it does alone."""
    sliding = convert(tiny_v4.model(layers=(S, S)).double(), cache_layout="bf16", page_size=8)
    ids, n = tokens(30, 30), 11
    mask = left_padding(30, n)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    got = forward(sliding, ids, attention_mask=mask, position_ids=positions)[1, -n:]
    alone = forward(sliding, ids[1:, -n:])[0]
    assert relative(got, alone) < 1e-6


# -------------------- generate


def test_generate_greedy() -> None:
    made = tiny_v4.model(index_topk=64, pad_token_id=0)
    lengths = (35, 3, 22)
    ids, mask = tokens(*lengths), left_padding(*lengths)
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    want = made.generate(ids, **call)
    got = convert(made, cache_layout="bf16", page_size=8).generate(ids, **call)
    assert torch.equal(got, want)
    assert len(set(want[0, 35:].tolist())) > 3  # not one token over and over
    set_policy(made, Policy.padded())
    assert torch.equal(made.generate(ids, **call), want)


def test_generate_beams() -> None:
    """Beams reorder the cache at every step; the pages follow. Scores agree, and sequences where scores are apart."""
    made = tiny_v4.model(layers=(S, C), index_topk=64, pad_token_id=0)
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    call |= {"return_dict_in_generate": True, "output_scores": True}
    ids = tokens(21, 21)
    want = made.generate(ids, **call)
    got = convert(made, cache_layout="bf16", page_size=8).generate(ids, **call)
    assert (got.sequences_scores - want.sequences_scores).abs().max() < 5e-3
    best, second = want.sequences_scores.view(-1, 2).unbind(-1)
    apart = (best - second > 1e-2).nonzero().flatten() * 2
    assert apart.numel()
    assert torch.equal(got.sequences[apart], want.sequences[apart])


# -------------------- state


def test_two_caches_and_two_policies_in_turn(converted: Any) -> None:
    """What `headfit compare` does: pad off and on, alternating on one model, each with its own cache."""
    ids = tokens(PROMPT)
    cuts = [33, 60, *range(61, 66)]
    lanes: list[LaneRecord] = []
    set_observer(converted, lanes.append)
    caches = {policy: new_cache(converted) for policy in (Policy.padded(), Policy.native())}
    logits: dict[Policy, list[Tensor]] = {policy: [] for policy in caches}
    for start, stop in itertools.pairwise([0, *cuts]):
        for policy, cache in caches.items():
            set_policy(converted, policy)
            logits[policy].append(forward(converted, ids[:, start:stop], cache))
    set_observer(converted, None)
    padded, native = (torch.cat(parts, 1) for parts in logits.values())
    assert torch.equal(padded, native)
    assert torch.equal(native, chunked(converted, ids[:, :65], cuts[:-1]))
    assert {r.decision.width for r in lanes} == {8}  # 8 heads at one rank are the whole model: nothing to pad
    assert {r.kind for r in lanes} == {"sliding", "compressed_sparse", "heavily_compressed"}
    assert {(r.phase, r.rows) for r in lanes} == {("prefill", 33), ("prefill", 27), ("decode", 1)}


def test_cache_copies_and_resets(converted: Any) -> None:
    ids = tokens(PROMPT)
    want = chunked(converted, ids, [40, 60])
    cache = new_cache(converted)
    forward(converted, ids[:, :40], cache)
    copied = copy.deepcopy(cache)
    for used in (copied, cache):
        assert torch.equal(chunked(converted, ids[:, 40:], [20], used), want[:, 40:])
    if not hasattr(modeling.DeepseekV4HCACache, "reset") or "reset" not in vars(modeling.DeepseekV4HCACache):
        pytest.skip("this Transformers cannot reset DeepSeek-V4's own cache")
    chunked(converted, tokens(PROMPT, seed=1), [50], other := new_cache(converted))
    other.reset()
    assert torch.equal(chunked(converted, ids, [40, 60], other), want)


def test_a_cache_outlives_the_conversion(model: Any) -> None:
    """Eager and converted can take over from each other in the middle of a sequence."""
    ids = tokens(PROMPT)
    want, choice = eager(model, ids)
    cuts = [40, 41, 60]
    for first_converted in (True, False):
        cache, parts = new_cache(model), []
        on = first_converted
        for start, stop in itertools.pairwise([0, *cuts, PROMPT]):
            if on:
                convert(model, cache_layout="bf16", page_size=8)
            with Choices(model, [c[:, start:stop] for c in choice]):
                parts.append(forward(model, ids[:, start:stop], cache))
            if on:
                revert(model)
            on = not on
        check(torch.cat(parts, 1), want)


def test_inference_mode_and_back(converted: Any) -> None:
    ids = tokens(40)
    want = chunked(converted, ids, [30, 31])
    cache = new_cache(converted)
    with torch.inference_mode():
        first = forward(converted, ids[:, :30], cache)
    rest = chunked(converted, ids[:, 30:], [1], cache)
    assert torch.equal(torch.cat([first, rest], 1), want)


def test_other_layout_on_the_same_cache(model: Any) -> None:
    ids = tokens(60)
    cache = new_cache(model)
    convert(model, cache_layout="v4", page_size=8)
    forward(model, ids[:, :50], cache)
    revert(model)
    convert(model, cache_layout="bf16", page_size=4)
    got = forward(model, ids[:, 50:], cache)
    pages = cache.layers[1].headfit_pages
    assert (pages.window.layout, pages.window.page_size, pages.written) == ("bf16", 4, 15)
    revert(model)
    assert got.isfinite().all()


def test_pages_hold_the_cache_and_die_with_it(converted: Any) -> None:
    ids = tokens(PROMPT)
    cache = new_cache(converted)
    chunked(converted, ids, [30, 31], cache)
    pages = cache.layers[1].headfit_pages
    stored = cache.layers[1].compressed_kv["compressor"][0]
    slots = pages.compressed.slots(torch.tensor(0), torch.arange(stored.shape[0]))
    assert torch.equal(pages.compressed.data.view(-1, 512)[slots], stored.bfloat16())
    alive = weakref.ref(pages)
    del pages, cache, stored
    gc.collect()
    assert alive() is None


def test_window_pages_stay_as_large_as_a_chunk(converted: Any) -> None:
    cache = new_cache(converted)
    chunked(converted, tokens(60), [20, *range(21, 60)], cache)
    assert cache.layers[0].headfit_pages.window.capacity <= 15 + 20 + 8


def test_revert_restores_everything(model: Any) -> None:
    ids = tokens(20)
    before = [layer.self_attn for layer in model.model.layers]
    names = list(model.state_dict())
    want = forward(model, ids)
    assert convert(model) is model
    assert all(isinstance(layer.self_attn, MQAAttention) for layer in model.model.layers)
    assert forward(model, ids).requires_grad is False
    assert revert(model) is model
    assert [layer.self_attn for layer in model.model.layers] == before
    assert list(model.state_dict()) == names
    assert torch.equal(forward(model, ids), want)


def test_weights_are_shared_at_one_rank(model: Any, converted: Any) -> None:
    attention = converted.model.layers[0].self_attn
    assert attention.layer.q_b is attention.original.q_b_proj.weight
    assert attention.compressor is attention.original.compressor


def test_bfloat16_model() -> None:
    made = tiny_v4.model(layers=(S, C))
    ids = tokens(40)
    want, choice = eager(made, ids)
    wide = set(
        made._keep_in_fp32_modules_strict
    )  # what Transformers itself leaves in float32 when it loads in bfloat16
    if modeling.DeepseekV4RMSNorm(4)(torch.zeros(1, 4).bfloat16()).dtype != torch.bfloat16:
        wide = {name for name in wide if "norm" not in name}  # before 5.18 a float32 norm widened the whole body
    keep = {n for n, _ in made.named_parameters() if set(n.split(".")) & wide}
    for name, parameter in made.named_parameters():
        if name not in keep:
            parameter.data = parameter.data.bfloat16()
    convert(made, cache_layout="bf16")
    with Choices(made, choice):
        got = forward(made, ids)
    assert got.dtype == torch.bfloat16
    assert relative(got, want) < 5e-2  # the body's own rounding; attention's part is bounded above


# -------------------- errors


def test_bad_models() -> None:
    with pytest.raises(TypeError, match=r"model: got Linear .*accepted is a Transformers DeepseekV4ForCausalLM"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="without converted attentions"):
        revert(nn.Linear(2, 2))
    small = tiny_v4.model(layers=(S,), head_dim=128)
    with pytest.raises(ValueError, match="head_dim 128, accepted is 512"):
        convert(small)
    assert type(small.model.layers[0].self_attn).__name__ == "DeepseekV4Attention"


def test_bad_conversions(model: Any, converted: Any) -> None:
    with pytest.raises(ValueError, match=r"converted model.*revert"):
        convert(converted)
    revert(model)
    for options, text in (
        ({"cache_layout": "fp4"}, "cache_layout: got 'fp4', accepted are 'v4' and 'bf16'"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"backend": "nope"}, "backend: got 'nope'"),
    ):
        with pytest.raises(ValueError, match=text):
            convert(model, **options)
        assert not any(isinstance(m, MQAAttention) for m in model.modules())
    convert(model)
    with pytest.raises(TypeError, match=r"DynamicCache\(config=model\.config\)"):
        forward(converted, tokens(5), DynamicCache())


def test_keep_original_false_lets_go() -> None:
    made = tiny_v4.model(layers=(S,))
    alive = weakref.ref(made.model.layers[0].self_attn)
    convert(made, keep_original=False)
    gc.collect()
    assert alive() is None
    with pytest.raises(ValueError, match=r"keep_original=False.*load the model again"):
        revert(made)


def test_engine_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(require("transformers"))
    with pytest.raises(ValueError, match="engine: got 'nope'"):
        require("nope")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.16.0")
    with pytest.raises(ImportError, match=r"got 5\.16\.0, accepted is 5\.17\.0 and newer; pip install"):
        require("transformers")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    with pytest.warns(UserWarning, match=f"newer than {ENGINES['transformers'].newest}"):
        require("transformers")


# -------------------- lanes


@pytest.mark.parametrize("past", [0, 3, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("boolean", [True, False])
def test_window_lanes_against_a_loop(past: int, batch: int, boolean: bool) -> None:
    length, window = 9, 6
    kept = min(past, window - 1)
    allowed = torch.rand(batch, 1, length, kept + length, generator=torch.Generator().manual_seed(past)) < 0.7
    row = past + torch.arange(length)[:, None]
    column = past - kept + torch.arange(kept + length)
    allowed &= (column <= row) & (column > row - window)
    mask = allowed if boolean else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    positions, lengths = window_lanes(past, length, window, mask, batch, torch.device("cpu"))
    for b, i in itertools.product(range(batch), range(length)):
        want = column[allowed[b, 0, i]].tolist()
        assert positions[b, i, : lengths[b, i]].tolist() == want
    plain, counts = window_lanes(past, length, window, None, batch, torch.device("cpu"))
    for b, i in itertools.product(range(batch), range(length)):
        here = past + i
        assert plain[b, i, : counts[b, i]].tolist() == list(range(max(0, here - window + 1), here + 1))


def test_a_flat_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 9\)"):
        window_lanes(0, 9, 6, torch.ones(1, 9), 1, torch.device("cpu"))


def test_sorted_choice() -> None:
    rows, lengths = sorted_choice(torch.tensor([[[5, -1, 0, 3], [-1, -1, -1, -1]]]))
    assert lengths.tolist() == [[3, 0]]
    assert rows[0, 0, :3].tolist() == [0, 3, 5]
