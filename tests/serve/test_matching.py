"""Skip lists and targets: what the rules say vLLM builds is what vLLM's own config classes say."""

import json
import random
from pathlib import Path

import pytest

from octavo.store.tensors import Checkpoint
from octavo.workflows.rules import vllm
from octavo.workflows.rules.engine import Target
from octavo.workflows.rules.findings import Findings
from octavo.workflows.rules.model import Model
from octavo.workflows.rules.scheme import read_scheme
from tests.workflows.broken import ct_config, decoder, native_config

A0, M1 = "model.layers.0.self_attn", "model.layers.1.mlp"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MODULES = [
    (f"model.layers.{layer}.{name}", kind)
    for layer in (0, 1)
    for name, kind in (
        ("self_attn.qkv_proj", "QKVParallelLinear"),
        ("self_attn.o_proj", "RowParallelLinear"),
        ("mlp.gate_up_proj", "MergedColumnParallelLinear"),
        ("mlp.down_proj", "RowParallelLinear"),
    )
]
NAMES = [f"{A0}.{p}" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")]
NAMES += [f"{M1}.{p}" for p in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")]
NAMES += ["lm_head", "o_proj", "down_proj", "qkv_proj", "model.layers.0", "layers.1", A0, f"{A0}*", "*o_proj", "Linear"]
NAMES += ["re:.*o_proj", "re:.*layers\\.1.*", "re:.*(q_proj|k_proj|v_proj)$", "re:.*gate_proj", "re:.*self_attn.*"]
TARGETS = [["Linear"], ["re:.*mlp.*"], ["re:.*(self_attn|mlp).*"], [f"{A0}.o_proj", "re:.*(gate|up)_proj$"]]
TARGETS += [[f"{A0}.q_proj", f"{A0}.k_proj", f"{A0}.v_proj"], ["re:.*q_proj$", "re:.*down_proj"], ["RowParallelLinear"]]


def configs(count):
    rng = random.Random(0)
    for _ in range(count):
        skip = rng.sample(NAMES, rng.randint(0, 5))
        yield native_config(skip)
        ct = ct_config("channel", skip)
        ct["config_groups"]["group_0"]["targets"] = rng.choice(TARGETS)
        yield ct
        yield {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": skip}


def ours(folder: Path, raw: dict) -> list[str]:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": raw}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint, out = Checkpoint.open(folder), Findings()
    plan = vllm.plan(Model(checkpoint), read_scheme(checkpoint, out), Target("vllm", (0, 32, 0), (9, 0)), out)
    result = []
    for name, _ in MODULES:
        parent, _, leaf = name.rpartition(".")
        members = [f"{parent}.{shard}" for shard in FUSED.get(leaf, (leaf,))]
        if any(member in plan.refused for member in members):
            result.append("error")
        else:
            kinds = {"fp8" if plan.modules[member].weights else "plain" for member in members}
            assert len(kinds) == 1, members
            result.append(kinds.pop())
    return result


@pytest.mark.serve
def test_rules_match_like_vllm(vllm, tmp_path):
    folder = decoder(layers=2).write(tmp_path / "ckpt")
    raws = list(configs(150))
    mine = [ours(folder, raw) for raw in raws]
    theirs = vllm.ask("quantized", configs=raws, modules=MODULES)
    wrong = [(raw, m, t) for raw, m, t in zip(raws, mine, theirs, strict=True) if m != t]
    assert not wrong, wrong[:3]
