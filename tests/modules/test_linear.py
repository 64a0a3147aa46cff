"""Float8Linear: forward and backward of a quantized, trainable weight."""

import pytest
import torch
from torch import nn

from octavo import Float8Linear, PerBlock, PerGroup, PerRow, PerTensor, Rule
from octavo.base.errors import ConfigError
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.testing import FLOOR_DB, assert_sqnr

MODES = {"none": None, "token": PerRow(), "group128": PerGroup(128)}


@pytest.mark.parametrize("activation", MODES)
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)
def test_forward_and_both_gradients(granularity, activation):
    torch.manual_seed(0)
    module = Float8Linear(136, 200, rule=Rule(granularity=granularity), activation=activation)
    x, grad = torch.randn(2, 9, 136, requires_grad=True), torch.randn(2, 9, 200)
    y = module(x)
    y.backward(grad)
    w = dequantize_ref(quantize_ref(module.weight.detach(), E4M3, granularity))
    a = x.detach()
    if activation != "none":
        a = dequantize_ref(quantize_ref(a, E4M3, MODES[activation]))
    assert_sqnr(y.detach(), a @ w.T + module.bias.detach(), FLOOR_DB["rounding", "float32"])
    assert_sqnr(x.grad, grad @ w, FLOOR_DB["rounding", "float32"])
    assert_sqnr(module.weight.grad, grad.flatten(0, 1).T @ a.flatten(0, 1), FLOOR_DB["rounding", "float32"])
    assert_sqnr(module.bias.grad, grad.sum((0, 1)), FLOOR_DB["rounding", "float32"])


def test_it_learns():
    torch.manual_seed(0)
    module, target = Float8Linear(32, 16), nn.Linear(32, 16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        x = torch.randn(64, 32)
        loss = (module(x) - target(x)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 50


def test_from_linear_takes_over_the_parameters():
    source = nn.Linear(8, 4, dtype=torch.bfloat16)
    module = Float8Linear.from_linear(source, activation="none")
    assert module.weight is source.weight and module.bias is source.bias
    assert list(module.state_dict()) == list(source.state_dict())
    assert "bias=True, rule=e4m3 row, activation=none" in repr(module)
    assert module(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_and_compile():
    torch._dynamo.reset()
    module = Float8Linear(24, 16)
    x = torch.randn(3, 24)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


def test_static_is_refused():
    with pytest.raises(ConfigError, match="none, token or group128"):
        Float8Linear(4, 4, activation="static")
