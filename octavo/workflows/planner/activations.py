"""What autograd keeps of a decoder layer until backward, in bytes; docs/planner.md derives each term.

Tests hook autograd in eleven families and compare. Nothing here is fitted.
"""

from __future__ import annotations

from octavo.workflows.planner import fused
from octavo.workflows.planner.model import Model, Width
from octavo.workflows.planner.setup import Setup


def trains_experts(model: Model, setup: Setup, width: Width) -> bool:
    return width.routed > 0 and (setup.method == "full" or model.adapts_experts(setup.precision))


def saved_per_token(model: Model, setup: Setup, width: Width) -> float:
    """Bytes that autograd keeps per token for one decoder layer without recomputation."""
    if setup.saved_fp8:
        own = setup.width * model.attention[3] if model.family.scores else 0  # the output is what O reads again
        return fused.saved_per_token(model, setup, width, _attention_per_token(model, setup) + own)
    a, h, full = setup.width, model.hidden, setup.method == "full"
    experts_train = trains_experts(model, setup, width)
    # Autocast over float32 master weights leaves the residual stream in float32, and stacked experts as well.
    cast = full and a == 2 and setup.sharding != "fsdp"
    wide = 4 if cast and width.routed else a
    norm = stream(setup) if setup.fused_layers else 4 + full * (4 if cast else a)
    total = len(model.family.norms) * norm * h + _attention_per_token(model, setup)
    # Gate, its activation, and the other factor; Liger recomputes the activation.
    total += (2 if setup.fused_layers else model.family.gated) * wide * width.ffn
    # Tokens gathered for the experts, and their results before the weighted sum.
    total += (1 + experts_train) * wide * width.routed * h
    inputs = _inputs_per_token(model, setup, width) + (wide * width.ffn if experts_train else 0)
    return total + inputs


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
        return float(a * width.adapted_in)  # every linear rounds its own copy, also of the attention's output
    if full and a == 2 and setup.sharding != "fsdp":
        return float(a * own)
    dense = 0 if width.routed else width.ffn
    return float(a * (h + (h if full or dense else 0) + dense) + between)


def _copies(setup: Setup) -> bool:
    """Whether every adapter casts its own copy of its input."""
    return setup.method == "lora" and setup.adapters != "same" and setup.width == 2


def selective_per_token(model: Model, setup: Setup) -> float:
    """Recomputing all but the attention: a layer's input, the attention's output and its normalizers stay."""
    kept = 0.0 if model.family.scores else setup.width * model.attention[3] + 4.0 * model.heads
    return stream(setup) * model.hidden + kept


def stream(setup: Setup) -> int:
    """Bytes of a value between layers: float32 where autocast works over float32 master weights."""
    return 4 if setup.method == "full" and setup.sharding != "fsdp" else setup.width


def blocks(model: Model, setup: Setup) -> tuple[float, float]:
    """What all layers keep until backward, and the most that recomputing one of them brings back."""
    kept = working = 0.0
    for width in model.widths:
        whole = saved_per_token(model, setup, width) * setup.tokens
        if setup.method == "lora" and trains_experts(model, setup, width):
            whole += float(setup.width * width.experts)  # the sum of weight and adapter, made anew in every pass
        working = max(working, whole)
        if setup.checkpointing == "none":
            kept += width.layers * whole
        elif setup.checkpointing == "selective":
            kept += width.layers * selective_per_token(model, setup) * setup.tokens
        else:
            kept += width.layers * stream(setup) * model.hidden * setup.tokens
    return kept, working if setup.recomputes else 0.0
