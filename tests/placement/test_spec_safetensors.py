"""Models from the headers of generated safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpurt.placement.errors import InvalidPlacementInput
from gpurt.placement.spec import ModelSpec
from gpurt.placement.spec_config import spec_from_config
from gpurt.placement.spec_safetensors import spec_from_safetensors
from gpurt.weights import DTYPES, WeightsError
from tests.weights.support import raw_file, write_index

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def write(path: Path, tensors: Shapes) -> Path:
    """The header and a hole where the data would be."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for extent in shape:
            elements *= extent
        begin, end = end, end + elements * DTYPES[dtype].bits // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = raw_file(entries)
    path.write_bytes(header)
    os.truncate(path, len(header) + end)
    return path


def llama(prefix: str = "model.", row: str = "layers", layers: int = 3) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {f"{prefix}embed_tokens.weight": ("BF16", (100, 64))}
    for index in range(layers):
        inside = f"{prefix}{row}.{index}."
        tensors |= {
            f"{inside}input_layernorm.weight": ("BF16", (64,)),
            f"{inside}self_attn.q_proj.weight": ("BF16", (64, 64)),
            f"{inside}self_attn.k_proj.weight": ("BF16", (32, 64)),
            f"{inside}self_attn.v_proj.weight": ("BF16", (32, 64)),
            f"{inside}self_attn.o_proj.weight": ("BF16", (64, 64)),
            f"{inside}post_attention_layernorm.weight": ("BF16", (64,)),
            f"{inside}mlp.gate_proj.weight": ("BF16", (96, 64)),
            f"{inside}mlp.up_proj.weight": ("BF16", (96, 64)),
            f"{inside}mlp.down_proj.weight": ("BF16", (64, 96)),
        }
    return {**tensors, f"{prefix}norm.weight": ("BF16", (64,)), "lm_head.weight": ("BF16", (100, 64))}


def checkpoint(
    folder: Path, tensors: Shapes | None = None, config: Mapping[str, Any] | None = None, shards: int = 1
) -> Path:
    tensors = llama() if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    if shards == 1:
        write(folder / "model.safetensors", tensors)
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        own = {name: shape for place, (name, shape) in enumerate(tensors.items()) if place % shards == number}
        write(folder / f"part-{number}.safetensors", own)
        weight_map |= dict.fromkeys(own, f"part-{number}.safetensors")
    write_index(folder, weight_map)
    return folder


class TestRight:
    @pytest.mark.parametrize("shards", [1, 3])
    def test_same_as_the_configuration_says(self, tmp_path: Path, shards: int) -> None:
        folder = checkpoint(tmp_path / "Small", shards=shards)
        assert spec_from_safetensors(folder) == spec_from_config(LLAMA, name="Small")

    def test_by_file_index_and_folder(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path / "Small", shards=2)
        whole = spec_from_safetensors(folder)
        assert spec_from_safetensors(folder / "model.safetensors.index.json") == whole
        single = checkpoint(tmp_path / "single")
        assert spec_from_safetensors(str(single / "model.safetensors"), name="Small") == whole
        assert ModelSpec.from_safetensors(folder) == whole

    def test_every_byte_is_somewhere(self, tmp_path: Path) -> None:
        tensors = {**llama(), "model.layers.1.extra.scale": ("F32", (7,)), "model.something": ("I8", (5,))}
        spec = spec_from_safetensors(checkpoint(tmp_path, tensors))
        plain = spec_from_config(LLAMA)
        assert spec.layers[1].weight_bytes == plain.layers[1].weight_bytes + 28
        assert spec.embedding_bytes == plain.embedding_bytes + 5
        assert spec.weight_bytes == plain.weight_bytes + 33
        assert "embedding_bytes" in spec.estimated

    def test_bytes_are_the_files_not_the_configurations(self, tmp_path: Path) -> None:
        tensors = llama()
        tensors["model.layers.2.mlp.down_proj.weight"] = ("F8_E4M3", (64, 96))
        layers = spec_from_safetensors(checkpoint(tmp_path, tensors)).layers
        assert layers[0].weight_bytes - layers[2].weight_bytes == 64 * 96
        assert layers[0].largest_tensor_bytes == 64 * 96 * 2

    @pytest.mark.parametrize("prefix", ["", "transformer.", "model.language_model.", "language_model.model."])
    @pytest.mark.parametrize("row", ["layers", "h", "blk", "blocks"])
    def test_names(self, tmp_path: Path, prefix: str, row: str) -> None:
        spec = spec_from_safetensors(checkpoint(tmp_path, llama(prefix, row)), name="x")
        assert spec == spec_from_config(LLAMA, name="x")

    def test_towers_beside_are_not_counted(self, tmp_path: Path) -> None:
        tensors = llama("language_model.model.") | {
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": ("BF16", (8, 8)),
            "multi_modal_projector.linear.weight": ("BF16", (8, 8)),
            "model.visual.blocks.7.attn.qkv.weight": ("BF16", (8, 8)),
        }
        assert spec_from_safetensors(checkpoint(tmp_path, tensors), name="x") == spec_from_config(LLAMA, name="x")

    def test_tied(self, tmp_path: Path) -> None:
        tensors = llama()
        with_head = spec_from_safetensors(checkpoint(tmp_path / "a", tensors, {**LLAMA, "tie_word_embeddings": True}))
        del tensors["lm_head.weight"]
        without = spec_from_safetensors(
            checkpoint(tmp_path / "b", tensors, {**LLAMA, "tie_word_embeddings": True}), name="a"
        )
        assert with_head == without
        assert without.tied_bytes == 100 * 64 * 2

    def test_experts(self, tmp_path: Path) -> None:
        config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        tensors = {name: shape for name, shape in llama().items() if ".mlp." not in name}
        for index in range(3):
            block = f"model.layers.{index}.block_sparse_moe"
            tensors[f"{block}.gate.weight"] = ("BF16", (4, 64))
            for expert in range(4):
                tensors[f"{block}.experts.{expert}.w1.weight"] = ("BF16", (96, 64))
                tensors[f"{block}.experts.{expert}.w2.weight"] = ("BF16", (64, 96))
                tensors[f"{block}.experts.{expert}.w3.weight"] = ("BF16", (96, 64))
        spec = spec_from_safetensors(checkpoint(tmp_path, tensors, config), name="x")
        assert spec == spec_from_config(config, name="x")
        read = spec.layers[0].read_bytes_per_token
        assert read is not None
        assert spec.layers[0].weight_bytes - read == 2 * 3 * 96 * 64 * 2

    def test_layers_that_draft_are_not_placed(self, tmp_path: Path) -> None:
        config = {**LLAMA, "num_nextn_predict_layers": 1}
        spec = spec_from_safetensors(checkpoint(tmp_path, llama(layers=4), config), name="x")
        assert spec.layers == spec_from_config(LLAMA).layers

    def test_latent_attention(self, tmp_path: Path) -> None:
        tensors = {"model.embed_tokens.weight": ("BF16", (100, 64)), "lm_head.weight": ("BF16", (100, 64))}
        tensors |= {f"model.layers.{index}.all.weight": ("BF16", (1000,)) for index in range(4)}
        spec = spec_from_safetensors(checkpoint(tmp_path, tensors, DEEPSEEK))
        assert spec.layer_count == 3
        assert {layer.kv_bytes_per_token for layer in spec.layers} == {(16 + 4) * 2}

    def test_files_that_are_not_what_the_configuration_describes(self, tmp_path: Path) -> None:
        spec = spec_from_safetensors(checkpoint(tmp_path, config={**LLAMA, "intermediate_size": 128}))
        assert "layers.kv_bytes_per_token" in spec.estimated

    def test_data_type_from_the_files(self, tmp_path: Path) -> None:
        config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
        spec = spec_from_safetensors(checkpoint(tmp_path, config=config))
        assert spec.dtype == "bfloat16"
        assert "dtype" not in spec.estimated

    def test_configuration_from_elsewhere(self, tmp_path: Path) -> None:
        path = write(tmp_path / "lonely.safetensors", llama())
        spec = spec_from_safetensors(path, config=LLAMA, cache_dtype="fp8", name="x")
        assert spec.layers[0].kv_bytes_per_token == 2 * 32
        assert spec.weight_bytes == spec_from_config(LLAMA).weight_bytes


