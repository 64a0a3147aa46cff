"""One engine's judgement of a folder: its plan against the tensors, the GPU, the tensor-parallel size, the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.workflows.rules import sglang, transformers, vllm
from octavo.workflows.rules.engine import Plan, Target, Voice, compare
from octavo.workflows.rules.findings import CONFIG, WRITE_ANEW, Findings
from octavo.workflows.rules.kernels import CPU, NONE, SM, Kernel, kernel_for, kind_of
from octavo.workflows.rules.kv_cache import check_kv_cache
from octavo.workflows.rules.model import Model
from octavo.workflows.rules.scheme import Scheme
from octavo.workflows.rules.tensor_parallel import max_tp, split_problems


class Rules(Protocol):
    """What an engine's file offers."""

    NEWEST: str
    RELEASES: tuple[str, ...]
    TABLE: dict[str, dict[SM, Kernel]]
    VOICE: Voice
    MIN_SM: Mapping[str, SM]
    plan: Callable[[Model, Scheme, Target, Findings], Plan]


ENGINES: dict[str, Rules] = {"vllm": vllm, "sglang": sglang, "transformers": transformers}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Judgement:
    """plan: what the engine builds. kernels: kind of layer -> kernel. max_tp: 0 when unknown or none."""

    plan: Plan
    kernels: dict[str, Kernel]
    max_tp: int

    @property
    def kernel(self) -> str:
        names = list(dict.fromkeys(k.name for k in self.kernels.values()))
        return " + ".join(names) if names else "16-bit matmul"

    @property
    def mode(self) -> str:
        modes = list(dict.fromkeys(k.mode for k in self.kernels.values()))
        return "+".join(modes) if modes else "w16a16"


def parse_version(text: str) -> tuple[int, ...]:
    """`0.33.0rc1` -> (0, 33, 0); () when there is no number at the start."""
    parts = []
    for part in text.strip().removeprefix("v").split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit()) if part[:1].isdigit() else ""
        number = digits and part[: len(part) - len(part.lstrip("0123456789"))]
        if not number:
            break
        parts.append(int(number))
    return tuple(parts)


def known_version(engine: str, version: str) -> bool:
    """Whether a release's rules were read. `0.33` covers 0.33.1."""
    parts = parse_version(version)
    known = [parse_version(release) for release in ENGINES[engine].RELEASES]
    return any(parts[: len(release)] == release for release in known)


def judge(engine: str, model: Model, scheme: Scheme, target: Target, out: Findings) -> Judgement:
    """Findings of one engine on one GPU go to `out`."""
    rules = ENGINES[engine]
    if scheme.method not in ("fp8", "compressed-tensors", "modelopt"):
        _no_fp8(model, scheme, rules.VOICE, out)
        return Judgement(Plan(scheme), {}, 0)
    plan = rules.plan(model, scheme, target, out)
    minimum = rules.MIN_SM.get(scheme.method)
    if minimum is not None and CPU < target.sm < minimum:
        text = (
            f"The quantization method {scheme.method} is not supported for the current GPU. "
            f"Minimum capability: {minimum[0]}{minimum[1]}. Current capability: {target.sm[0]}{target.sm[1]}."
        )
        out.error("gpu-too-old", f"--gpu {target.gpu}", text, "Serve on a newer GPU, or in 16 bit.")
    compare(model, plan, rules.VOICE, out)
    kernels = _kernels(engine, rules, model, plan, target)
    _kernel_notes(engine, model, plan, kernels, target, out)
    _whole_blocks(model, plan, kernels, rules.VOICE, target, out)
    _dtype(engine, model, plan, kernels, out)
    check_kv_cache(engine, model, scheme, target.sm, out)
    largest = _tensor_parallel(engine, model, plan, target, out)
    return Judgement(plan, kernels, largest)


def _no_fp8(model: Model, scheme: Scheme, voice: Voice, out: Findings) -> None:
    if scheme.method == "none":
        compare(model, Plan(scheme), voice, out)
        if model.fp8:
            text = "The weights are FP8 and no config says so: every engine would take the codes for weights."
            out.error("quant-config-missing", "config.json: quantization_config", text, CONFIG)
        else:
            out.info("not-quantized", "config.json", "The checkpoint is not quantized.")
    elif scheme.method != "unknown":
        text = f"quant_method {scheme.method} is not FP8: only files and 16-bit tensors were checked."
        out.info("not-checked", f"{scheme.key}.quant_method", text)


