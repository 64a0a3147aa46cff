"""Second moments and token weights against what autograd and a plain product give."""

import pytest
import torch
from torch import nn

from octavo.base.errors import CheckpointError
from octavo.modules.moments import (
    MOST_WEIGHT,
    TEMPER,
    MomentObserver,
    TokenWeights,
    fast_arithmetic,
    fast_products,
    fisher_backward,
    input_groups,
)


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


def shrunk(h, share):
    return h * (1 - share) + torch.diag(h.diagonal() * share)


def test_moments_are_the_sum_of_outer_products(block):
    samples = [torch.randn(1, t, 8) for t in (5, 3)]
    with MomentObserver(block, GROUPS) as seen:
        for x in samples:
            block(x)
    x = torch.cat(samples, 1)[0]
    torch.testing.assert_close(seen.matrices["gate_up_proj"], shrunk(x.T @ x, seen.noise["gate_up_proj"]))
    h = torch.sigmoid(block.gate_proj(x)) * block.up_proj(x)
    torch.testing.assert_close(seen.matrices["down_proj"], shrunk(h.T @ h, seen.noise["down_proj"]))
    block(x)
    torch.testing.assert_close(seen.matrices["gate_up_proj"], shrunk(x.T @ x, seen.noise["gate_up_proj"]))


@pytest.mark.parametrize(
    "tokens, loud", [(40, 1.0), (400, 1.0), (400, 1e3)], ids=["40 tokens", "400", "400, a loud input"]
)
def test_the_noise_is_that_of_the_sum(tokens, loud):
    """Inputs with one true correlation: the share of noise in the off-diagonal elements, known here, is what is found,
    and shrinking by it comes closer to the truth."""
    generator = torch.Generator().manual_seed(0)
    k, truth = 24, torch.eye(24) + 0.1 * (1 - torch.eye(24))
    factor = torch.linalg.cholesky(truth)
    linear = nn.Linear(k, 1)
    found, known, closer = [], [], 0
    for _ in range(20):
        with MomentObserver(nn.ModuleDict({"l": linear}), {"l": ["l"]}) as seen:
            samples = [torch.randn(1, tokens // 4, k, generator=generator) @ factor.T for _ in range(4)]
            for x in samples:
                linear(torch.cat([x[..., :1] * loud, x[..., 1:]], -1))
        h, x = seen.matrices["l"] / tokens, torch.cat(samples, 1)[0]
        error, plain = x.T @ x / tokens - truth, x.T @ x / tokens
        off = 1 - torch.eye(k)
        known.append(float((error * off).square().sum() / (plain * off).square().sum()))
        found.append(seen.noise["l"])
        inner = h[1:, 1:] - truth[1:, 1:]
        closer += int((inner * off[1:, 1:]).norm() < (error[1:, 1:] * off[1:, 1:]).norm())
    assert sum(found) == pytest.approx(sum(known), rel=0.25)
    assert closer >= 14


def test_one_sample_alone_tells_nothing_about_noise_and_equal_ones_show_none(block):
    x = torch.randn(1, 5, 8)
    for times in (1, 2):
        with MomentObserver(block, GROUPS) as seen:
            for _ in range(times):
                block(x)
        assert seen.noise["gate_up_proj"] == pytest.approx(0.0, abs=1e-12)
        torch.testing.assert_close(seen.matrices["gate_up_proj"], times * x[0].T @ x[0])


def test_weighted_moments_follow_the_order_of_tokens(block):
    samples, w = [torch.randn(1, t, 8) for t in (5, 3)], torch.rand(8)
    with MomentObserver(block, GROUPS, {"gate_up_proj": w, "down_proj": torch.ones(8)}) as seen:
        for x in samples:
            block(x)
    x = torch.cat(samples, 1)[0]
    expected = (x * (w / w.mean())[:, None]).T @ x
    torch.testing.assert_close(seen.matrices["gate_up_proj"], shrunk(expected, seen.noise["gate_up_proj"]))


def weights_of(model, groups, *samples):
    """Each sample is what runs it forward and backward. key -> [weights of a sample, ...], and the inputs likewise."""
    weights, inputs = {}, {}

    def use(key, x, weight):
        weights.setdefault(key, []).append(weight)
        inputs.setdefault(key, []).append(x)

    with TokenWeights(model, groups, use) as watch:
        for sample in samples:
            sample()
            watch.flush()
    return weights, inputs


def test_token_weights_are_squared_gradient_norms_tempered(block):
    x = torch.randn(1, 6, 8, requires_grad=True)
    weights, inputs = weights_of(block, GROUPS, lambda: block(x).square().sum().backward())
    assert torch.equal(inputs["gate_up_proj"][0], x[0])
    got, y = {key: found[0] for key, found in weights.items()}, block(x)
    gate, up = block.gate_proj(x), block.up_proj(x)
    for tensor in (gate, up):
        tensor.retain_grad()
    block.down_proj(torch.sigmoid(gate) * up).square().sum().backward()
    norms = (gate.grad.square().sum(-1) + up.grad.square().sum(-1))[0]
    torch.testing.assert_close(got["gate_up_proj"], norms**TEMPER)
    torch.testing.assert_close(got["down_proj"], (2 * y[0]).square().sum(-1).detach() ** TEMPER)


@pytest.mark.parametrize("before", [False, True], ids=["in the first sample", "later"])
def test_one_loud_token_does_not_drown_the_others(block, before):
    """It counts for at most MOST_WEIGHT times the mean of what came before and with it."""

    def run(loud):
        y = block(torch.randn(1, 400, 8, requires_grad=True))
        (y.sum() + (y[0, 0] * loud).sum()).backward()

    found = weights_of(block, GROUPS, *([lambda: run(0.0)] if before else []), lambda: run(1e6))[0]["down_proj"]
    everything = torch.cat(found)
    assert found[-1][0] == everything.max() <= 1.1 * MOST_WEIGHT * everything.mean()


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 1, 5, 8)], ids=["tokens", "tokens of one head, as in MLA"])
def test_samples_that_pass_together_are_told_apart(block, shape):
    samples = torch.randn(3, 1, 5, 8, requires_grad=True)
    apart = weights_of(block, GROUPS, *(lambda x=x: block(x).square().sum().backward() for x in samples))
    together = weights_of(block, GROUPS, lambda: block(samples.view(shape)).square().sum().backward())
    for one, other in zip(apart, together, strict=True):
        for key, found in one.items():
            torch.testing.assert_close(found, other[key])


