"""MQALayer alone: against a float64 layer written out longhand, padded against native, and split over ranks."""

from __future__ import annotations

import copy
import functools
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headfit import Policy, weights
from headfit.cache import empty_cache, unpack_kv
from headfit.geometry import Geometry
from headfit.layer import Keys, LaneRecord, MQALayer, set_observer, set_policy
from headfit.pages import new_pages
from headfit.rotary import rotary_tables, rotate_into
from headfit.weights import AttentionWeights, dequantize_blocks, from_official, from_transformers, take_shard

HEADS, GROUPS, HIDDEN, Q_LORA, O_LORA, ROWS, LANES = 64, 8, 96, 48, 24, 12, 20
GEOMETRY = Geometry(HEADS, HIDDEN, Q_LORA, 512, 64, 128, 512, GROUPS, O_LORA, (0,), ("sliding",))


@functools.cache
def whole(seed: int = 0, dtype: torch.dtype = torch.float32) -> AttentionWeights:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype)

    per_group = HEADS // GROUPS * 512
    return AttentionWeights(
        q_a=normal(Q_LORA, HIDDEN),
        q_a_norm=1 + 0.1 * torch.randn(Q_LORA, generator=draw),
        q_b=normal(HEADS * 512, Q_LORA),
        kv=normal(512, HIDDEN),
        kv_norm=1 + 0.1 * torch.randn(512, generator=draw),
        o_a=normal(GROUPS, O_LORA, per_group),
        o_b=normal(HIDDEN, GROUPS * O_LORA),
        sinks=torch.randn(HEADS, generator=draw),
    )


