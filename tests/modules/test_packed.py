"""PackedLinears against its layers one by one."""

import pytest
import torch
from torch import nn

from octavo.base.errors import UnsupportedError
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.packed import PackedLinears


def linears(*widths, bias=(False, False, False)):
    return [nn.Linear(64, n, bias=b).requires_grad_(False) for n, b in zip(widths, bias, strict=False)]


def frozen(layers, granularity, activation="none"):
    scales = [0.02, 0.03, 0.01] if activation == "static" else [None] * 3
    return [
        FrozenFloat8Linear.from_linear(layer, Rule(granularity=granularity), activation, input_scale=scale)
        for layer, scale in zip(layers, scales, strict=False)
    ]


@pytest.mark.parametrize("bias", [(False, False, False), (True, False, True)], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", [None, PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_same_results_in_shared_memory(kind, bias):
    layers = linears(32, 16, 48, bias=bias)
    layers = layers if kind is None else frozen(layers, kind)
    x = torch.randn(3, 64)
    want = torch.cat([layer(x) for layer in layers], dim=1)
    packed = PackedLinears(layers)
    torch.testing.assert_close(packed(x), want)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=1), want)
    again = PackedLinears(layers)
    assert again.weight.data_ptr() == packed.weight.data_ptr() and torch.equal(again(x), packed(x))
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {
        packed.weight.untyped_storage().data_ptr()
    }


def test_one_layer_alone_and_activations():
    for activation in ("token", "static"):
        layers = frozen(linears(32, 32), PerRow(), activation)
        x = torch.randn(3, 64)
        assert torch.equal(PackedLinears(layers[:1])(x), layers[0](x))
        packed = PackedLinears(layers)
        assert packed.input_scale is None or float(packed.input_scale) == pytest.approx(0.03)
        if activation == "token":
            torch.testing.assert_close(packed(x), torch.cat([layer(x) for layer in layers], dim=1))


def test_what_cannot_be_packed():
    with pytest.raises(UnsupportedError, match="Identity, Linear"):
        PackedLinears([nn.Linear(4, 4), nn.Identity()])
    with pytest.raises(UnsupportedError, match="different schemes"):
        PackedLinears([*frozen(linears(16), PerRow()), *frozen(linears(16), PerTensor())])
    with pytest.raises(UnsupportedError, match="blocks across two"):
        PackedLinears(frozen(linears(24, 32), PerBlock(16, 16)))
