"""octavo serve."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.common import AsJson, ConfigFile, Result, flags, option

KV_CACHE = "auto|bfloat16|fp8|fp8_e4m3|fp8_e5m2|fp8_per_token_head"


def serve(
    ctx: typer.Context,
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="An exported checkpoint.")] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="VLLM_ARGS", help="More arguments for vLLM, after a --.")
    ] = None,
    gpu: Annotated[str | None, option("The GPU to serve on: h100, sm90, cpu. By default this machine's.")] = None,
    tp: Annotated[int | None, option("GPUs that share the model. By default as few as hold it.")] = None,
    max_model_len: Annotated[int | None, option("Tokens. By default the model's own, or what fits.")] = None,
    kv_cache_dtype: Annotated[str | None, option("KV cache; auto: 16 bit.", "auto", KV_CACHE)] = None,
    kv_report: Annotated[Path | None, option("FP8 if this report of eval calls it safe.", None, "FILE")] = None,
    host: Annotated[str | None, option("Address to listen on.")] = None,
    port: Annotated[int | None, option("Port to listen on.")] = None,
    vllm: Annotated[str | None, option("The vllm executable.", "vllm", "FILE")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
    config: ConfigFile = None,
    json: AsJson = False,
) -> Result:
    """Serve a checkpoint with the vLLM command that fits it and this GPU."""
    from octavo.workflows.serve import ServeConfig, find_vllm, launch
    from octavo.workflows.serve import serve as workflow

    report = workflow(ServeConfig.load(config, flags(ctx)))
    lines = [*(f"# {note}" for note in report.notes), report.shell]
    if dry_run:
        return Result(report, lines)
    find_vllm(report.command[0])
    return Result(report, lines, then=partial(launch, report, stdout_to_stderr=json))
