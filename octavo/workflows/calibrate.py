"""calibrate: a few hundred samples through a model -> scales.json: ranges of activations and of the KV cache, the error
FP8 makes in every linear, and which linears feel it most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic
import safetensors.torch
import torch
from torch import nn

from octavo.base.errors import CheckpointError, ConfigError, require_type
from octavo.base.log import logger, progress
from octavo.base.report import Config, Report, atomic_write
from octavo.formats.architectures import fused_group
from octavo.formats.recipe import Recipe
from octavo.formats.scale import ZERO_TILE_SCALE, scale_of
from octavo.formats.spec import E4M3
from octavo.integrations import measuring
from octavo.integrations.data import calibration_samples
from octavo.integrations.moments import gather_moments
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.observers import PERCENTILES, CacheObserver, InputObserver, InputStats
from octavo.modules.sensitivity import float_weight, output_error, weight_errors
from octavo.modules.static_scale import static_scale
from octavo.store.manifest import fingerprint
from octavo.store.scales import KVScales, ModuleScales, Scales
from octavo.store.tensors import Checkpoint

# Inputs kept to measure the error of outputs: this many rows a linear, fewer where that would take more memory.
ERROR_ROWS, ERROR_BYTES = 256, 512 * 2**20
MOST_SENSITIVE = 10


class CalibrateConfig(Config):
    """model: a folder, hub id or `demo`. data: a text, JSON lines or Parquet file, a folder, a hub dataset or `demo`.

    samples: windows of `context` tokens, or conversations cut to it; fewer if the data holds fewer.
    channels: write the largest input of every channel too, into a safetensors file beside `out`.
    moments: a folder for the second moments of the inputs, which compensated rounding needs. weighting: of the tokens
    in them: `none`, or `fisher`, as much as the loss depends on each. sequential: each block sees what the blocks
    before it, rounded by `scheme`, make of the samples; the moments then belong to that scheme. input_scale: how static
    scales are chosen, see `octavo.modules.static_scale`.
    scheme, activation: of the W8A8 error that ranks the linears. dtype: of the arithmetic.
    """

    model: str
    data: str = "demo"
    out: Path = Path("scales.json")
    samples: int = pydantic.Field(128, ge=1)
    context: int = pydantic.Field(512, ge=2)
    channels: bool = True
    moments: Path | None = None
    weighting: Literal["none", "fisher"] = "fisher"
    sequential: bool = False
    input_scale: Literal["amax", "mse"] = "mse"
    scheme: Literal["channel", "block128", "tensor"] = "channel"
    activation: Literal["static", "token", "group128"] = "token"
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @pydantic.model_validator(mode="after")
    def _sequential_gathers_moments(self) -> CalibrateConfig:
        if self.sequential and self.moments is None:
            raise ConfigError("sequential", got="no moments to gather", fix="Name their folder with --moments DIR.")
        return self


class CalibrateReport(Report):
    """out, channels_file: what was written. unseen: linears that no token reached; they have no scale.

    sensitive: (linear, SQNR of its output in dB), worst first.
    """

    out: Path
    channels_file: Path | None
    moments: Path | None
    model: str
    model_fingerprint: str
    data_fingerprint: str
    samples: int
    tokens: int
    modules: int
    unseen: list[str]
    kv_layers: int
    sensitive: list[tuple[str, float | None]]
    seconds: float


@dataclass(frozen=True)
class Target:
    """A linear as the checkpoint stores it. weight: read when asked for, float32 [N, K]."""

    name: str
    stats: InputStats
    weight: Callable[[], torch.Tensor]


def calibrate(config: CalibrateConfig) -> CalibrateReport:
    """Run the samples one at a time, measure every linear, write `config.out` (and its companion) atomically.

    DataError for data that is unreadable, empty or shorter than one sample; CheckpointError for a model that does not
    load or whose activations hold NaN or Inf (the layer is named).
    """
    require_type("calibrate: config", config, CalibrateConfig)
    started = time.monotonic()
    if measuring.is_run(config.model):
        fix = "Calibrate its base, or the checkpoint that octavo export writes."
        raise ConfigError(f"{config.model} is a run folder", need="a model", fix=fix)
    dtype = measuring.compute_dtype(config.dtype, config.device)
    opened = measuring.open_model(config.model, recipe=None, activation="none", device=config.device, dtype=dtype)
    context = opened.context(config.context)
    data, samples = calibration_samples(opened.tokenizer, config.data, config.samples, context)
    opened.require_known(samples)
    inputs, kv = observe(opened.model, samples)
    checkpoint = Checkpoint.open(opened.folder)
    stored = measuring.stored_names(opened.model, checkpoint)
    targets = stored_targets(opened.model, inputs, stored)
    modules = measure(targets, config)
    unseen = sorted(target.name for target in targets if not target.stats.tokens)
    channels_file = config.out.with_suffix(".channels.safetensors") if config.channels else None
    if channels_file:
        write_channels(channels_file, targets)
    scales = Scales(
        model_fingerprint=fingerprint(checkpoint),
        data_fingerprint=data.fingerprint,
        samples=len(samples),
        tokens=sum(map(len, samples)),
        modules=modules,
        input_scale_method=config.input_scale,
        unseen=unseen,
        kv=kv_scales(kv, measuring.attention_names(opened.model, stored), checkpoint.text_config.get("kv_lora_rank")),
        channels_file=channels_file.name if channels_file else None,
    )
    scales.write(config.out)
    if config.moments:
        recipe = Recipe.named(config.scheme, rounding="compensated") if config.sequential else None
        settings = data.fingerprint, samples, config.moments, config.weighting
        gather_moments(opened, *settings, sequential=recipe, every=1)
    ranked = sorted(modules, key=lambda name: modules[name].rank or 0)
    return CalibrateReport(
        out=config.out,
        channels_file=channels_file,
        moments=config.moments,
        model=config.model,
        modules=len(modules),
        kv_layers=len(scales.kv),
        sensitive=[(name, modules[name].w8a8_sqnr_db) for name in ranked[:MOST_SENSITIVE]],
        seconds=time.monotonic() - started,
        **scales.model_dump(include={"model_fingerprint", "data_fingerprint", "samples", "tokens", "unseen"}),
    )


def observe(model: nn.Module, samples: list[torch.Tensor]) -> tuple[InputObserver, CacheObserver]:
    """Send every sample through the layers of a Transformers model; only one sample's activations exist at a time."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    taken = [name for name, decision in Recipe().assign(shapes).items() if decision.rule is not None]
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    watched = [name for name in taken if name in linears or len(shapes.get(name, ())) == 3]
    if not watched:
        raise CheckpointError(f"{type(model).__name__} has no linear to calibrate", need="layers of type nn.Linear")
    if any(isinstance(module, FrozenFloat8Experts) for module in model.modules()):
        raise ConfigError("a mixture of experts whose experts are FP8", fix="Calibrate the original 16-bit model.")
    measuring.show_experts(model)
    inputs, kv = InputObserver(model, watched, rows_per_sample(shapes, watched, len(samples))), CacheObserver()
    with inputs, progress("Calibrating", len(samples)) as advance:
        for sample in samples:
            cache = measuring.new_cache(model)
            measuring.run_layers(model, sample, cache if cache is None else kv.watch(cache))
            advance(1)
    return inputs, kv


