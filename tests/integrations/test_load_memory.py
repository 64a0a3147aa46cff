"""Peak memory of octavo.load: a process of its own, sampled while it loads a checkpoint in shuffled shards."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

MB = 1 << 20
HIDDEN, WIDTH, VOCAB, LAYERS = 1024, 4096, 8192, 24

CHILD = """
import json, sys, threading, time
import torch, transformers, octavo
from octavo.integrations import quantizer, transformers as ours
from transformers.models.llama import modeling_llama

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

octavo.quantize(torch.ones(64, 64))
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
model = octavo.load(sys.argv[1], sys.argv[2], device="cpu")
done.set()
thread.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"rise": peak - before, "size": size}))
"""


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory):
    """A 0.9 GB Llama in BF16, its tensors in random order over seven shards, so that siblings lie far apart."""
    folder = tmp_path_factory.mktemp("shuffled")
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for leaf in ("q", "k", "v", "o"):
            shapes[f"{prefix}.self_attn.{leaf}_proj.weight"] = (HIDDEN, HIDDEN)
        for leaf in ("gate", "up", "down"):
            shapes[f"{prefix}.mlp.{leaf}_proj.weight"] = (HIDDEN, WIDTH) if leaf == "down" else (WIDTH, HIDDEN)
        for leaf in ("input", "post_attention"):
            shapes[f"{prefix}.{leaf}_layernorm.weight"] = (HIDDEN,)
    names = sorted(shapes)
    random.Random(0).shuffle(names)
    noise, weight_map = torch.randn(WIDTH * HIDDEN * 2).bfloat16(), {}
    for index in range(7):
        file = f"model-{index + 1:05}-of-00007.safetensors"
        shard = names[index::7]
        weight_map |= dict.fromkeys(shard, file)
        values = {n: noise[: torch.Size(shapes[n]).numel()].view(shapes[n]).clone() for n in shard}
        save_file(values, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": VOCAB}
    config |= {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["channel", "tensor"])
def test_peak_is_the_final_size_and_one_tensor(shuffled, recipe):
    largest = VOCAB * HIDDEN * 2
    source = sum(file.stat().st_size for file in shuffled.glob("*.safetensors"))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(shuffled), recipe], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    limit = found["size"] + largest + 300 * MB
    assert limit < source  # else reading everything in 16 bit would pass as well
    assert found["rise"] <= limit, f"{found['rise'] / MB:.0f} MB of {limit / MB:.0f} MB"
    assert found["rise"] >= found["size"] - 2 * largest  # the codes are really there: the meter works
