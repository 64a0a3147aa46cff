"""What octavo finetune is told, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic

from octavo.base.errors import ConfigError
from octavo.base.report import Config, Report
from octavo.formats.recipe import ACTIVATIONS, Recipe

RESUME_MAY_CHANGE = frozenset(
    {"resume", "out", "max_steps", "epochs", "report_to", "device", "eval_every", "eval_tokens", "eval_data"}
    | {"checkpointing", "attention"}
    | {"save_every", "adapter_only_every", "keep", "keep_every", "keep_best", "snapshot_url", "grace", "spot"}
)
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
    `group128` and `static` imitate the served model; `auto` is `token`, or `group128` over blocks, where that makes
    them FP8 products, on GPUs of SM89 and later, else `none`. policy: policy.json of the model, from octavo tune; the
    run keeps it, and export follows. moments: of the model, from octavo calibrate: its rounding is compensated. rank,
    alpha, dropout, rslora, target_modules: of LoRA. warmup: steps, or a share of them if below 1. max_steps: instead of
    epochs. packing: cut samples of exactly `context` tokens from the joined text (default for texts). completion_only:
    count the loss on answers only (default where the data says prompt and completion). checkpointing: `full` runs every
    layer again in backward, `selective` all of it but the attention; `auto` is `none` where the planner says that it
    fits, else `full`. attention: of Transformers; one that does not run is named in a warning, and sdpa or eager runs;
    `auto` is flash_attention_4 where it is installed, on SM90 and later, else the model's own.
    resume: `auto` continues `out` where it has something to continue, `must` insists, `never` wants a new folder.
    save_every: steps that a kill costs at most; a snapshot is due twice as often. adapter_only_every, eval_every: steps
    between; 0 for never; of adapter-only snapshots those since the last full one stay. keep, keep_every, keep_best:
    full snapshots that stay: the last, those at multiples, the one with the best held-out perplexity. snapshot_url:
    object storage to copy them to. grace: seconds for the last snapshot after SIGTERM, SIGINT or (with spot) the notice
    of EC2.
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
    activation: str = "auto"
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
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    attention: Literal["auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "sdpa", "eager"] = "auto"
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
        if self.mode == "two-stage" and self.activation not in ("auto", "none"):
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
        activation = "none" if self.activation == "auto" else self.activation
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation '{activation}' is unknown", need=", ".join(("auto", *ACTIVATIONS)))
        rule = {"scale_format": self.scale_format, "rounding": "compensated" if self.moments else "nearest"}
        return Recipe.named(self.scheme, activation=activation, skip=self.skip, **rule)


class FinetuneReport(Report):
    """activation_reason, checkpointing_reason: why `auto` chose them. trainable: parameters of the adapter. first_loss,
    last_loss: of the first and last step of this call, nats. perplexity_*: held out, None without eval_data: before
    training, after it, and in mode two-stage with the adapter merged and the linears quantized. seconds: training
    alone. warnings: what to know before relying on the result.
    """

    run: str
    model: str
    mode: str
    scheme: str
    activation: str
    activation_reason: str
    checkpointing: str
    checkpointing_reason: str
    attention: str
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
