"""The vLLM command that fits a checkpoint and a GPU. Every flag that is not the engine's default has its note.

Facts about vLLM 0.32 and 0.33 (their sources: v1 kernel lists, quantization/, config/): `--kv-cache-dtype auto` turns
to FP8 where the checkpoint declares a scheme for it, with scale 1.0 where it holds none; FP8 weights need no
`--quantization`, the checkpoint's own config decides; DeepGEMM rounds FP32 block scales up to powers of two.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field

from octavo.base.errors import CheckpointError, ConfigError, RefusedError, UnsupportedError, require_type
from octavo.base.hardware import HardwareCaps, caps_named, caps_of
from octavo.base.report import Config, Report
from octavo.formats.architectures import ROW_PARALLEL
from octavo.formats.granularity import PerBlock
from octavo.formats.scale import is_power_of_two
from octavo.store.adapter import Adapter
from octavo.store.kv_report import KVCacheReport
from octavo.store.kv_scales import stored_kv_scales
from octavo.store.schema import StoredScheme, parse_quantization_config, stored_scale_name
from octavo.store.tensors import Checkpoint

# What vLLM gives to weights and KV cache by default, and what we leave for activations and CUDA graphs, bytes.
GPU_SHARE, ACTIVATION_ROOM = 0.92, 2 << 30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
SAMPLED_SCALES = 8


class ServeConfig(Config):
    """folder: an exported checkpoint. gpu: by name or as sm90; empty: this machine's. tp: GPUs that share the model;
    None: as few as hold it. max_model_len: tokens; None: the model's own, or what fits. vllm: the executable.
    kv_cache_dtype: `auto` is 16 bit, unless `kv_report` (of octavo eval --kv-cache fp8 --out) calls FP8 safe for this
    very folder. extra: more arguments for vLLM, passed on as they are.
    """

    folder: Path
    gpu: str = ""
    tp: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"] = "auto"
    kv_report: Path | None = None
    host: str | None = None
    port: int | None = Field(default=None, ge=1, le=65535)
    vllm: str = "vllm"
    extra: tuple[str, ...] = ()


class ServeReport(Report):
    """command and environment: to run. shell: the same as one line to copy. notes: why, and what to know."""

    command: list[str]
    environment: dict[str, str]
    shell: str
    gpu: str
    notes: list[str]


class _Plan:
    """Flags, environment and notes as they come together."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.caps = caps_named(config.gpu) if config.gpu else caps_of()
        folder = config.folder
        self.checkpoint = Checkpoint.open(_base_folder(folder))
        self.scheme = parse_quantization_config(self.checkpoint.config)
        self.block = any(isinstance(group.granularity, PerBlock) for group in self.scheme.groups)
        self.flags: list[str] = []
        self.environment: dict[str, str] = {}
        self.notes: list[str] = []


def serve(config: ServeConfig) -> ServeReport:
    """Build the command; runs nothing. CheckpointError for a broken folder, RefusedError for what cannot work."""
    require_type("serve: config", config, ServeConfig)
    plan = _Plan(config)
    _dtype(plan)
    tp = _tensor_parallel(plan)
    length = _context(plan, tp)
    _kv_cache(plan)
    _weights(plan)
    _scales(plan)
    _lora(plan)
    if not plan.caps.is_cuda:
        space = max(1, math.ceil(4 * _kv_bytes(plan.checkpoint) * length / 2**30))
        plan.environment["VLLM_CPU_KVCACHE_SPACE"] = str(space)
    for flag in ("host", "port"):
        if (value := getattr(config, flag)) is not None:
            plan.flags += [f"--{flag}", str(value)]
    command = [config.vllm, "serve", str(plan.checkpoint.folder), *plan.flags, *config.extra]
    assignments = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    return ServeReport(
        command=command,
        environment=plan.environment,
        shell=" ".join([*assignments, shlex.join(command)]),
        gpu=str(plan.caps),
        notes=plan.notes,
    )


def find_vllm(text: str) -> str:
    """The path of the executable. UnsupportedError with what installs it."""
    if path := shutil.which(text):
        return path
    raise UnsupportedError(
        f"vLLM is not installed: no executable '{text}'",
        fix="pip install vllm, in an environment of its own since it pins its torch, then --vllm ENV/bin/vllm; "
        "--dry-run only prints the command.",
    )


def launch(report: ServeReport, *, stdout_to_stderr: bool = False) -> None:
    """Replace this process by the server, so that signals and the exit code are its own. Does not return."""
    path = find_vllm(report.command[0])
    sys.stdout.flush()
    if stdout_to_stderr:
        os.dup2(2, 1)
    os.execve(path, report.command, {**os.environ, **report.environment})


def _base_folder(folder: Path) -> Path:
    if (folder / "adapter").is_dir() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} is a run of octavo finetune, not a checkpoint", fix="Make one with: octavo export RUN OUT"
        )
    return folder


