"""What one rank of `headfit compare` does: two runs, every bit compared, a planted fault found and named."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from headfit import compare, demo_model, subject  # noqa: E402
from headfit import comparison as data  # noqa: E402
from headfit.kernels import cpu, hopper  # noqa: E402
from headfit.ranks import InputError, Rank  # noqa: E402

TEXT = Path(subject.__file__).read_bytes()
CPU = torch.device("cpu")
LAYERS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers, one of each kind."""
    folder = tmp_path_factory.mktemp("model")
    demo_model.build(3, layer_types=LAYERS).save_pretrained(folder)
    return folder


@pytest.fixture
def options(model_folder: Path, tmp_path: Path) -> data.Options:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(TEXT)
    return data.Options(
        tp=1,
        model=str(model_folder),
        prompt=str(prompt),
        prompt_tokens=150,
        prefill_chunk=70,
        new_tokens=3,
        backend="cpu",
    )


def run(options: data.Options, events: list | None = None) -> data.Comparison:
    emit = (lambda event: None) if events is None else events.append
    made = compare.run(options, subject.read_prompt(options), Rank(0, 1), None, CPU, emit, time.perf_counter())
    assert made is not None
    return made


def test_one_rank_runs_every_layer_kind_and_phase_alike(options):
    events: list = []
    made = run(options, events)
    assert made.exit_code == 0
    assert made.first_difference is None
    # One line a phase and kind: 150 tokens in chunks of 70, 70 and 10, then 2 decode steps for 3 tokens.
    lanes = [(lane.phase, lane.kind, lane.layers, lane.calls, lane.rows) for lane in made.lanes]
    kinds = ("sliding", "compressed_sparse", "heavily_compressed")
    expected = [("prefill", kind, 1, 3, 150) for kind in kinds] + [("decode", kind, 1, 2, 2) for kind in kinds]
    assert lanes == expected
    assert all(lane.seconds_off[0] > 0 and lane.seconds_on[0] > 0 for lane in made.lanes)
    assert len(made.tokens_on) == len(made.tokens_off) == 3
    per_row = 3 * (64 * 512 + 64 + 4 * 256)  # attention out, lse, four residual streams
    assert made.checked_elements == (150 + 2) * per_row + (3 + 2) * (demo_model.VOCAB + 1)
    assert [event["done"] for event in events if event["event"] == "progress"] == [0, 1, 2, 3, 4, 5]
    assert data.from_dict(json.loads(json.dumps(data.to_dict(made), allow_nan=False))) == made


def test_every_call_has_a_form_that_the_hopper_backend_takes(options, monkeypatch):
    """So a named `hopper` refuses no call of a layer: packed pages, whole aligned buffers, no max_logits."""
    taken: list[str | None] = []
    run_on_cpu = cpu.run

    def noted(call):
        taken.append(hopper.why_not_taken(call))
        run_on_cpu(call)

    monkeypatch.setattr(cpu, "run", noted)
    run(options)
    assert len(taken) > 30
    assert set(taken) == {None}


def test_seed_and_prompt_decide_the_text(options, tmp_path):
    options = dataclasses.replace(options, prompt_tokens=40)
    first = run(options)
    assert run(options).tokens_on == first.tokens_on
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT[1000:])
    assert run(dataclasses.replace(options, prompt=str(other))).tokens_on != first.tokens_on


def plant(monkeypatch: pytest.MonkeyPatch, where: str, *, layer: int, step: int, row: int, head: int) -> None:
    """In the padded run, flip the lowest bit of one number of one attention call before the layer goes on with it."""
    observe = compare._Runner._observe

    def observed(self, record):
        if self.current is self.off and (record.layer, self.step) == (layer, step) and record.rows > 16:
            value = record.out[row, head].view(torch.int16) if where == "out" else record.lse[row].view(torch.int32)
            value[11] ^= 1
        observe(self, record)

    monkeypatch.setattr(compare._Runner, "_observe", observed)


def test_a_flipped_bit_is_named_where_it_first_shows(options, monkeypatch):
    plant(monkeypatch, "out", layer=1, step=1, row=33, head=42)
    made = run(options)
    first = made.first_difference
    assert first is not None
    assert made.exit_code == 1
    assert (first.step, first.token, first.layer, first.stage, first.rank) == (1, 70 + 33, 1, "attention out", 0)
    assert "heads 42: 1 elements differ" in first.sentence
    same = {(lane.phase, lane.kind): lane.identical for lane in made.lanes}
    assert same["prefill", "sliding"]  # nothing reached it: the fault is in a later layer of the same pass
    assert not same["prefill", "compressed_sparse"]
    assert not same["prefill", "heavily_compressed"]  # fed by the faulty layer


