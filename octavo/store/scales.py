"""scales.json: what calibration measured, tied to the model it was measured on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

import pydantic

from octavo.base.errors import CheckpointError, MismatchError
from octavo.base.report import UNREADABLE, Report, read_json
from octavo.store.manifest import fingerprint
from octavo.store.tensors import Checkpoint

SCHEMA_VERSION = 1
# Finite, positive and normal in float32: anything else would turn every number it meets to NaN, Inf or zero.
Scale = Annotated[float, pydantic.Field(ge=2.0**-126, le=3.4028234663852886e38, allow_inf_nan=False)]


class ModuleScales(Report):
    """One linear.

    input_amax: largest |activation| seen. input_percentiles: `"99.9"` -> that percentile of |activation|.
    input_scale: what static quantization divides by. weight_sqnr_db: scheme -> dB. w8a8_sqnr_db: of the layer's
    output with weight and input quantized, dB; null: infinite. rank: 1 is the most sensitive module.
    """

    input_amax: float
    input_scale: Scale
    input_percentiles: dict[str, float] = pydantic.Field(default_factory=dict)
    input_channel_amax: list[float] | None = None
    weight_sqnr_db: dict[str, float | None] = pydantic.Field(default_factory=dict)
    w8a8_sqnr_db: float | None = None
    rank: int | None = None


class KVScales(Report):
    """One attention layer. amax: largest |key| and |value| seen; scale: amax / 448."""

    k_amax: float
    v_amax: float
    k_scale: Scale
    v_scale: Scale


class Scales(Report):
    """The file. model_fingerprint: `octavo.store.manifest.fingerprint` of the model; data_fingerprint: of the text.

    input_scale_method: how `input_scale` was chosen: `amax`, or `mse`, the least error on what calibration saw.
    unseen: linears, such as rare experts, that no token of the data reached; they have no scale.
    channels_file: a safetensors file beside this one with `MODULE.input_channel_amax`, float32 [K].
    """

    schema_version: int = SCHEMA_VERSION
    model_fingerprint: str
    data_fingerprint: str
    samples: int
    tokens: int
    modules: dict[str, ModuleScales]
    input_scale_method: str = "amax"
    unseen: list[str] = pydantic.Field(default_factory=list)
    channels_file: str | None = None
    kv: dict[str, KVScales] = pydantic.Field(default_factory=dict)

    @classmethod
    def load(
        cls, path: Path | str, *, model: Path | str | Checkpoint | None = None, modules: Iterable[str] | None = None
    ) -> Self:
        """Read scales.json.

        model: the folder it will be used with; MismatchError unless it is the calibrated one. modules: names that must
        be covered; MismatchError lists the missing. CheckpointError for an unreadable or newer file.
        """
        path = Path(path)
        scales = cls._read(path)
        if model is not None:
            found = fingerprint(model)
            if found != scales.model_fingerprint:
                raise MismatchError(
                    f"{path} belongs to another model",
                    got=f"{found[:19]}... in the model folder",
                    need=f"{scales.model_fingerprint[:19]}...",
                    fix="Calibrate this model: octavo calibrate MODEL --out scales.json",
                )
        scales.require(modules or (), str(path))
        return scales

    @classmethod
    def _read(cls, path: Path) -> Self:
        fix = "Write it anew with octavo calibrate."
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist", fix=fix) from None
        except UNREADABLE as error:
            raise CheckpointError(f"{path} is not readable JSON", got=str(error), fix=fix) from None
        found = values.get("schema_version") if isinstance(values, dict) else None
        if found != SCHEMA_VERSION:
            raise CheckpointError(f"{path}: schema_version", got=repr(found), need=str(SCHEMA_VERSION), fix=fix)
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{path}: {where}", got=first["msg"], fix=fix) from None

    def require(self, modules: Iterable[str], source: str = "scales.json") -> None:
        """MismatchError unless every one of these modules was measured."""
        missing = [module for module in modules if module not in self.modules]
        if missing:
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            unseen = set(missing) & set(self.unseen)
            some += f"; no token reached {len(unseen)} of them" if unseen else ""
            fix = "Calibrate again with samples that reach every layer."
            raise MismatchError(f"{source} lacks modules of this model", got=f"nothing for {some}", fix=fix)
