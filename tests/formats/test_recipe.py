import pytest

from octavo.base.errors import ConfigError
from octavo.formats.architectures import fused_group, layer_index, role
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.recipe import Recipe, matches
from octavo.formats.rule import Rule

L = "model.layers.0"
LLAMA = {
    "model.embed_tokens.weight": (512, 256),
    f"{L}.self_attn.q_proj.weight": (256, 256),
    f"{L}.self_attn.k_proj.weight": (128, 256),
    f"{L}.self_attn.v_proj.weight": (128, 256),
    f"{L}.self_attn.o_proj.weight": (256, 256),
    f"{L}.mlp.gate_proj.weight": (384, 256),
    f"{L}.mlp.up_proj.weight": (384, 256),
    f"{L}.mlp.down_proj.weight": (256, 384),
    f"{L}.input_layernorm.weight": (256,),
    "lm_head.weight": (512, 256),
}


def quantized(assignments):
    return {m for m, a in assignments.items() if a.rule}


def linears():
    return {n.removesuffix(".weight") for n in LLAMA if "_proj" in n}


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("lm_head.weight", (9, 9), "head"),
        ("model.embed_tokens.weight", (9, 9), "embedding"),
        ("transformer.wte.weight", (9, 9), "embedding"),
        ("backbone.embeddings.weight", (9, 9), "embedding"),
        ("transformer.word_embeddings_layernorm.weight", (9,), "norm"),
        ("head.weight", (9, 9), "head"),
        ("model.layers.3.input_layernorm.weight", (9,), "norm"),
        ("model.layers.3.self_attn.q_norm.weight", (9,), "norm"),
        ("model.layers.3.self_attn.q_proj.weight", (9, 9), "linear"),
        ("model.layers.3.self_attn.q_proj.bias", (9,), "other"),
        ("model.layers.3.mlp.gate.weight", (4, 9), "router"),
        ("model.layers.3.block_sparse_moe.gate.weight", (4, 9), "router"),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 9), "router"),
        ("model.layers.3.mlp.router.weight", (4, 9), "router"),
        ("model.layers.3.block_sparse_moe.router.layer.weight", (4, 9), "router"),
        ("model.layers.3.mlp.gate_proj.weight", (9, 9), "linear"),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (9, 9), "expert"),
        ("model.layers.3.mlp.experts.gate_up_proj", (4, 9, 9), "expert"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", (9, 9), "linear"),
        ("model.visual.blocks.0.attn.qkv.weight", (9, 9), "tower"),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", (9, 9), "tower"),
        ("model.multi_modal_projector.linear_1.weight", (9, 9), "tower"),
        ("model.layers.4.self_attn.q_proj.weight", (9, 9), "mtp"),
        ("mtp.layers.0.self_attn.q_proj.weight", (9, 9), "mtp"),
        ("backbone.layers.0.mixer.conv1d.weight", (9, 1, 4), "other"),
        ("backbone.layers.0.mixer.A_log", (9,), "other"),
        ("backbone.layers.0.mixer.dt_proj.weight", (9, 9), "other"),
        ("model.layers.0.self_attn.indexer.weights_proj.weight", (9, 9), "router"),
        ("model.layers.0.self_attn.qkv_proj.lora_A.vision.weight", (9, 9), "other"),
        ("model.embed_tokens_per_layer.weight", (9, 9), "embedding"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (9, 9), "linear"),
        ("score.weight", (9, 9), "head"),
    ],
)
def test_roles(name, shape, want):
    assert role(name, shape, layers=4) == want


def test_fused_group():
    assert fused_group("a.k_proj") == ("a.qkv_proj", ("a.q_proj", "a.k_proj", "a.v_proj"))
    assert fused_group("up_proj") == ("gate_up_proj", ("gate_proj", "up_proj"))
    assert fused_group("a.o_proj") is None
    assert layer_index("model.visual.layers.3.x") is None and layer_index("model.layers.12.x") == 12


@pytest.mark.parametrize("layout", [None, "ct", "native"])
@pytest.mark.parametrize("scheme", ["channel", "block128", "tensor"])
def test_the_plain_case_quantizes_every_linear(scheme, layout):
    got = Recipe.named(scheme).assign(LLAMA, layout=layout, layers=1)
    assert quantized(got) == linears()
    assert all(a.rule == Recipe.named(scheme).rule for a in got.values() if a.rule)


def test_skipping_one_shard_keeps_all_of_them():
    for pattern in (f"{L}.self_attn.k_proj", "*k_proj", r"re:.*\.k_proj$"):
        got = Recipe.named("channel", skip=(pattern,)).assign(LLAMA, layers=1)
        assert linears() - quantized(got) == {f"{L}.self_attn.{p}_proj" for p in "qkv"}
    assert "fuse" in got[f"{L}.self_attn.q_proj"].reason and "skipped" in got[f"{L}.self_attn.k_proj"].reason


@pytest.mark.parametrize("layout", [None, "ct", "native"])
def test_a_skipped_first_shard_keeps_the_others_in_a_file_too(layout):
    got = Recipe.named("block128", skip=("*q_proj",)).assign(LLAMA, layers=1, layout=layout)
    assert linears() - quantized(got) == {f"{L}.self_attn.{p}_proj" for p in "qkv"}