def test_a_flipped_bit_of_the_log_sum_exp_is_named(options, monkeypatch):
    plant(monkeypatch, "lse", layer=2, step=0, row=5, head=11)
    made = run(options)
    first = made.first_difference
    assert first is not None
    assert (first.token, first.layer, first.stage) == (5, 2, "lse")
    assert "heads 11:" in first.sentence
    assert made.exit_code == 1
    assert made.same_text  # nothing reads it


def test_prompt_limit_and_short_prompts(options):
    made = run(dataclasses.replace(options, prompt_tokens=1, new_tokens=1))
    assert made.exit_code == 0
    assert (made.workload.prompt_tokens, made.workload.prompt_tokens_all) == (1, len(TEXT))
    assert {lane.rows for lane in made.lanes} == {1}
    assert not made.workload.sparse


def test_plain_cache(options):
    made = run(dataclasses.replace(options, cache_layout="bf16", prompt_tokens=20))
    assert made.exit_code == 0
    assert made.workload.cache_layout == "bf16"


# ---------------------------------------------------------------- what the user may get wrong


def test_device_that_is_not_here():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="torch sees no CUDA GPU here; use --device cpu"):
        compare.choose_device("cuda", Rank(0, 2, 0, 2))
    assert compare.choose_device("auto", Rank(0, 2, 0, 2)) == CPU


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 ranks need 2 GPUs and 1 are here"):
        compare.choose_device("cuda", Rank(0, 2, 0, 2))
    assert compare.choose_device("auto", Rank(0, 2, 0, 2)) == CPU


def test_unknown_backend(options):
    with pytest.raises(InputError, match="backend: got 'nope'"):
        run(dataclasses.replace(options, backend="nope"))


def copy(folder: Path, to: Path, **changes) -> Path:
    """The checkpoint with another config.json and its weights linked."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    (to / "model.safetensors").symlink_to(folder / "model.safetensors")
    return to


def test_checkpoint_that_lacks_weights(options, model_folder, tmp_path):
    layers = [*LAYERS, "sliding_attention"]
    folder = copy(model_folder, tmp_path / "more", num_hidden_layers=4, layer_types=layers, mlp_layer_types=["moe"] * 4)
    with pytest.raises(InputError, match=r"weights are missing, such as .*; give a whole checkpoint"):
        run(dataclasses.replace(options, model=str(folder)))


def test_checkpoint_whose_weights_are_no_weights(options, model_folder, tmp_path):
    folder = copy(model_folder, tmp_path / "torn")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"cannot be loaded .*; give a whole DeepSeek-V4 checkpoint") as caught:
        run(dataclasses.replace(options, model=str(folder)))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the default model


def test_default_model_is_seeded_by_name_not_by_order():
    few, more = demo_model.build(5, layer_types=LAYERS[:1]), demo_model.build(5, layer_types=LAYERS)
    weights = dict(more.named_parameters())
    for name, value in few.named_parameters():
        assert torch.equal(value, weights[name]), name
    other = dict(demo_model.build(6, layer_types=LAYERS[:1]).named_parameters())
    assert not torch.equal(other["lm_head.weight"], few.lm_head.weight)


def test_default_model_has_the_true_attention_and_lives():
    """Attention decides what comes out, no weight that matters is zero, and logits are neither flat nor stuck."""
    model = demo_model.build(0)
    config = model.config
    assert (config.num_attention_heads, config.head_dim) == (64, 512)
    assert (config.sliding_window, config.index_topk) == (128, 512)
    assert config.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    assert set(config.layer_types) == set(LAYERS)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.abs().max() > 0, name
        assert torch.isfinite(value.float()).all(), name
    ids = torch.randint(0, demo_model.VOCAB, (1, 140), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0]
        for layer in model.model.layers:
            layer.self_attn.o_b_proj.weight.zero_()
        without = model(input_ids=ids).logits[0]
    assert torch.isfinite(logits).all()
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.1
    assert logits.argmax(-1).unique().numel() > 70
    assert (logits.argmax(-1) == without.argmax(-1)).float().mean() < 0.5
