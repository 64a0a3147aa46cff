"""Groups and skip lists that we write: vLLM's own config class picks for every module what the plan decided."""

import pytest

from octavo.formats.architectures import expert_block, fused_group
from octavo.formats.recipe import Recipe
from octavo.store.plan import make_plan
from octavo.store.tensors import Checkpoint
from tests.workflows.architectures import build

# Families and schemes whose files need more than one group, or a skip list for experts.
MIXED = [("llama", "ragged", "block128"), ("phi3", "ragged", "block128"), ("gemma3", "ragged", "block128")]
MIXED += [
    ("qwen2_5_vl", "ragged", "block128"),
    ("deepseek_v3", "ragged", "block128"),
    ("mixtral", "ragged", "block128"),
]
MIXED += [("mixtral", "whole", "tensor"), ("qwen3_moe", "whole", "tensor"), ("gpt_oss", "whole", "block128")]
STRATEGY = {"row": "channel", "block": "block", "tensor": "tensor"}
ROW_PARALLEL = ("o_proj", "down_proj")


def asked(plan):
    """(module, class) as vLLM asks for them -> strategy: merged matrices by their name, experts by the first one's."""
    result = {}
    for module, decision in plan.assignments.items():
        leaf = module.rpartition(".")[2]
        strategy = STRATEGY[decision.rule.granularity.name] if decision.rule else None
        fused = fused_group(module)
        if decision.role == "expert":
            leaves = ("w1", "w2", "w3") if leaf.startswith("w") else ("gate_proj", "up_proj", "down_proj")
            result |= {(f"{expert_block(module)}.0.{one}", "RoutedExperts"): strategy for one in leaves}
        elif decision.role == "linear" and fused and sum(shard in plan.assignments for shard in fused[1]) > 1:
            result[fused[0], "MergedColumnParallelLinear"] = strategy
        elif decision.role == "linear":
            result[module, "RowParallelLinear" if leaf in ROW_PARALLEL else "QKVParallelLinear"] = strategy
    return result


@pytest.mark.serve
@pytest.mark.parametrize(("name", "size", "scheme"), MIXED)
def test_vllm_picks_the_planned_group(vllm, save_tiny, name, size, scheme):
    plan = make_plan(Checkpoint.open(save_tiny(build(name, size), name)), Recipe.named(scheme), "ct")
    wanted = asked(plan)
    found = vllm.ask("strategies", raw=plan.quantization_config(Recipe.named(scheme)), modules=list(wanted))
    wrong = [(module, w, g) for (module, w), g in zip(wanted.items(), found, strict=True) if w != g]
    assert not wrong, wrong[:5]
