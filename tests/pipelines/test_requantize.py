"""requantize: what each target gets and why, nothing lost on the way, and verify has the last word."""

import json
import math

import pytest
import torch

from octavo.base.errors import ConfigError, InputError, RefusedError
from octavo.formats.measure import sqnr_db
from octavo.formats.reference import dequantize_ref
from octavo.formats.scale import is_power_of_two
from octavo.pipelines.requantize import requantize
from octavo.store.schema import parse_quantization_config, read_scaled
from octavo.store.tensors import Checkpoint
from octavo.workflows.requantize import RequantizeConfig
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.broken import HIDDEN, decoder, quantize

A0 = "model.layers.0.self_attn"
Q = f"{A0}.q_proj"


def run(folder, path, target, tp=1):
    source = folder.write(path / "in")
    report = requantize(RequantizeConfig(model=str(source), out=path / "out", target=target, tp=tp))
    return report, Checkpoint.open(source), Checkpoint.open(path / "out")


def fp8(kind="block", model_type="qwen3", **more):
    return quantize(decoder(model_type, **more), kind)


# model, target, tp -> method, scheme, layout, scale format
CHOICES = {
    "16 bit for Blackwell": (decoder, "vllm:sm120", 1, ("quantize", "block128", "ct", "po2")),
    "16 bit for Hopper, kernel with FP32 scales": (decoder, "sglang:h100", 1, ("quantize", "block128", "ct", "fp32")),
    "16 bit for Ada": (decoder, "vllm:l4", 1, ("quantize", "channel", "ct", "fp32")),
    "16 bit for Ampere": (decoder, "vllm:0.32.0:rtx3090", 1, ("quantize", "channel", "ct", "fp32")),
    "16 bit for a CPU": (decoder, "vllm:cpu", 1, ("quantize", "channel", "ct", "fp32")),
    "16 bit for Transformers": (decoder, "transformers:sm90", 1, ("quantize", "block128", "native", "fp32")),
    "blocks that do not split": (decoder, "vllm:sm120", 2, ("quantize", "channel", "ct", "fp32")),
    "mostly ragged blocks": (lambda: decoder(inter=320), "vllm:sm120", 1, ("quantize", "channel", "ct", "fp32")),
    "blocks already right": (lambda: fp8(), "sglang:h100", 1, ("relayout", "block128", "native", "as stored")),
    "po2 blocks already": (
        lambda: quantize(decoder("qwen3"), "block", po2=True),
        "vllm:sm120",
        1,
        ("relayout", "block128", "native", "as stored"),
    ),
    "FP32 scales that Blackwell rounds": (lambda: fp8(), "vllm:sm120", 1, ("quantize", "block128", "native", "po2")),
    "Llama's native blocks in SGLang": (
        lambda: fp8(model_type="llama"),
        "sglang:h100",
        1,
        ("relayout", "block128", "ct", "as stored"),
    ),
    "blocks on Ada": (lambda: fp8(), "vllm:sm89", 1, ("quantize", "channel", "ct", "fp32")),
    "ModelOpt for Transformers": (
        lambda: fp8("modelopt"),
        "transformers:cpu",
        1,
        ("relayout", "tensor", "ct", "as stored"),
    ),
    "block experts in Transformers": (
        lambda: fp8("ct-block", "qwen3_moe", experts=4),
        "transformers:sm90",
        1,
        ("relayout", "block128", "native", "as stored"),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name, tmp_path):
    make, target, tp, wanted = CHOICES[name]
    report, _, _ = run(make(), tmp_path, target, tp)
    done = report.requantized
    assert (done.method, done.scheme, done.layout, done.scale_format) == wanted, (done.why, done.against)
    assert report.verified.verdict == "ok", report.verified.findings
    assert [line.split()[0] for line in done.why] == ["method", "scheme", "layout", "scale"]


def test_relayout_keeps_every_code_and_scale(tmp_path):
    report, before, after = run(fp8(model_type="llama"), tmp_path, "sglang:h100")
    assert report.requantized.error_db is None
    old, new = read_scaled(before, Q), read_scaled(after, Q)
    assert torch.equal(old.codes, new.codes) and torch.equal(old.scale, new.scale)


def test_rounding_once_more_is_exact_up_to_the_error_it_reports(tmp_path):
    folder = fp8()
    report, before, after = run(folder, tmp_path, "vllm:sm120")
    signal = noise = 0.0
    for module in folder.linears:
        old, new = dequantize_ref(read_scaled(before, module)), dequantize_ref(read_scaled(after, module))
        assert bool(is_power_of_two(after.get(f"{module}.weight_scale_inv")).all())
        signal, noise = signal + float(old.square().sum()), noise + float((new - old).square().sum())
    assert report.requantized.error_db == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
    worst, db = next(iter(report.requantized.worst.items()))
    one = sqnr_db(dequantize_ref(read_scaled(after, worst)), dequantize_ref(read_scaled(before, worst)))
    assert db == pytest.approx(one, abs=0.01)


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("ct-block", "transformers:sm90"),
        ("ct-block", "vllm:sm89"),
        ("modelopt", "vllm:sm120"),
        ("modelopt", "transformers:cpu"),
        ("block", "vllm:sm89"),
        ("block", "sglang:h100"),
    ],
)
def test_kv_cache_survives(kind, target, tmp_path):
    folder = fp8(kind)
    folder.quant.update({"kv_cache_scheme": KV} if kind == "ct-block" else {"kv_cache_quant_algo": "FP8"})
    values = {f"{A0}.{part}_proj.{part}_scale": torch.tensor(0.25) for part in "kv"}
    folder.tensors |= values
    report, _, after = run(folder, tmp_path, target)
    assert all(torch.equal(after.get(name), value) for name, value in values.items())
    config = after.config["quantization_config"]
    kept = config.get("kv_cache_scheme") == KV or config.get("kv_cache_quant_algo") == "FP8"
    assert kept and parse_quantization_config(config).kv_cache, config
    assert report.requantized.lost_keys == []
    assert report.verified.verdict == "ok", report.verified.findings


