"""Accounting: what a model is made of, exactly. Parameters per role, the sizes that activations depend on, adapters.

From the headers of safetensors files where there are any, else by the formulas of shapes.py. Nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from octavo.base.errors import ConfigError
from octavo.formats.architectures import ADAPTED_STACKS, layer_index, role
from octavo.workflows.planner.config import head_dim, number, text_config
from octavo.workflows.planner.shapes import FAMILIES, Family, is_tied, shapes_of

Shapes = Mapping[str, tuple[int, ...]]
QUANTIZED = frozenset({"linear", "expert"})  # roles that a recipe gives FP8 codes; formats.recipe, without torch
# Companions of quantized weights in a checkpoint: not parameters.
SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale", "q_scale", "activation_scale")
PACKED = ("weight_packed", "qweight", "qzeros", "weight_shape", "SCB")


@dataclass(frozen=True)
class Width:
    """One kind of decoder layer. layers: how many. ffn: width of the MLP that one token passes, all its experts
    together. routed: of them, copies of the token that the router sends out. adapted_in, adapted_out: inputs and
    outputs of the linears that get an adapter, summed; adapters: their number. parameters: of one layer; experts: of
    all its experts. active: linear parameters that one token multiplies. linear: (rows, columns) of the largest."""

    layers: int
    ffn: int
    routed: int
    adapted_in: int
    adapted_out: int
    adapters: int
    parameters: int
    active: int
    experts: int
    linear: tuple[int, int]


@dataclass(frozen=True)
class Model:
    """name: as given. config: config.json. shapes: every tensor. exact: from headers. tied: the head is the embedding.
    target_modules: the linears that get adapters, by the end of their names; none: all."""

    name: str
    config: Mapping[str, Any]
    shapes: Shapes
    exact: bool
    target_modules: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], targets: tuple[str, ...] = ()) -> Model:
        """By formula. ConfigError for a family that has none, and for packed weights."""
        stored = config.get("quantization_config") or {}
        if not isinstance(stored, dict):
            raise ConfigError("config.json: quantization_config", got=repr(stored)[:60], need="an object")
        method = stored.get("quant_method")
        if method not in (None, "fp8", "compressed-tensors", "modelopt"):
            fix = "Plan with the original 16-bit model: that is what is fine-tuned."
            raise ConfigError(f"model {name}: quantization '{method}' is not supported", fix=fix)
        return cls(name, config, shapes_of(config), False, targets)

    @classmethod
    def from_headers(cls, name: str, config: Mapping[str, Any], shapes: Shapes, targets: tuple[str, ...] = ()) -> Model:
        """By the tensors that are there. ConfigError for weights packed in a way that hides their number."""
        kept = {}
        for tensor, shape in shapes.items():
            leaf = tensor.rpartition(".")[2]
            if leaf in PACKED:
                fix = "Plan with the original 16-bit model: that is what is fine-tuned."
                raise ConfigError(f"model {name}: packed weights ({tensor}) are not supported", fix=fix)
            if leaf not in SCALES:
                kept[tensor] = shape
        return cls(name, config, kept, True, targets)

    @cached_property
    def text(self) -> Mapping[str, Any]:
        return text_config(self.config)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Tensor -> role, for all that a training run holds: multi-token prediction is left out when loading."""
        found = {name: role(name, shape, self.layers) for name, shape in self.shapes.items()}
        tied = self.tied
        return {n: r for n, r in found.items() if r != "mtp" and not (tied and r == "head")}

    @cached_property
    def by_role(self) -> dict[str, int]:
        """Role -> parameters."""
        counts: dict[str, int] = {}
        for name, kind in self.roles.items():
            counts[kind] = counts.get(kind, 0) + prod(self.shapes[name])
        return counts

    @property
    def parameters(self) -> int:
        return sum(self.by_role.values())

    @property
    def quantized(self) -> int:
        """Parameters that become FP8 codes."""
        return sum(self.by_role.get(kind, 0) for kind in QUANTIZED)

    @cached_property
    def scales(self) -> int:
        """Float32 scales, one per row of every quantized matrix."""
        return sum(prod(self.shapes[n][:-1]) for n, kind in self.roles.items() if kind in QUANTIZED)

    @property
    def tied(self) -> bool:
        return is_tied(self.config)

    @property
    def hidden(self) -> int:
        return number(self.text, "hidden_size", "n_embd", "d_model")

    @property
    def layers(self) -> int:
        return number(self.text, "num_hidden_layers", "n_layer")

    @property
    def vocab(self) -> int:
        return number(self.text, "vocab_size")

    @property
    def heads(self) -> int:
        return number(self.text, "num_attention_heads", "n_head")

    @property
    def longest(self) -> int | None:
        value = self.text.get("max_position_embeddings")
        return value if isinstance(value, int) else None

    @cached_property
    def attention(self) -> tuple[int, int, int, int]:
        """Widths of queries, keys, values and the attention's output, as the kernel sees them."""
        if self.text.get("kv_lora_rank"):
            qk = number(self.text, "qk_rope_head_dim") + number(self.text, "qk_nope_head_dim")
            v = number(self.text, "v_head_dim")
            return self.heads * qk, self.heads * qk, self.heads * v, self.heads * v
        width = head_dim(self.text)
        kv = number(self.text, "num_key_value_heads", default=self.heads) * width
        return self.heads * width, kv, kv, self.heads * width

    @property
    def family(self) -> Family:
        return FAMILIES.get(str(self.text.get("model_type")), Family())

    @cached_property
    def adapted(self) -> dict[str, tuple[int, int]]:
        """Linear -> (rows, columns) of every one that gets an adapter; stacked experts and the head do not."""
        found = {}
        for name, kind in self.roles.items():
            shape = self.shapes[name]
            module = name.removesuffix(".weight")
            # PEFT adapts nn.Linear. Transformers' routers are none, but for the gate of Qwen2-MoE's shared expert.
            linear = kind == "linear" or module.endswith(".shared_expert_gate")
            linear = linear or (kind == "tower" and len(shape) == 2 and "embed" not in name)
            linear = linear and not (self.stacked and ".mlp." in module)
            if linear and module != name and self._targeted(module):
                found[module] = (shape[0], shape[1])
        if not found:
            raise ConfigError("target_modules fit no linear layer", got=", ".join(self.target_modules))
        return found

    def adapter_parameters(self, rank: int, precision: str = "bf16") -> int:
        """Of LoRA: rank * (in + out) for every adapted linear. For experts that PEFT adapts too, a rank for each,
        doubled for gate and up, which are one tensor; FP8 ones are left alone."""
        total = sum(rank * (rows + cols) for rows, cols in self.adapted.values())
        if not self.adapts_experts(precision):
            return total
        for name, kind in self.roles.items():
            shape = self.shapes[name]
            if kind == "router" and name.endswith(".weight"):
                total += rank * (shape[0] + shape[1])
            elif kind == "expert":
                count, rows, cols = shape if len(shape) == 3 else (1, *shape)
                leaf = name.removesuffix(".weight").rpartition(".")[2]
                if leaf == "gate_up_proj":
                    total += 2 * rank * count * (rows + cols)
                elif leaf in ("down_proj", "w2"):
                    total += rank * count * (rows + cols)
                else:  # gate or up on its own, half of what Transformers stacks
                    total += rank * count * (2 * rows + cols)
        return total

    @property
    def stacked(self) -> bool:
        """Whether PEFT takes the linears of an MLP for stacked experts."""
        return str(self.text.get("model_type")) in ADAPTED_STACKS

    def adapts_experts(self, precision: str) -> bool:
        """Whether LoRA trains the experts: then each pass makes new weights for all of them."""
        return self.stacked and precision == "bf16" and not self.target_modules

    @cached_property
    def widths(self) -> list[Width]:
        """The kinds of decoder layers, dense ones and mixtures of experts."""
        layers: dict[int, list[str]] = {}
        for name in self.roles:
            index = layer_index(name)
            if index is not None:
                layers.setdefault(index, []).append(name)
        if len(layers) != self.layers:
            raise ConfigError(
                f"model {self.name}", got=f"{len(layers)} layers", need=f"{self.layers}, as its config says"
            )
        kinds: dict[tuple[Any, ...], list[Width]] = {}
        for names in layers.values():
            width = self._width(names)
            kinds.setdefault((width.ffn, width.parameters), []).append(width)
        return [Width(len(same), *list(vars(same[0]).values())[1:]) for same in kinds.values()]

    def _width(self, names: Collection[str]) -> Width:
        matrices = {n: self.shapes[n] for n in names if self.roles[n] in QUANTIZED}
        expert_count = max((s[0] for n, s in matrices.items() if len(s) == 3), default=0) or len(
            {n.split(".experts.")[1].split(".")[0] for n in matrices if ".experts." in n and len(self.shapes[n]) == 2}
        )
        chosen = number(self.text, "num_experts_per_tok", "top_k_experts", default=2) if expert_count else 0
        active = 0
        for name, shape in matrices.items():
            share = chosen / expert_count if self.roles[name] == "expert" else 1
            active += round(prod(shape) * share)
        adapted = [self.adapted[n.removesuffix(".weight")] for n in names if n.removesuffix(".weight") in self.adapted]
        attention = sum(
            prod(s) for n, s in matrices.items() if ".experts." not in n and ("attn" in n or "attention" in n)
        )
        # A gated MLP multiplies three matrices of hidden x ffn: what is not attention is MLP.
        ffn = (active - attention) // (3 * self.hidden)
        largest = max((s[-2:] for s in matrices.values()), key=prod)
        return Width(
            layers=1,
            ffn=ffn,
            routed=chosen,
            adapted_in=sum(cols for _, cols in adapted),
            adapted_out=sum(rows for rows, _ in adapted),
            adapters=len(adapted),
            parameters=sum(prod(self.shapes[n]) for n in names),
            active=active,
            experts=sum(prod(s) for n, s in matrices.items() if self.roles[n] == "expert"),
            linear=(largest[0], largest[1]),
        )

    def _targeted(self, module: str) -> bool:
        return not self.target_modules or any(
            module == target or module.endswith("." + target) for target in self.target_modules
        )