EXPERTS = {
    f"{L}.mlp.experts.{e}.{p}.weight": (256, 320) if p == "down_proj" else (320, 256)
    for e in range(3)
    for p in ("gate_proj", "up_proj", "down_proj")
}


def test_experts_of_a_layer_share_one_rule():
    """K of down_proj is ragged: all nine matrices fall back together, since engines look at the first expert only."""
    shapes = {**LLAMA, **EXPERTS}
    got = Recipe.named("block128").assign(shapes, layout="ct", layers=1)
    experts = {m: a for m, a in got.items() if ".experts." in m}
    assert {a.rule.granularity for a in experts.values()} == {PerRow()}
    assert got[f"{L}.mlp.down_proj"].rule.granularity == PerBlock()
    native = Recipe.named("block128").assign(shapes, layout="native", layers=1)
    assert not any(a.rule for m, a in native.items() if ".experts." in m)


def test_one_skipped_expert_keeps_its_layer():
    got = Recipe.named("channel", skip=("*.experts.1.up_proj",)).assign({**LLAMA, **EXPERTS}, layers=1)
    assert not any(a.rule for m, a in got.items() if ".experts." in m)
    assert "all experts" in got[f"{L}.mlp.experts.2.down_proj"].reason


FUSED_SHAPES = {f"{L}.self_attn.qkv_proj.weight": (512, 256), f"{L}.mlp.gate_up_proj.weight": (768, 256)}


@pytest.mark.parametrize(
    ("config", "qkv"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}, PerBlock()),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}, PerBlock()),
        ({"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64}, PerRow()),
        ({}, PerRow()),
    ],
    ids=["whole-blocks", "from-hidden-size", "half-a-block", "unknown"],
)
def test_matrices_fused_on_disk(config, qkv):
    got = Recipe.named("block128").assign(FUSED_SHAPES, layout="ct", config=config)
    assert got[f"{L}.self_attn.qkv_proj"].rule.granularity == qkv
    assert got[f"{L}.mlp.gate_up_proj"].rule.granularity == PerBlock()


@pytest.mark.parametrize(
    ("name", "shape", "fall"),
    [
        (f"{L}.self_attn.k_proj.weight", (64, 256), {"q_proj", "k_proj", "v_proj"}),  # a fused shard of half a block
        (f"{L}.mlp.down_proj.weight", (256, 320), {"down_proj"}),  # K
        (f"{L}.self_attn.o_proj.weight", (200, 256), set()),  # ragged rows of a module on its own load fine
    ],
)
def test_block_scales_reach_a_file_only_where_engines_take_them(name, shape, fall):
    shapes = {**LLAMA, name: shape}
    recipe = Recipe.named("block128")
    in_memory = recipe.assign(shapes, layers=1)
    assert all(a.rule.granularity == PerBlock() for m, a in in_memory.items() if m in linears())
    ct, native = recipe.assign(shapes, layout="ct", layers=1), recipe.assign(shapes, layout="native", layers=1)
    fallen = {m.rpartition(".")[2] for m, a in ct.items() if a.rule and a.rule.granularity == PerRow()}
    kept = {m.rpartition(".")[2] for m in linears() - quantized(native)}
    assert fallen == kept == fall


def test_overrides_and_names():
    rule = Rule(granularity=PerBlock(64, 64))
    recipe = Recipe(overrides=(("*down_proj", rule), ("*o_proj", None)))
    got = recipe.assign(LLAMA, layers=1)
    assert got[f"{L}.mlp.down_proj"].rule == rule and got[f"{L}.self_attn.o_proj"].rule is None
    assert matches("lm_head", "lm_head") and not matches("o_proj", "a.o_proj") and matches("re:.*o_proj", "a.o_proj")
    assert str(Rule(scale_format="po2", method="mse")) == "e4m3 row po2 mse"


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Recipe.named("chanel"), "channel"),
        (lambda: Recipe(activation="tokens"), "token"),
        (lambda: Rule(method="mean"), "mse"),
        (lambda: Recipe.named("channel", scale_format="pow2"), "po2"),
        (lambda: Rule(rounding="nearst"), "nearest"),
    ],
)
def test_unknown_words_name_the_nearest(make, hint):
    with pytest.raises(ConfigError, match=hint):
        make()


def test_compensated_takes_scales_by_the_hessian_unless_told_otherwise():
    assert Recipe.named("channel", rounding="compensated").rule.method == "hessian"
    assert Recipe.named("channel", rounding="compensated", method="absmax").rule.method == "absmax"
    assert Recipe.named("tensor", rounding="compensated").rule.method == "absmax", "one scale holds all siblings"
    assert Recipe.named("channel", rounding="compensated").rule.rounded("nearest") == Rule()
    assert Recipe.named("channel", rounding="compensated").rule.per(PerTensor()).method == "absmax"
    with pytest.raises(ConfigError, match="moments"):
        Rule(method="hessian")