def test_linears_without_a_gradient_leave_the_weights_to_their_siblings(block):
    x = torch.randn(1, 6, 8, requires_grad=True)

    def run():
        block.gate_proj(x).square().sum().backward()
        block.up_proj(x)

    weights, _ = weights_of(block, GROUPS, run, run)
    assert set(weights) == {"gate_up_proj"} and len(weights["gate_up_proj"]) == 2
    norms = (2 * block.gate_proj(x)[0]).square().sum(-1).detach()
    torch.testing.assert_close(weights["gate_up_proj"][1], norms**TEMPER)


def test_nan_gradients_are_named(block):
    x = torch.randn(1, 2, 8, requires_grad=True)
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        weights_of(block, GROUPS, lambda: (block(x) * torch.nan).sum().backward())


def test_fisher_gradient_has_the_fishers_expectation():
    """E[(softmax - onehot)^2 summed] = 1 - sum p^2, over tokens drawn from p."""
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(20_000, 1).requires_grad_(True)
    fisher_backward(logits, torch.Generator().manual_seed(0))
    p = logits.detach()[0].softmax(-1)
    assert abs(logits.grad.square().sum(-1).mean() - (1 - p.square().sum())) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_drawn_as_often_as_the_model_says(dtype):
    """A vocabulary that is no whole number of runs, and a likely token in each run but one."""
    p = torch.rand(700, generator=torch.Generator().manual_seed(1)) * 1e-3
    p[[0, 255, 511, 699]] = torch.tensor([0.1, 0.2, 0.05, 0.3])
    p[512:600] = 0
    logits = p.log().to(dtype).expand(20_000, -1).clone().requires_grad_(True)
    fisher_backward(logits, torch.Generator().manual_seed(0))
    drawn = (logits.grad < -0.5).float()
    assert (drawn.sum(-1) == 1).all()
    torch.testing.assert_close(drawn.mean(0), p / p.sum(), atol=0.01, rtol=0)
    assert drawn[:, 512:600].sum() == 0


class Experts(nn.Module):
    """Two experts as slices of one stack; `masked` multiplies every expert with every token, zeros for others'."""

    def __init__(self, masked):
        super().__init__()
        self.up_proj, self.masked = nn.Parameter(torch.randn(3, 5, 8)), masked

    def forward(self, x, expert):
        if self.masked:
            routed = torch.stack([x * (expert == e)[:, None] for e in range(3)])
            return torch.bmm(routed, self.up_proj.mT).sum(0)
        out = x.new_zeros(len(x), 5)
        for e in range(3):
            if (expert == e).any():
                out[expert == e] = nn.functional.linear(x[expert == e], self.up_proj[e])
        return out


@pytest.mark.parametrize("masked", [False, True], ids=["one by one", "masked"])
def test_experts_see_the_tokens_routed_to_them(masked):
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts(masked)})
    x, expert = torch.randn(10, 8, requires_grad=True), torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 1])
    groups = {f"experts.{e}.up_proj": [f"experts.{e}.up_proj"] for e in range(3)}
    weights, _ = weights_of(model, groups, lambda: model["experts"](x, expert).square().sum().backward())
    w = {key: found[0] for key, found in weights.items()}
    assert set(w) == {"experts.0.up_proj", "experts.1.up_proj"}
    with MomentObserver(model, groups, w) as seen:
        model["experts"](x, expert)
    for e in (0, 1):
        key, rows = f"experts.{e}.up_proj", x.detach()[expert == e]
        norms = (2 * rows @ model["experts"].up_proj[e].detach().T).square().sum(-1) ** TEMPER
        torch.testing.assert_close(w[key], norms)
        torch.testing.assert_close(seen.matrices[key], (rows * (norms / norms.mean())[:, None]).T @ rows)
    assert seen.tokens == {"experts.0.up_proj": 3, "experts.1.up_proj": 7, "experts.2.up_proj": 0}
    assert "experts.2.up_proj" not in seen.matrices


def test_fast_products_end_with_the_block():
    x = torch.randn(64, 64)
    exact = x @ x
    with fast_products():
        torch.testing.assert_close(x @ x, exact, rtol=0.05, atol=0.2)
    assert torch.equal(x @ x, exact)


@pytest.mark.parametrize("units", [True, False])
def test_fast_arithmetic_ends_with_the_block(block, monkeypatch, units):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    block.register_buffer("positions", torch.randn(3, 8))
    block.register_buffer("frequencies", torch.randn(3))
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(KeyError), fast_arithmetic(block):
        assert {p.dtype for p in block.parameters()} == {torch.bfloat16 if units else torch.float32}
        assert block.positions.dtype == block.gate_proj.weight.dtype and block.frequencies.dtype == torch.float32
        raise KeyError
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
