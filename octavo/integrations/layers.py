"""How decoders of Transformers are laid out: which of their layers are known, and which projections run as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from octavo.formats.architectures import FUSED_DECODERS, DecoderLayer
from octavo.modules.frozen import FrozenFloat8Linear

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """written: how a layer is put together. activation: of its MLP; None where that is no fused one."""

    written: DecoderLayer
    activation: str | None

    @classmethod
    def of(cls, decoder: nn.Module) -> Layout | None:
        """None for an architecture that is not in FUSED_DECODERS."""
        config = getattr(decoder, "config", None)
        written = FUSED_DECODERS.get(getattr(config, "model_type", ""))
        named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        return Layout(written, ACTIVATIONS.get(named or "")) if written else None

    def groups(self, layer: nn.Module) -> list[tuple[nn.Module | None, list[nn.Module]]]:
        """The projections that run together, and the norm before them: of QKV; of O; of a gated MLP.

        Empty where no linear of the layer is in FP8.
        """
        parts, mlp = cast(Any, layer), getattr(layer, "mlp", None)
        if not any(isinstance(module, FrozenFloat8Linear) for module in layer.modules()):
            return []
        found: list[tuple[nn.Module | None, list[nn.Module]]] = [
            (parts.input_layernorm, [getattr(parts.self_attn, name) for name in QKV]),
            (None, [parts.self_attn.o_proj]),
        ]
        if self.activation and mlp is not None and all(hasattr(mlp, name) for name in GATED):
            found.append((getattr(layer, self.written.mlp_norm), [getattr(mlp, name) for name in GATED]))
        return found


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The layers of a decoder that have an attention and a norm before it."""
    stacks = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    return [layer for stack in stacks for layer in stack if {"self_attn", "input_layernorm"} <= layer._modules.keys()]


def decoder(model: nn.Module) -> nn.Module:
    """The stack of layers of a causal language model, without its head; of a wrapper, that of its text model."""
    whole = cast(Any, model.get_base_model() if hasattr(model, "get_base_model") else model)  # type: ignore[operator]
    found: Any = whole.get_decoder()
    if not hasattr(found, "get_output_embeddings"):  # some classes call their head so
        found = whole.base_model
    while found.get_output_embeddings() is not None:  # some classes call all of themselves the decoder
        found = found.base_model if found.base_model is not found else found.model
    return cast(nn.Module, found)
