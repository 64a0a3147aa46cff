"""verify: will this folder load in this engine, version, GPU and tensor-parallel size, with which kernel, and are its
numbers right? Static: no GPU and no engine is needed. The knowledge is in rules/."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from octavo.base.errors import CheckpointError, ConfigError, did_you_mean, require_type
from octavo.base.hardware import KNOWN_SM, HardwareCaps, caps_named, caps_of
from octavo.base.log import progress
from octavo.base.report import Config, Report
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.engine import Target
from octavo.workflows.rules.expected import check_layers
from octavo.workflows.rules.files import check_files, check_side_files, check_tensors, compare_side_files
from octavo.workflows.rules.findings import Finding, Findings, Verdict, verdict
from octavo.workflows.rules.judge import ENGINES, Judgement, judge, known_version, parse_version
from octavo.workflows.rules.model import Model
from octavo.workflows.rules.numbers import check_numbers
from octavo.workflows.rules.policy import check_policy
from octavo.workflows.rules.predicted import check_merged_scales, check_po2
from octavo.workflows.rules.reference import compare_numbers
from octavo.workflows.rules.repair import repair
from octavo.workflows.rules.running import check_logits, run_vllm
from octavo.workflows.rules.scheme import Scheme, read_scheme
from octavo.workflows.rules.shapes import check_shapes


class VerifyConfig(Config):
    """folder: the checkpoint. engine: vllm, sglang, transformers or all. engine_version: of that engine, newest known
    when not given. gpu: sm90, h100, rtx3090, cpu, ...; this machine's, or every known one on a machine without. tp:
    tensor-parallel size. reference: the 16-bit model to compare numbers and tokenizer with. policy: policy.json that it
    must follow. quick: headers only.
    logits: also load the folder in Transformers and compare logits with the dequantized weights. run_vllm: a Python
    interpreter with vLLM, which loads the folder and generates. fix: write a repaired copy here.
    """

    folder: Path
    engine: str = "all"
    engine_version: str | None = None
    gpu: str | None = None
    tp: int = Field(default=1, ge=1, le=1024)
    reference: Path | None = None
    policy: Path | None = None
    quick: bool = False
    logits: bool = False
    run_vllm: Path | None = None
    fix: Path | None = None


class GpuReport(pydantic.BaseModel):
    """What one GPU gets: verdict, kernel and mode (w8a8, w8a16: weight-only, w16a16: dequantized)."""

    verdict: Verdict
    kernel: str
    mode: str


class EngineReport(pydantic.BaseModel):
    """verdict of one engine; kernel and mode on the GPU asked for; max_tp: largest tensor-parallel size, 0 if unknown.

    gpus: the same for every known GPU, when none was asked for and the machine has none; `verdict` is then the best of
    them.
    """

    version: str
    verdict: Verdict
    kernel: str
    mode: str
    max_tp: int
    gpus: dict[str, GpuReport] = {}


class VerifyReport(Report):
    """verdict: the worst of all. findings: worst first. reference_error: relative, per FP8 module, of `--reference`.

    probe: the answer of `--run-vllm`. fixed, changes, fixed_verdict: of `--fix`: the new folder, what was changed, and
    the verdict on it; an error there needs quantizing again.
    """

    folder: str
    verdict: Verdict
    findings: list[Finding]
    engines: dict[str, EngineReport] = Field(default_factory=dict)
    reference_error: dict[str, float] = Field(default_factory=dict)
    probe: dict[str, object] = Field(default_factory=dict)
    fixed: str | None = None
    changes: list[str] = Field(default_factory=list)
    fixed_verdict: Verdict | None = None


ORDER = {"error": 0, "warn": 1, "info": 2}


def verify(config: VerifyConfig) -> VerifyReport:
    """A folder too broken to read is a verdict `error`, not an exception; ConfigError only for wrong settings."""
    require_type("verify: config", config, VerifyConfig)
    engines = _engines(config)
    gpus = _gpus(config)
    common = Findings()
    try:
        checkpoint = Checkpoint.open(config.folder, strict=False)
    except (CheckpointError, OSError) as error:
        common.error("unreadable", str(config.folder), str(error), getattr(error, "fix", ""))
        return _report(config, common.all(), {}, {})
    check_files(checkpoint, common)
    check_side_files(checkpoint.folder, common)
    model = Model(checkpoint)
    reports: dict[str, EngineReport] = {}
    errors: dict[str, float] = {}
    found: list[Finding] = []
    if len(checkpoint):
        scheme = read_scheme(checkpoint, common)
        check_tensors(model, common)
        check_shapes(model, common)
        check_layers(model, common)
        if config.policy is not None:
            check_policy(model, config.policy, common)
        for engine, version in engines.items():
            local = Findings(engine)
            reports[engine] = _judge_all(config, engine, version, gpus, model, scheme, local)
            found += local.all()
        if not config.quick:
            errors = _numbers(config, model, scheme, common)
    probe: dict[str, object] = {}
    if config.logits:
        check_logits(config.folder, common)
    if config.run_vllm is not None:
        probe = run_vllm(config.folder, config.run_vllm, config.tp, common)
    findings = common.all() + found
    base = verdict(common.all())
    reports = {name: _worse(report, base) for name, report in reports.items()}
    report = _report(config, findings, reports, errors, probe)
    return _repaired(config, checkpoint, report) if config.fix is not None else report


def _repaired(config: VerifyConfig, checkpoint: Checkpoint, report: VerifyReport) -> VerifyReport:
    """Write the repaired copy and judge it the same way."""
    assert config.fix is not None
    done = repair(checkpoint, read_scheme(checkpoint, Findings()), config.fix)
    again = verify(config.model_copy(update={"folder": config.fix, "fix": None, "run_vllm": None}))
    update = {"fixed": str(config.fix), "changes": done.changes, "fixed_verdict": again.verdict}
    return report.model_copy(update=update)


def _engines(config: VerifyConfig) -> dict[str, str]:
    names = list(ENGINES) if config.engine == "all" else [config.engine]
    for name in names:
        if name not in ENGINES:
            raise ConfigError(f"engine '{name}' is unknown", fix=did_you_mean(name, [*ENGINES, "all"]))
    versions = {name: ENGINES[name].NEWEST for name in names}
    for part in (config.engine_version or "").split(","):
        name, _, version = part.rpartition("=")
        if not part:
            continue
        if not name and len(names) > 1:
            fix = "Give --engine, or --engine-version vllm=0.33.0,sglang=0.5.23."
            raise ConfigError(f"engine version '{part}' of which engine?", fix=fix)
        name = name or names[0]
        if name not in versions:
            raise ConfigError(f"engine version '{part}'", got=f"engine '{name}'", need=" or ".join(versions))
        if not parse_version(version):
            raise ConfigError(f"engine version '{version}'", need="a version number such as 0.33.0")
        versions[name] = version
    return versions


def _gpus(config: VerifyConfig) -> list[HardwareCaps]:
    if config.gpu is not None:
        return [caps_named(config.gpu)]
    here = caps_of()
    if here.is_cuda:
        return [here]
    return [HardwareCaps(sm, f"sm{sm[0]}{sm[1]}") for sm in KNOWN_SM]


def _judge_all(
    config: VerifyConfig,
    engine: str,
    version: str,
    gpus: list[HardwareCaps],
    model: Model,
    scheme: Scheme,
    out: Findings,
) -> EngineReport:
    """One GPU: its findings as they are. Several: those of the GPU that fares best, and a table of the rest."""
    if not known_version(engine, version):
        rules = ENGINES[engine]
        text = (
            f"{engine} {version} is unknown to these rules; those of {rules.RELEASES[0]} to {rules.NEWEST} were used."
        )
        out.warn("unknown-version", f"--engine-version {version}", text, "Trust the verdict less, or update Octavo.")
    results: list[tuple[HardwareCaps, Findings, Judgement]] = []
    for caps in gpus:
        asked = f"{engine}:{caps.tag}" + (f" --tp {config.tp}" if config.tp > 1 else "")
        local = Findings(engine, asked)
        target = Target(engine, parse_version(version), caps.sm, config.tp)
        judgement = judge(engine, model, scheme, target, local)
        if not config.quick:
            if engine != "transformers":
                check_merged_scales(model, judgement.plan, judgement.kernels, ENGINES[engine].VOICE.name, local)
            check_po2(model, judgement.plan, judgement.kernels, local)
        results.append((caps, local, judgement))
    order = ("ok", "warn", "error")
    caps, best, judgement = min(results, key=lambda r: (order.index(verdict(r[1].all())), -int(r[0].sm == (9, 0))))
    for finding in best.all():
        out.add(finding.severity, finding.code, finding.where, finding.message, finding.fix)
    table = {c.tag: GpuReport(verdict=verdict(f.all()), kernel=j.kernel, mode=j.mode) for c, f, j in results}
    return EngineReport(
        version=version,
        verdict=verdict(out.all()),
        kernel=judgement.kernel,
        mode=judgement.mode,
        max_tp=judgement.max_tp,
        gpus=table if len(gpus) > 1 else {},
    )


def _numbers(config: VerifyConfig, model: Model, scheme: Scheme, out: Findings) -> dict[str, float]:
    size = float(model.checkpoint.nbytes)
    with progress("verify: reading weights", size, unit="bytes") as advance:
        check_numbers(model, scheme, out, advance)
    if config.reference is None:
        return {}
    from octavo.integrations.hub import resolve_model

    reference = Checkpoint.open(resolve_model(config.reference))
    compare_side_files(model.checkpoint.folder, reference.folder, out)
    with progress("verify: comparing with the reference", size, unit="bytes") as advance:
        return compare_numbers(model, scheme, reference, out, advance)


def _worse(report: EngineReport, base: Verdict) -> EngineReport:
    order: tuple[Literal["ok", "warn", "error"], ...] = ("ok", "warn", "error")
    worst = max(report.verdict, base, key=order.index)
    return report.model_copy(update={"verdict": worst})


def _addressed(finding: Finding, folder: Path) -> Finding:
    """Commands of a fix with this folder, to be copied."""
    fix = finding.fix.replace(" DIR ", f" {shlex.quote(str(folder))} ")
    return finding.model_copy(update={"fix": fix})


def _report(
    config: VerifyConfig,
    findings: list[Finding],
    engines: dict[str, EngineReport],
    errors: dict[str, float],
    probe: dict[str, object] | None = None,
) -> VerifyReport:
    return VerifyReport(
        folder=str(config.folder),
        verdict=verdict(findings),
        findings=sorted((_addressed(f, config.folder) for f in findings), key=lambda f: ORDER[f.severity]),
        engines=engines,
        reference_error=errors,
        probe=probe or {},
    )
