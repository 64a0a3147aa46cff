"""vLLM: how it reads a checkpoint. Releases 0.32 and 0.33; data first.

Sources: model_executor/layers/quantization/{fp8,modelopt}.py, compressed_tensors/, utils/{quant_utils,fp8_utils}.py,
model_executor/models/*, and what its own loader does with broken folders.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.formats.architectures import ROW_PARALLEL, STACKED_ONLY
from octavo.workflows.rules import kernels
from octavo.workflows.rules.engine import (
    Built,
    Plan,
    Target,
    Voice,
    bad_patterns,
    built_by,
    dynamic_blocks,
    exact,
    exact_or_regex,
    experts_block,
    inside_experts,
    listed,
    modelopt_exclude,
)
from octavo.workflows.rules.expected import check_strangers
from octavo.workflows.rules.experts import check_schemes, listed_inside, stacked_experts, stacked_only
from octavo.workflows.rules.findings import CONFIG, REQUANTIZE, WRITE_ANEW, Findings
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.scheme import CODE_FORMATS, Group, Scheme

NEWEST = "0.33.0"
RELEASES = ("0.32", "0.33")  # read; their rules hold for every patch release of them
TABLE = kernels.VLLM
VOICE = Voice("vLLM", "error", "vLLM stops at a tensor that no parameter waits for")

MIN_SM = {"fp8": (7, 5), "compressed-tensors": (7, 5), "modelopt": (8, 0)}
MODELOPT_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "MIXED_PRECISION")

# Routers are built in 16 bit; these families hand their quantization config to them all the same.
QUANTIZED_ROUTERS = {"qwen3_moe": ("gate",), "qwen3_vl_moe": ("gate",), "llama4": ("router",), "lfm2_moe": ("gate",)}
# Prefixes of a multimodal checkpoint -> vLLM's module tree; skip lists go through the same mapping.
WRAPPER_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("language_model.", "language_model."),
    ("model.", "language_model.model."),
)
# Vision blocks that ModelOpt checkpoints never quantize in vLLM.
MODELOPT_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")
# DeepGEMM is switched off for these: requantized scales cost them too much accuracy.
NO_DEEP_GEMM = frozenset({"qwen3_5", "qwen3_5_moe"})
# Expert blocks re-grid their block scales down to 32 from this release on.
REFINE_SINCE = (0, 32)

SHARDS_ERROR = (
    "Detected some but not all shards of {} are quantized. All shards of fused layers to have the same precision."
)
CT_SHARDS_ERROR = "Found different quantization schemes for the shards of {}. vLLM requires all to use the same scheme."


def plan(model: Model, scheme: Scheme, target: Target, out: Findings) -> Plan:
    """What vLLM builds for every module of this folder."""
    result = Plan(scheme)
    if scheme.method == "fp8":
        _native(model, scheme, result, out)
    elif scheme.method == "compressed-tensors":
        _compressed_tensors(model, scheme, result, out)
    elif scheme.method == "modelopt":
        _modelopt(model, scheme, result, out)
    check_strangers(model, VOICE.name, out)
    stacked_only(model, STACKED_ONLY, VOICE.name, result, out)
    return result


def canonical(name: str, model: Model) -> str:
    """A name of the file as vLLM's module path."""
    if model.is_wrapper:
        for old, new in WRAPPER_PREFIXES:
            if name.startswith(old):
                return new + name.removeprefix(old)
    return name


