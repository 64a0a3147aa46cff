"""FrozenFloat8Experts against the sum written out, with the edges of routing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.granularity import PerBlock, PerTensor
from octavo.formats.rule import Rule
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenParameter
from octavo.ops.quantize import dequantize, quantize

EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 32, 24, 10
RULES = {"row": Rule(), "tensor": Rule(granularity=PerTensor()), "block": Rule(granularity=PerBlock(16, 16))}


def make(rule, **settings):
    torch.manual_seed(0)
    module = FrozenFloat8Experts(EXPERTS, HIDDEN, WIDTH, F.silu, rule=rule, **settings)
    gate_up, down = (
        torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
    )
    for name, weight, shards in (("gate_up_proj", gate_up, 2), ("down_proj", down, 1)):
        parts = [[quantize(half, rule) for half in w.chunk(shards)] for w in weight]
        codes = torch.stack([torch.cat([q.codes for q in part]) for part in parts])
        scales = torch.stack([torch.stack([q.scale for q in part]) for part in parts])
        module._parameters[name] = FrozenParameter(codes)
        module._parameters[f"{name}_scale"] = FrozenParameter(scales)
    return module


def written_out(module, x, index, weights):
    result = torch.zeros_like(x)
    for t in range(len(x)):
        for slot in range(index.shape[1]):
            if index[t, slot] < EXPERTS:
                gate, up, down = (dequantize(q, x.dtype) for q in module.scaled(int(index[t, slot])).values())
                result[t] += weights[t, slot] * (down @ (F.silu(gate @ x[t]) * (up @ x[t])))
    return result


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sum_over_the_chosen_experts(rule):
    module = make(rule)
    x, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, 2)
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    assert torch.allclose(module(x, index, weights), written_out(module, x, index, weights), atol=1e-5)


def test_experts_without_tokens_and_out_of_range():
    module = make(Rule())
    x, weights = torch.randn(3, HIDDEN), torch.rand(3, 2)
    index = torch.tensor([[0, EXPERTS], [0, 0], [EXPERTS, EXPERTS + 3]])
    y = module(x, index, weights)
    assert torch.allclose(y, written_out(module, x, index, weights), atol=1e-5)
    assert torch.equal(y[2], torch.zeros(HIDDEN))
    assert module(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)


def test_gradients_reach_inputs_and_router_weights():
    module = make(Rule())
    x, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 2, requires_grad=True)
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    target = torch.randn(TOKENS, HIDDEN)
    got = torch.autograd.grad((module(x, index, weights) * target).sum(), (x, weights))
    expected = torch.autograd.grad((written_out(module, x, index, weights) * target).sum(), (x, weights))
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_codes_and_scales_survive_casts():
    module = make(Rule())
    before = {name: p.clone() for name, p in module.named_parameters()}
    for cast in (module.half, module.bfloat16, module.float, module.double):
        cast()
        assert all(module.get_parameter(name).dtype == p.dtype for name, p in before.items())
    module = make(Rule()).half().to(torch.bfloat16)
    module.requires_grad_(True)
    assert all(torch.equal(module.get_parameter(name), p) for name, p in before.items())
    assert not any(p.requires_grad for p in module.parameters())


def test_an_activation_module_moves_along():
    module = FrozenFloat8Experts(EXPERTS, HIDDEN, WIDTH, nn.PReLU())
    assert module.half().act_fn.weight.dtype == torch.float16


def test_refusals():
    with pytest.raises(ConfigError, match="static"):
        FrozenFloat8Experts(EXPERTS, HIDDEN, WIDTH, F.silu, activation="static")
    with pytest.raises(ShapeError):
        make(Rule())(torch.randn(2, 3, HIDDEN), torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1))
