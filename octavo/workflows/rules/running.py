"""Findings from real engines: logits in Transformers, and a load in somebody else's vLLM."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.workflows.rules.findings import Findings

# compressed-tensors quantizes activations as they will be served, which costs about 5 % on the logits of tiny models.
ODD, BAD = 0.15, 0.35
TOP1_BAD = 0.5
TIMEOUT = 1800.0  # seconds
SCALES = ("scale", "scale_inv")


def check_logits(folder: Path, out: Findings) -> None:
    """Load in Transformers, compare with the decoded weights."""
    from octavo.integrations.comparing import compare_logits

    found = compare_logits(folder)
    fix = "`octavo explain` knows many of Transformers' messages."
    if found.error:
        out.error("transformers-load", str(folder), f"It does not load in Transformers: {found.error}", fix)
        return
    lost = [name for name in found.missing if name.endswith((*SCALES, "weight"))]
    if lost:
        text = f"Transformers finds no tensor for {len(lost)} parameters and makes values up."
        out.error("transformers-missing", lost[0], text, fix)
    dropped = [name for name in found.unexpected if name.endswith((*SCALES, "weight"))]
    if dropped:
        text = f"Transformers has no parameter for {len(dropped)} tensors and drops them."
        out.warn("transformers-unexpected", dropped[0], text, fix)
    if found.reference_error:
        out.error("not-decodable", str(folder), f"The weights cannot be decoded: {found.reference_error}", "")
        return
    text = f"Logits differ by {found.relative:.2%} from those of the decoded weights, top-1 equal in {found.top1:.0%}."
    if not math.isfinite(found.relative) or found.relative > BAD or found.top1 < TOP1_BAD:
        out.error("logits-differ", str(folder), text, "Look for findings about scales and names.")
    elif found.relative > ODD:
        out.warn("logits-differ", str(folder), text, "Look for findings about scales and names.")
    else:
        out.info("logits-agree", str(folder), text)


def run_vllm(folder: Path, python: Path, tp: int, out: Findings) -> dict[str, Any]:
    """Load and generate with the vLLM of another interpreter; returns what the probe says."""
    if not python.is_file():
        raise ConfigError(f"--run-vllm {python}", got="no such file", need="a Python interpreter that has vLLM")
    script = Path(__file__).with_name("vllm_probe.py")
    tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json"))
    command = [str(python), str(script), str(folder.resolve())]
    command += [] if tokenizer else ["--token-ids", "1,2,3,4"]
    command += ["--engine", json.dumps({"tensor_parallel_size": tp})] if tp > 1 else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        out.error("vllm-timeout", str(folder), f"vLLM gave no answer in {TIMEOUT / 60:.0f} minutes.", "")
        return {}
    answer = _last_json(done.stdout)
    if done.returncode or answer is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"--run-vllm {python}", got=last[:300], need="a Python interpreter that has vLLM")
    _judge_answer(answer, folder, out)
    return answer


def _judge_answer(answer: dict[str, Any], folder: Path, out: Findings) -> None:
    version = answer.get("version", "")
    if not answer.get("loads"):
        text = f"vLLM {version} does not load it: {answer.get('error', '')}"
        out.error("vllm-load", str(folder), text[:2000], "`octavo explain` knows many of vLLM's messages.")
        return
    if answer.get("error"):
        text = f"vLLM {version} loads it and fails in the first request: {answer['error']}"
        out.error("vllm-run", str(folder), text[:2000], "`octavo explain` knows many of vLLM's messages.")
        return
    numbers = [*answer.get("logprobs", []), *answer.get("prompt_logprobs", [])]
    if any(number is None for number in numbers):
        text = f"vLLM {version} loads it and computes NaN: a scale is missing or wrong."
        out.error("vllm-nan", str(folder), text, "Look for findings about scales.")
        return
    said = f", says {answer['text']!r}" if answer.get("text") else ""
    out.info("vllm-runs", str(folder), f"vLLM {version} loads it{said}, with {', '.join(answer.get('kernels', []))}.")


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None
