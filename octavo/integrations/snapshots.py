"""Training state on disk without pickle: adapter, optimizer, schedule, random states; one folder per step.

    adapter_model.safetensors, adapter_config.json   as PEFT writes them
    optimizer.safetensors                            moments, named INDEX.NAME
    training.json                                    optimizer groups, schedule, random states of Python and NumPy
    random.safetensors                               random states of torch, byte for byte
    trainer_state.json                               the Trainer's own counters

The Trainer reads its counters and the adapter from there; the rest is read back here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.base.errors import CheckpointError, MismatchError
from octavo.base.report import UNREADABLE, read_json
from octavo.store.run import RunFolder, whole_folder

OPTIMIZER, RANDOM, TRAINING, COUNTERS = (
    "optimizer.safetensors",
    "random.safetensors",
    "training.json",
    "trainer_state.json",
)


class Snapshots(TrainerCallback):  # type: ignore[misc]
    """Save every `every` steps (0: never) and keep the last `keep`; `resume`: a snapshot folder to continue from."""

    def __init__(self, run: RunFolder, every: int, keep: int, resume: Path | None = None) -> None:
        self.run, self.every, self.keep, self.resume = run, every, keep, resume
        self._rng_pending = resume is not None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if self.resume is not None:
            load_training(self.resume, parts["optimizer"], parts["lr_scheduler"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if self._rng_pending and self.resume is not None:
            # After the data loader was fast-forwarded, which draws random numbers too.
            load_random(self.resume)
            self._rng_pending = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if self.every and state.global_step % self.every == 0 and state.is_world_process_zero:
            with whole_folder(self.run.snapshot(state.global_step)) as folder:
                save_adapter(parts["model"], folder)
                save_training(folder, parts["optimizer"], parts["lr_scheduler"])
                state.save_to_json(str(folder / COUNTERS))
            self.run.prune(self.keep)


def save_adapter(model: Any, folder: Path) -> None:
    """The adapter alone, as PEFT reads it: safetensors and its config."""
    model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a model card to fill in, of no use here


def save_training(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """optimizer: torch's, or accelerate's around it; scheduler: a LambdaLR or any with a JSON state."""
    state = optimizer.state_dict()
    moments = {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, entry in state["state"].items()
        for name, value in entry.items()
    }
    save_file(moments, folder / OPTIMIZER)
    save_file({name: value.contiguous() for name, value in torch_random().items()}, folder / RANDOM)
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    training = {
        "optimizer_groups": state["param_groups"],
        "scheduler": scheduler.state_dict(),
        "python_random": random.getstate(),
        "numpy_random": [kind, [int(key) for key in keys], position, has_gauss, cached],
    }
    (folder / TRAINING).write_text(json.dumps(training))


def load_training(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """MismatchError unless the optimizer has the parameters the snapshot was taken from."""
    training, moments = _read_training(folder), _read_tensors(folder / OPTIMIZER)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": training["optimizer_groups"]})
    except ValueError as error:
        raise MismatchError(
            f"snapshot {folder} is of another optimizer", got=str(error), fix="Resume with the settings of the run."
        ) from None
    scheduler.load_state_dict(training["scheduler"])


def torch_random() -> dict[str, torch.Tensor]:
    """The random states of torch, uint8: `cpu`, and `cuda.N` of every GPU."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found.update({f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return found


def load_random(folder: Path) -> None:
    """Put every random state back; a GPU that is not here any more is left out."""
    training, tensors = _read_training(folder), _read_tensors(folder / RANDOM)
    version, words, gauss = training["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = training["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def _read_training(folder: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = read_json(folder / TRAINING)
        return values
    except UNREADABLE as error:
        raise CheckpointError(f"snapshot {folder} is not readable", got=str(error), fix="Use an earlier one.") from None


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not readable", got=str(error), fix="Use an earlier snapshot.") from None
