"""SnapshotCallback in Trainer and TRL: bit for bit, with evaluation and epochs in between; size; refusals; signals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from octavo.base.errors import ConfigError, MismatchError
from octavo.integrations import SnapshotCallback
from octavo.integrations.peft import get_peft_model, load_adapter, lora_config
from octavo.integrations.snapshots import HISTORY, counters
from octavo.integrations.transformers import load
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.workflows.finetune import FinetuneConfig, finetune

ROOT = Path(__file__).parents[2]


class Losses(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_log(self, args, state, control, logs=None, **parts):
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]


def lora(tiny_llama, rank=4, seed=0):
    model = load(tiny_llama, "channel", device="cpu", dtype=torch.float32)
    torch.manual_seed(seed)
    return get_peft_model(model, lora_config(model, rank=rank, alpha=8, dropout=0.2))


def rows(tokens=24):
    generator = torch.Generator().manual_seed(3)
    return Dataset.from_list(
        [{"input_ids": torch.randint(4, 200, (tokens,), generator=generator).tolist()} for _ in range(10)]
    )


def options(folder, **more):
    defaults = {
        "output_dir": str(folder),
        "max_steps": 9,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
    }
    defaults |= {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
    }
    return {**defaults, "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 2, "bf16": False, **more}


def labelled(data):
    return data.map(lambda row: {"labels": row["input_ids"]})


class Stopped(Exception):
    pass


class Stop(TrainerCallback):
    """End after so many steps: like a kill in the step that comes next, or by asking the Trainer."""

    def __init__(self, step, kill):
        self.step, self.kill = step, kill

    def on_step_begin(self, args, state, control, **parts):
        if self.kill and state.global_step == self.step:
            raise Stopped

    def on_step_end(self, args, state, control, **parts):
        control.should_training_stop |= not self.kill and state.global_step == self.step


def run(build, folder, every=2, stop=None, **more):
    """Train to the end, or until `stop`. Returns losses, the point it continued from, and the trainer."""
    losses, snapshots = (
        Losses(),
        SnapshotCallback(folder / "snapshots", every=every, signals=False, exits=False, **more),
    )
    trainer = build([losses, snapshots, *([stop] if stop else [])])
    point = snapshots.resume(trainer)
    try:
        trainer.train(resume_from_checkpoint=point)
    except Stopped:
        snapshots.abandon()
    snapshots.close()
    return losses.found, point, trainer


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("trainer-full", [(6, True), (6, False), (5, True)]),
        ("trainer-lora", [(5, True)]),
        ("sft-packed", [(6, True), (5, False)]),
    ],
    ids=["trainer-full", "trainer-lora", "sft-packed"],
)
def test_resumed_losses_are_the_same(tiny_llama, tiny_tokenizer, tmp_path, kind, stops):
    """Three epochs of three steps, evaluation between (its loader draws random numbers), dropout, shuffling.

    stops: (step, killed or asked to), at the end of an epoch and in the middle of one.
    """

    def build(callbacks):
        if kind == "sft-packed":
            args = SFTConfig(**options(tmp_path), max_length=16, packing=True, packing_strategy="wrapped")
            data = rows()
            return SFTTrainer(
                lora(tiny_llama),
                args,
                train_dataset=data,
                eval_dataset=data,
                processing_class=tiny_tokenizer,
                callbacks=callbacks,
            )
        torch.manual_seed(0)
        model = lora(tiny_llama) if kind == "trainer-lora" else AutoModelForCausalLM.from_pretrained(tiny_llama)
        data = labelled(rows())
        return Trainer(
            model, TrainingArguments(**options(tmp_path)), train_dataset=data, eval_dataset=data, callbacks=callbacks
        )

    straight, _, _ = run(build, tmp_path / "straight", every=0)
    for step, kill in stops:
        folder = tmp_path / f"{step}-{kill}"
        first, _, _ = run(build, folder, every=1, stop=Stop(step, kill))
        second, point, _ = run(build, folder, every=1)
        assert point.endswith(f"step-{step}")
        assert first | second == straight and set(second) == set(range(step + 1, 10))


def test_a_lora_snapshot_is_small_and_reads_as_an_adapter(tiny_llama, tmp_path):
    data = labelled(rows())

    def build(callbacks, rank=4):
        args = TrainingArguments(**options(tmp_path, max_steps=2))
        return Trainer(lora(tiny_llama, rank), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)

    _, _, trainer = run(build, tmp_path, best="eval_loss")
    folder = SnapshotFolder(tmp_path / "snapshots")
    files = {path.name: path.stat().st_size for path in folder.at(2).iterdir()}
    trained = sum(p.numel() * 4 for p in trainer.model.parameters() if p.requires_grad)
    assert trained * 3 < sum(files.values()) < trained * 3 + (1 << 20)
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"} < set(files)
    assert all("lora" in name for name in load_file(folder.at(2) / "adapter_model.safetensors"))
    again = load_adapter(load(tiny_llama, "channel", device="cpu", dtype=torch.float32), folder.at(2))
    want = {name: p for name, p in trainer.model.named_parameters() if "lora" in name}
    assert all(torch.equal(p, want[name]) for name, p in again.named_parameters() if "lora" in name)
    assert folder.best()["step"] == 2
    with pytest.raises(MismatchError, match=r"lora_A.weight; got \[8, 176\]; need \[4, 176\]"):
        run(lambda callbacks: build(callbacks, rank=8), tmp_path)


def test_a_snapshot_takes_the_end_of_the_log_and_copies_no_more_of_it():
    class Costly(dict):
        def __deepcopy__(self, memo):
            raise AssertionError("a copy of the whole log stops training for longer with every step")

    state = TrainerState()
    state.log_history = [Costly(step=step) for step in range(HISTORY + 5)]
    found = json.loads(counters(state))
    assert [entry["step"] for entry in found["log_history"]] == list(range(5, HISTORY + 5))
    assert found.keys() == {field.name for field in dataclasses.fields(state)}


def test_settings_and_base_are_compared(tiny_llama, tiny_llama_128, tmp_path):
    data = labelled(rows())

    def build(callbacks, model=tiny_llama, **more):
        args = TrainingArguments(**options(tmp_path, max_steps=2, **more))
        return Trainer(lora(model), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)

    run(build, tmp_path)
    with pytest.raises(MismatchError, match=r"other settings: learning_rate; got 0.5; need 0.01"):
        run(lambda callbacks: build(callbacks, learning_rate=0.5), tmp_path)
    with pytest.raises(MismatchError, match="other settings: model"):
        run(lambda callbacks: build(callbacks, tiny_llama_128), tmp_path)
    with pytest.raises(ConfigError, match="save_strategy"):
        run(lambda callbacks: build(callbacks, save_strategy="steps"), tmp_path)


SCRIPT = """
import sys, yaml
from octavo.cli.main import run
sys.exit(run(["finetune", sys.argv[1], "--resume", "auto"]))
"""


@pytest.mark.slow
def test_finetune_is_stopped_and_continues(tiny_llama, tmp_path):
    """SIGTERM: exit code 75, a snapshot of the step that was under way; the same command goes on from there."""
    (tmp_path / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    settings = {"model": str(tiny_llama), "data": str(tmp_path / "train.txt"), "out": str(tmp_path / "run")}
    settings |= {"max_steps": 400, "context": 32, "accumulation": 1, "rank": 4, "save_every": 1000, "eval_every": 0}
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGTERM)
    errors = process.communicate()[1]
    assert process.returncode == 75 and "stopped by SIGTERM" in errors and "with --resume auto" in errors, errors
    folder = SnapshotFolder(tmp_path / "run" / "snapshots")
    (step,) = folder.steps()
    assert folder.problem(step) is None
    done = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert done[-1] == step
    policy = (tmp_path / "run" / "policy.json").read_text()
    report = finetune(FinetuneConfig(**{**settings, "resume": "must", "max_steps": step + 2}))
    assert (report.resumed_from, report.steps) == (step, step + 2)
    assert (tmp_path / "run" / "policy.json").read_text() == policy
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "fsdp-lora"])
def test_a_sharded_trainer_continues_on_other_numbers_of_ranks(tmp_path, kind):
    """FSDP2 on two gloo ranks, one process, two ranks: each begins with the very weights the last one ended with."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.trainer_lives", kind, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    words = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    found = [sorted({(int(w[2]), w[3]) for w in words if w[1] == kind}) for kind in ("start", "weights")]
    begun, ended = found
    assert [step for step, _ in begun] == [0, 6, 9] and [step for step, _ in ended] == [6, 9, 12]
    assert begun[1:] == ended[:-1] and len({weights for _, weights in begun + ended}) == 4
    assert "was written by 2 ranks, not 1: random states differ" in done.stderr
    last = {path.name for path in (tmp_path / "run" / "step-12").iterdir()}
    part = "adapter_model" if kind == "fsdp-lora" else "model"
    assert {f"{part}-0000{rank}-of-00002.safetensors" for rank in (1, 2)} < last
