"""calibrate on architectures that name, store or multiply their weights in other ways than Llama."""

import pytest
import torch

from octavo.base.errors import CheckpointError
from octavo.formats.architectures import role
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.modules.sensitivity import SCHEMES
from octavo.store.moments import Moments
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from tests.conftest import TINY
from tests.workflows.architectures import build

MOE = {"hidden_size": 64, "num_experts_per_tok": 2, "tie_word_embeddings": False, **TINY}
MLA = {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def config(name):
    import transformers

    if name == "Llama4":
        return build("llama4", "ragged")
    own = {
        "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, **MOE},
        "GptOss": {"intermediate_size": 48, "num_local_experts": 4, "sliding_window": 16, **MOE},
        "Llama4Text": {"intermediate_size": 48, "num_local_experts": 4, **MOE, "num_experts_per_tok": 1},
        "DeepseekV3": {**MOE, **MLA},
    }
    return getattr(transformers, f"{name}Config")(**own[name])


@pytest.fixture(scope="module")
def calibrated(save_tiny, tmp_path_factory):
    """name -> (folder, scales, moments), made once."""
    cache = {}
    data = tmp_path_factory.mktemp("data") / "text.txt"
    data.write_text("The quick brown fox jumps over the lazy dog; 17 wizards vex a jumbled box of grapes. " * 10)

    def run(name):
        if name not in cache:
            folder, out = save_tiny(config(name), name), tmp_path_factory.mktemp("scales") / "scales.json"
            settings = {"samples": 4, "context": 64, "moments": out.with_name("moments")}
            calibrate(CalibrateConfig(model=str(folder), data=str(data), out=out, **settings))
            cache[name] = folder, Scales.load(out, model=folder), Moments.open(settings["moments"], model=folder)
        return cache[name]

    return run


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_one_tensor_an_expert_by_the_names_on_disk(calibrated, name):
    folder, scales, _ = calibrated(name)
    checkpoint = Checkpoint.open(folder)
    stored = {n.removesuffix(".weight") for n, s in checkpoint.shapes().items() if role(n, s) in ("linear", "expert")}
    assert set(scales.modules) | set(scales.unseen) == stored
    assert_weights_are(scales, lambda module: checkpoint.get(f"{module}.weight"))


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "Llama4"])
def test_moments_are_of_every_linear(calibrated, name):
    """Latent attention gives linears a dimension more; Llama 4's wrapper has a language model with its head inside."""
    _, scales, moments = calibrated(name)
    assert set(moments.index.modules) | set(moments.index.few) >= set(scales.modules)
    assert len(moments.index.modules) > len(moments.index.few)


@pytest.mark.parametrize("name", ["GptOss", "Llama4Text"])
def test_stacked_experts_stored_transposed(calibrated, name):
    """[E, K, N] in the file, used as x @ W[e]; Llama 4 multiplies all experts with all tokens at once."""
    folder, scales, _ = calibrated(name)
    checkpoint = Checkpoint.open(folder)
    experts = [module for module in scales.modules if ".experts." in module]
    assert len(experts) >= 8 and len(experts) + len(scales.unseen) == 2 * 4 * 2

    def weight(module):
        if ".experts." not in module:
            return checkpoint.get(f"{module}.weight")
        owner, expert, leaf = module.rsplit(".", 2)
        return checkpoint.get(f"{owner}.{leaf}")[int(expert)].T

    assert_weights_are(scales, weight)


def test_latent_attention_has_one_scale(calibrated):
    _, scales, _ = calibrated("DeepseekV3")
    assert list(scales.kv) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(kv.k_scale == kv.v_scale == pytest.approx(kv.k_amax / 448) for kv in scales.kv.values())


def test_a_model_without_linears_is_refused(save_tiny, tmp_path):
    from transformers import GPT2Config

    folder = save_tiny(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=264, bos_token_id=0, eos_token_id=0))
    with pytest.raises(CheckpointError, match="no linear to calibrate"):
        calibrate(CalibrateConfig(model=str(folder), out=tmp_path / "scales.json", samples=1, context=64))


def assert_weights_are(scales, weight_of):
    """The weight error recorded is that of this weight and of no other: equal to 1e-3 relative, in noise power."""
    for module, entry in scales.modules.items():
        weight = weight_of(module).float()
        q = dequantize_ref(quantize_ref(weight, E4M3, SCHEMES["channel"].granularity))
        noise = float((q - weight).square().sum() / weight.square().sum())
        assert 10 ** (-entry.weight_sqnr_db["channel"] / 10) == pytest.approx(noise, rel=1e-3), module
        assert torch.isfinite(torch.tensor([entry.input_amax, entry.input_scale])).all()
