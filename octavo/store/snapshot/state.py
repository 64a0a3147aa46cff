"""What a snapshot holds of a training: weights, optimizer, schedule, random states, and whatever has a state_dict.

    model.safetensors or adapter_model.safetensors   every weight, or, where some are frozen, the trained ones alone
    optimizer.safetensors                            moments, as optimizer.NAME OF PARAMETER.NAME OF MOMENT
    random.safetensors                               random states of torch, byte for byte
    training.json                                    optimizer groups, schedule, random states of Python and NumPy,
                                                     settings, extra states
With several ranks each writes its shards and its random states: NAME-00001-of-00008 and so on. An adapter that is
not sharded stays one file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import nn

from octavo.base.errors import CheckpointError, MismatchError, UnsupportedError
from octavo.base.log import logger
from octavo.base.report import UNREADABLE, read_json
from octavo.store.snapshot.layout import Layout, lay_out
from octavo.store.snapshot.shards import (
    Target,
    is_sharded,
    is_writer,
    load_tensors,
    local_piece,
    stored_tensors,
)

TRAINING, RANDOM, OPTIMIZER, MODEL, ADAPTER = "training", "random", "optimizer", "model", "adapter_model"


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class TrainingState:
    """model: plain, DDP or FSDP2. optimizer: torch's, or a wrapper's `.optimizer`. scheduler: a state of JSON values.

    extra: name -> object whose state_dict is JSON values: data position, stability guard, precision policy.
    adapter_names: for a PEFT model, parameter -> name in adapter_model.safetensors.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        adapter_names: Callable[[nn.Module], Mapping[str, str]] | None = None,
    ) -> None:
        self.model = _unwrapped(model)
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner
        self.optimizer: torch.optim.Optimizer = optimizer
        self.scheduler, self.extra = scheduler, dict(extra or {})
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self._stems = {id(parameter): f"{OPTIMIZER}.{name}" for parameter, name in self.names.items()}
        self.partial = any(not p.requires_grad for p in self.names)
        trained = {name: p for p, name in self.names.items() if p.requires_grad}
        renamed = adapter_names(self.model) if adapter_names and self.partial else {}
        self._trained = {renamed.get(name, name): p for name, p in trained.items()}
        self._laid_out: dict[tuple[str, int, int], tuple[object, Layout]] = {}

    @property
    def gpu(self) -> torch.device | None:
        """The GPU of the parameters, or the first of several."""
        return next((parameter.device for parameter in self.names if parameter.is_cuda), None)

    def weights(self) -> dict[str, torch.Tensor]:
        """Name in the file -> parameter or buffer. With frozen parameters: what is trained, and nothing else."""
        if self.partial:
            return dict(self._trained)
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(f"state of the model {name}", got=type(value).__name__, need="tensors")
            found.setdefault(id(value), (name, value))  # tied weights once
        return dict(found.values())

    def layout(self, kind: str, rank: int, world: int) -> Layout:
        """The files of this rank. Computed again only when tensors came, went or moved."""
        stem, weights = ADAPTER if self.partial else MODEL, self.weights()
        moments = self._moments() if kind == "full" else []
        values = [*weights.values(), *(value for _, _, value in moments)]
        key = [*weights], [name for _, name, _ in moments], [*map(id, values)], [*map(torch.Tensor.data_ptr, values)]
        known = self._laid_out.get((kind, rank, world))
        if known is None or known[0] != key:
            files, groups = {}, {stem: weights}
            if kind == "full":
                groups[OPTIMIZER] = {f"{self._stems[id(p)]}.{name}": value for p, name, value in moments}
            for stem, tensors in groups.items():
                # An adapter that every rank has whole is one file, as PEFT reads it.
                writers = 1 if stem == ADAPTER and not any(map(is_sharded, tensors.values())) else world
                mine = {
                    name: replace(piece, early=stem == MODEL and not isinstance(value, nn.Parameter))
                    for index, (name, value) in enumerate(tensors.items())
                    if is_writer(value, index % writers, rank) and (piece := local_piece(value)) is not None
                }
                if mine:
                    files[_file(stem, rank, writers, ".safetensors")] = mine
            known = self._laid_out[kind, rank, world] = key, lay_out(files)
        return known[1]

    def small_files(self, rank: int, world: int, more: Mapping[str, Any]) -> dict[str, str]:
        """name -> bytes as latin-1: training.json with `more` in it, and random.safetensors."""
        values = {
            **more,
            "optimizer_groups": self._groups(),
            "optimizer_values": {f"{self._stems[id(p)]}.{n}": v for p, n, v in self._moments(tensors=False)},
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "extra": {name: item.state_dict() for name, item in self.extra.items()},
            **_plain_random(),
        }
        try:
            text = json.dumps(values)
        except TypeError as error:
            need = "values that JSON has, in the states of scheduler, optimizer groups and extra"
            raise UnsupportedError("the state of this training", got=str(error), need=need) from None
        states = save({f"random.{rank}.{name}": value.contiguous() for name, value in torch_random().items()})
        return {
            _file(TRAINING, rank, world, ".json"): text,
            _file(RANDOM, rank, world, ".safetensors"): states.decode("latin-1"),
        }

    def load(self, folder: Path, rank: int, world: int, saved_world: int, group: Any = None) -> None:
        """Put everything back but the random states. MismatchError names what differs."""
        stored = stored_tensors(folder)
        groups = read_training(folder, 0, saved_world)["optimizer_groups"]
        weights = self.weights()
        prefix = f"{OPTIMIZER}."
        self._same_names(folder, weights, {n: v for n, v in stored.items() if not n.startswith((prefix, f"{RANDOM}."))})
        moments, targets = self._empty_moments(stored, groups, folder)
        with torch.no_grad():
            load_tensors(folder, {**{name: w.detach() for name, w in weights.items()}, **targets}, group)
        values = read_training(folder, min(rank, saved_world - 1), saved_world)
        for name, value in values["optimizer_values"].items():
            stem, _, key = name.rpartition(".")
            moments.setdefault(self._owners()[stem], {})[key] = value
        for parameter, state in moments.items():
            self.optimizer.state[parameter] = state
        for live, saved in zip(self.optimizer.param_groups, groups, strict=True):
            live.update({key: value for key, value in saved.items() if key != "params"})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(values["scheduler"])
        for name, item in self.extra.items():
            if name in values["extra"]:
                item.load_state_dict(values["extra"][name])
        if world != saved_world:
            logger().warning("%s was written by %d ranks, not %d: random states differ", folder, saved_world, world)

    def _moments(self, *, tensors: bool = True) -> list[tuple[torch.Tensor, str, Any]]:
        """Parameter, name, value of the optimizer's state: the tensors, or the plain values that some keep beside them.

        The time of every snapshot that training stands still for: no more work for a tensor than this.
        """
        state = self.optimizer.state
        return [
            (p, name, value)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p in state
            for name, value in state[p].items()
            if isinstance(value, torch.Tensor) == tensors
        ]

    def _groups(self) -> list[dict[str, Any]]:
        groups = []
        for group in self.optimizer.param_groups:
            plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            groups.append({**plain, "params": [self.names[p] for p in group["params"]]})
        return groups

    def _same_names(self, folder: Path, live: Mapping[str, torch.Tensor], stored: Mapping[str, Target]) -> None:
        for name in sorted({*live} | {*stored}):
            mine = [*live[name].shape] if name in live else "absent"
            theirs = [*stored[name].shape] if name in stored else "absent"
            if mine != theirs:
                fix = "Resume with the model, adapter and settings of the run."
                raise MismatchError(f"snapshot {folder}: {name}", got=f"{mine}", need=f"{theirs}", fix=fix)

    def _empty_moments(
        self, stored: Mapping[str, Target], groups: list[dict[str, Any]], folder: Path
    ) -> tuple[dict[torch.Tensor, dict[str, Any]], dict[str, torch.Tensor]]:
        """Parameter -> its empty state, and the same tensors by their names in the files."""
        live = [group["params"] for group in self._groups()]
        if [group["params"] for group in groups] != live:
            raise MismatchError(
                f"snapshot {folder} is of another optimizer",
                got=f"{sum(map(len, live))} parameters in {len(live)} groups",
                need=f"{sum(len(g['params']) for g in groups)} in {len(groups)}, in their order",
                fix="Resume with the settings of the run.",
            )
        states: dict[torch.Tensor, dict[str, Any]] = {}
        targets = {}
        owner = self._owners()
        for name, target in stored.items():
            stem, _, key = name.rpartition(".")
            if stem in owner:
                value = target.empty_like(owner[stem], scalars_on_device=self._steps_on_device(owner[stem]))
                states.setdefault(owner[stem], {})[key] = targets[name] = value
        return states, targets

    def _owners(self) -> dict[str, torch.Tensor]:
        return {f"{OPTIMIZER}.{name}": p for p, name in self.names.items()}

    def _steps_on_device(self, parameter: torch.Tensor) -> bool:
        """Whether this optimizer keeps the step count of a parameter on its device."""
        for group in self.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return bool(group.get("capturable") or group.get("fused"))
        return False


