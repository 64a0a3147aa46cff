"""What is written validates with compressed_tensors' own models, and is read back as it was meant."""

import itertools

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.recipe import Recipe
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3, E5M2
from octavo.store import schema
from octavo.store.tensors import Checkpoint
from tests.store.conftest import CONFIG, gaussian, write_checkpoint

SHAPES = {
    "model.embed_tokens.weight": (512, 256),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.self_attn.k_proj.weight": (64, 256),
    "model.layers.0.self_attn.v_proj.weight": (64, 256),
    "model.layers.0.self_attn.o_proj.weight": (256, 256),
    "model.layers.0.mlp.gate.weight": (8, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.visual.blocks.0.attn.qkv.weight": (288, 96),
    "model.visual.blocks.0.norm1.weight": (96,),
    "lm_head.weight": (512, 256),
}
ATTENTION = "model.layers.0.self_attn."


def config_of(recipe, layout):
    assignments = recipe.assign(SHAPES, layout=layout)
    return schema.to_quantization_config(assignments, recipe, layout, shapes=SHAPES)


ALLOWED = [(s, a) for s in ("channel", "tensor") for a in ("token", "static", "none")] + [
    ("block128", "group128"),
    ("block128", "none"),
]


@pytest.mark.parametrize(("scheme", "activation"), ALLOWED)
def test_ct_validates_with_its_own_models(scheme, activation):
    recipe = Recipe.named(scheme, activation=activation)
    config = config_of(recipe, "ct")
    schema.validate_ct(config)
    stored = schema.parse_quantization_config({"quantization_config": config})
    group = stored.group_of(f"{ATTENTION}o_proj")
    assert (stored.layout, group.granularity, group.activation) == ("ct", recipe.rule.granularity, activation)
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs is None) == (activation == "none")


def test_block_fallback_is_a_group_by_name():
    config = config_of(Recipe.named("block128"), "ct")
    schema.validate_ct(config)
    groups = config["config_groups"]
    assert groups["group_0"]["targets"] == [r"re:(?:.*\.)?layers\.0\.self_attn\.(?:qkv_proj|q_proj|k_proj|v_proj)$"]
    assert groups["group_0"]["weights"]["strategy"] == "channel"
    assert groups["group_0"]["input_activations"]["strategy"] == "token"
    assert groups["group_1"]["targets"] == ["Linear"]
    stored = schema.parse_quantization_config(config)
    assert stored.group_of(f"{ATTENTION}k_proj").granularity == PerRow()
    assert stored.group_of(f"{ATTENTION}o_proj").granularity == PerBlock(128, 128)


