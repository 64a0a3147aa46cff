"""octavo.load and the registered quantizer on tiny models."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CompressedTensorsConfig

import octavo
from octavo.base.errors import CheckpointError, ConfigError, MismatchError, RefusedError, UnsupportedError
from octavo.formats.reference import quantize_ref
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint

IDS = torch.arange(24).view(2, 12) * 7 % 256


def float8_modules(model):
    kinds = (FrozenFloat8Linear, FrozenFloat8Experts)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def states(model):
    """Every FP8 module's frozen parameters, by full name."""
    return {
        f"{name}.{leaf}": p
        for name, module in float8_modules(model).items()
        for leaf, p in module.named_parameters(recurse=False)
    }


def assert_same_codes(a, b):
    a, b = states(a), states(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return found


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("recipe", ["channel", "block128", "tensor"])
def test_codes_are_those_of_the_reference(tiny_llama, recipe):
    model = octavo.load(tiny_llama, recipe, device="cpu", activation="none")
    source = tensors(tiny_llama)
    rule = octavo.Recipe.named(recipe).rule
    modules = float8_modules(model)
    assert len(modules) == 14
    for name, module in modules.items():
        scale = None
        if recipe == "tensor":
            group = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["o_proj"], ["down_proj"]]
            parent, _, leaf = name.rpartition(".")
            siblings = next(g for g in group if leaf in g)
            scale = max(source[f"{parent}.{s}.weight"].float().abs().max() for s in siblings) / 448
        expected = quantize_ref(source[f"{name}.weight"], rule.spec, rule.granularity, scale=scale)
        assert torch.equal(module.scaled().codes, expected.codes), name
        assert torch.equal(module.scaled().scale, expected.scale), name
        assert not any(p.requires_grad for p in module.parameters())
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(model.get_parameter(name), source[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id
    assert not model.training


@pytest.mark.parametrize("recipe", ["channel", "block128", "tensor"])
@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_moe"])
def test_from_pretrained_gives_the_same_codes(request, folder, recipe):
    folder = request.getfixturevalue(folder)
    a = octavo.load(folder, recipe, device="cpu")
    config = octavo.OctavoConfig(recipe=recipe)
    b = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    assert_same_codes(a, b)
    assert torch.equal(logits(a), logits(b))


def test_a_float32_checkpoint_is_rounded_once(tiny_llama, tmp_path):
    wide = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    wide.save_pretrained(tmp_path)
    a = octavo.load(tmp_path, "channel", device="cpu")
    config = octavo.OctavoConfig(recipe="channel")
    b = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj"
    expected = octavo.quantize(wide.get_parameter(f"{name}.weight").detach())
    assert torch.equal(a.get_submodule(name).weight, expected.codes)
    assert_same_codes(a, b)
    assert a.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["channel", "block128", "tensor"])
def test_saved_folder_loads_everywhere(tiny_llama_128, tmp_path, recipe):
    model = octavo.load(tiny_llama_128, recipe, device="cpu")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert "lm_head" in config["ignore"]
    saved = tensors(tmp_path)
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert saved["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32

    again = octavo.load(tmp_path, device="cpu")
    assert_same_codes(model, again)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("recipe", ["channel", "block128", "tensor"])
def test_transformers_alone_reads_the_saved_weights(tiny_llama_128, tmp_path, recipe):
    octavo.load(tiny_llama_128, recipe, device="cpu").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True))
    weight_only = octavo.load(tmp_path, device="cpu", activation="none")
    expected = logits(plain)  # some versions decompress in the first forward
    modules = float8_modules(weight_only)
    for name, module in modules.items():
        found, exact = plain.get_submodule(name).weight.float(), module.dequantize(torch.float32)
        # Up to three roundings to bfloat16, 2**-8 each: Transformers 5.17 rounds the scale too.
        assert torch.allclose(found, exact, rtol=3 * 2**-8, atol=0), name
    if not any(hasattr(module, "quantization_scheme") for module in plain.modules()):  # else it quantizes activations
        # One product is off by bfloat16's 2**-8: Octavo rounds after it, Transformers the weight before it.
        error = (logits(weight_only) - expected).norm() / expected.norm()
        assert error <= len(modules) ** 0.5 * 2**-8


