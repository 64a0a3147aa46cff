"""A LoRA adapter folder as PEFT writes it, read without PEFT: what it adds to which weight of the base model.

delta = scaling * B A with A [r, K], B [N, r]; scaling = alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA
(arXiv 2312.03732). Everything that is not a plain pair of matrices on a linear layer is refused by name, so that an
export never loses a part of what was trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.base.errors import CheckpointError, MismatchError, RefusedError
from octavo.base.report import UNREADABLE, read_json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."

# Settings of an adapter that change the weights in a way other than adding B A: key -> what it is.
_FOREIGN = {
    "use_dora": "DoRA rescales the weight by a learned norm",
    "lora_bias": "it trains biases of its own",
    "modules_to_save": "it carries whole modules that were trained in full",
    "target_parameters": "it adapts stacked parameters",
    "trainable_token_indices": "it trains rows of the embedding",
    "layer_replication": "it repeats layers of the base model",
}


@dataclass(frozen=True)
class LoraPair:
    """a [r, K], b [N, r], any float dtype; transposed: the base stores its weight as [K, N] (Conv1D of GPT-2)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight it belongs to."""
        n, k = self.b.shape[0], self.a.shape[1]
        return (k, n) if self.transposed else (n, k)

    def delta(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start to stop of scaling * B A, float32, in the layout of the base weight."""
        a, b = self.a.float(), self.b.float()
        if self.transposed:
            return self.scaling * (a.mT[start:stop] @ b.mT)
        return self.scaling * (b[start:stop] @ a)


@dataclass(frozen=True)
class Adapter:
    """pairs: module name in the base model -> its matrices. config: adapter_config.json."""

    folder: Path
    config: Mapping[str, Any]
    pairs: Mapping[str, LoraPair]

    @classmethod
    def open(cls, folder: Path) -> Adapter:
        """Read a folder. CheckpointError if it is no adapter or broken, RefusedError if it is more than plain LoRA."""
        config = _read_config(folder)
        tensors = _read_weights(folder)
        transposed = bool(config.get("fan_in_fan_out"))
        pairs = {}
        for module in sorted({_split(folder, key)[0] for key in tensors}):
            a, b = (tensors.get(f"{PREFIX}{module}.lora_{side}.weight") for side in "AB")
            if a is None or b is None:
                side = "lora_A" if a is None else "lora_B"
                raise CheckpointError(f"{folder / WEIGHTS}: {module} has no {side}", fix="Save the adapter again.")
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                got = f"A {list(a.shape)}, B {list(b.shape)}"
                raise CheckpointError(f"{folder / WEIGHTS}: {module}", got=got, need="A [r, K] and B [N, r]")
            if not a.shape[0] or not (a.dtype.is_floating_point and b.dtype.is_floating_point):
                got = f"rank {a.shape[0]}, {a.dtype} and {b.dtype}"
                raise CheckpointError(f"{folder / WEIGHTS}: {module}", got=got, need="rank 1 or more, floating point")
            if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {module} holds NaN or Inf", fix="Train again from an earlier snapshot."
                )
            pairs[module] = LoraPair(a, b, _scaling(folder, config, module, a.shape[0]), transposed)
        if not pairs:
            raise CheckpointError(f"{folder / WEIGHTS} holds no adapter", fix="Check the folder.")
        return cls(folder, config, pairs)

    @property
    def rank(self) -> int:
        """The largest rank of any layer: what a server must allow."""
        return max(pair.a.shape[0] for pair in self.pairs.values())

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LoraPair]:
        """Tensor name of the base checkpoint -> its pair. shapes: tensor name -> shape, of the whole checkpoint.

        Names may carry a prefix more than the modules (`language_model.`) as long as it leaves one candidate.
        MismatchError names the module that is not in the checkpoint, or whose shape differs.
        """
        result = {}
        for module, pair in self.pairs.items():
            tensor = _find(f"{module}.weight", shapes)
            if tensor is None:
                raise MismatchError(
                    f"adapter {self.folder}: the base model has no weight for {module}",
                    fix="Give the model the adapter was trained on.",
                )
            if tuple(shapes[tensor]) != pair.shape:
                raise MismatchError(
                    f"adapter {self.folder}: {module}",
                    got=f"a base weight {list(shapes[tensor])}",
                    need=f"{list(pair.shape)}",
                    fix="Give the model the adapter was trained on.",
                )
            result[tensor] = pair
        return result


def _find(tensor: str, names: Iterable[str]) -> str | None:
    names = list(names)
    if tensor in names:
        return tensor
    near = [n for n in names if n.endswith("." + tensor) or tensor.endswith("." + n)]
    return near[0] if len(near) == 1 else None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no adapter: it has no {CONFIG}", fix="Give the folder PEFT saved, or a finished run."
        ) from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not readable JSON", got=" ".join(str(error).split())) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise RefusedError(f"{path}: peft_type", got=repr(kind), need="LORA", fix="Only LoRA adapters can be exported.")
    for key, reason in _FOREIGN.items():
        if config.get(key):
            raise RefusedError(f"{path}: {key} is set: {reason}", fix="Merge it with PEFT on the 16-bit model instead.")
    if config.get("bias", "none") != "none":
        raise RefusedError(f"{path}: bias is '{config['bias']}': trained biases would be lost", fix="Use bias='none'.")
    return config


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        pickle = folder / "adapter_model.bin"
        why = f"; {pickle.name} is a pickle, which can run code when read" if pickle.exists() else ""
        raise CheckpointError(f"{path} does not exist{why}", fix="Save the adapter with safe_serialization=True.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not readable", got=str(error), fix="Save the adapter again.") from None


def _split(folder: Path, key: str) -> tuple[str, str]:
    match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", key)
    if match is None:
        raise RefusedError(
            f"{folder / WEIGHTS}: '{key}' is not a matrix of a plain LoRA layer",
            fix="Merge this adapter with PEFT on the 16-bit model instead.",
        )
    return match[1], match[2]


def _scaling(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    try:
        alpha = config.get("lora_alpha", 8)
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        alpha = float(alpha)
    except (TypeError, ValueError, OverflowError, AttributeError, re.error) as error:
        got = " ".join(str(error).split())
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha or alpha_pattern of {module}", got=got) from None
    if not math.isfinite(alpha):
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha of {module}", got=str(alpha), need="a finite number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
