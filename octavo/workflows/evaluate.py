"""evaluate (the command `eval`): how good a model is, and how far from another, on the same tokens.

Both models see one window after the other; no logits are kept. What counts is the divergence: perplexity is noisier
than the effect of FP8 on it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import nn

from octavo.base import page
from octavo.base.errors import ConfigError, MismatchError, require_type
from octavo.base.report import Config, Report, atomic_write
from octavo.formats.recipe import Recipe
from octavo.integrations import measuring
from octavo.integrations.data import load_data, token_windows
from octavo.integrations.hub import resolve_model
from octavo.integrations.kv_check import KVCheck, check_kv_cache
from octavo.integrations.lm_eval import harness_answers, require_harness
from octavo.integrations.moments import moments_for
from octavo.integrations.scoring import Logits, attribution, score, spread
from octavo.integrations.tasks import BUNDLED, TaskScore, make_task, right_answers
from octavo.modules.divergence import Divergence, known
from octavo.store.kv_report import KVCacheReport, KVScale
from octavo.store.moments import Moments
from octavo.store.policy import Policy
from octavo.store.tensors import Checkpoint

TASK_COLUMNS = ("task", "items", "right", "±", "reference", "lost", "gained", "within noise")


class EvaluateConfig(Config):
    """model, against: a folder in 16 bit or FP8, the run folder of a fine-tune, a hub id, or `demo`.

    data: as for calibrate; its part `split`. tokens: at most so many, in windows of `context`.
    scheme: `stored` takes the weights as the folder has them; another quantizes a 16-bit `model` while loading, with
    `scale_format` and `rounding`: `compensated` needs `moments`, or `calibration`, a source of text as for calibrate,
    of which `samples` windows are taken. policy: policy.json of the model, from octavo tune; its scheme by default.
    activation: what `model` does to its activations: none, static (needs scales), token, group128; by default what its
    folder says, and none for 16-bit weights quantized here. `against` runs as it is stored.
    kv_cache: `fp8` rounds keys and values of `model` as an engine's cache does, and judges whether that is safe:
    kv_limit is the most KL divergence, nats per token, that it may cost. kv_scale, kv_query: see KVCheck.
    attribution: what every layer and kind of linear of an FP8 `model` costs alone, in `against`.
    attribution_tokens: for that, and for the layers of the KV cache; 0 leaves them out.
    tasks: `arithmetic` and `retrieval`, which come with Octavo, or tasks of lm-eval, also from task_folder; at most
    task_items of each. out: also write the report there, as JSON; page: as an HTML page with charts.
    """

    model: str
    against: str | None = None
    data: str = "demo"
    split: Literal["eval", "calibration", "train"] = "eval"
    tokens: int = pydantic.Field(12_288, ge=2)
    context: int = pydantic.Field(512, ge=2)
    scheme: Literal["stored", "channel", "block128", "tensor"] = "stored"
    scale_format: Literal["fp32", "po2"] = "fp32"
    rounding: Literal["nearest", "compensated"] = "nearest"
    moments: Path | None = None
    calibration: str | None = None
    samples: int = pydantic.Field(128, ge=1)
    policy: Path | None = None
    activation: Literal["none", "static", "token", "group128"] | None = None
    scales: Path | None = None
    kv_cache: Literal["16bit", "fp8"] = "16bit"
    kv_scale: KVScale | None = None
    kv_query: Literal["16bit", "fp8"] | None = None
    kv_limit: float = pydantic.Field(0.01, gt=0, le=100)
    attribution: bool = False
    attribution_tokens: int = pydantic.Field(1024, ge=0)
    tasks: tuple[str, ...] = ()
    task_items: int = pydantic.Field(100, ge=1)
    task_folder: Path | None = None
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    out: Path | None = None
    page: Path | None = None

    @pydantic.model_validator(mode="after")
    def _settings_go_together(self) -> EvaluateConfig:
        if self.attribution and self.against is None:
            raise ConfigError("attribution", got="no reference", fix="Name the 16-bit model with --against.")
        if self.kv_cache == "fp8" and (others := set(self.tasks) - set(BUNDLED)):
            got = f"task '{min(others)}' of lm-eval, which keeps a cache of its own"
            raise ConfigError("an FP8 KV cache", got=got, need=f"tasks of: {', '.join(BUNDLED)}")
        for name in ("kv_scale", "kv_query"):
            if getattr(self, name) is not None and self.kv_cache == "16bit":
                raise ConfigError(name, got="a 16-bit KV cache", fix="Add --kv-cache fp8.")
        return self


class Part(Report):
    """A layer or a kind of linear, alone in FP8. kl: nats per token. greedy_changed: share of other first tokens."""

    name: str
    kl: float
    kl_se: float | None
    greedy_changed: float


class EvaluateReport(Report):
    """perplexity, perplexity_se: of `model`; every `_se` is a standard error over windows.

    Against a reference (`against`, or the same model with a 16-bit KV cache), paired on the same tokens, else None:
    rise_percent of the perplexity, kl in nats per token and its 99th percentile kl_p99, top1: share of positions where
    both put the same token first, lost and gained: share of tokens that only the reference or only the model puts first
    rightly, within_noise: the 95 % interval of the paired difference holds zero. verdict: the same in a sentence.
    attribution: what each part costs alone, most first. kv_cache: what octavo serve reads. tasks: by exact match.
    """

    model: str
    against: str | None
    scheme: str
    activation: str | None
    data: str
    data_fingerprint: str
    tokens: int
    windows: int
    context: int
    perplexity: float
    perplexity_se: float | None
    reference_perplexity: float | None = None
    reference_perplexity_se: float | None = None
    rise_percent: float | None = None
    rise_percent_se: float | None = None
    kl: float | None = None
    kl_se: float | None = None
    kl_p99: float | None = None
    top1: float | None = None
    top1_se: float | None = None
    lost: float | None = None
    lost_se: float | None = None
    gained: float | None = None
    gained_se: float | None = None
    within_noise: bool | None = None
    verdict: str
    attribution: list[Part] = pydantic.Field(default_factory=list)
    kv_cache: KVCacheReport | None = None
    tasks: list[TaskScore] = pydantic.Field(default_factory=list)
    seconds: float

    def table(self) -> list[tuple[str, str]]:
        """(label, value with its standard error) of every figure there is: what the command prints."""
        rows = [("perplexity", _figure(self.perplexity, self.perplexity_se, 3))]
        if self.kl is not None:
            rows += [
                ("reference perplexity", _figure(self.reference_perplexity, self.reference_perplexity_se, 3)),
                ("rise", _figure(self.rise_percent, self.rise_percent_se, 2, " %")),
                ("KL to reference, mean", _figure(self.kl, self.kl_se, 5)),
                ("KL to reference, 99th percentile", _figure(self.kl_p99, None, 4)),
                ("same first token", _figure(self.top1, self.top1_se, 4)),
                ("right before, wrong now", _figure(self.lost, self.lost_se, 4)),
                ("wrong before, right now", _figure(self.gained, self.gained_se, 4)),
            ]
        return [*rows, ("tokens", f"{self.tokens:,} in {self.windows} windows of {self.context}")]


def evaluate(config: EvaluateConfig) -> EvaluateReport:
    """Perplexity of a model; with `against`, paired metrics of the difference.

    DataError for unreadable or too short data, MismatchError for two models that do not share a tokenizer,
    CheckpointError for a model that does not load or whose logits are NaN.
    """
    require_type("evaluate: config", config, EvaluateConfig)
    started = time.monotonic()
    for task in set(config.tasks) - set(BUNDLED):
        require_harness(task)
    device, dtype = config.device, measuring.compute_dtype(config.dtype, config.device)
    data = load_data(config.data, config.split, limit=config.tokens)
    policy = Policy.load(config.policy, model=Checkpoint.open(resolve_model(config.model))) if config.policy else None
    config = policy.adopt(config) if policy else config
    with moments_of(config) as moments:
        opened = measuring.open_model(
            config.model,
            recipe=recipe_of(config, policy),
            activation=config.activation,
            scales=config.scales if config.activation == "static" or config.kv_cache == "16bit" else None,
            moments=moments,
            device=device,
            dtype=dtype,
        )
    context = opened.context(min(config.context, config.tokens))
    texts, count = data.texts(opened.tokenizer), config.tokens // context
    windows = token_windows(opened.tokenizer, texts, context, count)
    opened.require_known(windows)
    reference = measuring.open_model(config.against, device=device, dtype=dtype) if config.against else None
    if reference and not torch.equal(windows, token_windows(reference.tokenizer, texts, context, count)):
        what = f"{config.model} and {config.against} cut the same text into different tokens"
        raise MismatchError(what, fix="Compare models that share a tokenizer.")
    report = EvaluateReport(
        activation=config.activation,
        data_fingerprint=data.fingerprint,
        tokens=windows.numel(),
        windows=len(windows),
        context=windows.shape[1],
        **config.model_dump(include={"model", "against", "scheme", "data"}),
        **measure(config, opened, reference, windows),
        seconds=time.monotonic() - started,
    )
    if config.out:
        report.write(config.out)
    if config.page:
        atomic_write(config.page, page_of(report))
    return report


def measure(
    config: EvaluateConfig, opened: measuring.Opened, reference: measuring.Opened | None, windows: torch.Tensor
) -> dict[str, Any]:
    """The fields of the report that come from tokens, int64 [n, T]."""
    candidate: Logits = partial(measuring.logits, opened.model)
    kv, against_16bit = None, None
    if config.kv_cache == "fp8":
        check = KVCheck(
            opened, config.kv_scale, config.kv_query, config.scales if config.activation != "static" else None
        )
        bound = config.scheme == "stored" and not measuring.is_run(config.model)
        kv, against_16bit = check_kv_cache(check, windows, config.kv_limit, config.attribution_tokens, bound=bound)
        candidate = partial(check.logits, writer=check.writer())
    if reference is not None:
        theirs = partial(measuring.logits, reference.model)
        figures = difference(score(theirs, {"": candidate}, windows, "Evaluating both")[""], len(windows))
    elif against_16bit is not None:
        figures = difference(against_16bit, len(windows))
    else:
        figures = alone(opened.model, windows)
    if reference is not None and config.attribution:
        some = spread(windows, config.attribution_tokens or windows.shape[1])
        parts = attribution(reference.model, opened.model, some).items()
        figures["attribution"] = sorted((_part(name, found) for name, found in parts), key=lambda part: -part.kl)
    theirs_16bit = reference or (opened if kv is not None else None)
    return {**figures, "kv_cache": kv, "tasks": score_tasks(config, opened, candidate, theirs_16bit)}


def score_tasks(
    config: EvaluateConfig, opened: measuring.Opened, candidate: Logits, reference: measuring.Opened | None
) -> list[TaskScore]:
    """Every task on the model, and where there is a reference on both, item by item."""
    ours: dict[str, list[bool]] = {}
    theirs: dict[str, list[bool]] = {}
    for name in (task for task in config.tasks if task in BUNDLED):
        items = make_task(name, config.task_items)
        ours[name] = right_answers(candidate, opened.tokenizer, items, name)
        if reference is not None:
            plain = partial(measuring.logits, reference.model)
            theirs[name] = right_answers(plain, reference.tokenizer, items, f"{name}, reference")
    if others := [task for task in config.tasks if task not in BUNDLED]:
        ours |= harness_answers(opened, others, config.task_items, config.task_folder)
        if reference is not None:
            theirs |= harness_answers(reference, others, config.task_items, config.task_folder)
    return [TaskScore.of(name, right, theirs.get(name)) for name, right in ours.items()]


def _part(name: str, found: Divergence) -> Part:
    return Part(name=name, kl=found.kl.mean, kl_se=known(found.kl.se), greedy_changed=1 - found.top1.mean)


def moments_of(config: EvaluateConfig) -> AbstractContextManager[Moments | None]:
    """What compensated rounding needs; None for nearest."""
    settings = config.model_dump(include={"moments", "samples", "context", "device"})
    return moments_for(config.rounding, config.model, data=config.calibration, **settings)


def recipe_of(config: EvaluateConfig, policy: Policy | None = None) -> Recipe | None:
    """How to quantize `model` while it loads; None takes its weights as stored."""
    if config.scheme == "stored":
        if policy is not None:
            raise ConfigError("a policy", got="weights as stored", need="a scheme", fix="Add --scheme.")
        if config.rounding != "nearest":
            fix = "Name a scheme, or leave the rounding out."
            raise ConfigError(f"rounding '{config.rounding}'", got="weights as stored", need="a scheme", fix=fix)
        return None
    if config.activation == "static" and config.scales is None:
        fix = "Give --scales scales.json, written by octavo calibrate."
        raise ConfigError("activation 'static'", got="no scales", need="calibrated scales", fix=fix)
    activation = config.activation or "none"
    recipe = Recipe.named(
        config.scheme, activation=activation, scale_format=config.scale_format, rounding=config.rounding
    )
    return policy.apply(recipe) if policy else recipe


def page_of(report: EvaluateReport) -> bytes:
    """The report as one HTML file."""
    against = f" against {report.against}" if report.against else ""
    parts = [page.verdict(report.verdict), page.table((), report.table())]
    if report.tasks:
        rows = [[_cell(value) for value in task.model_dump().values()] for task in report.tasks]
        parts += [page.heading("Tasks"), page.table(TASK_COLUMNS, rows)]
    layers = sorted((int(part.name.split()[1]), part) for part in report.attribution if part.name.startswith("layer "))
    kinds = [part for part in report.attribution if not part.name.startswith("layer ")]
    for title, named in (("layer", [(str(i), part) for i, part in layers]), ("linear", [(p.name, p) for p in kinds])):
        if named:
            bars = [page.Bar(name, part.kl, part.kl_se) for name, part in named]
            parts.append(page.bar_chart(f"What each {title} costs alone in FP8", title, "KL, nats per token", bars))
    if kv := report.kv_cache:
        parts += [page.heading("FP8 KV cache"), page.verdict(f"{kv.verdict}: {kv.reason}.")]
        bars = [page.Bar(str(k.layer), k.kl, k.kl_se, k.sensitive, k.name) for k in kv.layers if k.kl is not None]
        if bars:
            title = "What the FP8 cache of each layer costs alone (sensitive ones marked)"
            parts.append(page.bar_chart(title, "layer", "KL, nats per token", bars))
    return page.page(f"octavo eval: {report.model}{against}", parts)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def alone(model: nn.Module, windows: torch.Tensor) -> dict[str, Any]:
    """Perplexity of one model over windows of tokens, int64 [n, T]."""
    result = measuring.perplexity(model, windows, "Evaluating")
    text = f"perplexity {_figure(result.value, result.se, 3)}"
    return {"perplexity": result.value, "perplexity_se": known(result.se), "verdict": text}


def difference(result: Divergence, windows: int) -> dict[str, Any]:
    """A paired comparison over so many windows, as fields of the report."""
    return {
        "perplexity": result.candidate.value,
        "perplexity_se": known(result.candidate.se),
        "reference_perplexity": result.reference.value,
        "reference_perplexity_se": known(result.reference.se),
        "rise_percent": result.rise.mean,
        "rise_percent_se": known(result.rise.se),
        "kl": result.kl.mean,
        "kl_se": known(result.kl.se),
        "kl_p99": result.kl_p99,
        "top1": result.top1.mean,
        "top1_se": known(result.top1.se),
        "lost": result.lost.mean,
        "lost_se": known(result.lost.se),
        "gained": result.gained.mean,
        "gained_se": known(result.gained.se),
        "within_noise": result.within_noise,
        "verdict": verdict(result, windows),
    }


def verdict(result: Divergence, windows: int) -> str:
    """What the figures allow to say, in one sentence."""
    change = f"perplexity {_figure(result.rise.mean, known(result.rise.se), 2, ' %', sign=True)}"
    if windows == 1:
        return f"{change}: a single window cannot tell a difference from noise"
    if result.kl.mean == 0:
        return "the two models are the same: no token's distribution differs"
    if result.within_noise:
        return f"{change}: within noise over {windows} windows; KL {result.kl.mean:.5f} shows how far the models differ"
    better = "better" if result.rise.mean < 0 else "worse"
    return f"{change}: {better} than the reference beyond noise; KL {result.kl.mean:.5f}"


def _figure(value: float | None, se: float | None, digits: int, unit: str = "", *, sign: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return f"{text}{unit}" if se is None else f"{text} ± {se:.{digits}f}{unit}"
