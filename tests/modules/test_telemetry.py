"""Telemetry counts what the quantizer does, and costs nothing when off."""

import pytest
import torch
from torch import nn

from octavo import Float8Linear, FrozenFloat8Linear
from octavo.base.errors import ConfigError
from octavo.formats.granularity import PerTensor
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3
from octavo.modules.telemetry import Telemetry, count_input


def frozen(activation, input_scale=None):
    return FrozenFloat8Linear.from_linear(nn.Linear(8, 4), activation=activation, input_scale=input_scale)


def test_counts_agree_with_the_codes():
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.exp2(torch.randint(-20, 6, (50, 64)).float())
    scale = torch.tensor(0.02)
    values, saturated, underflowed, nonfinite, amax = count_input(x, "static", scale).tolist()
    codes = quantize_ref(x, E4M3, PerTensor(), scale=scale).codes & 0x7F
    assert (values, nonfinite, amax) == (3200, 0, float(x.abs().max()))
    assert underflowed == int(((codes == 0) & (x != 0)).sum()) > 0
    assert saturated == int((x.abs() > 448 * scale).sum()) > 0
    assert saturated <= int((codes == 0x7E).sum())


@pytest.mark.parametrize("activation", ["token", "group128"])
def test_dynamic_scales_never_saturate(activation):
    x = torch.randn(5, 300)
    x[0, 0], x[1, 1], x[2] = float("inf"), float("nan"), 0
    _, saturated, _, nonfinite, _ = count_input(x, activation).tolist()
    assert (saturated, nonfinite) == (0, 2)


def test_hooks_count_every_nth_call_and_go():
    model = nn.Sequential(frozen("static", 0.01), nn.ReLU(), Float8Linear(4, 4), frozen("none"))
    model = model[:3]
    with Telemetry(model, every=2) as telemetry:
        for _ in range(5):
            model(torch.full((3, 8), 100.0))
        health = telemetry.read()
    assert list(health) == ["0", "2"]
    assert (health["0"].values, health["0"].saturated, health["0"].amax) == (3 * 24, 3 * 24, 100.0)
    assert health["0"].saturation == 1.0 and health["0"].underflow == 0.0 and health["2"].values == 3 * 12
    model(torch.ones(3, 8))
    assert telemetry.read() == health, "closed: nothing more is counted"
    assert not any(module._forward_pre_hooks for module in model.modules())
    telemetry.reset()
    assert telemetry.read() == {}


def test_empty_batches_and_compiled_calls_are_left_alone():
    torch._dynamo.reset()
    model = nn.Sequential(frozen("token"))
    with Telemetry(model, every=1) as telemetry:
        model(torch.ones(0, 8))
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.ones(2, 8))
        assert telemetry.read() == {}


def test_refusals():
    with pytest.raises(ConfigError, match="no FP8 layer that quantizes its input"):
        Telemetry(nn.Sequential(nn.Linear(2, 2), frozen("none")))
    with pytest.raises(ConfigError, match="every"):
        Telemetry(frozen("token"), every=0)
