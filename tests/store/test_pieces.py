"""Real families by their names and shapes: what is quantized, and how stacked experts come apart."""

import json

import pytest
import torch

from octavo.base.errors import CheckpointError
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.recipe import Recipe
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3
from octavo.store import schema
from octavo.store.conversion import convert_checkpoint
from octavo.store.pieces import find_pieces
from octavo.store.plan import make_plan
from octavo.store.tensors import Checkpoint
from tests.store.conftest import gaussian, write_checkpoint

H, I, E = 256, 128, 2  # noqa: E741
AT = "model.layers.0"


def linear(name, n, k, seed=0):
    return {f"{name}.weight": gaussian(n, k, seed=seed)}


def attention(at, q=256, kv=128):
    rows = {"q_proj": (q, H), "k_proj": (kv, H), "v_proj": (kv, H), "o_proj": (H, q)}
    return {f"{at}.{name}.weight": gaussian(*shape) for name, shape in rows.items()}


def mlp(at, inter=384, names=("gate_proj", "up_proj", "down_proj")):
    shapes = ((inter, H), (inter, H), (H, inter))
    return {f"{at}.{name}.weight": gaussian(*shape) for name, shape in zip(names, shapes, strict=True)}


EMBED = linear("model.embed_tokens", 32, H)
NORMS = {f"{AT}.input_layernorm.weight": gaussian(H), "model.norm.weight": gaussian(H)}
FAMILIES = {
    "llama": (
        {},
        {**attention(f"{AT}.self_attn"), **mlp(f"{AT}.mlp"), **linear("lm_head", 32, H)},
        {"embed_tokens", "lm_head"},
    ),
    "qwen2-bias": (
        {},
        {**attention(f"{AT}.self_attn"), f"{AT}.self_attn.q_proj.bias": gaussian(256)},
        {"embed_tokens"},
    ),
    "gemma2": (
        {},
        {**attention(f"{AT}.self_attn"), f"{AT}.pre_feedforward_layernorm.weight": gaussian(H)},
        {"embed_tokens"},
    ),
    "phi3-fused": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
        {**linear(f"{AT}.self_attn.qkv_proj", 512, H), **linear(f"{AT}.mlp.gate_up_proj", 768, H)},
        {"embed_tokens"},
    ),
    "qwen3-moe": (
        {"model_type": "qwen3_moe"},
        {
            **attention(f"{AT}.self_attn"),
            **linear(f"{AT}.mlp.gate", 4, H),
            **mlp(f"{AT}.mlp.experts.0", I),
            **mlp(f"{AT}.mlp.experts.1", I),
        },
        {"embed_tokens", "gate"},
    ),
    "mixtral": (
        {"model_type": "mixtral"},
        {
            **linear(f"{AT}.block_sparse_moe.gate", 4, H),
            **mlp(f"{AT}.block_sparse_moe.experts.0", I, ("w1", "w3", "w2")),
        },
        {"embed_tokens", "gate"},
    ),
    "deepseek-v3": (
        {"num_hidden_layers": 1},
        {
            **linear(f"{AT}.self_attn.q_a_proj", 256, H),
            **linear(f"{AT}.self_attn.q_b_proj", 384, 256),
            **linear(f"{AT}.self_attn.kv_a_proj_with_mqa", 128, H),
            **linear(f"{AT}.self_attn.kv_b_proj", 256, 128),
            **linear(f"{AT}.mlp.gate", 4, H),
            **mlp(f"{AT}.mlp.experts.0", I),
            **mlp(f"{AT}.mlp.shared_experts", I),
            **linear("model.layers.1.eh_proj", H, 2 * H),
            **attention("model.layers.1.self_attn"),
            **linear("model.layers.1.shared_head.head", 32, H),
        },
        {"embed_tokens", "gate", "eh_proj", "head", "model.layers.1."},
    ),
    "qwen2-vl": (
        {"model_type": "qwen2_vl", "text_config": {"hidden_size": H, "num_hidden_layers": 1}},
        {
            **attention("model.language_model.layers.0.self_attn"),
            **linear("model.visual.blocks.0.attn.qkv", 288, 96),
            "model.visual.patch_embed.proj.weight": gaussian(96, 3, 2, 4, 4),
        },
        {"embed_tokens", "visual"},
    ),
}


def family(tmp_path, name):
    config, tensors, kept = FAMILIES[name]
    config = {"model_type": "llama", "hidden_size": H, "num_hidden_layers": 1, **config}
    return write_checkpoint(tmp_path / "model", [{**EMBED, **NORMS, **tensors}], config), kept


