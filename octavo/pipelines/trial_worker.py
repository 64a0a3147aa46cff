"""One rank of a trial: the real octavo finetune on worst-case data, under a memory limit, and what it took.

    python -m octavo.pipelines.trial_worker SPEC.json RESULT.json

SPEC: {"settings": of FinetuneConfig but out, data and eval_data, "folder": for them, "limit": bytes or null,
"steps": optimizer steps}. Every sample is exactly as long as the context allows. After the steps comes a snapshot;
before and after them an evaluation.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

from octavo.base.allocator import prefer_expandable_segments
from octavo.pipelines.trial_process import end_with_parent

CHARACTERS = 6  # of English text per token, more than any tokenizer makes of it
PAGE = 8192  # characters of a document
EVAL_TOKENS = 1024


def main(spec_file: str, result_file: str) -> None:
    """Run and write the result; an exception passes through, its text is what the parent reads."""
    end_with_parent(Path(spec_file).parent)
    prefer_expandable_segments()
    spec = json.loads(Path(spec_file).read_text())
    import torch

    from octavo.integrations import peft, snapshots, trl  # noqa: F401  # before the memory is counted
    from octavo.ops.backends import why
    from octavo.workflows.finetune import FinetuneConfig, finetune

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    settings, folder = dict(spec["settings"]), Path(spec["folder"]) / f"rank-{rank}"
    device = str(settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.startswith("cuda"):
        device = f"cuda:{rank}"
    before = _prepare(device, spec["limit"])
    config = FinetuneConfig.parse(
        settings | _data(folder, settings, spec["steps"]) | _ending(folder, spec["steps"], device), "trial"
    )
    report = finetune(config)
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    result = _memory(device, before) | {
        "steps": report.steps,
        "backend": why(m=config.micro_batch * config.context, device=device).backend,
        "saved": (config.out / "snapshots" / f"step-{report.steps}").is_dir(),
        "evaluated": report.perplexity_after is not None,
        "seconds_per_step": statistics.median(line["seconds"] for line in steps[1:] or steps),
        "gradient_norm": max((line["gradient_norm"] or 0.0 for line in steps), default=0.0),
    }
    Path(result_file).write_text(json.dumps(result))


def _data(folder: Path, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Text that packs into full samples only, enough for all the steps of this rank's share."""
    from octavo.integrations.demo import demo_texts

    folder.mkdir(parents=True)
    text = "\n\n".join(demo_texts("train"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tokens = settings["context"] * (settings["micro_batch"] * settings["accumulation"] * ranks * steps + 1)
    # In pages, so that the tokenizer's own memory stays small; the trainer joins them and cuts full samples.
    pages = -(-tokens * CHARACTERS // PAGE)
    starts = [PAGE * page % max(1, len(text) - PAGE) for page in range(pages)]
    lines = (json.dumps({"text": text[start : start + PAGE]}) + "\n" for start in starts)
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "eval.txt").write_text(text[: EVAL_TOKENS * CHARACTERS], encoding="utf-8")
    return {"data": str(folder / "train.jsonl"), "eval_data": str(folder / "eval.txt"), "packing": True}


def _ending(folder: Path, steps: int, device: str) -> dict[str, Any]:
    return {
        "out": folder / "run",
        "max_steps": steps,
        "save_every": 2 * steps,  # one snapshot, half way: at the end
        "keep": 1,
        "eval_tokens": EVAL_TOKENS,
        "device": device,
        "schedule": "constant",
        "warmup": 0.0,
    }


def _prepare(device: str, limit: float | None) -> float:
    """Set the limit and start counting; returns the bytes that are in use already (on a CPU)."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        if limit:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        torch.cuda.reset_peak_memory_stats()
        return 0.0
    weight = torch.ones(512, 512, requires_grad=True)
    torch.autograd.backward((weight @ weight).sum())  # the threads of OpenMP and autograd exist before the limit does
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    if limit:
        most = int(_status("VmData") + limit)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return _status("VmRSS")


def _memory(device: str, before: float) -> dict[str, float]:
    """peak_bytes: reserved by torch's allocator, or on a CPU what the process grew by."""
    import torch

    if not device.startswith("cuda"):
        return {"peak_bytes": _status("VmHWM") - before, "alloc_retries": 0}
    stats = torch.cuda.memory_stats()
    return {
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "alloc_retries": stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0),
    }


def _status(key: str) -> float:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return float(match[1]) * 1024 if match else 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
