"""Pieces: every tensor of the output as a window of a stored one, read in slices of rows.

Most pieces are a whole tensor. Experts that are stacked in one 3-D parameter become one matrix per expert and
projection, under the names that engines read from files. FP8 inputs, when allowed, read as code * scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.formats.architectures import CONV1D_TYPES, STACKED_LAYOUT, W_NAMES, role
from octavo.formats.codec import decode
from octavo.formats.scaled import ScaledTensor
from octavo.store.schema import (
    INPUT_SCALE,
    SCALE_NAMES,
    StoredScheme,
    parse_quantization_config,
    read_scaled,
    stored_quantization,
)
from octavo.store.tensors import Checkpoint

_STACK = re.compile(
    r"(?P<at>.*\bexperts)\.(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(?P<bias>_bias)?$"
)
_W_LEAF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_SCALE_LEAVES = (*SCALE_NAMES, INPUT_SCALE, "activation_scale", "weight_zero_point")


@dataclass(frozen=True)
class Piece:
    """name: in the output. source: the stored tensor. The window: expert, then transposed, then part of `parts`.

    interleaved: part i is every second row, starting at i. scaled: the stored FP8 module, to read dequantized.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    expert: int | None = None
    part: int | None = None
    transposed: bool = False
    interleaved: bool = False
    scaled: ScaledTensor | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def whole(self) -> bool:
        """True where the piece is the stored tensor itself."""
        return self.expert is None and self.scaled is None

    def rows(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop, contiguous; a view of the file where that is possible. FP8 pieces read as float32."""
        if self.scaled is not None:
            return _dequantized_rows(self.scaled, start, stop)
        if self.expert is None:
            return checkpoint.rows(self.source, start, stop)
        stored = checkpoint.get(self.source)[self.expert]
        if self.transposed:
            stored = stored.T
        if self.part is not None:
            half = stored.shape[0] // 2
            stored = stored[self.part :: 2] if self.interleaved else stored[self.part * half : (self.part + 1) * half]
        return stored[start:stop].contiguous()


def find_pieces(checkpoint: Checkpoint, *, dequantize: bool = False) -> list[Piece]:
    """All tensors of a checkpoint as pieces, in the order of the files.

    CheckpointError for FP8 or otherwise quantized input, unless `dequantize` and it is FP8. ConfigError for families
    whose matrices are stored transposed.
    """
    conv1d = next((kind for kind in checkpoint.model_types[-1:] if kind in CONV1D_TYPES), None)
    if conv1d:
        got = f"{conv1d}, whose matrices are stored as [in, out]"
        raise ConfigError(f"{checkpoint.folder}", got=got, need="a family with [out, in] matrices")
    scheme = _stored_scheme(checkpoint, dequantize)
    rename = _moe_rename(checkpoint)
    pieces = []
    for name in checkpoint.names():
        if scheme is not None and name.rpartition(".")[2] in _SCALE_LEAVES:
            continue
        if scheme is not None and is_float8(checkpoint.dtype(name)):
            scaled = read_scaled(checkpoint, name.removesuffix(".weight"), scheme)
            pieces.append(Piece(name, name, checkpoint.shape(name), torch.bfloat16, scaled=scaled))
            continue
        pieces += [replace(piece, name=rename(piece.name)) for piece in _unstack(checkpoint, name)]
    return pieces


def _stored_scheme(checkpoint: Checkpoint, dequantize: bool) -> StoredScheme | None:
    """The scheme to dequantize with; None for a model in 16 or 32 bit; CheckpointError for what must not pass."""
    float8 = next((name for name in checkpoint if is_float8(checkpoint.dtype(name))), None)
    stored = stored_quantization(checkpoint)
    if not stored:
        if float8 is None:
            return None
        got = f"{checkpoint.dtype(float8)} in {float8} without a quantization_config"
        raise CheckpointError(f"{checkpoint.folder}", got=got, need="16 or 32 bit weights")
    if not dequantize:
        raise CheckpointError(
            f"{checkpoint.folder} is quantized already",
            got=f"quant_method {stored.get('quant_method')!r}",
            need="16 or 32 bit weights",
            fix="Quantize the original model, or use `octavo requantize`, which keeps the error that FP8 made.",
        )
    return parse_quantization_config(stored)


def is_float8(dtype: torch.dtype) -> bool:
    """True for every 8-bit float dtype of torch."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _unstack(checkpoint: Checkpoint, name: str) -> Iterator[Piece]:
    """One stored tensor as pieces: itself, or one matrix (or bias) per expert and projection."""
    info = checkpoint.info(name)
    stack = _STACK.match(name)
    ndim = 2 if stack and stack["bias"] else 3
    orientation = _orientation(checkpoint, name, stack) if stack and len(info.shape) == ndim else None
    if stack is None or orientation is None:
        yield Piece(name, name, info.shape, info.dtype)
        return
    transposed, interleaved = orientation
    leaves: tuple[str, ...] = ("gate_proj", "up_proj") if stack["leaf"] == "gate_up_proj" else (stack["leaf"],)
    if any(kind in W_NAMES for kind in checkpoint.model_types[:1]):
        leaves = tuple(_W_LEAF.get(leaf, leaf) for leaf in leaves)
    experts, *matrix = info.shape
    matrix = matrix[::-1] if transposed and not stack["bias"] else matrix
    shape = (matrix[0] // len(leaves), *matrix[1:])
    ending = "bias" if stack["bias"] else "weight"
    for expert in range(experts):
        for part, leaf in enumerate(leaves):
            yield Piece(
                f"{stack['at']}.{expert}.{leaf}.{ending}",
                name,
                shape,
                info.dtype,
                expert=expert,
                part=part if len(leaves) == 2 else None,
                transposed=transposed and not stack["bias"],
                interleaved=interleaved,
            )


def _orientation(checkpoint: Checkpoint, name: str, stack: re.Match[str]) -> tuple[bool, bool] | None:
    """(stored as [E, in, out], gate and up interleaved), from the shape where it tells, else from the model type.

    None where nothing tells, or the tensor belongs to a vision or audio tower: it is then copied as it is.
    """
    config = checkpoint.text_config
    if role(name.removesuffix("_bias"), (1, 1, 1), checkpoint.layers) != "expert":
        return None
    known = next((STACKED_LAYOUT[t] for t in checkpoint.model_types if t in STACKED_LAYOUT), (False, False))
    hidden = config.get("hidden_size")
    if stack["bias"]:
        return known
    rows, cols = checkpoint.shape(name)[1:]
    if rows != cols and hidden in (rows, cols):
        out_is_hidden = stack["leaf"] in ("down_proj", "w2")
        return (hidden == cols) == out_is_hidden, known[1]
    return known if rows == cols == hidden else None


def _moe_rename(checkpoint: Checkpoint) -> Any:
    """Transformers calls the block of Mixtral's family `mlp` in memory; its files, and engines, block_sparse_moe."""
    block = next((W_NAMES[t] for t in checkpoint.model_types[:1] if t in W_NAMES), None)
    stacked = any(_STACK.match(name) and len(checkpoint.shape(name)) == 3 for name in checkpoint)
    if block is None or not stacked:
        return lambda name: name
    return lambda name: re.sub(r"\.mlp\.(experts|gate)\.", rf".{block}.\1.", name)


def restack(pieces: list[Piece], quantized: Mapping[str, bool], checkpoint: Checkpoint) -> list[Piece]:
    """Put stacks back together of which no expert is quantized: they are copied as they are."""
    result: dict[str, Piece] = {}
    used = {piece.source for piece in pieces if quantized.get(piece.module, False)}
    blocks = {source.rpartition(".")[0] for source in used}
    for piece in pieces:
        if not blocks:
            piece = replace(piece, name=piece.source) if piece.expert is None else piece
        if piece.expert is not None and piece.source.rpartition(".")[0] not in blocks:
            info = checkpoint.info(piece.source)
            piece = Piece(piece.source, piece.source, info.shape, info.dtype)
        result[piece.name] = piece
    return list(result.values())


def _dequantized_rows(q: ScaledTensor, start: int, stop: int) -> torch.Tensor:
    """float32 rows of a stored FP8 matrix: code * scale."""
    stop = min(stop, q.codes.shape[0])
    tile = q.granularity.tile[0]
    codes = q.codes[start:stop]
    if q.scale.ndim < 2:
        return decode(codes, q.spec) * q.scale
    rows = torch.arange(start, stop) // (tile or q.codes.shape[0])
    scale = q.scale[rows]
    if q.granularity.tile[1]:
        scale = scale.repeat_interleave(q.granularity.tile[1], -1)[:, : codes.shape[1]]
    return decode(codes, q.spec) * scale
