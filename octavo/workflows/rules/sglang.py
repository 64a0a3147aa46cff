"""SGLang: how it reads a checkpoint. Release 0.5.23; data first.

Sources: srt/layers/quantization/{fp8,modelopt_quant,utils}.py, compressed_tensors/, srt/models/*.
"""

from __future__ import annotations

from octavo.formats.architectures import ROW_PARALLEL, STACKED_ONLY
from octavo.workflows.rules import kernels
from octavo.workflows.rules.engine import (
    Built,
    Match,
    Plan,
    Target,
    Voice,
    bad_patterns,
    built_by,
    dotted_segments,
    dynamic_blocks,
    exact_or_regex,
    exact_regex_or_suffix,
    experts_block,
    inside_experts,
    listed,
    modelopt_parts,
)
from octavo.workflows.rules.experts import GENERIC_LEAF, check_schemes, listed_inside, stacked_experts, stacked_only
from octavo.workflows.rules.findings import CONFIG, REQUANTIZE, WRITE_ANEW, Findings
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.scheme import Group, Scheme

NEWEST = "0.5.23"
RELEASES = ("0.5.23",)
TABLE = kernels.SGLANG
VOICE = Voice("SGLang", "warn", "SGLang logs it and drops it")

MIN_SM = {"fp8": (8, 0), "compressed-tensors": (8, 0), "modelopt": (8, 9)}
W8A8_SM = (8, 9)
# Model classes whose loader renames *.weight_scale_inv to *.weight_scale and *.activation_scale to *.input_scale.
LLAMA_LOADERS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"}
    | {"Phi3ForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM", "TeleFLMForCausalLM"}
    | {"Llama4ForCausalLM", "YiVLForCausalLM", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"}
)
LLAMA_RENAMES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}

SHARDS_ERROR = (
    "Detected some but not all shards of {} are quantized. All shards of fused layers to have the same precision."
)
CT_SHARDS_ERROR = (
    "Found different quantization schemes for the shards of {}. SGLang requires all to use the same scheme."
)


def plan(model: Model, scheme: Scheme, target: Target, out: Findings) -> Plan:
    """What SGLang builds for every module of this folder."""
    renames = LLAMA_RENAMES if model.architecture in LLAMA_LOADERS else {}
    result = Plan(scheme, renames=dict(renames))
    if scheme.method == "fp8":
        _native(model, scheme, result, out)
    elif scheme.method == "compressed-tensors":
        _compressed_tensors(model, scheme, target, result, out)
    elif scheme.method == "modelopt":
        _modelopt(model, scheme, result, out)
    stacked_only(model, STACKED_ONLY, VOICE.name, result, out)
    return result


