"""Conversion speed and memory against llm-compressor's model_free_ptq, and whether the bytes are right.

    python benchmarks/convert.py --rival ENV/bin/python          ENV: scripts/rival_env.sh ENV makes it
    python benchmarks/convert.py                                 Octavo alone
    python benchmarks/convert.py --gigabytes 0.5 --rounds 1      a quick look; the claim is about 4 GB

Generates a Llama-shaped BF16 checkpoint in four shards, then runs whole processes, Octavo and the rival in turn, on the
same files. One JSON line per scheme on stdout; the exit code is 1 if the claim is not met: at least 4 times faster, at
most 1 GB of memory, codes equal to round-to-nearest-even of w / (amax / 448) in FP32, and with compat="llmcompressor"
the rival's bytes. Memory: peak of the anonymous and shared pages above their size after the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint

SPEEDUP, MEMORY = 4.0, 1e9
HIDDEN, INTER, KV, VOCAB, LAYERS = 4096, 14336, 1024, 32000, 8
RIVAL_SCHEME = {"channel": "FP8_DYNAMIC", "block128": "FP8_BLOCK"}

OCTAVO = """
import sys
from pathlib import Path
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
print("imported", flush=True)
model, out, scheme, compat = sys.argv[1:]
quantize_checkpoint(QuantizeConfig(model=model, out=Path(out), scheme=scheme, compat=compat or None))
"""
RIVAL = """
import sys
from llmcompressor import model_free_ptq
print("imported", flush=True)
model, out, scheme, _ = sys.argv[1:]
ignore = ["lm_head", "re:.*embed_tokens.*"]
model_free_ptq(model, out, scheme=scheme, ignore=ignore, max_workers=2, device="cpu")
"""


def generate(folder: Path, gigabytes: float) -> None:
    """Llama-3-8B's matrices, fewer layers: 8 of them and the vocabulary are 4.01 GB."""
    layers = max(1, round(LAYERS * gigabytes / 4.01))
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (KV, HIDDEN), "v_proj": (KV, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    mlp = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    vocab = min(VOCAB, round(VOCAB * gigabytes / 4.01 / 32) * 32)
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}"
        names |= {f"{at}.self_attn.{n}.weight": s for n, s in shapes.items()}
        names |= {f"{at}.mlp.{n}.weight": s for n, s in mlp.items()}
        names |= {f"{at}.{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")}
    names |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}
    random = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    every, index = list(names), {}
    folder.mkdir(parents=True)
    for shard in range(4):
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        part = every[shard * len(every) // 4 : (shard + 1) * len(every) // 4]
        save_file({name: _values(random, names[name], every.index(name)) for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    config |= {"intermediate_size": INTER, "num_hidden_layers": layers, "num_attention_heads": 32, "vocab_size": vocab}
    config |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _values(random: torch.Tensor, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same random numbers, rolled and scaled per tensor and per row: generating 2e9 new ones takes minutes."""
    count = torch.Size(shape).numel()
    rolled = random.roll(seed * 1_000_003).repeat(-(-count // random.numel()))[:count].reshape(shape)
    rows = torch.linspace(0.5, 1.5, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (rolled * rows * 0.02).to(torch.bfloat16)


def run_process(python: str, code: str, arguments: list[str]) -> dict[str, float]:
    """Wall seconds, CPU seconds and the peak of memory above the imports, of one whole process."""
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(
        [python, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    process.stdout.readline()  # "imported"
    imported, base, peak = time.perf_counter(), _memory(process.pid), 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    reader.join()
    process.stdout.close()
    process.stderr.close()
    if process.returncode:
        raise SystemExit(f"{python} failed:\n{errors[0]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "import_seconds": imported - started, "cpu_seconds": cpu, "rise": peak - base}


def _memory(pid: int) -> int:
    """Anonymous and shared resident bytes; mapped files belong to the page cache."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def codes_are_right(model: Path, out: Path, scheme: str) -> bool:
    """Every scale, and the codes of the first and last rows of every module, against the reference."""
    source, result = Checkpoint.open(model), Checkpoint.open(out)
    granularity = PerRow() if scheme == "channel" else PerBlock(128, 128)
    modules = [name.removesuffix(".weight") for name in result if result.dtype(name) == E4M3.dtype]
    for module in modules:
        q = read_scaled(result, module)
        for start in (0, q.codes.shape[0] - 256):
            rows = slice(start, start + 256)
            want = quantize_ref(source.rows(f"{module}.weight", start, start + 256), E4M3, granularity)
            tile = granularity.tile[0]
            scale = q.scale[start // tile : (start + 256) // tile]
            if not torch.equal(q.codes[rows], want.codes) or not torch.equal(scale, want.scale):
                return False
        weight = source.get(f"{module}.weight")
        for start in range(0, weight.shape[0], 1024):
            amax = granularity.amax(weight[start : start + 1024])
            tile = granularity.tile[0]
            if not torch.equal(q.scale[start // tile : start // tile + amax.shape[0]], amax / 448):
                return False
    return len(modules) == 7 * source.config["num_hidden_layers"]


def same_bytes(ours: Path, theirs: Path) -> bool:
    """All tensors of two checkpoints, whatever their shards."""
    a, b = Checkpoint.open(ours), Checkpoint.open(theirs)
    if set(a.names()) != set(b.names()):
        return False
    return all(
        a.dtype(n) == b.dtype(n)
        and a.shape(n) == b.shape(n)
        and torch.equal(a.get(n).view(torch.uint8), b.get(n).view(torch.uint8))
        for n in a
    )


def measure(model: Path, work: Path, scheme: str, rival: str | None, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {"octavo": [], "rival": []}
    ours, theirs = work / "ours", work / "theirs"

    for _ in range(rounds):
        shutil.rmtree(ours, ignore_errors=True)
        runs["octavo"].append(run_process(sys.executable, OCTAVO, [str(model), str(ours), scheme, ""]))
        if rival:
            shutil.rmtree(theirs, ignore_errors=True)
            runs["rival"].append(run_process(rival, RIVAL, [str(model), str(theirs), RIVAL_SCHEME[scheme], ""]))
    line: dict[str, Any] = {"claim": "conversion", "scheme": scheme, "bytes": Checkpoint.open(model).nbytes}
    for who, found in runs.items():
        for key in ("seconds", "import_seconds", "cpu_seconds"):
            line[f"{who}_{key}"] = [round(run[key], 2) for run in found]
        line[f"{who}_rise_gb"] = [round(run["rise"] / 1e9, 3) for run in found]
    line["codes_are_right"] = codes_are_right(model, ours, scheme)
    met = line["codes_are_right"] and max(run["rise"] for run in runs["octavo"]) <= MEMORY
    if rival:
        line["speedup"] = round(_median(runs["rival"]) / _median(runs["octavo"]), 2)
        shutil.rmtree(ours)
        run_process(sys.executable, OCTAVO, [str(model), str(ours), scheme, "llmcompressor"])
        line["compat_bytes_equal"] = same_bytes(ours, theirs)
        met = met and line["compat_bytes_equal"] and line["speedup"] >= SPEEDUP
    shutil.rmtree(ours)
    shutil.rmtree(theirs, ignore_errors=True)
    return {**line, "met": met, "load_average": os.getloadavg()[0], "torch": torch.__version__}


def _median(runs: list[dict[str, float]]) -> float:
    return sorted(run["seconds"] for run in runs)[len(runs) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", help="python of an environment with llmcompressor")
    parser.add_argument("--gigabytes", type=float, default=4.01)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schemes", default="channel,block128")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="octavo-convert-") as place:
        generate(Path(place) / "model", arguments.gigabytes)
        for scheme in arguments.schemes.split(","):
            line = measure(Path(place) / "model", Path(place), scheme, arguments.rival, arguments.rounds)
            print(json.dumps(line), flush=True)
            met = met and line["met"]
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
