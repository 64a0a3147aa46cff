"""Scales of the KV cache: where each engine looks for them, and what happens when they are not there."""

from __future__ import annotations

import re
from typing import Any

from octavo.formats.architectures import layer_index
from octavo.workflows.rules.findings import CONFIG, Findings, Severity
from octavo.workflows.rules.kernels import CPU, SM
from octavo.workflows.rules.model import Model, Stored
from octavo.workflows.rules.scheme import Scheme

# Spellings that vLLM and SGLang map to attn.k_scale and attn.v_scale; group 1 or the leaf says which.
SPELLINGS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\.self_attn\.([kv])_scale$",
        r"\.self_attn\.[kv]_proj\.([kv])_scale$",
        r"\.self_attn\.qkv_proj\.([kv])_scale$",
        r"\.self_attn\.attn\.([kv])_scale$",
        r"\.self_attn\.([kv])_proj\.output_scale$",
        r"\.self_attn\.([kv])_cache\.scale$",
        r"\.mixer\.(?:[kv]_proj\.)?([kv])_scale$",
        r"\.attn\.([kv])_scale$",
        r"\.attention\.([kv])_scale$",
    )
)
FUSED = re.compile(r"\.kv_scale$")
LOOKS_LIKE = re.compile(r"\.(k|v|kv|key|value)_?(cache)?_?scale(_inv)?$|\.[kv]_proj\.output_scale$")
LINEAR = frozenset({"weight_scale", "weight_scale_inv", "input_scale"})  # of the many, none is a cache's
NATIVE_SM = (8, 9)
NAMES = "Name it ...self_attn.k_scale or ...self_attn.v_scale."


def kv_scales(model: Model) -> tuple[dict[str, dict[str, Stored]], list[Stored]]:
    """(attention prefix -> {k, v} -> tensor) of those with a known spelling, and those that only look like one."""
    known: dict[str, dict[str, Stored]] = {}
    strange: list[Stored] = []
    scales = [
        s for m in model.modules.values() for leaf, s in m.leaves.items() if "scale" in leaf and leaf not in LINEAR
    ]
    for stored in scales:
        if not LOOKS_LIKE.search(stored.name) and not FUSED.search(stored.name):
            continue
        if FUSED.search(stored.name):
            attention = stored.name.rpartition(".kv_scale")[0]
            known.setdefault(_layer_of(attention), {}).update(k=stored, v=stored)
            continue
        match = next((m for p in SPELLINGS if (m := p.search(stored.name))), None)
        if match:
            known.setdefault(_layer_of(stored.name), {})[match[1]] = stored
        else:
            strange.append(stored)
    return known, strange


def _layer_of(name: str) -> str:
    index = layer_index(name)
    return str(index) if index is not None else name.partition(".self_attn")[0]


def check_kv_cache(engine: str, model: Model, scheme: Scheme, sm: SM, out: Findings) -> None:
    """The declared KV scheme against the scales that are stored, for one engine on one GPU."""
    known, strange = kv_scales(model)
    where = f"{scheme.key}.kv_cache_scheme"
    for stored in strange:
        text = f"{stored.name} looks like a KV-cache scale and has no spelling that engines know"
        fate = "vLLM stops at it" if engine == "vllm" else "it would be dropped"
        severity: Severity = "error" if engine == "vllm" else "warn"
        out.add(severity, "kv-scale-name", stored.name, f"{text}; {fate}.", NAMES)
    if engine == "vllm" and scheme.method != "fp8":
        _output_scales(known, out)
    if scheme.kv is None:
        if known:
            text = "KV-cache scales are stored; engines use them only with an FP8 KV cache (--kv-cache-dtype fp8)."
            out.info("kv-scales-idle", next(iter(next(iter(known.values())).values())).name, text)
        return
    if engine == "transformers":
        return
    per_head = _check_scheme(engine, scheme.kv, where, out)
    if CPU < sm < NATIVE_SM:
        text = f"The KV cache is declared FP8 (e4m3), which SM{sm[0]}{sm[1]} has no hardware for."
        fix = "Serve with --kv-cache-dtype auto and remove kv_cache_scheme from config.json."
        out.warn("kv-cache-gpu", where, text, fix)
    _check_presence(model, known, where, out)
    for pair in known.values():
        for stored in pair.values():
            elements = 1
            for extent in stored.shape:
                elements *= extent
            if elements != 1 and not per_head:
                text = f"KV-cache scale expects a scalar weight, got shape {list(stored.shape)}."
                out.error("kv-scale-shape", stored.name, text, "Store one value per layer.")


def _output_scales(known: dict[str, dict[str, Stored]], out: Findings) -> None:
    for stored in (s for pair in known.values() for s in pair.values() if s.name.endswith(".output_scale")):
        text = f"vLLM reads the spelling output_scale only with quant_method fp8, and stops at {stored.name}."
        out.error("kv-scale-name", stored.name, text, NAMES)


def _check_scheme(engine: str, kv: dict[str, Any], where: str, out: Findings) -> bool:
    strategy = kv.get("strategy", "tensor")
    wrong = []
    if str(kv.get("type", "int")).lower() != "float" or kv.get("num_bits", 8) != 8:
        wrong.append("only 8-bit float")
    if kv.get("symmetric") is False:
        wrong.append("only symmetric")
    if strategy not in ("tensor", "attn_head"):
        wrong.append(f"no strategy {strategy}")
    if engine == "sglang" and (strategy != "tensor" or kv.get("dynamic")):
        wrong.append("only static scales per tensor")
    if wrong:
        text = f"The declared KV-cache scheme is not supported: {', '.join(wrong)}."
        out.add("error" if engine == "vllm" else "warn", "kv-scheme", where, text, CONFIG)
    return bool(strategy == "attn_head")


def _check_presence(model: Model, known: dict[str, dict[str, Stored]], where: str, out: Findings) -> None:
    fix = (
        "Calibrate with `octavo calibrate MODEL --data D --out scales.json`, then `octavo quantize MODEL OUT "
        "--kv-cache fp8 --scales scales.json`; or remove kv_cache_scheme."
    )
    layers = [i for i, modules in model.layers.items() if any(m.leaf in ("k_proj", "qkv_proj") for m in modules)]
    if not known:
        text = "The KV cache is declared FP8 and no k_scale or v_scale is stored: engines use 1.0 and do not say so."
        out.warn("kv-scales-missing", where, text, fix)
        return
    for index in layers:
        pair = known.get(str(index), {})
        missing = [f"{n}_scale" for n in ("k", "v") if n not in pair]
        if missing:
            place = f"model.layers.{index}.self_attn.{missing[0]}"
            text = f"This layer has no {' and no '.join(missing)}, other layers have: it runs with 1.0."
            out.warn("kv-scales-missing", place, text, fix)
