"""Errors of weights and outputs against the oracle."""

import math

import pytest
import torch
from torch import nn

from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.sensitivity import SCHEMES, float_weight, output_error, weight_errors


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def db(actual, expected):
    return float(-10 * ((actual - expected).square().sum() / expected.square().sum()).log10())


def test_weight_errors_of_every_scheme():
    w = gaussian(130, 200)
    (errors,) = weight_errors([w])
    for name, rule in SCHEMES.items():
        q = quantize_ref(w, E4M3, rule.granularity, scale_format=rule.scale_format)
        assert errors[name] == pytest.approx(db(dequantize_ref(q), w), abs=1e-3)
    assert 30.5 < errors["channel"] < 32.5


def test_fused_weights_share_their_tensor_scale():
    small, large = gaussian(16, 32) * 0.011, gaussian(16, 32, seed=1)
    alone, fused = weight_errors([small])[0], weight_errors([small, large])[0]
    common = PerTensor().amax(large) / 448
    want = db(dequantize_ref(quantize_ref(small, E4M3, PerTensor(), scale=common)), small)
    assert fused["tensor"] == pytest.approx(want, abs=1e-3)
    assert fused["tensor"] != alone["tensor"]
    assert fused["channel"] == alone["channel"]


def test_exact_weights_have_no_error():
    assert weight_errors([torch.eye(16)])[0] == dict.fromkeys(SCHEMES, math.inf)


@pytest.mark.parametrize("activation", ["none", "static", "token"])
def test_output_error(activation):
    x, w = gaussian(20, 64), gaussian(32, 64, seed=1)
    scale = float(x.abs().max()) / 448 if activation == "static" else None
    q = {"none": lambda: x, "static": lambda: dequantize_ref(quantize_ref(x, E4M3, PerTensor()))}
    xq = q.get(activation, lambda: dequantize_ref(quantize_ref(x, E4M3, PerRow())))()
    want = db(xq @ dequantize_ref(quantize_ref(w, E4M3, PerRow())).T, x @ w.T)
    assert output_error(x, w, "channel", activation, scale) == pytest.approx(want, abs=1e-2)


def test_weight_of_an_fp8_linear_is_decoded():
    linear = nn.Linear(16, 8)
    frozen = FrozenFloat8Linear.from_linear(linear)
    want = dequantize_ref(quantize_ref(linear.weight.detach(), E4M3, PerRow()))
    assert torch.equal(float_weight(frozen), want)
    assert torch.equal(float_weight(linear), linear.weight.detach())