class TestWrong:
    def test_no_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_safetensors(write(tmp_path / "lonely.safetensors", llama()))
        assert caught.value.field == "config.json"

    @pytest.mark.parametrize(
        ("drop", "add", "field"),
        [
            ("model.layers.1.", {}, "layers.1"),
            ("", {"model.layers.3.x": ("I8", (1,))}, "layers.3"),
            ("", {"model.layers.999999.x": ("I8", (1,))}, "layers.999999"),
            ("", {"other.layers.0.x": ("I8", (1,))}, "layers"),
            ("", {"encoder.layers.0.x": ("I8", (1,))}, "layers"),
            ("lm_head", {}, "head_bytes"),
            ("model.embed", {}, "embedding_bytes"),
        ],
    )
    def test_contradictions(self, tmp_path: Path, drop: str, add: Shapes, field: str) -> None:
        tensors = {name: shape for name, shape in llama().items() if not drop or not name.startswith(drop)}
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_safetensors(checkpoint(tmp_path, {**tensors, **add}))
        assert caught.value.field == field

    def test_no_layer_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidPlacementInput) as caught:
            spec_from_safetensors(checkpoint(tmp_path, {"x": ("I8", (1,))}))
        assert caught.value.field == "layers.0"

    def test_malformed(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path)
        (folder / "model.safetensors").write_bytes(b"no")
        with pytest.raises(WeightsError):
            spec_from_safetensors(folder)

    def test_missing_shard(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path, shards=2)
        (folder / "part-1.safetensors").unlink()
        with pytest.raises(WeightsError, match=r"part-1"):
            spec_from_safetensors(folder)

    def test_missing_all(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path)
        (folder / "model.safetensors").unlink()
        with pytest.raises(WeightsError, match="cannot be read"):
            spec_from_safetensors(folder)


def test_errors_name_the_file_that_is_wrong_and_the_file_names_the_model(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file, llama())
    with pytest.raises(InvalidPlacementInput, match="--config FILE") as caught:
        spec_from_safetensors(file)
    assert caught.value.path == str(file)
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(InvalidPlacementInput, match="model_type: is missing") as caught:
        spec_from_safetensors(file)
    assert caught.value.path == str(config)
    config.write_text(json.dumps({**LLAMA, "num_hidden_layers": 7}))
    with pytest.raises(InvalidPlacementInput, match=r"layers\.3: the files have no tensor") as caught:
        spec_from_safetensors(file)
    assert caught.value.path == str(file)
    config.write_text(json.dumps(LLAMA))
    assert spec_from_safetensors(file).name == "x"
    file.rename(tmp_path / "model.safetensors")
    assert spec_from_safetensors(tmp_path).name == tmp_path.name
