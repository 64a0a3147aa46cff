"""Snapshots in Hugging Face's Trainer and TRL, in place of the Trainer's own saving.

    snapshots = SnapshotCallback("run/snapshots", every=100)
    trainer = SFTTrainer(..., args=SFTConfig(..., save_strategy="no"), callbacks=[snapshots])
    trainer.train(resume_from_checkpoint=snapshots.resume(trainer))
    snapshots.close()

A snapshot of step N is taken when step N+1 begins: what evaluation and the data loader draw from the random states in
between is then part of it, and the copy runs under the forward and backward of that step. The last one, with no step to
come, is taken at the end of the training; if that is the end of an epoch, the next epoch's loader has yet to draw.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.base.errors import ConfigError
from octavo.store.manifest import fingerprint_of
from octavo.store.snapshot.session import Resume
from octavo.store.snapshot.shards import whole
from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import Stateful, TrainingState

COUNTERS = "trainer_state.json"
HISTORY = 200  # entries of the Trainer's log that a snapshot takes along
# What shapes the result of a Trainer; a resume with others is refused.
SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "label_smoothing_factor"),
    *("optim", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "seed", "data_seed"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing"),
    *("completion_only_loss", "assistant_only_loss", "loss_type", "beta"),  # of TRL
)


class SnapshotCallback(TrainerCallback):  # type: ignore[misc]
    """Snapshots of a Trainer. options: every, keep_last, remote and so on, as octavo.Snapshots takes them.

    extra: name -> object with a state_dict of JSON values, such as a stability guard. best: the metric of evaluations
    whose best snapshot stays, such as `eval_loss`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        extra: Mapping[str, Stateful] | None = None,
        best: str | None = None,
        greater_is_better: bool = False,
        **options: Any,
    ) -> None:
        self.snapshots = Snapshots(folder, **options)
        self.extra, self.best, self.greater_is_better = dict(extra or {}), best, greater_is_better
        self._derive_settings = "settings" not in options
        self._scaler = self._attached = self._closed = False
        self._fresh, self._between_epochs = True, False
        self._metric: tuple[int, float] | None = None

    def resume(self, trainer: Trainer, resume: Resume = "auto") -> str | None:
        """What to give as resume_from_checkpoint: the snapshot to continue from, or None. See octavo.Snapshots.find.

        The Trainer takes its counters from there and skips the data; weights, optimizer, schedule and random states
        are put back by this callback, once the model is wrapped and sharded.
        """
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            self.extra["scaler"] = scaler
        self._scaler = True
        step = self.snapshots.find(resume)
        trainer._load_from_checkpoint = lambda *args, **kwargs: None
        return None if step is None else str(self._folder().at(step))

    def state_dict(self) -> dict[str, Any]:
        return {"between_epochs": self._between_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._between_epochs = state["between_epochs"]

    def note_metric(self, step: int, value: float) -> None:
        """The metric after `step` steps, for the best snapshot."""
        self._metric = step, value

    def close(self) -> None:
        """Wait for the last snapshot. Ends the process with 1 if it failed; called after training, once."""
        if self._attached and not self._closed:
            self._closed = True
            self.snapshots.close(finished=True)

    def abandon(self) -> None:
        """After an exception: what is in flight is finished, nothing is raised."""
        if self.snapshots.session is not None and not self._closed:
            self._closed = True
            self.snapshots.abandon()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if args.save_strategy != "no":
            fix = 'Set save_strategy="no": this callback saves.'
            raise ConfigError("the Trainer would save checkpoints of its own", got=str(args.save_strategy), fix=fix)
        if args.fp16 and not self._scaler:
            raise ConfigError("fp16 has a loss scale to save", fix="Call resume(trainer) before train.")
        model: nn.Module = parts["model"]
        snapshots = self.snapshots
        if snapshots.session is None:
            snapshots.find("never")
        if self._derive_settings:
            snapshots.settings = {name: plain(getattr(args, name, None)) for name in SETTINGS}
        snapshots.base = snapshots.base or frozen_fingerprint(model)
        extra = {**self.extra, "trainer": self}
        training = TrainingState(model, parts["optimizer"], parts["lr_scheduler"], extra, adapter_names)
        config = adapter_config(model)
        snapshots.attach(training, lambda: {COUNTERS: counters(state), **config})
        self._attached = True
        if self._between_epochs:
            snapshots.restore_random()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if self._fresh:
            if not self._between_epochs:
                self.snapshots.restore_random()  # after the data loader was wound forward, which draws numbers too
            self._fresh = self._between_epochs = False
        elif self._done(state.global_step):
            self._closed = True
            self.snapshots.close()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if not self._fresh:
            self._between_epochs = float(state.epoch or 0).is_integer()
            self._done(state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        metrics = parts.get("metrics") or {}
        if self.best is not None and self.best in metrics:
            self.note_metric(state.global_step, float(metrics[self.best]))

    def _done(self, step: int) -> bool:
        stopped = self.snapshots.step_done(step)
        if self._metric is not None:
            self.snapshots.note_metric(*self._metric, greater_is_better=self.greater_is_better)
            self._metric = None
        return stopped

    def _folder(self) -> Any:
        assert self.snapshots.session is not None
        return self.snapshots.session.folder


def counters(state: TrainerState) -> str:
    """trainer_state.json, as the Trainer reads it, with the end of its log alone."""
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}  # asdict copies all of it
    values["log_history"] = values["log_history"][-HISTORY:]
    return json.dumps(values)


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Parameter -> the name under which PEFT keeps it in adapter_model.safetensors."""
    if not isinstance(model, PeftModel):
        return {}
    numbers = _numbers(model)
    saved = get_peft_model_state_dict(model, state_dict=numbers, save_embedding_layers=False)
    names = list(numbers)
    return {names[int(number)]: name for name, number in saved.items()}


def _numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """A number in the place of each parameter, which may be a shard."""
    return {name: torch.tensor(number) for number, (name, _) in enumerate(model.named_parameters())}


def adapter_config(model: nn.Module) -> dict[str, str]:
    """adapter_config.json, so that PEFT reads a snapshot as an adapter; nothing for other models."""
    if not isinstance(model, PeftModel):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(model, Path(folder), state_dict=_numbers(model))
        text = (Path(folder) / "adapter_config.json").read_text(encoding="utf-8")
    return {"adapter_config.json": json.dumps(json.loads(text))}  # plain ASCII


def frozen_fingerprint(model: nn.Module) -> str:
    """Who the frozen base is, by names, shapes and a sample of its bytes; empty where all is trained.

    Of a sharded one each parameter is put together in turn: all ranks call this.
    """
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return fingerprint_of((name, whole(p)) for name, p in frozen) if frozen else ""


def save_adapter(model: Any, folder: Path, **more: Any) -> None:
    """The adapter alone, as PEFT reads it: safetensors and its config. more: of PEFT's save_pretrained."""
    model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False, **more)
    (folder / "README.md").unlink(missing_ok=True)  # a model card to fill in, of no use here


def plain(value: Any) -> Any:
    """An argument of the Trainer as a JSON value."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
