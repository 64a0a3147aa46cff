"""scales.json of small real architectures against what the model was really given."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from octavo.base.errors import CheckpointError, ConfigError, DataError, MismatchError
from octavo.formats.granularity import PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.integrations.transformers import load
from octavo.modules.sensitivity import SCHEMES
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint
from octavo.workflows.calibrate import CalibrateConfig, calibrate

TEXT = "The quick brown fox jumps over the lazy dog; 17 wizards quietly vex a jumbled box of grapes. "


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT * 20)
    return path


def run(model, data, out, **settings):
    config = CalibrateConfig(model=str(model), data=str(data), out=out, **{"samples": 6, "context": 64, **settings})
    return calibrate(config), Scales.load(out, model=model)


@pytest.fixture(scope="module")
def llama(tiny_llama, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("scales") / "scales.json"
    return tiny_llama, *run(tiny_llama, data, out), out


def reference_run(folder, data, tokens=64, samples=6):
    """The model's own modules, hooked by hand; inputs and KV of all samples together."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(data.read_text())["input_ids"][: tokens * samples]
    inputs, caches = {}, []
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            module.register_forward_hook(
                lambda module, args, out, name=name: inputs.setdefault(name, []).append(args[0][0])
            )
    with torch.no_grad():
        for window in torch.tensor(ids).view(samples, tokens):
            caches.append(model(window[None], use_cache=True).past_key_values)
    return model, {name: torch.cat(parts) for name, parts in inputs.items()}, caches


def test_every_linear_and_nothing_else(llama):
    folder, report, scales, _ = llama
    want = {n.removesuffix(".weight") for n in Checkpoint.open(folder) if "proj" in n}
    assert set(scales.modules) == want and report.modules == len(want) == 14
    assert (report.samples, report.tokens, scales.samples, scales.tokens) == (6, 384, 6, 384)
    assert not scales.unseen
    assert sorted(m.rank for m in scales.modules.values()) == list(range(1, 15))


def test_ranges_and_errors_are_those_of_the_inputs(llama, data):
    folder, report, scales, out = llama
    model, inputs, _ = reference_run(folder, data)
    channels = safetensors.torch.load_file(out.with_name(scales.channels_file))
    for name, entry in scales.modules.items():
        x, weight = inputs[name], model.get_submodule(name).weight.detach()
        assert entry.input_amax == pytest.approx(float(x.abs().max()), rel=1e-5)
        noises = [rounding_noise(x, scale) for scale in (entry.input_scale, entry.input_amax / 448)]
        assert noises[0] <= noises[1] * 1.05 and 0.999 < entry.input_scale * 448 / entry.input_amax < 2
        exact = float(torch.quantile(x.abs().flatten()[:100_000], 0.5))
        assert exact * 0.97 <= entry.input_percentiles["50"] <= exact * 1.05
        torch.testing.assert_close(channels[f"{name}.input_channel_amax"], x.abs().amax(0), rtol=1e-5, atol=1e-6)
        q = quantize_ref(weight, E4M3, SCHEMES["channel"].granularity)
        noise = (dequantize_ref(q) - weight).square().sum() / weight.square().sum()
        assert entry.weight_sqnr_db["channel"] == pytest.approx(float(-10 * noise.log10()), abs=0.01)
        xq, wq = (dequantize_ref(quantize_ref(t, E4M3, SCHEMES["channel"].granularity)) for t in (x, weight))
        noise = (xq @ wq.T - x @ weight.T).square().sum() / (x @ weight.T).square().sum()
        assert entry.w8a8_sqnr_db == pytest.approx(float(-10 * noise.log10()), abs=0.5)
    assert report.sensitive[0][1] == min(entry.w8a8_sqnr_db for entry in scales.modules.values())


def rounding_noise(x, scale):
    """Mean over tokens of |error|^2 / |token|^2 with one static scale."""
    rounded = dequantize_ref(quantize_ref(x, E4M3, PerTensor(), scale=torch.tensor(scale)))
    return float(((rounded - x).square().sum(1) / x.square().sum(1)).mean())


def test_input_scale_amax_puts_the_largest_on_the_largest_code(tiny_llama, data, tmp_path):
    out = tmp_path / "scales.json"
    calibrate(CalibrateConfig(model=str(tiny_llama), data=str(data), out=out, samples=2, input_scale="amax"))
    scales = Scales.load(out)
    assert scales.input_scale_method == "amax"
    for entry in scales.modules.values():
        assert entry.input_scale == pytest.approx(entry.input_amax / 448, rel=1e-6)


def test_kv_ranges_are_those_of_the_cache(llama, data):
    folder, report, scales, _ = llama
    _, _, caches = reference_run(folder, data)
    assert report.kv_layers == 2
    for layer, name in enumerate(f"model.layers.{i}.self_attn" for i in range(2)):
        for what, letter in (("keys", "k"), ("values", "v")):
            amax = max(float(getattr(cache.layers[layer], what).abs().max()) for cache in caches)
            assert getattr(scales.kv[name], f"{letter}_amax") == pytest.approx(amax, rel=1e-5)
            assert getattr(scales.kv[name], f"{letter}_scale") == pytest.approx(amax / 448, rel=1e-5)


def test_another_model_is_refused(llama, tiny_llama_128):
    with pytest.raises(MismatchError, match="belongs to another model"):
        Scales.load(llama[3], model=tiny_llama_128)


def test_a_missing_layer_is_refused(llama, tmp_path):
    values = json.loads(llama[3].read_text())
    del values["modules"]["model.layers.1.mlp.up_proj"]
    (tmp_path / "scales.json").write_text(json.dumps(values))
    with pytest.raises(MismatchError, match="up_proj"):
        Scales.load(tmp_path / "scales.json", model=llama[0], modules=list(llama[2].modules))