class Inputs:
    """One call: hidden rows at positions 0.., their own slots, random lanes over them, a second key set."""

    def __init__(self, layout: str = "v4", rows: int = ROWS, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(rows, HIDDEN, generator=draw).to(dtype)
        self.cos, self.sin = rotary_tables(torch.arange(rows), 64, 10000.0)
        self.slots = torch.randperm(32, generator=draw)[:rows]
        lanes = (
            self.slots[torch.randint(0, max(rows, 1), (rows, LANES), generator=draw)] if rows else self.slots[:, None]
        )
        lengths = torch.randint(1, LANES + 1, (rows,), generator=draw, dtype=torch.int32)
        self.window = Keys(new_pages(4, 8, layout, torch.device("cpu")), lanes.to(torch.int32), lengths)
        extra = new_pages(3, 8, layout, torch.device("cpu"))
        from headfit.cache import write_rows

        write_rows(extra, torch.arange(24), torch.randn(24, 512, generator=draw))
        self.extra = Keys(extra, torch.randint(-1, 24, (rows, 7), generator=draw, dtype=torch.int32))

    def call(self, layer: MQALayer, **options: Any) -> Tensor:
        return layer(self.hidden, self.cos, self.sin, self.slots, self.window, self.extra, **options)


def make(
    world: int = 1, rank: int = 0, policy: Policy | None = None, source: AttentionWeights | None = None
) -> MQALayer:
    layer = MQALayer(GEOMETRY, shard=(rank, world), policy=policy or Policy.native(), backend="cpu")
    return layer.load(source or whole()).eval()


def norm(t: Tensor) -> Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(t: Tensor, x: Inputs, sign: int) -> Tensor:
    """Rotary as complex multiplication."""
    angle = torch.complex(x.cos.double(), sign * x.sin.double())
    angle = angle.view(angle.shape[0], *[1] * (t.dim() - 2), angle.shape[-1])
    pairs = torch.view_as_complex(t[..., 448:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([t[..., :448], torch.view_as_real(pairs * angle).flatten(-2)], -1)


def longhand_rows(w: AttentionWeights, x: Inputs) -> Tensor:
    """The latent rows of the call in float64."""
    return turn(norm(x.hidden.double() @ w.kv.double().T) * w.kv_norm.double(), x, 1)


def longhand(w: AttentionWeights, x: Inputs) -> Tensor:
    """The layer in float64 from its definition; reads the rows the pages hold."""
    h = x.hidden.double()
    latent = norm(h @ w.q_a.double().T) * w.q_a_norm.double()
    q = turn(norm((latent @ w.q_b.double().T).view(-1, HEADS, 512)), x, 1)
    rows, extra = unpack_kv(x.window.cache).double(), unpack_kv(x.extra.cache).double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        keys = rows[x.window.indices[i, : x.window.lengths[i]].long()]
        more = x.extra.indices[i]
        keys = torch.cat([keys, extra[more[more >= 0].long()]])
        scores = torch.cat([q[i] @ keys.T * 512**-0.5, w.sinks.double()[:, None]], -1)
        out[i] = scores.softmax(-1)[:, :-1] @ keys
    out = turn(out, x, -1).view(-1, GROUPS, HEADS // GROUPS * 512)
    low = torch.einsum("rgi,goi->rgo", out, w.o_a.double().view(GROUPS, O_LORA, -1))
    return low.flatten(1) @ w.o_b.double().T


@pytest.mark.parametrize("layout", ["v4", "bf16"])
def test_matches_the_definition(layout: str) -> None:
    x = Inputs(layout)
    got = x.call(make())
    assert got.dtype == torch.float32
    want = longhand(whole(), x)
    assert (got - want).norm() / want.norm() < 4e-3  # bf16 q and out
    stored = unpack_kv(x.window.cache)[x.slots].double()
    rows = longhand_rows(whole(), x)
    assert (stored - rows).norm() / rows.norm() < (0.04 if layout == "v4" else 3e-3)


def test_bfloat16_weights() -> None:
    w = whole(dtype=torch.bfloat16)
    x = Inputs("bf16", dtype=torch.bfloat16)
    got = x.call(make(source=w))
    assert got.dtype == torch.bfloat16
    want = longhand(w, x)
    assert (got.double() - want).norm() / want.norm() < 1.5e-2


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32, 64])
def test_ranks_add_up_and_padding_changes_nothing(world: int) -> None:
    """Partial outputs of all ranks sum to the layer; at each rank padded and native agree in every bit."""
    want = Inputs().call(make())
    total = torch.zeros_like(want)
    for rank in range(world):
        if rank % max(1, world // 4):  # every rank counts in the sum, some are compared with their padded selves
            total += Inputs().call(make(world, rank))
            continue
        records: dict[str, LaneRecord] = {}
        outs = {}
        for policy in (Policy.padded(), Policy.native()):
            layer = make(world, rank, policy)
            layer.observer = functools.partial(records.__setitem__, policy.kind)
            outs[policy.kind] = Inputs().call(layer)
        native, padded = records["native"], records["padded"]
        assert (native.decision.width, padded.decision.width) == (HEADS // world, 64)
        assert native.out.shape == (ROWS, HEADS // world, 512)
        assert native.lse.shape == (ROWS, HEADS // world)
        assert torch.equal(native.out, padded.out)
        assert torch.equal(native.lse, padded.lse)
        assert torch.equal(outs["native"], outs["padded"])
        total += outs["native"]
    assert (total - want).norm() / want.norm() < 1e-4


def test_a_wrong_shard_would_be_noticed() -> None:
    """The sum over ranks is a real check: a rank with its neighbour's o_a columns changes it."""
    want = Inputs().call(make())
    total = torch.zeros_like(want)
    for rank in range(16):
        layer = make(16, rank)
        if rank == 3:
            layer.o_a.data = take_shard(whole(), GEOMETRY, GEOMETRY.shard(2, 16)).o_a
        total += Inputs().call(layer)
    assert (total - want).norm() / want.norm() > 1e-2


def test_query_gemm_writes_one_contiguous_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = MQALayer._kernel_query

    def spy(self: MQALayer, flat: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
        q = original(self, flat, cos, sin, width)
        seen.append(
            (tuple(flat.shape), flat.stride(), flat.is_contiguous(), tuple(q.shape), q[:, : self.n_local].clone())
        )
        return q

    monkeypatch.setattr(MQALayer, "_kernel_query", spy)
    for policy in (Policy.padded(), Policy.native()):
        Inputs().call(make(8, 1, policy))
    (padded, native) = seen
    assert padded[:3] == native[:3] == ((ROWS, 8 * 512), (8 * 512, 1), True)
    assert (padded[3], native[3]) == ((ROWS, 64, 512), (ROWS, 8, 512))
    assert torch.equal(padded[4], native[4])


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace cuts rows; norm, rotary and kernel query keep their bits, the projection its rounding."""
    want = Inputs().call(make())
    monkeypatch.setitem(__import__("headfit.layer").layer._WORKSPACE, "cpu", 5 * 4 * HEADS * 512)
    got = Inputs().call(make())
    assert (got - want).norm() / want.norm() < 1e-6


def test_no_rows() -> None:
    x = Inputs(rows=0)
    x.window = Keys(x.window.cache, torch.empty(0, 4, dtype=torch.int32))
    assert x.call(make()).shape == (0, HIDDEN)


def test_records_and_walkers() -> None:
    model = nn.ModuleList([make(2), make(2)])
    records: list[LaneRecord] = []
    assert set_observer(model, records.append) == 2
    assert set_policy(model, Policy.padded()) == 2
    x = Inputs()
    for layer, mode in zip(model, ("extend", "decode"), strict=True):
        x.call(layer, mode=mode)
    assert [(r.layer, r.kind, r.phase, r.rows, r.n_local) for r in records] == [
        (0, "sliding", "prefill", ROWS, 32),
        (0, "sliding", "decode", ROWS, 32),
    ]
    assert all(r.seconds > 0 and r.decision.padded and r.decision.reason for r in records)
    set_observer(model, None)
    x.call(model[0])
    assert len(records) == 2
    for walk in (lambda: set_policy(nn.Linear(1, 1), Policy.native()), lambda: set_observer(nn.Linear(1, 1), None)):
        with pytest.raises(ValueError, match=r"without an MQALayer.*convert"):
            walk()


def test_sinks_follow_the_parameter() -> None:
    layer = make(4, 2, source=whole.__wrapped__())  # a copy of its own, to be changed in place
    before = Inputs().call(layer)
    pointer = layer._sinks(16, torch.device("cpu")).data_ptr()
    with torch.no_grad():
        layer.sinks.fill_(torch.inf)
    assert Inputs().call(layer).abs().max() == 0
    mine = whole().sinks[layer.shard.heads.start : layer.shard.heads.stop]
    layer.sinks.data.copy_(mine)  # how weight loaders write: no version counter notices
    assert torch.equal(Inputs().call(layer), before)
    layer.sinks.data = torch.full_like(mine, torch.inf)  # replaced: taken over anew, at the place a graph knows
    assert Inputs().call(layer).abs().max() == 0
    layer.sinks.data.copy_(mine)
    twin = copy.deepcopy(layer)
    twin.sinks.data.fill_(torch.inf)
    assert Inputs().call(twin).abs().max() == 0
    assert torch.equal(Inputs().call(layer), before)
    assert layer._sinks(16, torch.device("cpu")).data_ptr() == pointer


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_sinks_survive_a_cast_of_the_module(cast: torch.dtype) -> None:
    layer = make(source=whole.__wrapped__())
    layer.sinks.data.copy_(layer.sinks.to(torch.bfloat16).float())
    expected = layer._sinks(layer.n_local, torch.device("cpu")).clone()
    layer.sinks = nn.Parameter(layer.sinks.to(cast), requires_grad=False)
    assert torch.equal(layer._sinks(layer.n_local, torch.device("cpu")), expected)
    layer.sinks.data.fill_(-1)
    assert bool((layer._sinks(layer.n_local, torch.device("cpu")) == -1).all())


def test_a_layer_without_weights_says_so() -> None:
    layer = MQALayer(GEOMETRY).eval()
    with pytest.raises(RuntimeError, match=r"before its weights.*load\(\)"):
        layer.query_latent(torch.zeros(1, HIDDEN))


def test_gradients_are_refused_and_not_kept() -> None:
    layer = make()
    assert not Inputs().call(layer).requires_grad
    with pytest.raises(RuntimeError, match=r"training mode.*model.eval\(\)"):
        Inputs().call(layer.train())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "dense"}, "kind: got 'dense', accepted are sliding"),
        ({"shard": (0, 3)}, "world: got 3.*does not divide"),
        ({"shard": (2, 2)}, "rank: got 2"),
        ({"backend": "nope"}, "backend: got 'nope'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MQALayer(GEOMETRY, **options)


def test_another_head_dim_is_refused() -> None:
    geometry = Geometry(8, HIDDEN, Q_LORA, 128, 64, 128, 512, 8, O_LORA, (0,), ("sliding",))
    with pytest.raises(ValueError, match="head_dim 128, accepted is 512"):
        MQALayer(geometry)


# -------------------- weights

OFFICIAL = {
    "q_a": "wq_a.weight",
    "q_a_norm": "q_norm.weight",
    "q_b": "wq_b.weight",
    "kv": "wkv.weight",
    "kv_norm": "kv_norm.weight",
    "o_a": "wo_a.weight",
    "o_b": "wo_b.weight",
    "sinks": "attn_sink",
}


def official(w: AttentionWeights, prefix: str) -> dict[str, Tensor]:
    state = {prefix + OFFICIAL[f.name]: getattr(w, f.name) for f in fields(w)}
    state[prefix + "wo_a.weight"] = w.o_a.reshape(GROUPS * O_LORA, -1)
    return state


def test_official_names() -> None:
    state = official(whole(), "layers.3.attn.")
    layer = MQALayer(GEOMETRY, policy=Policy.native(), backend="cpu").eval()
    got = Inputs().call(layer.load_official(state, "layers.3.attn."))
    assert torch.equal(got, Inputs().call(make()))


def test_missing_and_misshapen_weights() -> None:
    state = official(whole(), "attn.")
    with pytest.raises(ValueError, match=r"got no layers\.0\.attn\.attn_sink, layers\.0\.attn\.kv_norm"):
        from_official(state, GEOMETRY, "layers.0.attn.")
    del state["attn.wq_b.weight"]
    with pytest.raises(ValueError, match=r"got no attn\.wq_b\.weight"):
        from_official(state, GEOMETRY)
    state = official(whole(), "attn.") | {"attn.wkv.weight": torch.zeros(512, HIDDEN + 1)}
    with pytest.raises(ValueError, match=r"kv: got shape \(512, 97\), accepted is \(512, 96\)"):
        from_official(state, GEOMETRY)
    with pytest.raises(ValueError, match=r"Linear without q_a_proj\.weight"):
        from_transformers(nn.Linear(1, 1), GEOMETRY)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "uint8"])
@pytest.mark.parametrize("shape", [(128, 128), (200, 130), (1, 300)])
def test_block_scales(kind: str, shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=draw).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    exponents = torch.randint(-6, 6, blocks, generator=draw)
    scale = torch.exp2(exponents.float())
    given = {
        "float32": scale,
        "bfloat16": scale.bfloat16(),
        "e8m0": scale.to(torch.float8_e8m0fnu),
        "uint8": (exponents + 127).to(torch.uint8),
    }[kind]
    got = dequantize_blocks(weight, given)
    for row in range(shape[0]):
        for block in range(blocks[1]):
            part = slice(block * 128, min(block * 128 + 128, shape[1]))
            assert torch.equal(got[row, part], weight[row, part].float() * scale[row // 128, block])


def test_fp8_checkpoint() -> None:
    """FP8 weights with their scales give the layer of the dequantised ones; without scales they are refused."""
    w = whole()
    state = official(w, "attn.")
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        weight = state[f"attn.{name}.weight"]
        blocks = (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        state[f"attn.{name}.weight"] = (weight * 8).to(torch.float8_e4m3fn)
        state[f"attn.{name}.scale"] = torch.full(blocks, 0.125)
    got = from_official(state, GEOMETRY)
    assert got.q_b.dtype == torch.bfloat16
    assert (got.q_b.float() - w.q_b).norm() / w.q_b.norm() < 0.04
    x = Inputs(dtype=torch.bfloat16)
    assert x.call(make(source=got)).isfinite().all()
    wrong = state | {"attn.wkv.scale": torch.ones(1, 1)}
    with pytest.raises(ValueError, match=r"wkv\.weight: got scales of shape \(1, 1\).*accepted is \(4, 1\)"):
        from_official(wrong, GEOMETRY)
    del state["attn.wkv.scale"]
    with pytest.raises(ValueError, match=r"wkv\.weight: got torch\.float8_e4m3fn without a companion scale"):
        from_official(state, GEOMETRY)


def test_one_rank_shares_the_source_and_several_do_not() -> None:
    w = whole()
    assert make(source=w).q_b.data_ptr() == w.q_b.data_ptr()
    part = make(2, 0, source=w)
    assert part.q_b.untyped_storage().data_ptr() != w.q_b.untyped_storage().data_ptr()
    assert part.q_b.untyped_storage().nbytes() == w.q_b.untyped_storage().nbytes() // 2
    assert weights.take_shard(w, GEOMETRY, GEOMETRY.shard(0, 1)) is w


# -------------------- rotary


def test_rotation_and_back() -> None:
    x = torch.randn(5, 3, 512)
    cos, sin = rotary_tables(torch.arange(5) * 1000, 64, 160000.0)
    there, back = torch.empty_like(x), torch.empty_like(x)
    rotate_into(there, x, cos, sin)
    rotate_into(back, there, cos, sin, inverse=True)
    assert torch.equal(there[..., :448], x[..., :448])
    assert (there[1:, :, 448:] != x[1:, :, 448:]).any()
    torch.testing.assert_close(back, x)
    with pytest.raises(ValueError, match="even number"):
        rotary_tables(torch.arange(2), 63, 1.0)


def test_rotation_is_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    x = torch.randn(1, 3, 5, 512)
    cos, sin = rotary_tables(torch.arange(5), 64, 10000.0)
    want = modeling.apply_rotary_pos_emb(x, cos[None], sin[None])[0].transpose(0, 1)
    got = torch.empty(5, 3, 512)
    rotate_into(got, x[0].transpose(0, 1), cos, sin)
    assert torch.equal(got, want)


def test_packed_pages_are_the_caches() -> None:
    assert new_pages(3, 8, "v4", torch.device("cpu")).stride() == empty_cache(3, 8).stride()
