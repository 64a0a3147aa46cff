"""Model: the folder as engines see it: modules with their tensors and roles, fused groups, and config.json, typed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from octavo.formats.architectures import FUSED, expert_block, fused_group, layer_index, role
from octavo.store.tensors import Checkpoint

EIGHT_BIT = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8, torch.int8}
)
SIXTEEN_BIT = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

# Leaves of a quantized linear that are not parameters of the plain one.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight", "weight_scale_2")
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale", "qscale_act")
NOT_LINEAR = frozenset({"embedding", "norm", "other"})
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """`[256, 128] float8_e4m3fn`, for messages."""
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(eq=False)
class Module:
    """name: dotted path. leaves: last part of the tensor's name -> tensor. role: of formats.architectures.

    A stacked expert parameter (`experts.gate_up_proj`, 3-D) is a module whose weight has the leaf `` (empty).
    """

    name: str
    role: str
    leaves: dict[str, Stored] = field(default_factory=dict)

    @cached_property
    def weight(self) -> Stored | None:
        return self.leaves.get("weight") or self.leaves.get("")

    @cached_property
    def scales(self) -> dict[str, Stored]:
        """Weight scales under any known name."""
        return {leaf: self.leaves[leaf] for leaf in WEIGHT_SCALES if leaf in self.leaves}

    @cached_property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def quantized(self) -> bool:
        """Stored in 8 bit, or at least with a scale."""
        weight = self.weight
        return bool(self.scales) or (weight is not None and weight.dtype in EIGHT_BIT)

    @cached_property
    def is_matrix(self) -> bool:
        return self.weight is not None and len(self.weight.shape) == 2


class Model:
    """Built from a Checkpoint by its headers alone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.text: dict[str, Any] = checkpoint.text_config
        self.modules: dict[str, Module] = {}
        self._read(checkpoint)
        self.groups = self._fused()
        self.fused_name = {m.name: fused for fused, members in self.groups.items() for m in members}
        self._linears = [m for m in self.modules.values() if m.is_matrix and m.role not in NOT_LINEAR]

    def _read(self, checkpoint: Checkpoint) -> None:
        layers = checkpoint.layers
        for name in checkpoint.names():
            shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
            module, leaf = split_name(name, shape)
            owner = self.modules.get(module)
            if owner is None:
                owner = self.modules[module] = Module(module, "other")
            owner.leaves[leaf] = Stored(name, shape, dtype)
        for module_name, owner in self.modules.items():
            weight = owner.weight
            if weight is not None:
                owner.role = role(weight.name, weight.shape, layers)
            elif owner.scales:
                owner.role = role(f"{module_name}.weight", (1, 1), layers)

    def _fused(self) -> dict[str, list[Module]]:
        groups: dict[str, list[Module]] = {}
        for name, module in self.modules.items():
            found = fused_group(name)
            if found is None or module.weight is None:
                continue
            fused, shards = found
            members = [self.modules[s] for s in shards if s in self.modules and self.modules[s].weight is not None]
            if len(members) > 1:
                groups[fused] = members
        return groups

    def linears(self) -> list[Module]:
        """Everything an engine could build as a linear: 2-D weights that are no look-up table and no norm."""
        return self._linears

    @cached_property
    def representatives(self) -> list[Module]:
        """Every linear; of the experts of a block, which engines split and build alike, one of each shape."""
        kinds: dict[tuple[object, ...], Module] = {}
        for module in self._linears:
            block, shape = expert_block(module.name), module.weight.shape if module.weight else ()
            kinds.setdefault((block, module.leaf, shape) if block else (module.name,), module)
        return list(kinds.values())

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def model_type(self) -> str:
        """Of the language model: `qwen2_vl_text` of a wrapper is `qwen2_vl`, so both are given without `_text`."""
        value = self.text.get("model_type") or self.config.get("model_type")
        return value.removesuffix("_text") if isinstance(value, str) else ""

    @property
    def is_wrapper(self) -> bool:
        """A vision or audio model around a language model."""
        return self.text is not self.config

    @property
    def dtype(self) -> str:
        """`bfloat16`, `float16`, ... as config.json says, or empty."""
        for config in (self.config, self.text):
            for key in ("dtype", "torch_dtype"):
                if isinstance(config.get(key), str):
                    return str(config[key]).removeprefix("torch.")
        return ""

    @property
    def tied(self) -> bool:
        value = self.config.get("tie_word_embeddings", self.text.get("tie_word_embeddings"))
        return value is True

    def number(self, *keys: str) -> int | None:
        """The first of these keys of the language model's config that holds a positive integer."""
        for key in keys:
            value = self.text.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    @property
    def layers(self) -> dict[int, list[Module]]:
        """Decoder layer -> its modules."""
        found: dict[int, list[Module]] = {}
        for name, module in self.modules.items():
            index = layer_index(name)
            if index is not None:
                found.setdefault(index, []).append(module)
        return found

    @property
    def fp8(self) -> bool:
        """Any weight in 8 bit."""
        return any(m.weight is not None and m.weight.dtype in EIGHT_BIT for m in self.modules.values())


def split_name(name: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Tensor name -> (module, leaf). `experts.gate_up_proj_scale_inv` belongs to the stacked `experts.gate_up_proj`."""
    module, _, leaf = name.rpartition(".")
    if module.endswith("experts") and leaf not in ("weight", "bias"):
        for scale in ("scale_inv", "scale"):
            stem = leaf.removesuffix(f"_{scale}")
            if stem != leaf:
                return f"{module}.{stem.removesuffix('_weight')}", f"weight_{scale}"
        if leaf in STACKED or len(shape) == 3:
            return name, ""
    return module, leaf


STACKED = frozenset({"gate_up_proj", "down_proj", *FUSED["gate_up_proj"], *FUSED["w13"], "w2"})
