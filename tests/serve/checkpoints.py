"""FP8 checkpoints written by hand, and what they should answer: an oracle that shares no code with Octavo or vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E4M3_MAX = 448.0
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Scheme:
    """weights: channel, tensor or block. activations: token, group, tensor, static (per tensor) or none."""

    weights: str
    activations: str
    native: bool = False

    @property
    def name(self) -> str:
        return f"{'native' if self.native else 'ct'}-{self.weights}-{self.activations}"


SCHEMES = (
    Scheme("channel", "token"),
    Scheme("block", "group", native=True),
    Scheme("block", "group"),
    Scheme("tensor", "tensor", native=True),
    Scheme("tensor", "static", native=True),
    Scheme("tensor", "static"),
    Scheme("tensor", "token"),
    Scheme("channel", "none"),
)


def write_checkpoint(source: Path, out: Path, scheme: Scheme, input_scales: dict[str, float] | None = None) -> Path:
    """`source` with every linear of its layers in FP8. input_scales: per linear, for static activations."""
    out.mkdir(parents=True)
    tensors = {k: t for file in source.glob("*.safetensors") for k, t in load_file(file).items()}
    result: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            result[name] = weight
            continue
        siblings = [tensors[other] for other in _fused_with(name) if other in tensors]
        scale = weight_scale(weight, scheme, max(t.abs().max().item() for t in siblings))
        result[name] = to_codes(weight.float() / spread(scale, weight.shape, scheme))
        suffix = "_scale_inv" if scheme.native and scheme.weights == "block" else "_scale"
        result[name + suffix] = scale
        if scheme.activations == "static":
            assert input_scales is not None
            result[name.replace(".weight", ".input_scale")] = torch.tensor(input_scales[name.removesuffix(".weight")])
    save_file({k: t.contiguous() for k, t in result.items()}, out / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and "safetensors" not in file.name:
            shutil.copy(file, out)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = native_config(scheme) if scheme.native else compressed_tensors_config(scheme)
    (out / "config.json").write_text(json.dumps(config))
    return out


def weight_scale(weight: torch.Tensor, scheme: Scheme, fused_max: float) -> torch.Tensor:
    """Absmax scales. Tensors that vLLM fuses share one tensor scale, or vLLM would quantize them a second time."""
    w = weight.float().abs()
    if scheme.weights == "channel":
        return w.amax(1, keepdim=True) / E4M3_MAX
    if scheme.weights == "tensor":
        return torch.tensor(fused_max / E4M3_MAX)
    n, k = weight.shape
    padded = torch.nn.functional.pad(w, (0, -k % 128, 0, -n % 128))
    return padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3)) / E4M3_MAX


def spread(scale: torch.Tensor, shape: torch.Size, scheme: Scheme) -> torch.Tensor:
    """The scale of every element."""
    if scheme.weights == "block":
        return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return scale.expand(shape)


def to_codes(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def native_config(scheme: Scheme) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
    config["activation_scheme"] = "static" if scheme.activations == "static" else "dynamic"
    return config | ({"weight_block_size": [128, 128]} if scheme.weights == "block" else {})


def compressed_tensors_config(scheme: Scheme) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "strategy": scheme.weights, "dynamic": False}
    if scheme.weights == "block":
        weights["block_structure"] = [128, 128]
    inputs: dict[str, Any] | None = {**common, "dynamic": scheme.activations != "static"}
    if scheme.activations == "none":
        inputs = None
    elif scheme.activations == "group":
        inputs |= {"strategy": "group", "group_size": 128}
    else:
        inputs |= {"strategy": "token" if scheme.activations == "token" else "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


class EmulatedLinear(torch.nn.Module):
    """FP32 product of the decoded weight and of the activation as it looks after its trip through FP8."""

    def __init__(self, weight: torch.Tensor, scheme: Scheme, input_scale: float | None) -> None:
        super().__init__()
        self.weight, self.scheme, self.input_scale = weight, scheme, input_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.through_fp8(x), self.weight)

    def through_fp8(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.scheme.activations
        if kind == "none":
            return x
        if kind == "group":
            k = x.shape[-1]
            groups = torch.nn.functional.pad(x, (0, -k % 128)).unflatten(-1, (-1, 128))
            scale = groups.abs().amax(-1, keepdim=True) / E4M3_MAX
            return (to_codes(groups / scale).float() * scale).flatten(-2)[..., :k]
        if kind == "static":
            scale = torch.tensor(self.input_scale)
        else:
            scale = (x.abs().amax(-1, keepdim=True) if kind == "token" else x.abs().amax()) / E4M3_MAX
        return to_codes(x / scale).float() * scale


def oracle(source: Path, scheme: Scheme | None, input_scales: dict[str, float] | None = None) -> Any:
    """The BF16 model of `source` in FP32, with its linears as the checkpoint of that scheme has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if scheme is None:
        return model
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if not name.endswith("proj.weight"):
            continue
        scale = weight_scale(
            weight.data, scheme, max(weights[n].abs().max().item() for n in _fused_with(name) if n in weights)
        )
        scale = spread(scale, weight.shape, scheme)
        layer = name.removesuffix(".weight")
        parent, _, child = layer.rpartition(".")
        emulated = EmulatedLinear(
            to_codes(weight.data / scale).float() * scale, scheme, (input_scales or {}).get(layer)
        )
        setattr(model.get_submodule(parent), child, emulated)
    return model


@torch.inference_mode()
def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    """Of every token after the first, given those before it."""
    logits = model(torch.tensor([ids])).logits[0].float()
    picked = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return picked[:, 0].tolist()


@torch.inference_mode()
def input_ranges(model: Any, ids: list[int]) -> dict[str, float]:
    """Static scale of every linear's input: the absmax over one prompt, over 448."""
    scales: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            scales[name] = inputs[0].abs().max().item() / E4M3_MAX

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if name.endswith("proj") and isinstance(module, torch.nn.Linear)
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return scales


def drop_tensor(source: Path, out: Path, name: str) -> Path:
    """The same checkpoint without one tensor."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _fused_with(name: str) -> list[str]:
    """The names of the tensors that vLLM stores with this one, itself included."""
    for group in FUSED:
        for member in group:
            if name.endswith(f".{member}.weight"):
                return [name.replace(f".{member}.", f".{other}.") for other in group]
    return [name]
