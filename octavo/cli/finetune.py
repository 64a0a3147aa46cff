"""octavo finetune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import ACTIVATIONS, SCHEMES, AsJson, Device, Policy, Result, flags, option
from octavo.cli.render import number, pairs

if TYPE_CHECKING:
    from octavo.workflows.finetune import FinetuneReport

RunFile = Annotated[
    Path | None,
    typer.Argument(metavar="RUN.yaml", help="Settings, with the names of the flags; flags win.", show_default=False),
]
ATTENTIONS = "auto|flash_attention_4|flash_attention_3|flash_attention_2|sdpa|eager"
SCHEDULES = "linear|cosine|constant|constant_with_warmup"
CompletionOnly = Annotated[
    bool | None, option("Loss on answers only.", None, None, "--completion-only/--no-completion-only")
]


def finetune(
    ctx: typer.Context,
    config: RunFile = None,
    model: Annotated[str | None, option("A folder, a hub id, or demo.", None, "MODEL")] = None,
    out: Annotated[Path | None, option("The run folder.", None, "DIR")] = None,
    data: Annotated[str | None, option("Texts, conversations, or prompts with completions.", None, "DATA")] = None,
    eval_data: Annotated[str | None, option("For held-out perplexity.", None, "DATA")] = None,
    mode: Annotated[str | None, option("Over the FP8 base, or else.", "lora", "lora|two-stage|fp8-aware")] = None,
    scheme: Annotated[str | None, option("Of the base.", "channel", SCHEMES)] = None,
    scale_format: Annotated[str | None, option("Of its scales.", "fp32", "fp32|po2")] = None,
    skip: Annotated[list[str] | None, option("Stays in 16 bit: a name, a glob, or re:...", None, "PATTERN")] = None,
    policy: Policy = None,
    activation: Annotated[str | None, option("Round activations as served.", "auto", f"auto|{ACTIVATIONS}")] = None,
    scales: Annotated[Path | None, option("scales.json, for static activations.", None, "FILE")] = None,
    moments: Annotated[Path | None, option("Of calibrate: compensated rounding of the base.", None, "DIR")] = None,
    rank: Annotated[int | None, option("Of LoRA.", 16)] = None,
    alpha: Annotated[float | None, option("Of LoRA.", 32)] = None,
    dropout: Annotated[float | None, option("Of LoRA.", 0.0)] = None,
    target_modules: Annotated[list[str] | None, option("By default all linears.", None, "NAME")] = None,
    rslora: Annotated[bool | None, option("Rank-stabilised scaling.", False, None, "--rslora/--no-rslora")] = None,
    dora: Annotated[bool | None, option("Refused, with the reason.", False, None, "--dora/--no-dora")] = None,
    init: Annotated[str | None, option("default or gaussian.", "default")] = None,
    learning_rate: Annotated[float | None, option("At its height.", 2e-4)] = None,
    schedule: Annotated[str | None, option("Of the learning rate.", "cosine", SCHEDULES)] = None,
    warmup: Annotated[float | None, option("Steps, or a share below 1.", 0.03)] = None,
    weight_decay: Annotated[float | None, option("Of AdamW.", 0.0)] = None,
    max_grad_norm: Annotated[float | None, option("Longer gradients are cut.", 1.0)] = None,
    max_steps: Annotated[int | None, option("Instead of epochs.")] = None,
    epochs: Annotated[float | None, option("Times through the data.", 1.0)] = None,
    micro_batch: Annotated[int | None, option("Samples in one pass.", 1)] = None,
    accumulation: Annotated[int | None, option("Passes in one step.", 8)] = None,
    context: Annotated[int | None, option("Tokens of a sample.", 1024)] = None,
    packing: Annotated[bool | None, option("Cut full samples.", None, None, "--packing/--no-packing")] = None,
    checkpointing: Annotated[str | None, option("What runs again.", "auto", "auto|none|selective|full")] = None,
    attention: Annotated[str | None, option("Of Transformers.", "auto", ATTENTIONS)] = None,
    completion_only: CompletionOnly = None,
    seed: Annotated[int | None, option("Of adapters and order.", 0)] = None,
    report_to: Annotated[list[str] | None, option("tensorboard, wandb, trackio.", None, "NAME")] = None,
    resume: Annotated[str | None, option("auto continues what is there.", "never", "never|auto|must")] = None,
    save_every: Annotated[int | None, option("Steps a kill can cost at most, 0: no snapshots.", 50)] = None,
    adapter_only_every: Annotated[int | None, option("Steps between saves of the adapter alone.", 0)] = None,
    keep: Annotated[int | None, option("Snapshots that stay.", 2)] = None,
    keep_every: Annotated[int | None, option("Those at multiples stay too, 0: none.", 0)] = None,
    keep_best: Annotated[bool | None, option("The best stays.", False, None, "--keep-best/--no-keep-best")] = None,
    snapshot_url: Annotated[str | None, option("Copy snapshots to object storage.", None, "s3://...")] = None,
    grace: Annotated[float | None, option("Seconds for the last snapshot when asked to stop.", 60.0)] = None,
    spot: Annotated[bool | None, option("Watch for EC2's spot notice.", False, None, "--spot/--no-spot")] = None,
    eval_every: Annotated[int | None, option("Steps between evaluations, 0: none.", 0)] = None,
    eval_tokens: Annotated[int | None, option("Held-out tokens.", 12288)] = None,
    device: Device = None,
    json: AsJson = False,
) -> Result:
    """LoRA over an FP8 base, or over 16 bit and then quantized: writes a run folder."""
    from octavo.workflows.finetune import FinetuneConfig
    from octavo.workflows.finetune import finetune as workflow

    report = workflow(FinetuneConfig.load(config, flags(ctx)))
    return Result(report, _lines(report))


def _lines(report: FinetuneReport) -> list[object]:
    facts: dict[str, object] = {
        "run": report.run,
        "adapter": f"{report.trainable:,} parameters on {report.adapted_layers} linears, {report.fp8_layers} in FP8",
        "activation": f"{report.activation}: {report.activation_reason}",
        "checkpointing": f"{report.checkpointing}: {report.checkpointing_reason}",
        "steps": f"{report.steps}, up to {report.tokens_per_step} tokens each, {report.seconds:.0f} s",
        "loss, first and last step": f"{number(report.first_loss)}, {number(report.last_loss)}",
        "held-out perplexity before": report.perplexity_before,
        "after": report.perplexity_after,
        "quantized": report.perplexity_quantized,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    return [pairs(known), f"next: octavo export {report.run} OUT"]