def test_compressed_tensors_finds_every_named_target(caplog):
    """What it does to a model in Transformers: the right scheme for each linear, and no warning about a name."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = torch.nn.Module()
    model.k_proj, model.o_proj = torch.nn.Linear(256, 64), torch.nn.Linear(256, 256)
    recipe = Recipe.named("block128")
    shapes = {"q_proj.weight": (256, 256), "k_proj.weight": (64, 256), "o_proj.weight": (256, 256)}
    config = schema.to_quantization_config(recipe.assign(shapes, layout="ct"), recipe, "ct", shapes=shapes)
    with caplog.at_level("WARNING"):
        apply_quantization_config(model, QuantizationConfig.model_validate(config), show_progress=False)
    assert model.k_proj.quantization_scheme.weights.strategy == "channel"
    assert model.o_proj.quantization_scheme.weights.strategy == "block"
    assert "Could not match" not in caplog.text.replace("Could not match `lm_head`", "")


def test_compressed_tensors_prefers_names_to_classes():
    """The second group works only because a full name outranks `Linear` in the library that reads it."""
    from compressed_tensors.utils.match import match_targets

    linear = torch.nn.Linear(2, 2)
    assert match_targets("a.k_proj", linear, ["Linear", "a.k_proj"])[0] == "a.k_proj"


def test_validate_names_the_complaint():
    config = config_of(Recipe.named("channel"), "ct")
    config["config_groups"]["group_0"]["weights"]["colour"] = "blue"
    with pytest.raises(ConfigError, match="colour"):
        schema.validate_ct(config)


@pytest.mark.parametrize(
    ("scheme", "activation", "block", "mode"),
    [
        ("block128", "group128", [128, 128], "dynamic"),
        ("tensor", "token", None, "dynamic"),
        ("tensor", "static", None, "static"),
    ],
)
def test_native(scheme, activation, block, mode):
    recipe = Recipe.named(scheme, activation=activation)
    config = config_of(recipe, "native")
    assert config["quant_method"] == "fp8"
    assert config["activation_scheme"] == mode
    assert config["weight_block_size"] == block
    stored = schema.parse_quantization_config(config)
    assert stored.groups[0].granularity == recipe.rule.granularity
    assert stored.groups[0].activation == activation
    if scheme == "block128":
        assert f"{ATTENTION}k_proj" in config["modules_to_not_convert"]


def test_skip_list_has_full_names_in_every_spelling():
    config = config_of(Recipe.named("channel", skip=("*.o_proj",)), "ct")
    assert config["ignore"] == sorted(
        [
            "lm_head",
            f"{ATTENTION}o_proj",
            "model.layers.0.mlp.gate",
            "model.visual.blocks.0.attn.qkv",
            "visual.blocks.0.attn.qkv",
        ]
    )


def test_skip_list_names_a_tied_head_that_has_no_tensor():
    shapes = {k: v for k, v in SHAPES.items() if k != "lm_head.weight"}
    assert "lm_head" in schema.skip_list(Recipe.named("channel").assign(shapes), shapes)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("model.layers.0.mlp.gate", set()),
        ("language_model.model.layers.0.a", {"model.language_model.layers.0.a", "model.layers.0.a"}),
        ("model.language_model.layers.0.a", {"language_model.model.layers.0.a", "model.layers.0.a"}),
        ("language_model.lm_head", {"lm_head"}),
        ("visual.merger.mlp.0", {"model.visual.merger.mlp.0"}),
        ("model.vision_tower.x", {"vision_tower.x"}),
    ],
)
def test_spellings(name, others):
    assert schema.spellings(name) == {name} | others


REFUSED = [
    ("channel", "native", {}, "one scale per channel"),
    ("block128", "native", {"activation": "none"}, "weight-only"),
    ("block128", "ct", {"activation": "static"}, "activation mode 'static'"),
    ("block128", "ct", {"activation": "token"}, "activation mode 'token'"),
    ("channel", "ct", {"activation": "group128"}, "activation mode 'group128'"),
    ("channel", "parquet", {}, "layout 'parquet'"),
]


@pytest.mark.parametrize(("scheme", "layout", "options", "message"), REFUSED)
def test_what_no_engine_runs_is_refused(scheme, layout, options, message):
    with pytest.raises(ConfigError, match=message):
        schema.check_layout(layout, Recipe.named(scheme, **options))


@pytest.mark.parametrize(
    "rule", [Rule(spec=E5M2), Rule(granularity=PerGroup(128)), Rule(granularity=PerBlock(64, 64))], ids=str
)
def test_rules_that_fit_no_file(rule):
    with pytest.raises(ConfigError):
        schema.check_layout("ct", Recipe(rule=rule, activation="none"))


MODULE = "model.layers.0.mlp.gate"
MATCHING = [
    ("ct", None, MODULE, True),
    ("ct", None, "re:.*mlp.gate$", True),
    ("ct", None, "mlp.gate", False),
    ("native", "vllm", MODULE, True),
    ("native", "vllm", "mlp.gate", False),
    ("native", "sglang", "mlp.gate", True),
    ("native", "sglang", "gat", False),
    ("native", "sglang", "model.model.layers.0.mlp.gate", True),
    ("native", "transformers", "gate", True),
    ("native", "transformers", "model.layers.0", True),
    ("native", "transformers", "model.layers.1", False),
    ("native", "transformers", "layers.0", False),
    ("native", "transformers", "model.layers.*", True),
    ("native", "transformers", "(", False),
    ("modelopt", None, "mlp", True),
    ("modelopt", None, "*gate", True),
    ("modelopt", None, "up_proj", False),
]


@pytest.mark.parametrize(("layout", "engine", "pattern", "skipped"), MATCHING)
def test_skip_lists_mean_what_each_engine_makes_of_them(layout, engine, pattern, skipped):
    assert schema.skip_matches(layout, engine, pattern, MODULE) == skipped
    assert schema.StoredScheme(layout, skip=(pattern,)).skips(MODULE, engine) == skipped


@pytest.mark.parametrize(
    ("algo", "granularity"),
    [("FP8", PerTensor()), ("FP8_PER_CHANNEL_PER_TOKEN", PerRow()), ("FP8_PB_WO", PerBlock(128, 128))],
)
def test_modelopt(algo, granularity):
    config = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}
    stored = schema.parse_quantization_config(config)
    assert stored.groups[0].granularity == granularity
    assert stored.skip == ("lm_head",)
    assert stored.kv_cache


def test_sixteen_bit_model():
    assert schema.parse_quantization_config(CONFIG) == schema.StoredScheme("none")


CT = {"quant_method": "compressed-tensors"}
MALFORMED = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "gptq"),
    "a-list": ({"quantization_config": [1]}, "quant_method"),
    "no-groups": (CT, "malformed"),
    "groups-is-a-list": ({**CT, "config_groups": [1]}, "malformed"),
    "int4": ({**CT, "config_groups": {"g": {"targets": [], "weights": {"num_bits": 4, "type": "int"}}}}, "4 bit int"),
    "group": (
        {**CT, "config_groups": {"g": {"targets": [], "weights": {"type": "float", "strategy": "group"}}}},
        "group",
    ),
    "block-of-one": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "at least 1"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_config(case):
    config, message = MALFORMED[case]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        schema.parse_quantization_config(config)


GRANULARITIES = [PerTensor(), PerRow(), PerBlock(128, 128)]


@pytest.mark.parametrize(
    ("granularity", "layout"),
    [
        (g, layout)
        for g, layout in itertools.product(GRANULARITIES, schema.LAYOUTS)
        if (g, layout) != (PerRow(), "native")
    ],
    ids=str,
)
def test_scaled_tensor_survives_the_file(tmp_path, granularity, layout):
    """Weight and scale in different shards, a ragged shape, bytes and scales unchanged."""
    weight = gaussian(200, 300, dtype=torch.float32)
    q = quantize_ref(weight, E4M3, granularity)
    name = schema.scale_name("a", granularity, layout)
    stored = schema.scale_to_file(q.scale, granularity, layout)
    assert tuple(stored.shape) == schema.file_scale_shape((200, 300), granularity, layout)
    scheme = {"row": "channel", "tensor": "tensor", "block": "block128"}[granularity.name]
    recipe = Recipe.named(scheme)
    config = {**CONFIG, "quantization_config": config_of(recipe, layout)}
    write_checkpoint(tmp_path, [{"a.weight": q.as_float8()}, {name: stored.clone()}], config)
    back = schema.read_scaled(Checkpoint.open(tmp_path), "a")
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scale, q.scale)
    assert torch.equal(dequantize_ref(back), dequantize_ref(q))


def one_module(tmp_path, tensors, config=None):
    inner = config or config_of(Recipe.named("channel"), "ct")
    write_checkpoint(tmp_path, [tensors], {"quantization_config": inner})
    return Checkpoint.open(tmp_path)


CODES = torch.zeros(4, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": CODES}, "module a.*without a scale"),
        ({"a.weight": CODES, "a.weight_scale": torch.ones(4)}, r"a.weight_scale; got shape \[4\]"),
        ({"a.weight": CODES, "a.weight_scale": torch.ones(1, 4)}, r"need \[4, 1\]"),
        ({"a.weight": CODES, "a.weight_scale": torch.ones(4, 1, dtype=torch.int32)}, "floating-point"),
        ({"a.weight": CODES.view(torch.uint8), "a.weight_scale": torch.ones(4, 1)}, "a.weight; got torch.uint8"),
        ({"a.weight": torch.zeros(4, 8).to(torch.float8_e5m2), "a.weight_scale": torch.ones(4, 1)}, "float8_e5m2"),
    ],
    ids=["no-scale", "flat", "transposed", "int-scale", "uint8", "e5m2"],
)
def test_unusable_module(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        schema.read_scaled(one_module(tmp_path, tensors), "a")


def test_module_outside_of_every_group(tmp_path):
    config = config_of(Recipe.named("channel"), "ct")
    config["config_groups"]["group_0"]["targets"] = ["b"]
    checkpoint = one_module(tmp_path, {"a.weight": CODES, "a.weight_scale": torch.ones(4, 1)}, config)
    with pytest.raises(CheckpointError, match="no group"):
        schema.read_scaled(checkpoint, "a")


def test_bf16_scale_is_widened(tmp_path):
    checkpoint = one_module(tmp_path, {"a.weight": CODES, "a.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16)})
    assert schema.read_scaled(checkpoint, "a").scale.dtype == torch.float32
