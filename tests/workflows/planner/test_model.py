"""Accounting: published models to the last parameter, headers, and what is refused."""

import json
import struct

import pytest

from octavo.base.errors import CheckpointError, ConfigError
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.source import read_model
from octavo.workflows.planner.tables import load

PUBLISHED = load("models")["models"]
LLAMA = PUBLISHED["Llama-3.1-8B"]["config"]


def write_headers(path, shapes, dtype="BF16"):
    """A safetensors file that is all header: the sizes are right, the data is a hole in the file."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4}[dtype]
        for n in shape:
            size *= n
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_to_the_last_parameter(name):
    assert read_model(name).parameters == PUBLISHED[name]["parameters"]


def test_the_two_figures_everybody_knows():
    assert read_model("meta-llama/Llama-3.1-8B").parameters == 8_030_261_248
    assert read_model("Llama-3.1-70B").parameters == 70_553_706_496


def test_adapters_of_llama_8b():
    model = read_model("Llama-3.1-8B")
    assert model.adapter_parameters(16) == 41_943_040
    assert Model.from_config("x", LLAMA, ("q_proj", "v_proj")).adapter_parameters(16) == 6_815_744


def test_what_one_token_of_a_mixture_multiplies():
    mixtral, deep = read_model("Mixtral-8x7B-v0.1"), read_model("DeepSeek-V3")
    head = mixtral.hidden * mixtral.vocab
    assert sum(w.active * w.layers for w in mixtral.widths) + 2 * head == pytest.approx(12.9e9, rel=0.01)
    assert sum(w.active * w.layers for w in deep.widths) == pytest.approx(37e9, rel=0.05)
    assert [(w.layers, w.routed) for w in deep.widths] == [(3, 0), (58, 8)]


@pytest.mark.parametrize(
    "name", ["Llama-3.2-1B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"], ids=["tied", "experts", "latent-attention"]
)
def test_headers_say_the_same_as_the_formula(tmp_path, name):
    by_formula = read_model(name)
    small = {**PUBLISHED[name]["config"], "num_hidden_layers": 2}
    formula = Model.from_config(name, small)
    (tmp_path / "config.json").write_text(json.dumps(small))
    write_headers(tmp_path / "model.safetensors", formula.shapes)
    read = read_model(str(tmp_path))
    assert read.exact and not by_formula.exact
    assert (read.parameters, read.by_role, read.widths) == (formula.parameters, formula.by_role, formula.widths)


def test_experts_stored_one_by_one_count_like_stacked_ones(tmp_path):
    config = {**PUBLISHED["Qwen3-30B-A3B"]["config"], "num_hidden_layers": 1, "num_experts": 4}
    stacked = Model.from_config("x", config)
    shapes = {n: s for n, s in stacked.shapes.items() if ".experts." not in n}
    for expert in range(4):
        for name, shape in (("gate_proj", (768, 2048)), ("up_proj", (768, 2048)), ("down_proj", (2048, 768))):
            shapes[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] = shape
    apart = Model.from_headers("x", config, shapes)
    assert apart.parameters == stacked.parameters
    assert [(w.ffn, w.active, w.routed) for w in apart.widths] == [(w.ffn, w.active, w.routed) for w in stacked.widths]


def test_scales_are_no_parameters_and_prediction_layers_are_left_out():
    small = {**LLAMA, "num_hidden_layers": 1}
    plain = Model.from_config("x", small)
    extra = {"model.layers.0.self_attn.q_proj.weight_scale": (4096, 1), "model.layers.1.mlp.up_proj.weight": (8, 8)}
    assert Model.from_headers("x", small, plain.shapes | extra).parameters == plain.parameters


def test_tied_head_that_is_stored_counts_once():
    config = {**PUBLISHED["Llama-3.2-1B"]["config"], "num_hidden_layers": 1}
    plain = Model.from_config("x", config)
    stored = Model.from_headers("x", config, plain.shapes | {"lm_head.weight": (128256, 2048)})
    assert stored.parameters == plain.parameters


def test_the_outer_config_of_two_says_whether_the_head_is_tied(tmp_path):
    inner = {**LLAMA, "num_hidden_layers": 1, "tie_word_embeddings": True}
    shapes = Model.from_config("x", {**inner, "tie_word_embeddings": False}).shapes
    outer = {"model_type": "llava", "tie_word_embeddings": False, "text_config": inner}
    assert "head" in Model.from_headers("x", outer, shapes).by_role
    assert "head" not in Model.from_headers("x", {**outer, "tie_word_embeddings": True}, shapes).by_role


def test_packed_weights_are_refused_by_name():
    with pytest.raises(ConfigError, match="qweight"):
        Model.from_headers("x", LLAMA, {"model.layers.0.self_attn.q_proj.qweight": (512, 4096)})
    with pytest.raises(ConfigError, match="gptq"):
        Model.from_config("x", {**LLAMA, "quantization_config": {"quant_method": "gptq"}})


def test_a_checkpoint_in_parts_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    table = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    write_headers(tmp_path / "model-1.safetensors", {"a": (2, 2)})
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        read_model(str(tmp_path))


def test_an_index_without_its_shards_is_a_plan_by_formula(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert read_model(str(tmp_path)).parameters == 8_030_261_248


def test_config_json_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert read_model(str(path)).parameters == read_model(str(tmp_path)).parameters == 8_030_261_248
    path.write_text("[1")
    with pytest.raises(CheckpointError, match="not readable"):
        read_model(str(path))


def test_layers_that_contradict_the_config():
    with pytest.raises(ConfigError, match="31 layers"):
        _ = Model.from_headers(
            "x", LLAMA, {n: s for n, s in Model.from_config("x", LLAMA).shapes.items() if ".31." not in n}
        ).widths


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**18),
        ("hidden_size", 10**400),
        ("head_dim", "128"),
        ("num_attention_heads", 4097),
        ("num_key_value_heads", -1),
        ("num_key_value_heads", [8]),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", ["3"]),
        ("quantization_config", ["fp8"]),
    ],
)
def test_a_value_that_no_model_has_is_named(tmp_path, key, value):
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **moe}))
    assert read_model(str(path)).parameters > 0
    path.write_text(json.dumps({**LLAMA, **moe, key: value}))
    with pytest.raises(ConfigError, match=rf"config\.json: {key}"):
        read_model(str(path))