def test_other_keys_survive_or_are_named(tmp_path):
    folder = fp8("ct-block")
    folder.quant.update(version="0.20.1", transform_config={})
    report, _, after = run(folder, tmp_path, "vllm:sm89")
    assert after.config["quantization_config"]["version"] == "0.20.1"
    folder = fp8("modelopt")
    folder.quant["colour"] = "blue"
    report, _, _ = run(folder, tmp_path / "second", "vllm:sm89")
    assert report.requantized.lost_keys == ["colour"]


def test_rotated_weights_stay_where_the_rotation_is_known(tmp_path):
    """Without its transforms the model would compute something else."""
    folder = fp8("ct-channel")
    folder.quant["transform_config"] = {"config_groups": {"R1": {}}}
    report, _, after = run(folder, tmp_path, "vllm:sm89")
    assert after.config["quantization_config"]["transform_config"] == {"config_groups": {"R1": {}}}
    assert report.requantized.layout == "ct"
    folder.quant["config_groups"]["group_0"]["targets"] = ["Linear"]
    report, _, _ = run(folder, tmp_path / "second", "transformers:sm90")
    assert report.requantized.layout == "ct" and "transform_config" in str(report.requantized.against)


def test_modelopt_s_own_file(tmp_path):
    folder = fp8("modelopt")
    inner = folder.config.pop("quantization_config")
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": inner["ignore"]}
    folder.files["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": inner}
    report, _, after = run(folder, tmp_path, "vllm:sm89")
    assert report.verified.verdict == "ok"
    assert not (after.folder / "hf_quant_config.json").exists()


# What `octavo verify` sends here, and how it ends: the command in the finding is the one that mends it.
SENT = {
    "block-on-ada": (lambda: fp8(), "vllm", "sm89", 1),
    "tp-block": (lambda: quantize(decoder("qwen3", heads=4, kv=4, inter=512), "block"), "vllm", "sm90", 4),
    "merged-rows": (lambda: quantize(decoder("qwen3", kv=1), "block"), "vllm", "sm90", 1),
    "ragged-k": (lambda: quantize(decoder("qwen3", inter=320), "block"), "vllm", "sm90", 1),
    "scales-dropped": (lambda: fp8(model_type="llama"), "sglang", "sm90", 1),
    "partial-fusion": (lambda: quantize(decoder("qwen3"), "block", keep=[f"{A0}.k_proj"]), "sglang", "sm90", 1),
    "block-weight-only": (lambda: fp8("ct-block"), "sglang", "sm80", 1),
    "expert-blocks": (lambda: fp8("ct-block", "qwen3_moe", experts=4), "transformers", "sm90", 1),
    "quant-method": (lambda: fp8("modelopt"), "transformers", "sm90", 1),
    "ragged-dequantize": (lambda: quantize(decoder("qwen3", kv=3, heads=3), "block"), "transformers", "cpu", 1),
}


@pytest.mark.parametrize("code", SENT)
def test_the_command_in_a_finding_mends_it(code, tmp_path):
    make, engine, gpu, tp = SENT[code]
    source = make().write(tmp_path / "in")
    report = verify(VerifyConfig(folder=source, engine=engine, gpu=gpu, tp=tp, quick=True))
    fixes = {f.fix for f in report.findings if f.code == code}
    command = f"`octavo requantize {source} OUT --for {engine}:{gpu}{f' --tp {tp}' if tp > 1 else ''}`"
    assert any(command in fix for fix in fixes), (fixes, report.findings)
    done = requantize(RequantizeConfig(model=str(source), out=tmp_path / "out", target=f"{engine}:{gpu}", tp=tp))
    assert done.verified.verdict == "ok", done.verified.findings


def test_no_way_to_write_it(tmp_path):
    """3 heads cannot be split over 2 GPUs, however the weights are written."""
    with pytest.raises(RefusedError, match="heads cannot be split"):
        run(decoder(heads=3, kv=3), tmp_path, "vllm:h100", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["", "vllm", "vlm:sm90", "vllm:sm91", "vllm:new:sm90", "vllm:1:2:sm90", "vllm:"])
def test_targets_that_are_none(target, tmp_path):
    with pytest.raises(ConfigError):
        run(decoder(), tmp_path, target)


def test_bad_folders(tmp_path):
    folder = fp8()
    del folder.tensors[f"{Q}.weight_scale_inv"]
    with pytest.raises(InputError, match=r"q_proj.*without a scale"):
        run(folder, tmp_path, "vllm:sm120")
    assert not (tmp_path / "out").exists()
    assert json.loads((tmp_path / "in" / "config.json").read_text())["hidden_size"] == HIDDEN
