"""Geometry from every way of writing a config, and what each rank of any tensor-parallel size owns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headfit.geometry import PRESETS, Geometry

# The published config.json of the two models, as far as attention goes (recorded on 2026-11-29).
PUBLISHED = {
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "index_topk": 512,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    },
    "deepseek-v4-pro": {
        "model_type": "deepseek_v4",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "index_topk": 1024,
        "o_groups": 16,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    },
}
# DeepSeek's inference code names the same things so.
OFFICIAL = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "num_nextn_predict_layers": "n_mtp_layers",
}


def official(config: dict[str, Any]) -> dict[str, Any]:
    return {OFFICIAL.get(k, k): v for k, v in config.items() if k not in ("model_type", "num_key_value_heads")}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_published_configs(preset: str) -> None:
    geometry = Geometry.from_config(preset)
    assert geometry.name == preset
    assert geometry == Geometry.from_config(PUBLISHED[preset], preset)
    assert geometry == Geometry.from_config(official(PUBLISHED[preset]), preset)
    assert geometry.mtp_layers == 1
    assert geometry.softmax_scale == 512**-0.5
    assert (geometry.nope_dim, geometry.rope_dim) == (448, 64)


def test_layer_kinds_of_both_models() -> None:
    flash, pro = (Geometry.from_config(name) for name in PRESETS)
    assert flash.layer_kinds[:4] == ("sliding", "sliding", "compressed_sparse", "heavily_compressed")
    assert flash.layer_kinds[-1] == "compressed_sparse"
    assert [flash.layer_kinds.count(k) for k in ("sliding", "compressed_sparse", "heavily_compressed")] == [2, 21, 20]
    assert pro.layer_kinds[:3] == ("heavily_compressed", "heavily_compressed", "compressed_sparse")
    assert [pro.layer_kinds.count(k) for k in ("sliding", "compressed_sparse", "heavily_compressed")] == [0, 30, 31]
    assert flash.n_layers == len(flash.compress_ratios) == 43


def test_keys_of_a_query() -> None:
    flash = Geometry.from_config("deepseek-v4-flash")
    assert flash.keys("sliding", 100) == (100, 0)
    assert flash.keys("sliding", 8192) == (128, 0)
    assert flash.keys("compressed_sparse", 400) == (128, 100)
    assert flash.keys("compressed_sparse", 8192) == (128, 512)
    assert flash.keys("heavily_compressed", 127) == (127, 0)
    assert flash.keys("heavily_compressed", 8192) == (128, 64)
    with pytest.raises(ValueError, match="has no such layer"):
        Geometry.from_config("deepseek-v4-pro").keys("heavily", 8192)  # type: ignore[arg-type]


def test_from_a_file_and_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED["deepseek-v4-pro"]))
    expected = Geometry.from_config("deepseek-v4-pro")
    for config in (folder, str(folder), folder / "config.json"):
        geometry = Geometry.from_config(config)
        assert geometry.name == "my-model"
        assert Geometry.from_config(config, "deepseek-v4-pro") == expected


def test_from_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(**PUBLISHED["deepseek-v4-flash"])
    expected = Geometry.from_config("deepseek-v4-flash", "x")
    assert Geometry.from_config(config, "x") == expected
    config.save_pretrained(tmp_path)  # written back with layer_types instead of compress_ratios
    assert Geometry.from_config(tmp_path, "x") == expected
    small = transformers.DeepseekV4Config(num_hidden_layers=3, compress_rates=None, layer_types=None)
    assert Geometry.from_config(small).layer_kinds == ("heavily_compressed",) * 3


def test_layer_types_with_other_rates() -> None:
    config = {k: v for k, v in PUBLISHED["deepseek-v4-flash"].items() if k != "compress_ratios"}
    config |= {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64},
    }
    assert Geometry.from_config(config).compress_ratios == (0, 8, 64)
    assert Geometry.from_config({**config, "compress_rate_csa": 2}).compress_ratios == (0, 2, 64)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32, 64])
def test_shards_cover_every_head_and_group_exactly_once(preset: str, world: int) -> None:
    geometry = Geometry.from_config(preset)
    shards = [geometry.shard(rank, world) for rank in range(world)]
    assert [h for s in shards for h in s.heads] == list(range(geometry.n_heads))
    owners: dict[int, list[int]] = {}
    for s in shards:
        assert s.n_local * world == geometry.n_heads
        assert len(s.groups) >= 1
        assert s.heads_per_local_group * len(s.groups) == s.n_local
        assert {h // geometry.heads_per_group for h in s.heads} == set(s.groups)
        for group in s.groups:
            owners.setdefault(group, []).append(s.group_part)
    # every group is owned whole by one rank, or by group_ranks ranks in the order of their parts
    assert sorted(owners) == list(range(geometry.o_groups))
    assert all(parts == list(range(shards[0].group_ranks)) for parts in owners.values())
    assert shards[0].group_ranks == max(1, world // geometry.o_groups)
    assert world in geometry.worlds()


def test_worlds() -> None:
    assert Geometry.from_config("deepseek-v4-flash").worlds() == (1, 2, 4, 8, 16, 32, 64)
    assert Geometry.from_config("deepseek-v4-pro").worlds() == (1, 2, 4, 8, 16, 32, 64, 128)
    # 12 heads in 2 groups of 6: four ranks of 3 share a group in halves, three ranks of 4 would cut across a border
    odd = Geometry.from_config({**PUBLISHED["deepseek-v4-flash"], "num_attention_heads": 12, "o_groups": 2})
    assert odd.worlds() == (1, 2, 4, 6, 12)
    with pytest.raises(ValueError, match="cut across the output projection's groups of 6 heads; choose one of 1, 2, 4"):
        odd.shard(0, 3)


@pytest.mark.parametrize(
    ("rank", "world", "match"),
    [
        (0, 3, "world: got 3, which does not divide 64 heads; choose one of 1, 2, 4, 8, 16, 32, 64"),
        (0, 128, "world: got 128, which does not divide"),
        (0, 0, "world: got 0"),
        (2, 2, "rank: got 2, need 0 to 1"),
        (-1, 2, "rank: got -1"),
        (0, 2.0, "world: got 2.0"),
    ],
)
def test_bad_shards_are_refused(rank: int, world: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Geometry.from_config("deepseek-v4-flash").shard(rank, world)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_attention_heads": None}, "lacks num_attention_heads or n_heads"),
        ({"num_attention_heads": "64"}, "num_attention_heads: got '64'"),
        ({"o_groups": 7}, "o_groups: got 7, need a divisor of n_heads = 64"),
        ({"qk_rope_head_dim": 1024}, "rope_dim: got 1024"),
        ({"qk_rope_head_dim": None}, "lacks qk_rope_head_dim or rope_head_dim"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": []}, "partial_rotary_factor: got"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers: got '1'"),
        ({"layer_types": 3}, "layer_types: got 3, need a list"),
        ({"layer_types": ["sliding_attention"] * 43, "compress_rates": [4]}, "compress_rates: got"),
        ({"compress_ratios": None}, "lacks compress_ratios or layer_types"),
        ({"compress_ratios": [0, 4]}, "43 layers, but compress_ratios or layer_types has 2 entries"),
        ({"compress_ratios": [2] * 43}, "compress_ratios: got .*accepted are 0, 4 and 128"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratios: got"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types: got full_attention"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"sliding_window": True}, "sliding_window: got True"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Geometry.from_config({**PUBLISHED["deepseek-v4-flash"], **change})


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file or folder; accepted are deepseek-v4-flash"):
        Geometry.from_config(tmp_path / "nope")
    with pytest.raises(FileNotFoundError, match=r"the folder holds no config.json"):
        Geometry.from_config(tmp_path)
    file = tmp_path / "config.json"
    for text, match in (
        ("{", "is not JSON"),
        ("[]", "holds a list, need a JSON object"),
        ("{}", "lacks num_attention"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            Geometry.from_config(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        Geometry.from_config(file)
    file.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 32, "hidden_size": 64}))
    with pytest.raises(ValueError, match="model_type 'llama'"):
        Geometry.from_config(file)
    with pytest.raises(TypeError, match="config: got int"):
        Geometry.from_config(3)
