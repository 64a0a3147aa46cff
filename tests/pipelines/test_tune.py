"""tune on tiny models: what is promised of bytes and divergence holds in the checkpoint that the policy makes."""

import json
from fractions import Fraction

import pytest

from octavo.base.errors import CheckpointError, ConfigError, DataError, RefusedError
from octavo.formats.recipe import Recipe
from octavo.pipelines import tune as module
from octavo.pipelines.targets import Target, choices, corrected, picks_of, size_of
from octavo.pipelines.tune import tune
from octavo.pipelines.tune_report import TuneConfig
from octavo.store.manifest import fingerprint
from octavo.store.policy import Policy, PolicyEntry
from octavo.store.tensors import Checkpoint
from octavo.store.units import HIGH, find_units, mixed_recipe
from octavo.workflows.evaluate import EvaluateConfig, evaluate
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from octavo.workflows.verify import VerifyConfig, verify

SIZES = {"tokens": 192, "context": 48, "samples": 4, "checks": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 20)
    return str(path)


@pytest.fixture(scope="module")
def tuned(tiny_llama_128, text, tmp_path_factory):
    """A share of 12 % of the bytes, compensated rounding, block scales."""
    out = tmp_path_factory.mktemp("tune") / "out"
    settings = {"scheme": "block128", "rounding": "compensated", "alternatives": ("channel",)}
    config = TuneConfig(model=str(tiny_llama_128), data=text, out=out, keep="12%", **settings, **SIZES)
    return config, tune(config)


def test_share_and_bytes_are_those_of_the_export(tuned, tiny_llama_128, tmp_path):
    config, report = tuned
    options = {"policy": config.out / "policy.json", "rounding": "compensated", "moments": config.out / "moments"}
    done = quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "out", **options))
    assert done.bytes_out == report.bytes
    kept = {m.module for m in done.modules if not m.rule and m.role == "linear"}
    out = Checkpoint.open(tmp_path / "out")
    share = sum(out.info(f"{module}.weight").nbytes for module in kept) / done.bytes_out
    assert share == report.share and 0 < share <= 0.12
    found = verify(VerifyConfig(folder=tmp_path / "out", policy=options["policy"], gpu="sm90"))
    assert found.verdict == "ok", (found.findings, report.exceptions)
    settings = {"data": config.data, "context": 48, "tokens": 192, "activation": "none", "dtype": "float32"}
    found = evaluate(EvaluateConfig(model=str(tmp_path / "out"), against=str(tiny_llama_128), **settings))
    assert found.kl < report.kl_fp8 * 1.2, "on other text, but of the same kind"


def test_less_divergence_than_all_in_fp8(tuned):
    _, report = tuned
    assert 0 < report.kl < report.kl_fp8 and report.exceptions
    assert sum(point.measured for point in report.curve) == 2
    predicted = [point.kl for point in report.curve if not point.measured]
    assert predicted == sorted(predicted, reverse=True) and predicted[-1] == 0
    assert report.bytes_fp8 < report.bytes < report.bytes_16bit


def test_the_page_draws_the_curve(tuned):
    config, report = tuned
    page = (config.out / "report.html").read_text()
    assert page.count("<circle") == 2 and "<polyline" in page and "<script" not in page
    assert json.loads((config.out / "report.json").read_text())["kl"] == report.kl


def test_siblings_are_decided_together(tuned, tiny_llama_128):
    policy = Policy.load(tuned[0].out / "policy.json", model=Checkpoint.open(tiny_llama_128))
    assert policy.measured["kl"] == tuned[1].kl
    for layer in range(2):
        for shards in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            entries = [policy.modules[f"model.layers.{layer}.{shard}"] for shard in shards]
            assert len({(entry.precision, entry.scheme, entry.kl) for entry in entries}) == 1


def test_a_second_call_measures_nothing_again(tuned, monkeypatch):
    config, report = tuned
    monkeypatch.setattr(module, "Lab", None)
    again = tune(config)
    assert again.model_copy(update={"seconds": 0}) == report.model_copy(update={"seconds": 0})


def test_budget_is_met_by_fewer_bytes(tuned):
    config, report = tuned
    budget = (report.kl + report.kl_fp8) / 2
    found = tune(config.model_copy(update={"keep": None, "budget": f"kl={budget}"}))
    assert found.kl <= budget and found.bytes <= report.bytes


def test_budget_out_of_reach_says_how_far_it_got(tuned):
    config, _ = tuned
    with pytest.raises(RefusedError, match=r"budget kl=1e-09 within 1\.00% of the bytes; got KL .* needs about --keep"):
        tune(config.model_copy(update={"keep": "1%", "budget": "kl=1e-9"}))
    assert not (config.out / "policy.json").exists()
    assert json.loads((config.out / "report.json").read_text())["budget"] == 1e-9


def verdicts(folder, **options):
    found = verify(VerifyConfig(folder=folder, gpu="sm90", quick=True, **options))
    return {engine: report.verdict for engine, report in found.engines.items()}, found.findings


