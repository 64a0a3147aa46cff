"""ScaledTensor: the only carrier of quantized values. A tensor and its scale never travel apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from octavo.base.errors import ShapeError
from octavo.formats.granularity import Granularity, PerRow, PerTensor
from octavo.formats.spec import E4M3, FloatSpec


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """x ~ decode(codes) * scale.

    codes: uint8 [..., N, K], row-major; `as_float8()` views them as torch's dtype, bit for bit.
    scale: float32, of shape granularity.scale_shape(codes.shape).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    spec: FloatSpec = E4M3
    granularity: Granularity = PerRow()

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8:
            raise ShapeError("ScaledTensor codes", got=str(self.codes.dtype), need="uint8; view float8 as uint8 first")
        if self.scale.dtype != torch.float32:
            raise ShapeError("ScaledTensor scale", got=str(self.scale.dtype), need="float32")
        want = self.granularity.scale_shape(self.codes.shape)
        if self.scale.shape != want:
            got = f"{list(self.scale.shape)} for codes {list(self.codes.shape)}"
            raise ShapeError(f"ScaledTensor scale, {self.granularity}", got=got, need=str(list(want)))

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Codes and scales together, bytes."""
        return self.codes.numel() + self.scale.numel() * self.scale.element_size()

    def as_float8(self) -> torch.Tensor:
        """The codes viewed as the float8 dtype of `spec`: the same bytes."""
        return self.codes.view(self.spec.dtype)

    def to(self, device: torch.device | str) -> ScaledTensor:
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))

    def per_row(self) -> ScaledTensor:
        """The same values with one scale per row: lossless, from one scale per tensor."""
        if isinstance(self.granularity, PerRow):
            return self
        if not isinstance(self.granularity, PerTensor):
            raise ShapeError("per_row()", got=str(self.granularity), need="tensor or row scales")
        rows = self.scale.expand(*self.codes.shape[:-1], 1).contiguous()
        return replace(self, scale=rows, granularity=PerRow())
