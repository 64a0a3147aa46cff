"""What MODEL means: a folder, `demo`, or a hub id. And the hub's refusals in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.base.errors import CheckpointError, ConfigError, OctavoError, RefusedError
from octavo.base.log import progress
from octavo.base.report import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# No pickles: weights come as safetensors or not at all. Python files are fetched only for trusted remote code.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(text: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Path:
    """A folder as it is, `demo` -> the demo model, a hub id -> its snapshot in the hub's cache (downloaded if missing).

    CheckpointError if there is neither such a folder nor such a model, RefusedError if the hub says no.
    """
    name = str(text)
    if name == "demo":
        from octavo.integrations.demo import demo_folder

        return demo_folder()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise CheckpointError(f"model '{name}'", got="a file", need="a folder with config.json and safetensors")
    if not name or not _HUB_ID.fullmatch(name):
        fix = "Give a folder, a hub id such as org/name, or demo."
        raise CheckpointError(f"model folder '{name}' does not exist", fix=fix)
    from huggingface_hub import snapshot_download

    patterns = [*_FILES, "*.py"] if trust_remote_code else list(_FILES)
    with hub_errors(name), progress(f"Fetching {name}"):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def describe(repo: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """config.json of a hub model, and the shape of every tensor of its safetensors files: headers alone are fetched.

    From the cache the shapes are empty. CheckpointError, RefusedError: as resolve_model.
    """
    if not _HUB_ID.fullmatch(repo):
        fix = "Give a folder, a config.json, a hub id such as org/name, or demo."
        raise CheckpointError(f"model '{repo}' does not exist", fix=fix)
    from huggingface_hub import HfApi, constants, errors, hf_hub_download

    with hub_errors(repo):
        config = read_json(Path(hf_hub_download(repo, "config.json")))
        if constants.HF_HUB_OFFLINE:
            return config, {}
        try:
            found = HfApi().get_safetensors_metadata(repo)
        except errors.NotASafetensorsRepoError:
            return config, {}
    files = found.files_metadata.values()
    return config, {name: tuple(t.shape) for file in files for name, t in file.tensors.items()}


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder. One without a pad token pads with its end-of-text token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        fix = "Copy the tokenizer files of the original model into the folder."
        raise CheckpointError(f"{folder} has no tokenizer that loads", got=first_line(error), fix=fix) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def push(folder: Path, repo: str, *, private: bool = True, message: str = "Upload with Octavo") -> str:
    """Upload a finished folder to the hub, creating the repository; returns its address."""
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        what = f"{folder} holds neither config.json nor adapter_config.json"
        raise CheckpointError(what, fix="Push the folder that `octavo export` or `octavo quantize` wrote.")
    if not _HUB_ID.fullmatch(repo) or "/" not in repo:
        raise ConfigError(f"repository '{repo}'", need="the form owner/name")
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(repo, writing=True), progress(f"Pushing {folder} to {repo}"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    return str(address)


@contextmanager
def hub_errors(repo: str, *, writing: bool = False, kind: str = "model") -> Iterator[None]:
    """Turn the hub client's errors about `repo` into ours. kind: what the repository holds, for the message."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        translated = _translate(error, repo, writing, kind)
        if translated is None:
            raise
        raise translated from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type: what fits into a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _translate(error: Exception, repo: str, writing: bool, kind: str) -> OctavoError | None:
    from huggingface_hub import errors

    place = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo}"
    token = "set HF_TOKEN to a token of your account (or run `hf auth login`)"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        fix = f"Accept the licence at {place} with your account, then {token}."
        return RefusedError(f"{kind} {repo} is gated and this machine has no access to it", fix=fix)
    if writing and status in (401, 403):
        fix = f"{token[0].upper()}{token[1:]} with write access to {repo}."
        return RefusedError(f"the hub refuses to write to {repo}", got=f"HTTP {status}", fix=fix)
    if isinstance(error, errors.RepositoryNotFoundError):
        fix = f"Check the spelling; if it is private, {token}."
        return CheckpointError(f"'{repo}' is neither a folder here nor a {kind} the hub shows to you", fix=fix)
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{kind} {repo} has no such revision", got=first_line(error))
    if status in (401, 403):
        fix = f"Accept the licence at {place} if it asks for one, then {token}."
        return RefusedError(f"the hub refuses access to {repo}", got=f"HTTP {status}", fix=fix)
    if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
        return CheckpointError(f"the hub cannot give {kind} {repo}", got=first_line(error))
    # The HTTP library under the hub's client differs between versions: its root error is the first base here.
    network = errors.HfHubHTTPError.__bases__[0]
    if isinstance(error, (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError, network)):
        fix = "Give a folder, or fetch it where the hub can be reached (HF_HUB_OFFLINE must not be set)."
        what = f"'{repo}' is neither a folder here nor in the hub's cache, and the hub cannot be reached"
        return CheckpointError(what, fix=fix)
    return None
