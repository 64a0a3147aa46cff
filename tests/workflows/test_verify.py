"""Good checkpoints raise no alarm; one defect each is named, for the engines it concerns and for no other."""

import copy
import json

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError, OctavoError
from octavo.formats.codec import decode
from octavo.formats.spec import E4M3
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from octavo.workflows.rules.scan import as_float32, decode_fast
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.broken import HIDDEN, decoder, matrix, quantize

A0, M0 = "model.layers.0.self_attn", "model.layers.0.mlp"


def run(folder, path, engine="vllm", gpu="sm90", tp=1, **more):
    return verify(VerifyConfig(folder=folder.write(path / "ckpt"), engine=engine, gpu=gpu, tp=tp, **more))


def found(report, severity=None):
    return [(f.code, f.where) for f in report.findings if severity in (None, f.severity)]


GOOD = {
    "block": lambda: quantize(decoder("qwen3"), "block"),
    "block-po2": lambda: quantize(decoder("qwen3"), "block", po2=True),
    "ct-channel": lambda: quantize(decoder(layers=2, inter=320), "ct-channel"),
    "ct-block": lambda: quantize(decoder(), "ct-block"),
    "ct-tensor": lambda: quantize(decoder(), "ct-tensor"),
    "ct-static": lambda: quantize(decoder(), "ct-static"),
    "tied": lambda: quantize(decoder("qwen2", tie=True), "block"),
    "moe-block": lambda: quantize(decoder("qwen3_moe", experts=4), "block"),
    "mixtral-block": lambda: quantize(decoder("mixtral", experts=4), "block"),
    "16-bit": decoder,
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("kind", GOOD)
def test_good_checkpoints_raise_no_alarm(kind, engine, tmp_path):
    report = run(GOOD[kind](), tmp_path, engine)
    assert report.verdict == "ok", found(report)
    assert report.engines[engine].verdict == "ok"


@pytest.mark.parametrize("kind", ["tensor", "static", "modelopt"])
def test_per_tensor_native_and_modelopt_serve_but_do_not_load_in_transformers(kind, tmp_path):
    folder = quantize(decoder(), kind)
    for engine in ("vllm", "sglang"):
        assert run(folder, tmp_path, engine).verdict == "ok"
    assert run(folder, tmp_path, "transformers").verdict == "error"


# ------------------------------------------------------------------------------------------------- one defect at a time
def drop(name):
    return lambda f: f.tensors.pop(name)


def edit(name, change):
    def apply(f):
        f.tensors[name] = change(f.tensors[name])

    return apply


def renamed(old, new):
    return lambda f: f.rename(old, new)


def config(**values):
    return lambda f: f.quant.update(values)


def nan_code(x):
    x = x.view(torch.uint8).clone()
    x[3, 5] = 0xFF
    return x.view(torch.float8_e4m3fn)


def transposed(x):
    return x.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)


def e5m2(x):
    return x.float().to(torch.float8_e5m2)


def args(f):
    return f.quant["config_groups"]["group_0"]["weights"]


def no_activations(f):
    f.quant["config_groups"]["group_0"]["input_activations"] = None


def every_scale(factor):
    def apply(f):
        f.tensors = {n: x * factor if "weight_scale" in n else x for n, x in f.tensors.items()}

    return apply


def added_to_codes(x):
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 200
    return (x.float() + noise).clamp(-448, 448).to(torch.float8_e4m3fn)


def second_layer(f):
    f.tensors |= {n.replace("layers.0", "layers.1"): x.clone() for n, x in f.tensors.items() if "layers.0" in n}


def stray(f):
    f.tensors[f"{A0}.extra.weight"] = torch.ones(4)


def kv_scales(leaf):
    return lambda f: f.tensors.update({f"{A0}.{leaf}": torch.tensor([0.05])})