@pytest.mark.parametrize("recipe", ["channel", "block128", "tensor"])
def test_transformers_alone_runs_the_saved_folder(tiny_llama_128, tmp_path, recipe):
    model = octavo.load(tiny_llama_128, recipe, device="cpu")
    model.save_pretrained(tmp_path)
    expected, found = logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    original = logits(AutoModelForCausalLM.from_pretrained(tiny_llama_128))
    # Two W8A8 simulations round a few activations to other codes: they differ by less than either from BF16.
    assert (found - expected).norm() < (original - expected).norm()


def test_moe_experts_are_float8_and_the_router_is_not(tiny_moe):
    model = octavo.load(tiny_moe, "channel", device="cpu", activation="none")
    source = tensors(tiny_moe)
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, FrozenFloat8Experts)
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.bfloat16
    for expert in range(8):
        for leaf, q in experts.scaled(expert).items():
            expected = octavo.quantize(source[f"model.layers.1.mlp.experts.{expert}.{leaf}.weight"])
            assert torch.equal(q.codes, expected.codes)
            assert torch.equal(q.scale, expected.scale)


@pytest.mark.parametrize("recipe", ["channel", "tensor", "block128"])
def test_moe_round_trip(tiny_moe, tmp_path, recipe):
    model = octavo.load(tiny_moe, recipe, device="cpu", activation="none")
    model.save_pretrained(tmp_path)
    saved = tensors(tmp_path)
    assert saved["model.layers.0.mlp.experts.7.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert set(tensors(tiny_moe)) <= set(saved)
    again = octavo.load(tmp_path, device="cpu", activation="none")
    assert_same_codes(model, again)
    assert torch.equal(logits(model), logits(again))


def test_mixtral_keeps_the_names_of_its_files(save_tiny, tmp_path):
    from transformers import MixtralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_hidden_layers": 1}
    folder = save_tiny(MixtralConfig(vocab_size=264, num_attention_heads=4, num_key_value_heads=2, **sizes))
    model = octavo.load(folder, "tensor", device="cpu")
    model.save_pretrained(tmp_path)
    names, saved = set(tensors(folder)), tensors(tmp_path)
    assert names <= set(saved)
    expert = "model.layers.0.block_sparse_moe.experts.3"
    assert f"{expert}.w1.weight" in names
    assert torch.equal(saved[f"{expert}.w1.weight_scale"], saved[f"{expert}.w3.weight_scale"])
    assert_same_codes(model, octavo.load(tmp_path, device="cpu"))


def test_a_familys_own_linear_layers(save_tiny, tmp_path):
    """Falcon's derive from nn.Linear; what octavo quantize takes by its name, octavo.load takes too."""
    from transformers import FalconConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 0}
    folder = save_tiny(FalconConfig(vocab_size=264, **sizes))
    quantize_checkpoint(QuantizeConfig(model=str(folder), out=tmp_path / "out"))
    assert len(float8_modules(octavo.load(folder, "channel", device="cpu"))) == 4
    assert_same_codes(octavo.load(tmp_path / "out", device="cpu"), octavo.load(folder, "channel", device="cpu"))


def test_vision_tower_stays_in_16_bit(tiny_vlm, tmp_path):
    model = octavo.load(tiny_vlm, device="cpu")
    modules = float8_modules(model)
    assert len(modules) == 14
    assert all("language_model" in name for name in modules)
    config = octavo.OctavoConfig(recipe="channel")
    other = AutoModelForImageTextToText.from_pretrained(tiny_vlm, quantization_config=config, dtype=torch.bfloat16)
    assert_same_codes(model, other)
    model.save_pretrained(tmp_path)
    assert_same_codes(model, octavo.load(tmp_path, device="cpu"))


