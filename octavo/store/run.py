"""The folder of a training run: where its files are, how they are written, and how a later step reads them.

    config.yaml    every setting, resolved           policy.json    layer -> precision and why
    adapter/       the trained adapter               snapshots/     step-N/, enough to continue
    metrics.jsonl  one line per step                 report.json, manifest.json, scales.json

adapter/ and every snapshot (store/snapshot) appear by one rename: a killed run has none or a whole one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError

from octavo.base.errors import CheckpointError, MismatchError
from octavo.base.report import atomic_write, read_yaml, sync_folder
from octavo.store.folder import output_error
from octavo.store.manifest import Manifest
from octavo.store.policy import POLICY, Policy
from octavo.store.snapshot.folder import SnapshotFolder


@dataclass(frozen=True)
class RunFolder:
    """Names only; creating the object touches nothing."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def scales(self) -> Path:
        return self.path / "scales.json"

    @property
    def policy(self) -> Path:
        return self.path / POLICY

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    def steps(self) -> list[int]:
        """The steps of the snapshots that are whole, ascending."""
        return SnapshotFolder(self.snapshots).steps()

    def snapshot(self, step: int) -> Path:
        return SnapshotFolder(self.snapshots).at(step)

    def require_finished(self) -> None:
        """CheckpointError unless this is a run that trained to its end."""
        if not self.path.is_dir():
            raise CheckpointError(f"run {self.path} does not exist", fix="Check the path.")
        for need in (self.config, self.policy, self.manifest):
            if not need.is_file():
                raise CheckpointError(
                    f"{self.path} is no run of octavo finetune: it has no {need.name}", fix="Check the path."
                )
        if not self.adapter.is_dir():
            steps = self.steps()
            have = f"snapshots up to step {steps[-1]}" if steps else "no snapshot"
            raise CheckpointError(
                f"run {self.path} has no adapter: it did not finish",
                got=have,
                fix=f"Continue it: octavo finetune {self.config} --resume auto",
            )

    def require_settings(self, settings: Mapping[str, Any], free: Set[str]) -> None:
        """settings: as `write_config` takes them, of the run to come. MismatchError where one outside `free` differs
        from those the run began with: it would silently give another result.
        """
        began = self.read_config()
        for name in sorted({*began, *settings} - free):
            if began.get(name) != settings.get(name):
                raise MismatchError(
                    f"{self.path} was trained with other settings: {name}",
                    got=repr(settings.get(name)),
                    need=repr(began.get(name)),
                    fix="Resume with the settings of the run, or start a new one.",
                )

    def require_model(self, source: str) -> None:
        """MismatchError unless the run was trained on the model of this fingerprint."""
        began = self.read_manifest().source
        if began != source:
            raise MismatchError(
                f"{self.path} was trained on another model",
                got=f"{source[:19]}...",
                need=f"{began[:19]}...",
                fix="Give the model folder the run began with.",
            )

    def require_policy(self, policy: Policy) -> None:
        """MismatchError unless the run began with the same precision for every module, or has not begun."""
        if not self.policy.is_file():
            return
        began = self.read_policy().modules
        for name in sorted({*began, *policy.modules}):
            old, new = (modules.get(name) for modules in (began, policy.modules))
            if old is None or new is None or (old.precision, old.scheme) != (new.precision, new.scheme):
                raise MismatchError(
                    f"{self.path} was trained with another policy: {name}",
                    got=f"{new.precision} {new.scheme}".strip() if new else "nothing",
                    need=f"{old.precision} {old.scheme}".strip() if old else "nothing",
                    fix="Resume with the policy of the run, or start a new one.",
                )

    def read_manifest(self) -> Manifest:
        try:
            return Manifest.model_validate_json(self.manifest.read_bytes())
        except (OSError, pydantic.ValidationError) as error:
            raise CheckpointError(f"{self.manifest}", got=" ".join(str(error).split())[:200]) from None

    def read_config(self) -> dict[str, Any]:
        return read_yaml(self.config)

    def write_config(self, values: Mapping[str, Any]) -> None:
        import yaml

        atomic_write(self.config, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode())

    def write_policy(self, policy: Policy) -> None:
        policy.write(self.policy)

    def read_policy(self) -> Policy:
        return Policy.read(self.policy)

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot takes along: the precision policy as it is at that step."""
        return self.read_policy().model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.write_policy(Policy.model_validate(state))


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Write into a hidden sibling; on success it replaces `target` by a rename, on any error nothing is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.tmp"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    try:
        yield work
        sync_tree(work)
        if target.exists():
            _remove(target)
        os.replace(work, target)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError):
            raise output_error(target, error) from None
        if isinstance(error, SafetensorError):  # what its writer makes of an OSError, the number in the text
            number = re.search(r"os error (\d+)", str(error))
            raise output_error(target, OSError(int(number[1]) if number else 0, str(error))) from None
        raise
    sync_folder(target.parent)


def _remove(folder: Path) -> None:
    """Out of sight by a rename first: killed in between, nothing half-deleted keeps a name that means something."""
    hidden = folder.parent / f".{folder.name}.old.tmp"
    if hidden.exists():
        shutil.rmtree(hidden)
    os.replace(folder, hidden)
    shutil.rmtree(hidden)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below."""
    for parent, _, files in os.walk(folder):
        for name in files:
            handle = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(parent))
