"""LoRA over FP8: trains, merges with a number, unmerges bit for bit, saves and loads; stock PEFT never drops it."""

import copy
import math

import peft
import pytest
import torch
from peft import LoraConfig
from torch import nn

from octavo.base.errors import ConfigError, RefusedError, ShapeError
from octavo.formats.granularity import PerBlock, PerTensor
from octavo.formats.rule import Rule
from octavo.integrations.peft import Float8LoraLinear, adapted_layers, get_peft_model, kept, load_adapter, lora_config
from octavo.integrations.transformers import load
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.testing import assert_sqnr


class Net(nn.Module):
    def __init__(self, rule=None, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = FrozenFloat8Linear.from_linear(nn.Linear(48, 80, bias=bias), rule)
        self.o_proj = FrozenFloat8Linear.from_linear(nn.Linear(80, 48, bias=bias), rule)
        self.norm = nn.LayerNorm(48)

    def forward(self, x):
        return self.o_proj(torch.relu(self.q_proj(self.norm(x))))


def config(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})


def randomize(model, size=0.05):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=size)
    return model


def wrapped(rule=None, size=0.05, bias=False, **options):
    return randomize(get_peft_model(Net(rule, bias), config(**options)), size)


def layer(model) -> Float8LoraLinear:
    return model.base_model.model.q_proj


X = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))


