"""Octavo's fused LoRA layers (octavo.ops.lora), which save activations as FP8 codes: bytes kept and moved.

Inputs of QKV and of the MLP, h, gate and up are codes of a byte; attention keeps q, k, v and its output in 16 bit;
norms keep nothing, and O quantizes attention's output again. docs/planner.md has the table.
"""

from __future__ import annotations

from octavo.formats.architectures import FUSED_DECODERS
from octavo.workflows.planner.model import Model, Width
from octavo.workflows.planner.setup import Setup

TERMS, COLUMNS = 3, 128  # columns of an adapter's rank in an FP8 product, and what they are rounded up to


def refused(model: Model, scheme: str) -> str:
    """Why the layers of this model are not planned as fused ones, or nothing."""
    kind = str(model.text.get("model_type", ""))
    if kind not in FUSED_DECODERS or any(width.routed for width in model.widths):
        return f"activations saved in FP8 need dense fused layers, which '{kind}' has not"
    if scheme not in ("channel", "tensor"):
        return f"activations saved in FP8 are planned for scales per channel or tensor, got {scheme}"
    return ""


def room(k: int, rank: int) -> int:
    """Columns behind rows of k codes for adapters of this rank in all."""
    return -(-TERMS * rank // COLUMNS) * COLUMNS if 2 * TERMS * rank <= k else 0


def saved_per_token(model: Model, setup: Setup, width: Width, attention: float) -> float:
    """Bytes that a layer keeps per token; attention: of them, the attention's own, with its output."""
    h, f, r = model.hidden, width.ffn, setup.rank
    codes = h + room(h, 3 * r) + h + room(h, 2 * r) + 3 * f + room(f, r)
    plain_norms = 4 * h * (len(model.family.norms) - 2)
    scales = 4 * (5 + 2)  # of five matrices of codes, and two norms' rstd
    return codes + attention + plain_norms + scales + setup.width * r * width.adapters


def scratch(model: Model, setup: Setup, width: Width) -> tuple[float, float]:
    """What a layer takes for a moment, forward and backward, where its MLP is: gate and up; their gradients, in 16 bit
    and as codes, and dX; in both the weights of gate and up with the adapters' columns."""
    a, h, f = setup.width, model.hidden, width.ffn
    weights = 2.0 * f * (h + room(h, 2 * setup.rank))
    forward = 2.0 * a * f * setup.tokens + weights
    backward = (2.0 * a * f + 2 * f + room(2 * f, 2 * setup.rank) + 2 * a * h) * setup.tokens
    return forward, backward + weights


def moved(model: Model, setup: Setup, width: Width) -> tuple[float, float]:
    """Bytes that a layer's own kernels and what is between them read and write per token, forward and backward."""
    a, h, f = setup.width, model.hidden, width.ffn
    q, k, v, out = model.attention
    rope = 11 * a * (q + k)
    # Two norms with their quantization, O's input, the gated activation; residuals; x A^T from the codes.
    forward = 6 * h + 3 * out + 7 * f + 6 * a * h + rope + (2 * h + out + f)
    # Sums of two gradients, norms from codes, dY of QKV, O and down, gated activation; O's input again; then twice dY
    # (dY B and dB) and once every input (dA).
    backward = 6 * a * h + 10 * h + 3 * (q + k + v + 2 * h) + 10 * f + 3 * out + rope
    backward += 2 * a * (q + k + v + 2 * h + 2 * f) + (2 * h + out + f)
    return float(forward), float(backward)


def moved_weights(model: Model, setup: Setup) -> float:
    """Bytes per pass: a copy with the adapters' columns, read and written, in every forward pass; a transposed one."""
    forwards = 1 + setup.recomputes
    return 2.0 * (forwards + 1) * model.quantized
