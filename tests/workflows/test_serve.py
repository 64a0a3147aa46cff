"""serve: the command for each kind of checkpoint and GPU, and that it really runs what it prints."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from octavo.base.errors import CheckpointError, ConfigError, MismatchError, RefusedError, UnsupportedError
from octavo.base.hardware import HardwareCaps
from octavo.store.manifest import fingerprint
from octavo.workflows.serve import ServeConfig, serve

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.fixture
def checkpoint(tmp_path):
    """make(quantization_config, scale, extra tensors, config keys) -> folder with one linear, 256 x 256."""

    def make(quantization=None, scale=None, tensors=None, **config):
        weight = torch.ones(256, 256, dtype=torch.float8_e4m3fn if quantization else torch.bfloat16)
        held = {f"{O_PROJ}.weight": weight, **(tensors or {})}
        if quantization:
            name = "weight_scale_inv" if quantization is BLOCK else "weight_scale"
            held[f"{O_PROJ}.{name}"] = torch.ones(256, 1) if scale is None else scale
        folder = tmp_path / "out"
        folder.mkdir()
        save_file(held, folder / "model.safetensors")
        full = {**LLAMA, **config, **({"quantization_config": quantization} if quantization else {})}
        (folder / "config.json").write_text(json.dumps(full))
        return folder

    return make


def planned(folder, **settings):
    return serve(ServeConfig(folder=folder, **settings))


def test_channel_on_hopper_needs_nothing_special(checkpoint):
    folder = checkpoint(CHANNEL)
    report = planned(folder, gpu="h100")
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-dtype", "auto"]
    assert report.command == ["vllm", "serve", str(folder), *flags]
    assert report.environment == {} and report.notes == []
    assert shlex.split(report.shell) == report.command


@pytest.mark.parametrize(
    ("gpu", "scale", "environment"),
    [
        ("sm90", 0.3, {"VLLM_USE_DEEP_GEMM_E8M0": "0"}),
        ("b200", 0.3, {"VLLM_USE_DEEP_GEMM": "0"}),
        ("sm120", 0.3, {"VLLM_USE_DEEP_GEMM": "0"}),
        ("b200", 0.25, {}),
        ("l4", 0.3, {}),
    ],
)
def test_block_scales_that_deepgemm_would_round(checkpoint, gpu, scale, environment):
    report = planned(checkpoint(BLOCK, torch.full((2, 2), scale)), gpu=gpu)
    assert report.environment == environment
    assert report.shell.startswith("".join(f"{k}={v} " for k, v in environment.items()) + "vllm serve")
    assert bool(environment) == any("po2" in note for note in report.notes)


@pytest.mark.parametrize(("gpu", "word"), [("l4", "Marlin"), ("a100", "Marlin"), ("cpu", "AMX")])
def test_block_where_it_is_slower(checkpoint, gpu, word):
    assert any(word in note for note in planned(checkpoint(BLOCK, torch.ones(2, 2)), gpu=gpu).notes)


DECLARED = {**CHANNEL, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
SCALES = {f"model.layers.0.self_attn.{letter}_scale": torch.full((1,), 0.5) for letter in "kv"}
OTHERS = {name: scale / 2 for name, scale in SCALES.items()}


@pytest.mark.parametrize("scales", [{}, SCALES], ids=["without scales", "with scales"])
def test_kv_cache_stays_16_bit_without_a_report(checkpoint, scales):
    report = planned(checkpoint(DECLARED, tensors=scales), gpu="h100")
    assert report.command[-2:] == ["--kv-cache-dtype", "bfloat16"]
    assert any("no report calls it safe" in note for note in report.notes)
    assert any("without scales" in note for note in report.notes) == (not scales)


def kv_report(folder, **changes):
    """A report of eval on this folder, beside it."""
    values = {"scale": "calibrated", "query": "fp8", "tokens": 2, "windows": 1, "rise_percent": 0.1, "kl": 0.001}
    values |= {"rise_percent_se": None, "kl_se": None, "kl_p99": 0.01, "greedy_changed": 0, "greedy_changed_se": None}
    scale = {"one": 1.0, "calibrated": 0.5, "token-head": None}[changes.get("scale", "calibrated")]
    layer = {"layer": 0, "name": "model.layers.0.self_attn", "k_scale": scale, "v_scale": scale, "clipped": 0}
    values |= {
        "clipped": 0,
        "limit": 0.01,
        "verdict": "safe",
        "reason": "small enough",
        "layers": [layer, {**layer, "layer": 3}],
        **changes,
    }
    path = folder.parent / "kv.json"
    path.write_text(json.dumps({"kv_cache": {"model_fingerprint": fingerprint(folder), **values}}))
    return path


@pytest.mark.parametrize(
    ("gpu", "stored", "changes", "flags"),
    [
        ("h100", SCALES, {}, ["fp8"]),
        ("h100", {}, {"scale": "one"}, ["fp8"]),
        ("h100", {}, {"scale": "token-head", "query": "16bit"}, ["fp8_per_token_head"]),
        (
            "h100",
            SCALES,
            {"verdict": "keep-layers", "keep_layers": [0, 3], "kept_kl": 0.001},
            ["fp8", "--kv-cache-dtype-skip-layers", "0", "3"],
        ),
        ("h100", SCALES, {"verdict": "not-safe", "reason": "KL 0.3"}, ["bfloat16"]),
        ("h100", SCALES, {"scale": "one"}, ["bfloat16"]),
        ("h100", {}, {"scale": "calibrated"}, ["bfloat16"]),
        ("h100", OTHERS, {}, ["bfloat16"]),
        ("h100", SCALES, {"query": "16bit"}, ["bfloat16"]),
        ("a100", SCALES, {}, ["bfloat16"]),
        ("sm75", SCALES, {}, ["float16"]),
        ("cpu", {}, {"scale": "token-head"}, ["bfloat16"]),
        ("cpu", SCALES, {"query": "16bit"}, ["fp8"]),
    ],
)
def test_kv_cache_as_the_report_allows(checkpoint, gpu, stored, changes, flags):
    folder = checkpoint(DECLARED if stored else CHANNEL, tensors=stored)
    report = planned(folder, gpu=gpu, kv_report=kv_report(folder, **changes))
    start = report.command.index("--kv-cache-dtype")
    assert report.command[start + 1 :] == flags
    assert (
        sum(note.startswith(f"KV cache in {'FP8' if 'fp8' in flags[0] else '16 bit'}:") for note in report.notes) == 1
    )


def test_kv_report_of_another_model(checkpoint, tmp_path):
    folder = checkpoint(CHANNEL)
    with pytest.raises(MismatchError, match="about another model"):
        planned(folder, gpu="h100", kv_report=kv_report(folder, model_fingerprint="sha256:0"))
    with pytest.raises(MismatchError, match="in no folder"):
        planned(folder, gpu="h100", kv_report=kv_report(folder, model_fingerprint=None))
    with pytest.raises(ConfigError, match="Leave one of them out"):
        planned(folder, gpu="h100", kv_report=kv_report(folder), kv_cache_dtype="fp8")
    for text in ("{}", "[1]", "nonsense", '{"kv_cache": null}', '{"kv_cache": {"kl": 1}}'):
        (tmp_path / "kv.json").write_text(text)
        with pytest.raises(ConfigError, match=r"is no report on a KV cache.*octavo eval"):
            planned(folder, gpu="h100", kv_report=tmp_path / "kv.json")
    with pytest.raises(ConfigError, match="is no report"):
        planned(folder, gpu="h100", kv_report=tmp_path / "nothing.json")


def test_kv_cache_that_cannot_be(checkpoint):
    folder = checkpoint(CHANNEL)
    with pytest.raises(UnsupportedError, match="sm89"):
        planned(folder, gpu="a100", kv_cache_dtype="fp8")
    with pytest.raises(RefusedError, match="e5m2"):
        planned(folder, gpu="h100", kv_cache_dtype="fp8_e5m2")
    assert any("scale 1.0" in note for note in planned(folder, gpu="h100", kv_cache_dtype="fp8").notes)


def test_turing_has_no_bfloat16(checkpoint):
    assert planned(checkpoint(CHANNEL), gpu="t4").command[3:5] == ["--dtype", "float16"]


def test_16_bit_weights_are_served_as_they_are(checkpoint):
    report = planned(checkpoint(), gpu="h100")
    assert "--quantization" not in report.command
    assert any("octavo quantize" in note for note in report.notes)


def test_modelopt_is_named(checkpoint):
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    command = planned(checkpoint(modelopt, torch.ones(256)), gpu="h100").command
    assert command[command.index("--quantization") + 1] == "modelopt"


def test_cpu_gets_room_for_its_cache(checkpoint):
    assert planned(checkpoint(CHANNEL), gpu="cpu").environment == {"VLLM_CPU_KVCACHE_SPACE": "1"}


def test_lora_export_is_served_with_its_adapter(checkpoint):
    folder = checkpoint(CHANNEL)
    adapter = folder / "adapter"
    adapter.mkdir()
    name = f"base_model.model.{O_PROJ}"
    pair = {f"{name}.lora_A.weight": torch.ones(20, 256), f"{name}.lora_B.weight": torch.ones(256, 20)}
    save_file(pair, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 20, "lora_alpha": 20}))
    command = planned(folder, gpu="h100").command
    assert command[-5:] == ["--enable-lora", "--lora-modules", f"adapter={adapter}", "--max-lora-rank", "32"]


def test_tensor_parallel_must_split_heads_and_blocks(checkpoint):
    folder = checkpoint(BLOCK, torch.ones(2, 2))
    assert "--tensor-parallel-size" not in planned(folder, gpu="h100", tp=1).command
    assert "--tensor-parallel-size" in planned(folder, gpu="h100", tp=2).command
    with pytest.raises(RefusedError, match="heads"):
        planned(folder, gpu="h100", tp=3)
    with pytest.raises(RefusedError, match=r"o_proj.*whole blocks"):
        planned(folder, gpu="h100", tp=4)


@pytest.fixture
def machine(monkeypatch):
    """machine(memory): this machine's GPU has so many bytes and keeps none of them for itself."""
    monkeypatch.setattr("octavo.workflows.serve.GPU_SHARE", 1.0)
    monkeypatch.setattr("octavo.workflows.serve.ACTIVATION_ROOM", 0)
    return lambda memory: monkeypatch.setattr(
        "octavo.workflows.serve.caps_of", lambda: HardwareCaps((9, 0), "small", memory=memory)
    )


