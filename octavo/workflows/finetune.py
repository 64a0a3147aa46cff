"""finetune: LoRA over an FP8 base, over 16 bit first, or through the rounding of the sum; TRL's trainer, a run folder.

The base stays frozen: codes, norms, embeddings and head are as loaded. Adapters, their gradients and the optimizer
are float32. Held-out perplexity is measured before and after on the same windows.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from octavo.base.allocator import prefer_expandable_segments
from octavo.base.errors import CheckpointError, ConfigError, UnsupportedError, require_type
from octavo.base.log import logger, progress
from octavo.base.packages import pip_line, version_of
from octavo.base.report import Config, Report
from octavo.formats.recipe import ACTIVATIONS, Recipe
from octavo.integrations.data import TextData, load_data, token_windows
from octavo.integrations.hub import load_tokenizer, resolve_model
from octavo.integrations.measuring import compute_dtype, is_fp8, load_base, load_merged, perplexity
from octavo.modules.convert import convert
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.linear import Float8Linear
from octavo.store.manifest import Manifest, fingerprint
from octavo.store.moments import Moments
from octavo.store.policy import Policy, PolicyEntry
from octavo.store.run import RunFolder, whole_folder
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

EVAL_CONTEXT = 512  # as octavo eval has it, so that the figures compare
RESUME_MAY_CHANGE = frozenset(
    {"resume", "out", "max_steps", "epochs", "report_to", "device", "eval_every", "eval_tokens", "eval_data"}
    | {"save_every", "adapter_only_every", "keep", "keep_every", "keep_best", "snapshot_url", "grace", "spot"}
)
TINY_BATCH = 4096  # tokens an optimizer step sees; below it the gradient is mostly noise of the few samples

# Found by a sweep over learning rate, rank, layers and batch on the demo model and text, 20 to 60 steps of 256 to 1,024
# tokens: 20 steps of 512 lower the held-out perplexity by 14 to 17 %, 30 by 20 %, 40 of 1,024 by 28 %. Twice the
# learning rate gives the same, half of it two points less, attention alone four points less.
QUICK: dict[str, Any] = {
    "rank": 16,
    "alpha": 32,
    "learning_rate": 2e-3,
    "schedule": "linear",
    "warmup": 2,
    "max_steps": 24,
    "micro_batch": 1,
    "accumulation": 1,
    "context": 512,
}


class FinetuneConfig(Config):
    """model: a folder, a hub id or `demo`. out: the run folder. data: text, JSON lines or Parquet, a folder, a hub
    dataset or `demo`: texts, conversations, or prompts with completions. eval_data: the same, for held-out perplexity.

    mode: `lora` trains over the FP8 base that is served later; `two-stage` over the 16-bit model, which export then
    quantizes; `fp8-aware` through the rounding of base + adapter, as export merges it. scheme, scale_format, skip,
    scales: how the base is quantized. activation: what the linears do to their inputs while training; `token`,
    `group128` and `static` imitate the served model. policy: policy.json of the model, from octavo tune; the run keeps
    it, and export follows. moments: of the model, from octavo calibrate: its rounding is compensated. rank, alpha,
    dropout, rslora, target_modules: of LoRA. warmup: steps, or a share of them if below 1. max_steps: instead of
    epochs. packing: cut samples of exactly `context` tokens from the joined text
    (default for texts). completion_only: count the loss on answers only (default where the data says prompt and
    completion). gradient_checkpointing: default on GPUs. resume: `auto` continues `out` where it has something to
    continue, `must` insists, `never` wants a new folder. save_every: steps that a kill costs at most; a snapshot is due
    twice as often. adapter_only_every, eval_every: steps between; 0 for never; of adapter-only snapshots those since
    the last full one stay. keep, keep_every, keep_best: full snapshots that stay: the last, those at multiples, the one
    with the best held-out perplexity. snapshot_url: object storage to copy them to. grace: seconds for the last
    snapshot after SIGTERM, SIGINT or (with spot) the notice of EC2.
    """

    model: str
    out: Path
    data: str
    eval_data: str | None = None
    mode: Literal["lora", "two-stage", "fp8-aware"] = "lora"
    scheme: str = "channel"
    scale_format: str = "fp32"
    skip: tuple[str, ...] = ()
    policy: Path | None = None
    activation: str = "none"
    scales: Path | None = None
    moments: Path | None = None
    rank: int = pydantic.Field(16, ge=1)
    alpha: float = pydantic.Field(32, gt=0, le=1e6)
    dropout: float = pydantic.Field(0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    init: str = "default"
    learning_rate: float = pydantic.Field(2e-4, gt=0, le=1)
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    warmup: float = pydantic.Field(0.03, ge=0, le=1e9)
    weight_decay: float = pydantic.Field(0.0, ge=0, le=1)
    max_grad_norm: float = pydantic.Field(1.0, gt=0, le=1e9)
    max_steps: int | None = pydantic.Field(None, ge=1)
    epochs: float = pydantic.Field(1.0, gt=0, le=1e6)
    micro_batch: int = pydantic.Field(1, ge=1)
    accumulation: int = pydantic.Field(8, ge=1)
    context: int = pydantic.Field(1024, ge=2)
    packing: bool | None = None
    gradient_checkpointing: bool | None = None
    completion_only: bool | None = None
    seed: int = pydantic.Field(0, ge=0)
    report_to: tuple[str, ...] = ()
    resume: Literal["never", "auto", "must"] = "never"
    save_every: int = pydantic.Field(50, ge=0)
    adapter_only_every: int = pydantic.Field(0, ge=0)
    keep: int = pydantic.Field(2, ge=1)
    keep_every: int = pydantic.Field(0, ge=0)
    keep_best: bool = False
    snapshot_url: str | None = None
    grace: float = pydantic.Field(60.0, gt=0, allow_inf_nan=False)
    spot: bool = False
    eval_every: int = pydantic.Field(0, ge=0)
    eval_tokens: int = pydantic.Field(12_288, ge=2)
    device: str | None = None

    @pydantic.model_validator(mode="after")
    def _settings_go_together(self) -> FinetuneConfig:
        self.recipe()
        if self.activation == "static" and self.scales is None:
            fix = "Give --scales scales.json, written by octavo calibrate."
            raise ConfigError("activation 'static'", got="no scales", need="calibrated scales", fix=fix)
        if self.mode == "fp8-aware" and (self.activation == "static" or self.dropout):
            got = "activation 'static'" if self.activation == "static" else f"dropout {self.dropout:g}"
            raise ConfigError("mode fp8-aware", got=got, need="activation none, token or group128, and no dropout")
        if self.moments is not None and self.mode != "lora":
            raise ConfigError(f"moments in mode {self.mode}", got="a base in 16 bit", fix="Give them to octavo export.")
        if self.mode == "two-stage" and self.activation != "none":
            raise ConfigError("activation in mode two-stage", got=f"'{self.activation}'", need="'none'")
        if self.dora:
            what = "dora: it rescales by the norm of the base weight, and an export would have to undo it"
            raise ConfigError(what, fix="Use rslora, or train DoRA on the 16-bit model with PEFT.")
        if self.init not in ("default", "gaussian"):
            what = f"init '{self.init}': it decomposes or changes the base weight, which stays as FP8 codes"
            raise ConfigError(what, need="default or gaussian")
        if self.eval_every and self.eval_data is None:
            raise ConfigError("eval_every", got="no eval_data", fix="Name the held-out text with --eval-data.")
        if self.keep_best and not self.eval_every:
            raise ConfigError("keep_best", got="no eval_every", fix="Say how often to evaluate with --eval-every.")
        return self

    def recipe(self) -> Recipe:
        """The recipe of the base. ConfigError for an unknown scheme, scale format or activation."""
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation '{self.activation}' is unknown", need=", ".join(ACTIVATIONS))
        rule = {"scale_format": self.scale_format, "rounding": "compensated" if self.moments else "nearest"}
        return Recipe.named(self.scheme, activation=self.activation, skip=self.skip, **rule)


class FinetuneReport(Report):
    """trainable: parameters of the adapter. first_loss, last_loss: of the first and last step of this call, nats.

    perplexity_*: held out, None without eval_data: before training, after it, and in mode two-stage with the adapter
    merged and the linears quantized. seconds: training alone. warnings: what to know before relying on the result.
    """

    run: str
    model: str
    mode: str
    scheme: str
    activation: str
    steps: int
    resumed_from: int | None
    tokens_per_step: int
    trainable: int
    adapted_layers: int
    fp8_layers: int
    first_loss: float | None
    last_loss: float | None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    perplexity_quantized: float | None = None
    seconds: float
    seconds_per_step: float | None
    warnings: list[str] = pydantic.Field(default_factory=list)


def finetune(config: FinetuneConfig) -> FinetuneReport:
    """Train and write the run folder; `adapter/` appears in one piece at the end.

    ConfigError, DataError, CheckpointError, MismatchError: input that cannot work, before anything is written.
    RefusedError: the loss or a gradient became NaN, or the last snapshot failed; the others stay. PreemptedError: asked
    to stop, and saved. UnsupportedError: a package or device is missing.
    """
    require_type("finetune: config", config, FinetuneConfig)
    logger().info("CUDA's allocator: %s", prefer_expandable_segments())
    _require_packages(config)
    config = Policy.read(config.policy).adopt(config) if config.policy else config
    run = RunFolder(config.out)
    _may_start(config, run)
    data = load_data(config.data, "train")
    folder = resolve_model(config.model)
    tokenizer = load_tokenizer(folder)
    windows = _held_out(config, tokenizer)
    if config.mode != "lora" and is_fp8(folder):
        raise ConfigError(f"mode {config.mode}", got=f"{folder} in FP8", need="a 16-bit model", fix="Use mode lora.")
    checkpoint = Checkpoint.open(folder)
    source = fingerprint(checkpoint)
    recipe, policy = _decide(config, checkpoint, source)
    if run.steps():
        run.require_model(source)
        run.require_policy(policy)
    wrapped = _wrap(_base(config, folder, checkpoint, recipe), config)
    trainer, snapshots = _trainer(wrapped, tokenizer, data, config, run, source)
    _describe(config, run, checkpoint, recipe, policy)
    before = None if windows is None else _held_out_perplexity(wrapped, windows)
    started = time.monotonic()
    steps, began = _train(trainer, snapshots, config, windows)
    seconds = time.monotonic() - started
    with whole_folder(run.adapter) as work:
        from octavo.integrations.snapshots import save_adapter

        save_adapter(wrapped, work)
    losses, done, figures = trainer.recorder.losses, steps - (began or 0), _layers(wrapped)
    after = None if windows is None else _held_out_perplexity(wrapped, windows)
    report = FinetuneReport(
        run=str(config.out),
        steps=steps,
        resumed_from=began,
        tokens_per_step=_tokens_per_step(config),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        perplexity_before=before,
        perplexity_after=after,
        perplexity_quantized=_quantized(wrapped, recipe, config, windows),
        seconds=round(seconds, 3),
        seconds_per_step=round(seconds / done, 3) if done > 0 else None,
        warnings=_warnings(config),
        trainable=figures[0],
        adapted_layers=figures[1],
        fp8_layers=figures[2],
        **config.model_dump(include={"model", "mode", "scheme", "activation"}),
    )
    report.write(run.report)
    snapshots.close()
    return report


def _require_packages(config: FinetuneConfig) -> None:
    for package in ("peft", "trl", "datasets", "accelerate"):
        if version_of(package) is None:
            raise UnsupportedError(f"fine-tuning needs the package {package}", fix=f"Run: {pip_line('train')}")
    from octavo.integrations.trl import check_reporters

    check_reporters(config.report_to)


def _may_start(config: FinetuneConfig, run: RunFolder) -> None:
    """ConfigError where `out` is in the way, MismatchError where it began with other settings."""
    if config.resume == "never":
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            raise ConfigError(f"out {run.path} exists", fix="Give another folder, or --resume auto to continue it.")
    elif run.config.is_file() and run.steps():
        run.require_settings(config.model_dump(mode="json"), RESUME_MAY_CHANGE)
    elif config.resume == "must":
        raise CheckpointError(f"run {run.path} has no snapshot to continue from", fix="Check the path.")
    elif run.path.is_dir():
        logger().warning("%s has no snapshot: the run starts from the beginning", run.path)


def _held_out(config: FinetuneConfig, tokenizer: Any) -> torch.Tensor | None:
    if config.eval_data is None:
        return None
    texts = load_data(config.eval_data, "eval").texts(tokenizer)
    context = min(EVAL_CONTEXT, config.eval_tokens)
    return token_windows(tokenizer, texts, context, config.eval_tokens // context)


def _wrap(model: Any, config: FinetuneConfig) -> Any:
    from octavo.integrations.peft import get_peft_model, lora_config

    torch.manual_seed(config.seed)
    return get_peft_model(
        model,
        lora_config(
            model,
            rank=config.rank,
            alpha=config.alpha,
            dropout=config.dropout,
            rslora=config.rslora,
            gaussian=config.init == "gaussian",
            target_modules=config.target_modules,
        ),
    )


def _held_out_perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    return perplexity(model, windows, "Held-out perplexity").value


def _base(config: FinetuneConfig, folder: Path, checkpoint: Checkpoint, recipe: Recipe) -> Any:
    dtype = compute_dtype("auto", config.device)
    if config.mode == "fp8-aware":
        return load_merged(folder, recipe, device=config.device, dtype=dtype)
    scales = Scales.load(config.scales, model=checkpoint) if config.scales else None
    moments = Moments.open(config.moments, model=checkpoint) if config.moments else None
    rule = recipe if config.mode == "lora" else None
    return load_base(folder, rule, device=config.device, dtype=dtype, scales=scales, moments=moments)


def _decide(config: FinetuneConfig, checkpoint: Checkpoint, source: str) -> tuple[Recipe, Policy]:
    """The recipe, and what it makes of every module, written down so that the export does the same."""
    tuned = Policy.load(config.policy, model=checkpoint) if config.policy else None
    recipe = tuned.apply(config.recipe()) if tuned else config.recipe()
    schemes = {name: entry.scheme for name, entry in tuned.exceptions()} if tuned else {}
    entries = {}
    for name, found in recipe.assign(checkpoint.shapes(), layers=checkpoint.layers).items():
        if found.rule is not None:
            scheme, rule = schemes.get(name, ""), str(found.rule)
            entries[name] = PolicyEntry(precision="fp8", scheme=scheme, rule=rule, reason=found.reason)
        elif found.role not in ("norm", "other"):
            entries[name] = PolicyEntry(precision="16bit", reason=found.reason)
    return recipe, Policy(model_fingerprint=source, modules=entries)


def _describe(config: FinetuneConfig, run: RunFolder, checkpoint: Checkpoint, recipe: Recipe, policy: Policy) -> None:
    """Everything about the run that is known before the first step."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_config(config.model_dump(mode="json"))
    run.write_policy(policy)
    options = {"model": str(checkpoint.folder.resolve())}
    made = Manifest.collect("octavo finetune", recipe=recipe, source=policy.model_fingerprint, options=options)
    made.write(run.manifest)
    if config.scales and config.scales.resolve() != run.scales.resolve():
        shutil.copyfile(config.scales, run.scales)


