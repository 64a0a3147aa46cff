"""Memory of one GPU in a training step: what stays, plus the maximum over the instants of the step. Never a plain sum.

docs/planner.md derives the terms. tests/workflows/planner/test_replay.py compares them with the storages of real steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from octavo.workflows.planner import fused
from octavo.workflows.planner.activations import blocks, stream
from octavo.workflows.planner.model import Model, Width
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.tables import GIB, backend, factor

EVAL_TOKENS = 512  # the window of octavo finetune's held-out perplexity
TILE = (4096, 32768)  # tokens and words of a tile of TRL's head


@dataclass(frozen=True)
class Memory:
    """Bytes. persistent, instants: name -> bytes; outside: of torch's allocator. low and high bound the peak, which is
    persistent + the largest instant + fragmentation + outside. terms: the parts of that peak. dominant: the largest."""

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

    @property
    def reserved(self) -> float:
        """What torch's allocator holds."""
        return self.peak - self.outside

    @property
    def allocated(self) -> float:
        """What torch's allocator is asked for at the same time."""
        return self.reserved - self.terms["fragmentation"]


def memory(model: Model, setup: Setup) -> Memory:
    """The account of one GPU for one setup."""
    stays, instants = persistent(model, setup), _instants(model, setup)
    sums = {name: sum(parts.values()) for name, parts in instants.items()}
    worst = max(sums, key=lambda name: sums[name])
    parts = dict(stays) | {name: value for name, value in instants[worst].items() if value}
    wasted, spread = _fragmentation(model, setup, instants), factor("fragmentation")
    parts["fragmentation"] = wasted
    outside = _outside(setup)
    parts["context and NCCL"] = outside[0]
    low, high = sum(stays.values()) + outside[1], sum(stays.values()) + outside[2]
    low += spread.low * wasted
    high += spread.high * wasted
    uncertain = {"activations": "activations", "working set": "activations", "logits": "logits"}
    for name, value in instants[worst].items():
        bounds = factor(uncertain[name]) if name in uncertain else None
        low += value * (bounds.low if bounds else 1.0)
        high += value * (bounds.high if bounds else 1.0)
    return Memory(stays, sums, outside[0], worst, parts, sum(parts.values()), low, high)


def trained_parameters(model: Model, setup: Setup) -> int:
    lora = setup.method == "lora"
    return model.adapter_parameters(setup.rank, setup.precision) if lora else model.parameters


def persistent(model: Model, setup: Setup) -> dict[str, float]:
    """What is there from the first optimizer step to the last, bytes of one GPU: gradients live from backward to the
    optimizer, and from pass to pass where they accumulate."""
    shards = setup.world if setup.sharding == "fsdp" else 1
    trained = trained_parameters(model, setup)
    found: dict[str, float] = {}
    if setup.method == "lora":
        if setup.precision == "fp8":
            found["FP8 codes and scales"] = model.quantized + 4.0 * model.scales
            found["16-bit weights"] = float(setup.width * (model.parameters - model.quantized))
        else:
            found["16-bit weights"] = float(setup.width * model.parameters)
        found["adapters, optimizer"] = 12.0 * trained
    else:
        found |= {"master weights": 4.0 * trained, "optimizer": 8.0 * trained}
    if setup.accumulation > 1:
        found["gradients"] = 4.0 * trained
    found = {name: value / shards for name, value in found.items()}
    return found | ({"workspaces of cuBLAS": factor("cublas_gib").value * GIB} if setup.width == 2 else {})


def _instants(model: Model, setup: Setup) -> dict[str, dict[str, float]]:
    """instant -> term -> bytes on top of what stays."""
    kept, working = blocks(model, setup)
    trained, head = trained_parameters(model, setup), model.vocab * model.hidden
    full, shards = setup.method == "full", setup.world if setup.sharding == "fsdp" else 1
    made = 0.0 if setup.accumulation > 1 else 4.0 * trained / shards
    of_head = min(made, 4.0 * head / shards) if full else 0.0
    # In the last block's backward its own gradients are still to come, and an embedding's that is not the head.
    missing = 4.0 * (min(w.parameters for w in model.widths) + (0 if model.tied else head)) / shards if full else 0.0
    gathered = _gathered(model, setup)
    copies, left, block = _copies(model, setup)
    rounding, scratch = (max(sides) for sides in zip(*(_scratch(model, setup, w) for w in model.widths), strict=True))
    forward, backward = loss_bytes(model, setup)
    found: dict[str, dict[str, float]] = {
        "forward end": {"activations": kept, "logits": forward, "16-bit copies": copies},
        "last FP8 linear": {
            "activations": kept + working,
            "working set": rounding,
            "16-bit copies": max(copies, block),
        },
        "loss": {"activations": kept, "logits": backward, "16-bit copies": left},
        "first block's backward": {
            "activations": kept + working,
            "working set": scratch,
            "16-bit copies": left + block,
            "gradients": of_head,
        },
        "last block's backward": {
            "activations": kept / model.layers + working,
            "working set": max(scratch, rounding) if setup.recomputes else scratch,
            "16-bit copies": max(block, left / model.layers),
            "gradients": max(0.0, made - missing),
        },
    }
    if full:
        # The head's gradient, and the embedding's; a tied one is the sum of both, a third.
        tied = 8.0 * head if model.tied and setup.sharding != "fsdp" else 0.0
        found["embedding's gradient"] = {"gradients": made + tied}
    for parts in found.values():
        parts["gathered blocks"] = gathered
    # AdamW updates in place; DDP's buckets hold a second copy of the gradients at that moment.
    buckets = 4.0 * trained if setup.sharding == "ddp" else 0.0
    found["optimizer"] = {"gradients": made, "buckets": buckets}
    found["save"] = {"gathered blocks": gathered}
    if setup.evaluates:
        logits = (setup.width + 8.0) * EVAL_TOKENS * model.vocab
        found["evaluation"] = {"logits": logits, "gathered blocks": gathered}
    return found


