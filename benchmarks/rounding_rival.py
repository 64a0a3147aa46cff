"""One rival's FP8 checkpoint, made in its own environment; benchmarks/rounding.py runs this file with its python.

    ENV/bin/python benchmarks/rounding_rival.py MODEL OUT RECIPE TOKENS.json      ENV: scripts/rival_env.sh ENV makes it

RECIPE: fp8_dynamic, fp8_block, gptq, gptq_block, smoothquant_gptq, autoround of llm-compressor; torchao, whose float8
weights are saved decoded, in float32. TOKENS.json: calibration windows, lists of ids.
The last line of stdout is JSON: seconds of loading, calibrating, quantizing and saving, imports left out, by the wall
clock and of all threads together.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMON = {"targets": "Linear", "ignore": ["lm_head"]}


def modifiers(recipe: str) -> list[Any]:
    """llm-compressor's, by the names above."""
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    return {
        "fp8_dynamic": lambda: [QuantizationModifier(scheme="FP8_DYNAMIC", **COMMON)],
        "fp8_block": lambda: [QuantizationModifier(scheme="FP8_BLOCK", **COMMON)],
        "gptq": lambda: [GPTQModifier(scheme="FP8_DYNAMIC", **COMMON)],
        "gptq_block": lambda: [GPTQModifier(scheme="FP8_BLOCK", **COMMON)],
        "smoothquant_gptq": lambda: [SmoothQuantModifier(), GPTQModifier(scheme="FP8_DYNAMIC", **COMMON)],
        "autoround": lambda: [AutoRoundModifier(scheme="FP8_DYNAMIC", **COMMON)],
    }[recipe]()


def compress(model: Any, tokenizer: Any, recipe: str, windows: list[list[int]], out: str) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot

    options: dict[str, Any] = {}
    if "fp8" not in recipe:  # those round to nearest and look at no data
        rows = {"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]}
        options = {"dataset": Dataset.from_dict(rows), "num_calibration_samples": len(windows)}
        options["max_seq_length"] = max(map(len, windows))
    oneshot(model=model, tokenizer=tokenizer, recipe=modifiers(recipe), output_dir=out, **options)


def weight_only(model: Any, tokenizer: Any, out: str) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig(), is_linear)
    for name, module in model.named_modules():
        if is_linear(module, name):
            module.weight = torch.nn.Parameter(module.weight.qdata.float() * module.weight.scale.float())
    model.float().save_pretrained(out)
    tokenizer.save_pretrained(out)


def is_linear(module: Any, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def main() -> None:
    source, out, recipe, tokens = sys.argv[1:]
    windows = json.loads(Path(tokens).read_text())
    if recipe == "torchao":
        importlib.import_module("torchao.quantization")
    else:
        modifiers(recipe)
    started, worked = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if recipe == "torchao":
        weight_only(model, tokenizer, out)
    else:
        compress(model, tokenizer, recipe, windows, out)
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    print(json.dumps({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}))


if __name__ == "__main__":
    main()