WEIGHTS, CACHE_PER_TOKEN = 256 * 256 + 4 * 256, 2 * 2 * 4 * 64


def value(command, flag):
    return command[command.index(flag) + 1] if flag in command else None


@pytest.mark.parametrize(("tokens", "length"), [(5000, "4096"), (3000, "2048"), (900, "900")])
def test_no_more_tokens_than_fit(checkpoint, machine, tokens, length):
    machine(WEIGHTS + tokens * CACHE_PER_TOKEN)
    command = planned(checkpoint(CHANNEL)).command
    assert value(command, "--max-model-len") == length and value(command, "--tensor-parallel-size") is None


def test_as_many_gpus_as_hold_the_weights(checkpoint, machine):
    machine(WEIGHTS - 1000)
    assert value(planned(checkpoint(CHANNEL)).command, "--tensor-parallel-size") == "2"


def test_a_model_that_no_share_fits(checkpoint, machine):
    machine(1000)
    with pytest.raises(UnsupportedError, match="weights alone"):
        planned(checkpoint(CHANNEL), tp=1)


def test_longer_than_the_model(checkpoint):
    with pytest.raises(ConfigError, match="4096"):
        planned(checkpoint(CHANNEL), gpu="h100", max_model_len=8192)


def test_a_run_folder_is_not_a_checkpoint(tmp_path):
    (tmp_path / "adapter").mkdir()
    with pytest.raises(CheckpointError, match="octavo export"):
        planned(tmp_path)