@pytest.mark.parametrize("scheme", ["channel", "block128", "tensor"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path, name, scheme):
    folder, kept = family(tmp_path, name)
    plan = make_plan(Checkpoint.open(folder), Recipe.named(scheme), "ct")
    for piece in plan.pieces:
        high = any(word in piece.module.split(".") or ("." in word and word in piece.name) for word in kept)
        is_linear = len(piece.shape) == 2 and piece.name.endswith(".weight")
        assert (plan.rule_of(piece) is not None) == (is_linear and not high), piece.name
        if plan.rule_of(piece):
            wanted = "channel" if scheme == "tensor" and ".experts." in piece.name else scheme
            assert plan.rule_of(piece).rule == Recipe.named(wanted).rule, piece.name
    config = schema.to_quantization_config(plan.assignments, Recipe.named(scheme), "ct")
    schema.validate_ct(config)


def test_mtp_linears_are_listed_by_their_full_names(tmp_path):
    folder, _ = family(tmp_path, "deepseek-v3")
    source = Checkpoint.open(folder)
    plan = make_plan(source, Recipe.named("block128"), "native")
    ignore = schema.skip_list(plan.assignments, source.shapes())
    assert {"model.layers.1.eh_proj", "model.layers.1.self_attn.q_proj", f"{AT}.mlp.gate", "lm_head"} <= set(ignore)
    assert not any("norm" in name for name in ignore)


def stacked(kind):
    """(config, stored tensors, {piece name: expected matrix}) for two experts."""
    gate = [gaussian(I, H, seed=e) for e in range(E)]
    up = [gaussian(I, H, seed=10 + e) for e in range(E)]
    down = [gaussian(H, I, seed=20 + e) for e in range(E)]
    at = f"{AT}.feed_forward.experts" if kind == "llama4" else f"{AT}.mlp.experts"
    rows_major = torch.stack([torch.cat([g, u]) for g, u in zip(gate, up, strict=True)])
    if kind in ("qwen3_moe", "mixtral"):
        stored = {f"{at}.gate_up_proj": rows_major, f"{at}.down_proj": torch.stack(down)}
    else:
        both = rows_major
        if kind == "gpt_oss":
            both = torch.stack([torch.stack([g, u], 1).reshape(2 * I, H) for g, u in zip(gate, up, strict=True)])
        stored = {
            f"{at}.gate_up_proj": both.transpose(1, 2).contiguous(),
            f"{at}.down_proj": torch.stack(down).transpose(1, 2).contiguous(),
        }
    leaves, out = ("gate_proj", "up_proj", "down_proj"), at
    if kind == "mixtral":
        leaves, out = ("w1", "w3", "w2"), f"{AT}.block_sparse_moe.experts"
    want = {
        f"{out}.{e}.{leaf}.weight": matrices[e]
        for e in range(E)
        for leaf, matrices in zip(leaves, (gate, up, down), strict=True)
    }
    return {"model_type": kind, "hidden_size": H, "num_hidden_layers": 1}, stored, want


@pytest.mark.parametrize("scheme", ["channel", "block128"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "llama4", "qwen3_vl_moe"])
def test_stacked_experts_become_one_matrix_each(tmp_path, kind, scheme):
    """Scales never cross experts; names are those that engines read."""
    config, stored, want = stacked(kind)
    router = f"{AT}.mlp.gate.weight"
    folder = write_checkpoint(tmp_path / "model", [{**stored, router: gaussian(E, H)}], config)
    convert_checkpoint(Checkpoint.open(folder), tmp_path / "out", Recipe.named(scheme))
    result = Checkpoint.open(tmp_path / "out")
    granularity = PerRow() if scheme == "channel" else PerBlock(128, 128)
    for name, matrix in want.items():
        q, expected = schema.read_scaled(result, name.removesuffix(".weight")), quantize_ref(matrix, E4M3, granularity)
        assert torch.equal(q.codes, expected.codes), name
        assert torch.equal(q.scale, expected.scale), name
    router = router.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else router
    assert set(result.names()) == {router, *want, *(f"{n}_scale" for n in want)}


def test_square_stacks_follow_the_model_type(tmp_path):
    """2I = H: the shape does not tell, the model type does."""
    square = torch.stack([gaussian(H, H, seed=e) for e in range(E)])
    for kind, turned in (("qwen3_moe", False), ("llama4", True)):
        config = {"model_type": kind, "hidden_size": H, "num_hidden_layers": 1}
        folder = write_checkpoint(tmp_path / kind, [{f"{AT}.mlp.experts.down_proj": square}], config)
        checkpoint = Checkpoint.open(folder)
        piece = find_pieces(checkpoint)[0]
        assert torch.equal(piece.rows(checkpoint, 0, H), square[0].T if turned else square[0])


def test_gpt_oss_comes_apart_by_the_names_of_its_layout(tmp_path):
    """Interleaved columns and biases: what a reader of single experts sees."""
    config, stored, want = stacked("gpt_oss")
    both, down = gaussian(E, 2 * I), gaussian(E, H)
    biases = {f"{AT}.mlp.experts.gate_up_proj_bias": both, f"{AT}.mlp.experts.down_proj_bias": down}
    source = Checkpoint.open(write_checkpoint(tmp_path / "model", [{**stored, **biases}], config))
    for e in range(E):
        want[f"{AT}.mlp.experts.{e}.gate_proj.bias"] = both[e, 0::2]
        want[f"{AT}.mlp.experts.{e}.up_proj.bias"] = both[e, 1::2]
        want[f"{AT}.mlp.experts.{e}.down_proj.bias"] = down[e]
    pieces = {piece.name: piece for piece in find_pieces(source)}
    assert set(pieces) == set(want)
    for name, matrix in want.items():
        assert torch.equal(pieces[name].rows(source, 0, len(matrix)), matrix), name


def test_experts_that_no_engine_reads_one_by_one_stay_stacked(tmp_path):
    config, stored, _ = stacked("gpt_oss")
    source = Checkpoint.open(write_checkpoint(tmp_path / "model", [{**stored, **attention(f"{AT}.self_attn")}], config))
    for layout, block in (("native", f"{AT}.mlp.experts"), ("ct", r"re:(?:.*\.)?layers\.0\.mlp\.experts\..*")):
        summary = convert_checkpoint(source, tmp_path / layout, Recipe.named("block128"), layout=layout)
        result = Checkpoint.open(tmp_path / layout)
        assert all(torch.equal(result.get(name), tensor) for name, tensor in stored.items())
        assert block in json.dumps(summary.quantization_config).replace("\\\\", "\\")
        reasons = {o.reason for o in summary.outcomes if o.role == "expert"}
        assert reasons == {"no engine reads single FP8 experts of gpt_oss"}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_skipped_stacks_stay_stacked(tmp_path, kind):
    config, stored, _ = stacked(kind)
    gate = {f"{AT}.mlp.gate.weight": gaussian(E, H)}
    folder = write_checkpoint(tmp_path / "model", [{**stored, **gate}], config)
    source = Checkpoint.open(folder)
    convert_checkpoint(source, tmp_path / "out", Recipe.named("channel", skip=("*experts.1.*",)))
    result = Checkpoint.open(tmp_path / "out")
    assert set(result.names()) == set(source.names())
    for name in source:
        assert torch.equal(result.get(name), source.get(name))
    assert any(
        name.endswith(("experts.0.down_proj", "experts.0.w2"))
        for name in result.config["quantization_config"]["ignore"]
    )


def test_stack_of_unknown_orientation_stays_and_says_so(tmp_path):
    tensors = {f"{AT}.mlp.experts.down_proj": gaussian(E, 64, 32)}
    folder = write_checkpoint(tmp_path / "model", [tensors], {"model_type": "new_moe", "hidden_size": H})
    plan = make_plan(Checkpoint.open(folder), Recipe.named("channel"), "ct")
    assert [o.reason for o in plan.outcomes] == ["stacked experts whose orientation config.json does not tell"]
    assert plan.pieces[0].name == f"{AT}.mlp.experts.down_proj"


def test_nan_in_one_expert_is_named(tmp_path):
    config, stored, _ = stacked("qwen3_moe")
    name = f"{AT}.mlp.experts.gate_up_proj"
    stored[name][1, 3, 5] = float("nan")
    folder = write_checkpoint(tmp_path / "model", [stored], config)
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj; got NaN or Inf in .*experts.1.gate_proj.weight"):
        convert_checkpoint(Checkpoint.open(folder), tmp_path / "out", Recipe.named("channel"))


def test_other_quantization_is_refused(tmp_path):
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    folder = write_checkpoint(tmp_path / "model", [{"a": gaussian(2, 2)}], config)
    for dequantize in (False, True):
        with pytest.raises(CheckpointError, match="mxfp4"):
            find_pieces(Checkpoint.open(folder), dequantize=dequantize)
