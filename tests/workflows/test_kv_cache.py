"""An FP8 KV cache: from calibration to a checkpoint that declares it, what verify says, and if eval calls it safe."""

import json
import shutil

import pytest
import safetensors.torch

from octavo.base.errors import ConfigError
from octavo.cli import main
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from octavo.workflows.evaluate import EvaluateConfig, evaluate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from octavo.workflows.serve import ServeConfig, serve
from octavo.workflows.verify import VerifyConfig, verify
from tests.conftest import TINY


@pytest.fixture(scope="module")
def calibrated(tiny_llama_128, tmp_path_factory):
    """(scales.json, data) of the tiny model."""
    folder = tmp_path_factory.mktemp("kv")
    (folder / "text.txt").write_text("Sphinx of black quartz, judge my vow; pack my box with five dozen jugs. " * 30)
    data = str(folder / "text.txt")
    out = folder / "scales.json"
    calibrate(CalibrateConfig(model=str(tiny_llama_128), data=data, out=out, samples=4, context=64))
    return out, data


@pytest.mark.parametrize(("scheme", "layout"), [("channel", "ct"), ("block128", "native")])
def test_verify_finds_nothing_wrong(tiny_llama_128, calibrated, tmp_path, scheme, layout):
    out = tmp_path / "out"
    settings = {"scheme": scheme, "layout": layout, "kv_cache": "fp8", "scales": calibrated[0]}
    quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=out, **settings))
    report = verify(VerifyConfig(folder=out, engine="vllm", gpu="h100"))
    assert report.verdict == "ok", report.findings
    kv = [finding.code for finding in report.findings if finding.code.startswith("kv")]
    assert kv == ([] if layout == "ct" else ["kv-scales-idle"])  # native: used once the flag asks for FP8


def test_the_commands_say_that_scales_are_stored_and_for_which_gpu(tiny_llama_128, calibrated, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main.run(["quantize", str(tiny_llama_128), out, "--kv-cache", "fp8", "--scales", str(calibrated[0])]) == 0
    assert "scales for FP8 are stored" in capsys.readouterr().out
    assert main.run(["verify", out, "--quick", "--engine", "vllm", "--gpu", "h100"]) == 0
    assert "h100" in capsys.readouterr().out
    assert main.run(["quantize", str(tiny_llama_128), str(tmp_path / "plain")]) == 0
    assert "KV cache" not in capsys.readouterr().out


def test_renaming_cannot_add_scales(tiny_llama_128, tmp_path, calibrated):
    with pytest.raises(ConfigError, match="relayout"):
        settings = {"kv_cache": "fp8", "scales": calibrated[0], "fp8_input": "relayout"}
        quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "out", **settings))


@pytest.fixture(scope="module")
def loud(save_tiny):
    """Eight layers; layer 5 makes values of some thousands and its o_proj divides them away: too large for scale 1."""
    from transformers import LlamaConfig

    tiny = {**TINY, "num_hidden_layers": 8, "initializer_range": 0.1}
    folder = save_tiny(LlamaConfig(hidden_size=64, intermediate_size=96, tie_word_embeddings=True, **tiny), "loud")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.5.self_attn.v_proj.weight"] *= 4096
    tensors["model.layers.5.self_attn.o_proj.weight"] /= 4096
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def judged(model, data, **settings):
    common = {"data": data, "tokens": 512, "context": 64, "kv_cache": "fp8", "attribution_tokens": 128}
    return evaluate(EvaluateConfig(model=str(model), **{**common, **settings}))


