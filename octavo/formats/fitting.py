"""What engines can load from a file. In memory every rule runs everywhere; a file must suit kernels that fuse.

`Recipe.assign(layout=...)` sends its decisions through `fit_file`; what it changes says why.
Sources: vLLM 0.33 and SGLang 0.5.23, compressed_tensors_moe*.py, fp8.py, and their scale loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.formats.architectures import STACKED_ONLY, expert_block, fused_group, shard_rows
from octavo.formats.granularity import Granularity, PerBlock, PerRow, PerTensor
from octavo.formats.rule import Assignment

# What serving does with the inputs of a linear, per granularity of its weight: other pairs have no kernel anywhere.
SERVABLE = {"row": ("token", "static", "none"), "tensor": ("token", "static", "none"), "block": ("group128", "none")}
# Grouped kernels of experts take fewer from compressed-tensors; weight-only experts have no class in any engine.
SERVABLE_EXPERTS = {"row": ("token",), "tensor": ("static",), "block": ("group128",)}
# Merged matrices that every rank holds whole: their last shard may end in a ragged block (DeepSeek-V3's own files).
RAGGED_END = frozenset({"fused_qkv_a_proj"})


def served_activation(granularity: Granularity, wanted: str, *, expert: bool, layout: str) -> str:
    """The activation mode a file declares for weights of this granularity: `wanted` where engines have it.

    Static scales cannot be made up: where only they would serve, it stays `wanted`.
    """
    modes = (SERVABLE_EXPERTS if expert and layout == "ct" else SERVABLE)[granularity.name]
    return wanted if wanted in modes or modes[0] == "static" else modes[0]


def fit_file(
    decisions: Mapping[str, Assignment],
    rows_cols: Mapping[str, tuple[int, ...]],
    layout: str,
    activation: str,
    config: Mapping[str, Any],
) -> dict[str, Assignment]:
    """The decisions as a file of `layout` can hold them.

    rows_cols: module -> the last two extents of its weight. activation: the recipe's. config: the language model's part
    of config.json.
    """
    result = dict(decisions)
    for group in fused_groups(result):
        sizes = [rows_cols[module] for module in group]
        if result[group[0]].rule is not None and len(group) == 1:
            rows, cols = sizes[0]
            sizes = [(part, cols) for part in shard_rows(group[0], rows, config) or (rows,)]
        for module in group:
            result[module] = _fit_blocks(module, result[module], sizes, layout)
    for module, decision in result.items():
        if decision.rule is not None:
            result[module] = _fit_activation(decision, layout, activation, str(config.get("model_type")))
    return result


def unfit(
    decisions: Mapping[str, Assignment],
    shapes: Mapping[str, tuple[int, ...]],
    activation: str,
    config: Mapping[str, Any],
) -> dict[str, str]:
    """Module -> why a compressed-tensors file of these decisions would not serve it as decided. Arguments as
    `fit_file`; shapes: tensor name -> shape."""
    rows_cols = {name.removesuffix(".weight"): tuple(shape[-2:]) for name, shape in shapes.items()}
    quantized = {module: decision for module, decision in decisions.items() if decision.rule and module in rows_cols}
    fitted = fit_file(quantized, rows_cols, "ct", activation, config)
    return {m: fitted[m].reason for m, decision in quantized.items() if fitted[m].rule != decision.rule}


def fused_groups(modules: Mapping[str, Assignment]) -> list[list[str]]:
    """Every module once, together with the siblings that engines fuse it with, in the fused order."""
    groups: dict[str, list[str]] = {}
    for module in modules:
        name, shards = fused_group(module) or (module, (module,))
        if name not in groups:
            groups[name] = [shard for shard in shards if shard in modules]
    return list(groups.values())


def unite_experts(result: dict[str, Assignment]) -> None:
    """One rule for all experts of a layer: engines read the first expert's scheme and apply it to every one."""
    blocks: dict[str, list[str]] = {}
    for module, decision in result.items():
        block = expert_block(module)
        if block is not None and decision.role == "expert":
            blocks.setdefault(block, []).append(module)
    for modules in blocks.values():
        # The rarest first: 16 bit, then whatever is not the rule of the first expert.
        odd = next((m for m in modules if result[m].rule is None), None) or next(
            (m for m in modules if isinstance(getattr(result[m].rule, "granularity", None), PerRow)), None
        )
        for module in modules:
            if odd is not None and result[module].rule != result[odd].rule:
                what = "in 16 bit" if result[odd].rule is None else "per channel"
                reason = f"{odd} is {what}, and engines run all experts of a layer alike"
                same = {"rule": result[odd].rule, "activation": result[odd].activation}
                result[module] = replace(result[module], reason=reason, **same)  # type: ignore[arg-type]


def _fit_blocks(module: str, decision: Assignment, group: list[tuple[int, ...]], layout: str) -> Assignment:
    """Block scales reach a file only where engines load and run them.

    vLLM places the scale rows of fused shards as if each shard were whole blocks, without an error when it is not,
    and its W8A8 kernels assert on K % block. So: K divisible, and every sibling's rows too when there is more than one.
    """
    granularity = decision.rule.granularity if decision.rule else None
    if not isinstance(granularity, PerBlock) or decision.rule is None:
        return decision
    fused = (fused_group(module) or (module,))[0].rpartition(".")[2]
    inner = group[:-1] if fused in RAGGED_END else group
    ragged_k = any(cols % granularity.cols for _, cols in group)
    ragged_rows = len(group) > 1 and any(rows % granularity.rows for rows, _ in inner)
    if not ragged_k and not ragged_rows:
        return decision
    what = (
        f"K is not a multiple of {granularity.cols}"
        if ragged_k
        else f"rows of {module} and its fused siblings are not multiples of {granularity.rows}"
    )
    if layout == "native":
        return replace(decision, rule=None, reason=f"{what}: stays in 16 bit")
    return replace(decision, rule=decision.rule.per(PerRow()), reason=f"{what}: one scale per channel")


def _fit_activation(decision: Assignment, layout: str, activation: str, model_type: str) -> Assignment:
    """Experts: the pairs of weight scale and activation that grouped kernels take, or 16 bit."""
    rule, expert = decision.rule, decision.role == "expert"
    assert rule is not None
    if expert and model_type in STACKED_ONLY:
        return replace(decision, rule=None, reason=f"no engine reads single FP8 experts of {model_type}")
    granularity = rule.granularity
    if expert and layout == "ct" and isinstance(granularity, PerTensor) and activation != "static":
        granularity = PerRow()
        reason = "experts with one scale per tensor need static activations: one scale per channel"
        decision = replace(decision, rule=rule.per(granularity), reason=reason)
    served = served_activation(granularity, activation, expert=expert, layout=layout)
    if served != activation and expert and granularity == rule.granularity:
        decision = replace(decision, reason=f"{decision.reason}; experts run with activations per {served} only")
    return replace(decision, activation=served)
