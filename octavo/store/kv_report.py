"""What octavo eval measured of an FP8 KV cache, in total and by layer; octavo serve reads it before it uses one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

import pydantic

from octavo.base.errors import ConfigError, MismatchError
from octavo.base.report import UNREADABLE, Report, read_json
from octavo.store.manifest import fingerprint
from octavo.store.tensors import Checkpoint

KVScale = Literal["one", "calibrated", "token-head"]
KVVerdict = Literal["safe", "keep-layers", "not-safe"]


class KVLayer(Report):
    """One attention layer with its cache alone in FP8.

    kl: to the 16-bit cache, nats per token. greedy_changed: share of positions where another token comes first.
    sensitive: kl is more than three times the median layer's. clipped: share of keys and values beyond 448 scales.
    """

    layer: int
    name: str
    k_scale: float | None
    v_scale: float | None
    clipped: float
    kl: float | None = None
    kl_se: float | None = None
    greedy_changed: float | None = None
    sensitive: bool = False


class KVCacheReport(Report):
    """The FP8 cache against the 16-bit cache of the same model, on the same tokens.

    model_fingerprint: of the folder it holds for, null where the weights measured are in no folder. scale: one for all,
    calibrated per layer, or found per token and head. query: whether queries were rounded too. limit: of kl, in nats
    per token; safe means that the 95 % interval of kl ends below it. kept_kl: with keep_layers left in 16 bit.
    """

    model_fingerprint: str | None
    scale: KVScale
    query: Literal["16bit", "fp8"]
    tokens: int
    windows: int
    rise_percent: float
    rise_percent_se: float | None
    kl: float
    kl_se: float | None
    kl_p99: float
    greedy_changed: float
    greedy_changed_se: float | None
    clipped: float
    limit: float
    verdict: KVVerdict
    reason: str
    keep_layers: list[int] = pydantic.Field(default_factory=list)
    kept_kl: float | None = None
    kept_kl_se: float | None = None
    attribution_tokens: int = 0
    layers: list[KVLayer] = pydantic.Field(min_length=1)

    @classmethod
    def load(cls, path: Path, checkpoint: Checkpoint) -> Self:
        """The `kv_cache` block of a report of octavo eval.

        ConfigError for another file, MismatchError for a report about another model.
        """
        fix = f"Write it with: octavo eval {checkpoint.folder} --kv-cache fp8 --out {path}"
        try:
            values = read_json(path)
            block = values["kv_cache"] if isinstance(values, dict) else None
            report = cls.model_validate(block)
            report._must_agree()
        except (*UNREADABLE, KeyError) as error:
            got = f"no key {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
            raise ConfigError(f"{path} is no report on a KV cache", got=got, fix=fix) from None
        found = fingerprint(checkpoint)
        if found != report.model_fingerprint:
            need = f"{found[:19]}..."
            got = f"{report.model_fingerprint[:19]}..." if report.model_fingerprint else "weights that are in no folder"
            raise MismatchError(f"{path} is about another model than {checkpoint.folder}", got=got, need=need, fix=fix)
        return report

    def _must_agree(self) -> None:
        """ValueError for a file edited by hand whose verdict is not what its figures say."""
        scales = [s for layer in self.layers for s in (layer.k_scale, layer.v_scale) if s is not None]
        if not all(math.isfinite(s) and s > 0 for s in scales):
            raise ValueError("a k_scale or v_scale that is no positive number")
        if strange := set(self.keep_layers) - {layer.layer for layer in self.layers}:
            raise ValueError(f"keep_layers names {sorted(strange)}, which are not among its layers")
        left = {"safe": self.kl, "keep-layers": self.kept_kl, "not-safe": None}[self.verdict]
        if self.verdict != "not-safe" and (left is None or not left <= self.limit < math.inf):
            raise ValueError(f"verdict {self.verdict} with KL {left}, limit {self.limit}")