def test_the_layer_at_fault_is_found_and_kept(loud, calibrated, tmp_path):
    report = judged(loud, calibrated[1], kv_scale="one", kv_limit=0.05, out=tmp_path / "kv.json")
    kv = report.kv_cache
    assert (kv.verdict, kv.keep_layers) == ("keep-layers", [5])
    assert kv.kl > kv.limit > kv.kept_kl and "layers 5 in 16 bit" in kv.reason
    assert [layer.layer for layer in kv.layers] == list(range(8))
    assert max(kv.layers, key=lambda layer: layer.kl).layer == 5 and kv.layers[5].sensitive
    assert not all(layer.sensitive for layer in kv.layers)
    assert max(kv.layers, key=lambda layer: layer.clipped).layer == 5 and kv.layers[5].clipped > 0.1
    assert kv.layers[5].name == "model.layers.5.self_attn" and kv.layers[5].v_scale == 1
    assert kv.query == "fp8" and kv.attribution_tokens == 128
    assert json.loads((tmp_path / "kv.json").read_text())["kv_cache"]["keep_layers"] == [5]
    assert (report.kl, report.top1) == (kv.kl, 1 - kv.greedy_changed) and report.against is None


def test_scales_that_fit_make_it_safe(loud, calibrated, tmp_path, caplog):
    scales = tmp_path / "scales.json"
    calibrate(CalibrateConfig(model=str(loud), data=calibrated[1], out=scales, samples=8, context=64))
    own = judged(loud, calibrated[1], scales=scales, kv_limit=0.05).kv_cache
    assert (own.scale, own.verdict) == ("calibrated", "safe") and own.clipped < 1e-3
    per_token = judged(loud, calibrated[1], kv_scale="token-head", kv_limit=0.05, attribution_tokens=0).kv_cache
    assert (per_token.verdict, per_token.query, per_token.layers[0].k_scale) == ("safe", "16bit", None)
    assert per_token.kl < own.kl and per_token.layers[0].kl is None and not per_token.keep_layers
    out = tmp_path / "out"
    settings = {"kv_cache": "fp8", "scales": scales}
    quantize_checkpoint(QuantizeConfig(model=str(loud), out=out, **settings))
    shutil.copy(loud / "tokenizer.json", out)
    with caplog.at_level("WARNING", "octavo"):
        stored = judged(out, calibrated[1], kv_limit=0.05, attribution_tokens=0).kv_cache
    assert not [r.message for r in caplog.records if "no place in the model" in r.message]  # k_scale and v_scale
    assert (stored.scale, stored.verdict, stored.layers[5].v_scale) == ("calibrated", "safe", own.layers[5].v_scale)
    serving = serve(ServeConfig(folder=out, gpu="h100", kv_report=written(stored, tmp_path)))
    assert serving.command[-2:] == ["--kv-cache-dtype", "fp8"]


def written(kv, folder):
    path = folder / "report.json"
    path.write_text(json.dumps({"kv_cache": json.loads(kv.to_json())}))
    return path


def test_not_safe_and_too_few_tokens_to_tell(loud, calibrated):
    kv = judged(loud, calibrated[1], kv_scale="one", kv_limit=1e-6).kv_cache
    assert kv.verdict == "not-safe" and not kv.keep_layers and kv.kept_kl is None
    single = {"tokens": 64, "attribution_tokens": 0, "kv_scale": "token-head", "kv_limit": 1}
    kv = judged(loud, calibrated[1], **single).kv_cache
    assert kv.verdict == "not-safe" and "too few tokens" in kv.reason


def test_against_another_model_the_cache_comes_on_top(tiny_llama, calibrated):
    settings = {"scheme": "channel", "against": str(tiny_llama), "attribution_tokens": 0}
    report = judged(tiny_llama, calibrated[1], **settings)
    weights = judged(tiny_llama, calibrated[1], **settings, kv_cache="16bit")
    assert report.kl > weights.kl and weights.kv_cache is None
    assert report.kv_cache.kl != report.kl and report.kv_cache.model_fingerprint is None


def test_settings_that_do_not_go_together(tiny_llama, calibrated):
    with pytest.raises(ConfigError, match="kv_scale 'calibrated'; got no scales"):
        judged(tiny_llama, calibrated[1], kv_scale="calibrated")
    with pytest.raises(ConfigError, match="kv_scale; got a 16-bit KV cache"):
        judged(tiny_llama, calibrated[1], kv_cache="16bit", kv_scale="one")
