"""Compensated rounding against nearest rounding and rivals, one claim a function; each result is a JSON line on stdout.

    python benchmarks/rounding.py                     channel, block128 and po2 on the demo model and text
    python benchmarks/rounding.py block128            one of them
    python benchmarks/rounding.py block128 --model DIR --calibration A.txt --data B.txt    any model and text
    python benchmarks/rounding.py rivals --rival ENV/bin/python        ENV: scripts/rival_env.sh ENV makes it

A line holds the figures, the expected ones and `agrees`; the exit code is 1 if one does not. The absolute limits are
those of the demo at 12,288 tokens; on another model the weights stay below half of nearest rounding's divergence.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.formats.recipe import Recipe
from octavo.integrations import measuring
from octavo.integrations.data import calibration_samples, load_data, token_windows
from octavo.integrations.hub import load_tokenizer
from octavo.integrations.moments import moments_of
from octavo.integrations.transformers import load
from octavo.modules.divergence import Divergence, PairedScore, known
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.store.moments import Moments
from octavo.workflows.calibrate import CalibrateConfig, calibrate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint

FULL = 12_288
CONTEXT = 512


@dataclass(frozen=True)
class Setup:
    """What the claims run on; the limits are those of the protocol and hold for no other model or text."""

    model: str = "demo"
    calibration: str = "demo"
    data: str = "demo"
    tokens: int = FULL
    rival: str | None = None
    recipes: tuple[str, ...] = ()

    @property
    def is_protocol(self) -> bool:
        return {self.model, self.calibration, self.data} == {"demo"}


class Judge:
    """The 16-bit model and the evaluation tokens; every candidate sees the same."""

    def __init__(self, setup: Setup) -> None:
        opened = measuring.open_model(setup.model, dtype=torch.float32)
        self.reference, self.folder = opened.model, opened.folder
        texts = load_data(setup.data, "eval", limit=setup.tokens).texts(opened.tokenizer)
        self.windows = token_windows(opened.tokenizer, texts, CONTEXT, setup.tokens // CONTEXT)

    def of(self, model: nn.Module, activations: list[str]) -> dict[str, dict[str, Any]]:
        """Figures by what the FP8 linears do to their inputs."""
        scores = {activation: PairedScore() for activation in activations}
        modules = [m for m in model.modules() if isinstance(m, FrozenFloat8Linear | FrozenFloat8Experts)]
        for window in self.windows:
            expected = measuring.logits(self.reference, window)
            for activation, score in scores.items():
                for module in modules:
                    module.activation = activation
                score.add(expected, measuring.logits(model, window), window)
        return {activation: _figures(score.result()) for activation, score in scores.items()}


def _figures(found: Divergence) -> dict[str, Any]:
    """Standard errors of a single window are null."""
    figures = {
        "kl": found.kl.mean,
        "kl_se": found.kl.se,
        "kl_p99": found.kl_p99,
        "rise_percent": found.rise.mean,
        "rise_percent_se": found.rise.se,
        "top1": found.top1.mean,
    }
    return {name: known(value) for name, value in figures.items()}


# activations -> the largest mean KL to the BF16 model that compensated rounding may leave. Plain rounding leaves 0.0176
# and 0.0286 per channel, 0.0156 and 0.0236 per block.
CHANNEL = {"none": 0.0050, "token": 0.0165}
BLOCK = {"none": 0.0045, "group128": 0.0125}
CALIBRATION_WINDOWS = 18  # of 512 tokens: all that the demo's calibration topics hold
HALF = 0.5  # of nearest rounding's divergence in the weights, at most, on any model


def compensated(setup: Setup) -> Iterator[dict[str, Any]]:
    """Codes rounded with compensation, same scales and size: the divergence that is left, and what it costs in time."""
    yield from _compensated(setup, "channel", "fp32", CHANNEL)


def compensated_block(setup: Setup) -> Iterator[dict[str, Any]]:
    """The same per block of 128 x 128, in memory, ragged edges included."""
    yield from _compensated(setup, "block128", "fp32", BLOCK)


def compensated_po2(setup: Setup) -> Iterator[dict[str, Any]]:
    """The same with scales that are powers of two, as Blackwell wants them."""
    yield from _compensated(setup, "block128", "po2", BLOCK)


@cache
def _calibrated(setup: Setup) -> tuple[Moments, float, tempfile.TemporaryDirectory[str]]:
    """Moments, the seconds they took, and their folder, which lives as long as the process."""
    folder = tempfile.TemporaryDirectory()
    started = time.perf_counter()
    settings = {"samples": CALIBRATION_WINDOWS, "context": CONTEXT, "weighting": "fisher"}
    moments = moments_of(setup.model, setup.calibration, Path(folder.name) / "moments", **settings)
    return moments, time.perf_counter() - started, folder


def sequential(setup: Setup) -> Iterator[dict[str, Any]]:
    """Channel scales, each block calibrated on what the rounded ones before it make of the text."""
    with tempfile.TemporaryDirectory() as folder:
        moments, scales = Path(folder) / "moments", Path(folder) / "scales.json"
        started = time.perf_counter()
        settings = {"samples": CALIBRATION_WINDOWS, "context": CONTEXT, "sequential": True, "moments": moments}
        calibrate(CalibrateConfig(model=setup.model, data=setup.calibration, out=scales, **settings))
        seconds = time.perf_counter() - started
        known = Moments.open(moments), seconds
        for line in _compensated(setup, "channel", "fp32", CHANNEL, known):
            yield {**line, "weights": "channel fp32, compensated, sequential"}


def _compensated(
    setup: Setup,
    weights: str,
    scale_format: str,
    limits: dict[str, float],
    known: tuple[Moments, float] | None = None,
) -> Iterator[dict[str, Any]]:
    moments, calibrated = known or _calibrated(setup)[:2]
    recipe = Recipe.named(weights, scale_format=scale_format)
    started = time.perf_counter()
    model = load(setup.model, recipe, dtype=torch.float32, rounding="compensated", moments=moments)
    seconds = time.perf_counter() - started
    judge = Judge(setup)
    figures = judge.of(model, list(limits))
    nearest = None if setup.is_protocol else judge.of(load(setup.model, recipe, dtype=torch.float32), list(limits))
    for activation, most in limits.items():
        if nearest is not None:
            most = HALF * nearest[activation]["kl"] if activation == "none" else nearest[activation]["kl"]
        yield {
            "weights": f"{weights} {scale_format}, compensated",
            "activation": activation,
            "calibrate_seconds": round(calibrated, 1),
            "quantize_seconds": round(seconds, 1),
            "kl_nearest": None if nearest is None else nearest[activation]["kl"],
            "expected": {"kl": f"<= {most:.3g}"},
            "agrees": figures[activation]["kl"] <= most if setup.tokens == FULL or nearest is not None else None,
            **figures[activation],
        }


# What the rivals make, by the recipes of rounding_rival.py, and the activations of the scheme.
RIVALS = {
    "fp8_dynamic": "token",
    "gptq": "token",
    "smoothquant_gptq": "token",
    "fp8_block": "group128",
    "gptq_block": "group128",
    "torchao": "none",  # a checkpoint of decoded weights has no activations to round
    "autoround": "token",
}
DEFAULT_RIVALS = [name for name in RIVALS if name != "autoround"]  # which takes hours on a CPU
RIVAL_WINDOWS = 16
RIVAL_SHARE = 0.5  # of the time of the rival's GPTQ


def rivals(setup: Setup) -> Iterator[dict[str, Any]]:
    """Ours and llm-compressor's, same calibration tokens, same evaluation tokens, whole jobs timed in the same run."""
    if setup.rival is None:
        return
    judge = Judge(setup)
    _, windows = calibration_samples(load_tokenizer(judge.folder), setup.calibration, RIVAL_WINDOWS, CONTEXT)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "tokens.json").write_text(json.dumps([window.tolist() for window in windows]))
        started, worked = time.perf_counter(), time.process_time()
        settings = {"rounding": "compensated", "data": setup.calibration, "samples": RIVAL_WINDOWS}
        quantize_checkpoint(QuantizeConfig(model=setup.model, out=work / "octavo", **settings))
        ours = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - worked}
        yield from _rival_lines(judge, "octavo channel compensated", work / "octavo", "token", ours, None)
        for recipe in setup.recipes:
            activation = RIVALS[recipe]
            name = recipe if recipe == "torchao" else f"llm-compressor {recipe}"
            script = Path(__file__).with_name("rounding_rival.py")
            command = [
                setup.rival,
                str(script),
                str(judge.folder),
                str(work / recipe),
                recipe,
                str(work / "tokens.json"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip() or "no message").splitlines()[-1]
                yield {"part": name, "failed": reason, "agrees": None}
                continue
            seconds = json.loads(done.stdout.strip().splitlines()[-1])
            gate = ours if recipe == "gptq" and setup.is_protocol else None
            yield from _rival_lines(judge, name, work / recipe, activation, seconds, gate)


def _rival_lines(
    judge: Judge, name: str, folder: Path, activation: str, took: dict[str, float], ours: dict[str, float] | None
) -> Iterator[dict[str, Any]]:
    opened = measuring.open_model(folder, dtype=torch.float32)
    for mode, figures in judge.of(opened.model, list(dict.fromkeys(["none", activation]))).items():
        share = None
        if ours is not None and mode == "none":
            share = {clock: round(ours[clock] / seconds, 3) for clock, seconds in took.items()}
        yield {
            "part": name,
            "activation": mode,
            **{clock: round(seconds, 1) for clock, seconds in took.items()},
            "our_share": share,
            "expected": {"our seconds": f"<= {RIVAL_SHARE} x its"} if share else {},
            "agrees": share["seconds"] <= RIVAL_SHARE if share else None,
            **figures,
        }


CLAIMS: dict[str, Callable[[Setup], Iterator[dict[str, Any]]]] = {
    "channel": compensated,
    "block128": compensated_block,
    "po2": compensated_po2,
    "sequential": sequential,
    "rivals": rivals,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", help=f"of: {', '.join(CLAIMS)}")
    parser.add_argument("--model", default="demo", help="a 16-bit model folder")
    parser.add_argument("--calibration", default="demo", help="text to calibrate on")
    parser.add_argument("--data", default="demo", help="text to evaluate on, another")
    parser.add_argument("--tokens", type=int, default=FULL)
    parser.add_argument("--rival", help="python of an environment with llm-compressor and torchao, for `rivals`")
    parser.add_argument("--recipes", nargs="*", default=DEFAULT_RIVALS, choices=RIVALS, help="of the rivals")
    arguments = parser.parse_args()
    if unknown := set(arguments.claims) - set(CLAIMS):
        parser.error(f"unknown claims: {', '.join(sorted(unknown))}; known: {', '.join(CLAIMS)}")
    setup = Setup(arguments.model, arguments.calibration, arguments.data, arguments.tokens, arguments.rival)
    setup = replace(setup, recipes=tuple(arguments.recipes))
    stamp = {
        "model": setup.model,
        "data": setup.data,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    failed = False
    for name in arguments.claims or CLAIMS:
        for line in CLAIMS[name](setup):
            print(json.dumps({"claim": name, **line, **stamp}), flush=True)
            failed |= line["agrees"] is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
