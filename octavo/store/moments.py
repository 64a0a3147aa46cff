"""Second moments of the inputs of linears, on disk: what error-compensated rounding needs of a calibration.

A folder: `moments.json` names, for every module, the file and tensor that hold its matrix; siblings that are given the
same input share one. Float32 [K, K], read one at a time: 4 K^2 bytes each, 33 GB for an 8B model, 0.4 GB for 135M.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pydantic
import torch
from safetensors.torch import save, save_file

from octavo.base.errors import CheckpointError, MismatchError
from octavo.base.report import UNREADABLE, Report, atomic_write, read_json
from octavo.store.header import read_header
from octavo.store.manifest import fingerprint
from octavo.store.tensors import Checkpoint, safe_relative

INDEX = "moments.json"
SCHEMA_VERSION = 1


class MomentsIndex(Report):
    """model_fingerprint: of the model that was calibrated. tokens: seen. weighting: `none`, or `fisher`: each token
    counts as much as the loss depends on the layer's output there. files: matrix -> file. modules: module -> matrix.
    few: modules that too few tokens reached for their moments to be of use -> how many.
    """

    schema_version: int = SCHEMA_VERSION
    model_fingerprint: str
    data_fingerprint: str
    tokens: int
    weighting: str
    files: dict[str, str] = pydantic.Field(default_factory=dict)
    modules: dict[str, str] = pydantic.Field(default_factory=dict)
    few: dict[str, int] = pydantic.Field(default_factory=dict)


class Moments:
    """The matrices of a calibration, by module. Build it with `Moments.open`."""

    def __init__(self, folder: Path, index: MomentsIndex) -> None:
        self.folder, self.index = folder, index

    @classmethod
    def open(cls, folder: Path | str, *, model: Path | str | Checkpoint | None = None) -> Moments:
        """Read the index. CheckpointError if it is unreadable, MismatchError if it belongs to another model."""
        folder = Path(folder)
        path = folder / INDEX
        try:
            index = MomentsIndex(**read_json(path))
        except FileNotFoundError:
            fix = "Make it with: octavo calibrate MODEL --data D --moments DIR"
            raise CheckpointError(f"{path} does not exist", fix=fix) from None
        except (*UNREADABLE, TypeError) as error:
            raise CheckpointError(f"{path} is not readable", got=" ".join(str(error).split())[:200]) from None
        if index.schema_version != SCHEMA_VERSION:
            raise CheckpointError(f"{path}: schema_version", got=str(index.schema_version), need=str(SCHEMA_VERSION))
        if model is not None and (found := fingerprint(model)) != index.model_fingerprint:
            fix = "Calibrate this model."
            raise MismatchError(f"{path} is of another model", got=index.model_fingerprint, need=found, fix=fix)
        unsafe = [file for file in index.files.values() if not safe_relative(file)]
        if unsafe:
            raise CheckpointError(f"{path} points outside of its folder", got=unsafe[0])
        return cls(folder, index)

    def __contains__(self, module: object) -> bool:
        return module in self.index.modules

    def missing(self, module: str) -> str:
        """Why there is nothing for a module, in words."""
        if module in self.index.few:
            return f"{self.index.few[module]} calibration tokens reached it, too few"
        return "its inputs were not calibrated"

    def key(self, module: str) -> str:
        """The matrix of a module: equal for modules that share their input."""
        return self.index.modules[module]

    def get(self, module: str) -> torch.Tensor:
        """Float32 [K, K] of one module, read now. CheckpointError if the file is damaged or gone."""
        key = self.key(module)
        path = self.folder / self.index.files.get(key, INDEX)
        try:
            infos, problems = read_header(path, path.name)
        except OSError as error:
            raise CheckpointError(f"{path}", got=str(error.strerror or error)) from None
        fits = key in infos and infos[key].dtype == torch.float32
        if problems or not fits:
            got = problems[0].message if problems else f"no float32 tensor {key}"
            raise CheckpointError(f"{path}", got=got, fix="Calibrate again.")
        info = infos[key]
        with path.open("rb") as file:
            file.seek(info.begin)
            data = bytearray(file.read(info.nbytes))
        return torch.frombuffer(data, dtype=torch.float32).reshape(info.shape)


class MomentsWriter:
    """Writes a moments folder batch by batch; the index comes last, so a killed run leaves no folder that opens.

    durable: on the disk once it is written; False for a folder that is gone with the process.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder, self.durable = folder, durable
        self._files: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        self._few: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)

    def add(self, matrices: Mapping[str, torch.Tensor], members: Mapping[str, list[str]]) -> None:
        """One file of matrices, if there are any. members: matrix -> the modules that are given this input."""
        if not matrices:
            return
        name = f"moments-{len(set(self._files.values())) + 1:05d}.safetensors"
        tensors = {key: value.float().cpu().contiguous() for key, value in matrices.items()}
        if self.durable:
            atomic_write(self.folder / name, save(tensors))
        else:
            save_file(tensors, self.folder / name)
        for key in matrices:
            self._files[key] = name
            self._modules.update(dict.fromkeys(members[key], key))

    def skip(self, few: Mapping[str, int]) -> None:
        """Modules without a matrix -> the tokens that reached them."""
        self._few.update(few)

    def finish(self, *, model_fingerprint: str, data_fingerprint: str, tokens: int, weighting: str) -> MomentsIndex:
        index = MomentsIndex(
            model_fingerprint=model_fingerprint,
            data_fingerprint=data_fingerprint,
            tokens=tokens,
            weighting=weighting,
            files=self._files,
            modules=self._modules,
            few=self._few,
        )
        index.write(self.folder / INDEX)
        return index
