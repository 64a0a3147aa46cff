"""What the activation `auto` of a fine-tune stands for, on a CPU that pretends to have FP8 tensor cores."""

import pytest
import torch

import octavo
from octavo import Recipe
from octavo.formats.granularity import PerRow
from octavo.integrations import fast_path, survey
from octavo.integrations.fast_path import choose_activation
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.ops.backends import Backend
from octavo.testing import assert_sqnr
from tests.integrations.test_fused import adapted, build


@pytest.fixture
def tensor_cores(monkeypatch):
    def refuse(problem, caps):
        wanted = "group128" if problem.tile == (128, 128) else "token"
        if problem.activation != wanted:
            return f"{wanted}, not {problem.activation}"
        return "rows of multiples of 128" if wanted == "group128" and problem.k % 128 else None

    monkeypatch.setattr(survey, "BACKENDS", {"native": Backend("native", refuse, "octavo.ops.native")})


def activations(model):
    return {module.activation for module in model.modules() if isinstance(module, FrozenFloat8Linear)}


def test_fp8_products_where_the_layers_are_known(tensor_cores):
    model = build(activation="none")
    chosen = choose_activation(model)
    assert chosen.activation == "token" and activations(model) == {"token"}
    assert chosen.reason == "14 of 14 FP8 linears multiply in FP8, forward and backward"


def test_a_cpu_says_what_it_lacks():
    model = build()
    chosen = choose_activation(model)
    assert chosen.activation == "none" and activations(model) == {"none"}
    assert chosen.reason.startswith("needs a CUDA device of sm89 or later, this is cpu")


def test_a_decoder_that_is_not_known(tensor_cores):
    assert choose_activation(build("olmo2")).reason == "decoder 'olmo2' runs layer by layer"


def test_dropout_of_the_adapters(tensor_cores):
    assert choose_activation(build(dropout=0.1)).reason.startswith("14 of 14")
    assert choose_activation(build(dropout=1.0)).reason == "adapters or hooks of Linear"


def test_power_of_two_blocks_become_rows(tensor_cores, tiny_llama_128):
    """Where that gives products of rows, also on resuming; a fine-tune that keeps 16-bit inputs leaves them alone."""

    def build():
        recipe = Recipe.named("block128", activation="none", scale_format="po2")
        return adapted(octavo.load(tiny_llama_128, recipe, device="cpu"), ["q_proj"])

    def linears(model):
        return [module for module in model.modules() if isinstance(module, FrozenFloat8Linear)]

    before, after, again, left = (build() for _ in range(4))
    assert choose_activation(after).activation == "token"
    choose_activation(again, fast_path.Chosen("token", "as the run began"))
    choose_activation(left, fast_path.Chosen("none", "as the run began"))
    for old, new, same, kept in zip(*map(linears, (before, after, again, left)), strict=True):
        assert new.rule.granularity == same.rule.granularity == PerRow() and kept.rule == old.rule
        assert_sqnr(new.dequantize(), old.dequantize().double(), 45.0)
        assert torch.equal(new.weight, same.weight)


def test_scales_in_blocks_take_groups(tensor_cores, tiny_llama, tiny_llama_128):
    whole, ragged = (
        adapted(octavo.load(folder, Recipe.named("block128", activation="none"), device="cpu"), ["q_proj"])
        for folder in (tiny_llama_128, tiny_llama)
    )
    assert choose_activation(whole).activation == "group128" and activations(whole) == {"group128"}
    chosen = choose_activation(ragged)
    assert (chosen.activation, chosen.reason) == ("none", "rows of multiples of 128")


def test_experts_outnumber_the_attention(tensor_cores, tiny_moe):
    model = octavo.load(tiny_moe, Recipe.named("channel", activation="none"), device="cpu")
    chosen = choose_activation(adapted(model, ["q_proj", "v_proj"]))
    assert (chosen.activation, chosen.reason) == ("none", "experts run one by one")


def test_layers_in_16_bit_are_no_matter_while_they_are_few(tensor_cores):
    model = build(activation="none")
    attention = model.base_model.model.model.layers[0].self_attn
    attention.o_proj.base_layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    assert choose_activation(model).reason.startswith("13 of 13")