def octavo(*argv):
    return subprocess.run(
        [sys.executable, "-m", "octavo", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_runs_what_it_prints(checkpoint, tmp_path):
    """A stand-in for vllm tells how it was called; the JSON stays the last line of stdout, the exit code is vllm's."""
    folder = checkpoint(BLOCK, torch.full((2, 2), 0.3))
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\necho "called with $* and $VLLM_USE_DEEP_GEMM"\nexit 7\n')
    os.chmod(vllm, 0o755)
    argv = ["serve", str(folder), "--gpu", "b200", "--port", "8001", "--vllm", str(vllm), "--json", "--", "--seed", "3"]
    done = octavo(*argv)
    assert done.returncode == 7, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["command"][-4:] == ["--port", "8001", "--seed", "3"]
    assert f"called with {shlex.join(report['command'][1:])} and 0" in done.stderr


def test_without_vllm(checkpoint):
    folder = checkpoint(CHANNEL)
    argv = ["serve", str(folder), "--gpu", "h100", "--vllm", "no-such-vllm", "--json"]
    done = octavo(*argv)
    assert done.returncode == 3
    assert "pip install vllm" in json.loads(done.stdout.splitlines()[-1])["error"]["fix"]
    done = octavo(*argv[:-1], "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("no-such-vllm serve ")
