"""A fine-tune on tiny models: the run folder, what trains, resume, broken input, NaN, chat data."""

import json
import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.base.errors import ConfigError, DataError, MismatchError, RefusedError, UnsupportedError
from octavo.store.adapter import Adapter
from octavo.store.manifest import fingerprint
from octavo.store.run import RunFolder
from octavo.store.scales import ModuleScales, Scales
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.tensors import Checkpoint
from octavo.workflows.export import ExportConfig, export
from octavo.workflows.finetune import FinetuneConfig, finetune

TEXT = "the quick brown fox jumps over the lazy dog. " * 80


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.txt"
    path.write_text(TEXT)
    return path


def settings(model, text, out, **more):
    return FinetuneConfig(
        **{
            "model": str(model),
            "data": str(text),
            "out": out,
            "rank": 4,
            "alpha": 8,
            "learning_rate": 5e-3,
            "max_steps": 4,
            "micro_batch": 2,
            "accumulation": 2,
            "context": 32,
            "save_every": 4,
            **more,
        }
    )


@pytest.fixture(scope="module")
def finished(tiny_llama, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    config = settings(tiny_llama, text, out, eval_data=str(text), eval_tokens=256, eval_every=2, max_steps=8)
    return config, finetune(config)


def test_report_and_run_folder(finished):
    config, report = finished
    run = RunFolder(config.out)
    assert {p.name for p in run.path.iterdir()} == {
        "config.yaml",
        "policy.json",
        "manifest.json",
        "metrics.jsonl",
        "report.json",
        "adapter",
        "snapshots",
    }
    assert run.steps() == [6, 8]
    assert {p.name for p in run.adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    decided = {"activation": "none", "checkpointing": "none", "attention": "sdpa"}
    assert FinetuneConfig.parse(run.read_config()) == config.model_copy(update=decided)
    assert report.steps == 8 and report.fp8_layers == report.adapted_layers == 14
    assert report.tokens_per_step == 128 and "at most 128 tokens" in report.warnings[0]
    assert report.perplexity_after < 0.9 * report.perplexity_before
    assert json.loads(run.report.read_text())["steps"] == 8
    run.require_finished()


def test_metrics_hold_every_step(finished):
    config, report = finished
    lines = [json.loads(line) for line in RunFolder(config.out).metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[0]["loss"] == report.first_loss and steps[-1]["loss"] == report.last_loss
    assert 4 < report.first_loss < 7 and report.last_loss < report.first_loss
    assert all(line["gradient_norm"] > 0 and line["seconds"] > 0 for line in steps)
    assert [line["step"] for line in lines if "held_out_perplexity" in line] == [2, 4, 6, 8]


def test_no_pickle_anywhere(finished):
    config, _ = finished
    assert {p.suffix for p in config.out.rglob("*") if p.is_file()} <= {".yaml", ".json", ".jsonl", ".safetensors"}


def test_adapter_is_float32_and_policy_lists_the_layers(finished):
    config, _ = finished
    run = RunFolder(config.out)
    adapter = Adapter.open(run.adapter)
    assert len(adapter.pairs) == 14
    assert {pair.a.dtype for pair in adapter.pairs.values()} == {torch.float32}
    assert all(pair.b.abs().max() > 0 for pair in adapter.pairs.values())
    policy = run.read_policy().modules
    assert policy["model.layers.0.self_attn.q_proj"].precision == "fp8"
    assert policy["model.embed_tokens"].precision == "16bit"
    assert not any("norm" in name for name in policy)


def test_saves_of_the_adapter_alone_between_snapshots(tiny_llama, text, tmp_path):
    """Each reads as an adapter; the next snapshot takes the place of those before it."""
    finetune(settings(tiny_llama, text, tmp_path / "run", max_steps=3, adapter_only_every=1))
    folder = SnapshotFolder(tmp_path / "run" / "snapshots")
    assert (folder.steps(), folder.steps("adapter")) == ([2], [3])
    assert folder.problem(3, "adapter") is None
    saved, last = Adapter.open(folder.at(3, "adapter")), Adapter.open(tmp_path / "run" / "adapter")
    assert saved.pairs.keys() == last.pairs.keys()
    assert all(torch.equal(saved.pairs[name].b, last.pairs[name].b) for name in last.pairs)


def test_resume_continues_bit_for_bit(tiny_llama, text, tmp_path, finished):
    config, _ = finished
    again = config.model_copy(update={"out": tmp_path / "run", "eval_data": None, "eval_every": 0})
    finetune(again.model_copy(update={"max_steps": 8}))
    straight = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    run = RunFolder(tmp_path / "run")
    for child in (run.snapshot(8), run.adapter):
        for file in child.iterdir():
            file.unlink()
        child.rmdir()
    report = finetune(again.model_copy(update={"resume": "auto"}))
    assert (report.resumed_from, report.steps) == (6, 8)
    resumed = load_file(run.adapter / "adapter_model.safetensors")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 9))
    with pytest.raises(MismatchError, match="other settings: rank"):
        finetune(again.model_copy(update={"resume": "auto", "rank": 8}))


def test_existing_folder_is_not_overwritten(tiny_llama, text, tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        finetune(settings(tiny_llama, text, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]


def test_two_stage_trains_over_16_bit_and_reports_both(tiny_llama, text, tmp_path):
    config = settings(tiny_llama, text, tmp_path / "run", mode="two-stage", eval_data=str(text), eval_tokens=128)
    report = finetune(config)
    assert report.fp8_layers == 0 and report.adapted_layers == 14
    assert report.perplexity_after < report.perplexity_before
    assert report.perplexity_quantized == pytest.approx(report.perplexity_after, rel=0.05)
    assert report.perplexity_quantized != report.perplexity_after


@pytest.mark.parametrize("activation", ["token", "group128"])
def test_activations_as_served(tiny_llama, text, tmp_path, activation):
    report = finetune(settings(tiny_llama, text, tmp_path / "run", activation=activation, max_steps=2, rslora=True))
    assert report.activation == activation and math.isfinite(report.last_loss)


@pytest.mark.parametrize("kind", ["messages", "prompt_completion", "completion of messages"])
def test_chat_data(tiny_llama, tmp_path, kind):
    question, answer = {"role": "user", "content": "what is 2 + 2?"}, {"role": "assistant", "content": "it is 4."}
    record = (
        {"prompt": "2 + 2 =", "completion": " 4"} if kind == "prompt_completion" else {"messages": [question, answer]}
    )
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for _ in range(8)))
    only = True if kind == "completion of messages" else None
    report = finetune(settings(tiny_llama, data, tmp_path / "run", max_steps=2, completion_only=only, context=128))
    assert report.steps == 2 and math.isfinite(report.last_loss)


@pytest.fixture(scope="module")
def scales(tiny_llama, tmp_path_factory):
    checkpoint = Checkpoint.open(tiny_llama)
    modules = {
        name.removesuffix(".weight"): ModuleScales(input_amax=8.0, input_scale=8 / 448)
        for name, shape in checkpoint.shapes().items()
        if len(shape) == 2 and "layers" in name
    }
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    Scales(model_fingerprint=fingerprint(checkpoint), data_fingerprint="", samples=1, tokens=1, modules=modules).write(
        path
    )
    return path


def test_static_activations_take_their_scales_along(tiny_llama, text, tmp_path, scales):
    report = finetune(
        settings(tiny_llama, text, tmp_path / "run", activation="static", scales=scales, max_steps=2, save_every=0)
    )
    assert report.activation == "static" and math.isfinite(report.last_loss)
    assert (tmp_path / "run" / "scales.json").read_bytes() == scales.read_bytes()
    export(ExportConfig(run=tmp_path / "run", out=tmp_path / "out", min_kept=0))
    out = Checkpoint.open(tmp_path / "out")
    assert float(out.get("model.layers.0.mlp.up_proj.input_scale")) == pytest.approx(8 / 448)


def test_a_static_run_goes_on_with_its_scales_only(tiny_llama, text, tmp_path, scales):
    static = {"activation": "static", "scales": scales}
    finetune(settings(tiny_llama, text, tmp_path / "run", save_every=1, max_steps=1, **static))
    with pytest.raises(MismatchError, match="scales"):
        finetune(settings(tiny_llama, text, tmp_path / "run", save_every=1, max_steps=2, resume="must"))
    with pytest.raises(MismatchError, match="activation; got auto"):
        finetune(settings(tiny_llama, text, tmp_path / "run", save_every=1, max_steps=2, resume="must", scales=scales))


def test_scales_of_another_model_are_refused(tiny_llama_128, text, tmp_path, scales):
    with pytest.raises(MismatchError, match="another model"):
        finetune(settings(tiny_llama_128, text, tmp_path / "run", activation="static", scales=scales))
    assert not (tmp_path / "run").exists()


def test_checkpointing_gives_the_same_losses(tiny_llama, text, tmp_path):
    losses = []
    for mode in ("none", "selective", "full"):
        out = tmp_path / mode
        report = finetune(settings(tiny_llama, text, out, max_steps=2, checkpointing=mode))
        assert (report.checkpointing, report.checkpointing_reason) == (mode, "as asked for")
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_what_auto_stands_for_is_written_down(finished):
    config, report = finished
    assert (config.activation, config.checkpointing) == ("auto", "auto")
    assert report.activation == "none" and "needs a CUDA device" in report.activation_reason
    assert report.checkpointing == "none" and "CPU" in report.checkpointing_reason


def test_an_attention_that_does_not_run_is_replaced(tiny_llama, text, tmp_path, caplog):
    config = settings(tiny_llama, text, tmp_path / "run", max_steps=1, attention="flash_attention_2", save_every=0)
    assert finetune(config).attention == "sdpa"
    assert "attention flash_attention_2 does not run" in caplog.text


def test_a_run_that_goes_on_keeps_the_activation_it_began_with(tiny_llama, text, tmp_path):
    began = settings(tiny_llama, text, tmp_path / "run", activation="token", save_every=2, max_steps=2)
    finetune(began)
    goes_on = settings(tiny_llama, text, tmp_path / "run", save_every=2, max_steps=3, resume="must")
    report = finetune(goes_on)
    assert (report.activation, report.activation_reason, report.resumed_from) == ("token", "as the run began", 2)
    with pytest.raises(MismatchError, match="activation"):
        finetune(goes_on.model_copy(update={"activation": "none", "max_steps": 4}))


def test_nan_stops_the_run_and_leaves_no_adapter(tiny_llama, text, tmp_path):
    poisoned = tmp_path / "model"
    poisoned.mkdir()
    for file in tiny_llama.iterdir():
        (poisoned / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e38
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 1e38
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "run"
    with pytest.raises(RefusedError, match="gradient of step 1 is nan"):
        finetune(settings(poisoned, text, out))
    assert not (out / "adapter").exists() and RunFolder(out).steps() == []
    assert json.loads((out / "metrics.jsonl").read_text())["gradient_norm"] is None


def test_raw_loss_is_written_before_the_run_stops(tmp_path):
    from transformers import TrainerState

    from octavo.integrations.trl import Recorder

    recorder = Recorder(RunFolder(tmp_path))
    recorder.micro_losses += [torch.tensor(1.0), torch.tensor(torch.nan)]
    with pytest.raises(RefusedError, match="loss of step 4 is nan"):
        recorder.on_pre_optimizer_step(None, TrainerState(global_step=3), None, model=torch.nn.Linear(1, 1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 4, "loss": None, "raw": "nan"}


def test_one_process_is_one_gpu(tmp_path, monkeypatch):
    """On several, the Trainer would wrap the model in nn.DataParallel."""
    from octavo.integrations import trl

    monkeypatch.setattr(trl, "SFTConfig", lambda **options: SimpleNamespace(n_gpu=4, _n_gpu=4))
    assert trl._arguments(MagicMock(report_to=()), RunFolder(tmp_path), on_cpu=False)._n_gpu == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_steps": -1}, "max_steps"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"rank": 0}, "rank"),
        ({"rank": "many"}, "rank"),
        ({"lerning_rate": 1e-3}, "Did you mean 'learning_rate'"),
        ({"scheme": "chanel"}, "Did you mean 'channel'"),
        ({"scale_format": "fp23"}, "scale format"),
        ({"activation": "tokens"}, "activation"),
        ({"activation": "static"}, "no scales"),
        ({"mode": "two-stage", "activation": "token"}, "two-stage"),
        ({"dora": True}, "dora"),
        ({"init": "pissa"}, "init 'pissa'"),
        ({"eval_every": 5}, "eval_every"),
    ],
    ids=lambda v: str(v),
)
def test_settings_that_cannot_work(values, words):
    with pytest.raises(ConfigError, match=words):
        FinetuneConfig.parse({"model": "m", "data": "d", "out": "o", **values})


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"data": "missing.txt"}, DataError, "does not exist"),
        ({"context": 100_000}, DataError, "shorter than one sample"),
        ({"eval_data": "missing.txt"}, DataError, "does not exist"),
        ({"target_modules": ("q_prj",)}, ConfigError, "Did you mean 'q_proj'"),
        ({"target_modules": ("embed_tokens",)}, ConfigError, "takes no adapter"),
        ({"completion_only": True}, ConfigError, "no completion"),
        ({"report_to": ("tensorbord",)}, ConfigError, "Did you mean 'tensorboard'"),
        ({"report_to": ("swanlab",)}, UnsupportedError, "no such package"),
    ],
    ids=["no data", "short data", "no eval data", "target", "embedding", "completion", "reporter", "package"],
)
def test_bad_input_leaves_no_folder(tiny_llama, text, tmp_path, more, error, words):
    out = tmp_path / "run"
    with pytest.raises(error, match=words):
        finetune(settings(tiny_llama, text, out, **more))
    assert not out.exists()