def test_moe_by_stored_names_and_unseen_experts(tiny_moe, tmp_path):
    text = tmp_path / "few.txt"
    text.write_text("ab")
    report, scales = run(tiny_moe, text, tmp_path / "scales.json", samples=1, context=2)
    stored = {n.removesuffix(".weight") for n in Checkpoint.open(tiny_moe) if "_proj" in n}
    assert set(scales.modules) | set(scales.unseen) == stored
    assert not set(scales.modules) & set(scales.unseen)
    assert len(scales.unseen) >= 3 * 2 * (8 - 4)  # two tokens reach at most four of the eight experts of each layer
    assert report.unseen == scales.unseen
    seen = next(n for n in scales.modules if ".experts." in n and n.endswith("gate_proj"))
    assert scales.modules[seen].input_amax == scales.modules[seen.replace("gate_proj", "up_proj")].input_amax
    with pytest.raises(MismatchError, match="no token reached"):
        scales.require(stored)


def test_moe_weights_are_those_of_the_file(tiny_moe, data, tmp_path):
    _, scales = run(tiny_moe, data, tmp_path / "scales.json")
    checkpoint = Checkpoint.open(tiny_moe)
    experts = [n for n in scales.modules if ".experts." in n]
    assert len(experts) > 24
    for name in experts:
        weight = checkpoint.get(f"{name}.weight").float()
        q = dequantize_ref(quantize_ref(weight, E4M3, SCHEMES["channel"].granularity))
        noise = float((q - weight).square().sum() / weight.square().sum())
        assert 10 ** (-scales.modules[name].weight_sqnr_db["channel"] / 10) == pytest.approx(noise, rel=1e-3)


def test_language_part_of_a_multimodal_model_by_stored_names(tiny_vlm, data, tmp_path):
    _, scales = run(tiny_vlm, data, tmp_path / "scales.json")
    stored = [n.removesuffix(".weight") for n in Checkpoint.open(tiny_vlm)]
    assert set(scales.modules) == {n for n in stored if "language_model" in n and n.endswith("_proj")}
    assert {f"{name}.k_proj" for name in scales.kv} == {n for n in scales.modules if n.endswith("k_proj")}


def as_fp8(source, folder):
    load(source, Recipe.named("channel", activation="token")).save_pretrained(folder)
    for file in source.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_fp8_folder_keeps_its_codes(tiny_llama, data, tmp_path):
    report, scales = run(as_fp8(tiny_llama, tmp_path / "fp8"), data, tmp_path / "scales.json")
    assert report.modules == 14 and report.kv_layers == 2
    assert all(entry.weight_sqnr_db["channel"] is None for entry in scales.modules.values())  # exact: no error left
    assert all(entry.weight_sqnr_db["po2"] > 25 for entry in scales.modules.values())


def test_fp8_experts_are_refused(tiny_moe, data, tmp_path):
    with pytest.raises(ConfigError, match="original 16-bit model"):
        run(as_fp8(tiny_moe, tmp_path / "fp8"), data, tmp_path / "scales.json")


def test_conversations_are_samples_of_their_own(tiny_llama, tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello" * n}] for n in (1, 30)]
    path.write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    report, _ = run(tiny_llama, path, tmp_path / "scales.json")
    assert report.samples == 2
    assert 64 < report.tokens < 128  # the second is cut to the context, the first is not padded to it


def test_same_input_same_file(llama, data, tmp_path):
    run(llama[0], data, tmp_path / "again.json")
    first, again = (json.loads(p.read_text()) for p in (llama[3], tmp_path / "again.json"))
    assert first.pop("channels_file") != again.pop("channels_file")
    assert first == again


@pytest.mark.parametrize("moments", [False, True], ids=["scales", "moments"])
def test_nan_names_the_weight_and_writes_nothing(tiny_llama, data, tmp_path, moments):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    file = broken / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 5] = torch.nan
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj\.weight; got nan at \[3, 5\]"):
        run(broken, data, tmp_path / "out" / "scales.json", moments=tmp_path / "out" / "moments" if moments else None)
    assert not (tmp_path / "out").exists()


def test_too_little_data(tiny_llama, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(DataError, match="shorter than one sample"):
        run(tiny_llama, short, tmp_path / "scales.json")


@pytest.mark.parametrize("moments", [False, True], ids=["scales", "moments"])
def test_what_the_model_cannot_take(save_tiny, data, tmp_path, moments):
    """A context beyond its positions is cut to them; tokens without an embedding are named before anything runs."""
    from transformers import OPTConfig

    sizes = {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_hidden_layers": 1}
    settings = {"moments": tmp_path / "moments"} if moments else {}
    short = save_tiny(OPTConfig(vocab_size=264, num_attention_heads=4, max_position_embeddings=32, **sizes))
    report, _ = run(short, data, tmp_path / "scales.json", samples=3, **settings)
    assert report.tokens == 3 * 32
    ignorant = save_tiny(OPTConfig(vocab_size=40, num_attention_heads=4, max_position_embeddings=64, **sizes))
    with pytest.raises(MismatchError, match="knows more tokens than the model"):
        run(ignorant, data, tmp_path / "others.json", **settings)


def test_a_run_folder_is_refused(data, tmp_path):
    (tmp_path / "config.yaml").write_text("model: demo\n")
    with pytest.raises(ConfigError, match="run folder"):
        run(tmp_path, data, tmp_path / "scales.json")
