"""From a run to a checkpoint: merge then quantize, exactly; what survives is measured; what cannot be is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import CheckpointError, ConfigError, InputError, MismatchError, RefusedError
from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.measure import delta_kept
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.integrations.moments import moments_of
from octavo.integrations.transformers import load
from octavo.store.adapter import Adapter
from octavo.store.policy import PolicyEntry
from octavo.store.run import RunFolder
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint
from octavo.workflows.export import ExportConfig, export
from octavo.workflows.finetune import FinetuneConfig, finetune

TEXT = "the quick brown fox jumps over the lazy dog. " * 80
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def train(model, folder, **more):
    (folder / "train.txt").write_text(TEXT)
    config = {"rank": 4, "alpha": 8, "learning_rate": 1e-2, "max_steps": 6, "context": 32, "accumulation": 1}
    more = {**config, "micro_batch": 4, "save_every": 0, **more}
    finetune(FinetuneConfig(model=str(model), data=str(folder / "train.txt"), out=folder / "run", **more))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tiny_llama, tmp_path_factory):
    return train(tiny_llama, tmp_path_factory.mktemp("run"), skip=("*.layers.1.mlp.down_proj",), rslora=True)


def scale_adapter(run, target, factor):
    shutil.copytree(run, target)
    path = target / "adapter" / "adapter_model.safetensors"
    tensors = {k: v * factor if "lora_B" in k else v for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def base_and_delta(run, model, module):
    pair = Adapter.open(run / "adapter").pairs[module]
    return Checkpoint.open(model).get(f"{module}.weight").float(), pair.delta()


def test_original_is_merge_in_float32_then_quantize(run, tiny_llama, tmp_path):
    report = export(ExportConfig(run=run, out=tmp_path / "out"))
    base, delta = base_and_delta(run, tiny_llama, Q)
    q = quantize_ref(base + delta, E4M3, PerRow())
    out = Checkpoint.open(tmp_path / "out")
    assert torch.equal(out.get(f"{Q}.weight").view(torch.uint8), q.codes)
    torch.testing.assert_close(out.get(f"{Q}.weight_scale"), q.scale, rtol=0, atol=0)
    layer = next(layer for layer in report.layers if layer.module == Q)
    assert layer.kept == pytest.approx(delta_kept(base, base + delta, q), abs=1e-5)
    assert layer.change == pytest.approx(float(delta.norm() / base.norm()), rel=1e-5)
    assert 0.9 < report.kept < 1.1 and report.output_kept is report.output_cosine is report.nearest is None
    assert len(report.layers) == 14
    assert report.activation == "token" and "weights alone" in report.measured_on
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_layers_of_the_policy_stay_16_bit_and_are_listed(run, tiny_llama, tmp_path):
    report = export(ExportConfig(run=run, out=tmp_path / "out"))
    assert "skipped by" in report.kept_16bit[DOWN]
    assert Q not in report.kept_16bit
    out = Checkpoint.open(tmp_path / "out")
    base, delta = base_and_delta(run, tiny_llama, DOWN)
    assert torch.equal(out.get(f"{DOWN}.weight"), (base + delta).bfloat16())
    layer = next(layer for layer in report.layers if layer.module == DOWN)
    assert layer.precision == "16bit" and layer.kept == pytest.approx(1, abs=0.02)
    assert DOWN in out.config["quantization_config"]["ignore"]


def test_the_policy_file_decides(run, tmp_path):
    edited = tmp_path / "run"
    shutil.copytree(run, edited)
    policy = RunFolder(edited).read_policy()
    reason = "the guard demoted it at step 40"
    policy.modules["model.layers.0.mlp.down_proj"] = PolicyEntry(precision="16bit", reason=reason)
    RunFolder(edited).write_policy(policy)
    report = export(ExportConfig(run=edited, out=tmp_path / "out"))
    assert report.kept_16bit["model.layers.0.mlp.down_proj"] == "the guard demoted it at step 40"
    assert Checkpoint.open(tmp_path / "out").dtype("model.layers.0.mlp.down_proj.weight") == torch.bfloat16


def test_exported_model_answers_like_the_run(run, tiny_llama, tmp_path):
    from octavo.integrations.peft import load_adapter

    export(ExportConfig(run=run, out=tmp_path / "out"))
    exported = load(tmp_path / "out", dtype=torch.float32, activation="none").eval()
    base = load(tiny_llama, "channel", dtype=torch.float32, activation="none").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        plain = base(input_ids=tokens).logits
        trained = load_adapter(base, run / "adapter")(input_ids=tokens).logits
        served = exported(input_ids=tokens).logits
    assert (served - trained).norm() < 0.25 * (trained - plain).norm()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_llama / name).read_bytes()


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block128"])
def test_dequantized_adds_to_the_fp8_base(run, tiny_llama, tmp_path, scheme):
    report = export(ExportConfig(run=run, out=tmp_path / "out", merge="dequantized", scheme=scheme, min_kept=0))
    base, delta = base_and_delta(run, tiny_llama, Q)
    if scheme == "tensor":
        group = [Q.replace("q_proj", name) for name in ("q_proj", "k_proj", "v_proj")]
        weights = [Checkpoint.open(tiny_llama).get(f"{name}.weight").float() for name in group]
        scale = torch.stack([w.abs().max() for w in weights]).max() / 448
        base = dequantize_ref(quantize_ref(base, E4M3, PerTensor(), scale=scale))
    else:  # in a file, blocks of a layer this small are channels
        base = dequantize_ref(quantize_ref(base, E4M3, PerRow()))
    from octavo.store.schema import read_scaled

    q = read_scaled(Checkpoint.open(tmp_path / "out"), Q)
    layer = next(layer for layer in report.layers if layer.module == Q)
    assert layer.kept == pytest.approx(delta_kept(base, base + delta, q), abs=1e-4)
    assert report.scheme == scheme


def test_a_small_change_survives_on_original_weights_only(run, tmp_path):
    small = scale_adapter(run, tmp_path / "run", 0.02)
    with pytest.raises(RefusedError, match="of its change survives") as error:
        export(ExportConfig(run=small, out=tmp_path / "out", merge="dequantized"))
    assert (
        "--merge original" in error.value.fix and "--merge none" in error.value.fix and "--min-kept" in error.value.fix
    )
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    report = export(ExportConfig(run=small, out=tmp_path / "lossy", merge="dequantized", min_kept=0))
    assert report.kept < 0.7
    assert export(ExportConfig(run=small, out=tmp_path / "out", min_kept=0)).kept > report.kept


def test_compensated_rounding_of_the_merged_weights(run, tiny_llama, tmp_path):
    """Other codes, lower error of the outputs on the calibrated inputs; the adapter's change survives."""
    moments = moments_of(tiny_llama, "demo", tmp_path / "m", samples=8, context=64, weighting="none")
    plain = export(ExportConfig(run=run, out=tmp_path / "plain", min_kept=0))
    better = export(ExportConfig(run=run, out=tmp_path / "better", min_kept=0, moments=tmp_path / "m"))
    a, b = Checkpoint.open(tmp_path / "plain"), Checkpoint.open(tmp_path / "better")
    base, delta = base_and_delta(run, tiny_llama, Q)
    h = moments.get(Q)
    errors = []
    for checkpoint in (a, b):
        e = dequantize_ref(read_scaled(checkpoint, Q)) - (base + delta)
        errors.append(torch.trace(e @ h @ e.T))
    assert errors[1] < 0.6 * errors[0]
    assert better.rounding == "compensated" and plain.rounding == "nearest" and plain.nearest is None
    assert better.nearest.kept == pytest.approx(plain.kept, rel=1e-6)
    assert better.output_error < 0.8 * better.nearest.output_error
    assert better.output_cosine > better.nearest.output_cosine > 0.99
    assert "tokens" in better.measured_on
    measured = export(ExportConfig(run=run, out=tmp_path / "c", min_kept=0, moments=tmp_path / "m", rounding="nearest"))
    assert torch.equal(Checkpoint.open(tmp_path / "c").get(f"{Q}.weight").view(torch.uint8), read_scaled(a, Q).codes)
    for name in ("kept", "output_kept", "output_error", "output_cosine"):
        assert getattr(measured, name) == pytest.approx(getattr(better.nearest, name), rel=1e-4)
    with pytest.raises(ConfigError, match="merge 'none'"):
        export(ExportConfig(run=run, out=tmp_path / "no", merge="none", moments=tmp_path / "m"))