def test_native_block_checkpoint_is_not_requantized(tiny_llama_128, tmp_path):
    model = octavo.load(tiny_llama_128, "block128", device="cpu")
    model.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    native = {name.replace("weight_scale", "weight_scale_inv"): t for name, t in tensors(tmp_path).items()}
    save_file(native, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = octavo.load(tmp_path, device="cpu")
    assert_same_codes(model, again)
    assert next(iter(float8_modules(again).values())).activation == "group128"


def test_skip_and_overrides_are_honoured(tiny_llama):
    recipe = octavo.Recipe.named("channel", skip=("*.layers.0.mlp.down_proj",))
    model = octavo.load(tiny_llama, recipe, device="cpu")
    assert "model.layers.0.mlp.down_proj" not in float8_modules(model)
    assert len(float8_modules(model)) == 13
    config = octavo.OctavoConfig(skip=("*.layers.0.mlp.down_proj",))
    other = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config, dtype=torch.bfloat16)
    assert_same_codes(model, other)
    assert "model.layers.0.mlp.down_proj" in other.config.quantization_config.to_dict()["ignore"]


def test_static_activations_come_from_scales(tiny_llama, tmp_path):
    from octavo.store.manifest import fingerprint
    from octavo.store.scales import ModuleScales, Scales

    names = list(float8_modules(octavo.load(tiny_llama, device="cpu")))
    modules = {name: ModuleScales(input_amax=448.0 * i, input_scale=float(i)) for i, name in enumerate(names, 1)}
    known = {"data_fingerprint": "x", "samples": 1, "tokens": 1}
    scales = Scales(model_fingerprint=fingerprint(tiny_llama), modules=modules, **known)
    path = tmp_path / "scales.json"
    scales.write(path)
    recipe = octavo.Recipe.named("tensor", activation="static")
    model = octavo.load(tiny_llama, recipe, device="cpu", scales=path)
    assert [float(model.get_submodule(name).input_scale) for name in names] == [float(i) for i in range(1, 15)]
    model.save_pretrained(tmp_path / "out")
    again = octavo.load(tmp_path / "out", device="cpu")
    assert_same_codes(model, again)
    assert torch.equal(logits(model), logits(again))
    with pytest.raises(CheckpointError, match="no input scale"):
        octavo.load(tiny_llama, recipe, device="cpu")
    Scales(model_fingerprint="sha256:other", modules=modules, **known).write(path)
    with pytest.raises(MismatchError, match="another model"):
        octavo.load(tiny_llama, recipe, device="cpu", scales=path)


def test_ragged_blocks_work_in_memory_and_saving_says_where_not(tiny_llama, tmp_path, caplog):
    model = octavo.load(tiny_llama, "block128", device="cpu", activation="none")
    assert tuple(model.model.layers[0].mlp.up_proj.weight_scale.shape) == (2, 1)
    assert torch.isfinite(logits(model)).all()
    assert not caplog.text
    model.save_pretrained(tmp_path / "out")
    assert "14 modules of this file will load in Octavo, not in vLLM" in caplog.text
    assert "octavo requantize" in caplog.text
    assert_same_codes(model, octavo.load(tmp_path / "out", device="cpu"))


def test_saving_what_every_engine_serves_says_nothing(tiny_llama_128, tmp_path, caplog):
    octavo.load(tiny_llama_128, "block128", device="cpu").save_pretrained(tmp_path / "out")
    assert not caplog.text


@pytest.mark.slow
def test_the_demo_model_in_float8(demo_model):
    from octavo.integrations.data import load_texts, token_windows
    from octavo.integrations.hub import load_tokenizer

    model, original = (
        octavo.load("demo", device="cpu", activation="none"),
        AutoModelForCausalLM.from_pretrained(demo_model),
    )
    modules = float8_modules(model).values()
    assert len(modules) == 210
    wide = sum(module.weight.numel() * 2 for module in modules)
    stored = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    assert wide / stored > 1.95
    ids = token_windows(load_tokenizer(demo_model), load_texts("demo", "eval"), 256, count=1)
    with torch.no_grad():
        rise = float(model(ids, labels=ids).loss - original(ids, labels=ids).loss)
    assert rise < 0.05  # 2 % on 12,288 tokens, give or take as much on so few


