"""What the engines share: Target, Built (what an engine builds for a module), and Built against what is stored."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from octavo.workflows.rules.findings import CONFIG, REPAIR, REQUANTIZE, WRITE_ANEW, Findings, Severity
from octavo.workflows.rules.model import (
    EIGHT_BIT,
    INPUT_SCALES,
    KV_SCALES,
    SIXTEEN_BIT,
    WEIGHT_SCALES,
    Model,
    Module,
    Stored,
)
from octavo.workflows.rules.scheme import Group, Scheme, Weights

E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Target:
    """Where it will be served. sm: compute capability, (0, 0) for a CPU. version: of the engine, as a tuple."""

    engine: str
    version: tuple[int, ...]
    sm: tuple[int, int]
    tp: int = 1

    @property
    def gpu(self) -> str:
        return f"sm{self.sm[0]}{self.sm[1]}" if self.sm > (0, 0) else "cpu"


@dataclass(frozen=True)
class Built:
    """How an engine builds one module.

    weights None: in 16 bit. why: the reason, for messages. scale: the name of the weight scale that it loads.
    input_scale: the name of the static activation scale it needs, empty when none. scalar: accepted shapes of a
    per-tensor scale.
    """

    weights: Weights | None
    why: str
    scale: str = ""
    input_scale: str = ""
    scalar: tuple[tuple[int, ...], ...] = ((), (1,))


def built_by(group: Group) -> Built:
    """What a group of compressed-tensors makes of a linear that it targets."""
    weights = group.weights
    if weights is None or weights.kind != "float" or weights.bits != 8:
        return Built(None, "its group is not FP8")
    static = "input_scale" if weights.activation == "static" and weights.strategy != "block" else ""
    return Built(weights, f"compressed-tensors, {weights}", "weight_scale", static)


@dataclass
class Plan:
    """modules: name -> Built. refused: modules already reported, of which nothing more is said. scheme: what was read.

    renames: leaf -> leaf, what the engine's loader renames before it looks for a parameter.
    """

    scheme: Scheme
    modules: dict[str, Built] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    renames: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Voice:
    """name: of the engine, for messages. unexpected: severity and fate of a tensor that no parameter waits for."""

    name: str
    unexpected: Severity
    unexpected_text: str
    byte_scales: bool = False


def scale_shape(weights: Weights, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale of a matrix; `()` stands for every accepted scalar."""
    rows, cols = shape[-2:]
    if weights.strategy == "channel":
        return (*shape[:-2], rows, 1)
    if weights.strategy == "block" and weights.block:
        m, n = weights.block
        return (*shape[:-2], -(-rows // m), -(-cols // n))
    return ()


def compare(model: Model, plan: Plan, voice: Voice, out: Findings) -> None:
    """Every module as built against what the folder holds."""
    for name, module in model.modules.items():
        if name in plan.refused:
            continue
        built = plan.modules.get(name)
        if built is None or built.weights is None:
            _compare_plain(module, built.why if built else "", voice, out)
        else:
            _compare_quantized(module, built, built.weights, plan, voice, out)


def _compare_plain(module: Module, why: str, voice: Voice, out: Findings) -> None:
    reason = f" ({why})" if why else ""
    if any(leaf.startswith(("weight_packed", "weight_global")) for leaf in module.leaves):
        return
    for leaf, stored in module.leaves.items():
        if leaf in ("weight", "bias", "") and stored.dtype in EIGHT_BIT - {torch.uint8, torch.int8}:
            text = f"{voice.name} builds {module.name} in 16 bit{reason}, so its FP8 codes would be taken for weights."
            out.error("codes-as-weights", stored.name, text, WRITE_ANEW)
    weight = module.weight
    left = [s for leaf, s in module.leaves.items() if leaf in (*WEIGHT_SCALES, *INPUT_SCALES)]
    if left and weight is not None and weight.dtype in SIXTEEN_BIT and module.role != "other":
        text = f"{module.name} is in 16 bit, yet the folder holds a scale for it; {voice.unexpected_text}."
        out.add(voice.unexpected, "scale-without-codes", left[0].name, text, "Remove the scale from the file.")


def _compare_quantized(module: Module, built: Built, weights: Weights, plan: Plan, voice: Voice, out: Findings) -> None:
    weight = module.weight
    leaves = {plan.renames.get(leaf, leaf): stored for leaf, stored in module.leaves.items()}
    if weight is None:
        where = f"{module.name}.weight"
        out.error("weight-missing", where, "There is a scale, but no weight to go with it.", REQUANTIZE)
        return
    if weight.dtype in SIXTEEN_BIT:
        text = (
            f"{voice.name} builds {module.name} as FP8 ({built.why}), and it is stored as {weight.text}: "
            "the values would be cast to FP8 without a scale."
        )
        fix = f"List {module.name} in the skip list by its full name, or quantize it. {CONFIG}"
        out.error("weight-not-quantized", weight.name, text, fix)
        return
    if weight.dtype != torch.float8_e4m3fn:
        text = f"Only float8_e4m3fn weights are supported; this is {weight.text}."
        out.error("weight-dtype", weight.name, text, REQUANTIZE)
        return
    _compare_scale(module, weight, leaves, built, weights, voice, out)
    _compare_rest(module, leaves, built, voice, out)


def _compare_scale(
    module: Module,
    weight: Stored,
    leaves: dict[str, Stored],
    built: Built,
    weights: Weights,
    voice: Voice,
    out: Findings,
) -> None:
    scale = leaves.get(built.scale)
    if scale is None:
        others = [s.name for leaf, s in module.leaves.items() if leaf in WEIGHT_SCALES]
        if others:
            text = f"{voice.name} loads {module.name}.{built.scale} ({built.why}); the folder has {others[0]} instead"
            out.error("scale-name", others[0], f"{text}, so the module would run without its scale.", REPAIR)
        else:
            text = f"{module.name} has FP8 codes and no {built.scale}: it would run with an uninitialised scale."
            out.error("scale-missing", f"{module.name}.{built.scale}", text, REQUANTIZE)
        return
    if (
        scale.dtype not in SIXTEEN_BIT
        and scale.dtype != E8M0
        and not (voice.byte_scales and scale.dtype == torch.uint8)
    ):
        text = f"The scale is {scale.text}; loaders want plain floating-point scales, and would copy its integers."
        out.error("scale-dtype", scale.name, text, REQUANTIZE)
        return
    want = scale_shape(weights, weight.shape)
    fits = scale.shape in built.scalar if want == () else scale.shape == want
    if not fits:
        shown = " or ".join(str(list(s)) for s in built.scalar) if want == () else str(list(want))
        text = f"A {weights} scale of {weight.text} must have the shape {shown}; this one has {list(scale.shape)}."
        lossless = scale.shape.count(1) != len(scale.shape) and _elements(scale.shape) == _elements(want)
        out.error("scale-shape", scale.name, text, REPAIR if lossless or want == () else REQUANTIZE)


def _compare_rest(module: Module, leaves: dict[str, Stored], built: Built, voice: Voice, out: Findings) -> None:
    if built.input_scale and built.input_scale not in leaves:
        others = [s.name for leaf, s in leaves.items() if leaf in INPUT_SCALES]
        where = others[0] if others else f"{module.name}.{built.input_scale}"
        text = f"Activations are static, and {module.name} has no {built.input_scale}"
        if others:
            text += f" (it has {others[0]}, a name that {voice.name} does not know)"
        out.error("input-scale-missing", where, f"{text}.", REPAIR if others else "Calibrate and quantize again.")
    known = {"weight", "bias", "", built.scale, built.input_scale, *KV_SCALES}
    for leaf, stored in leaves.items():
        if leaf in known:
            continue
        if leaf in (*WEIGHT_SCALES, *INPUT_SCALES) and built.scale in leaves:
            text = f"{voice.name} has no parameter {module.name}.{leaf}; {voice.unexpected_text}."
            severity = voice.unexpected
            if leaf in INPUT_SCALES and built.input_scale:
                continue
            out.add(severity, "unexpected-tensor", stored.name, text, "Remove or rename the tensor.")
        elif leaf == "weight_zero_point":
            text = f"FP8 has no zero point, and {voice.name} has no parameter for it; {voice.unexpected_text}."
            out.add(voice.unexpected, "unexpected-tensor", stored.name, text, "Remove the tensor.")


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def dynamic_blocks(weights: Weights, where: str, out: Findings) -> Weights:
    """Block scales with static activations: an error in vLLM and SGLang, after which dynamic ones are assumed."""
    if weights.strategy != "block" or weights.activation != "static":
        return weights
    text = (
        "The block-wise quantization only supports dynamic activation scheme for now, but got static activation scheme."
    )
    out.error("block-static", where, text, CONFIG)
    return replace(weights, activation="dynamic")


# -------------------------------------------------------------------------------------------- matching of skip lists
@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


def regex_match(pattern: str, name: str) -> bool:
    """re.match; an invalid pattern matches nothing (`bad_patterns` reports it)."""
    compiled = _compiled(pattern)
    return compiled is not None and compiled.match(name) is not None


def bad_patterns(patterns: Iterable[str], where: str, out: Findings) -> None:
    """Regular expressions that Python cannot compile stop an engine at start."""
    for pattern in patterns:
        if pattern.startswith("re:") and _compiled(pattern[3:]) is None:
            out.error("bad-pattern", where, f"'{pattern}' is no valid regular expression.", CONFIG)


def exact_or_regex(pattern: str, name: str) -> bool:
    """compressed-tensors: the full name, or `re:` and a regular expression from the start."""
    return regex_match(pattern[3:], name) if pattern.startswith("re:") else pattern == name


def exact(pattern: str, name: str) -> bool:
    """vLLM's native fp8: the full name and nothing else."""
    return pattern == name


def dotted_segments(pattern: str, name: str) -> bool:
    """SGLang's native fp8: a run of whole dotted parts anywhere in the name."""
    return f".{pattern.rstrip('.')}." in f".{name.rstrip('.')}."


def exact_regex_or_suffix(pattern: str, name: str) -> bool:
    """SGLang's compressed-tensors: full name, `re:`, or whole dotted parts at the end."""
    return exact_or_regex(pattern, name) or (not pattern.startswith("re:") and name.endswith(f".{pattern}"))


def transformers_skip(pattern: str, name: str) -> bool:
    """Transformers' native fp8: a regular expression from the start up to a dot or the end, or any suffix."""
    return name.endswith(pattern) or regex_match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)


def modelopt_exclude(pattern: str, name: str) -> bool:
    """vLLM's ModelOpt: substring, or a glob."""
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


def modelopt_parts(pattern: str, name: str) -> bool:
    """SGLang's ModelOpt: a glob on the whole name or on one dotted part."""
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, *name.split(".")))


def inside_experts(pattern: str, name: str) -> bool:
    """An expert block whose name is part of an entry about experts."""
    return "experts" in pattern and name in pattern


Match = Callable[[str, str], bool]


@lru_cache(maxsize=1 << 16)  # the experts of a block, thousands of them, ask with one name
def listed(skip: tuple[str, ...], name: str, match: Match) -> bool:
    """Whether any entry of a skip list matches."""
    return any(match(pattern, name) for pattern in skip)


def experts_block(name: str) -> str | None:
    """`model.layers.0.mlp.experts.3.up_proj` -> `model.layers.0.mlp.experts`; None outside of experts."""
    head, found, _ = name.partition(".experts.")
    return f"{head}.experts" if found else None
