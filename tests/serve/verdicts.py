"""Checkpoints for the question whether verify says what vLLM does: good ones, and one defect each.

Weights are loud: blocks of rows and columns differ by factors, so that a scale which lands in the wrong place shows in
the answer far above the rounding of FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.workflows.broken import Folder, decoder, quantize

Change = Callable[[Folder], object]
A0, M0 = "model.layers.0.self_attn", "model.layers.0.mlp"
Q, K, V, O = (f"{A0}.{leaf}_proj" for leaf in "qkvo")
GATE, UP, DOWN = (f"{M0}.{leaf}_proj" for leaf in ("gate", "up", "down"))


def loud(*arguments: Any, **more: Any) -> Folder:
    folder = decoder(*arguments, **more)
    generator = torch.Generator().manual_seed(3)
    for name, x in folder.tensors.items():
        if name == "lm_head.weight" or (folder.config["tie_word_embeddings"] and "embed" in name):
            folder.tensors[name] = (x.float() * 6).bfloat16()
        elif "embed" in name:
            folder.tensors[name] = (x.float() * 20).bfloat16()
        elif name.removesuffix(".weight") in folder.linears:
            rows, cols = x.shape
            factors = torch.tensor([0.5, 1.0, 3.0])
            by_row = factors[torch.randint(0, 3, (-(-rows // 64),), generator=generator)].repeat_interleave(64)[:rows]
            by_col = factors[torch.randint(0, 3, (-(-cols // 64),), generator=generator)].repeat_interleave(64)[:cols]
            folder.tensors[name] = (x.float() * by_row[:, None] * by_col).bfloat16()
    return folder


def drop(name: str) -> Change:
    return lambda f: f.tensors.pop(name)


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(f: Folder) -> None:
        for found in [n for n in f.tensors if n.endswith(name)]:
            f.tensors[found] = change(f.tensors[found])

    return apply


def renamed(old: str, new: str) -> Change:
    return lambda f: f.rename(old, new)


def config(**values: Any) -> Change:
    return lambda f: f.quant.update(values)


def without(key: str) -> Change:
    return lambda f: f.quant.pop(key)


def group(f: Folder) -> dict[str, Any]:
    return f.quant["config_groups"]["group_0"]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)


def merged_codes(x: torch.Tensor) -> torch.Tensor:
    """An adapter's update added to the codes as if they were weights."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 200
    return (x.float() + noise).clamp(-448, 448).to(torch.float8_e4m3fn)


def both(*changes: Change) -> Change:
    return lambda f: [change(f) for change in changes]