def rows_per_sample(shapes: Mapping[str, tuple[int, ...]], watched: list[str], samples: int) -> int:
    """Rows to keep of every linear and sample, so that all together stay within ERROR_ROWS and ERROR_BYTES."""
    wide = 0
    for name in watched:
        shape = shapes.get(f"{name}.weight", shapes.get(name, (0, 0)))
        wide += shape[-1] * (shape[0] if len(shape) == 3 else 1)
    rows = min(ERROR_ROWS, ERROR_BYTES // (4 * max(wide, 1)))
    return max(1, -(-rows // samples))


def stored_targets(model: nn.Module, inputs: InputObserver, stored: measuring.StoredNames) -> list[Target]:
    """What was observed, by the names of the checkpoint: most hold every expert, and its gate and up, on their own."""
    targets = []
    for name, stats in inputs.stats.items():
        owner, expert, leaf = [*name.rsplit(".", 2), "", ""][:3]
        stack = inputs.stack(f"{owner}.{leaf}")
        if stack is None:
            names = stored(f"{name}.weight")
            known = names[0][0] if len(names) == 1 and len(names[0]) == 1 else name
            targets.append(Target(known, stats, _linear_weight(model.get_submodule(name))))
            continue
        weight = _expert_weight(stack, int(expert), f"{owner}.{leaf}" in inputs.transposed)
        names = stored(f"{owner}.{leaf}")
        if names and all(len(part) == len(stack) for part in names):
            parts = enumerate(part[int(expert)] for part in names)
            targets += [Target(part, stats, _part(weight, i, len(names))) for i, part in parts]
        else:
            targets.append(Target(name, stats, weight))
    return targets


def measure(targets: list[Target], config: CalibrateConfig) -> dict[str, ModuleScales]:
    """Errors and scales of every linear that was given tokens, ranked: 1 is the one whose output suffers most."""
    found: dict[str, ModuleScales] = {}
    groups: dict[str, list[Target]] = {}
    for target in targets:
        fused = fused_group(target.name)
        groups.setdefault(fused[0] if fused else target.name, []).append(target)
    with progress("Measuring errors", len(targets)) as advance:
        for group in groups.values():
            weights = [target.weight() for target in group]
            for target, weight, errors in zip(group, weights, weight_errors(weights), strict=True):
                if target.stats.tokens:
                    found[target.name] = _module_scales(target.name, target.stats, weight, errors, config)
                advance(1)
    ranked = sorted(found, key=lambda name: (_db(found[name]), name))
    ranks = {name: rank for rank, name in enumerate(ranked, 1)}
    return {name: entry.model_copy(update={"rank": ranks[name]}) for name, entry in found.items()}


def kv_scales(kv: CacheObserver, names: Mapping[int, str], latent: int | None) -> dict[str, KVScales]:
    """Ranges and scales by attention module. names: of layers. latent: kv_lora_rank of a model with latent attention.

    Such a model keeps one latent vector with its rotary part; engines store the two as one, with one scale. Where
    Transformers caches expanded keys and values instead, what it shows is not what is served: nothing is recorded.
    """
    result = {}
    for layer, (k, v) in sorted(kv.ranges.items()):
        k_amax, v_amax = float(k.max()), float(v.max())
        if latent is not None:
            if kv.widths[layer] != latent:
                logger().warning("layer %d caches expanded keys, not the latent ones: no KV scale is written", layer)
                continue
            k_amax = v_amax = max(k_amax, v_amax)
        name = names.get(layer, str(layer))
        scales = {"k_scale": _scale(k_amax, name), "v_scale": _scale(v_amax, name)}
        result[name] = KVScales(k_amax=k_amax, v_amax=v_amax, **scales)
    return result


def write_channels(path: Path, targets: list[Target]) -> None:
    """`NAME.input_channel_amax`, float32 [K], of every linear that was given tokens."""
    seen = {f"{t.name}.input_channel_amax": t.stats.channel_amax.cpu().clone() for t in targets if t.stats.tokens}
    atomic_write(path, safetensors.torch.save(seen))


def _module_scales(
    name: str, stats: InputStats, weight: torch.Tensor, errors: dict[str, float], config: CalibrateConfig
) -> ModuleScales:
    amax = stats.amax or 0.0
    inputs = stats.sample().to(weight.device)
    _scale(amax, name)  # says no to what is not finite
    scale = static_scale(stats, config.input_scale) or ZERO_TILE_SCALE
    static = scale if config.activation == "static" else None
    return ModuleScales(
        input_amax=amax,
        input_scale=scale,
        input_percentiles={f"{p:g}": stats.percentile(p) or 0.0 for p in PERCENTILES},
        weight_sqnr_db={name: _finite(db) for name, db in errors.items()},
        w8a8_sqnr_db=_finite(output_error(inputs, weight, config.scheme, config.activation, static)),
    )


def _db(entry: ModuleScales) -> float:
    return math.inf if entry.w8a8_sqnr_db is None else entry.w8a8_sqnr_db


def _scale(amax: float, name: str) -> float:
    if not math.isfinite(amax):
        fix = "Try --dtype float32; if it stays, the model itself is broken."
        raise CheckpointError(
            f"calibration of {name}", got=f"activations that reach {amax}", need="finite ones", fix=fix
        )
    return float(scale_of(torch.tensor(amax), E4M3))


def _finite(db: float) -> float | None:
    return None if db == math.inf else db


def _linear_weight(linear: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: float_weight(linear)


def _expert_weight(stack: nn.Parameter, expert: int, transposed: bool) -> Callable[[], torch.Tensor]:
    return lambda: (stack[expert].T if transposed else stack[expert]).detach().float()


def _part(weight: Callable[[], torch.Tensor], index: int, parts: int) -> Callable[[], torch.Tensor]:
    return lambda: weight().chunk(parts)[index]