def _trainer(
    model: Any, tokenizer: Any, data: TextData, config: FinetuneConfig, run: RunFolder, source: str
) -> tuple[Any, Any]:
    """Everything that can be wrong with data and settings shows here, before the run folder has a file."""
    from octavo.integrations.trl import Recorder, SftOptions, build_trainer, run_snapshots

    settings = config.model_dump()
    settings["packing"] = data.kind == "text" if config.packing is None else config.packing
    settings["max_steps"] = config.max_steps or -1
    if config.gradient_checkpointing is None:
        settings["gradient_checkpointing"] = next(model.parameters()).device.type != "cpu"
    options = SftOptions(**{field.name: settings[field.name] for field in fields(SftOptions)})
    recorder, snapshots = Recorder(run), run_snapshots(run, source, settings)
    existed = run.path.exists()
    try:
        return build_trainer(model, tokenizer, data, options, run, recorder, snapshots), snapshots
    except BaseException:
        if run.path.exists() and not existed:
            run.path.rmdir()  # the Trainer makes it
        raise


def _train(
    trainer: Any, snapshots: Any, config: FinetuneConfig, windows: torch.Tensor | None
) -> tuple[int, int | None]:
    """The number of the last step, and that of the snapshot it continued from."""
    from octavo.integrations.trl import train

    evaluate = None if windows is None else partial(_held_out_perplexity, trainer.model, windows)
    with progress("Fine-tuning", config.max_steps) as advance:
        trainer.recorder.report_to(advance, evaluate, config.eval_every)
        steps, began = train(trainer, snapshots, config.resume)
    return int(steps), began


def _quantized(model: Any, recipe: Recipe, config: FinetuneConfig, windows: torch.Tensor | None) -> float | None:
    """Mode two-stage: what the second stage costs. Merges and quantizes in memory: the last use."""
    if config.mode != "two-stage" or windows is None:
        return None
    return _held_out_perplexity(convert(model.merge_and_unload(), recipe), windows)


def _layers(model: Any) -> tuple[int, int, int]:
    """Trainable parameters, layers with an adapter, layers in FP8."""
    from octavo.integrations.peft import adapted_layers

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    fp8 = sum(isinstance(m, Float8Linear | FrozenFloat8Linear) for m in model.modules())
    return trainable, len(adapted_layers(model)), fp8


def _tokens_per_step(config: FinetuneConfig) -> int:
    return config.micro_batch * config.accumulation * config.context


def _warnings(config: FinetuneConfig) -> list[str]:
    if (tokens := _tokens_per_step(config)) >= TINY_BATCH:
        return []
    more = f"raise accumulation {-(-TINY_BATCH // tokens)} times"
    text = f"an optimizer step sees at most {tokens} tokens: for a run that counts, {more}"
    logger().warning(text)
    return [text]
