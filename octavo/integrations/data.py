"""Text in: files, folders, hub datasets or the demo text -> records of one kind -> texts -> windows of tokens.

A record has one of three forms, told by its columns; others are ignored:

    messages            {"messages": [{"role": ..., "content": ...}, ...]}     a conversation, for a chat template
    prompt_completion   {"prompt": ..., "completion": ...}                      texts or lists of messages
    text                {"text": ...}                                           a text or Markdown file is one record
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import DataError, UnsupportedError
from octavo.base.log import logger
from octavo.base.report import UNREADABLE
from octavo.integrations.hub import first_line, hub_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_TEXT_FILES, _JSON_FILES, _PARQUET_FILES = (".txt", ".md", ".rst"), (".jsonl", ".json"), (".parquet",)
_FILES = (*_TEXT_FILES, *_JSON_FILES, *_PARQUET_FILES)
# What a hub dataset may call the part that we ask for, first found wins.
_HUB_SPLITS = {"calibration": ("calibration", "train"), "eval": ("eval", "validation", "test")}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_FIX = "Give a text, JSON lines or Parquet file, a folder of them, a hub dataset, or demo."


@dataclass(frozen=True)
class TextData:
    """Records of one kind (a key of KINDS), each with exactly the columns of that kind; never empty."""

    kind: str
    records: tuple[Record, ...]
    source: str

    def texts(self, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
        """Every record as one text. Messages go through the tokenizer's chat template: DataError if it has none."""
        return [_as_text(record, self.kind, tokenizer, self.source) for record in self.records]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the records, in order: 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for record in self.records:
            digest.update(json.dumps(record, sort_keys=True, ensure_ascii=False).encode() + b"\n")
        return digest.hexdigest()


def load_data(source: str | Path, split: str = "train", *, limit: int | None = None) -> TextData:
    """Read `source`; at most `limit` records, empty ones left out.

    split: `train`, `calibration` or `eval`; it chooses among the parts of the demo text and of hub datasets. A file or
    folder is one part: give different files for different purposes. DataError for anything unreadable, empty, of
    unknown columns or of mixed kinds.
    """
    name = str(source)
    kind, kept = "", []
    for record, where in _rows(name, split):
        this = _kind_of(record, where)
        kind = kind or this
        if this != kind:
            raise DataError(f"{where}: a record of kind {this} among records of kind {kind}", fix="Split the file.")
        checked = {column: _checked(record[column], column, where) for column in KINDS[kind]}
        if all(checked.values()):
            kept.append(checked)
        if limit is not None and len(kept) >= limit:
            break
    if not kept:
        raise DataError(f"data '{name}' is empty", fix=_FIX)
    return TextData(kind, tuple(kept), name)


def load_texts(
    source: str | Path,
    split: str = "train",
    *,
    limit: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[str]:
    """`load_data(...).texts(tokenizer)`."""
    return load_data(source, split, limit=limit).texts(tokenizer)


def token_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], context: int, count: int | None = None
) -> torch.Tensor:
    """The texts joined by blank lines, tokenized once and cut: int64 [n, context], n <= count; the tail is dropped.

    DataError if there are fewer than `context` tokens in all.
    """
    import torch

    ids = tokenizer("\n\n".join(texts), verbose=False)["input_ids"]
    windows = len(ids) // context if count is None else min(count, len(ids) // context)
    if windows < 1:
        fix = f"Give more text, or a context of at most {len(ids)} tokens."
        raise DataError("the data is shorter than one sample", got=f"{len(ids)} tokens", need=str(context), fix=fix)
    return torch.tensor(ids[: windows * context], dtype=torch.int64).view(windows, context)


def token_samples(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], context: int, count: int | None = None
) -> list[torch.Tensor]:
    """One sample per text, cut to `context` tokens: int64 [<= context] each, at most `count`, no padding.

    DataError if no text holds a token.
    """
    import torch

    samples = (
        torch.tensor(ids, dtype=torch.int64)
        for text in texts
        if (ids := tokenizer(text, truncation=True, max_length=context, verbose=False)["input_ids"])
    )
    found = list(islice(samples, count))
    if not found:
        raise DataError("the data holds no token", fix=_FIX)
    return found


def calibration_samples(
    tokenizer: PreTrainedTokenizerBase, source: str | Path, samples: int, context: int
) -> tuple[TextData, list[torch.Tensor]]:
    """The calibration part of `source`, and at most `samples` token sequences of it, int64 [<= context], none padded.

    Plain text: windows of the joined texts. Conversations: one sample each. Fewer than asked for are a warning.
    """
    # Enough records for the samples asked for, without reading all of a large dataset.
    data = load_data(source, "calibration", limit=64 * samples)
    texts = data.texts(tokenizer)
    if data.kind == "text":
        found = list(token_windows(tokenizer, texts, context, samples))
    else:
        found = token_samples(tokenizer, texts, context, samples)
    if len(found) < samples:
        logger().warning("%s holds %d samples, %d were asked for", source, len(found), samples)
    return data, found


