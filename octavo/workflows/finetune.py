"""finetune: LoRA over an FP8 base, over 16 bit first, or through the rounding of the sum; TRL's trainer, a run folder.

The base stays frozen: codes, norms, embeddings and head are as loaded. Adapters, their gradients and the optimizer
are float32. Held-out perplexity is measured before and after on the same windows.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.base.allocator import prefer_expandable_segments
from octavo.base.errors import CheckpointError, ConfigError, UnsupportedError, require_type
from octavo.base.log import logger, progress
from octavo.base.packages import pip_line, version_of
from octavo.formats.recipe import Recipe
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
from octavo.workflows.training.settings import QUICK as QUICK
from octavo.workflows.training.settings import RESUME_MAY_CHANGE
from octavo.workflows.training.settings import FinetuneConfig as FinetuneConfig
from octavo.workflows.training.settings import FinetuneReport as FinetuneReport

SETTINGS = {"model", "mode", "scheme", "activation", "checkpointing", "attention"}  # that a report repeats
EVAL_CONTEXT = 512  # as octavo eval has it, so that the figures compare
TINY_BATCH = 4096  # tokens an optimizer step sees; below it the gradient is mostly noise of the few samples


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
    config, recipe, reasons = _settle(config, recipe, wrapped, run, folder)
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
    report = FinetuneReport(
        run=str(config.out),
        steps=steps,
        resumed_from=began,
        tokens_per_step=_tokens_per_step(config),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        perplexity_before=before,
        perplexity_after=None if windows is None else _held_out_perplexity(wrapped, windows),
        perplexity_quantized=_quantized(wrapped, recipe, config, windows),
        seconds=round(seconds, 3),
        seconds_per_step=round(seconds / done, 3) if done > 0 else None,
        warnings=_warnings(config),
        trainable=figures[0],
        adapted_layers=figures[1],
        fp8_layers=figures[2],
        **config.model_dump(include=SETTINGS) | reasons,
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
        free = RESUME_MAY_CHANGE | ({"activation"} if config.activation == "auto" else set())
        run.require_settings(config.model_dump(mode="json"), free)
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


def _settle(
    config: FinetuneConfig, recipe: Recipe, model: Any, run: RunFolder, folder: Path
) -> tuple[FinetuneConfig, Recipe, dict[str, str]]:
    from octavo.workflows.training.settle import settle

    config, reasons = settle(config, model, run, folder)
    return config, replace(recipe, activation=config.activation), reasons


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
