"""What is trained and how: one way to run a training step, as the memory and the time model read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["tiled", "plain", "liger"]


@dataclass(frozen=True)
class Setup:
    """method: lora or full. precision: bf16, or fp8: codes as the frozen base of LoRA, FP8 products for full.

    loss: `tiled`, the head of TRL's trainer, which octavo finetune takes; `plain`, Transformers' own, all logits at
    once; `liger`. fused_layers: Liger's norms, activation and rotary embedding. adapters: `autocast` (Trainer),
    `float32` (PEFT without autocast), `same` (16-bit adapters). micro: sequences of one pass; accumulation: passes of
    an optimizer step. world: GPUs; sharding: none, ddp or fsdp. width: bytes of a 16-bit value; 4 on a CPU, which
    computes in float32. context: tokens of a sequence. saved_fp8: LoRA over FP8 in Octavo's fused layers, which keep
    activations in FP8. backend: of Octavo's FP8 linears. expandable: segments of the allocator. evaluates: held-out
    perplexity on windows between the steps.
    """

    method: str = "lora"
    precision: str = "bf16"
    rank: int = 16
    context: int = 1024
    micro: int = 1
    accumulation: int = 1
    checkpointing: Checkpointing = "full"
    loss: Loss = "tiled"
    fused_layers: bool = False
    adapters: str = "autocast"
    sharding: str = "none"
    world: int = 1
    width: int = 2
    saved_fp8: bool = False
    backend: str = "dequant"
    expandable: bool = True
    evaluates: bool = True

    @property
    def tokens(self) -> int:
        return self.micro * self.context

    @property
    def recomputes(self) -> bool:
        """Whether layers run again in backward, with `selective` all of them but the attention."""
        return self.checkpointing != "none"

    @property
    def casts(self) -> bool:
        """Whether autocast keeps 16-bit copies of float32 weights that train."""
        return self.width == 2 and self.sharding != "fsdp" and (self.method == "full" or self.adapters == "autocast")
