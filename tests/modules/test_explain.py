"""explain: every FP8 layer, like ones together, for a GPU that is not here."""

import pytest
import torch
from torch import nn

import octavo
from octavo import FrozenFloat8Linear, PerBlock, Rule
from octavo.base.errors import ConfigError
from octavo.modules.experts import FrozenFloat8Experts


@pytest.fixture
def model():
    found = nn.ModuleDict(
        {
            name: FrozenFloat8Linear(512, 256, rule=Rule(granularity=tile), dtype=torch.bfloat16)
            for name, tile in (("q", octavo.PerRow()), ("k", octavo.PerRow()), ("v", PerBlock(128, 128)))
        }
    )
    found["experts"] = FrozenFloat8Experts(4, 128, 64, nn.SiLU(), activation="token")
    found["head"] = nn.Linear(512, 10)
    return found


def test_groups_and_kernels(model):
    found = octavo.explain(model, (1, 64), gpu="h100")
    assert [layer.names for layer in found.layers] == [("q", "k"), ("v",), ("experts.gate_up",), ("experts.down",)]
    assert found.sixteen_bit == ("head",)
    few, some = found.layers[0].choices
    assert (few.problem.m, some.problem.m, few.backend, few.problem.n) == (1, 64, "w8a16", 256)
    assert few.kernel != some.kernel and dict(few.refused)["native"]
    assert {choice.backend for choice in found.layers[2].choices} == {"native"}
    text = str(found)
    assert "2 x k, q" in text and few.kernel in text and "1 linears in 16 bit: torch" in text


def test_here_and_elsewhere(model):
    assert {c.backend for layer in octavo.explain(model).layers for c in layer.choices} == {"cpu"}
    ampere = octavo.explain(model, (1,), gpu="a100").layers
    assert [layer.choices[0].backend for layer in ampere] == ["w8a16", "w8a16", "dequant", "dequant"]
    with pytest.raises(ConfigError):
        octavo.explain(model, gpu="h1000")
