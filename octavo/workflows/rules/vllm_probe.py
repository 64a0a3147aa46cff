"""Does this folder load in a real vLLM, and what does it say? Run by the interpreter of another environment.

    PYTHON vllm_probe.py FOLDER [--prompt TEXT | --token-ids 1,2,3] [--max-tokens 16] [--track-weights] [--engine JSON]

Needs vLLM and nothing else: it imports no Octavo, and keeps to Python and vLLM interfaces that change little. The
answer is one line of JSON, the last of stdout; what vLLM prints goes to stderr:

    {"loads": true, "error": "", "text": " Paris", "tokens": [7042], "logprobs": [-0.3], "prompt_logprobs": [-2.0],
     "kernels": ["CutlassFP8ScaledMMLinearKernel"], "version": "0.32.0"}

`logprobs` has one number per generated token, `prompt_logprobs` one per prompt token after the first; null stands for
NaN, which is what a model with a missing scale answers. `kernels` counts no layer, it lists the classes in use. The
exit code is 0 whatever the verdict; another one means that there is no verdict (no vLLM, a killed process).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A script's folder comes first where Python looks, and the modules beside this one are called vllm and transformers.
sys.path[:] = [p for p in sys.path if os.path.realpath(p) != os.path.dirname(os.path.realpath(__file__))]

PROMPT = "The capital of France is"
CONTEXT = 512  # tokens
KV_BYTES = 2**30  # enough for CONTEXT tokens of any common model; a given size also spares vLLM a profiling run


def probe(
    folder: str,
    prompt: str | list[int] = PROMPT,
    max_tokens: int = 16,
    track_weights: bool = False,
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load the folder, decode greedily, let go of it. Any error while loading or generating is the answer, not a crash.

    prompt: text, or token ids (then the folder needs no tokenizer and `text` stays empty).
    track_weights: let vLLM refuse a checkpoint that leaves a parameter uninitialized, where its tracker notices.
    engine: further arguments of `vllm.LLM`.
    """
    import vllm

    answer: dict[str, Any] = {"loads": False, "error": "", "text": "", "tokens": [], "logprobs": [], "kernels": []}
    answer |= {"prompt_logprobs": [], "version": vllm.__version__}
    llm = None
    try:
        llm = vllm.LLM(**engine_arguments(folder, isinstance(prompt, list), track_weights, engine or {}))
        answer["loads"] = True
        answer["kernels"] = kernels(llm)
        text = isinstance(prompt, str)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=text
        )
        request: Any = prompt if text else {"prompt_token_ids": prompt}
        answer |= reading(llm.generate([request], sampling, use_tqdm=False)[0])
    except (Exception, SystemExit) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    finally:
        del llm
        release()
    return answer


def engine_arguments(folder: str, ids_only: bool, track_weights: bool, extra: dict[str, Any]) -> dict[str, Any]:
    """One process, no compilation, a short context: what starts soonest."""
    config = json.loads((Path(folder) / "config.json").read_text())
    longest = config.get("text_config", config).get("max_position_embeddings") or CONTEXT
    arguments: dict[str, Any] = {"model": folder, "enforce_eager": True, "max_model_len": min(CONTEXT, longest)}
    arguments |= {"skip_tokenizer_init": ids_only, "max_num_seqs": 4, "disable_log_stats": True}
    arguments["kv_cache_memory_bytes"] = KV_BYTES
    if extra.get("tensor_parallel_size", 1) == 1:
        arguments["distributed_executor_backend"] = "uni"
    if track_weights:
        arguments["model_loader_extra_config"] = {"enable_weights_track": True}
    return arguments | extra


def kernels(llm: Any) -> list[str]:
    """The classes of the linear kernels. Empty with several processes: the model is not in this one."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        return []

    def find(model: Any) -> set[str]:
        holders = [getattr(m, name, None) for m in model.modules() for name in ("quant_method", "scheme")]
        held = [type(v).__name__ for h in holders if h is not None for v in getattr(h, "__dict__", {}).values()]
        return {name for name in held if name.endswith("Kernel")}

    return sorted(set().union(*llm.apply_model(find)))


def reading(output: Any) -> dict[str, Any]:
    """Tokens and their log-probabilities out of vLLM's answer to one request."""
    made = output.outputs[0]
    given = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False))[1:]
    return {
        "text": made.text,
        "tokens": list(made.token_ids),
        "logprobs": [finite(at[t].logprob) for t, at in zip(made.token_ids, made.logprobs, strict=True)],
        "prompt_logprobs": [finite(at[t].logprob) for t, at in given],
    }


def finite(x: float) -> float | None:
    """JSON has no NaN."""
    return float(x) if math.isfinite(x) else None


def release() -> None:
    """Give the memory back and leave vLLM's global groups, so that the same process can load the next folder."""
    gc.collect()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@contextlib.contextmanager
def answers() -> Iterator[Any]:
    """A stream on the real stdout; what anybody else prints meanwhile, C++ included, goes to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(saved, "w") as stream:
        yield stream


def configure() -> None:
    """Before the first import of vllm: one process if the platform allows it, no network."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a folder in vLLM and print what it says, as one line of JSON.")
    parser.add_argument("folder")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--token-ids", default="", help="comma-separated, instead of --prompt")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--track-weights", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    given = parser.parse_args()
    configure()
    prompt = [int(t) for t in given.token_ids.split(",")] if given.token_ids else given.prompt
    with answers() as stream:
        answer = probe(given.folder, prompt, given.max_tokens, given.track_weights, given.engine)
        print(json.dumps(answer, allow_nan=False), file=stream, flush=True)
    sys.stderr.flush()
    os._exit(0)  # vLLM's threads sometimes outlive the last line


if __name__ == "__main__":
    main()
