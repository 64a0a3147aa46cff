"""How many values share one scale. All four are a tile of the last two dimensions, so one piece of code serves them.

    PerTensor()       one scale                       scale ()
    PerRow()          one per row: channel or token   scale [..., N, 1]
    PerGroup(g)       one per g values of a row       scale [..., N, ceil(K/g)]
    PerBlock(m, n)    one per m x n block             scale [..., ceil(N/m), ceil(K/n)]

Ragged edges: the last tile of a row or column may be smaller than the others. Leading dimensions are batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.base.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Granularity:
    """Base of the four. `tile` is (rows, columns); 0 means the whole extent."""

    name: ClassVar[str]

    @property
    def tile(self) -> tuple[int, int]:
        raise NotImplementedError

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a tensor of this shape. A whole extent has one scale, even where it is empty."""
        rows, cols = self.tile
        *batch, n, k = _matrix(shape)
        return (*batch, -(-n // rows) if rows else 1, -(-k // cols) if cols else 1)[-len(shape) :]

    def expand(self, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Repeat a scale so that it broadcasts against a tensor of `shape`."""
        want = self.scale_shape(shape)
        if tuple(scale.shape) != want:
            raise ShapeError(
                f"scale of a {list(shape)} tensor, {self}", got=str(list(scale.shape)), need=str(list(want))
            )
        rows, cols = self.tile
        if rows > 1 and len(shape) > 1:
            scale = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
        if cols > 1:
            scale = scale.repeat_interleave(cols, -1)[..., : shape[-1]]
        return scale

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """The largest finite magnitude of each tile, float32, 0 for a tile without one. Inf and NaN do not count."""
        return self.reduce(finite_abs(x))

    def reduce(self, x: torch.Tensor, how: str = "max") -> torch.Tensor:
        """Fold each tile of a non-negative tensor to its `max` or `sum`; an absent tail counts as 0."""
        rows, cols = self.tile
        *batch, n, k = _matrix(tuple(x.shape))
        x, out = x.reshape(*batch, n, k), self.scale_shape(tuple(x.shape))
        if 0 in x.shape:
            return x.new_zeros(out)
        rows, cols = rows or n, cols or k
        if n % rows or k % cols:
            x = torch.nn.functional.pad(x, (0, -k % cols, 0, -n % rows))
        tiles = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // cols, cols)
        folded = tiles.sum((-3, -1)) if how == "sum" else tiles.amax((-3, -1))
        return folded.reshape(out)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class PerTensor(Granularity):
    name: ClassVar[str] = "tensor"

    @property
    def tile(self) -> tuple[int, int]:
        return (0, 0)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def reduce(self, x: torch.Tensor, how: str = "max") -> torch.Tensor:
        if how == "sum" or not x.numel():
            return x.sum()
        return x.amax()


@dataclass(frozen=True)
class PerRow(Granularity):
    name: ClassVar[str] = "row"

    @property
    def tile(self) -> tuple[int, int]:
        return (1, 0)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1)


@dataclass(frozen=True)
class PerGroup(Granularity):
    size: int = 128
    name: ClassVar[str] = "group"

    def __post_init__(self) -> None:
        _positive(self, self.size)

    @property
    def tile(self) -> tuple[int, int]:
        return (1, self.size)

    def __str__(self) -> str:
        return f"group{self.size}"


@dataclass(frozen=True)
class PerBlock(Granularity):
    rows: int = 128
    cols: int = 128
    name: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        _positive(self, self.rows, self.cols)

    @property
    def tile(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    def __str__(self) -> str:
        return f"block{self.rows}x{self.cols}"


def from_tile(rows: int, cols: int) -> Granularity:
    """The inverse of `Granularity.tile`: how an op's schema, which holds only numbers, names a granularity."""
    if (rows, cols) == (0, 0):
        return PerTensor()
    if (rows, cols) == (1, 0):
        return PerRow()
    return PerGroup(cols) if rows == 1 else PerBlock(rows, cols)


def finite_abs(x: torch.Tensor) -> torch.Tensor:
    """|x| in float32 with Inf and NaN replaced by 0."""
    return torch.nan_to_num(x.float().abs(), nan=0.0, posinf=0.0)


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 1 else shape


def _positive(owner: object, *sizes: int) -> None:
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(type(owner).__name__, got=str(sizes), need="sizes of at least 1")