def _dtype(plan: _Plan) -> None:
    stored = plan.checkpoint.config.get("dtype", plan.checkpoint.config.get("torch_dtype"))
    dtype = _sixteen_bit(plan)
    if dtype == "float16":
        plan.notes.append(f"{plan.caps.tag} has no bfloat16: float16, whose range overflows in some models.")
    elif stored == "float16":
        plan.notes.append("The checkpoint says float16; FP8 block kernels write bfloat16 only, so bfloat16 is set.")
    plan.flags += ["--dtype", dtype]


def _tensor_parallel(plan: _Plan) -> int:
    tp, checkpoint = plan.config.tp, plan.checkpoint
    if tp is None:
        tp = 1
        while plan.caps.memory and tp < 8 and _room(plan.caps, checkpoint, tp) <= 0:
            tp *= 2
        if tp > 1:
            plan.notes.append(f"{checkpoint.nbytes / 1e9:.1f} GB of weights: {tp} GPUs like this one share them.")
    heads = checkpoint.text_config.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        raise RefusedError(f"{heads} attention heads cannot be split over {tp} GPUs", fix="Choose a divisor with --tp.")
    if tp > 1 and plan.block:
        _check_blocks(checkpoint, tp)
    if tp > 1:
        plan.flags += ["--tensor-parallel-size", str(tp)]
    return tp


def _check_blocks(checkpoint: Checkpoint, tp: int) -> None:
    """vLLM wants whole 128-blocks on every rank: columns of row-parallel layers, rows of all others."""
    for name in checkpoint.names():
        module = name.removesuffix(".weight")
        if name == module or stored_scale_name(checkpoint, module) is None:
            continue
        rows, cols = checkpoint.shape(name)[-2:]
        split = cols if module.rpartition(".")[2] in ROW_PARALLEL else rows
        if split % (tp * 128):
            raise RefusedError(
                f"{module}: {split} split over {tp} GPUs", need="whole blocks of 128 on each",
                fix="Use fewer GPUs with --tp, or octavo quantize --scheme channel, which splits anywhere.",
            )  # fmt: skip


def _context(plan: _Plan, tp: int) -> int:
    """Set --max-model-len and return it, 0 where nobody knows it."""
    own, asked = plan.checkpoint.text_config.get("max_position_embeddings"), plan.config.max_model_len
    own = own if isinstance(own, int) else 0
    if asked and own and asked > own:
        raise ConfigError("max_model_len", got=str(asked), need=f"at most {own}, what the model was made for")
    length, per_token = asked or own, _kv_bytes(plan.checkpoint)
    if plan.caps.memory and per_token:
        fits = int(_room(plan.caps, plan.checkpoint, tp) * tp / per_token)
        if fits <= 0:
            need = f"{plan.checkpoint.nbytes / tp / 1e9:.1f} GB for weights alone on each GPU, and room to compute"
            got = f"{plan.caps.memory / 1e9:.1f} GB"
            raise UnsupportedError(f"the model on {plan.caps}", got=got, need=need, fix="Share it with a larger --tp.")
        if fits < length and not asked:
            length = fits // 1024 * 1024 or fits
            plan.notes.append(f"The model takes {own} tokens; this GPU has room for a KV cache of {length}.")
    if length:
        plan.flags += ["--max-model-len", str(length)]
    return length


def _kv_cache(plan: _Plan) -> None:
    dtype: str = plan.config.kv_cache_dtype
    scales, keep = any(n.endswith("k_scale") for n in plan.checkpoint.names()), list[int]()
    if plan.config.kv_report is not None and dtype != "auto":
        got = f"kv_cache_dtype '{dtype}' and a report to choose it by"
        raise ConfigError("kv_report", got=got, fix="Leave one of them out.")
    if plan.config.kv_report is not None:
        report = KVCacheReport.load(plan.config.kv_report, plan.checkpoint)
        refusal = _why_16_bit(plan.caps, report, plan.checkpoint)
        plan.notes.append(f"KV cache in {'16 bit' if refusal else 'FP8'}: {refusal or report.reason}.")
        fp8 = "fp8_per_token_head" if report.scale == "token-head" else "fp8"
        dtype, keep = (_sixteen_bit(plan), []) if refusal else (fp8, report.keep_layers)
    elif dtype == "auto" and plan.scheme.kv_cache:
        dtype = _sixteen_bit(plan)
        plan.notes.append(
            f"KV cache in 16 bit: the checkpoint declares FP8{'' if scales else ' without scales'}, no report calls it "
            f"safe. Make one: octavo eval {plan.config.folder} --kv-cache fp8 --out kv.json, then give --kv-report."
        )
    elif dtype == "fp8_e5m2" and plan.scheme.layout != "none":
        raise RefusedError("fp8_e5m2 KV cache is not supported with FP8 checkpoints", fix="Use auto, or fp8_e4m3.")
    elif dtype.startswith("fp8"):
        if plan.caps.is_cuda and not plan.caps.native_fp8:
            raise UnsupportedError(f"FP8 E4M3 KV cache on {plan.caps}", need="sm89 or later", fix="Use auto: 16 bit.")
        if not scales and dtype != "fp8_per_token_head":
            plan.notes.append(
                "FP8 KV cache without scales in the checkpoint: scale 1.0. Compare with octavo eval first."
            )
    plan.flags += ["--kv-cache-dtype", dtype]
    if keep:
        plan.flags += ["--kv-cache-dtype-skip-layers", *map(str, keep)]