class TestRefusals:
    def test_unknown_recipe(self, tiny_llama):
        with pytest.raises(ConfigError, match="Did you mean 'channel'"):
            octavo.load(tiny_llama, "chanel")

    def test_unknown_settings(self, tiny_llama):
        with pytest.raises(ConfigError, match="activation mode 'tokn'"):
            octavo.load(tiny_llama, activation="tokn")
        with pytest.raises(ConfigError, match="dtype"):
            octavo.load(tiny_llama, device="cpu", dtype="int8")
        with pytest.raises(ConfigError, match="device"):
            octavo.load(tiny_llama, device="tpu9")
        with pytest.raises(ConfigError, match="got scheme"):
            octavo.OctavoConfig(scheme="channel")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
    def test_no_such_device(self, tiny_llama):
        with pytest.raises(UnsupportedError, match="0 CUDA devices"):
            octavo.load(tiny_llama, device="cuda")

    def test_missing_and_empty_folder(self, tmp_path):
        with pytest.raises(CheckpointError, match="does not exist"):
            octavo.load("/no/such/folder")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            octavo.load(tmp_path)

    @pytest.fixture
    def copy(self, tiny_llama, tmp_path):
        folder = tmp_path / "copy"
        shutil.copytree(tiny_llama, folder)
        return folder

    def edit(self, folder, **changes):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", None])
    def test_another_quantization(self, copy, method):
        self.edit(copy, quantization_config={"quant_method": method, "bits": 4})
        with pytest.raises(CheckpointError, match="already quantized"):
            octavo.load(copy, device="cpu")

    def test_unknown_model_type(self, copy):
        self.edit(copy, model_type="octavo_unknown", architectures=["OctavoUnknown"])
        with pytest.raises(UnsupportedError, match="model type 'octavo_unknown' is unknown"):
            octavo.load(copy, device="cpu")

    def test_remote_code(self, copy):
        self.edit(copy, model_type="octavo_unknown", auto_map={"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"})
        with pytest.raises(RefusedError, match=r"brings its own code.*trust_remote_code=True"):
            octavo.load(copy, device="cpu")

    def test_other_granularity_than_stored(self, tiny_llama_128, tmp_path):
        octavo.load(tiny_llama_128, "block128", device="cpu").save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="holds FP8 with scales per block128x128"):
            octavo.load(tmp_path, "channel", device="cpu")

    def test_not_a_number(self, copy, capfd):
        from safetensors.torch import load_file, save_file

        weights = load_file(copy / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight; got NaN"):
            octavo.load(copy, device="cpu")
        assert "Traceback" not in capfd.readouterr().err

    @pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
    @pytest.mark.parametrize("recipe", ["channel", "tensor"])
    def test_missing_weight(self, copy, lost, recipe):
        from safetensors.torch import load_file, save_file

        weights = load_file(copy / "model.safetensors")
        del weights[lost]
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"lacks weights.*{lost.removesuffix('.weight')}"):
            octavo.load(copy, recipe, device="cpu")

    def test_codes_without_a_scale(self, tiny_llama, tmp_path):
        from safetensors.torch import load_file, save_file

        octavo.load(tiny_llama, device="cpu").save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        del weights["model.layers.0.mlp.up_proj.weight_scale"]
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj.*without a scale"):
            octavo.load(tmp_path, device="cpu")

    def test_codes_without_a_quantization_config(self, tiny_llama, tmp_path):
        octavo.load(tiny_llama, device="cpu").save_pretrained(tmp_path)
        self.edit(tmp_path, quantization_config=None)
        with pytest.raises(CheckpointError, match="holds FP8 codes"):
            octavo.load(tmp_path, device="cpu")