def test_experts_that_are_codes_get_no_adapter_and_the_attention_trains(tiny_moe):
    model = load(tiny_moe, "channel", device="cpu", dtype=torch.float32)
    model = get_peft_model(model, lora_config(model, rank=4, alpha=8))
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    ids = torch.tensor([[5, 6, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


def test_only_adapters_train_in_float32():
    model = wrapped(size=0.0)
    assert type(layer(model)) is Float8LoraLinear
    assert sorted(adapted_layers(model)) == ["o_proj", "q_proj"]
    model(X).square().mean().backward()
    trained = {n: p for n, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 4
    assert all("lora_" in n and p.dtype == p.grad.dtype == torch.float32 for n, p in trained.items())
    assert layer(model).base_layer.weight.dtype == torch.uint8


@pytest.mark.parametrize("rule", [Rule(), Rule(granularity=PerBlock(32, 32)), Rule(granularity=PerTensor())], ids=str)
@pytest.mark.parametrize("safe", [False, True], ids=["merge", "safe_merge"])
def test_merge_and_unload_takes_the_adapter_along(rule, safe):
    model = wrapped(rule, size=0.2)
    before = model(X)
    with model.disable_adapter():
        base = model(X)
    merged = model.merge_and_unload(safe_merge=safe)
    assert type(merged.q_proj) is FrozenFloat8Linear
    assert_sqnr(merged(X), before.detach(), 22)
    assert (merged(X) - before).norm() < 0.2 * (before - base).norm()
    assert set(kept(merged)) == {"q_proj", "o_proj"}
    assert all(0.95 < share < 1.05 for share in kept(merged).values())


def test_unmerge_is_exact_and_a_second_merge_starts_from_the_base():
    model = wrapped(size=0.2, bias=True, lora_bias=True)
    lora = layer(model)
    codes, bias = lora.base_layer.weight.clone(), lora.base_layer.bias.clone()
    before = model(X)
    model.merge_adapter()
    once = lora.base_layer.weight.clone()
    assert not torch.equal(once, codes)
    assert_sqnr(model(X), before.detach(), 22)
    model.unmerge_adapter()
    assert torch.equal(lora.base_layer.weight, codes) and torch.equal(lora.base_layer.bias, bias)
    assert lora.kept is None and kept(model) == {}
    torch.testing.assert_close(model(X), before, rtol=0, atol=0)
    model.merge_adapter()
    assert torch.equal(lora.base_layer.weight, once)


@pytest.mark.filterwarnings("ignore:Already following adapters")
def test_two_adapters_merge_as_their_sum():
    model = wrapped(size=0.2)
    model.add_adapter("other", config())
    randomize(model, 0.2)
    lora = layer(model)
    want = lora.base_layer.dequantize(torch.float32) + lora.get_delta_weight("default") + lora.get_delta_weight("other")
    lora.merge(adapter_names=["default"])
    lora.merge(adapter_names=["other"])
    assert_sqnr(lora.base_layer.dequantize(torch.float32), want.detach(), 28)


def test_small_delta_is_reported_lost():
    model = wrapped(size=0.001)
    with pytest.warns(UserWarning, match="lost more than a tenth"):
        model.merge_adapter()
    assert all(share < 0.9 for share in kept(model).values())


def test_rank_stabilised_scaling():
    lora = layer(wrapped(use_rslora=True))
    assert lora.scaling["default"] == 8 / math.sqrt(4)


def test_save_and_load(tmp_path):
    model = wrapped(size=0.2)
    model.save_pretrained(tmp_path)
    again = load_adapter(Net(), tmp_path)
    assert type(layer(again)) is Float8LoraLinear
    torch.testing.assert_close(again(X), model(X))
    assert not any(p.requires_grad for p in again.parameters())
    assert sum(p.requires_grad for p in load_adapter(Net(), tmp_path, trainable=True).parameters()) == 4
    assert_sqnr(again.merge_and_unload()(X), model(X).detach(), 22)


def test_broken_adapter_is_not_merged():
    model = wrapped()
    layer(model).lora_B["default"].weight.data[0, 0] = torch.nan
    codes = layer(model).base_layer.weight.clone()
    with pytest.raises(RefusedError, match="NaN or Inf"):
        model.merge_adapter()
    assert torch.equal(layer(model).base_layer.weight, codes)
    assert not layer(model).merged


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}]
    + [{"init_lora_weights": i} for i in ("pissa", "pissa_niter_4", "olora", "orthogonal", "loftq", "eva", "corda")],
    ids=lambda o: str(next(iter(o.values()))),
)
def test_what_reads_the_weight_is_refused(options):
    wanted = config()
    for name, value in options.items():
        setattr(wanted, name, value)  # not through the constructor, which asks for scipy first for LoftQ
    with pytest.raises(ConfigError, match=r"FP8 codes"):
        get_peft_model(Net(), wanted)


@pytest.mark.parametrize("kind", [peft.LoHaConfig, peft.IA3Config, peft.AdaLoraConfig, peft.PrefixTuningConfig])
def test_other_adapters_are_refused(kind):
    own = {"num_virtual_tokens": 2} if kind is peft.PrefixTuningConfig else {"target_modules": ["q_proj"]}
    own |= (
        {"total_step": 9} if kind is peft.AdaLoraConfig else {"feedforward_modules": []} if "IA3" in str(kind) else {}
    )
    with pytest.raises(ConfigError, match=f"{kind.__name__} over FP8 codes; need a LoraConfig"):
        get_peft_model(Net(), kind(**own))


def test_codes_are_not_trained_as_modules_to_save():
    model = Net()
    with pytest.raises(ConfigError, match="'o_proj'; got FP8 codes"):
        get_peft_model(model, config(target_modules=["q_proj"], modules_to_save=["o_proj"]))
    assert type(model.q_proj) is FrozenFloat8Linear, "nothing has been wrapped"
    assert get_peft_model(model, config(modules_to_save=["norm"])).base_model.model.norm.weight.requires_grad


@pytest.mark.parametrize("safe", [False, True], ids=["merge", "safe_merge"])
@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter"])
def test_stock_peft_refuses_to_merge(how, safe):
    model = randomize(peft.get_peft_model(Net(), config()), 0.2)
    assert type(layer(model)) is peft.tuners.lora.Linear
    before, codes = model(X), layer(model).base_layer.weight.clone()
    with pytest.raises(RefusedError, match="would lose the adapter"):
        getattr(model, how)(safe_merge=safe)
    assert torch.equal(layer(model).base_layer.weight, codes)
    torch.testing.assert_close(model(X), before, rtol=0, atol=0)
    assert isinstance(model.unload().q_proj, FrozenFloat8Linear)


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}] + [{"init_lora_weights": i} for i in ("pissa", "olora", "orthogonal")],
    ids=lambda o: str(next(iter(o.values()))),
)
def test_stock_peft_does_not_read_codes(options):
    with pytest.raises(RefusedError, match="reads the FP8 codes"):
        peft.get_peft_model(Net(), config(**options))


def test_the_guard_leaves_the_layer_a_plain_linear():
    linear = FrozenFloat8Linear(4, 3)
    assert not hasattr(linear, "base_layer")
    assert not hasattr(copy.deepcopy(linear), "base_layer")
    with pytest.raises(AttributeError, match="base_layer"):
        _ = linear.base_layer


def test_load_scaled_copies_and_checks():
    layer, other = FrozenFloat8Linear.from_linear(nn.Linear(8, 4)), FrozenFloat8Linear.from_linear(nn.Linear(8, 4))
    codes = layer.weight
    layer.load_scaled(other.scaled())
    assert layer.weight is codes and torch.equal(codes, other.weight)
    assert torch.equal(layer.weight_scale, other.weight_scale)
    with pytest.raises(ShapeError, match="load_scaled"):
        layer.load_scaled(FrozenFloat8Linear(8, 5).scaled())
