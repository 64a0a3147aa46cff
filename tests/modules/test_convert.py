"""convert: which layers are replaced, by what."""

import pytest
import torch
from torch import nn

from octavo import FrozenFloat8Linear, PerRow, PerTensor, Recipe, Rule, convert
from octavo.base.errors import ConfigError
from octavo.modules.convert import assignments


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(48, 48), nn.Linear(48, 16), nn.Linear(48, 16)
        self.o_proj = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x)[..., :16] * self.k_proj(x) + self.v_proj(x))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(30, 48)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(48)
        self.lm_head = nn.Linear(48, 30, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tiny()


def kinds(model):
    return {name for name, module in model.named_modules() if isinstance(module, FrozenFloat8Linear)}


EVERY = {f"layers.{i}.{p}" for i in (0, 1) for p in ("q_proj", "k_proj", "v_proj", "o_proj")}


@pytest.mark.parametrize("preset", ["channel", "block128", "tensor"])
def test_presets(model, preset):
    tokens = torch.arange(20)[None]
    want = model(tokens)
    assert convert(model, preset, activation="none") is model
    assert kinds(model) == EVERY and type(model.lm_head) is nn.Linear
    found = model(tokens)
    assert 0 < (found - want).norm() / want.norm() < 0.05
    found.sum().backward()
    assert model.norm.weight.grad is not None


def test_skip_and_overrides(model):
    recipe = Recipe.named("channel", skip=("layers.0.*",))
    recipe = Recipe("mine", recipe.rule, "token", recipe.skip, (("*.o_proj", Rule(granularity=PerTensor())),))
    convert(model, recipe)
    assert kinds(model) == {name for name in EVERY if name.startswith("layers.1")}
    assert model.layers[1].o_proj.rule.granularity == PerTensor()
    assert model.layers[1].q_proj.rule.granularity == PerRow()
    assert model.layers[1].q_proj.activation == "token"


def test_fused_siblings_share_one_scale_per_tensor(model):
    weights = [getattr(model.layers[0], p).weight.detach() for p in ("q_proj", "k_proj", "v_proj")]
    convert(model, "tensor")
    scales = {float(getattr(model.layers[0], p).weight_scale) for p in ("q_proj", "k_proj", "v_proj")}
    largest = torch.stack([w.abs().max() for w in weights]).max()
    assert scales == {float(largest / 448)}
    assert float(model.layers[0].o_proj.weight_scale) not in scales


def test_static_needs_a_scale_for_every_layer(model):
    with pytest.raises(ConfigError, match=r"no input scale for layers.0.q_proj and 7 more"):
        convert(model, "channel", activation="static")
    assert not kinds(model), "nothing may be half converted"
    convert(model, "channel", activation="static", input_scales=dict.fromkeys(EVERY, 0.02))
    assert float(model.layers[1].o_proj.input_scale) == pytest.approx(0.02)


def test_shared_weights_stay(model):
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    decisions = assignments(model, Recipe.named("channel"))
    assert decisions["layers.0.q_proj"].reason == "shares its weight with layers.1.q_proj"
    assert decisions["lm_head"].rule is None
    convert(model, "channel")
    assert "layers.0.q_proj" not in kinds(model) and "layers.0.k_proj" in kinds(model)


def test_nothing_to_take_is_an_error(model):
    with pytest.raises(ConfigError, match="none taken by 'channel'"):
        convert(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match="scheme 'chanel' is unknown"):
        convert(model, "chanel")