def _rows(name: str, split: str) -> Iterator[tuple[Any, str]]:
    """(record, where it stands) of every record, lazily."""
    path = Path(name).expanduser()
    if name == "demo":
        from octavo.integrations.demo import demo_texts

        yield from (({"text": text}, "demo") for text in demo_texts(split))
    elif path.is_file():
        yield from _file_rows(path)
    elif name and path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in _FILES)
        if not files:
            raise DataError(f"folder {path} holds no data file", need=f"files ending in {', '.join(_FILES)}")
        for file in files:
            yield from _file_rows(file)
    elif not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix.lower() in _FILES:
        raise DataError(f"data '{name}' does not exist", fix=_FIX)
    else:
        yield from _hub_rows(name, split)


def _file_rows(path: Path) -> Iterator[tuple[Any, str]]:
    suffix = path.suffix.lower()
    try:
        if suffix in _TEXT_FILES:
            yield {"text": path.read_text(encoding="utf-8-sig")}, str(path)
        elif suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as file:
                yield from ((json.loads(line), f"{path}:{i}") for i, line in enumerate(file, 1) if line.strip())
        elif suffix == ".json":
            records = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(records, list):
                raise DataError(f"{path}", got=type(records).__name__, need="a JSON list of records")
            yield from ((record, f"{path}[{i}]") for i, record in enumerate(records))
        elif suffix in _PARQUET_FILES:
            yield from _parquet_rows(path)
        else:
            raise DataError(f"{path} is of an unknown kind", need=f"a name ending in {', '.join(_FILES)}")
    except UNREADABLE as error:  # ValueError: also pyarrow's ArrowInvalid
        raise DataError(f"{path} is not readable", got=first_line(error)) from error


def _parquet_rows(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError("Parquet files need pyarrow", fix="Run: pip install 'octavo[train]'") from None
    table = parquet.ParquetFile(path)
    number = 0
    for batch in table.iter_batches(1024):
        for record in batch.to_pylist():
            yield record, f"{path}[{number}]"
            number += 1


def _hub_rows(name: str, split: str) -> Iterator[tuple[Any, str]]:
    """A hub dataset, `owner/name` or `owner/name:configuration`."""
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            "hub datasets need the package datasets", fix="Run: pip install 'octavo[train]'"
        ) from None
    repo, _, configuration = name.partition(":")
    with hub_errors(repo, kind="dataset"):
        try:
            parts = datasets.load_dataset(repo, configuration or None)
        except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
            what = f"data '{name}' is neither a file or folder here nor a dataset the hub can give"
            raise DataError(what, got=first_line(error), fix=_FIX) from error
        except ValueError as error:
            raise DataError(f"dataset {name}", got=first_line(error)) from error
    wanted = _HUB_SPLITS.get(split, (split,))
    found = next((part for part in wanted if part in parts), None)
    if found is None:
        raise DataError(f"dataset {name} has no part for '{split}'", got=", ".join(parts), need=" or ".join(wanted))
    yield from ((record, f"{name}[{i}]") for i, record in enumerate(parts[found]))


def _kind_of(record: Any, where: str) -> str:
    if not isinstance(record, dict):
        raise DataError(where, got=type(record).__name__, need="a record of named columns")
    for kind, columns in KINDS.items():
        if all(record.get(column) is not None for column in columns):
            return kind
    need = "text, or messages, or prompt and completion"
    raise DataError(f"{where}: no column to train or measure on", got=f"columns {', '.join(record)}", need=need)


def _checked(value: Any, column: str, where: str) -> Any:
    """A text, or a list of messages reduced to role and content."""
    whole = isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    texts = [value] if isinstance(value, str) else [m.get("content") for m in value] if whole else []
    if any(_HALF_PAIR.search(text) for text in texts if isinstance(text, str)):
        got = "half of a surrogate pair, which is no character"
        raise DataError(f"{where}: column '{column}'", got=got, need="text that can be written as UTF-8")
    if isinstance(value, str) and column != "messages":
        return value if value.strip() else ""
    if column == "text" or not whole:
        need = {"text": "a text", "messages": "a list of {role, content}"}.get(column, "a text or a list of messages")
        raise DataError(f"{where}: column '{column}'", got=type(value).__name__, need=need)
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _as_text(record: Record, kind: str, tokenizer: PreTrainedTokenizerBase | None, source: str) -> str:
    if kind == "text":
        return str(record["text"])
    if kind == "prompt_completion" and isinstance(record["prompt"], str) and isinstance(record["completion"], str):
        return record["prompt"] + record["completion"]
    if tokenizer is None or not tokenizer.chat_template:
        fix = "Use an instruct model, or data with a text column."
        raise DataError(f"data '{source}' holds conversations, and the model has no chat template", fix=fix)
    messages: list[Record] = []
    for column in KINDS[kind]:
        part, role = record[column], "assistant" if column == "completion" else "user"
        messages += [{"role": role, "content": part}] if isinstance(part, str) else part
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template raises whatever its author wrote
        raise DataError(f"data '{source}': the chat template refuses a conversation", got=first_line(error)) from error