def loss_bytes(model: Model, setup: Setup) -> tuple[float, float]:
    """Around the loss, at the end of the forward pass and in the backward pass: the logits or a part of them, and the
    head's gradient while it is made."""
    a, tokens, h, vocab = setup.width, setup.tokens, model.hidden, model.vocab
    full = setup.method == "full"
    weight = 4.0 * vocab * h if full else 0.0
    if setup.loss == "plain":
        # 16-bit logits, float32 ones, log-probabilities; then log-probabilities, their gradient, the logits' gradient.
        return (8.0 + a) * tokens * vocab, max(12.0 * tokens * vocab, a * tokens * vocab + 1.5 * weight)
    if setup.loss == "tiled":
        kept = stream(setup) * tokens * h
        tile = a * (min(tokens, TILE[0]) * TILE[1] + full * min(vocab, TILE[1]) * h)
        if a == 4:  # without Triton: the tile, and five float32 copies of what it holds
            tile += 20 * min(tokens, TILE[0]) * min(vocab, TILE[1])
        return float(kept + tile), float(kept + tile + (4 + stream(setup)) * tokens * h + weight)
    rows = liger_chunks(model, setup)[1]
    # Logits, their float32 copy and probabilities of a chunk; the gradient of the head's input is kept.
    chunk = (a + 8.0) * rows * vocab + a * tokens * h + weight
    return chunk, chunk


def liger_chunks(model: Model, setup: Setup) -> tuple[int, int]:
    """Number and rows of the chunks of Liger's fused loss."""
    rows = 1 << (ceil(setup.tokens / max(1, ceil(model.vocab / model.hidden))) - 1).bit_length()
    return ceil(setup.tokens / rows), min(rows, setup.tokens)


def _copies(model: Model, setup: Setup) -> tuple[float, float, float]:
    """16-bit copies of weights that train in float32: at the end of the forward pass, in the backward pass until they
    are used, and of a block that is recomputed. Autocast forgets its copies when the forward pass ends; those that
    backward needs stay."""
    if not setup.casts:
        return 0.0, 0.0, 0.0
    recompute = setup.recomputes
    if setup.method == "lora":
        every = 2.0 * trained_parameters(model, setup)
        return every, 0.0 if recompute else every, every / model.layers
    head = 0.0 if setup.loss == "tiled" else 2.0 * model.vocab * model.hidden
    every = 2.0 * model.quantized
    if not recompute:
        return head + every, head + every, 0.0
    # Rounded weights are no leaves: autocast makes a copy at every use and keeps none.
    return head + (0.0 if setup.precision == "fp8" else every), head, every / model.layers


def _scratch(model: Model, setup: Setup, width: Width) -> tuple[float, float]:
    """What a block takes for a moment: an FP8 linear beside its result, forward; gradients in flight while its MLP goes
    backward, with a weight's gradient in 16 bit and float32."""
    if setup.saved_fp8:
        return fused.scratch(model, setup, width)
    a, tokens = setup.width, setup.tokens
    rows, cols = width.linear
    values, wide = rows * cols, max(width.ffn, model.hidden) * tokens
    backward = 4.0 * a * wide + (6.0 * values if setup.method == "full" else 0.0)
    if setup.precision != "fp8":
        return 0.0, backward
    own = backend(setup.backend)
    if setup.method == "full":
        return own.scratch_round * max(wide, values), backward
    forward = own.scratch_result * tokens * rows + own.scratch_weight * values
    return forward, max(backward, backward / 2 + own.scratch_weight_backward * values)


def _fragmentation(model: Model, setup: Setup, instants: Mapping[str, Mapping[str, float]]) -> float:
    """Bytes that the allocator holds in gaps too small for what is asked; factors from replayed steps."""
    if setup.width == 4:
        return 0.0
    plain = setup.loss == "plain"
    parts = instants["first block's backward"]
    total = factor("gaps_kept" if setup.loss != "tiled" else "gaps_kept_tiled").value * parts["activations"]
    # Where all logits were, the blocks that are recomputed find room only in pieces.
    share = factor("gaps_working_plain" if plain else "gaps_working").value
    moving = max(parts["working set"], instants["last FP8 linear"]["working set"])
    moving += blocks(model, setup)[1] if plain else 0.0
    total += (share + (0.0 if setup.expandable else factor("gaps_fixed_segments").value)) * moving
    if plain:
        total += setup.width * setup.tokens * model.vocab  # where the 16-bit logits were
    if setup.method == "full":
        total += factor("gaps_head").value * 4.0 * model.vocab * model.hidden  # where the head's gradient was
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
