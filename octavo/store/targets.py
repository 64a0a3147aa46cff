"""Modules by name in a quantization_config: skip lists and targets, in every spelling that engines look for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from octavo.formats.architectures import expert_block, fused_group
from octavo.formats.rule import Assignment

ROLES_OF_LINEARS = frozenset({"linear", "expert", "router", "head", "tower", "mtp"})
_TOWER = re.compile(r"(model\.)?(visual|vision|audio|multi_modal|mm_|embed_vision|embed_audio|connector|aligner)")


def group_targets(modules: list[str], assignments: Mapping[str, Assignment]) -> list[str]:
    """What a group beside the main one names: patterns that hold in every engine, each of which matches something.

    SGLang asks for a merged matrix by its merged name, then by class, and only then by its shards. Expert blocks are
    asked for under names that differ between engines (`0.w1`, `0.gate_proj`), so one pattern covers a block.
    """
    targets: dict[str, None] = {}
    for module in sorted(modules):
        block = expert_block(module) if assignments[module].role == "expert" else None
        parent = module.rpartition(".")[0]
        fused, shards = fused_group(module) or (module, ())
        leaves = "|".join(re.escape(name.rpartition(".")[2]) for name in dict.fromkeys((fused, *shards)))
        targets[block_pattern(block) if block else f"{_anywhere(parent)}(?:{leaves})$"] = None
    return list(targets)


def block_pattern(block: str) -> str:
    """`model.layers.3.mlp.experts` -> a target for all that is inside."""
    return f"{_anywhere(block)}.*"


def _anywhere(parent: str) -> str:
    """The start of a target for what is in a module, whatever stands before `layers`: wrappers are named differently
    on disk, in Transformers and in vLLM, which translates names but not patterns."""
    _, found, tail = parent.partition("layers.")
    path = re.escape(found + tail if found else parent)
    return rf"re:(?:.*\.)?{path}\." if path else r"re:(?:.*\.)?"


def skip_list(
    assignments: Mapping[str, Assignment], shapes: Mapping[str, tuple[int, ...]] | None = None, layout: str = "native"
) -> list[str]:
    """Full names of every linear that stays in 16 bit, one per shard, in each spelling that an engine may use.

    Of experts that stay as a whole also their block, which is what engines ask for.
    """
    kept, blocks = {"lm_head"}, set[str]()
    for module, decision in assignments.items():
        shape = (shapes or {}).get(f"{module}.weight", () if shapes else (1, 1))
        is_matrix = len(shape) == 2 or decision.role == "expert"
        if decision.rule is None and decision.role in ROLES_OF_LINEARS and is_matrix:
            kept.add(module)
            block = expert_block(module)
            if block is not None and decision.role == "expert":
                blocks.add(block)
    names = {spelling for module in kept for spelling in spellings(module)}
    names |= {block_pattern(b) for b in blocks} if layout == "ct" else {s for b in blocks for s in spellings(b)}
    return sorted(names)


def spellings(module: str) -> set[str]:
    """The names one module of a multimodal wrapper has on disk, in Transformers 5, and loaded as text only."""
    names = {module}
    for old, new in (
        ("language_model.model.", "model.language_model."),
        ("model.language_model.", "language_model.model."),
        ("language_model.lm_head", "lm_head"),
    ):
        if module.startswith(old):
            names.add(new + module.removeprefix(old))
    for prefix in ("model.language_model.", "language_model.model."):
        if module.startswith(prefix):
            names.add("model." + module.removeprefix(prefix))
    if _TOWER.match(module):
        names.add(module.removeprefix("model.") if module.startswith("model.") else f"model.{module}")
    return names
