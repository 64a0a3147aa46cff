"""Files laid out in another way than the model in memory: experts stacked, shards fused, other kinds of experts."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import octavo
from octavo.formats.granularity import PerTensor
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from tests.integrations.test_load import assert_same_codes, float8_modules, logits, tensors


@pytest.mark.parametrize("recipe", ["channel", "tensor"])
def test_experts_stacked_on_disk_get_the_same_codes(tiny_moe, tmp_path, recipe):
    model = AutoModelForCausalLM.from_pretrained(tiny_moe)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert tensors(tmp_path)["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    stacked = octavo.load(tmp_path, recipe, device="cpu", activation="none")
    assert_same_codes(stacked, octavo.load(tiny_moe, recipe, device="cpu", activation="none"))
    stacked.save_pretrained(tmp_path / "out")
    assert_same_codes(stacked, octavo.load(tmp_path / "out", device="cpu"))


def test_experts_of_another_kind_stay_in_16_bit(save_tiny, caplog):
    from transformers import GptOssConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    folder = save_tiny(GptOssConfig(vocab_size=264, **sizes, **heads), "gpt_oss")
    model = octavo.load(folder, device="cpu", activation="none")
    kinds = {type(module) for module in float8_modules(model).values()}
    assert kinds == {FrozenFloat8Linear}
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert "stays in 16 bit: its matrices are stored transposed" in caplog.text
    assert torch.isfinite(logits(model)).all()


def test_one_skipped_expert_keeps_its_layer_in_16_bit(tiny_moe, tmp_path):
    recipe = octavo.Recipe.named("channel", skip=("model.layers.0.mlp.experts.3.*",))
    model = octavo.load(tiny_moe, recipe, device="cpu")
    experts = [isinstance(layer.mlp.experts, FrozenFloat8Experts) for layer in model.model.layers]
    assert experts == [False, True]
    ignored = model.config.quantization_config.to_dict()["ignore"]
    assert "model.layers.0.mlp.experts.5.up_proj" in ignored
    assert "model.layers.1.mlp.experts.5.up_proj" not in ignored
    model.save_pretrained(tmp_path)
    before, after = tensors(tiny_moe), tensors(tmp_path)
    assert set(before) <= set(after)
    kept = "model.layers.0.mlp.experts.7.up_proj.weight"
    assert torch.equal(before[kept], after[kept])
    assert_same_codes(model, octavo.load(tmp_path, device="cpu"))


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="a newer Transformers has this model")
@pytest.mark.parametrize("recipe", ["channel", "tensor"])
def test_shards_fused_on_disk(save_tiny, tmp_path, recipe):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = save_tiny(transformers.HrmTextConfig(vocab_size=264, head_dim=16, **sizes), "fused")
    fused = [name for name in tensors(folder) if "gqkv_proj" in name or "gate_up_proj" in name]
    assert fused
    model = octavo.load(folder, recipe, device="cpu", activation="none")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    mlps = [name for name in float8_modules(model) if name.endswith("mlp.gate_proj")]
    assert mlps
    for name in mlps:
        up = name.replace("gate_proj", "up_proj")
        weights = [plain.get_submodule(m).weight.detach() for m in (name, up)]
        rule = octavo.Recipe.named(recipe).rule
        common = torch.stack(weights).float().abs().max() / 448 if rule.granularity == PerTensor() else None
        for module, weight in zip((name, up), weights, strict=True):
            assert torch.equal(model.get_submodule(module).weight, octavo.quantize(weight, rule, scale=common).codes)
    model.save_pretrained(tmp_path)
    assert_same_codes(model, octavo.load(tmp_path, device="cpu"))
