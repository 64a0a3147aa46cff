"""The folder: what Checkpoint.open found wrong, tensors that no engine can use, and the files that are not weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from octavo.base.report import UNREADABLE, read_json
from octavo.formats.architectures import EMBEDDINGS, FUSED, HEADS, ROW_PARALLEL
from octavo.store.raw_header import INDEX
from octavo.store.tensors import SINGLE, Checkpoint
from octavo.workflows.rules.findings import REPAIR, REQUANTIZE, Findings
from octavo.workflows.rules.model import Model, Module, Stored

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tekken.json")
SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
COPY = "Copy it from the 16-bit model."
SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors$")
JSON_LIMIT = 64 << 20  # bytes of a JSON file that is read whole
MATRICES = frozenset(shard for shards in FUSED.values() for shard in shards) | ROW_PARALLEL - {"dense", "c_proj", "wo"}
MATRICES |= FUSED.keys() | HEADS | EMBEDDINGS | {"q_b_proj", "kv_b_proj"}
# Of other quantization methods: 8-bit integers beside a scale.
CODES = frozenset({torch.int8, torch.uint8})
FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


def check_files(checkpoint: Checkpoint, out: Findings) -> None:
    """Problems of the files themselves, the same for every engine."""
    repairable = {"index-mismatch", "bad-index"}
    for problem in checkpoint.problems:
        fix = REPAIR if problem.code in repairable and problem.fatal is False else problem.fix
        stale = problem.code == "index-mismatch"
        severity = "error" if problem.fatal or stale else "warn"
        where = problem.where or str(checkpoint.folder)
        out.add(severity, problem.code, where, _sentence(problem.message), fix)  # type: ignore[arg-type]
    _unlisted_shards(checkpoint, out)
    _total_size(checkpoint, out)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _unlisted_shards(checkpoint: Checkpoint, out: Findings) -> None:
    """Shards on disk that loaders never open, and folders without the index that loaders need."""
    folder = checkpoint.folder
    used = set(checkpoint.files)
    present = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    indexed = (folder / INDEX).is_file()
    counts = {int(m[2]) for name in present if (m := SHARD.match(name))}
    for name in present:
        if name in used or not (indexed or SHARD.match(name)):
            continue
        if SHARD.match(name) or (name == SINGLE and indexed and not used):
            text = "This shard is on disk and the index never names it: loaders leave all of its tensors out."
            out.error("shard-not-in-index", name, text, REPAIR)
    if not indexed and len(used) > 1:
        text = f"{len(used)} shards and no {INDEX}: Transformers cannot load them, and vLLM reads whatever is there."
        out.error("index-missing", INDEX, text, REPAIR)
    for total in counts:
        numbers = {int(m[1]) for name in present if (m := SHARD.match(name)) and int(m[2]) == total}
        for number in sorted(set(range(1, min(total, 10_000) + 1)) - numbers):
            name = f"model-{number:05d}-of-{total:05d}.safetensors"
            if not any(problem.file == name for problem in checkpoint.problems):
                text = "Its name is missing from a numbered set of shards."
                out.error("missing-shard", name, text, "Fetch the missing shard.")


def _total_size(checkpoint: Checkpoint, out: Findings) -> None:
    metadata = read_object(checkpoint.folder / INDEX).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(size, int) and not checkpoint.problems and size != checkpoint.nbytes:
        text = f"metadata.total_size is {size}, the tensors have {checkpoint.nbytes} bytes; loaders do not use it."
        out.info("total-size", f"{INDEX}: metadata.total_size", text, REPAIR)


def check_tensors(model: Model, out: Findings) -> None:
    """Tensors in FP8 that no engine reads as FP8: norms, biases, embeddings, convolutions; other 8-bit floats.

    And tensors in 16 bit that fit no parameter.
    """
    for module in model.modules.values():
        for leaf, stored in module.leaves.items():
            if stored.dtype not in FP8_DTYPES:
                if leaf in ("weight", "bias"):
                    _check_plain(module, leaf, stored, out)
                continue
            if leaf == "weight" and len(stored.shape) != 2:
                text = f"{stored.text}: only two-dimensional linear weights are served in FP8."
                out.error("not-a-matrix", stored.name, text, REQUANTIZE)
            elif leaf == "bias":
                out.error("fp8-bias", stored.name, "A bias is never served in FP8.", REQUANTIZE)
            elif leaf in ("weight", "") and stored.dtype != torch.float8_e4m3fn:
                text = f"Only float8_e4m3fn weights are supported; this is {stored.text}."
                out.error("weight-dtype", stored.name, text, REQUANTIZE)
            elif leaf == "weight" and module.role == "embedding":
                out.error(
                    "fp8-embedding", stored.name, "Embeddings are never served in FP8 by these engines.", REQUANTIZE
                )


def _check_plain(module: Module, leaf: str, stored: Stored, out: Findings) -> None:
    """Parameters have real numbers, values, and as many dimensions as their layer multiplies with."""
    fix = "Save the model again, or take this tensor from the original."
    if not stored.dtype.is_floating_point and stored.dtype not in CODES:
        text = f"{stored.text}: loaders copy it into a floating-point parameter, and the values mean something else."
        out.error("not-numbers", stored.name, text, fix)
    elif module.role in ("tower", "mtp"):
        return
    elif 0 in stored.shape and module.role != "other":
        out.error("empty-tensor", stored.name, f"{stored.text}: no parameter has this shape.", fix)
    elif leaf == "weight" and len(stored.shape) != 2 and module.leaf in MATRICES:
        text = f"{stored.text}: the weight of {module.leaf} is a matrix, and loaders stop at another shape."
        out.error("weight-rank", stored.name, text, fix)
    elif not stored.shape and (leaf == "bias" or module.role == "norm"):
        out.error("weight-rank", stored.name, f"{stored.text}: loaders want one value for each feature.", fix)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or {} for anything else: callers only compare."""
    try:
        value = read_json(path) if path.stat().st_size <= JSON_LIMIT else {}
    except UNREADABLE:
        return {}
    return value if isinstance(value, dict) else {}


