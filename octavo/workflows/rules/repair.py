"""--fix: every repair that changes no number. Names and shapes of scales, the config, skip lists, the index.

Codes keep their bytes and scales their values; what needs other codes or scales is left for quantizing again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.base.errors import CheckpointError
from octavo.base.log import progress
from octavo.formats.granularity import Granularity, PerBlock, PerRow
from octavo.store import schema
from octavo.store.conversion import check_paths, write_config
from octavo.store.folder import OutputFolder, check_space, copy_side_files
from octavo.store.header import TensorInfo, read_header
from octavo.store.relayout import Move
from octavo.store.runner import Task, default_workers, write_shards
from octavo.store.tensors import Checkpoint
from octavo.store.writer import ShardWriter
from octavo.workflows.rules.files import SHARD
from octavo.workflows.rules.model import INPUT_SCALES, SIXTEEN_BIT, WEIGHT_SCALES, Model, Module
from octavo.workflows.rules.numbers import granularity_of
from octavo.workflows.rules.scheme import ARGS_KEYS, GROUP_KEYS, Scheme

# Problems of the files that writing the tensors again mends.
MENDED = frozenset({"index-mismatch", "bad-index", "no-config"})
CT_METHODS = ("compressed-tensors",)


@dataclass
class Repair:
    """changes: what was done, in words, each once."""

    changes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.changes:
            self.changes.append(text)


def repair(checkpoint: Checkpoint, scheme: Scheme, out: Path) -> Repair:
    """Write the repaired folder; it appears whole or not at all. CheckpointError when the files are damaged."""
    for problem in checkpoint.problems:
        if problem.fatal and problem.code not in MENDED:
            raise CheckpointError(f"--fix: {problem.where}", got=problem.message, fix=problem.fix)
    if scheme.method not in ("fp8", "compressed-tensors", "modelopt"):
        raise CheckpointError("--fix", got=f"quant_method {scheme.method}", need="an FP8 checkpoint")
    check_paths(checkpoint.folder, out)
    work = Repair()
    source = _with_unlisted(checkpoint, work)
    model = Model(source)
    moves = list(_moves(model, scheme, work))
    quantization = _config(model, scheme, work)
    if not work.changes:
        work.note("nothing to repair without loss: the copy equals the original")
    with OutputFolder(out, None) as folder:
        writer = ShardWriter(folder.path, {move.name: (move.dtype, move.shape) for move in moves})
        check_space(folder.path, writer.total_size)
        by_file: dict[str, list[Task]] = {file: [] for file in writer.shards}
        for move in moves:
            by_file[writer.shard_of[move.name]].append(partial(_copy, source, writer, move))
        with progress("verify: writing the repaired copy", float(source.nbytes), unit="bytes") as advance:
            write_shards(writer, by_file.__getitem__, default_workers(), advance)
        writer.finish()
        copy_side_files(source.folder, folder.path)
        write_config(source.config, folder.path, quantization)
        folder.commit()
    return work


def _copy(source: Checkpoint, writer: ShardWriter, move: Move) -> int:
    stored = source.get(move.source)
    writer.put(move.name, stored.to(move.dtype).reshape(move.shape))
    return stored.nbytes


def _with_unlisted(checkpoint: Checkpoint, work: Repair) -> Checkpoint:
    """The checkpoint with the numbered shards that its index forgot."""
    tensors: dict[str, TensorInfo] = {name: checkpoint.info(name) for name in checkpoint}
    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        if path.name in checkpoint.files or not SHARD.match(path.name):
            continue
        found, problems = read_header(path, path.name)
        if problems or set(found) & set(tensors):
            raise CheckpointError(f"--fix: {path.name} is not in the index", got="a damaged or duplicate shard")
        tensors |= found
        work.note(f"{path.name} taken into the index")
    if any(problem.code == "index-mismatch" for problem in checkpoint.problems):
        work.note("index rebuilt")
    return Checkpoint(checkpoint.folder, tensors, checkpoint.config, [])


def _moves(model: Model, scheme: Scheme, work: Repair) -> Iterator[Move]:
    """Every tensor under the name, dtype and shape that the method asks for."""
    ct = scheme.method in CT_METHODS
    for module in model.modules.values():
        found = granularity_of(module, scheme)
        for leaf, stored in module.leaves.items():
            move = Move(stored.name, stored.name, stored.dtype, stored.shape)
            if leaf in (*WEIGHT_SCALES, *INPUT_SCALES) and module.weight and module.weight.dtype in SIXTEEN_BIT:
                work.note(f"scales of 16-bit weights dropped ({stored.name})")
                continue
            if found is not None and stored.name == found[0] and leaf != "weight_scale_2":
                move = _scale_move(module, stored.name, stored.dtype, found[1], scheme, ct=ct)
            elif leaf in INPUT_SCALES:
                shape = ((1,) if ct else ()) if stored.shape in ((), (1,), (1, 1)) else stored.shape
                move = Move(stored.name, f"{module.name}.input_scale", torch.float32, shape)
            if move.name != stored.name:
                work.note(f"{leaf} renamed to {move.name.rpartition('.')[2]}")
            if move.shape != stored.shape:
                work.note(f"shapes of {move.name.rpartition('.')[2]} corrected")
            yield move


def _scale_move(
    module: Module, name: str, dtype: torch.dtype, granularity: Granularity, scheme: Scheme, *, ct: bool
) -> Move:
    assert module.weight is not None
    shape = granularity.scale_shape(module.weight.shape)
    if shape == () and ct:
        shape = (1,)
    native_block = scheme.method == "fp8" and isinstance(granularity, PerBlock)
    leaf = "weight_scale_inv" if native_block else "weight_scale"
    plain = dtype in (torch.bfloat16, torch.float16, torch.float32)
    wide = dtype if plain else torch.float32 if dtype.is_floating_point else dtype
    return Move(name, f"{module.name}.{leaf}", wide, shape)


# ----------------------------------------------------------------------------------------------------- configuration
def _config(model: Model, scheme: Scheme, work: Repair) -> dict[str, Any]:
    raw = copy.deepcopy(scheme.raw)
    skip = _plain_linears(model)
    if scheme.method == "fp8":
        _native(raw, model, scheme, work)
        _skip_list(raw, "modules_to_not_convert", skip, work)
        raw.pop("ignored_layers", None)
    elif scheme.method == "modelopt":
        body = raw.pop("quantization", None)
        if isinstance(body, dict):
            raw |= {key: value for key, value in body.items() if key != "exclude_modules"}
        raw["quant_method"] = "modelopt"
        _skip_list(raw, "ignore", skip, work)
    else:
        _compressed_tensors(raw, model, work)
        _skip_list(raw, "ignore", skip, work)
    return raw


def _plain_linears(model: Model) -> list[str]:
    """Full names of everything linear that is stored in 16 bit, in every spelling engines may look for."""
    names = [m.name for m in model.linears() if m.weight is not None and m.weight.dtype in SIXTEEN_BIT]
    names += [n.rpartition(".")[0] for n, m in model.modules.items() if "" in m.leaves and not m.quantized]
    if not any(m.role == "head" and m.quantized for m in model.modules.values()):
        names.append("lm_head")  # also where it is tied and not stored
    return sorted({spelling for name in names for spelling in schema.spellings(name)})


def _skip_list(raw: dict[str, Any], key: str, skip: list[str], work: Repair) -> None:
    before = raw.get(key) or raw.get("ignored_layers") or []
    if not isinstance(before, list) or sorted(map(str, before)) != skip:
        work.note(f"{key} written with full names")
    raw[key] = skip


def _native(raw: dict[str, Any], model: Model, scheme: Scheme, work: Repair) -> None:
    grids = [g for m in model.modules.values() if (g := granularity_of(m, scheme))]
    block = next((g[1] for g in grids if isinstance(g[1], PerBlock)), None)
    if any(isinstance(g[1], PerRow) for g in grids):
        raise CheckpointError(
            "--fix", got="native fp8 with one scale per row", fix="Use `octavo requantize DIR OUT --for ENGINE:GPU`."
        )
    if block is not None and "weight_block_size" not in raw:
        raw["weight_block_size"] = [block.rows, block.cols]
        work.note("weight_block_size added")
    wanted = "static" if raw.get("activation_scheme") == "static" and block is None else "dynamic"
    if raw.get("activation_scheme") != wanted:
        raw["activation_scheme"] = wanted
        work.note(f"activation_scheme set to {wanted}")


def _compressed_tensors(raw: dict[str, Any], model: Model, work: Repair) -> None:
    raw["quant_method"] = "compressed-tensors"
    if raw.get("format") != "float-quantized":
        raw["format"] = "float-quantized"
        work.note("format set to float-quantized")
    groups = raw.get("config_groups")
    head = next((m.name for m in model.linears() if m.role == "head" and m.quantized), None)
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict):
            continue
        _drop(group, GROUP_KEYS, work)
        for key in ("weights", "input_activations"):
            if isinstance(group.get(key), dict):
                _drop(group[key], ARGS_KEYS - {"actorder"}, work)
        targets = group.get("targets")
        if head is not None and isinstance(targets, list) and head not in targets:
            targets.append(head)
            work.note(f"{head} targeted by name")
            head = None


def _drop(values: dict[str, Any], known: frozenset[str], work: Repair) -> None:
    for key in sorted(set(values) - known):
        if key != "actorder" or values[key] is not None:
            work.note(f"key {key} removed")
        del values[key]