def _sixteen_bit(plan: _Plan) -> Literal["bfloat16", "float16"]:
    return "float16" if plan.caps.is_cuda and plan.caps.sm < (8, 0) else "bfloat16"


def _why_16_bit(caps: HardwareCaps, report: KVCacheReport, checkpoint: Checkpoint) -> str:
    """Why a report does not allow an FP8 cache here; empty if it does."""
    if report.verdict == "not-safe":
        return report.reason
    if caps.is_cuda and not caps.native_fp8:
        return f"{caps.tag} has no FP8 units"
    if report.scale == "token-head" and not caps.is_cuda:
        return "vLLM on a CPU has no scale per token and head"
    if report.scale == "token-head":
        return ""
    for layer in report.layers:
        stored = stored_kv_scales(checkpoint, layer.name) or (1.0, 1.0)  # 1.0: what engines then use
        measured = layer.k_scale or 0.0, layer.v_scale or 0.0
        if not all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(stored, measured, strict=True)):
            return f"the report was measured with other scales than the checkpoint holds for {layer.name}"
    if report.query == "16bit" and caps.is_cuda:
        return "the report leaves queries in 16 bit, and kernels on this GPU round them"
    return ""


def _weights(plan: _Plan) -> None:
    if plan.scheme.layout == "none":
        plan.notes.append("These weights are 16 bit: octavo quantize makes FP8, or add --quantization fp8_per_tensor.")
    elif plan.scheme.layout == "modelopt":
        plan.flags += ["--quantization", "modelopt"]
    elif not plan.caps.is_cuda and (plan.block or plan.scheme.layout == "native"):
        plan.notes.append("vLLM on a CPU runs this scheme only with AMX; the channel-wise scheme runs on AVX2 too.")
    elif plan.caps.is_cuda and not plan.caps.native_fp8:
        plan.notes.append(f"{plan.caps.tag} has no FP8 units: vLLM keeps FP8 weights and computes in 16 bit (Marlin).")
    elif plan.block and plan.caps.sm == (8, 9):
        plan.notes.append("On sm89 block scales run weight-only (Marlin); the channel scheme uses the FP8 units.")


def _scales(plan: _Plan) -> None:
    """Where block scales are not powers of two, keep DeepGEMM from rounding them: 2.65 % weight error became 3.8 %."""
    if not plan.block or not plan.caps.is_cuda or plan.caps.sm < (9, 0) or _powers_of_two(plan.checkpoint, plan.scheme):
        return
    if plan.caps.sm < (10, 0):
        plan.environment["VLLM_USE_DEEP_GEMM_E8M0"] = "0"
    else:
        plan.environment["VLLM_USE_DEEP_GEMM"] = "0"
    plan.notes.append(
        "Block scales here are not powers of two and DeepGEMM would round them: switched off. "
        "octavo quantize --scale-format po2 makes scales that need no rounding."
    )


def _powers_of_two(checkpoint: Checkpoint, scheme: StoredScheme) -> bool:
    names = [name for name in checkpoint.names() if name.endswith((".weight_scale", ".weight_scale_inv"))]
    return all(bool(is_power_of_two(checkpoint.get(name).float()).all()) for name in names[:SAMPLED_SCALES])


def _lora(plan: _Plan) -> None:
    folder = plan.checkpoint.folder / "adapter"
    if not folder.is_dir():
        return
    adapter = Adapter.open(folder)
    rank = next((r for r in LORA_RANKS if r >= adapter.rank), None)
    if rank is None:
        raise RefusedError(f"{folder}: rank {adapter.rank}", need=f"at most {LORA_RANKS[-1]}", fix="Merge it instead.")
    plan.flags += ["--enable-lora", "--lora-modules", f"adapter={folder}", "--max-lora-rank", str(rank)]
    plan.notes.append("Requests for model `adapter` use the adapter, those for the base model's name do not.")


def _kv_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of KV cache per token in 16 bit; 0 where config.json does not tell."""
    config, layers = checkpoint.text_config, checkpoint.layers
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    if config.get("kv_lora_rank"):
        return 2 * (layers or 0) * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim", 0)))
    width = config.get("head_dim") or int(config.get("hidden_size", 0)) // int(config.get("num_attention_heads") or 1)
    return 2 * 2 * (layers or 0) * int(heads or 0) * int(width)


def _room(caps: HardwareCaps, checkpoint: Checkpoint, tp: int) -> float:
    """Bytes left for the KV cache on each of `tp` GPUs."""
    return GPU_SHARE * caps.memory - checkpoint.nbytes / tp - ACTIVATION_ROOM
