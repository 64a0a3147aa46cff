"""Checkpoint: a folder of safetensors as one table of tensors. ShardWriter (writer.py) is its counterpart.

Nothing is read until asked for: opening parses headers, `get` and `rows` return views of the mapped file.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from octavo.base.errors import CheckpointError
from octavo.base.log import logger
from octavo.base.report import UNREADABLE, read_json
from octavo.store.header import Problem, TensorInfo, read_header
from octavo.store.raw_header import INDEX
from octavo.store.writer import ShardWriter as ShardWriter
from octavo.store.writer import plan_shards as plan_shards

SINGLE = "model.safetensors"
PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)(\.index\.json)?$")
# Weights of something else that model folders also hold: Mistral's second copy, adapters, optimizer states.
OTHER_WEIGHTS = re.compile(r"(consolidated|adapter_model|optimizer|rng_state|scheduler).*\.safetensors$")


class Checkpoint:
    """Read access to the tensors of a model folder. Build it with `Checkpoint.open`.

    folder: as given. config: config.json as a dict. problems: everything found wrong; empty or harmless when strict.
    """

    def __init__(
        self, folder: Path, tensors: dict[str, TensorInfo], config: dict[str, Any], problems: list[Problem]
    ) -> None:
        self.folder, self.config, self.problems = folder, config, problems
        self._tensors = tensors

    @classmethod
    def open(cls, folder: Path | str, *, strict: bool = True) -> Checkpoint:
        """Read config.json, the index and the header of every shard.

        strict: the first fatal problem is raised as CheckpointError, the harmless ones go to the log. Otherwise all
        are in `.problems`, and the tensors that are still readable are in the table.
        """
        folder = Path(folder)
        if not folder.is_dir():
            got = "a file" if folder.exists() else "nothing there"
            raise CheckpointError(f"model folder {folder}", got=got, fix="Give a folder with config.json and weights.")
        problems: list[Problem] = []
        config = _read_json(folder, "config.json", problems)
        files, weight_map = _weight_files(folder, problems)
        tensors = _read_shards(folder, files, problems)
        if weight_map is not None:
            _compare_index(weight_map, tensors, problems)
        if strict:
            for problem in problems:
                if problem.fatal:
                    raise CheckpointError(f"{folder}: {problem.where}", got=problem.message, fix=problem.fix)
                logger().warning("%s: %s: %s", folder, problem.where, problem.message)
        return cls(folder, tensors, config, problems)

    def names(self) -> list[str]:
        """All tensors, in the order of files and of bytes in them: reading in this order is sequential."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """dtype, shape, file and first byte. CheckpointError for an unknown name."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: tensor {name}", got="no such tensor in any shard") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.info(name).dtype

    def file_of(self, name: str) -> str:
        """The shard that holds a tensor, relative to the folder."""
        return self.info(name).file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor: what `Recipe.assign` takes."""
        return {name: info.shape for name, info in self._tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self._tensors.values())

    @property
    def files(self) -> list[str]:
        """The shards, in the order of `names()`."""
        return list(dict.fromkeys(info.file for info in self._tensors.values()))

    @property
    def layers(self) -> int | None:
        """num_hidden_layers of the language model, or None where config.json does not say."""
        value = self.text_config.get("num_hidden_layers", self.text_config.get("n_layer"))
        return value if isinstance(value, int) else None

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json about the language model: `text_config` of a multimodal wrapper, else all of it."""
        for key in ("text_config", "llm_config", "language_config", "thinker_config"):
            inner = self.config.get(key)
            if isinstance(inner, dict):
                deeper = inner.get("text_config")
                return deeper if isinstance(deeper, dict) else inner
        return self.config

    @property
    def model_types(self) -> tuple[str, ...]:
        """model_type of the language model and of the whole, as far as config.json has them as text."""
        found = (self.text_config.get("model_type"), self.config.get("model_type"))
        return tuple(value for value in found if isinstance(value, str))

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapped file: no copy. Writing to it does not reach the file."""
        info = self.info(name)
        return self._view(info, info.begin, info.shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of dimension 0, as a view."""
        info = self.info(name)
        stop = min(stop, info.shape[0])
        row = prod(info.shape[1:]) * info.dtype.itemsize
        return self._view(info, info.begin + start * row, (stop - start, *info.shape[1:]))

    def matrix(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of a tensor [..., N, K] seen as one matrix, as a view [stop - start, K]."""
        info = self.info(name)
        return self._view(
            info, info.begin + start * info.shape[-1] * info.dtype.itemsize, (stop - start, info.shape[-1])
        )

    def _view(self, info: TensorInfo, begin: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Only these bytes are mapped (privately), and only while the view lives: its pages count as this process's."""
        size = prod(shape) * info.dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=info.dtype)
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            with (self.folder / info.file).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), begin - page + size, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            fix = "Leave the files alone while they are read."
            what = f"{self.folder / info.file} changed since it was opened"
            raise CheckpointError(what, got=str(error), fix=fix) from None
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin - page)
        if begin % info.dtype.itemsize:
            data = data.clone()  # torch views a dtype only at offsets that are multiples of its size
        return data.view(info.dtype).reshape(shape)