def _kernels(engine: str, rules: Rules, model: Model, plan: Plan, target: Target) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for name, built in plan.modules.items():
        weights = built.weights
        if weights is None or weights.strategy not in ("tensor", "channel", "block"):
            continue
        role = model.modules[name].role
        kind = kind_of(weights.strategy, weights.activation, expert=role == "expert")
        if kind not in found:
            found[kind] = kernel_for(rules.TABLE, kind, target.sm, weights.activation)
            if engine == "transformers":
                found[kind] = transformers.mode_note(plan.scheme) or found[kind]
            if engine == "vllm" and model.model_type in vllm.NO_DEEP_GEMM and "DeepGEMM" in found[kind].name:
                found[kind] = Kernel("CUTLASS", "w8a8", "DeepGEMM is switched off for this family")
    return found


def _kernel_notes(
    engine: str, model: Model, plan: Plan, kernels: dict[str, Kernel], target: Target, out: Findings
) -> None:
    for kind, kernel in kernels.items():
        where = f"--gpu {target.gpu}"
        if kernel is NONE:
            if target.sm == CPU:
                text = f"No {kind} kernel for CPUs is known; compressed-tensors by channel is the one that runs there."
                out.warn("no-cpu-kernel", where, text, WRITE_ANEW)
            continue
        if engine == "vllm" and kind == "block" and target.sm == (8, 9):
            text = (
                "Block scales (weight_block_size 128x128) run weight-only (W8A16, Marlin) on SM89: vLLM has no block "
                "W8A8 kernel for Ada. Channel scales use the FP8 units."
            )
            out.warn("block-on-ada", where, text, WRITE_ANEW)
        elif engine == "vllm" and kind.endswith("block") and target.sm == CPU:
            text = "Failed to find a kernel: block scales on a CPU need AMX tile support."
            out.warn("no-cpu-kernel", where, text, WRITE_ANEW)
        elif kernel.note:
            out.info("kernel", where, f"{kind}: {kernel.name}, {kernel.mode}: {kernel.note}.")


def _whole_blocks(
    model: Model, plan: Plan, kernels: dict[str, Kernel], voice: Voice, target: Target, out: Findings
) -> None:
    """W8A8 kernels quantize activations in groups of the block's columns and assert when the last is not whole."""
    for name, built in plan.modules.items():
        module, weights = model.modules[name], built.weights
        if weights is None or weights.block is None or module.weight is None or name in plan.refused:
            continue
        cols, size = module.weight.shape[-1], weights.block[1]
        if cols % size == 0 or module.weight.dtype != torch.float8_e4m3fn:
            continue
        kernel = kernels.get(kind_of(weights.strategy, weights.activation, expert=module.role == "expert"), NONE)
        if kernel.mode == "w8a8":
            text = (
                f"K = {cols} is no multiple of {size}: activations cannot be quantized in whole groups, and "
                f"{voice.name} stops in the first forward pass."
            )
            out.error("ragged-k", module.weight.name, text, WRITE_ANEW)
        elif kernel.mode == "w8a16":
            text = f"K = {cols} is no multiple of {size}; weight-only kernels pad it, W8A8 kernels stop."
            out.info("ragged-k", module.weight.name, text)
    sizes = {w.block for b in plan.modules.values() if (w := b.weights) and w.block and w.block != (128, 128)}
    for block in sorted(sizes):
        text = f"Blocks of {block[0]}x{block[1]}: only the Triton kernels take other sizes than 128x128."
        out.warn("block-size", plan.scheme.key, text, WRITE_ANEW)


def _dtype(engine: str, model: Model, plan: Plan, kernels: dict[str, Kernel], out: Findings) -> None:
    if model.dtype != "float16" or engine == "transformers":
        return
    fast = [k for kind, k in kernels.items() if kind.endswith("block") and k.mode == "w8a8"]
    fix = f"Write dtype bfloat16. {CONFIG}"
    if fast:
        text = "torch_dtype float16: block FP8 kernels need BF16 outputs; the fast path is lost and serving can fail."
        out.warn("dtype-float16", "config.json: torch_dtype", text, fix)
    elif plan.scheme.method == "modelopt" and any(k.mode == "w8a8" for k in kernels.values()):
        text = "torch_dtype float16: some FP8 kernels stop with 'For FP8 input, output must have dtype BF16'."
        out.warn("dtype-float16", "config.json: torch_dtype", text, fix)


def _tensor_parallel(engine: str, model: Model, plan: Plan, target: Target, out: Findings) -> int:
    if engine == "transformers":
        return 0
    refine = engine == "vllm" and plan.scheme.method == "fp8" and target.version >= vllm.REFINE_SINCE
    last_exempt = engine == "vllm" or plan.scheme.method == "compressed-tensors"
    for code, where, message in split_problems(model, plan, target.tp, last_exempt=last_exempt, refine=refine):
        fix = f"Use a smaller --tp. {WRITE_ANEW}"
        out.error(code, where, message, fix)
    return max_tp(model, plan, last_exempt=last_exempt, refine=refine)
