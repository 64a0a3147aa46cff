"""What a family's decoder must hold: layers, linears, norms, embedding and head, under the names engines look for."""

from __future__ import annotations

import re

from octavo.workflows.rules.findings import Findings
from octavo.workflows.rules.model import Model, Module
from octavo.workflows.rules.shapes import Sizes

# Families whose layers hold exactly one of each set below, and two norms. Others are only compared layer by layer.
FAMILIES = frozenset(
    {"llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "gemma", "gemma2"}
    | {"gemma3", "deepseek_v2", "deepseek_v3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "granite"}
)
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = {"qwen3": ("q_norm", "k_norm"), "qwen3_moe": ("q_norm", "k_norm"), "gemma3": ("q_norm", "k_norm")}
ATTENTION = (("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj"))
LATENT = (
    ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)
DENSE = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
# Families without layers for multi-token prediction and without variants that add modules to a layer.
PLAIN = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
IN_LAYERS = frozenset(leaf for leaves in (*ATTENTION, *DENSE) for leaf in leaves) | {*NORMS, "q_norm", "k_norm", "gate"}
IN_LAYERS |= {"w1", "w2", "w3", "experts", "self_attn", "attn", "k_cache", "v_cache", "rotary_emb"}
BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj"), "qwen2_vl": ("q_proj", "k_proj", "v_proj")}
BIASED |= dict.fromkeys(("qwen2_moe", "qwen2_5_vl"), BIASED["qwen2"])
_PREFIX = re.compile(r"^(.*?)\.?layers\.\d+\.")


def check_layers(model: Model, out: Findings) -> None:
    """Every layer that config.json promises is there, with the linears its neighbours have."""
    count = model.checkpoint.layers
    layers = model.layers
    fix = "Fetch or convert the missing tensors; check the index."
    for name, module in model.modules.items():
        if module.weight is None and module.scales:
            out.error("weight-missing", f"{name}.weight", "There is a scale, but no weight to go with it.", fix)
    if not layers:
        return
    if count is not None and 0 < count < 100_000:
        for index in range(count):
            if index not in layers:
                text = f"config.json has {count} layers and nothing is stored for this one"
                out.error("layer-missing", f"model.layers.{index}", f"The whole layer is missing: {text}.", fix)
    usual = _usual_attention(layers, count)
    for index, modules in layers.items():
        if count is not None and index >= count:
            continue
        stored = {module.leaf for module in modules if module.weight is not None}
        for name in sorted(usual):
            leaf = name
            if leaf not in stored and usual[name] >= 0.99 and stored & set(usual):
                prefix = modules[0].name.split(f"layers.{index}")[0]
                where = f"{prefix}layers.{index}.*.{leaf}.weight"
                out.error("weight-missing", where, f"Every other layer has a {leaf}, this one has none.", fix)
    _check_experts(model, out, fix)
    _check_family(model, layers, count, out, fix)
    if not model.tied and count and not any(m.role == "head" for m in model.modules.values()):
        text = "tie_word_embeddings is not set and the folder has no lm_head.weight"
        if any(m.role == "embedding" for m in model.modules.values()) and _is_causal(model):
            default = model.model_type.startswith("gemma") or "tie_word_embeddings" not in model.config
            out.add("info" if default else "error", "head-missing", "lm_head.weight", f"No output head: {text}.", fix)


def _usual_attention(layers: dict[int, list[Module]], count: int | None) -> dict[str, float]:
    """Share of layers that hold each norm or attention linear; only those of all but at most one layer are returned."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "input_layernorm", "post_attention_layernorm")
    real = {i: m for i, m in layers.items() if count is None or i < count}
    held = {n: sum(any(m.leaf == n and m.weight for m in modules) for modules in real.values()) for n in names}
    return {n: 1.0 for n, k in held.items() if len(real) > 2 and len(real) - 1 <= k < len(real)}


def _check_experts(model: Model, out: Findings, fix: str) -> None:
    """Per-expert storage: all experts of a block, each with the same projections."""
    count = Sizes(model).experts
    blocks: dict[str, dict[int, set[str]]] = {}
    for name, module in model.modules.items():
        head, found, tail = name.partition(".experts.")
        number, _, leaf = tail.partition(".")
        if found and number.isdigit() and leaf and module.weight is not None:
            blocks.setdefault(f"{head}.experts", {}).setdefault(int(number), set()).add(leaf)
    for block, experts in blocks.items():
        leaves = set().union(*experts.values())
        numbers = range(count) if count is not None and count <= 4096 else sorted(experts)
        for index in numbers:
            for leaf in sorted(leaves - experts.get(index, set())):
                where = f"{block}.{index}.{leaf}.weight"
                out.error("weight-missing", where, "This expert's matrix is missing; the other experts have it.", fix)


def check_strangers(model: Model, name: str, out: Findings) -> None:
    """For an engine that stops at names it has no module for: extra layers, and what no layer of the family has."""
    count = model.checkpoint.layers
    if model.model_type not in PLAIN or model.is_wrapper or count is None:
        return
    for index, modules in model.layers.items():
        if index >= count:
            text = f"config.json has {count} layers; {name} has no module for this one and stops."
            out.error("extra-layer", modules[0].name, text, "Set num_hidden_layers, or remove the layer.")
            continue
        for module in modules:
            if module.leaf not in IN_LAYERS and set(module.leaves) - {"bias"}:
                text = f"No layer of {model.model_type} has a {module.leaf}: {name} has no module for it and stops."
                out.error("unexpected-tensor", next(iter(module.leaves.values())).name, text, "Remove the tensor.")


def _is_causal(model: Model) -> bool:
    return model.architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))


def _check_family(model: Model, layers: dict[int, list[Module]], count: int | None, out: Findings, fix: str) -> None:
    """Known families: nothing a layer needs is absent, and names start as the architecture's do."""
    if model.model_type not in FAMILIES:
        return
    roots = {match[1] for modules in layers.values() for m in modules if (match := _PREFIX.match(m.name))}
    if model.architecture.endswith("ForCausalLM") and not model.is_wrapper and roots and "model" not in roots:
        root = sorted(roots)[0]
        text = f"{model.architecture} looks for model.layers, the folder has {root}.layers: nothing would be loaded."
        out.error("name-prefix", f"{root}.layers", text, "Rename the tensors, or give the config of the whole model.")
        return
    for root in sorted(roots):
        for name in ("embed_tokens", "norm"):
            if f"{root}.{name}" not in model.modules and len(roots) == 1:
                out.error("weight-missing", f"{root}.{name}.weight", f"The model has no {name}.", fix)
    for index, modules in sorted(layers.items()):
        if count is not None and index >= count:
            continue
        match = _PREFIX.match(modules[0].name)
        where = f"{match[1]}.layers.{index}" if match else f"layers.{index}"
        for part, leaf in _absent(model, modules):
            out.error("weight-missing", f"{where}.{part}{leaf}.weight", f"This layer has no {leaf}.", fix)
        for module in modules:
            if module.leaf in BIASED.get(model.model_type, ()) and module.weight and "bias" not in module.leaves:
                text = f"{model.model_type} has a bias here: engines leave it uninitialised or make values up."
                out.error("bias-missing", f"{module.name}.bias", text, fix)


def _absent(model: Model, modules: list[Module]) -> list[tuple[str, str]]:
    """(parent, leaf) of everything a layer of a known family lacks."""
    here = {
        m.leaf
        for m in modules
        if m.weight is not None and not {"experts", "shared_expert", "shared_experts"} & set(m.name.split("."))
    }
    experts = any(".experts" in m.name for m in modules)
    sets = LATENT if Sizes(model).is_mla else ATTENTION
    absent = [("self_attn.", leaf) for leaf in _nearest(sets, here) if leaf not in here]
    if not experts:
        absent += [("mlp.", leaf) for leaf in _nearest(DENSE, here) if leaf not in here]
    absent += [("", leaf) for leaf in NORMS if leaf not in here]
    return absent + [("self_attn.", leaf) for leaf in HEAD_NORMS.get(model.model_type, ()) if leaf not in here]


def _nearest(sets: tuple[tuple[str, ...], ...], here: set[str]) -> tuple[str, ...]:
    """The set that most of is there; ties go to the first."""
    return max(sets, key=lambda leaves: sum(leaf in here for leaf in leaves) / len(leaves))
