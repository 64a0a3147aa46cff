"""What tune is asked, and what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from octavo.base.errors import ConfigError
from octavo.base.report import Config, Report

Scheme = Literal["channel", "block128", "tensor"]


class TuneConfig(Config):
    """model: a folder, a hub id or `demo`, in 16 bit. out: folder for policy.json, the report and what a killed call
    can continue from.

    budget: `kl=0.003`, the largest mean divergence from the 16-bit model, nats per token: the fewest bytes win. keep:
    `2%`, the largest share of the checkpoint's bytes in layers kept in 16 bit: the least divergence wins. Both: the
    budget, as long as the share allows.
    scheme, scale_format, rounding, method, skip: as in quantize. alternatives: schemes that a layer may take instead.
    layout: of the files to come, `ct` or `native`, or `memory` for octavo.load, which takes every ragged edge.
    activation: what the linears do to their inputs while measured. moments: for compensated rounding; gathered from
    `data` by default. data: text; its calibration part, `samples` windows, serves the rounding, `tokens` of other text
    the measurements. checks: layers that are also measured alone.
    """

    model: str
    out: Path = Path("octavo-tune")
    budget: str | None = None
    keep: str | None = None
    scheme: Scheme = "channel"
    alternatives: tuple[Scheme, ...] = ()
    layout: Literal["ct", "native", "memory"] = "ct"
    scale_format: Literal["fp32", "po2"] = "fp32"
    rounding: Literal["nearest", "compensated"] = "nearest"
    method: Literal["absmax", "mse", "hessian"] | None = None
    activation: Literal["none", "token", "group128"] = "none"
    skip: tuple[str, ...] = ()
    moments: Path | None = None
    data: str = "demo"
    samples: int = pydantic.Field(128, ge=1)
    tokens: int = pydantic.Field(8192, ge=2)
    context: int = pydantic.Field(512, ge=2)
    checks: int = pydantic.Field(6, ge=0)
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @pydantic.model_validator(mode="after")
    def _moments_have_a_use(self) -> TuneConfig:
        if self.moments is not None and self.rounding == "nearest":
            fix = "Add --rounding compensated, or leave them out."
            raise ConfigError("moments with rounding 'nearest', which has no use for them", fix=fix)
        return self


class UnitReport(Report):
    """One unit that is not as the scheme has it. option: `16bit` or a scheme. bytes: more than in the scheme.

    kl: what it costs when it alone is FP8, nats per token. measured: whether that was measured, or estimated.
    """

    unit: str
    option: str
    bytes: int
    kl: float
    measured: bool


class Point(Report):
    """bytes: of the checkpoint. share: of them in layers kept in 16 bit. kl: predicted, or measured with its se."""

    bytes: int
    share: float
    kl: float
    se: float | None = None
    measured: bool = False


class TuneReport(Report):
    """policy: the file. kl, kl_se: of the policy, measured; kl_fp8: of everything in FP8. predicted: before measuring.

    additivity: divergence of everything in FP8 over the sum of the layers' own. bytes, bytes_fp8, bytes_16bit: of the
    checkpoint with this policy, all in FP8, all in 16 bit. share: of its bytes in layers kept in 16 bit. weighed: what
    a layer is charged with. curve: size against divergence. next: commands that use the policy.
    """

    policy: str
    model: str
    scheme: str
    rounding: str
    layout: str
    activation: str
    budget: float | None
    keep: float | None
    kl: float
    kl_se: float | None
    kl_fp8: float
    predicted: float
    additivity: float
    bytes: int
    bytes_fp8: int
    bytes_16bit: int
    share: float
    weighed: str
    exceptions: list[UnitReport]
    curve: list[Point]
    tokens: int
    seconds: float
    next: list[str]
