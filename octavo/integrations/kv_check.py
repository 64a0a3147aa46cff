"""Is an FP8 KV cache safe for this model? Its divergence from the 16-bit cache, in total and layer by layer.

The criterion: the 95 % interval of the mean KL divergence, over windows of text, ends below a limit. Where it does not,
the layers that cost most are left in 16 bit, at most a quarter of all, and the rest is measured again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from octavo.base.errors import ConfigError
from octavo.integrations.kv_cache import cached_logits
from octavo.integrations.measuring import Opened, attention_names, logits, stored_names
from octavo.integrations.scoring import score, spread
from octavo.modules.divergence import Divergence, Estimate, known, t_quantile
from octavo.modules.kv_cache import Float8KVWriter
from octavo.store.kv_report import KVCacheReport, KVLayer, KVScale, KVVerdict
from octavo.store.kv_scales import stored_kv_scales
from octavo.store.manifest import fingerprint
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

SENSITIVE = 3.0  # times the median layer's divergence
MOST_KEPT = 0.25  # of the layers; beyond it a 16-bit cache is the simpler answer


@dataclass
class KVCheck:
    """The FP8 cache of an opened model.

    scale: None is what the folder's own scales say: `calibrated` if it holds any, else `one`. query: None is `fp8`,
    except for `token-head` and latent attention, whose kernels take queries in 16 bit. scales: a scales.json of this
    model.
    """

    opened: Opened
    scale: KVScale | None = None
    query: Literal["16bit", "fp8"] | None = None
    scales: Path | None = None

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoint.open(self.opened.folder)
        model = self.opened.model
        self.names = attention_names(model, stored_names(model, self.checkpoint))
        self.latent: int | None = self.checkpoint.text_config.get("kv_lora_rank")
        stored = self._calibrated()
        self.scale = self.scale or ("calibrated" if stored else "one")
        if self.scale == "calibrated" and not stored:
            fix = "Give --scales scales.json of octavo calibrate, or a folder of octavo quantize --kv-cache fp8."
            raise ConfigError("kv_scale 'calibrated'", got="no scales of keys and values", fix=fix)
        if self.scale == "token-head" and self.latent:
            fix = "Use --kv-scale one."
            raise ConfigError("kv_scale 'token-head'", got="latent attention, which has no heads to cache", fix=fix)
        self.layer_scales = stored if self.scale == "calibrated" else {}
        if self.query is None:
            self.query = "16bit" if self.scale == "token-head" or self.latent else "fp8"

    def _calibrated(self) -> dict[int, tuple[float, float]]:
        """Layer -> scales of keys and values: of the scales.json given, else those that the folder holds."""
        if self.scales is not None:
            kv = Scales.load(self.scales, model=self.checkpoint).kv
            return {i: (kv[n].k_scale, kv[n].v_scale) for i, n in self.names.items() if n in kv}
        found = {i: stored_kv_scales(self.checkpoint, name) for i, name in self.names.items()}
        return {i: pair for i, pair in found.items() if pair is not None}

    def writer(self, layers: Collection[int] | None = None) -> Float8KVWriter:
        """A new one, for all layers or for some."""
        granularity: Literal["tensor", "token-head"] = "token-head" if self.scale == "token-head" else "tensor"
        return Float8KVWriter(granularity, self.layer_scales, layers, self.latent)

    def logits(self, tokens: torch.Tensor, writer: Float8KVWriter) -> torch.Tensor:
        """tokens int64 [T] -> logits [T, V], with the cache that `writer` keeps."""
        return cached_logits(self.opened.model, tokens, writer, self.query == "fp8")


def check_kv_cache(
    check: KVCheck, windows: torch.Tensor, limit: float, attribution_tokens: int, *, bound: bool
) -> tuple[KVCacheReport, Divergence]:
    """Measure on windows of tokens, int64 [n, T]. bound: the weights measured are those of the folder.

    attribution_tokens: for each layer alone; 0 leaves the layers out, and then none can be kept in 16 bit.
    """
    plain = partial(logits, check.opened.model)
    writer = check.writer()
    total = score(plain, {"": lambda w: check.logits(w, writer)}, windows, "FP8 KV cache")[""]
    layers = sorted(writer.counts)
    single: dict[int, Divergence] = {}
    if attribution_tokens:
        some = spread(windows, attribution_tokens)
        alone = {str(i): partial(check.logits, writer=check.writer({i})) for i in layers}
        single = {int(i): found for i, found in score(plain, alone, some, "FP8 KV cache, by layer").items()}
    kept, rest = _keep(check, windows, limit, total, single)
    verdict: KVVerdict = "safe" if _upper(total.kl, len(windows)) <= limit else "keep-layers" if kept else "not-safe"
    counts = writer.counts.values()
    report = KVCacheReport(
        model_fingerprint=fingerprint(check.checkpoint) if bound else None,
        scale=check.scale or "one",
        query=check.query or "fp8",
        tokens=windows.numel(),
        windows=len(windows),
        rise_percent=total.rise.mean,
        rise_percent_se=known(total.rise.se),
        kl=total.kl.mean,
        kl_se=known(total.kl.se),
        kl_p99=total.kl_p99,
        greedy_changed=1 - total.top1.mean,
        greedy_changed_se=known(total.top1.se),
        clipped=sum(c.clipped for c in counts) / max(sum(c.values for c in counts), 1),
        limit=limit,
        verdict=verdict,
        reason=_reason(verdict, total.kl, rest.kl if rest else None, kept, len(windows), limit),
        keep_layers=kept,
        kept_kl=rest.kl.mean if rest else None,
        kept_kl_se=known(rest.kl.se) if rest else None,
        attribution_tokens=spread(windows, attribution_tokens).numel() if attribution_tokens else 0,
        layers=_layers(check, writer, single),
    )
    return report, total


def _keep(
    check: KVCheck, windows: torch.Tensor, limit: float, total: Divergence, single: dict[int, Divergence]
) -> tuple[list[int], Divergence | None]:
    """The fewest costly layers whose cache has to stay in 16 bit, and what the others cost together; else none."""
    upper = _upper(total.kl, len(windows))
    most = int(MOST_KEPT * len(single))
    if upper <= limit or not most:
        return [], None
    ranked = sorted(single, key=lambda i: -single[i].kl.mean)
    whole = sum(found.kl.mean for found in single.values())
    count, left = 0, whole
    while count < most and upper * left > limit * whole:  # as if divergences of single layers added up
        left -= single[ranked[count]].kl.mean
        count += 1
    plain = partial(logits, check.opened.model)
    for attempt in dict.fromkeys((min(count, most), most)):
        others = check.writer(set(ranked[attempt:]))
        rest = score(plain, {"": partial(check.logits, writer=others)}, windows, f"{attempt} layers in 16 bit")[""]
        if _upper(rest.kl, len(windows)) <= limit:
            return sorted(ranked[:attempt]), rest
    return [], None


def _layers(check: KVCheck, writer: Float8KVWriter, single: dict[int, Divergence]) -> list[KVLayer]:
    median = statistics.median(found.kl.mean for found in single.values()) if single else 0.0
    result = []
    for i, count in sorted(writer.counts.items()):
        scale = check.layer_scales.get(i, (1.0, 1.0)) if check.scale != "token-head" else (None, None)
        found = single.get(i)
        result.append(
            KVLayer(
                layer=i,
                name=check.names.get(i, str(i)),
                k_scale=scale[0],
                v_scale=scale[1],
                clipped=count.clipped / max(count.values, 1),
                kl=found.kl.mean if found else None,
                kl_se=known(found.kl.se) if found else None,
                greedy_changed=1 - found.top1.mean if found else None,
                sensitive=found is not None and found.kl.mean > SENSITIVE * median,
            )
        )
    return result


def _reason(
    verdict: KVVerdict, kl: Estimate, rest: Estimate | None, kept: list[int], windows: int, limit: float
) -> str:
    shown = f"KL to the 16-bit cache {kl.mean:.5f} over {windows} windows, with 95 % confidence at most "
    shown += f"{_upper(kl, windows):.5f}; limit {limit:.5f}"
    if verdict == "safe":
        return shown
    if verdict == "keep-layers" and rest is not None:
        named = ", ".join(map(str, kept))
        return f"{shown}. With layers {named} in 16 bit at most {_upper(rest, windows):.5f}"
    if kl.mean <= limit:
        return f"{shown}: too few tokens to call it safe; measure more, or keep the cache in 16 bit"
    return f"{shown}: keep the cache in 16 bit"


def _upper(kl: Estimate, windows: int) -> float:
    """The end of the 95 % interval; a single window has none."""
    return kl.mean + t_quantile(windows) * kl.se if windows > 1 else (0.0 if kl.mean == 0 else math.inf)
