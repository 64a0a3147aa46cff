"""Tiny checkpoints for verify: good ones of every layout and architecture kind, and one defect at a time."""

import json
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3

HIDDEN, INTER, VOCAB = 256, 384, 128
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Folder:
    """A checkpoint in memory: config, tensors, and the shards that `write` makes of them."""

    config: dict
    tensors: dict
    linears: list
    keep: list = field(default_factory=lambda: ["lm_head"])
    shards: dict | None = None
    index: dict | None = None
    files: dict = field(default_factory=dict)

    @property
    def quant(self):
        return self.config["quantization_config"]

    def rename(self, old, new):
        self.tensors = {name.replace(old, new): x for name, x in self.tensors.items()}

    def two_shards(self, second):
        names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        parts = [n for n in self.tensors if not second(n)], [n for n in self.tensors if second(n)]
        self.shards = dict(zip(names, parts, strict=True))
        self.index = {name: file for file, part in self.shards.items() for name in part}
        return names

    def write(self, path):
        path.mkdir(parents=True, exist_ok=True)
        for file, names in (self.shards or {"model.safetensors": list(self.tensors)}).items():
            save_file({n: self.tensors[n].contiguous() for n in names}, path / file, metadata={"format": "pt"})
        if self.index is not None:
            size = sum(x.numel() * x.element_size() for x in self.tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": self.index}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, value in {"config.json": self.config, **self.files}.items():
            (path / name).write_text(json.dumps(value))
        return path


def matrix(name, rows, cols):
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + rows)
    x = torch.randn(rows, cols, generator=generator) * 0.03
    x[:: max(rows // 7, 1), :: max(cols // 5, 1)] *= 6
    return x.bfloat16()


def decoder(
    model_type="llama",
    *,
    layers=1,
    inter=INTER,
    heads=4,
    kv=2,
    dim=64,
    tie=False,
    experts=0,
    root="model",
    hidden=HIDDEN,
    expert_inter=128,
):
    """A decoder in BF16. experts: a mixture of that many, named as the family names them."""
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    config = {
        "architectures": [f"{names[model_type]}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tie,
        "torch_dtype": "bfloat16",
    }
    if experts:
        key = "num_local_experts" if model_type == "mixtral" else "num_experts"
        config |= {key: experts, "num_experts_per_tok": 2, "moe_intermediate_size": expert_inter}
        if model_type == "mixtral":
            config["intermediate_size"] = expert_inter
    folder = Folder(config, {f"{root}.embed_tokens.weight": matrix("embed", VOCAB, hidden)}, [])
    for layer in range(layers):
        at = f"{root}.layers.{layer}"
        shapes = {
            "q_proj": (heads * dim, hidden),
            "k_proj": (kv * dim, hidden),
            "v_proj": (kv * dim, hidden),
            "o_proj": (hidden, heads * dim),
        }
        add(folder, f"{at}.self_attn", shapes)
        for leaf in ("q_proj", "k_proj", "v_proj") if model_type == "qwen2" else ():
            folder.tensors[f"{at}.self_attn.{leaf}.bias"] = torch.zeros(shapes[leaf][0]).bfloat16()
        for norm in ("q_norm", "k_norm") if model_type.startswith("qwen3") else ():
            folder.tensors[f"{at}.self_attn.{norm}.weight"] = torch.ones(dim).bfloat16()
        _add_mlp(folder, at, model_type, (hidden, inter, expert_inter), experts)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            folder.tensors[f"{at}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    folder.tensors[f"{root}.norm.weight"] = torch.ones(hidden).bfloat16()
    if not tie:
        folder.tensors["lm_head.weight"] = matrix("head", VOCAB, hidden)
    return folder


def add(folder, at, shapes):
    for leaf, shape in shapes.items():
        folder.tensors[f"{at}.{leaf}.weight"] = matrix(f"{at}.{leaf}", *shape)
        folder.linears.append(f"{at}.{leaf}")


def _add_mlp(folder, at, model_type, sizes, experts):
    hidden, inter, expert_inter = sizes
    if not experts:
        add(folder, f"{at}.mlp", dict(zip(MLP, [(inter, hidden), (inter, hidden), (hidden, inter)], strict=True)))
        return
    block, leaves = ("block_sparse_moe", ("w1", "w3", "w2")) if model_type == "mixtral" else ("mlp", MLP)
    folder.tensors[f"{at}.{block}.gate.weight"] = matrix("router", experts, hidden)
    folder.keep.append(f"{at}.{block}.gate")
    for expert in range(experts):
        shapes = dict(
            zip(leaves, [(expert_inter, hidden), (expert_inter, hidden), (hidden, expert_inter)], strict=True)
        )
        add(folder, f"{at}.{block}.experts.{expert}", shapes)


def ct_config(strategy, ignore, *, static=False, activations=True):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    act = {"channel": "token", "tensor": "tensor", "block": "group"}[strategy]
    inputs = {"num_bits": 8, "type": "float", "strategy": act, "symmetric": True, "dynamic": not static}
    if strategy == "block":
        weights["block_structure"], inputs["group_size"] = [128, 128], 128
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if activations else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def native_config(skip, *, block=True, static=False):
    config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        config["weight_block_size"] = [128, 128]
    return config | {"modules_to_not_convert": list(skip)}


def quantize(folder, kind, *, keep=(), skip=None, po2=False, block=128):
    """kind: block, tensor, static (native), ct-channel, ct-block, ct-tensor, ct-static, modelopt."""
    skip = folder.keep + list(keep) if skip is None else skip
    granularity = PerBlock(block, block) if "block" in kind else PerRow() if "channel" in kind else PerTensor()
    common = _common_amax(folder) if granularity == PerTensor() else {}
    for module in folder.linears:
        if module in keep:
            continue
        x = folder.tensors[f"{module}.weight"].float()
        scale = torch.tensor(common[module] / 448) if common else None
        q = quantize_ref(x, E4M3, granularity, scale_format="po2" if po2 else "fp32", scale=scale)
        leaf = "weight_scale_inv" if kind == "block" else "weight_scale"
        ct_scalar = kind in ("ct-tensor", "ct-static")
        folder.tensors[f"{module}.weight"] = q.as_float8()
        folder.tensors[f"{module}.{leaf}"] = q.scale.reshape(1) if ct_scalar else q.scale
        if kind in ("static", "ct-static", "modelopt"):
            folder.tensors[f"{module}.input_scale"] = torch.tensor([0.02] if ct_scalar else 0.02)
    folder.config["quantization_config"] = _config(kind, skip, block)
    return folder


def _config(kind, skip, block):
    if kind == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(skip)}
    if kind.startswith("ct-"):
        strategy = kind.removeprefix("ct-")
        config = ct_config("tensor" if strategy == "static" else strategy, skip, static=strategy == "static")
        group = config["config_groups"]["group_0"]
        if strategy == "block":
            group["weights"]["block_structure"], group["input_activations"]["group_size"] = [block, block], block
        return config
    config = native_config(skip, block=kind == "block", static=kind == "static")
    return config | ({"weight_block_size": [block, block]} if kind == "block" else {})


def _common_amax(folder):
    """One amax per merged group, as converters should choose it."""
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
    result = {}
    for module in folder.linears:
        parent, _, leaf = module.rpartition(".")
        group = next((g for g in groups if leaf in g), (leaf,))
        result[module] = max(float(folder.tensors[f"{parent}.{g}.weight"].abs().max()) for g in group)
    return result
