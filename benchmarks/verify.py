"""octavo verify: throughput from the page cache, memory on a checkpoint larger than it may use, headers of many shards.

    python benchmarks/verify.py                      4 GB of codes, 20 GB sparse, 1,000 shards; about a minute
    python benchmarks/verify.py --gigabytes 1 --sparse 2 --shards 100

Each figure is that of a whole process of its own, imports and start excluded from the seconds, included in the memory
(ru_maxrss, mapped pages of files too). One JSON line each; the exit code is 1 if a claim is not met: at least 0.5 GB/s
on two cores, less than 1 GB of memory for the sparse checkpoint, headers of 1,000 shards in less than 3 s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from octavo.store.header import header_bytes

RATE, MEMORY, SECONDS = 0.5, 1000, 3.0  # GB/s, MB, s
RUN = """
import json, resource, sys, time
from pathlib import Path
from octavo.workflows.verify import VerifyConfig, verify
start, cpu = time.perf_counter(), time.process_time()
report = verify(VerifyConfig(folder=Path(sys.argv[1]), engine=sys.argv[2], gpu="sm90", quick=sys.argv[3] == "quick"))
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
codes = sorted({f.code for f in report.findings if f.severity != "info"})
print(json.dumps({"seconds": seconds, "cpu": cpu, "memory_mb": memory, "verdict": report.verdict, "codes": codes}))
"""
F8, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def dense(layers: int, hidden: int = 8192, inter: int = 28672, kv: int = 1024, vocab: int = 128256) -> Tensors:
    """Llama-3-70B's tensors with channel scales; 0.86 GB a layer, 4.2 GB of embeddings."""
    rows = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    every: Tensors = {"model.embed_tokens.weight": (BF16, (vocab, hidden)), "lm_head.weight": (BF16, (vocab, hidden))}
    every["model.norm.weight"] = (BF16, (hidden,))
    for at in (f"model.layers.{i}" for i in range(layers)):
        linears = {f"{at}.self_attn.{n}": s for n, s in rows.items()} | {f"{at}.mlp.{n}": s for n, s in mlp.items()}
        for name, shape in linears.items():
            every[f"{name}.weight"], every[f"{name}.weight_scale"] = (F8, shape), (F32, (shape[0], 1))
        every |= {f"{at}.{n}.weight": (BF16, (hidden,)) for n in ("input_layernorm", "post_attention_layernorm")}
    return every


def write(folder: Path, tensors: Tensors, shards: int, values: bool) -> float:
    """The checkpoint, GB. values: random codes; otherwise holes in the files, which read as zero and take no disk."""
    folder.mkdir(parents=True)
    names, index = list(tensors), {}
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noise[(noise & 0x7F) == 0x7F] = 0
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        head, begin = header_bytes([(name, *tensors[name]) for name in part])
        with (folder / file).open("wb") as stream:
            stream.write(head)
            for name in part:
                dtype, shape = tensors[name]
                size = torch.Size(shape).numel() * dtype.itemsize
                stream.seek(begin[name])
                if dtype == F32:
                    stream.write(torch.full(shape, 1e-4).numpy().tobytes())
                elif values:
                    _fill(stream, noise, size, dtype)
                stream.truncate(begin[name] + size)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.values()) / 1e9


def _fill(stream: Any, noise: torch.Tensor, size: int, dtype: torch.dtype) -> None:
    data = noise if dtype == F8 else (noise.view(torch.int8).float() * 1e-3).to(dtype).view(torch.uint8)
    while size > 0:
        size -= stream.write(memoryview(data.numpy())[: min(size, len(data))])


def configure(folder: Path, layers: int, hidden: int, inter: int, kv: int, vocab: int) -> None:
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": args | {"strategy": "channel", "dynamic": False}}
    group["input_activations"] = args | {"strategy": "token", "dynamic": True}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128}
    config |= {"hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "vocab_size": vocab}
    config |= {"num_attention_heads": hidden // 128, "num_key_value_heads": kv // 128, "torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config["quantization_config"] |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))


def make(folder: Path, layers: int, shards: int, *, values: bool = False, **sizes: int) -> float:
    """A folder that verify finds nothing wrong with but its values. Returns its size, GB."""
    shape = {"hidden": 8192, "inter": 28672, "kv": 1024, "vocab": 128256} | sizes
    gigabytes = write(folder, dense(layers, **shape), shards, values)
    configure(folder, layers, **shape)
    return gigabytes


def measure(folder: Path, engine: str = "all", mode: str = "full") -> dict[str, Any]:
    """verify in a process of its own: seconds, CPU seconds, peak memory in MB, verdict."""
    done = subprocess.run([sys.executable, "-c", RUN, str(folder), engine, mode], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of real data, for the throughput")
    parser.add_argument("--sparse", type=float, default=20.0, help="GB of the sparse checkpoint")
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints for a while")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        root = Path(scratch)
        size = make(root / "data", max(1, round(given.gigabytes / 0.86)), 4, values=True, vocab=1024)
        measure(root / "data")  # into the page cache
        best = min((measure(root / "data") for _ in range(3)), key=lambda answer: float(answer["seconds"]))
        rate = size / best["seconds"]
        print(json.dumps({"measure": "throughput", "gigabytes": size, "gb_per_s": round(rate, 2), **best}), flush=True)
        failed += rate < RATE
        shutil.rmtree(root / "data")
        size = make(root / "sparse", max(1, round((given.sparse - 4.2) / 0.86)), 8)
        answer = measure(root / "sparse")
        print(json.dumps({"measure": "memory", "gigabytes": size, **answer}), flush=True)
        failed += answer["memory_mb"] >= MEMORY
        shutil.rmtree(root / "sparse")
        size = make(root / "many", 126, given.shards, hidden=16384, inter=53248)  # Llama-3.1-405B
        answer = min((measure(root / "many", mode="quick") for _ in range(3)), key=lambda a: float(a["seconds"]))
        print(json.dumps({"measure": "headers", "gigabytes": size, "shards": given.shards, **answer}), flush=True)
        failed += answer["seconds"] >= SECONDS
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