def safe_relative(text: object) -> bool:
    """True for a path that stays inside its folder: relative, and no part of it is `..`."""
    if not isinstance(text, str) or not text or "\\" in text or "\0" in text:
        return False
    path = PurePosixPath(text)
    return not path.is_absolute() and ".." not in path.parts


def _read_json(folder: Path, name: str, problems: list[Problem]) -> dict[str, Any]:
    try:
        value = read_json(folder / name)
    except FileNotFoundError:
        problems.append(Problem("no-config", name, "", "the file is missing", "Is this a Transformers model folder?"))
        return {}
    except UNREADABLE as error:
        problems.append(Problem("bad-json", name, "", f"not readable JSON ({error})", "Fetch the file again."))
        return {}
    if not isinstance(value, dict):
        problems.append(Problem("bad-json", name, "", "not a JSON object", "Fetch the file again."))
        return {}
    return value


def _weight_files(folder: Path, problems: list[Problem]) -> tuple[list[str], dict[str, str] | None]:
    """The shards to read, and the index's table when there is one."""
    if (folder / INDEX).exists():
        weight_map = _read_json(folder, INDEX, problems).get("weight_map")
        if isinstance(weight_map, dict):
            return _shards_of_index(folder, weight_map, problems), weight_map
        if not any(problem.file == INDEX for problem in problems):
            problems.append(Problem("bad-index", INDEX, "", "it has no table weight_map", "Fetch the file again."))
    if (folder / SINGLE).exists():
        return [SINGLE], None
    found = sorted(path.name for path in folder.glob("*.safetensors") if not OTHER_WEIGHTS.match(path.name))
    if not found:
        problems.append(_no_weights(folder))
    return found, None


def _shards_of_index(folder: Path, weight_map: dict[str, Any], problems: list[Problem]) -> list[str]:
    good, seen = [], set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in seen:
            seen.add(str(file))
            if not safe_relative(file):
                text = f"the index sends this tensor to '{file}', outside of the folder"
                problems.append(Problem("unsafe-path", INDEX, tensor, text, "Do not trust this checkpoint."))
            elif not file.endswith(".safetensors"):
                problems.append(Problem("pickle", file, tensor, "not a safetensors file", _PICKLE_FIX))
            elif not (folder / file).is_file():
                text = f"the index names it for {tensor}, and it is not there"
                problems.append(Problem("missing-shard", file, "", text, "Fetch the missing shard."))
            else:
                good.append(file)
    return sorted(good)


_PICKLE_FIX = (
    "Pickle can run code when it is opened, so it is refused. Convert it once where you trust it: "
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
)


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for path in folder.iterdir() if PICKLE.match(path.name))
    if pickles:
        return Problem("pickle", pickles[0], "", "the weights are pickle files", _PICKLE_FIX)
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        fix = "Load it with from_pretrained(folder, gguf_file=...) and save it as a Transformers folder."
        return Problem("gguf", ggufs[0], "", "the weights are a GGUF file", fix)
    return Problem("no-weights", "", "", "no *.safetensors in the folder", "Give a folder with the weights.")


def _read_shards(folder: Path, files: list[str], problems: list[Problem]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        try:
            found, wrong = read_header(folder / file, file)
        except OSError as error:
            problems.append(Problem("unreadable", file, "", str(error.strerror or error), "Check its permissions."))
            continue
        problems.extend(wrong)
        unusable = {problem.tensor for problem in wrong}
        for name, info in found.items():
            if name in tensors:
                text = f"the tensor is also in {tensors[name].file}"
                problems.append(Problem("duplicate", file, name, text, "Keep one of the two and rebuild the index."))
            elif name not in unusable:
                tensors[name] = info
    return tensors


def _compare_index(weight_map: dict[str, Any], tensors: dict[str, TensorInfo], problems: list[Problem]) -> None:
    """Engines trust the index or the shards, each its own way: where the two disagree, something gets lost."""
    bad_files = {problem.file for problem in problems if problem.fatal}
    fix = "Rebuild the index, or fetch the shard again."
    for name, file in weight_map.items():
        if name in tensors and tensors[name].file != file and isinstance(file, str):
            text = f"the index says {file}, the tensor is in {tensors[name].file}"
            problems.append(Problem("index-mismatch", INDEX, name, text, fix))
        elif name not in tensors and str(file) not in bad_files and INDEX not in bad_files:
            problems.append(Problem("index-mismatch", str(file), name, "the index lists it, the shard lacks it", fix))
    for name, info in tensors.items():
        if name not in weight_map:
            text = "the shard holds it, the index does not list it"
            problems.append(Problem("index-mismatch", info.file, name, text, fix, fatal=False))
