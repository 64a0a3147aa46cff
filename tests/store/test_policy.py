"""policy.json: what is read, what is refused, and what becomes of a recipe."""

import json

import pytest

from octavo.base.errors import CheckpointError, ConfigError, MismatchError
from octavo.formats.granularity import PerRow
from octavo.formats.recipe import Recipe
from octavo.store.manifest import fingerprint
from octavo.store.policy import Policy, PolicyEntry, unit_of
from octavo.store.tensors import Checkpoint

LAYER = "model.layers.0"
KEPT = {"precision": "16bit"}


def write(path, model, modules, **fields):
    values = {"schema_version": 1, "model_fingerprint": fingerprint(model), "modules": modules, **fields}
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{", CheckpointError, "is not a policy"),
        ("[]", CheckpointError, "an object with schema_version and modules"),
        ('{"schema_version": 2, "modules": {}}', CheckpointError, "schema_version; got 2; need 1"),
        ('{"schema_version": 1, "modules": {"a": {"precision": "bf16"}}}', ConfigError, "'bf16' is unknown"),
        ('{"schema_version": 1, "modules": {"a": {"precision": 16}}}', ConfigError, "modules.a.precision"),
        ('{"schema_version": 1, "modules": {"a": "16bit"}}', ConfigError, "modules.a"),
        (
            '{"schema_version": 1, "modules": {"a": {"precision": "16bit"}, "a": {"precision": "fp8"}}}',
            CheckpointError,
            "'a' is there twice",
        ),
        ('{"schema_version": 1, "modules": {"a": {}}}', ConfigError, "'modules.a.precision' is missing"),
        (
            '{"schema_version": 1, "modules": {}, "module": 1}',
            ConfigError,
            "unknown key 'module'. Did you mean 'modules'",
        ),
        ('{"schema_version": 1, "modules": {}, "scheme": "chanel"}', ConfigError, "Did you mean 'channel'"),
    ],
)
def test_malformed_files_are_one_clear_error(tmp_path, text, error, words):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(error) as caught:
        Policy.read(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="octavo tune"):
        Policy.read(tmp_path / "policy.json")


def test_bound_to_its_model(tiny_llama, tiny_llama_128, tmp_path):
    path = write(tmp_path / "policy.json", tiny_llama, {f"{LAYER}.mlp.down_proj": KEPT})
    assert Policy.load(path, model=Checkpoint.open(tiny_llama)).modules[f"{LAYER}.mlp.down_proj"].precision == "16bit"
    with pytest.raises(MismatchError, match="is of another model"):
        Policy.load(path, model=Checkpoint.open(tiny_llama_128))
    write(path, tiny_llama, {}, model_fingerprint="")
    with pytest.raises(MismatchError, match="not tied to a model"):
        Policy.load(path, model=Checkpoint.open(tiny_llama))


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        ({f"{LAYER}.mlp.dwn_proj": KEPT}, MismatchError, f"Did you mean '{LAYER}.mlp.down_proj'"),
        ({f"{LAYER}.self_attn.q_proj": KEPT, f"{LAYER}.self_attn.k_proj": {"precision": "fp8"}}, ConfigError, "fuse"),
        ({"model.embed_tokens": {"precision": "fp8"}}, ConfigError, "role 'embedding'"),
        ({f"{LAYER}.mlp.experts.*": KEPT}, MismatchError, "no such module"),
    ],
)
def test_what_engines_cannot_run_is_refused(tiny_llama, tmp_path, modules, error, words):
    path = write(tmp_path / "policy.json", tiny_llama, modules)
    with pytest.raises(error) as caught:
        Policy.load(path, model=Checkpoint.open(tiny_llama))
    assert words in str(caught.value)


def test_siblings_and_experts_follow_together(tiny_moe):
    kept = PolicyEntry(precision="16bit", reason="measured")
    policy = Policy(modules={f"{LAYER}.self_attn.k_proj": kept, "model.layers.1.mlp.experts.*": kept})
    decided = policy.apply(Recipe.named("channel")).assign(Checkpoint.open(tiny_moe).shapes(), layout="ct", layers=2)
    high = {module for module, found in decided.items() if found.rule is None and found.role in ("linear", "expert")}
    attention = {f"{LAYER}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")}
    leaves = ("gate_proj", "up_proj", "down_proj")
    assert high == attention | {f"model.layers.1.mlp.experts.{e}.{leaf}" for e in range(8) for leaf in leaves}


def test_another_scheme_for_some_layers(tiny_llama_128):
    other = PolicyEntry(precision="fp8", scheme="channel")
    policy = Policy(scheme="block128", modules={f"{LAYER}.mlp.up_proj": other})
    recipe = policy.apply(Recipe.named("block128", method="mse"))
    decided = recipe.assign(Checkpoint.open(tiny_llama_128).shapes(), layout="ct")
    rows = {module for module, found in decided.items() if found.rule and found.rule.granularity == PerRow()}
    assert rows == {f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.gate_proj"}
    assert decided[f"{LAYER}.mlp.up_proj"].rule.method == "mse"
    with pytest.raises(MismatchError, match="tuned for scheme block128; got scheme tensor"):
        policy.apply(Recipe.named("tensor"))


@pytest.mark.parametrize(
    ("module", "unit"),
    [
        ("a.q_proj", "a.qkv_proj"),
        ("a.up_proj", "a.gate_up_proj"),
        ("a.o_proj", "a.o_proj"),
        ("a.mlp.experts.3.up_proj", "a.mlp.experts.*"),
        ("a.mlp.experts.*", "a.mlp.experts.*"),
        ("a.mlp.experts.gate_up_proj", "a.mlp.experts.*"),
    ],
)
def test_units(module, unit):
    assert unit_of(module) == unit


@pytest.mark.parametrize("path", [3, [], {}, b"policy.json"], ids=repr)
def test_a_policy_that_is_no_path_is_named(path):
    with pytest.raises(ConfigError, match=r"policy; got .*; need str or Path"):
        Policy.read(path)
