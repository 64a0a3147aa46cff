"""Which tensor-parallel sizes a checkpoint can be split into, and the module that stands in the way."""

from __future__ import annotations

from math import gcd

from octavo.formats.architectures import ROW_PARALLEL
from octavo.workflows.rules.engine import Plan, experts_block
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.shapes import Sizes, rows_of_shards

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Latent projections of MLA, routers and gates are held whole by every rank.
REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate", "fused_qkv_a_proj"})
KV = frozenset({"k_proj", "v_proj"})


def split_problems(model: Model, plan: Plan, tp: int, *, last_exempt: bool, refine: bool) -> list[tuple[str, str, str]]:
    """(code, where, message) of everything that cannot be split into `tp` ranks; empty when it can.

    last_exempt: the last shard of a merged matrix may be ragged when it is not split, which matrices that every rank
    holds whole never are. refine: block scales of experts
    are re-gridded down to 32 where the intermediate size asks for it.
    """
    sizes = Sizes(model)
    problems = _heads(sizes, tp)
    if problems:
        return problems
    for fused, members in _merged(model, sizes, plan):
        problems += _merged_rows(fused, members, sizes, plan, tp, last_exempt=last_exempt)
    for module in model.representatives:
        problems += _single(module, plan, tp, refine=refine, merged=module.name in model.fused_name)
    return problems


def max_tp(model: Model, plan: Plan, *, last_exempt: bool, refine: bool) -> int:
    """The largest power of two up to 64 that works, and all smaller ones with it; 0 when not even one does."""
    best = 0
    for tp in SIZES:
        if split_problems(model, plan, tp, last_exempt=last_exempt, refine=refine):
            break
        best = tp
    return best


def _heads(sizes: Sizes, tp: int) -> list[tuple[str, str, str]]:
    if tp == 1:
        return []
    where = "config.json: num_attention_heads"
    if sizes.heads and sizes.heads % tp:
        return [("tp-heads", where, f"{sizes.heads} attention heads cannot be split over {tp} GPUs.")]
    kv = sizes.kv_heads
    if kv and kv % tp and tp % kv:
        where = "config.json: num_key_value_heads"
        return [("tp-heads", where, f"{kv} KV heads can neither be split nor copied evenly over {tp} GPUs.")]
    return []


def _merged(model: Model, sizes: Sizes, plan: Plan) -> list[tuple[str, list[tuple[str, int]]]]:
    """Merged matrices with block scales: name -> [(shard, rows)], from siblings or fused on disk."""
    found = []
    for fused, members in model.groups.items():
        if experts_block(fused) is None and all(_block(plan, m.name) for m in members):
            found.append((fused, [(m.name, m.weight.shape[0]) for m in members if m.weight]))
    for module in model.linears():
        if module.role == "linear" and _block(plan, module.name):
            rows = rows_of_shards(sizes, module.leaf)
            if rows and module.weight and sum(rows) == module.weight.shape[0]:
                found.append((module.name, [(module.name, n) for n in rows]))
    return found


def _block(plan: Plan, name: str) -> tuple[int, int] | None:
    built = plan.modules.get(name)
    return built.weights.block if built and built.weights and name not in plan.refused else None


def _per_rank(name: str, rows: int, sizes: Sizes, tp: int) -> int:
    """Rows of a shard on one rank; KV heads are copied where there are fewer of them than ranks."""
    leaf = name.rpartition(".")[2]
    if leaf in REPLICATED:
        return rows
    if leaf in KV and sizes.kv_heads and sizes.kv_heads < tp:
        return rows // sizes.kv_heads
    return rows // tp


def _merged_rows(
    fused: str, members: list[tuple[str, int]], sizes: Sizes, plan: Plan, tp: int, *, last_exempt: bool
) -> list[tuple[str, str, str]]:
    replicated = any(name.rpartition(".")[2] in REPLICATED for name, _ in members)
    split = tp > 1 and not replicated
    checked = members[:-1] if not split and (last_exempt or replicated) else members
    problems = []
    for name, rows in checked:
        block = _block(plan, name)
        mine = _per_rank(name, rows, sizes, tp) if split else rows
        if block and mine % block[0]:
            shown = name if name == fused else f"{name} (merged into {fused})"
            each = f"{mine} rows on each of {tp} GPUs" if split else f"{mine} rows"
            text = f"{shown} has {each}, no multiple of {block[0]}: the scale rows of the merged matrix do not fit it."
            problems.append(("merged-rows", f"{name}.weight", text))
    return problems


def _single(module: Module, plan: Plan, tp: int, *, refine: bool, merged: bool) -> list[tuple[str, str, str]]:
    if module.weight is None or module.role in ("tower", "head", "router") or module.leaf in REPLICATED:
        return []
    rows, cols = module.weight.shape
    row_parallel = module.leaf in ROW_PARALLEL
    extent = cols if row_parallel else rows
    side = "input" if row_parallel else "output"
    where = module.weight.name
    if extent % tp and module.leaf not in KV:
        return [("tp-split", where, f"Its {extent} {side} features cannot be split over {tp} GPUs.")]
    block = _block(plan, module.name)
    if not block:
        return []
    if experts_block(module.name):
        return _expert(module, extent, block, tp, refine=refine)
    if tp == 1 or merged:
        return []
    size, mine = block[1] if row_parallel else block[0], extent // tp
    if mine % size:
        text = f"{module.name} has {mine} {side} features on each of {tp} GPUs, no multiple of the block size {size}."
        return [("tp-block", where, text)]
    return []


def _expert(module: Module, inter: int, block: tuple[int, int], tp: int, *, refine: bool) -> list[tuple[str, str, str]]:
    mine = inter // tp
    size = block[0]
    if mine % size == 0 or (refine and gcd(mine, size) >= 32):
        return []
    text = f"{module.name} has {mine} intermediate features on each of {tp} GPUs; block scales of {size} do not fit."
    return [("tp-expert", module.weight.name if module.weight else module.name, text)]