def check_side_files(folder: Path, out: Findings) -> None:
    """JSON files that are there must be readable; a folder without a tokenizer is worth a note."""
    for path in sorted(folder.glob("*.json")):
        if path.name in ("config.json", INDEX, "hf_quant_config.json") or not path.is_file():
            continue
        try:
            if path.stat().st_size <= JSON_LIMIT:
                json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            out.warn("bad-json", path.name, f"Not readable JSON ({error}).", COPY)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        out.info("no-tokenizer", "tokenizer.json", "The folder has no tokenizer; servers need --tokenizer then.", COPY)


def compare_side_files(folder: Path, reference: Path, out: Findings) -> None:
    """Tokenizer, chat template and generation config against the reference's."""
    for name in TOKENIZER_FILES:
        there, here = reference / name, folder / name
        if there.is_file() and not here.is_file():
            if name in ("vocab.json", "merges.txt") and (folder / "tokenizer.json").is_file():
                continue
            out.warn("file-lost", name, f"The reference has {name}, this folder does not.", COPY)
        elif there.is_file() and not _same(here, there):
            out.warn("tokenizer-changed", name, f"{name} differs from the reference's.", COPY)
    for name in SIDE_FILES:
        if (reference / name).is_file() and not (folder / name).is_file():
            out.warn("file-lost", name, f"The reference has {name}, this folder does not.", COPY)
    ours, theirs = chat_template(folder), chat_template(reference)
    if theirs is not None and ours is None:
        out.warn(
            "chat-template-lost",
            "chat_template.jinja",
            "The reference has a chat template, this folder has none.",
            COPY,
        )
    elif theirs is not None and ours != theirs:
        out.warn(
            "chat-template-changed", "chat_template.jinja", "The chat template differs from the reference's.", COPY
        )
    for name, keys in (
        ("generation_config.json", None),
        ("config.json", ("eos_token_id", "bos_token_id", "pad_token_id")),
    ):
        mine, other = read_object(folder / name), read_object(reference / name)
        for key in keys or sorted(set(mine) | set(other)):
            if mine and other and key != "transformers_version" and mine.get(key) != other.get(key):
                text = f"{key} is {mine.get(key)!r}, the reference has {other.get(key)!r}."
                out.warn("token-ids-changed" if keys else "generation-config-changed", f"{name}: {key}", text, COPY)


def _same(a: Path, b: Path) -> bool:
    try:
        if a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes():
            return True
    except OSError:
        return False
    if a.suffix == ".json":  # written again by another version: the same content in another layout
        left, right = read_object(a), read_object(b)
        return bool(left) and left == right
    return False


def chat_template(folder: Path) -> str | None:
    """The chat template, wherever this folder keeps it."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / name).get("chat_template")
        if isinstance(value, str):
            return value.strip()
        if isinstance(value, list):
            return json.dumps(value, sort_keys=True)
    return None
