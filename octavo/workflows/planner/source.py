"""What MODEL means to the planner: a folder, a config.json, a hub id, or a published model that comes with Octavo.

Weights are never fetched and never mapped: the headers of safetensors files say it all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.base.errors import CheckpointError
from octavo.base.report import UNREADABLE, read_json
from octavo.store.raw_header import INDEX, check_shape, read_raw_header
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.tables import load

OTHER_WEIGHTS = ("consolidated", "adapter_model", "optimizer", "rng_state", "scheduler")


def read_model(name: str, targets: tuple[str, ...] = ()) -> Model:
    """CheckpointError for what is no model, ConfigError for one whose size cannot be told exactly."""
    path = Path(name).expanduser()
    if path.is_dir():
        config = _config(path / "config.json")
        shapes = _headers(path)
        return Model.from_headers(name, config, shapes, targets) if shapes else Model.from_config(name, config, targets)
    if path.is_file():
        return Model.from_config(name, _config(path), targets)
    if (known := published().get(name.rpartition("/")[2].lower())) is not None:
        return Model.from_config(name, known, targets)
    from octavo.integrations.hub import describe

    config, hub_shapes = describe(name)
    if hub_shapes:
        return Model.from_headers(name, config, hub_shapes, targets)
    return Model.from_config(name, config, targets)


def published() -> dict[str, dict[str, Any]]:
    """Name in small letters -> config.json, as far as sizes go, of models that plans are often made for."""
    return {name.lower(): entry["config"] for name, entry in load("models")["models"].items()}


def hub_id(name: str) -> str:
    """What other commands call this model: the repository of a published model, anything else as it is."""
    known = {key.lower(): entry["repository"] for key, entry in load("models")["models"].items() if key != "demo"}
    return name if Path(name).expanduser().exists() else known.get(name.lower(), name)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix="Give a model folder, a config.json or a hub id.") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not readable JSON", got=" ".join(str(error).split())[:200]) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}", got=type(config).__name__, need="a JSON object")
    return config


def _headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape over all shards; empty where the folder has none. CheckpointError for a part of a model."""
    files = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith(OTHER_WEIGHTS))
    if (folder / INDEX).is_file():
        table = _config(folder / INDEX).get("weight_map")
        wanted = sorted({str(file) for file in table.values()}) if isinstance(table, dict) else files
        missing = [file for file in wanted if not (folder / file).is_file()]
        if files and missing:
            fix = "Fetch it, or plan from the config.json alone."
            raise CheckpointError(f"{folder}: shard {missing[0]} is missing", fix=fix)
        files = wanted if not missing else []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        header, problems = read_raw_header(folder / file, file)
        if header is None or problems:
            raise CheckpointError(f"{folder}: {problems[0].where}", got=problems[0].message, fix=problems[0].fix)
        for name, entry in header.entries.items():
            try:
                shapes[name] = check_shape(entry)[1]
            except (KeyError, TypeError, ValueError):
                raise CheckpointError(f"{folder}: {file}: {name}", got="a malformed header entry") from None
    return shapes
