"""A small checkpoint in two shards, written with the safetensors library itself."""

import json

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1}


def gaussian(*shape, seed=0, dtype=torch.bfloat16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def write_checkpoint(folder, shards, config=CONFIG, index=True):
    """shards: list of {name: tensor}. One shard without index is model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(shards) > 1 and index:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        size = sum(t.nbytes for tensors in shards for t in tensors.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def two_shards(tmp_path):
    first = {"a.weight": gaussian(8, 16), "a.bias": gaussian(8, seed=1), "ids": torch.arange(5)}
    second = {"b.weight": gaussian(4, 6, seed=2, dtype=torch.float32), "empty": torch.empty(0, 3)}
    write_checkpoint(tmp_path / "model", [first, second])
    return tmp_path / "model", {**first, **second}