def _native(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    if "activation_scheme" not in scheme.raw:
        text = "vLLM has no default for activation_scheme and stops without it."
        out.error("activation-scheme", f"{scheme.key}.activation_scheme", text, CONFIG)
    skip = tuple(canonical(entry, model) for entry in scheme.skip)
    assert scheme.weights is not None
    weights = dynamic_blocks(scheme.weights, f"{scheme.key}.activation_scheme", out)
    leaf = "weight_scale_inv" if weights.block else "weight_scale"
    quantized = Built(weights, f"native fp8, {weights}", leaf, "input_scale" if weights.activation == "static" else "")
    for fused, members in model.groups.items():
        if experts_block(fused) is None and not listed(skip, canonical(fused, model), exact):
            _agree(
                fused,
                members,
                [listed(skip, canonical(m.name, model), exact) for m in members],
                SHARDS_ERROR,
                result,
                out,
            )
    for module in model.linears():
        block = experts_block(module.name)
        name = canonical(module.name, model)
        if module.role == "head":
            built = Built(None, "native fp8 never quantizes the output head")
        elif _plain_router(module, model):
            built = Built(None, "vLLM builds routers in 16 bit")
        elif block is not None or module.name.endswith(".experts"):
            prefix = canonical(block or module.name, model)
            skipped = listed(skip, prefix, inside_experts)
            built = Built(None, f"{prefix} is in the skip list") if skipped else quantized
        else:
            fused_name = model.fused_name.get(module.name)
            skipped = listed(skip, name, exact) or (
                fused_name is not None and listed(skip, canonical(fused_name, model), exact)
            )
            built = Built(None, "in the skip list") if skipped else quantized
        result.modules[module.name] = built
    stacked_experts(model, quantized, result, lambda name: listed(skip, canonical(name, model), inside_experts))


def _plain_router(module: Module, model: Model) -> bool:
    return module.role == "router" and module.leaf not in QUANTIZED_ROUTERS.get(model.model_type, ())


def _agree(fused: str, members: list[Module], skipped: list[bool], text: str, result: Plan, out: Findings) -> None:
    """All shards of a merged matrix are skipped or none."""
    if any(skipped) and not all(skipped):
        odd = [m.name for m, s in zip(members, skipped, strict=True) if s]
        where = f"{odd[0]} (merged into {fused})"
        out.error("partial-fusion", where, f"Only {', '.join(odd)} in the skip list. {text.format(fused)}", WRITE_ANEW)
        result.refused.update(m.name for m in members)


# ------------------------------------------------------------------------------------------------ compressed-tensors
def _compressed_tensors(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    skip = tuple(_map_target(entry, model) for entry in scheme.skip)
    bad_patterns((*scheme.skip, *(t for g in scheme.groups for t in g.targets)), scheme.key, out)
    _check_groups(scheme, out)
    targets = [(_map_target(t, model), g) for g in scheme.groups for t in g.targets if not t.endswith("Attention")]
    decided: dict[str, Built] = {}
    for fused, members in model.groups.items():
        if experts_block(fused) is not None:
            continue
        names = [canonical(m.name, model) for m in members]
        direct = listed(skip, canonical(fused, model), exact_or_regex)
        skipped = [direct or listed(skip, n, exact_or_regex) for n in names]
        _agree(fused, members, skipped, CT_SHARDS_ERROR, result, out)
        built = (
            Built(None, "in the ignore list")
            if all(skipped)
            else _fused_target(fused, names, targets, model, out, members, result)
        )
        decided.update({m.name: built for m in members})
    for module in model.linears():
        if module.name in decided:
            result.modules[module.name] = decided[module.name]
            continue
        block = experts_block(module.name)
        name = canonical(module.name, model)
        if block is not None:
            name = canonical(f"{block}.0.{module.leaf}", model)  # vLLM asks expert 0 and takes its answer for all
        result.modules[module.name] = _ct_module(module, name, skip, targets, model)
    linear = next((g for t, g in targets if t == "Linear"), None)
    quantized = built_by(linear) if linear is not None else Built(None, "no target matches")
    stacked_experts(
        model, quantized, result, lambda block: listed_inside(skip, canonical(block, model), exact_or_regex)
    )
    check_schemes(result, out)


def _map_target(entry: str, model: Model) -> str:
    return canonical(entry, model) if "." in entry and not entry.startswith("re:") else entry


def _ct_module(
    module: Module, name: str, skip: tuple[str, ...], targets: list[tuple[str, Group]], model: Model
) -> Built:
    if listed(skip, name, exact_or_regex):
        return Built(None, "in the ignore list")
    by_name = next((g for t, g in targets if exact_or_regex(t, name)), None)
    if by_name is not None:
        return Built(None, "vLLM builds routers in 16 bit") if _plain_router(module, model) else built_by(by_name)
    if module.role == "head":
        return Built(None, "the head is quantized only where a target names it, and 'Linear' does not")
    if _plain_router(module, model):
        return Built(None, "vLLM builds routers in 16 bit")
    by_class = next((g for t, g in targets if _names_class(t, module)), None)
    return built_by(by_class) if by_class is not None else Built(None, "no target matches")


def _names_class(target: str, module: Module) -> bool:
    """A target that is part of vLLM's class name, which is how vLLM reads `Linear`."""
    owner = "rowparallellinear" if module.leaf in ROW_PARALLEL else "mergedcolumnparallellinear qkvparallellinear"
    return not target.startswith("re:") and "." not in target and target.lower() in owner


def _fused_target(
    fused: str,
    names: list[str],
    targets: list[tuple[str, Group]],
    model: Model,
    out: Findings,
    members: list[Module],
    result: Plan,
) -> Built:
    """The merged name first, then all shards by name (the first shard's group counts), then the class."""
    direct = next((g for t, g in targets if exact_or_regex(t, canonical(fused, model))), None)
    by_shard = [next((g for t, g in targets if exact_or_regex(t, n)), None) for n in names]
    found = [g for g in by_shard if g is not None]
    if len(found) == len(names) and any(g.weights != found[0].weights for g in found):
        schemes = ", ".join(f"{m.leaf}: {g.weights}" for m, g in zip(members, found, strict=True))
        where = f"{members[-1].name} (merged into {fused})"
        out.error("mixed-schemes", where, f"One merged matrix cannot use two schemes ({schemes}).", WRITE_ANEW)
        result.refused.update(m.name for m in members)
    if direct is not None or len(found) == len(names):
        return built_by(direct or found[0])
    by_class = next((g for t, g in targets if _names_class(t, members[0])), None)
    return built_by(by_class) if by_class is not None else Built(None, "no target matches all of its shards")


def _check_groups(scheme: Scheme, out: Findings) -> None:
    """Schemes that vLLM has no class for."""
    for group in scheme.groups:
        weights, where = group.weights, f"{scheme.key}.config_groups.{group.name}"
        if weights is None or weights.kind != "float" or weights.bits != 8:
            continue
        dynamic_blocks(weights, f"{where}.input_activations.dynamic", out)
        fmt = group.format or scheme.format
        if fmt not in CODE_FORMATS:
            text = (
                f"No compressed-tensors compatible scheme was found: format is {fmt!r}, FP8 codes are float-quantized."
            )
            out.error("format", f"{scheme.key}.format", text, CONFIG)
        if weights.strategy == "block" and weights.activation == "none":
            text = "vLLM's weight-only scheme stops at block scales without input_activations (AssertionError)."
            fix = "Declare dynamic input_activations in groups of 128, or quantize by channel: `--scheme channel`."
            out.error("block-weight-only", f"{where}.input_activations", text, fix)
        if weights.strategy not in ("tensor", "channel", "block"):
            text = f"No compressed-tensors compatible scheme was found for strategy {weights.strategy}."
            out.error("strategy", f"{where}.weights.strategy", text, REQUANTIZE)
        args = _args(scheme, group, "weights")
        if args.get("symmetric") is False or args.get("dynamic"):
            text = "vLLM has FP8 only for symmetric, static weights."
            out.error("strategy", f"{where}.weights", text, CONFIG)
        if weights.activation == "static" and weights.act_strategy != "tensor":
            text = f"Static activations are per tensor in vLLM, not per {weights.act_strategy}."
            out.error("strategy", f"{where}.input_activations.strategy", text, CONFIG)
        acts = _args(scheme, group, "input_activations")
        if acts and str(acts.get("type", "int")).lower() != "float":
            text = "FP8 weights with integer activations have no kernel."
            out.error("strategy", f"{where}.input_activations.type", text, CONFIG)


def _args(scheme: Scheme, group: Group, key: str) -> dict[str, object]:
    value = scheme.raw.get("config_groups", {}).get(group.name, {})
    value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------------------------------------------------- ModelOpt
def _modelopt(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    weights = scheme.weights
    if weights is None:
        if scheme.format is not None and scheme.format not in MODELOPT_ALGOS:
            text = f"ModelOpt in vLLM supports {', '.join(MODELOPT_ALGOS)}, not {scheme.format}."
            out.error("quant-algo", f"{scheme.key}.quant_algo", text, REQUANTIZE)
        elif scheme.format is not None:
            out.info("not-checked", f"{scheme.key}.quant_algo", f"{scheme.format} is not FP8: nothing more is checked.")
        return
    leaf = "weight_scale"
    static = "input_scale" if weights.activation == "static" else ""
    quantized = Built(weights, f"ModelOpt {scheme.format}", leaf, static)
    skip = tuple(_map_target(entry, model) for entry in scheme.skip)
    merged: dict[str, bool] = {}
    for fused, members in model.groups.items():
        if experts_block(fused) is None:
            prefix = canonical(fused, model)
            shards = [listed(skip, canonical(m.name, model), exact) for m in members]
            if not listed(skip, prefix, exact):
                _agree(fused, members, shards, SHARDS_ERROR, result, out)
            excluded = all(shards) or listed(skip, prefix, modelopt_exclude)
            merged.update({m.name: excluded for m in members})
    for module in model.linears():
        block = experts_block(module.name)
        excluded = merged.get(module.name, _modelopt_skips(skip, block or module.name, model))
        tower = any(part in module.name for part in MODELOPT_TOWERS)
        if _plain_router(module, model):
            built = Built(None, "vLLM builds routers in 16 bit")
        elif excluded or tower:
            built = Built(None, "excluded" if excluded else "vLLM never quantizes this tower")
        else:
            built = replace(quantized, why=f"{quantized.why}, not excluded")
        result.modules[module.name] = built
    if model.tied and not any(_modelopt_skips(skip, name, model) for name in ("lm_head", "language_model.lm_head")):
        text = "ModelOpt quantizes the head unless it is excluded, and a tied head cannot be quantized."
        out.error("tied-head", f"{scheme.key}: lm_head", text, CONFIG)


def _modelopt_skips(skip: tuple[str, ...], name: str, model: Model) -> bool:
    """A full name, a part of it, or a glob; of expert blocks also the name inside an entry."""
    prefix = canonical(name, model)
    inside = prefix.endswith(".experts") and listed(skip, prefix, inside_experts)
    return inside or listed(skip, prefix, modelopt_exclude)
