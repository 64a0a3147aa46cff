"""Second moments and token weights against what autograd and a plain product give."""

import pytest
import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.modules.moments import MOST_WEIGHT, MomentObserver, TokenWeights, fisher_backward, input_groups


class Block(nn.Module):
    """Two siblings on one input, a third on their product: names as in a decoder layer."""

    def __init__(self, d=8, inner=12):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


GROUPS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


def test_groups():
    assert input_groups(["gate_proj", "up_proj", "down_proj"]) == GROUPS


def test_moments_are_the_sum_of_outer_products(block):
    samples = [torch.randn(1, t, 8) for t in (5, 3)]
    with MomentObserver(block, GROUPS) as seen:
        for x in samples:
            block(x)
    x = torch.cat(samples, 1)[0]
    torch.testing.assert_close(seen.matrices["gate_up_proj"], x.T @ x)
    h = torch.sigmoid(block.gate_proj(x)) * block.up_proj(x)
    torch.testing.assert_close(seen.matrices["down_proj"], h.T @ h)
    block(x)
    torch.testing.assert_close(seen.matrices["gate_up_proj"], x.T @ x)


def test_weighted_moments_follow_the_order_of_tokens(block):
    samples, w = [torch.randn(1, t, 8) for t in (5, 3)], torch.rand(8)
    with MomentObserver(block, GROUPS, {"gate_up_proj": w, "down_proj": torch.ones(8)}) as seen:
        for x in samples:
            block(x)
    x = torch.cat(samples, 1)[0]
    torch.testing.assert_close(seen.matrices["gate_up_proj"], (x * w[:, None]).T @ x)


def test_token_weights_are_squared_gradient_norms(block):
    x = torch.randn(1, 6, 8, requires_grad=True)
    with TokenWeights(block, GROUPS) as weights:
        y = block(x)
        y.square().sum().backward()
    got = weights.finish()
    gate, up = block.gate_proj(x), block.up_proj(x)
    for tensor in (gate, up):
        tensor.retain_grad()
    block.down_proj(torch.sigmoid(gate) * up).square().sum().backward()
    norms = (gate.grad.square().sum(-1) + up.grad.square().sum(-1))[0]
    torch.testing.assert_close(got["gate_up_proj"], norms / norms.mean())
    torch.testing.assert_close(got["down_proj"], (d := (2 * y[0]).square().sum(-1)).detach() / d.mean().detach())


def test_one_loud_token_does_not_drown_the_others(block):
    x = torch.randn(1, 400, 8, requires_grad=True)
    with TokenWeights(block, GROUPS) as weights:
        y = block(x)
        (y[0, 0] * 1e6).sum().backward(retain_graph=True)
        y.sum().backward()
    assert weights.finish()["down_proj"].max() <= 1.1 * MOST_WEIGHT


def test_nan_gradients_are_named(block):
    x = torch.randn(1, 2, 8, requires_grad=True)
    with TokenWeights(block, GROUPS) as weights:
        (block(x) * torch.nan).sum().backward()
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        weights.finish()


def test_fisher_gradient_has_the_fishers_expectation():
    """E[(softmax - onehot)^2 summed] = 1 - sum p^2, over tokens drawn from p."""
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(20_000, 1).requires_grad_(True)
    fisher_backward(logits, torch.Generator().manual_seed(0))
    p = logits.detach()[0].softmax(-1)
    assert abs(logits.grad.square().sum(-1).mean() - (1 - p.square().sum())) < 0.01
