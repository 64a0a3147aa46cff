"""octavo verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, ConfigFile, Result, flags, option
from octavo.cli.render import table

if TYPE_CHECKING:
    from octavo.workflows.verify import VerifyReport


def verify(
    ctx: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="A checkpoint.", show_default=False)] = None,
    engine: Annotated[str | None, option("Who is to load it.", "all", "vllm|sglang|transformers|all")] = None,
    engine_version: Annotated[str | None, option("By default the newest known.", None, "VERSION")] = None,
    gpu: Annotated[str | None, option("sm90, h100, cpu. By default this machine's, or every known one.")] = None,
    tp: Annotated[int | None, option("Tensor-parallel size.", 1)] = None,
    reference: Annotated[Path | None, option("The 16-bit model to compare numbers with.", None, "DIR")] = None,
    policy: Annotated[Path | None, option("policy.json that it must follow.", None, "FILE")] = None,
    quick: Annotated[bool | None, option("Headers and names only, no numbers.", False, None, "--quick")] = None,
    logits: Annotated[
        bool | None, option("Also load it in Transformers and compare logits.", False, None, "--logits")
    ] = None,
    run_vllm: Annotated[Path | None, option("Also run the vLLM of this interpreter.", None, "PYTHON")] = None,
    fix: Annotated[Path | None, option("Write a repaired copy here.", None, "OUT")] = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Will this folder load, in which engine and with which kernel, and are its numbers right?

    Exits with 1 when the verdict is error.
    """
    from octavo.workflows.verify import VerifyConfig
    from octavo.workflows.verify import verify as workflow

    settings = VerifyConfig.load(config, flags(ctx))
    report = workflow(settings)
    return Result(report, _lines(report, settings.gpu or "this machine"), code=1 if report.verdict == "error" else 0)


def _lines(report: VerifyReport, only: str) -> list[object]:
    """only: the GPU where the report is about one."""
    lines: list[object] = []
    for finding in report.findings:
        concerns = f" ({finding.engine})" if finding.engine else ""
        lines.append(f"{finding.severity}: {finding.code}{concerns}: {finding.where}: {finding.message}")
        lines += [f"  next: {finding.fix}"] if finding.fix else []
    rows: list[tuple[str, ...]] = []
    for name, engine in report.engines.items():
        found = {only: (engine.verdict, engine.mode, engine.kernel)}
        found = {gpu: (one.verdict, one.mode, one.kernel) for gpu, one in engine.gpus.items()} or found
        rows += [(f"{name} {engine.version}", gpu, *one) for gpu, one in found.items()]
    if rows:
        lines.append(table(("engine", "GPU", "verdict", "mode", "kernel"), rows))
    if report.fixed:
        lines += [f"repaired: {change}" for change in report.changes]
        lines.append(f"repaired copy: {report.fixed}, verdict: {report.fixed_verdict}")
    return [*lines, f"verdict: {report.verdict}"]