def torch_random() -> dict[str, torch.Tensor]:
    """The random states of torch, uint8: `cpu`, and `cuda` of this rank's GPU."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def load_random(folder: Path, rank: int, saved_world: int) -> None:
    """Put every random state back; a rank that did not exist, and a GPU that is not here, keep theirs."""
    if rank >= saved_world:
        return
    values = read_training(folder, rank, saved_world)
    version, words, gauss = values["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = values["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    states = load_file(folder / _file(RANDOM, rank, saved_world, ".safetensors"))
    torch.set_rng_state(states[f"random.{rank}.cpu"])
    if torch.cuda.is_available() and f"random.{rank}.cuda" in states:
        torch.cuda.set_rng_state(states[f"random.{rank}.cuda"])


def _plain_random() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, cached]
    return {"python_random": random.getstate(), "numpy_random": numpy_state}


def read_training(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """training.json of a rank. CheckpointError if it is not readable."""
    path = folder / _file(TRAINING, rank, world, ".json")
    try:
        values: dict[str, Any] = read_json(path)
        return values
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not readable", got=str(error)[:200], fix="Use an earlier one.") from None


def _file(stem: str, rank: int, world: int, suffix: str) -> str:
    return f"{stem}{suffix}" if world == 1 else f"{stem}-{rank + 1:05d}-of-{world:05d}{suffix}"


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
