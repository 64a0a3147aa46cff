"""The whole main job on a small real model: calibrate, fine-tune over FP8, export, verify, evaluate.

Sizes are chosen so that it takes five minutes on two CPU cores: fewer samples and steps than the commands' defaults.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from octavo import __version__
from octavo.base.errors import require_type
from octavo.base.report import Config, Report
from octavo.integrations.hub import resolve_model
from octavo.pipelines.phases import Facts, Phases, Say, silent
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from octavo.workflows.evaluate import EvaluateConfig, evaluate
from octavo.workflows.export import ExportConfig, export
from octavo.workflows.finetune import QUICK, FinetuneConfig, finetune
from octavo.workflows.serve import ServeConfig, serve
from octavo.workflows.verify import VerifyConfig, verify

TEXT = "demo"  # CPython's language reference: calibration, training and evaluation take disjoint topics
SAMPLES, CONTEXT, EVAL_TOKENS = 16, 512, 4096
AS_SERVED = "token"  # activations in FP8 too, while training and in every figure of an FP8 model


class QuickstartConfig(Config):
    """model: a folder, a hub id or `demo`. out: the folder for scales, run and exported checkpoint."""

    model: str = "demo"
    out: Path = Path("octavo-quickstart")


class QuickstartReport(Report):
    """Perplexities on the held-out topics: in 16 bit, quantized, after fine-tuning, exported; those in FP8 with the
    activations in FP8 too, as served on GPUs with FP8 units. verify: its verdict.

    seconds: all phases, those of an earlier call included. Not in the JSON: serve_command, and phases: name ->
    (seconds, CPU seconds).
    """

    bf16_ppl: float
    fp8_ppl: float
    finetuned_ppl: float
    exported_ppl: float
    exported_dir: str
    verify: str
    seconds: float
    serve_command: str = Field(exclude=True)
    phases: dict[str, tuple[float, float]] = Field(exclude=True)


def quickstart(config: QuickstartConfig, say: Say = silent) -> QuickstartReport:
    """Run it all, or what an earlier call with the same settings left to do. `say` is told of every phase.

    ConfigError or MismatchError for an `out` that holds something else.
    """
    require_type("quickstart: config", config, QuickstartConfig)
    settings = {"model": config.model, "octavo": __version__}
    phases = Phases(config.out, "quickstart", settings, say, total=7)
    scales, run, exported = config.out / "scales.json", config.out / "run", config.out / "model"
    folder = phases.run("model", f"Model {config.model}", lambda: {"folder": str(resolve_model(config.model))})[
        "folder"
    ]
    phases.run("calibrate", "Calibrate: ranges and errors", lambda: _calibrate(folder, scales), scales)
    bf16 = phases.run("evaluate", "Evaluate the 16-bit model", lambda: _evaluate(folder))
    trained = phases.run("finetune", "Fine-tune LoRA over the FP8 base", lambda: _finetune(folder, run), run)
    phases.run("export", "Export: merge, quantize", lambda: _export(run, exported), exported)
    verdict = phases.run("verify", "Verify the checkpoint", lambda: _verify(exported))
    final = phases.run("evaluate exported", "Evaluate the checkpoint", lambda: _evaluate(str(exported)))
    return QuickstartReport(
        bf16_ppl=bf16["perplexity"],
        fp8_ppl=trained["before"],
        finetuned_ppl=trained["after"],
        exported_ppl=final["perplexity"],
        exported_dir=str(exported),
        verify=verdict["verdict"],
        seconds=round(phases.seconds, 1),
        serve_command=serve(ServeConfig(folder=exported)).shell,
        phases=phases.times,
    )


def _calibrate(folder: str, scales: Path) -> Facts:
    sizes = {"samples": SAMPLES, "context": CONTEXT, "channels": False}
    return {
        "samples": calibrate(CalibrateConfig.parse({"model": folder, "data": TEXT, "out": scales, **sizes})).samples
    }


def _evaluate(model: str) -> Facts:
    config = EvaluateConfig.parse({"model": model, "data": TEXT, "tokens": EVAL_TOKENS, "context": CONTEXT})
    return {"perplexity": evaluate(config).perplexity}


def _finetune(folder: str, run: Path) -> Facts:
    held_out = {"eval_data": TEXT, "eval_tokens": EVAL_TOKENS}
    settings = {"model": folder, "out": run, "data": TEXT, "activation": AS_SERVED, "save_every": 0}
    report = finetune(FinetuneConfig.parse({**settings, **held_out, **QUICK}))
    return {"before": report.perplexity_before, "after": report.perplexity_after}


def _export(run: Path, out: Path) -> Facts:
    report = export(ExportConfig.parse({"run": run, "out": out}))
    return {"kept": report.kept}


def _verify(folder: Path) -> Facts:
    return {"verdict": verify(VerifyConfig(folder=folder)).verdict}
