"""octavo requantize: write the model as the target wants it, then let verify judge the result for that target."""

from __future__ import annotations

from pathlib import Path

from octavo.base.errors import require_type
from octavo.base.report import Report
from octavo.workflows.requantize import RequantizeConfig, RequantizeReport
from octavo.workflows.requantize import requantize as write
from octavo.workflows.verify import VerifyConfig, VerifyReport, verify


class RequantizedReport(Report):
    """requantized: what was written and why. verified: the verdict on it, for the target."""

    requantized: RequantizeReport
    verified: VerifyReport


def requantize(config: RequantizeConfig) -> RequantizedReport:
    """Errors as the workflow's; a folder that does not verify is a verdict, and stays for a closer look."""
    require_type("requantize: config", config, RequantizeConfig)
    report = write(config)
    engine, version, gpu = config.parts()
    check = VerifyConfig(folder=Path(report.out), engine=engine, engine_version=version or None, gpu=gpu, tp=config.tp)
    return RequantizedReport(requantized=report, verified=verify(check))