Q, DOWN = f"{A0}.q_proj", f"{M0}.down_proj"
DEFECTS = {
    # id: (kind, change, engine, gpu, code, part of where)
    "scale missing": ("block", drop(f"{DOWN}.weight_scale_inv"), "vllm", "sm90", "scale-missing", DOWN),
    "k scale missing": ("ct-channel", drop(f"{A0}.k_proj.weight_scale"), "vllm", "sm90", "scale-missing", "k_proj"),
    "reciprocal": ("block", edit(f"{Q}.weight_scale_inv", lambda s: 1 / s), "vllm", "sm90", "scale-implausible", Q),
    "reciprocal rows": (
        "ct-channel",
        edit(f"{Q}.weight_scale", lambda s: 1 / s),
        "vllm",
        "sm90",
        "scale-implausible",
        Q,
    ),
    "zero scale": ("block", edit(f"{Q}.weight_scale_inv", lambda s: s * 0), "vllm", "sm90", "scale-not-positive", Q),
    "negative scale": (
        "ct-channel",
        edit(f"{Q}.weight_scale", lambda s: -s),
        "sglang",
        "sm90",
        "scale-not-positive",
        Q,
    ),
    "inf scale": ("ct-tensor", edit(f"{Q}.weight_scale", lambda s: s / 0), "vllm", "sm90", "scale-not-positive", Q),
    "nan code": ("ct-channel", edit(f"{Q}.weight", nan_code), "transformers", "sm90", "nan-codes", Q),
    "e5m2": ("block", edit(f"{Q}.weight", e5m2), "vllm", "sm90", "weight-dtype", Q),
    "transposed": ("ct-channel", edit(f"{DOWN}.weight", transposed), "vllm", "sm90", "weight-transposed", DOWN),
    "int32 scale": ("block", edit(f"{Q}.weight_scale_inv", lambda s: s.int()), "vllm", "sm90", "scale-dtype", Q),
    "uint8 scale": (
        "block",
        edit(f"{Q}.weight_scale_inv", lambda s: s.to(torch.uint8)),
        "vllm",
        "sm90",
        "scale-dtype",
        Q,
    ),
    "scale 1-d": ("ct-channel", edit(f"{Q}.weight_scale", lambda s: s[:, 0]), "vllm", "sm90", "scale-shape", Q),
    "grid too small": ("block", edit(f"{Q}.weight_scale_inv", lambda s: s[:1]), "vllm", "sm90", "scale-shape", Q),
    "native named ct": ("block", renamed("_scale_inv", "_scale"), "vllm", "sm90", "scale-name", "weight_scale"),
    "ct named native": ("ct-block", renamed("_scale", "_scale_inv"), "vllm", "sm90", "scale-name", "weight_scale_inv"),
    "activation name": (
        "static",
        renamed("input_scale", "activation_scale"),
        "vllm",
        "sm90",
        "input-scale-missing",
        "act",
    ),
    "no input scale": ("ct-static", drop(f"{Q}.input_scale"), "vllm", "sm90", "input-scale-missing", Q),
    "block static": ("block", config(activation_scheme="static"), "vllm", "sm90", "block-static", "activation_scheme"),
    "unknown scheme": ("block", config(activation_scheme="odd"), "vllm", "sm90", "activation-scheme", "activation"),
    "no block size": ("block", lambda f: f.quant.pop("weight_block_size"), "vllm", "sm90", "scale-name", "scale_inv"),
    "extra ct key": ("ct-channel", lambda f: args(f).update(odd=1), "vllm", "sm90", "ct-args", "odd"),
    "actorder": ("ct-channel", lambda f: args(f).update(actorder="group"), "vllm", "sm90", "ct-args", "actorder"),
    "wrong format": ("ct-channel", config(format="pack-quantized"), "vllm", "sm90", "format", "format"),
    "no method": ("ct-channel", lambda f: f.quant.pop("quant_method"), "vllm", "sm90", "quant-method-missing", "quant"),
    "no config": ("block", lambda f: f.config.pop("quantization_config"), "vllm", "sm90", "codes-as-weights", "weight"),
    "ampere ct block": ("ct-block", lambda f: None, "sglang", "sm80", "block-weight-only", "strategy"),
    "turing": ("ct-channel", lambda f: None, "sglang", "sm75", "gpu-too-old", "sm75"),
    "modelopt ampere": ("modelopt", lambda f: None, "sglang", "sm86", "gpu-too-old", "sm86"),
    "modelopt head": ("modelopt", config(ignore=[]), "vllm", "sm90", "weight-not-quantized", "lm_head"),
    "modelopt algo": ("modelopt", config(quant_algo="W4A8_AWQ"), "vllm", "sm90", "quant-algo", "quant_algo"),
    "bf16 nan": ("block", edit("model.norm.weight", lambda x: x / 0), "vllm", "sm90", "not-finite", "model.norm"),
    "ct block w8a16": ("ct-block", no_activations, "vllm", "sm90", "block-weight-only", "input_activations"),
    "times 448": ("ct-channel", every_scale(448.0), "vllm", "sm90", "scale-implausible", "weight_scale"),
    "divided by 448": ("block", every_scale(1 / 448), "vllm", "sm90", "scale-implausible", "quantization_config"),
    "codes merged on": ("block", edit(f"{DOWN}.weight", added_to_codes), "vllm", "sm90", "saturated", DOWN),
    "unknown method": ("block", config(quant_method="float8"), "transformers", "sm90", "quant-method", "quant_method"),
    "extra layer": ("ct-channel", second_layer, "vllm", "sm90", "extra-layer", "layers.1"),
    "stray tensor": ("ct-channel", stray, "vllm", "sm90", "unexpected-tensor", "extra"),
    "odd KV name": ("ct-channel", kv_scales("key_scale"), "vllm", "sm90", "kv-scale-name", "key_scale"),
    "old KV name": ("ct-channel", kv_scales("k_proj.output_scale"), "vllm", "sm90", "kv-scale-name", "output_scale"),
    "llama native block": ("block", lambda f: None, "sglang", "sm90", "scales-dropped", "weight_scale_inv"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_an_error(name, tmp_path):
    kind, change, engine, gpu, code, where = DEFECTS[name]
    folder = quantize(decoder(), kind)
    change(folder)
    report = run(folder, tmp_path, engine, gpu)
    assert report.verdict == "error"
    assert any(c == code and where in w for c, w in found(report, "error")), found(report)


def test_skip_lists_mean_what_each_engine_makes_of_them(tmp_path):
    def verdicts(kind, skip, keep):
        folder = quantize(decoder("qwen3"), kind, keep=keep, skip=skip)
        return [run(folder, tmp_path, engine).verdict for engine in ("vllm", "sglang", "transformers")]

    o_proj = f"{A0}.o_proj"
    assert verdicts("block", ["lm_head", o_proj], [o_proj]) == ["ok", "ok", "ok"]
    assert verdicts("block", ["lm_head", "o_proj"], [o_proj]) == ["error", "ok", "ok"]  # exact, segments, suffix
    assert verdicts("block", ["lm_head", "layers.0"], list(decoder().linears)) == ["error", "ok", "error"]
    assert verdicts("block", ["lm_head", "model.layers.0.self_attn"], [o_proj]) == ["error", "error", "error"]
    assert verdicts("ct-channel", ["lm_head", "re:.*o_proj"], [o_proj]) == ["ok", "ok", "ok"]
    assert verdicts("ct-channel", ["lm_head", "self_attn.o_proj"], [o_proj]) == ["error", "ok", "error"]


def test_merged_shards_share_one_precision_in_servers_only(tmp_path):
    for kind in ("block", "ct-channel"):
        folder = quantize(decoder("qwen3"), kind, keep=[f"{A0}.k_proj"])
        assert [run(folder, tmp_path, e).verdict for e in ("vllm", "sglang", "transformers")] == [
            "error",
            "error",
            "ok",
        ]
    report = run(folder, tmp_path, "vllm")
    assert ("partial-fusion", f"{A0}.k_proj (merged into {A0}.qkv_proj)") in found(report, "error")


def test_two_schemes_in_one_merged_matrix(tmp_path):
    folder = quantize(decoder(), "ct-channel")
    blocks = quantize(decoder(), "ct-block")
    for leaf in ("k_proj", "v_proj"):
        for part in ("weight", "weight_scale"):
            folder.tensors[f"{A0}.{leaf}.{part}"] = blocks.tensors[f"{A0}.{leaf}.{part}"]
    groups = folder.quant["config_groups"]
    groups["group_0"]["targets"] = ["re:.*(q_proj|o_proj|gate_proj|up_proj|down_proj)$"]
    groups["group_1"] = blocks.quant["config_groups"]["group_0"] | {"targets": ["re:.*(k_proj|v_proj)$"]}
    assert "mixed-schemes" in dict(found(run(folder, tmp_path), "error"))
    assert run(folder, tmp_path, "transformers").verdict == "ok"


def test_heads_embeddings_and_routers(tmp_path):
    native, named = decoder(), decoder()
    native.linears.append("lm_head")
    assert run(quantize(native, "block", skip=[]), tmp_path).verdict == "error"
    named.linears.append("lm_head")
    quantize(named, "ct-channel", skip=[])
    assert run(named, tmp_path).verdict == "error"
    assert run(named, tmp_path, "transformers").verdict == "ok"
    named.quant["config_groups"]["group_0"]["targets"].append("re:.*lm_head")
    assert run(named, tmp_path).verdict == "ok"
    embedding = decoder()
    embedding.linears.append("model.embed_tokens")
    assert "fp8-embedding" in dict(found(run(quantize(embedding, "block"), tmp_path), "error"))
    mixtral = decoder("mixtral", experts=4)
    mixtral.linears.append("model.layers.0.block_sparse_moe.gate")
    assert "codes-as-weights" in dict(found(run(quantize(mixtral, "block", skip=["lm_head"]), tmp_path), "error"))
    listed_not = quantize(decoder("qwen3_moe", experts=4), "block", skip=["lm_head"])
    assert any("mlp.gate" in w for _, w in found(run(listed_not, tmp_path), "error")), "vLLM quantizes this router"


def test_experts_are_all_quantized_or_none(tmp_path):
    keep = [m for m in decoder("qwen3_moe", experts=4).linears if ".experts.3." in m]
    folder = quantize(decoder("qwen3_moe", experts=4), "ct-channel", keep=keep)
    assert any("experts.3" in w for _, w in found(run(folder, tmp_path), "error"))
    whole = quantize(
        decoder("qwen3_moe", experts=4),
        "ct-channel",
        keep=[m for m in decoder("qwen3_moe", experts=4).linears if "experts" in m],
    )
    assert run(whole, tmp_path).verdict == "ok"
    lost = quantize(decoder("qwen3_moe", experts=4), "block")
    lost.tensors.pop(f"{M0}.experts.2.up_proj.weight")
    assert ("weight-missing", f"{M0}.experts.2.up_proj.weight") in found(run(lost, tmp_path), "error")


def test_experts_in_transformers(tmp_path):
    """Seen with Transformers 5.24: channel scales load, block scales stop, a mixture gives NaN."""
    moe = lambda kind, **more: quantize(decoder("qwen3_moe", experts=4), kind, **more)  # noqa: E731
    assert run(moe("ct-channel"), tmp_path, "transformers").verdict == "ok"
    assert "expert-blocks" in dict(found(run(moe("ct-block"), tmp_path, "transformers"), "error"))
    keep = [m for m in decoder("qwen3_moe", experts=4).linears if ".experts.3." in m]
    for kind in ("ct-channel", "block"):
        assert "mixed-experts" in dict(found(run(moe(kind, keep=keep), tmp_path, "transformers"), "error"))


def test_scalars_and_tied_heads_in_transformers(tmp_path):
    """Seen with Transformers 5.24: compressed-tensors wants [1], native fp8 on a GPU a 0-d scale."""
    scalar = quantize(decoder(), "ct-tensor")
    scalar.tensors = {n: x.reshape(()) if n.endswith("_scale") else x for n, x in scalar.tensors.items()}
    assert run(scalar, tmp_path, "transformers").verdict == "error"
    assert run(scalar, tmp_path, "vllm").verdict == "ok"
    native = quantize(decoder(), "tensor")
    native.rename("weight_scale", "weight_scale_inv")
    native.quant["weight_block_size"] = None
    assert run(native, tmp_path, "transformers").verdict == "ok"
    assert run(native, tmp_path, "vllm").verdict == "error"
    tied = quantize(decoder("qwen2", tie=True), "ct-channel", skip=[])
    assert "tied-head" in dict(found(run(tied, tmp_path, "transformers"), "error"))
    assert run(tied, tmp_path, "vllm").verdict == "ok"


def test_stacked_experts_left_in_16_bit(tmp_path):
    folder = decoder("qwen3_moe", experts=4)
    at = f"{M0}.experts"
    gate, up, down = (
        torch.stack([folder.tensors.pop(f"{at}.{e}.{p}.weight") for e in range(4)])
        for p in ("gate_proj", "up_proj", "down_proj")
    )
    folder.tensors |= {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    folder.linears = [m for m in folder.linears if "experts" not in m]
    report = run(quantize(folder, "block"), tmp_path)
    assert any("experts" in w for _, w in found(report, "error"))
    folder.quant["modules_to_not_convert"].append(at)
    report = run(folder, tmp_path)
    assert report.verdict == "ok", found(report)


# ------------------------------------------------------------------------------------------- shapes and tensor parallel
def test_tensor_parallel_sizes(tmp_path):
    block = quantize(decoder("qwen3", inter=512), "block")
    assert run(block, tmp_path).engines["vllm"].max_tp == 1
    assert any("k_proj" in w for _, w in found(run(block, tmp_path, tp=2), "error"))
    wide = quantize(decoder("qwen3", kv=4, inter=512), "block")
    assert run(wide, tmp_path, tp=2).verdict == "ok"
    assert run(wide, tmp_path).engines["vllm"].max_tp == 2
    channel = quantize(decoder(), "ct-channel")
    assert run(channel, tmp_path, tp=4).verdict == "ok"
    assert "tp-heads" in dict(found(run(channel, tmp_path, tp=3), "error"))


def test_ragged_shapes_with_block_scales(tmp_path):
    one_head = quantize(decoder("qwen3", kv=1), "block")
    assert "merged-rows" in dict(found(run(one_head, tmp_path), "error"))
    assert run(one_head, tmp_path, "transformers").verdict == "ok"
    odd = quantize(decoder("qwen3", dim=96), "block")
    assert run(odd, tmp_path, "transformers", "sm80").verdict == "error"
    ragged_k = decoder("qwen3", inter=320)
    report = run(quantize(ragged_k, "block"), tmp_path)
    assert {"ragged-k", "merged-rows"} <= set(dict(found(report, "error")))


# ------------------------------------------------------------------------------------------------ devices and numbers
@pytest.mark.parametrize(
    ("kind", "gpu", "mode", "verdict"),
    [
        ("block", "sm90", "w8a8", "ok"),
        ("block", "l40s", "w8a16", "warn"),
        ("ct-channel", "rtx3090", "w8a16", "ok"),
        ("ct-channel", "sm75", "w8a16", "ok"),
        ("ct-channel", "sm89", "w8a8", "ok"),
        ("block", "sm120", "w8a8", "ok"),
        ("ct-static", "b200", "w8a8", "ok"),
        ("ct-channel", "cpu", "w8a8", "ok"),
        ("block", "cpu", "w8a8", "warn"),
    ],
)
def test_kernel_and_mode(kind, gpu, mode, verdict, tmp_path):
    report = run(quantize(decoder("qwen3"), kind), tmp_path, gpu=gpu)
    assert (report.engines["vllm"].mode, report.verdict) == (mode, verdict), found(report)


def test_without_a_gpu_every_known_one_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = run(quantize(decoder(), "ct-block"), tmp_path, "all", None)
    assert report.engines["sglang"].gpus["sm80"].verdict == "error"
    assert report.engines["sglang"].gpus["sm90"].verdict == "ok"
    assert {"sm75", "sm89", "sm103", "sm121"} <= set(report.engines["vllm"].gpus)
    assert report.verdict == "ok"


def test_merged_per_tensor_scales(tmp_path):
    folder = quantize(decoder(), "tensor")
    assert "merged-scale-ratio" not in dict(found(run(folder, tmp_path)))
    folder.tensors[f"{A0}.k_proj.weight_scale"] = folder.tensors[f"{A0}.k_proj.weight_scale"] / 100
    assert "merged-scale-ratio" in dict(found(run(folder, tmp_path), "warn"))
    assert run(folder, tmp_path, gpu="sm80").verdict == "ok", "weight-only kernels expand the scales"


def test_power_of_two_requantization_is_predicted(tmp_path):
    plain = run(quantize(decoder("qwen3"), "block"), tmp_path, gpu="sm100")
    text = next(f.message for f in plain.findings if f.code == "po2-requantization")
    assert "2." in text and plain.verdict == "ok"
    po2 = run(quantize(decoder("qwen3"), "block", po2=True), tmp_path, gpu="sm100")
    assert "po2-requantization" not in dict(found(po2))


def test_kv_cache_scales(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    folder = quantize(decoder(layers=2), "ct-channel")
    folder.quant["kv_cache_scheme"] = scheme
    assert "kv-scales-missing" in dict(found(run(folder, tmp_path), "warn"))
    for layer in range(2):
        for n in "kv":
            folder.tensors[f"model.layers.{layer}.self_attn.{n}_scale"] = torch.tensor([0.05])
    assert run(folder, tmp_path).verdict == "ok"
    assert "kv-cache-gpu" in dict(found(run(folder, tmp_path, gpu="a100"), "warn"))
    folder.tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([0.05, 0.05])
    assert "kv-scale-shape" in dict(found(run(folder, tmp_path), "error"))
    del folder.tensors["model.layers.1.self_attn.v_scale"]
    assert "kv-scales-missing" in dict(found(run(folder, tmp_path), "warn"))
    folder.quant["kv_cache_scheme"] = scheme | {"num_bits": 4}
    assert "kv-scheme" in dict(found(run(folder, tmp_path), "error"))


def test_float16_costs_block_kernels(tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    folder.config["torch_dtype"] = "float16"
    assert "dtype-float16" in dict(found(run(folder, tmp_path), "warn"))
    assert run(folder, tmp_path, gpu="sm80").verdict == "ok"


# ----------------------------------------------------------------------------------------------------------- reference
def reference_error(tmp_path, change, *, square=False):
    source = decoder("qwen3", kv=4) if square else decoder("qwen3")
    source.write(tmp_path / "bf16")
    folder = quantize(source, "block")
    change(folder)
    return run(folder, tmp_path, reference=tmp_path / "bf16")


def test_reference_agrees(tmp_path):
    report = reference_error(tmp_path, lambda f: None)
    assert report.verdict == "ok", found(report)
    assert 0.02 < report.reference_error[Q] < 0.03


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (edit(f"{Q}.weight", transposed), "reference-error", "transposed"),
        (edit(f"{Q}.weight_scale_inv", lambda s: s / 448), "reference-error", "divided by 448"),
        (edit("model.norm.weight", lambda x: x * 1.5), "reference-differs", "16-bit"),
        (drop("model.norm.weight"), "tensor-lost", "does not"),
        (edit(f"{Q}.weight", lambda x: (x.float() * 0.9).to(torch.float8_e4m3fn)), "reference-error", "%"),
    ],
    ids=["transposed", "scale", "norm", "lost", "scaled"],
)
def test_reference_differs(change, code, text, tmp_path):
    report = reference_error(tmp_path, change, square=True)
    assert report.verdict == "error"
    assert any(f.code == code and text in f.message for f in report.findings), report.findings


def test_tokenizer_and_chat_template_against_the_reference(tmp_path):
    source = decoder("qwen3")
    source.files = {
        "tokenizer.json": {"model": {"vocab": {"a": 1}}},
        "tokenizer_config.json": {"chat_template": "{{ x }}"},
        "generation_config.json": {"eos_token_id": 2},
    }
    source.write(tmp_path / "bf16")
    folder = quantize(source, "block")
    assert run(folder, tmp_path, reference=tmp_path / "bf16").verdict == "ok"
    folder.files["tokenizer_config.json"] = {"chat_template": "{{ y }}"}
    folder.files["generation_config.json"] = {"eos_token_id": 3}
    report = run(folder, tmp_path, reference=tmp_path / "bf16")
    assert {"chat-template-changed", "generation-config-changed"} <= set(dict(found(report, "warn")))
    folder.files = {}
    for path in (tmp_path / "ckpt").iterdir():
        path.unlink()
    report = run(folder, tmp_path, reference=tmp_path / "bf16")
    assert {"file-lost", "chat-template-lost"} <= set(dict(found(report, "warn")))


# --------------------------------------------------------------------------------------------------------------- files
def test_shards(tmp_path):
    folder = quantize(decoder("qwen3", layers=2), "block")
    folder.two_shards(lambda n: n.endswith("_inv"))
    assert run(folder, tmp_path / "split").verdict == "ok"
    last = folder.two_shards(lambda n: "layers.1" in n)[1]
    folder.index = {n: f for n, f in folder.index.items() if f != last}
    assert ("shard-not-in-index", last) in found(run(folder, tmp_path / "unlisted"), "error")
    folder.index = None
    assert "index-missing" in dict(found(run(folder, tmp_path / "none"), "error"))


def test_stale_index(tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    last = folder.two_shards(lambda n: ".mlp." in n)[1]
    folder.index[f"{M0}.lost.weight_scale_inv"] = last
    assert "index-mismatch" in dict(found(run(folder, tmp_path), "error"))


def test_a_block_beyond_any_matrix(tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    folder.quant["weight_block_size"] = [1 << 70, 128]
    assert "block-size" in dict(found(run(folder, tmp_path), "error"))


def test_too_broken_to_read_is_a_verdict(tmp_path):
    def check(path, code):
        report = verify(VerifyConfig(folder=path, engine="vllm", gpu="sm90"))
        assert report.verdict == "error" and code in dict(found(report, "error")), found(report)

    check(tmp_path / "nothing", "unreadable")
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty", "no-weights")
    path = quantize(decoder(), "block").write(tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    check(path, "truncated")
    (path / "config.json").write_text("{")
    check(path, "bad-json")
    file.write_bytes(b"")
    check(path, "truncated")


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj", "self_attn.q_norm", "input_layernorm"])
def test_missing_weight(name, tmp_path):
    folder = quantize(decoder("qwen3"), "block")
    folder.tensors = {n: x for n, x in folder.tensors.items() if not n.startswith(f"model.layers.0.{name}.")}
    for engine in ("vllm", "transformers"):
        assert ("weight-missing", f"model.layers.0.{name}.weight") in found(run(folder, tmp_path, engine), "error")


def test_missing_bias(tmp_path):
    folder = quantize(decoder("qwen2"), "ct-channel")
    assert run(folder, tmp_path).verdict == "ok"
    del folder.tensors[f"{Q}.bias"]
    for engine in ("vllm", "transformers"):
        assert ("bias-missing", f"{Q}.bias") in found(run(folder, tmp_path, engine), "error")


def test_uniform_weights_are_not_clipped(tmp_path):
    """As layers are initialized: 3.6 % of their codes are 448, and the largest of every tile; 7 % are 416."""
    torch.manual_seed(0)
    folder = decoder("qwen3")
    for name in folder.linears:
        x = folder.tensors[f"{name}.weight"]
        folder.tensors[f"{name}.weight"] = torch.rand_like(x) * 0.1 - 0.05
    for kind in ("block", "ct-channel"):
        report = run(quantize(copy.deepcopy(folder), kind), tmp_path)
        assert report.verdict == "ok", found(report)


def test_missing_embedding_head_and_prefix(tmp_path):
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        folder = quantize(decoder("qwen3"), "ct-channel")
        del folder.tensors[f"{name}.weight"]
        assert any(name in w for _, w in found(run(folder, tmp_path), "error"))
    folder = quantize(decoder("qwen3"), "ct-channel")
    folder.rename("model.", "model.language_model.")
    assert "name-prefix" in dict(found(run(folder, tmp_path), "error"))


def test_missing_layer(tmp_path):
    folder = quantize(decoder("qwen3", layers=2), "block")
    folder.config["num_hidden_layers"] = 3
    assert ("layer-missing", "model.layers.2") in found(run(folder, tmp_path), "error")


def test_wrong_settings(tmp_path):
    folder = quantize(decoder(), "ct-channel").write(tmp_path / "x")
    for bad in (
        {"engine": "vlm"},
        {"gpu": "h1000"},
        {"engine_version": "0.33.0"},
        {"engine": "vllm", "engine_version": "new"},
    ):
        with pytest.raises(ConfigError):
            verify(VerifyConfig(folder=folder, **{"gpu": "sm90"} | bad))
    with pytest.raises(CheckpointError):
        verify(VerifyConfig(folder=folder, gpu="sm90", reference=tmp_path / "none"))
    report = verify(VerifyConfig(folder=folder, engine="vllm", engine_version="0.99.1", gpu="sm90"))
    assert report.verdict == "warn" and found(report, "warn")[0][0] == "unknown-version"
    versions = verify(VerifyConfig(folder=folder, engine_version="vllm=0.32.1,sglang=0.5.23", gpu="sm90"))
    assert versions.engines["vllm"].version == "0.32.1" and versions.verdict == "ok"


def test_quick_reads_no_weights(tmp_path):
    folder = quantize(decoder(), "ct-channel")
    folder.tensors[f"{Q}.weight"] = nan_code(folder.tensors[f"{Q}.weight"])
    assert run(folder, tmp_path, quick=True).verdict == "ok"
    assert run(folder, tmp_path).verdict == "error"


def test_report_is_json(tmp_path):
    document = json.loads(run(quantize(decoder(), "block"), tmp_path, "all").to_json())
    assert {"verdict", "findings", "engines"} <= set(document)
    assert {"severity", "code", "where", "message", "fix"} <= set(document["findings"][0])


def test_same_defect_in_many_places_is_counted(tmp_path):
    folder = quantize(decoder("qwen3_moe", experts=16), "block")
    folder.tensors = {n: x for n, x in folder.tensors.items() if not ("experts" in n and n.endswith("_inv"))}
    report = run(folder, tmp_path)
    assert sum(f.code == "scale-missing" for f in report.findings) == 21
    assert any("more like this" in f.message for f in report.findings)


def test_fast_decode_is_exact():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = decode(codes, E4M3)
    assert torch.equal(torch.from_numpy(decode_fast(codes.numpy())), expected.nan_to_num(480.0) * expected_sign(codes))
    x = torch.tensor([1.5, -0.0, 3e38, 1e-40]).bfloat16()
    assert torch.equal(torch.from_numpy(as_float32(x)), x.float())


def expected_sign(codes):
    return torch.where(codes == 0xFF, -1.0, 1.0)


def test_transposed_square_channel_matrix(tmp_path):
    folder = decoder("qwen3", kv=4)
    folder.tensors[f"{Q}.weight"] = (
        matrix("q", HIDDEN, HIDDEN).float() * torch.logspace(-2, 0, HIDDEN)[:, None]
    ).bfloat16()
    quantize(folder, "ct-channel")
    assert run(folder, tmp_path).verdict == "ok"
    folder.tensors[f"{Q}.weight"] = transposed(folder.tensors[f"{Q}.weight"])
    assert "weight-transposed" in dict(found(run(folder, tmp_path), "error"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("kind", "inputs"),
    [("ct-channel", None), ("ct-tensor", None), ("ct-block", None), ("ct-tensor", "token"), ("ct-channel", "static")],
)
def test_pairs_that_no_grouped_kernel_takes(engine, kind, inputs, tmp_path):
    folder = quantize(decoder("qwen3_moe", experts=4), kind)
    group = folder.quant["config_groups"]["group_0"]
    if inputs is None:
        group["input_activations"] = None
    else:
        group["input_activations"] |= {"strategy": "tensor" if inputs == "static" else inputs}
        group["input_activations"]["dynamic"] = inputs != "static"
    report = run(folder, tmp_path, engine, quick=True)
    assert "expert-schemes" in dict(found(report, "error"))


ODD = {
    "0-d norm": ("model.norm.weight", lambda x: x[0], "weight-rank"),
    "0-d linear": (f"{Q}.weight", lambda x: x[0, 0], "weight-rank"),
    "flat linear": (f"{Q}.weight", lambda x: x.reshape(-1), "weight-rank"),
    "3-d head": ("lm_head.weight", lambda x: x[None], "weight-rank"),
    "empty linear": (f"{Q}.weight", lambda x: x[:0], "empty-tensor"),
    "bool linear": (f"{Q}.weight", lambda x: x > 0, "not-numbers"),
    "complex embedding": ("model.embed_tokens.weight", lambda x: x.to(torch.complex64), "not-numbers"),
    "integer norm": ("model.norm.weight", lambda x: x.long(), "not-numbers"),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_fit_no_parameter(name, tmp_path):
    """What stays in 16 bit must be what a loader can copy, too. The converter refuses it before it starts."""
    tensor, change, code = ODD[name]
    folder = decoder("qwen3")
    folder.tensors[tensor] = change(folder.tensors[tensor])
    if not name.endswith("linear"):
        quantize(folder, "block")
    report = run(folder, tmp_path)
    assert (code, tensor) in found(report, "error"), found(report)
    folder.config.pop("quantization_config", None)
    plain = decoder("qwen3")
    plain.tensors[tensor] = folder.tensors[tensor]
    with pytest.raises(OctavoError):
        quantize_checkpoint(QuantizeConfig(model=str(plain.write(tmp_path / "plain")), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
