"""Who a model is, and where a folder came from: a cheap fingerprint, and the manifest written beside results."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import pydantic
import torch

from octavo.base.errors import CheckpointError
from octavo.base.hardware import caps_of
from octavo.base.report import Report
from octavo.formats.recipe import Recipe
from octavo.store.header import NAMES
from octavo.store.tensors import Checkpoint

MANIFEST = "octavo_manifest.json"
PACKAGES = ("octavo", "torch", "safetensors", "transformers", "compressed-tensors", "peft", "trl")
WINDOWS, WINDOW = 8, 64  # per tensor: evenly spaced windows of this many bytes enter the fingerprint


def fingerprint(model: Path | str | Checkpoint) -> str:
    """sha256 over the names, dtypes, shapes and a strided sample of the bytes of every tensor, as `sha256:...`.

    It does not depend on how tensors are spread over shards, nor on config.json. Reads 512 bytes a tensor.
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.open(model)
    return fingerprint_of((name, checkpoint.get(name)) for name in sorted(checkpoint.names()))


def fingerprint_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The same over tensors in memory, of any device, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}\0{NAMES[tensor.dtype]}\0{list(tensor.shape)}\0".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
        last = max(len(data) - WINDOW, 0)
        for step in range(WINDOWS if last else 1):
            start = last * step // (WINDOWS - 1)
            digest.update(data[start : start + WINDOW].cpu().numpy().data)
    return f"sha256:{digest.hexdigest()}"


class Manifest(Report):
    """schema_version: of this record. made_by: the command. source: fingerprint of the model it started from.

    files: name -> size in bytes and, for all but weights, sha256. output: fingerprint of the weights written.
    """

    schema_version: int = 1
    made_by: str
    versions: dict[str, str] = pydantic.Field(default_factory=dict)
    hardware: str = ""
    platform: str = ""
    recipe: dict[str, Any] = pydantic.Field(default_factory=dict)
    options: dict[str, Any] = pydantic.Field(default_factory=dict)
    source: str = ""
    output: str = ""
    files: dict[str, str] = pydantic.Field(default_factory=dict)

    @classmethod
    def collect(cls, made_by: str, *, recipe: Recipe | None = None, folder: Path | None = None, **fields: Any) -> Self:
        """Fill in versions and hardware, the recipe in plain values, and the files of `folder`."""
        return cls(
            made_by=made_by,
            versions=package_versions(),
            hardware=str(caps_of()),
            platform=platform.platform(),
            recipe=plain_recipe(recipe) if recipe else {},
            files=describe_files(folder) if folder else {},
            **fields,
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of a folder. CheckpointError if there is none or it is damaged."""
        try:
            return cls.model_validate_json((folder / MANIFEST).read_bytes())
        except (OSError, pydantic.ValidationError) as error:
            raise CheckpointError(f"{folder / MANIFEST}", got=" ".join(str(error).split())[:200]) from None


def package_versions() -> dict[str, str]:
    """The versions of the packages that decide bytes; absent ones are left out. Imports none of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON values."""
    return {
        "name": recipe.name,
        "rule": str(recipe.rule),
        "activation": recipe.activation,
        "skip": list(recipe.skip),
        "overrides": [[pattern, str(rule) if rule else None] for pattern, rule in recipe.overrides],
    }


def describe_files(folder: Path) -> dict[str, str]:
    """Relative name -> `size` of weights, `size sha256` of everything else."""
    result = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            size = path.stat().st_size
            if path.suffix != ".safetensors":
                result[str(path.relative_to(folder))] = f"{size} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            else:
                result[str(path.relative_to(folder))] = str(size)
    return result
