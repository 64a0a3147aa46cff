"""A folder as Transformers loads it, against the same folder with its scales applied by Octavo: do the logits agree?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.base.errors import OctavoError
from octavo.integrations.hub import first_line
from octavo.integrations.loading import auto_class, load_config, load_folder
from octavo.integrations.measuring import logits
from octavo.store.tensors import Checkpoint

TOKENS = 32


@dataclass(frozen=True)
class Agreement:
    """error: why it does not load, empty when it does. missing, unexpected: tensor names of Transformers' load report.

    relative: |ours - theirs| / |ours| over the logits, nan where either is not finite. top1: share of equal argmax.
    reference_error: why Octavo could not decode the folder; then there is no comparison.
    """

    error: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    relative: float = 0.0
    top1: float = 1.0
    reference_error: str = ""


def compare_logits(folder: Path, tokens: int = TOKENS) -> Agreement:
    """Both models in float32 on the CPU, one after the other, on the same tokens spread over the vocabulary."""
    checkpoint = Checkpoint.open(folder, strict=False)
    try:
        model, report = _as_transformers(folder)
    except Exception as error:  # whatever it is, it is Transformers' answer
        return Agreement(error=first_line(error) or type(error).__name__)
    ids = _tokens(model, tokens)
    try:
        theirs = logits(model, ids).float()
    except Exception as error:
        return Agreement(error=f"in the first forward pass: {first_line(error) or type(error).__name__}")
    missing, unexpected = sorted(report.get("missing_keys", ())), sorted(report.get("unexpected_keys", ()))
    del model
    if not any(checkpoint.dtype(name) == torch.float8_e4m3fn for name in checkpoint):
        return Agreement("", tuple(missing), tuple(unexpected))  # nothing to decode
    try:
        decoded = load_folder(folder, None, device=torch.device("cpu"), dtype=torch.float32, activation="none")
        ours = logits(decoded, ids).float()
    except OctavoError as error:
        return Agreement("", tuple(missing), tuple(unexpected), reference_error=str(error))
    relative = float((ours - theirs).norm() / ours.norm())
    top1 = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return Agreement("", tuple(missing), tuple(unexpected), relative, top1)


def _as_transformers(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model class as octavo.load picks it, but config.json, quantization included, read by Transformers itself."""
    kind = auto_class(load_config(folder))
    model, report = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    return model.eval(), report


def _tokens(model: Any, count: int) -> torch.Tensor:
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return (torch.arange(1, count + 1) * max(vocabulary // (count + 2), 1)) % vocabulary