def _native(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    if "activation_scheme" not in scheme.raw:
        text = "SGLang has no default for activation_scheme and stops without it."
        out.error("activation-scheme", f"{scheme.key}.activation_scheme", text, CONFIG)
    base = [entry.removeprefix("model.") for entry in scheme.skip]
    skip = (*base, *(f"model.{entry}" for entry in base))
    assert scheme.weights is not None
    weights = dynamic_blocks(scheme.weights, f"{scheme.key}.activation_scheme", out)
    leaf = "weight_scale_inv" if weights.block else "weight_scale"
    static = "input_scale" if weights.activation == "static" else ""
    quantized = Built(weights, f"native fp8, {weights}", leaf, static)
    if weights.block and result.renames:
        _renamed_scales(model, result, out)
    _merged(model, skip, dotted_segments, SHARDS_ERROR, result, out)
    for module in model.linears():
        block = experts_block(module.name)
        if module.role == "head":
            built = Built(None, "native fp8 never quantizes the output head")
        elif module.role == "router":
            built = Built(None, "SGLang builds routers in 16 bit")
        elif block is not None:
            skipped = listed(skip, block, dotted_segments) or listed(skip, block, inside_experts)
            built = Built(None, "in the skip list") if skipped else quantized
        else:
            built = Built(None, "in the skip list") if listed(skip, module.name, dotted_segments) else quantized
        result.modules[module.name] = built
    stacked_experts(model, quantized, result, lambda block: listed(skip, block, dotted_segments))


def _renamed_scales(model: Model, result: Plan, out: Findings) -> None:
    """One finding for the whole folder; per module it would be the same sentence again and again."""
    found = [m for m in model.modules.values() if "weight_scale_inv" in m.leaves]
    if not found:
        return
    text = (
        f"SGLang's loader for {model.architecture} renames every weight_scale_inv to weight_scale, finds no such "
        f"parameter and drops all {len(found)} block scales without stopping."
    )
    fix = f"A rename to compressed-tensors is lossless. {WRITE_ANEW}"
    out.error("scales-dropped", found[0].leaves["weight_scale_inv"].name, text, fix)
    result.refused.update(m.name for m in found)


def _merged(model: Model, skip: tuple[str, ...], match: Match, text: str, result: Plan, out: Findings) -> None:
    for fused, members in model.groups.items():
        if experts_block(fused) is not None:
            continue
        skipped = [listed(skip, m.name, match) for m in members]
        if any(skipped) and not all(skipped):
            odd = [m.name for m, s in zip(members, skipped, strict=True) if s]
            where = f"{odd[0]} (merged into {fused})"
            out.error(
                "partial-fusion", where, f"Only {', '.join(odd)} in the skip list. {text.format(fused)}", WRITE_ANEW
            )
            result.refused.update(m.name for m in members)


# ------------------------------------------------------------------------------------------------ compressed-tensors
def _compressed_tensors(model: Model, scheme: Scheme, target: Target, result: Plan, out: Findings) -> None:
    bad_patterns((*scheme.skip, *(t for g in scheme.groups for t in g.targets)), scheme.key, out)
    targets = [(t, g) for g in scheme.groups for t in g.targets]
    _check_groups(scheme, target, out)
    for fused, members in model.groups.items():
        if experts_block(fused) is None:
            built = _fused(fused, members, scheme, targets, result, out)
            result.modules.update({m.name: built for m in members})
    for module in model.linears():
        if module.name not in result.modules:
            block = experts_block(module.name)
            # SGLang asks expert 0, by these names in every family, and takes its answer for all.
            name = f"{block}.0.{GENERIC_LEAF.get(module.leaf, module.leaf)}" if block else module.name
            result.modules[module.name] = _module(module, name, scheme, targets, out)
    linear = next((g for t, g in targets if t == "Linear"), None)
    quantized = built_by(linear) if linear is not None else Built(None, "no target matches")
    stacked_experts(model, quantized, result, lambda block: listed_inside(scheme.skip, block, exact_regex_or_suffix))
    check_schemes(result, out)


def _fused(
    fused: str, members: list[Module], scheme: Scheme, targets: list[tuple[str, Group]], result: Plan, out: Findings
) -> Built:
    """Ignored by the merged name or by all shards; then the merged name, the class, all shards by name."""
    where = f"{members[-1].name} (merged into {fused})"
    if fused in scheme.skip:
        return Built(None, "in the ignore list")
    skipped = [listed(scheme.skip, m.name, exact_regex_or_suffix) for m in members]
    if any(skipped):
        odd = [m.name for m, s in zip(members, skipped, strict=True) if s]
        if not all(skipped):
            where = f"{odd[0]} (merged into {fused})"
            text = f"Only {', '.join(odd)} in the ignore list. {CT_SHARDS_ERROR.format(fused)}"
            out.error("partial-fusion", where, text, WRITE_ANEW)
            result.refused.update(m.name for m in members)
        return Built(None, "in the ignore list")
    by_shard = [next((g for t, g in targets if exact_or_regex(t, m.name)), None) for m in members]
    named = [g for g in by_shard if g is not None]
    if len(named) == len(members) and any(g.weights != named[0].weights for g in named):
        schemes = ", ".join(f"{m.leaf}: {g.weights}" for m, g in zip(members, named, strict=True))
        out.error("mixed-schemes", where, f"One merged matrix cannot use two schemes ({schemes}).", WRITE_ANEW)
        result.refused.update(m.name for m in members)
    found = next((g for t, g in targets if exact_or_regex(t, fused)), None)
    found = found or next((g for t, g in targets if _names_class(t, members[0])), None)
    if found is None and len(named) == len(members):
        found = named[0]
    return built_by(found) if found is not None else _no_target(members[0], fused, out)


def _names_class(target: str, module: Module) -> bool:
    """A target that is part of SGLang's class name, which is how it reads `Linear`."""
    owner = "rowparallellinear" if module.leaf in ROW_PARALLEL else "mergedcolumnparallellinear qkvparallellinear"
    return not target.startswith("re:") and "." not in target and target.lower() in owner


def _no_target(module: Module, name: str, out: Findings) -> Built:
    if module.role != "tower":
        text = f"Unable to find matching target for {name} in the compressed-tensors config."
        out.error("no-target", module.name, text, f"Add it to the ignore list. {CONFIG}")
    return Built(None, "no target matches")


def _module(module: Module, name: str, scheme: Scheme, targets: list[tuple[str, Group]], out: Findings) -> Built:
    if listed(scheme.skip, name, exact_regex_or_suffix):
        return Built(None, "in the ignore list")
    if module.role == "head":
        named = next((g for t, g in targets if exact_regex_or_suffix(t, name)), None)
        if named is not None and named.weights is not None and named.weights.block:
            text = "SGLang splits the head by vocabulary rows and cannot split a block scale that way."
            out.error("head-block", module.name, text, WRITE_ANEW)
        return built_by(named) if named is not None else Built(None, "no target names the head")
    if module.role == "router":
        return Built(None, "SGLang builds routers in 16 bit")
    found = next((g for t, g in targets if exact_or_regex(t, name)), None)
    found = found or next((g for t, g in targets if _names_class(t, module)), None)
    return built_by(found) if found is not None else _no_target(module, module.name, out)


def _check_groups(scheme: Scheme, target: Target, out: Findings) -> None:
    for group in scheme.groups:
        weights, where = group.weights, f"{scheme.key}.config_groups.{group.name}"
        if weights is None or weights.kind != "float" or weights.bits != 8:
            continue
        dynamic_blocks(weights, f"{where}.input_activations.dynamic", out)
        if weights.strategy not in ("tensor", "channel", "block"):
            text = "No compressed-tensors compatible scheme was found."
            out.error("strategy", f"{where}.weights.strategy", text, REQUANTIZE)
        weight_only = target.sm < W8A8_SM or weights.activation == "none"
        if weights.strategy == "block" and weight_only and target.sm > kernels.CPU:
            text = (
                "Unsupported weight strategy=block: below SM89, and for weight-only checkpoints, SGLang's "
                "compressed-tensors path takes tensor and channel scales only."
            )
            fix = WRITE_ANEW
            out.error("block-weight-only", f"{where}.weights.strategy", text, fix)


# ---------------------------------------------------------------------------------------------------------- ModelOpt
def _modelopt(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    if scheme.format != "FP8":
        if scheme.format is not None:
            text = f"ModelOptFp8Config only supports regular FP8 quantization, but found {scheme.format!r}."
            out.error("quant-algo", f"{scheme.key}.quant_algo", text, WRITE_ANEW)
        return
    weights = scheme.weights
    assert weights is not None
    quantized = Built(weights, "ModelOpt FP8, not excluded", "weight_scale", "input_scale")
    _merged(model, scheme.skip, _modelopt_skips, SHARDS_ERROR, result, out)
    for module in model.linears():
        name = experts_block(module.name) or module.name
        if module.role == "router":
            built = Built(None, "SGLang builds routers in 16 bit")
        else:
            built = Built(None, "excluded") if listed(scheme.skip, name, _modelopt_skips) else quantized
        result.modules[module.name] = built


def _modelopt_skips(entry: str, name: str) -> bool:
    return modelopt_parts(entry, name) or dotted_segments(entry, name)
