"""Mixtures of experts: which storage each family's loader reads, and which schemes the grouped kernels take.

Sources: vLLM 0.33 compressed_tensors_moe.py and compressed_tensors_moe_w8a8_fp8.py; SGLang 0.5.23 get_moe_scheme and
compressed_tensors_w8a8_fp8_moe.py, which raise the same.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.workflows.rules.engine import Built, Match, Plan, experts_block, listed
from octavo.workflows.rules.findings import WRITE_ANEW, Findings
from octavo.workflows.rules.model import Model
from octavo.workflows.rules.scheme import Weights

GENERIC_LEAF = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked_experts(model: Model, quantized: Built, result: Plan, skipped: Callable[[str], bool]) -> None:
    """Experts stacked in one 3-D parameter: FP8 unless their block is skipped."""
    for name, module in model.modules.items():
        if module.role == "expert" and module.weight is not None and len(module.weight.shape) == 3:
            block = name.rpartition(".")[0]
            result.modules[name] = Built(None, "in the skip list") if skipped(block) else quantized


def listed_inside(skip: tuple[str, ...], block: str, match: Match) -> bool:
    """compressed-tensors: a block is skipped when the three matrices of its first expert are."""
    return all(listed(skip, f"{block}.0.{leaf}", match) for leaf in GENERIC_LEAF.values())


def stacked_only(model: Model, families: frozenset[str], name: str, plan: Plan, out: Findings) -> None:
    """Families whose loader knows only experts stacked in one parameter: tensors per expert fall on the floor."""
    found = [m for n, m in model.modules.items() if experts_block(n) and m.is_matrix and m.weight is not None]
    if model.model_type not in families or not found:
        return
    text = (
        f"{name} loads the experts of {model.model_type} only from stacked parameters; {len(found)} stored per "
        "expert are dropped, and the experts stay uninitialised."
    )
    fix = WRITE_ANEW
    first = found[0].weight
    out.error("experts-dropped", first.name if first else found[0].name, text, fix)
    plan.refused.update(m.name for m in found)


def check_schemes(result: Plan, out: Findings) -> None:
    """compressed-tensors: one scheme per expert block, of the few that the grouped kernels take."""
    blocks: dict[str, dict[str, Weights | None]] = {}
    for name, built in result.modules.items():
        block = experts_block(name)
        if block is not None:
            blocks.setdefault(block, {})[name.rpartition(".")[2]] = built.weights
    for block, leaves in blocks.items():
        if len(set(leaves.values())) > 1:
            text = "All MoE projections need to have same quantization scheme but found multiple."
            out.error("expert-schemes", block, text, WRITE_ANEW)
        for weights in leaves.values():
            problem = _unsupported(weights) if weights is not None else ""
            if problem:
                out.error("expert-schemes", block, problem, WRITE_ANEW)


def _unsupported(weights: Weights) -> str:
    if weights.activation == "none" and weights.strategy == "channel":
        return "For Fused MoE layers, only format pack-quantized is supported without quantized activations."
    if weights.activation == "none":
        return "Unsupported FusedMoe scheme: FP8 weights without quantized activations."
    if weights.strategy == "channel" and weights.activation == "static":
        return "For FP8 Fused MoE layer, we require either per tensor or channelwise, dynamic per token."
    if weights.strategy == "tensor" and weights.act_strategy != "tensor":
        return "Experts with one scale per tensor need activations with one scale per tensor."
    return ""
