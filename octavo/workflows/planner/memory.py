"""Memory of one GPU in a training step: what stays, plus the maximum over the instants of the step. Never a plain sum.

The bytes per token are those that autograd saves in Transformers' decoder layers; docs/planner.md derives each of them
and compares with what was measured. Nothing here is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from octavo.workflows.planner.model import Model, Width
from octavo.workflows.planner.tables import GIB, factor

Checkpointing = Literal["none", "selective", "full"]
EVAL_TOKENS = 512  # the window of octavo finetune's held-out perplexity
STATE = 16  # bytes of a trained parameter: float32 value, gradient and two moments of AdamW
# Peak of the plain loss in bytes per logit: log-probabilities, their gradient and the logits' gradient, each float32.
PLAIN_LOSS = 12


@dataclass(frozen=True)
class Setup:
    """What is trained and how. method: lora or full. precision: bf16, or fp8: codes as the frozen base of LoRA, FP8
    products for full. fused_loss: Liger's. adapters: `autocast` (Trainer), `float32` (PEFT without autocast), `same`
    (16-bit adapters). micro: sequences of one pass. world: GPUs; sharding: none, ddp or fsdp. width: bytes of a 16-bit
    value; 4 on a CPU, which computes in float32. context: tokens of a sequence. saved_fp8: activations saved in FP8.
    """

    method: str = "lora"
    precision: str = "bf16"
    rank: int = 16
    context: int = 1024
    micro: int = 1
    checkpointing: Checkpointing = "full"
    fused_loss: bool = False
    fused_layers: bool = False
    adapters: str = "autocast"
    sharding: str = "none"
    world: int = 1
    width: int = 2
    saved_fp8: bool = False

    @property
    def tokens(self) -> int:
        return self.micro * self.context


@dataclass(frozen=True)
class Memory:
    """Bytes. persistent, instants: name -> bytes; outside: of torch's allocator. low and high bound the peak, which is
    persistent + the largest instant + outside. terms: the parts of that peak. dominant: the largest of them."""

    persistent: Mapping[str, float]
    instants: Mapping[str, float]
    outside: float
    instant: str
    terms: Mapping[str, float]
    peak: float
    low: float
    high: float

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def memory(model: Model, setup: Setup) -> Memory:
    """The account of one GPU for one setup."""
    stays, blocks = persistent(model, setup), _blocks(model, setup)
    logits, scratch = loss_bytes(model, setup), max(_scratch(model, setup, w) for w in model.widths)
    gathered = _gathered(model, setup)
    working = max(blocks[1].values(), default=0.0) if setup.checkpointing == "full" else 0.0
    trained = trained_parameters(model, setup)
    instants: dict[str, dict[str, float]] = {
        "loss": {"activations": blocks[0], "logits": logits, "gathered blocks": gathered},
        "backward": {"activations": blocks[0] + working, "working set": scratch, "gathered blocks": gathered},
        # AdamW updates in place; DDP's buckets hold a second copy of the gradients at that moment.
        "optimizer": {"buckets": 4.0 * trained if setup.sharding == "ddp" else 0.0},
        "save": {"gathered blocks": gathered},
        "evaluation": {"logits": (setup.width + 8.0) * EVAL_TOKENS * model.vocab, "gathered blocks": gathered},
    }
    sums = {name: sum(parts.values()) for name, parts in instants.items()}
    worst = max(sums, key=lambda name: sums[name])
    parts = dict(stays) | {name: value for name, value in instants[worst].items() if value}
    spread = factor("fragmentation")
    parts["fragmentation"] = spread.value * sums[worst]
    outside = _outside(setup)
    parts["context and NCCL"] = outside[0]
    uncertain = {"activations": "activations", "working set": "activations", "logits": "logits"}
    low, high = sum(stays.values()) + outside[1], sum(stays.values()) + outside[2]
    for name, value in instants[worst].items():
        bounds = factor(uncertain[name]) if name in uncertain else None
        low += value * (bounds.low if bounds else 1.0) * (1 + spread.low)
        high += value * (bounds.high if bounds else 1.0) * (1 + spread.high)
    return Memory(stays, sums, outside[0], worst, parts, sum(parts.values()), low, high)


def trained_parameters(model: Model, setup: Setup) -> int:
    lora = setup.method == "lora"
    return model.adapter_parameters(setup.rank, setup.precision) if lora else model.parameters


def _trains_experts(model: Model, setup: Setup, width: Width) -> bool:
    return width.routed > 0 and (setup.method == "full" or model.adapts_experts(setup.precision))


def persistent(model: Model, setup: Setup) -> dict[str, float]:
    """What is there from the first optimizer step to the last, bytes of one GPU."""
    shards = setup.world if setup.sharding == "fsdp" else 1
    trained = trained_parameters(model, setup)
    found: dict[str, float] = {}
    if setup.method == "lora":
        if setup.precision == "fp8":
            found["FP8 codes and scales"] = model.quantized + 4.0 * model.scales
            found["16-bit weights"] = float(setup.width * (model.parameters - model.quantized))
        else:
            found["16-bit weights"] = float(setup.width * model.parameters)
        found["adapters, gradients, optimizer"] = float(STATE * trained)
    else:
        found |= {"master weights": 4.0 * trained, "gradients": 4.0 * trained, "optimizer": 8.0 * trained}
        if shards == 1 and setup.width == 2:
            found["16-bit copies of autocast"] = 2.0 * trained
    return {name: value / shards for name, value in found.items()}


def loss_bytes(model: Model, setup: Setup) -> float:
    """Around the loss: all logits in float32, or with a fused loss the chunk of rows that Liger takes at a time."""
    if not setup.fused_loss:
        return float(PLAIN_LOSS * setup.tokens * model.vocab)
    chunks = max(1, ceil(model.vocab / model.hidden))
    rows = 1 << (ceil(setup.tokens / chunks) - 1).bit_length()
    rows = min(rows, setup.tokens)
    weight_gradient = 4.0 * model.vocab * model.hidden if setup.method == "full" else 0.0
    # Logits, their float32 copy and probabilities of a chunk; the gradient of the head's input is kept.
    return (setup.width + 8.0) * rows * model.vocab + setup.width * setup.tokens * model.hidden + weight_gradient


def saved_per_token(model: Model, setup: Setup, width: Width) -> float:
    """Bytes that autograd keeps per token for one decoder layer without recomputation."""
    a, h, full = setup.width, model.hidden, setup.method == "full"
    trains_experts = _trains_experts(model, setup, width)
    # Autocast over float32 master weights leaves the residual stream in float32, and stacked experts as well.
    cast = full and a == 2 and setup.sharding != "fsdp"
    wide = 4 if cast and width.routed else a
    norm = _stream(setup) if setup.fused_layers else 4 + full * (4 if cast else a)
    total = len(model.family.norms) * norm * h + _attention_per_token(model, setup)
    # Gate, its activation, and the other factor; Liger recomputes the activation.
    total += (2 if setup.fused_layers else model.family.gated) * wide * width.ffn
    # Tokens gathered for the experts, and their results before the weighted sum.
    total += (1 + trains_experts) * wide * width.routed * h
    inputs = _inputs_per_token(model, setup, width) + (wide * width.ffn if trains_experts else 0)
    return (total + inputs) / (2 if setup.saved_fp8 else 1)


def _attention_per_token(model: Model, setup: Setup) -> float:
    """What the attention itself keeps, its output where no adapter has a copy of its own."""
    a, full, family = setup.width, setup.method == "full", model.family
    q, k, v, out = model.attention
    total = float(a * (q + k + v + out) + 4 * model.heads)
    if family.scores:  # keys and values repeated for every head, and matrices of s x s
        total = a * 3 * q + (0 if _copies(setup) else a * out) + family.scores * model.heads * setup.context
    if family.attention == "fused":
        total += a * (q + k)  # values are a view of the whole projection
    if family.qk_norm or model.text.get("kv_lora_rank"):
        total += (4 + full * a) * (q + k)
    return total


def _inputs_per_token(model: Model, setup: Setup, width: Width) -> float:
    """Inputs of what trains: of adapters, or of the linears themselves. Shared ones once, unless each casts its own."""
    a, h, full = setup.width, model.hidden, setup.method == "full"
    between = 0 if full else a * setup.rank * width.adapters  # the two matrices of an adapter
    if _copies(setup):
        return float((4 if setup.adapters == "float32" else 2) * width.adapted_in + between)
    own = width.adapted_in - model.attention[3]  # the attention's output is saved already
    if full and setup.precision == "fp8":
        return float(a * (own + width.adapted_in))  # every linear rounds its own copy
    if full and a == 2 and setup.sharding != "fsdp":
        return float(a * own)
    dense = 0 if width.routed else width.ffn
    return float(a * (h + (h if full or dense else 0) + dense) + between)


def _copies(setup: Setup) -> bool:
    """Whether every adapter casts its own copy of its input."""
    return setup.method == "lora" and setup.adapters != "same" and setup.width == 2


def selective_per_token(model: Model, setup: Setup, width: Width) -> float:
    """Recomputing all but the matrix products and attention: their outputs stay."""
    q, k, v, out = model.attention
    return float(setup.width * (2 * model.hidden + q + k + v + out + 2 * width.ffn) + 4 * model.heads)


def _stream(setup: Setup) -> int:
    """Bytes of a value between layers: float32 where autocast works over float32 master weights."""
    return 4 if setup.method == "full" and setup.sharding != "fsdp" else setup.width


def _blocks(model: Model, setup: Setup) -> tuple[float, dict[int, float]]:
    """What all layers keep until backward, and per kind of layer what recomputing one of them brings back."""
    kept, working = 0.0, {}
    for index, width in enumerate(model.widths):
        whole = saved_per_token(model, setup, width) * setup.tokens
        if setup.method == "full" and setup.precision == "fp8":
            whole += 2.0 * width.parameters  # the rounded weight that a linear multiplied by
        if setup.method == "lora" and _trains_experts(model, setup, width):
            whole += float(setup.width * width.experts)  # the sum of weight and adapter, made anew in every pass
        working[index] = whole
        if setup.checkpointing == "none":
            kept += width.layers * whole
        elif setup.checkpointing == "selective":
            kept += width.layers * min(whole, selective_per_token(model, setup, width) * setup.tokens)
        else:
            kept += width.layers * _stream(setup) * model.hidden * setup.tokens
    return kept, working


def _scratch(model: Model, setup: Setup, width: Width) -> float:
    """Gradients in flight while a block's MLP goes backward, and what decoding an FP8 weight takes for a moment."""
    a, tokens = setup.width, setup.tokens
    total = 4.0 * a * max(width.ffn, model.hidden) * tokens
    if setup.precision == "fp8" and setup.method == "lora":
        rows, cols = width.linear
        values = rows * cols
        # Backend dequant: a float32 product, scaled and cast; backward a float32 weight, scaled and cast.
        total += a * values if a == 4 else max((8.0 + a) * tokens * rows + a * values, (8.0 + a) * values)
    return total


def _gathered(model: Model, setup: Setup) -> float:
    """FSDP: this block and the prefetched one, whole, plus embeddings and head; gradients before the reduction."""
    if setup.sharding != "fsdp":
        return 0.0
    block = max(width.parameters for width in model.widths)
    size = 1.0 if setup.precision == "fp8" and setup.method == "lora" else 2.0
    root = 2.0 * (model.parameters - sum(w.parameters * w.layers for w in model.widths))
    reduced = 4.0 * block if setup.method == "full" else 0.0
    return 2 * size * block + root + reduced


def _outside(setup: Setup) -> tuple[float, float, float]:
    """CUDA context, and NCCL where there are several GPUs: value, low, high. Nothing of both on a CPU."""
    if setup.width == 4:
        return 0.0, 0.0, 0.0
    context, nccl = factor("context_gib"), factor("nccl_gib")
    several = setup.world > 1
    values = [getattr(context, name) + several * getattr(nccl, name) for name in ("value", "low", "high")]
    return values[0] * GIB, values[1] * GIB, values[2] * GIB