@pytest.mark.parametrize(
    ("model", "scheme", "layout"),
    [
        ("tiny_llama_128", "channel", "ct"),
        ("tiny_llama_128", "block128", "ct"),
        ("tiny_llama_128", "block128", "native"),
        ("tiny_llama", "block128", "ct"),
        ("tiny_moe", "channel", "ct"),
        ("tiny_moe", "tensor", "native"),
    ],
)
def test_every_unit_makes_a_checkpoint_that_engines_load(model, scheme, layout, request, tmp_path):
    """In ct all engines; native loads with every policy where it loads without one."""
    folder = request.getfixturevalue(model)
    source = Checkpoint.open(folder)
    units, total = find_units(source, [Recipe.named(scheme)], layout)
    assert {len(unit.modules) for unit in units} == ({1, 3, 24} if model == "tiny_moe" else {1, 2, 3})
    config = {"model": str(folder), "scheme": scheme, "layout": layout}
    quantize_checkpoint(QuantizeConfig(out=tmp_path / "plain", **config))
    plain, _ = verdicts(tmp_path / "plain")
    assert layout == "native" or set(plain.values()) == {"ok"}
    policy = tmp_path / "policy.json"
    for index, kept in enumerate([[unit] for unit in units] + [units[::2], units[1::2]]):
        entries = {pattern: PolicyEntry(precision="16bit") for unit in kept for pattern in unit.patterns}
        Policy(model_fingerprint=fingerprint(source), modules=entries).write(policy)
        done = quantize_checkpoint(QuantizeConfig(out=tmp_path / f"out{index}", policy=policy, **config))
        picks = {unit.name: HIGH if unit in kept else scheme for unit in units}
        assert done.bytes_out == size_of(units, picks, total).total
        found, findings = verdicts(tmp_path / f"out{index}", policy=policy)
        assert found == plain, (kept, findings)


def test_units_of_a_mixture_of_experts_in_memory(tiny_moe):
    units, _ = find_units(Checkpoint.open(tiny_moe), [Recipe.named("block128"), Recipe.named("channel")], "memory")
    units = {unit.name: unit for unit in units}
    experts, attention = "model.layers.0.mlp.experts.*", "model.layers.1.self_attn.qkv_proj"
    assert units[experts].patterns == (experts,) and list(units[experts].size) == ["16bit", "block128", "channel"]
    recipe = mixed_recipe(Recipe.named("block128"), list(units.values()), {experts: HIGH, attention: "channel"})
    assert dict(recipe.overrides)[experts] is None and len(recipe.overrides) == 1 + 3


def test_an_alternative_that_a_layout_makes_the_same_is_none(tiny_llama):
    units, _ = find_units(Checkpoint.open(tiny_llama), [Recipe.named("block128"), Recipe.named("channel")], "ct")
    assert all(list(unit.rules) == ["block128"] for unit in units), "ragged: per channel either way"


@pytest.mark.parametrize(
    ("budget", "keep", "words"),
    [(None, None, "without a target"), ("0.003", None, "kl=VALUE"), ("kl=-1", None, "kl=VALUE")]
    + [(None, keep, "a share") for keep in ("120%", "two", "-1%", "nan")],
)
def test_targets_that_are_none(budget, keep, words):
    with pytest.raises(ConfigError, match=words):
        Target.parse(budget, keep)


def test_targets():
    assert Target.parse("KL = 3e-3", "2%") == Target(0.003, Fraction(1, 50))
    assert Target.parse(None, "0.02").keep == Fraction(1, 50)


@pytest.mark.parametrize("keep", [Fraction(1, 50), Fraction(1, 7), Fraction(3, 10), Fraction(0)])
def test_share_is_kept_to_the_byte(tiny_llama_128, keep):
    units, total = find_units(Checkpoint.open(tiny_llama_128), [Recipe.named("channel")], "ct")
    losses = {"channel": {unit.name: float(1 + i % 3) for i, unit in enumerate(units)}}
    best = choices(units, losses, total, keep)[-1]
    size = size_of(units, picks_of(units, best), total)
    assert size.kept <= keep * size.total
    for unit in units:  # nothing that is left out would still fit in the room that is left
        picks = picks_of(units, best)
        if picks[unit.name] != HIGH:
            larger = size_of(units, {**picks, unit.name: HIGH}, total)
            assert larger.kept > keep * larger.total


def test_measured_layers_scale_the_others():
    estimates = {"channel": {"a": 1.0, "b": 2.0, "c": 4.0}, "tensor": {"c": 8.0}}
    found = corrected(estimates, {"a": 2.0, "b": 1.0, "c": 5.0}, {"a": 1.0, "b": 0.5}, "channel")
    assert found == {"channel": {"a": 0.5, "b": 1.0, "c": 2.0}, "tensor": {"c": 4.0}}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"data": "short.txt"}, DataError, "shorter than one sample"),
        ({"skip": ("*",)}, ConfigError, "no layer"),
        ({"layout": "native"}, ConfigError, "one scale per channel"),
        ({"model": "fp8"}, CheckpointError, "quantized already"),
    ],
)
def test_bad_input_leaves_nothing(tiny_llama, text, tmp_path, settings, error, words):
    (tmp_path / "short.txt").write_text("too short")
    names = {"fp8": tmp_path / "fp8", "short.txt": tmp_path / "short.txt"}
    if settings.get("model"):
        quantize_checkpoint(QuantizeConfig(model=str(tiny_llama), out=names["fp8"]))
    given = {"model": str(tiny_llama), "data": text, **SIZES, **settings}
    given.update({k: str(names[v]) for k, v in given.items() if isinstance(v, str) and v in names})
    with pytest.raises(error, match=words):
        tune(TuneConfig(out=tmp_path / "out", keep="5%", **given))
    assert not (tmp_path / "out" / "policy.json").exists()
