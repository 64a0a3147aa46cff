"""What `auto` stands for in a fine-tune, decided on the loaded model with its adapters, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.base.allocator import expandable_segments
from octavo.base.errors import ConfigError, MismatchError
from octavo.base.log import logger
from octavo.integrations.attention import choose_attention
from octavo.integrations.fast_path import Chosen, choose_activation
from octavo.store.run import RunFolder
from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import read_model
from octavo.workflows.planner.tables import GIB
from octavo.workflows.training.settings import FinetuneConfig


def settle(config: FinetuneConfig, model: Any, run: RunFolder, folder: Path) -> tuple[FinetuneConfig, dict[str, str]]:
    """The config without `auto`, and the reasons by their names in the report. Sets activation and attention.

    A run that goes on keeps the activation it began with.
    """
    activation = Chosen(config.activation, "as asked for")
    if config.activation == "auto":
        activation = _activation(config, model, run)
    mode, why = str(config.checkpointing), "as asked for"
    if mode == "auto":
        mode, why = choose_checkpointing(config, folder, next(model.parameters()).device)
    logger().info("activation %s: %s", activation.activation, activation.reason)
    logger().info("checkpointing %s: %s", mode, why)
    attention = choose_attention(model, config.attention)
    chosen = {"activation": activation.activation, "checkpointing": mode, "attention": attention}
    return config.model_copy(update=chosen), {"activation_reason": activation.reason, "checkpointing_reason": why}


def _activation(config: FinetuneConfig, model: Any, run: RunFolder) -> Chosen:
    if config.mode != "lora":
        return Chosen("none", f"mode {config.mode}")
    if not run.steps():
        return choose_activation(model)
    began = str(run.read_config()["activation"])
    if began == "static":
        fix = "Give --activation static and its --scales."
        raise MismatchError(f"{run.path} was trained with other settings: activation", got="auto", need=began, fix=fix)
    return choose_activation(model, Chosen(began, "as the run began"))


def choose_checkpointing(config: FinetuneConfig, folder: Path, device: torch.device) -> tuple[str, str]:
    """`none` or `full`, and the reason: the planner's account against what the device has free.

    The account is that of layers run one by one, and its upper bound; fused FP8 layers need less.
    """
    if device.type != "cuda":
        return "none", f"on a {device.type.upper()} it would cost time alone"
    setup = Setup(
        precision="fp8" if config.mode == "lora" else "bf16",
        rank=config.rank,
        context=config.context,
        micro=config.micro_batch,
        accumulation=config.accumulation,
        checkpointing="none",
        expandable=expandable_segments(),
    )
    if config.mode == "fp8-aware":
        return "full", "mode fp8-aware makes new weights in every pass"
    try:
        needed = memory(read_model(str(folder), config.target_modules), setup).high
    except ConfigError as error:
        return "full", f"the planner does not know this model: {error.what}"
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    figures = f"{needed / GIB:.1f} GiB at most without, {free / GIB:.1f} GiB free"
    return ("none" if needed <= free else "full"), figures
