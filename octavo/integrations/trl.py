"""Supervised fine-tuning with TRL: our record of every step, our snapshots, nothing of theirs on stdout."""

from __future__ import annotations

import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from octavo.base.errors import ConfigError, DataError, RefusedError, UnsupportedError, did_you_mean
from octavo.base.log import Advance
from octavo.integrations.data import TextData
from octavo.integrations.snapshots import SnapshotCallback
from octavo.store.run import RunFolder
from octavo.store.snapshot.session import Resume
from octavo.store.snapshot.signals import AWS


@dataclass(frozen=True)
class SftOptions:
    """What the trainer needs to know; field by field as in FinetuneConfig, whose `auto` has been decided.

    max_steps: -1 for whole epochs. packing: samples cut from the joined text, each exactly `context` tokens.
    completion_only: the loss counts the answer alone; None: where the data has prompts and completions.
    """

    learning_rate: float
    schedule: str
    warmup: float
    weight_decay: float
    max_grad_norm: float
    max_steps: int
    epochs: float
    micro_batch: int
    accumulation: int
    context: int
    packing: bool
    checkpointing: str
    completion_only: bool | None
    seed: int
    report_to: tuple[str, ...]


# What Trainer can report to, and the package that does it.
REPORTERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
}


def check_reporters(names: Iterable[str]) -> None:
    """ConfigError for a name nobody knows, UnsupportedError for a package that is not installed."""
    for name in names:
        if name not in REPORTERS:
            raise ConfigError(f"report_to '{name}' is unknown", fix=did_you_mean(name, REPORTERS))
        if importlib.util.find_spec(REPORTERS[name]) is None:
            raise UnsupportedError(
                f"report_to '{name}'", got="no such package", fix=f"Run: pip install {REPORTERS[name]}"
            )


class Trainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that hands the loss of every micro-batch, as it came out of the model, to the recorder."""

    recorder: Recorder

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.recorder.micro_losses.append(loss)
        return loss


class Recorder(TrainerCallback):  # type: ignore[misc]
    """metrics.jsonl: one line a step with loss, gradient norm, learning rate, seconds; one per evaluation.

    The loss is written before anything filters it; a loss or gradient that is NaN or Inf ends the run with
    RefusedError before the optimizer takes it up.
    """

    def __init__(self, run: RunFolder) -> None:
        self.path = run.metrics
        self.micro_losses: list[torch.Tensor] = []
        self.losses: list[float] = []
        self._started = time.monotonic()
        self.note_metric: Callable[[int, float], None] = lambda step, value: None
        self.report_to(lambda amount: None, None, 0)

    def report_to(self, advance: Advance, evaluate: Callable[[], float] | None, every: int) -> None:
        """advance: called with 1 after each step. evaluate: held-out perplexity, every so many steps; 0: never."""
        self.advance, self.evaluate, self.every = advance, evaluate, every

    def keep_until(self, step: int) -> None:
        """Drop what a run wrote after the snapshot it continues from."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        self._started = time.monotonic()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        loss = float(torch.stack(self.micro_losses).sum())
        self.micro_losses.clear()
        self.losses.append(loss)
        step = state.global_step + 1
        if not math.isfinite(loss):
            self.write(step=step, loss=None, raw=str(loss))
            raise RefusedError(
                f"the loss of step {step} is {loss}",
                fix="Lower the learning rate, look for broken samples, or continue from the last snapshot.",
            )
        grads = [p.grad for p in parts["model"].parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not math.isfinite(norm):
            self.write(step=step, loss=loss, gradient_norm=None, raw=str(norm))
            raise RefusedError(
                f"the gradient of step {step} is {norm}, its loss {loss:.4g}", fix="Lower the learning rate."
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        logs = parts.get("logs") or {}
        if "loss" not in logs or not self.losses:
            return
        self.write(
            step=state.global_step,
            loss=self.losses[-1],
            gradient_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            tokens=logs.get("num_tokens"),
            seconds=round(time.monotonic() - self._started, 3),
        )
        self.advance(1)
        if self.evaluate and self.every and state.global_step % self.every == 0:
            perplexity = self.evaluate()
            self.write(step=state.global_step, held_out_perplexity=perplexity)
            self.note_metric(state.global_step, perplexity)
            self._started = time.monotonic()


def as_dataset(data: TextData, completion_only: bool | None) -> datasets.Dataset:
    """Records as TRL wants them. completion_only on conversations: the last answer becomes the completion."""
    records = [dict(record) for record in data.records]
    if completion_only and data.kind == "text":
        raise ConfigError(
            f"completion_only with data '{data.source}'",
            got="plain texts, which have no completion",
            need="prompt and completion, or messages",
            fix="Leave completion_only out.",
        )
    if completion_only and data.kind == "messages":
        records = [_last_answer(record["messages"], data.source) for record in records]
    return datasets.Dataset.from_list(records)


def build_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: TextData,
    options: SftOptions,
    run: RunFolder,
    recorder: Recorder,
    snapshots: SnapshotCallback,
) -> Trainer:
    """A trainer ready to run on a PeftModel. DataError if the data makes no sample."""
    if data.kind == "messages" and not tokenizer.chat_template:
        raise DataError(
            f"data '{data.source}' holds conversations, and the model has no chat template",
            fix="Use an instruct model, or data with a text column.",
        )
    on_cpu = next(model.parameters()).device.type == "cpu"
    with quiet():
        trainer = Trainer(
            model=model,
            args=_arguments(options, run, on_cpu),
            train_dataset=as_dataset(data, options.completion_only),
            processing_class=tokenizer,
            callbacks=[recorder, snapshots],
        )
    trainer.recorder = recorder
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    _require_samples(trainer, options)
    return trainer


def _arguments(options: SftOptions, run: RunFolder, on_cpu: bool) -> SFTConfig:
    """Saving, logging and evaluation are ours: the trainer only trains."""
    arguments = SFTConfig(
        output_dir=str(run.path),
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.schedule,
        warmup_steps=options.warmup,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        max_steps=options.max_steps,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulation,
        max_length=options.context,
        packing=options.packing,
        packing_strategy="wrapped",
        shuffle_dataset=True,
        completion_only_loss=options.completion_only,
        gradient_checkpointing=options.checkpointing != "none",
        gradient_checkpointing_kwargs={"use_reentrant": False, "selective": options.checkpointing == "selective"},
        seed=options.seed,
        report_to=list(options.report_to) or "none",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        use_cpu=on_cpu,
        bf16=not on_cpu,
        dataloader_pin_memory=not on_cpu,
        disable_tqdm=True,
    )
    # One process is one GPU: else the Trainer wraps the model in nn.DataParallel, whose copies share bound forwards.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def run_snapshots(run: RunFolder, source: str, settings: Mapping[str, Any]) -> SnapshotCallback:
    """Snapshots of a run folder. source: fingerprint of its model. settings: the names and values of FinetuneConfig."""
    return SnapshotCallback(
        run.snapshots,
        every=settings["save_every"],
        adapter_every=settings["adapter_only_every"],
        keep_last=settings["keep"],
        keep_every=settings["keep_every"],
        best="held-out perplexity" if settings["keep_best"] else None,
        remote=settings["snapshot_url"],
        grace=settings["grace"],
        spot=AWS if settings["spot"] else None,
        base=source,
        extra={"policy": run},
        settings={},  # RunFolder.require_settings compares them long before the model is loaded
        exits=False,
    )


def train(trainer: Trainer, snapshots: SnapshotCallback, resume: Resume) -> tuple[int, int | None]:
    """Run to the end. Returns the number of the last step, and that of the snapshot it continued from."""
    folder = snapshots.resume(trainer, resume)
    began = None if folder is None else _step_of(Path(folder))
    if began is not None:
        trainer.recorder.keep_until(began)
    if snapshots.best is not None:
        trainer.recorder.note_metric = snapshots.note_metric
    try:
        with quiet():
            trainer.train(resume_from_checkpoint=folder)
    except BaseException:
        snapshots.abandon()
        raise
    return int(trainer.state.global_step), began


@contextmanager
def quiet() -> Iterator[None]:
    """No bars of datasets, no advice of Transformers about settings that are ours, for a while."""
    shown, verbosity = not datasets.are_progress_bars_disabled(), transformers_logging.get_verbosity()
    datasets.disable_progress_bars()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # Transformers 5.24 renames an argument that 5.17 only knows by its old name.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def _last_answer(messages: list[dict[str, str]], source: str) -> dict[str, Any]:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            f"data '{source}': a conversation ends with '{messages[-1]['role'] if messages else 'nothing'}'",
            need="an answer of the assistant to count the loss on",
            fix="Leave completion_only out, or drop the conversation.",
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _require_samples(trainer: Trainer, options: SftOptions) -> None:
    samples = trainer.train_dataset
    longest = max((len(ids) for ids in samples["input_ids"]), default=0)
    if longest < (options.context if options.packing else 2):
        raise DataError(
            "the training data is shorter than one sample",
            got=f"{longest} tokens",
            need=f"{options.context if options.packing else 2}",
            fix="Give more text or a shorter context.",
        )


def _step_of(snapshot: Path) -> int:
    return int(snapshot.name.removeprefix("step-"))
