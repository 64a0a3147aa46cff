"""An output folder that appears whole or not at all, and the files that travel with the weights.

Work happens in `.NAME.octavo-unfinished` beside the target (inside it, where the target is an empty folder that cannot
be replaced, such as a mount point). The last step is one rename. A lock, which a killed process lets go of, keeps two
jobs apart; a job that finds its own unfinished work goes on with it, any other starts cleanly.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Self

from octavo.base.errors import CheckpointError, InputError, OctavoError
from octavo.base.report import atomic_write, sync_folder

JOB = ".octavo-job"
# Weights, in this or other formats, and what belongs to them: the output has its own.
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|pkl|msgpack|h5|onnx|onnx_data|gguf|ggml|npz|ot|tflite|mlmodel)$"
    r"|.*\.(safetensors|bin)\.index\.json$"
)
_REWRITTEN = frozenset({"config.json", "hf_quant_config.json", "octavo_manifest.json"})
SIDE_FILE_LIMIT = 256 << 20  # bytes; tokenizers are below 50 MB


class OutputFolder:
    """Context manager: `.path` is where to write; leaving it without an error and after commit() shows the result.

    job: what makes two runs the same job; None never resumes. On an OctavoError or OSError everything is removed, on
    anything else (an interrupt) the work stays, for the next run to resume or to clean.
    """

    def __init__(self, target: Path, job: str | None) -> None:
        target = Path(os.path.abspath(target))
        self.target, self._job = target, job
        self._inside = _must_work_inside(target)
        self.path = (target if self._inside else target.parent) / f".{target.name}.octavo-unfinished"
        self._lock = -1
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        check_output(self.target, self.path)
        try:
            for parent in reversed([p for p in self.path.parents if not p.exists()]):
                parent.mkdir()
                self._made.append(parent)
            self.path.mkdir(exist_ok=True)
            self._take_lock()
            if self._job is None or not self._same_job():
                self._clear()
                atomic_write(self.path / JOB, (self._job or "").encode())
        except OSError as error:
            raise output_error(self.target, error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, (OctavoError, OSError)):
                shutil.rmtree(self.path, ignore_errors=True)
                for parent in reversed(self._made):
                    parent.rmdir()
        finally:
            os.close(self._lock)
        if isinstance(error, OSError):
            raise output_error(self.target, error) from None

    def commit(self) -> None:
        """Make the finished folder visible under its name."""
        (self.path / JOB).unlink()
        _sync_tree(self.path)
        if self._inside:
            # config.json last: without it no engine takes the folder for a model.
            for path in sorted(self.path.iterdir(), key=lambda p: p.name == "config.json"):
                path.replace(self.target / path.name)
            self.path.rmdir()
            sync_folder(self.target)
        else:
            self.path.replace(self.target)
            sync_folder(self.target.parent)

    def _take_lock(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"output folder {self.target}", got="another process writing it", fix="Wait.") from None

    def _same_job(self) -> bool:
        try:
            return (self.path / JOB).read_bytes() == (self._job or "").encode()
        except FileNotFoundError:
            return False

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_output(target: Path, work: Path | None = None) -> None:
    """InputError unless target is absent, or an empty folder (our own unfinished work aside)."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"output {target}", got="a file or a link", need="a new folder")
    if target.is_dir() and any(path != work for path in target.iterdir()):
        fix = "Choose another name, or remove the folder."
        raise InputError(f"output folder {target}", got="a folder that is not empty", need="a new folder", fix=fix)


def check_apart(source: Path, target: Path) -> None:
    """InputError if one of the two folders is or contains the other."""
    a, b = _real(source), _real(target)
    if a == b or a in b.parents or b in a.parents:
        raise InputError(f"output folder {target}", got=f"the same place as {source}", need="a folder apart from it")


def output_error(target: Path, error: OSError) -> InputError:
    """An OSError while writing, in our words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"output {target}: the disk is full", fix="Free some space, or choose another disk.")
    return InputError(f"output {target}", got=error.strerror or str(error), fix="Check the path and its permissions.")


def check_space(folder: Path, needed: int) -> None:
    """InputError if the file system of `folder` lacks `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        got, need = f"{free / 1e9:.2f} GB free", f"{needed / 1e9:.2f} GB"
        raise InputError(f"output {folder}: the disk is full", got=got, need=need, fix="Choose another disk.")


def copy_side_files(source: Path, out: Path, *, skip: frozenset[str] = _REWRITTEN) -> tuple[list[str], list[str]]:
    """Copy all that is not weights: tokenizer, chat template, generation config, code, licence.

    Returns what was copied and what was left out because of its size, as relative names. Links are followed only to
    places that hold this model already (its folder, the folder its config.json really lies in, a hub cache's blobs);
    CheckpointError for others, which may lead to anything on this machine. Linked folders are not entered.
    """
    trusted = {_real(source), _real(source / "config.json").parent}
    copied, left = [], []
    for root, folders, files in os.walk(source, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(root)
        for name in sorted(files):
            path, relative = here / name, (here / name).relative_to(source)
            if _WEIGHTS.match(name) or str(relative) in skip or name.startswith("."):
                continue
            real = _real(path)
            if path.is_symlink() and not any(place in real.parents for place in trusted):
                fix = "Put the file itself in the folder, or remove the link."
                raise CheckpointError(f"{path}", got=f"a link to {real}, outside of the model", fix=fix)
            if not real.is_file():
                raise CheckpointError(f"{path}", got="neither a file nor a link to one", fix="Remove it.")
            if real.stat().st_size > SIDE_FILE_LIMIT:
                left.append(str(relative))
                continue
            target = out / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # never write through a link that lies there
            shutil.copyfile(real, target)
            copied.append(str(relative))
    return copied, left


def _real(path: Path) -> Path:
    """Links followed. Unlike Path.resolve, a link to itself is no exception: it stays, and is no file."""
    return Path(os.path.realpath(path))


def _must_work_inside(target: Path) -> bool:
    """True for an existing folder that a rename cannot replace."""
    return target.is_dir() and (os.path.ismount(target) or not os.access(target.absolute().parent, os.W_OK))


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            if not name.endswith(".safetensors"):  # shards are on the disk already
                sync_folder(Path(root) / name)
        sync_folder(Path(root))
