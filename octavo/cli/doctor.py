"""octavo doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.common import AsJson, Result, flags, option
from octavo.cli.render import pairs, size, table

if TYPE_CHECKING:
    from octavo.workflows.doctor import DoctorReport


def doctor(
    ctx: typer.Context,
    gpu: Annotated[str | None, option("Show the backends of this GPU instead: h100, rtx3090, sm90.")] = None,
    json: AsJson = False,
) -> Result:
    """What this machine can run: hardware, versions, and each backend with its reason."""
    from octavo.workflows.doctor import DoctorConfig
    from octavo.workflows.doctor import doctor as workflow

    report = workflow(DoctorConfig.load(None, flags(ctx)))
    return Result(report, _lines(report))


def _lines(report: DoctorReport) -> list[object]:
    machine: dict[str, object] = {
        "octavo": report.octavo,
        "python": report.python,
        "system": report.system,
        "cpu": f"{report.cpu}, {report.cores} cores",
        "memory": f"{size(report.memory_free)} free of {size(report.memory)}",
        "cache": f"{report.cache_dir}, {size(report.disk_free)} free",
        "torch CUDA": report.pytorch_cuda or "none: a CPU build",
        "CUDA memory": report.allocator,
    }
    for gpu in report.gpus:
        fp8 = "FP8 tensor cores" if gpu.native_fp8 else "no FP8 tensor cores: FP8 in memory, 16-bit arithmetic"
        machine[gpu.tag] = f"{gpu.name}, {size(gpu.free)} free of {size(gpu.memory)}, {fp8}"
    versions = list(report.packages.items())
    for extra in (extra for extra in report.extras if extra.name != "test"):
        versions += [(f"{name} [{extra.name}]", version) for name, version in extra.packages.items()]
    chosen = [
        (line.problem, ": ".join(filter(None, (line.name, line.kernel)))) for line in report.backends if line.chosen
    ]
    refused = dict.fromkeys((line.name, line.reason) for line in report.backends if line.reason)
    lines: list[object] = [
        pairs(machine),
        table(("package", "version"), [(name, version or "not installed") for name, version in versions]),
        table(("call", "backend"), chosen, title=f"Backends on {report.target}"),
        table(("not", "because it"), list(refused)),
    ]
    return lines + [extra.install for extra in report.extras if extra.install]