def test_a_small_change_survives_in_the_outputs_of_fp8_weights(run, tmp_path):
    """Rounding to nearest drops most of it, code by code; compensation keeps it where the inputs look."""
    small = scale_adapter(run, tmp_path / "run", 0.01)
    text = tmp_path / "run" / "text.txt"
    text.write_text(TEXT)
    settings = {"merge": "dequantized", "data": str(text), "samples": 8, "context": 64}
    report = export(ExportConfig(run=small, out=tmp_path / "out", min_kept=0, **settings))
    assert 1 - report.output_kept < 0.6 * (1 - report.nearest.output_kept)
    assert not list(tmp_path.glob(".octavo*"))


def test_none_keeps_the_adapter_beside_the_base(run, tiny_llama, tmp_path):
    report = export(ExportConfig(run=run, out=tmp_path / "out", merge="none"))
    base, _ = base_and_delta(run, tiny_llama, Q)
    q = quantize_ref(base, E4M3, PerRow())
    assert torch.equal(Checkpoint.open(tmp_path / "out").get(f"{Q}.weight").view(torch.uint8), q.codes)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / "adapter" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    assert report.kept == 1 and report.layers == []
    assert "--enable-lora --max-lora-rank 8" in report.next[-1]


def test_untrained_adapter_is_said_to_change_nothing(run, tmp_path):
    zero = scale_adapter(run, tmp_path / "run", 0.0)
    report = export(ExportConfig(run=zero, out=tmp_path / "out"))
    assert report.kept is None and "changes nothing" in report.warnings[0]


