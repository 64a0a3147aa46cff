"""Transformers: how it reads a checkpoint. Releases 5.17 to 5.24; data first.

Sources: quantizers/quantizer_finegrained_fp8.py, quantizers/quantizers_utils.py, integrations/finegrained_fp8.py,
quantizers/quantizer_compressed_tensors.py, and compressed_tensors' matching.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.formats.architectures import STACKED_ONLY
from octavo.workflows.rules import kernels
from octavo.workflows.rules.engine import (
    Built,
    Plan,
    Target,
    Voice,
    bad_patterns,
    exact_or_regex,
    experts_block,
    listed,
    transformers_skip,
)
from octavo.workflows.rules.experts import stacked_only
from octavo.workflows.rules.findings import CONFIG, WRITE_ANEW, Findings
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.scheme import Group, Scheme, Weights

NEWEST = "5.24.0"
RELEASES = tuple(f"5.{minor}" for minor in range(17, 25))
TABLE = kernels.TRANSFORMERS
VOICE = Voice("Transformers", "warn", "Transformers mentions it in its load report and drops it", byte_scales=True)

MIN_SM: dict[str, tuple[int, int]] = {}
# Below this capability, and on CPUs, the model is dequantized to BF16 while it loads.
NATIVE_SM = (8, 9)
DEFAULT_BLOCK = (128, 128)
# The loader renames these leaves before it looks for parameters.
RENAMES = {"scale": "weight_scale_inv", "qscale_weight": "weight_scale_inv"}
# Families without a mapping from per-expert names to their stacked parameters.
STACKED_EXPERTS = STACKED_ONLY | {"llama4"}
# Routers that are a plain nn.Linear in the model's code, so that they are converted like any other.
LINEAR_ROUTERS = frozenset({"shared_expert_gate"})


def plan(model: Model, scheme: Scheme, target: Target, out: Findings) -> Plan:
    """What Transformers builds for every module of this folder."""
    result = Plan(scheme)
    if scheme.method == "fp8":
        _native(model, scheme, target, result, out)
    elif scheme.method == "compressed-tensors":
        _compressed_tensors(model, scheme, result, out)
    elif scheme.method == "modelopt" and scheme.weights is not None:
        text = (
            "Transformers does not know quant_method modelopt: it loads the folder with no more than a load report "
            "and takes the FP8 codes for weights."
        )
        fix = f"Compressed-tensors is what it reads. {WRITE_ANEW}"
        out.error("quant-method", f"{scheme.key}.quant_method modelopt", text, fix)
        result.refused.update(model.modules)
        return result
    stacked_only(model, STACKED_EXPERTS, VOICE.name, result, out)
    return result


def _native(model: Model, scheme: Scheme, target: Target, result: Plan, out: Findings) -> None:
    weights = _weights(scheme)
    result.renames = dict(RENAMES)
    dequantized = target.sm < NATIVE_SM
    static = "activation_scale" if weights.activation == "static" and not dequantized else ""
    scalar = ((), (1,)) if dequantized else ((),)
    quantized = Built(weights, f"native fp8, {weights}", "weight_scale_inv", static, scalar=scalar)
    given = scheme.raw.get("modules_to_not_convert")
    if given is None:
        given = scheme.raw.get("ignored_layers")
    skip = tuple(entry for entry in given if isinstance(entry, str)) if isinstance(given, list) else None
    bad_patterns([f"re:{entry}" for entry in skip or ()], scheme.key, out)
    for module in model.linears():
        built = _native_module(module, skip, quantized, model)
        if dequantized:  # while loading: what has a scale is decoded, the rest is taken as it is
            built = quantized if module.quantized else Built(None, "stored in 16 bit")
        result.modules[module.name] = built
    for name, module in model.modules.items():
        if module.role == "expert" and module.weight is not None and len(module.weight.shape) == 3:
            block = name.rpartition(".")[0]
            skipped = skip is not None and listed(skip, block, transformers_skip)
            result.modules[name] = Built(None, "in the skip list") if skipped else quantized
    if dequantized and weights.block:
        _ragged(model, result, out)
    _mixed_experts(model, result, out)


def _weights(scheme: Scheme) -> Weights:
    """A missing weight_block_size means 128 x 128; null means one scale per tensor."""
    weights = scheme.weights
    assert weights is not None
    if "weight_block_size" not in scheme.raw:
        return replace(weights, strategy="block", block=DEFAULT_BLOCK, act_strategy="group")
    return weights


def _native_module(module: Module, skip: tuple[str, ...] | None, quantized: Built, model: Model) -> Built:
    if module.role == "router" and module.leaf not in LINEAR_ROUTERS:
        return Built(None, "Transformers keeps routers out of FP8")
    if module.role == "head" and (skip is None or model.tied):
        return Built(None, "the output head is left out by default")
    name = experts_block(module.name) or module.name
    if skip is not None and listed(skip, name, transformers_skip):
        return Built(None, "in the skip list")
    return quantized


def _ragged(model: Model, result: Plan, out: Findings) -> None:
    """Dequantizing derives the block from weight shape / scale shape: right only without a ragged last block."""
    for name, built in result.modules.items():
        module = model.modules[name]
        scale, weight = module.leaves.get("weight_scale_inv"), module.weight
        if built.weights is None or built.weights.block is None or scale is None or weight is None:
            continue
        if len(scale.shape) != len(weight.shape) or len(scale.shape) < 2:
            continue
        for extent, count, size in zip(weight.shape[-2:], scale.shape[-2:], built.weights.block, strict=True):
            if count < 2 or extent % size == 0:
                continue
            if extent % count:
                text = (
                    f"Weight shape {list(weight.shape)} not divisible by scale grid {list(scale.shape)}: loading stops."
                )
                out.error("ragged-dequantize", weight.name, text, WRITE_ANEW)
            else:
                text = (
                    f"On this device the model is dequantized, with blocks of {extent // count} instead of {size} "
                    f"({extent} / {count} scales): most values get the wrong scale."
                )
                out.error("ragged-dequantize", weight.name, text, WRITE_ANEW)


def _mixed_experts(model: Model, result: Plan, out: Findings) -> None:
    """The experts of a block are stacked while loading, weights beside scales: all have one, or none."""
    blocks: dict[tuple[str, str], list[Module]] = {}
    for name, module in model.modules.items():
        block = experts_block(name)
        if block is not None and module.is_matrix:
            blocks.setdefault((block, module.leaf), []).append(module)
    for (block, leaf), modules in blocks.items():
        plain = [m for m in modules if not m.scales]
        if plain and len(plain) < len(modules):
            text = (
                f"{len(plain)} of {len(modules)} {leaf} of {block} have no scale: stacked, scales reach wrong experts."
            )
            out.error("mixed-experts", plain[0].name, text, WRITE_ANEW)
            result.refused.update(m.name for m in modules)


# ------------------------------------------------------------------------------------------------ compressed-tensors
def _compressed_tensors(model: Model, scheme: Scheme, result: Plan, out: Findings) -> None:
    bad_patterns((*scheme.skip, *(t for g in scheme.groups for t in g.targets)), scheme.key, out)
    targets = [(t, g) for g in scheme.groups for t in g.targets]
    for module in model.linears():
        result.modules[module.name] = _ct_module(module, scheme, targets, model)
    _mixed_experts(model, result, out)
    blocks = [n for n, b in result.modules.items() if b.weights and b.weights.block and experts_block(n)]
    if blocks:
        text = "Transformers multiplies experts by their scale as it is stored: block scales do not fit, it stops."
        out.error("expert-blocks", f"{blocks[0]}.weight_scale", text, WRITE_ANEW)
        result.refused.update(blocks)
    head = Module("lm_head", "head")
    if model.tied and _ct_module(head, scheme, targets, model).weights is not None:
        text = "The head is tied and not in the ignore list: it is decompressed with a scale that nobody stored."
        out.error("tied-head", f"{scheme.key}.ignore: lm_head", text, f"Add lm_head to the ignore list. {CONFIG}")


def _ct_module(module: Module, scheme: Scheme, targets: list[tuple[str, Group]], model: Model) -> Built:
    if listed(scheme.skip, module.name, exact_or_regex) or "Linear" in scheme.skip:
        return Built(None, "in the ignore list")
    if module.role == "router" and module.leaf not in LINEAR_ROUTERS:
        return Built(None, "routers are no nn.Linear in Transformers")
    found = next((g for t, g in targets if exact_or_regex(t, module.name)), None)
    if found is None:
        found = next((g for t, g in targets if t == "Linear"), None)
    if found is None:
        return Built(None, "no target matches")
    weights = found.weights
    if weights is None or weights.kind != "float" or weights.bits != 8:
        return Built(None, "its group is not FP8")
    static = "input_scale" if weights.activation == "static" else ""
    return Built(weights, f"compressed-tensors, {weights}", "weight_scale", static, scalar=((1,),))


def mode_note(scheme: Scheme) -> kernels.Kernel | None:
    """compressed-tensors is decompressed, whatever the device."""
    return kernels.DECOMPRESSED if scheme.method == "compressed-tensors" else None