def test_another_base_is_refused(run, tiny_llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    tensors = load_file(other / "model.safetensors")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] * 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MismatchError, match="another model"):
        export(ExportConfig(run=run, out=tmp_path / "out", model=str(other)))
    moved = tmp_path / "moved"
    shutil.copytree(tiny_llama, moved)
    export(ExportConfig(run=run, out=tmp_path / "out", model=str(moved)))


def damaged(run, case):
    if case == "unfinished":
        shutil.rmtree(run / "adapter")
    elif case == "dora":
        config = json.loads((run / "adapter" / "adapter_config.json").read_text())
        (run / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    elif case == "truncated":
        path = run / "adapter" / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif case == "policy":
        (run / "policy.json").write_text("{}")


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("unfinished", CheckpointError, "did not finish"),
        ("dora", RefusedError, "use_dora"),
        ("truncated", CheckpointError, "not readable"),
        ("policy", CheckpointError, "not a policy"),
    ],
)
def test_damaged_run_writes_nothing(run, tmp_path, case, error, words):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    damaged(copy, case)
    with pytest.raises(error, match=words):
        export(ExportConfig(run=copy, out=tmp_path / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("values", [{"scheme": "chanel"}, {"activation": "tokens"}, {"activation": "static"}], ids=str)
def test_unknown_settings(run, tmp_path, values):
    with pytest.raises(ConfigError):
        export(ExportConfig(run=run, out=tmp_path / "out", **values))
    assert list(tmp_path.iterdir()) == []


def test_existing_out_stays(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError):
        export(ExportConfig(run=run, out=tmp_path / "out"))
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_fp8_base_cannot_take_the_original_route(tiny_llama, run, tmp_path):
    from octavo.formats.recipe import Recipe
    from octavo.store.conversion import convert_checkpoint

    convert_checkpoint(Checkpoint.open(tiny_llama), tmp_path / "fp8", Recipe.named("channel"))
    trained = train(tmp_path / "fp8", tmp_path)
    with pytest.raises(RefusedError, match="FP8 already"):
        export(ExportConfig(run=trained, out=tmp_path / "out"))
    report = export(ExportConfig(run=trained, out=tmp_path / "out", merge="dequantized", min_kept=0))
    assert report.kept is not None and len(report.layers) == 14


def test_scales_of_the_merged_weights_can_be_searched(run, tmp_path):
    for method in ("absmax", "mse"):
        export(ExportConfig(run=run, out=tmp_path / method, min_kept=0, method=method))
    searched, plain = (read_scaled(Checkpoint.open(tmp_path / name), Q).scale for name in ("mse", "absmax"))
    assert bool((searched >= plain).all()) and not torch.equal(searched, plain)
    with pytest.raises(ConfigError, match="method 'mse'"):
        export(ExportConfig(run=run, out=tmp_path / "out", merge="dequantized", method="mse"))
